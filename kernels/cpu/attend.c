/* Sparse core: one softmax over window rows, compressed entries and the sink.
 *
 * One piece is one token with all its heads, which share every row (core.h). Rows are decoded in
 * blocks of 128 set members. Neighbouring tokens share all but one row of a full window, which is
 * block 0 then, so decoded window rows are kept.
 *
 * With few heads neighbours of a run take that block together (attend_near): their queries are the
 * rows of one product with the members of all their windows as panels, and each takes from it, and
 * from the weighted sum, the band that is its own window. */
#include "kernels/cpu/core.h"

/* The full window as block 0: usually only the newest row is not there yet. */
static const float *kept_window(struct core *c) {
    uint32_t first = c->pos + 1 - TD_WINDOW;
    if (c->kept_run != c->run || first < c->kept_from || first > c->kept_to ||
        c->pos >= c->kept_from + TD_ATTEND_SPAN) {
        c->kept_run = c->run;
        c->kept_from = c->kept_to = first;
    }
    for (; c->kept_to <= c->pos; c->kept_to++)
        decode(c, window_row(c, c->kept_to), c->kept + (c->kept_to - c->kept_from) * c->row);
    return c->kept + (first - c->kept_from) * c->row;
}

/* Decoded rows of a block; `again`: for the second pass over the set. */
static const float *block_of(struct core *c, uint32_t block, uint32_t blocks, bool again) {
    bool full = c->window == TD_WINDOW;
    if (block == 0 && full) return kept_window(c);
    if (again && blocks - full <= TD_ATTEND_BLOCKS)
        return c->rows + (size_t)(block % TD_ATTEND_BLOCKS) * TD_BLOCK * c->row;
    return decode_block(c, block);
}

static void set_of_row(struct core *c, uint32_t i) {
    const struct td_attend_args *a = c->a;
    const struct td_op_batch *b = a->batch;
    c->run = &b->run[b->row[i].run];
    c->pos = b->row[i].pos;
    c->window = c->pos + 1 < TD_WINDOW ? c->pos + 1 : TD_WINDOW;
    c->count = c->window;
    c->entry = NULL;
    if (b->kv->ratio[a->layer] == TD_HCA_RATIO && !a->ml) c->count += (c->pos + 1) / TD_HCA_RATIO;
    if (c->csa && !a->ml) {
        c->entry = a->selected + (size_t)i * a->topk;
        for (uint32_t e = 0; e < a->topk && c->entry[e] >= 0; e++)
            c->count++;
    }
    c->stride = (c->count + 7) & ~7u;
}

static float *output_of(const struct core *c, uint32_t i) {
    return c->a->o + (size_t)i * c->heads * D;
}

/* The weighted sums of row i: divided, unless the softmax goes on elsewhere. */
static void finish_row(const struct core *c, uint32_t i, const float *ml) {
    float *o = output_of(c, i);
    for (uint32_t h = 0; h < c->heads; h++, o += D) {
        float sum[D];
        memcpy(sum, o, sizeof sum);
        put_values(c, sum, c->a->ml ? 1.0f : ml[2 * h + 1], o);
    }
    if (c->a->ml)
        memcpy(c->a->ml + (size_t)i * c->heads * 2, ml, (size_t)c->heads * 2 * sizeof *ml);
}

static void attend_row(struct core *c, uint32_t i) {
    float ml[TD_MAX_HEADS * 2], *o = output_of(c, i);
    set_of_row(c, i);
    c->score = c->scores;
    pack_queries(c, i);
    uint32_t blocks = blocks_of(c);
    for (uint32_t b = 0; b < blocks; b++)
        score_block(c, b, block_of(c, b, blocks, false));
    softmax(c, ml);
    for (uint32_t b = 0; b < blocks; b++)
        weigh_block(c, b, block_of(c, b, blocks, true), b > 0, o);
    finish_row(c, i, ml);
}

/* ---- neighbours ---- */

/* Tokens that may be taken together. */
static uint32_t near_tokens(uint32_t heads) {
    uint32_t rows = (heads + PANEL_HEADS - 1) / PANEL_HEADS * PANEL_HEADS;
    uint32_t n = TD_ATTEND_QUERIES / rows;
    return n < TD_ATTEND_NEAR ? n : TD_ATTEND_NEAR;
}

/* How many of rows i..end-1 are neighbours of row i with full windows and as many blocks. */
static uint32_t count_near(struct core *c, uint32_t i, uint32_t end) {
    uint32_t n = 0, most = near_tokens(c->heads), blocks = 0;
    const struct td_op_run *run = NULL;
    for (; n < most && i + n < end; n++) {
        set_of_row(c, i + n);
        if (n == 0) {
            run = c->run;
            blocks = blocks_of(c);
        }
        if (c->run != run || c->window < TD_WINDOW || blocks_of(c) != blocks) break;
    }
    return n;
}

/* Sixteen decoded rows as a panel: value k of all of them side by side. */
static void pack_panel(const struct core *c, const float *rows, float *to) {
    const uint32_t each = c->bf16 ? 2 : 1; /* values of a word */
    for (uint32_t s = 0; s < D / each; s += 8) {
        v8 t[4][4]; /* by four rows, block of the word: a word of each row and the next one */
        for (uint32_t m = 0; m < 4; m++) {
            v8 in[4];
            for (uint32_t r = 0; r < 4; r++)
                in[r] = load8(rows + (4 * m + r) * c->row + s);
            transpose4(in, t[m]);
        }
        for (uint32_t b = 0; b < 4; b++)
            for (uint32_t next = 0; next < 2; next++) {
                float *at = to + (size_t)(b * CHAIN + (s / 4 + next) * each) * TD_PANEL;
                for (uint32_t half = 0; half < 2; half++, at += 8) {
                    v8 lo = t[2 * half][b], hi = t[2 * half + 1][b];
                    v8 v = next ? __builtin_shufflevector(lo, hi, 4, 5, 6, 7, 12, 13, 14, 15)
                                : __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 8, 9, 10, 11);
                    store8(at, c->bf16 ? (v8)((u8)v << 16) : v);
                    if (c->bf16) store8(at + TD_PANEL, (v8)((u8)v & 0xffff0000u));
                }
            }
    }
}

/* Window rows of n tokens from row `first`, decoded and as panels. */
static void near_rows(struct core *c, uint32_t first, uint32_t n) {
    uint32_t rows = TD_WINDOW - 1 + n;
    c->kept_run = c->run;
    c->kept_from = c->a->batch->row[first].pos + 1 - TD_WINDOW;
    c->kept_to = c->kept_from + rows;
    for (uint32_t i = 0; i < rows; i++)
        decode(c, window_row(c, c->kept_from + i), c->kept + i * c->row);
    for (uint32_t i = 0; i < rows; i += TD_PANEL)
        pack_panel(c, c->kept + i * c->row, c->panel + (size_t)i * D);
}

/* Dots of heads r..r+m-1, counted over the tokens from row `first`, with their windows. */
static void near_scores(const struct core *c, uint32_t first, uint32_t r, uint32_t m) {
    uint32_t heads = c->heads, from = r / heads / TD_PANEL;
    uint32_t panels = ((r + m - 1) / heads + TD_WINDOW - 1) / TD_PANEL + 1 - from;
    struct tile t = {.w = c->panel + (size_t)from * TD_PANEL * D,
                     .w_step = TD_PANEL,
                     .w_panel = (size_t)D * TD_PANEL,
                     .k = D,
                     .y = c->dot,
                     .y_step = (size_t)panels * TD_PANEL};
    for (uint32_t i = 0; i < m; i++)
        t.x[i] = c->a->q + ((size_t)first * heads + r + i) * D;
    tile_run(&t, TILE_FP32, m, panels);
    for (uint32_t i = 0; i < m; i++) {
        uint32_t token = (r + i) / heads, head = (r + i) % heads;
        memcpy(c->scores + (size_t)(token * score_rows(c) + head) * c->stride,
               c->dot + i * t.y_step + token - from * TD_PANEL, TD_WINDOW * sizeof *c->dot);
    }
}

static void near_weigh(const struct core *c, uint32_t first, uint32_t r, uint32_t m, bool add) {
    uint32_t heads = c->heads, from = r / heads;
    struct tile t = {.w = c->kept + from * c->row,
                     .w_step = c->row,
                     .w_panel = c->bf16 ? TD_PANEL / 2 : TD_PANEL,
                     .y = output_of(c, first) + (size_t)r * D,
                     .y_step = D,
                     .add = add,
                     .span = TD_WINDOW};
    for (uint32_t i = 0; i < m; i++) {
        uint32_t token = (r + i) / heads, head = (r + i) % heads;
        t.from[i] = token - from;
        t.x[i] = c->scores + (size_t)(token * score_rows(c) + head) * c->stride - t.from[i];
    }
    tile_run(&t, c->bf16 ? TILE_BAND_BF16 : TILE_BAND, m, D / TD_PANEL);
}

/* The set of the i-th token from row `first`, with its scores. */
static void near_set(struct core *c, uint32_t first, uint32_t i, uint32_t stride) {
    set_of_row(c, first + i);
    c->stride = stride;
    c->score = c->scores + (size_t)i * score_rows(c) * stride;
}

/* count_near's n rows. A sum of two terms has no order, so with a single block of entries its part
 * is computed while the block is there, before the window's. */
static void attend_near(struct core *c, uint32_t first, uint32_t n) {
    uint32_t heads = c->heads;
    float ml[TD_ATTEND_QUERIES * 2];
    set_of_row(c, first + n - 1);
    uint32_t stride = c->stride, blocks = blocks_of(c); /* the last one has the largest set */
    near_rows(c, first, n);
    for (uint32_t r = 0; r < n * heads; r += TILE_ROWS)
        near_scores(c, first, r, n * heads - r < TILE_ROWS ? n * heads - r : TILE_ROWS);
    for (uint32_t i = 0; i < n; i++) {
        const float *rows = NULL;
        near_set(c, first, i, stride);
        if (blocks > 1) pack_queries(c, first + i);
        for (uint32_t b = 1; b < blocks; b++) {
            rows = decode_block(c, b);
            score_block(c, b, rows);
        }
        softmax(c, ml + 2 * i * heads);
        if (blocks == 2) weigh_block(c, 1, rows, false, output_of(c, first + i));
    }
    for (uint32_t r = 0; r < n * heads; r += TILE_ROWS)
        near_weigh(c, first, r, n * heads - r < TILE_ROWS ? n * heads - r : TILE_ROWS, blocks == 2);
    for (uint32_t i = 0; i < n; i++) {
        near_set(c, first, i, stride);
        for (uint32_t b = 1; blocks > 2 && b < blocks; b++)
            weigh_block(c, b, decode_block(c, b), true, output_of(c, first + i));
        finish_row(c, first + i, ml + 2 * i * heads);
    }
}

/* ---- the op ---- */

enum { NEAR_LEAST = 8 }; /* fewer tokens do not repay their panels */

struct attend_job {
    const struct td_device *d;
    const struct td_attend_args *a;
    uint32_t piece; /* rows of a piece */
};

static void attend_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct attend_job *job = arg;
    const struct td_attend_args *a = job->a;
    struct core c = core_of(a->batch, a->layer, a->heads);
    c.a = a;
    c.own = a->rows;
    c.sink = a->sink;
    c.query = a->q;
    c.rows = op_scratch(job->d, thread);
    c.kept = c.rows + (size_t)TD_ATTEND_BLOCKS * TD_BLOCK * ROW;
    c.dot = c.kept + (size_t)TD_ATTEND_SPAN * ROW;
    c.panel = c.dot + TD_ATTEND_DOTS;
    c.q = c.panel + (size_t)TD_ATTEND_SPAN * D;
    c.scores = c.q + (size_t)score_rows(&c) / PANEL_HEADS * CHAIN * TD_PANEL;
    uint32_t stop = end * job->piece < a->batch->n ? end * job->piece : a->batch->n;
    for (uint32_t i = begin * job->piece, n; i < stop; i += n) {
        n = count_near(&c, i, stop);
        if (n >= NEAR_LEAST) {
            attend_near(&c, i, n);
        } else {
            n = 1;
            attend_row(&c, i);
        }
    }
}

void TD_OP(attend)(const struct td_device *d, const struct td_attend_args *a) {
    uint32_t most = near_tokens(a->heads), n = a->batch->n;
    bool many = n >= 2 * most * td_threads_count(d->threads);
    struct attend_job job = {d, a, many ? most : 1};
    td_threads_run(d->threads, attend_rows, &job, (n + job.piece - 1) / job.piece);
}

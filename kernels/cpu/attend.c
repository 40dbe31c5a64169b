/* Sparse core: one softmax over window rows, compressed entries and the sink.
 *
 * One piece is one token with all its heads, which share every row. A row's 512 values are four
 * blocks of 128 whose sums are independent chains, so a decoded row holds the blocks side by side
 * ([128][4], split.h) and every head takes four lanes of a product: few heads still fill a vector.
 * The weighted sum of rows has the row's values as lanes, where their order does not matter; it is
 * put right when the sum is divided. Rows stored as bf16 stay bf16 ([64][4] words of two) and are
 * widened in registers: a window is then small enough to stay in a core's own cache.
 *
 * Rows are decoded in blocks of 128 set members; the scores of the whole set are kept, so the
 * maximum is known before the first exponential and nothing is rescaled. Neighbouring tokens share
 * all but one row of a full window, which is block 0 then, so decoded window rows are kept.
 *
 * With few heads neighbours of a run take that block together (attend_near): their queries are the
 * rows of one product with the members of all their windows as panels, and each takes from it, and
 * from the weighted sum, the band that is its own window. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/split.h"
#include "kernels/cpu/stored.h"
#include "kernels/cpu/tile.h"
#include "kernels/scratch.h"

enum {
    D = TD_HEAD_DIM,
    CHAIN = TD_BLOCK, /* values of one of a row's four blocks */
    PANEL_HEADS = TD_PANEL / 4,
    AHEAD = 3, /* rows fetched before they are decoded */
    /* 32-bit words between decoded rows: not a power of two, so that a column of a block spreads
     * over the cache. */
    ROW = TD_ATTEND_ROW,
    ROW_BF16 = TD_HEAD_DIM / 2 + 16,
};

struct core {
    const struct td_attend_args *a;
    const struct td_op_run *run;
    uint32_t pos, window, count; /* set members; the first `window` are window rows */
    const int32_t *selected;
    bool bf16;   /* decoded rows are */
    size_t row;  /* ROW or ROW_BF16 */
    float *rows; /* [TD_ATTEND_BLOCKS][TD_BLOCK][row] decoded */
    float *kept; /* [TD_ATTEND_SPAN][row] window rows of positions kept_from..kept_to-1 */
    uint32_t kept_from, kept_to;
    const struct td_op_run *kept_run; /* of this run; NULL: nothing is kept */
    float *q;                         /* [head panels][CHAIN][16] */
    float *dot;                       /* [TD_BLOCK][16] of one head panel; TD_ATTEND_DOTS */
    float *panel;                     /* [panels of kept rows][D][16]: fp32, in the order of k */
    float *scores, *score;            /* all; the token's: [heads of whole panels][stride] */
    uint32_t stride;                  /* count, rounded up to whole vectors */
};

/* Where the window row of position t is stored. */
static struct td_kv_row window_row(const struct core *c, uint32_t t) {
    const struct td_op_batch *b = c->a->batch;
    if (t < c->run->pos) return td_kv_window_row(b->kv, c->run->slot, c->a->layer, t);
    return td_kv_dense_row(b->kv, c->a->rows, c->run->first + (t - c->run->pos));
}

/* Where member s of the set is. */
static struct td_kv_row member(const struct core *c, uint32_t s) {
    const struct td_op_batch *b = c->a->batch;
    uint32_t layer = c->a->layer;
    if (s < c->window) return window_row(c, c->pos + 1 - c->window + s);
    uint32_t e = s - c->window;
    if (!c->selected)
        return td_kv_hca_row(b->kv, b->pool, layer, c->run->pages[e / TD_KV_HCA_PER_PAGE],
                             e % TD_KV_HCA_PER_PAGE);
    uint32_t w = (uint32_t)c->selected[e];
    return td_kv_csa_row(b->kv, b->pool, layer, c->run->pages[w / TD_KV_CSA_PER_PAGE],
                         w % TD_KV_CSA_PER_PAGE);
}

static void decode(const struct core *c, struct td_kv_row from, float *to) {
    const float *v = from.values;
    float plain[D];
    size_t part = CHAIN;
    if (c->bf16) {
        part = CHAIN / 2; /* words */
    } else if (c->a->batch->kv->row_dtype != TD_KV_ROW_FP32) {
        row_decode8(from, c->a->batch->kv->row_dtype, plain);
        v = plain;
    }
    split4((const float *[]){v, v + part, v + 2 * part, v + 3 * part}, (uint32_t)part, to, 4);
}

static uint32_t block_rows(const struct core *c, uint32_t block) {
    uint32_t left = c->count - block * TD_BLOCK;
    return left < TD_BLOCK ? left : TD_BLOCK;
}

/* Chosen entries lie anywhere in the pool: no hardware guesses the next one. */
static void prefetch(const struct core *c, uint32_t s) {
    const uint8_t *values = member(c, s).values;
    for (uint32_t i = 0; i < c->a->batch->kv->row_stride; i += 64)
        __builtin_prefetch(values + i);
}

static const float *decode_block(const struct core *c, uint32_t block) {
    float *rows = c->rows + (size_t)(block % TD_ATTEND_BLOCKS) * TD_BLOCK * c->row;
    uint32_t n = block_rows(c, block);
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch(c, block * TD_BLOCK + i + AHEAD);
        decode(c, member(c, block * TD_BLOCK + i), rows + i * c->row);
    }
    return rows;
}

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
    c->selected = NULL;
    if (b->kv->ratio[a->layer] == TD_HCA_RATIO) c->count += (c->pos + 1) / TD_HCA_RATIO;
    if (b->kv->ratio[a->layer] == TD_CSA_RATIO) {
        c->selected = a->selected + (size_t)i * a->topk;
        for (uint32_t e = 0; e < a->topk && c->selected[e] >= 0; e++)
            c->count++;
    }
    c->stride = (c->count + 7) & ~7u;
}

static void pack_queries(const struct core *c, uint32_t i) {
    uint32_t heads = c->a->heads;
    const float *q = c->a->q + (size_t)i * heads * D;
    if (heads % PANEL_HEADS)
        memset(c->q + (size_t)(heads / PANEL_HEADS) * CHAIN * TD_PANEL, 0,
               CHAIN * TD_PANEL * sizeof *q);
    for (uint32_t h = 0; h < heads; h++, q += D)
        split4((const float *[]){q, q + CHAIN, q + 2 * CHAIN, q + 3 * CHAIN}, CHAIN,
               c->q + (size_t)(h / PANEL_HEADS) * CHAIN * TD_PANEL + h % PANEL_HEADS * 4, TD_PANEL);
}

/* Sums of the four blocks, ascending, of the dots of n members: from [member][head][block] to
 * [head][member], first member `s`. Whole groups of four members are written. */
static void add_blocks(const struct core *c, uint32_t panel, uint32_t s, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 4)
        for (uint32_t half = 0; half < 2; half++) {
            v8 in[4], t[4];
            for (uint32_t m = 0; m < 4; m++)
                in[m] = load8(c->dot + (size_t)(i + m) * TD_PANEL + half * 8);
            transpose4(in, t);
            v8 sum = ((t[0] + t[1]) + t[2]) + t[3];
            float *to = c->score + (size_t)(panel * PANEL_HEADS + half * 2) * c->stride + s + i;
            memcpy(to, &sum, 16);
            memcpy(to + c->stride, (const float *)&sum + 4, 16);
        }
}

static void score_block(const struct core *c, uint32_t block, const float *rows) {
    uint32_t n = block_rows(c, block), step = c->bf16 ? TILE_ROWS_PAIRS : TILE_ROWS;
    struct tile t = {.w_step = TD_PANEL, .k = CHAIN, .y_step = TD_PANEL};
    for (uint32_t panel = 0; panel * PANEL_HEADS < c->a->heads; panel++) {
        t.w = c->q + (size_t)panel * CHAIN * TD_PANEL;
        for (uint32_t i = 0; i < n; i += step) {
            uint32_t m = n - i < step ? n - i : step;
            for (uint32_t r = 0; r < m; r++)
                t.x[r] = rows + (i + r) * c->row;
            t.y = c->dot + (size_t)i * TD_PANEL;
            tile_run(&t, c->bf16 ? TILE_QUAD_BF16 : TILE_QUAD, m, 1);
        }
        add_blocks(c, panel, block * TD_BLOCK, n);
    }
}

/* Scores of all heads to exponentials; den: their sums with the sinks'. */
static void softmax(const struct core *c, float *den) {
    const v8 scale = splat8(0.04419417382415922f); /* 512^-0.5 */
    uint32_t heads = c->a->heads;
    for (uint32_t h = 0; h < heads; h++) {
        float *score = c->score + (size_t)h * c->stride, sink = c->a->sink[h];
        for (uint32_t s = c->count; s < c->stride; s++)
            score[s] = -INFINITY;
        v8 top = splat8(sink);
        for (uint32_t s = 0; s < c->stride; s += 8) {
            v8 v = load8(score + s) * scale;
            store8(score + s, v);
            top = max8(v, top);
        }
        float max = top[0];
        for (int i = 1; i < 8; i++)
            max = top[i] > max ? top[i] : max;
        for (uint32_t s = 0; s < c->stride; s += 8)
            store8(score + s, exp8(load8(score + s) - splat8(max)));
        den[h] = exp1(sink - max);
    }
    /* Chains of additions, four heads side by side. */
    for (uint32_t h = 0; h < heads; h += PANEL_HEADS) {
        const float *score = c->score + (size_t)h * c->stride;
        float sum[PANEL_HEADS] = {0};
        for (uint32_t s = 0; s < c->count; s++)
            for (uint32_t j = 0; j < PANEL_HEADS; j++)
                sum[j] += score[j * c->stride + s];
        for (uint32_t j = 0; j < PANEL_HEADS && h + j < heads; j++)
            den[h + j] = sum[j] + den[h + j];
    }
}

static void weigh_block(const struct core *c, uint32_t block, const float *rows, bool add,
                        float *o) {
    struct tile t = {.w = rows,
                     .w_step = c->row,
                     .w_panel = c->bf16 ? TD_PANEL / 2 : TD_PANEL,
                     .k = block_rows(c, block),
                     .y_step = D,
                     .add = add};
    for (uint32_t h = 0; h < c->a->heads; h += TILE_ROWS) {
        uint32_t m = c->a->heads - h < TILE_ROWS ? c->a->heads - h : TILE_ROWS;
        for (uint32_t r = 0; r < m; r++)
            t.x[r] = c->score + (size_t)(h + r) * c->stride + (size_t)block * TD_BLOCK;
        t.y = o + (size_t)h * D;
        tile_run(&t, c->bf16 ? TILE_BF16 : TILE_FP32, m, D / TD_PANEL);
    }
}

/* The weighted sums of a token by their denominators, in the order of values. */
static void divide(const struct core *c, const float *den, float *o) {
    for (uint32_t h = 0; h < c->a->heads; h++, o += D) {
        float sum[D];
        memcpy(sum, o, sizeof sum);
        join4_divided(sum, c->bf16, den[h],
                      (float *[]){o, o + CHAIN, o + 2 * CHAIN, o + 3 * CHAIN});
    }
}

static uint32_t blocks_of(const struct core *c) {
    return (c->count + TD_BLOCK - 1) / TD_BLOCK;
}

static float *output_of(const struct core *c, uint32_t i) {
    return c->a->o + (size_t)i * c->a->heads * D;
}

static void attend_row(struct core *c, uint32_t i) {
    float den[TD_MAX_HEADS], *o = output_of(c, i);
    set_of_row(c, i);
    c->score = c->scores;
    pack_queries(c, i);
    uint32_t blocks = blocks_of(c);
    for (uint32_t b = 0; b < blocks; b++)
        score_block(c, b, block_of(c, b, blocks, false));
    softmax(c, den);
    for (uint32_t b = 0; b < blocks; b++)
        weigh_block(c, b, block_of(c, b, blocks, true), b > 0, o);
    divide(c, den, o);
}

/* ---- neighbours ---- */

/* Heads of a token as rows of the scores. */
static uint32_t score_rows(const struct core *c) {
    return (c->a->heads + PANEL_HEADS - 1) / PANEL_HEADS * PANEL_HEADS;
}

/* Tokens that may be taken together. */
static uint32_t near_tokens(uint32_t heads) {
    uint32_t rows = (heads + PANEL_HEADS - 1) / PANEL_HEADS * PANEL_HEADS;
    uint32_t n = TD_ATTEND_QUERIES / rows;
    return n < TD_ATTEND_NEAR ? n : TD_ATTEND_NEAR;
}

/* How many of rows i..end-1 are neighbours of row i with full windows and as many blocks. */
static uint32_t count_near(struct core *c, uint32_t i, uint32_t end) {
    uint32_t n = 0, most = near_tokens(c->a->heads), blocks = 0;
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
    uint32_t heads = c->a->heads, from = r / heads / TD_PANEL;
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
    uint32_t heads = c->a->heads, from = r / heads;
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
    uint32_t heads = c->a->heads;
    float den[TD_ATTEND_QUERIES];
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
        softmax(c, den + i * heads);
        if (blocks == 2) weigh_block(c, 1, rows, false, output_of(c, first + i));
    }
    for (uint32_t r = 0; r < n * heads; r += TILE_ROWS)
        near_weigh(c, first, r, n * heads - r < TILE_ROWS ? n * heads - r : TILE_ROWS, blocks == 2);
    for (uint32_t i = 0; i < n; i++) {
        near_set(c, first, i, stride);
        for (uint32_t b = 1; blocks > 2 && b < blocks; b++)
            weigh_block(c, b, decode_block(c, b), true, output_of(c, first + i));
        divide(c, den + i * heads, output_of(c, first + i));
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
    struct core c = {.a = a, .rows = op_scratch(job->d, thread)};
    c.bf16 = a->batch->kv->row_dtype == TD_KV_ROW_BF16;
    c.row = c.bf16 ? ROW_BF16 : ROW;
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

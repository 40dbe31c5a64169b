/* Sparse core: one softmax over window rows, compressed entries and the sink.
 *
 * One piece is one token with all its heads, which share every row. Rows are decoded from their
 * stored form in blocks of 128 set members; the scores of the whole set are kept, so the maximum
 * is known before the first exponential and nothing is rescaled. Neighbouring tokens share all
 * but one row of a full window, which is block 0 then, so decoded window rows are kept. */
#include "kernels/ref/op.h"
#include "kernels/ref/product.h"
#include "kernels/scratch.h"
#include "kernels/ref/stored.h"

enum { D = TD_HEAD_DIM, ROW = TD_ATTEND_ROW };

struct core {
    const struct td_attend_args *a;
    const struct td_op_run *run;
    uint32_t pos, window, count; /* set members; the first `window` are window rows */
    const int32_t *selected;
    float *rows; /* [TD_ATTEND_BLOCKS][TD_BLOCK][ROW] decoded */
    float *kept; /* [TD_ATTEND_SPAN][ROW] window rows of positions kept_from..kept_to-1 */
    uint32_t kept_from, kept_to;
    const struct td_op_run *kept_run; /* of this run; NULL: nothing is kept */
    float *q;                         /* [D][lanes] */
    float *score;                     /* [count][lanes] */
};

/* Where member s of the set is stored. */
static struct td_kv_row member(const struct core *c, uint32_t s) {
    const struct td_op_batch *b = c->a->batch;
    uint32_t layer = c->a->layer;
    if (s < c->window) {
        uint32_t t = c->pos + 1 - c->window + s;
        if (t < c->run->pos) return td_kv_window_row(b->kv, c->run->slot, layer, t);
        return td_kv_dense_row(b->kv, c->a->rows, c->run->first + (t - c->run->pos));
    }
    uint32_t e = s - c->window;
    if (!c->selected)
        return td_kv_hca_row(b->kv, b->pool, layer, c->run->pages[e / TD_KV_HCA_PER_PAGE],
                             e % TD_KV_HCA_PER_PAGE);
    uint32_t w = (uint32_t)c->selected[e];
    return td_kv_csa_row(b->kv, b->pool, layer, c->run->pages[w / TD_KV_CSA_PER_PAGE],
                         w % TD_KV_CSA_PER_PAGE);
}

static uint32_t block_rows(const struct core *c, uint32_t block) {
    uint32_t left = c->count - block * TD_BLOCK;
    return left < TD_BLOCK ? left : TD_BLOCK;
}

static const float *decode_block(const struct core *c, uint32_t block) {
    float *rows = c->rows + (size_t)(block % TD_ATTEND_BLOCKS) * TD_BLOCK * ROW;
    for (uint32_t i = 0; i < block_rows(c, block); i++)
        row_decode(member(c, block * TD_BLOCK + i), c->a->batch->kv->row_dtype,
                   rows + (size_t)i * ROW);
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
        row_decode(member(c, c->kept_to - first), c->a->batch->kv->row_dtype,
                   c->kept + (size_t)(c->kept_to - c->kept_from) * ROW);
    return c->kept + (size_t)(first - c->kept_from) * ROW;
}

/* Decoded rows of a block; `again`: for the second pass over the set. */
static const float *block_of(struct core *c, uint32_t block, uint32_t blocks, bool again) {
    bool full = c->window == TD_WINDOW;
    if (block == 0 && full) return kept_window(c);
    if (again && blocks - full <= TD_ATTEND_BLOCKS)
        return c->rows + (size_t)(block % TD_ATTEND_BLOCKS) * TD_BLOCK * ROW;
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
}

/* Scores to exponentials; den per head. */
static void softmax(const struct core *c, uint32_t lanes, float *den) {
    const v8 scale = splat8(0.04419417382415922f); /* 512^-0.5 */
    for (uint32_t l = 0; l < lanes; l += 8) {
        v8 sink = splat8(0.0f);
        for (uint32_t h = l; h < c->a->heads && h < l + 8; h++)
            sink[h - l] = c->a->sink[h];
        v8 max = sink, sum = splat8(0.0f);
        for (uint32_t s = 0; s < c->count; s++) {
            float *at = c->score + (size_t)s * lanes + l;
            v8 v = load8(at) * scale;
            store8(at, v);
            max = max8(v, max);
        }
        for (uint32_t s = 0; s < c->count; s++) {
            float *at = c->score + (size_t)s * lanes + l;
            v8 e = exp8(load8(at) - max);
            store8(at, e);
            sum = sum + e;
        }
        store8(den + l, sum + exp8(sink - max));
    }
}

static void weigh_block(const struct core *c, uint32_t block, const float *rows, uint32_t lanes,
                        float *o) {
    struct product p = {
        .x_step = lanes, .w_step = ROW, .k = block_rows(c, block), .y_step = D, .add = block > 0};
    for (uint32_t h = 0; h < c->a->heads; h += PRODUCT_ROWS) {
        uint32_t m = c->a->heads - h < PRODUCT_ROWS ? c->a->heads - h : PRODUCT_ROWS;
        for (uint32_t i = 0; i < m; i++)
            p.x[i] = c->score + (size_t)block * TD_BLOCK * lanes + h + i;
        for (uint32_t at = 0; at < D; at += 16) {
            p.w = rows + at;
            p.y = o + (size_t)h * D + at;
            product16(&p, m);
        }
    }
}

static void attend_row(struct core *c, uint32_t i) {
    const struct td_attend_args *a = c->a;
    uint32_t lanes = td_lanes(a->heads);
    set_of_row(c, i);
    memset(c->q, 0, (size_t)D * lanes * sizeof *c->q);
    for (uint32_t h = 0; h < a->heads; h++)
        for (uint32_t k = 0; k < D; k++)
            c->q[(size_t)k * lanes + h] = a->q[((size_t)i * a->heads + h) * D + k];

    uint32_t blocks = (c->count + TD_BLOCK - 1) / TD_BLOCK;
    struct product p = {.x_step = 1, .w = c->q, .w_step = lanes, .k = D, .y_step = lanes};
    for (uint32_t b = 0; b < blocks; b++) {
        p.y = c->score + (size_t)b * TD_BLOCK * lanes;
        product_lanes(&p, block_of(c, b, blocks, false), ROW, block_rows(c, b), lanes);
    }
    float den[TD_MAX_HEADS], *o = a->o + (size_t)i * a->heads * D;
    softmax(c, lanes, den);
    for (uint32_t b = 0; b < blocks; b++)
        weigh_block(c, b, block_of(c, b, blocks, true), lanes, o);
    for (uint32_t h = 0; h < a->heads; h++)
        for (uint32_t k = 0; k < D; k++)
            o[(size_t)h * D + k] /= den[h];
}

struct attend_job {
    const struct td_device *d;
    const struct td_attend_args *a;
};

static void attend_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct attend_job *job = arg;
    uint32_t lanes = td_lanes(job->a->heads);
    struct core c = {.a = job->a, .rows = op_scratch(job->d, thread)};
    c.kept = c.rows + (size_t)TD_ATTEND_BLOCKS * TD_BLOCK * ROW;
    c.q = c.kept + (size_t)TD_ATTEND_SPAN * ROW;
    c.score = c.q + (size_t)D * lanes;
    for (uint32_t i = begin; i < end; i++)
        attend_row(&c, i);
}

void TD_OP(attend)(const struct td_device *d, const struct td_attend_args *a) {
    struct attend_job job = {d, a};
    td_threads_run(d->threads, attend_rows, &job, a->batch->n);
}

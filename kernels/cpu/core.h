/* What the sparse core's two forms share (attend.c: a whole softmax; attend_part.c: parts of one):
 * a set's rows decoded in blocks, their scores for all heads, exponentials and weighted sums.
 *
 * A row's 512 values are four blocks of 128 whose sums are independent chains, so a decoded row
 * holds the blocks side by side ([128][4], split.h) and every head takes four lanes of a product:
 * few heads still fill a vector. The weighted sum of rows has the row's values as lanes, where
 * their order does not matter; it is put right when the sum is divided. Rows stored as bf16 stay
 * bf16
 * ([64][4] words of two) and are widened in registers: a window is then small enough to stay in a
 * core's own cache. The scores of the whole set are kept, so the maximum is known before the first
 * exponential and nothing is rescaled. */
#ifndef TD_KERNELS_CPU_CORE_H
#define TD_KERNELS_CPU_CORE_H

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

#define TD_CORE static __attribute__((unused))

struct core {
    const struct td_op_batch *batch;
    uint32_t layer, heads;
    const float *query; /* [.., row, rank_heads, 512]: heads of ranks rank_step floats apart */
    uint32_t rank_heads;
    size_t rank_step;
    const void *own;   /* this step's window rows */
    const float *sink; /* [heads] or NULL */
    const struct td_op_run *run;
    uint32_t pos, window, count; /* set members; the first `window` are window rows */
    const int32_t *entry;        /* the others; NULL: 0, 1, ... */
    bool csa;                    /* of a CSA layer, else HCA */
    bool bf16;                   /* decoded rows are */
    size_t row;                  /* ROW or ROW_BF16 */
    float *rows;                 /* [TD_ATTEND_BLOCKS][TD_BLOCK][row] decoded */
    float *q;                    /* [head panels][CHAIN][16] */
    float *dot;                  /* [TD_BLOCK][16] of one head panel; TD_ATTEND_DOTS */
    float *score;                /* the token's: [heads of whole panels][stride] */
    uint32_t stride;             /* count, rounded up to whole vectors */
    /* attend.c's */
    const struct td_attend_args *a;
    float *kept; /* [TD_ATTEND_SPAN][row] window rows of positions kept_from..kept_to-1 */
    uint32_t kept_from, kept_to;
    const struct td_op_run *kept_run; /* of this run; NULL: nothing is kept */
    float *panel;                     /* [panels of kept rows][D][16]: fp32, in the order of k */
    float *scores;                    /* of all tokens */
};

TD_INLINE struct core core_of(const struct td_op_batch *batch, uint32_t layer, uint32_t heads) {
    bool bf16 = batch->kv->row_dtype == TD_KV_ROW_BF16;
    return (struct core){.batch = batch,
                         .layer = layer,
                         .heads = heads,
                         .rank_heads = heads,
                         .csa = batch->kv->ratio[layer] == TD_CSA_RATIO,
                         .bf16 = bf16,
                         .row = bf16 ? ROW_BF16 : ROW};
}

/* Heads of a token as rows of the scores. */
TD_INLINE uint32_t score_rows(const struct core *c) {
    return (c->heads + PANEL_HEADS - 1) / PANEL_HEADS * PANEL_HEADS;
}

/* Where the window row of position t is stored. */
TD_CORE struct td_kv_row window_row(const struct core *c, uint32_t t) {
    const struct td_op_batch *b = c->batch;
    if (t < c->run->pos) return td_kv_window_row(b->kv, c->run->slot, c->layer, t);
    return td_kv_dense_row(b->kv, c->own, c->run->first + (t - c->run->pos));
}

/* Where member s of the set is. */
TD_CORE struct td_kv_row member(const struct core *c, uint32_t s) {
    const struct td_op_batch *b = c->batch;
    uint32_t layer = c->layer;
    if (s < c->window) return window_row(c, c->pos + 1 - c->window + s);
    uint32_t w = c->entry ? (uint32_t)c->entry[s - c->window] : s - c->window;
    if (!c->csa)
        return td_kv_hca_row(b->kv, b->pool, layer, td_op_page(b, c->run, w / TD_KV_HCA_PER_PAGE),
                             w % TD_KV_HCA_PER_PAGE);
    return td_kv_csa_row(b->kv, b->pool, layer, td_op_page(b, c->run, w / TD_KV_CSA_PER_PAGE),
                         w % TD_KV_CSA_PER_PAGE);
}

TD_CORE void decode(const struct core *c, struct td_kv_row from, float *to) {
    const float *v = from.values;
    float plain[D];
    size_t part = CHAIN;
    if (c->bf16) {
        part = CHAIN / 2; /* words */
    } else if (c->batch->kv->row_dtype != TD_KV_ROW_FP32) {
        row_decode8(from, c->batch->kv->row_dtype, plain);
        v = plain;
    }
    split4((const float *[]){v, v + part, v + 2 * part, v + 3 * part}, (uint32_t)part, to, 4);
}

TD_CORE uint32_t block_rows(const struct core *c, uint32_t block) {
    uint32_t left = c->count - block * TD_BLOCK;
    return left < TD_BLOCK ? left : TD_BLOCK;
}

/* Chosen entries lie anywhere in the pool: no hardware guesses the next one. */
TD_CORE void prefetch(const struct core *c, uint32_t s) {
    const uint8_t *values = member(c, s).values;
    for (uint32_t i = 0; i < c->batch->kv->row_stride; i += 64)
        __builtin_prefetch(values + i);
}

TD_CORE const float *decode_block(const struct core *c, uint32_t block) {
    float *rows = c->rows + (size_t)(block % TD_ATTEND_BLOCKS) * TD_BLOCK * c->row;
    uint32_t n = block_rows(c, block);
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch(c, block * TD_BLOCK + i + AHEAD);
        decode(c, member(c, block * TD_BLOCK + i), rows + i * c->row);
    }
    return rows;
}

TD_CORE const float *query_of(const struct core *c, uint32_t i, uint32_t h) {
    return c->query + h / c->rank_heads * c->rank_step +
           ((size_t)i * c->rank_heads + h % c->rank_heads) * D;
}

TD_CORE void pack_queries(const struct core *c, uint32_t i) {
    uint32_t heads = c->heads;
    if (heads % PANEL_HEADS)
        memset(c->q + (size_t)(heads / PANEL_HEADS) * CHAIN * TD_PANEL, 0,
               CHAIN * TD_PANEL * sizeof *c->q);
    for (uint32_t h = 0; h < heads; h++) {
        const float *q = query_of(c, i, h);
        split4((const float *[]){q, q + CHAIN, q + 2 * CHAIN, q + 3 * CHAIN}, CHAIN,
               c->q + (size_t)(h / PANEL_HEADS) * CHAIN * TD_PANEL + h % PANEL_HEADS * 4, TD_PANEL);
    }
}

/* Sums of the four blocks, ascending, of the dots of n members: from [member][head][block] to
 * [head][member], first member `s`. Whole groups of four members are written. */
TD_CORE void add_blocks(const struct core *c, uint32_t panel, uint32_t s, uint32_t n) {
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

TD_CORE void score_block(const struct core *c, uint32_t block, const float *rows) {
    uint32_t n = block_rows(c, block), step = c->bf16 ? TILE_ROWS_PAIRS : TILE_ROWS;
    struct tile t = {.w_step = TD_PANEL, .k = CHAIN, .y_step = TD_PANEL};
    for (uint32_t panel = 0; panel * PANEL_HEADS < c->heads; panel++) {
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

/* Scores of all heads to exponentials; ml [heads, 2]: their maxima and sums, the sinks' included.
 */
TD_CORE void softmax(const struct core *c, float *ml) {
    const v8 scale = splat8(0.04419417382415922f); /* 512^-0.5 */
    uint32_t heads = c->heads;
    for (uint32_t h = 0; h < heads; h++) {
        float *score = c->score + (size_t)h * c->stride, sink = c->sink ? c->sink[h] : -INFINITY;
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
        ml[2 * h] = max;
        ml[2 * h + 1] = c->sink ? exp1(sink - max) : 0.0f;
    }
    /* Chains of additions, four heads side by side. */
    for (uint32_t h = 0; h < heads; h += PANEL_HEADS) {
        const float *score = c->score + (size_t)h * c->stride;
        float sum[PANEL_HEADS] = {0};
        for (uint32_t s = 0; s < c->count; s++)
            for (uint32_t j = 0; j < PANEL_HEADS; j++)
                sum[j] += score[j * c->stride + s];
        for (uint32_t j = 0; j < PANEL_HEADS && h + j < heads; j++)
            ml[2 * (h + j) + 1] = sum[j] + ml[2 * (h + j) + 1];
    }
}

TD_CORE void weigh_block(const struct core *c, uint32_t block, const float *rows, bool add,
                         float *o) {
    struct tile t = {.w = rows,
                     .w_step = c->row,
                     .w_panel = c->bf16 ? TD_PANEL / 2 : TD_PANEL,
                     .k = block_rows(c, block),
                     .y_step = D,
                     .add = add};
    for (uint32_t h = 0; h < c->heads; h += TILE_ROWS) {
        uint32_t m = c->heads - h < TILE_ROWS ? c->heads - h : TILE_ROWS;
        for (uint32_t r = 0; r < m; r++)
            t.x[r] = c->score + (size_t)(h + r) * c->stride + (size_t)block * TD_BLOCK;
        t.y = o + (size_t)h * D;
        tile_run(&t, c->bf16 ? TILE_BF16 : TILE_FP32, m, D / TD_PANEL);
    }
}

/* A head's weighted sum, divided, in the order of values. */
TD_CORE void put_values(const struct core *c, const float *sum, float den, float *o) {
    join4_divided(sum, c->bf16, den, (float *[]){o, o + CHAIN, o + 2 * CHAIN, o + 3 * CHAIN});
}

TD_CORE uint32_t blocks_of(const struct core *c) {
    return (c->count + TD_BLOCK - 1) / TD_BLOCK;
}

#endif

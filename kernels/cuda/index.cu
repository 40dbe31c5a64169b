/* Lightning indexer in the reference's order: a block is one query; it scores a tile of keys, a key
 * a thread, and cuts its running list. Nothing grows with the context. */
#include "kernels/cuda/topk.h"

enum { THREADS = TD_TOPK_THREADS, D = TD_INDEX_DIM };

struct index {
    struct td_op_batch b;
    struct td_kv_layout kv;
    uint32_t layer, heads, topk;
    const float *q, *wt;
    float wt_scale;
    bool score_bf16;
    int32_t *selected;
};

static __global__ void index_rows(struct index a) {
    TD_SHARED(uint64_t, list); /* [topk + THREADS], then wt [heads], q [heads, D] */
    __shared__ struct td_topk k;
    float *wt = (float *)(void *)(list + a.topk + THREADS), *q = wt + a.heads;
    uint32_t i = blockIdx.x, t = threadIdx.x, visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO;
    const struct td_op_run *run = &a.b.run[a.b.row[i].run];
    int32_t *to = a.selected + (size_t)i * a.topk;
    if (visible <= a.topk) { /* the whole block */
        for (uint32_t e = t; e < a.topk; e += THREADS)
            to[e] = e < visible ? (int32_t)e : -1;
        return;
    }
    for (uint32_t h = t; h < a.heads; h += THREADS)
        wt[h] = a.wt[(size_t)i * a.heads + h] * a.wt_scale;
    for (uint32_t c = t; c < a.heads * D; c += THREADS)
        q[c] = a.q[(size_t)i * a.heads * D + c];
    if (t == 0) k.floor = 0;
    uint32_t count = 0;
    __syncthreads();
    for (uint32_t tile = 0; tile < visible; tile += THREADS) {
        uint32_t w = tile + t;
        float score = 0.0f;
        if (w < visible) {
            const uint8_t *stored = (const uint8_t *)td_kv_index_key(
                &a.kv, a.b.pool, a.layer, run->pages[w / TD_KV_CSA_PER_PAGE],
                w % TD_KV_CSA_PER_PAGE);
            float key[D];
#pragma unroll
            for (uint32_t c = 0; c < D; c++)
                key[c] = td_key_value(stored, a.kv.key_dtype, c);
            for (uint32_t h = 0; h < a.heads; h++) {
                float dot = 0.0f;
#pragma unroll
                for (uint32_t c = 0; c < D; c++)
                    dot = fmaf(key[c], q[h * D + c], dot);
                score = fmaf(wt[h], dot > 0.0f ? dot : 0.0f, score);
            }
        }
        count = td_topk_add(&k, list, tile / THREADS, count, td_candidate(score, a.score_bf16, w),
                            w < visible);
        count = td_topk_cut(&k, list, count, a.topk);
    }
    __syncthreads();
    for (uint32_t e = t; e < a.topk; e += THREADS)
        to[e] = e < count ? (int32_t)(0xffffffffu - (uint32_t)list[e]) : -1;
}

void TD_PLAIN(index)(const struct td_device *d, const struct td_index_args *a) {
    struct index p = {.b = *a->batch, .kv = *a->batch->kv};
    size_t shared = (a->topk + THREADS) * sizeof(uint64_t) + a->heads * (D + 1) * sizeof(float);
    p.layer = a->layer;
    p.heads = a->heads;
    p.topk = a->topk;
    p.b.row += a->first;
    p.q = a->q + (size_t)a->first * a->heads * D;
    p.wt = a->wt + (size_t)a->first * a->heads;
    p.wt_scale = a->wt_scale;
    p.score_bf16 = a->score_bf16;
    p.selected = a->selected + (size_t)a->first * a->topk;
    if (a->rows == 0) return;
    td_cuda_allow_shared(d, (const void *)index_rows, shared, "index");
    TD_LAUNCH(d, "index", index_rows, a->rows, THREADS, shared, p);
}

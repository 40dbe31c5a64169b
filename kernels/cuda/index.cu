/* Lightning indexer in the reference's order: a block is one query; it scores a tile of keys, a key
 * a thread, and cuts its running list. Nothing grows with the context. And the choice among all
 * ranks' candidates, which has one form. */
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
    uint64_t *candidate;
};

static __global__ void index_rows(struct index a) {
    TD_SHARED(uint64_t, list); /* [topk + THREADS], then wt [heads], q [heads, D] */
    __shared__ struct td_topk k;
    float *wt = (float *)(void *)(list + a.topk + THREADS), *q = wt + a.heads;
    uint32_t i = blockIdx.x, t = threadIdx.x, visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO;
    const struct td_op_run *run = &a.b.run[a.b.row[i].run];
    size_t to = (size_t)i * a.topk;
    if (visible <= a.topk) { /* the whole block */
        for (uint32_t e = t; !a.candidate && e < a.topk; e += THREADS)
            a.selected[to + e] = e < visible ? (int32_t)e : -1;
        return;
    }
    visible = td_own_keys(&a.b, visible);
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
        uint64_t c = td_candidate(score, a.score_bf16, td_own_entry(&a.b, w));
        count = td_topk_add(&k, list, tile / THREADS, count, c, w < visible);
        count = td_topk_cut(&k, list, count, a.topk);
    }
    __syncthreads();
    for (uint32_t e = t; e < a.topk; e += THREADS)
        td_put_chosen(a.selected, a.candidate, to + e, e < count, list[e]);
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
    p.candidate = a->candidate;
    if (a->rows == 0) return;
    td_cuda_allow_shared(d, (const void *)index_rows, shared, "index");
    TD_LAUNCH(d, "index", index_rows, a->rows, THREADS, shared, p);
}

/* ---- the best of all ranks' candidates ---- */

enum { ROOM = 1024 }; /* candidates beside the kept ones before the list is cut */

struct ranks {
    struct td_op_batch b;
    uint32_t rows, ranks, topk;
    const uint64_t *candidate;
    int32_t *selected;
};

/* How many of list[from .. to - 1], which ascend, are of lower entries. */
static __device__ uint32_t lower(const uint64_t *list, uint32_t from, uint32_t to, uint32_t entry) {
    uint32_t first = from;
    while (from < to) {
        uint32_t mid = (from + to) / 2;
        if (td_index_entry(list[mid]) < entry)
            from = mid + 1;
        else
            to = mid;
    }
    return from - first;
}

/* A block is one query. What is kept of a rank ascends and lies together: a candidate's place is
 * the number of lower ones in each. */
static __global__ void __launch_bounds__(THREADS)
    merge_ranks(const __grid_constant__ struct ranks a) {
    TD_SHARED(uint64_t, list); /* [topk + ROOM + THREADS] */
    __shared__ struct td_topk k;
    __shared__ uint32_t kept[TD_MAX_RANKS], begin[TD_MAX_RANKS + 1];
    uint32_t i = blockIdx.x, t = threadIdx.x, visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO;
    uint32_t count = 0, turn = 0;
    int32_t *to = a.selected + (size_t)i * a.topk;
    if (visible <= a.topk) { /* the whole block */
        for (uint32_t e = t; e < a.topk; e += THREADS)
            to[e] = e < visible ? (int32_t)e : -1;
        return;
    }
    if (t == 0) k.floor = 0;
    if (t < TD_MAX_RANKS) kept[t] = 0;
    __syncthreads();
    for (uint32_t r = 0; r < a.ranks; r++)
        for (uint32_t e = 0; e < a.topk; e += THREADS) {
            size_t from = ((size_t)r * a.rows + i) * a.topk + e + t;
            uint64_t c = e + t < a.topk ? a.candidate[from] : 0;
            count = td_topk_add(&k, list, turn++, count, c, c != 0);
            if (count >= a.topk + ROOM) count = td_topk_cut(&k, list, count, a.topk);
        }
    count = td_topk_cut(&k, list, count, a.topk);
    __syncthreads();
    for (uint32_t e = t; e < count; e += THREADS)
        atomicAdd(&kept[td_kv_page_rank(td_index_entry(list[e]) / TD_KV_CSA_PER_PAGE, a.b.split)],
                  1u);
    __syncthreads();
    if (t == 0) {
        begin[0] = 0;
        for (uint32_t r = 0; r < a.ranks; r++)
            begin[r + 1] = begin[r] + kept[r];
    }
    __syncthreads();
    for (uint32_t e = t; e < a.topk; e += THREADS) {
        if (e >= count) {
            to[e] = -1;
            continue;
        }
        uint32_t entry = td_index_entry(list[e]), place = 0;
        for (uint32_t r = 0; r < a.ranks; r++)
            place += lower(list, begin[r], begin[r + 1], entry);
        to[place] = (int32_t)entry;
    }
}

void TD_PLAIN(index_merge)(const struct td_device *d, const struct td_index_merge_args *a) {
    struct ranks p = {.b = *a->batch, .rows = a->rows, .ranks = a->ranks, .topk = a->topk};
    size_t shared = (a->topk + ROOM + THREADS) * sizeof(uint64_t);
    p.b.row += a->first;
    p.candidate = a->candidate;
    p.selected = a->selected + (size_t)a->first * a->topk;
    if (a->rows == 0) return;
    td_cuda_allow_shared(d, (const void *)merge_ranks, shared, "index_merge");
    TD_LAUNCH(d, "index_merge", merge_ranks, a->rows, THREADS, shared, p);
}

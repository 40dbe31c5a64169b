/* The sparse core in parts (td_attend_part_args): whose entries a block looks at, where its queries
 * and results are, and how two parts are merged. */
#ifndef TD_KERNELS_CUDA_PARTS_H
#define TD_KERNELS_CUDA_PARTS_H

#include "kernels/cuda/attend.h"

enum {
    TD_PART_GROUP = 512, /* members of a shard that a block of groups.cu takes: all, but in the
                            longest HCA sets */
    TD_PART_SCRATCH = 16 /* words of td_parts_list */
};

/* td_attend_part_args with what its pointers of the host lead to. */
struct td_parts {
    struct td_op_batch b; /* `row` from the first one on */
    struct td_kv_layout kv;
    uint32_t layer, rows, heads, all_heads, topk;
    uint32_t first_shard, shards, groups; /* groups of a shard's members */
    uint32_t from;                        /* row of the first token of a launch */
    const float *q;
    const int32_t *selected; /* CSA layers; else NULL */
    float *part;
    size_t part_floats;          /* of a rank */
    struct td_attend_left *left; /* [tokens, head blocks, shards, groups] */
};

#ifdef TD_CUDA_EMULATED
#define td_cuda_part_groups td_emulated_part_groups
#define td_cuda_part_tiles td_emulated_part_tiles
#endif
/* Sums of every group of every shard of rows from .. from + n - 1 to `left`, not divided; those of
 * a group without members are 0 and nothing else of them is written. For Hopper (groups.cu), and
 * for others (core.cu), with one group for all members. */
void td_cuda_part_groups(const struct td_device *d, const struct td_parts *p, uint32_t n);
void td_cuda_part_tiles(const struct td_device *d, const struct td_parts *p, uint32_t n);

/* NULL beyond the last head. */
static __device__ inline const float *td_parts_query(const struct td_parts *a, uint32_t i,
                                                     uint32_t h) {
    if (h >= a->all_heads) return NULL;
    size_t row = ((size_t)(h / a->heads) * a->rows + i) * a->heads + h % a->heads;
    return a->q + row * TD_HEAD_DIM;
}

static __device__ inline struct td_attend_left *
td_parts_left(const struct td_parts *a, uint32_t token, uint32_t heads, uint32_t at) {
    size_t block = (size_t)token * td_ceil(a->all_heads, TD_ATTEND_HEADS) + heads;
    return a->left + block * (a->shards * a->groups) + at;
}

/* Entry `at` of page `page` of the sequence as member x of what is listed. */
static __device__ inline void td_parts_put(const struct td_parts *a, const struct td_op_run *run,
                                           uint32_t page, uint32_t at, uint32_t x,
                                           const uint8_t **values, uint32_t *scales) {
    page = td_op_page(&a->b, run, page);
    struct td_kv_row row = a->selected ? td_kv_csa_row(&a->kv, a->b.pool, a->layer, page, at)
                                       : td_kv_hca_row(&a->kv, a->b.pool, a->layer, page, at);
    values[x] = (const uint8_t *)row.values;
    scales[x] = row.scales ? (uint32_t)(row.scales - (const uint8_t *)row.values) : 0;
}

/* Where members first .. first + most - 1 of the `shard`-th of the rank's shards are, of row i:
 * values[0 .. most - 1], NULL beyond the last one, and for FP8 rows the bytes from there to the
 * scales. Returns how many the shard has. By a block, which may read the list after a barrier, and
 * comes again after another. */
template <int THREADS>
static __device__ uint32_t td_parts_list(const struct td_parts *a, uint32_t i, uint32_t shard,
                                         uint32_t first, uint32_t most, const uint8_t **values,
                                         uint32_t *scales, uint32_t *scratch) {
    static_assert(2 * THREADS / 32 <= TD_PART_SCRATCH, "a word per warp, twice");
    const struct td_op_run *run = &a->b.run[a->b.row[i].run];
    uint32_t t = threadIdx.x, count = 0, turn = 0;
    shard += a->first_shard;
    if (a->selected) {
        const int32_t *selected = a->selected + (size_t)i * a->topk;
        for (uint32_t from = 0; from < a->topk; from += THREADS, turn++) {
            int32_t w = from + t < a->topk ? selected[from + t] : -1;
            bool mine = w >= 0 && td_kv_shard((uint32_t)w / TD_KV_CSA_PER_PAGE) == shard;
            uint32_t mask = __ballot_sync(0xffffffffu, mine), before = 0, all = 0;
            uint32_t *warp = scratch + turn % 2 * (THREADS / 32);
            if (t % 32 == 0) warp[t / 32] = (uint32_t)__popc(mask);
            __syncthreads();
            for (uint32_t k = 0; k < THREADS / 32; k++) {
                before += k < t / 32 ? warp[k] : 0;
                all += warp[k];
            }
            uint32_t x = count + before + (uint32_t)__popc(mask & ((1u << t % 32) - 1u)) - first;
            if (mine && x < most) /* those before `first` are far beyond */
                td_parts_put(a, run, (uint32_t)w / TD_KV_CSA_PER_PAGE,
                             (uint32_t)w % TD_KV_CSA_PER_PAGE, x, values, scales);
            count += all;
        }
    } else {
        uint32_t visible = (a->b.row[i].pos + 1) / TD_HCA_RATIO, own = td_kv_shard(shard);
        uint32_t pages = visible / TD_KV_HCA_PER_PAGE; /* full ones; then the one that is open */
        count = (pages + TD_KV_SHARDS - 1 - own) / TD_KV_SHARDS * TD_KV_HCA_PER_PAGE;
        if (pages % TD_KV_SHARDS == own) count += visible % TD_KV_HCA_PER_PAGE;
        for (uint32_t x = t; x < most && first + x < count; x += THREADS)
            td_parts_put(a, run, (first + x) / TD_KV_HCA_PER_PAGE * TD_KV_SHARDS + own,
                         (first + x) % TD_KV_HCA_PER_PAGE, x, values, scales);
    }
    for (uint32_t x = (count > first ? count - first : 0) + t; x < most; x += THREADS) {
        values[x] = NULL;
        scales[x] = 0;
    }
    return count;
}

/* Four values of a part, with its maximum and sum. */
struct td_part {
    float4 acc;
    float m, l;
};

static __device__ inline void td_part_merge(struct td_part *a, struct td_part b) {
    if (b.l == 0.0f) return;
    if (a->l == 0.0f || b.m > a->m) {
        struct td_part greater = b;
        b = *a;
        *a = greater;
        if (b.l == 0.0f) return;
    }
    float f = td_exp(b.m - a->m);
    a->l = fmaf(b.l, f, a->l);
    a->acc.x = fmaf(b.acc.x, f, a->acc.x);
    a->acc.y = fmaf(b.acc.y, f, a->acc.y);
    a->acc.z = fmaf(b.acc.z, f, a->acc.z);
    a->acc.w = fmaf(b.acc.w, f, a->acc.w);
}

/* The tree sum of N parts, 1, 2, 4 or 8, which is p[0] then. */
template <int N> static __device__ inline void td_part_tree(struct td_part p[N]) {
#pragma unroll
    for (int by = 1; by < N; by *= 2)
#pragma unroll
        for (int i = 0; i < N; i += 2 * by)
            td_part_merge(&p[i], p[i + by]);
}
#define TD_PART_KERNEL(kernel, n)                                                                  \
    ((n) == 1 ? kernel<1> : (n) == 2 ? kernel<2> : (n) == 4 ? kernel<4> : kernel<8>)

#endif

/* The sparse core where ranks share entries: the parts of a rank's shards, and what becomes of all
 * ranks' parts. Shards' parts are plain, in the reference's order, or come from the tensor cores
 * (groups.cu, core.cu); merging follows the reference to the bit in both. */
#include "kernels/cuda/parts.h"

enum { THREADS = 128, D = TD_HEAD_DIM };

static struct td_parts parts_of(const struct td_attend_part_args *a) {
    struct td_parts p = {.b = *a->batch, .kv = *a->batch->kv};
    p.b.row += a->first;
    p.layer = a->layer;
    p.rows = a->rows;
    p.heads = a->heads;
    p.all_heads = a->ranks * a->heads;
    p.topk = a->topk;
    p.shards = TD_KV_SHARDS >> p.b.split;
    p.first_shard = p.b.rank * p.shards;
    p.groups = 1;
    p.q = a->q;
    if (p.kv.ratio[a->layer] == TD_CSA_RATIO) p.selected = a->selected + (size_t)a->first * a->topk;
    p.part = a->part;
    p.part_floats = td_attend_part_floats(a->rows, a->heads);
    return p;
}

/* The most members that a shard may have. */
static uint32_t most_of(const struct td_parts *p) {
    uint32_t pages = td_ceil(p->b.max_pos / TD_KV_PAGE_TOKENS + 1, TD_KV_SHARDS);
    uint32_t most = pages * TD_KV_CSA_PER_PAGE;
    if (!p->selected) return pages * TD_KV_HCA_PER_PAGE;
    return most < p->topk ? most : p->topk;
}

/* A thread's four values of head h of row i. */
static __device__ void put_part(const struct td_parts *a, uint32_t i, uint32_t h, uint32_t column,
                                struct td_part v) {
    float *part = a->part + h / a->heads * a->part_floats;
    size_t row = (size_t)i * a->heads + h % a->heads;
    float *ml = part + (size_t)a->rows * a->heads * D + row * 2;
    if (v.l != 0.0f) *(float4 *)(part + row * D + column) = v.acc;
    if (column > 0) return;
    ml[0] = v.l != 0.0f ? v.m : 0.0f;
    ml[1] = v.l;
}

/* ---- plain ---- */

struct place {
    const uint8_t **values; /* [most] */
    uint32_t *scales;       /* [most] */
    float *score;           /* [most] */
    uint32_t most;
};

static __device__ struct td_kv_row member(const struct place *p, uint32_t m) {
    struct td_kv_row row = {(void *)(uintptr_t)p->values[m],
                            (uint8_t *)(uintptr_t)p->values[m] + p->scales[m]};
    return row;
}

/* Of columns 4t .. 4t + 3. */
static __device__ struct td_part plain_shard(const struct td_parts *a, uint32_t i, uint32_t shard,
                                             const float *q, const struct place *p) {
    __shared__ float warp_max[THREADS / 32], sum;
    __shared__ uint32_t scratch[TD_PART_SCRATCH];
    uint32_t t = threadIdx.x;
    struct td_part part = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f, 0.0f};
    __syncthreads();
    uint32_t count = td_parts_list<THREADS>(a, i, shard, 0, p->most, p->values, p->scales, scratch);
    if (count == 0) return part; /* the whole block */
    __syncthreads();
    float max = -INFINITY;
    for (uint32_t m = t; m < count; m += THREADS) {
        float total = 0.0f;
        for (uint32_t b = 0; b < D; b += TD_BLOCK) {
            float chain = 0.0f;
            for (uint32_t k = b; k < b + TD_BLOCK; k++)
                chain = fmaf(td_row_value(member(p, m), a->kv.row_dtype, k), q[k], chain);
            total = b == 0 ? chain : total + chain;
        }
        total *= 0.04419417382415922f; /* 512^-0.5 */
        p->score[m] = total;
        max = total > max ? total : max;
    }
    max = td_group_max(max, 32);
    if (t % 32 == 0) warp_max[t / 32] = max;
    __syncthreads();
    for (uint32_t k = 0; k < THREADS / 32; k++)
        max = warp_max[k] > max ? warp_max[k] : max;
    for (uint32_t m = t; m < count; m += THREADS)
        p->score[m] = td_exp(p->score[m] - max);
    __syncthreads();
    if (t == 0) {
        float l = 0.0f;
        for (uint32_t m = 0; m < count; m++)
            l = l + p->score[m];
        sum = l;
    }
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t b = 0; b < count; b += TD_BLOCK) {
        float chain[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (uint32_t m = b; m < count && m < b + TD_BLOCK; m++)
            for (uint32_t k = 0; k < 4; k++)
                chain[k] = fmaf(p->score[m], td_row_value(member(p, m), a->kv.row_dtype, 4 * t + k),
                                chain[k]);
        for (uint32_t k = 0; k < 4; k++)
            acc[k] = b == 0 ? chain[k] : acc[k] + chain[k];
    }
    __syncthreads();
    part.acc.x = acc[0];
    part.acc.y = acc[1];
    part.acc.z = acc[2];
    part.acc.w = acc[3];
    part.m = max;
    part.l = sum;
    return part;
}

/* A block is one token and head, and goes through the rank's shards. */
static __global__ void part_heads(const __grid_constant__ struct td_parts a, uint32_t most) {
    TD_SHARED(const uint8_t *, values); /* [most], then scales and scores */
    __shared__ float q[D];
    struct place p = {values, (uint32_t *)(void *)(values + most), NULL, most};
    uint32_t i = blockIdx.x, h = blockIdx.y, depth = 0;
    p.score = (float *)(void *)(p.scales + most);
    for (uint32_t k = threadIdx.x; k < D; k += THREADS)
        q[k] = td_parts_query(&a, i, h)[k];
    struct td_part waiting[4]; /* for their second half */
    for (uint32_t s = 0; s < a.shards; s++) {
        waiting[depth++] = plain_shard(&a, i, s, q, &p);
        for (uint32_t ends = s + 1; ends % 2 == 0; ends /= 2, depth--)
            td_part_merge(&waiting[depth - 2], waiting[depth - 1]);
    }
    put_part(&a, i, h, 4 * threadIdx.x, waiting[0]);
}

void TD_PLAIN(attend_part)(const struct td_device *d, const struct td_attend_part_args *a) {
    struct td_parts p = parts_of(a);
    uint32_t most = most_of(&p);
    size_t shared = most * (sizeof(uint8_t *) + sizeof(uint32_t) + sizeof(float));
    if (a->rows == 0) return;
    td_cuda_allow_shared(d, (const void *)part_heads, shared, "attend_part");
    TD_LAUNCH(d, "attend_part", part_heads, dim3(a->rows, p.all_heads), THREADS, shared, p, most);
}

/* ---- fast ---- */

/* What the blocks of a token left becomes its parts: of a shard its groups, ascending; then the
 * tree. A thread has four values of a head. */
template <int SHARDS>
static __global__ void __launch_bounds__(THREADS)
    merge_left(const __grid_constant__ struct td_parts a) {
    uint32_t h = blockIdx.x, at = h % TD_ATTEND_HEADS, column = 4 * threadIdx.x;
    struct td_part part[SHARDS];
    const struct td_attend_left *left = td_parts_left(&a, blockIdx.y, h / TD_ATTEND_HEADS, 0);
    auto group = [&](uint32_t k) {
        struct td_part v = {{0.0f, 0.0f, 0.0f, 0.0f}, left[k].max[at], left[k].sum[at]};
        if (v.l != 0.0f) v.acc = *(const float4 *)&left[k].o[at * D + column];
        return v;
    };
#pragma unroll
    for (int s = 0; s < SHARDS; s++)
        part[s] = group(s * a.groups);
#pragma unroll
    for (int s = 0; s < SHARDS; s++)
        for (uint32_t g = 1; g < a.groups; g++)
            td_part_merge(&part[s], group(s * a.groups + g));
    td_part_tree<SHARDS>(part);
    put_part(&a, a.from + blockIdx.y, h, column, part[0]);
}

void TD_FAST(attend_part)(const struct td_device *d, const struct td_attend_part_args *a) {
    struct td_parts p = parts_of(a);
    bool hopper = td_cuda_of(d)->major == 9;
    if (hopper) p.groups = td_ceil(most_of(&p), TD_PART_GROUP);
    uint32_t each = p.shards * p.groups * td_ceil(p.all_heads, TD_ATTEND_HEADS);
    uint32_t tokens = TD_ATTEND_SLOTS / each;
    if (p.kv.row_dtype == TD_KV_ROW_FP32 || tokens == 0) {
        TD_PLAIN(attend_part)(d, a);
        return;
    }
    p.left = td_cuda_of(d)->attend;
    for (p.from = 0; p.from < a->rows; p.from += tokens) {
        uint32_t n = a->rows - p.from < tokens ? a->rows - p.from : tokens;
        if (hopper)
            td_cuda_part_groups(d, &p, n);
        else
            td_cuda_part_tiles(d, &p, n);
        TD_LAUNCH(d, "attend_part", TD_PART_KERNEL(merge_left, p.shards), dim3(p.all_heads, n),
                  THREADS, 0, p);
    }
}

/* ---- what ranks have of a token together ---- */

struct merge {
    const float *part;
    size_t part_floats;
    const float *ml;
    float *o;
    uint32_t first, rows, heads;
};

template <int RANKS> static __global__ void __launch_bounds__(THREADS) merge_ranks(struct merge a) {
    uint32_t h = blockIdx.y, column = 4 * threadIdx.x;
    size_t row = (size_t)blockIdx.x * a.heads + h, sums = (size_t)a.rows * a.heads * D;
    struct td_part part[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        const float *p = a.part + r * a.part_floats;
        part[r].acc = *(const float4 *)(p + row * D + column);
        part[r].m = p[sums + row * 2];
        part[r].l = p[sums + row * 2 + 1];
    }
    td_part_tree<RANKS>(part);
    row += (size_t)a.first * a.heads;
    float4 *o = (float4 *)(a.o + row * D + column);
    struct td_part all = {*o, a.ml[row * 2], a.ml[row * 2 + 1]};
    td_part_merge(&all, part[0]);
    float4 v = {all.acc.x / all.l, all.acc.y / all.l, all.acc.z / all.l, all.acc.w / all.l};
    *o = v;
}

void TD_PLAIN(attend_merge)(const struct td_device *d, const struct td_attend_merge_args *a) {
    struct merge m = {
        a->part, td_attend_part_floats(a->rows, a->heads), a->ml, a->o, a->first, a->rows,
        a->heads};
    if (a->rows == 0) return;
    TD_LAUNCH(d, "attend_merge", TD_PART_KERNEL(merge_ranks, a->ranks), dim3(a->rows, a->heads),
              THREADS, 0, m);
}

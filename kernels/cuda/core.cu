/* Sparse core on the tensor cores: the fast form of attend.cu for bf16 and FP8 rows where
 * groups.cu, Hopper's, does not serve; queries and exponentials are rounded to bf16.
 *
 * A block is one token and 32 heads, and walks through the set 32 members at a time in ascending
 * order with a running maximum, so a result does not depend on what else is in the step. Each of
 * its 8 warps owns 64 of the 512 values of a row (in FP8 rows that is one scale), for the scores
 * and for the sum alike: it alone reads them, and only scores are exchanged. */
#include "kernels/cuda/parts.h"
#include "kernels/cuda/mma.h"

enum {
    WARPS = 8,
    THREADS = 32 * WARPS,
    D = TD_HEAD_DIM,
    HEADS = 32,           /* of a block: two operands of 16 */
    MEMBERS = 32,         /* of a chunk */
    SLICE = D / WARPS,    /* values of a row a warp owns */
    PITCH = SLICE + 8,    /* of rows in shared memory */
    PART = MEMBERS + 4,   /* of partial scores */
    WEIGHT = MEMBERS + 8, /* of exponentials */
    LISTED = 512,         /* members whose places are looked up together */
};

struct shared {
    uint16_t rows[WARPS][MEMBERS][PITCH];
    float part[WARPS][HEADS][PART];
    uint16_t weight[HEADS][WEIGHT];
    float factor[HEADS];
    const uint8_t *values[LISTED]; /* of a stretch of members; NULL beyond the set */
    uint32_t scales[LISTED];       /* FP8: bytes from the values to the scales */
    uint32_t scratch[TD_PART_SCRATCH];
};

/* Where members first .. first + LISTED - 1 are: page and slot are many loads away, so everyone
 * looks some up at once. */
static __device__ void list_members(const struct td_attend *a, const struct td_attend_set *set,
                                    uint32_t first, struct shared *s) {
    for (uint32_t i = threadIdx.x; i < LISTED; i += THREADS) {
        struct td_kv_row row = {NULL, NULL};
        if (first + i < set->count) row = td_attend_member(a, set, first + i);
        s->values[i] = (const uint8_t *)row.values;
        s->scales[i] = row.scales ? (uint32_t)(row.scales - (const uint8_t *)row.values) : 0;
    }
}

/* This warp's slices of a chunk, on their way: piece i of a lane is 8 values of member
 * 4 i + lane / 8. */
struct slices {
    uint4 v[MEMBERS / 4];
    uint32_t scale[MEMBERS / 4]; /* FP8; whole registers, or packing them would wait for each */
};

static __device__ void load_slices(const struct shared *s, uint32_t at, bool fp8, uint32_t warp,
                                   struct slices *to) {
    uint32_t lane = threadIdx.x % 32;
    bool small = fp8 && warp < WARPS - 1;
#pragma unroll
    for (int i = 0; i < MEMBERS / 4; i++) {
        uint32_t m = at + i * 4 + lane / 8;
        const uint8_t *row = s->values[m], *p = row + warp * SLICE * (fp8 ? 1 : 2);
        uint4 v = {0, 0, 0, 0};
        to->scale[i] = 0;
        if (row && !fp8) v = *(const uint4 *)(p + lane % 8 * 16);
        if (row && fp8) { /* a step's own rows are 8-aligned */
            const uint2 *from = (const uint2 *)(p + lane % 8 * (small ? 8 : 16));
            uint2 low = from[0];
            v.x = low.x;
            v.y = low.y;
            if (!small) {
                v.z = from[1].x;
                v.w = from[1].y;
            }
            if (small) to->scale[i] = row[s->scales[m] + warp];
        }
        to->v[i] = v;
    }
}

static __device__ void store_slices(const struct slices *from, bool fp8, uint32_t warp,
                                    uint16_t (*rows)[PITCH]) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MEMBERS / 4; i++) {
        uint4 v = from->v[i], w = v;
        if (fp8 && warp < WARPS - 1) {
            uint32_t scale = td_e8m0_pair((uint8_t)from->scale[i]);
            td_e4m3_pairs(v.x, scale, &w.x, &w.y);
            td_e4m3_pairs(v.y, scale, &w.z, &w.w);
        }
        *(uint4 *)&rows[i * 4 + lane / 8][lane % 8 * 8] = w;
    }
}

/* Two heads' worth of queries per register pair: operand (m, k step) of the warp's slice.
 * query_of(h): of the block's head h, or NULL beyond the last one. */
template <typename QUERY>
static __device__ void load_queries(const QUERY &query_of, uint32_t warp,
                                    uint32_t q[2][SLICE / 16][4]) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float *from = query_of(m * 16 + r * 8 + g);
            uint32_t at = warp * SLICE + t * 8;
#pragma unroll
            for (int c = 0; c < SLICE / 32; c++) { /* 8 values side by side: two steps */
                float4 u = {0.0f, 0.0f, 0.0f, 0.0f}, v = u;
                if (from) {
                    u = *(const float4 *)(from + at + c * 32);
                    v = *(const float4 *)(from + at + c * 32 + 4);
                }
                q[m][2 * c][r] = td_bf16_pair(u.x, u.y);
                q[m][2 * c][r + 2] = td_bf16_pair(u.z, u.w);
                q[m][2 * c + 1][r] = td_bf16_pair(v.x, v.y);
                q[m][2 * c + 1][r + 2] = td_bf16_pair(v.z, v.w);
            }
        }
}

/* The warp's share of every score of the chunk. */
static __device__ void score(const uint32_t q[2][SLICE / 16][4], const uint16_t (*rows)[PITCH],
                             float (*part)[PART]) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < MEMBERS / 8; n++) {
        float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int k = 0; k < SLICE / 32; k++) {
            uint4 v = *(const uint4 *)&rows[n * 8 + g][k * 32 + t * 8];
            uint32_t first[2] = {v.x, v.y}, second[2] = {v.z, v.w};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                td_mma(c[m], q[m][2 * k], first);
                td_mma(c[m], q[m][2 * k + 1], second);
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                part[m * 16 + r * 8 + g][n * 8 + 2 * t] = c[m][2 * r];
                part[m * 16 + r * 8 + g][n * 8 + 2 * t + 1] = c[m][2 * r + 1];
            }
    }
}

/* A head's running maximum and sum, by 8 threads with 4 members each. */
struct running {
    float max, sum;
};

static __device__ void weigh(struct shared *s, struct running *run, uint32_t first,
                             uint32_t count) {
    uint32_t h = threadIdx.x / 8, m = threadIdx.x % 8 * 4;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f}, max = run->max, sum = 0.0f;
    for (int w = 0; w < WARPS; w++) {
        float4 p = *(const float4 *)&s->part[w][h][m];
        v[0] += p.x;
        v[1] += p.y;
        v[2] += p.z;
        v[3] += p.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] *= 0.04419417382415922f; /* 512^-0.5 */
        if (first + m + i < count) max = v[i] > max ? v[i] : max;
    }
    max = td_group_max(max, 8);
    uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float e = first + m + i < count ? td_exp(v[i] - max) : 0.0f;
        code[i] = td_f32_to_bf16(e);
        sum += td_bf16_to_f32((uint16_t)code[i]);
    }
    uint2 pairs = {code[0] | code[1] << 16, code[2] | code[3] << 16};
    *(uint2 *)&s->weight[h][m] = pairs;
    for (int by = 1; by < 8; by *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    float factor = td_exp(run->max - max);
    run->sum = run->sum * factor + sum;
    run->max = max;
    if (m == 0) s->factor[h] = factor;
}

/* o = o * factor + weights x rows, the warp's 64 columns. */
static __device__ void accumulate(const struct shared *s, const uint16_t (*rows)[PITCH],
                                  float o[2][SLICE / 8][4]) {
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        float low = s->factor[m * 16 + g], high = s->factor[m * 16 + 8 + g];
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++) {
            o[m][n][0] *= low;
            o[m][n][1] *= low;
            o[m][n][2] *= high;
            o[m][n][3] *= high;
        }
    }
#pragma unroll
    for (int k = 0; k < MEMBERS / 16; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 4; r++)
                a[m][r] = *(const uint32_t *)&s
                               ->weight[m * 16 + r % 2 * 8 + g][k * 16 + r / 2 * 8 + 2 * t];
#pragma unroll
        for (int n = 0; n < SLICE / 8; n += 2) {
            uint32_t b[4];
            td_load_transposed(b, &rows[k * 16 + lane % 16][n * 8 + lane / 16 * 8]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                td_mma(o[m][n], a[m], b);
                td_mma(o[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* Through a set of `count` members, listed by list(first) as they are needed: o of the warp's
 * columns, undivided, and the running sums, to which `run` is the start. */
template <typename QUERY, typename LIST>
static __device__ void walk(const QUERY &query_of, const LIST &list, uint32_t count, bool fp8,
                            struct shared *s, float o[2][SLICE / 8][4], struct running *run) {
    uint32_t warp = threadIdx.x / 32, q[2][SLICE / 16][4];
    struct slices next;
    uint16_t(*rows)[PITCH] = s->rows[warp];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < SLICE / 8; n++)
            o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
    load_queries(query_of, warp, q);
    for (uint32_t first = 0; first < count; first += MEMBERS) {
        if (first % LISTED == 0) {
            __syncthreads();
            list(first);
            __syncthreads();
            load_slices(s, 0, fp8, warp, &next);
        }
        __syncwarp();
        store_slices(&next, fp8, warp, rows);
        if ((first + MEMBERS) % LISTED)
            load_slices(s, (first + MEMBERS) % LISTED, fp8, warp, &next);
        __syncwarp();
        score(q, rows, s->part[warp]);
        __syncthreads();
        weigh(s, run, first, count);
        __syncthreads();
        accumulate(s, rows, o);
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, 1) core_tiles(struct td_attend a) {
    TD_SHARED(struct shared, s);
    uint32_t i = blockIdx.x, head = blockIdx.y * HEADS, t = threadIdx.x, warp = t / 32;
    struct td_attend_set set = td_attend_set_of(&a, i);
    bool fp8 = a.kv.row_dtype == TD_KV_ROW_FP8;
    uint32_t own = head + t / 8;
    float o[2][SLICE / 8][4];
    struct running run = {own < a.heads ? a.sink[own] : 0.0f, 1.0f}; /* the sink's exp(0) */
    auto query_of = [&](uint32_t h) {
        return head + h < a.heads ? a.q + ((size_t)i * a.heads + head + h) * D
                                  : (const float *)NULL;
    };
    walk(
        query_of, [&](uint32_t first) { list_members(&a, &set, first, s); }, set.count, fp8, s, o,
        &run);
    if (t % 8 == 0) {
        s->factor[t / 8] = a.ml ? 1.0f : run.sum;
        if (a.ml && own < a.heads) {
            float *ml = a.ml + ((size_t)i * a.heads + own) * 2;
            ml[0] = run.max;
            ml[1] = run.sum;
        }
    }
    __syncthreads();
    uint32_t g = t % 32 / 4;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t h = m * 16 + r * 8 + g;
            float *to = a.o + ((size_t)i * a.heads + head + h) * D + warp * SLICE + t % 4 * 2;
            if (head + h >= a.heads) continue;
            float sum = s->factor[h];
#pragma unroll
            for (int n = 0; n < SLICE / 8; n++) {
                float2 v = {o[m][n][2 * r] / sum, o[m][n][2 * r + 1] / sum};
                *(float2 *)(to + n * 8) = v;
            }
        }
}

void TD_FAST(attend)(const struct td_device *d, const struct td_attend_args *a) {
    struct td_attend p = td_attend_of(a);
    if (p.kv.row_dtype == TD_KV_ROW_FP32) {
        TD_PLAIN(attend)(d, a);
        return;
    }
    if (p.b.n == 0 || td_cuda_attend_groups(d, a)) return;
    td_cuda_allow_shared(d, (const void *)core_tiles, sizeof(struct shared), "attend");
    TD_LAUNCH(d, "attend", core_tiles, dim3(p.b.n, td_ceil(a->heads, HEADS)), THREADS,
              sizeof(struct shared), p);
}

/* ---- parts of shards ---- */

/* A block has all members of a shard, of one token and 32 heads, and leaves its sums. */
static __global__ void __launch_bounds__(THREADS, 1)
    part_tiles(const __grid_constant__ struct td_parts a) {
    TD_SHARED(struct shared, s);
    uint32_t i = a.from + blockIdx.z, head = blockIdx.y * HEADS, t = threadIdx.x,
             shard = blockIdx.x;
    struct td_attend_left *left = td_parts_left(&a, blockIdx.z, head / TD_ATTEND_HEADS, shard);
    uint32_t base = head % TD_ATTEND_HEADS, own = base + t / 8;
    bool fp8 = a.kv.row_dtype == TD_KV_ROW_FP8;
    auto list_from = [&](uint32_t first) {
        return td_parts_list<THREADS>(&a, i, shard, first, LISTED, s->values, s->scales,
                                      s->scratch);
    };
    uint32_t count = list_from(0);
    if (count == 0) { /* the whole block */
        if (t % 8 == 0) left->sum[own] = 0.0f;
        return;
    }
    auto query_of = [&](uint32_t h) { return td_parts_query(&a, i, head + h); };
    float o[2][SLICE / 8][4];
    struct running run = {-1e30f, 0.0f};
    walk(
        query_of,
        [&](uint32_t first) {
            if (first > 0) list_from(first);
        },
        count, fp8, s, o, &run);
    if (t % 8 == 0) {
        left->max[own] = run.max;
        left->sum[own] = run.sum;
    }
    uint32_t row = base + t % 32 / 4, column = t / 32 * SLICE + t % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < SLICE / 8; n++) {
                float2 v = {o[m][n][2 * r], o[m][n][2 * r + 1]};
                *(float2 *)&left->o[(row + m * 16 + r * 8) * D + column + n * 8] = v;
            }
}

void td_cuda_part_tiles(const struct td_device *d, const struct td_parts *p, uint32_t n) {
    dim3 grid(p->shards, td_ceil(p->all_heads, HEADS), n);
    td_cuda_allow_shared(d, (const void *)part_tiles, sizeof(struct shared), "attend_part");
    TD_LAUNCH(d, "attend_part", part_tiles, grid, THREADS, sizeof(struct shared), *p);
}

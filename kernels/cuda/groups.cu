/* Sparse core on Hopper: bf16 and FP8 rows; queries and exponentials are rounded to bf16.
 *
 * A set is cut into groups of 320 members by absolute index. A block has one group of one token and
 * 64 heads: it walks through it 64 members at a time with a running maximum, while the rows of the
 * next chunks are copied to shared memory. A warp group owns half of the 512 values of a row, for
 * the scores and for the sum alike, so one copy of it serves both and only partial scores are
 * exchanged; whole scores are an operand in registers as they lie. The groups of a token are added
 * in ascending order: two of them by a pair of blocks with half of the columns each, more by the
 * block that ends last, to which the others leave theirs in the device's workspace. So a result
 * depends neither on what else is in the step nor on the order in which blocks run. */
#include "kernels/cuda/parts.h"
#include "kernels/cuda/wgmma.h"

enum {
    THREADS = 256,
    SIDE = THREADS / 2, /* a warp group */
    D = TD_HEAD_DIM,
    HEADS = TD_ATTEND_HEADS,
    MEMBERS = 64, /* of a chunk */
    GROUP = 320,
    LISTED = TD_PART_GROUP, /* the most members of a group */
    TILES = D / TD_TILE,
    OWN = TILES / 2,          /* of a warp group */
    TILE = MEMBERS * TD_TILE, /* values */
    FP8_ROW = TD_KV_FP8_ROW_DIM + 2 * (TD_KV_ROW_DIM - TD_KV_FP8_ROW_DIM),
    RAW = FP8_ROW + 16, /* bytes between raw rows: values, scales */
    SLOTS = TD_ATTEND_SLOTS
};

struct shared {
    uint16_t q[TILES][TILE];
    uint16_t rows[2][TILES][TILE];
    uint8_t more[2 * MEMBERS * RAW - 2 * TILES * TILE]; /* FP8: rows[1] and this, two raw chunks */
    float4 part[2][4][SIDE];                            /* scores, by halves */
    const uint8_t *values[LISTED];
    uint32_t scales[LISTED]; /* FP8: bytes from the values to the scales */
    float sum[HEADS];
    uint32_t order, scratch[TD_PART_SCRATCH];
};

struct arrivals {
    uint32_t arrived, ready;
};

struct work {
    bool pairs;                   /* blocks 0 and 1 of a token are launched as one */
    struct td_attend_left *group; /* [tokens, head blocks, groups] */
    struct arrivals *arrivals;    /* [tokens, head blocks] */
    uint32_t first;               /* token of blockIdx.z 0 */
};

#ifdef TD_HAS_WGMMA

#define SCALE2 0.06375871732f /* 512^-0.5 log2 e */
#define LOG2E 1.44269504f
#define LN2 0.693147181f

/* Where the members of the group are; beyond the set nobody looks. The places of all are on their
 * way at once. */
static __device__ void list_members(const struct td_attend *a, const struct td_attend_set *set,
                                    uint32_t first, struct shared *s) {
    enum { EACH = (GROUP + THREADS - 1) / THREADS };
    uint32_t m[EACH], entry[EACH], page[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        m[j] = first + j * THREADS + threadIdx.x;
        m[j] = m[j] < set->count ? m[j] : set->count - 1;
        entry[j] = td_attend_entry(set, m[j]);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++)
        page[j] = td_attend_page(a, set, m[j], entry[j]);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        uint32_t i = j * THREADS + threadIdx.x;
        if (i >= GROUP) break;
        struct td_kv_row row = td_attend_row(a, set, m[j], entry[j], page[j]);
        s->values[i] = (const uint8_t *)row.values;
        s->scales[i] = row.scales ? (uint32_t)(row.scales - (const uint8_t *)row.values) : 0;
    }
}

/* Own half of every head's: 8 values a piece. query_of(h): of the block's head h, or NULL beyond
 * the last one. */
enum { PIECES = HEADS * D / 8 / THREADS };
struct queries {
    float4 v[PIECES][2];
};

template <typename QUERY>
static __device__ void load_queries(const QUERY &query_of, struct queries *to) {
    uint32_t t = threadIdx.x % SIDE, c = threadIdx.x / SIDE * (D / 2) + t % (D / 16) * 8;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const float *from = query_of((j * SIDE + t) / (D / 16));
        float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
        to->v[j][0] = from ? *(const float4 *)(from + c) : zero;
        to->v[j][1] = from ? *(const float4 *)(from + c + 4) : zero;
    }
}

static __device__ void store_queries(const struct queries *from, struct shared *s) {
    uint32_t t = threadIdx.x % SIDE, c = threadIdx.x / SIDE * (D / 2) + t % (D / 16) * 8;
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        uint32_t h = (j * SIDE + t) / (D / 16);
        float4 v = from->v[j][0], w = from->v[j][1];
        uint4 r = {td_bf16_pair(v.x, v.y), td_bf16_pair(v.z, v.w), td_bf16_pair(w.x, w.y),
                   td_bf16_pair(w.z, w.w)};
        *(uint4 *)&s->q[c / TD_TILE][td_tile_at(h, c % TD_TILE)] = r;
    }
}

/* Own half of every row of a chunk; beyond the `count` members the last one's, whose weight will be
 * 0. */
static __device__ void copy_rows(struct shared *s, uint32_t chunk, uint32_t count) {
    uint16_t(*to)[TILE] = s->rows[chunk % 2];
    uint32_t t = threadIdx.x % SIDE, c = threadIdx.x / SIDE * (D / 16) + t % (D / 16);
#pragma unroll
    for (uint32_t j = 0; j < MEMBERS * D / 8 / THREADS; j++) {
        uint32_t m = (j * SIDE + t) / (D / 16), at = chunk * MEMBERS + m;
        const uint8_t *row = s->values[at < count ? at : count - 1];
        td_copy_async(&to[c / 8][td_tile_at(m, c % 8 * 8)], row + c * 16, true);
    }
    td_copy_commit();
}

static __device__ uint8_t *raw_rows(struct shared *s, uint32_t chunk) {
    return (uint8_t *)s->rows[1] + chunk % 2 * MEMBERS * RAW;
}

/* FP8: values as stored, then the scales. A step's own rows are 8-aligned. */
static __device__ void copy_raw(struct shared *s, uint32_t chunk, uint32_t count) {
    enum { EIGHTS = FP8_ROW / 8 + 1 };
    uint8_t *to = raw_rows(s, chunk);
    for (uint32_t u = threadIdx.x; u < MEMBERS * EIGHTS; u += THREADS) {
        uint32_t m = u / EIGHTS, c = u % EIGHTS, at = chunk * MEMBERS + m;
        at = at < count ? at : count - 1;
        const uint8_t *row = s->values[at];
        uint32_t from = c + 1 < EIGHTS ? c * 8 : s->scales[at];
        td_copy_async8(to + m * RAW + c * 8, row + from, true);
    }
    td_copy_commit();
}

static __device__ void decode_rows(struct shared *s, uint32_t chunk) {
    const uint8_t *raw = raw_rows(s, chunk);
#pragma unroll 4
    for (uint32_t j = 0; j < MEMBERS * D / 8 / THREADS; j++) {
        uint32_t u = j * THREADS + threadIdx.x, m = u % MEMBERS, c = u / MEMBERS * 8;
        const uint8_t *row = raw + m * RAW;
        uint4 v;
        if (c < TD_KV_FP8_ROW_DIM) {
            uint2 eight = *(const uint2 *)(row + c);
            uint32_t scale = td_e8m0_pair(row[FP8_ROW + c / TD_QUANT_SIM8]);
            td_e4m3_pairs(eight.x, scale, &v.x, &v.y);
            td_e4m3_pairs(eight.y, scale, &v.z, &v.w);
        } else {
            v = *(const uint4 *)(row + TD_KV_FP8_ROW_DIM + (c - TD_KV_FP8_ROW_DIM) * 2);
        }
        *(uint4 *)&s->rows[0][c / TD_TILE][td_tile_at(m, c % TD_TILE)] = v;
    }
}

/* What both warp groups have of every score is added: the same sum in both. Before it all threads
 * met since they were here last. */
static __device__ void share_scores(float score[32], struct shared *s) {
    uint32_t t = threadIdx.x % SIDE, side = threadIdx.x / SIDE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half) __syncthreads(); /* the first was read */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *v = score + 16 * half + 4 * i;
            float4 four = {v[0], v[1], v[2], v[3]};
            s->part[side][i][t] = four;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 four = s->part[side ^ 1][i][t];
            float *v = score + 16 * half + 4 * i;
            v[0] += four.x;
            v[1] += four.y;
            v[2] += four.z;
            v[3] += four.w;
        }
    }
}

/* Of the two heads of a thread: rows g and g + 8 of its warp's 16. */
struct running {
    float max[2], sum[2];
};

/* Scores of a chunk become weights, as operands; o is brought to the new maximum. */
static __device__ void weigh(float score[32], uint32_t left, struct running *run, float o[128],
                             uint32_t weight[4][4]) {
    uint32_t t = threadIdx.x % 4;
    float max[2] = {run->max[0], run->max[1]};
    if (left < MEMBERS) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (i / 4 * 8 + 2 * t + i % 2 >= left) score[i] = -1e30f;
    }
    float most[2] = {-1e30f, -1e30f};
#pragma unroll
    for (int i = 0; i < 32; i++)
        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
    max[0] = fmaxf(max[0], most[0] * SCALE2);
    max[1] = fmaxf(max[1], most[1] * SCALE2);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffffu, max[r], 1));
        max[r] = fmaxf(max[r], __shfl_xor_sync(0xffffffffu, max[r], 2));
    }
    bool rises = max[0] > run->max[0] || max[1] > run->max[1];
    if (__ballot_sync(0xffffffffu, rises)) { /* else the factors are 1 */
        float factor[2] = {td_exp2(run->max[0] - max[0]), td_exp2(run->max[1] - max[1])};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            run->max[r] = max[r];
            run->sum[r] *= factor[r];
        }
#pragma unroll
        for (int i = 0; i < 128; i++)
            o[i] *= factor[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        int r = i / 2 % 2;
        uint32_t pair = td_bf16_pair(td_exp2(fmaf(score[i], SCALE2, -max[r])),
                                     td_exp2(fmaf(score[i + 1], SCALE2, -max[r])));
        run->sum[r] += td_bits_f32(pair << 16) + td_bits_f32(pair & 0xffff0000u);
        weight[i / 8][i / 4 % 2 * 2 + r] = pair;
    }
}

/* True in the block that is to add up all groups of the token, when the others have left theirs. */
static __device__ bool ends_last(struct arrivals *at, uint32_t groups, struct td_attend_left *own,
                                 const struct running *run, const float o[128], struct shared *s) {
    uint32_t t = threadIdx.x, g = t % 32 / 4;
    if (t == 0) s->order = atomicAdd(&at->arrived, 1u);
    __syncthreads();
    if (s->order + 1 < groups) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float4 v = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
            *(float4 *)&own->o[(i * THREADS + t) * 4] = v;
        }
        if (t < 128 && t % 4 == 0)
            for (int r = 0; r < 2; r++) {
                own->max[t / 32 * 16 + r * 8 + g] = run->max[r];
                own->sum[t / 32 * 16 + r * 8 + g] = run->sum[r];
            }
        __threadfence();
        __syncthreads();
        if (t == 0) atomicAdd(&at->ready, 1u);
        return false;
    }
    if (t == 0) {
        while (*(volatile uint32_t *)&at->ready + 1 < groups) /* they are past their sums */
            ;
        at->arrived = at->ready = 0;
        __threadfence();
    }
    __syncthreads();
    return true;
}

/* Factors of every group for every head to factor[groups][HEADS], and 1 over the sum to s->sum. */
static __device__ void weigh_groups(const struct td_attend *a, uint32_t i,
                                    const struct td_attend_left *group, uint32_t groups,
                                    uint32_t own, uint32_t head, const struct running *run,
                                    float *factor, struct shared *s) {
    uint32_t t = threadIdx.x, g = t % 32 / 4;
    if (t < 128 && t % 4 == 0)
        for (int r = 0; r < 2; r++) {
            uint32_t h = t / 32 * 16 + r * 8 + g;
            float sink = (head + h < a->heads ? a->sink[head + h] : 0.0f) * LOG2E, max = sink;
            float sum = 0.0f;
            for (uint32_t j = 0; j < groups; j++)
                max = fmaxf(max, j == own ? run->max[r] : __ldcg(&group[j].max[h]));
            for (uint32_t j = 0; j < groups; j++) {
                float f = td_exp2((j == own ? run->max[r] : __ldcg(&group[j].max[h])) - max);
                factor[j * HEADS + h] = f;
                sum += (j == own ? run->sum[r] : __ldcg(&group[j].sum[h])) * f;
            }
            sum += td_exp2(sink - max);
            s->sum[h] = a->ml ? 1.0f : 1.0f / sum;
            if (a->ml && head + h < a->heads) {
                float *ml = a->ml + ((size_t)i * a->heads + head + h) * 2;
                ml[0] = max * LN2;
                ml[1] = sum;
            }
        }
    __syncthreads();
}

static __device__ void write_sums(const struct td_attend *a, uint32_t i, uint32_t head,
                                  const struct td_attend_left *group, uint32_t groups, uint32_t own,
                                  const float o[128], const float *factor, const struct shared *s) {
    enum { PART = 8 }; /* vectors asked for together */
    uint32_t t = threadIdx.x, row = t / 32 % 4 * 16 + t % 32 / 4;
#pragma unroll
    for (int part = 0; part < 32; part += PART) {
        float4 sum[PART];
#pragma unroll
        for (int k = 0; k < PART; k++)
            sum[k].x = sum[k].y = sum[k].z = sum[k].w = 0.0f;
        for (uint32_t j = 0; j < groups; j++) {
            float low = factor[j * HEADS + row], high = factor[j * HEADS + row + 8];
            float4 v[PART];
#pragma unroll
            for (int k = 0; k < PART; k++) {
                int n = part + k;
                if (j == own) {
                    v[k].x = o[4 * n];
                    v[k].y = o[4 * n + 1];
                    v[k].z = o[4 * n + 2];
                    v[k].w = o[4 * n + 3];
                } else {
                    v[k] = __ldcg((const float4 *)&group[j].o[(n * THREADS + t) * 4]);
                }
            }
#pragma unroll
            for (int k = 0; k < PART; k++) {
                sum[k].x += v[k].x * low;
                sum[k].y += v[k].y * low;
                sum[k].z += v[k].z * high;
                sum[k].w += v[k].w * high;
            }
        }
        float low = s->sum[row], high = s->sum[row + 8];
        float *to = a->o + ((size_t)i * a->heads + head + row) * D + t / 128 * (D / 2) + t % 4 * 2;
#pragma unroll
        for (int k = 0; k < PART; k++) {
            float2 first = {sum[k].x * low, sum[k].y * low};
            float2 second = {sum[k].z * high, sum[k].w * high};
            if (head + row < a->heads) *(float2 *)(to + (part + k) * 8) = first;
            if (head + row + 8 < a->heads)
                *(float2 *)(to + (size_t)8 * D + (part + k) * 8) = second;
        }
    }
}

/* Through the `count` members that are listed, one at least: o and its sums, of a thread's places.
 */
template <bool FP8>
static __device__ void walk(const struct queries *q, uint32_t count, struct shared *s, float o[128],
                            struct running *run) {
    uint32_t chunks = td_ceil(count, MEMBERS), side = threadIdx.x / SIDE;
    auto copy = [&](uint32_t chunk) {
        if (chunk >= chunks) return;
        if (FP8)
            copy_raw(s, chunk, count);
        else
            copy_rows(s, chunk, count);
    };
    copy(0);
    copy(1);
    store_queries(q, s);
#pragma unroll
    for (int k = 0; k < 128; k++)
        o[k] = 0.0f;
    for (uint32_t chunk = 0; chunk < chunks; chunk++) {
        const uint16_t(*rows)[TILE] = s->rows[FP8 ? 0 : chunk % 2] + side * OWN;
        float score[32];
        uint32_t weight[4][4];
        if (chunk + 1 < chunks)
            td_copy_wait<1>();
        else
            td_copy_wait<0>();
        if (FP8) {
            __syncthreads();
            decode_rows(s, chunk);
        }
        td_wgmma_publish();
        __syncthreads();
        if (FP8) copy(chunk + 2);
#pragma unroll
        for (int k = 0; k < 32; k++)
            score[k] = 0.0f;
        td_wgmma_begin();
#pragma unroll
        for (int tile = 0; tile < OWN; tile++)
#pragma unroll
            for (int k = 0; k < TD_TILE; k += 16)
                td_wgmma_dots(score, s->q[side * OWN + tile], rows[tile], k);
        td_wgmma_end();
        share_scores(score, s);
        weigh(score, count - chunk * MEMBERS, run, o, weight);
        td_wgmma_begin();
#pragma unroll
        for (int k = 0; k < MEMBERS / 16; k++)
            td_wgmma_sums(o, weight[k], rows[0], k * 16, TILE);
        td_wgmma_end();
        if (!FP8 && chunk + 1 < chunks) {
            td_wgmma_sync(); /* who copies over these rows used them, as nobody else did */
            copy(chunk + 2);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        run->sum[r] += __shfl_xor_sync(0xffffffffu, run->sum[r], 1);
        run->sum[r] += __shfl_xor_sync(0xffffffffu, run->sum[r], 2);
    }
}

/* The same for the two groups of a pair: of each warp group's columns this block ends half, whose
 * sums the other block leaves in the memory of this one's queries. Bit for bit what write_sums
 * gives.
 */
template <int OWN_GROUP>
static __device__ void write_pair(const struct td_attend *a, uint32_t i, uint32_t head,
                                  const struct running *run, const float o[128], struct shared *s) {
    enum { FIRST = OWN_GROUP * 16, OTHERS = 16 - FIRST }; /* of 32 times 8 columns */
    static_assert(sizeof s->q == 16 * THREADS * sizeof(float4) &&
                      sizeof s->part >= THREADS * sizeof(float4),
                  "what is left fits");
    uint32_t t = threadIdx.x, row = t / 32 % 4 * 16 + t % 32 / 4;
    float4 *left = (float4 *)(void *)s->q;        /* [16][THREADS] */
    float4 *left_run = (float4 *)(void *)s->part; /* [THREADS] maxima and sums */
    float4 *other = (float4 *)td_pair_memory(left, OWN_GROUP ^ 1);
    float4 *other_run = (float4 *)td_pair_memory(left_run, OWN_GROUP ^ 1);
    td_pair_sync(); /* queries are no longer needed */
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const float *from = o + 4 * (OTHERS + k);
        float4 v = {from[0], from[1], from[2], from[3]};
        other[k * THREADS + t] = v;
    }
    float4 own = {run->max[0], run->max[1], run->sum[0], run->sum[1]};
    other_run[t] = own;
    td_pair_sync();
    float4 theirs = left_run[t];
    float4 group[2] = {OWN_GROUP ? theirs : own, OWN_GROUP ? own : theirs};
    float factor[2][2], whole[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t h = head + row + r * 8;
        float sink = (h < a->heads ? a->sink[h] : 0.0f) * LOG2E, max = sink, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++)
            max = fmaxf(max, r ? group[j].y : group[j].x);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            factor[j][r] = td_exp2((r ? group[j].y : group[j].x) - max);
            sum += (r ? group[j].w : group[j].z) * factor[j][r];
        }
        whole[r] = 1.0f / (sum + td_exp2(sink - max));
    }
    float *to = a->o + ((size_t)i * a->heads + head + row) * D + t / SIDE * (D / 2) + t % 4 * 2;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        float4 v = left[k * THREADS + t];
        float others[4] = {v.x, v.y, v.z, v.w}, sum[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float mine = o[4 * (FIRST + k) + n];
            sum[n] = 0.0f + (OWN_GROUP ? others[n] : mine) * factor[0][n / 2];
            sum[n] = (sum[n] + (OWN_GROUP ? mine : others[n]) * factor[1][n / 2]) * whole[n / 2];
        }
        float2 low = {sum[0], sum[1]}, high = {sum[2], sum[3]};
        if (head + row < a->heads) *(float2 *)(to + (FIRST + k) * 8) = low;
        if (head + row + 8 < a->heads) *(float2 *)(to + (size_t)8 * D + (FIRST + k) * 8) = high;
    }
}

#endif

template <bool FP8>
static __global__ void __launch_bounds__(THREADS, 1)
    core_groups(const __grid_constant__ struct td_attend a, const __grid_constant__ struct work w) {
#ifdef TD_HAS_WGMMA
    TD_SHARED(unsigned char, memory);
    struct shared *s = (struct shared *)td_tile_memory(memory);
    uint32_t i = w.first + blockIdx.z, own = blockIdx.x, head = blockIdx.y * HEADS;
    struct td_attend_set set = td_attend_set_of(&a, i);
    uint32_t first = own * GROUP, groups = td_ceil(set.count, GROUP);
    if (first >= set.count) return; /* the whole block */
    uint32_t count = set.count - first < GROUP ? set.count - first : GROUP;
    auto query_of = [&](uint32_t h) {
        return head + h < a.heads ? a.q + ((size_t)i * a.heads + head + h) * D
                                  : (const float *)NULL;
    };
    float o[128];
    struct running run = {{-1e30f, -1e30f}, {0.0f, 0.0f}};
    struct queries q; /* on their way before the rows, which take longer to find */
    load_queries(query_of, &q);
    list_members(&a, &set, first, s);
    __syncthreads();
    walk<FP8>(&q, count, s, o, &run);
    if (w.pairs && groups == 2) {
        if (own == 0)
            write_pair<0>(&a, i, head, &run, o, s);
        else
            write_pair<1>(&a, i, head, &run, o, s);
        return;
    }
    uint32_t at = blockIdx.z * gridDim.y + blockIdx.y;
    struct td_attend_left *group = w.group + (size_t)at * gridDim.x;
    if (groups > 1 && !ends_last(&w.arrivals[at], groups, &group[own], &run, o, s)) return;
    __syncthreads();
    float *factor = (float *)(void *)s->q; /* no longer needed */
    weigh_groups(&a, i, group, groups, own, head, &run, factor, s);
    write_sums(&a, i, head, group, groups, own, o, factor, s);
#endif
}

size_t td_cuda_attend_bytes(void) {
    return SLOTS * (sizeof(struct td_attend_left) + sizeof(struct arrivals));
}

template <bool FP8>
static void launch(const struct td_device *d, const struct td_attend *p, uint32_t groups) {
    size_t shared = sizeof(struct shared) + TD_TILE_ROOM;
    uint32_t heads = td_ceil(p->heads, HEADS), tokens = SLOTS / (groups * heads);
    struct work w = {};
    w.pairs = groups == 2;
    w.group = td_cuda_of(d)->attend;
    w.arrivals = (struct arrivals *)(void *)(w.group + SLOTS);
    if (w.pairs) tokens = 65535; /* of grid.z */
    td_cuda_allow_shared(d, (const void *)core_groups<FP8>, shared, "attend");
    for (uint32_t from = 0; from < p->b.n; from += tokens) {
        uint32_t n = p->b.n - from < tokens ? p->b.n - from : tokens;
        w.first = from;
        dim3 grid(groups, heads, n);
        if (w.pairs)
            TD_LAUNCH_PAIRS(d, "attend", core_groups<FP8>, grid, THREADS, shared, *p, w);
        else
            TD_LAUNCH(d, "attend", core_groups<FP8>, grid, THREADS, shared, *p, w);
    }
}

bool td_cuda_attend_groups(const struct td_device *d, const struct td_attend_args *a) {
    struct td_attend p = td_attend_of(a);
    uint32_t groups = td_ceil(td_attend_most(a), GROUP);
    if (td_cuda_of(d)->major != 9 || groups * td_ceil(a->heads, HEADS) > SLOTS) return false;
    if (p.kv.row_dtype == TD_KV_ROW_FP8)
        launch<true>(d, &p, groups);
    else
        launch<false>(d, &p, groups);
    return true;
}

/* ---- parts of shards ---- */

/* A block has a group of a shard's members, of one token and 64 heads, and leaves its sums. */
template <bool FP8>
static __global__ void __launch_bounds__(THREADS, 1)
    part_groups(const __grid_constant__ struct td_parts a) {
#ifdef TD_HAS_WGMMA
    TD_SHARED(unsigned char, memory);
    struct shared *s = (struct shared *)td_tile_memory(memory);
    uint32_t i = a.from + blockIdx.z, head = blockIdx.y * HEADS, t = threadIdx.x;
    uint32_t shard = blockIdx.x / a.groups, first = blockIdx.x % a.groups * LISTED;
    struct td_attend_left *left = td_parts_left(&a, blockIdx.z, blockIdx.y, blockIdx.x);
    auto query_of = [&](uint32_t h) { return td_parts_query(&a, i, head + h); };
    struct queries q;
    load_queries(query_of, &q);
    uint32_t all =
        td_parts_list<THREADS>(&a, i, shard, first, LISTED, s->values, s->scales, s->scratch);
    if (first >= all) { /* the whole block */
        if (t < HEADS) left->sum[t] = 0.0f;
        return;
    }
    float o[128];
    struct running run = {{-1e30f, -1e30f}, {0.0f, 0.0f}};
    __syncthreads();
    walk<FP8>(&q, all - first < LISTED ? all - first : (uint32_t)LISTED, s, o, &run);
    uint32_t row = t / 32 % 4 * 16 + t % 32 / 4, column = t / 128 * (D / 2) + t % 4 * 2;
#pragma unroll
    for (int k = 0; k < 32; k++) {
        float2 low = {o[4 * k], o[4 * k + 1]}, high = {o[4 * k + 2], o[4 * k + 3]};
        *(float2 *)&left->o[row * D + column + k * 8] = low;
        *(float2 *)&left->o[(row + 8) * D + column + k * 8] = high;
    }
    if (t < 128 && t % 4 == 0)
        for (int r = 0; r < 2; r++) {
            left->max[row + r * 8] = run.max[r] * LN2;
            left->sum[row + r * 8] = run.sum[r];
        }
#endif
}

template <bool FP8>
static void launch_parts(const struct td_device *d, const struct td_parts *p, uint32_t n) {
    size_t shared = sizeof(struct shared) + TD_TILE_ROOM;
    dim3 grid(p->shards * p->groups, td_ceil(p->all_heads, HEADS), n);
    td_cuda_allow_shared(d, (const void *)part_groups<FP8>, shared, "attend_part");
    TD_LAUNCH(d, "attend_part", part_groups<FP8>, grid, THREADS, shared, *p);
}

void td_cuda_part_groups(const struct td_device *d, const struct td_parts *p, uint32_t n) {
    if (p->kv.row_dtype == TD_KV_ROW_FP8)
        launch_parts<true>(d, p, n);
    else
        launch_parts<false>(d, p, n);
}

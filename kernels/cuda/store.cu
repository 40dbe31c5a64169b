/* What is written to KV state: window rows, compressed entries, indexer keys; and the rounding
 * steps of `ref` numerics. A closed window is pooled, normalised, rotated, rounded and stored by
 * one block without an intermediate in memory. The reference's bits. */
#include "kernels/cuda/op.h"

enum { THREADS = 128, D = TD_HEAD_DIM };

/* ---- rounding and storing one vector in shared memory, by a block of 128 threads ---- */

/* The greatest magnitude of every group of `group` (32, 64 or 128) of v[0..dim-1] to max[]; a NaN
 * counts as nothing, or with `nan` makes the maximum one. */
static __device__ void group_maxima(const float *v, uint32_t dim, uint32_t group, bool nan,
                                    float *max) {
    uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32;
    for (uint32_t g = warp; g * group < dim; g += THREADS / 32) {
        float m = 0.0f;
        bool bad = false;
        for (uint32_t i = lane; i < group && g * group + i < dim; i += 32) {
            float x = v[g * group + i], a = td_magnitude(x);
            bad = bad || x != x;
            m = a > m ? a : m;
        }
        m = td_group_max(m, 32);
        if (nan && __ballot_sync(0xffffffffu, bad)) m = td_bits_f32(0x7fc00000u);
        if (lane == 0) max[g] = m;
    }
    __syncthreads();
}

/* `max`: shared memory for a float per group. */
static __device__ void fp8_round(float *v, uint32_t dim, uint32_t group, float *max) {
    group_maxima(v, dim, group, false, max);
    for (uint32_t i = threadIdx.x; i < dim; i += THREADS) {
        float s = td_fp8_scale(max[i / group]);
        v[i] = td_e4m3_nearest(v[i] * (1.0f / s)) * s;
    }
    __syncthreads();
}

static __device__ float fp4_group_scale(float max) {
    return max != max ? max : td_fp4_scale(max);
}

static __device__ void sim4(float *v, float *max) {
    group_maxima(v, TD_INDEX_DIM, TD_QUANT_SIM4, true, max);
    uint32_t i = threadIdx.x;
    float s = fp4_group_scale(max[i / TD_QUANT_SIM4]);
    v[i] = td_e2m1_to_f32(td_f32_to_e2m1(v[i] * (1.0f / s))) * s;
    __syncthreads();
}

static __device__ void hadamard(float *v) {
    uint32_t i = threadIdx.x;
    for (uint32_t h = 1; h < TD_INDEX_DIM; h *= 2) {
        float a = v[i & ~h], b = v[i | h];
        __syncthreads();
        v[i] = i & h ? a - b : a + b;
        __syncthreads();
    }
    v[i] *= 0.08838834764831845f;
    __syncthreads();
}

static __device__ void store_row(const float *v, enum td_kv_row_dtype type, struct td_kv_row to,
                                 float *max) {
    uint32_t t = threadIdx.x;
    if (type == TD_KV_ROW_FP32) {
        for (uint32_t i = t; i < D; i += THREADS)
            ((float *)to.values)[i] = v[i];
        return;
    }
    uint16_t *narrow = (uint16_t *)to.values;
    if (type == TD_KV_ROW_BF16) {
        for (uint32_t i = t; i < D; i += THREADS)
            narrow[i] = td_f32_to_bf16(v[i]);
        return;
    }
    group_maxima(v, TD_KV_FP8_ROW_DIM, TD_QUANT_SIM8, false, max);
    for (uint32_t i = t; i < TD_KV_FP8_ROW_DIM; i += THREADS) {
        float s = td_fp8_scale(max[i / TD_QUANT_SIM8]);
        ((uint8_t *)to.values)[i] = td_f32_to_e4m3(v[i] * (1.0f / s));
    }
    if (t < TD_KV_FP8_ROW_SCALES)
        to.scales[t] =
            t + 1 < TD_KV_FP8_ROW_SCALES ? td_e8m0_byte(td_fp8_scale(max[t])) : (uint8_t)0;
    if (t < TD_KV_ROW_DIM - TD_KV_FP8_ROW_DIM)
        narrow[TD_KV_FP8_ROW_DIM / 2 + t] = td_f32_to_bf16(v[TD_KV_FP8_ROW_DIM + t]);
}

static __device__ void store_key(const float *v, enum td_kv_key_dtype type, uint8_t *to,
                                 float *max) {
    uint32_t i = threadIdx.x;
    if (type == TD_KV_KEY_FP32) {
        ((float *)(void *)to)[i] = v[i];
    } else if (type == TD_KV_KEY_BF16) {
        ((uint16_t *)(void *)to)[i] = td_f32_to_bf16(v[i]);
    } else if (type == TD_KV_KEY_FP8) {
        group_maxima(v, TD_KV_KEY_DIM, TD_KV_KEY_DIM, false, max);
        float scale = max[0] / TD_E4M3_MAX;
        if (scale == 0.0f) scale = 1.0f;
        to[i] = td_f32_to_e4m3(v[i] / scale);
        if (i == 0) *(float *)(void *)(to + TD_KV_KEY_DIM) = scale;
    } else {
        group_maxima(v, TD_KV_KEY_DIM, TD_QUANT_SIM4, true, max);
        float s = fp4_group_scale(max[i / TD_QUANT_SIM4]);
        uint32_t code = td_f32_to_e2m1(v[i] * (1.0f / s));
        uint32_t high = __shfl_down_sync(0xffffffffu, code, 1);
        if (i % 2 == 0) to[i / 2] = (uint8_t)(code | high << 4);
        if (i % TD_QUANT_SIM4 == 0) to[TD_KV_KEY_DIM / 2 + i / TD_QUANT_SIM4] = td_e8m0_byte(s);
    }
}

/* ---- rounding as ops ---- */

/* A block per row and 128 values. */
static __global__ void round_groups(struct td_round_fp8_args a) {
    __shared__ float v[TD_BLOCK], max[1];
    uint32_t at = blockIdx.y * TD_BLOCK, left = a.dim - at < TD_BLOCK ? a.dim - at : TD_BLOCK;
    size_t from = (size_t)blockIdx.x * a.dim + at;
    if (a.rows && blockIdx.x >= *a.rows) return; /* the whole block */
    if (threadIdx.x < left) v[threadIdx.x] = a.x[from + threadIdx.x];
    __syncthreads();
    fp8_round(v, left, TD_BLOCK, max);
    if (threadIdx.x < left) a.y[from + threadIdx.x] = v[threadIdx.x];
}

/* Whole groups: a warp has two, four values a lane, and waits for nobody. */
enum { WHOLE_EACH = 2, WHOLE_GROUPS = THREADS / 32 * WHOLE_EACH };
static __global__ void round_whole_groups(struct td_round_fp8_args a, uint32_t groups) {
    uint32_t per = a.dim / TD_BLOCK, lane = threadIdx.x % 32;
    uint32_t first = blockIdx.x * WHOLE_GROUPS + threadIdx.x / 32 * WHOLE_EACH;
    uint32_t used = a.rows ? *a.rows : a.n;
    groups = used * per < groups ? used * per : groups;
    float4 v[WHOLE_EACH];
#pragma unroll
    for (uint32_t i = 0; i < WHOLE_EACH; i++) {
        uint32_t g = first + i < groups ? first + i : 0;
        v[i] = *(const float4 *)(a.x + (size_t)g * TD_BLOCK + lane * 4);
    }
#pragma unroll
    for (uint32_t i = 0; i < WHOLE_EACH; i++) {
        float low = fmaxf(td_magnitude(v[i].x), td_magnitude(v[i].y));
        float s = td_fp8_scale(
            td_group_max(fmaxf(low, fmaxf(td_magnitude(v[i].z), td_magnitude(v[i].w))), 32));
        float up = 1.0f / s;
        v[i].x = td_e4m3_nearest(v[i].x * up) * s;
        v[i].y = td_e4m3_nearest(v[i].y * up) * s;
        v[i].z = td_e4m3_nearest(v[i].z * up) * s;
        v[i].w = td_e4m3_nearest(v[i].w * up) * s;
        if (first + i < groups) *(float4 *)(a.y + (size_t)(first + i) * TD_BLOCK + lane * 4) = v[i];
    }
}

void TD_PLAIN(round_fp8)(const struct td_device *d, const struct td_round_fp8_args *a) {
    dim3 grid(a->n, td_ceil(a->dim, TD_BLOCK));
    bool whole = a->dim % TD_BLOCK == 0 && ((uintptr_t)a->x | (uintptr_t)a->y) % 16 == 0;
    if (a->n && whole) {
        uint32_t groups = a->n * (a->dim / TD_BLOCK);
        TD_LAUNCH(d, "round_fp8", round_whole_groups, td_ceil(groups, WHOLE_GROUPS), THREADS, 0, *a,
                  groups);
        return;
    }
    if (a->n) TD_LAUNCH(d, "round_fp8", round_groups, grid, THREADS, 0, *a);
}

static __global__ void round_queries(struct td_index_query_args a) {
    __shared__ float v[TD_INDEX_DIM], max[4];
    float *q = a.q + (size_t)blockIdx.x * TD_INDEX_DIM;
    v[threadIdx.x] = q[threadIdx.x];
    __syncthreads();
    if (a.hadamard) hadamard(v);
    if (a.sim4) sim4(v, max);
    q[threadIdx.x] = v[threadIdx.x];
}

void TD_PLAIN(index_query)(const struct td_device *d, const struct td_index_query_args *a) {
    if (a->n) TD_LAUNCH(d, "index_query", round_queries, a->n * a->heads, THREADS, 0, *a);
}

struct nvfp4 {
    const float *x;
    const uint32_t *x_row, *offset;
    const struct td_matrix *w;
    float *y;
    struct td_nvfp4_codes codes;
    uint32_t dim;
};

/* kernels/ref/quant.h: nvfp4_round. A block takes every gridDim.x-th row of an expert. */
static __global__ void round_nvfp4_rows(struct nvfp4 a) {
    enum { GROUP = 16 };
    uint32_t e = blockIdx.y, t = threadIdx.x, lane = t % 32;
    float input_scale = a.w[e].input_scale;
    for (uint32_t r = a.offset[e] + blockIdx.x; r < a.offset[e + 1]; r += gridDim.x) {
        const float *x = a.x + (size_t)(a.x_row ? a.x_row[r] : r) * a.dim;
        for (uint32_t from = 0; from < a.dim; from += THREADS) {
            uint32_t i = from + t;
            float v = i < a.dim ? x[i] : 0.0f, max = td_group_max(td_magnitude(v), GROUP);
            uint32_t bad = __ballot_sync(0xffffffffu, v != v) >> (lane & GROUP) & 0xffffu;
            uint8_t b = bad ? 0x7f : td_f32_to_e4m3(max / TD_E2M1_MAX / input_scale);
            float step = bad ? td_bits_f32(0x7fc00000u) : td_e4m3_to_f32(b) * input_scale;
            uint32_t q = step == 0.0f ? 0 : bad ? 7 : td_f32_to_e2m1(v / step);
            uint32_t next = __shfl_xor_sync(0xffffffffu, q, 1);
            size_t to = (size_t)r * a.dim + i;
            if (i >= a.dim) continue; /* whole groups */
            a.y[to] = step == 0.0f ? 0.0f : td_e2m1_to_f32((uint8_t)q) * step;
            if (!a.codes.code) continue;
            if (i % 2 == 0) a.codes.code[to / 2] = (uint8_t)(q | next << 4);
            if (i % GROUP == 0) a.codes.scale[to / GROUP] = step == 0.0f ? 0 : b;
        }
    }
}

void TD_PLAIN(round_nvfp4)(const struct td_device *d, const struct td_round_nvfp4_args *a) {
    struct nvfp4 p = {.x = a->x, .x_row = a->x_row, .offset = a->offset};
    p.w = a->w[0].device;
    p.y = a->y;
    p.codes = a->codes;
    p.dim = a->dim;
    TD_LAUNCH(d, "round_nvfp4", round_nvfp4_rows, dim3(8, a->experts), THREADS, 0, p);
}

/* ---- window rows ---- */

static __global__ void store_rows(struct td_row_store_args a, struct td_kv_layout kv) {
    __shared__ float v[D], max[8];
    for (uint32_t i = threadIdx.x; i < D; i += THREADS)
        v[i] = a.kv[(size_t)blockIdx.x * D + i];
    __syncthreads();
    if (a.sim8) fp8_round(v, TD_KV_FP8_ROW_DIM, TD_QUANT_SIM8, max);
    store_row(v, kv.row_dtype, td_kv_dense_row(&kv, a.rows, blockIdx.x), max);
}

void TD_PLAIN(row_store)(const struct td_device *d, const struct td_row_store_args *a) {
    if (a->n) TD_LAUNCH(d, "row_store", store_rows, a->n, THREADS, 0, *a, *a->layout);
}

static __global__ void ring_rows(struct td_op_batch b, struct td_kv_layout kv, uint32_t layer,
                                 const void *rows) {
    uint32_t i = blockIdx.x, pos = b.row[i].pos;
    const struct td_op_run *run = &b.run[b.row[i].run];
    if (pos + TD_KV_WINDOW_ROWS < run->pos + run->n) return; /* a later row takes its place */
    struct td_kv_row to = td_kv_window_row(&kv, run->slot, layer, pos);
    struct td_kv_row from = td_kv_dense_row(&kv, rows, i);
    for (uint32_t c = threadIdx.x; c < kv.row_stride / 4; c += THREADS)
        ((uint32_t *)to.values)[c] = ((const uint32_t *)from.values)[c];
    if (to.scales && threadIdx.x < TD_KV_FP8_ROW_SCALES)
        to.scales[threadIdx.x] = from.scales[threadIdx.x];
}

void TD_PLAIN(ring_write)(const struct td_device *d, const struct td_ring_write_args *a) {
    const struct td_op_batch *b = a->batch;
    if (b->n)
        TD_LAUNCH(d, "ring_write", ring_rows, b->n, THREADS, 0, *b, *b->kv, a->layer, a->rows);
}

/* ---- compressors ---- */

struct shape {
    uint32_t d, width, ratio, ring;
    bool overlap;
};
struct compressor {
    struct td_compress_args a;
    struct td_op_batch b;
    struct td_kv_layout kv;
    struct shape s;
};

static struct shape shape_of(enum td_kv_family family) {
    struct shape csa = {TD_HEAD_DIM, TD_KV_CSA_STATE_DIM, TD_CSA_RATIO, TD_KV_CSA_RING, true};
    struct shape index = {TD_INDEX_DIM, TD_KV_INDEX_STATE_DIM, TD_CSA_RATIO, TD_KV_CSA_RING, true};
    struct shape hca = {TD_HEAD_DIM, TD_KV_HCA_STATE_DIM, TD_HCA_RATIO, TD_KV_HCA_RING, false};
    return family == TD_KV_CSA ? csa : family == TD_KV_INDEX ? index : hca;
}

static __device__ float *state_row(const struct compressor *c, const struct td_op_run *run,
                                   uint32_t pos) {
    if (c->a.family == TD_KV_CSA) return td_kv_csa_state(&c->kv, run->slot, c->a.layer, pos);
    if (c->a.family == TD_KV_INDEX) return td_kv_index_state(&c->kv, run->slot, c->a.layer, pos);
    return td_kv_hca_state(&c->kv, run->slot, c->a.layer, pos);
}

/* u of channel `at` of position pos; g lies *ret_g floats behind it. */
static __device__ const float *token_u(const struct compressor *c, const struct td_op_run *run,
                                       uint32_t pos, const float **ret_g) {
    if (pos >= run->pos) {
        size_t row = (size_t)(run->first + (pos - run->pos)) * c->s.width;
        *ret_g = c->a.g + row;
        return c->a.u + row;
    }
    const float *state = state_row(c, run, pos);
    *ret_g = state + c->s.width;
    return state;
}

static __global__ void add_ape(struct compressor c) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, i = at / c.s.width;
    if (i >= c.b.n) return;
    c.a.g[at] += c.a.ape[(size_t)(c.b.row[i].pos % c.s.ratio) * c.s.width + at % c.s.width];
}

/* Two passes over the window's rows per channel: maximum, then the sums. */
static __device__ float pool(const struct compressor *c, const struct td_op_run *run, uint32_t from,
                             uint32_t own, uint32_t pos, uint32_t channel) {
    float max = 0.0f, den = 0.0f, num = 0.0f;
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t t = from; t <= pos; t++) {
            const float *g, *u = token_u(c, run, t, &g);
            uint32_t at = channel + (t >= own ? c->s.width - c->s.d : 0);
            if (pass == 0) {
                max = t == from ? g[at] : g[at] > max ? g[at] : max;
            } else {
                float e = td_exp(g[at] - max);
                den = den + e;
                num = fmaf(e, u[at], num);
            }
        }
    return num / den;
}

static __global__ void close_windows(struct compressor c) {
    __shared__ float v[D], part[17], max[8];
    uint32_t t = threadIdx.x, pos = c.b.row[blockIdx.x].pos, w = pos / c.s.ratio;
    const struct td_op_run *run = &c.b.run[c.b.row[blockIdx.x].run];
    /* the whole block: nothing closes, or another rank has the page */
    if ((pos + 1) % c.s.ratio != 0 || !td_op_has_page(&c.b, pos / TD_KV_PAGE_TOKENS)) return;
    uint32_t own = c.s.ratio * w, from = c.s.overlap && w > 0 ? own - c.s.ratio : own;
    for (uint32_t i = t; i < c.s.d; i += THREADS)
        v[i] = pool(&c, run, from, own, pos, i);
    __syncthreads();
    float r = td_rms_factor(v, c.s.d, c.a.eps, part);
    for (uint32_t i = t; i < c.s.d; i += THREADS)
        v[i] = v[i] * r * c.a.norm[i];
    __syncthreads();
    if (t < TD_ROPE_DIM / 2) {
        float cos, sin;
        td_cos_sin((float)own * c.a.freq[t], &cos, &sin);
        td_rotate(v + c.s.d - TD_ROPE_DIM + 2 * t, cos, sin);
    }
    __syncthreads();
    if (c.a.family == TD_KV_INDEX) {
        if (c.a.hadamard) hadamard(v);
        if (c.a.sim4) sim4(v, max);
    } else if (c.a.sim8) {
        fp8_round(v, TD_KV_FP8_ROW_DIM, TD_QUANT_SIM8, max);
    }
    if (c.a.family == TD_KV_HCA) {
        uint32_t page = td_op_page(&c.b, run, w / TD_KV_HCA_PER_PAGE);
        store_row(v, c.kv.row_dtype,
                  td_kv_hca_row(&c.kv, c.b.pool, c.a.layer, page, w % TD_KV_HCA_PER_PAGE), max);
        return;
    }
    uint32_t page = td_op_page(&c.b, run, w / TD_KV_CSA_PER_PAGE), i = w % TD_KV_CSA_PER_PAGE;
    if (c.a.family == TD_KV_CSA)
        store_row(v, c.kv.row_dtype, td_kv_csa_row(&c.kv, c.b.pool, c.a.layer, page, i), max);
    else
        store_key(v, c.kv.key_dtype,
                  (uint8_t *)td_kv_index_key(&c.kv, c.b.pool, c.a.layer, page, i), max);
}

static __global__ void keep_state(struct compressor c) {
    uint32_t i = blockIdx.x, pos = c.b.row[i].pos;
    const struct td_op_run *run = &c.b.run[c.b.row[i].run];
    if (pos + c.s.ring < run->pos + run->n) return; /* a later row takes its place */
    float *state = state_row(&c, run, pos);
    for (uint32_t k = threadIdx.x; k < c.s.width; k += THREADS) {
        state[k] = c.a.u[(size_t)i * c.s.width + k];
        state[c.s.width + k] = c.a.g[(size_t)i * c.s.width + k];
    }
}

/* Three launches: entries are closed from rows and rings as they were before the step's own. */
void TD_PLAIN(compress)(const struct td_device *d, const struct td_compress_args *a) {
    struct compressor c = {.a = *a, .b = *a->batch, .kv = *a->batch->kv, .s = shape_of(a->family)};
    size_t all = (size_t)c.b.n * c.s.width;
    if (c.b.n == 0) return;
    TD_LAUNCH(d, "compress", add_ape, td_ceil(all, THREADS), THREADS, 0, c);
    TD_LAUNCH(d, "compress", close_windows, c.b.n, THREADS, 0, c);
    TD_LAUNCH(d, "compress", keep_state, c.b.n, THREADS, 0, c);
}

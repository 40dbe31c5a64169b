/* Ops on single rows: embedding, norm, gather, shard sums, rotation, hyper-connections. Every one
 * gives the reference's bits. */
#include "kernels/cuda/op.h"

/* TOGETHER: values that a thread asks for at once, or each would be a wait. */
enum { S = TD_HC_STREAMS, THREADS = 128, TOGETHER = 8 };

/* ---- embedding, gather, shard sums ---- */

enum { EMBED_EACH = 2 };
static __global__ void embed_rows(struct td_embed_args a, struct td_weight w) {
    uint32_t row = (uint32_t)a.ids[blockIdx.x] - a.first;
    float *y = a.y + (size_t)blockIdx.x * w.cols;
    for (uint32_t i = 0; i < EMBED_EACH; i++) {
        uint32_t c = (blockIdx.y * EMBED_EACH + i) * THREADS + threadIdx.x;
        if (c < w.cols) y[c] = row < w.rows ? td_weight_value(&w, row, c) : 0.0f;
    }
}

void TD_PLAIN(embed)(const struct td_device *d, const struct td_embed_args *a) {
    dim3 grid(a->n, td_ceil(a->w->cols, EMBED_EACH * THREADS));
    if (a->n) TD_LAUNCH(d, "embed", embed_rows, grid, THREADS, 0, *a, *a->w);
}

static __global__ void expand_rows(struct td_expand_args a) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    size_t i = at / a.hidden, c = at % a.hidden;
    if (i >= a.n) return;
    for (uint32_t s = 0; s < S; s++)
        a.x[(i * S + s) * a.hidden + c] = a.y[at];
}

void TD_PLAIN(expand)(const struct td_device *d, const struct td_expand_args *a) {
    size_t all = (size_t)a->n * a->hidden;
    if (all) TD_LAUNCH(d, "expand", expand_rows, td_ceil(all, THREADS), THREADS, 0, *a);
}

static __global__ void gather_rows(struct td_gather_args a) {
    const uint32_t *from = (const uint32_t *)a.x + (size_t)a.index[blockIdx.x] * a.dim;
    uint32_t *to = (uint32_t *)a.y + (size_t)blockIdx.x * a.dim;
    uint32_t first = blockIdx.y * TOGETHER * THREADS + threadIdx.x, v[TOGETHER];
#pragma unroll
    for (uint32_t i = 0; i < TOGETHER; i++)
        v[i] = first + i * THREADS < a.dim ? from[first + i * THREADS] : 0;
#pragma unroll
    for (uint32_t i = 0; i < TOGETHER; i++)
        if (first + i * THREADS < a.dim) to[first + i * THREADS] = v[i];
}

void TD_PLAIN(gather)(const struct td_device *d, const struct td_gather_args *a) {
    dim3 grid(a->n, td_ceil(a->dim, TOGETHER * THREADS));
    if (a->n) TD_LAUNCH(d, "gather", gather_rows, grid, THREADS, 0, *a);
}

template <uint32_t SHARDS> static __global__ void shard_sums(struct td_add_shards_args a) {
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, all = (size_t)a.n * a.dim;
    if (i >= all) return;
    auto shard = [&](uint32_t s) { return a.shard[s * all + i]; };
    a.y[i] = td_tree_sum<SHARDS>(shard, a.shards);
}

void TD_PLAIN(add_shards)(const struct td_device *d, const struct td_add_shards_args *a) {
    size_t all = (size_t)a->n * a->dim;
    if (!all) return;
    TD_LAUNCH(d, "add_shards", TD_BY_SHARDS(shard_sums, a->shards), td_ceil(all, THREADS), THREADS,
              0, *a);
}

/* ---- norm ---- */

enum { NORM_TILE = 1024, NORM_EACH = NORM_TILE / THREADS };

/* td_rms_factor of a row in device memory, by the whole block. The sixteen chains are what takes
 * time: each of their steps would wait for memory, so everyone brings the row to shared memory, the
 * next stretch while the chains walk through this one. */
static __device__ float row_factor(const float *x, uint32_t dim, float eps) {
    __shared__ float tile[2][NORM_TILE], part[17];
    float next[NORM_EACH], sum = 0.0f;
    uint32_t t = threadIdx.x, turn = 0;
    for (uint32_t i = 0; i < NORM_EACH; i++)
        next[i] = i * THREADS + t < dim ? x[i * THREADS + t] : 0.0f;
    for (uint32_t begin = 0; begin < dim; begin += NORM_TILE, turn ^= 1) {
        uint32_t rest = dim - begin < NORM_TILE ? dim - begin : (uint32_t)NORM_TILE;
#pragma unroll
        for (uint32_t i = 0; i < NORM_EACH; i++)
            tile[turn][i * THREADS + t] = next[i];
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < NORM_EACH; i++) {
            uint32_t at = begin + NORM_TILE + i * THREADS + t;
            next[i] = at < dim ? x[at] : 0.0f;
        }
        if (t < 16) {
#pragma unroll 16
            for (uint32_t i = t; i < rest; i += 16)
                sum = fmaf(tile[turn][i], tile[turn][i], sum);
        }
    }
    if (t < 16) part[t] = sum;
    __syncthreads();
    if (t == 0) part[16] = td_rms_of(part, dim, eps);
    __syncthreads();
    return part[16];
}

/* The same of a row that the block's threads hold, EACH vectors a thread: vector k of thread t is
 * number k * blockDim.x + t. Everything is asked for at once, and a chain lies in one stretch of
 * shared memory, [16][dim / 16 + 4] and 16 more, so that four of its steps are one load. */
static __host__ __device__ inline uint32_t held_floats(uint32_t dim) {
    return dim + 16 * 4 + 16;
}
template <int EACH>
static __device__ float held_factor(const float4 v[EACH], uint32_t dim, float eps, float *chain) {
    uint32_t t = threadIdx.x, len = dim / 16, pitch = len + 4;
    float *part = chain + 16 * pitch;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        uint32_t at = k * blockDim.x + t;
        float *to = chain + at % 4 * 4 * pitch + at / 4;
        if (4 * at >= dim) continue;
        to[0] = v[k].x;
        to[pitch] = v[k].y;
        to[2 * pitch] = v[k].z;
        to[3 * pitch] = v[k].w;
    }
    __syncthreads();
    if (t < 16) {
        float sum = 0.0f;
#pragma unroll 8
        for (uint32_t i = 0; i < len; i += 4) {
            float4 u = *(const float4 *)&chain[t * pitch + i];
            sum = fmaf(u.x, u.x, sum);
            sum = fmaf(u.y, u.y, sum);
            sum = fmaf(u.z, u.z, sum);
            sum = fmaf(u.w, u.w, sum);
        }
        part[t] = sum;
    }
    __syncthreads();
    return td_rms_of(part, dim, eps);
}

template <int EACH> static __global__ void norm_held(struct td_rms_norm_args a) {
    TD_SHARED(float, chain);
    const float4 *x = (const float4 *)(a.x + blockIdx.x * a.x_stride), *w = (const float4 *)a.w;
    float4 *y = (float4 *)(a.y + blockIdx.x * a.y_stride), v[EACH], u[EACH];
    uint32_t t = threadIdx.x;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
        bool there = 4 * (k * THREADS + t) < a.dim;
        v[k] = there ? x[k * THREADS + t] : zero;
        u[k] = there && w ? w[k * THREADS + t] : zero;
    }
    float r = held_factor<EACH>(v, a.dim, a.eps, chain);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        float4 o = {v[k].x * r, v[k].y * r, v[k].z * r, v[k].w * r};
        if (w) {
            o.x *= u[k].x;
            o.y *= u[k].y;
            o.z *= u[k].z;
            o.w *= u[k].w;
        }
        if (4 * (k * THREADS + t) < a.dim) y[k * THREADS + t] = o;
    }
}

/* y may be x: who writes a value has read it. */
static __global__ void norm_rows(struct td_rms_norm_args a) {
    const float *x = a.x + blockIdx.x * a.x_stride;
    float *y = a.y + blockIdx.x * a.y_stride;
    float r = row_factor(x, a.dim, a.eps);
    for (uint32_t from = threadIdx.x; from < a.dim; from += TOGETHER * THREADS) {
        float v[TOGETHER], w[TOGETHER];
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; i++) {
            uint32_t c = from + i * THREADS;
            v[i] = c < a.dim ? x[c] : 0.0f;
            w[i] = c < a.dim && a.w ? a.w[c] : 0.0f;
        }
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; i++)
            if (from + i * THREADS < a.dim)
                y[from + i * THREADS] = a.w ? v[i] * r * w[i] : v[i] * r;
    }
}

/* Short rows, of which there are many: half a warp has one, a lane a chain, and nobody waits for
 * anybody. The lanes' exchanges are td_rms_of's sums. */
template <int EACH> static __global__ void norm_short_rows(struct td_rms_norm_args a) {
    uint32_t lane = threadIdx.x % 16;
    uint32_t row = blockIdx.x * (THREADS / 16) + threadIdx.x / 16, from = row < a.n ? row : 0;
    const float *x = a.x + from * a.x_stride + lane;
    float *y = a.y + from * a.y_stride + lane;
    float v[EACH], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        v[i] = x[i * 16];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        sum = fmaf(v[i], v[i], sum);
    for (int by = 8; by > 0; by /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    float r = 1.0f / sqrtf(sum / (float)a.dim + a.eps);
    if (row >= a.n) return;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        y[i * 16] = a.w ? v[i] * r * a.w[lane + i * 16] : v[i] * r;
}

void TD_PLAIN(rms_norm)(const struct td_device *d, const struct td_rms_norm_args *a) {
    enum { VECTOR = 16, MOST = 8, SHORT = 512 };
    size_t places = (uintptr_t)a->x | (uintptr_t)a->y | (uintptr_t)a->w | 4 * a->x_stride | 4 * a->y_stride;
    size_t shared = held_floats(a->dim) * sizeof(float);
    if (a->n == 0) return;
    if (a->dim == SHORT)
        TD_LAUNCH(d, "rms_norm", norm_short_rows<SHORT / 16>, td_ceil(a->n, THREADS / 16), THREADS,
                  0, *a);
    else if (places % VECTOR || a->dim % 64 || a->dim > MOST * 4 * THREADS)
        TD_LAUNCH(d, "rms_norm", norm_rows, a->n, THREADS, 0, *a);
    else if (a->dim <= 4 * THREADS)
        TD_LAUNCH(d, "rms_norm", norm_held<1>, a->n, THREADS, shared, *a);
    else if (a->dim <= 2 * 4 * THREADS)
        TD_LAUNCH(d, "rms_norm", norm_held<2>, a->n, THREADS, shared, *a);
    else
        TD_LAUNCH(d, "rms_norm", norm_held<MOST>, a->n, THREADS, shared, *a);
}

/* ---- rotation ---- */

static __global__ void angle_rows(struct td_rope_angles_args a) {
    uint32_t at = blockIdx.x * THREADS + threadIdx.x, i = at / (TD_ROPE_DIM / 2);
    if (i >= a.n) return;
    float angle = (float)a.row[i].pos * a.freq[at % (TD_ROPE_DIM / 2)];
    td_cos_sin(angle, &a.cs[2 * at], &a.cs[2 * at + 1]);
}

void TD_PLAIN(rope_angles)(const struct td_device *d, const struct td_rope_angles_args *a) {
    uint32_t all = a->n * (TD_ROPE_DIM / 2);
    if (all) TD_LAUNCH(d, "rope_angles", angle_rows, td_ceil(all, THREADS), THREADS, 0, *a);
}

static __global__ void rotate_rows(struct td_rope_args a) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    size_t row = at / (TD_ROPE_DIM / 2);
    uint32_t j = (uint32_t)(at % (TD_ROPE_DIM / 2));
    if (row >= (size_t)a.n * a.heads) return;
    const float *cs = a.cs + row / a.heads * TD_ROPE_DIM + 2 * j;
    td_rotate(a.x + row * a.dim + a.dim - TD_ROPE_DIM + 2 * j, cs[0], a.inverse ? -cs[1] : cs[1]);
}

void TD_PLAIN(rope)(const struct td_device *d, const struct td_rope_args *a) {
    size_t all = (size_t)a->n * a->heads * (TD_ROPE_DIM / 2);
    if (all) TD_LAUNCH(d, "rope", rotate_rows, td_ceil(all, THREADS), THREADS, 0, *a);
}

/* ---- hyper-connections ---- */

/* y = sum over streams of weight[s] * x[s], by the whole block. */
static __device__ void mix_down(const float *x, const float *weight, float *y, uint32_t hidden) {
    for (uint32_t from = threadIdx.x; from < hidden; from += TOGETHER * THREADS) {
        float v[TOGETHER][S];
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; i++)
#pragma unroll
            for (uint32_t s = 0; s < S; s++)
                v[i][s] =
                    from + i * THREADS < hidden ? x[s * hidden + from + i * THREADS] : 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < TOGETHER; i++) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t s = 0; s < S; s++)
                sum = fmaf(weight[s], v[i][s], sum);
            if (from + i * THREADS < hidden) y[from + i * THREADS] = sum;
        }
    }
}

/* The first warp holds the 4 x 4, one value a thread, the upper half as idle copies; each thread adds
 * its row or column up in the reference's order. */
static __device__ float comb_of(float v, uint32_t iters, float eps) {
    uint32_t j = threadIdx.x / S % S, k = threadIdx.x % S;
    float o[S], sum = 0.0f;
    auto row = [&](uint32_t i) { return __shfl_sync(0xffffffffu, v, (int)(j * S + i)); };
    auto column = [&](uint32_t i) { return __shfl_sync(0xffffffffu, v, (int)(i * S + k)); };
    for (uint32_t i = 0; i < S; i++)
        o[i] = row(i);
    float max = o[0];
    for (uint32_t i = 1; i < S; i++)
        max = o[i] > max ? o[i] : max;
    v = td_exp(v - max);
    for (uint32_t i = 0; i < S; i++)
        o[i] = row(i);
    for (uint32_t i = 0; i < S; i++)
        sum += o[i];
    v = v / sum + eps;
    for (uint32_t it = 0; it < iters; it++) {
        if (it > 0) {
            for (uint32_t i = 0; i < S; i++)
                o[i] = row(i);
            v /= ((o[0] + o[1]) + o[2]) + o[3] + eps;
        }
        for (uint32_t i = 0; i < S; i++)
            o[i] = column(i);
        v /= ((o[0] + o[1]) + o[2]) + o[3] + eps;
    }
    return v;
}

static __global__ void pre_rows(struct td_hc_pre_args a) {
    __shared__ float pre[S];
    uint32_t i = blockIdx.x, t = threadIdx.x;
    const float *x = a.x + (size_t)i * S * a.hidden, *m = a.m + (size_t)i * 24;
    float r = row_factor(x, S * a.hidden, a.eps);
    if (t < 32) {
        if (t < S) {
            pre[t] = td_sigmoid(fmaf(m[t] * r, a.scale[0], a.base[t])) + a.hc_eps;
            a.post[(size_t)i * S + t] =
                2.0f * td_sigmoid(fmaf(m[S + t] * r, a.scale[1], a.base[S + t]));
        }
        uint32_t at = 2 * S + t % (S * S);
        float comb = comb_of(fmaf(m[at] * r, a.scale[2], a.base[at]), a.iters, a.hc_eps);
        if (t < S * S) a.comb[(size_t)i * S * S + t] = comb;
    }
    __syncthreads();
    mix_down(x, pre, a.y + (size_t)i * a.hidden, a.hidden);
}

/* Few rows: a block holds all streams of one, a thread two vectors of each, and waits for memory
 * once. Of many rows more fit a processor in the form above. */
enum { HELD = 2, HELD_MOST = 512 };

static bool held_fits(const struct td_device *d, uint32_t n, uint32_t hidden, const float *x,
                      const float *y) {
    return n <= 2 * (uint32_t)td_cuda_of(d)->processors && hidden % (32 * 4 * HELD) == 0 &&
           hidden <= HELD_MOST * 4 * HELD && ((uintptr_t)x | (uintptr_t)y) % 16 == 0 &&
           held_floats(S * hidden) * sizeof(float) + 1024 < td_cuda_of(d)->shared_max;
}

static __device__ void hold(const float *x, float4 v[HELD * S]) {
#pragma unroll
    for (int k = 0; k < HELD * S; k++)
        v[k] = ((const float4 *)x)[k * blockDim.x + threadIdx.x];
}

static __device__ void mix_held(const float4 v[HELD * S], const float *weight, float *y) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int s = 0; s < S; s++) {
            float4 u = v[s * HELD + k];
            sum.x = fmaf(weight[s], u.x, sum.x);
            sum.y = fmaf(weight[s], u.y, sum.y);
            sum.z = fmaf(weight[s], u.z, sum.z);
            sum.w = fmaf(weight[s], u.w, sum.w);
        }
        ((float4 *)y)[k * blockDim.x + threadIdx.x] = sum;
    }
}

static __global__ void __launch_bounds__(HELD_MOST) pre_held(struct td_hc_pre_args a) {
    TD_SHARED(float, chain);
    __shared__ float pre[S];
    uint32_t i = blockIdx.x, t = threadIdx.x, at = 2 * S + t % (S * S);
    const float *m = a.m + (size_t)i * 24;
    float4 v[HELD * S];
    hold(a.x + (size_t)i * S * a.hidden, v);
    float m_pre = m[t % S], m_post = m[S + t % S], m_comb = m[at], b_pre = a.base[t % S];
    float b_post = a.base[S + t % S], b_comb = a.base[at];
    float r = held_factor<HELD * S>(v, S * a.hidden, a.eps, chain);
    if (t < S) pre[t] = td_sigmoid(fmaf(m_pre * r, a.scale[0], b_pre)) + a.hc_eps;
    __syncthreads();
    mix_held(v, pre, a.y + (size_t)i * a.hidden);
    if (t >= 32) return;
    if (t < S) a.post[(size_t)i * S + t] = 2.0f * td_sigmoid(fmaf(m_post * r, a.scale[1], b_post));
    float comb = comb_of(fmaf(m_comb * r, a.scale[2], b_comb), a.iters, a.hc_eps);
    if (t < S * S) a.comb[(size_t)i * S * S + t] = comb;
}

void TD_PLAIN(hc_pre)(const struct td_device *d, const struct td_hc_pre_args *a) {
    size_t shared = held_floats(S * a->hidden) * sizeof(float);
    if (a->n == 0) return;
    if (!held_fits(d, a->n, a->hidden, a->x, a->y)) {
        TD_LAUNCH(d, "hc_pre", pre_rows, a->n, THREADS, 0, *a);
        return;
    }
    td_cuda_allow_shared(d, (const void *)pre_held, shared, "hc_pre");
    TD_LAUNCH(d, "hc_pre", pre_held, a->n, a->hidden / (4 * HELD), shared, *a);
}

static __global__ void post_rows(struct td_hc_post_args a) {
    size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    size_t i = at / a.hidden, c = at % a.hidden;
    if (i >= a.n) return;
    float *x = a.x + i * S * a.hidden + c, o = a.o[at], old[S];
    const float *post = a.post + i * S, *comb = a.comb + i * S * S;
    for (uint32_t j = 0; j < S; j++)
        old[j] = x[j * a.hidden];
    for (uint32_t k = 0; k < S; k++) {
        float sum = post[k] * o;
        for (uint32_t j = 0; j < S; j++)
            sum = fmaf(comb[S * j + k], old[j], sum);
        x[k * a.hidden] = sum;
    }
}

void TD_PLAIN(hc_post)(const struct td_device *d, const struct td_hc_post_args *a) {
    size_t all = (size_t)a->n * a->hidden;
    if (all) TD_LAUNCH(d, "hc_post", post_rows, td_ceil(all, THREADS), THREADS, 0, *a);
}

static __global__ void head_rows(struct td_hc_head_args a) {
    __shared__ float w[S];
    uint32_t i = blockIdx.x, t = threadIdx.x;
    const float *x = a.x + (size_t)i * S * a.hidden, *m = a.m + (size_t)i * S;
    float r = row_factor(x, S * a.hidden, a.eps);
    if (t < S) w[t] = td_sigmoid(fmaf(m[t] * r, a.scale[0], a.base[t])) + a.hc_eps;
    __syncthreads();
    mix_down(x, w, a.y + (size_t)i * a.hidden, a.hidden);
}

static __global__ void __launch_bounds__(HELD_MOST) head_held(struct td_hc_head_args a) {
    TD_SHARED(float, chain);
    __shared__ float w[S];
    uint32_t i = blockIdx.x, t = threadIdx.x;
    float4 v[HELD * S];
    hold(a.x + (size_t)i * S * a.hidden, v);
    float m = a.m[(size_t)i * S + t % S], base = a.base[t % S];
    float r = held_factor<HELD * S>(v, S * a.hidden, a.eps, chain);
    if (t < S) w[t] = td_sigmoid(fmaf(m * r, a.scale[0], base)) + a.hc_eps;
    __syncthreads();
    mix_held(v, w, a.y + (size_t)i * a.hidden);
}

void TD_PLAIN(hc_head)(const struct td_device *d, const struct td_hc_head_args *a) {
    size_t shared = held_floats(S * a->hidden) * sizeof(float);
    if (a->n == 0) return;
    if (!held_fits(d, a->n, a->hidden, a->x, a->y)) {
        TD_LAUNCH(d, "hc_head", head_rows, a->n, THREADS, 0, *a);
        return;
    }
    td_cuda_allow_shared(d, (const void *)head_held, shared, "hc_head");
    TD_LAUNCH(d, "hc_head", head_held, a->n, a->hidden / (4 * HELD), shared, *a);
}

/* Ops on single rows: embedding, norm, gather, shard sums, rotation, hyper-connections. Every one
 * gives the reference's bits. */
#include "kernels/cuda/op.h"

enum { S = TD_HC_STREAMS, THREADS = 128 };

/* ---- embedding, gather, shard sums ---- */

static __global__ void embed_rows(struct td_embed_args a, struct td_weight w) {
    uint32_t row = (uint32_t)a.ids[blockIdx.x] - a.first;
    float *y = a.y + (size_t)blockIdx.x * w.cols;
    for (uint32_t c = threadIdx.x; c < w.cols; c += THREADS)
        y[c] = row < w.rows ? td_weight_value(&w, row, c) : 0.0f;
}

void TD_PLAIN(embed)(const struct td_device *d, const struct td_embed_args *a) {
    if (a->n) TD_LAUNCH(d, "embed", embed_rows, a->n, THREADS, 0, *a, *a->w);
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
    for (uint32_t c = threadIdx.x; c < a.dim; c += THREADS)
        to[c] = from[c];
}

void TD_PLAIN(gather)(const struct td_device *d, const struct td_gather_args *a) {
    if (a->n) TD_LAUNCH(d, "gather", gather_rows, a->n, THREADS, 0, *a);
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

/* y may be x: who writes a value has read it, TOGETHER of them at once, or each would be a wait. */
enum { TOGETHER = 8 };
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
    enum { SHORT = 512 };
    if (a->n && a->dim == SHORT)
        TD_LAUNCH(d, "rms_norm", norm_short_rows<SHORT / 16>, td_ceil(a->n, THREADS / 16), THREADS,
                  0, *a);
    else if (a->n)
        TD_LAUNCH(d, "rms_norm", norm_rows, a->n, THREADS, 0, *a);
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

/* The first warp holds the 4 x 4 in shared memory, one value a thread, the upper half as idle
 * copies; each thread adds its row or column up in the reference's order. */
static __device__ void comb_of(float (*c)[S], uint32_t iters, float eps) {
    uint32_t j = threadIdx.x / S % S, k = threadIdx.x % S;
    float max = c[j][0], sum = 0.0f, v;
    for (uint32_t i = 1; i < S; i++)
        max = c[j][i] > max ? c[j][i] : max;
    v = td_exp(c[j][k] - max);
    __syncwarp();
    c[j][k] = v;
    __syncwarp();
    for (uint32_t i = 0; i < S; i++)
        sum += c[j][i];
    v = v / sum + eps;
    __syncwarp();
    c[j][k] = v;
    __syncwarp();
    for (uint32_t it = 0; it < iters; it++) {
        if (it > 0) {
            sum = ((c[j][0] + c[j][1]) + c[j][2]) + c[j][3] + eps;
            v /= sum;
            __syncwarp();
            c[j][k] = v;
            __syncwarp();
        }
        sum = ((c[0][k] + c[1][k]) + c[2][k]) + c[3][k] + eps;
        v /= sum;
        __syncwarp();
        c[j][k] = v;
        __syncwarp();
    }
}

static __global__ void pre_rows(struct td_hc_pre_args a) {
    __shared__ float pre[S], comb[S][S];
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
        comb[t / S % S][t % S] = fmaf(m[at] * r, a.scale[2], a.base[at]);
        __syncwarp();
        comb_of(comb, a.iters, a.hc_eps);
        if (t < S * S) a.comb[(size_t)i * S * S + t] = comb[t / S][t % S];
    }
    __syncthreads();
    mix_down(x, pre, a.y + (size_t)i * a.hidden, a.hidden);
}

void TD_PLAIN(hc_pre)(const struct td_device *d, const struct td_hc_pre_args *a) {
    if (a->n) TD_LAUNCH(d, "hc_pre", pre_rows, a->n, THREADS, 0, *a);
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

void TD_PLAIN(hc_head)(const struct td_device *d, const struct td_hc_head_args *a) {
    if (a->n) TD_LAUNCH(d, "hc_head", head_rows, a->n, THREADS, 0, *a);
}

/* Scalar forms of kernels/ref's arithmetic for the device: the same operations in the same order,
 * each correctly rounded, so a kernel that follows the reference's order gives its bits. (Sources
 * are compiled without contraction; divisions and square roots are the IEEE ones.) */
#ifndef TD_KERNELS_CUDA_NUM_H
#define TD_KERNELS_CUDA_NUM_H

#include "kernels/cuda/rt.h"
#include "kernels/model/numbers.h"

enum { TD_QUANT_SIM8 = 64, TD_QUANT_SIM4 = 32 };

/* kernels/ref/math.h: exp1 */
static __device__ inline float td_exp(float x) {
    const float magic = 12582912.0f;
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float t = fmaf(x, 0x1.715476p+0f, magic), n = t - magic;
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t k = (int32_t)td_f32_bits(t) - (int32_t)td_f32_bits(magic), half = k >> 1;
    float s1 = td_bits_f32((uint32_t)(half + 127) << 23);
    float s2 = td_bits_f32((uint32_t)(k - half + 127) << 23);
    return p * s1 * s2;
}

static __device__ inline float td_sigmoid(float x) {
    return 1.0f / (1.0f + td_exp(-x));
}

static __device__ inline float td_softplus(float x) {
    float z = td_exp(-fabsf(x)), s = z / (2.0f + z), q = s * s, p = 1.0f / 17.0f;
    for (int k = 15; k >= 1; k -= 2)
        p = fmaf(p, q, 1.0f / (float)k);
    float l = 2.0f * s * p;
    return x > 0 ? x + l : l;
}

/* kernels/ref/angle.h: cos_sin */
static __device__ inline void td_cos_sin(float angle, float *ret_cos, float *ret_sin) {
    double x = (double)angle, n = nearbyint(x * 0x1.45f306dc9c883p-1);
    double r = fma(n, -0x1.921fb54442d18p+0, x);
    r = fma(n, -0x1.1a62633145c07p-54, r);
    double q = r * r, s = -1.0 / 1307674368000.0, c = -1.0 / 87178291200.0;
    const double odd[] = {1.0 / 6227020800.0,
                          -1.0 / 39916800.0,
                          1.0 / 362880.0,
                          -1.0 / 5040.0,
                          1.0 / 120.0,
                          -1.0 / 6.0,
                          1.0};
    const double even[] = {1.0 / 479001600.0,
                           -1.0 / 3628800.0,
                           1.0 / 40320.0,
                           -1.0 / 720.0,
                           1.0 / 24.0,
                           -1.0 / 2.0,
                           1.0};
#pragma unroll
    for (int i = 0; i < 7; i++) {
        s = fma(s, q, odd[i]);
        c = fma(c, q, even[i]);
    }
    s *= r;
    int quarter = (int)((int64_t)n & 3);
    *ret_cos = (float)(quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s);
    *ret_sin = (float)(quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c);
}

/* Pair j of the rotated values: (u, v) by the angle (c, s). */
static __device__ inline void td_rotate(float *x, float c, float s) {
    float u = x[0], v = x[1];
    x[0] = fmaf(u, c, -(v * s));
    x[1] = fmaf(u, s, v * c);
}

/* ---- kernels/ref/quant.h ---- */

static __device__ inline float td_pow2_ceil(float v) {
    uint32_t u = td_f32_bits(v), e = (u >> 23) + ((u & 0x7fffffu) != 0);
    return td_bits_f32((e < 254u ? e : 254u) << 23);
}
static __device__ inline float td_fp8_scale(float max) {
    return td_pow2_ceil((max > 1e-4f ? max : 1e-4f) * (1.0f / TD_E4M3_MAX));
}
static __device__ inline float td_fp4_scale(float max) {
    return td_pow2_ceil((max > 0x1.8p-124f ? max : 0x1.8p-124f) * (1.0f / TD_E2M1_MAX));
}
/* |x|, or 0 for a NaN: what a maximum sees. */
static __device__ inline float td_magnitude(float x) {
    float a = td_bits_f32(td_f32_bits(x) & 0x7fffffffu);
    return a > 0.0f ? a : 0.0f;
}
static __device__ inline float td_e4m3_nearest(float x) {
    uint32_t sign = td_f32_bits(x) & 0x80000000u;
    float a = td_bits_f32(td_f32_bits(x) & 0x7fffffffu);
    a = a > TD_E4M3_MAX ? TD_E4M3_MAX : a;
    uint32_t m = td_f32_bits(a);
    m = (m + 0x7ffffu + ((m >> 20) & 1u)) & 0xfff00000u;
    float fine = (a + 0x1p14f) - 0x1p14f;
    float r = a < 0x1p-6f ? fine : td_bits_f32(m);
    return x != x ? x : td_bits_f32(td_f32_bits(r) | sign);
}
static __device__ inline uint8_t td_e8m0_byte(float s) {
    return (uint8_t)((td_f32_bits(s) >> 23) & 0xffu);
}

/* ---- one value of a stored row or key, kernels/ref/stored.h ---- */

static __device__ inline float td_row_value(struct td_kv_row r, enum td_kv_row_dtype type,
                                            uint32_t i) {
    if (type == TD_KV_ROW_FP32) return ((const float *)r.values)[i];
    if (type == TD_KV_ROW_BF16) return td_bf16_to_f32(((const uint16_t *)r.values)[i]);
    const uint8_t *v = (const uint8_t *)r.values;
    if (i < TD_KV_FP8_ROW_DIM)
        return td_e4m3_to_f32(v[i]) * td_e8m0_to_f32(r.scales[i / TD_QUANT_SIM8]);
    return td_bf16_to_f32(
        ((const uint16_t *)(const void *)(v + TD_KV_FP8_ROW_DIM))[i - TD_KV_FP8_ROW_DIM]);
}

static __device__ inline float td_key_value(const uint8_t *k, enum td_kv_key_dtype type,
                                            uint32_t i) {
    if (type == TD_KV_KEY_FP32) return ((const float *)(const void *)k)[i];
    if (type == TD_KV_KEY_BF16) return td_bf16_to_f32(((const uint16_t *)(const void *)k)[i]);
    if (type == TD_KV_KEY_FP8)
        return td_e4m3_to_f32(k[i]) * *(const float *)(const void *)(k + TD_KV_KEY_DIM);
    float s = td_e8m0_to_f32(k[TD_KV_KEY_DIM / 2 + i / TD_QUANT_SIM4]);
    return td_e2m1_to_f32((uint8_t)(k[i / 2] >> (i % 2 * 4) & 15u)) * s;
}

/* ---- one value of a stored weight, kernels/model/weight.c ---- */

static __device__ inline float td_weight_value(const struct td_weight *w, uint32_t r, uint32_t c) {
    size_t at = (size_t)r * w->cols + c;
    const uint8_t *data = (const uint8_t *)w->data, *scale = (const uint8_t *)w->scale;
    switch (w->format) {
    case TD_W_F32:
        return ((const float *)w->data)[at];
    case TD_W_BF16:
        return td_bf16_to_f32(((const uint16_t *)w->data)[at]);
    case TD_W_FP8_BLOCK:
        return td_e4m3_to_f32(data[at]) *
               td_e8m0_to_f32(scale[(size_t)(r / 128) * ((w->cols + 127) / 128) + c / 128]);
    case TD_W_FP4:
        return td_e2m1_to_f32((uint8_t)(data[at / 2] >> (c % 2 * 4) & 15u)) *
               td_e8m0_to_f32(scale[at / 32]);
    case TD_W_NVFP4:
        return td_e2m1_to_f32((uint8_t)(data[at / 2] >> (c % 2 * 4) & 15u)) *
               td_e4m3_to_f32(scale[at / 16]) * w->scale2;
    default:
        return 0.0f;
    }
}

/* ---- the tree sum of kernels/ops.h ---- */

/* Of leaf(0) .. leaf(n - 1), asked for in this order. N: n, so that everything stays in registers,
 * or 0 where it is not one of TD_BY_SHARDS'. */
template <uint32_t N, typename LEAF>
static __device__ inline float td_tree_sum(LEAF &leaf, uint32_t n, uint32_t first = 0) {
    if constexpr (N == 1) {
        return leaf(first);
    } else if constexpr (N > 1) {
        float low = td_tree_sum<N / 2>(leaf, n, first);
        return low + td_tree_sum<N - N / 2>(leaf, n, first + N / 2);
    } else {
        float sum[9]; /* those that wait for their second half: up to 256 leaves */
        uint32_t depth = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t lo = 0, hi = n, ends = 0; /* how many sums end with leaf i */
            while (hi - lo > 1) {
                uint32_t mid = lo + (hi - lo) / 2;
                ends = i < mid ? 0 : ends + 1;
                if (i < mid)
                    hi = mid;
                else
                    lo = mid;
            }
            sum[depth++] = leaf(i);
            for (; ends > 0; ends--, depth--)
                sum[depth - 2] += sum[depth - 1];
        }
        return sum[0];
    }
}
#define TD_BY_SHARDS(kernel, n)                                                                    \
    ((n) == 1   ? kernel<1>                                                                        \
     : (n) == 2 ? kernel<2>                                                                        \
     : (n) == 4 ? kernel<4>                                                                        \
     : (n) == 8 ? kernel<8>                                                                        \
                : kernel<0>)

/* ---- a block's sums ---- */

/* The factor of a norm from its sixteen chains. */
static __device__ inline float td_rms_of(const float *part, uint32_t dim, float eps) {
    float v[8];
    for (int i = 0; i < 8; i++)
        v[i] = part[i] + part[i + 8];
    float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], e = v[3] + v[7];
    return 1.0f / sqrtf(((a + c) + (b + e)) / (float)dim + eps);
}

/* The norm factor of x[0..dim-1] by a block of at least 16 threads: 1 / sqrt(lane sum / dim + eps).
 * `part` [17] is shared memory; the result is every thread's. */
static __device__ inline float td_rms_factor(const float *x, uint32_t dim, float eps, float *part) {
    uint32_t t = threadIdx.x;
    if (t < 16) {
        float sum = 0.0f;
        for (uint32_t i = t; i < dim; i += 16)
            sum = fmaf(x[i], x[i], sum);
        part[t] = sum;
    }
    __syncthreads();
    if (t == 0) part[16] = td_rms_of(part, dim, eps);
    __syncthreads();
    return part[16];
}

/* The greatest of `v` over the lanes of an aligned group of `width` (a power of two up to 32). */
static __device__ inline float td_group_max(float v, int width) {
    for (int m = width / 2; m > 0; m /= 2) {
        float o = __shfl_xor_sync(0xffffffffu, v, m);
        v = o > v ? o : v;
    }
    return v;
}

#endif

/* The elementary functions that the definitions need, one value at a time.
 *
 * Built from correctly rounded operations only, so results depend neither on the C library nor on
 * the instruction set, and a vector form gives the same bits lane by lane. */
#ifndef TD_KERNELS_REF_MATH_H
#define TD_KERNELS_REF_MATH_H

#include <math.h>
#include <stdint.h>

#include "kernels/model/numbers.h"

/* a when a > b, else b (so b when either is NaN). */
static inline float max1(float a, float b) {
    return a > b ? a : b;
}

/* e^x: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial of degree 7 in r by fmaf, scaled by 2^n
 * in two factors so that subnormal results and overflow come out by themselves. At most 2 ulp for
 * normal results; 0 below -104, infinity above 89; NaN for NaN. */
static inline float exp1(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    float t = fmaf(x, 0x1.715476p+0f, magic);
    float n = t - magic;
    float r = fmaf(n, -0x1.62e400p-1f, x); /* ln 2: high part with trailing zeros, low part */
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* Wrapping: of a NaN the bits do not matter. */
    int32_t k = (int32_t)(td_f32_bits(t) - td_f32_bits(magic)), half = k >> 1;
    float s1 = td_bits_f32((uint32_t)(half + 127) << 23);
    float s2 = td_bits_f32((uint32_t)(k - half + 127) << 23);
    return p * s1 * s2;
}

static inline float sigmoid1(float x) {
    return 1.0f / (1.0f + exp1(-x));
}

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|); log1p(z) = 2 atanh(s) with s = z / (2 + z) <= 1/3, its
 * odd series to s^17 (the next term is below 2^-32 of the sum). */
static inline float softplus1(float x) {
    float z = exp1(-fabsf(x));
    float s = z / (2.0f + z), q = s * s, p = 1.0f / 17.0f;
    for (int k = 15; k >= 1; k -= 2)
        p = fmaf(p, q, 1.0f / (float)k);
    float l = 2.0f * s * p;
    return x > 0 ? x + l : l;
}

/* The lane sum of x^2 (kernels/ops.h); n is a multiple of 16. */
static inline float lane_sum_squares(const float *x, uint32_t n) {
    float lane[16] = {0};
    for (uint32_t i = 0; i < n; i++)
        lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    for (uint32_t half = 8; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

/* 1 / sqrt(mean of x^2 + eps); dim is a multiple of 16. */
static inline float rms_factor(const float *x, uint32_t dim, float eps) {
    return 1.0f / sqrtf(lane_sum_squares(x, dim) / (float)dim + eps);
}

static inline void rms_norm_row(const float *x, float *y, const float *w, uint32_t dim, float eps) {
    float r = rms_factor(x, dim, eps);
    for (uint32_t i = 0; i < dim; i++)
        y[i] = w ? x[i] * r * w[i] : x[i] * r;
}

#endif

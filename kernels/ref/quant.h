/* The rounding steps of `ref` numerics (s.2): e4m3 and e2m1 with power-of-two scales, and the
 * Hadamard transform.
 *
 * FP8, per group of consecutive values: s = 2^ceil(log2(max(max|x|, 1e-4) * fp32(1/448))), x
 * becomes e4m3_rne(clamp(x / s, -448, 448)) * s. FP4, per group of 32: the same with floor 6 *
 * 2^-126, 1/6, e2m1 and 6. The power of two is read from the product's fp32 bits: its exponent,
 * plus one when the mantissa is not zero. Scales stop at 2^127. x / s is exact but where it is
 * subnormal, so it is computed as x * (1 / s).
 *
 * NVFP4 activations, per group of 16, with the linear's calibrated input_scale:
 * b = e4m3_rne((max|x| / 6) / input_scale), d = b * input_scale, x becomes
 * e2m1_rne(clamp(x / d, -6, 6)) * d, every step in fp32; a group whose d is 0 becomes zeros.
 *
 * NaN: an e4m3 NaN stays one; e2m1 has none, so it makes its whole group NaN by the scale. */
#ifndef TD_KERNELS_REF_QUANT_H
#define TD_KERNELS_REF_QUANT_H

#include <math.h>

#include "kernels/model/numbers.h"

enum { QUANT_SIM8 = 64, QUANT_SIM4 = 32, QUANT_NVFP4 = 16 }; /* group sizes */

/* The least power of two that is not below v; v is positive and normal, or infinite. */
static inline float pow2_ceil(float v) {
    uint32_t u = td_f32_bits(v), e = (u >> 23) + ((u & 0x7fffffu) != 0);
    return td_bits_f32((e < 254u ? e : 254u) << 23);
}

/* max |x|; NaNs count as nothing. */
static inline float max_abs(const float *x, uint32_t n) {
    float max = 0.0f;
    for (uint32_t i = 0; i < n; i++)
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    return max;
}

static inline float fp8_scale(float max) {
    return pow2_ceil((max > 1e-4f ? max : 1e-4f) * (1.0f / TD_E4M3_MAX));
}

static inline float fp4_scale(float max) {
    return pow2_ceil((max > 0x1.8p-124f ? max : 0x1.8p-124f) * (1.0f / TD_E2M1_MAX));
}

/* One group; y may be x. An e4m3 NaN is the input's own. */
static inline void fp8_round_group(const float *x, float *y, uint32_t n) {
    float scale = fp8_scale(max_abs(x, n)), inverse = 1.0f / scale;
    for (uint32_t i = 0; i < n; i++) {
        float v = x[i] * inverse;
        y[i] = (v == v ? td_e4m3_to_f32(td_f32_to_e4m3(v)) : v) * scale;
    }
}

/* Groups of `group`, the last one shorter when dim ends inside it. */
static inline void fp8_round(const float *x, float *y, uint32_t dim, uint32_t group) {
    for (uint32_t i = 0; i < dim; i += group)
        fp8_round_group(x + i, y + i, dim - i < group ? dim - i : group);
}

/* The scale of a group of FP4: NaN when one of its values is. */
static inline float fp4_group_scale(const float *x) {
    for (uint32_t i = 0; i < QUANT_SIM4; i++)
        if (x[i] != x[i]) return td_e8m0_to_f32(255);
    return fp4_scale(max_abs(x, QUANT_SIM4));
}

/* dim is a multiple of 32. In place. */
static inline void sim4(float *x, uint32_t dim) {
    for (uint32_t g = 0; g < dim; g += QUANT_SIM4) {
        float s = fp4_group_scale(x + g), inverse = 1.0f / s;
        for (uint32_t i = g; i < g + QUANT_SIM4; i++)
            x[i] = td_e2m1_to_f32(td_f32_to_e2m1(x[i] * inverse)) * s;
    }
}

/* The block scale b of one NVFP4 group: NaN when one of its values is. */
static inline uint8_t nvfp4_group_scale(const float *x, float input_scale) {
    for (uint32_t i = 0; i < QUANT_NVFP4; i++)
        if (x[i] != x[i]) return 0x7f;
    return td_f32_to_e4m3(max_abs(x, QUANT_NVFP4) / TD_E2M1_MAX / input_scale);
}

/* dim is a multiple of 16; y may be x. What y is made of to code [dim / 2] and scale [dim / 16],
 * unless code is NULL; the codes of a group with a NaN are 7. */
static inline void nvfp4_round(const float *x, float *y, uint32_t dim, float input_scale,
                               uint8_t *code, uint8_t *scale) {
    for (uint32_t g = 0; g < dim; g += QUANT_NVFP4) {
        uint8_t b = nvfp4_group_scale(x + g, input_scale), q[QUANT_NVFP4] = {0};
        float step = b == 0x7f ? td_e8m0_to_f32(255) : td_e4m3_to_f32(b) * input_scale;
        for (uint32_t i = 0; i < QUANT_NVFP4; i++) {
            if (step != 0.0f) q[i] = b == 0x7f ? 7 : td_f32_to_e2m1(x[g + i] / step);
            y[g + i] = step == 0.0f ? 0.0f : td_e2m1_to_f32(q[i]) * step;
        }
        if (!code) continue;
        for (uint32_t i = 0; i < QUANT_NVFP4; i += 2)
            code[(g + i) / 2] = (uint8_t)(q[i] | q[i + 1] << 4);
        scale[g / QUANT_NVFP4] = step == 0.0f ? 0 : b;
    }
}

/* y = 128^-0.5 H x, H in natural (Sylvester) order: butterflies of distance 1, 2, .. 64, then the
 * factor. In place, 128 values. */
static inline void hadamard128(float *x) {
    for (uint32_t h = 1; h < 128; h *= 2)
        for (uint32_t block = 0; block < 128; block += 2 * h)
            for (uint32_t i = block; i < block + h; i++) {
                float a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
    for (uint32_t i = 0; i < 128; i++)
        x[i] *= 0.08838834764831845f;
}

#endif

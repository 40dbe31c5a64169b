/* The rounding steps of `ref` numerics (s.2): e4m3 and e2m1 with power-of-two scales, and the
 * Hadamard transform.
 *
 * FP8, per group of consecutive values: s = 2^ceil(log2(max(max|x|, 1e-4) * fp32(1/448))), x
 * becomes e4m3_rne(clamp(x / s, -448, 448)) * s. FP4, per group of 32: the same with floor 6 *
 * 2^-126, 1/6, e2m1 and 6. The power of two is read from the product's fp32 bits: its exponent,
 * plus one when the mantissa is not zero. Scales stop at 2^127. x / s is exact but where it is
 * subnormal, so it is computed as x * (1 / s).
 *
 * NaN: an e4m3 NaN stays one; e2m1 has none, so it makes its whole group NaN by the scale. */
#ifndef TD_KERNELS_CPU_QUANT_H
#define TD_KERNELS_CPU_QUANT_H

#include "kernels/model/numbers.h"
#include "kernels/cpu/vec.h"

enum { QUANT_SIM8 = 64, QUANT_SIM4 = 32 }; /* group sizes */

/* The least power of two that is not below v; v is positive and normal, or infinite. */
TD_INLINE float pow2_ceil(float v) {
    uint32_t u = td_f32_bits(v), e = (u >> 23) + ((u & 0x7fffffu) != 0);
    return td_bits_f32((e < 254u ? e : 254u) << 23);
}

/* max |x|; NaNs count as nothing. n is a multiple of 8. */
TD_INLINE float max_abs(const float *x, uint32_t n) {
    v8 max = splat8(0.0f);
    for (uint32_t i = 0; i < n; i += 8)
        max = max8((v8)((u8)load8(x + i) & 0x7fffffffu), max);
    float m = max[0];
    for (int i = 1; i < 8; i++)
        m = max[i] > m ? max[i] : m;
    return m;
}

TD_INLINE float fp8_scale(float max) {
    return pow2_ceil((max > 1e-4f ? max : 1e-4f) * (1.0f / TD_E4M3_MAX));
}

TD_INLINE float fp4_scale(float max) {
    return pow2_ceil((max > 0x1.8p-124f ? max : 0x1.8p-124f) * (1.0f / TD_E2M1_MAX));
}

/* The e4m3 value nearest to x, ties to even, saturating: td_e4m3_to_f32(td_f32_to_e4m3(x)). */
TD_INLINE v8 e4m3_nearest8(v8 x) {
    u8 sign = (u8)x & 0x80000000u;
    v8 a = (v8)((u8)x & 0x7fffffffu);
    i8 nan = x != x;
    a = select8(a > splat8(TD_E4M3_MAX), splat8(TD_E4M3_MAX), a);
    u8 m = (u8)a;
    m = (m + 0x7ffffu + ((m >> 20) & 1u)) & 0xfff00000u;
    /* Below 2^-6 the grid is 2^-9, the distance of neighbours at 2^14. */
    v8 fine = (a + splat8(0x1p14f)) - splat8(0x1p14f);
    v8 r = select8(a < splat8(0x1p-6f), fine, (v8)m);
    return select8(nan, x, (v8)((u8)r | sign));
}

/* One group; y may be x. n is a multiple of 8. */
TD_INLINE void fp8_round_group(const float *x, float *y, uint32_t n) {
    float s = fp8_scale(max_abs(x, n));
    v8 scale = splat8(s), inverse = splat8(1.0f / s);
    for (uint32_t i = 0; i < n; i += 8)
        store8(y + i, e4m3_nearest8(load8(x + i) * inverse) * scale);
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

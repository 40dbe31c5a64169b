/* The FP8 rounding of kernels/ref/quant.h, eight values at a time. */
#ifndef TD_KERNELS_CPU_QUANT_H
#define TD_KERNELS_CPU_QUANT_H

#include "kernels/cpu/vec.h"
#include "kernels/ref/quant.h"

/* max |x|; NaNs count as nothing. n is a multiple of 8. */
TD_INLINE float max_abs8(const float *x, uint32_t n) {
    v8 max = splat8(0.0f);
    for (uint32_t i = 0; i < n; i += 8)
        max = max8((v8)((u8)load8(x + i) & 0x7fffffffu), max);
    float m = max[0];
    for (int i = 1; i < 8; i++)
        m = max[i] > m ? max[i] : m;
    return m;
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
TD_INLINE void fp8_round_group8(const float *x, float *y, uint32_t n) {
    float s = fp8_scale(max_abs8(x, n));
    v8 scale = splat8(s), inverse = splat8(1.0f / s);
    for (uint32_t i = 0; i < n; i += 8)
        store8(y + i, e4m3_nearest8(load8(x + i) * inverse) * scale);
}

/* Groups of `group`, the last one shorter when dim ends inside it. */
static inline void fp8_round8(const float *x, float *y, uint32_t dim, uint32_t group) {
    for (uint32_t i = 0; i < dim; i += group)
        fp8_round_group8(x + i, y + i, dim - i < group ? dim - i : group);
}

#endif

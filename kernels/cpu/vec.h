/* Eight floats side by side, and the few functions on them that the kernels need.
 *
 * Every operation is per lane and correctly rounded (or built from such), so a lane has the bits of
 * the scalar form in kernels/ref whatever the instruction set. */
#ifndef TD_KERNELS_CPU_VEC_H
#define TD_KERNELS_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__) && defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels/ref/math.h"

#define TD_INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

TD_INLINE v8 splat8(float x) {
    return (v8){x, x, x, x, x, x, x, x};
}

TD_INLINE v8 load8(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

TD_INLINE void store8(float *p, v8 v) {
    memcpy(p, &v, sizeof v);
}

/* Four floats from each. In registers: what is read back as a whole right after it was stored in
 * halves waits until the stores are done. */
TD_INLINE v8 join8(const float *lo, const float *hi) {
    float a __attribute__((vector_size(16))), b __attribute__((vector_size(16)));
    memcpy(&a, lo, sizeof a);
    memcpy(&b, hi, sizeof b);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* a * b + c, rounded once. */
TD_INLINE v8 fma8(v8 a, v8 b, v8 c) {
#if defined(__FMA__) && defined(__AVX2__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < 8; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Lane-wise mask ? a : b; mask lanes are all ones or zero, as comparisons give. */
TD_INLINE v8 select8(i8 mask, v8 a, v8 b) {
    return (v8)((mask & (i8)a) | (~mask & (i8)b));
}

TD_INLINE u8 select_u8(u8 mask, u8 a, u8 b) {
    return (mask & a) | (~mask & b);
}

/* a when a > b, else b (so b when either is NaN). */
TD_INLINE v8 max8(v8 a, v8 b) {
    return select8(a > b, a, b);
}

/* Lanes i and i+4, i and i+2, i and i+1 added, in this order. */
TD_INLINE float sum8(v8 v) {
    float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
    return (a + c) + (b + d);
}

/* exp1 of kernels/ref/math.h, lane by lane. */
TD_INLINE v8 exp8(v8 x) {
    const v8 magic = splat8(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    x = select8(x > splat8(89.0f), splat8(89.0f), x);
    x = select8(x < splat8(-104.0f), splat8(-104.0f), x);
    v8 t = fma8(x, splat8(0x1.715476p+0f), magic);
    v8 n = t - magic;
    v8 r = fma8(n, splat8(-0x1.62e400p-1f), x); /* ln 2: high part with trailing zeros, low part */
    r = fma8(n, splat8(-0x1.7f7d1cp-20f), r);
    v8 p = splat8(1.0f / 5040.0f);
    p = fma8(p, r, splat8(1.0f / 720.0f));
    p = fma8(p, r, splat8(1.0f / 120.0f));
    p = fma8(p, r, splat8(1.0f / 24.0f));
    p = fma8(p, r, splat8(1.0f / 6.0f));
    p = fma8(p, r, splat8(0.5f));
    p = fma8(p, r, splat8(1.0f));
    p = fma8(p, r, splat8(1.0f));
    i8 k = (i8)t - (i8)magic;
    i8 half = k >> 1;
    v8 s1 = (v8)((half + 127) << 23), s2 = (v8)((k - half + 127) << 23);
    return p * s1 * s2;
}

TD_INLINE v8 sigmoid8(v8 x) {
    return splat8(1.0f) / (splat8(1.0f) + exp8(-x));
}

#endif

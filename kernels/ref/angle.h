/* cos and sin of an fp32 angle, and the rotation of one vector.
 *
 * The angle pos * freq is rounded to fp32 (s.3) and may be a million radians; its cosine is taken
 * in double with full reduction and rounded once, so it is the correctly rounded value in all but
 * a few cases in 10^8 and does not depend on the C library. */
#ifndef TD_KERNELS_REF_ANGLE_H
#define TD_KERNELS_REF_ANGLE_H

#include <math.h>
#include <stdbool.h>

#include "kernels/ops.h"

/* |angle| <= 2^21. */
static inline void cos_sin(float angle, float *ret_cos, float *ret_sin) {
    double x = (double)angle;
    double n = nearbyint(x * 0x1.45f306dc9c883p-1); /* 2 / pi */
    double r = fma(n, -0x1.921fb54442d18p+0, x);    /* pi / 2, high and low part */
    r = fma(n, -0x1.1a62633145c07p-54, r);
    double q = r * r;
    double s = -1.0 / 1307674368000.0, c = -1.0 / 87178291200.0; /* 1/15!, 1/14! */
    static const double odd[] = {1.0 / 6227020800.0,
                                 -1.0 / 39916800.0,
                                 1.0 / 362880.0,
                                 -1.0 / 5040.0,
                                 1.0 / 120.0,
                                 -1.0 / 6.0,
                                 1.0};
    static const double even[] = {1.0 / 479001600.0,
                                  -1.0 / 3628800.0,
                                  1.0 / 40320.0,
                                  -1.0 / 720.0,
                                  1.0 / 24.0,
                                  -1.0 / 2.0,
                                  1.0};
    for (int i = 0; i < 7; i++) {
        s = fma(s, q, odd[i]);
        c = fma(c, q, even[i]);
    }
    s *= r;
    switch ((int64_t)n & 3) {
    case 0:
        *ret_cos = (float)c;
        *ret_sin = (float)s;
        break;
    case 1:
        *ret_cos = (float)-s;
        *ret_sin = (float)c;
        break;
    case 2:
        *ret_cos = (float)-c;
        *ret_sin = (float)-s;
        break;
    default:
        *ret_cos = (float)s;
        *ret_sin = (float)-c;
        break;
    }
}

/* cs [32][2] of position pos. */
static inline void rope_angles_row(uint32_t pos, const float *freq, float *cs) {
    for (uint32_t j = 0; j < TD_ROPE_DIM / 2; j++)
        cos_sin((float)pos * freq[j], &cs[2 * j], &cs[2 * j + 1]);
}

/* x: the 64 rotated values. */
static inline void rope_row(float *x, const float *cs, bool inverse) {
    for (uint32_t j = 0; j < TD_ROPE_DIM / 2; j++) {
        float c = cs[2 * j], s = inverse ? -cs[2 * j + 1] : cs[2 * j + 1];
        float u = x[2 * j], v = x[2 * j + 1];
        x[2 * j] = fmaf(u, c, -(v * s));
        x[2 * j + 1] = fmaf(u, s, v * c);
    }
}

#endif

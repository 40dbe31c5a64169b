/* The lane sum and the norm of one row, for the norm op and for ops that normalise inside. */
#ifndef TD_KERNELS_CPU_NORM_H
#define TD_KERNELS_CPU_NORM_H

#include "kernels/cpu/vec.h"

/* 1 / sqrt(mean of x^2 + eps); dim is a multiple of 16. */
static inline float rms_factor8(const float *x, uint32_t dim, float eps) {
    v8 a = splat8(0.0f), b = splat8(0.0f);
    for (uint32_t i = 0; i < dim; i += 16) {
        v8 u = load8(x + i), v = load8(x + i + 8);
        a = fma8(u, u, a);
        b = fma8(v, v, b);
    }
    return 1.0f / sqrtf(sum8(a + b) / (float)dim + eps);
}

static inline void rms_norm_row8(const float *x, float *y, const float *w, uint32_t dim,
                                 float eps) {
    v8 r = splat8(rms_factor8(x, dim, eps));
    for (uint32_t i = 0; i < dim; i += 8) {
        v8 v = load8(x + i) * r;
        store8(y + i, w ? v * load8(w + i) : v);
    }
}

#endif

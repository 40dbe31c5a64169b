/* The block sum and the tree sum of kernels/ops.h, as they are written there. */
#ifndef TD_KERNELS_REF_SUM_H
#define TD_KERNELS_REF_SUM_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

/* Of x[k] * w[k], n products; steps are the distances of neighbours in floats. */
static inline float block_sum(const float *x, size_t x_step, const float *w, size_t w_step,
                              uint32_t n) {
    float total = 0.0f;
    for (uint32_t begin = 0; begin < n; begin += TD_BLOCK) {
        float chain = 0.0f;
        for (uint32_t k = begin; k < n && k < begin + TD_BLOCK; k++)
            chain = fmaf(x[k * x_step], w[k * w_step], chain);
        total = begin == 0 ? chain : total + chain;
    }
    return total;
}

/* Of x[0], x[step], ..., n values. */
static inline float tree_sum(const float *x, size_t step, uint32_t n) {
    return n == 1 ? *x : tree_sum(x, step, n / 2) + tree_sum(x + n / 2 * step, step, n - n / 2);
}

#endif

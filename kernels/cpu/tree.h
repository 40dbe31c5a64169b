/* The tree sum of kernels/ops.h, eight columns at a time. */
#ifndef TD_KERNELS_CPU_TREE_H
#define TD_KERNELS_CPU_TREE_H

#include "kernels/cpu/vec.h"
#include "kernels/ref/sum.h"

/* Of n vectors, `step` floats apart. */
static v8 tree_sum8(const float *x, size_t step, uint32_t n) {
    if (n == 1) return load8(x);
    if (n == 2) return load8(x) + load8(x + step);
    return tree_sum8(x, step, n / 2) + tree_sum8(x + n / 2 * step, step, n - n / 2);
}

#endif

/* Names of the definitions: td_linear_ref and so on. */
#ifndef TD_KERNELS_REF_OP_H
#define TD_KERNELS_REF_OP_H

#include "kernels/ops.h"

#define TD_OP(op) td_##op##_ref

#define X(op) void TD_OP(op)(const struct td_device *d, const struct td_##op##_args *a);
TD_OPS_MAP(X)
#undef X

static inline float *op_scratch(const struct td_device *d, uint32_t thread) {
    return (float *)(void *)(d->scratch + (size_t)thread * d->scratch_stride);
}

#endif

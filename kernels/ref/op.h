/* Names of the kernels by what they are built for: td_linear_ref here, td_linear_avx2 where the
 * build sets TD_ISA (kernels/cpu, and the definitions that are fast enough as they stand). */
#ifndef TD_KERNELS_REF_OP_H
#define TD_KERNELS_REF_OP_H

#include "kernels/ops.h"

#ifndef TD_ISA
#define TD_ISA ref
#endif

#define TD_ISA_PASTE2(op, isa) td_##op##_##isa
#define TD_ISA_PASTE(op, isa) TD_ISA_PASTE2(op, isa)
#define TD_OP(op) TD_ISA_PASTE(op, TD_ISA)

#define X(op) void TD_OP(op)(const struct td_device *d, const struct td_##op##_args *a);
TD_OPS_MAP(X)
#undef X

static inline float *op_scratch(const struct td_device *d, uint32_t thread) {
    return (float *)(void *)(d->scratch + (size_t)thread * d->scratch_stride);
}

#endif

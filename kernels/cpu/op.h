/* Names of the fast kernels: each source here is compiled once per instruction set, and TD_ISA, set
 * by the build, tells the copies apart: td_linear_avx2 and so on. */
#ifndef TD_KERNELS_CPU_OP_H
#define TD_KERNELS_CPU_OP_H

#include "kernels/ops.h"
#include "kernels/cpu/vec.h"

#define TD_ISA_PASTE2(op, isa) td_##op##_##isa
#define TD_ISA_PASTE(op, isa) TD_ISA_PASTE2(op, isa)
#define TD_OP(op) TD_ISA_PASTE(op, TD_ISA)

#define X(op) void TD_OP(op)(const struct td_device *d, const struct td_##op##_args *a);
TD_OPS_MAP(X)
#undef X

TD_INLINE float *op_scratch(const struct td_device *d, uint32_t thread) {
    return (float *)(void *)(d->scratch + (size_t)thread * d->scratch_stride);
}

#endif

/* Names of the kernels' entry points: plain ones follow the reference's order of summation to the
 * bit; fast ones are this device's own definition. */
#ifndef TD_KERNELS_CUDA_OP_H
#define TD_KERNELS_CUDA_OP_H

#include "kernels/cuda/num.h"

#ifdef TD_CUDA_EMULATED
#define TD_PLAIN(op) td_emulated_plain_##op
#define TD_FAST(op) td_emulated_fast_##op
#else
#define TD_PLAIN(op) td_cuda_plain_##op
#define TD_FAST(op) td_cuda_fast_##op
#endif

extern "C" {
#define X(op) void TD_PLAIN(op)(const struct td_device *d, const struct td_##op##_args *a);
TD_OPS_MAP(X)
#undef X

/* Ops with a fast form. */
#define TD_FAST_MAP(X)                                                                             \
    X(linear)                                                                                      \
    X(expert_linear)                                                                               \
    X(index)                                                                                       \
    X(attend)                                                                                      \
    X(attend_part)
#define X(op) void TD_FAST(op)(const struct td_device *d, const struct td_##op##_args *a);
TD_FAST_MAP(X)
#undef X

/* Wire blocks (td_backend). */
void TD_FAST(pack)(struct td_device *d, const struct td_wire_rows *r);
void TD_FAST(unpack)(struct td_device *d, const struct td_wire_rows *r);
void TD_FAST(sum)(struct td_device *d, const struct td_sums *s);

/* Ranks (td_backend). */
td_status TD_FAST(join)(struct td_device *d, size_t words, struct td_error *err);
void TD_FAST(leave)(struct td_device *d);
void TD_FAST(all_reduce)(const struct td_device *d, const struct td_all_reduce_args *a);
void TD_FAST(all_gather)(const struct td_device *d, const struct td_all_gather_args *a);
void TD_FAST(all_to_all)(const struct td_device *d, const struct td_all_to_all_args *a);
void TD_FAST(break_off)(struct td_device *d);
}

#endif

/* How much ranks tell each other in a step: the forward pass walked through with collectives that
 * count and ops that do nothing. */
#ifndef TD_KERNELS_EXCHANGED_H
#define TD_KERNELS_EXCHANGED_H

#include "kernels/forward.h"

/* Bytes that reach a rank in the step that `f` is set to; f is planned (with td_packed_plan), its
 * buffers are not touched and may lie nowhere. */
TD_MUST_USE td_status td_forward_exchanged(const struct td_forward *f, uint64_t *ret,
                                           struct td_error *err);

#endif

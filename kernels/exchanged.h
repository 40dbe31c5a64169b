/* How much ranks tell each other in a step: the forward pass walked through with collectives that
 * count and ops that do nothing. */
#ifndef TD_KERNELS_EXCHANGED_H
#define TD_KERNELS_EXCHANGED_H

#include "kernels/forward.h"

/* Bytes that reach a rank in the step that `f` is set to; f is planned, its buffers are not touched
 * and may lie nowhere. */
uint64_t td_forward_exchanged(const struct td_forward *f);

#endif

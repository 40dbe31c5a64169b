/* A worker's own copy of what a request's sampling borrows from its message (td_guide, and what was
 * said before): one block per request, taken when it comes and given back when its last sequence
 * has gone. */
#ifndef TD_KERNELS_GUIDE_H
#define TD_KERNELS_GUIDE_H

#include "common/base/sampling.h"
#include "common/base/status.h"

/* Replaces everything *s borrows by a copy. s->guide is NULL afterwards exactly when there was
 * nothing to copy. NO_MEMORY leaves *s as it was. */
TD_MUST_USE td_status td_guide_take(struct td_sampling *s, struct td_error *err);
/* The same with the prompt: *ids [n], NULL stays NULL, becomes a copy that the caller frees. All of
 * it or nothing. */
TD_MUST_USE td_status td_guide_take_prompt(struct td_sampling *s, const int32_t **ids, uint32_t n,
                                           struct td_error *err);
/* The guide of a sampling that was taken; NULL is fine. */
void td_guide_give(const struct td_guide *g);

#endif

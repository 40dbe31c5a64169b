/* A thread that does one job at a time beside its owner: what the host prepares while a step
 * computes. */
#ifndef TD_KERNELS_ASIDE_H
#define TD_KERNELS_ASIDE_H

#include "common/base/status.h"

struct td_aside;

TD_MUST_USE td_status td_aside_create(struct td_aside **ret, struct td_error *err);
/* No job may be under way; NULL is fine. */
void td_aside_destroy(struct td_aside *a);

/* `fn` runs there until it returns; the last one has been waited for. */
void td_aside_start(struct td_aside *a, void (*fn)(void *), void *arg);
/* Until it has returned; at once when nothing was started. */
void td_aside_wait(struct td_aside *a);

#endif

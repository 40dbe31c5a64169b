/* A small fixed pool for data-parallel loops inside one engine step.
 *
 * A loop has `items` independent pieces addressed by absolute index; which thread does a piece,
 * and in which order pieces are done, never changes a result. Threads are taken once. Between
 * loops workers spin briefly and then sleep, so an idle engine costs nothing. */
#ifndef TD_KERNELS_THREADS_H
#define TD_KERNELS_THREADS_H

#include <stdint.h>

#include "common/base/status.h"

enum { TD_MAX_THREADS = 256 };

struct td_threads;

/* Does pieces begin..end-1. `thread` (0..count-1) names the caller's private scratch. */
typedef void td_loop_fn(const void *arg, uint32_t begin, uint32_t end, uint32_t thread);

/* `count` threads including the one that calls td_threads_run; 1..TD_MAX_THREADS. */
TD_MUST_USE td_status td_threads_create(uint32_t count, struct td_threads **ret,
                                        struct td_error *err);
/* Joins the workers; NULL is fine. */
void td_threads_destroy(struct td_threads *t);

uint32_t td_threads_count(const struct td_threads *t);

/* Returns when all pieces are done. One caller at a time; fn must not call it again. */
void td_threads_run(struct td_threads *t, td_loop_fn *fn, const void *arg, uint32_t items);

#endif

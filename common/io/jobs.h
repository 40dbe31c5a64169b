/* One dedicated thread that runs submitted jobs in order and reports each on the loop: where an
 * engine steps while the loop serves sockets. The queue is fixed; nothing is allocated per job. */
#ifndef TD_COMMON_IO_JOBS_H
#define TD_COMMON_IO_JOBS_H

#include <stdint.h>
#include <uv.h>

#include "common/base/status.h"

struct td_jobs;
typedef void td_job_fn(void *user);

/* `capacity` jobs may be submitted and not yet reported. `name` (<= 15 characters) is the thread's
 * name. */
TD_MUST_USE td_status td_jobs_create(uv_loop_t *loop, uint32_t capacity, const char *name,
                                     struct td_jobs **ret, struct td_error *err);

/* `run` on the thread, then `done` (may be NULL) on the loop, both in the order of submission.
 * Called on the loop's thread only. TD_BUSY: `capacity` jobs are pending. What `user` points to
 * belongs to the job until `done`: the hand-over is a full memory barrier both ways. */
TD_MUST_USE td_status td_jobs_submit(struct td_jobs *j, td_job_fn *run, td_job_fn *done,
                                     void *user);
/* Submitted and not yet reported. */
uint32_t td_jobs_pending(const struct td_jobs *j);

/* Waits for the job that is running, drops those not started, calls no `done` any more. NULL is
 * fine. */
void td_jobs_destroy(struct td_jobs *j);

#endif

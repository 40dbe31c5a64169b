/* Small helpers around a libuv loop: one-shot and repeating timers, termination signals, and
 * running a loop until every closed handle is gone. */
#ifndef TD_COMMON_IO_LOOP_H
#define TD_COMMON_IO_LOOP_H

#include <stdint.h>
#include <uv.h>

#include "common/base/status.h"

/* ---- timers ---- */

struct td_timer;
typedef void td_timer_fn(void *user);

TD_MUST_USE td_status td_timer_create(uv_loop_t *loop, td_timer_fn *fn, void *user,
                                      struct td_timer **ret);
/* Each of these replaces what was set before. */
void td_timer_after(struct td_timer *t, uint64_t delay_ms);
void td_timer_every(struct td_timer *t, uint64_t period_ms);
/* At td_now_ns() == `at_ns`, rounded up to a millisecond; the past means the next turn. This is
 * what carries out a pure machine's "set deadline". */
void td_timer_at(struct td_timer *t, uint64_t at_ns);
void td_timer_stop(struct td_timer *t);
/* No callback comes any more; the memory goes with the loop's close callback. NULL is fine. */
void td_timer_destroy(struct td_timer *t);

/* ---- signals ---- */

struct td_signals;
/* SIGTERM, SIGINT and SIGHUP call `fn` on the loop, each time; SIGPIPE is ignored for the process. */
typedef void td_signal_fn(void *user, int signum);
TD_MUST_USE td_status td_signals_create(uv_loop_t *loop, td_signal_fn *fn, void *user,
                                        struct td_signals **ret);
void td_signals_destroy(struct td_signals *s);

/* ---- end ---- */

/* Runs the loop until nothing is active or closing, then closes it. TD_BUSY: something is still
 * open after `timeout_ms` (a leak of a handle). */
TD_MUST_USE td_status td_loop_drain(uv_loop_t *loop, uint64_t timeout_ms);

#endif

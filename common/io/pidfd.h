/* Proof that a process on this host is gone: the loop watches a pidfd. A landing slab that was
 * granted to a peer may be used again once the peer's exit is proven. */
#ifndef TD_COMMON_IO_PIDFD_H
#define TD_COMMON_IO_PIDFD_H

#include <sys/types.h>
#include <uv.h>

#include "common/base/status.h"

struct td_pidfd;
typedef void td_exit_fn(void *user, pid_t pid);

/* `fn` comes once, from the loop, when `pid` has exited (a zombie counts as exited). TD_NOT_FOUND:
 * no such process now, which is the same proof; no callback follows. The pid must be known to be
 * the peer's at the time of the call (Unix socket credentials, or a live heartbeat). */
TD_MUST_USE td_status td_pidfd_watch(uv_loop_t *loop, pid_t pid, td_exit_fn *fn, void *user,
                                     struct td_pidfd **ret, struct td_error *err);
/* Stops watching, also after `fn` came. NULL is fine. */
void td_pidfd_destroy(struct td_pidfd *p);

#endif

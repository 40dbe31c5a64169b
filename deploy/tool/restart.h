/* Restarting one process of a cluster, which is also a step of restarting all of them. */
#ifndef TD_DEPLOY_TOOL_RESTART_H
#define TD_DEPLOY_TOOL_RESTART_H

#include "deploy/tool/target.h"

/* Replaces t's process, waits until it serves again and says so on stdout. `drain`: only when it
 * has no request left; if that does not come it is resumed and not restarted, also when
 * td_watch_interrupts() holds and the wait is interrupted. timeout_s: of draining and of serving
 * each; -1: 600 s and 120 s. TIMEOUT, PEER_LOST, CANCELLED: see watch.h; INTERNAL: it did not
 * start. */
TD_MUST_USE td_status td_restart(const struct td_target *t, bool drain, long timeout_s,
                                 struct td_error *err);

#endif

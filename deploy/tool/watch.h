/* What the commands that restart and drain want to know of a running cluster, from /v1/cluster. */
#ifndef TD_DEPLOY_TOOL_WATCH_H
#define TD_DEPLOY_TOOL_WATCH_H

#include <stdbool.h>

#include "deploy/tool/target.h"

struct td_watched {
    bool answers; /* the router */
    bool present; /* the worker is linked */
    char name[TD_PROC_NAME_MAX];
    char epoch[24];
    long pid, requests;
    bool draining;
    bool serves; /* a pair with it is proven, or there is none to prove */
};

/* One look at worker t->name. */
void td_watch_worker(const struct td_target *t, struct td_watched *ret);
/* One look at every linked worker: `ret` holds up to `cap` of them, decode workers first,
 * by number. TOO_LONG: there are more; else what asking the router may fail with. */
TD_MUST_USE td_status td_watch_fleet(const struct td_target *t, struct td_watched *ret, int cap,
                                     int *ret_n, struct td_error *err);

/* From here on ^C and SIGTERM end the waits below with CANCELLED instead of the process, so that
 * what was begun can be taken back. */
void td_watch_interrupts(void);
/* Between two looks. CANCELLED: see above. */
TD_MUST_USE td_status td_watch_a_little(struct td_error *err);

/* Tells the router to drain (or resume) t->name. */
TD_MUST_USE td_status td_watch_drain(const struct td_target *t, bool draining,
                                     struct td_error *err);
/* Waits until a draining worker has no request. TIMEOUT; PEER_LOST: it left. */
TD_MUST_USE td_status td_watch_until_idle(const struct td_target *t, long timeout_s,
                                          struct td_error *err);
/* Waits until another process than `old_epoch` serves as t->name, or for the router until /ready.
 * *ret_router: it answers; without a router a worker is as far as it can get when it runs. */
TD_MUST_USE td_status td_watch_until_serving(const struct td_target *t, const char *old_epoch,
                                             long timeout_s, bool *ret_router,
                                             struct td_error *err);

#endif

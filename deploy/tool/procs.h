/* The processes of a local cluster, known by pid files in run_dir. A pid file holds the pid and
 * the process's start time, so a recycled pid is never taken for ours. */
#ifndef TD_DEPLOY_TOOL_PROCS_H
#define TD_DEPLOY_TOOL_PROCS_H

#include <stdbool.h>
#include <sys/types.h>

#include "common/base/config.h"

enum {
    TD_PROCS_MAX = 1 + 64 + 64,
    TD_PROC_NAME_MAX = 32,
    TD_STOP_GRACE_MS = 10000, /* more than a role's own bound for an orderly end */
};

struct td_proc {
    char name[TD_PROC_NAME_MAX]; /* "router", "prefill@0", "decode@0" */
    char role[16], instance[16];
};

struct td_procs {
    char run_dir[TD_CONFIG_STRING_MAX];
    struct td_proc proc[TD_PROCS_MAX]; /* in starting order */
    int n;
};

/* The cluster that `c` describes. */
void td_procs_init(struct td_procs *p, const struct td_config *c);
/* Who starts processes of this run_dir holds its lock meanwhile: two that look at the same time
 * find nothing running, and both would start. BUSY: somebody else does. The lock ends with
 * td_procs_unlock() or with this process; what is started does not inherit it. */
TD_MUST_USE td_status td_procs_lock(const struct td_procs *p, int *ret_fd, struct td_error *err);
void td_procs_unlock(int fd);
/* Pid when that process runs, 0 when it does not. */
pid_t td_proc_pid(const struct td_procs *p, int i);
/* Path of the program tandem-ROLE that belongs to this executable. NOT_FOUND: it was not built. */
TD_MUST_USE td_status td_proc_program(const char *role, char *out, size_t cap,
                                      struct td_error *err);
/* Starts process i as a daemon: own session, output appended to run_dir/NAME.log. The program
 * tandem-ROLE is the one beside this executable. */
TD_MUST_USE td_status td_proc_start(const struct td_procs *p, int i, const char *config,
                                    struct td_error *err);
/* SIGTERM, and SIGKILL when it has not ended after `grace_ms`; removes the pid file. Returns
 * whether it had to be killed. No-op when it does not run. */
bool td_proc_stop(const struct td_procs *p, int i, int grace_ms);
/* Path of its log. */
void td_proc_log(const struct td_procs *p, int i, char *path, size_t cap);

#endif

/* A local cluster as a whole: up until a real prompt went through it, and down again. What
 * `tandem up` and `down` do, and what comparisons start for themselves. */
#ifndef TD_DEPLOY_TOOL_LOCAL_H
#define TD_DEPLOY_TOOL_LOCAL_H

#include "deploy/tool/procs.h"

struct td_local {
    const char *path; /* of the configuration file; outlives this */
    struct td_config config;
    struct td_procs procs;
    char url[TD_CONFIG_STRING_MAX + 16];
};

TD_MUST_USE td_status td_local_load(struct td_local *l, const char *path, struct td_error *err);

/* Starts every process and waits until the router is ready. BUSY: one of them, or something else at
 * the address, runs already. After any failure nothing of it runs; when a role ended while starting
 * the sentence is its own last line. libcurl must have been initialised. */
TD_MUST_USE td_status td_local_up(struct td_local *l, long timeout_s, struct td_error *err);

/* Stops what runs; how many were running, and in *ret_killed how many had to be killed. */
int td_local_down(const struct td_local *l, int *ret_killed);

#endif

/* Which process a command means: ROLE[@N] of a cluster, and who runs it. A cluster is named by its
 * configuration file. What `tandem up` started has a pid file in run_dir; otherwise the role is the
 * systemd unit of its name. */
#ifndef TD_DEPLOY_TOOL_TARGET_H
#define TD_DEPLOY_TOOL_TARGET_H

#include "common/base/config.h"
#include "deploy/tool/procs.h"

struct td_target {
    struct td_config config;
    const char *config_path;
    char url[TD_CONFIG_STRING_MAX + 16];
    struct td_procs procs;
    bool local;                  /* `tandem up` started this cluster */
    int index;                   /* LOCAL: which process of procs */
    char name[TD_PROC_NAME_MAX]; /* "router", "decode@1"; "" : all of them */
    char unit[64];               /* "tandem-decode@1.service"; all: "tandem-*" */
};

enum { TD_TARGET_ARGS_MAX = 12 };

/* What the commands on a cluster have in common. */
struct td_target_options {
    const char *config; /* NULL: the installed one */
    const char *role;   /* ROLE[@N]; NULL: none was given */
    long timeout_s;     /* -1: none was given */
    long lines;         /* likewise */
    bool drain, follow;
};

/* Reads the options a command allows: `allowed` holds the first letters of those besides --config
 * and --help ("t": --timeout SECONDS, "n": --lines N, "d": --drain, "f": --follow). Returns -1 to
 * go on, else the exit code; what is wrong is said, --help is printed. */
int td_target_options(int argc, char **argv, const char *help, const char *allowed,
                      struct td_target_options *ret);

/* Loads the configuration and finds the process. `role` NULL: the whole cluster. CONFIG, IO: the
 * file; INVALID: no such role; NOT_FOUND: neither a process of `tandem up` nor a unit. */
TD_MUST_USE td_status td_target_find(struct td_target *t, const char *config, const char *role,
                                     struct td_error *err);

/* Runs a program with our standard streams and gives its exit code; 127: it could not start. */
int td_target_run(const char *const argv[]);
/* First line of what it prints, without the newline; false when it fails. */
bool td_target_ask(const char *const argv[], char *ret, size_t cap);

/* Pid of the process, 0 when it does not run. */
pid_t td_target_pid(const struct td_target *t);

#endif

/* The command line of a worker: --config FILE, --name INSTANCE, --set KEY=VALUE, --help. */
#ifndef TD_COMMON_BASE_ROLE_ARGS_H
#define TD_COMMON_BASE_ROLE_ARGS_H

#include <stdio.h>

#include "common/base/config.h"

struct td_role_args {
    struct td_config config; /* defaults, then the file's sections, then each --set in order */
    char instance[32];       /* --name, "0" without */
    char name[64];           /* "prefill@0" */
    bool help;               /* --help: nothing else was read */
};

/* What a role's process ends with. CONFIG apart, so that a service manager does not start it again
 * with the same configuration. */
enum { TD_ROLE_EXIT_OK = 0, TD_ROLE_EXIT_FAILED = 1, TD_ROLE_EXIT_CONFIG = 2 };
int td_role_exit(td_status st);

/* CONFIG: an unknown option, a missing value, or what the configuration says. */
TD_MUST_USE td_status td_role_args_read(int argc, char **argv, const char *role,
                                        struct td_role_args *ret, struct td_error *err);
/* `about`: one line. Lists every setting with its default. */
void td_role_args_help(FILE *to, const char *program, const char *about);
/* Effective settings as "key = value" lines into `buf` [cap], terminated; what does not fit is left
 * out. Returns the length. */
size_t td_config_text(const struct td_config *c, char *buf, size_t cap);

#endif

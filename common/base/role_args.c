/* Options of the workers, and their settings as text. */
#include "common/base/role_args.h"

#include <string.h>

static bool takes_value(const char *option) {
    return strcmp(option, "--config") == 0 || strcmp(option, "--name") == 0 ||
           strcmp(option, "--set") == 0;
}

/* The value of the last `option`, or NULL. */
static const char *value_of(int argc, char **argv, const char *option) {
    const char *v = NULL;
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], option) == 0) v = argv[i + 1];
    return v;
}

td_status td_role_args_read(int argc, char **argv, const char *role, struct td_role_args *ret,
                            struct td_error *err) {
    memset(ret, 0, sizeof *ret);
    td_config_defaults(&ret->config);
    for (int i = 1; i < argc; i += 2) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            ret->help = true;
            return TD_OK;
        }
        if (!takes_value(argv[i]))
            return td_fail(err, TD_CONFIG, "%s: unknown option (see --help)", argv[i]);
        if (i + 1 == argc) return td_fail(err, TD_CONFIG, "%s: a value is missing", argv[i]);
    }
    const char *name = value_of(argc, argv, "--name"), *file = value_of(argc, argv, "--config");
    if (!name) name = "0";
    if (!*name || strlen(name) >= sizeof ret->instance)
        return td_fail(err, TD_CONFIG, "--name %s: expected 1 to %zu characters", name,
                       sizeof ret->instance - 1);
    snprintf(ret->instance, sizeof ret->instance, "%s", name);
    snprintf(ret->name, sizeof ret->name, "%s@%s", role, name);
    if (file) TD_TRY(td_config_load(&ret->config, file, role, ret->instance, err));
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], "--set") == 0) TD_TRY(td_config_set(&ret->config, argv[i + 1], err));
    return TD_OK;
}

int td_role_exit(td_status st) {
    return st == TD_OK       ? TD_ROLE_EXIT_OK
           : st == TD_CONFIG ? TD_ROLE_EXIT_CONFIG
                             : TD_ROLE_EXIT_FAILED;
}

void td_role_args_help(FILE *to, const char *program, const char *about) {
    struct td_config c;
    const char *key, *help;
    char value[TD_CONFIG_STRING_MAX];
    td_config_defaults(&c);
    fprintf(to,
            "usage: %s [--config FILE] [--name INSTANCE] [--set KEY=VALUE]...\n%s\n"
            "  --config FILE     configuration; the role's sections and lines without one hold\n"
            "  --name INSTANCE   which of several workers of the role this is; default 0\n"
            "  --set KEY=VALUE   one setting, after the file; may be repeated\n"
            "  --help            this text and every setting\n\n"
            "settings and their defaults:\n",
            program, about);
    for (size_t i = 0; td_config_row(&c, i, &key, value, &help); i++)
        fprintf(to, "  %-28s %-16s %s\n", key, *value ? value : "(none)", help);
}

size_t td_config_text(const struct td_config *c, char *buf, size_t cap) {
    const char *key;
    char value[TD_CONFIG_STRING_MAX];
    size_t used = 0;
    if (cap == 0) return 0;
    buf[0] = 0;
    for (size_t i = 0; td_config_row(c, i, &key, value, NULL); i++) {
        int n = snprintf(buf + used, cap - used, "%s = %s\n", key, value);
        if (n < 0 || (size_t)n >= cap - used) break;
        used += (size_t)n;
    }
    buf[used] = 0;
    return used;
}

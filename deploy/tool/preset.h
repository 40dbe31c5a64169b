/* The ways of dividing eight GPUs among workers that are worth a name, as a configuration that a
 * person can read: settings in their order with what they are for. It is written to a file once and
 * then belongs to that person; nothing reads a preset by name later. */
#ifndef TD_DEPLOY_TOOL_PRESET_H
#define TD_DEPLOY_TOOL_PRESET_H

#include <stdio.h>

#include "common/base/config.h"

enum { TD_PRESET_LINES = 96 };

struct td_preset_line {
    char section[32]; /* "": holds for all; "decode", "decode@1" */
    char key[48], value[TD_CONFIG_STRING_MAX];
    const char *comment; /* or NULL */
};

struct td_preset {
    const char *name, *what;                     /* "4+4", "1 prefill worker of 4 GPUs and ..." */
    struct td_preset_line line[TD_PRESET_LINES]; /* those of a section together, "" first */
    uint32_t lines;
};

/* Name of preset i, and NULL past the last; the first is the one to take without a reason. */
const char *td_preset_name(uint32_t i);

/* INVALID: no such name. */
TD_MUST_USE td_status td_preset_find(const char *name, struct td_preset *ret, struct td_error *err);

/* "key=value" for all sections that have the key, or for all processes where none has;
 * "ROLE:key=value" and "ROLE@N:key=value" for that section. CONFIG as td_config_set, or when a
 * section is none of this preset's. */
TD_MUST_USE td_status td_preset_set(struct td_preset *p, const char *assignment,
                                    struct td_error *err);

/* What holds for a process, as td_config_load of the written file. */
TD_MUST_USE td_status td_preset_config(const struct td_preset *p, const char *role,
                                       const char *instance, struct td_config *ret,
                                       struct td_error *err);

/* The file. */
void td_preset_write(const struct td_preset *p, FILE *out);

#endif

/* What a setting costs in recall: one local cluster per value, the same prompts to each. */
#ifndef TD_DEPLOY_TOOL_NEEDLE_AB_H
#define TD_DEPLOY_TOOL_NEEDLE_AB_H

#include <stdint.h>

#include "common/base/status.h"

enum { TD_NEEDLE_AB_VALUES_MAX = 8, TD_NEEDLE_AB_SETS_MAX = 16 };

struct td_needle_ab {
    const char *model_dir;
    const char *setting;                    /* "key=a,b,c" */
    const char *set[TD_NEEDLE_AB_SETS_MAX]; /* "key=value", for every cluster */
    int n_sets;
    const uint32_t *lengths;
    int n_lengths;
    uint32_t look_alikes, trials; /* trials per length */
    uint64_t seed;
};

/* Prints recall per value with its 95 % interval. Fails when a cluster cannot be started or asked;
 * lost needles are the result, not a failure. libcurl must have been initialised. */
TD_MUST_USE td_status td_needle_ab(const struct td_needle_ab *o, struct td_error *err);

#endif

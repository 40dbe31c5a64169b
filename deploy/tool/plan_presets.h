/* What every preset of `tandem topology` holds, and how it balances, for one model on eight GPUs of
 * one kind: the planner's bytes, and predictions by the formulas of forecast.h. */
#ifndef TD_DEPLOY_TOOL_PLAN_PRESETS_H
#define TD_DEPLOY_TOOL_PLAN_PRESETS_H

#include "deploy/tool/forecast.h"
#include "kernels/model/model.h"

struct td_plan_presets {
    const char *model_dir;
    int format;             /* enum td_outline, -1: what config.json says */
    uint64_t memory;        /* bytes of a GPU */
    const char *const *set; /* [sets], as for `tandem topology` */
    uint32_t sets;
    struct td_forecast_rates rates;
};

/* Prints them. NO_MEMORY: a preset does not fit; the others are printed. */
TD_MUST_USE td_status td_plan_presets(const struct td_plan_presets *a, struct td_error *err);

#endif

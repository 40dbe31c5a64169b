/* The plan of one worker from its settings and a config.json, for GPUs that need not be there. */
#ifndef TD_DEPLOY_TOOL_PLAN_WORKER_H
#define TD_DEPLOY_TOOL_PLAN_WORKER_H

#include "kernels/worker_plan.h"

struct td_plan_asked {
    const struct td_config *config;
    const struct td_model_config *model;
    enum td_outline format;
    bool prefill;    /* else decode */
    uint32_t ranks;  /* GPUs that share its weights */
    uint64_t memory; /* bytes of each; 0: a worker on the CPU, without a limit */
};

/* As td_worker_plan: TD_NO_MEMORY with the setting to change when it does not fit. */
TD_MUST_USE td_status td_plan_worker(const struct td_plan_asked *a, struct td_worker_plan *ret,
                                     struct td_error *err);

#endif

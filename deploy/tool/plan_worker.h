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

/* The same worker with another kv_layout, and what its ranks then tell each other: bytes that reach
 * a rank in a decode step of one sequence, in one of as many as there are slots, and in a step of
 * chunk_tokens (td_engine_exchanged). */
struct td_plan_layout {
    struct td_worker_plan plan; /* pages 0: it does not fit */
    uint64_t one, all, chunk;
};
TD_MUST_USE td_status td_plan_layout(const struct td_plan_asked *a, bool split,
                                     struct td_plan_layout *ret, struct td_error *err);
/* Prints both, for workers of several ranks; `far`: of the sequences that are counted, tokens. */
TD_MUST_USE td_status td_plan_print_layouts(const struct td_plan_asked *a, uint32_t far,
                                            struct td_error *err);

#endif

/* What both workers do between configuration and the first step: open the checkpoint, resolve the
 * settings, build the engine, and run a step with its samplings as one job. */
#ifndef TD_KERNELS_WORKER_ENGINE_H
#define TD_KERNELS_WORKER_ENGINE_H

#include "kernels/sampler.h"
#include "kernels/selections.h"

struct td_worker_engine {
    struct td_model *model;
    struct td_engine *engine;
    struct td_engine_options options;
    const struct td_kv_layout *layout; /* the engine's */
    uint32_t split;                    /* td_engine_split of the options */
    const char *numerics;              /* one line */
    uint64_t numerics_id;
    char model_name[TD_CONFIG_STRING_MAX];
    struct td_samplers samplers;
    size_t mask_bytes;
    struct td_selections selections;
};

/* Writes what was resolved (every "auto" and 0) back into *c, so that what is shown is what runs.
 * All memory is taken here; errors are sentences for the user. `watch` (may be NULL) sees the
 * checkpoint's bytes being read. */
TD_MUST_USE td_status td_worker_engine_open(struct td_worker_engine *w, struct td_config *c,
                                            const struct td_load_watch *watch,
                                            struct td_error *err);
/* Zeroed and half-open ones are fine. */
void td_worker_engine_close(struct td_worker_engine *w);
/* An engine was left behind because a rank of it hangs. Then the process ends by _exit: what
 * libraries do at an ordinary end may wait for that rank. */
bool td_worker_engine_lost(void);

/* A step and its samplings; tokens [n_samples], of which there are at most as many as slots or as
 * choices of one prompt. Meant for the jobs thread: it takes as long as the step takes and touches
 * nothing but the engine, `tokens`, `failed` and *ret_selections. failed[i].status is TD_OK,
 * or sample i has no token and the sentence says why (a NaN among its logits): nothing of the
 * others. *ret_selections (the pointer may be NULL) is NULL when no sampling wants them, else
 * [n_samples], meaningful for those that do, valid until the step after the next. What is returned
 * is about the step as a whole. */
TD_MUST_USE td_status td_worker_engine_step(struct td_worker_engine *w, const struct td_run *runs,
                                            uint32_t n_runs, const struct td_worker_sample *samples,
                                            uint32_t n_samples, struct td_token *tokens,
                                            const struct td_selection **ret_selections,
                                            struct td_error *failed, struct td_error *err);

/* The memory plan as lines "what   bytes" with a total, into `buf` [cap]; `slabs` bytes of slabs
 * are the role's. */
void td_worker_engine_memory_text(const struct td_worker_engine *w, size_t slabs, char *buf,
                                  size_t cap);

#endif

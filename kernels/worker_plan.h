/* What a worker takes in memory, known before anything is taken: the engine's bytes by the code
 * that takes them (td_engine_plan), what the worker adds, and how many pages what is left of a
 * device holds. `tandem plan` prints it from config.json alone, a worker prints it at start. */
#ifndef TD_KERNELS_WORKER_PLAN_H
#define TD_KERNELS_WORKER_PLAN_H

#include "kernels/engine.h"

/* A rank's device; zeros: the host, no limit. */
struct td_plan_device {
    uint64_t bytes;    /* of the card */
    uint32_t fraction; /* percent of it that may be planned with */
};

/* A CUDA device as planning sees it; also in builds without CUDA. */
const struct td_backend *td_worker_plan_cuda(void);

struct td_worker_plan {
    struct td_engine_options options; /* pages as planned */
    struct td_kv_layout layout;
    struct td_engine_memory engine;        /* of each rank, and of the host */
    size_t sampling, grammars, selections; /* of the host; grammars: at most */
    size_t slab_bytes, slabs;              /* one; all of the role, of the host */
    size_t context, graphs, libraries;     /* of a device beside the engine: see worker_plan.c */
    struct td_plan_device device;
};

/* Sets the lines of what a device's process holds beside its engine, by `options`. */
void td_worker_plan_beside(struct td_worker_plan *p, uint32_t layers);

/* Line i of the plan, without the total; false past the last. `host`: of the worker's host; else of
 * each rank's device. */
struct td_plan_row {
    const char *what;
    size_t bytes;
    bool host;
};
bool td_worker_plan_row(const struct td_worker_plan *p, uint32_t i, struct td_plan_row *ret);
/* Sums of the lines: of the host, or of one rank's device. */
size_t td_worker_plan_bytes(const struct td_worker_plan *p, bool host);
/* All lines as "what   bytes", with " x N ranks" where each has so much, then the total, into `buf`
 * [cap]. */
void td_worker_plan_text(const struct td_worker_plan *p, char *buf, size_t cap);

/* Plans a worker that takes `slabs` slabs of at least `slab_bytes` and keeps `mask_bytes` of masks.
 * With a device and options.pages
 * == 0 the pool gets what is left. What does not fit, or holds not even one sequence of
 * max_context, is TD_NO_MEMORY with a sentence that says which setting to change and to what. */
TD_MUST_USE td_status td_worker_plan(const struct td_model *model,
                                     const struct td_engine_options *o,
                                     const struct td_plan_device *device, uint64_t slab_bytes,
                                     uint32_t slabs, uint64_t mask_bytes,
                                     struct td_worker_plan *ret, struct td_error *err);

/* At a worker's start: plans for the cards that the options name, by the one with least room, with
 * mem_fraction of it, and gives the pool what is left unless pool_pages says how many. What does
 * not fit the plan, or fits it but not beside what others have taken, is refused as above. Nothing
 * to do on the CPU. */
TD_MUST_USE td_status td_worker_plan_card(const struct td_model *model, const struct td_config *c,
                                          struct td_engine_options *o, struct td_error *err);

/* Sequences of `tokens` each that run at once. */
uint32_t td_worker_plan_sequences(const struct td_worker_plan *p, uint32_t tokens);

/* Threads that draw a step's tokens: with a device the cores have nothing else to do, and a draw
 * from a real vocabulary takes up to a millisecond; on the CPU one, since vocabularies there are
 * small. */
uint32_t td_worker_sample_threads(const struct td_engine_options *o);

/* Bytes of a slab: `wanted`, or more where the largest wire block needs it; whole memory pages. */
uint64_t td_worker_slab_bytes(const struct td_kv_layout *l, uint64_t wanted);

#endif

/* What the two halves of the engine share: its start (engine_start.c) and its steps (engine.c). */
#ifndef TD_KERNELS_ENGINE_PARTS_H
#define TD_KERNELS_ENGINE_PARTS_H

#include "kernels/decode_graphs.h"
#include "kernels/engine.h"
#include "kernels/forward.h"
#include "kernels/kv_staging.h"
#include "kernels/team.h"

/* What a step is told, in one order twice: as the host fills it, and where the device reads it. On
 * the CPU both are the same memory. */
struct step_arrays {
    struct td_op_row *rows; /* [max_tokens] */
    struct td_op_run *runs; /* [max_runs] */
    int32_t *ids;           /* [max_tokens] */
    uint32_t *want;         /* [max_runs] */
    uint32_t *pages;        /* [max_runs * pages of a context], run after run */
};

/* A rank: a device with its share of the weights, all of the KV state, and a step's memory. Only
 * its own thread touches it while the team runs; the KV lane is the thread's that packs and
 * unpacks. */
struct td_rank {
    struct td_engine *engine;
    struct td_packed_model *packed;
    struct td_threads *threads;
    uint8_t *pool, *slots, *own_pool, *own_slots;
    void *scratch, *host; /* the device's; the host's */
    size_t scratch_bytes, host_bytes, index_bytes;
    struct td_ops ops;
    struct td_forward f;       /* with the device */
    struct step_arrays in, at; /* the host's, the device's */
    struct td_kv_staging staging;
    struct td_decode_graphs graphs;
    void *idle_slot;         /* of a recorded step's rows without a sequence */
    struct td_error watched; /* the fault that a watched layer met */
};

/* What the ranks are to do; as it is for as long as one may look at it. */
struct td_engine_call {
    const struct td_run *runs;
    uint32_t n_runs;
    bool want_logits, want_capture;
    const struct td_layer_tap *tap;
    uint32_t pos, layer;
    uint32_t launches; /* of rank 0 */
};

struct td_engine {
    const struct td_model *model;
    struct td_engine_options o;
    uint32_t ranks;
    struct td_team *team; /* NULL: one rank */
    struct td_rank rank[TD_MAX_RANKS];
    struct td_kv_stagings stagings; /* of the ranks */
    struct td_kv_layout layout;
    uint32_t split; /* td_engine_split */
    void *shared; /* of the host, below */
    size_t shared_bytes;
    float *logits;       /* [max_runs, vocab]: each rank writes its tokens */
    int32_t *captured;   /* [csa_layers, max_runs, topk] */
    uint32_t *tap_pages; /* [pages of a context] identity, for td_engine_layer */
    uint8_t *slot_used;  /* [slots] of the step being checked */
    /* Of several ranks: the step's runs, which the caller may free when one hangs. */
    struct td_run *runs; /* [max_runs] */
    int32_t *run_ids;    /* [max_tokens] */
    uint32_t *run_pages; /* [max_runs * pages of a context] */
    struct td_engine_call call;
    char numerics[512];
    uint64_t numerics_id;
};

/* After memory is taken: records decode steps where the device can. Of a rank, in its thread. */
TD_MUST_USE td_status td_rank_record(struct td_rank *r, struct td_error *err);
/* From now on the options' layer_done is called. */
void td_rank_watch(struct td_rank *r);

#endif

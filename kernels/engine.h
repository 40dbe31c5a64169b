/* The engine: a model, its KV pool and slots, and the workspace of a forward step.
 *
 * Synchronous and single-threaded towards its caller; inside, ranks share the weights and compute
 * threads a step. Results do not depend on either. All
 * memory is taken by td_engine_create and counted in td_engine_memory; a step allocates nothing.
 * A token's result does not depend on what else is in the step, on how a prompt is cut into
 * steps, or on which engine of equal numerics id computed its history. */
#ifndef TD_KERNELS_ENGINE_H
#define TD_KERNELS_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/config.h"
#include "common/kv/layout.h"
#include "common/kv/split.h"
#include "common/kv/wire.h"
#include "kernels/device.h"
#include "kernels/model/model.h"

struct td_engine;
struct td_engine_memory;
struct td_ops;

struct td_engine_options {
    enum td_kv_row_dtype row_dtype;
    enum td_kv_key_dtype key_dtype;
    bool ref;               /* numerics: ref, else plain */
    bool index_sim4;        /* FP4 rounding of index queries and keys */
    bool nvfp4_activations; /* what NVFP4 experts multiply is rounded too; with ref alone */
    bool score_bf16;        /* index scores rounded to bf16 before they are compared */
    uint32_t index_topk;    /* 1..2048 */
    uint32_t max_context;   /* tokens per sequence */
    uint32_t pages, slots;  /* of the pool; a page has td_kv_page_tokens(td_engine_split) tokens */
    uint32_t max_tokens;    /* of one step, all runs together */
    uint32_t max_runs;      /* of one step */
    uint32_t threads;       /* of all ranks together */
    const struct td_backend *backend; /* NULL: the CPU */
    uint32_t ranks;                   /* 1 (or 0), 2, 4 or 8 that share the weights */
    uint32_t device[TD_MAX_RANKS];    /* which of the backend's */
    bool kv_split;            /* ranks share entries and keys by position, else each has all */
    uint32_t collective_ms;   /* silence of the ranks after which a step has failed; 0: a minute */
    uint64_t force_ref;       /* td_ops_mask: ops taken from the reference table even where a faster
                                 one runs, to find a faulty one; on the CPU the same bits */
    const struct td_ops *ops; /* NULL: chosen; for checks that put something between; CPU only */
    bool eager; /* every kernel of a step is launched anew even where steps can be recorded */
    /* For measurements, or NULL: a layer of a step that is not replayed is done on the device. */
    void (*layer_done)(void *user, uint32_t layer);
    void *layer_user;
    void *pool_memory; /* layout.pool_bytes, 64-aligned, e.g. registered for transfers; */
    void *
        slot_memory; /* slots * layout.slot_bytes; NULL: the engine takes its own. One rank alone */
};

/* Of common/kv/split.h: 1 << split ranks share the pages of a sequence. */
static inline uint32_t td_engine_split(const struct td_engine_options *o) {
    uint32_t split = 0;
    while (o->kv_split && o->ranks > 1u << split)
        split++;
    return split;
}

/* The model that the configuration names: a checkpoint, or with load_format = random weights made
 * from a seed. */
TD_MUST_USE td_status td_model_open_from(const struct td_config *c,
                                         const struct td_load_watch *watch, struct td_model **ret,
                                         struct td_error *err);
/* Its numbers and how its matrices are stored, from config.json and the settings alone. */
TD_MUST_USE td_status td_model_config_from(const struct td_config *c, struct td_model_config *ret,
                                           enum td_outline *ret_kind, struct td_error *err);

/* Options from the configuration and the checkpoint, every "auto" resolved: numerics is ref for a
 * checkpoint with quantization_config, kv_dtype fp8 in ref and bf16 in plain. */
TD_MUST_USE td_status td_engine_options_from(const struct td_config *c,
                                             const struct td_model_config *m,
                                             struct td_engine_options *ret, struct td_error *err);

/* `model` must outlive the engine, and so must memory given in the options. */
TD_MUST_USE td_status td_engine_create(const struct td_model *model,
                                       const struct td_engine_options *o, struct td_engine **ret,
                                       struct td_error *err);
/* False: a rank hangs and cannot be ended. Then everything is left as it is, and so must be the
 * model; only the end of the process ends it. */
bool td_engine_destroy(struct td_engine *e);
/* The bytes that td_engine_create would take, by the code that takes them: nothing is opened, taken
 * or read, so `model` may be an outline and the device absent (td_packed_plan). */
TD_MUST_USE td_status td_engine_plan(const struct td_model *model,
                                     const struct td_engine_options *o,
                                     struct td_kv_layout *ret_layout, struct td_engine_memory *ret,
                                     struct td_error *err);

/* Bytes that reach a rank from the others in a step of `rows` rows, at most max_tokens, by walking
 * through the step without computing: what is gathered or changed hands comes once; of a sum of n
 * values a rank receives a part of each other rank's terms and the other parts' sums. Nothing for
 * one rank. As td_engine_plan. */
TD_MUST_USE td_status td_engine_exchanged(const struct td_model *model,
                                          const struct td_engine_options *o, uint32_t rows,
                                          uint64_t *ret, struct td_error *err);

const struct td_kv_layout *td_engine_layout(const struct td_engine *e);
/* In the device's memory; of the first rank, whose bytes are those of all (of the pool: unless
 * ranks share it). */
void *td_engine_pool(struct td_engine *e);
void *td_engine_slot(struct td_engine *e, uint32_t slot);
/* What a sequence has in a slot, or in a page, for another one that goes on from the same tokens.
 * Not while a step uses the one or the other; other steps may run. */
TD_MUST_USE td_status td_engine_copy_slot(struct td_engine *e, uint32_t from, uint32_t to,
                                          struct td_error *err);
TD_MUST_USE td_status td_engine_copy_page(struct td_engine *e, uint32_t from, uint32_t to,
                                          struct td_error *err);

/* Memory in which wire blocks will lie (slabs): whole pages of the host, of which a device then
 * copies without the host's help. NO_MEMORY with a sentence where that cannot be: everything works
 * without, a copy slower. On the CPU there is nothing to do. From the thread that packs. */
TD_MUST_USE td_status td_engine_pin(struct td_engine *e, void *memory, size_t bytes,
                                    struct td_error *err);
/* Before the memory and the engine go; nothing where it was not pinned. NULL is fine. */
void td_engine_unpin(struct td_engine *e, const void *memory);

/* Wire blocks of the engine's pages and slots: td_kv_pack_page and its kin of common/kv/wire.h,
 * wherever the pool lies. `page`: the host's page that block `index` is in; where ranks share the
 * pages, the rank that has the block is the one that packs or takes it. One thread at a time, which
 * may be another than the one that steps: what is packed or unpacked must not be part of a step
 * under way. */
TD_MUST_USE td_status td_engine_pack_page(struct td_engine *e, uint32_t page,
                                          struct td_kv_ticket ticket, uint32_t index,
                                          uint32_t tokens, void *dst, size_t cap, size_t *ret_len,
                                          struct td_kv_block_header *ret_header,
                                          struct td_error *err);
TD_MUST_USE td_status td_engine_pack_slot(struct td_engine *e, uint32_t slot,
                                          struct td_kv_ticket ticket, uint32_t n, void *dst,
                                          size_t cap, size_t *ret_len,
                                          struct td_kv_block_header *ret_header,
                                          struct td_error *err);
TD_MUST_USE td_status td_engine_unpack_page(struct td_engine *e, const void *block, size_t len,
                                            struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                            uint32_t page, struct td_kv_block_header *ret_header,
                                            struct td_error *err);
TD_MUST_USE td_status td_engine_unpack_slot(struct td_engine *e, const void *block, size_t len,
                                            struct td_kv_ticket ticket, uint32_t n, uint32_t slot,
                                            struct td_kv_block_header *ret_header,
                                            struct td_error *err);

/* n consecutive tokens of one sequence starting at absolute position pos. Positions before pos
 * must already be in the slot and pages (or pos == 0: the engine resets the slot itself). A slot
 * may occur once per step. */
struct td_run {
    uint32_t slot;
    uint32_t pos, n;
    const int32_t *ids;    /* [n] */
    const uint32_t *pages; /* [td_kv_pages(pos + n, split)] page ids, by absolute index */
    bool want_logits;      /* of the run's last token */
};

/* Optional record of what the indexer chose, for the last token of each run with want_logits. */
struct td_capture {
    uint32_t runs, csa_layers, topk;
    int32_t *entries; /* [runs][csa_layers][topk], ascending, -1 = none; caller-owned */
};

/* Runs one step. *ret_logits points at [runs that want logits][vocab] fp32 in run order, valid
 * until the next step. Bad arguments (limits, ids outside the vocabulary) are TD_INVALID and
 * change nothing. */
TD_MUST_USE td_status td_engine_step(struct td_engine *e, const struct td_run *runs,
                                     uint32_t n_runs, const float **ret_logits,
                                     struct td_capture *capture, struct td_error *err);

/* Kernels of layer `layer` of a step with one row; 0 where they are not counted (the CPU). */
TD_MUST_USE td_status td_engine_launches(struct td_engine *e, uint32_t layer, uint32_t *ret,
                                         struct td_error *err);

/* One layer alone from given input streams, for checks against recorded layer taps: positions
 * 0..n-1 of a fresh sequence in slot 0 and pages 0.., whose contents are overwritten. n may exceed
 * max_tokens (the engine cuts it) but not max_context nor the pool. All arrays are caller-owned. */
struct td_layer_tap {
    uint32_t layer, n;
    const int32_t *ids; /* [n], for layers that choose experts by token id */
    const float *x_in;  /* [n, 4, hidden] */
    float *attn_out;    /* [n, hidden], before it is mixed into the streams; or NULL */
    float *ffn_out;     /* [n, hidden]; or NULL */
    float *x_out;       /* [n, 4, hidden]; or NULL */
    int32_t *selected;  /* [n, index_topk] ascending, -1 = none; CSA layers; or NULL */
};
TD_MUST_USE td_status td_engine_layer(struct td_engine *e, const struct td_layer_tap *tap,
                                      struct td_error *err);

/* Bytes: of each rank's device, by the rank that takes most; `host` of all together. Where device
 * memory is the host's, what a rank has of the host is part of its scratch. */
struct td_engine_memory {
    uint32_t ranks;
    size_t weights, pool, slots, index_workspace, scratch, host;
    size_t collectives; /* what ranks take to tell each other things, at most (kernels/mailbox.h) */
    size_t pinned;      /* of the caller's, td_engine_pin */
    uint32_t graphs, graph_launches; /* recorded decode steps, and at most so many kernels of one */
};
void td_engine_memory(const struct td_engine *e, struct td_engine_memory *ret);

/* Build and modes as one line, and the hash of what decides over bits in it: equal ids promise
 * equal bits. (Forced reference ops are shown but not hashed: they have the same bits.) */
const char *td_engine_numerics(const struct td_engine *e, uint64_t *ret_id);

#endif

/* A loaded checkpoint: configuration and one td_weight view per tensor, by layer.
 *
 * The files stay mapped for the life of the td_model; every shape has been checked against
 * config.json, so kernels index without looking back. */
#ifndef TD_KERNELS_MODEL_MODEL_H
#define TD_KERNELS_MODEL_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/model/config.h"
#include "kernels/model/weight.h"

struct td_compressor_weights { /* d = 512 (main) or 128 (indexer); coff = 2 (CSA) or 1 (HCA) */
    struct td_weight ape;      /* f32  [ratio, coff*d] */
    struct td_weight wkv;      /* bf16 [coff*d, hidden] */
    struct td_weight wgate;    /* bf16 [coff*d, hidden] */
    struct td_weight norm;     /* bf16 [d] */
};

struct td_expert_weights {
    struct td_weight w1; /* gate [inner, hidden] */
    struct td_weight w3; /* up   [inner, hidden] */
    struct td_weight w2; /* down [hidden, inner] */
};

struct td_hc_weights {   /* hyper-connection of one sub-layer; rows 24 = 4 pre + 4 post + 16 comb */
    struct td_weight fn; /* f32 [24, 4*hidden] */
    struct td_weight base;  /* f32 [24] */
    struct td_weight scale; /* f32 [3] */
};

struct td_layer_weights {
    struct td_weight attn_norm, ffn_norm; /* bf16 [hidden] */
    struct td_hc_weights hc_attn, hc_ffn;
    struct td_weight wq_a;    /* [q_lora, hidden] */
    struct td_weight q_norm;  /* bf16 [q_lora] */
    struct td_weight wq_b;    /* [heads*512, q_lora] */
    struct td_weight wkv;     /* [512, hidden] */
    struct td_weight kv_norm; /* bf16 [512] */
    struct td_weight sink;    /* f32 [heads] */
    struct td_weight wo_a;    /* [o_groups*o_lora, heads/o_groups*512], rows of group g together */
    struct td_weight wo_b;    /* [hidden, o_groups*o_lora] */
    struct td_compressor_weights comp;       /* CSA and HCA layers */
    struct td_weight index_wq_b;             /* CSA: [index_heads*128, q_lora] */
    struct td_weight index_weights_proj;     /* CSA: [index_heads, hidden] */
    struct td_compressor_weights index_comp; /* CSA */
    struct td_weight gate;                   /* [experts, hidden] */
    struct td_weight gate_bias;              /* f32 [experts]; absent in hash layers */
    const int64_t *tid2eid; /* [vocab, experts_per_token]; hash layers only, values checked */
    struct td_expert_weights shared;
    struct td_expert_weights *experts; /* [experts] */
};

struct td_model {
    struct td_model_config config;
    struct td_weight embed;         /* [vocab, hidden] */
    struct td_weight head;          /* [vocab, hidden] */
    struct td_weight norm;          /* [hidden] */
    struct td_hc_weights hc_head;   /* fn f32 [4, 4*hidden], base f32 [4], scale f32 [1] */
    struct td_layer_weights *layer; /* [layers] */
    /* Hash of the configuration's values and of every tensor's official name, dtype and shape plus
     * samples of its bytes: equal for equal weights however they are named and in whatever files;
     * part of the fingerprint roles compare. */
    uint64_t fingerprint;
    size_t bytes;                 /* sum of the tensors' bytes */
    struct td_model_files *files; /* mappings; private to the loader */
    int64_t *ids;                 /* of a model without files: every tid2eid */
};

/* Called while the tensors' bytes are read, from the calling thread: `done` grows from 0 to
 * `total`. */
struct td_load_watch {
    void (*progress)(void *arg, size_t done, size_t total);
    void *arg;
};

/* Opens DIR: config.json, model.safetensors or the shards of model.safetensors.index.json, under
 * official names, transformers' (experts stacked or single), SGLang's, or those the reference
 * converter reads and writes. The layout follows from names and dtypes alone; a mixture of layouts
 * is refused. Bytes are read through once (load.h). Errors are one sentence naming file, tensor,
 * expected and found. */
TD_MUST_USE td_status td_model_open(const char *dir, struct td_model **ret, struct td_error *err);
/* The same, watched; `watch` may be NULL. */
TD_MUST_USE td_status td_model_open_watched(const char *dir, const struct td_load_watch *watch,
                                            struct td_model **ret, struct td_error *err);
/* A model of `config` from one safetensors file of `size` bytes in memory, which must outlive it;
 * `name` is for sentences. */
TD_MUST_USE td_status td_model_parse(const char *name, const struct td_model_config *config,
                                     const uint8_t *data, size_t size, struct td_model **ret,
                                     struct td_error *err);
/* UNSUPPORTED with a sentence naming the tensor unless every routed expert is NVFP4 with an
 * input_scale for each of its linears, w1 and w3 sharing theirs. */
TD_MUST_USE td_status td_model_nvfp4_inputs(const struct td_model *m, struct td_error *err);
/* What a checkpoint of `config` holds when nothing but config.json is there: format and shape of
 * every weight, `data` NULL; `bytes` is what its tensors take, drafts aside. Not to compute with.
 */
TD_MUST_USE td_status td_model_outline(const struct td_model_config *config, enum td_outline kind,
                                       struct td_model **ret, struct td_error *err);
/* The same with weights to compute with: every tensor is a function of its name and the seed
 * (random.h). */
TD_MUST_USE td_status td_model_random(const struct td_model_config *config, enum td_outline kind,
                                      uint64_t seed, struct td_model **ret, struct td_error *err);
/* NULL and half-built models are fine. */
void td_model_close(struct td_model *m);

#endif

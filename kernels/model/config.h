/* config.json of a DeepSeek-V4 checkpoint as numbers, checked. Names follow the model paper;
 * limits are what the engine's fixed arrays and kernels hold. */
#ifndef TD_KERNELS_MODEL_CONFIG_H
#define TD_KERNELS_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum {
    TD_MAX_LAYERS = 128,
    /* Compile-time in every kernel: equal in the tiny and the real model. */
    TD_HEAD_DIM = 512,
    TD_ROPE_DIM = 64, /* the last 64 of a head and of an indexer vector */
    TD_INDEX_DIM = 128,
    TD_WINDOW = 128, /* sliding window, positions p-127..p */
    TD_HC_STREAMS = 4,
    TD_CSA_RATIO = 4,
    TD_HCA_RATIO = 128,
    TD_MAX_INDEX_TOPK = 2048,
    TD_MAX_EXPERTS = 512,
    TD_MAX_EXPERTS_PER_TOKEN = 16,
};

enum td_layer_kind { TD_LAYER_SWA, TD_LAYER_CSA, TD_LAYER_HCA };

struct td_model_config {
    uint32_t vocab, hidden, layers;
    enum td_layer_kind kind[TD_MAX_LAYERS]; /* from compress_ratios 0 | 4 | 128 */
    uint32_t heads, q_lora_rank;
    uint32_t o_groups, o_lora_rank; /* heads / o_groups heads per group */
    uint32_t index_heads, index_topk;
    uint32_t experts, experts_per_token, shared_experts, expert_inner;
    uint32_t hash_layers; /* the first n layers choose experts by token id */
    float routed_scale, swiglu_limit, rms_eps, hc_eps;
    uint32_t sinkhorn_iters;
    float rope_theta, compress_rope_theta;
    float yarn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_original_positions;
    uint32_t max_positions;
    int32_t bos_id, eos_id;
    uint32_t draft_layers; /* ratios after the last layer: that many drafts may be in the files */
    /* Some matrix is stored in 8 or 4 bits. Set from the tensors when a model is opened; what
     * config.json says about it differs between revisions of the same files. */
    bool quantised;
};

/* How a checkpoint stores its matrices. */
enum td_outline {
    TD_OUTLINE_BF16,  /* every matrix bf16 */
    TD_OUTLINE_FP4,   /* the official release: linears FP8, routed experts FP4 */
    TD_OUTLINE_NVFP4, /* the same with NVFP4 experts */
};

/* Reads DIR/config.json, with the keys of transformers or of the reference code ("dim",
 * "n_layers", ...; token ids and the longest position may be absent there). A missing or
 * contradictory value is TD_FORMAT with file, key, expected and found. Values that must equal the
 * compile-time ones above are checked. */
TD_MUST_USE td_status td_model_config_load(const char *dir, struct td_model_config *ret,
                                           struct td_error *err);
/* The same from `size` bytes of text; `path` is for sentences. */
TD_MUST_USE td_status td_model_config_parse(const char *path, const char *text, size_t size,
                                            struct td_model_config *ret, struct td_error *err);
/* What DIR/config.json says of how weights are stored: nothing for bf16, and NVFP4 by that word in
 * any revision. Checkpoints themselves are read by their tensors' dtypes. */
TD_MUST_USE td_status td_model_config_format(const char *dir, enum td_outline *ret,
                                             struct td_error *err);

#endif

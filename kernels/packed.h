/* A rank's share of the checkpoint in the layout of its device's kernels, packed once: matrices
 * (td_matrix), fp32 vectors. Arrays of matrices are host memory, everything they point to is the
 * device's.
 *
 * wo_a and wo_b are cut by output group here, because a group is the logical shard over which
 * attention outputs are summed. What is computed from a whole row of the streams is whole on every
 * rank: hyper-connections, norms, wq_a, wkv, compressors, the indexer, gate and shared expert. */
#ifndef TD_KERNELS_PACKED_H
#define TD_KERNELS_PACKED_H

#include "kernels/model/model.h"
#include "kernels/ops.h"

/* What a rank has of the things that ranks divide: equal stretches of logical shards, so `groups`
 * output groups from `group` on with their heads and the experts of the same shards, and of the
 * vocabulary. */
struct td_share {
    uint32_t group, groups;
    uint32_t head, heads;
    uint32_t expert, experts; /* may be none */
    uint32_t token, tokens;
};
/* `ranks` divides o_groups. */
struct td_share td_share_of(const struct td_model_config *c, uint32_t rank, uint32_t ranks);

struct td_packed_compressor {
    struct td_matrix wkv, wgate; /* [coff * d, hidden] */
    const float *ape;            /* [ratio, coff * d] */
    const float *norm;           /* [d] */
};

struct td_packed_ffn {
    struct td_matrix w1, w3; /* [inner, hidden] */
    struct td_matrix w2;     /* [hidden, inner] */
};

struct td_packed_layer {
    enum td_layer_kind kind;
    const float *attn_norm, *ffn_norm; /* [hidden] */
    struct td_hc hc_attn, hc_ffn;
    struct td_matrix wq_a;  /* [q_lora, hidden] */
    const float *q_norm;    /* [q_lora] */
    struct td_matrix wq_b;  /* [own heads * 512, q_lora] */
    struct td_matrix wkv;   /* [512, hidden] */
    const float *kv_norm;   /* [512] */
    const float *sink;      /* [own heads] */
    struct td_matrix *wo_a; /* [own groups] of [o_lora, heads / o_groups * 512] */
    struct td_matrix *wo_b; /* [own groups] of [hidden, o_lora] */
    struct td_packed_compressor comp, index_comp;
    struct td_matrix index_wq_b;    /* [index_heads * 128, q_lora] */
    struct td_matrix index_weights; /* [index_heads, hidden] */
    struct td_matrix gate;          /* [experts, hidden] */
    const float *gate_bias;         /* [experts] or NULL */
    const int64_t *tid2eid;         /* [vocab, experts_per_token] or NULL */
    struct td_packed_ffn shared;
    struct td_matrix *w1, *w3, *w2; /* [own experts] */
};

struct td_packed_model {
    const struct td_model *model;
    struct td_device *device;
    struct td_share share;
    struct td_packed_layer *layer; /* [layers] */
    struct td_weight embed;        /* [own tokens, hidden] */
    struct td_hc hc_head;
    const float *norm;         /* [hidden] */
    struct td_matrix head;     /* [own tokens, hidden] */
    const float *freq[2];      /* [32] of SWA layers, of compressing layers */
    void *memory, *arrays;     /* the device's; the host's */
    size_t bytes, array_bytes; /* of them */
    uint8_t *bf16;             /* the plan's: which matrices are held so, in the order of packing */
};

/* Shapes and `bytes`, nothing taken. Of `d` only backend, rank, ranks and team are looked at; 0
 * ranks are 1. `model` and `d` must outlive the result. A model without bytes (td_model_outline)
 * counts as much as a real one, or more where the CPU's layout depends on values. */
TD_MUST_USE td_status td_packed_plan(const struct td_model *model, struct td_device *d,
                                     struct td_packed_model **ret, struct td_error *err);
/* Takes the memory and packs; once. */
TD_MUST_USE td_status td_packed_fill(struct td_packed_model *p, struct td_error *err);
void td_packed_destroy(struct td_packed_model *p);

#endif

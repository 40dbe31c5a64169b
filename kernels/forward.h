/* The forward pass over one step's rows: fixed memory, the op table, the order of the model. */
#ifndef TD_KERNELS_FORWARD_H
#define TD_KERNELS_FORWARD_H

#include "kernels/bump.h"
#include "kernels/ops.h"
#include "kernels/packed.h"

/* Intermediates of a step, fp32 unless said; n = rows of the step. Heads, groups and logits are
 * those of the rank's share (td_share). */
struct td_forward_buffers {
    float *x;       /* [n, 4, hidden] residual streams */
    float *mix;     /* [n, 24] hyper-connection products */
    float *post;    /* [n, 4] */
    float *comb;    /* [n, 4, 4] */
    float *y, *h;   /* [n, hidden] mixed down; normalised */
    float *rounded; /* [n, hidden or q_lora] an input as FP8 and FP4 linears see it */
    float *cs[2];   /* [n, 32, 2] angles of SWA and of compressing layers */
    float *qr;      /* [n, q_lora] */
    float *q, *o;   /* [n, heads, 512] */
    /* Where ranks share the entries: for a slice of up to TD_SLICE_ROWS rows at a time. */
    float *all_q;         /* [ranks, slice, heads, 512]; of several ranks */
    float *part, *parts;  /* td_attend_part_floats for each rank: this rank's part of all heads; all
                             ranks' of this rank's heads (one rank: the same) */
    float *ml;            /* [n, heads, 2] of the window's part */
    uint64_t *candidates; /* [ranks, slice, topk]; of several ranks */
    float *kv;            /* [n, 512] */
    void *rows;           /* [n] window rows as stored */
    float *u, *g;         /* [n, 1024] main compressor */
    float *iu, *ig;       /* [n, 256] index compressor */
    float *iq;            /* [n, index_heads, 128] */
    float *iw;            /* [n, index_heads] */
    int32_t *selected;    /* [n, topk] */
    void *index;          /* the indexer's workspace */
    float *z;             /* [n, z_dim] */
    float *merged_z;      /* [n, o_groups * o_lora] of all ranks; where z is merged, else NULL */
    float *shard;         /* [o_groups, n, hidden] */
    float *partial;       /* [n, hidden] what a rank has of a sum; NULL: it has all */
    float *attn_out;      /* [n, hidden] */
    float *gate;          /* [n, experts] */
    uint32_t *expert;     /* [n, k] */
    float *weight;        /* [n, k] */
    uint32_t *offset;     /* [experts + 1] */
    uint32_t *token;      /* [n * k] */
    float *row_weight;    /* [n * k] */
    uint32_t *place;      /* [n, k] */
    float *a, *b;         /* [n * k, inner] or [n, shared inner] */
    float *expert_out;    /* [n * k, hidden] */
    struct td_nvfp4_codes codes; /* [n * k, hidden or inner] experts' inputs, with nvfp4 */
    float *shared_out;           /* [n, hidden] */
    float *ffn_out;              /* [n, hidden] */
    float *top_x;                /* [wanted, 4, hidden] */
    float *top_mix;              /* [wanted, 4] */
    float *top_h;                /* [wanted, hidden] */
    float *logits;    /* [wanted, logits_stride] the rank's tokens; whoever plans gives it */
    int32_t *capture; /* [csa_layers, wanted, topk] chosen for the wanted rows */
};

/* Rows whose queries and parts ranks tell each other at once: what that takes in memory does not
 * grow with a chunk. */
enum { TD_SLICE_ROWS = 128 };

struct td_forward {
    const struct td_ops *ops;
    struct td_device device;
    const struct td_packed_model *model;
    uint32_t topk;
    bool ref;        /* rounding of ref numerics: linear inputs, rows, Hadamard */
    bool nvfp4;      /* inputs of NVFP4 experts too */
    bool sim4;       /* FP4 rounding of index queries and keys */
    bool score_bf16; /* of index scores before they are compared */
    bool split;      /* ranks share the entries (kv_layout) */
    uint32_t layer;  /* where the step is: what a team is told */
    struct td_forward_buffers s;
    size_t logits_stride;
    size_t spare_bytes; /* of q, and of o: products may use them while they are nobody's */
    /* Output groups before z and in it: the rank's own, or, where a group of rounded values spans
     * ranks, all; then columns of other ranks are zero and stay so. */
    uint32_t z_first, z_dim;
    /* The step, set before each pass; arrays are in device memory. */
    struct td_op_batch batch;
    const int32_t *ids;   /* [n] */
    const uint32_t *want; /* [wanted] rows whose logits are wanted */
    uint32_t wanted;
    bool capture;                                                   /* s.capture is wanted too */
    void (*layer_done)(const struct td_forward *f, uint32_t layer); /* or NULL */
    void *layer_user;
};

/* Counts (base NULL) or hands out the buffers for up to max_rows rows and max_wanted logit rows;
 * `device` says which rank it is. */
void td_forward_plan(struct td_forward *f, struct td_bump *b, uint32_t max_rows,
                     uint32_t max_wanted, const struct td_kv_layout *kv);

/* The most 32-bit words that ranks tell each other at once (td_backend.join). */
size_t td_forward_words(const struct td_forward *f, uint32_t max_rows);

/* The whole pass: ids to logits of the wanted rows. Of a team that breaks on the way nothing more
 * is computed. */
void td_forward_step(struct td_forward *f);

/* The steps of the above, for checks layer by layer. */
void td_forward_angles(struct td_forward *f);
void td_forward_layer(struct td_forward *f, uint32_t layer);

#endif

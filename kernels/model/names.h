/* Names of tensors: what a checkpoint calls them -> what the official release calls them. Private
 * to the loader.
 *
 * The official names are `layers.3.attn.wq_a.weight`. Other writers of the same tensors use
 * `model.layers.3.self_attn.q_a_proj.weight` (transformers), the official words below `model.`
 * with `topk.tid2eid` (SGLang), or transformers' words for the modules around the official words
 * for their matrices (the reference converter reads these). */
#ifndef TD_KERNELS_MODEL_NAMES_H
#define TD_KERNELS_MODEL_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* Words that change together. Within one checkpoint each group is spelt one way: a folder in which
 * it is not was put together from two, or converted half. */
enum td_name_group {
    TD_NAMES_PREFIX,    /* layers | model.layers */
    TD_NAMES_MODULE,    /* attn, ffn | self_attn, mlp */
    TD_NAMES_OUTER,     /* embed, head, attn_norm, ffn_norm | embed_tokens, ... */
    TD_NAMES_HC,        /* hc_attn_fn | attn_hc.fn */
    TD_NAMES_ATTENTION, /* wq_a, compressor.wkv | q_a_proj, compressor.kv_proj */
    TD_NAMES_EXPERT,    /* w1, w2, w3 | gate_proj, down_proj, up_proj; stacked or not */
    TD_NAMES_BIAS,      /* gate.bias | gate.e_score_correction_bias */
    TD_NAMES_IDS,       /* gate.tid2eid | topk.tid2eid */
    TD_NAMES_SCALE,     /* .scale | .weight_scale_inv */
    TD_NAMES_GROUPS,
};

struct td_name_styles {
    const char *seen[TD_NAMES_GROUPS][2]; /* the first name of each spelling; borrowed */
};

enum { TD_NAME_MAX = 256 };

/* The official name of `stored` into ret [TD_NAME_MAX], and its spelling into *styles. A name that
 * belongs to no layout, or is too long for any, is returned as it is, or cut. TD_FORMAT when
 * `stored` spells a group otherwise than an earlier name did; `path` is for the sentence. */
TD_MUST_USE td_status td_name_official(struct td_name_styles *styles, const char *path,
                                       const char *stored, char ret[TD_NAME_MAX],
                                       struct td_error *err);

/* Draft tensors (official names) have no place in the model: mtp.*, and layers past the last, as
 * many as the configuration says there are drafts. */
bool td_name_is_draft(const char *official, uint32_t layers, uint32_t drafts);

#endif

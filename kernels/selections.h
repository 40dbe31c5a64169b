/* What the indexer selected in a worker's steps, from the engine's fixed places to the dense form
 * that travels with tokens. Memory is taken once, for every sequence that can run; a step in which
 * nobody asks touches none of it. */
#ifndef TD_KERNELS_SELECTIONS_H
#define TD_KERNELS_SELECTIONS_H

#include "common/base/sampling.h"
#include "kernels/engine.h"

struct td_selections {
    struct td_capture capture; /* of the step under way */
    uint32_t layer[TD_SELECTION_LAYERS_MAX], samples, set;
    uint32_t row;                /* of the sample added last */
    struct {                     /* two sets: one is read while the next step fills the other */
        int32_t *entry;          /* [runs][csa_layers][topk], dense in the end */
        uint32_t *count;         /* [runs][csa_layers] */
        struct td_selection *of; /* [samples] */
    } sets[2];
    void *memory;
    size_t bytes;
};

/* For steps of up to `runs` runs that want logits and `samples` samplings. */
TD_MUST_USE td_status td_selections_init(struct td_selections *s, const struct td_kv_layout *l,
                                         uint32_t topk, uint32_t runs, uint32_t samples,
                                         struct td_error *err);
/* What td_selections_init takes. */
size_t td_selections_bytes(const struct td_kv_layout *l, uint32_t topk, uint32_t runs,
                           uint32_t samples);
void td_selections_finish(struct td_selections *s);

/* Where the next step's engine call puts what was selected. */
struct td_capture *td_selections_begin(struct td_selections *s);
/* After it, for the samples that want it, i ascending: `row` is the number of its run among those
 * that want logits. Samples of one run follow each other, all want it, and share the arrays. Valid
 * until the begin after the next. */
void td_selections_add(struct td_selections *s, uint32_t i, uint32_t row);
/* [samples], of which those added mean something. */
const struct td_selection *td_selections_of(const struct td_selections *s);

#endif

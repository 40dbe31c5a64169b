/* The samplings of a worker's steps: what each running sequence's tokens have led to (counts for
 * the penalties), and from a row of logits to its token.
 *
 * A sequence has a place by its engine slot. A place knows its sequence by a number that is never
 * used again, so nothing has to be said when one ends: the next one's first sampling begins anew.
 * All memory is taken once, for every sequence that can run. */
#ifndef TD_KERNELS_SAMPLER_H
#define TD_KERNELS_SAMPLER_H

#include <stddef.h>

#include "common/base/sampling.h"
#include "common/base/status.h"

/* One sampling of a step. */
struct td_worker_sample {
    const struct td_sampling *sampling; /* its guide and what was said live until the first sampling
                                         * of the sequence is done, the guide until its last */
    uint32_t position;                  /* absolute, of the sampled token */
    uint32_t row;   /* whose logits: number of the run among those that want them */
    uint32_t slot;  /* the sequence's; choices of a prompt that sample their first token share it */
    uint64_t owner; /* the sequence's number; 0: it has no earlier samplings */
    int32_t fed;    /* the token of the answer that the run fed; -1: it fed the prompt */
};

struct td_sampler {
    uint64_t owner; /* whose tokens were counted; 0: nobody's */
};

struct td_samplers {
    uint32_t n, vocab;
    int32_t eos;
    struct td_sampler *of; /* [n] */
    uint32_t *counts;      /* [n][vocab]: kernels/shape.h */
    float *shaped;         /* [vocab] */
    void *work;            /* td_sample_workspace */
};

/* For `n` slots. `eos` -1: there is no end-of-text. */
TD_MUST_USE td_status td_samplers_init(struct td_samplers *s, uint32_t n, uint32_t vocab,
                                       int32_t eos, struct td_error *err);
/* What it takes. */
size_t td_samplers_bytes(uint32_t n, uint32_t vocab);
/* A zeroed one is fine. */
void td_samplers_finish(struct td_samplers *s);

/* The token of sample `p` from its row of logits [vocab]. An error is this sequence's alone. */
TD_MUST_USE td_status td_samplers_draw(struct td_samplers *s, const float *logits,
                                       const struct td_worker_sample *p, struct td_token *ret,
                                       struct td_error *err);

#endif

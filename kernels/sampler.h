/* The samplings of a worker's steps: what each running sequence's tokens have led to (counts for
 * the penalties, its place in a grammar and the tokens that may come there), and from a row of
 * logits to its token.
 *
 * A sequence has a place by its engine slot. A place knows its sequence by a number that is never
 * used again, so nothing has to be said when one ends: the next one's first sampling begins anew.
 * All memory is taken once, for every sequence that can run; grammars are opened within a bound.
 *
 * What a step's samplings need follows from the tokens that the step feeds, which are known before
 * it computes. So td_samplers_follow works beside the step, in a thread of its own when there are
 * grammars: a mask over the whole vocabulary may take longer than a count. */
#ifndef TD_KERNELS_SAMPLER_H
#define TD_KERNELS_SAMPLER_H

#include <stddef.h>

#include "common/base/sampling.h"
#include "common/base/status.h"

struct td_aside;
struct td_grammars;
struct td_sampler;
struct td_threads;
struct td_tokenizer;

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

struct td_samplers_params {
    uint32_t slots, vocab;
    int32_t eos;                          /* -1: there is no end-of-text */
    const struct td_tokenizer *tokenizer; /* for the call only; NULL: no grammars */
    size_t mask_bytes;                    /* budget for masks computed before */
    uint32_t threads; /* that draw a step's samples; 0 and 1: the caller alone */
};

struct td_samplers {
    struct td_samplers_params p;
    struct td_sampler *of; /* [slots] */
    uint32_t *counts;      /* [slots][vocab]: kernels/shape.h */
    uint32_t *masks;       /* [slots][mask_words] */
    uint32_t mask_words;
    struct td_threads *threads; /* NULL: the caller alone */
    float *shaped;              /* [threads][vocab] */
    uint8_t *work;              /* [threads][td_sample_workspace] */
    struct td_grammars *store;  /* of the thread beside; NULL: none */
    struct td_aside *aside;
    const struct td_worker_sample *samples; /* [n_samples] of the step under way */
    uint32_t n_samples;
};

TD_MUST_USE td_status td_samplers_init(struct td_samplers *s, const struct td_samplers_params *p,
                                       struct td_error *err);
/* What it takes, without grammars, and at most for those. */
size_t td_samplers_bytes(uint32_t slots, uint32_t vocab, uint32_t threads);
size_t td_samplers_grammar_bytes(uint32_t slots, uint32_t vocab, size_t mask_bytes);
/* A zeroed one is fine. */
void td_samplers_finish(struct td_samplers *s);

/* Begins to follow the tokens that a step feeds; `samples` [n] of it stay until td_samplers_wait,
 * which comes before any is drawn and before the next step. */
void td_samplers_follow(struct td_samplers *s, const struct td_worker_sample *samples, uint32_t n);
void td_samplers_wait(struct td_samplers *s);

/* The token of sample `p` from its row of logits [vocab]. An error is this sequence's alone: its
 * logits are no numbers (INTERNAL), its tokens are not of its grammar (CORRUPT), its grammar is
 * none (CORRUPT) or cannot be enforced here (UNSUPPORTED), nothing that may come next has a chance
 * (INVALID). */
TD_MUST_USE td_status td_samplers_draw(struct td_samplers *s, const float *logits,
                                       const struct td_worker_sample *p, struct td_token *ret,
                                       struct td_error *err);
/* The same for all samples of a step: failed[i].status is how sample i of [n] went. `logits`: rows
 * of [vocab]. Who draws what changes no token. */
void td_samplers_draw_all(struct td_samplers *s, const float *logits,
                          const struct td_worker_sample *samples, uint32_t n,
                          struct td_token *tokens, struct td_error *failed);

#endif

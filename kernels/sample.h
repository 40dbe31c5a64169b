/* From logits to a token.
 *
 * The result depends on the logits, the parameters, the seed and the absolute position alone: not
 * on the batch, the step or the machine that runs it. The random number of a position is a pure
 * function of (seed, position), and exponentials are computed by arithmetic of this file, not by
 * the C library, so they round the same everywhere.
 *
 * Order of the filters (that of Hugging Face and SGLang): temperature, top_k, top_p, min_p.
 *   temperature  logits / temperature; 0 is greedy and ignores everything below
 *   top_k        keeps the k most likely; 0 keeps all
 *   top_p        of what is left, renormalised: the shortest run of the most likely tokens whose
 *                probabilities reach top_p, the one that crosses included, so never empty; 1 keeps
 *                all, 0 keeps one
 *   min_p        keeps tokens at least min_p times as likely as the most likely one; 0 keeps all
 * "Most likely" orders by logit, equal logits by ascending id. */
#ifndef TD_KERNELS_SAMPLE_H
#define TD_KERNELS_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum { TD_SAMPLE_MAX_TOP = 20 };

struct td_sample_params {
    float temperature;  /* >= 0, finite */
    float top_p, min_p; /* 0..1 */
    uint32_t top_k;
    uint64_t seed;
    bool logprobs;         /* compute `logprob` and `top` */
    uint32_t top_logprobs; /* 0..20 entries of `top`; needs logprobs */
};

/* Log probabilities are those of the unmodified distribution: log softmax of the model's logits at
 * temperature 1, before bias, penalties, masks and every filter. */
struct td_sampled {
    int32_t token;
    float logprob; /* of `token`; 0 unless asked for */
    uint32_t n_top;
    struct td_sampled_top {
        int32_t id;
        float logprob;
    } top[TD_SAMPLE_MAX_TOP]; /* [n_top], most likely first */
};

/* TD_INVALID with a sentence when a value is out of range. */
TD_MUST_USE td_status td_sample_params_check(const struct td_sample_params *p,
                                             struct td_error *err);

/* Bytes td_sample needs beside its arguments. */
size_t td_sample_workspace(uint32_t vocab);

/* `logits` [vocab] fp32, read only: the model's. `shaped` [vocab]: what the token is chosen from
 * instead (kernels/shape.h); NULL: the logits themselves. -inf excludes a token. `position`:
 * absolute position the token will have. `work`: td_sample_workspace(vocab) bytes, 4-aligned.
 * Parameters must have passed the check. A NaN, +inf or no finite logit at all is TD_INTERNAL, this
 * worker's own fault: the request is lost here, the worker is not. Shaped so that none is left it
 * is INVALID, the request's. Allocates nothing. */
TD_MUST_USE td_status td_sample(const float *logits, const float *shaped, uint32_t vocab,
                                const struct td_sample_params *p, uint64_t position, void *work,
                                struct td_sampled *ret, struct td_error *err);

/* Philox4x32-10, the counter-based generator behind td_sample: four words from a counter of four
 * and a key of two. */
void td_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]);

#endif

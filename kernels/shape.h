/* From the model's logits to those a token is chosen from: bias, penalties, what may not come now.
 *
 * Pure arithmetic on one row, in this order (vLLM's; "answer" is what was generated so far, of
 * earlier attempts too, reasoning and markup included):
 *   logit_bias          added to its ids
 *   repetition_penalty  r: of an id that occurs in prompt or answer the logit becomes l / r when it
 *                       is positive, else l * r (Keskar et al. 2019, "CTRL"; as in Hugging Face)
 *   frequency_penalty   f: an id that occurs c times in the answer loses f * c
 *   presence_penalty    p: an id that occurs in the answer loses p (both as OpenAI defines them:
 *                       mu[j] - c[j] * f - (c[j] > 0) * p)
 *   mask, excluded id   everything else becomes -inf
 * Temperature and the filters of kernels/sample.h follow. */
#ifndef TD_KERNELS_SHAPE_H
#define TD_KERNELS_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

/* In a count: the id occurs in the prompt. The rest is its number of occurrences in the answer. */
#define TD_COUNT_PROMPT 0x80000000u

struct td_shape {
    uint32_t n_bias;
    const int32_t *bias_id; /* [n_bias]; ids outside the vocabulary have no logit */
    const float *bias;
    const uint32_t *counts;                /* [vocab]; NULL: no penalties */
    float frequency, presence, repetition; /* 0, 0, 1: off */
    const uint32_t
        *mask; /* [ceil(vocab / 32)] bit i % 32 of word i / 32: id i may come; NULL: all may */
    int32_t excluded; /* may not come; -1: none */
};

/* `logits` [vocab] to `ret` [vocab], which may be the same. */
void td_shape_logits(const float *logits, uint32_t vocab, const struct td_shape *s, float *ret);

#endif

/* See shape.h. */
#include "kernels/shape.h"

#include <math.h>
#include <string.h>

static void penalise(float *l, uint32_t vocab, const struct td_shape *s) {
    for (uint32_t i = 0; i < vocab; i++) {
        uint32_t count = s->counts[i] & ~TD_COUNT_PROMPT;
        if (s->counts[i] == 0) continue;
        l[i] = l[i] > 0 ? l[i] / s->repetition : l[i] * s->repetition;
        if (count == 0) continue;
        l[i] -= s->frequency * (float)count;
        l[i] -= s->presence;
    }
}

void td_shape_logits(const float *logits, uint32_t vocab, const struct td_shape *s, float *ret) {
    if (ret != logits) memcpy(ret, logits, vocab * sizeof *ret);
    for (uint32_t i = 0; i < s->n_bias; i++)
        if ((uint32_t)s->bias_id[i] < vocab) ret[s->bias_id[i]] += s->bias[i];
    if (s->counts) penalise(ret, vocab, s);
    for (uint32_t i = 0; s->mask && i < vocab; i++)
        if (!(s->mask[i / 32] >> i % 32 & 1)) ret[i] = -INFINITY;
    if ((uint32_t)s->excluded < vocab) ret[s->excluded] = -INFINITY;
}

/* See sampler.h. */
#include "kernels/sampler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/sample.h"
#include "kernels/shape.h"

size_t td_samplers_bytes(uint32_t n, uint32_t vocab) {
    return n * (sizeof(struct td_sampler) + vocab * sizeof(uint32_t)) + vocab * sizeof(float) +
           td_sample_workspace(vocab);
}

td_status td_samplers_init(struct td_samplers *s, uint32_t n, uint32_t vocab, int32_t eos,
                           struct td_error *err) {
    *s = (struct td_samplers){.n = n, .vocab = vocab, .eos = eos};
    s->of = calloc(n, sizeof *s->of);
    s->counts = calloc((size_t)n * vocab, sizeof *s->counts);
    s->shaped = calloc(vocab, sizeof *s->shaped);
    s->work = calloc(1, td_sample_workspace(vocab));
    if (s->of && s->counts && s->shaped && s->work) return TD_OK;
    td_samplers_finish(s);
    return td_fail(err, TD_NO_MEMORY, "no memory for the sampling of %u sequences", n);
}

void td_samplers_finish(struct td_samplers *s) {
    free(s->of);
    free(s->counts);
    free(s->shaped);
    free(s->work);
    *s = (struct td_samplers){0};
}

/* ---- what was generated so far ---- */

static bool penalised(const struct td_sampling *p) {
    return p->frequency_penalty != 0 || p->presence_penalty != 0 ||
           (p->repetition_penalty != 0 && p->repetition_penalty != 1);
}

static uint32_t *counts_of(struct td_samplers *s, const struct td_worker_sample *p) {
    assert(p->slot < s->n);
    return s->counts + (size_t)p->slot * s->vocab;
}

static void count(const struct td_samplers *s, uint32_t *counts, int32_t id) {
    if ((uint32_t)id < s->vocab) counts[id]++;
}

static void begin(struct td_samplers *s, const struct td_worker_sample *p) {
    uint32_t *counts = counts_of(s, p);
    const struct td_sampling *q = p->sampling;
    memset(counts, 0, s->vocab * sizeof *counts);
    for (uint32_t i = 0; q->guide && i < q->guide->n_prompt_ids; i++)
        if ((uint32_t)q->guide->prompt_id[i] < s->vocab)
            counts[q->guide->prompt_id[i]] = TD_COUNT_PROMPT;
    for (uint32_t i = 0; q->said && i < q->n_said; i++)
        count(s, counts, q->said[i]);
    s->of[p->slot].owner = p->owner;
}

/* The tokens up to the one that this step fed. */
static void follow(struct td_samplers *s, const struct td_worker_sample *p) {
    if (!penalised(p->sampling)) return;
    if (p->owner == 0 || s->of[p->slot].owner != p->owner) begin(s, p);
    if (p->fed >= 0) count(s, counts_of(s, p), p->fed);
}

/* ---- drawing ---- */

/* The logits to choose from; NULL: the model's as they are. */
static const float *shape(struct td_samplers *s, const float *logits,
                          const struct td_worker_sample *p) {
    const struct td_sampling *q = p->sampling;
    const struct td_guide *g = q->guide;
    bool early = p->position < q->end_from && s->eos >= 0, counted = penalised(q);
    if (!early && !counted && (!g || g->n_bias == 0)) return NULL;
    const struct td_shape t = {
        .n_bias = g ? g->n_bias : 0,
        .bias_id = g ? g->bias_id : NULL,
        .bias = g ? g->bias : NULL,
        .counts = counted ? counts_of(s, p) : NULL,
        .frequency = q->frequency_penalty,
        .presence = q->presence_penalty,
        .repetition = q->repetition_penalty != 0 ? q->repetition_penalty : 1,
        .excluded = early ? s->eos : -1,
    };
    td_shape_logits(logits, s->vocab, &t, s->shaped);
    return s->shaped;
}

td_status td_samplers_draw(struct td_samplers *s, const float *logits,
                           const struct td_worker_sample *p, struct td_token *ret,
                           struct td_error *err) {
    const struct td_sampling *q = p->sampling;
    const struct td_sample_params params = {
        .temperature = q->temperature,
        .top_p = q->top_p,
        .min_p = q->min_p,
        .top_k = q->top_k,
        .seed = q->seed,
        .logprobs = q->logprobs || q->top_logprobs,
        .top_logprobs = q->top_logprobs,
    };
    struct td_sampled t;
    TD_TRY(td_sample_params_check(&params, err));
    follow(s, p);
    TD_TRY(
        td_sample(logits, shape(s, logits, p), s->vocab, &params, p->position, s->work, &t, err));
    ret->id = t.token;
    ret->logprob = t.logprob;
    ret->n_top = t.n_top;
    for (uint32_t i = 0; i < t.n_top; i++)
        ret->top[i] = (struct td_token_alt){.id = t.top[i].id, .logprob = t.top[i].logprob};
    return TD_OK;
}

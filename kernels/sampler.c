/* See sampler.h. */
#include "kernels/sampler.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/chat.h"
#include "common/text/grammar.h"
#include "kernels/aside.h"
#include "kernels/sample.h"
#include "kernels/shape.h"
#include "kernels/threads.h"

_Static_assert((int)TD_GUIDE_GRAMMAR_MAX == (int)TD_GRAMMAR_BYTES_MAX, "one bound");

enum {
    KEPT = 16,              /* grammars kept beside those of every slot */
    TREE_BYTES = 96,        /* of a token's part in the store's tree of the vocabulary, at most */
    STORE_BYTES = 64 << 10, /* and of the rest of a store */
};

struct td_sampler {
    uint64_t owner;                   /* whose tokens were counted; 0: nobody's */
    const struct td_grammar *grammar; /* open; NULL: none */
    struct td_matcher matcher;
    bool masked;         /* its mask is that of the matcher */
    struct td_error why; /* OK, or why nothing can be drawn any more */
};

static uint32_t mask_words(uint32_t vocab) {
    return (vocab + 31) / 32;
}

size_t td_samplers_bytes(uint32_t slots, uint32_t vocab, uint32_t threads) {
    size_t each = vocab * sizeof(float) + td_sample_workspace(vocab);
    return slots * (size_t)vocab * sizeof(uint32_t) + (threads > 1 ? threads : 1) * each;
}

size_t td_samplers_grammar_bytes(uint32_t slots, uint32_t vocab, size_t mask_bytes) {
    size_t place = sizeof(struct td_sampler) + mask_words(vocab) * sizeof(uint32_t);
    return slots * place + (slots + (size_t)KEPT) * TD_GRAMMAR_BYTES_MAX + mask_bytes +
           vocab * (size_t)TREE_BYTES + STORE_BYTES;
}

static td_status open_store(struct td_samplers *s, struct td_error *err) {
    struct td_chat chat;
    if (!s->p.tokenizer) return TD_OK;
    td_chat_init(&chat, s->p.tokenizer);
    const struct td_grammars_params g = {
        .t = s->p.tokenizer,
        .vocab = (int32_t)s->p.vocab,
        .eos = s->p.eos,
        .dsml = chat.dsml,
        .think_end = chat.think_end,
        .grammars_max = s->p.slots + KEPT,
        .mask_bytes = s->p.mask_bytes,
    };
    TD_TRY(td_grammars_create(&g, &s->store, err));
    size_t takes = td_grammars_bytes(s->store);
    size_t most = td_samplers_grammar_bytes(s->p.slots, s->p.vocab, s->p.mask_bytes);
    if (takes > most)
        return td_fail(err, TD_INTERNAL, "grammars: %zu bytes were planned, the store takes %zu",
                       most, takes);
    return td_aside_create(&s->aside, err);
}

td_status td_samplers_init(struct td_samplers *s, const struct td_samplers_params *p,
                           struct td_error *err) {
    *s = (struct td_samplers){.p = *p, .mask_words = mask_words(p->vocab)};
    s->of = calloc(p->slots, sizeof *s->of);
    s->counts = calloc((size_t)p->slots * p->vocab, sizeof *s->counts);
    s->masks = calloc((size_t)p->slots * s->mask_words, sizeof *s->masks);
    size_t lanes = p->threads > 1 ? p->threads : 1;
    s->shaped = calloc(lanes * p->vocab, sizeof *s->shaped);
    s->work = calloc(lanes, td_sample_workspace(p->vocab));
    td_status st =
        s->of && s->counts && s->masks && s->shaped && s->work
            ? open_store(s, err)
            : td_fail(err, TD_NO_MEMORY, "no memory for the sampling of %u sequences", p->slots);
    if (st == TD_OK && lanes > 1) st = td_threads_create(p->threads, &s->threads, err);
    s->p.tokenizer = NULL;
    if (st != TD_OK) td_samplers_finish(s);
    return st;
}

void td_samplers_finish(struct td_samplers *s) {
    td_aside_destroy(s->aside);
    td_threads_destroy(s->threads);
    td_grammars_destroy(s->store);
    free(s->of);
    free(s->counts);
    free(s->masks);
    free(s->shaped);
    free(s->work);
    *s = (struct td_samplers){0};
}

/* ---- following ---- */

static bool penalised(const struct td_sampling *p) {
    return p->frequency_penalty != 0 || p->presence_penalty != 0 ||
           (p->repetition_penalty != 0 && p->repetition_penalty != 1);
}

static bool guided(const struct td_sampling *p) {
    return p->guide && p->guide->grammar_n > 0;
}

static uint32_t *counts_of(const struct td_samplers *s, uint32_t slot) {
    return s->counts + (size_t)slot * s->p.vocab;
}

static uint32_t *mask_of(const struct td_samplers *s, uint32_t slot) {
    return s->masks + (size_t)slot * s->mask_words;
}

static void count(const struct td_samplers *s, uint32_t slot, int32_t id) {
    if ((uint32_t)id < s->p.vocab) counts_of(s, slot)[id]++;
}

/* A token of the answer. */
static void advance(struct td_samplers *s, const struct td_worker_sample *p, int32_t id) {
    struct td_sampler *of = &s->of[p->slot];
    if (penalised(p->sampling)) count(s, p->slot, id);
    if (!of->grammar || of->why.status != TD_OK) return;
    of->masked = false;
    if (!td_grammars_token(s->store, &of->matcher, id))
        of->why.status =
            td_fail(&of->why, TD_CORRUPT,
                    "token %d of the answer is not one that its grammar allows there", id);
}

static void open_grammar(struct td_samplers *s, struct td_sampler *of, const struct td_guide *g) {
    if (of->grammar) td_grammars_close(s->store, of->grammar);
    of->grammar = NULL;
    of->masked = false;
    of->why.status = TD_OK;
    if (!g || g->grammar_n == 0) return;
    if (!s->store)
        of->why.status = td_fail(&of->why, TD_UNSUPPORTED,
                                 "this worker's model folder has no tokenizer.json, so no grammar "
                                 "can be enforced");
    else
        of->why.status =
            td_grammars_open(s->store, g->grammar, g->grammar_n, &of->grammar, &of->why);
    if (of->grammar) td_matcher_init(&of->matcher, of->grammar);
}

static void begin(struct td_samplers *s, const struct td_worker_sample *p) {
    const struct td_sampling *q = p->sampling;
    if (penalised(q)) {
        uint32_t *counts = counts_of(s, p->slot);
        memset(counts, 0, s->p.vocab * sizeof *counts);
        for (uint32_t i = 0; q->guide && i < q->guide->n_prompt_ids; i++)
            if ((uint32_t)q->guide->prompt_id[i] < s->p.vocab)
                counts[q->guide->prompt_id[i]] = TD_COUNT_PROMPT;
    }
    open_grammar(s, &s->of[p->slot], q->guide);
    for (uint32_t i = 0; q->said && i < q->n_said; i++)
        advance(s, p, q->said[i]);
    s->of[p->slot].owner = p->owner;
}

/* The tokens up to the one that this step fed, and what may come behind it. */
static void follow(struct td_samplers *s, const struct td_worker_sample *p) {
    struct td_sampler *of = &s->of[p->slot];
    assert(p->slot < s->p.slots);
    if (!penalised(p->sampling) && !guided(p->sampling)) return;
    if (p->owner == 0 || of->owner != p->owner) begin(s, p);
    if (p->fed >= 0) advance(s, p, p->fed);
    if (!of->grammar || of->masked || of->why.status != TD_OK) return;
    td_grammars_mask(s->store, &of->matcher, mask_of(s, p->slot));
    of->masked = true;
}

static void follow_all(void *samplers) {
    struct td_samplers *s = samplers;
    for (uint32_t i = 0; i < s->n_samples; i++)
        follow(s, &s->samples[i]);
}

void td_samplers_follow(struct td_samplers *s, const struct td_worker_sample *samples, uint32_t n) {
    bool grammars = false;
    s->samples = samples;
    s->n_samples = n;
    for (uint32_t i = 0; i < n; i++)
        grammars |= guided(samples[i].sampling);
    if (grammars && s->aside)
        td_aside_start(s->aside, follow_all, s);
    else
        follow_all(s);
}

void td_samplers_wait(struct td_samplers *s) {
    if (s->aside) td_aside_wait(s->aside);
}

/* ---- drawing ---- */

/* Whether anything may come but `id`. */
static bool any_other(const struct td_samplers *s, const uint32_t *mask, int32_t id) {
    for (uint32_t i = 0; i < s->mask_words; i++) {
        uint32_t own = id >= 0 && (uint32_t)id / 32 == i ? 1u << id % 32 : 0;
        if (mask[i] & ~own) return true;
    }
    return false;
}

/* The logits to choose from, or NULL: the model's as they are. Where nothing but the end may come,
 * it comes, however early. */
static td_status shape(const struct td_samplers *s, const float *logits,
                       const struct td_worker_sample *p, float *shaped, const float **ret,
                       struct td_error *err) {
    const struct td_sampling *q = p->sampling;
    const struct td_guide *g = q->guide;
    const uint32_t *mask = guided(q) ? mask_of(s, p->slot) : NULL;
    bool early = p->position < q->end_from && s->p.eos >= 0, counted = penalised(q);
    if (mask && !any_other(s, mask, s->p.eos)) {
        early = false;
        if (!any_other(s, mask, -1))
            return td_fail(err, TD_INVALID,
                           "the answer's grammar allows no token of the vocabulary here");
    }
    *ret = NULL;
    if (!early && !counted && !mask && (!g || g->n_bias == 0)) return TD_OK;
    const struct td_shape t = {
        .n_bias = g ? g->n_bias : 0,
        .bias_id = g ? g->bias_id : NULL,
        .bias = g ? g->bias : NULL,
        .counts = counted ? counts_of(s, p->slot) : NULL,
        .frequency = q->frequency_penalty,
        .presence = q->presence_penalty,
        .repetition = q->repetition_penalty != 0 ? q->repetition_penalty : 1,
        .mask = mask,
        .excluded = early ? s->p.eos : -1,
    };
    td_shape_logits(logits, s->p.vocab, &t, shaped);
    *ret = shaped;
    return TD_OK;
}

/* By thread `lane`, with working memory of its own. */
static td_status draw(const struct td_samplers *s, uint32_t lane, const float *logits,
                      const struct td_worker_sample *p, struct td_token *ret,
                      struct td_error *err) {
    void *work = s->work + lane * td_sample_workspace(s->p.vocab);
    float *room = s->shaped + (size_t)lane * s->p.vocab;
    const struct td_sampling *q = p->sampling;
    const struct td_error *why = &s->of[p->slot].why;
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
    const float *shaped = NULL;
    TD_TRY(td_sample_params_check(&params, err));
    if (guided(q) && why->status != TD_OK) return td_fail(err, why->status, "%s", why->text);
    TD_TRY(shape(s, logits, p, room, &shaped, err));
    TD_TRY(td_sample(logits, shaped, s->p.vocab, &params, p->position, work, &t, err));
    ret->id = t.token;
    ret->logprob = t.logprob;
    ret->n_top = t.n_top;
    for (uint32_t i = 0; i < t.n_top; i++)
        ret->top[i] = (struct td_token_alt){.id = t.top[i].id, .logprob = t.top[i].logprob};
    return TD_OK;
}

td_status td_samplers_draw(struct td_samplers *s, const float *logits,
                           const struct td_worker_sample *p, struct td_token *ret,
                           struct td_error *err) {
    return draw(s, 0, logits, p, ret, err);
}

struct draws {
    const struct td_samplers *s;
    const float *logits;
    const struct td_worker_sample *samples;
    struct td_token *tokens;
    struct td_error *failed;
};

static void draw_some(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct draws *d = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *row = d->logits + (size_t)d->samples[i].row * d->s->p.vocab;
        d->failed[i].status = draw(d->s, thread, row, &d->samples[i], &d->tokens[i], &d->failed[i]);
    }
}

void td_samplers_draw_all(struct td_samplers *s, const float *logits,
                          const struct td_worker_sample *samples, uint32_t n,
                          struct td_token *tokens, struct td_error *failed) {
    const struct draws d = {s, logits, samples, tokens, failed};
    if (s->threads && n > 1)
        td_threads_run(s->threads, draw_some, &d, n);
    else
        draw_some(&d, 0, n, 0);
}

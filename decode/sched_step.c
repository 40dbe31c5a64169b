/* What goes into a step: one token for every running sequence, then a chunk of one self-prefilled
 * prompt in what is left of the budget; and what comes out of it. */
#include <stdio.h>

#include "decode/sched_parts.h"

/* ---- growing ---- */

/* The router numbers a request's choices like requests that follow each other. */
static uint64_t age(const struct seq *s) {
    return s->key.request + s->choice;
}

static struct seq *youngest(struct td_decode *d) {
    struct seq *y = NULL;
    for (uint32_t i = 0; i < d->o.slots; i++) {
        struct seq *s = &d->seq[i];
        if (s->state != FREE && s->state != ENDING && s->state != JOINING &&
            (y == NULL || age(s) > age(y)))
            y = s;
    }
    return y;
}

/* Between steps only a handoff that is still being unpacked keeps pages of a sequence that is over:
 * they come back without anybody else making room. */
static bool pages_come_back(const struct td_decode *d) {
    for (uint32_t i = 0; i < d->o.slots; i++)
        if (d->seq[i].state == ENDING) return true;
    return false;
}

static bool has_page(const struct td_decode *d, const struct seq *s) {
    return s->pos / td_kv_page_tokens(d->o.split) < s->n_pages;
}

/* A page for the next token. When there is none, the youngest sequence makes room, which may be
 * this one: then it is no longer RUNNING. */
static void grow(struct td_decode *d, struct seq *s) {
    while (s->state == RUNNING && !has_page(d, s)) {
        if (d->pages.count[TD_UNIT_FREE] == 0) {
            if (pages_come_back(d)) return;
            td_seq_fail(d, youngest(d), TD_PREEMPTED,
                        "every page is taken and the youngest sequence has to make room");
            continue;
        }
        td_status st =
            td_ledger_take(&d->pages, s->owner, 1, td_seq_pages(d, s) + s->n_pages, NULL);
        assert(st == TD_OK && s->n_pages < d->pages_per_seq);
        (void)st;
        s->n_pages++;
    }
}

/* ---- building ---- */

/* The token sampled from position p's logits stands at p + 1. */
static void sample(struct td_decode *d, struct seq *s, uint32_t row, uint32_t position,
                   int32_t fed) {
    d->sample_seq[d->n_samples] = (uint32_t)(s - d->seq);
    d->samples[d->n_samples++] =
        (struct td_decode_sample){&s->sampling, position, row, s->slot, s->owner, fed};
}

static void add(struct td_decode *d, struct seq *s, uint32_t n, const int32_t *ids, bool logits) {
    s->step_n = n;
    d->run_seq[d->n_runs] = (uint32_t)(s - d->seq);
    d->runs[d->n_runs++] = (struct td_run){
        .slot = s->slot,
        .pos = s->pos,
        .n = n,
        .ids = ids,
        .pages = td_seq_pages(d, s),
        .want_logits = logits,
    };
}

/* Every choice of a prompt that will be complete; those that join take part in the step, so that
 * none of them goes while it runs. */
static void sample_choices(struct td_decode *d, struct seq *lead, uint32_t row) {
    for (struct seq *s = NULL; (s = td_seq_next_choice(d, lead->key, s)) != NULL;) {
        if (s == lead ? lead->dropped : s->state != JOINING) continue;
        sample(d, s, row, lead->n_prompt, -1);
        if (s != lead) s->step_n = 1;
    }
}

static void add_chunk(struct td_decode *d, uint32_t budget) {
    struct seq *s = NULL;
    for (uint32_t i = 0; i < d->o.slots; i++)
        if (d->seq[i].state == PREFILLING && (s == NULL || d->seq[i].owner < s->owner))
            s = &d->seq[i];
    if (s == NULL || budget == 0) return;
    uint32_t left = s->n_prompt - s->pos, n = left;
    if (left > budget) {
        uint32_t end = (s->pos + budget) / TD_KV_PAGE_TOKENS * TD_KV_PAGE_TOKENS;
        n = end > s->pos ? end - s->pos : budget;
    }
    uint32_t row = d->n_samples;
    add(d, s, n, s->ids + s->pos, n == left);
    if (n == left) sample_choices(d, s, row);
}

void td_decode_run(struct td_decode *d) {
    if (d->stepping) return;
    for (uint32_t i = 0; i < d->o.slots; i++)
        grow(d, &d->seq[i]);
    d->n_runs = d->n_samples = 0;
    for (uint32_t i = 0; i < d->o.slots; i++)
        if (d->seq[i].state == RUNNING && has_page(d, &d->seq[i])) {
            sample(d, &d->seq[i], d->n_runs, d->seq[i].pos + 1, d->seq[i].last);
            add(d, &d->seq[i], 1, &d->seq[i].last, true);
        }
    add_chunk(d, d->o.max_tokens - d->n_runs);
    if (d->n_runs == 0) return;
    d->stepping = true;
    d->step_began_ns = d->now_ns;
    struct td_decode_action *a = td_fifo_push(&d->actions);
    a->kind = TD_DECODE_STEP;
    a->step.runs = d->runs;
    a->step.n_runs = d->n_runs;
    a->step.samples = d->samples;
    a->step.n_samples = d->n_samples;
}

/* ---- results ---- */

static void sampled(struct td_decode *d, struct seq *s, const struct td_token *token,
                    const struct td_selection *selection) {
    struct td_msg_tokens *m = &td_decode_say(d, TD_MSG_TOKENS)->tokens;
    m->key = s->key;
    m->choice = s->choice;
    m->index = s->produced;
    m->n = 1;
    m->tokens = token;
    m->selections = s->sampling.selections ? selection : NULL;
    td_seq_token(d, s, token->id);
}

static void step_failed(struct td_decode *d, struct seq *s, td_status status, const char *why) {
    char text[TD_TEXT_MAX];
    snprintf(text, sizeof text, "the engine could not compute a step%s%.200s",
             why != NULL ? ": " : "", why != NULL ? why : "");
    td_seq_fail(d, s, status, text);
}

void td_decode_step_done(struct td_decode *d, const struct td_decode_event *ev) {
    assert(d->stepping);
    d->stepping = false;
    d->steps++;
    uint64_t took = d->now_ns - d->step_began_ns;
    d->step_ns = d->step_ns == 0 ? took : (7 * d->step_ns + took) / 8;
    for (uint32_t k = 0; k < d->n_samples; k++)
        d->seq[d->sample_seq[k]].step_n = 0;
    for (uint32_t k = 0; k < d->n_runs; k++) {
        struct seq *s = &d->seq[d->run_seq[k]];
        s->pos += d->runs[k].n;
        s->step_n = 0;
        if (s->state == ENDING) continue; /* for nobody; it is let go after the step */
        if (ev->step.status != TD_OK)
            step_failed(d, s, ev->step.status, ev->step.text);
        else if (s->state == PREFILLING && d->runs[k].want_logits)
            td_seq_fork(d, s);
    }
    for (uint32_t k = 0; k < d->n_samples && ev->step.status == TD_OK; k++) {
        struct seq *s = &d->seq[d->sample_seq[k]];
        const struct td_error *failed = ev->step.failed != NULL ? &ev->step.failed[k] : NULL;
        if (s->state != RUNNING) continue;
        if (failed != NULL && failed->status != TD_OK)
            td_seq_fail(d, s, failed->status, failed->text);
        else
            sampled(d, s, &ev->step.tokens[k],
                    ev->step.selections != NULL ? &ev->step.selections[k] : NULL);
    }
}

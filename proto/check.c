/* The limits of every message field that has one. Checked before a message is encoded and after it
 * was decoded, so that a machine never sees, and a peer is never sent, anything outside them. */
#include <math.h>

#include "proto/codec_parts.h"

#define REFUSE(...) return td_fail(err, TD_PROTOCOL, __VA_ARGS__)

static td_status check_ids(const int32_t *ids, size_t n, const char *where, struct td_error *err) {
    if (n > 0 && !ids) REFUSE("%zu ids of the %s are missing", n, where);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0) REFUSE("id %zu of the %s is %d, expected >= 0", i, where, ids[i]);
    return TD_OK;
}

static td_status check_guide(const struct td_guide *g, struct td_error *err) {
    if (g->n_bias > TD_LOGIT_BIAS_MAX)
        REFUSE("%u biased ids, at most %d", g->n_bias, TD_LOGIT_BIAS_MAX);
    for (uint32_t i = 0; i < g->n_bias; i++)
        if (!isfinite(g->bias[i])) REFUSE("bias %u is %g", i, (double)g->bias[i]);
    if (g->grammar_n > TD_GUIDE_GRAMMAR_MAX || (g->grammar_n && !g->grammar))
        REFUSE("a grammar of %u bytes, at most %d", g->grammar_n, TD_GUIDE_GRAMMAR_MAX);
    TD_TRY(check_ids(g->bias_id, g->n_bias, "bias", err));
    return check_ids(g->prompt_id, g->n_prompt_ids, "prompt", err);
}

static bool penalty_fits(float p) {
    return p >= -2 && p <= 2;
}

static td_status check_sampling(const struct td_sampling *s, struct td_error *err) {
    if (!isfinite(s->temperature) || s->temperature < 0)
        REFUSE("temperature %g, expected a number >= 0", (double)s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1)) REFUSE("top_p %g is outside (0, 1]", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p < 1)) REFUSE("min_p %g is outside [0, 1)", (double)s->min_p);
    if (s->top_logprobs > TD_TOP_LOGPROBS_MAX)
        REFUSE("top_logprobs %u, at most %d", s->top_logprobs, TD_TOP_LOGPROBS_MAX);
    if (!penalty_fits(s->frequency_penalty) || !penalty_fits(s->presence_penalty))
        REFUSE("penalties %g and %g, expected -2 to 2", (double)s->frequency_penalty,
               (double)s->presence_penalty);
    if (!(s->repetition_penalty >= 0) || isinf(s->repetition_penalty))
        REFUSE("repetition penalty %g, expected a number above 0", (double)s->repetition_penalty);
    if (s->guide) TD_TRY(check_guide(s->guide, err));
    return check_ids(s->said, s->n_said, "answer", err);
}

/* `n` of a request with several choices. */
static td_status check_choices(uint32_t n, struct td_error *err) {
    if (n > TD_CHOICES_MAX) REFUSE("%u choices, at most %d", n, TD_CHOICES_MAX);
    return TD_OK;
}

static td_status check_choice(uint32_t choice, struct td_error *err) {
    if (choice >= TD_CHOICES_MAX) REFUSE("choice %u, at most %d", choice, TD_CHOICES_MAX - 1);
    return TD_OK;
}

static td_status check_only(uint32_t only, struct td_error *err) {
    return only == 0 ? TD_OK : check_choice(only - 1, err);
}

static td_status check_tokens(const struct td_token *t, size_t n, struct td_error *err) {
    for (size_t i = 0; i < n; i++) {
        if (t[i].id < 0) REFUSE("token %zu has id %d, expected >= 0", i, t[i].id);
        if (isnan(t[i].logprob)) REFUSE("token %zu has a logprob that is no number", i);
        if (t[i].n_top > TD_TOP_LOGPROBS_MAX)
            REFUSE("token %zu has %u alternatives, at most %d", i, t[i].n_top, TD_TOP_LOGPROBS_MAX);
        for (uint32_t k = 0; k < t[i].n_top; k++)
            if (t[i].top[k].id < 0 || isnan(t[i].top[k].logprob))
                REFUSE("alternative %u of token %zu is no token", k, i);
    }
    return TD_OK;
}

static td_status check_selection(const struct td_selection *s, struct td_error *err) {
    uint32_t at = 0;
    if (s->n_layers > TD_SELECTION_LAYERS_MAX)
        REFUSE("a selection in %u layers, at most %d", s->n_layers, TD_SELECTION_LAYERS_MAX);
    for (uint32_t l = 0; l < s->n_layers; l++) {
        if (l > 0 && s->layer[l] <= s->layer[l - 1]) REFUSE("a selection's layers do not ascend");
        if (s->count[l] > TD_SELECTION_ENTRIES_MAX || s->count[l] > s->n_entries - at)
            REFUSE("layer %u selects %u entries, at most %d, %u are left", s->layer[l], s->count[l],
                   TD_SELECTION_ENTRIES_MAX, s->n_entries - at);
        for (uint32_t i = 1; i < s->count[l]; i++)
            if (s->entry[at + i] <= s->entry[at + i - 1])
                REFUSE("entries of layer %u do not ascend", s->layer[l]);
        at += s->count[l];
    }
    if (at != s->n_entries) REFUSE("%u selected entries belong to no layer", s->n_entries - at);
    return TD_OK;
}

static td_status check_tokens_msg(const struct td_msg_tokens *m, struct td_error *err) {
    if (m->n < 1 || m->n > TD_TOKENS_PER_MSG_MAX)
        REFUSE("%u tokens in a message, expected 1 to %d", m->n, TD_TOKENS_PER_MSG_MAX);
    TD_TRY(check_choice(m->choice, err));
    for (uint32_t i = 0; m->selections && i < m->n; i++)
        TD_TRY(check_selection(&m->selections[i], err));
    return check_tokens(m->tokens, m->n, err);
}

static td_status check_blob(const uint8_t *p, size_t n, size_t max, const char *what,
                            struct td_error *err) {
    if (n > max) REFUSE("%s of %zu bytes, at most %zu", what, n, max);
    if (n && !p) REFUSE("%s of %zu bytes is missing", what, n);
    return TD_OK;
}

static td_status check_hello(const struct td_msg_hello *h, struct td_error *err) {
    if (h->role != TD_ROLE_ROUTER && h->role != TD_ROLE_PREFILL && h->role != TD_ROLE_DECODE)
        REFUSE("role %d is none of 1, 2, 3", (int)h->role);
    if (!h->name[0]) REFUSE("a hello without a name");
    TD_TRY(check_blob(h->xfer_address, h->xfer_address_len, TD_MSG_ADDRESS_MAX,
                      "a transfer address", err));
    return check_blob((const uint8_t *)h->settings, h->settings_len, TD_SETTINGS_MAX, "settings",
                      err);
}

static td_status check_admit(const struct td_msg_admit *a, struct td_error *err) {
    if (a->n_prompt < 1) REFUSE("an empty prompt");
    if (a->max_new < 1) REFUSE("max_new is 0, expected at least 1");
    TD_TRY(check_choices(a->n, err));
    TD_TRY(check_sampling(&a->sampling, err));
    return a->ids ? check_ids(a->ids, a->n_prompt, "prompt", err) : TD_OK;
}

static td_status check_prefill(const struct td_msg_prefill *p, struct td_error *err) {
    if (p->n_prompt < 1 || !p->ids) REFUSE("an empty prompt");
    if (p->max_new < 1) REFUSE("max_new is 0, expected at least 1");
    TD_TRY(check_choices(p->n, err));
    TD_TRY(check_sampling(&p->sampling, err));
    TD_TRY(check_ids(p->ids, p->n_prompt, "prompt", err));
    return check_blob(p->decode_address, p->decode_address_len, TD_MSG_ADDRESS_MAX,
                      "a transfer address", err);
}

static td_status check_welcome(const struct td_msg_peer_welcome *w, struct td_error *err) {
    if (w->n_slabs > TD_LANDING_SLABS_MAX)
        REFUSE("%u landing slabs, at most %d", w->n_slabs, TD_LANDING_SLABS_MAX);
    if (w->status == TD_OK && (!w->n_slabs || !w->slab_bytes)) REFUSE("a welcome without slabs");
    return check_blob(w->rkey, w->rkey_len, TD_RKEY_MAX, "a remote key", err);
}

static td_status check_manifest(const struct td_msg_manifest *m, struct td_error *err) {
    if (m->n_prompt < 1) REFUSE("a manifest of an empty prompt");
    if (m->n_families > TD_KV_FAMILIES_MAX)
        REFUSE("%u families, at most %d", m->n_families, TD_KV_FAMILIES_MAX);
    if (m->n_first > TD_FIRST_TOKENS_MAX)
        REFUSE("%u first tokens, at most %d", m->n_first, TD_FIRST_TOKENS_MAX);
    return check_tokens(m->first, m->n_first, err);
}

td_status td_msg_check(const struct td_msg *m, struct td_error *err) {
    switch (m->type) {
    case TD_MSG_HELLO:
        return check_hello(&m->hello, err);
    case TD_MSG_ADMIT:
        return check_admit(&m->admit, err);
    case TD_MSG_PREFILL:
        return check_prefill(&m->prefill, err);
    case TD_MSG_TOKENS:
        return check_tokens_msg(&m->tokens, err);
    case TD_MSG_FINISHED:
        if (m->finished.reason != TD_FINISH_STOP && m->finished.reason != TD_FINISH_LENGTH)
            REFUSE("finish reason %d is neither 1 nor 2", (int)m->finished.reason);
        return check_choice(m->finished.choice, err);
    case TD_MSG_FAILED:
        return check_only(m->failed.only, err);
    case TD_MSG_CANCEL:
        return check_only(m->cancel.only, err);
    case TD_MSG_MOVED:
        return check_blob(m->moved.xfer_address, m->moved.xfer_address_len, TD_MSG_ADDRESS_MAX,
                          "a transfer address", err);
    case TD_MSG_PEER_HELLO:
        if (!m->peer_hello.name[0]) REFUSE("a hello without a name");
        return check_blob(m->peer_hello.xfer_address, m->peer_hello.xfer_address_len,
                          TD_MSG_ADDRESS_MAX, "a transfer address", err);
    case TD_MSG_PEER_WELCOME:
        return check_welcome(&m->peer_welcome, err);
    case TD_MSG_MANIFEST:
        return check_manifest(&m->manifest, err);
    case TD_MSG_HELLO_REPLY:
    case TD_MSG_HEARTBEAT:
    case TD_MSG_ADMIT_REPLY:
    case TD_MSG_KEEP:
    case TD_MSG_RELEASED:
    case TD_MSG_LEDGER:
    case TD_MSG_PEER_BEAT:
    case TD_MSG_SLAB:
    case TD_MSG_CREDIT:
    case TD_MSG_VERDICT:
    case TD_MSG_ABORT:
        return TD_OK;
    }
    REFUSE("message type %d does not exist", (int)m->type);
}

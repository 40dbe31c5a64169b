/* The control plane's messages (router <-> workers) to protobuf structs and back. */
#include "proto/codec_parts.h"

/* Sets p->frame's body to the scratch of one kind. */
#define BODY(kind, KIND)                                                                           \
    TdPb__##KIND *b = &p->body.kind;                                                               \
    td_pb__##kind##__init(b);                                                                      \
    p->frame.kind = b

static TdPb__Key *pack_key(struct td_pack *p, struct td_key k) {
    td_pb__key__init(&p->key);
    p->key.request = k.request;
    p->key.attempt = k.attempt;
    return &p->key;
}

static TdPb__Sampling *pack_sampling(struct td_pack *p, const struct td_sampling *s) {
    TdPb__Sampling *b = &p->sampling;
    td_pb__sampling__init(b);
    b->temperature = s->temperature;
    b->top_p = s->top_p;
    b->min_p = s->min_p;
    b->top_k = s->top_k;
    b->seed = s->seed;
    b->top_logprobs = s->top_logprobs;
    b->logprobs = s->logprobs;
    b->ignore_eos = s->ignore_eos;
    b->selections = s->selections;
    b->frequency_penalty = s->frequency_penalty;
    b->presence_penalty = s->presence_penalty;
    b->repetition_penalty = s->repetition_penalty;
    b->end_from = s->end_from;
    b->n_said = s->n_said;
    b->said = (uint32_t *)s->said;
    const struct td_guide *g = s->guide;
    if (!g) return b;
    b->n_bias_id = b->n_bias = g->n_bias;
    b->bias_id = (uint32_t *)g->bias_id;
    b->bias = (float *)g->bias;
    b->n_prompt_id = g->n_prompt_ids;
    b->prompt_id = (uint32_t *)g->prompt_id;
    b->grammar.data = (uint8_t *)g->grammar;
    b->grammar.len = g->grammar_n;
    return b;
}

static void pack_hello(struct td_pack *p, const struct td_msg_hello *m) {
    BODY(hello, Hello);
    b->version = m->version;
    b->role = m->role;
    b->name = (char *)m->name;
    b->epoch = m->epoch;
    b->pid = m->pid;
    b->fingerprint = m->fingerprint;
    b->numerics_id = m->numerics_id;
    b->numerics = (char *)m->numerics;
    b->model = (char *)m->model;
    b->max_context = m->max_context;
    b->max_running = m->max_running;
    b->pages = m->pages;
    b->slots = m->slots;
    b->selection_max = m->selection_max;
    b->page_tokens = m->page_tokens;
    b->xfer_address.data = (uint8_t *)m->xfer_address;
    b->xfer_address.len = m->xfer_address_len;
    b->xfer_number = m->xfer_number;
    b->settings.data = (uint8_t *)m->settings;
    b->settings.len = m->settings_len;
}

static void pack_heartbeat(struct td_pack *p, const struct td_msg_heartbeat *m) {
    BODY(heartbeat, Heartbeat);
    b->epoch = m->epoch;
    b->seq = m->seq;
    b->running = m->running;
    b->waiting = m->waiting;
    b->queued_tokens = m->queued_tokens;
    b->free_pages = m->free_pages;
    b->free_slots = m->free_slots;
    b->steps = m->steps;
    b->busy = m->busy;
}

static void pack_admit(struct td_pack *p, const struct td_msg_admit *m) {
    BODY(admit, Admit);
    b->key = pack_key(p, m->key);
    b->n_prompt = m->n_prompt;
    b->max_new = m->max_new;
    b->sampling = pack_sampling(p, &m->sampling);
    b->n_ids = m->ids ? m->n_prompt : 0;
    b->ids = (uint32_t *)m->ids;
    b->prompt_hash = m->prompt_hash;
    b->n = m->n;
}

static void pack_admit_reply(struct td_pack *p, const struct td_msg_admit_reply *m) {
    BODY(admit_reply, AdmitReply);
    b->key = pack_key(p, m->key);
    b->status = m->status;
    b->text = (char *)m->text;
    b->ticket = m->ticket;
    b->lease_ms = m->lease_ms;
    b->retry_ms = m->retry_ms;
}

static void pack_prefill(struct td_pack *p, const struct td_msg_prefill *m) {
    BODY(prefill, Prefill);
    b->key = pack_key(p, m->key);
    b->max_new = m->max_new;
    b->sampling = pack_sampling(p, &m->sampling);
    b->n_ids = m->n_prompt;
    b->ids = (uint32_t *)m->ids;
    b->ticket = m->ticket;
    b->decode_epoch = m->decode_epoch;
    b->decode_name = (char *)m->decode_name;
    b->decode_address.data = (uint8_t *)m->decode_address;
    b->decode_address.len = m->decode_address_len;
    b->decode_number = m->decode_number;
    b->n = m->n;
}

static void pack_moved(struct td_pack *p, const struct td_msg_moved *m) {
    BODY(moved, Moved);
    b->epoch = m->epoch;
    b->xfer_address.data = (uint8_t *)m->xfer_address;
    b->xfer_address.len = m->xfer_address_len;
    b->xfer_number = m->xfer_number;
}

static void pack_ledger(struct td_pack *p, const struct td_msg_ledger *m) {
    BODY(ledger, Ledger);
    b->pages_free = m->pages_free;
    b->pages_owned = m->pages_owned;
    b->slots_free = m->slots_free;
    b->slots_owned = m->slots_owned;
    b->landing_free = m->landing_free;
    b->landing_granted = m->landing_granted;
    b->landing_quarantined = m->landing_quarantined;
    b->send_free = m->send_free;
    b->send_busy = m->send_busy;
    b->handoffs_ok = m->handoffs_ok;
    b->handoffs_failed = m->handoffs_failed;
    b->bytes_moved = m->bytes_moved;
    b->cancels = m->cancels;
    b->bytes_before_last_chunk = m->bytes_before_last_chunk;
    b->pages_shared = m->pages_shared;
}

static void pack_selections(struct td_pack *p, const struct td_msg_tokens *m, TdPb__Tokens *b) {
    b->n_selections = m->selections ? m->n : 0;
    b->selections = p->selections;
    for (size_t i = 0; i < b->n_selections; i++) {
        const struct td_selection *s = &m->selections[i];
        TdPb__Selection *to = p->selections[i] = &p->selection[i];
        td_pb__selection__init(to);
        to->n_layer = to->n_count = s->n_layers;
        to->layer = (uint32_t *)s->layer;
        to->count = (uint32_t *)s->count;
        to->n_entry = s->n_entries;
        to->entry = (uint32_t *)s->entry;
    }
}

static void pack_result(struct td_pack *p, const struct td_msg *m) {
    if (m->type == TD_MSG_TOKENS) {
        BODY(tokens, Tokens);
        b->key = pack_key(p, m->tokens.key);
        b->choice = m->tokens.choice;
        b->index = m->tokens.index;
        b->tokens = td_pack_tokens(p, m->tokens.tokens, m->tokens.n);
        pack_selections(p, &m->tokens, b);
    } else if (m->type == TD_MSG_FINISHED) {
        BODY(finished, Finished);
        b->key = pack_key(p, m->finished.key);
        b->choice = m->finished.choice;
        b->reason = m->finished.reason;
        b->n_tokens = m->finished.n_tokens;
    } else if (m->type == TD_MSG_FAILED) {
        BODY(failed, Failed);
        b->key = pack_key(p, m->failed.key);
        b->only = m->failed.only;
        b->status = m->failed.status;
        b->text = (char *)m->failed.text;
    } else {
        BODY(released, Released);
        b->key = pack_key(p, m->released.key);
        b->queue_ns = m->released.queue_ns;
        b->compute_ns = m->released.compute_ns;
        b->transfer_ns = m->released.transfer_ns;
    }
}

static void pack_small(struct td_pack *p, const struct td_msg *m) {
    if (m->type == TD_MSG_HELLO_REPLY) {
        BODY(hello_reply, HelloReply);
        b->version = m->hello_reply.version;
        b->epoch = m->hello_reply.epoch;
        b->status = m->hello_reply.status;
        b->text = (char *)m->hello_reply.text;
    } else if (m->type == TD_MSG_KEEP) {
        BODY(keep, Keep);
        b->key = pack_key(p, m->keep.key);
    } else {
        BODY(cancel, Cancel);
        b->key = pack_key(p, m->cancel.key);
        b->only = m->cancel.only;
    }
}

void td_pack_control(struct td_pack *p, const struct td_msg *m) {
    p->frame.body_case = (TdPb__Frame__BodyCase)m->type;
    switch ((int)m->type) {
    case TD_MSG_HELLO:
        pack_hello(p, &m->hello);
        return;
    case TD_MSG_HEARTBEAT:
        pack_heartbeat(p, &m->heartbeat);
        return;
    case TD_MSG_ADMIT:
        pack_admit(p, &m->admit);
        return;
    case TD_MSG_ADMIT_REPLY:
        pack_admit_reply(p, &m->admit_reply);
        return;
    case TD_MSG_PREFILL:
        pack_prefill(p, &m->prefill);
        return;
    case TD_MSG_LEDGER:
        pack_ledger(p, &m->ledger);
        return;
    case TD_MSG_MOVED:
        pack_moved(p, &m->moved);
        return;
    case TD_MSG_TOKENS:
    case TD_MSG_FINISHED:
    case TD_MSG_FAILED:
    case TD_MSG_RELEASED:
        pack_result(p, m);
        return;
    default:
        pack_small(p, m);
        return;
    }
}

/* ---- the way back ---- */

static struct td_key unpack_key(const TdPb__Key *k) {
    return k ? (struct td_key){.request = k->request, .attempt = k->attempt} : (struct td_key){0};
}

static td_status unpack_guide(const TdPb__Sampling *b, struct td_msg_arena *a,
                              struct td_sampling *s, struct td_error *err) {
    if (b->n_said > UINT32_MAX || b->n_prompt_id > UINT32_MAX || b->n_bias > UINT32_MAX)
        return td_fail(err, TD_PROTOCOL, "%zu ids of the answer, %zu of the prompt", b->n_said,
                       b->n_prompt_id);
    if (b->n_bias_id != b->n_bias)
        return td_fail(err, TD_PROTOCOL, "%zu ids came with %zu biases", b->n_bias_id, b->n_bias);
    s->n_said = (uint32_t)b->n_said;
    s->said = b->n_said ? (const int32_t *)b->said : NULL;
    if (b->grammar.len > TD_GUIDE_GRAMMAR_MAX)
        return td_fail(err, TD_PROTOCOL, "a grammar of %zu bytes, at most %d", b->grammar.len,
                       TD_GUIDE_GRAMMAR_MAX);
    if (!b->n_bias && !b->n_prompt_id && !b->grammar.len) return TD_OK;
    struct td_guide *g = td_msg_arena_take(a, sizeof *g);
    if (!g) return td_fail(err, TD_TOO_LONG, "no room for %zu biases", b->n_bias);
    *g = (struct td_guide){.n_bias = (uint32_t)b->n_bias,
                           .bias_id = (const int32_t *)b->bias_id,
                           .bias = b->bias,
                           .n_prompt_ids = (uint32_t)b->n_prompt_id,
                           .prompt_id = (const int32_t *)b->prompt_id,
                           .grammar_n = (uint32_t)b->grammar.len,
                           .grammar = b->grammar.data};
    s->guide = g;
    return TD_OK;
}

static td_status unpack_sampling(const TdPb__Sampling *b, struct td_msg_arena *a,
                                 struct td_sampling *s, struct td_error *err) {
    s->top_p = 1;
    if (!b) return TD_OK;
    s->temperature = b->temperature;
    if (b->top_p != 0) s->top_p = b->top_p; /* a missing one is "off" */
    s->min_p = b->min_p;
    s->top_k = b->top_k;
    s->seed = b->seed;
    s->top_logprobs = b->top_logprobs;
    s->logprobs = b->logprobs;
    s->ignore_eos = b->ignore_eos;
    s->selections = b->selections;
    s->frequency_penalty = b->frequency_penalty;
    s->presence_penalty = b->presence_penalty;
    s->repetition_penalty = b->repetition_penalty;
    s->end_from = b->end_from;
    return unpack_guide(b, a, s, err);
}

static td_status unpack_hello(const TdPb__Hello *b, struct td_msg_hello *m, struct td_error *err) {
    m->version = b->version;
    m->role = (enum td_role)b->role;
    TD_TRY(td_unpack_text(b->name, m->name, sizeof m->name, "name", err));
    m->epoch = b->epoch;
    m->pid = b->pid;
    m->fingerprint = b->fingerprint;
    m->numerics_id = b->numerics_id;
    TD_TRY(td_unpack_text(b->numerics, m->numerics, sizeof m->numerics, "numerics", err));
    TD_TRY(td_unpack_text(b->model, m->model, sizeof m->model, "model", err));
    m->max_context = b->max_context;
    m->max_running = b->max_running;
    m->pages = b->pages;
    m->slots = b->slots;
    m->selection_max = b->selection_max;
    m->page_tokens = b->page_tokens;
    m->xfer_address = b->xfer_address.data;
    m->xfer_address_len = b->xfer_address.len;
    m->xfer_number = b->xfer_number;
    m->settings = (const char *)b->settings.data;
    m->settings_len = b->settings.len;
    return TD_OK;
}

static void unpack_heartbeat(const TdPb__Heartbeat *b, struct td_msg_heartbeat *m) {
    m->epoch = b->epoch;
    m->seq = b->seq;
    m->running = b->running;
    m->waiting = b->waiting;
    m->queued_tokens = b->queued_tokens;
    m->free_pages = b->free_pages;
    m->free_slots = b->free_slots;
    m->steps = b->steps;
    m->busy = b->busy;
}

static td_status unpack_admit(const TdPb__Admit *b, struct td_msg_arena *a, struct td_msg_admit *m,
                              struct td_error *err) {
    if (b->n_ids && b->n_ids != b->n_prompt)
        return td_fail(err, TD_PROTOCOL, "a prompt of %u tokens came with %zu ids", b->n_prompt,
                       b->n_ids);
    m->key = unpack_key(b->key);
    m->n_prompt = b->n_prompt;
    m->max_new = b->max_new;
    TD_TRY(unpack_sampling(b->sampling, a, &m->sampling, err));
    m->ids = b->n_ids ? (const int32_t *)b->ids : NULL;
    m->prompt_hash = b->prompt_hash;
    m->n = b->n;
    return TD_OK;
}

static td_status unpack_admit_reply(const TdPb__AdmitReply *b, struct td_msg_admit_reply *m,
                                    struct td_error *err) {
    m->key = unpack_key(b->key);
    m->status = td_unpack_status(b->status);
    m->ticket = b->ticket;
    m->lease_ms = b->lease_ms;
    m->retry_ms = b->retry_ms;
    return td_unpack_text(b->text, m->text, sizeof m->text, "text", err);
}

static td_status unpack_prefill(const TdPb__Prefill *b, struct td_msg_arena *a,
                                struct td_msg_prefill *m, struct td_error *err) {
    if (b->n_ids > UINT32_MAX) return td_fail(err, TD_PROTOCOL, "a prompt of %zu ids", b->n_ids);
    m->key = unpack_key(b->key);
    m->n_prompt = (uint32_t)b->n_ids;
    m->max_new = b->max_new;
    TD_TRY(unpack_sampling(b->sampling, a, &m->sampling, err));
    m->ids = (const int32_t *)b->ids;
    m->ticket = b->ticket;
    m->decode_epoch = b->decode_epoch;
    m->decode_address = b->decode_address.data;
    m->decode_address_len = b->decode_address.len;
    m->decode_number = b->decode_number;
    m->n = b->n;
    return td_unpack_text(b->decode_name, m->decode_name, sizeof m->decode_name, "name", err);
}

static td_status unpack_selections(const TdPb__Tokens *b, struct td_msg_arena *a,
                                   struct td_msg_tokens *m, struct td_error *err) {
    size_t n = b->n_selections;
    if (n == 0) return TD_OK;
    if (n != m->n) return td_fail(err, TD_PROTOCOL, "%u tokens came with %zu selections", m->n, n);
    struct td_selection *s = td_msg_arena_take(a, n * sizeof *s);
    if (!s) return td_fail(err, TD_TOO_LONG, "no room for %zu selections", n);
    for (size_t i = 0; i < n; i++) {
        const TdPb__Selection *from = b->selections[i];
        if (from->n_layer != from->n_count || from->n_layer > TD_SELECTION_LAYERS_MAX ||
            from->n_entry > (size_t)TD_SELECTION_LAYERS_MAX * TD_SELECTION_ENTRIES_MAX)
            return td_fail(err, TD_PROTOCOL,
                           "a selection of %zu entries in %zu layers with %zu counts",
                           from->n_entry, from->n_layer, from->n_count);
        s[i] = (struct td_selection){(uint32_t)from->n_layer, (uint32_t)from->n_entry, from->layer,
                                     from->count, from->entry};
    }
    m->selections = s;
    return TD_OK;
}

static td_status unpack_tokens(const TdPb__Tokens *b, struct td_msg_arena *a,
                               struct td_msg_tokens *m, struct td_error *err) {
    m->key = unpack_key(b->key);
    m->choice = b->choice;
    m->index = b->index;
    if (!b->tokens) return td_fail(err, TD_PROTOCOL, "a tokens message without tokens");
    size_t n = b->tokens->n_id;
    if (n > TD_TOKENS_PER_MSG_MAX)
        return td_fail(err, TD_PROTOCOL, "%zu tokens in a message, at most %d", n,
                       TD_TOKENS_PER_MSG_MAX);
    struct td_token *t = td_msg_arena_take(a, n * sizeof *t);
    if (!t) return td_fail(err, TD_TOO_LONG, "no room for %zu tokens", n);
    m->n = (uint32_t)n;
    m->tokens = t;
    TD_TRY(td_unpack_tokens(b->tokens, t, n, err));
    return unpack_selections(b, a, m, err);
}

static void unpack_ledger(const TdPb__Ledger *b, struct td_msg_ledger *m) {
    m->pages_free = b->pages_free;
    m->pages_owned = b->pages_owned;
    m->slots_free = b->slots_free;
    m->slots_owned = b->slots_owned;
    m->landing_free = b->landing_free;
    m->landing_granted = b->landing_granted;
    m->landing_quarantined = b->landing_quarantined;
    m->send_free = b->send_free;
    m->send_busy = b->send_busy;
    m->handoffs_ok = b->handoffs_ok;
    m->handoffs_failed = b->handoffs_failed;
    m->bytes_moved = b->bytes_moved;
    m->cancels = b->cancels;
    m->bytes_before_last_chunk = b->bytes_before_last_chunk;
    m->pages_shared = b->pages_shared;
}

static td_status unpack_small(const TdPb__Frame *f, struct td_msg *m, struct td_error *err) {
    switch ((int)m->type) {
    case TD_MSG_HELLO_REPLY:
        m->hello_reply.version = f->hello_reply->version;
        m->hello_reply.epoch = f->hello_reply->epoch;
        m->hello_reply.status = td_unpack_status(f->hello_reply->status);
        return td_unpack_text(f->hello_reply->text, m->hello_reply.text, sizeof m->hello_reply.text,
                              "text", err);
    case TD_MSG_KEEP:
        m->keep.key = unpack_key(f->keep->key);
        return TD_OK;
    case TD_MSG_CANCEL:
        m->cancel.key = unpack_key(f->cancel->key);
        m->cancel.only = f->cancel->only;
        return TD_OK;
    case TD_MSG_FINISHED:
        m->finished.key = unpack_key(f->finished->key);
        m->finished.choice = f->finished->choice;
        m->finished.reason = (enum td_finish)f->finished->reason;
        m->finished.n_tokens = f->finished->n_tokens;
        return TD_OK;
    case TD_MSG_FAILED:
        m->failed.key = unpack_key(f->failed->key);
        m->failed.only = f->failed->only;
        m->failed.status = td_unpack_status(f->failed->status);
        return td_unpack_text(f->failed->text, m->failed.text, sizeof m->failed.text, "text", err);
    default:
        m->released.key = unpack_key(f->released->key);
        m->released.queue_ns = f->released->queue_ns;
        m->released.compute_ns = f->released->compute_ns;
        m->released.transfer_ns = f->released->transfer_ns;
        return TD_OK;
    }
}

td_status td_unpack_control(const TdPb__Frame *f, struct td_msg_arena *a, struct td_msg *m,
                            struct td_error *err) {
    switch ((int)m->type) {
    case TD_MSG_HELLO:
        return unpack_hello(f->hello, &m->hello, err);
    case TD_MSG_HEARTBEAT:
        unpack_heartbeat(f->heartbeat, &m->heartbeat);
        return TD_OK;
    case TD_MSG_ADMIT:
        return unpack_admit(f->admit, a, &m->admit, err);
    case TD_MSG_ADMIT_REPLY:
        return unpack_admit_reply(f->admit_reply, &m->admit_reply, err);
    case TD_MSG_PREFILL:
        return unpack_prefill(f->prefill, a, &m->prefill, err);
    case TD_MSG_TOKENS:
        return unpack_tokens(f->tokens, a, &m->tokens, err);
    case TD_MSG_LEDGER:
        unpack_ledger(f->ledger, &m->ledger);
        return TD_OK;
    case TD_MSG_MOVED:
        m->moved.epoch = f->moved->epoch;
        m->moved.xfer_address = f->moved->xfer_address.data;
        m->moved.xfer_address_len = f->moved->xfer_address.len;
        m->moved.xfer_number = f->moved->xfer_number;
        return TD_OK;
    default:
        return unpack_small(f, m, err);
    }
}

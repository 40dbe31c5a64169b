/* Tickets and slabs of the sending half; peers and their messages are in handoff_peer.c. */
#include "prefill/handoff.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "prefill/handoff_parts.h"

td_status td_sender_create(struct td_sender *s, const struct td_prefill_options *o,
                           struct td_fifo *actions, struct td_error *err) {
    assert(o->send_slabs >= 1 && o->max_peers >= 1);
    assert(o->slab_bytes >= td_kv_slot_block_bytes_max(o->layout));
    assert(o->slab_bytes >= td_kv_page_block_bytes_max(o->layout));
    *s = (struct td_sender){.o = o, .actions = actions};
    s->peer = calloc(o->max_peers, sizeof *s->peer);
    s->slab = calloc(o->send_slabs, sizeof *s->slab);
    s->ticket = calloc(o->max_requests, sizeof *s->ticket);
    if (s->peer == NULL || s->slab == NULL || s->ticket == NULL)
        return td_fail(err, TD_NO_MEMORY, "handoff tables: out of memory");
    return TD_OK;
}

void td_sender_destroy(struct td_sender *s) {
    free(s->peer);
    free(s->slab);
    free(s->ticket);
}

/* ---- tickets ---- */

void td_sender_open(struct td_sender *s, uint32_t i, const struct td_sender_order *o,
                    const struct td_sender_address *address) {
    struct td_sender_ticket *t = &s->ticket[i];
    struct td_error err;
    assert(t->state == TD_TICKET_NONE);
    *t = (struct td_sender_ticket){
        .state = TD_TICKET_OPEN,
        .o = *o,
        .peer = UINT32_MAX, /* nobody's yet, should one be lost in here */
        .page_blocks = td_kv_page_blocks(o->n_prompt),
        .deadline_ns = UINT64_MAX,
    };
    if (td_kv_tally_init(&t->tally, o->n_prompt, &err) != TD_OK) {
        td_ticket_over(s, i, err.status, err.text);
        return;
    }
    t->peer = td_peer_for(s, o->decode_epoch, address);
    if (t->peer == UINT32_MAX)
        td_ticket_over(s, i, TD_BUSY, "as many decode peers are connected as may be");
    else if (s->peer[t->peer].state == TD_PEER_CLOSING)
        td_ticket_over(s, i, TD_PEER_LOST, "the link to the decode worker is being closed");
}

void td_sender_ready(struct td_sender *s, uint32_t i, uint32_t tokens) {
    struct td_sender_ticket *t = &s->ticket[i];
    if (t->state != TD_TICKET_OPEN) return;
    t->ready = tokens / TD_KV_PAGE_TOKENS;
}

void td_sender_complete(struct td_sender *s, uint32_t i, const struct td_token *first) {
    struct td_sender_ticket *t = &s->ticket[i];
    if (t->state != TD_TICKET_OPEN) return;
    memcpy(t->first, first, t->o.n_first * sizeof *first);
    t->complete = true;
    t->ready = t->page_blocks + 1;
}

void td_ticket_over(struct td_sender *s, uint32_t i, td_status status, const char *text) {
    struct td_sender_ticket *t = &s->ticket[i];
    assert(t->state == TD_TICKET_OPEN);
    t->state = TD_TICKET_OVER;
    t->status = status;
    t->deadline_ns = UINT64_MAX;
    snprintf(t->text, sizeof t->text, "%s", text);
    if (status == TD_OK) s->handoffs_ok++;
    if (status != TD_OK && status != TD_CANCELLED) s->handoffs_failed++;
    /* What is flushed but not said goes no further. What was said comes back by CREDIT. */
    for (uint32_t k = 0; k < s->o->send_slabs; k++)
        if (s->slab[k].state == TD_SLAB_FLUSHED && s->slab[k].ticket == i) td_slab_free(s, k);
}

void td_sender_abort(struct td_sender *s, uint32_t i, td_status status, const char *text) {
    struct td_sender_ticket *t = &s->ticket[i];
    if (t->state != TD_TICKET_OPEN) return;
    uint32_t peer = t->peer;
    td_ticket_over(s, i, status, text);
    if (s->peer[peer].state != TD_PEER_OPEN) return;
    struct td_msg_abort *m = &td_peer_send(s, peer, TD_MSG_ABORT)->abort;
    m->epoch = s->o->epoch;
    m->ticket = t->o.ticket;
    m->status = status;
    snprintf(m->text, sizeof m->text, "%s", text);
}

void td_sender_drop(struct td_sender *s, uint32_t i) {
    if (s->ticket[i].state == TD_TICKET_OPEN)
        td_ticket_over(s, i, TD_CANCELLED, "the first token ended the answer");
}

bool td_sender_quiet(const struct td_sender *s, uint32_t i) {
    const struct td_sender_ticket *t = &s->ticket[i];
    return t->state == TD_TICKET_NONE || (t->state == TD_TICKET_OVER && t->slabs == 0);
}

void td_sender_forget(struct td_sender *s, uint32_t i) {
    assert(td_sender_quiet(s, i));
    s->ticket[i].state = TD_TICKET_NONE;
}

/* ---- slabs ---- */

void td_slab_free(struct td_sender *s, uint32_t k) {
    struct td_sender_slab *b = &s->slab[k];
    assert(b->state != TD_SLAB_FREE && s->ticket[b->ticket].slabs > 0);
    struct td_sender_landing *l = &s->peer[b->peer].landing[b->landing];
    if (l->state == TD_LANDING_RESERVED) l->state = TD_LANDING_OURS;
    s->ticket[b->ticket].slabs--;
    s->peer[b->peer].slabs--;
    b->state = TD_SLAB_FREE;
    td_peer_forget(s, b->peer);
}

static bool alive(const struct td_sender *s, const struct td_sender_slab *b) {
    return s->ticket[b->ticket].state == TD_TICKET_OPEN && s->peer[b->peer].state == TD_PEER_OPEN;
}

static void packed(struct td_sender *s, const struct td_prefill_event *ev) {
    uint32_t k = ev->packed.send_slab;
    assert(k < s->o->send_slabs && s->slab[k].state == TD_SLAB_PACKING);
    struct td_sender_slab *b = &s->slab[k];
    struct td_sender_ticket *t = &s->ticket[b->ticket];
    struct td_error err = {.status = ev->packed.status, .text = "packing KV blocks failed"};
    td_status st = ev->packed.status;
    if (alive(s, b)) {
        for (uint32_t j = 0; st == TD_OK && j < b->n_blocks; j++)
            st = td_kv_tally_add(&t->tally, &ev->packed.headers[j], &err);
        if (st != TD_OK) td_sender_abort(s, b->ticket, err.status, err.text);
    }
    if (!alive(s, b)) {
        td_slab_free(s, k);
        return;
    }
    b->state = TD_SLAB_PUTTING;
    b->bytes = ev->packed.bytes;
    struct td_prefill_action *a = td_fifo_push(s->actions);
    a->kind = TD_PREFILL_PUT;
    a->put.epoch = s->peer[b->peer].epoch;
    a->put.send_slab = k;
    a->put.landing_slab = b->landing;
    a->put.remote_address = s->peer[b->peer].landing[b->landing].address;
    a->put.bytes = b->bytes;
    a->put.deadline_ns = s->now_ns + s->o->transfer_ns;
}

static void say_slab(struct td_sender *s, uint32_t k) {
    struct td_sender_slab *b = &s->slab[k];
    struct td_sender_ticket *t = &s->ticket[b->ticket];
    struct td_msg_slab *m = &td_peer_send(s, b->peer, TD_MSG_SLAB)->slab;
    m->epoch = s->o->epoch;
    m->ticket = t->o.ticket;
    m->slab = b->landing;
    m->first_block = b->first_block;
    m->n_blocks = b->n_blocks;
    m->bytes = b->bytes;
    struct td_sender_landing *l = &s->peer[b->peer].landing[b->landing];
    l->state = TD_LANDING_THEIRS;
    l->ticket = t->o.ticket;
    l->first_block = b->first_block;
    l->deadline_ns = s->now_ns + s->o->transfer_ns;
    t->told += b->n_blocks;
    td_slab_free(s, k);
}

void td_ticket_manifest(struct td_sender *s, uint32_t i) {
    struct td_sender_ticket *t = &s->ticket[i];
    const struct td_kv_expected known = {
        .ticket = {t->o.decode_epoch, t->o.ticket},
        .prefill_epoch = s->o->epoch,
        .prompt_hash = t->o.prompt_hash,
        .prompt_tokens = t->o.n_prompt,
        .n_first = t->o.n_first,
    };
    struct td_kv_manifest k;
    struct td_error err;
    if (td_kv_manifest_fill(&k, s->o->layout, &known, &t->tally, &err) != TD_OK) {
        td_sender_abort(s, i, err.status, err.text);
        return;
    }
    struct td_msg_manifest *m = &td_peer_send(s, t->peer, TD_MSG_MANIFEST)->manifest;
    m->epoch = s->o->epoch;
    m->decode_epoch = k.decode_epoch;
    m->ticket = k.ticket;
    m->n_prompt = k.prompt_tokens;
    m->n_blocks = k.blocks;
    m->prompt_hash = k.prompt_hash;
    m->fingerprint = k.fingerprint;
    m->n_families = TD_KV_FAMILIES;
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        m->family[f] =
            (struct td_msg_family){k.family[f].rows, k.family[f].bytes, k.family[f].checksum};
    m->n_first = t->o.n_first;
    memcpy(m->first, t->first, m->n_first * sizeof m->first[0]);
    m->seed = t->o.seed;
    m->next_position = t->o.n_prompt + 1;
    if (!t->manifest) t->deadline_ns = s->now_ns + s->o->transfer_ns;
    t->manifest = true;
    t->ask_ns = s->now_ns + s->o->transfer_ns / TD_MANIFEST_TIMES;
}

static void flushed(struct td_sender *s, uint32_t k) {
    uint32_t i = s->slab[k].ticket;
    struct td_sender_ticket *t = &s->ticket[i];
    s->slab[k].state = TD_SLAB_FLUSHED;
    s->bytes_moved += s->slab[k].bytes;
    if (!t->complete) s->bytes_early += s->slab[k].bytes;
    /* In block order, whatever the order of the flushes. */
    for (uint32_t j = 0; j < s->o->send_slabs; j++) {
        const struct td_sender_slab *b = &s->slab[j];
        if (b->state != TD_SLAB_FLUSHED || b->ticket != i || b->first_block != t->told) continue;
        say_slab(s, j);
        j = UINT32_MAX; /* from the start */
    }
    if (t->told == t->page_blocks + 1) td_ticket_manifest(s, i);
}

static void put_done(struct td_sender *s, const struct td_prefill_event *ev) {
    uint32_t k = ev->put.send_slab;
    assert(k < s->o->send_slabs && s->slab[k].state == TD_SLAB_PUTTING);
    struct td_sender_slab *b = &s->slab[k];
    uint32_t peer = b->peer;
    if (ev->put.status == TD_OK && alive(s, b)) {
        flushed(s, k);
        return;
    }
    if (ev->put.quiet || ev->put.status == TD_OK)
        td_slab_free(s, k);
    else
        b->state = TD_SLAB_UNQUIET;
    if (ev->put.status != TD_OK)
        td_peer_lost(s, peer, ev->put.status == TD_TIMEOUT ? TD_TIMEOUT : TD_PEER_LOST,
                     "a write into the decode worker's landing slab failed");
}

/* ---- giving out slabs ---- */

static uint32_t free_landing(const struct td_sender_peer *p) {
    for (uint32_t k = 0; k < p->n_landing; k++)
        if (p->landing[k].state == TD_LANDING_OURS) return k;
    return UINT32_MAX;
}

static void pack(struct td_sender *s, uint32_t i, uint32_t k, uint32_t landing) {
    struct td_sender_ticket *t = &s->ticket[i];
    struct td_sender_peer *p = &s->peer[t->peer];
    bool slot = t->packed == t->page_blocks;
    uint32_t n = 1;
    if (!slot) {
        uint64_t fit = p->slab_bytes / td_kv_page_block_bytes_max(s->o->layout);
        uint32_t ready = t->ready < t->page_blocks ? t->ready : t->page_blocks;
        n = ready - t->packed;
        if (n > fit) n = (uint32_t)fit;
    }
    p->landing[landing].state = TD_LANDING_RESERVED;
    s->slab[k] = (struct td_sender_slab){
        .state = TD_SLAB_PACKING,
        .ticket = i,
        .peer = t->peer,
        .landing = landing,
        .first_block = t->packed,
        .n_blocks = n,
    };
    struct td_prefill_action *a = td_fifo_push(s->actions);
    a->kind = TD_PREFILL_PACK;
    a->pack.send_slab = k;
    a->pack.ticket = (struct td_kv_ticket){t->o.decode_epoch, t->o.ticket};
    a->pack.n_prompt = t->o.n_prompt;
    a->pack.first_block = t->packed;
    a->pack.n_blocks = n;
    a->pack.pages = slot ? NULL : t->o.pages + (t->packed >> s->o->split);
    a->pack.slot_block = slot;
    a->pack.slot = t->o.slot;
    a->pack.epoch = p->epoch;
    a->pack.remote_address = p->landing[landing].address;
    a->pack.room = p->slab_bytes;
    t->packed += n;
    t->slabs++;
    p->slabs++;
}

void td_sender_pump(struct td_sender *s) {
    uint32_t n = s->o->max_requests, idle = 0;
    /* In turn, so that a long prompt does not keep a short one waiting. */
    for (uint32_t k = 0; k < s->o->send_slabs; k++) {
        if (s->slab[k].state != TD_SLAB_FREE) continue;
        for (; idle < n; idle++) {
            uint32_t i = (s->next_ticket + idle) % n;
            struct td_sender_ticket *t = &s->ticket[i];
            if (t->state != TD_TICKET_OPEN || t->packed >= t->ready) continue;
            if (s->peer[t->peer].state != TD_PEER_OPEN) continue;
            uint32_t landing = free_landing(&s->peer[t->peer]);
            if (landing == UINT32_MAX) continue;
            pack(s, i, k, landing);
            s->next_ticket = (i + 1) % n;
            idle = 0;
            break;
        }
        if (idle == n) return;
    }
}

void td_sender_event(struct td_sender *s, const struct td_prefill_event *ev) {
    switch (ev->kind) {
    case TD_PREFILL_PACKED:
        packed(s, ev);
        return;
    case TD_PREFILL_PUT_DONE:
        put_done(s, ev);
        return;
    case TD_PREFILL_PUT_QUIET:
        if (s->slab[ev->put.send_slab].state == TD_SLAB_UNQUIET) td_slab_free(s, ev->put.send_slab);
        return;
    default:
        td_peer_event(s, ev);
    }
}

/* Peers of the sending half: greeting, beats, credits, verdicts, silence. */
#include <stdio.h>
#include <string.h>

#include "prefill/handoff_parts.h"

struct td_msg *td_peer_send(struct td_sender *s, uint32_t peer, enum td_msg_type type) {
    struct td_prefill_action *a = td_fifo_push(s->actions);
    a->kind = TD_PREFILL_SEND_PEER;
    a->peer.epoch = s->peer[peer].epoch;
    a->peer.msg.type = type;
    return &a->peer.msg;
}

static uint32_t find(const struct td_sender *s, uint64_t epoch) {
    for (uint32_t p = 0; p < s->o->max_peers; p++)
        if (s->peer[p].state != TD_PEER_FREE && s->peer[p].epoch == epoch) return p;
    return UINT32_MAX;
}

static void greet(struct td_sender *s, uint32_t peer) {
    struct td_sender_peer *p = &s->peer[peer];
    p->state = TD_PEER_GREETING;
    p->tries++;
    p->again = p->closed = false;
    p->n_landing = 0;
    p->deadline_ns = s->now_ns + s->o->transfer_ns;
    struct td_prefill_action *a = td_fifo_push(s->actions);
    a->kind = TD_PREFILL_CONNECT;
    a->peer.epoch = p->epoch;
    a->peer.address = p->address.bytes;
    a->peer.address_len = p->address.len;
    struct td_msg_peer_hello *m = &td_peer_send(s, peer, TD_MSG_PEER_HELLO)->peer_hello;
    m->version = TD_PROTO_VERSION;
    m->epoch = s->o->epoch;
    m->decode_epoch = p->epoch;
    m->fingerprint = s->o->layout->fingerprint;
    m->numerics_id = s->o->numerics_id;
}

/* Of those that rest, the one that answered least. */
static uint32_t longest_rest(const struct td_sender *s) {
    uint32_t most = UINT32_MAX;
    for (uint32_t p = 0; p < s->o->max_peers; p++)
        if (s->peer[p].state == TD_PEER_RESTING &&
            (most == UINT32_MAX || s->peer[p].tries > s->peer[most].tries))
            most = p;
    return most;
}

uint32_t td_peer_for(struct td_sender *s, uint64_t epoch, const struct td_sender_address *address) {
    td_sender_moved(s, epoch, address);
    uint32_t p = find(s, epoch);
    if (p != UINT32_MAX) {
        if (s->peer[p].state == TD_PEER_RESTING) greet(s, p);
        return p;
    }
    for (p = 0; p < s->o->max_peers && s->peer[p].state != TD_PEER_FREE; p++) {
    }
    if (p == s->o->max_peers) p = longest_rest(s);
    if (p == UINT32_MAX) return UINT32_MAX;
    struct td_sender_peer *n = &s->peer[p];
    *n = (struct td_sender_peer){.epoch = epoch, .address = *address};
    greet(s, p);
    return p;
}

static void close_link(struct td_sender *s, uint32_t peer, bool again) {
    s->peer[peer].again = again;
    s->peer[peer].state = TD_PEER_CLOSING;
    struct td_prefill_action *a = td_fifo_push(s->actions);
    a->kind = TD_PREFILL_CLOSE;
    a->peer.epoch = s->peer[peer].epoch;
}

void td_peer_lost(struct td_sender *s, uint32_t peer, td_status status, const char *text) {
    struct td_sender_peer *p = &s->peer[peer];
    if (p->state != TD_PEER_GREETING && p->state != TD_PEER_OPEN) return;
    for (uint32_t i = 0; i < s->o->max_requests; i++)
        if (s->ticket[i].state == TD_TICKET_OPEN && s->ticket[i].peer == peer)
            td_ticket_over(s, i, status, text);
    /* Refused or never reached, it granted us nothing. */
    close_link(s, peer, status != TD_UNREACHABLE && !p->refused);
}

/* What is greeted in vain has been sent nothing, so its tickets go along. */
void td_sender_moved(struct td_sender *s, uint64_t epoch, const struct td_sender_address *address) {
    uint32_t p = find(s, epoch);
    if (p == UINT32_MAX || address->number <= s->peer[p].address.number) return;
    s->peer[p].address = *address;
    s->peer[p].tries = 0;
    if (s->peer[p].state == TD_PEER_RESTING)
        greet(s, p);
    else if (s->peer[p].state == TD_PEER_GREETING)
        close_link(s, p, true);
    else /* CLOSING: greeted there, if at all, when it is closed */
        td_peer_lost(s, p, TD_PEER_LOST, "the decode worker has another address now");
}

static void rest(struct td_sender *s, uint32_t peer) {
    struct td_sender_peer *p = &s->peer[peer];
    uint64_t times = 1;
    for (uint32_t k = TD_PEER_TRIES; k < p->tries && times < TD_PEER_REST_MAX; k++)
        times *= 2;
    p->state = TD_PEER_RESTING;
    p->deadline_ns = s->now_ns + times * s->o->transfer_ns;
}

void td_peer_forget(struct td_sender *s, uint32_t peer) {
    struct td_sender_peer *p = &s->peer[peer];
    if (!p->closed || p->slabs > 0) return;
    if (p->again && p->tries < TD_PEER_TRIES)
        greet(s, peer);
    else if (p->again)
        rest(s, peer);
    else
        *p = (struct td_sender_peer){.state = TD_PEER_FREE};
}

static void closed(struct td_sender *s, uint32_t peer) {
    /* A pack under way reads our own pool only and ends by PACKED. */
    for (uint32_t k = 0; k < s->o->send_slabs; k++)
        if (s->slab[k].peer == peer &&
            (s->slab[k].state == TD_SLAB_PUTTING || s->slab[k].state == TD_SLAB_UNQUIET))
            td_slab_free(s, k);
    s->peer[peer].closed = true;
    td_peer_forget(s, peer);
}

static void welcome(struct td_sender *s, uint32_t peer, const struct td_msg_peer_welcome *m) {
    struct td_sender_peer *p = &s->peer[peer];
    if (p->state != TD_PEER_GREETING || m->prefill_epoch != s->o->epoch) return;
    char text[TD_TEXT_MAX];
    if (m->status != TD_OK) {
        p->refused = true;
        td_peer_lost(s, peer, m->status, m->text);
        return;
    }
    uint64_t need = td_kv_slot_block_bytes_max(s->o->layout);
    if (need < td_kv_page_block_bytes_max(s->o->layout))
        need = td_kv_page_block_bytes_max(s->o->layout);
    if (m->slab_bytes < need || m->n_slabs == 0 || m->n_slabs > TD_LANDING_SLABS_MAX) {
        snprintf(text, sizeof text,
                 "landing slabs: expected 1 to %d of at least %llu bytes, found %u of %llu",
                 TD_LANDING_SLABS_MAX, (unsigned long long)need, m->n_slabs,
                 (unsigned long long)m->slab_bytes);
        p->refused = true;
        td_peer_lost(s, peer, TD_MISMATCH, text);
        return;
    }
    p->state = TD_PEER_OPEN;
    p->tries = 0;
    p->slab_bytes = m->slab_bytes < s->o->slab_bytes ? m->slab_bytes : s->o->slab_bytes;
    p->n_landing = m->n_slabs;
    for (uint32_t k = 0; k < m->n_slabs; k++)
        p->landing[k] = (struct td_sender_landing){.address = m->slab_address[k]};
}

static void credit(struct td_sender *s, uint32_t peer, const struct td_msg_credit *m) {
    struct td_sender_peer *p = &s->peer[peer];
    if (m->slab >= p->n_landing) return;
    struct td_sender_landing *l = &p->landing[m->slab];
    /* A double, or of an earlier use of the slab. */
    if (l->state != TD_LANDING_THEIRS || l->ticket != m->ticket || l->first_block != m->first_block)
        return;
    l->state = TD_LANDING_OURS;
}

static uint32_t ticket_of(const struct td_sender *s, uint32_t peer, uint64_t ticket) {
    for (uint32_t i = 0; i < s->o->max_requests; i++)
        if (s->ticket[i].state == TD_TICKET_OPEN && s->ticket[i].peer == peer &&
            s->ticket[i].o.ticket == ticket)
            return i;
    return UINT32_MAX;
}

static void message(struct td_sender *s, uint32_t peer, const struct td_msg *m) {
    s->peer[peer].heard_ns = s->now_ns;
    uint32_t i;
    switch (m->type) {
    case TD_MSG_PEER_WELCOME:
        welcome(s, peer, &m->peer_welcome);
        return;
    case TD_MSG_CREDIT:
        credit(s, peer, &m->credit);
        return;
    case TD_MSG_VERDICT:
        i = ticket_of(s, peer, m->verdict.ticket);
        if (i == UINT32_MAX) return;
        if (m->verdict.status == TD_OK && !s->ticket[i].manifest)
            td_sender_abort(s, i, TD_PROTOCOL, "decode accepted a handoff that was not complete");
        else
            td_ticket_over(s, i, m->verdict.status, m->verdict.text);
        return;
    case TD_MSG_ABORT:
        i = ticket_of(s, peer, m->abort.ticket);
        if (i == UINT32_MAX) return;
        td_ticket_over(s, i, m->abort.status != TD_OK ? m->abort.status : TD_PROTOCOL,
                       m->abort.text);
        return;
    default:
        return; /* a beat, or nothing we know: it was heard */
    }
}

void td_peer_event(struct td_sender *s, const struct td_prefill_event *ev) {
    uint32_t p = find(s, ev->peer.epoch);
    if (p == UINT32_MAX) return;
    switch (ev->kind) {
    case TD_PREFILL_PEER_MESSAGE:
        if (s->peer[p].state == TD_PEER_GREETING || s->peer[p].state == TD_PEER_OPEN)
            message(s, p, ev->peer.msg);
        return;
    case TD_PREFILL_PEER_LOST:
        td_peer_lost(s, p, ev->peer.status != TD_OK ? ev->peer.status : TD_PEER_LOST,
                     "the link to the decode worker is lost");
        return;
    case TD_PREFILL_PEER_CLOSED:
        td_peer_lost(s, p, TD_PEER_LOST, "the link to the decode worker was closed");
        if (s->peer[p].state == TD_PEER_CLOSING) closed(s, p);
        return;
    default:
        assert(!"an event of the handoff");
    }
}

/* ---- clocks ---- */

static void beat(struct td_sender *s, uint32_t peer) {
    struct td_sender_peer *p = &s->peer[peer];
    struct td_msg_peer_beat *m = &td_peer_send(s, peer, TD_MSG_PEER_BEAT)->peer_beat;
    m->epoch = s->o->epoch;
    m->seq = ++p->seq;
    p->beat_ns = s->now_ns + s->o->beat_ns;
}

/* The first of: their WELCOME; the end of a rest; their next word; the next CREDIT. A credit that
 * does not come would be missing for ever, whatever became of its ticket: only a new link brings
 * the slab back. */
static uint64_t patience(const struct td_sender *s, const struct td_sender_peer *p) {
    if (p->state == TD_PEER_GREETING || p->state == TD_PEER_RESTING) return p->deadline_ns;
    if (p->state != TD_PEER_OPEN) return UINT64_MAX;
    uint64_t first = p->heard_ns + s->o->peer_timeout_ns;
    for (uint32_t k = 0; k < p->n_landing; k++)
        if (p->landing[k].state == TD_LANDING_THEIRS && p->landing[k].deadline_ns < first)
            first = p->landing[k].deadline_ns;
    return first;
}

/* Beats wake us at least so often. When one is late by more than another, our own loop stood still:
 * nothing could be heard meanwhile, and that time is not the peer's. */
static void excuse(struct td_sender *s, struct td_sender_peer *p) {
    if (p->state != TD_PEER_OPEN || s->now_ns <= p->beat_ns + s->o->beat_ns) return;
    p->heard_ns += s->now_ns - p->beat_ns;
    if (p->heard_ns > s->now_ns) p->heard_ns = s->now_ns;
}

static const char *why_lost(const struct td_sender *s, const struct td_sender_peer *p) {
    if (p->state == TD_PEER_GREETING) return "the decode worker did not answer our hello";
    return p->heard_ns + s->o->peer_timeout_ns <= s->now_ns
               ? "the decode worker is silent"
               : "the decode worker does not return a landing slab";
}

void td_sender_timer(struct td_sender *s) {
    for (uint32_t i = 0; i < s->o->max_requests; i++) {
        struct td_sender_ticket *t = &s->ticket[i];
        if (t->state != TD_TICKET_OPEN || !t->manifest) continue;
        if (t->deadline_ns <= s->now_ns)
            td_sender_abort(s, i, TD_TIMEOUT, "the decode worker gave no verdict in time");
        else if (t->ask_ns <= s->now_ns)
            td_ticket_manifest(s, i);
    }
    for (uint32_t p = 0; p < s->o->max_peers; p++) {
        struct td_sender_peer *peer = &s->peer[p];
        excuse(s, peer);
        bool due = patience(s, peer) <= s->now_ns;
        if (due && peer->state == TD_PEER_RESTING)
            greet(s, p);
        else if (due)
            td_peer_lost(s, p, TD_TIMEOUT, why_lost(s, peer));
        else if (peer->state == TD_PEER_OPEN && peer->beat_ns <= s->now_ns)
            beat(s, p);
    }
}

uint64_t td_sender_deadline(const struct td_sender *s) {
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < s->o->max_requests; i++)
        if (s->ticket[i].state == TD_TICKET_OPEN && s->ticket[i].manifest) {
            const struct td_sender_ticket *t = &s->ticket[i];
            uint64_t next = t->ask_ns < t->deadline_ns ? t->ask_ns : t->deadline_ns;
            if (next < first) first = next;
        }
    for (uint32_t p = 0; p < s->o->max_peers; p++) {
        uint64_t d = patience(s, &s->peer[p]);
        if (d < first) first = d;
        if (s->peer[p].state == TD_PEER_OPEN && s->peer[p].beat_ns < first)
            first = s->peer[p].beat_ns;
    }
    return first;
}

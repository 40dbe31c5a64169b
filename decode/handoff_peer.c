/* Peers of the receiving half: greeting, beats, silence, quarantine. */
#include <stdio.h>
#include <string.h>

#include "decode/handoff_parts.h"

static struct td_msg *send_link(struct td_receiver *r, td_link_id link, enum td_msg_type type) {
    struct td_decode_action *a = td_fifo_push(r->actions);
    a->kind = TD_DECODE_SEND_PEER;
    a->peer.link = link;
    a->peer.msg.type = type;
    return &a->peer.msg;
}

/* To a peer that is not connected the message is written for nobody: the shell drops what is meant
 * for a link it does not have. */
struct td_msg *td_source_send(struct td_receiver *r, uint32_t peer, enum td_msg_type type) {
    return send_link(r, r->peer[peer].link, type);
}

void td_source_abort(struct td_receiver *r, uint32_t peer, uint64_t ticket, td_status status,
                     const char *text) {
    struct td_msg_abort *m = &td_source_send(r, peer, TD_MSG_ABORT)->abort;
    m->epoch = r->o->epoch;
    m->ticket = ticket;
    m->status = status;
    snprintf(m->text, sizeof m->text, "%s", text);
}

static uint32_t by_link(const struct td_receiver *r, td_link_id link) {
    for (uint32_t p = 0; p < r->o->max_peers; p++)
        if (r->peer[p].state != TD_SOURCE_FREE && r->peer[p].link == link) return p;
    return UINT32_MAX;
}

/* ---- greeting ---- */

static td_status check_hello(const struct td_receiver *r, const struct td_msg_peer_hello *m,
                             struct td_error *err) {
    if (m->version != TD_PROTO_VERSION)
        return td_fail(err, TD_PROTOCOL, "protocol version: expected %d, found %u",
                       TD_PROTO_VERSION, m->version);
    if (m->decode_epoch != r->o->epoch)
        return td_fail(err, TD_STALE, "decode epoch: expected %016llx, found %016llx",
                       (unsigned long long)r->o->epoch, (unsigned long long)m->decode_epoch);
    if (m->epoch == 0) return td_fail(err, TD_PROTOCOL, "a prefill worker needs an epoch");
    if (m->fingerprint != r->o->layout->fingerprint)
        return td_fail(err, TD_MISMATCH, "KV layout fingerprint: expected %016llx, found %016llx",
                       (unsigned long long)r->o->layout->fingerprint,
                       (unsigned long long)m->fingerprint);
    if (m->numerics_id != r->o->numerics_id && !r->o->mixed_numerics)
        return td_fail(err, TD_MISMATCH, "numerics id: expected %016llx, found %016llx",
                       (unsigned long long)r->o->numerics_id, (unsigned long long)m->numerics_id);
    return TD_OK;
}

static void welcome(struct td_receiver *r, uint32_t peer) {
    struct td_receiver_peer *p = &r->peer[peer];
    p->owes_welcome = false;
    struct td_msg_peer_welcome *m = &send_link(r, p->link, TD_MSG_PEER_WELCOME)->peer_welcome;
    m->epoch = r->o->epoch;
    m->prefill_epoch = p->epoch;
    m->status = TD_OK;
    m->slab_bytes = r->o->slab_bytes;
    m->n_slabs = r->o->landing_slabs;
    struct td_decode_action *a = TD_CONTAINER(TD_CONTAINER(m, struct td_msg, peer_welcome),
                                              struct td_decode_action, peer.msg);
    a->peer.first_slab = peer * r->o->landing_slabs;
}

static void refuse(struct td_receiver *r, td_link_id link, uint64_t prefill_epoch, td_status status,
                   const char *text) {
    struct td_msg_peer_welcome *m = &send_link(r, link, TD_MSG_PEER_WELCOME)->peer_welcome;
    m->epoch = r->o->epoch;
    m->prefill_epoch = prefill_epoch;
    m->status = status;
    snprintf(m->text, sizeof m->text, "%s", text);
}

static void lost(struct td_receiver *r, uint32_t peer, const char *text) {
    struct td_receiver_peer *p = &r->peer[peer];
    if (p->state != TD_SOURCE_OPEN) return;
    p->state = TD_SOURCE_QUARANTINED;
    p->owes_welcome = false;
    for (uint32_t i = 0; i < r->o->slots; i++)
        if (r->receipt[i].state == TD_RECEIPT_OPEN && r->receipt[i].peer == peer)
            td_receipt_over(r, i, TD_PEER_LOST, text);
    struct td_decode_action *a = td_fifo_push(r->actions);
    a->kind = TD_DECODE_CLOSE;
    a->peer.link = p->link;
}

static void hello(struct td_receiver *r, uint64_t now_ns, td_link_id link,
                  const struct td_msg_peer_hello *m) {
    struct td_error err;
    uint32_t p = UINT32_MAX, quarantined = 0;
    td_status st = check_hello(r, m, &err);
    if (st != TD_OK) {
        refuse(r, link, m->epoch, st, err.text);
        return;
    }
    for (uint32_t k = 0; k < r->o->max_peers; k++) {
        if (r->peer[k].state == TD_SOURCE_FREE && p == UINT32_MAX) p = k;
        if (r->peer[k].state == TD_SOURCE_QUARANTINED) quarantined++;
    }
    for (uint32_t k = 0; k < r->o->max_peers; k++)
        if (r->peer[k].state != TD_SOURCE_FREE && r->peer[k].epoch == m->epoch) p = k;
    if (p == UINT32_MAX) {
        td_fail(&err, TD_BUSY, "%u prefill workers hold landing slabs, %u of them are silent",
                r->o->max_peers, quarantined);
        refuse(r, link, m->epoch, TD_BUSY, err.text);
        return;
    }
    struct td_receiver_peer *peer = &r->peer[p];
    if (peer->epoch == m->epoch && link <= peer->link) return; /* a double, or of an earlier link */
    /* A worker greets again only when nothing of its earlier link is under way. */
    lost(r, p, "the prefill worker opened a new link");
    peer->state = TD_SOURCE_OPEN;
    peer->epoch = m->epoch;
    peer->link = link;
    peer->heard_ns = now_ns;
    peer->beat_ns = now_ns + r->o->beat_ns;
    peer->owes_welcome = true;
    if (peer->unpacking == 0) welcome(r, p);
}

/* ---- the end of a peer ---- */

static void settle(struct td_receiver *r, uint32_t peer) {
    struct td_receiver_peer *p = &r->peer[peer];
    if (p->unpacking > 0) return;
    if (p->state == TD_SOURCE_GONE) memset(p, 0, sizeof *p);
    if (p->state == TD_SOURCE_OPEN && p->owes_welcome) welcome(r, peer);
}

void td_source_unpacked(struct td_receiver *r, uint32_t peer) {
    assert(r->peer[peer].unpacking > 0);
    r->peer[peer].unpacking--;
    settle(r, peer);
}

static void gone(struct td_receiver *r, uint32_t peer, const char *text) {
    lost(r, peer, text);
    r->peer[peer].state = TD_SOURCE_GONE;
    settle(r, peer);
}

static void message(struct td_receiver *r, uint64_t now_ns, uint32_t peer, const struct td_msg *m) {
    r->peer[peer].heard_ns = now_ns;
    uint32_t i;
    switch (m->type) {
    case TD_MSG_SLAB:
        td_receipt_slab(r, now_ns, peer, &m->slab);
        return;
    case TD_MSG_MANIFEST:
        td_receipt_manifest(r, peer, &m->manifest);
        return;
    case TD_MSG_ABORT:
        i = td_receipt_find(r, m->abort.ticket);
        if (i == UINT32_MAX) return;
        if (r->receipt[i].peer != UINT32_MAX && r->receipt[i].peer != peer) return;
        td_receipt_over(r, i, m->abort.status != TD_OK ? m->abort.status : TD_PROTOCOL,
                        m->abort.text);
        return;
    default:
        return; /* a beat, or nothing we know: it was heard */
    }
}

void td_source_event(struct td_receiver *r, const struct td_decode_event *ev) {
    td_link_id link = ev->peer.link;
    if (ev->kind == TD_DECODE_PEER_MESSAGE && ev->peer.msg->type == TD_MSG_PEER_HELLO) {
        hello(r, ev->now_ns, link, &ev->peer.msg->peer_hello);
        return;
    }
    uint32_t p = by_link(r, link);
    if (p == UINT32_MAX) return; /* never greeted, or replaced by a newer link */
    switch (ev->kind) {
    case TD_DECODE_PEER_MESSAGE:
        if (r->peer[p].state == TD_SOURCE_OPEN) message(r, ev->now_ns, p, ev->peer.msg);
        return;
    case TD_DECODE_PEER_LOST:
        lost(r, p, "the link to the prefill worker is lost");
        return;
    case TD_DECODE_PEER_EXITED:
        gone(r, p, "the prefill worker has died");
        return;
    case TD_DECODE_PEER_QUIET:
        gone(r, p, "the link to the prefill worker was closed");
        return;
    default:
        assert(!"an event of the handoff");
    }
}

/* ---- clocks ---- */

void td_receiver_timer(struct td_receiver *r, uint64_t now_ns) {
    for (uint32_t i = 0; i < r->o->slots; i++)
        if (r->receipt[i].state == TD_RECEIPT_OPEN && r->receipt[i].lease_ns <= now_ns)
            td_receiver_abort(r, i, TD_TIMEOUT, "the admission's lease has expired");
    for (uint32_t k = 0; k < r->o->max_peers; k++) {
        struct td_receiver_peer *p = &r->peer[k];
        if (p->state != TD_SOURCE_OPEN) continue;
        /* Beats wake us at least so often. When one is late by more than another, our own loop
         * stood still: nothing could be heard meanwhile, and that time is not the peer's. */
        if (now_ns > p->beat_ns + r->o->beat_ns) p->heard_ns += now_ns - p->beat_ns;
        if (p->heard_ns > now_ns) p->heard_ns = now_ns;
        if (p->heard_ns + r->o->peer_timeout_ns <= now_ns) {
            lost(r, k, "the prefill worker is silent");
        } else if (p->beat_ns <= now_ns) {
            struct td_msg_peer_beat *m = &td_source_send(r, k, TD_MSG_PEER_BEAT)->peer_beat;
            m->epoch = r->o->epoch;
            m->seq = ++p->seq;
            p->beat_ns = now_ns + r->o->beat_ns;
        }
    }
}

uint64_t td_receiver_deadline(const struct td_receiver *r) {
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < r->o->slots; i++)
        if (r->receipt[i].state == TD_RECEIPT_OPEN && r->receipt[i].lease_ns < first)
            first = r->receipt[i].lease_ns;
    for (uint32_t k = 0; k < r->o->max_peers; k++) {
        const struct td_receiver_peer *p = &r->peer[k];
        if (p->state != TD_SOURCE_OPEN) continue;
        if (p->beat_ns < first) first = p->beat_ns;
        if (p->heard_ns + r->o->peer_timeout_ns < first)
            first = p->heard_ns + r->o->peer_timeout_ns;
    }
    return first;
}

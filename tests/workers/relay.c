/* The relay on the data plane. */
#include "tests/workers/relay.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/kv/wire.h"

static uint64_t soon(void) {
    return td_now_ns() + 10u * CLUSTER_SLOW * 1000000000u;
}

static struct relay_pair *pair_of(struct relay *r, const struct td_xfer_peer *p) {
    for (int i = 0; i < RELAY_PAIRS; i++)
        if (p && (r->pair[i].near == p || r->pair[i].far == p)) return &r->pair[i];
    return NULL;
}

static void close_both(struct relay_pair *p) {
    if (p->near) td_xfer_peer_close(p->near);
    if (p->far) td_xfer_peer_close(p->far);
}

static void on_accept(void *user, struct td_xfer_peer *peer) {
    struct relay *r = user;
    struct td_error err;
    for (int i = 0; i < RELAY_PAIRS; i++) {
        struct relay_pair *p = &r->pair[i];
        if (p->near || p->far) continue;
        p->near = peer;
        if (td_xfer_connect(td_plane_xfer(r->plane), r->c->decode.address, r->c->decode.address_len,
                            &p->far, &err) != TD_OK) {
            p->far = NULL; /* decode is dead */
            td_xfer_peer_close(peer);
        }
        return;
    }
    abort();
}

static void pass(struct relay *r, struct td_xfer_peer *to, const struct td_msg *m) {
    struct relay_pair *p = pair_of(r, to);
    r->welcomes += m->type == TD_MSG_PEER_WELCOME && m->peer_welcome.status == TD_OK;
    r->verdicts += m->type == TD_MSG_VERDICT && m->verdict.status == TD_OK;
    if (p && td_plane_send(r->plane, to, m, soon(), NULL) != TD_OK) close_both(p);
}

static bool is_slot_block(const struct relay *r, const struct td_msg *m) {
    for (int i = 0; i < CLUSTER_REQUESTS; i++) {
        const struct request *q = &r->c->request[i];
        if (q->key.request && q->decode.reply.ticket == m->slab.ticket)
            return m->slab.first_block == td_kv_page_blocks(q->n_prompt);
    }
    return false;
}

static enum relay_action action_for(struct relay *r, const struct td_msg *m) {
    if (r->hit || r->action == RELAY_PASS || m->type != r->type) return RELAY_PASS;
    if (r->slot_block && !is_slot_block(r, m)) return RELAY_PASS;
    r->hit = true;
    return r->action;
}

static void on_message(void *user, struct td_xfer_peer *peer, const struct td_msg *m) {
    struct relay *r = user;
    struct relay_pair *p = pair_of(r, peer);
    if (!p) return;
    struct td_xfer_peer *to = p->near == peer ? p->far : p->near;
    if (!to) return;
    r->passed++;
    switch (action_for(r, m)) {
    case RELAY_DROP:
        return;
    case RELAY_LATE: /* none of the messages a test delays points to anything */
        r->late = *m;
        r->late_to = to;
        r->is_late = true;
        return;
    case RELAY_TWICE:
        pass(r, to, m);
        break;
    case RELAY_SIGNAL:
        kill(r->pid, r->signal);
        break;
    case RELAY_PASS:
        break;
    }
    pass(r, to, m);
    if (r->is_late && r->late_to == to && m->type != TD_MSG_PEER_BEAT) {
        r->is_late = false;
        pass(r, to, &r->late);
    }
}

static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *text) {
    struct relay *r = user;
    (void)why, (void)text;
    struct relay_pair *p = pair_of(r, peer);
    if (p) close_both(p);
}

static void on_closed(void *user, struct td_xfer_peer *peer) {
    struct relay *r = user;
    struct relay_pair *p = pair_of(r, peer);
    if (!p) return;
    *(p->near == peer ? &p->near : &p->far) = NULL;
}

/* The relay is a receiver like others: who is killed in the middle of a send leaves it deaf. */
static void on_renewed(void *user, td_status status, const char *text) {
    struct relay *r = user;
    (void)status, (void)text;
    r->c->via = td_xfer_address(td_plane_xfer(r->plane), &r->c->via_len);
    r->c->via_number++;
    r->renewals++;
}

static const struct td_plane_events events = {.on_accept = on_accept,
                                              .on_message = on_message,
                                              .on_lost = on_lost,
                                              .on_closed = on_closed,
                                              .on_renewed = on_renewed};

void relay_open(struct relay *r, struct cluster *c) {
    struct td_error err;
    memset(r, 0, sizeof *r);
    r->c = c;
    struct td_plane_options o = cluster_plane(c, 2 * RELAY_PAIRS, 256);
    if (td_plane_create(&c->loop, &events, r, &o, &r->plane, &err) != TD_OK) {
        fprintf(stderr, "relay: %s\n", err.text);
        abort();
    }
    c->via = td_xfer_address(td_plane_xfer(r->plane), &c->via_len);
}

void relay_close(struct relay *r) {
    td_plane_destroy(r->plane);
    r->c->via = NULL;
}

void relay_break(struct relay *r) {
    for (int i = 0; i < RELAY_PAIRS; i++)
        close_both(&r->pair[i]);
}

void relay_arm(struct relay *r, enum td_msg_type type, bool slot_block, enum relay_action action) {
    r->type = type;
    r->slot_block = slot_block;
    r->action = action;
    r->hit = r->is_late = false;
}

bool relay_hit(void *arg) {
    return ((struct relay *)arg)->hit;
}

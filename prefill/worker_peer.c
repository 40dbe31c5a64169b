/* The data plane of the prefill worker's shell: links to decode workers, packing into send slabs,
 * puts into landing slabs. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "prefill/worker_parts.h"

enum { NS_PER_MS = 1000000 };

static struct td_prefill_link *link_of(struct td_prefill_worker *w, uint64_t epoch) {
    for (int i = 0; i < TD_PREFILL_PEERS_MAX; i++)
        if (w->link[i].peer && w->link[i].epoch == epoch) return &w->link[i];
    return NULL;
}

static void say_peer(struct td_prefill_worker *w, enum td_prefill_event_kind kind, uint64_t epoch,
                     td_status status) {
    struct td_prefill_event ev = {.kind = kind, .peer = {.epoch = epoch, .status = status}};
    td_prefill_feed(w, &ev);
}

/* ---- links ---- */

void td_prefill_connect(struct td_prefill_worker *w, const struct td_prefill_action *a) {
    struct td_prefill_link *l = NULL;
    struct td_error err = {.status = TD_BUSY, .text = "too many links"};
    for (int i = 0; i < TD_PREFILL_PEERS_MAX && !l; i++)
        if (!w->link[i].peer) l = &w->link[i];
    struct td_xfer_peer *peer;
    if (!l || td_xfer_connect(td_plane_xfer(td_host_plane(w->host)), a->peer.address,
                              a->peer.address_len, &peer, &err) != TD_OK) {
        td_warn("no link to decode worker %016llx: %s", (unsigned long long)a->peer.epoch,
                err.text);
        say_peer(w, TD_PREFILL_PEER_LOST, a->peer.epoch, err.status);
        return;
    }
    *l = (struct td_prefill_link){.epoch = a->peer.epoch, .peer = peer};
    td_xfer_peer_set_user(peer, l);
}

void td_prefill_send_peer(struct td_prefill_worker *w, struct td_prefill_action *a) {
    struct td_prefill_link *l = link_of(w, a->peer.epoch);
    struct td_msg *m = &a->peer.msg;
    if (!l) return; /* its loss was or will be reported */
    if (m->type == TD_MSG_PEER_HELLO) {
        size_t len;
        snprintf(m->peer_hello.name, sizeof m->peer_hello.name, "%s", w->name);
        m->peer_hello.pid = (uint64_t)getpid();
        m->peer_hello.xfer_address = td_xfer_address(td_plane_xfer(td_host_plane(w->host)), &len);
        m->peer_hello.xfer_address_len = len;
    }
    struct td_error err;
    uint64_t deadline = td_now_ns() + w->config.transfer_timeout_ms * NS_PER_MS;
    td_status st = td_plane_send(td_host_plane(w->host), l->peer, m, deadline, &err);
    if (st == TD_OK) return;
    td_warn("decode worker %016llx: %s", (unsigned long long)a->peer.epoch, err.text);
    say_peer(w, TD_PREFILL_PEER_LOST, a->peer.epoch, st);
}

void td_prefill_close(struct td_prefill_worker *w, uint64_t epoch) {
    struct td_prefill_link *l = link_of(w, epoch);
    if (l) {
        td_prefill_unpin(w, l);
        td_xfer_peer_close(l->peer);
    } else { /* it never came to be */
        say_peer(w, TD_PREFILL_PEER_CLOSED, epoch, TD_OK);
    }
}

void td_prefill_unpin(struct td_prefill_worker *w, struct td_prefill_link *l) {
    td_engine_unpin(w->engine.engine, l->pinned);
    l->pinned = NULL;
}

/* Our landing slabs of that worker lie side by side (decode/worker_peer.c); where they do not, or
 * are no whole pages, blocks go through pinned halves. */
static void pin_landing(struct td_prefill_worker *w, struct td_prefill_link *l,
                        const struct td_msg_peer_welcome *wel) {
    struct td_error err;
    size_t bytes = wel->n_slabs * wel->slab_bytes;
    for (uint32_t i = 1; i < wel->n_slabs; i++)
        if (wel->slab_address[i] != wel->slab_address[0] + i * wel->slab_bytes) return;
    void *at = td_xfer_remote_at(l->remote, wel->slab_address[0], bytes);
    if (!at) return;
    td_status st = td_engine_pin(w->engine.engine, at, bytes, &err);
    if (st == TD_OK) l->pinned = at;
    if (st != TD_OK)
        td_warn("landing slabs of decode worker %016llx: %s: the host copies each block once more",
                (unsigned long long)l->epoch, err.text);
}

static void on_peer_message(void *user, struct td_xfer_peer *peer, const struct td_msg *m) {
    struct td_prefill_worker *w = user;
    struct td_prefill_link *l = td_xfer_peer_user(peer);
    struct td_error err;
    if (m->type == TD_MSG_PEER_WELCOME && m->peer_welcome.status == TD_OK && !l->remote) {
        const struct td_msg_peer_welcome *wel = &m->peer_welcome;
        td_status st = td_xfer_remote_open(peer, wel->rkey, wel->rkey_len, &l->remote, &err);
        if (st != TD_OK) {
            td_warn("landing slabs of decode worker %016llx: %s", (unsigned long long)l->epoch,
                    err.text);
            say_peer(w, TD_PREFILL_PEER_LOST, l->epoch, st);
            return;
        }
        pin_landing(w, l, wel);
        char lanes[TD_XFER_LANES_MAX];
        td_xfer_lanes(peer, lanes);
        bool here = td_xfer_remote_at(l->remote, wel->slab_address[0], wel->slab_bytes) != NULL;
        td_info("linked with decode worker %016llx: %u landing slabs of %llu bytes, %s, lanes %s",
                (unsigned long long)l->epoch, wel->n_slabs, (unsigned long long)wel->slab_bytes,
                here ? "blocks are packed there" : "blocks are put there", lanes);
    }
    struct td_prefill_event ev = {.kind = TD_PREFILL_PEER_MESSAGE,
                                  .peer = {.epoch = l->epoch, .msg = m}};
    td_prefill_feed(w, &ev);
}

static void on_peer_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *text) {
    struct td_prefill_worker *w = user;
    struct td_prefill_link *l = td_xfer_peer_user(peer);
    if (!w->stopping)
        td_warn("link to decode worker %016llx lost: %s", (unsigned long long)l->epoch, text);
    say_peer(w, TD_PREFILL_PEER_LOST, l->epoch, why);
}

static void on_peer_closed(void *user, struct td_xfer_peer *peer) {
    struct td_prefill_worker *w = user;
    struct td_prefill_link *l = td_xfer_peer_user(peer);
    uint64_t epoch = l->epoch;
    memset(l, 0, sizeof *l);
    say_peer(w, TD_PREFILL_PEER_CLOSED, epoch, TD_OK);
}

/* Nobody dials us: whom we greet again learns the new address from the greeting. */
static void on_renewed(void *user, td_status status, const char *text) {
    (void)user;
    if (status != TD_OK)
        td_warn("lane shm: nothing can be received any more, and there is no new queue yet: %s", text);
    else
        td_warn("lane shm: nothing could be received any more, which a peer does that ends or stops "
                "inside a send: new queue, all data links begin anew");
}

/* Nobody dials a prefill worker: without on_accept callers are refused. */
const struct td_plane_events td_prefill_plane_events = {.on_message = on_peer_message,
                                                        .on_lost = on_peer_lost,
                                                        .on_closed = on_peer_closed,
                                                        .on_renewed = on_renewed};

/* ---- packing ----
 * On the loop, not as an engine job: what is packed is finished, no later step writes to it, and
 * so the copy runs beside the next chunk instead of waiting behind it. */

static td_status pack_blocks(struct td_prefill_worker *w, const struct td_prefill_action *a,
                             size_t *ret_bytes, struct td_error *err) {
    struct td_send_slab *s = &w->slab[a->pack.send_slab];
    struct td_prefill_link *l = link_of(w, a->pack.epoch);
    size_t used = 0, len;
    uint8_t *to = NULL;
    /* Shared memory: no copy but this one. The slab is ours until its SLAB message is said. */
    if (l && l->remote) to = td_xfer_remote_at(l->remote, a->pack.remote_address, a->pack.room);
    s->there = to != NULL;
    if (!to) to = s->bytes;
    if (a->pack.n_blocks > w->headers_max)
        return td_fail(err, TD_INTERNAL, "%u blocks for one slab, at most %u", a->pack.n_blocks,
                       w->headers_max);
    for (uint32_t i = 0; i < a->pack.n_blocks; i++, used += len) {
        uint32_t index = a->pack.first_block + i;
        size_t room = (size_t)a->pack.room - used;
        uint32_t page = a->pack.slot_block ? 0
                                           : td_kv_page_of_block(a->pack.pages, a->pack.first_block,
                                                                 index, w->engine.split);
        if (a->pack.slot_block)
            TD_TRY(td_engine_pack_slot(w->engine.engine, a->pack.slot, a->pack.ticket,
                                       a->pack.n_prompt, to + used, room, &len, &w->headers[i],
                                       err));
        else
            TD_TRY(td_engine_pack_page(w->engine.engine, page, a->pack.ticket, index,
                                       td_kv_block_tokens(a->pack.n_prompt, index), to + used, room,
                                       &len, &w->headers[i], err));
    }
    *ret_bytes = used;
    return TD_OK;
}

void td_prefill_pack(struct td_prefill_worker *w, const struct td_prefill_action *a) {
    struct td_error err = {0};
    size_t bytes = 0;
    td_status st = pack_blocks(w, a, &bytes, &err);
    if (st != TD_OK) td_warn("packing: %s", err.text);
    struct td_prefill_event ev = {
        .kind = TD_PREFILL_PACKED,
        .packed = {.send_slab = a->pack.send_slab,
                   .status = st,
                   .bytes = bytes,
                   .headers = w->headers},
    };
    td_prefill_feed(w, &ev);
    td_host_fault(w->host, st, err.text);
}

/* ---- putting ---- */

static void say_put(struct td_send_slab *s, enum td_prefill_event_kind kind, td_status st,
                    bool quiet) {
    struct td_prefill_event ev = {
        .kind = kind,
        .put = {.send_slab = (uint32_t)(s - s->w->slab), .status = st, .quiet = quiet},
    };
    td_prefill_feed(s->w, &ev);
}

static bool all_quiet(const struct td_send_slab *s) {
    return s->put.quiet && (!s->flushing || s->flush.quiet);
}

static void on_put_done(struct td_xfer_req *r, td_status st) {
    struct td_send_slab *s = r->user;
    if (st == TD_OK || s->reported) return; /* success counts when the flush is quiet */
    s->reported = true;
    bool quiet = all_quiet(s);
    if (quiet) s->putting = false;
    say_put(s, TD_PREFILL_PUT_DONE, st, quiet);
}

static void on_put_quiet(struct td_xfer_req *r) {
    struct td_send_slab *s = r->user;
    if (!s->putting || !all_quiet(s)) return;
    s->putting = false;
    if (s->reported) {
        say_put(s, TD_PREFILL_PUT_QUIET, TD_OK, true);
    } else {
        s->reported = true;
        say_put(s, TD_PREFILL_PUT_DONE, TD_OK, true);
    }
}

void td_prefill_put(struct td_prefill_worker *w, const struct td_prefill_action *a) {
    struct td_send_slab *s = &w->slab[a->put.send_slab];
    struct td_prefill_link *l = link_of(w, a->put.epoch);
    const struct td_xfer_req req = {.deadline_ns = a->put.deadline_ns,
                                    .on_done = on_put_done,
                                    .on_quiet = on_put_quiet,
                                    .user = s};
    if (s->there && l) {
        say_put(s, TD_PREFILL_PUT_DONE, TD_OK, true);
        return;
    }
    s->putting = true;
    s->reported = s->flushing = false;
    s->epoch = a->put.epoch;
    s->put = s->flush = req;
    td_status st = TD_PEER_LOST;
    if (l && l->remote)
        st =
            td_xfer_put(l->peer, l->remote, a->put.remote_address, s->bytes, a->put.bytes, &s->put);
    if (st != TD_OK) {
        s->putting = false;
        say_put(s, TD_PREFILL_PUT_DONE, st, true);
        return;
    }
    s->flushing = true;
    st = td_xfer_flush(l->peer, &s->flush);
    if (st == TD_OK) return;
    s->flushing = false;
    s->reported = true;
    bool quiet = s->put.quiet;
    if (quiet) s->putting = false;
    say_put(s, TD_PREFILL_PUT_DONE, st, quiet);
}

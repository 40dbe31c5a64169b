/* The data plane of the decode worker's shell: links from prefill workers, their processes' exits,
 * unpacking landing slabs. */
#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "decode/worker_parts.h"

enum { NS_PER_MS = 1000000 };

static struct td_decode_link *link_of(struct td_decode_worker *w, td_link_id id) {
    for (int i = 0; i < TD_DECODE_LINKS_MAX; i++)
        if (w->link[i].id == id) return &w->link[i];
    return NULL;
}

static void say_peer(struct td_decode_worker *w, enum td_decode_event_kind kind, td_link_id link) {
    struct td_decode_event ev = {.kind = kind, .peer = {.link = link}};
    td_decode_feed(w, &ev);
}

/* ---- processes ---- */

static void on_exit_seen(void *user, pid_t pid) {
    struct td_decode_watch *v = user;
    struct td_decode_worker *w = v->w;
    td_link_id link = v->link;
    td_info("prefill process %d has exited", (int)pid);
    td_pidfd_destroy(v->pidfd);
    v->pid = 0;
    say_peer(w, TD_DECODE_PEER_EXITED, link);
}

static struct td_decode_watch *watch_of(struct td_decode_worker *w, uint64_t pid) {
    struct td_decode_watch *unused = NULL;
    for (int i = 0; i < TD_DECODE_LINKS_MAX; i++) {
        if (w->watch[i].pid == pid) return &w->watch[i];
        if (!unused && w->watch[i].pid == 0) unused = &w->watch[i];
    }
    return unused;
}

/* False: the process is gone already. Without a watch a silent peer's landing slabs stay in
 * quarantine until it greets again. */
static bool watch(struct td_decode_worker *w, uint64_t pid, td_link_id link) {
    struct td_decode_watch *v = watch_of(w, pid);
    struct td_error err;
    if (!v) {
        td_warn("no room to watch process %llu", (unsigned long long)pid);
        return true;
    }
    v->link = link;
    if (v->pid == pid) return true;
    v->w = w;
    td_status st =
        pid > 0 && pid <= INT32_MAX
            ? td_pidfd_watch(td_host_loop(w->host), (pid_t)pid, on_exit_seen, v, &v->pidfd, &err)
            : td_fail(&err, TD_INVALID, "%llu is no process", (unsigned long long)pid);
    if (st == TD_OK) v->pid = pid;
    if (st != TD_OK) td_warn("prefill worker: %s", err.text);
    return st != TD_NOT_FOUND;
}

void td_decode_stop_watching(struct td_decode_worker *w) {
    for (int i = 0; i < TD_DECODE_LINKS_MAX; i++) {
        if (w->watch[i].pid) td_pidfd_destroy(w->watch[i].pidfd);
        w->watch[i].pid = 0;
    }
}

/* ---- links ---- */

static void on_accept(void *user, struct td_xfer_peer *peer) {
    struct td_decode_worker *w = user;
    struct td_decode_link *l = link_of(w, 0);
    if (!l || w->stopping) {
        td_xfer_peer_close(peer);
        return;
    }
    *l = (struct td_decode_link){.id = ++w->next_link, .peer = peer};
    td_xfer_peer_set_user(peer, l);
}

static void on_peer_message(void *user, struct td_xfer_peer *peer, const struct td_msg *m) {
    struct td_decode_worker *w = user;
    struct td_decode_link *l = td_xfer_peer_user(peer);
    if (!l) return;
    td_link_id link = l->id;
    bool alive = true;
    if (m->type == TD_MSG_PEER_HELLO) {
        char lanes[TD_XFER_LANES_MAX];
        td_xfer_lanes(peer, lanes);
        td_info("hello from %s, process %llu, epoch %016llx, lanes %s", m->peer_hello.name,
                (unsigned long long)m->peer_hello.pid, (unsigned long long)m->peer_hello.epoch,
                lanes);
        /* Over TCP it may be a process of another host, and its exit proves nothing we need. */
        if (td_xfer_lane_of(td_plane_xfer(td_host_plane(w->host))) == TD_XFER_SHM)
            alive = watch(w, m->peer_hello.pid, link);
    }
    struct td_decode_event ev = {.kind = TD_DECODE_PEER_MESSAGE, .peer = {.link = link, .msg = m}};
    td_decode_feed(w, &ev);
    if (!alive) say_peer(w, TD_DECODE_PEER_EXITED, link);
}

static void on_peer_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *text) {
    struct td_decode_worker *w = user;
    struct td_decode_link *l = td_xfer_peer_user(peer);
    if (!l) return;
    td_link_id link = l->id;
    td_warn("link %llu from a prefill worker lost: %s (%s)", (unsigned long long)link, text,
            td_status_name(why));
    say_peer(w, TD_DECODE_PEER_LOST, link);
    td_xfer_peer_close(peer); /* also when the machine never heard of it */
}

static void on_peer_closed(void *user, struct td_xfer_peer *peer) {
    struct td_decode_worker *w = user;
    struct td_decode_link *l = td_xfer_peer_user(peer);
    if (!l) return; /* refused in on_accept */
    td_link_id link = l->id;
    memset(l, 0, sizeof *l);
    say_peer(w, TD_DECODE_PEER_LOST, link);
    /* On the tcp lane it was this process that wrote what the peer sent: that is over now. */
    if (td_xfer_lane_of(td_plane_xfer(td_host_plane(w->host))) == TD_XFER_TCP)
        say_peer(w, TD_DECODE_PEER_QUIET, link);
}

static void on_stranger(void *user, const char *text) {
    struct td_decode_worker *w = user;
    if (td_log_due(&w->stranger_ns)) td_warn("lane tcp: %s", text);
}

static void on_renewed(void *user, td_status status, const char *text) {
    struct td_decode_worker *w = user;
    if (status != TD_OK) {
        td_warn("lane shm: nothing can be received any more, and there is no new queue yet: %s", text);
        return;
    }
    td_warn("lane shm: nothing could be received any more, which a peer does that ends or stops inside "
            "a send: new queue and address, all data links begin anew");
    td_host_moved(w->host, &w->hello);
}

const struct td_plane_events td_decode_plane_events = {.on_accept = on_accept,
                                                       .on_message = on_peer_message,
                                                       .on_lost = on_peer_lost,
                                                       .on_closed = on_peer_closed,
                                                       .on_stranger = on_stranger,
                                                       .on_renewed = on_renewed};

void td_decode_close(struct td_decode_worker *w, td_link_id link) {
    struct td_decode_link *l = link ? link_of(w, link) : NULL;
    if (l) td_xfer_peer_close(l->peer); /* PEER_LOST comes from on_closed */
}

void td_decode_send_peer(struct td_decode_worker *w, struct td_decode_action *a) {
    struct td_decode_link *l = a->peer.link ? link_of(w, a->peer.link) : NULL;
    struct td_msg *m = &a->peer.msg;
    if (!l) return; /* meant for a link that is gone */
    if (m->type == TD_MSG_PEER_WELCOME && m->peer_welcome.status == TD_OK) {
        size_t len;
        for (uint32_t i = 0; i < m->peer_welcome.n_slabs; i++) /* offsets in the region */
            m->peer_welcome.slab_address[i] = (a->peer.first_slab + i) * w->slab_bytes;
        m->peer_welcome.rkey = td_xfer_region_key(w->landing, &len);
        m->peer_welcome.rkey_len = len;
        td_xfer_grant(l->peer, w->landing, a->peer.first_slab * w->slab_bytes,
                      m->peer_welcome.n_slabs * w->slab_bytes);
    }
    struct td_error err;
    uint64_t deadline = td_now_ns() + w->config.transfer_timeout_ms * NS_PER_MS;
    if (td_plane_send(td_host_plane(w->host), l->peer, m, deadline, &err) == TD_OK) return;
    td_warn("link %llu: %s", (unsigned long long)a->peer.link, err.text);
    td_xfer_peer_close(l->peer); /* a message lost is a link lost */
}

/* ---- unpacking ----
 * On the loop, not as an engine job: the pages and the slot belong to a sequence that is not in
 * any step before its handoff is verified, so the copy runs beside the step under way instead of
 * waiting behind it, and the credit goes back at once. */

static td_status unpack_blocks(struct td_decode_worker *w, const struct td_decode_action *a,
                               struct td_error *err) {
    const uint8_t *from =
        (const uint8_t *)td_xfer_region_base(w->landing) + a->unpack.landing_slab * w->slab_bytes;
    uint32_t page_blocks = td_kv_page_blocks(a->unpack.n_prompt);
    uint64_t left = a->unpack.bytes;
    if (left > w->slab_bytes || a->unpack.n_blocks > w->headers_max)
        return td_fail(err, TD_PROTOCOL, "%u blocks in %llu bytes of a slab of %llu",
                       a->unpack.n_blocks, (unsigned long long)left,
                       (unsigned long long)w->slab_bytes);
    for (uint32_t i = 0; i < a->unpack.n_blocks; i++) {
        uint32_t index = a->unpack.first_block + i;
        struct td_kv_block_header h;
        TD_TRY(td_kv_peek(from, left, &h, err));
        uint64_t len = (uint64_t)h.header_bytes + h.body_bytes;
        if (h.body_bytes > left || len > left)
            return td_fail(err, TD_CORRUPT, "block %u has %llu bytes, %llu are left", index,
                           (unsigned long long)len, (unsigned long long)left);
        if (index < page_blocks)
            TD_TRY(td_engine_unpack_page(
                w->engine.engine, from, len, a->unpack.ticket, a->unpack.n_prompt, index,
                td_kv_page_of_block(a->unpack.pages, a->unpack.first_block, index, w->engine.split),
                &w->headers[i], err));
        else
            TD_TRY(td_engine_unpack_slot(w->engine.engine, from, len, a->unpack.ticket,
                                         a->unpack.n_prompt, a->unpack.slot, &w->headers[i], err));
        from += len;
        left -= len;
    }
    if (left != 0)
        return td_fail(err, TD_CORRUPT, "%llu bytes behind the last block",
                       (unsigned long long)left);
    return TD_OK;
}

void td_decode_unpack(struct td_decode_worker *w, const struct td_decode_action *a) {
    struct td_error err = {0};
    td_status st = unpack_blocks(w, a, &err);
    struct td_decode_event ev = {
        .kind = TD_DECODE_UNPACKED,
        .unpacked = {.landing_slab = a->unpack.landing_slab,
                     .status = st,
                     .headers = st == TD_OK ? w->headers : NULL},
    };
    if (st != TD_OK) {
        td_warn("a landing slab: %s", err.text);
        snprintf(ev.unpacked.text, sizeof ev.unpacked.text, "%s", err.text);
    }
    td_decode_feed(w, &ev);
    td_host_fault(w->host, st, err.text);
}

/* UCX under libuv. Before each wait of the loop UCX is moved on until it has nothing more to do and
 * its descriptor is armed; then the loop may sleep until the descriptor, a deadline, or anything
 * else wakes it. */
#include "proto/data_plane.h"

#include <stdlib.h>

#include "common/base/clock.h"
#include "proto/codec.h"

enum {
    NS_PER_MS = 1000000,
    TURNS_MAX = 256, /* of UCX before others on the loop get theirs */
};

struct td_plane {
    struct td_xfer *xfer;
    struct td_msg_arena *arena;
    const struct td_plane_events *events;
    void *user;
    uv_prepare_t prepare; /* before the loop waits */
    uv_poll_t poll;       /* UCX's descriptor */
    uv_timer_t timer;     /* deadlines, and polling when UCX cannot wake us */
    uv_idle_t again;      /* keeps the loop from waiting when there is more at once */
    int open_handles;
    uint8_t out[TD_XFER_MESSAGE_MAX];
};

/* Marks a caller that was refused here: its end is nobody's business. */
static char refused;

/* ---- from UCX ---- */

static void on_accept(void *user, struct td_xfer_peer *peer) {
    struct td_plane *p = user;
    if (p->events->on_accept) {
        p->events->on_accept(p->user, peer);
    } else {
        td_xfer_peer_set_user(peer, &refused);
        td_xfer_peer_close(peer);
    }
}

static void on_message(void *user, struct td_xfer_peer *peer, const void *bytes, size_t len) {
    struct td_plane *p = user;
    struct td_msg m;
    struct td_error err = {0};
    td_status st = td_msg_decode(bytes, len, p->arena, &m, &err);
    if (st == TD_UNSUPPORTED) return; /* a newer peer's; we can do without */
    if (st == TD_OK && m.type < TD_MSG_PEER_HELLO)
        st = td_fail(&err, TD_PROTOCOL, "message type %d does not belong on the data plane",
                     (int)m.type);
    if (st == TD_OK) {
        p->events->on_message(p->user, peer, &m);
    } else {
        p->events->on_lost(p->user, peer, TD_PROTOCOL, err.text);
    }
}

static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *sentence) {
    struct td_plane *p = user;
    p->events->on_lost(p->user, peer, why, sentence);
}

static void on_closed(void *user, struct td_xfer_peer *peer) {
    struct td_plane *p = user;
    if (td_xfer_peer_user(peer) != &refused) p->events->on_closed(p->user, peer);
}

static void on_stranger(void *user, const char *sentence) {
    struct td_plane *p = user;
    if (p->events->on_stranger) p->events->on_stranger(p->user, sentence);
}

static void on_readable(uv_poll_t *h, int rc, int events);

static void on_renewed(void *user, td_status status, const char *sentence) {
    struct td_plane *p = user;
    /* The descriptor has the old number and is another one. */
    uv_poll_stop(&p->poll);
    uv_poll_start(&p->poll, UV_READABLE, on_readable);
    if (p->events->on_renewed) p->events->on_renewed(p->user, status, sentence);
}

/* ---- from libuv ---- */

static void on_timer(uv_timer_t *h) {
    (void)h; /* woke the loop; the next prepare does the work */
}

static void on_readable(uv_poll_t *h, int rc, int events) {
    (void)h, (void)rc, (void)events; /* likewise */
}

static void on_idle(uv_idle_t *h) {
    (void)h;
}

static void wake_at(struct td_plane *p, uint64_t at_ns, uint64_t now) {
    if (at_ns == UINT64_MAX) {
        uv_timer_stop(&p->timer);
        return;
    }
    uint64_t ms = at_ns > now ? (at_ns - now) / NS_PER_MS + 1 : 0;
    uv_update_time(p->timer.loop);
    uv_timer_start(&p->timer, on_timer, ms, 0);
}

static void on_prepare(uv_prepare_t *h) {
    struct td_plane *p = h->data;
    int turns = 0;
    while (td_xfer_progress(p->xfer) && ++turns < TURNS_MAX) {
    }
    uint64_t now = td_now_ns(), next = td_xfer_expire(p->xfer, now);
    enum td_xfer_wait wait = turns < TURNS_MAX ? td_xfer_arm(p->xfer) : TD_XFER_AGAIN;
    if (wait == TD_XFER_POLL && next > now + NS_PER_MS) next = now + NS_PER_MS;
    if (wait == TD_XFER_AGAIN) {
        uv_idle_start(&p->again, on_idle);
    } else {
        uv_idle_stop(&p->again);
    }
    wake_at(p, next, now);
}

/* ---- interface ---- */

static void on_handle_closed(uv_handle_t *h) {
    struct td_plane *p = h->data;
    if (--p->open_handles == 0) free(p);
}

static void close_handles(struct td_plane *p) {
    uv_close((uv_handle_t *)&p->prepare, on_handle_closed);
    uv_close((uv_handle_t *)&p->timer, on_handle_closed);
    uv_close((uv_handle_t *)&p->again, on_handle_closed);
    if (p->open_handles > 3) uv_close((uv_handle_t *)&p->poll, on_handle_closed);
}

static td_status open_handles(struct td_plane *p, uv_loop_t *loop, struct td_error *err) {
    uv_prepare_init(loop, &p->prepare);
    uv_timer_init(loop, &p->timer);
    uv_idle_init(loop, &p->again);
    p->prepare.data = p->timer.data = p->again.data = p->poll.data = p;
    p->open_handles = 3;
    int rc = uv_poll_init(loop, &p->poll, td_xfer_fd(p->xfer));
    if (rc != 0) return td_fail(err, TD_IO, "watching UCX's descriptor: %s", uv_strerror(rc));
    p->open_handles++;
    uv_poll_start(&p->poll, UV_READABLE, on_readable);
    uv_prepare_start(&p->prepare, on_prepare);
    return TD_OK;
}

td_status td_plane_create(uv_loop_t *loop, const struct td_plane_events *events, void *user,
                          const struct td_plane_options *po, struct td_plane **ret,
                          struct td_error *err) {
    struct td_plane *p = calloc(1, sizeof *p);
    if (!p || td_msg_arena_create(&p->arena) != TD_OK) {
        free(p);
        return td_fail(err, TD_NO_MEMORY, "no memory for the data plane");
    }
    p->events = events;
    p->user = user;
    struct td_xfer_options o = {.on_accept = on_accept,
                                .on_message = on_message,
                                .on_lost = on_lost,
                                .on_closed = on_closed,
                                .on_stranger = on_stranger,
                                .on_renewed = on_renewed,
                                .user = p,
                                .key = po->key,
                                .role = po->role,
                                .epoch = po->epoch,
                                .max_peers = po->max_peers,
                                .sends_per_peer = po->sends_per_peer};
    td_status st = td_xfer_create(&o, &p->xfer, err);
    if (st != TD_OK) {
        td_msg_arena_destroy(p->arena);
        free(p);
        return st;
    }
    st = open_handles(p, loop, err);
    if (st != TD_OK) {
        td_plane_destroy(p);
        return st;
    }
    *ret = p;
    return TD_OK;
}

void td_plane_destroy(struct td_plane *p) {
    if (!p) return;
    close_handles(p);
    td_xfer_destroy(p->xfer);
    td_msg_arena_destroy(p->arena);
}

struct td_xfer *td_plane_xfer(struct td_plane *p) {
    return p->xfer;
}

td_status td_plane_send(struct td_plane *p, struct td_xfer_peer *peer, const struct td_msg *m,
                        uint64_t deadline_ns, struct td_error *err) {
    size_t len;
    TD_TRY(td_msg_encode(m, p->out, sizeof p->out, &len, err));
    td_status st = td_xfer_send(peer, p->out, len, deadline_ns);
    if (st != TD_OK)
        return td_fail(err, st, "message type %d to a peer: %s", (int)m->type, td_status_text(st));
    return TD_OK;
}

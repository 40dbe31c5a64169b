/* Control links. Server and client differ in who opens and who says hello; a connection's life
 * after that is the same code. A connection's memory goes with the close callback of its timer, so
 * it may be closed from inside any of its own callbacks; an endpoint's goes with its last
 * connection. */
#include "proto/link.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/auth/challenge.h"
#include "common/base/clock.h"
#include "common/base/list.h"
#include "common/io/stream.h"
#include "proto/codec_parts.h"

enum {
    NS_PER_MS = 1000000,
    FLUSH_MS = 1000,       /* for a last message to a peer that is slow to read */
    BACKOFF_MIN_MS = 20,   /* a restarted router is found again fast ... */
    BACKOFF_MAX_MS = 1000, /* ... and an absent one costs nothing */
};

/* PROVING: over TCP, before all else; then as over a Unix socket. */
enum state { PROVING, WAIT_HELLO, WAIT_REPLY, UP, CLOSED };

struct endpoint {
    uv_loop_t *loop;
    struct td_link_options o;
    const struct td_link_events *events;
    void *user;
    struct td_msg_arena *arena; /* one message is decoded at a time */
    struct td_link conns;
    uint32_t n_conns; /* whose memory still lives */
    bool destroyed;
    bool tcp;
    struct td_listener *listener; /* server */
    struct td_dialer *dialer;     /* client, with the next two */
    const struct td_msg_hello *hello;
    struct td_conn *current;
};

struct td_link_server {
    struct endpoint e;
};

struct td_link_client {
    struct endpoint e;
};

struct td_conn {
    struct td_link link;
    struct endpoint *e;
    struct td_stream *stream;
    uv_timer_t timer; /* every heartbeat_ms */
    enum state state;
    uint64_t heard_ns, tick_ns;
    uint64_t seq;
    struct td_challenge challenge; /* PROVING */
    uint64_t peer_epoch;
    char peer_name[TD_NAME_MAX];
    void *data;
};

static void free_endpoint(struct endpoint *e) {
    td_msg_arena_destroy(e->arena);
    free(e);
}

static void on_timer_closed(uv_handle_t *h) {
    struct td_conn *c = h->data;
    struct endpoint *e = c->e;
    free(c);
    if (--e->n_conns == 0 && e->destroyed) free_endpoint(e);
}

/* Takes the connection out of everything; `c` stays readable until the loop's next turn. */
static void retire(struct td_conn *c, bool flushed) {
    if (c->state == CLOSED) return;
    bool was_up = c->state == UP;
    c->state = CLOSED;
    td_list_remove(&c->link);
    if (flushed) {
        td_stream_close_flushed(c->stream, FLUSH_MS);
    } else {
        td_stream_close(c->stream);
    }
    c->stream = NULL;
    uv_close((uv_handle_t *)&c->timer, on_timer_closed);
    if (c->e->current == c) c->e->current = NULL;
    if (c->e->dialer && !c->e->destroyed) td_dialer_redial(c->e->dialer, was_up);
}

/* The link is lost, or was refused to this client. */
static void lose(struct td_conn *c, td_status why, const char *text) {
    if (c->state == CLOSED) return;
    struct endpoint *e = c->e;
    bool was_up = c->state == UP;
    bool refused = c->state == WAIT_REPLY || (c->state == PROVING && e->dialer);
    bool stranger = c->state == PROVING && !e->dialer;
    retire(c, false);
    if (stranger && e->events->on_stranger) e->events->on_stranger(e->user, why, text);
    if (!e->events->on_down) return;
    if (was_up) e->events->on_down(e->user, c, why, text);
    if (refused) e->events->on_down(e->user, NULL, why, text);
}

static td_status send_now(struct td_conn *c, const struct td_msg *m, struct td_error *err) {
    if (c->state == CLOSED) return td_fail(err, TD_UNREACHABLE, "the link is down");
    TD_TRY(td_msg_check(m, err));
    size_t size = td_msg_size_bound(m), used = 0;
    uint8_t *place;
    td_status st = td_stream_begin(c->stream, size, &place);
    if (st == TD_PEER_LOST) st = TD_UNREACHABLE;
    if (st != TD_OK)
        return td_fail(err, st, "message type %d of %zu bytes to %s: %s", (int)m->type, size,
                       c->peer_name[0] ? c->peer_name : "a peer", td_status_text(st));
    st = td_msg_pack(m, place, size, &used, NULL);
    assert(st == TD_OK);
    td_stream_end(c->stream, used);
    return TD_OK;
}

/* ---- time ---- */

static void send_beat(struct td_conn *c) {
    struct endpoint *e = c->e;
    struct td_msg m = {.type = TD_MSG_HEARTBEAT};
    m.heartbeat.epoch = e->o.epoch;
    m.heartbeat.seq = ++c->seq;
    if (e->events->on_beat) e->events->on_beat(e->user, c, &m.heartbeat);
    /* A failure means that the stream is going down, which on_down reports. */
    if (send_now(c, &m, NULL) != TD_OK) return;
}

static void on_tick(uv_timer_t *t) {
    struct td_conn *c = t->data;
    uint64_t now = td_now_ns(), period = (uint64_t)c->e->o.heartbeat_ms * NS_PER_MS;
    uint64_t since = now - c->tick_ns;
    c->tick_ns = now;
    /* While our own loop stood still nothing could be heard: that time is not the peer's. */
    if (since > 2 * period) c->heard_ns += since - period;
    if (now > c->heard_ns && now - c->heard_ns > (uint64_t)c->e->o.peer_timeout_ms * NS_PER_MS) {
        char text[TD_TEXT_MAX];
        snprintf(text, sizeof text, "nothing was heard from %s for %u ms",
                 c->peer_name[0] ? c->peer_name : "the peer", c->e->o.peer_timeout_ms);
        lose(c, TD_PEER_LOST, text);
    } else if (c->state == UP) {
        send_beat(c);
    }
}

/* ---- opening ---- */

/* The other side learns why before the connection closes. */
static void refuse(struct td_conn *c, td_status why, const char *text) {
    struct td_msg m = {.type = TD_MSG_HELLO_REPLY};
    m.hello_reply.version = TD_PROTO_VERSION;
    m.hello_reply.epoch = c->e->o.epoch;
    m.hello_reply.status = why;
    snprintf(m.hello_reply.text, sizeof m.hello_reply.text, "%s", text);
    if (send_now(c, &m, NULL) == TD_OK) {
        retire(c, true);
    } else {
        retire(c, false);
    }
}

static void on_hello(struct td_conn *c, const struct td_msg *m) {
    struct endpoint *e = c->e;
    char text[TD_TEXT_MAX] = "";
    td_status st = TD_OK;
    if (m->type != TD_MSG_HELLO) {
        snprintf(text, sizeof text, "expected a hello first, found message type %d", (int)m->type);
        refuse(c, TD_PROTOCOL, text);
        return;
    }
    memcpy(c->peer_name, m->hello.name, sizeof c->peer_name);
    c->peer_epoch = m->hello.epoch;
    if (m->hello.version != TD_PROTO_VERSION) {
        snprintf(text, sizeof text, "%s speaks version %u of the protocol, this router speaks %d",
                 c->peer_name, m->hello.version, TD_PROTO_VERSION);
        refuse(c, TD_MISMATCH, text);
        return;
    }
    if (e->events->on_hello) st = e->events->on_hello(e->user, &m->hello, text);
    if (st != TD_OK) {
        refuse(c, st, text);
        return;
    }
    struct td_msg reply = {.type = TD_MSG_HELLO_REPLY};
    reply.hello_reply.version = TD_PROTO_VERSION;
    reply.hello_reply.epoch = e->o.epoch;
    if (send_now(c, &reply, NULL) != TD_OK) {
        retire(c, false);
        return;
    }
    c->state = UP;
    if (e->events->on_up) e->events->on_up(e->user, c, m);
}

static void send_hello(struct td_conn *c) {
    struct td_msg m = {.type = TD_MSG_HELLO, .hello = *c->e->hello};
    struct td_error err;
    c->state = WAIT_REPLY;
    td_status st = send_now(c, &m, &err);
    if (st != TD_OK) lose(c, st, err.text);
}

static void on_hello_reply(struct td_conn *c, const struct td_msg *m) {
    struct endpoint *e = c->e;
    char text[TD_TEXT_MAX + 64];
    if (m->type != TD_MSG_HELLO_REPLY) {
        snprintf(text, sizeof text, "expected a hello's reply, found message type %d",
                 (int)m->type);
        lose(c, TD_PROTOCOL, text);
        return;
    }
    if (m->hello_reply.status != TD_OK) {
        snprintf(text, sizeof text, "the router refused: %s", m->hello_reply.text);
        lose(c, m->hello_reply.status, text);
        return;
    }
    c->peer_epoch = m->hello_reply.epoch;
    c->state = UP;
    e->current = c;
    if (e->events->on_up) e->events->on_up(e->user, c, m);
    /* What the worker has is known from the start, not after a period. */
    if (c->state == UP) send_beat(c);
}

/* ---- the challenge, over TCP ---- */

static void start_challenge(struct td_conn *c) {
    struct endpoint *e = c->e;
    uint8_t nonce[TD_NONCE_BYTES], out[TD_CHALLENGE_MAX];
    struct td_challenge_party self = {e->o.role, e->o.epoch};
    enum td_challenge_side side = e->dialer ? TD_CHALLENGE_CALLER : TD_CHALLENGE_HOST;
    if (getrandom(nonce, sizeof nonce, 0) != sizeof nonce) {
        lose(c, TD_IO, "no random numbers from the system");
        return;
    }
    td_challenge_init(&c->challenge, e->o.key, side, TD_CHALLENGE_CONTROL, 0, self, nonce);
    td_stream_limit(c->stream, TD_CHALLENGE_MAX);
    if (side == TD_CHALLENGE_HOST) return;
    size_t len = td_challenge_open(&c->challenge, out);
    if (td_stream_send(c->stream, out, len) != TD_OK)
        lose(c, TD_UNREACHABLE, "the challenge cannot be sent");
}

static void on_challenge(struct td_conn *c, const uint8_t *bytes, size_t len) {
    uint8_t out[TD_CHALLENGE_MAX];
    size_t out_len;
    struct td_error err;
    td_status st = td_challenge_take(&c->challenge, bytes, len, out, &out_len, &err);
    if (out_len && td_stream_send(c->stream, out, out_len) != TD_OK && st == TD_OK)
        st = td_fail(&err, TD_UNREACHABLE, "the challenge cannot be answered");
    if (st != TD_OK) {
        struct endpoint *e = c->e;
        if (e->dialer) {
            lose(c, st, err.text);
            return;
        }
        retire(c, out_len > 0); /* so that it hears why */
        if (e->events->on_stranger) e->events->on_stranger(e->user, st, err.text);
        return;
    }
    if (!c->challenge.done) return;
    td_stream_limit(c->stream, TD_FRAME_BYTES_MAX);
    c->heard_ns = td_now_ns();
    if (c->e->dialer)
        send_hello(c);
    else
        c->state = WAIT_HELLO;
}

/* Whoever comes with the key gets in, however many there are without: the oldest of these leaves.
 */
static void bound_strangers(struct endpoint *e) {
    struct td_conn *oldest = NULL;
    int n = 0;
    TD_LIST_EACH (&e->conns, it) {
        struct td_conn *c = TD_CONTAINER(it, struct td_conn, link);
        if (c->state != PROVING) continue;
        if (!oldest) oldest = c;
        n++;
    }
    if (n > TD_LINK_STRANGERS_MAX)
        lose(oldest, TD_BUSY, "as many connections as may be are waiting to prove the cluster key");
}

/* ---- the stream's events ---- */

static void on_up_msg(struct td_conn *c, const struct td_msg *m) {
    if (m->type == TD_MSG_HELLO || m->type == TD_MSG_HELLO_REPLY || m->type >= TD_MSG_PEER_HELLO) {
        char text[TD_TEXT_MAX];
        snprintf(text, sizeof text, "message type %d does not belong on an open control link",
                 (int)m->type);
        lose(c, TD_PROTOCOL, text);
        return;
    }
    c->e->events->on_msg(c->e->user, c, m);
}

static void on_frame(void *user, const uint8_t *bytes, size_t len) {
    struct td_conn *c = user;
    struct td_error err = {0};
    struct td_msg m;
    if (c->state == PROVING) {
        on_challenge(c, bytes, len);
        return;
    }
    c->heard_ns = td_now_ns();
    td_status st = td_msg_decode(bytes, len, c->e->arena, &m, &err);
    if (st == TD_UNSUPPORTED && c->state == UP) return; /* a newer peer's; we can do without */
    if (st != TD_OK && c->state == WAIT_HELLO) {
        refuse(c, st, err.text);
    } else if (st != TD_OK) {
        lose(c, st, err.text);
    } else if (c->state == WAIT_HELLO) {
        on_hello(c, &m);
    } else if (c->state == WAIT_REPLY) {
        on_hello_reply(c, &m);
    } else {
        on_up_msg(c, &m);
    }
}

static void on_stream_down(void *user, td_status why, const char *text) {
    struct td_conn *c = user;
    if (c->state == CLOSED) return;
    c->stream = NULL; /* freed by itself */
    lose(c, why, text);
}

static const struct td_stream_events stream_events = {.on_frame = on_frame,
                                                      .on_down = on_stream_down};

static struct td_conn *conn_create(struct endpoint *e, struct td_stream *s, enum state state) {
    struct td_conn *c = calloc(1, sizeof *c);
    if (!c) {
        td_stream_close(s);
        return NULL;
    }
    c->e = e;
    c->stream = s;
    c->state = state;
    c->heard_ns = c->tick_ns = td_now_ns();
    uv_timer_init(e->loop, &c->timer);
    c->timer.data = c;
    uv_timer_start(&c->timer, on_tick, e->o.heartbeat_ms, e->o.heartbeat_ms);
    td_list_push_back(&e->conns, &c->link);
    e->n_conns++;
    td_stream_start(s, &stream_events, c);
    return c;
}

static void on_accept(void *user, struct td_stream *s) {
    struct endpoint *e = user;
    struct td_conn *c = conn_create(e, s, e->tcp ? PROVING : WAIT_HELLO);
    if (!c || !e->tcp) return;
    start_challenge(c);
    bound_strangers(e);
}

static void on_connect(void *user, struct td_stream *s) {
    struct endpoint *e = user;
    struct td_conn *c = conn_create(e, s, e->tcp ? PROVING : WAIT_REPLY);
    if (!c) {
        td_dialer_redial(e->dialer, false);
        return;
    }
    snprintf(c->peer_name, sizeof c->peer_name, "router");
    if (e->tcp)
        start_challenge(c);
    else
        send_hello(c);
}

/* ---- interface ---- */

td_status td_conn_send(struct td_conn *c, const struct td_msg *m, struct td_error *err) {
    if (c->state != UP) return td_fail(err, TD_UNREACHABLE, "the link is down");
    return send_now(c, m, err);
}

uint64_t td_conn_peer_epoch(const struct td_conn *c) {
    return c->peer_epoch;
}

void td_conn_set_data(struct td_conn *c, void *data) {
    c->data = data;
}

void *td_conn_data(const struct td_conn *c) {
    return c->data;
}

void td_conn_close(struct td_conn *c) {
    retire(c, true);
}

static td_status endpoint_create(uv_loop_t *loop, const char *address,
                                 const struct td_link_options *o,
                                 const struct td_link_events *events, void *user,
                                 struct endpoint **ret, struct td_stream_limits *ret_limits,
                                 struct td_error *err) {
    bool tcp;
    TD_TRY(td_address_is_tcp(address, &tcp, err));
    if (tcp && !o->key)
        return td_fail(
            err, TD_CONFIG,
            "%s: expected a cluster key for a control link over TCP, found none: set "
            "cluster_key_file, to the same secret on every host (head -c 32 /dev/urandom "
            "| base64 > FILE; chmod 600 FILE)",
            address);
    struct endpoint *e = calloc(1, sizeof *e);
    if (!e) return td_fail(err, TD_NO_MEMORY, "no memory for control links");
    e->tcp = tcp;
    if (td_msg_arena_create(&e->arena) != TD_OK) {
        free(e);
        return td_fail(err, TD_NO_MEMORY, "no memory for control links");
    }
    e->loop = loop;
    e->o = *o;
    e->events = events;
    e->user = user;
    td_list_init(&e->conns);
    ret_limits->frame_max = TD_FRAME_BYTES_MAX;
    ret_limits->queue_max = o->queue_max ? o->queue_max : TD_LINK_QUEUE_DEFAULT;
    *ret = e;
    return TD_OK;
}

static void endpoint_destroy(struct endpoint *e) {
    e->destroyed = true;
    td_listener_close(e->listener);
    td_dialer_close(e->dialer);
    TD_LIST_EACH_SAFE (&e->conns, it, next) {
        retire(TD_CONTAINER(it, struct td_conn, link), true);
    }
    if (e->n_conns == 0) free_endpoint(e);
}

td_status td_link_server_create(uv_loop_t *loop, const char *address,
                                const struct td_link_options *o, uint32_t max_conns,
                                const struct td_link_events *events, void *user,
                                struct td_link_server **ret, struct td_error *err) {
    struct endpoint *e = NULL;
    struct td_stream_limits limits;
    TD_TRY(endpoint_create(loop, address, o, events, user, &e, &limits, err));
    td_status st =
        td_listener_create(loop, address, &limits, max_conns, on_accept, e, &e->listener, err);
    if (st != TD_OK) {
        free_endpoint(e);
        return st;
    }
    *ret = (struct td_link_server *)e;
    return TD_OK;
}

uint16_t td_link_server_port(const struct td_link_server *s) {
    return td_listener_port(s->e.listener);
}

void td_link_server_destroy(struct td_link_server *s) {
    if (s) endpoint_destroy(&s->e);
}

td_status td_link_client_create(uv_loop_t *loop, const char *address,
                                const struct td_link_options *o, const struct td_msg_hello *hello,
                                const struct td_link_events *events, void *user,
                                struct td_link_client **ret, struct td_error *err) {
    struct endpoint *e = NULL;
    struct td_stream_limits limits;
    struct td_msg m = {.type = TD_MSG_HELLO, .hello = *hello};
    TD_TRY(td_msg_check(&m, err));
    TD_TRY(endpoint_create(loop, address, o, events, user, &e, &limits, err));
    e->hello = hello;
    td_status st = td_dialer_create(loop, address, &limits, BACKOFF_MIN_MS, BACKOFF_MAX_MS,
                                    on_connect, e, &e->dialer, err);
    if (st != TD_OK) {
        free_endpoint(e);
        return st;
    }
    *ret = (struct td_link_client *)e;
    return TD_OK;
}

struct td_conn *td_link_client_conn(const struct td_link_client *c) {
    return c->e.current;
}

const char *td_link_client_trouble(const struct td_link_client *c) {
    return td_dialer_last_error(c->e.dialer);
}

void td_link_client_destroy(struct td_link_client *c) {
    if (c) endpoint_destroy(&c->e);
}

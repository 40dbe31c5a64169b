/* Connections: accepting, reading, clocks, closing. See http_server.h. */
#include "router/http_conn.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void td_http_limits_defaults(struct td_http_limits *l) {
    *l = (struct td_http_limits){
        .head_bytes = 32 << 10,
        .body_bytes = 8 << 20,
        .bodies_bytes = 256 << 20,
        .queue_bytes = 8 << 20,
        .connections = 1024,
        .idle_ms = 75000,
        .read_ms = 60000,
        .write_ms = 30000,
        .linger_ms = 2000,
    };
}

/* ---- closing ---- */

static void on_conn_closed(uv_handle_t *h) {
    struct td_http_conn *c = h->data;
    struct td_http_server *s = c->server;
    if (c->state == TD_HTTP_CLOSING && c->owner) {
        if (!c->begun_answer) s->statuses[TD_HTTP_CLIENT_LEFT]++;
        s->handler.gone(s->handler.user, c);
    }
    td_list_remove(&c->link);
    td_list_remove(&c->unsent);
    s->n_conns--;
    free(c->head);
    td_http_body_drop(c);
    td_http_bytes_free(&c->body);
    td_http_bytes_free(&c->pending);
    td_http_bytes_free(&c->out);
    td_http_bytes_free(&c->flight);
    free(c);
}

void td_http_conn_close(struct td_http_conn *c) {
    if (c->state == TD_HTTP_CLOSING) return;
    /* An owner that has ended its answer is not told that the client left. */
    if (c->state != TD_HTTP_HANDLING) c->owner = NULL;
    c->state = TD_HTTP_CLOSING;
    uv_close((uv_handle_t *)&c->tcp, on_conn_closed);
}

static void on_shutdown(uv_shutdown_t *req, int status) {
    struct td_http_conn *c = req->data;
    if (status < 0) td_http_conn_close(c);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf);

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf) {
    (void)suggested;
    struct td_http_conn *c = h->data;
    *buf = uv_buf_init(c->server->read_buf, sizeof c->server->read_buf);
}

/* Reads go on, also behind a request being answered, since the end of the stream is how a client
 * leaves; they stop while enough is waiting. */
static void reads_on(struct td_http_conn *c) {
    bool enough = c->state == TD_HTTP_HANDLING && c->pending.n >= TD_HTTP_READ_BYTES;
    if (c->state == TD_HTTP_CLOSING || c->reading == !enough) return;
    if (enough) {
        uv_read_stop((uv_stream_t *)&c->tcp);
        c->reading = false;
        return;
    }
    if (uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read) == 0)
        c->reading = true;
    else
        td_http_conn_close(c);
}

/* Closing at once would reset the connection while the client still sends, and the reset could
 * overtake the answer. So: half-close, throw away what comes, close at the client's own close. */
void td_http_conn_linger(struct td_http_conn *c) {
    if (c->state == TD_HTTP_CLOSING || c->state == TD_HTTP_LINGER) return;
    c->state = TD_HTTP_LINGER;
    c->owner = NULL;
    c->pending.n = 0;
    td_http_body_drop(c);
    c->read_deadline = 0; /* until all is written the clock of writes holds */
    td_http_flush(c);
    td_http_conn_shut(c);
    reads_on(c);
}

void td_http_conn_shut(struct td_http_conn *c) {
    if (c->state != TD_HTTP_LINGER || c->shut || c->writing || c->out.n > 0) return;
    c->read_deadline = uv_now(c->server->loop) + c->server->limits.linger_ms;
    c->shutdown_req.data = c;
    c->shut = uv_shutdown(&c->shutdown_req, (uv_stream_t *)&c->tcp, on_shutdown) == 0;
}

/* ---- from bytes to requests ---- */

static void conn_handle(struct td_http_conn *c) {
    struct td_http_server *s = c->server;
    c->state = TD_HTTP_HANDLING;
    c->read_deadline = 0;
    if (c->url.n) {
        char *query = strchr(c->head + c->url.at, '?');
        if (query) *query++ = 0;
        c->query = query;
    }
    s->handler.request(s->handler.user, c);
}

static void conn_refuse(struct td_http_conn *c) {
    struct td_http_server *s = c->server;
    c->state = TD_HTTP_HANDLING;
    c->keep_alive = false;
    s->handler.refused(s->handler.user, c, c->refuse_status, c->refuse_text);
    assert(c->state != TD_HTTP_HANDLING); /* the contract: answered at once */
}

/* Parses `bytes`; what is behind a complete request waits in `pending`. */
static void conn_feed(struct td_http_conn *c, const char *bytes, size_t n) {
    size_t used;
    if (!c->begun && n > 0) c->read_deadline = uv_now(c->server->loop) + c->server->limits.read_ms;
    td_http_parse_feed(c, bytes, n, &used);
    if (c->state == TD_HTTP_CLOSING) return;
    if (c->refuse_status) {
        conn_refuse(c);
        return;
    }
    if (!c->complete) return;
    if (used < n && !td_http_bytes_add(&c->pending, bytes + used, n - used, SIZE_MAX)) {
        td_http_conn_close(c);
        return;
    }
    conn_handle(c);
}

/* Goes on with what is pending while requests are answered on the spot. */
static void conn_process(struct td_http_conn *c) {
    if (c->in_process) return;
    c->in_process = true;
    while (c->state == TD_HTTP_READING && c->pending.n > 0) {
        struct td_http_bytes b = c->pending;
        c->pending = (struct td_http_bytes){0};
        conn_feed(c, b.p, b.n);
        td_http_bytes_free(&b);
    }
    c->in_process = false;
    if (c->state == TD_HTTP_READING || c->state == TD_HTTP_HANDLING) reads_on(c);
}

void td_http_conn_next(struct td_http_conn *c) {
    if (c->state != TD_HTTP_HANDLING) return;
    if (!c->keep_alive || c->server->stopping) {
        td_http_conn_linger(c);
        return;
    }
    td_http_parse_reset(c);
    c->state = TD_HTTP_READING;
    c->read_deadline = uv_now(c->server->loop) + c->server->limits.idle_ms;
    conn_process(c);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
    struct td_http_conn *c = stream->data;
    if (n == 0) return;
    if (n < 0) { /* end of file counts as leaving: nobody would read the answer's end */
        td_http_conn_close(c);
        return;
    }
    if (c->state == TD_HTTP_LINGER) return;
    if (c->state == TD_HTTP_HANDLING) {
        if (!td_http_bytes_add(&c->pending, buf->base, (size_t)n, 2 * TD_HTTP_READ_BYTES)) {
            td_http_conn_close(c);
            return;
        }
        reads_on(c);
        return;
    }
    if (c->state != TD_HTTP_READING) return;
    c->in_process = true;
    conn_feed(c, buf->base, (size_t)n);
    c->in_process = false;
    if (c->state == TD_HTTP_READING) conn_process(c);
}

/* ---- accepting ---- */

static void turn_away(struct td_http_server *s);

static void on_spare_closed(uv_handle_t *h) {
    struct td_http_server *s = h->data;
    s->spare_used = false;
    if (s->spare_wanted && !s->stopping) turn_away(s);
}

/* A connection that nobody accepts would stop the listener for ever. */
static void turn_away(struct td_http_server *s) {
    s->spare_wanted = s->spare_used;
    if (s->spare_used) return; /* on_spare_closed comes back */
    s->spare_used = uv_tcp_init(s->loop, &s->spare) == 0;
    s->spare.data = s;
    (void)uv_accept((uv_stream_t *)&s->listener, (uv_stream_t *)&s->spare);
    uv_close((uv_handle_t *)&s->spare, on_spare_closed);
}

static void on_connection(uv_stream_t *listener, int status) {
    struct td_http_server *s = listener->data;
    if (status < 0 || s->stopping) return;
    if (s->n_conns >= s->limits.connections + TD_HTTP_TURNED_AWAY_MAX) {
        turn_away(s);
        return;
    }
    struct td_http_conn *c = calloc(1, sizeof *c);
    char *head = c ? malloc(s->limits.head_bytes + 1) : NULL;
    if (!head || uv_tcp_init(s->loop, &c->tcp) != 0) {
        free(head);
        free(c);
        turn_away(s);
        return;
    }
    c->head = head;
    c->server = s;
    c->tcp.data = c;
    td_list_push_back(&s->conns, &c->link);
    td_list_init(&c->unsent);
    s->n_conns++;
    llhttp_init(&c->parser, HTTP_REQUEST, &s->settings);
    c->parser.data = c;
    td_http_parse_reset(c);
    if (uv_accept(listener, (uv_stream_t *)&c->tcp) != 0) {
        td_http_conn_close(c);
        return;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    c->read_deadline = uv_now(s->loop) + s->limits.idle_ms;
    if (s->n_conns > s->limits.connections) {
        td_http_refuse(c, 503, "too many connections");
        conn_refuse(c);
        return;
    }
    reads_on(c);
}

/* ---- clocks ---- */

static void conn_tick(struct td_http_conn *c, uint64_t now) {
    if (c->state == TD_HTTP_CLOSING) return;
    if (c->writing && now >= c->write_deadline) {
        size_t queue = uv_stream_get_write_queue_size((uv_stream_t *)&c->tcp);
        if (queue >= c->last_queue) {
            td_http_conn_close(c);
            return;
        }
        c->last_queue = queue;
        c->write_deadline = now + c->server->limits.write_ms;
    }
    if (!c->read_deadline || now < c->read_deadline) return;
    if (c->state == TD_HTTP_READING && c->begun) {
        td_http_refuse(c, 408, "the request did not arrive in time");
        conn_refuse(c);
    } else {
        td_http_conn_close(c);
    }
}

static void on_tick(uv_timer_t *t) {
    struct td_http_server *s = t->data;
    uint64_t now = uv_now(s->loop);
    TD_LIST_EACH_SAFE (&s->conns, it, tmp) {
        conn_tick(TD_CONTAINER(it, struct td_http_conn, link), now);
    }
}

static void on_turn(uv_prepare_t *p) {
    struct td_http_server *s = p->data;
    TD_LIST_EACH_SAFE (&s->unsent, it, tmp) {
        td_http_flush(TD_CONTAINER(it, struct td_http_conn, unsent));
    }
}

static uint32_t tick_ms(const struct td_http_limits *l) {
    uint32_t least = l->idle_ms < l->read_ms ? l->idle_ms : l->read_ms;
    if (l->write_ms < least) least = l->write_ms;
    if (l->linger_ms < least) least = l->linger_ms;
    least /= 4;
    return least < 10 ? 10 : least > 250 ? 250 : least;
}

/* ---- the server ---- */

td_status td_http_server_create(uv_loop_t *loop, const struct td_http_limits *limits,
                                const struct td_http_handler *handler, struct td_http_server **ret,
                                struct td_error *err) {
    struct td_http_server *s = calloc(1, sizeof *s);
    if (!s) return td_fail(err, TD_NO_MEMORY, "HTTP server: out of memory");
    s->loop = loop;
    s->limits = *limits;
    s->handler = *handler;
    td_list_init(&s->conns);
    td_list_init(&s->unsent);
    td_http_parse_settings(&s->settings);
    *ret = s;
    return TD_OK;
}

static td_status parse_address(const char *text, struct sockaddr_storage *out,
                               struct td_error *err) {
    char host[128];
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    size_t n = colon ? (size_t)(colon - text) : 0;
    bool bad =
        !colon || end == colon + 1 || *end || port > UINT16_MAX || n == 0 || n >= sizeof host;
    if (!bad) {
        bool six = text[0] == '[' && text[n - 1] == ']';
        snprintf(host, sizeof host, "%.*s", (int)(n - 2 * (size_t)six), text + six);
        if (strcmp(host, "localhost") == 0) snprintf(host, sizeof host, "127.0.0.1");
        bad = six ? uv_ip6_addr(host, (int)port, (struct sockaddr_in6 *)out) != 0
                  : uv_ip4_addr(host, (int)port, (struct sockaddr_in *)out) != 0;
    }
    if (bad)
        return td_fail(err, TD_CONFIG,
                       "router.listen: expected ADDRESS:PORT like 127.0.0.1:8000 or [::1]:8000, "
                       "found '%s'",
                       text);
    return TD_OK;
}

td_status td_http_server_listen(struct td_http_server *s, const char *address,
                                struct td_error *err) {
    struct sockaddr_storage a = {0};
    TD_TRY(parse_address(address, &a, err));
    int rc = uv_tcp_init(s->loop, &s->listener);
    if (rc == 0) {
        s->listener_open = true;
        s->listener.data = s;
        rc = uv_tcp_bind(&s->listener, (struct sockaddr *)&a, 0);
    }
    if (rc == 0) rc = uv_listen((uv_stream_t *)&s->listener, 1024, on_connection);
    int len = sizeof a;
    if (rc == 0) rc = uv_tcp_getsockname(&s->listener, (struct sockaddr *)&a, &len);
    if (rc == 0) rc = uv_timer_init(s->loop, &s->tick);
    if (rc != 0) return td_fail(err, TD_IO, "cannot listen on %s: %s", address, uv_strerror(rc));
    s->port = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                            : ((struct sockaddr_in *)&a)->sin_port);
    s->tick_open = true;
    s->tick.data = s;
    uint32_t ms = tick_ms(&s->limits);
    uv_timer_start(&s->tick, on_tick, ms, ms);
    uv_prepare_init(s->loop, &s->turn); /* neither this nor the start of it can fail */
    s->turn.data = s;
    uv_prepare_start(&s->turn, on_turn);
    return TD_OK;
}

bool td_http_peer_is_local(const struct td_http_conn *c) {
    struct sockaddr_storage a;
    int len = sizeof a;
    if (uv_tcp_getpeername(&c->tcp, (struct sockaddr *)&a, &len) != 0) return false;
    if (a.ss_family == AF_INET)
        return ntohl(((struct sockaddr_in *)&a)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    const struct in6_addr *six = &((struct sockaddr_in6 *)&a)->sin6_addr;
    return a.ss_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(six) ||
            (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == IN_LOOPBACKNET));
}

uint16_t td_http_server_port(const struct td_http_server *s) {
    return s->port;
}

const uint64_t *td_http_server_statuses(const struct td_http_server *s) {
    return s->statuses;
}

uint32_t td_http_server_connections(const struct td_http_server *s) {
    return s->n_conns;
}

void td_http_server_stop(struct td_http_server *s) {
    s->stopping = true;
    if (s->listener_open) uv_close((uv_handle_t *)&s->listener, NULL);
    TD_LIST_EACH_SAFE (&s->conns, it, tmp) {
        td_http_conn_close(TD_CONTAINER(it, struct td_http_conn, link));
    }
    if (s->tick_open) {
        uv_close((uv_handle_t *)&s->tick, NULL);
        uv_close((uv_handle_t *)&s->turn, NULL);
    }
    s->listener_open = s->tick_open = false;
}

void td_http_server_destroy(struct td_http_server *s) {
    if (!s) return;
    assert(td_list_empty(&s->conns));
    free(s);
}

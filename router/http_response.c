/* Answers: status line and headers, whole bodies, streams, and the bounded queue of bytes that a
 * client has yet to take. A slow client costs its own queue only. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/put.h"
#include "router/http_conn.h"

bool td_http_bytes_add(struct td_http_bytes *b, const char *p, size_t n, size_t limit) {
    if (n > limit || b->n > limit - n) return false;
    if (b->n + n > b->cap) {
        size_t cap = b->cap ? b->cap : 4096;
        while (cap < b->n + n)
            cap *= 2;
        char *grown = realloc(b->p, cap);
        if (!grown) return false;
        b->p = grown;
        b->cap = cap;
    }
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    return true;
}

void td_http_bytes_free(struct td_http_bytes *b) {
    free(b->p);
    *b = (struct td_http_bytes){0};
}

/* ---- the queue ---- */

static void on_written(uv_write_t *req, int status) {
    struct td_http_conn *c = req->data;
    c->writing = false;
    c->flight.n = 0;
    if (c->flight.cap > TD_HTTP_KEEP_BYTES) td_http_bytes_free(&c->flight);
    if (status < 0) {
        td_http_conn_close(c);
        return;
    }
    td_http_flush(c);
    td_http_conn_shut(c);
}

void td_http_flush(struct td_http_conn *c) {
    td_list_remove(&c->unsent);
    if (c->state == TD_HTTP_CLOSING || c->writing || c->out.n == 0) return;
    uv_buf_t buf = uv_buf_init(c->out.p, (unsigned)c->out.n);
    int sent = uv_try_write((uv_stream_t *)&c->tcp, &buf, 1);
    if (sent < 0 && sent != UV_EAGAIN) {
        td_http_conn_close(c);
        return;
    }
    size_t done = sent > 0 ? (size_t)sent : 0;
    if (done == c->out.n) {
        c->out.n = 0;
        return;
    }
    struct td_http_bytes t = c->flight;
    c->flight = c->out;
    c->out = t;
    c->out.n = 0;
    buf = uv_buf_init(c->flight.p + done, (unsigned)(c->flight.n - done));
    c->write_req.data = c;
    if (uv_write(&c->write_req, (uv_stream_t *)&c->tcp, &buf, 1, on_written) != 0) {
        td_http_conn_close(c);
        return;
    }
    c->writing = true;
    c->last_queue = buf.len;
    c->write_deadline = uv_now(c->server->loop) + c->server->limits.write_ms;
}

static void enqueue_within(struct td_http_conn *c, const char *bytes, size_t n, size_t limit) {
    if (c->state == TD_HTTP_CLOSING || c->state == TD_HTTP_LINGER) return;
    size_t room = limit > c->flight.n ? limit - c->flight.n : 0;
    if (!td_http_bytes_add(&c->out, bytes, n, room)) td_http_conn_close(c);
}

static void enqueue(struct td_http_conn *c, const char *bytes, size_t n) {
    enqueue_within(c, bytes, n, c->server->limits.queue_bytes);
}

void td_http_send(struct td_http_conn *c, const char *bytes, size_t n) {
    enqueue(c, bytes, n);
    td_http_flush(c);
}

size_t td_http_queued(const struct td_http_conn *c) {
    return c->out.n +
           (c->writing ? uv_stream_get_write_queue_size((const uv_stream_t *)&c->tcp) : 0);
}

/* ---- the head ---- */

void td_http_add_header(struct td_http_conn *c, const char *name, const char *value) {
    for (const unsigned char *p = (const unsigned char *)value; *p; p++)
        if (*p < 0x20 || *p == 0x7f) return;
    size_t n = strlen(name) + strlen(value) + 4;
    if (n > sizeof c->extra - c->extra_n) return;
    char *at = td_put(td_put(c->extra + c->extra_n, name), ": ");
    td_put(td_put(at, value), "\r\n");
    c->extra_n += n;
}

/* Of the second that `s` wrote last. */
static const char *date(struct td_http_server *s) {
    time_t now = time(NULL);
    struct tm tm;
    if (now == s->date_s) return s->date;
    s->date_s = now;
    strftime(s->date, sizeof s->date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    return s->date;
}

static void write_head(struct td_http_conn *c, int status, const char *content_type,
                       const char *framing) {
    char head[TD_HTTP_EXTRA_MAX + 512], *at = head;
    if (c->server->stopping) c->keep_alive = false;
    const char *connection = !c->keep_alive ? "Connection: close\r\n"
                             : c->http10    ? "Connection: keep-alive\r\n"
                                            : "";
    const char *parts[] = {llhttp_status_name((llhttp_status_t)status), "\r\nDate: ", date(c->server),
                           "\r\nContent-Type: ", content_type, "\r\n", framing, connection};
    at = td_put(td_put_u64(td_put(at, "HTTP/1.1 "), (uint64_t)status), " ");
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        at = td_put(at, parts[i]);
    at = td_put(td_put_bytes(at, c->extra, c->extra_n), "\r\n");
    assert(at <= head + sizeof head);
    enqueue(c, head, (size_t)(at - head));
    c->begun_answer = true;
    if (status < TD_HTTP_STATUSES) c->server->statuses[status]++;
}

void td_http_reply(struct td_http_conn *c, int status, const char *content_type, const char *body,
                   size_t n) {
    char framing[48];
    if (c->state == TD_HTTP_CLOSING) return;
    assert(!c->begun_answer && c->state == TD_HTTP_HANDLING);
    *td_put(td_put_u64(td_put(framing, "Content-Length: "), n), "\r\n") = 0;
    write_head(c, status, content_type, framing);
    if (!c->head_only) enqueue_within(c, body, n, SIZE_MAX); /* it is whole: nothing follows */
    td_http_flush(c);
    td_http_conn_next(c);
}

/* ---- streams ---- */

/* One write for all that this turn of the loop has for the client. */
static void send_soon(struct td_http_conn *c) {
    if (c->out.n >= TD_HTTP_KEEP_BYTES)
        td_http_flush(c);
    else if (td_list_empty(&c->unsent))
        td_list_push_back(&c->server->unsent, &c->unsent);
}

void td_http_begin(struct td_http_conn *c, int status, const char *content_type) {
    if (c->state == TD_HTTP_CLOSING) return;
    assert(!c->begun_answer && c->state == TD_HTTP_HANDLING);
    c->chunked = !c->http10;
    if (!c->chunked) c->keep_alive = false; /* HTTP/1.0: the close ends the body */
    write_head(c, status, content_type,
               c->chunked ? "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"
                          : "Cache-Control: no-cache\r\n");
    send_soon(c);
}

static void enqueue_size(struct td_http_conn *c, size_t n) {
    char line[2 * sizeof n + 2];
    size_t at = sizeof line;
    line[--at] = '\n';
    line[--at] = '\r';
    do
        line[--at] = "0123456789abcdef"[n & 15];
    while (n >>= 4);
    enqueue(c, line + at, sizeof line - at);
}

void td_http_write(struct td_http_conn *c, const char *bytes, size_t n) {
    if (c->state != TD_HTTP_HANDLING || c->head_only || n == 0) return;
    assert(c->begun_answer);
    if (c->chunked) enqueue_size(c, n);
    enqueue(c, bytes, n);
    if (c->chunked) enqueue(c, "\r\n", 2);
    send_soon(c);
}

void td_http_end(struct td_http_conn *c) {
    if (c->state != TD_HTTP_HANDLING) return;
    assert(c->begun_answer);
    if (c->chunked && !c->head_only) td_http_send(c, "0\r\n\r\n", 5);
    td_http_conn_next(c);
}

void td_http_abort(struct td_http_conn *c) {
    if (c->state != TD_HTTP_HANDLING) return;
    td_http_conn_linger(c);
}

/* From bytes to one request, by llhttp, with the limits enforced as bytes arrive. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "router/http_conn.h"

int td_http_refuse(struct td_http_conn *c, int status, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->refuse_text, sizeof c->refuse_text, fmt, ap);
    va_end(ap);
    c->refuse_status = status;
    return HPE_USER;
}

static int head_add(struct td_http_conn *c, struct td_http_span *span, const char *at, size_t n) {
    size_t limit = c->server->limits.head_bytes;
    if (n > limit - c->head_n)
        return td_http_refuse(c, 431, "the request line and headers are longer than %zu bytes",
                              limit);
    if (span->n == 0) span->at = (uint32_t)c->head_n;
    memcpy(c->head + c->head_n, at, n);
    c->head_n += n;
    span->n += (uint32_t)n;
    return 0;
}

/* Spans end with a 0 in `head`, which has room for it beyond the limit (see conn creation). */
static void head_terminate(struct td_http_conn *c, struct td_http_span *span) {
    if (span->n == 0) span->at = (uint32_t)c->head_n;
    c->head[c->head_n] = 0;
    if (c->head_n < c->server->limits.head_bytes) c->head_n++;
}

static int on_message_begin(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    c->begun = true;
    return 0;
}

static int on_url(llhttp_t *p, const char *at, size_t n) {
    struct td_http_conn *c = p->data;
    return head_add(c, &c->url, at, n);
}

static int on_url_complete(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    head_terminate(c, &c->url);
    return 0;
}

static int on_field(llhttp_t *p, const char *at, size_t n) {
    struct td_http_conn *c = p->data;
    if (c->head_done) { /* trailers are counted, not kept */
        c->raw_head_n += n;
        if (c->raw_head_n > c->server->limits.head_bytes)
            return td_http_refuse(c, 431, "trailers are longer than %zu bytes",
                                  c->server->limits.head_bytes);
        return 0;
    }
    if (c->n_fields == TD_HTTP_FIELDS_MAX)
        return td_http_refuse(c, 431, "more than %d headers", TD_HTTP_FIELDS_MAX);
    size_t at0 = c->head_n;
    int rc = head_add(c, &c->field[c->n_fields], at, n);
    for (size_t i = at0; i < c->head_n; i++)
        if (c->head[i] >= 'A' && c->head[i] <= 'Z') c->head[i] = (char)(c->head[i] | 0x20);
    return rc;
}

static int on_field_complete(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    if (!c->head_done) head_terminate(c, &c->field[c->n_fields]);
    return 0;
}

static int on_value(llhttp_t *p, const char *at, size_t n) {
    struct td_http_conn *c = p->data;
    if (c->head_done) return on_field(p, at, n);
    return head_add(c, &c->value[c->n_fields], at, n);
}

static int on_value_complete(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    if (c->head_done) return 0;
    head_terminate(c, &c->value[c->n_fields]);
    c->n_fields++;
    return 0;
}

static int on_headers_complete(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    c->head_done = true;
    c->raw_head_n = 0;
    /* An offer to switch protocols may be ignored; then the message goes on as HTTP/1. */
    p->upgrade = 0;
    if (p->http_major != 1 || p->http_minor > 1)
        return td_http_refuse(c, 505, "HTTP/%u.%u is not spoken here", p->http_major,
                              p->http_minor);
    c->http10 = p->http_minor == 0;
    c->head_only = p->method == HTTP_HEAD;
    if (!c->http10 && !td_http_header(c, "host"))
        return td_http_refuse(c, 400, "the Host header is missing");
    if ((p->flags & F_CONTENT_LENGTH) && p->content_length > c->server->limits.body_bytes)
        return td_http_refuse(c, 413, "the body is %llu bytes long, the limit is %zu",
                              (unsigned long long)p->content_length, c->server->limits.body_bytes);
    const char *expect = td_http_header(c, "expect");
    if (expect && !c->http10) {
        if (strcasecmp(expect, "100-continue") != 0)
            return td_http_refuse(c, 417,
                                  "Expect: 100-continue is understood, other expectations are not");
        static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
        td_http_send(c, go_on, sizeof go_on - 1);
    }
    return 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n) {
    struct td_http_conn *c = p->data;
    size_t limit = c->server->limits.body_bytes;
    if (n > limit - c->body.n)
        return td_http_refuse(c, 413, "the body is at least %zu bytes long, the limit is %zu",
                              c->body.n + n, limit);
    struct td_http_server *s = c->server;
    if (s->bodies_n + n > s->limits.bodies_bytes)
        return td_http_refuse(c, 503, "too many bytes of requests are arriving, try again later");
    s->bodies_n += n;
    if (!td_http_bytes_add(&c->body, at, n, limit)) {
        s->bodies_n -= n;
        return td_http_refuse(c, 503, "out of memory");
    }
    return 0;
}

static int on_message_complete(llhttp_t *p) {
    struct td_http_conn *c = p->data;
    c->complete = true;
    c->keep_alive = llhttp_should_keep_alive(p) != 0;
    return HPE_PAUSED;
}

void td_http_parse_settings(llhttp_settings_t *s) {
    llhttp_settings_init(s);
    s->on_message_begin = on_message_begin;
    s->on_url = on_url;
    s->on_url_complete = on_url_complete;
    s->on_header_field = on_field;
    s->on_header_field_complete = on_field_complete;
    s->on_header_value = on_value;
    s->on_header_value_complete = on_value_complete;
    s->on_headers_complete = on_headers_complete;
    s->on_body = on_body;
    s->on_message_complete = on_message_complete;
}

void td_http_body_drop(struct td_http_conn *c) {
    c->server->bodies_n -= c->body.n;
    c->body.n = 0;
    if (c->body.cap > TD_HTTP_KEEP_BYTES) td_http_bytes_free(&c->body);
}

void td_http_parse_reset(struct td_http_conn *c) {
    c->head_n = c->raw_head_n = 0;
    c->url = (struct td_http_span){0};
    c->query = NULL;
    memset(c->field, 0,
           c->n_fields < TD_HTTP_FIELDS_MAX ? (c->n_fields + 1) * sizeof c->field[0]
                                            : sizeof c->field);
    memset(c->value, 0,
           c->n_fields < TD_HTTP_FIELDS_MAX ? (c->n_fields + 1) * sizeof c->value[0]
                                            : sizeof c->value);
    c->n_fields = 0;
    td_http_body_drop(c);
    c->begun = c->head_done = c->complete = false;
    c->refuse_status = 0;
    c->extra_n = 0;
    c->head_only = c->chunked = c->begun_answer = false;
    c->owner = NULL;
}

void td_http_parse_feed(struct td_http_conn *c, const char *bytes, size_t n, size_t *ret_used) {
    llhttp_errno_t rc = llhttp_execute(&c->parser, bytes, n);
    *ret_used = n;
    if (rc == HPE_PAUSED && c->complete) {
        const char *pos = llhttp_get_error_pos(&c->parser);
        *ret_used = pos ? (size_t)(pos - bytes) : n;
        llhttp_resume(&c->parser);
        return;
    }
    if (rc != HPE_OK && c->refuse_status == 0) {
        const char *why = llhttp_get_error_reason(&c->parser);
        if (rc == HPE_INVALID_METHOD) {
            td_http_refuse(c, 501, "no method of HTTP that is known here");
            return;
        }
        if (rc == HPE_PAUSED_H2_UPGRADE) {
            td_http_refuse(c, 505, "HTTP/2 is not spoken here");
            return;
        }
        td_http_refuse(c, 400, "malformed HTTP request: %s",
                       why && *why ? why : llhttp_errno_name(rc));
        return;
    }
    if (rc == HPE_OK && !c->head_done) {
        /* White space around values is not kept, but it is not free either. */
        c->raw_head_n += n;
        if (c->raw_head_n > c->server->limits.head_bytes + TD_HTTP_READ_BYTES)
            td_http_refuse(c, 431, "the request line and headers are longer than %zu bytes",
                           c->server->limits.head_bytes);
    }
}

/* ---- reading the request ---- */

const char *td_http_method(const struct td_http_conn *c) {
    return llhttp_method_name((llhttp_method_t)c->parser.method);
}

const char *td_http_path(const struct td_http_conn *c) {
    /* The query is cut off in place when the handler takes over; see conn_handle. */
    return c->url.n ? c->head + c->url.at : "";
}

const char *td_http_query(const struct td_http_conn *c) {
    return c->query ? c->query : "";
}

const char *td_http_header(const struct td_http_conn *c, const char *name) {
    for (uint32_t i = 0; i < c->n_fields; i++)
        if (strcmp(c->head + c->field[i].at, name) == 0) return c->head + c->value[i].at;
    return NULL;
}

char *td_http_take_body(struct td_http_conn *c, size_t *ret_n) {
    char *p = c->body.p;
    *ret_n = c->body.n;
    c->server->bodies_n -= c->body.n;
    c->body = (struct td_http_bytes){0};
    return p;
}

void td_http_set_owner(struct td_http_conn *c, void *owner) {
    c->owner = owner;
}

void *td_http_owner(const struct td_http_conn *c) {
    return c->owner;
}

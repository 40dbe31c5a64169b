/* What the three halves of the HTTP server (connections, parsing, answering) share about one
 * connection; included by them alone. */
#ifndef TD_ROUTER_HTTP_CONN_H
#define TD_ROUTER_HTTP_CONN_H

#include <llhttp.h>
#include <time.h>
#include <uv.h>

#include "common/base/list.h"
#include "router/http_server.h"

enum {
    TD_HTTP_FIELDS_MAX = 100,
    TD_HTTP_EXTRA_MAX = 1024,
    TD_HTTP_READ_BYTES = 65536, /* one read; also what may wait pipelined before reads stop */
    TD_HTTP_KEEP_BYTES = 65536, /* buffers larger than this are freed between requests */
};

enum td_http_state {
    TD_HTTP_READING,  /* waiting for a request, or inside one */
    TD_HTTP_HANDLING, /* the handler owns it */
    TD_HTTP_LINGER,   /* last answer written; reads are thrown away until the client closes */
    TD_HTTP_CLOSING,  /* uv_close called */
};

struct td_http_bytes {
    char *p;
    size_t n, cap;
};

struct td_http_span { /* of `head` */
    uint32_t at, n;
};

struct td_http_conn {
    uv_tcp_t tcp;
    uv_write_t write_req;
    uv_shutdown_t shutdown_req;
    struct td_http_server *server;
    struct td_link link;
    struct td_link unsent; /* in the server's list while `out` waits for the turn's end */
    enum td_http_state state;
    void *owner;

    /* the request */
    llhttp_t parser;
    char *head; /* [limits.head_bytes + terminators] */
    size_t head_n, raw_head_n;
    const char *query; /* of the url, cut off it when the request is handed over */
    struct td_http_span url, field[TD_HTTP_FIELDS_MAX], value[TD_HTTP_FIELDS_MAX];
    uint32_t n_fields;
    struct td_http_bytes body;
    struct td_http_bytes pending; /* received behind the request being answered */
    bool begun, head_done, complete;
    bool in_process; /* parsing or handling on this stack: do not start again */
    bool reading;    /* uv_read_start is on */
    bool keep_alive, http10;
    int refuse_status; /* set inside parser callbacks */
    char refuse_text[200];
    uint64_t read_deadline; /* loop ms; 0: none */

    /* the answer */
    char extra[TD_HTTP_EXTRA_MAX];
    size_t extra_n;
    bool head_only, chunked, begun_answer, shut;
    struct td_http_bytes out, flight;
    bool writing;
    size_t last_queue; /* bytes in flight when write_deadline was set */
    uint64_t write_deadline;
};

struct td_http_server {
    uv_loop_t *loop;
    struct td_http_limits limits;
    struct td_http_handler handler;
    uv_tcp_t listener;
    uv_timer_t tick;
    uv_prepare_t turn; /* before the loop waits: what streams wrote in this turn goes out */
    uv_tcp_t spare;    /* takes and closes a connection there was no memory for */
    bool spare_used, spare_wanted;
    bool listener_open, tick_open, stopping;
    size_t bodies_n; /* bytes of bodies not yet taken */
    uint16_t port;
    uint32_t n_conns;
    struct td_link conns, unsent;
    uint64_t statuses[TD_HTTP_STATUSES];
    time_t date_s; /* which second `date` is of */
    char date[40];
    llhttp_settings_t settings;
    char read_buf[TD_HTTP_READ_BYTES];
};

/* http_parse.c */
void td_http_parse_settings(llhttp_settings_t *s);
/* Notes why the request is refused; the value is what a parser callback returns then. */
int td_http_refuse(struct td_http_conn *c, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void td_http_parse_reset(struct td_http_conn *c);
/* Drops the body, if the handler has not taken it. */
void td_http_body_drop(struct td_http_conn *c);
/* Feeds bytes until a request is complete or refused; *ret_used bytes were taken. On a refusal
 * refuse_status is set. */
void td_http_parse_feed(struct td_http_conn *c, const char *bytes, size_t n, size_t *ret_used);

/* http_server.c */
void td_http_conn_next(struct td_http_conn *c);
void td_http_conn_close(struct td_http_conn *c);
void td_http_conn_linger(struct td_http_conn *c);
/* While lingering: half-closes once everything is written. */
void td_http_conn_shut(struct td_http_conn *c);

/* http_response.c */
void td_http_send(struct td_http_conn *c, const char *bytes, size_t n);
void td_http_flush(struct td_http_conn *c);

/* Appends, growing up to `limit`; false when that would be exceeded or memory is short. */
bool td_http_bytes_add(struct td_http_bytes *b, const char *p, size_t n, size_t limit);
void td_http_bytes_free(struct td_http_bytes *b);

#endif

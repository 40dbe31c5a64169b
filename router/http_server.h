/* An HTTP/1.1 server over libuv and llhttp that knows nothing of models: it gives whole requests
 * to one handler and sends what the handler answers, at once or as a stream.
 *
 * A connection carries one request at a time; requests that a client pipelines behind it wait,
 * unparsed, within a bound. A `struct td_http_conn` therefore also names the request being
 * answered. Everything a client controls is bounded: bytes of the head and of the body, time to
 * send a request, bytes that wait for a client that does not read, connections.
 *
 * One thread: that of the loop. The process must ignore SIGPIPE. No call here calls the handler
 * back, except td_http_end and td_http_reply, which may go on to the next pipelined request of the
 * same connection. */
#ifndef TD_ROUTER_HTTP_SERVER_H
#define TD_ROUTER_HTTP_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "common/base/status.h"

struct td_http_server;
struct td_http_conn;

/* Connections beyond the limit that may be waiting for their 503; further ones are just closed. */
enum { TD_HTTP_TURNED_AWAY_MAX = 64, TD_HTTP_STATUSES = 600, TD_HTTP_CLIENT_LEFT = 499 };

struct td_http_limits {
    size_t head_bytes;    /* request line and headers */
    size_t body_bytes;    /* request body, after removal of the chunked coding */
    size_t bodies_bytes;  /* bodies of all connections that have not been taken; beyond: 503 */
    size_t queue_bytes;   /* of a stream, waiting for the client; beyond: the client is cut off */
    uint32_t connections; /* more are answered 503 and closed */
    uint32_t idle_ms;     /* between requests */
    uint32_t read_ms;     /* from a request's first byte to its last; beyond: 408 */
    uint32_t write_ms;    /* without progress of a waiting response; beyond: cut off */
    uint32_t linger_ms;   /* for the client to read the last answer before the close */
};

void td_http_limits_defaults(struct td_http_limits *l);

struct td_http_handler {
    void *user;
    /* A whole request. Must be answered, now or later, by td_http_reply or td_http_begin ..
     * td_http_end / td_http_abort. */
    void (*request)(void *user, struct td_http_conn *c);
    /* The client left before the answer ended; called once, from the loop, never from inside a
     * call into this server. `c` is invalid after it returns. */
    void (*gone)(void *user, struct td_http_conn *c);
    /* The server refuses a request by itself (malformed, too large, too late): answer it with
     * `status` by td_http_reply, now. The connection closes afterwards. */
    void (*refused)(void *user, struct td_http_conn *c, int status, const char *sentence);
};

TD_MUST_USE td_status td_http_server_create(uv_loop_t *loop, const struct td_http_limits *limits,
                                            const struct td_http_handler *handler,
                                            struct td_http_server **ret, struct td_error *err);
/* "127.0.0.1:8000", "[::1]:0"; port 0 takes a free one. TD_CONFIG: not an address; TD_IO. */
TD_MUST_USE td_status td_http_server_listen(struct td_http_server *s, const char *address,
                                            struct td_error *err);
/* The port bound. */
uint16_t td_http_server_port(const struct td_http_server *s);
uint32_t td_http_server_connections(const struct td_http_server *s);
/* [TD_HTTP_STATUSES] answers begun so far, by their status; 499: none, since the client left
 * before. */
const uint64_t *td_http_server_statuses(const struct td_http_server *s);
/* Stops listening and closes every connection; `gone` follows for answers not ended. */
void td_http_server_stop(struct td_http_server *s);
/* After stop and after the loop has run out of this server's handles. NULL is fine. */
void td_http_server_destroy(struct td_http_server *s);

/* ---- the request; valid until the answer ends or `gone` ---- */

const char *td_http_method(const struct td_http_conn *c); /* "GET", "HEAD", ... */
const char *td_http_path(const struct td_http_conn *c);   /* without the query, not decoded */
/* Behind the first '?', not decoded; "" when there is none. */
const char *td_http_query(const struct td_http_conn *c);
/* Value of the first header of that (lower-case) name, NULL if absent; terminated. */
const char *td_http_header(const struct td_http_conn *c, const char *name);
/* Does the connection come from this host? A proxy here makes that true for everybody behind it. */
bool td_http_peer_is_local(const struct td_http_conn *c);
/* The body, given away: the caller frees it. NULL and 0 when there is none. */
char *td_http_take_body(struct td_http_conn *c, size_t *ret_n);
/* The caller's mark on the request; NULL at first. */
void td_http_set_owner(struct td_http_conn *c, void *owner);
void *td_http_owner(const struct td_http_conn *c);

/* ---- the answer ---- */

/* Adds "name: value" to the headers of the answer, before it begins. Values with control
 * characters, and what exceeds 1,024 bytes in all, are left out. */
void td_http_add_header(struct td_http_conn *c, const char *name, const char *value);
/* A whole answer. To HEAD only the headers go out. */
void td_http_reply(struct td_http_conn *c, int status, const char *content_type, const char *body,
                   size_t n);
/* A streamed answer: head now, then writes, then the end. What is written goes out before the loop
 * waits again, in one piece. Writes after the client has gone are dropped. */
void td_http_begin(struct td_http_conn *c, int status, const char *content_type);
void td_http_write(struct td_http_conn *c, const char *bytes, size_t n);
void td_http_end(struct td_http_conn *c);
/* Ends a stream so that the client sees that it is not whole: no last chunk, connection closed
 * once what was written is out. */
void td_http_abort(struct td_http_conn *c);
/* Bytes written but not yet taken by the kernel. */
size_t td_http_queued(const struct td_http_conn *c);

#endif

/* Framed byte streams over Unix sockets or TCP: 4-byte little-endian length, then the payload.
 *
 * Everything here belongs to one loop's thread. Memory of a stream, listener or dialer dies only
 * after libuv's close callback, so the loop must keep running (td_loop_drain) until handles that
 * were closed are gone. Nothing is allocated per frame in the steady state: the two write buffers
 * and the read buffer of a stream grow to what was needed and stay.
 *
 * Addresses: "/path" (or "unix:/path") is a Unix socket, "host:port" with a numeric host is TCP
 * ("127.0.0.1:7000", "[::1]:7000"). */
#ifndef TD_COMMON_IO_STREAM_H
#define TD_COMMON_IO_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "common/base/status.h"

struct td_stream_limits {
    uint32_t frame_max; /* payload bytes of one frame, both directions */
    size_t queue_max;   /* bytes waiting for a peer that does not read; more closes the stream */
};

struct td_stream_events {
    /* One whole frame; `bytes` are borrowed until the callback returns. Closing the stream in here
     * is fine. */
    void (*on_frame)(void *user, const uint8_t *bytes, size_t len);
    /* The stream ended by itself: peer gone, broken frame, too much queued. Comes exactly once,
     * from the loop, never from inside another call of this file, and not at all after the owner
     * called td_stream_close. The stream is freed when it returns. */
    void (*on_down)(void *user, td_status why, const char *text);
};

struct td_stream;

/* Must be called once for a stream that on_accept or on_connect handed over; `events` is kept by
 * pointer and must outlive the stream. */
void td_stream_start(struct td_stream *s, const struct td_stream_events *events, void *user);

/* A place for a frame of up to `cap` bytes inside the write buffer; fill it, then call
 * td_stream_end with the bytes used (<= cap). No other call on this stream may come between. The
 * frame is written as soon as the socket takes it. TD_TOO_LONG: over frame_max. TD_BUSY: over
 * queue_max, and the stream goes down. TD_PEER_LOST: it is already going down. */
TD_MUST_USE td_status td_stream_begin(struct td_stream *s, size_t cap, uint8_t **ret_place);
void td_stream_end(struct td_stream *s, size_t used);
/* The same for bytes that already exist. */
TD_MUST_USE td_status td_stream_send(struct td_stream *s, const uint8_t *bytes, size_t len);

/* How long the frames may be that are received from now on, up to the frame_max it was made with: who
 * has not yet proven anything gets little room. */
void td_stream_limit(struct td_stream *s, uint32_t frame_max);

/* Bytes accepted by td_stream_end and not yet by the kernel. */
size_t td_stream_queued(const struct td_stream *s);

/* Drops what is queued and ends; no callback comes any more. NULL is fine. */
void td_stream_close(struct td_stream *s);
/* Same, after what is queued was written, or `timeout_ms` passed. */
void td_stream_close_flushed(struct td_stream *s, uint64_t timeout_ms);

/* ---- listening ---- */

struct td_listener;
/* The callee owns `s`: td_stream_start or td_stream_close. */
typedef void td_accept_fn(void *user, struct td_stream *s);

/* A stale Unix socket file is removed; one that answers is an error (another process serves
 * there). The socket file gets mode 0600, and peers of other users than ours or root are dropped
 * at once. At most `max_streams` accepted streams exist at a time; more are dropped. */
TD_MUST_USE td_status td_listener_create(uv_loop_t *loop, const char *address,
                                         const struct td_stream_limits *limits,
                                         uint32_t max_streams, td_accept_fn *on_accept, void *user,
                                         struct td_listener **ret, struct td_error *err);
/* Stops listening and removes the socket file; accepted streams live on. NULL is fine. */
void td_listener_close(struct td_listener *l);
/* Whether an address is TCP: everything but a Unix socket, whose peer the system vouches for.
 * CONFIG: it is no address. */
TD_MUST_USE td_status td_address_is_tcp(const char *address, bool *ret_tcp, struct td_error *err);
/* The TCP port really bound (address "host:0"), 0 for a Unix socket. */
uint16_t td_listener_port(const struct td_listener *l);

/* ---- dialing ---- */

struct td_dialer;
typedef void td_connect_fn(void *user, struct td_stream *s);

/* Dials now, and again after each failure with a delay that doubles from `backoff_min_ms` to
 * `backoff_max_ms`, until connected; the callee of on_connect owns the stream. To connect again
 * after that stream went down: td_dialer_redial (a connection that lasted keeps the delay at its
 * minimum; one that failed at once keeps doubling it). */
TD_MUST_USE td_status td_dialer_create(uv_loop_t *loop, const char *address,
                                       const struct td_stream_limits *limits,
                                       uint32_t backoff_min_ms, uint32_t backoff_max_ms,
                                       td_connect_fn *on_connect, void *user,
                                       struct td_dialer **ret, struct td_error *err);
/* `lasted`: the last connection was good; the delay starts again at its minimum. */
void td_dialer_redial(struct td_dialer *d, int lasted);
/* The sentence of the last failed attempt, "" when none failed since the last success. */
const char *td_dialer_last_error(const struct td_dialer *d);
/* Stops dialing; streams already handed over live on. NULL is fine. */
void td_dialer_close(struct td_dialer *d);

#endif

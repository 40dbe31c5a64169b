/* One framed connection. Writing uses two buffers: frames collect in one while the other is with
 * the kernel; when that is written they change places. So a burst of small frames becomes one
 * write, and nothing is allocated once both have grown. Reading parses frames in place. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/io/stream_internal.h"

enum {
    HEADER_BYTES = 4,
    BUFFER_FIRST_BYTES = 16 << 10,
    /* What two handles (socket and flush timer) need closed before the memory may go. */
    HANDLES = 2,
};

struct buffer {
    uint8_t *bytes;
    size_t cap, used;
};

struct td_stream {
    union td_stream_handle handle;
    uv_timer_t flush_timer;
    uv_write_t write_req;
    struct td_stream_limits limits;
    uint32_t rx_max; /* bytes of a received frame, at most limits.frame_max */
    struct buffer rx, out[2];
    int collecting; /* out[collecting] takes frames, the other one is being written */
    bool writing, flushing;
    bool reserved; /* between td_stream_begin and td_stream_end */
    bool closing;  /* uv_close was called */
    bool silent;   /* the owner closed: no on_down */
    int open_handles;
    const struct td_stream_events *events;
    void *user;
    td_stream_gone_fn *on_gone;
    void *gone_user;
    td_status why;
    char text[160];
};

static td_status buffer_grow(struct buffer *b, size_t need, size_t max) {
    if (need <= b->cap) return TD_OK;
    size_t cap = b->cap ? b->cap : BUFFER_FIRST_BYTES;
    while (cap < need)
        cap *= 2;
    if (cap > max) cap = max;
    if (cap < need) return TD_TOO_LONG;
    uint8_t *p = realloc(b->bytes, cap);
    if (!p) return TD_NO_MEMORY;
    b->bytes = p;
    b->cap = cap;
    return TD_OK;
}

td_status td_stream_create(uv_loop_t *loop, bool is_unix, const struct td_stream_limits *limits,
                           struct td_stream **ret) {
    struct td_stream *s = calloc(1, sizeof *s);
    if (!s) return TD_NO_MEMORY;
    s->limits = *limits;
    s->rx_max = limits->frame_max;
    int rc = is_unix ? uv_pipe_init(loop, &s->handle.pipe, 0) : uv_tcp_init(loop, &s->handle.tcp);
    if (rc != 0) {
        free(s);
        return TD_IO;
    }
    uv_timer_init(loop, &s->flush_timer);
    s->handle.any.data = s;
    s->flush_timer.data = s;
    s->write_req.data = s;
    s->open_handles = HANDLES;
    *ret = s;
    return TD_OK;
}

union td_stream_handle *td_stream_handle(struct td_stream *s) {
    return &s->handle;
}

void td_stream_set_gone(struct td_stream *s, td_stream_gone_fn *fn, void *user) {
    s->on_gone = fn;
    s->gone_user = user;
}

bool td_stream_peer_allowed(struct td_stream *s) {
    if (s->handle.any.type != UV_NAMED_PIPE) return true;
    uv_os_fd_t fd;
    struct ucred cred;
    socklen_t len = sizeof cred;
    if (uv_fileno(&s->handle.any, &fd) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0)
        return false;
    return cred.uid == geteuid() || cred.uid == 0;
}

/* ---- ending ---- */

static void on_handle_closed(uv_handle_t *h) {
    struct td_stream *s = h->data;
    if (--s->open_handles > 0) return;
    if (s->on_gone) s->on_gone(s->gone_user);
    if (!s->silent && s->events && s->events->on_down) s->events->on_down(s->user, s->why, s->text);
    free(s->rx.bytes);
    free(s->out[0].bytes);
    free(s->out[1].bytes);
    free(s);
}

static void close_now(struct td_stream *s) {
    if (s->closing) return;
    s->closing = true;
    uv_close(&s->handle.any, on_handle_closed);
    uv_close((uv_handle_t *)&s->flush_timer, on_handle_closed);
}

/* The stream failed by itself; on_down follows from the close callback. */
static void go_down(struct td_stream *s, td_status why, const char *text) {
    if (s->closing) return;
    s->why = why;
    snprintf(s->text, sizeof s->text, "%s", text);
    close_now(s);
}

void td_stream_close(struct td_stream *s) {
    if (!s) return;
    s->silent = true;
    close_now(s);
}

static void on_flush_timeout(uv_timer_t *t) {
    close_now(t->data);
}

void td_stream_close_flushed(struct td_stream *s, uint64_t timeout_ms) {
    if (!s) return;
    s->silent = true;
    if (s->closing) return;
    if (td_stream_queued(s) == 0) {
        close_now(s);
        return;
    }
    s->flushing = true;
    uv_read_stop(&s->handle.stream);
    uv_timer_start(&s->flush_timer, on_flush_timeout, timeout_ms, 0);
}

/* ---- writing ---- */

static void write_collected(struct td_stream *s);

static void on_written(uv_write_t *req, int rc) {
    struct td_stream *s = req->data;
    s->writing = false;
    s->out[!s->collecting].used = 0;
    if (s->closing) return;
    if (rc != 0) {
        if (s->silent) {
            close_now(s);
        } else {
            go_down(s, TD_PEER_LOST, uv_strerror(rc));
        }
    } else if (s->out[s->collecting].used) {
        write_collected(s);
    } else if (s->flushing) {
        close_now(s);
    }
}

static void write_collected(struct td_stream *s) {
    struct buffer *b = &s->out[s->collecting];
    uv_buf_t buf = uv_buf_init((char *)b->bytes, (unsigned)b->used);
    s->collecting = !s->collecting;
    s->writing = true;
    int rc = uv_write(&s->write_req, &s->handle.stream, &buf, 1, on_written);
    if (rc != 0) {
        s->writing = false;
        b->used = 0;
        go_down(s, TD_PEER_LOST, uv_strerror(rc));
    }
}

void td_stream_limit(struct td_stream *s, uint32_t frame_max) {
    s->rx_max = frame_max < s->limits.frame_max ? frame_max : s->limits.frame_max;
}

size_t td_stream_queued(const struct td_stream *s) {
    return s->out[s->collecting].used +
           (s->writing ? uv_stream_get_write_queue_size(&s->handle.stream) : 0);
}

td_status td_stream_begin(struct td_stream *s, size_t cap, uint8_t **ret_place) {
    assert(!s->reserved);
    if (s->closing || s->flushing) return TD_PEER_LOST;
    if (cap > s->limits.frame_max) return TD_TOO_LONG;
    struct buffer *b = &s->out[s->collecting];
    if (td_stream_queued(s) + HEADER_BYTES + cap > s->limits.queue_max) {
        go_down(s, TD_PEER_LOST, "the peer does not read: the write queue is full");
        return TD_BUSY;
    }
    td_status st = buffer_grow(b, b->used + HEADER_BYTES + cap, s->limits.queue_max);
    if (st != TD_OK) {
        go_down(s, st, "no memory for the write queue");
        return st;
    }
    s->reserved = true;
    *ret_place = b->bytes + b->used + HEADER_BYTES;
    return TD_OK;
}

void td_stream_end(struct td_stream *s, size_t used) {
    struct buffer *b = &s->out[s->collecting];
    assert(s->reserved && b->used + HEADER_BYTES + used <= b->cap);
    s->reserved = false;
    uint8_t *h = b->bytes + b->used;
    h[0] = (uint8_t)used;
    h[1] = (uint8_t)(used >> 8);
    h[2] = (uint8_t)(used >> 16);
    h[3] = (uint8_t)(used >> 24);
    b->used += HEADER_BYTES + used;
    if (!s->writing) write_collected(s);
}

td_status td_stream_send(struct td_stream *s, const uint8_t *bytes, size_t len) {
    uint8_t *place;
    TD_TRY(td_stream_begin(s, len, &place));
    memcpy(place, bytes, len);
    td_stream_end(s, len);
    return TD_OK;
}

/* ---- reading ---- */

static uint32_t frame_len(const uint8_t *h) {
    return (uint32_t)h[0] | (uint32_t)h[1] << 8 | (uint32_t)h[2] << 16 | (uint32_t)h[3] << 24;
}

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf) {
    (void)suggested;
    struct td_stream *s = h->data;
    *buf = uv_buf_init((char *)s->rx.bytes + s->rx.used, (unsigned)(s->rx.cap - s->rx.used));
}

/* Hands out whole frames; keeps the rest at the front, with room for the frame it begins. */
static void parse(struct td_stream *s) {
    size_t at = 0, need = 0;
    while (!s->closing && !s->flushing && s->rx.used - at >= HEADER_BYTES) {
        size_t len = frame_len(s->rx.bytes + at);
        if (len > s->rx_max) {
            char text[sizeof s->text];
            snprintf(text, sizeof text, "a frame of %zu bytes, the limit is %u", len, s->rx_max);
            go_down(s, TD_PROTOCOL, text);
            return;
        }
        if (s->rx.used - at < HEADER_BYTES + len) {
            need = HEADER_BYTES + len;
            break;
        }
        s->events->on_frame(s->user, s->rx.bytes + at + HEADER_BYTES, len);
        at += HEADER_BYTES + len;
    }
    if (s->closing || s->flushing) return;
    if (at) {
        s->rx.used -= at;
        memmove(s->rx.bytes, s->rx.bytes + at, s->rx.used);
    }
    td_status st = buffer_grow(&s->rx, need, (size_t)s->limits.frame_max + HEADER_BYTES);
    if (st != TD_OK) go_down(s, st, "no memory for a frame");
}

static void on_read(uv_stream_t *h, ssize_t n, const uv_buf_t *buf) {
    (void)buf;
    struct td_stream *s = h->data;
    if (s->closing || s->flushing || n == 0) return;
    if (n < 0) {
        go_down(s, TD_PEER_LOST,
                n == UV_EOF ? "the peer closed the connection" : uv_strerror((int)n));
        return;
    }
    s->rx.used += (size_t)n;
    parse(s);
}

void td_stream_start(struct td_stream *s, const struct td_stream_events *events, void *user) {
    assert(!s->events && !s->closing);
    s->events = events;
    s->user = user;
    /* A frame_max below the first buffer's size must not shrink the room for a header. */
    size_t max = (size_t)s->limits.frame_max + HEADER_BYTES;
    td_status st = buffer_grow(&s->rx, max < BUFFER_FIRST_BYTES ? max : BUFFER_FIRST_BYTES, max);
    if (st != TD_OK) {
        go_down(s, st, "no memory for reading");
        return;
    }
    int rc = uv_read_start(&s->handle.stream, on_alloc, on_read);
    if (rc != 0) go_down(s, TD_IO, uv_strerror(rc));
}

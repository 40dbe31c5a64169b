/* The connecting side: tries an address until it answers, with a delay that doubles. */
#include <stdio.h>
#include <stdlib.h>

#include "common/io/stream_internal.h"

struct td_dialer {
    uv_timer_t timer;
    uv_connect_t req;
    uv_loop_t *loop;
    struct td_address address;
    struct td_stream_limits limits;
    uint32_t min_ms, max_ms, delay_ms;
    struct td_stream *trying; /* not yet connected */
    bool closing, timer_closed;
    td_connect_fn *on_connect;
    void *user;
    char last_error[160];
};

static void dial(struct td_dialer *d);

static void on_timer(uv_timer_t *t) {
    dial(t->data);
}

static void retry_later(struct td_dialer *d) {
    uv_timer_start(&d->timer, on_timer, d->delay_ms, 0);
    d->delay_ms = d->delay_ms > d->max_ms / 2 ? d->max_ms : d->delay_ms * 2;
}

static void attempt_failed(struct td_dialer *d, const char *why) {
    snprintf(d->last_error, sizeof d->last_error, "%s", why);
    td_stream_close(d->trying);
    d->trying = NULL;
    retry_later(d);
}

static void free_when_unused(struct td_dialer *d) {
    if (d->timer_closed && !d->trying) free(d);
}

static void on_connected(uv_connect_t *req, int rc) {
    struct td_dialer *d = req->data;
    if (d->closing) { /* td_dialer_close closed the stream; this is its ECANCELED */
        d->trying = NULL;
        free_when_unused(d);
        return;
    }
    if (rc != 0) {
        attempt_failed(d, uv_strerror(rc));
    } else if (!td_stream_peer_allowed(d->trying)) {
        attempt_failed(d, "the process that listens there runs as another user");
    } else {
        struct td_stream *s = d->trying;
        d->trying = NULL;
        d->last_error[0] = 0;
        if (!d->address.is_unix) uv_tcp_nodelay(&td_stream_handle(s)->tcp, 1);
        d->on_connect(d->user, s);
    }
}

static void dial(struct td_dialer *d) {
    if (td_stream_create(d->loop, d->address.is_unix, &d->limits, &d->trying) != TD_OK) {
        d->trying = NULL;
        attempt_failed(d, "no memory for a connection");
        return;
    }
    union td_stream_handle *h = td_stream_handle(d->trying);
    if (d->address.is_unix) { /* errors arrive in the callback */
        uv_pipe_connect(&d->req, &h->pipe, d->address.path, on_connected);
        return;
    }
    int rc = uv_tcp_connect(&d->req, &h->tcp, (struct sockaddr *)&d->address.tcp, on_connected);
    if (rc != 0) attempt_failed(d, uv_strerror(rc));
}

td_status td_dialer_create(uv_loop_t *loop, const char *address,
                           const struct td_stream_limits *limits, uint32_t backoff_min_ms,
                           uint32_t backoff_max_ms, td_connect_fn *on_connect, void *user,
                           struct td_dialer **ret, struct td_error *err) {
    struct td_address a;
    TD_TRY(td_address_parse(address, &a, err));
    struct td_dialer *d = calloc(1, sizeof *d);
    if (!d) return td_fail(err, TD_NO_MEMORY, "no memory for a dialer");
    d->loop = loop;
    d->address = a;
    d->limits = *limits;
    d->min_ms = d->delay_ms = backoff_min_ms ? backoff_min_ms : 1;
    d->max_ms = backoff_max_ms > d->min_ms ? backoff_max_ms : d->min_ms;
    d->on_connect = on_connect;
    d->user = user;
    d->req.data = d;
    uv_timer_init(loop, &d->timer);
    d->timer.data = d;
    dial(d);
    *ret = d;
    return TD_OK;
}

void td_dialer_redial(struct td_dialer *d, int lasted) {
    if (d->closing || d->trying) return;
    if (lasted) d->delay_ms = d->min_ms;
    retry_later(d);
}

const char *td_dialer_last_error(const struct td_dialer *d) {
    return d->last_error;
}

static void on_timer_closed(uv_handle_t *h) {
    struct td_dialer *d = h->data;
    d->timer_closed = true;
    free_when_unused(d);
}

void td_dialer_close(struct td_dialer *d) {
    if (!d || d->closing) return;
    d->closing = true;
    uv_close((uv_handle_t *)&d->timer, on_timer_closed);
    td_stream_close(d->trying); /* its connect request ends with ECANCELED */
}

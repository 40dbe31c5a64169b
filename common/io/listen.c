/* The accepting side: binds an address, refuses to steal a living one, lets in peers of our user
 * up to a bound. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/io/stream_internal.h"

enum { BACKLOG = 128 };

struct td_listener {
    union td_stream_handle handle;
    uv_loop_t *loop;
    struct td_address address;
    struct td_stream_limits limits;
    uint32_t max_streams, streams;
    bool closed;
    union td_stream_handle spare; /* takes in what there is no stream for */
    bool spare_open, spare_wanted;
    td_accept_fn *on_accept;
    void *user;
};

/* The listener's memory is needed by its own handle and by the streams that count themselves. */
static void free_when_unused(struct td_listener *l) {
    if (l->closed && l->streams == 0 && !l->spare_open) free(l);
}

static void on_stream_gone(void *user) {
    struct td_listener *l = user;
    l->streams--;
    free_when_unused(l);
}

static void turn_away(struct td_listener *l);

static void on_spare_closed(uv_handle_t *h) {
    struct td_listener *l = h->data;
    l->spare_open = false;
    if (l->spare_wanted && !uv_is_closing(&l->handle.any)) turn_away(l);
    free_when_unused(l);
}

/* libuv does not listen on while a connection waits to be accepted, so one that nobody accepts
 * would be the last. */
static void turn_away(struct td_listener *l) {
    union td_stream_handle *h = &l->spare;
    l->spare_wanted = l->spare_open;
    if (l->spare_open) return; /* on_spare_closed comes back */
    /* Fails for reasons of a loop that is not ours: of memory or descriptors it needs none. */
    int rc =
        l->address.is_unix ? uv_pipe_init(l->loop, &h->pipe, 0) : uv_tcp_init(l->loop, &h->tcp);
    if (rc != 0) return;
    l->spare_open = true;
    h->any.data = l;
    (void)uv_accept(&l->handle.stream, &h->stream);
    uv_close(&h->any, on_spare_closed);
}

static void on_connection(uv_stream_t *server, int rc) {
    struct td_listener *l = server->data;
    /* Out of descriptors: libuv has turned away who was waiting, with one it keeps for that. */
    if (rc != 0) return;
    struct td_stream *s;
    if (td_stream_create(l->loop, l->address.is_unix, &l->limits, &s) != TD_OK) {
        turn_away(l);
        return;
    }
    l->streams++;
    td_stream_set_gone(s, on_stream_gone, l);
    if (uv_accept(server, &td_stream_handle(s)->stream) != 0 || l->streams > l->max_streams ||
        !td_stream_peer_allowed(s)) {
        td_stream_close(s);
        return;
    }
    if (!l->address.is_unix) uv_tcp_nodelay(&td_stream_handle(s)->tcp, 1);
    l->on_accept(l->user, s);
}

/* A socket file left by a dead process refuses connections; a living one takes them. */
static td_status remove_stale(const char *path, struct td_error *err) {
    struct stat st;
    if (lstat(path, &st) != 0) return TD_OK;
    if (!S_ISSOCK(st.st_mode))
        return td_fail(err, TD_CONFIG, "%s exists and is not a socket", path);
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return td_fail(err, TD_IO, "a socket: %s", strerror(errno));
    int rc = connect(fd, (struct sockaddr *)&sa, sizeof sa);
    int why = errno;
    close(fd);
    if (rc == 0 || why == EAGAIN) /* EAGAIN: alive with a full backlog */
        return td_fail(err, TD_BUSY, "%s: another process answers there", path);
    if (why != ECONNREFUSED) return td_fail(err, TD_IO, "%s: %s", path, strerror(why));
    if (unlink(path) != 0) return td_fail(err, TD_IO, "%s: %s", path, strerror(errno));
    return TD_OK;
}

static td_status bind_and_listen(struct td_listener *l, const char *address, struct td_error *err) {
    int rc;
    if (l->address.is_unix) {
        TD_TRY(remove_stale(l->address.path, err));
        rc = uv_pipe_bind(&l->handle.pipe, l->address.path);
        if (rc == 0 && chmod(l->address.path, S_IRUSR | S_IWUSR) != 0) rc = -errno;
    } else {
        rc = uv_tcp_bind(&l->handle.tcp, (struct sockaddr *)&l->address.tcp, 0);
    }
    if (rc == 0) rc = uv_listen(&l->handle.stream, BACKLOG, on_connection);
    if (rc != 0) return td_fail(err, TD_IO, "listening on %s: %s", address, uv_strerror(rc));
    return TD_OK;
}

static void on_listener_closed(uv_handle_t *h) {
    struct td_listener *l = h->data;
    l->closed = true;
    free_when_unused(l);
}

td_status td_listener_create(uv_loop_t *loop, const char *address,
                             const struct td_stream_limits *limits, uint32_t max_streams,
                             td_accept_fn *on_accept, void *user, struct td_listener **ret,
                             struct td_error *err) {
    struct td_address a;
    TD_TRY(td_address_parse(address, &a, err));
    struct td_listener *l = calloc(1, sizeof *l);
    if (!l) return td_fail(err, TD_NO_MEMORY, "no memory for a listener");
    l->loop = loop;
    l->address = a;
    l->limits = *limits;
    l->max_streams = max_streams;
    l->on_accept = on_accept;
    l->user = user;
    int rc = a.is_unix ? uv_pipe_init(loop, &l->handle.pipe, 0) : uv_tcp_init(loop, &l->handle.tcp);
    if (rc != 0) {
        free(l);
        return td_fail(err, TD_IO, "listening on %s: %s", address, uv_strerror(rc));
    }
    l->handle.any.data = l;
    td_status st = bind_and_listen(l, address, err);
    if (st != TD_OK) {
        uv_close(&l->handle.any, on_listener_closed);
        return st;
    }
    *ret = l;
    return TD_OK;
}

void td_listener_close(struct td_listener *l) {
    if (!l || uv_is_closing(&l->handle.any)) return;
    uv_close(&l->handle.any, on_listener_closed); /* libuv unlinks the path of a bound pipe */
}

uint16_t td_listener_port(const struct td_listener *l) {
    if (l->address.is_unix) return 0;
    struct sockaddr_storage sa;
    int len = sizeof sa;
    if (uv_tcp_getsockname(&l->handle.tcp, (struct sockaddr *)&sa, &len) != 0) return 0;
    return ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                          : ((struct sockaddr_in *)&sa)->sin_port);
}

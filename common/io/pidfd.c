/* A pidfd becomes readable when its process has exited; libuv polls it like any descriptor. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/io/pidfd.h"

struct td_pidfd {
    uv_poll_t handle;
    int fd;
    pid_t pid;
    td_exit_fn *fn;
    void *user;
};

static void on_exit_seen(uv_poll_t *h, int rc, int events) {
    (void)rc; /* an error of the poll ends it too, but proves nothing */
    struct td_pidfd *p = h->data;
    uv_poll_stop(h);
    if (events & UV_READABLE) p->fn(p->user, p->pid);
}

static void on_closed(uv_handle_t *h) {
    struct td_pidfd *p = h->data;
    close(p->fd);
    free(p);
}

td_status td_pidfd_watch(uv_loop_t *loop, pid_t pid, td_exit_fn *fn, void *user,
                         struct td_pidfd **ret, struct td_error *err) {
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return td_fail(err, errno == ESRCH ? TD_NOT_FOUND : TD_IO, "watching process %d: %s",
                       (int)pid, strerror(errno));
    struct td_pidfd *p = calloc(1, sizeof *p);
    if (!p) {
        close(fd);
        return td_fail(err, TD_NO_MEMORY, "no memory to watch process %d", (int)pid);
    }
    p->fd = fd;
    p->pid = pid;
    p->fn = fn;
    p->user = user;
    int rc = uv_poll_init(loop, &p->handle, fd);
    if (rc != 0) {
        close(fd);
        free(p);
        return td_fail(err, TD_IO, "watching process %d: %s", (int)pid, uv_strerror(rc));
    }
    p->handle.data = p;
    uv_poll_start(&p->handle, UV_READABLE, on_exit_seen);
    *ret = p;
    return TD_OK;
}

void td_pidfd_destroy(struct td_pidfd *p) {
    if (p) uv_close((uv_handle_t *)&p->handle, on_closed);
}

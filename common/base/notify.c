/* The service manager's datagrams, spoken directly: the protocol is two screens of manual page, and
 * a library for it would bring its own event loop and bus client into every role. */
#include "common/base/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { NS_PER_US = 1000, SIGNS_PER_TIMEOUT = 3 };

/* ---- the watchdog's rule ---- */

void td_watchdog_init(struct td_watchdog *w, uint64_t timeout_ns) {
    *w = (struct td_watchdog){.period_ns = timeout_ns / SIGNS_PER_TIMEOUT};
}

bool td_watchdog_due(struct td_watchdog *w, uint64_t now_ns, bool busy, uint64_t steps) {
    if (w->period_ns == 0) return false;
    if (w->fed_ns != 0) {
        if (now_ns - w->fed_ns < w->period_ns) return false;
        if (busy && steps == w->steps) return false;
    }
    w->fed_ns = now_ns;
    w->steps = steps;
    return true;
}

/* ---- the socket ---- */

static void send_text(const struct td_notify *n, const char *text) {
    /* Never waits: a full socket means that the manager is behind, not that we should be. */
    if (n->fd >= 0) (void)!send(n->fd, text, strlen(text), MSG_DONTWAIT | MSG_NOSIGNAL);
}

static td_status connect_to(const char *path, int *ret, struct td_error *err) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if ((path[0] != '/' && path[0] != '@') || n < 2 || n >= sizeof sa.sun_path)
        return td_fail(err, TD_CONFIG,
                       "NOTIFY_SOCKET: expected a path or an abstract name (@) of 2 to %zu bytes, "
                       "found '%.100s'",
                       sizeof sa.sun_path - 1, path);
    memcpy(sa.sun_path, path, n);
    if (path[0] == '@') sa.sun_path[0] = '\0';
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&sa, len) != 0) {
        int why = errno;
        if (fd >= 0) close(fd);
        return td_fail(err, TD_IO, "NOTIFY_SOCKET %s: %s", path, strerror(why));
    }
    *ret = fd;
    return TD_OK;
}

/* 0 when nobody watches, or when the variable is meant for another process. */
static td_status read_timeout(const char *usec, const char *pid, uint64_t *ret_ns,
                              struct td_error *err) {
    char *end;
    *ret_ns = 0;
    if (!usec) return TD_OK;
    if (pid && strtol(pid, NULL, 10) != (long)getpid()) return TD_OK;
    errno = 0;
    unsigned long long v = strtoull(usec, &end, 10);
    if (usec[0] < '0' || usec[0] > '9' || *end || errno || v == 0 || v > UINT64_MAX / NS_PER_US)
        return td_fail(err, TD_CONFIG, "WATCHDOG_USEC: expected microseconds, found '%.100s'",
                       usec);
    *ret_ns = v * NS_PER_US;
    return TD_OK;
}

td_status td_notify_open(struct td_notify *n, struct td_error *err) {
    const char *path = getenv("NOTIFY_SOCKET");
    uint64_t timeout_ns = 0;
    td_status st = TD_OK;
    *n = (struct td_notify){.fd = -1};
    if (path) {
        st = read_timeout(getenv("WATCHDOG_USEC"), getenv("WATCHDOG_PID"), &timeout_ns, err);
        if (st == TD_OK) st = connect_to(path, &n->fd, err);
        if (st == TD_OK) td_watchdog_init(&n->watchdog, timeout_ns);
    }
    return st;
}

void td_notify_close(struct td_notify *n) {
    if (n->fd >= 0) close(n->fd);
    n->fd = -1;
}

/* ---- what is said ---- */

void td_notify_ready(struct td_notify *n) {
    send_text(n, "READY=1");
}

void td_notify_stopping(struct td_notify *n) {
    send_text(n, "STOPPING=1");
}

void td_notify_status(struct td_notify *n, const char *fmt, ...) {
    char text[sizeof "STATUS=" + TD_NOTIFY_STATUS_MAX] = "STATUS=", *line = text + strlen(text);
    va_list ap;
    if (n->fd < 0) return;
    va_start(ap, fmt);
    vsnprintf(line, TD_NOTIFY_STATUS_MAX, fmt, ap);
    va_end(ap);
    line[strcspn(line, "\n")] = '\0'; /* a second line would be another message */
    if (strcmp(line, n->status) == 0) return;
    snprintf(n->status, sizeof n->status, "%s", line);
    send_text(n, text);
}

void td_notify_alive(struct td_notify *n, uint64_t now_ns, bool busy, uint64_t steps) {
    if (n->fd >= 0 && td_watchdog_due(&n->watchdog, now_ns, busy, steps))
        send_text(n, "WATCHDOG=1");
}

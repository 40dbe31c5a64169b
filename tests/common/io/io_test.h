/* What the tests of common/io and of control links share: running a loop until something holds,
 * raw sockets that misbehave on purpose, a folder for socket files. */
#ifndef TD_TESTS_COMMON_IO_IO_TEST_H
#define TD_TESTS_COMMON_IO_IO_TEST_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <uv.h>

#include "common/base/clock.h"
#include "common/io/loop.h"

enum { TEST_LIMIT_MS = 60000 }; /* only a hang takes so long */

static char test_dir[64];

static pid_t test_dir_owner; /* not a child that ends first */

static inline void test_dir_leave(void) {
    if (getpid() == test_dir_owner) rmdir(test_dir); /* unless a failure left something in it */
}

static inline void test_dir_make(void) {
    snprintf(test_dir, sizeof test_dir, "/tmp/td-test-XXXXXX");
    if (!mkdtemp(test_dir)) abort();
    test_dir_owner = getpid();
    atexit(test_dir_leave);
}

static inline const char *test_path(const char *name) {
    static char path[108];
    snprintf(path, sizeof path, "%.60s/%.40s", test_dir, name);
    return path;
}

static inline void test_tick(uv_timer_t *t) {
    (void)t;
}

/* True as soon as `holds(arg)`; false when it did not within `ms`. */
static inline bool test_until_ms(uv_loop_t *loop, bool (*holds)(void *), void *arg, uint64_t ms) {
    uv_timer_t tick;
    uint64_t end = td_now_ns() + ms * 1000000u;
    bool ok;
    uv_timer_init(loop, &tick);
    uv_timer_start(&tick, test_tick, 1, 1);
    while (!(ok = holds(arg)) && td_now_ns() < end)
        uv_run(loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&tick, NULL);
    uv_run(loop, UV_RUN_NOWAIT);
    return ok || holds(arg);
}

static inline bool test_never(void *arg) {
    (void)arg;
    return false;
}

static inline void test_run_ms(uv_loop_t *loop, uint64_t ms) {
    test_until_ms(loop, test_never, NULL, ms);
}

static inline int test_raw_connect(const char *path) {
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&sa, sizeof sa) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static inline bool test_raw_write(int fd, const void *bytes, size_t n) {
    return write(fd, bytes, n) == (ssize_t)n;
}

#endif

/* A listener that could not take a connection takes the next one: out of memory, out of
 * descriptors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/io/stream.h"
#include "tests/common/io/io_test.h"

enum { FEW = 24, MANY = 60 };

static uv_loop_t loop;
static const struct td_stream_limits limits = {.frame_max = 64, .queue_max = 4096};
static bool no_memory;

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size) {
    return no_memory ? NULL : __real_calloc(n, size);
}

/* ---- the server: sends back every frame ---- */

static void on_frame(void *user, const uint8_t *bytes, size_t len) {
    struct td_stream **s = user;
    assert_int_equal(td_stream_send(*s, bytes, len), TD_OK);
}
static void on_down(void *user, td_status why, const char *text) {
    (void)why, (void)text;
    free(user);
}
static const struct td_stream_events events = {.on_frame = on_frame, .on_down = on_down};

static void take(void *user, struct td_stream *s) {
    (void)user;
    struct td_stream **p = malloc(sizeof *p);
    *p = s;
    td_stream_start(s, &events, p);
}

static struct td_listener *listen_at(const char *address) {
    struct td_listener *l;
    struct td_error err;
    if (td_listener_create(&loop, address, &limits, 1000, take, NULL, &l, &err) != TD_OK)
        fail_msg("%s", err.text);
    return l;
}

/* ---- the client: a plain blocking socket ---- */

static int call(const char *path) {
    const struct timeval limit = {.tv_sec = 5};
    int fd = test_raw_connect(path);
    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}

static const uint8_t frame[] = {2, 0, 0, 0, 'h', 'i'};

/* False: told that it is not served. Silence fails. */
static bool answered(int fd) {
    uint8_t back[sizeof frame];
    if (send(fd, frame, sizeof frame, MSG_NOSIGNAL) != (ssize_t)sizeof frame) return false;
    ssize_t n = recv(fd, back, sizeof back, MSG_WAITALL);
    if (n < 0 && errno == EAGAIN) fail_msg("no answer, and no end either");
    return n == (ssize_t)sizeof back && memcmp(back, frame, sizeof back) == 0;
}

/* ---- */

static int client_fd;
static bool is_answered(void *arg) {
    (void)arg;
    uint8_t back[sizeof frame];
    return recv(client_fd, back, sizeof back, MSG_DONTWAIT) == (ssize_t)sizeof back;
}
static bool is_over(void *arg) {
    (void)arg;
    uint8_t byte;
    return recv(client_fd, &byte, 1, MSG_DONTWAIT) == 0;
}

static void test_no_memory_for_a_stream(void **state) {
    (void)state;
    const char *path = test_path("listen");
    assert_int_equal(uv_loop_init(&loop), 0);
    struct td_listener *l = listen_at(path);
    int turned_away[3];
    for (int i = 0; i < 3; i++)
        turned_away[i] = call(path);
    no_memory = true;
    for (int i = 0; i < 3; i++) {
        client_fd = turned_away[i];
        assert_true(
            test_until_ms(&loop, is_over, NULL, TEST_LIMIT_MS)); /* told, not left waiting */
        close(client_fd);
    }
    no_memory = false;
    client_fd = call(path);
    assert_int_equal(send(client_fd, frame, sizeof frame, 0), sizeof frame);
    assert_true(test_until_ms(&loop, is_answered, NULL, TEST_LIMIT_MS));
    close(client_fd);
    td_listener_close(l);
    assert_int_equal(td_loop_drain(&loop, TEST_LIMIT_MS), TD_OK);
}

static void serve_with_few_descriptors(const char *path, int ready) {
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* no orphan of a test that fails */
    const struct rlimit few = {.rlim_cur = FEW, .rlim_max = FEW};
    if (setrlimit(RLIMIT_NOFILE, &few) != 0 || uv_loop_init(&loop) != 0) _exit(1);
    (void)listen_at(path);
    if (write(ready, "", 1) != 1) _exit(1);
    close(ready);
    uv_run(&loop, UV_RUN_DEFAULT);
    _exit(1);
}

static void test_no_descriptors(void **state) {
    (void)state;
    no_memory = false;
    const char *path = test_path("listen");
    int ready[2], fd[MANY], served = 0;
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) serve_with_few_descriptors(path, ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < MANY; i++)
            fd[i] = call(path);
        served = 0;
        for (int i = 0; i < MANY; i++)
            served += answered(fd[i]); /* the others are told at once that they are not */
        assert_in_range(served, 5, FEW);
        for (int i = 0; i < MANY; i++)
            close(fd[i]);
    }
    bool again = false; /* as soon as it has seen the ends of the last ones */
    for (int i = 0; i < 1000 && !again; i++) {
        fd[0] = call(path);
        again = answered(fd[0]);
        close(fd[0]);
    }
    assert_true(again);
    int status;
    assert_int_equal(waitpid(pid, &status, WNOHANG), 0); /* alive */
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_memory_for_a_stream),
        cmocka_unit_test(test_no_descriptors),
    };
    test_dir_make();
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Streams with real sockets: order and content, half frames, broken frames, peers that do not read,
 * reconnecting, stale socket files, strangers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

#include "common/io/stream.h"
#include "tests/common/io/io_test.h"
#include "tests/proto/count_malloc.h"

enum { FRAME_MAX = 200000, QUEUE_MAX = 1 << 20, STREAMS_MAX = 4 };

static const struct td_stream_limits limits = {.frame_max = FRAME_MAX, .queue_max = QUEUE_MAX};
static uv_loop_t loop;
static uint64_t seed;

/* One end of a stream and what happened to it. */
struct end {
    struct td_stream *s;
    struct end *echo_to; /* send every frame back */
    bool close_on_frame;
    uint64_t frames, bytes, sum;
    size_t last_len;
    int downs, connects;
    td_status why;
    char text[200];
    struct td_dialer *dialer;
};

static uint64_t mix(uint64_t h, const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static void on_frame(void *user, const uint8_t *bytes, size_t len) {
    struct end *e = user;
    e->frames++;
    e->bytes += len;
    e->last_len = len;
    e->sum = mix(e->sum, bytes, len);
    if (e->close_on_frame) {
        td_stream_close(e->s);
        e->s = NULL;
    } else if (e->echo_to) {
        assert_int_equal(td_stream_send(e->s, bytes, len), TD_OK);
    }
}

static void on_down(void *user, td_status why, const char *text) {
    struct end *e = user;
    e->s = NULL;
    e->downs++;
    e->why = why;
    snprintf(e->text, sizeof e->text, "%s", text);
    if (e->dialer) td_dialer_redial(e->dialer, true);
}

static const struct td_stream_events events = {.on_frame = on_frame, .on_down = on_down};

static void take(void *user, struct td_stream *s) {
    struct end *e = user;
    assert_null(e->s);
    e->s = s;
    e->connects++;
    td_stream_start(s, &events, e);
}

static bool is_up(void *arg) {
    return ((struct end *)arg)->s != NULL;
}
static bool is_down(void *arg) {
    return ((struct end *)arg)->downs > 0;
}
static bool has_frame(void *arg) {
    return ((struct end *)arg)->frames > 0;
}

static int setup(void **state) {
    (void)state;
    return uv_loop_init(&loop);
}

static int teardown(void **state) {
    (void)state;
    return td_loop_drain(&loop, TEST_LIMIT_MS) == TD_OK ? 0 : -1; /* every handle was closed */
}

static struct td_listener *listen_at(const char *address, struct end *server) {
    struct td_listener *l = NULL;
    struct td_error err = {0};
    if (td_listener_create(&loop, address, &limits, STREAMS_MAX, take, server, &l, &err) != TD_OK)
        fail_msg("%s", err.text);
    return l;
}

static struct td_dialer *dial(const char *address, struct end *client) {
    struct td_dialer *d = NULL;
    struct td_error err = {0};
    if (td_dialer_create(&loop, address, &limits, 1, 20, take, client, &d, &err) != TD_OK)
        fail_msg("%s", err.text);
    return d;
}

/* ---- content ---- */

struct exchange {
    struct end *client;
    uint64_t want;
};

static bool all_back(void *arg) {
    struct exchange *x = arg;
    return x->client->frames == x->want || x->client->downs;
}

static void exchange(const char *address, bool tcp) {
    struct end server = {0}, client = {0};
    static uint8_t bytes[FRAME_MAX];
    char text[64];
    server.echo_to = &server;
    struct td_listener *l = listen_at(address, &server);
    if (tcp) {
        snprintf(text, sizeof text, "127.0.0.1:%u", td_listener_port(l));
        address = text;
    }
    struct td_dialer *d = dial(address, &client);
    assert_true(test_until_ms(&loop, is_up, &client, TEST_LIMIT_MS));
    uint64_t r = seed, sum = 0;
    struct exchange x = {.client = &client};
    for (int i = 0; i < 600; i++) {
        r = r * 6364136223846793005u + 1442695040888963407u;
        size_t n = (size_t)(r >> 33) % (i % 50 == 0 ? FRAME_MAX + 1 : 700);
        for (size_t k = 0; k < n; k++)
            bytes[k] = (uint8_t)(k * 7 + (size_t)i);
        sum = mix(sum, bytes, n);
        assert_int_equal(td_stream_send(client.s, bytes, n), TD_OK);
        x.want++;
        if (i % 40 == 39) assert_true(test_until_ms(&loop, all_back, &x, TEST_LIMIT_MS));
    }
    assert_true(test_until_ms(&loop, all_back, &x, TEST_LIMIT_MS));
    assert_int_equal(client.frames, x.want);
    assert_true(client.sum == sum && server.sum == sum);
    assert_int_equal(td_stream_queued(client.s), 0);
    td_stream_close(client.s);
    assert_true(test_until_ms(&loop, is_down, &server, TEST_LIMIT_MS));
    assert_int_equal(server.why, TD_PEER_LOST);
    assert_int_equal(client.downs, 0); /* its owner closed it */
    td_dialer_close(d);
    td_listener_close(l);
}

static void test_unix(void **state) {
    (void)state;
    exchange(test_path("unix"), false);
    assert_int_not_equal(access(test_path("unix"), F_OK), 0); /* removed with the listener */
}

static void test_tcp(void **state) {
    (void)state;
    exchange("127.0.0.1:0", true);
}

static void test_begin_end(void **state) {
    (void)state;
    struct end server = {0}, client = {0};
    struct td_listener *l = listen_at(test_path("be"), &server);
    struct td_dialer *d = dial(test_path("be"), &client);
    assert_true(test_until_ms(&loop, is_up, &client, TEST_LIMIT_MS));
    uint8_t *p;
    assert_int_equal(td_stream_begin(client.s, FRAME_MAX + 1, &p), TD_TOO_LONG);
    assert_int_equal(td_stream_begin(client.s, 1000, &p), TD_OK);
    memcpy(p, "abc", 3);
    td_stream_end(client.s, 3); /* less than asked for */
    assert_true(test_until_ms(&loop, has_frame, &server, TEST_LIMIT_MS));
    assert_int_equal(server.last_len, 3);
    assert_true(server.sum == mix(0, (const uint8_t *)"abc", 3));
    td_stream_close(client.s);
    td_stream_close(server.s);
    td_dialer_close(d);
    td_listener_close(l);
}

/* ---- misbehaving peers ---- */

static struct td_listener *raw_pair(const char *name, struct end *server, int *fd) {
    struct td_listener *l = listen_at(test_path(name), server);
    *fd = test_raw_connect(test_path(name));
    assert_true(*fd >= 0);
    assert_true(test_until_ms(&loop, is_up, server, TEST_LIMIT_MS));
    return l;
}

static void test_half_frames(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("half", &server, &fd);
    const uint8_t wire[] = {3, 0, 0, 0, 'a', 'b', 'c', 0, 0, 0, 0, 1, 0, 0, 0, 'd'};
    for (size_t i = 0; i < sizeof wire; i++) {
        assert_true(test_raw_write(fd, &wire[i], 1));
        test_run_ms(&loop, 2);
        assert_int_equal(server.frames, i < 6 ? 0 : i < 10 ? 1 : i < 15 ? 2 : 3);
    }
    assert_true(server.sum == mix(0, (const uint8_t *)"abcd", 4));
    assert_true(test_raw_write(fd, "\x05\0\0\0xy", 6)); /* and dies in the middle */
    close(fd);
    assert_true(test_until_ms(&loop, is_down, &server, TEST_LIMIT_MS));
    assert_int_equal(server.frames, 3);
    assert_int_equal(server.why, TD_PEER_LOST);
    td_listener_close(l);
}

static void test_oversize_frame(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("big", &server, &fd);
    uint32_t n = FRAME_MAX + 1;
    assert_true(test_raw_write(fd, &n, sizeof n));
    assert_true(test_until_ms(&loop, is_down, &server, TEST_LIMIT_MS));
    assert_int_equal(server.why, TD_PROTOCOL);
    assert_non_null(strstr(server.text, "200001"));
    close(fd);
    td_listener_close(l);
}

static void test_slow_reader(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("slow", &server, &fd);
    static uint8_t bytes[50000];
    size_t accepted = 0;
    td_status st = TD_OK;
    for (int i = 0; i < 1000 && st == TD_OK; i++) {
        st = td_stream_send(server.s, bytes, sizeof bytes);
        if (st == TD_OK) accepted += sizeof bytes;
        assert_int_equal(server.downs, 0); /* never from inside a call */
        assert_true(td_stream_queued(server.s) <= QUEUE_MAX);
        uv_run(&loop, UV_RUN_NOWAIT);
    }
    assert_int_equal(st, TD_BUSY);
    assert_true(accepted > QUEUE_MAX / 2 && accepted < 3 * QUEUE_MAX);
    assert_true(test_until_ms(&loop, is_down, &server, TEST_LIMIT_MS));
    assert_int_equal(server.downs, 1);
    assert_int_equal(server.why, TD_PEER_LOST);
    assert_non_null(strstr(server.text, "does not read"));
    close(fd);
    td_listener_close(l);
}

static void test_send_after_down(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("after", &server, &fd);
    static uint8_t bytes[FRAME_MAX];
    td_status st;
    while ((st = td_stream_send(server.s, bytes, sizeof bytes)) == TD_OK) {
    }
    assert_int_equal(st, TD_BUSY);
    assert_int_equal(td_stream_send(server.s, bytes, 1), TD_PEER_LOST);
    assert_true(test_until_ms(&loop, is_down, &server, TEST_LIMIT_MS));
    close(fd);
    td_listener_close(l);
}

static void test_close_inside_frame(void **state) {
    (void)state;
    struct end server = {.close_on_frame = true};
    int fd;
    struct td_listener *l = raw_pair("inside", &server, &fd);
    assert_true(test_raw_write(fd, "\1\0\0\0a\1\0\0\0b", 10));
    assert_true(test_until_ms(&loop, has_frame, &server, TEST_LIMIT_MS));
    test_run_ms(&loop, 20);
    assert_int_equal(server.frames, 1);
    assert_int_equal(server.downs, 0);
    close(fd);
    td_listener_close(l);
}

static void test_close_flushed(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("flush", &server, &fd);
    static uint8_t bytes[100000];
    size_t want = 0, got = 0;
    for (int i = 0; i < 8; i++, want += sizeof bytes + 4)
        assert_int_equal(td_stream_send(server.s, bytes, sizeof bytes), TD_OK);
    assert_true(td_stream_queued(server.s) > 0);
    td_stream_close_flushed(server.s, 5000);
    for (;;) {
        ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n == 0) break;
        if (n > 0) got += (size_t)n;
        if (n < 0) test_run_ms(&loop, 1);
    }
    assert_int_equal(got, want);
    assert_int_equal(server.downs, 0);
    close(fd);
    td_listener_close(l);
}

static void test_flush_gives_up(void **state) {
    (void)state;
    struct end server = {0};
    int fd;
    struct td_listener *l = raw_pair("giveup", &server, &fd);
    static uint8_t bytes[FRAME_MAX];
    for (int i = 0; i < 5; i++)
        assert_int_equal(td_stream_send(server.s, bytes, sizeof bytes), TD_OK);
    td_stream_close_flushed(server.s, 30);
    td_listener_close(l);
    /* teardown would fail if the stream waited for its peer */
    assert_int_equal(td_loop_drain(&loop, TEST_LIMIT_MS), TD_OK);
    uv_loop_init(&loop);
    close(fd);
}

/* ---- addresses and listeners ---- */

static void refused_address(const char *address) {
    struct td_listener *l = NULL;
    struct td_error err = {0};
    struct end e = {0};
    td_status st = td_listener_create(&loop, address, &limits, 1, take, &e, &l, &err);
    assert_true(st == TD_CONFIG || st == TD_IO || st == TD_BUSY);
    assert_true(strlen(err.text) > 10);
    assert_null(l);
}

static void test_addresses(void **state) {
    (void)state;
    refused_address("");
    refused_address("nonsense");
    refused_address("localhost:80");
    refused_address("127.0.0.1:70000");
    refused_address("127.0.0.1:x");
    refused_address("unix:");
    refused_address("/no/such/folder/socket");
    refused_address(
        "/very/long/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
}

static void test_socket_files(void **state) {
    (void)state;
    struct end server = {0};
    struct stat st;
    const char *path = test_path("file");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    refused_address(path); /* a regular file is not ours to remove */
    assert_int_equal(stat(path, &st), 0);
    unlink(path);
    /* left behind by a process that died */
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    close(fd);
    struct td_listener *l = listen_at(path, &server);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    refused_address(path); /* someone answers there */
    assert_int_equal(stat(path, &st), 0);
    td_listener_close(l);
    test_run_ms(&loop, 5);
    if (server.s) td_stream_close(server.s); /* the probe's connection */
}

static void test_max_streams(void **state) {
    (void)state;
    struct end ends[1] = {0};
    struct td_listener *l = NULL;
    assert_int_equal(td_listener_create(&loop, test_path("max"), &limits, 1, take, ends, &l, NULL),
                     TD_OK);
    int a = test_raw_connect(test_path("max")), b = test_raw_connect(test_path("max"));
    assert_true(test_until_ms(&loop, is_up, &ends[0], TEST_LIMIT_MS));
    test_run_ms(&loop, 10);
    char c;
    assert_int_equal(recv(b, &c, 1, MSG_DONTWAIT), 0); /* dropped */
    assert_int_equal(recv(a, &c, 1, MSG_DONTWAIT), -1);
    close(a); /* makes room */
    assert_true(test_until_ms(&loop, is_down, &ends[0], TEST_LIMIT_MS));
    close(b);
    b = test_raw_connect(test_path("max"));
    assert_true(test_until_ms(&loop, is_up, &ends[0], TEST_LIMIT_MS));
    td_stream_close(ends[0].s);
    close(b);
    td_listener_close(l);
}

static void test_strangers(void **state) {
    (void)state;
    enum { NOBODY = 65534 };
    if (geteuid() != 0) skip();
    struct end server = {0};
    struct td_listener *l = listen_at(test_path("uid"), &server);
    assert_int_equal(chmod(test_dir, 0755), 0);
    assert_int_equal(chmod(test_path("uid"), 0666), 0); /* so that only the credentials decide */
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        int fd;
        if (setuid(NOBODY) != 0 || (fd = test_raw_connect(test_path("uid"))) < 0) _exit(9);
        _exit(read(fd, &c, 1) == 0 ? 0 : 1); /* closed without a word */
    }
    int status = -1;
    for (int i = 0; i < 500 && waitpid(pid, &status, WNOHANG) == 0; i++)
        test_run_ms(&loop, 5);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(server.connects, 0);
    td_listener_close(l);
}

/* ---- dialing ---- */

static void test_reconnect(void **state) {
    (void)state;
    struct end server = {0}, client = {0};
    struct td_dialer *d = dial(test_path("re"), &client);
    test_run_ms(&loop, 30);
    assert_null(client.s);
    assert_true(strlen(td_dialer_last_error(d)) > 0);
    client.dialer = d;
    for (int round = 1; round <= 3; round++) {
        struct td_listener *l = listen_at(test_path("re"), &server);
        assert_true(test_until_ms(&loop, is_up, &client, TEST_LIMIT_MS));
        assert_true(test_until_ms(&loop, is_up, &server, TEST_LIMIT_MS));
        assert_int_equal(client.connects, round);
        assert_string_equal(td_dialer_last_error(d), "");
        td_listener_close(l);
        td_stream_close(server.s);
        server.s = NULL;
        client.downs = 0;
        assert_true(test_until_ms(&loop, is_down, &client, TEST_LIMIT_MS));
    }
    td_dialer_close(d);
}

/* ---- allocation ---- */

static void test_steady_state(void **state) {
    (void)state;
    if (!test_counts_malloc) skip();
    struct end server = {0}, client = {0};
    server.echo_to = &server;
    static uint8_t bytes[30000];
    struct td_listener *l = listen_at(test_path("steady"), &server);
    struct td_dialer *d = dial(test_path("steady"), &client);
    assert_true(test_until_ms(&loop, is_up, &client, TEST_LIMIT_MS));
    for (int round = 0; round < 5; round++) {
        unsigned long before = test_mallocs;
        for (int i = 0; i < 200; i++) {
            uint64_t want = client.frames + 3;
            for (int k = 0; k < 3; k++)
                assert_int_equal(td_stream_send(client.s, bytes, 1 + (size_t)(i * 100)), TD_OK);
            while (client.frames < want)
                uv_run(&loop, UV_RUN_ONCE);
        }
        if (round == 4) assert_int_equal(test_mallocs, before);
    }
    td_stream_close(client.s);
    td_stream_close(server.s);
    td_dialer_close(d);
    td_listener_close(l);
}

int main(int argc, char **argv) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_unix),
        T(test_tcp),
        T(test_begin_end),
        T(test_half_frames),
        T(test_oversize_frame),
        T(test_slow_reader),
        T(test_send_after_down),
        T(test_close_inside_frame),
        T(test_close_flushed),
        T(test_flush_gives_up),
        T(test_addresses),
        T(test_socket_files),
        T(test_max_streams),
        T(test_strangers),
        T(test_reconnect),
        T(test_steady_state),
    };
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    test_dir_make();
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(test_dir);
    return rc;
}

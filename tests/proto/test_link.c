/* Control links with real sockets: opening, refusing, heartbeats, silence, reconnecting, processes
 * that die, peers that talk nonsense. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "proto/codec.h"
#include "proto/link.h"
#include "tests/common/io/io_test.h"

enum { BEAT_MS = 10, TIMEOUT_MS = 100, SERVER_EPOCH = 77, CLIENT_EPOCH = 99, CONNS_MAX = 4 };

static uv_loop_t loop;

struct side {
    struct td_conn *c;
    int ups, downs, refusals, beats, msgs, filled;
    td_status why, refuse_with;
    char text[TD_TEXT_MAX];
    struct td_msg_hello hello;
    struct td_msg_hello_reply reply;
    struct td_msg_heartbeat beat;
    struct td_key key; /* of the last CANCEL */
    bool close_on_msg;
    struct td_link_server **destroy_on_msg;
};

static td_status on_hello(void *user, const struct td_msg_hello *hello, char text[TD_TEXT_MAX]) {
    struct side *s = user;
    assert_int_equal(hello->role, TD_ROLE_DECODE);
    if (s->refuse_with != TD_OK) snprintf(text, TD_TEXT_MAX, "fingerprint 1, expected 2");
    return s->refuse_with;
}

static void on_up(void *user, struct td_conn *c, const struct td_msg *first) {
    struct side *s = user;
    s->c = c;
    s->ups++;
    if (first->type == TD_MSG_HELLO) {
        s->hello = first->hello;
    } else {
        assert_int_equal(first->type, TD_MSG_HELLO_REPLY);
        s->reply = first->hello_reply;
    }
}

static void on_msg(void *user, struct td_conn *c, const struct td_msg *m) {
    struct side *s = user;
    s->msgs++;
    if (m->type == TD_MSG_HEARTBEAT) {
        s->beats++;
        s->beat = m->heartbeat;
        return;
    }
    assert_int_equal(m->type, TD_MSG_CANCEL);
    s->key = m->cancel.key;
    if (s->close_on_msg) td_conn_close(c);
    if (s->destroy_on_msg) {
        td_link_server_destroy(*s->destroy_on_msg);
        *s->destroy_on_msg = NULL;
    }
}

static void on_down(void *user, struct td_conn *c, td_status why, const char *text) {
    struct side *s = user;
    if (c) {
        assert_ptr_equal(c, s->c);
        s->downs++;
    } else {
        s->refusals++;
    }
    s->c = NULL;
    s->why = why;
    snprintf(s->text, sizeof s->text, "%s", text);
}

static void on_beat(void *user, struct td_conn *c, struct td_msg_heartbeat *beat) {
    struct side *s = user;
    assert_ptr_equal(c, s->c);
    beat->running = 5;
    s->filled++;
}

static const struct td_link_events events = {
    .on_hello = on_hello, .on_up = on_up, .on_msg = on_msg, .on_down = on_down, .on_beat = on_beat};
static struct td_msg_hello hello; /* reset by setup */

static int setup(void **state) {
    (void)state;
    hello = (struct td_msg_hello){.version = TD_PROTO_VERSION,
                                  .role = TD_ROLE_DECODE,
                                  .name = "decode@0",
                                  .epoch = CLIENT_EPOCH,
                                  .settings = "a = b\n",
                                  .settings_len = 6};
    return uv_loop_init(&loop);
}

static int teardown(void **state) {
    (void)state;
    return td_loop_drain(&loop, TEST_LIMIT_MS) == TD_OK ? 0 : -1;
}

static struct td_link_server *serve(const char *name, struct side *s) {
    struct td_link_options o = {
        .epoch = SERVER_EPOCH, .heartbeat_ms = BEAT_MS, .peer_timeout_ms = TIMEOUT_MS};
    struct td_link_server *l = NULL;
    struct td_error err = {0};
    if (td_link_server_create(&loop, test_path(name), &o, CONNS_MAX, &events, s, &l, &err) != TD_OK)
        fail_msg("%s", err.text);
    return l;
}

static uint32_t client_beat_ms = BEAT_MS;

static struct td_link_client *dial_on(uv_loop_t *on, const char *name, struct side *s) {
    struct td_link_options o = {
        .epoch = CLIENT_EPOCH, .heartbeat_ms = client_beat_ms, .peer_timeout_ms = TIMEOUT_MS};
    struct td_link_client *c = NULL;
    struct td_error err = {0};
    if (td_link_client_create(on, test_path(name), &o, &hello, &events, s, &c, &err) != TD_OK)
        fail_msg("%s", err.text);
    return c;
}

static bool is_up(void *s) {
    return ((struct side *)s)->c != NULL;
}
static bool is_down(void *s) {
    return ((struct side *)s)->downs > 0;
}
static bool is_refused(void *s) {
    return ((struct side *)s)->refusals > 1; /* it tries again */
}
static bool has_beats(void *s) {
    return ((struct side *)s)->beats >= 3;
}
static bool has_beat(void *s) {
    return ((struct side *)s)->beats > 0;
}
static bool has_key(void *s) {
    return ((struct side *)s)->key.request != 0;
}

static struct td_msg cancel_of(uint64_t request) {
    return (struct td_msg){.type = TD_MSG_CANCEL, .cancel.key = {request, 3}};
}

/* ---- two ends in one process ---- */

static void test_open_talk_close(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    struct td_link_server *server = serve("talk", &s);
    struct td_link_client *client = dial_on(&loop, "talk", &c);
    assert_null(td_link_client_conn(client));
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    assert_true(is_up(&s));
    assert_ptr_equal(td_link_client_conn(client), c.c);
    assert_true(td_conn_peer_epoch(s.c) == CLIENT_EPOCH);
    assert_true(td_conn_peer_epoch(c.c) == SERVER_EPOCH);
    assert_string_equal(s.hello.name, "decode@0");
    assert_int_equal(s.hello.settings_len, 6);
    assert_int_equal(c.reply.status, TD_OK);
    td_conn_set_data(s.c, &s);
    assert_ptr_equal(td_conn_data(s.c), &s);
    assert_null(td_conn_data(c.c));

    struct td_msg m = cancel_of(11);
    assert_int_equal(td_conn_send(s.c, &m, NULL), TD_OK);
    m = cancel_of(12);
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    assert_true(test_until_ms(&loop, has_key, &s, TEST_LIMIT_MS));
    assert_true(test_until_ms(&loop, has_key, &c, TEST_LIMIT_MS));
    assert_int_equal(c.key.request, 11);
    assert_int_equal(s.key.request, 12);
    m.type = TD_MSG_TOKENS; /* without tokens */
    struct td_error err = {0};
    assert_int_equal(td_conn_send(c.c, &m, &err), TD_PROTOCOL);

    assert_true(test_until_ms(&loop, has_beats, &s, TEST_LIMIT_MS));
    assert_true(test_until_ms(&loop, has_beats, &c, TEST_LIMIT_MS));
    assert_true(s.beat.epoch == CLIENT_EPOCH && s.beat.running == 5 && s.beat.seq >= 3);
    test_run_ms(&loop, 3 * TIMEOUT_MS);
    assert_int_equal(s.downs + c.downs, 0); /* beats keep it up */

    td_link_client_destroy(client);
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    assert_int_equal(s.why, TD_PEER_LOST);
    assert_int_equal(c.downs, 0);
    td_link_server_destroy(server);
}

/* The router knows what a worker has as soon as it is there. */
static void test_first_beat(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    struct td_link_server *server = serve("first", &s);
    client_beat_ms = 100 * TEST_LIMIT_MS;
    struct td_link_client *client = dial_on(&loop, "first", &c);
    client_beat_ms = BEAT_MS;
    assert_true(test_until_ms(&loop, has_beat, &s, TEST_LIMIT_MS));
    assert_true(s.beat.running == 5 && s.beat.seq == 1);
    td_link_client_destroy(client);
    td_link_server_destroy(server);
}

static void test_last_words_arrive(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    struct td_link_server *server = serve("last", &s);
    struct td_link_client *client = dial_on(&loop, "last", &c);
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    struct td_msg m = cancel_of(5);
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    td_link_client_destroy(client);
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    assert_int_equal(s.key.request, 5);
    td_link_server_destroy(server);
}

static void test_reconnect(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    struct td_link_client *client = dial_on(&loop, "again", &c); /* before anyone listens */
    test_run_ms(&loop, 30);
    for (int round = 1; round <= 3; round++) {
        struct td_link_server *server = serve("again", &s);
        assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
        assert_int_equal(c.ups, round);
        c.downs = 0;
        td_link_server_destroy(server);
        assert_true(test_until_ms(&loop, is_down, &c, TEST_LIMIT_MS));
        assert_null(td_link_client_conn(client));
        s.c = NULL;
    }
    td_link_client_destroy(client);
}

static void test_close_inside_callbacks(void **state) {
    (void)state;
    struct side s = {.close_on_msg = true}, c = {0};
    struct td_link_server *server = serve("inside", &s);
    struct td_link_client *client = dial_on(&loop, "inside", &c);
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    struct td_msg m = cancel_of(1);
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    assert_true(test_until_ms(&loop, is_down, &c, TEST_LIMIT_MS));
    assert_int_equal(s.downs, 0);
    s.close_on_msg = false;
    s.destroy_on_msg = &server;
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    c.downs = 0;
    assert_true(test_until_ms(&loop, is_down, &c, TEST_LIMIT_MS));
    assert_null(server);
    td_link_client_destroy(client);
}

/* ---- refusals ---- */

static void test_refused_by_router(void **state) {
    (void)state;
    struct side s = {.refuse_with = TD_MISMATCH}, c = {0};
    struct td_link_server *server = serve("no", &s);
    struct td_link_client *client = dial_on(&loop, "no", &c);
    assert_true(test_until_ms(&loop, is_refused, &c, TEST_LIMIT_MS));
    assert_int_equal(c.why, TD_MISMATCH);
    assert_non_null(strstr(c.text, "fingerprint 1, expected 2"));
    assert_int_equal(s.ups + c.ups + s.downs, 0);
    s.refuse_with = TD_OK; /* a router with another configuration */
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    td_link_client_destroy(client);
    td_link_server_destroy(server);
}

static void test_other_version(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    hello.version = TD_PROTO_VERSION + 1;
    struct td_link_server *server = serve("version", &s);
    struct td_link_client *client = dial_on(&loop, "version", &c);
    assert_true(test_until_ms(&loop, is_refused, &c, TEST_LIMIT_MS));
    assert_int_equal(c.why, TD_MISMATCH);
    assert_non_null(strstr(c.text, "version"));
    td_link_client_destroy(client);
    td_link_server_destroy(server);
}

static void raw_send(int fd, const struct td_msg *m) {
    uint8_t buf[4096];
    size_t n;
    assert_int_equal(td_msg_encode(m, buf + 4, sizeof buf - 4, &n, NULL), TD_OK);
    for (int i = 0; i < 4; i++)
        buf[i] = (uint8_t)(n >> 8 * i);
    assert_true(test_raw_write(fd, buf, n + 4));
}

struct reply_wait {
    int fd;
    uint8_t buf[1000];
    size_t n;
    bool eof;
};

static bool ended(void *arg) {
    struct reply_wait *w = arg;
    ssize_t n = recv(w->fd, w->buf + w->n, sizeof w->buf - w->n, MSG_DONTWAIT);
    if (n > 0) w->n += (size_t)n;
    if (n == 0) w->eof = true;
    return w->eof;
}

static void expect_refusal(int fd, td_status status, const char *part) {
    struct reply_wait w = {.fd = fd};
    struct td_msg m;
    struct td_msg_arena *a;
    assert_true(test_until_ms(&loop, ended, &w, TEST_LIMIT_MS));
    assert_true(w.n > 4);
    assert_int_equal(td_msg_arena_create(&a), TD_OK);
    assert_int_equal(td_msg_decode(w.buf + 4, w.n - 4, a, &m, NULL), TD_OK);
    assert_int_equal(m.type, TD_MSG_HELLO_REPLY);
    assert_int_equal(m.hello_reply.status, status);
    if (!strstr(m.hello_reply.text, part)) fail_msg("\"%s\"", m.hello_reply.text);
    td_msg_arena_destroy(a);
    close(fd);
}

static void test_message_before_hello(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("early", &s);
    int fd = test_raw_connect(test_path("early"));
    struct td_msg m = cancel_of(1);
    raw_send(fd, &m);
    expect_refusal(fd, TD_PROTOCOL, "expected a hello first, found message type 11");
    fd = test_raw_connect(test_path("early"));
    assert_true(test_raw_write(fd, "\5\0\0\0abcde", 9)); /* no message at all */
    expect_refusal(fd, TD_PROTOCOL, "is not a message");
    fd = test_raw_connect(test_path("early"));
    assert_true(test_raw_write(fd, "GET / HTTP/1.1\r\n", 16)); /* a huge frame: just closed */
    struct reply_wait w = {.fd = fd};
    assert_true(test_until_ms(&loop, ended, &w, TEST_LIMIT_MS));
    assert_int_equal(w.n, 0);
    close(fd);
    assert_int_equal(s.ups + s.downs + s.msgs, 0);
    td_link_server_destroy(server);
}

static void test_silence(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("mute", &s);
    int mute = test_raw_connect(test_path("mute")); /* never says hello */
    uint64_t start = td_now_ns();
    struct reply_wait w = {.fd = mute};
    assert_true(test_until_ms(&loop, ended, &w, TEST_LIMIT_MS));
    uint64_t ms = (td_now_ns() - start) / 1000000;
    assert_true(ms >= TIMEOUT_MS);
    close(mute);
    int fd = test_raw_connect(test_path("mute")); /* says hello, then nothing */
    struct td_msg m = {.type = TD_MSG_HELLO, .hello = hello};
    raw_send(fd, &m);
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    assert_int_equal(s.why, TD_PEER_LOST);
    assert_non_null(strstr(s.text, "nothing was heard from decode@0"));
    close(fd);
    td_link_server_destroy(server);
}

static void stall(uv_timer_t *t) {
    (void)t;
    nanosleep(&(struct timespec){.tv_nsec = 2 * TIMEOUT_MS * 1000000L}, NULL);
}

/* A loop that stood still must not take its own absence for the peer's. */
static void test_own_stall(void **state) {
    (void)state;
    struct side s = {0}, c = {0};
    struct td_link_server *server = serve("stall", &s);
    struct td_link_client *client = dial_on(&loop, "stall", &c);
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    uv_timer_t t;
    uv_timer_init(&loop, &t);
    uv_timer_start(&t, stall, 20, 0);
    test_run_ms(&loop, 4 * TIMEOUT_MS);
    assert_int_equal(s.downs + c.downs, 0);
    uv_close((uv_handle_t *)&t, NULL);
    td_link_client_destroy(client);
    td_link_server_destroy(server);
}

static void test_wrong_messages(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("wrong", &s);
    struct td_msg h = {.type = TD_MSG_HELLO, .hello = hello};
    struct td_msg wrong[] = {
        h, {.type = TD_MSG_CREDIT, .credit = {.epoch = 1}}, /* of the other plane */
    };
    for (int i = 0; i < 2; i++) {
        int fd = test_raw_connect(test_path("wrong"));
        s = (struct side){0};
        raw_send(fd, &h);
        assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
        /* a type of a newer version is skipped */
        assert_true(test_raw_write(fd, "\3\0\0\0\xa2\x06\0", 7));
        struct td_msg m = cancel_of(4);
        raw_send(fd, &m);
        assert_true(test_until_ms(&loop, has_key, &s, TEST_LIMIT_MS));
        raw_send(fd, &wrong[i]);
        assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
        assert_int_equal(s.why, TD_PROTOCOL);
        close(fd);
    }
    td_link_server_destroy(server);
}

/* ---- two processes ---- */

/* A worker in a process of its own. */
static pid_t fork_worker(const char *name) {
    pid_t pid = fork();
    if (pid != 0) return pid;
    uv_loop_t own;
    struct side c = {0};
    signal(SIGALRM, SIG_DFL);
    alarm(30); /* never outlives a failed test for long */
    uv_loop_init(&own);
    dial_on(&own, name, &c);
    uv_run(&own, UV_RUN_DEFAULT);
    _exit(0);
}

static void test_process_killed(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("kill", &s);
    pid_t pid = fork_worker("kill");
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
    kill(pid, SIGKILL);
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    assert_null(strstr(s.text, "nothing was heard")); /* at once, not by silence */
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    td_link_server_destroy(server);
}

static void test_process_stopped(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("stop", &s);
    pid_t pid = fork_worker("stop");
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
    kill(pid, SIGSTOP);
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS)); /* by silence */
    assert_non_null(strstr(s.text, "nothing was heard"));
    s.downs = 0;
    kill(pid, SIGCONT);
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS)); /* comes back by itself */
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    td_link_server_destroy(server);
}

static void test_router_that_does_not_read(void **state) {
    (void)state;
    struct side s = {0};
    struct td_link_server *server = serve("full", &s);
    int fd = test_raw_connect(test_path("full"));
    struct td_msg h = {.type = TD_MSG_HELLO, .hello = hello};
    raw_send(fd, &h);
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
    enum { N = 1 << 20 };
    int32_t *ids = calloc(N, sizeof *ids);
    assert_non_null(ids);
    struct td_msg m = {.type = TD_MSG_PREFILL};
    m.prefill.n_prompt = N;
    m.prefill.ids = ids;
    m.prefill.max_new = 1;
    m.prefill.sampling.top_p = 1;
    td_status st;
    struct td_error err = {0};
    int sent = 0;
    while ((st = td_conn_send(s.c, &m, &err)) == TD_OK && sent < 1000)
        sent++;
    assert_int_equal(st, TD_BUSY);
    assert_true(sent >= 32 && sent < 100); /* 64 MiB of about 1 MiB each, and the socket's buffer */
    assert_true(test_until_ms(&loop, is_down, &s, TEST_LIMIT_MS));
    free(ids);
    close(fd);
    td_link_server_destroy(server);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_open_talk_close),
        T(test_first_beat),
        T(test_last_words_arrive),
        T(test_reconnect),
        T(test_close_inside_callbacks),
        T(test_refused_by_router),
        T(test_other_version),
        T(test_message_before_hello),
        T(test_silence),
        T(test_own_stall),
        T(test_wrong_messages),
        T(test_process_killed),
        T(test_process_stopped),
        T(test_router_that_does_not_read),
    };
    signal(SIGPIPE, SIG_IGN);
    test_dir_make();
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(test_dir);
    return rc;
}

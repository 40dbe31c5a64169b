/* Control links over TCP: nothing is taken before both ends have proven the cluster key, and those
 * who cannot are bounded in time, bytes and number. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>

#include <cmocka.h>

#include "common/auth/key.h"
#include "proto/codec.h"
#include "proto/link.h"
#include "tests/common/io/io_test.h"

enum { BEAT_MS = 10, TIMEOUT_MS = 150, CONNS_MAX = 64 };

static uv_loop_t loop;
static struct td_cluster_key *key, *other_key;
static struct td_msg_hello hello;

struct side {
    struct td_conn *c;
    int ups, downs, refusals, strangers;
    td_status why;
    char text[TD_TEXT_MAX];
};

static void on_up(void *user, struct td_conn *c, const struct td_msg *first) {
    struct side *s = user;
    (void)first;
    s->c = c;
    s->ups++;
}
static void on_msg(void *user, struct td_conn *c, const struct td_msg *m) {
    (void)user, (void)c, (void)m;
}
static void on_down(void *user, struct td_conn *c, td_status why, const char *text) {
    struct side *s = user;
    *(c ? &s->downs : &s->refusals) += 1;
    s->c = NULL;
    s->why = why;
    snprintf(s->text, sizeof s->text, "%s", text);
}
static void on_stranger(void *user, td_status why, const char *text) {
    struct side *s = user;
    s->strangers++;
    s->why = why;
    snprintf(s->text, sizeof s->text, "%s", text);
}
static const struct td_link_events events = {
    .on_up = on_up, .on_msg = on_msg, .on_down = on_down, .on_stranger = on_stranger};

static uint32_t timeout_ms;

static struct td_link_options options(enum td_role role, const struct td_cluster_key *k) {
    return (struct td_link_options){.epoch = 70u + (unsigned)role,
                                    .heartbeat_ms = BEAT_MS,
                                    .peer_timeout_ms = timeout_ms,
                                    .role = role,
                                    .key = k};
}

static struct td_link_server *server;
static struct side s;
static char address[32];

static int setup_for(uint32_t ms) {
    timeout_ms = ms;
    struct td_error err = {0};
    struct td_link_options o = options(TD_ROLE_ROUTER, key);
    hello = (struct td_msg_hello){
        .version = TD_PROTO_VERSION, .role = TD_ROLE_DECODE, .name = "decode@0", .epoch = 73};
    s = (struct side){0};
    if (uv_loop_init(&loop) != 0 || td_link_server_create(&loop, "127.0.0.1:0", &o, CONNS_MAX,
                                                          &events, &s, &server, &err) != TD_OK)
        return -1;
    snprintf(address, sizeof address, "127.0.0.1:%u", td_link_server_port(server));
    return 0;
}

static int setup(void **state) {
    (void)state;
    return setup_for(TIMEOUT_MS);
}

/* No clock ends anything. */
static int setup_patient(void **state) {
    (void)state;
    return setup_for(10 * TEST_LIMIT_MS);
}

static int teardown(void **state) {
    (void)state;
    td_link_server_destroy(server);
    return td_loop_drain(&loop, TEST_LIMIT_MS) == TD_OK ? 0 : -1;
}

static struct td_link_client *dial(struct side *c, const struct td_cluster_key *k) {
    struct td_link_options o = options(TD_ROLE_DECODE, k);
    struct td_link_client *client = NULL;
    struct td_error err = {0};
    if (td_link_client_create(&loop, address, &o, &hello, &events, c, &client, &err) != TD_OK)
        fail_msg("%s", err.text);
    return client;
}

static int raw(void) {
    struct sockaddr_in sa = {.sin_family = AF_INET, .sin_port = htons(td_link_server_port(server))};
    sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

static bool is_up(void *side) {
    return ((struct side *)side)->c != NULL;
}
static bool is_refused(void *side) {
    return ((struct side *)side)->refusals > 2; /* it tries again */
}
static bool hung_up(void *fd) {
    char c;
    return read(*(int *)fd, &c, 1) == 0;
}

static void test_with_the_key(void **state) {
    (void)state;
    struct side c = {0};
    struct td_link_client *client = dial(&c, key);
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    assert_true(test_until_ms(&loop, is_up, &s, TEST_LIMIT_MS));
    assert_true(td_conn_peer_epoch(c.c) == 70u + TD_ROLE_ROUTER);
    test_run_ms(&loop, 3 * TIMEOUT_MS);
    assert_int_equal(s.downs + c.downs + s.strangers, 0); /* beats keep it up */
    /* The limit on frames was that of the challenge alone. */
    int32_t *ids = calloc(100000, sizeof *ids);
    struct td_msg m = {.type = TD_MSG_PREFILL};
    m.prefill.n_prompt = 100000;
    m.prefill.ids = ids;
    m.prefill.max_new = 1;
    m.prefill.sampling.top_p = 1;
    assert_int_equal(td_conn_send(s.c, &m, NULL), TD_OK);
    assert_int_equal(td_conn_send(c.c, &m, NULL), TD_OK);
    test_run_ms(&loop, TIMEOUT_MS);
    assert_int_equal(s.downs + c.downs, 0);
    free(ids);
    td_link_client_destroy(client);
}

static void test_without_a_key(void **state) {
    (void)state;
    struct td_link_options o = options(TD_ROLE_ROUTER, NULL);
    struct td_link_server *l;
    struct td_link_client *c;
    struct td_error err = {0};
    assert_int_equal(
        td_link_server_create(&loop, "127.0.0.1:0", &o, CONNS_MAX, &events, &s, &l, &err),
        TD_CONFIG);
    assert_non_null(strstr(err.text, "cluster_key_file"));
    err.text[0] = 0;
    assert_int_equal(td_link_client_create(&loop, address, &o, &hello, &events, &s, &c, &err),
                     TD_CONFIG);
    assert_non_null(strstr(err.text, "cluster_key_file"));
}

static void test_another_key(void **state) {
    (void)state;
    struct side c = {0};
    struct td_link_client *client = dial(&c, other_key);
    assert_true(test_until_ms(&loop, is_refused, &c, TEST_LIMIT_MS));
    assert_int_equal(c.why, TD_MISMATCH);
    assert_non_null(strstr(c.text, "cluster_key_file"));
    assert_int_equal(s.why, TD_MISMATCH);
    assert_non_null(strstr(s.text, "cluster_key_file"));
    assert_in_range(s.strangers, 3, 4);
    assert_int_equal(s.ups + c.ups, 0);
    td_link_client_destroy(client);
}

/* The time is that of the whole opening: a byte now and then does not prolong it. */
static void test_slow(void **state) {
    (void)state;
    int fd = raw();
    bool ended = false;
    for (int i = 0; i < 4 + 0x38 - 1 && !ended; i++) {
        if (write(fd, &"\x38\0\0\0x"[i < 4 ? i : 4], 1) != 1) break;
        ended = test_until_ms(&loop, hung_up, &fd, 20);
    }
    assert_true(ended);
    assert_int_equal(s.strangers, 1);
    assert_int_equal(s.why, TD_PEER_LOST);
    close(fd);
}

static void test_nonsense(void **state) {
    (void)state;
    uint8_t frame[4 + 256] = {65}; /* one byte more than the longest */
    struct td_msg m = {.type = TD_MSG_HELLO, .hello = hello};
    size_t len;
    int fd = raw();
    assert_true(test_raw_write(fd, frame, 4));
    assert_true(test_until_ms(&loop, hung_up, &fd, TEST_LIMIT_MS));
    assert_int_equal(s.why, TD_PROTOCOL); /* not by the clock */
    assert_non_null(strstr(s.text, "the limit is 64"));
    close(fd);
    fd = raw(); /* what a Unix socket would take */
    assert_int_equal(td_msg_encode(&m, frame + 4, sizeof frame - 4, &len, NULL), TD_OK);
    assert_in_range(len, 1, 64);
    frame[0] = (uint8_t)len;
    assert_true(test_raw_write(fd, frame, 4 + len));
    assert_true(test_until_ms(&loop, hung_up, &fd, TEST_LIMIT_MS));
    assert_int_equal(s.why, TD_PROTOCOL);
    assert_int_equal(s.strangers, 2);
    assert_int_equal(s.ups, 0);
    close(fd);
}

/* However many there are, one with the key gets in, and the oldest of the others are sent away. */
static void test_many(void **state) {
    (void)state;
    enum { N = 2 * TD_LINK_STRANGERS_MAX };
    struct side c = {0};
    int fd[N];
    for (int i = 0; i < N; i++) {
        fd[i] = raw();
        test_run_ms(&loop, 1);
    }
    assert_in_range(s.strangers, N - TD_LINK_STRANGERS_MAX, N);
    struct td_link_client *client = dial(&c, key);
    assert_true(test_until_ms(&loop, is_up, &c, TEST_LIMIT_MS));
    for (int i = 0; i < N; i++)
        close(fd[i]);
    td_link_client_destroy(client);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_with_the_key), T(test_without_a_key),
        T(test_another_key),  T(test_slow),
        T(test_nonsense),     cmocka_unit_test_setup_teardown(test_many, setup_patient, teardown),
    };
    static const char text[] = "the first cluster key of the tests",
                      other[] = "and another one, as long as it was";
    signal(SIGPIPE, SIG_IGN);
    if (td_cluster_key_make(text, sizeof text, &key, NULL) != TD_OK ||
        td_cluster_key_make(other, sizeof other, &other_key, NULL) != TD_OK)
        return 1;
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    td_cluster_key_free(key);
    td_cluster_key_free(other_key);
    return rc;
}

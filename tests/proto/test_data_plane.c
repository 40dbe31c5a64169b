/* The data plane on a libuv loop: two planes in one process exchange messages, puts wake the loop,
 * nonsense is told to the owner, callers are refused where nobody is expected. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "proto/codec.h"
#include "proto/data_plane.h"
#include "tests/common/io/io_test.h"

enum { REGION = 1 << 20, SENDS = 300 };

struct side {
    struct td_plane *plane;
    struct td_xfer_peer *peer;
    int accepts, messages, lost, closed;
    td_status why;
    char text[400];
    struct td_msg_peer_beat beat;
};

static uv_loop_t loop;
static struct side a, b; /* b dials a */

static uint64_t soon(void) {
    return td_now_ns() + 5u * 1000000000u;
}

static void on_accept(void *user, struct td_xfer_peer *peer) {
    struct side *s = user;
    s->accepts++;
    s->peer = peer;
}

static void on_message(void *user, struct td_xfer_peer *peer, const struct td_msg *m) {
    struct side *s = user;
    assert_ptr_equal(peer, s->peer);
    assert_int_equal(m->type, TD_MSG_PEER_BEAT);
    s->messages++;
    s->beat = m->peer_beat;
    uv_stop(&loop); /* this comes before the loop waits: it would wait for nothing more */
}

static void on_lost(void *user, struct td_xfer_peer *peer, td_status why, const char *text) {
    struct side *s = user;
    assert_ptr_equal(peer, s->peer);
    s->lost++;
    s->why = why;
    snprintf(s->text, sizeof s->text, "%s", text);
}

static void on_closed(void *user, struct td_xfer_peer *peer) {
    struct side *s = user;
    assert_ptr_equal(peer, s->peer);
    s->closed++;
    s->peer = NULL;
}

static const struct td_plane_events events = {on_accept, on_message, on_lost, on_closed};
static const struct td_plane_events no_callers = {NULL, on_message, on_lost, on_closed};

static bool has_message(void *s) {
    return ((struct side *)s)->messages > 0;
}
static bool is_lost(void *s) {
    return ((struct side *)s)->lost > 0;
}
static bool is_closed(void *s) {
    return ((struct side *)s)->closed > 0;
}

static void on_guard(uv_timer_t *t) {
    *(bool *)t->data = true;
}

/* Waits with nothing on the loop that ticks: only the planes' own wake-ups end it in time. */
static bool without_ticks(bool (*holds)(void *), void *arg) {
    uv_timer_t guard;
    bool late = false;
    uv_timer_init(&loop, &guard);
    guard.data = &late;
    uv_timer_start(&guard, on_guard, 2000, 0);
    while (!holds(arg) && !late)
        uv_run(&loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&guard, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
    return !late;
}

static void open_pair(const struct td_plane_events *ea) {
    size_t len;
    struct td_error err = {0};
    const struct td_plane_options o = {.max_peers = 4, .sends_per_peer = SENDS};
    a = b = (struct side){0};
    assert_int_equal(uv_loop_init(&loop), 0);
    if (td_plane_create(&loop, ea, &a, &o, &a.plane, &err) != TD_OK ||
        td_plane_create(&loop, &events, &b, &o, &b.plane, &err) != TD_OK)
        fail_msg("%s", err.text);
    const void *address = td_xfer_address(td_plane_xfer(a.plane), &len);
    if (td_xfer_connect(td_plane_xfer(b.plane), address, len, &b.peer, &err) != TD_OK)
        fail_msg("%s", err.text);
}

static void close_pair(void) {
    td_plane_destroy(a.plane);
    td_plane_destroy(b.plane);
    assert_int_equal(td_loop_drain(&loop, TEST_LIMIT_MS), TD_OK);
}

static void send_beat(struct side *from, uint64_t seq) {
    struct td_msg m = {.type = TD_MSG_PEER_BEAT, .peer_beat = {.epoch = 5, .seq = seq}};
    assert_int_equal(td_plane_send(from->plane, from->peer, &m, soon(), NULL), TD_OK);
}

static void test_messages(void **state) {
    (void)state;
    open_pair(&events);
    for (uint64_t i = 1; i <= 200; i++) {
        a.messages = b.messages = 0;
        send_beat(&b, i);
        assert_true(without_ticks(has_message, &a));
        assert_int_equal(a.beat.seq, i);
        send_beat(&a, i + 1000);
        assert_true(without_ticks(has_message, &b));
        assert_int_equal(b.beat.seq, i + 1000);
    }
    for (int i = 0; i < 50; i++)
        send_beat(&b, 9); /* in one breath */
    td_xfer_peer_close(b.peer);
    assert_true(test_until_ms(&loop, is_closed, &b, TEST_LIMIT_MS));
    close_pair();
}

static bool has_all(void *s) {
    return ((struct side *)s)->messages == SENDS;
}

/* As many as were asked for wait for a peer that does not listen just now; none is lost. */
static void test_one_breath(void **state) {
    (void)state;
    open_pair(&events);
    for (uint64_t i = 1; i <= SENDS; i++)
        send_beat(&b, i);
    struct td_msg m = {.type = TD_MSG_PEER_BEAT};
    assert_int_equal(td_plane_send(b.plane, b.peer, &m, soon(), NULL), TD_BUSY);
    assert_true(without_ticks(has_all, &a));
    assert_int_equal(a.beat.seq, SENDS);
    close_pair();
}

static void nonsense(const void *bytes, size_t len, const char *part) {
    open_pair(&events);
    send_beat(&b, 1);
    assert_true(test_until_ms(&loop, has_message, &a, TEST_LIMIT_MS));
    assert_int_equal(td_xfer_send(b.peer, bytes, len, soon()), TD_OK);
    if (part) {
        assert_true(test_until_ms(&loop, is_lost, &a, TEST_LIMIT_MS));
        assert_int_equal(a.why, TD_PROTOCOL);
        if (!strstr(a.text, part)) fail_msg("\"%s\"", a.text);
    } else {
        a.messages = 0;
        send_beat(&b, 2);
        assert_true(test_until_ms(&loop, has_message, &a, TEST_LIMIT_MS));
        assert_int_equal(a.lost, 0);
    }
    close_pair();
}

static void test_nonsense(void **state) {
    (void)state;
    uint8_t buf[64];
    size_t len;
    struct td_msg control = {.type = TD_MSG_CANCEL, .cancel.key = {1, 1}};
    assert_int_equal(td_msg_encode(&control, buf, sizeof buf, &len, NULL), TD_OK);
    nonsense("garbage", 7, "is not a message");
    nonsense(buf, len, "does not belong on the data plane");
    nonsense("\xa2\x06\0", 3, NULL); /* a type of a newer version */
}

static void test_refused_caller(void **state) {
    (void)state;
    open_pair(&no_callers);
    send_beat(&b, 1);
    assert_true(test_until_ms(&loop, is_lost, &b, TEST_LIMIT_MS));
    assert_int_equal(a.messages, 0);
    close_pair();
}

/* ---- puts ---- */

static int done, quiet;

static void on_done(struct td_xfer_req *r, td_status st) {
    (void)r;
    assert_int_equal(st, TD_OK);
    done++;
}
static void on_quiet(struct td_xfer_req *r) {
    (void)r;
    quiet++;
    uv_stop(&loop);
}
static bool all_quiet(void *arg) {
    (void)arg;
    return quiet == 2;
}

static void test_put_wakes_the_loop(void **state) {
    (void)state;
    struct td_xfer_region *region;
    struct td_xfer_remote *remote;
    static uint8_t bytes[REGION];
    size_t len;
    open_pair(&events);
    assert_int_equal(td_xfer_region_alloc(td_plane_xfer(a.plane), REGION, &region, NULL), TD_OK);
    const void *key = td_xfer_region_key(region, &len);
    assert_int_equal(td_xfer_remote_open(b.peer, key, len, &remote, NULL), TD_OK);
    for (int i = 0; i < REGION; i++)
        bytes[i] = (uint8_t)(i * 7);
    for (int round = 0; round < 20; round++) {
        struct td_xfer_req put = {.deadline_ns = soon(), .on_done = on_done, .on_quiet = on_quiet};
        struct td_xfer_req flush = put;
        done = quiet = 0;
        bytes[round] ^= 0x55;
        assert_int_equal(td_xfer_put(b.peer, remote, 0, bytes, REGION, &put), TD_OK);
        assert_int_equal(td_xfer_flush(b.peer, &flush), TD_OK);
        assert_true(without_ticks(all_quiet, NULL));
        assert_int_equal(done, 2);
        assert_memory_equal(td_xfer_region_base(region), bytes, REGION);
    }
    td_xfer_region_free(region);
    close_pair();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages),           cmocka_unit_test(test_one_breath),
        cmocka_unit_test(test_nonsense),           cmocka_unit_test(test_refused_caller),
        cmocka_unit_test(test_put_wakes_the_loop),
    };
    struct td_error err;
    if (td_xfer_env(TD_XFER_SHM, "", &err) != TD_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Both ends of links in one process: messages, puts, limits, closing, and bytes that lie. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/xfer/wire.h"
#include "tests/common/xfer/ends.h"

static struct end a, b;
static struct end *both[] = {&a, &b};

static bool linked(void *user) {
    (void)user;
    return b.accepted == 1;
}

static bool linked_again(void *user) {
    return b.accepted == *(const unsigned *)user;
}

static int open_both(void **state) {
    (void)state;
    end_open(&a, 4, 8);
    end_open(&b, 4, 8);
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    end_connect(&a, address, len);
    return ends_run(both, 2, linked, NULL, ENDS_WAIT_MS) ? 0 : -1;
}

static int close_both(void **state) {
    (void)state;
    end_close(&a);
    end_close(&b);
    return 0;
}

static void test_lanes_are_the_chosen_ones(void **state) {
    (void)state;
    char lanes[TD_XFER_LANES_MAX];
    td_xfer_lanes(b.peer, lanes); /* tcp: known when the link is proven, to b before a */
    print_message("lanes: %s\n", lanes);
    const char *want = ends_tcp() ? "tcp/lo" : "posix/memory";
    assert_memory_equal(lanes, want, strlen(want));
    assert_null(strstr(lanes, ends_tcp() ? "posix" : "tcp"));
    assert_memory_equal(td_xfer_transport(a.x), want, strlen(want));
}

static bool answered(void *user) {
    return a.messages == *(unsigned *)user;
}

static void test_messages_of_every_kind_of_length(void **state) {
    (void)state;
    static const size_t edges[] = {0,    1,    31,    60,    61,    100,   7999,  8000,
                                   8001, 8224, 16000, 16001, 56000, 64000, 65535, 65536};
    static uint8_t out[TD_XFER_MESSAGE_MAX];
    b.echo = true;
    for (unsigned i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        pattern_fill(out, sizeof out, i);
        assert_int_equal(td_xfer_send(a.peer, out, edges[i], UINT64_MAX), TD_OK);
        unsigned want = i + 1;
        assert_true(ends_run(both, 2, answered, &want, ENDS_WAIT_MS));
        assert_int_equal(a.last_len, edges[i]);
        assert_memory_equal(a.last, out, edges[i]);
    }
    assert_int_equal(td_xfer_send(a.peer, out, TD_XFER_MESSAGE_MAX + 1, UINT64_MAX), TD_TOO_LONG);
}

static uint64_t next_expected;
static bool in_order;
static void check_order(struct end *e, struct td_xfer_peer *peer, const void *bytes, size_t len) {
    (void)e, (void)peer;
    uint64_t n;
    if (len >= 8) memcpy(&n, bytes, 8);
    if (len < 8 || n != next_expected++ ||
        (len > 8 && !pattern_is((const char *)bytes + 8, len - 8, n)))
        in_order = false;
}

static bool sent_all(void *user) {
    return b.messages == *(unsigned *)user;
}

static void test_many_messages_keep_order_and_push_back(void **state) {
    (void)state;
    unsigned seed = (unsigned)time(NULL), busy = 0, total = 3000;
    print_message("seed %u\n", seed);
    static uint8_t out[TD_XFER_MESSAGE_MAX];
    next_expected = 0;
    in_order = true;
    b.on_message = check_order;
    uint64_t stop = td_now_ns() + ENDS_WAIT_MS * 1000000ull;
    for (uint64_t n = 0; n < total; n++) {
        size_t most = rand_r(&seed) % 4 ? 200 : 65500;
        size_t len = 8 + (size_t)rand_r(&seed) % most;
        memcpy(out, &n, 8);
        pattern_fill(out + 8, len - 8, n);
        td_status st;
        while ((st = td_xfer_send(a.peer, out, len, UINT64_MAX)) == TD_BUSY) {
            busy++;
            assert_true(td_now_ns() < stop);
            (void)td_xfer_progress(b.x);
            (void)td_xfer_progress(a.x);
        }
        assert_int_equal(st, TD_OK);
    }
    assert_true(ends_run(both, 2, sent_all, &total, ENDS_WAIT_MS));
    assert_true(in_order);
    assert_true(busy > 0);
    assert_int_equal(a.lost + b.lost, 0);
}

static void test_backlog_is_bounded_and_expires(void **state) {
    (void)state;
    unsigned taken = 0, one = 1;
    assert_int_equal(td_xfer_send(a.peer, "x", 1, UINT64_MAX), TD_OK);
    assert_true(
        ends_run(both, 2, sent_all, &one, ENDS_WAIT_MS)); /* the link is open at both ends */
    /* Nobody progresses b. The window takes 16, the slots 8, then the answer is BUSY. */
    uint64_t deadline = td_now_ns() + 1000000000u;
    while (td_xfer_send(a.peer, "x", 1, deadline) == TD_OK)
        taken++;
    assert_int_equal(td_xfer_send(a.peer, "x", 1, deadline), TD_BUSY);
    assert_in_range(taken, 8, 24);
    for (int i = 0; i < 100; i++)
        (void)td_xfer_progress(a.x);
    assert_int_equal(td_xfer_expire(a.x, deadline - 1), deadline);
    assert_int_equal(a.lost, 0);
    (void)td_xfer_expire(a.x, deadline);
    (void)td_xfer_expire(a.x, deadline + 1);
    assert_int_equal(a.lost, 1);
    assert_int_equal(a.why, TD_TIMEOUT);
    assert_int_equal(td_xfer_send(a.peer, "x", 1, UINT64_MAX), TD_PEER_LOST);
}

static struct td_xfer_remote *open_region(size_t bytes, struct td_xfer_region **ret_region) {
    struct td_error err;
    size_t len;
    struct td_xfer_remote *remote = NULL;
    assert_int_equal(td_xfer_region_alloc(b.x, bytes, ret_region, &err), TD_OK);
    td_xfer_grant(b.peer, *ret_region, 0, bytes);
    const void *key = td_xfer_region_key(*ret_region, &len);
    assert_true(len <= TD_XFER_KEY_MAX);
    td_status st = td_xfer_remote_open(a.peer, key, len, &remote, &err);
    if (st != TD_OK) print_message("%s\n", err.text);
    assert_int_equal(st, TD_OK);
    return remote;
}

static void test_puts_land_where_they_should(void **state) {
    (void)state;
    enum { BYTES = 1 << 20 };
    struct td_xfer_region *region;
    struct td_xfer_remote *remote = open_region(BYTES, &region);
    char *base = td_xfer_region_base(region);
    assert_string_equal(td_xfer_region_transport(region), ends_tcp() ? "private" : "posix");
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(base[i], 0);
    char *src = malloc(BYTES);
    pattern_fill(src, BYTES, 7);
    static const size_t lens[] = {1, 8, 100, 4096, 65537, BYTES - 4096 - 8};
    size_t at = 5;
    static struct want puts[6], flush;
    for (size_t i = 0; i < 6 && at + lens[i] <= BYTES; i++) {
        want_init(&puts[i], UINT64_MAX);
        size_t off = i == 5 ? BYTES - lens[i] : at;
        memset(base, 0x55, BYTES);
        assert_int_equal(td_xfer_put(a.peer, remote, off, src + off, lens[i], &puts[i].req), TD_OK);
        assert_int_equal(puts[i].done, 0); /* never from inside the call */
        want_init(&flush, UINT64_MAX);
        assert_int_equal(td_xfer_flush(a.peer, &flush.req), TD_OK);
        assert_true(ends_run(both, 2, want_is_quiet, &flush, ENDS_WAIT_MS));
        assert_int_equal(puts[i].done, 1);
        assert_int_equal(puts[i].status, TD_OK);
        assert_int_equal(flush.status, TD_OK);
        for (size_t j = 0; j < BYTES; j++)
            if (base[j] != (j >= off && j < off + lens[i] ? src[j] : 0x55)) fail_msg("byte %zu", j);
        at = off + 3;
    }
    /* What this process writes by itself is there without a put. */
    char *there = td_xfer_remote_at(remote, 4096, BYTES - 4096);
    assert_true(ends_tcp() ? !there : there != NULL);
    memset(base, 0x55, BYTES);
    if (there) memcpy(there, src, BYTES - 4096);
    for (size_t j = 0; there && j < BYTES; j++)
        if (base[j] != (j >= 4096 ? src[j - 4096] : 0x55)) fail_msg("byte %zu", j);
    assert_null(td_xfer_remote_at(remote, 0, 0));
    assert_null(td_xfer_remote_at(remote, 1, BYTES));
    assert_null(td_xfer_remote_at(remote, UINT64_MAX, 2));
    struct want bad;
    want_init(&bad, UINT64_MAX);
    assert_int_equal(td_xfer_put(a.peer, remote, 0, src, 0, &bad.req), TD_INVALID);
    assert_int_equal(td_xfer_put(a.peer, remote, 1, src, BYTES, &bad.req), TD_INVALID);
    assert_int_equal(td_xfer_put(a.peer, remote, BYTES, src, 1, &bad.req), TD_INVALID);
    assert_int_equal(td_xfer_put(a.peer, remote, UINT64_MAX, src, 2, &bad.req), TD_INVALID);
    assert_true(bad.req.quiet);
    assert_int_equal(bad.done, 0);
    td_xfer_remote_close(remote);
    td_xfer_region_free(region);
    free(src);
}

static void test_damaged_bytes_are_refused(void **state) {
    (void)state;
    struct td_xfer_region *region;
    struct td_error err;
    (void)open_region(4096, &region);
    size_t len;
    uint8_t bytes[TD_XFER_ADDRESS_MAX];
    struct td_xfer_remote *remote;
    const void *key = td_xfer_region_key(region, &len);
    for (size_t i = 0; i < len; i++) {
        memcpy(bytes, key, len);
        bytes[i] ^= 0x10;
        assert_int_equal(td_xfer_remote_open(a.peer, bytes, len, &remote, &err), TD_PROTOCOL);
        memcpy(bytes, key, len);
        assert_int_equal(td_xfer_remote_open(a.peer, bytes, i, &remote, &err), TD_PROTOCOL);
    }
    td_xfer_region_free(region);
    struct td_xfer_peer *peer;
    const void *address = td_xfer_address(b.x, &len);
    for (size_t i = 0; i < len; i++) {
        memcpy(bytes, address, len);
        bytes[i] ^= 0x10;
        assert_int_equal(td_xfer_connect(a.x, bytes, len, &peer, &err), TD_PROTOCOL);
        memcpy(bytes, address, len);
        assert_int_equal(td_xfer_connect(a.x, bytes, i, &peer, &err), TD_PROTOCOL);
    }
    address = td_xfer_address(a.x, &len);
    assert_int_equal(td_xfer_connect(a.x, address, len, &peer, &err), TD_INVALID);
    assert_non_null(strstr(err.text, "our own"));
}

/* An address or key of the other lane is refused by a sentence, not by a crash in UCX. */
static void test_another_lane(void **state) {
    (void)state;
    struct td_xfer_envelope e = {0};
    struct td_error err;
    uint8_t bytes[TD_XFER_ADDRESS_MAX];
    size_t len;
    struct td_xfer_peer *peer;
    enum td_xfer_lane ours = ends_tcp() ? TD_XFER_TCP : TD_XFER_SHM;
    assert_int_equal(td_xfer_env(ends_tcp() ? TD_XFER_SHM : TD_XFER_TCP, "lo", &err), TD_OK);
    assert_int_equal(
        td_xfer_seal(&e, TD_XFER_ADDRESS_MAGIC, "12345678", 8, bytes, sizeof bytes, &len, &err),
        TD_OK);
    assert_int_equal(td_xfer_env(ours, "lo", &err), TD_OK);
    assert_int_equal(td_xfer_connect(a.x, bytes, len, &peer, &err), TD_MISMATCH);
    assert_non_null(strstr(err.text, "same setting lane"));
    assert_int_equal(td_xfer_env(TD_XFER_TCP, "nosuch0", &err), TD_CONFIG);
    assert_non_null(strstr(err.text, "lo"));
}

static bool farewell_heard(void *user) {
    (void)user;
    return a.closed == 1 && b.lost == 1;
}

static bool b_closed(void *user) {
    (void)user;
    return b.closed == 1;
}

static void test_close_tells_the_other_side(void **state) {
    (void)state;
    static struct want flush;
    want_init(&flush, UINT64_MAX);
    assert_int_equal(td_xfer_flush(a.peer, &flush.req), TD_OK);
    td_xfer_peer_close(a.peer);
    td_xfer_peer_close(a.peer);
    assert_int_equal(a.closed, 0);
    assert_int_equal(td_xfer_send(a.peer, "x", 1, UINT64_MAX), TD_PEER_LOST);
    assert_true(ends_run(both, 2, farewell_heard, NULL, ENDS_WAIT_MS));
    assert_int_equal(flush.done, 1);
    assert_int_equal(flush.quiet, 1);
    assert_int_equal(b.why, TD_PEER_LOST);
    assert_int_equal(a.lost, 0);
    td_xfer_peer_close(b.peer);
    assert_true(ends_run(both, 2, b_closed, NULL, ENDS_WAIT_MS));
    struct td_xfer_counts c;
    td_xfer_counts(a.x, &c);
    assert_int_equal(c.peers + c.requests + c.quarantined, 0);
}

static bool a_gone(void *user) {
    (void)user;
    return a.peer == NULL;
}
static bool b_lost(void *user) {
    return b.lost == *(unsigned *)user;
}
static bool b_gone(void *user) {
    (void)user;
    return b.peer == NULL;
}

/* Every seventh link is closed before its greeting can have left: the other side then may know of
 * it only inside UCX, whose pairing of endpoints is off by one from there on. Messages of several
 * fragments still have to arrive both ways. */
static void test_links_come_and_go(void **state) {
    (void)state;
    static uint8_t out[30000];
    b.echo = true;
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    unsigned links = ends_tcp() ? 45 : 200; /* over TCP closing takes its time */
    for (unsigned i = 1; i <= links; i++) {
        unsigned answers = a.messages + 1, losses = b.lost + 1;
        if (i > 1) end_connect(&a, address, len);
        if (i % 7 == 0) {
            td_xfer_peer_close(a.peer);
            assert_true(ends_run(both, 2, a_gone, NULL, ENDS_WAIT_MS));
            if (b.peer) {
                assert_true(ends_run(both, 2, b_lost, &losses, ENDS_WAIT_MS));
                td_xfer_peer_close(b.peer);
                assert_true(ends_run(both, 2, b_gone, NULL, ENDS_WAIT_MS));
            }
            continue;
        }
        pattern_fill(out, sizeof out, i);
        assert_int_equal(td_xfer_send(a.peer, out, sizeof out, UINT64_MAX), TD_OK);
        assert_true(ends_run(both, 2, answered, &answers, ENDS_WAIT_MS));
        assert_memory_equal(a.last, out, sizeof out);
        td_xfer_peer_close(a.peer);
        assert_true(ends_run(both, 2, b_lost, &losses, ENDS_WAIT_MS));
        td_xfer_peer_close(b.peer);
        assert_true(ends_run(both, 2, b_gone, NULL, ENDS_WAIT_MS));
    }
    assert_true(ends_run(both, 2, a_gone, NULL, ENDS_WAIT_MS));
    struct td_xfer_counts c;
    td_xfer_counts(b.x, &c);
    assert_int_equal(c.peers + c.requests, 0);
    assert_int_equal(c.malformed_dropped, 0);
}

static size_t resident(void) { /* bytes */
    FILE *f = fopen("/proc/self/statm", "r");
    size_t pages = 0;
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %zu", &pages), 1);
    fclose(f);
    return pages * 4096;
}

/* Room for 400 messages is 26 MB a link; what is not written is not resident, for a later
 * link as for the first. */
static void test_only_what_is_written_is_resident(void **state) {
    (void)state;
    size_t len, before = 0;
    end_open(&a, 4, 400);
    end_open(&b, 4, 8);
    const void *address = td_xfer_address(b.x, &len);
    for (unsigned i = 1; i <= 3; i++) {
        unsigned losses = b.lost + 1;
        end_connect(&a, address, len);
        assert_true(ends_run(both, 2, linked_again, &i, ENDS_WAIT_MS));
        if (i == 1) before = resident();
        assert_in_range(resident(), 0, before + (8u << 20));
        td_xfer_peer_close(a.peer);
        assert_true(ends_run(both, 2, b_lost, &losses, ENDS_WAIT_MS));
        td_xfer_peer_close(b.peer);
        assert_true(ends_run(both, 2, b_gone, NULL, ENDS_WAIT_MS));
        assert_true(ends_run(both, 2, a_gone, NULL, ENDS_WAIT_MS));
    }
    close_both(NULL);
}

static bool four_accepted(void *user) {
    (void)user;
    return b.accepted == 4;
}

static bool refused_twice(void *user) {
    return ((struct end *)user)->lost == 2;
}

static void test_a_full_house_says_no(void **state) {
    (void)state;
    /* c and a together open six links to b, which takes four. */
    struct end c;
    end_open(&c, 8, 2);
    struct end *three[] = {&a, &b, &c};
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    for (int i = 0; i < 3; i++)
        end_connect(&a, address, len);
    struct td_xfer_peer *peer;
    struct td_error err;
    assert_int_equal(td_xfer_connect(a.x, address, len, &peer, &err), TD_BUSY);
    assert_true(ends_run(three, 3, four_accepted, NULL, ENDS_WAIT_MS));
    end_connect(&c, address, len);
    end_connect(&c, address, len);
    assert_true(ends_run(three, 3, refused_twice, &c, ENDS_WAIT_MS));
    assert_int_equal(b.accepted, 4);
    assert_int_equal(c.lost, 2);
    assert_int_equal(c.why, TD_PEER_LOST);
    assert_int_equal(b.closed, 0);
    end_close(&c);
}

/* Without callbacks, but nothing of UCX's may still be looking at the caller's memory. */
static void test_destroy_leaves_all_quiet(void **state) {
    (void)state;
    struct end c;
    end_open(&c, 0, 0);
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    end_connect(&c, address, len);
    static struct want flush[2];
    want_init(&flush[0], UINT64_MAX);
    want_init(&flush[1], 1);
    for (int i = 0; i < 2; i++)
        assert_int_equal(td_xfer_flush(c.peer, &flush[i].req), TD_OK);
    for (int i = 0; i < 20; i++)
        assert_int_equal(td_xfer_send(c.peer, c.last, i == 19 ? 9000 : 60000, UINT64_MAX),
                         i < 16 ? TD_OK : TD_BUSY);
    (void)td_xfer_expire(c.x, 2);
    assert_int_equal(flush[1].done + flush[1].quiet, flush[1].req.quiet ? 0 : 1);
    end_close(&c);
    assert_true(flush[0].req.quiet && flush[1].req.quiet);
    assert_int_equal(flush[0].done + flush[0].quiet + flush[1].quiet, 0);
}

static void test_too_large_a_region_is_a_sentence(void **state) {
    (void)state;
    struct td_xfer_region *region;
    struct td_error err;
    assert_int_equal(td_xfer_region_alloc(a.x, (size_t)1 << 46, &region, &err), TD_NO_MEMORY);
    print_message("%s\n", err.text);
    assert_non_null(strstr(err.text, ends_tcp() ? "region of" : "/dev/shm"));
}

static void test_start_needs_its_settings(void **state) {
    (void)state;
    struct td_xfer *x;
    struct td_error err;
    struct end e;
    end_open(&e, 0, 0);
    struct td_xfer_options o = {0};
    assert_int_equal(td_xfer_create(&o, &x, &err), TD_INVALID);
    end_close(&e);
    setenv("UCX_TLS", "posix,tcp", 1);
    bool refused = false;
    /* All four callbacks as end_open sets them, by hand: create must refuse, not end_open. */
    o = (struct td_xfer_options){.on_accept = (void *)abort,
                                 .on_message = (void *)abort,
                                 .on_lost = (void *)abort,
                                 .on_closed = (void *)abort};
    refused = td_xfer_create(&o, &x, &err) == TD_CONFIG;
    assert_int_equal(td_xfer_env(ends_tcp() ? TD_XFER_TCP : TD_XFER_SHM, "lo", &err), TD_OK);
    assert_true(refused);
    struct td_cluster_key *key = NULL;
    if (ends_tcp()) {
        assert_int_equal(td_xfer_create(&o, &x, &err), TD_CONFIG);
        assert_non_null(strstr(err.text, "cluster_key_file"));
        assert_int_equal(td_cluster_key_make(err.text, 40, &key, &err), TD_OK);
    }
    o.key = key;
    assert_int_equal(td_xfer_create(&o, &x, &err), TD_OK);
    td_xfer_destroy(x);
    td_cluster_key_free(key);
    td_xfer_destroy(NULL);
}

int main(int argc, char **argv) {
    (void)ends_lane(argc, argv);
#define PAIR(f) cmocka_unit_test_setup_teardown(f, open_both, close_both)
    const struct CMUnitTest tests[] = {
        PAIR(test_lanes_are_the_chosen_ones),
        PAIR(test_messages_of_every_kind_of_length),
        PAIR(test_many_messages_keep_order_and_push_back),
        PAIR(test_backlog_is_bounded_and_expires),
        PAIR(test_puts_land_where_they_should),
        PAIR(test_damaged_bytes_are_refused),
        PAIR(test_another_lane),
        PAIR(test_close_tells_the_other_side),
        PAIR(test_links_come_and_go),
        cmocka_unit_test(test_only_what_is_written_is_resident),
        PAIR(test_a_full_house_says_no),
        PAIR(test_destroy_leaves_all_quiet),
        PAIR(test_too_large_a_region_is_a_sentence),
        cmocka_unit_test(test_start_needs_its_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

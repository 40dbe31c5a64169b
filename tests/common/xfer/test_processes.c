/* Two real processes: slabs with flush and message, and the ways a receiver goes away: killed in
 * the middle of a transfer, killed while nothing moves, stopped, and started again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <poll.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"
#include "tests/common/xfer/ends.h"

enum { SLAB = 8 << 20, PIECE = 1 << 20 };

static struct end a;
static struct end *ends[] = {&a};
static struct receiver r;
static struct td_xfer_remote *remote;
static uint8_t *slab;
static unsigned mapped_before; /* by a td_xfer without peers */

/* Mappings of peers' segments in this process. */
static unsigned mappings(void) {
    FILE *f = fopen("/proc/self/maps", "re");
    assert_non_null(f);
    char line[512];
    unsigned n = 0;
    while (fgets(line, sizeof line, f))
        if (strstr(line, "ucx_shm_posix")) n++;
    fclose(f);
    return n;
}

/* Names in /dev/shm: those there are, or how many of the given ones there still are. */
enum { NAMES_MAX = 256 };
struct names {
    unsigned n;
    char name[NAMES_MAX][64];
};
static struct names names_before; /* what others left */

static bool among(const struct names *s, const char *name) {
    for (unsigned i = 0; i < s->n; i++)
        if (strcmp(s->name[i], name) == 0) return true;
    return false;
}

static void names_now(struct names *ret) {
    DIR *d = opendir("/dev/shm");
    assert_non_null(d);
    ret->n = 0;
    struct dirent *e;
    while ((e = readdir(d)) && ret->n < NAMES_MAX)
        if (strncmp(e->d_name, "ucx_shm", 7) == 0)
            snprintf(ret->name[ret->n++], sizeof ret->name[0], "%.63s", e->d_name);
    closedir(d);
}

/* Of those there are now and were not before us. A process that starts beside us has some for a
 * moment; what is left behind stays. */
static unsigned names_left(void) {
    uint64_t stop = td_now_ns() + ENDS_WAIT_MS * 1000000ull;
    static struct names first, now;
    names_now(&first);
    for (;;) {
        unsigned n = 0;
        names_now(&now);
        for (unsigned i = 0; i < first.n; i++)
            n += among(&now, first.name[i]) && !among(&names_before, first.name[i]);
        if (n == 0 || td_now_ns() >= stop) return n;
        (void)poll(NULL, 0, 10);
    }
}

static struct td_xfer_remote *open_remote(void) {
    struct td_error err;
    struct td_xfer_remote *ret = NULL;
    td_status st = td_xfer_remote_open(a.peer, r.key, r.key_len, &ret, &err);
    if (st != TD_OK) print_message("%s\n", err.text);
    assert_int_equal(st, TD_OK);
    return ret;
}

static int setup(void **state) {
    (void)state;
    slab = malloc(SLAB);
    names_now(&names_before);
    end_open(&a, 0, 0);
    mapped_before = mappings();
    receiver_start(&r);
    end_connect(&a, r.address, r.address_len);
    remote = open_remote();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    end_close(&a);
    receiver_stop(&r);
    free(slab);
    return 0;
}

static bool answered(void *user) {
    return a.messages == *(unsigned *)user;
}
static bool lost(void *user) {
    (void)user;
    return a.lost > 0;
}
static bool closed(void *user) {
    (void)user;
    return a.closed > 0;
}
static bool spoken_to(void *user) {
    return ((struct end *)user)->messages >= 1;
}
static bool answered_twice(void *user) {
    return ((struct end *)user)->messages >= 2;
}
static bool end_lost(void *user) {
    return ((struct end *)user)->lost > 0;
}
static bool end_closed(void *user) {
    return ((struct end *)user)->closed > 0;
}
static bool never(void *user) {
    (void)user;
    return false;
}

static struct order ask(struct order o) {
    unsigned want = a.messages + 1;
    assert_int_equal(td_xfer_send(a.peer, &o, sizeof o, UINT64_MAX), TD_OK);
    assert_true(ends_run(ends, 1, answered, &want, ENDS_WAIT_MS));
    assert_int_equal(a.last_len, sizeof o);
    memcpy(&o, a.last, sizeof o);
    return o;
}

static void send_slab(uint64_t seed, uint64_t offset) {
    static struct want put, flush;
    pattern_fill(slab, SLAB, seed);
    want_init(&put, UINT64_MAX);
    want_init(&flush, UINT64_MAX);
    assert_int_equal(td_xfer_put(a.peer, remote, offset, slab, SLAB, &put.req), TD_OK);
    assert_int_equal(td_xfer_flush(a.peer, &flush.req), TD_OK);
    assert_true(ends_run(ends, 1, want_is_quiet, &flush, ENDS_WAIT_MS));
    assert_int_equal(put.done, 1);
    assert_int_equal(put.status, TD_OK);
    assert_int_equal(flush.status, TD_OK);
    struct order o =
        ask((struct order){.op = OP_VERIFY, .offset = offset, .len = SLAB, .seed = seed});
    assert_int_equal(o.op, OP_OK);
    assert_int_equal(o.epoch, r.epoch);
}

static void test_slabs_arrive_whole(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 6; i++)
        send_slab(100 + i, i % 2 ? SLAB : 0);
    /* The check can fail: the slab is not what another seed would give. */
    struct order o = ask((struct order){.op = OP_VERIFY, .offset = 0, .len = SLAB, .seed = 1});
    assert_int_equal(o.op, OP_BAD);
}

static void close_and_check(void) {
    td_xfer_peer_close(a.peer);
    uint64_t t = td_now_ns();
    assert_true(ends_run(ends, 1, closed, NULL, ENDS_WAIT_MS));
    print_message("closed after %.1f ms\n", (double)(td_now_ns() - t) / 1e6);
    struct td_xfer_counts c;
    td_xfer_counts(a.x, &c);
    assert_int_equal(c.peers + c.requests + c.quarantined, 0);
    assert_int_equal(mappings(), mapped_before);
    /* Nothing is left that keeps the loop busy, behind what UCX was still waking for. */
    uint64_t stop = td_now_ns() + ENDS_WAIT_MS * 1000000ull;
    do {
        a.polls = 0;
        (void)ends_run(ends, 1, never, NULL, 60);
    } while (a.polls > 0 && td_now_ns() < stop);
    assert_int_equal(a.polls, 0);
    assert_int_equal(td_xfer_arm(a.x), TD_XFER_SLEEP);
}

/* Both loops sleep up to 20 ms when the descriptor stays silent, and then find what had come: every
 * time, if it never spoke. That it comes just when the sleep ends is chance. */
static void test_descriptor_wakes(void **state) {
    (void)state;
    struct order o = ask((struct order){.op = OP_HELLO});
    uint64_t before = o.seed + a.missed, t = td_now_ns();
    for (int i = 0; i < 100; i++)
        o = ask((struct order){.op = OP_HELLO});
    uint64_t missed = o.seed + a.missed - before;
    print_message("round trip with both sides asleep: %.0f us; %llu of 200 slept through\n",
                  (double)(td_now_ns() - t) / 100e3, (unsigned long long)missed);
    assert_in_range(missed, 0, 50);
}

static void test_killed_in_the_middle(void **state) {
    (void)state;
    send_slab(1, 0);
    enum { PUTS = 64 };
    static struct want puts[PUTS], flush;
    for (unsigned i = 0; i < PUTS; i++) {
        want_init(&puts[i], UINT64_MAX);
        /* No wait for it to die: some puts meet it alive, some dying, some dead. */
        if (i == PUTS / 4) kill(r.pid, SIGKILL);
        td_status st = td_xfer_put(a.peer, remote, (i % 16) * PIECE, slab, PIECE, &puts[i].req);
        if (ends_tcp() && st == TD_PEER_LOST) /* noticed already */
            puts[i].done = puts[i].quiet = 1;
        else
            assert_int_equal(st, TD_OK);
        (void)td_xfer_progress(a.x);
    }
    want_init(&flush, UINT64_MAX);
    if (td_xfer_flush(a.peer, &flush.req) != TD_OK) flush.done = flush.quiet = 1;
    uint64_t t = td_now_ns();
    receiver_stop(&r); /* reaps: until then its id still stands for it */
    assert_true(ends_run(ends, 1, lost, NULL, ENDS_WAIT_MS));
    print_message("death noticed after %.0f ms: %s\n", (double)(td_now_ns() - t) / 1e6, a.sentence);
    assert_int_equal(a.why, TD_PEER_LOST);
    for (unsigned i = 0; i < PUTS; i++) {
        assert_int_equal(puts[i].done, 1);
        assert_int_equal(puts[i].quiet, 1);
    }
    assert_int_equal(flush.done, 1);
    assert_int_equal(td_xfer_put(a.peer, remote, 0, slab, PIECE, &puts[0].req), TD_PEER_LOST);
    close_and_check();
    assert_int_equal(names_left(), 0);
}

static void test_killed_while_idle(void **state) {
    (void)state;
    (void)ask((struct order){.op = OP_HELLO});
    if (ends_tcp())
        assert_int_equal(mappings(), 0);
    else
        assert_in_range(mappings(), mapped_before + 2, mapped_before + 8);
    receiver_stop(&r);
    /* Nothing is sent: only the descriptor can wake the loop. */
    assert_true(ends_run(ends, 1, lost, NULL, ENDS_WAIT_MS));
    /* Its region and its FIFO are no longer held here; they would keep its memory alive. */
    close_and_check();
    assert_int_equal(names_left(), 0);
}

static void test_closed_while_dead_and_unnoticed(void **state) {
    (void)state;
    (void)ask((struct order){.op = OP_HELLO});
    kill(r.pid, SIGKILL);
    struct order o = {.op = OP_HELLO};
    /* As many as it takes, to a FIFO nobody will ever empty. */
    unsigned n = 0;
    while (td_xfer_send(a.peer, &o, sizeof o, UINT64_MAX) == TD_OK)
        n++;
    static struct want put;
    want_init(&put, UINT64_MAX);
    td_status st = td_xfer_put(a.peer, remote, 0, slab, PIECE, &put.req);
    if (ends_tcp() && st == TD_PEER_LOST) /* a reset connection may have said so already */
        put.quiet = n = 16;
    else
        assert_int_equal(st, TD_OK);
    close_and_check();
    assert_int_equal(put.quiet > 0, 1);
    assert_true(n >= 16);
    struct td_error err;
    struct td_xfer_peer *peer;
    receiver_stop(&r);
    if (ends_tcp()) { /* found out by connecting */
        a.lost = 0;
        end_connect(&a, r.address, r.address_len);
        assert_true(ends_run(ends, 1, lost, NULL, ENDS_WAIT_MS));
        assert_int_equal(a.why, TD_PEER_LOST);
        a.closed = 0;
        close_and_check();
        return;
    }
    assert_int_equal(td_xfer_connect(a.x, r.address, r.address_len, &peer, &err), TD_UNREACHABLE);
    print_message("%s\n", err.text);
}

static void test_stopped_receiver(void **state) {
    (void)state;
    (void)ask((struct order){.op = OP_HELLO});
    kill(r.pid, SIGSTOP);
    struct order o = {.op = OP_HELLO};
    uint64_t soon = td_now_ns() + 50000000u;
    while (td_xfer_send(a.peer, &o, sizeof o, soon) == TD_OK) {
    }
    assert_false(ends_run(ends, 1, lost, NULL, 100));
    (void)td_xfer_expire(a.x, td_now_ns());
    assert_int_equal(a.lost, 1);
    assert_int_equal(a.why, TD_TIMEOUT);
    td_xfer_remote_close(remote);
    close_and_check();

    /* A link begun with a stopped process: nothing ends by itself, everything has a deadline. */
    end_connect(&a, r.address, r.address_len);
    remote = open_remote();
    static struct want put, flush;
    soon = td_now_ns() + 50000000u;
    want_init(&put, soon);
    want_init(&flush, soon);
    assert_int_equal(td_xfer_put(a.peer, remote, 0, slab, PIECE, &put.req), TD_OK);
    assert_int_equal(td_xfer_flush(a.peer, &flush.req), TD_OK);
    (void)ends_run(ends, 1, never, NULL, 80);
    bool put_waits = put.done == 0;
    for (int i = 0; i < 3; i++)
        (void)td_xfer_expire(a.x, td_now_ns());
    assert_int_equal(put.done, 1);
    assert_int_equal(flush.done, 1);
    print_message(
        "put waits for the link: %s; after its deadline %s, quiet %u; flush %s, quiet %u\n",
        put_waits ? "yes" : "no", td_status_name(put.status), put.quiet,
        td_status_name(flush.status), flush.quiet);
    if (put_waits) {
        assert_int_equal(put.status, TD_TIMEOUT);
        assert_false(put.req.quiet);
        struct td_xfer_counts c;
        td_xfer_counts(a.x, &c);
        assert_in_range(c.quarantined, 1, 2);
    }
    a.closed = 0;
    close_and_check();
    assert_int_equal(put.done, 1);
    assert_int_equal(put.quiet, 1);
    assert_int_equal(flush.quiet, 1);

    /* Awake again it finds the leavings of two dead links, and serves a third. */
    kill(r.pid, SIGCONT);
    end_connect(&a, r.address, r.address_len);
    remote = open_remote();
    send_slab(9, SLAB);
}

/* Links that came and went while the receiver was stopped do not spoil later ones: those live past
 * UCX's keep-alive, which ends what is joined with a dead endpoint. */
static void test_links_while_stopped(void **state) {
    (void)state;
    enum { LINKS = 3, KEEP_ALIVES_MS = 2500 };
    (void)ask((struct order){.op = OP_HELLO});
    td_xfer_remote_close(remote);
    close_and_check();
    kill(r.pid, SIGSTOP);
    for (int i = 0; i < LINKS; i++) {
        end_connect(&a, r.address, r.address_len);
        a.closed = 0;
        close_and_check();
    }
    kill(r.pid, SIGCONT);
    end_connect(&a, r.address, r.address_len);
    remote = open_remote();
    (void)ask((struct order){.op = OP_HELLO});
    a.lost = 0;
    assert_false(ends_run(ends, 1, lost, NULL, KEEP_ALIVES_MS));
    send_slab(11, 0);
}

static void test_restarted_receiver(void **state) {
    (void)state;
    send_slab(2, 0);
    struct receiver before = r;
    receiver_stop(&r);
    receiver_start(&r);
    assert_true(before.epoch != r.epoch);
    assert_true(ends_run(ends, 1, lost, NULL, ENDS_WAIT_MS));
    struct td_xfer_peer *old = a.peer;
    /* The new one is used before the old one is gone. */
    end_connect(&a, r.address, r.address_len);
    struct td_xfer_remote *stale;
    struct td_error err;
    td_status st = td_xfer_remote_open(a.peer, before.key, before.key_len, &stale, &err);
    if (ends_tcp()) { /* a number the new process does not know: it ends the link, see below */
        assert_int_equal(st, TD_OK);
        td_xfer_remote_close(stale);
    } else {
        assert_int_equal(st, TD_UNREACHABLE);
        print_message("%s\n", err.text);
    }
    remote = open_remote();
    send_slab(3, SLAB);
    td_xfer_peer_close(old);
    assert_true(ends_run(ends, 1, closed, NULL, ENDS_WAIT_MS));
    send_slab(4, 0);
}

/* The side that was connected to learns of a death as well, and can answer until then. */
static void test_killed_sender(void **state) {
    (void)state;
    static struct end b;
    static struct end *accepting[] = {&b};
    static struct receiver sender;
    end_open(&b, 0, 0);
    unsigned mapped = mappings();
    for (unsigned i = 1; i <= 2; i++) {
        size_t len;
        const void *address = td_xfer_address(b.x, &len);
        b.lost = b.closed = b.messages = 0;
        sender_start(&sender, address, len);
        assert_true(ends_run(accepting, 1, spoken_to, &b, ENDS_WAIT_MS));
        assert_int_equal(b.accepted, i);
        struct order o;
        assert_int_equal(b.last_len, sizeof o);
        memcpy(&o, b.last, sizeof o);
        assert_int_equal(o.epoch, sender.epoch);
        o.op = OP_HELLO;
        assert_int_equal(td_xfer_send(b.peer, &o, sizeof o, UINT64_MAX), TD_OK);
        assert_true(ends_run(accepting, 1, answered_twice, &b, ENDS_WAIT_MS));
        receiver_stop(&sender);
        assert_true(ends_run(accepting, 1, end_lost, &b, ENDS_WAIT_MS));
        assert_int_equal(b.why, TD_PEER_LOST);
        td_xfer_peer_close(b.peer);
        assert_true(ends_run(accepting, 1, end_closed, &b, ENDS_WAIT_MS));
        assert_int_equal(mappings(), mapped);
    }
    end_close(&b);
}

/* A prefill worker outlives many decode workers: nothing of them may pile up here. */
static void test_many_restarts_leave_nothing(void **state) {
    (void)state;
    unsigned mapped = 0, opened = 0;
    for (unsigned i = 0; i < 12; i++) {
        send_slab(i, 0);
        kill(r.pid, i % 2 ? SIGKILL : SIGSTOP);
        static struct want put;
        want_init(&put, UINT64_MAX);
        assert_int_equal(td_xfer_put(a.peer, remote, 0, slab, SLAB, &put.req), TD_OK);
        td_xfer_peer_close(a.peer);
        a.closed = 0;
        assert_true(ends_run(ends, 1, closed, NULL, ENDS_WAIT_MS));
        assert_int_equal(put.quiet, 1);
        receiver_stop(&r);
        if (i == 1) {
            mapped = mappings();
            opened = descriptors();
        }
        receiver_start(&r);
        end_connect(&a, r.address, r.address_len);
        remote = open_remote();
    }
    td_xfer_peer_close(a.peer);
    a.closed = 0;
    assert_true(ends_run(ends, 1, closed, NULL, ENDS_WAIT_MS));
    assert_int_equal(mappings(), mapped);
    assert_in_range(descriptors(), 1, opened);
    assert_int_equal(names_left(), 0);
}

/* Takes the sender's own check out of the way. */
static void remote_lie(struct td_xfer_remote *to) {
    to->bytes = UINT64_MAX;
}

/* tcp: whatever a peer says, nothing is written outside of what it was granted. The receiver closes
 * the link at once; its successor finds the region as it was. */
static void test_outside_of_the_grant(void **state) {
    (void)state;
    if (!ends_tcp()) skip(); /* who has the key may write anywhere in the region */
    enum { HALF = RECEIVER_REGION / 2 };
    static struct end b;
    static struct end *two[] = {&a, &b};
    static struct want put;
    struct td_xfer_region *region;
    struct td_error err;
    char before[4096];
    size_t len;
    end_open(&b, 0, 0);
    assert_int_equal(td_xfer_region_alloc(b.x, RECEIVER_REGION, &region, &err), TD_OK);
    uint8_t *base = td_xfer_region_base(region);
    static const struct {
        uint64_t offset, bytes;
        bool granted, other_region;
    } cases[] = {
        {HALF, 4096, true, false},
        {HALF - 1, 4096, true, false},
        {0, 4096, true, false},
        {2 * HALF - 4096, 4097, true, false},
        {3 * HALF / 2, HALF, true, false},
        {HALF, 4096, false, false},
        {HALF, 4096, true, true},
        {UINT64_MAX - 4096, 4096, true, false},
    };
    memset(before, 0x33, sizeof before);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        a.lost = a.closed = b.lost = b.messages = b.accepted = 0;
        const void *address = td_xfer_address(b.x, &len);
        end_connect(&a, address, len);
        struct td_xfer_remote *to;
        assert_int_equal(td_xfer_send(a.peer, "x", 1, UINT64_MAX), TD_OK);
        assert_true(ends_run(two, 2, spoken_to, &b, ENDS_WAIT_MS));
        if (cases[i].granted) td_xfer_grant(b.peer, region, HALF, HALF);
        const void *key = td_xfer_region_key(region, &len);
        if (cases[i].other_region) key = r.key;
        assert_int_equal(td_xfer_remote_open(a.peer, key, len, &to, &err), TD_OK);
        remote_lie(to);
        memset(base, 0x33, RECEIVER_REGION);
        want_init(&put, UINT64_MAX);
        assert_int_equal(td_xfer_put(a.peer, to, cases[i].offset, slab, cases[i].bytes, &put.req),
                         TD_OK);
        if (i == 0) {
            static struct want flush;
            want_init(&flush, UINT64_MAX);
            assert_int_equal(td_xfer_flush(a.peer, &flush.req), TD_OK);
            assert_true(ends_run(two, 2, want_is_quiet, &flush, ENDS_WAIT_MS));
            assert_memory_equal(base + HALF, slab, 4096);
            assert_int_equal(base[HALF - 1] + base[HALF + 4096], 2 * 0x33);
            td_xfer_peer_close(a.peer);
        }
        assert_true(ends_run(two, 2, end_lost, &b, ENDS_WAIT_MS));
        assert_int_equal(b.why, i == 0 ? TD_PEER_LOST : TD_PROTOCOL);
        if (i > 0 && cases[i].offset < HALF)
            assert_memory_equal(base + cases[i].offset, before, 4096);
        td_xfer_peer_close(b.peer);
        if (a.peer) td_xfer_peer_close(a.peer);
        assert_true(ends_run(two, 2, end_closed, &b, ENDS_WAIT_MS));
        assert_true(ends_run(two, 2, end_closed, &a, ENDS_WAIT_MS));
    }
    td_xfer_region_free(region);
    end_close(&b);
}

int main(int argc, char **argv) {
    int used = ends_lane(argc, argv);
    if (argc > used + 1 && strcmp(argv[used + 1], "receiver") == 0) return receiver_main();
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(test_slabs_arrive_whole),
        CASE(test_descriptor_wakes),
        CASE(test_killed_in_the_middle),
        CASE(test_killed_while_idle),
        CASE(test_closed_while_dead_and_unnoticed),
        CASE(test_stopped_receiver),
        CASE(test_links_while_stopped),
        CASE(test_killed_sender),
        CASE(test_restarted_receiver),
        CASE(test_many_restarts_leave_nothing),
        CASE(test_outside_of_the_grant),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The tcp lane and those who do not belong: another cluster key, no answers, forged tokens, bytes
 * of no protocol at UCX's ports, callers from outside the subnet. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"
#include "tests/common/xfer/ends.h"

static struct end a, b;
static struct end *both[] = {&a, &b};
static uint64_t later;

static int setup(void **state) {
    (void)state;
    ends_key("");
    end_open(&b, 16, 8);
    later = td_now_ns() + 2 * (uint64_t)TD_XFER_PROVE_MS * 1000000u;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    if (a.x) end_close(&a);
    end_close(&b);
    return 0;
}

static void call(void) {
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    end_connect(&a, address, len);
}

static bool a_lost(void *user) {
    (void)user;
    return a.lost > 0;
}
static bool stranger_seen(void *user) {
    (void)user;
    return b.strangers > 0;
}
static bool b_heard(void *user) {
    return b.messages == *(unsigned *)user;
}
static bool b_alone(void *user) {
    (void)user;
    struct td_xfer_counts n;
    td_xfer_counts(b.x, &n);
    return n.peers == 0;
}
static bool b_lost(void *user) {
    (void)user;
    return b.lost > 0;
}
static bool b_closed(void *user) {
    (void)user;
    return b.closed > 0;
}
static bool two_dropped(void *user) {
    (void)user;
    struct td_xfer_counts n;
    td_xfer_counts(b.x, &n);
    return n.malformed_dropped >= 2;
}
static bool never(void *user) {
    (void)user;
    return false;
}

static unsigned in_the_challenge(void) {
    unsigned n = 0;
    TD_LIST_EACH (&b.x->peers, it) {
        const struct td_xfer_peer *p = TD_CONTAINER(it, struct td_xfer_peer, link);
        n += p->called && !p->proven && p->state == TD_XFER_OPEN;
    }
    return n;
}

static void expect_honest_link(void) {
    struct end c;
    struct end *two[] = {&c, &b};
    unsigned heard = b.messages + 1;
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    ends_key("");
    end_open(&c, 4, 8);
    end_connect(&c, address, len);
    assert_int_equal(td_xfer_send(c.peer, "hello", 5, UINT64_MAX), TD_OK);
    assert_true(ends_run(two, 2, b_heard, &heard, ENDS_WAIT_MS));
    end_close(&c);
}

static void test_another_key(void **state) {
    (void)state;
    ends_key("not the cluster key of all the tests");
    end_open(&a, 16, 8);
    call();
    assert_int_equal(td_xfer_send(a.peer, "secret", 6, UINT64_MAX), TD_OK);
    assert_true(ends_run(both, 2, stranger_seen, NULL, ENDS_WAIT_MS));
    assert_non_null(strstr(b.sentence, "greeted us"));
    assert_true(ends_run(both, 2, a_lost, NULL, ENDS_WAIT_MS));
    assert_non_null(strstr(a.sentence, "cluster key"));
    assert_int_equal(b.accepted + b.messages, 0);
    expect_honest_link();
}

/* They know how to greet (somebody who listened could repeat it), but never answer. */
static void test_callers_who_do_not_answer(void **state) {
    (void)state;
    enum { MORE = TD_XFER_UNPROVEN_MAX + 4 };
    end_open(&a, 16, 8);
    for (int i = 0; i < MORE; i++)
        call();
    /* Until their greetings have left; what comes back is never read. */
    struct td_xfer_counts n;
    uint64_t stop = td_now_ns() + ENDS_WAIT_MS * 1000000ull;
    struct td_xfer_peer *held = NULL;
    do {
        td_xfer_counts(b.x, &n);
        TD_LIST_EACH (&b.x->peers, it) {
            struct td_xfer_peer *p = TD_CONTAINER(it, struct td_xfer_peer, link);
            if (p->id && !p->proven) held = p;
        }
        if (!held) (void)td_xfer_progress(a.x);
        (void)td_xfer_progress(b.x);
    } while (!held && td_now_ns() < stop);
    assert_non_null(held);
    for (int i = 0; i < 200; i++)
        (void)td_xfer_progress(b.x);
    td_xfer_counts(b.x, &n);
    assert_in_range(in_the_challenge(), 1, TD_XFER_UNPROVEN_MAX);
    assert_int_equal(b.accepted, 0);
    /* They keep nobody out who knows the key, and take no link's place. */
    expect_honest_link();
    assert_in_range(in_the_challenge(), 1, TD_XFER_UNPROVEN_MAX);
    assert_false(td_xfer_peers_full(b.x));
    struct end *one[] = {&b};
    assert_true(ends_run(one, 1, b_lost, NULL, ENDS_WAIT_MS));
    td_xfer_peer_close(b.peer);
    assert_true(ends_run(one, 1, b_closed, NULL, ENDS_WAIT_MS));
    b.accepted = b.lost = b.closed = 0;
    /* Nothing but the challenge is taken from them, and there is an end to it. */
    assert_int_equal(td_xfer_expire(b.x, td_now_ns()) < later, true);
    (void)td_xfer_expire(b.x, later);
    assert_true(b.strangers > 0);
    assert_true(ends_run(one, 1, b_alone, NULL, ENDS_WAIT_MS));
    assert_int_equal(b.accepted + b.lost + b.closed, 0); /* the upper layer never heard of them */
    (void)td_xfer_expire(a.x, later);
    end_close(&a);
    a.x = NULL;
    expect_honest_link();
}

/* A proven link whose heads carry another token: neither message nor piece counts. */
static void test_forged_tokens(void **state) {
    (void)state;
    static char slab[4096];
    static struct want put;
    struct td_xfer_region *region;
    struct td_xfer_remote *to;
    struct td_error err;
    struct td_xfer_counts n;
    unsigned one = 1;
    size_t len;
    end_open(&a, 16, 8);
    call();
    assert_int_equal(td_xfer_send(a.peer, "hello", 5, UINT64_MAX), TD_OK);
    assert_true(ends_run(both, 2, b_heard, &one, ENDS_WAIT_MS));
    assert_int_equal(td_xfer_region_alloc(b.x, sizeof slab, &region, &err), TD_OK);
    td_xfer_grant(b.peer, region, 0, sizeof slab);
    const void *key = td_xfer_region_key(region, &len);
    assert_int_equal(td_xfer_remote_open(a.peer, key, len, &to, &err), TD_OK);
    memset(slab, 0x77, sizeof slab);
    a.peer->token_out[TD_TOKEN_BYTES - 1] ^= 1;
    want_init(&put, UINT64_MAX);
    assert_int_equal(td_xfer_put(a.peer, to, 0, slab, sizeof slab, &put.req), TD_OK);
    assert_int_equal(td_xfer_send(a.peer, "forged", 6, UINT64_MAX), TD_OK);
    assert_true(ends_run(both, 2, two_dropped, NULL, ENDS_WAIT_MS));
    (void)ends_run(both, 2, never, NULL, 100);
    td_xfer_counts(b.x, &n);
    assert_int_equal(b.messages, 1);
    assert_in_range(n.malformed_dropped, 2, 4);
    assert_int_equal(((char *)td_xfer_region_base(region))[0], 0);
    assert_int_equal(b.lost, 0); /* nobody can end another's link either */
    td_xfer_region_free(region);
}

/* ---- bytes at the ports ---- */

static int own_ports(uint16_t ports[8]) {
    struct td_xfer_ports all;
    int n = 0;
    td_xfer_fence_look(&all);
    for (int i = 0; i < all.n && n < 8; i++) {
        struct sockaddr_in sa;
        socklen_t len = sizeof sa;
        assert_int_equal(getsockname(all.fd[i], (struct sockaddr *)&sa, &len), 0);
        ports[n++] = sa.sin_port;
    }
    return n;
}

static int dial(uint16_t port, uint32_t from) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = port}, src = to;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    src.sin_port = 0;
    src.sin_addr.s_addr = from;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&src, sizeof src), 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0 && errno != EINPROGRESS) {
        close(fd);
        return -1;
    }
    return fd;
}

static bool connected(int fd, int ms) {
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int error = 0;
    socklen_t len = sizeof error;
    return poll(&p, 1, ms) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0 &&
           error == 0;
}

static void test_garbage(void **state) {
    (void)state;
    uint16_t ports[8];
    int n = own_ports(ports);
    unsigned seed = 4711;
    assert_in_range(n, 2, 8); /* its listener and its transport's */
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < 8; k++) {
            char bytes[3000];
            for (size_t j = 0; j < sizeof bytes; j++)
                bytes[j] = (char)rand_r(&seed);
            int fd = dial(ports[i], htonl(INADDR_LOOPBACK));
            assert_true(fd >= 0 && connected(fd, ENDS_WAIT_MS));
            size_t len = k == 0 ? 0 : k == 1 ? 1 : k == 2 ? 7 : sizeof bytes >> (k - 3);
            if (len) assert_int_equal(write(fd, bytes, len), len);
            struct end *one[] = {&b};
            (void)ends_run(one, 1, never, NULL, 20);
            close(fd);
        }
    }
    assert_int_equal(b.accepted + b.messages, 0);
    expect_honest_link();
}

/* An address of ours outside 127.0.0.0/8: the kernel drops what comes from it. */
static void test_outside_of_the_subnet(void **state) {
    (void)state;
    uint16_t ports[8];
    int n = own_ports(ports);
    struct ifaddrs *list;
    uint32_t other = 0;
    assert_int_equal(getifaddrs(&list), 0);
    for (struct ifaddrs *i = list; i; i = i->ifa_next)
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && !(i->ifa_flags & IFF_LOOPBACK))
            other = ((struct sockaddr_in *)(void *)i->ifa_addr)->sin_addr.s_addr;
    freeifaddrs(list);
    if (!other) {
        print_message("no other interface\n");
        skip();
    }
    for (int i = 0; i < n; i++) {
        int fd = dial(ports[i], other);
        if (fd >= 0 && connected(fd, 300)) fail_msg("port %u answers", ntohs(ports[i]));
        if (fd >= 0) close(fd);
        fd = dial(ports[i], htonl(INADDR_LOOPBACK + 5)); /* 127.0.0.6: inside */
        assert_true(fd >= 0 && connected(fd, ENDS_WAIT_MS));
        close(fd);
    }
}

int main(int argc, char **argv) {
    (void)ends_lane(argc, argv);
    if (!ends_tcp()) {
        fprintf(stderr, "usage: test_strangers tcp\n");
        return 2;
    }
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(test_another_key), CASE(test_callers_who_do_not_answer), CASE(test_forged_tokens),
        CASE(test_garbage),     CASE(test_outside_of_the_subnet),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

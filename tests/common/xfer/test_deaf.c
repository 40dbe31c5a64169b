/* A sender that ends, or stops for good, exactly between taking a place in its receiver's queue and
 * filling it: it is traced and single-stepped through a send until the receiver's queue, whose head
 * is read in our own mapping of it, has one place more. The receiver must hear again within
 * seconds, by a new queue with a new address, and give the old one back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/xfer/ear.h"
#include "tests/common/xfer/ends.h"

enum { STEPS_MAX = 3000000, RECOVERY_MS = 20000, QUEUE_BYTES = 2048 * 128 };

static struct end b; /* the receiver */
static struct end *ends[] = {&b};
static struct receiver s, other;

static bool spoken_to(void *user) {
    return ((struct end *)user)->messages > 0;
}
static bool renewed(void *user) {
    return ((struct end *)user)->renewed > 0;
}
static bool all_closed(void *user) {
    struct end *e = user;
    struct td_xfer_counts c;
    td_xfer_counts(e->x, &c);
    return c.peers == 0;
}

/* ---- what is ours of UCX's memory ---- */

/* Mappings of UCX's shared memory and their bytes; the smallest one that holds a queue's elements is
 * the queue. */
static unsigned mapped(uint64_t *ret_bytes, volatile const uint64_t **ret_head) {
    char line[512];
    unsigned n = 0;
    uint64_t smallest = UINT64_MAX;
    FILE *f = fopen("/proc/self/maps", "re");
    assert_non_null(f);
    *ret_bytes = 0;
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to;
        if (!strstr(line, "/ucx_shm_posix") || sscanf(line, "%lx-%lx", &from, &to) != 2) continue;
        n++;
        *ret_bytes += to - from;
        if (ret_head && to - from >= QUEUE_BYTES && to - from < smallest) {
            smallest = to - from;
            *ret_head = (const uint64_t *)from;
        }
    }
    fclose(f);
    return n;
}

/* Numbers of the descriptors behind it. */
static unsigned memory_numbers(int *ret, unsigned max) {
    DIR *d = opendir("/proc/self/fd");
    assert_non_null(d);
    unsigned n = 0;
    for (struct dirent *e; n < max && (e = readdir(d));) {
        char target[128] = "";
        if (readlinkat(dirfd(d), e->d_name, target, sizeof target - 1) > 0 &&
            strstr(target, "/ucx_shm_posix"))
            ret[n++] = (int)strtol(e->d_name, NULL, 10);
    }
    closedir(d);
    return n;
}

/* ---- the moment ---- */

static uint64_t places(volatile const uint64_t *head) {
    return *head & ~(1ull << 63);
}

static void wait_for_stop(pid_t pid) {
    int status;
    assert_int_equal(waitpid(pid, &status, __WALL), pid);
    if (!WIFSTOPPED(status)) fail_msg("the sender ended with %x", status);
}

/* Our loop stands still meanwhile, and so does the other process, so nobody else takes a place. The sender echoes what it is
 * sent: it is given something to say, and stepped until it has begun to. */
static void stop_inside_a_send(struct receiver *r, volatile const uint64_t *head) {
    struct order o = {.op = OP_HELLO};
    int status;
    if (other.pid > 0) {
        kill(other.pid, SIGSTOP);
        assert_int_equal(waitpid(other.pid, &status, WUNTRACED), other.pid);
        assert_true(WIFSTOPPED(status));
    }
    assert_int_equal(ptrace(PTRACE_SEIZE, r->pid, 0, 0), 0);
    assert_int_equal(ptrace(PTRACE_INTERRUPT, r->pid, 0, 0), 0);
    wait_for_stop(r->pid);
    assert_int_equal(td_xfer_send(b.peer, &o, sizeof o, UINT64_MAX), TD_OK);
    uint64_t before = places(head);
    unsigned steps = 0;
    while (places(head) == before) {
        if (++steps == STEPS_MAX) fail_msg("the sender does not answer");
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, r->pid, 0, 0), 0);
        wait_for_stop(r->pid);
    }
    print_message("a place is taken after %u steps\n", steps);
    if (other.pid > 0) kill(other.pid, SIGCONT);
}

static void connect_sender(struct receiver *r) {
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    b.messages = 0;
    sender_start(r, address, len);
    assert_true(ends_run(ends, 1, spoken_to, &b, ENDS_WAIT_MS));
}

static void close_lost(struct end *e, struct td_xfer_peer *peer) {
    (void)e;
    td_xfer_peer_close(peer);
}

static void expect_round_trip(struct receiver *r) {
    struct order o = {.op = OP_HELLO};
    b.messages = 0;
    assert_int_equal(td_xfer_send(b.peer, &o, sizeof o, UINT64_MAX), TD_OK);
    assert_true(ends_run(ends, 1, spoken_to, &b, ENDS_WAIT_MS));
    memcpy(&o, b.last, sizeof o);
    assert_int_equal(o.epoch, r->epoch);
}

static void expect_renewal(uint8_t old[TD_XFER_ADDRESS_MAX], size_t old_len) {
    size_t len;
    uint64_t t = td_now_ns();
    assert_true(ends_run(ends, 1, renewed, &b, RECOVERY_MS));
    print_message("heard again after %.0f ms\n", (double)(td_now_ns() - t) / 1e6);
    assert_int_equal(b.renewed_status, TD_OK);
    const void *address = td_xfer_address(b.x, &len);
    assert_false(len == old_len && memcmp(address, old, len) == 0);
    assert_true(ends_run(ends, 1, all_closed, &b, ENDS_WAIT_MS));
}

static void open_b(volatile const uint64_t **ret_head, uint8_t old[TD_XFER_ADDRESS_MAX],
                   size_t *ret_len, uint64_t *ret_bytes) {
    end_open(&b, 0, 0);
    b.on_lost = close_lost;
    b.expires = true;
    (void)mapped(ret_bytes, ret_head);
    const void *address = td_xfer_address(b.x, ret_len);
    memcpy(old, address, *ret_len);
}

/* ---- tests ---- */

static void one(int signal, int times) {
    volatile const uint64_t *head;
    uint8_t old[TD_XFER_ADDRESS_MAX];
    size_t old_len;
    uint64_t bytes, bytes_now;
    open_b(&head, old, &old_len, &bytes);
    for (int i = 0; i < times; i++) {
        if (i > 0) {
            (void)mapped(&bytes_now, &head);
            const void *address = td_xfer_address(b.x, &old_len);
            memcpy(old, address, old_len);
        }
        b.renewed = 0;
        connect_sender(&other); /* a bystander */
        struct td_xfer_peer *bystander = b.peer;
        connect_sender(&s);
        assert_ptr_not_equal(b.peer, bystander);
        stop_inside_a_send(&s, head);
        if (signal == SIGKILL)
            receiver_stop(&s);
        else
            assert_int_equal(ptrace(PTRACE_DETACH, s.pid, 0, SIGSTOP), 0);
        expect_renewal(old, old_len);
        receiver_stop(&other);
        connect_sender(&other);
        expect_round_trip(&other);
        receiver_stop(&s);
        td_xfer_peer_close(b.peer);
        receiver_stop(&other);
        assert_true(ends_run(ends, 1, all_closed, &b, ENDS_WAIT_MS));
        (void)mapped(&bytes_now, NULL);
        assert_int_equal(bytes_now, bytes); /* the old queue went back */
    }
    end_close(&b);
}

static void test_killed_inside_a_send(void **state) {
    (void)state;
    unsigned fds = descriptors();
    one(SIGKILL, 2);
    assert_int_equal(descriptors(), fds);
}

static void test_stopped_inside_a_send(void **state) {
    (void)state;
    one(SIGSTOP, 1);
}

static bool some_lost(void *user) {
    return ((struct end *)user)->lost > 0;
}

/* A link that is made again with a process that knew the old address lives past UCX's keep-alive,
 * which ends what is joined with a dead endpoint (pairing.c). */
static void test_links_after_it(void **state) {
    (void)state;
    enum { KEEP_ALIVES_MS = 2500 };
    volatile const uint64_t *head;
    uint8_t old[TD_XFER_ADDRESS_MAX];
    size_t old_len;
    uint64_t bytes;
    open_b(&head, old, &old_len, &bytes);
    receiver_start(&other);
    end_connect(&b, other.address, other.address_len);
    expect_round_trip(&other);
    connect_sender(&s);
    stop_inside_a_send(&s, head);
    receiver_stop(&s);
    expect_renewal(old, old_len);
    end_connect(&b, other.address, other.address_len);
    expect_round_trip(&other);
    b.lost = 0;
    assert_false(ends_run(ends, 1, some_lost, &b, KEEP_ALIVES_MS));
    expect_round_trip(&other);
    receiver_stop(&other);
    end_close(&b);
}

/* What was stopped goes on later: it fills its place in a queue that is no more, and connects by an
 * address that is no more. Neither harms anybody. */
static void test_goes_on_later(void **state) {
    (void)state;
    volatile const uint64_t *head;
    uint8_t old[TD_XFER_ADDRESS_MAX];
    size_t old_len;
    uint64_t bytes;
    struct td_error err;
    struct td_xfer_peer *peer;
    struct end c, *both[] = {&b, &c};
    int number[32], file[64];
    open_b(&head, old, &old_len, &bytes);
    unsigned n = memory_numbers(number, 32);
    assert_in_range(n, 2, 31);
    connect_sender(&s);
    stop_inside_a_send(&s, head);
    assert_int_equal(ptrace(PTRACE_DETACH, s.pid, 0, SIGSTOP), 0);
    expect_renewal(old, old_len);
    /* No file comes under a number by which somebody may still map a part of the old queue. */
    for (int i = 0; i < 64; i++) {
        file[i] = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
        assert_true(file[i] >= 0);
        for (unsigned k = 0; k < n; k++)
            assert_int_not_equal(file[i], number[k]);
    }
    for (int i = 0; i < 64; i++)
        close(file[i]);
    kill(s.pid, SIGCONT);
    end_open(&c, 0, 0);
    assert_int_equal(td_xfer_connect(c.x, old, old_len, &peer, &err), TD_PEER_LOST);
    print_message("%s\n", err.text);
    b.messages = 0;
    size_t len;
    const void *address = td_xfer_address(b.x, &len);
    end_connect(&c, address, len);
    assert_int_equal(td_xfer_send(c.peer, "now", 3, UINT64_MAX), TD_OK);
    assert_true(ends_run(both, 2, spoken_to, &b, ENDS_WAIT_MS));
    assert_int_equal(b.last_len, 3);
    receiver_stop(&s);
    end_close(&c);
    end_close(&b);
}

/* A receiver whose peers are silent is not deaf. */
static void test_not_deaf(void **state) {
    (void)state;
    end_open(&b, 0, 0);
    b.on_lost = close_lost;
    b.expires = true;
    connect_sender(&s);
    kill(s.pid, SIGSTOP);
    struct order o = {.op = OP_HELLO};
    while (td_xfer_send(b.peer, &o, sizeof o, UINT64_MAX) == TD_OK) {
    }
    assert_false(ends_run(ends, 1, renewed, &b, 2 * TD_EAR_DEAF_MS));
    b.messages = 0;
    kill(s.pid, SIGCONT);
    assert_true(ends_run(ends, 1, spoken_to, &b, ENDS_WAIT_MS));
    assert_int_equal(b.renewed, 0);
    receiver_stop(&s);
    end_close(&b);
}

/* ---- the decision alone ---- */

static const uint64_t ms = 1000000;

static enum td_ear_verdict look_for(struct td_ear *e, uint64_t *now, uint64_t total, uint64_t each) {
    enum td_ear_verdict worst = TD_EAR_FINE;
    for (uint64_t t = 0; t < total; t += each) {
        enum td_ear_verdict v = td_ear_look(e, *now += each * ms, true, false);
        if (v > worst) worst = v;
    }
    return worst;
}

static void test_ear(void **state) {
    (void)state;
    struct td_ear e = {0};
    uint64_t now = 5000 * ms;
    assert_int_equal(td_ear_look(&e, now, true, false), TD_EAR_FINE);
    assert_int_equal(look_for(&e, &now, TD_EAR_ASK_MS - 1, 1), TD_EAR_FINE);
    assert_int_equal(look_for(&e, &now, 1, 1), TD_EAR_ASK);
    /* Asked once. */
    assert_int_equal(look_for(&e, &now, TD_EAR_DEAF_MS - TD_EAR_ASK_MS - 1, 1), TD_EAR_FINE);
    assert_int_equal(look_for(&e, &now, 1, 1), TD_EAR_DEAF);
    /* Again from the start. */
    assert_int_equal(look_for(&e, &now, TD_EAR_DEAF_MS - 1, 1), TD_EAR_ASK);
    assert_int_equal(look_for(&e, &now, 1, 1), TD_EAR_DEAF);
    /* Whatever is heard, or nothing to wait for, begins anew. */
    assert_int_equal(look_for(&e, &now, TD_EAR_DEAF_MS - 1, 1), TD_EAR_ASK);
    assert_int_equal(td_ear_look(&e, now += ms, true, true), TD_EAR_FINE);
    assert_int_equal(look_for(&e, &now, TD_EAR_DEAF_MS - 1, 1), TD_EAR_ASK);
    assert_int_equal(td_ear_look(&e, now += ms, false, false), TD_EAR_FINE);
    assert_int_equal(look_for(&e, &now, TD_EAR_DEAF_MS - 1, 1), TD_EAR_ASK);
    /* An hour away is one look. */
    struct td_ear away = {0};
    assert_int_equal(td_ear_look(&away, now, true, false), TD_EAR_FINE);
    assert_int_equal(td_ear_look(&away, now += 3600000 * ms, true, false), TD_EAR_FINE);
    assert_int_equal(look_for(&away, &now, 20000, 1000), TD_EAR_ASK);
    assert_int_equal(look_for(&away, &now, 29000, 1000), TD_EAR_DEAF);
}

int main(int argc, char **argv) {
    int used = ends_lane(argc, argv);
    if (argc > used + 1 && strcmp(argv[used + 1], "receiver") == 0) return receiver_main();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ear),
        cmocka_unit_test(test_killed_inside_a_send),
        cmocka_unit_test(test_stopped_inside_a_send),
        cmocka_unit_test(test_links_after_it),
        cmocka_unit_test(test_goes_on_later),
        cmocka_unit_test(test_not_deaf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Questions to GPUs (kernels/probe.h): sound ones answer well, and over emulated ones that are at
 * fault every fault shows as what it is. Built twice: over this machine's GPUs (skipped where there
 * is none) and over tests/kernels/cuda/peers.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/probe.h"

extern const struct td_gpu_probe TD_TEST_PROBE;

enum { TIMES = 3 };
static struct td_error err;
static uint32_t count;

static bool emulated(void) {
    return TD_TEST_PROBE.backend == NULL;
}

static size_t bytes(void) {
    return emulated() ? 40000 : 32u << 20; /* no multiple of a launch's threads */
}

static void peers(const char *words) {
    setenv("TD_PEERS", words, 1);
}

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

/* ---- sound GPUs ---- */

static void every_gpu(void **state) {
    (void)state;
    for (uint32_t i = 0; i < count; i++) {
        struct td_gpu_seen seen;
        struct td_gpu_host host;
        uint64_t wrong = 99;
        int built = 0;
        ok(TD_TEST_PROBE.look(i, &seen, &err));
        ok(TD_TEST_PROBE.kernels(i, &built, &err));
        assert_true(built == 90 || built == 120);
        assert_int_equal(built / 10, seen.major);
        assert_true(strchr(seen.bus, ':') != NULL && seen.name[0]);
        assert_true(seen.bytes >= (uint64_t)1 << 30 && seen.free <= seen.bytes && seen.free > 0);
        ok(TD_TEST_PROBE.compute(i, bytes(), &wrong, &err));
        assert_int_equal(wrong, 0);
        ok(TD_TEST_PROBE.host(i, bytes(), TIMES, &host, &err));
        assert_int_equal(host.wrong, 0);
        assert_true(host.rate[0] > 0.01 && host.rate[1] > 0.01);
        printf("cuda:%u %s: %.1f GB/s to it, %.1f from it\n", i, seen.name, host.rate[0],
               host.rate[1]);
    }
}

static void every_pair(void **state) {
    (void)state;
    for (uint32_t a = 0; a < count; a++)
        for (uint32_t b = a + 1; b < count; b++) {
            struct td_gpu_pair p;
            ok(TD_TEST_PROBE.pair(a, b, bytes(), TIMES, &p, &err));
            for (int way = 0; way < 2; way++) {
                assert_int_equal(p.copied[way] + p.stored[way] + p.loaded[way], 0);
                assert_true(p.rate[way] > 0.01 && p.both > 0.01);
            }
            printf("cuda:%u, cuda:%u: peers %d %d; %.1f, %.1f, both %.1f GB/s\n", a, b, p.peer[0],
                   p.peer[1], p.rate[0], p.rate[1], p.both);
        }
}

static void a_sum(void **state) {
    (void)state;
    uint32_t gpu[64];
    struct td_gpu_reduce r;
    for (uint32_t i = 0; i < count; i++)
        gpu[i] = i;
    if (emulated()) skip(); /* there is no library of its own: tests/deploy has one */
    td_status st = TD_TEST_PROBE.reduce(gpu, count, bytes(), &r, &err);
    if (st == TD_NOT_FOUND) {
        printf("no sum: %s\n", err.text);
        skip();
    }
    ok(st);
    assert_int_equal(r.wrong, 0);
    assert_true(r.version > 20000);
    assert_string_equal(r.stage, "done");
}

static void no_such_gpu(void **state) {
    (void)state;
    struct td_gpu_seen seen;
    if (emulated()) skip();
    assert_int_equal(TD_TEST_PROBE.look(count, &seen, &err), TD_IO);
    assert_true(strlen(err.text) > 10);
}

/* ---- faults ---- */

static void wrong_copies(void **state) {
    (void)state;
    struct td_gpu_pair p;
    peers("gpus=3 copy=2>0");
    ok(TD_TEST_PROBE.pair(0, 2, bytes(), TIMES, &p, &err));
    assert_int_equal(p.copied[0], 0);
    assert_int_equal(p.copied[1], 1); /* one bit of one word */
    assert_int_equal(p.stored[0] + p.stored[1] + p.loaded[0] + p.loaded[1], 0);
    ok(TD_TEST_PROBE.pair(0, 1, bytes(), TIMES, &p, &err));
    assert_int_equal(p.copied[0] + p.copied[1], 0);
}

/* What lay there before was right: only what arrives may count. */
static void lost_copies(void **state) {
    (void)state;
    struct td_gpu_pair p;
    for (int i = 0; i < 2; i++) {
        peers(i ? "gpus=2 far=0>1 far=1>0 drop=0>1" : "gpus=2 far=0>1 far=1>0");
        ok(TD_TEST_PROBE.pair(0, 1, bytes(), TIMES, &p, &err));
        assert_int_equal(p.copied[0], i ? bytes() / 4 : 0);
        assert_int_equal(p.copied[1], 0);
    }
}

static void no_peers(void **state) {
    (void)state;
    struct td_gpu_pair p;
    peers("gpus=2 far=0>1");
    ok(TD_TEST_PROBE.pair(0, 1, bytes(), TIMES, &p, &err));
    assert_false(p.peer[0]);
    assert_true(p.peer[1]);
    assert_int_equal(p.copied[0] + p.copied[1], 0);
}

static void wrong_kernels(void **state) {
    (void)state;
    struct td_gpu_pair p;
    uint64_t wrong = 0;
    int built;
    peers("gpus=2 mad=1");
    ok(TD_TEST_PROBE.compute(1, bytes(), &wrong, &err));
    assert_int_equal(wrong, 1);
    ok(TD_TEST_PROBE.compute(0, bytes(), &wrong, &err));
    assert_int_equal(wrong, 0);
    /* Stores of 1 into 0's memory are wrong, and loads see what was stored. */
    ok(TD_TEST_PROBE.pair(0, 1, bytes(), TIMES, &p, &err));
    assert_int_equal(p.stored[0], 0);
    assert_int_equal(p.stored[1], 1);
    assert_int_equal(p.loaded[1], 1);
    peers("old=0");
    assert_int_equal(TD_TEST_PROBE.kernels(0, &built, &err), TD_NO_KERNEL);
}

static void lost_devices(void **state) {
    (void)state;
    struct td_gpu_pair p;
    uint32_t n;
    peers("gpus=2 lost=1>0");
    assert_int_equal(TD_TEST_PROBE.pair(0, 1, bytes(), TIMES, &p, &err), TD_IO);
    assert_true(strstr(err.text, "cuda:0 and cuda:1") != NULL);
    peers("none");
    assert_int_equal(TD_TEST_PROBE.count(&n, &err), TD_CONFIG);
}

int main(void) {
    const struct CMUnitTest sound[] = {cmocka_unit_test(every_gpu), cmocka_unit_test(every_pair),
                                       cmocka_unit_test(a_sum), cmocka_unit_test(no_such_gpu)};
    const struct CMUnitTest faults[] = {
        cmocka_unit_test(wrong_copies), cmocka_unit_test(no_peers), cmocka_unit_test(wrong_kernels),
        cmocka_unit_test(lost_devices), cmocka_unit_test(lost_copies)};
    if (emulated()) peers("gpus=3");
    if (TD_TEST_PROBE.count(&count, &err) != TD_OK || count == 0) {
        printf("no GPU to ask: %s\n", count == 0 ? err.text : "none");
        return 77;
    }
    int failed = cmocka_run_group_tests(sound, NULL, NULL);
    return emulated() ? failed + cmocka_run_group_tests(faults, NULL, NULL) : failed;
}

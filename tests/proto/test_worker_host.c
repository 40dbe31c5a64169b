/* The shell of the workers: a device that failed ends the process with a sentence, and nothing else
 * does; what has arrived is read before a deadline is told. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "proto/worker_host.h"

static struct td_host *host;
static td_status fault;
static unsigned stops, rounds;
static bool late; /* the loop comes to a deadline late, and an answer lies there */
static unsigned answers;

static void on_message(void *user, const struct td_msg *m) {
    (void)user, (void)m;
}
static void on_router_down(void *user) {
    (void)user;
}
static void on_beat(void *user, struct td_msg_heartbeat *beat, struct td_msg_ledger *ledger) {
    (void)user, (void)beat, (void)ledger;
}
static void on_deadline(void *user) {
    (void)user;
    if (late) {
        assert_int_equal(answers, 1);
        assert_int_equal(kill(getpid(), SIGTERM), 0);
        return;
    }
    if (rounds++ > 0) { /* it goes on: ended from outside */
        assert_int_equal(kill(getpid(), SIGTERM), 0);
        return;
    }
    td_host_fault(host, fault, "a step: an illegal memory access");
    td_host_fault(host, fault, "packing: the same again");
    td_host_deadline(host, td_now_ns() + 20000000u);
}
static void on_stop(void *user) {
    (void)user;
    stops++;
}
static bool is_idle(void *user) {
    (void)user;
    return true;
}

static void on_answer(uv_poll_t *h, int rc, int events) {
    (void)rc, (void)events;
    answers++;
    uv_close((uv_handle_t *)h, NULL);
}
static void expect_answer(void) {
    static uv_poll_t poll;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "x", 1), 1);
    assert_int_equal(uv_poll_init(td_host_loop(host), &poll, ends[0]), 0);
    assert_int_equal(uv_poll_start(&poll, UV_READABLE, on_answer), 0);
    nanosleep(&(struct timespec){.tv_nsec = 5000000},
              NULL); /* the deadline is over before it runs */
}

static td_status run_with(td_status s, struct td_error *err) {
    static struct td_config config;
    static const struct td_host_events events = {.on_message = on_message,
                                                 .on_router_down = on_router_down,
                                                 .on_beat = on_beat,
                                                 .on_deadline = on_deadline,
                                                 .on_stop = on_stop,
                                                 .is_idle = is_idle};
    fault = s;
    stops = rounds = 0;
    td_config_defaults(&config);
    assert_int_equal(td_host_env(&config, err), TD_OK);
    assert_int_equal(td_host_create(&config, TD_ROLE_PREFILL, td_host_epoch(), &events, NULL, 4, 8,
                                    5000, &host, err),
                     TD_OK);
    td_host_deadline(host, td_now_ns());
    if (late) expect_answer();
    td_status st = td_host_run(host, err);
    assert_int_equal(stops, 1);
    assert_int_equal(td_host_destroy(host), TD_OK);
    return st;
}

static void test_failed_device_ends_it(void **state) {
    (void)state;
    struct td_error err = {0};
    assert_int_equal(run_with(TD_IO, &err), TD_IO);
    assert_non_null(strstr(err.text, "an illegal memory access"));
    assert_non_null(strstr(err.text, "a new process is needed"));
    assert_int_equal(rounds, 1);
}

static void test_failed_request_does_not(void **state) {
    (void)state;
    static const td_status others[] = {TD_OK, TD_INVALID, TD_CORRUPT, TD_INTERNAL};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        struct td_error err = {0};
        assert_int_equal(run_with(others[i], &err), TD_OK);
        assert_int_equal(rounds, 2);
    }
}

/* libuv runs timers before it reads. */
static void test_answer_before_its_deadline(void **state) {
    (void)state;
    struct td_error err = {0};
    late = true;
    assert_int_equal(run_with(TD_OK, &err), TD_OK);
    assert_int_equal(answers, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_failed_device_ends_it),
                                       cmocka_unit_test(test_failed_request_does_not),
                                       cmocka_unit_test(test_answer_before_its_deadline)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

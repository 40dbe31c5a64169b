/* Timers, signals, the job thread and pidfd on a real loop. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "common/io/jobs.h"
#include "common/io/pidfd.h"
#include "tests/common/io/io_test.h"

static uv_loop_t loop;

static int setup(void **state) {
    (void)state;
    return uv_loop_init(&loop);
}

static int teardown(void **state) {
    (void)state;
    return td_loop_drain(&loop, TEST_LIMIT_MS) == TD_OK ? 0 : -1;
}

static void count(void *user) {
    ++*(int *)user;
}

static bool counted(void *arg) {
    return *(int *)arg > 0;
}

static void test_timer(void **state) {
    (void)state;
    struct td_timer *t;
    int n = 0;
    assert_int_equal(td_timer_create(&loop, count, &n, &t), TD_OK);
    uint64_t start = td_now_ns(), at = start + 20 * 1000000u;
    td_timer_at(t, at);
    assert_true(test_until_ms(&loop, counted, &n, TEST_LIMIT_MS));
    assert_true(td_now_ns() >= at); /* never early: a machine's deadline has come */
    n = 0;
    td_timer_at(t, 1); /* long ago */
    assert_int_equal(n, 0);
    assert_true(test_until_ms(&loop, counted, &n, TEST_LIMIT_MS));
    n = 0;
    td_timer_after(t, 5);
    td_timer_stop(t);
    test_run_ms(&loop, 20);
    assert_int_equal(n, 0);
    td_timer_every(t, 2);
    test_run_ms(&loop, 40);
    assert_true(n >= 3);
    td_timer_after(t, 1);
    td_timer_destroy(t);
    n = 0;
    test_run_ms(&loop, 10);
    assert_int_equal(n, 0);
}

static void on_signal(void *user, int signum) {
    *(int *)user = signum;
}

static void test_signals(void **state) {
    (void)state;
    struct td_signals *s;
    int got = 0;
    assert_int_equal(td_signals_create(&loop, on_signal, &got, &s), TD_OK);
    kill(getpid(), SIGTERM);
    assert_true(test_until_ms(&loop, counted, &got, TEST_LIMIT_MS));
    assert_int_equal(got, SIGTERM);
    got = 0;
    kill(getpid(), SIGINT);
    assert_true(test_until_ms(&loop, counted, &got, TEST_LIMIT_MS));
    assert_int_equal(got, SIGINT);
    kill(getpid(), SIGPIPE); /* would end the test */
    td_signals_destroy(s);
}

static void test_drain_tells_leaks(void **state) {
    (void)state;
    uv_loop_t other;
    uv_timer_t leaked;
    assert_int_equal(uv_loop_init(&other), 0);
    uv_timer_init(&other, &leaked);
    uv_timer_start(&leaked, test_tick, 100000, 0);
    assert_int_equal(td_loop_drain(&other, 20), TD_BUSY);
    uv_close((uv_handle_t *)&leaked, NULL);
    assert_int_equal(td_loop_drain(&other, TEST_LIMIT_MS), TD_OK);
}

/* ---- jobs ---- */

enum { N_JOBS = 8 };

struct job {
    int id;
    pthread_t ran_on;
    int *runs, *dones;
    int run_at, done_at;
    uv_sem_t *gate;
};

static void run_job(void *user) {
    struct job *j = user;
    if (j->gate) uv_sem_wait(j->gate);
    j->ran_on = pthread_self();
    j->run_at = (*j->runs)++;
}

static void done_job(void *user) {
    struct job *j = user;
    assert_true(pthread_equal(pthread_self(), *(pthread_t *)loop.data));
    j->done_at = (*j->dones)++;
}

static bool all_done(void *arg) {
    return *(int *)arg == N_JOBS;
}

static void test_jobs(void **state) {
    (void)state;
    struct td_jobs *jobs;
    struct job j[N_JOBS];
    pthread_t self = pthread_self();
    int runs = 0, dones = 0;
    uv_sem_t gate;
    loop.data = &self;
    uv_sem_init(&gate, 0);
    assert_int_equal(td_jobs_create(&loop, N_JOBS, "test-jobs", &jobs, NULL), TD_OK);
    for (int round = 0; round < 200; round++) {
        runs = dones = 0;
        for (int i = 0; i < N_JOBS; i++) {
            j[i] = (struct job){
                .id = i, .runs = &runs, .dones = &dones, .gate = i == 0 ? &gate : NULL};
            assert_int_equal(td_jobs_submit(jobs, run_job, done_job, &j[i]), TD_OK);
        }
        assert_int_equal(td_jobs_submit(jobs, run_job, done_job, &j[0]), TD_BUSY);
        assert_int_equal(td_jobs_pending(jobs), N_JOBS);
        uv_sem_post(&gate);
        assert_true(test_until_ms(&loop, all_done, &dones, TEST_LIMIT_MS));
        for (int i = 0; i < N_JOBS; i++) {
            assert_int_equal(j[i].run_at, i);
            assert_int_equal(j[i].done_at, i);
            assert_false(pthread_equal(j[i].ran_on, self));
        }
        assert_int_equal(td_jobs_pending(jobs), 0);
    }
    td_jobs_destroy(jobs);
    uv_sem_destroy(&gate);
}

static void test_jobs_destroy(void **state) {
    (void)state;
    struct td_jobs *jobs;
    struct job j[3];
    pthread_t self = pthread_self();
    int runs = 0, dones = 0;
    uv_sem_t gate;
    loop.data = &self;
    uv_sem_init(&gate, 0);
    assert_int_equal(td_jobs_create(&loop, 3, "test-jobs", &jobs, NULL), TD_OK);
    for (int i = 0; i < 3; i++) {
        j[i] = (struct job){.id = i, .runs = &runs, .dones = &dones, .gate = &gate};
        assert_int_equal(td_jobs_submit(jobs, run_job, done_job, &j[i]), TD_OK);
    }
    for (int i = 0; i < 3; i++)
        uv_sem_post(&gate);
    td_jobs_destroy(jobs);
    int after = runs;
    test_run_ms(&loop, 20);
    assert_int_equal(dones, 0); /* nothing is reported after destroy */
    assert_int_equal(runs, after);
    uv_sem_destroy(&gate);
}

/* ---- pidfd ---- */

static void on_exit_of(void *user, pid_t pid) {
    *(int *)user = (int)pid;
}

static void test_pidfd(void **state) {
    (void)state;
    struct td_pidfd *p;
    int gone = 0;
    pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    assert_int_equal(td_pidfd_watch(&loop, pid, on_exit_of, &gone, &p, NULL), TD_OK);
    test_run_ms(&loop, 20);
    assert_int_equal(gone, 0);
    kill(pid, SIGKILL);
    assert_true(test_until_ms(&loop, counted, &gone, TEST_LIMIT_MS));
    assert_int_equal(gone, pid);
    td_pidfd_destroy(p);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    struct td_error err = {0};
    assert_int_equal(td_pidfd_watch(&loop, pid, on_exit_of, &gone, &p, &err), TD_NOT_FOUND);
    assert_true(strlen(err.text) > 5);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_timer), T(test_signals),      T(test_drain_tells_leaks),
        T(test_jobs),  T(test_jobs_destroy), T(test_pidfd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

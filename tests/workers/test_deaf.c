/* Real workers, one of which ends or stops exactly between taking a place in the other's queue and
 * filling it (common/xfer): it is traced and single-stepped until the head of that queue, read in
 * the other's shared memory, has gone on. The other must hear again by itself: a new process in the
 * place of the dead one hands over within seconds, what runs goes on to its end, no token is wrong,
 * and at the end everything is where it was, the old queue's memory included.
 *
 * usage: test_deaf PREFILL DECODE MODEL [test name pattern [kills [seed]]] */
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
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "tests/workers/cluster.h"

enum {
    PROMPT = 300,
    VOCAB = 2000,
    NEW_TOKENS = 5,
    LONG_TOKENS = 500,
    STEPS_MAX = 20000000,
    QUEUE_BYTES = 2048 * 128, /* its elements (common/xfer/env.c); the heads beside are small */
    QUEUE_MORE = 65536,
    STEPS_BEHIND = 250,
};

static unsigned kills = 2;
static uint64_t chance;
static const char *prefill_program, *decode_program, *model_dir;
static struct cluster cluster;
static int32_t ids[PROMPT];
static struct request alone; /* LONG_TOKENS as decode says them without a handoff */
static const struct td_sampling greedy = {.top_p = 1, .logprobs = true, .ignore_eos = true};
static const char *const settings[] = {"peer_timeout_ms=3000", "transfer_timeout_ms=4000",
                                       "lease_ms=8000", NULL};

static uint64_t draw(uint64_t below) {
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    return (chance >> 33) % below;
}

/* ---- waiting ---- */

static bool prefill_done(void *r) {
    return ((struct request *)r)->prefill.released;
}
static bool decode_done(void *r) {
    return ((struct request *)r)->decode.released;
}
static bool decode_speaks(void *arg) {
    const struct request *r = arg;
    return r->prefill.released && r->n_tokens > 8;
}
static bool over_or_failed(void *arg) {
    const struct request *r = arg;
    return request_over(arg) || r->prefill.failed || r->decode.failed;
}
static bool decode_moved(void *c) {
    return ((struct cluster *)c)->decode.moves > 0;
}
static bool prefill_up(void *c) {
    return ((struct cluster *)c)->prefill.conn != NULL;
}
static bool decode_up(void *c) {
    return ((struct cluster *)c)->decode.conn != NULL;
}
static bool in_quarantine(void *c) {
    return ((struct cluster *)c)->decode.ledger.landing_quarantined > 0;
}

static void settle(const char *what) {
    if (!cluster_settles(&cluster)) fail_msg("%s: never at rest", what);
}

/* ---- handoffs ---- */

static void expect_no_wrong_token(const char *what, const struct request *r) {
    const char *wrong = cluster_wrong_token(r, &alone);
    if (wrong) fail_msg("%s: %s", what, wrong);
}

/* Tried again, as the router does, while links come back. */
static void honest(const char *what) {
    uint64_t start = td_now_ns(), end = start + CLUSTER_WAIT_MS * 1000000ull;
    for (int k = 0; k == 0 || td_now_ns() < end; k++) {
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        UNTIL(what, over_or_failed, r);
        const struct leg *bad = r->prefill.failed ? &r->prefill : &r->decode;
        bool failed = bad->failed;
        if (failed) {
            print_message("%s: try %d: %s\n", what, k, bad->failure.text);
            cluster_cancel(&cluster, r);
        }
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        bool whole = !failed && r->n_tokens == NEW_TOKENS;
        cluster_forget(r);
        if (whole) {
            print_message("%s: a handoff after %.0f ms\n", what,
                          (double)(td_now_ns() - start) / 1e6);
            return;
        }
        cluster_run_ms(&cluster, 100);
    }
    cluster_print_logs(&cluster);
    fail_msg("%s: no handoff works afterwards", what);
}

/* A stream that has come to decode and goes on there. */
static struct request *long_stream(void) {
    struct request *r = cluster_begin(&cluster, ids, PROMPT, LONG_TOKENS, &greedy, false, false);
    UNTIL("a long stream", decode_speaks, r);
    return r;
}

static void expect_unharmed(const char *what, struct request *r) {
    UNTIL(what, decode_done, r);
    if (!r->decode.finished || r->n_tokens != LONG_TOKENS)
        fail_msg("%s: the stream ended after %u tokens: %s", what, r->n_tokens,
                 r->decode.failed ? r->decode.failure.text : "");
    expect_no_wrong_token(what, r);
    cluster_forget(r);
}

/* ---- the moment ---- */

/* Opens the queue of a process, or returns -1; *ret_bytes: of all UCX's memory that it holds. */
static int queue_of(const struct worker *w, uint64_t *ret_bytes) {
    char path[64];
    int found = -1;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)w->pid);
    DIR *d = opendir(path);
    *ret_bytes = 0;
    if (!d) return -1;
    for (struct dirent *e; (e = readdir(d));) {
        char target[128] = "";
        struct stat s;
        if (readlinkat(dirfd(d), e->d_name, target, sizeof target - 1) <= 0 ||
            !strstr(target, "/ucx_shm_posix") || fstatat(dirfd(d), e->d_name, &s, 0) != 0)
            continue;
        *ret_bytes += (uint64_t)s.st_size;
        if (s.st_size < QUEUE_BYTES || s.st_size > QUEUE_BYTES + QUEUE_MORE) continue;
        if (found >= 0) close(found);
        found = openat(dirfd(d), e->d_name, O_RDONLY | O_CLOEXEC);
    }
    closedir(d);
    return found;
}

static ino_t queue_file(const struct worker *w) {
    uint64_t bytes;
    struct stat s;
    int fd = queue_of(w, &bytes);
    assert_true(fd >= 0 && fstat(fd, &s) == 0);
    close(fd);
    return s.st_ino;
}

static uint64_t ucx_bytes(const struct worker *w) {
    uint64_t bytes;
    int fd = queue_of(w, &bytes);
    assert_true(fd >= 0);
    close(fd);
    return bytes;
}

static void wait_for_stop(pid_t pid) {
    int status;
    assert_int_equal(waitpid(pid, &status, __WALL), pid);
    if (!WIFSTOPPED(status)) fail_msg("the sender ended with %x", status);
}

static void step(pid_t pid, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, 0, 0), 0);
        wait_for_stop(pid);
    }
}

/* The loop's thread, which is the process's first, says beats to the other all the time. */
static void stop_inside_a_send(const struct worker *from, const struct worker *to) {
    uint64_t bytes;
    int fd = queue_of(to, &bytes);
    assert_true(fd >= 0);
    volatile const uint64_t *head = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(head, MAP_FAILED);
    close(fd);
    assert_int_equal(ptrace(PTRACE_SEIZE, from->pid, 0, 0), 0);
    assert_int_equal(ptrace(PTRACE_INTERRUPT, from->pid, 0, 0), 0);
    wait_for_stop(from->pid);
    const uint64_t armed = 1ull << 63, before = *head & ~armed; /* UCX's mark for "wake me" */
    unsigned steps = 0;
    while ((*head & ~armed) == before) {
        if (++steps == STEPS_MAX) fail_msg("%s says nothing", from->name);
        step(from->pid, 1);
        /* Steps take seconds on a busy machine, and the other must hear from its router. */
        if (steps % 1000 == 0) uv_run(&cluster.loop, UV_RUN_NOWAIT);
    }
    print_message("%s has taken a place after %u steps\n", from->name, steps);
    munmap((void *)(uintptr_t)head, 4096);
}

static void replace(struct worker *w, bool (*up)(void *), const char *what) {
    cluster_kill(w);
    while (w->conn)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    cluster_spawn(&cluster, w);
    UNTIL(what, up, &cluster);
}

/* ---- tests ---- */

static void test_prefill_dies_inside_a_send(void **state) {
    (void)state;
    const char *what = "prefill killed";
    uint64_t bytes = ucx_bytes(&cluster.decode);
    struct request *stream = long_stream();
    cluster.decode.moves = 0;
    stop_inside_a_send(&cluster.prefill, &cluster.decode);
    uint32_t so_far = stream->n_tokens;
    replace(&cluster.prefill, prefill_up, what);
    honest(what);
    assert_true(decode_moved(&cluster));
    assert_true(so_far < LONG_TOKENS);
    expect_unharmed(what, stream);
    settle(what);
    assert_int_equal(ucx_bytes(&cluster.decode), bytes);
}

static void test_decode_dies_inside_a_send(void **state) {
    (void)state;
    const char *what = "decode killed";
    uint64_t bytes = ucx_bytes(&cluster.prefill);
    stop_inside_a_send(&cluster.decode, &cluster.prefill);
    replace(&cluster.decode, decode_up, what);
    honest(what);
    settle(what);
    assert_int_equal(ucx_bytes(&cluster.prefill), bytes);
}

/* Stopped for good: its landing slabs stay in quarantine, another one serves. It goes on later, to
 * no harm, and dies. */
static void test_prefill_stops_inside_a_send(void **state) {
    (void)state;
    const char *what = "prefill stopped";
    struct request *stream = long_stream();
    cluster.decode.moves = 0;
    stop_inside_a_send(&cluster.prefill, &cluster.decode);
    struct worker stopped = cluster.prefill;
    assert_int_equal(ptrace(PTRACE_DETACH, stopped.pid, 0, SIGSTOP), 0);
    cluster_spawn(&cluster, &cluster.prefill);
    UNTIL(what, prefill_up, &cluster);
    honest(what);
    assert_true(decode_moved(&cluster));
    expect_unharmed(what, stream);
    UNTIL(what, in_quarantine, &cluster);
    kill(stopped.pid, SIGCONT);
    honest("it goes on");
    cluster_kill(&stopped);
    honest("it is dead");
    settle(what);
}

/* Killed some instructions later than the worst: inside or behind, in the one or the other, with a
 * handoff under way or none. */
static void test_dies_anywhere(void **state) {
    (void)state;
    unsigned deaf = 0;
    for (unsigned i = 0; i < kills; i++) {
        char what[64];
        snprintf(what, sizeof what, "kill %u", i);
        bool prefill = draw(2) == 0;
        struct worker *w = prefill ? &cluster.prefill : &cluster.decode;
        struct worker *other = prefill ? &cluster.decode : &cluster.prefill;
        struct request *r = NULL;
        if (draw(2) == 0)
            r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        cluster_run_ms(&cluster, draw(60));
        ino_t before = queue_file(other);
        stop_inside_a_send(w, other);
        step(w->pid, draw(STEPS_BEHIND));
        replace(w, prefill ? prefill_up : decode_up, what);
        if (r) {
            expect_no_wrong_token(what, r);
            cluster_cancel(&cluster, r);
            UNTIL(what, prefill ? decode_done : prefill_done, r);
            expect_no_wrong_token(what, r);
            cluster_forget(r);
        }
        honest(what);
        settle(what);
        deaf += queue_file(other) != before;
    }
    print_message("%u of %u kills left the other one deaf\n", deaf, kills);
}

static int start(void **state) {
    (void)state;
    for (int i = 0; i < PROMPT; i++)
        ids[i] = 3 + (i * 7919) % VOCAB;
    cluster_open(&cluster, prefill_program, decode_program, model_dir, settings);
    cluster_launch(&cluster);
    struct request *r = cluster_begin(&cluster, ids, PROMPT, LONG_TOKENS, &greedy, true, false);
    if (!cluster_until(&cluster, request_over, r) || !r->decode.finished) return -1;
    alone = *r;
    cluster_forget(r);
    honest("at first");
    return 0;
}

static int stop(void **state) {
    (void)state;
    return cluster_stop(&cluster) ? 0 : -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prefill_dies_inside_a_send),
        cmocka_unit_test(test_decode_dies_inside_a_send),
        cmocka_unit_test(test_prefill_stops_inside_a_send),
        cmocka_unit_test(test_dies_anywhere),
    };
    if (!cluster_lane(&argc, argv)) return 1;
    if (argc < 4) {
        fprintf(stderr,
                "usage: test_deaf PREFILL DECODE MODEL [test name pattern [kills [seed]]]\n");
        return 2;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    if (argc > 4) cmocka_set_test_filter(argv[4]);
    if (argc > 5) kills = (unsigned)strtoul(argv[5], NULL, 10);
    chance = argc > 6 ? strtoull(argv[6], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)chance);
    return cmocka_run_group_tests(tests, start, stop);
}

/* The tcp lane between real workers, control links over TCP included: the same bits as without a
 * handoff; a peer stopped or killed anywhere in a transfer; a worker with another key.
 *
 * A stopped peer's landing slabs need no proof from it: decode itself wrote them, and stops doing
 * so when it closes the link.
 *
 * usage: test_tcp PREFILL DECODE MODEL tcp [seed] */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "tests/workers/cluster.h"

enum {
    PROMPT = CLUSTER_SLOW > 1 ? 600 : 1100,
    VOCAB = 2000,
    NEW_TOKENS = 6,
    SILENCE_MS = 3000,
    STRIKES = CLUSTER_SLOW > 1 ? 2 : 4,
};

static const char *prefill_program, *decode_program, *model_dir;
static uint64_t seed;
static struct cluster cluster;
static int32_t ids[PROMPT];
static struct request alone; /* what decode says without a handoff */

static const struct td_sampling greedy = {.top_p = 1, .logprobs = true, .ignore_eos = true};
/* None may pass while an honest process waits its turn for a processor. */
static const char *const settings[] = {"peer_timeout_ms=3000", /* SILENCE_MS */
                                       "transfer_timeout_ms=4000", "lease_ms=8000",
                                       "slab_bytes=65536", NULL};

static uint64_t next_random(void) { /* splitmix64 */
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static bool decode_done(void *r) {
    return ((struct request *)r)->decode.released;
}
static bool prefill_done(void *r) {
    return ((struct request *)r)->prefill.released;
}
static bool prefill_up(void *c) {
    return ((struct cluster *)c)->prefill.conn != NULL;
}
static bool decode_up(void *c) {
    return ((struct cluster *)c)->decode.conn != NULL;
}
static bool no_quarantine(void *c) {
    return ((struct cluster *)c)->decode.ledger.landing_quarantined == 0;
}
static bool came_again(void *c) {
    return ((struct cluster *)c)->strangers > 2;
}
static bool slab_moved(void *c) {
    return ((struct cluster *)c)->decode.ledger.bytes_moved > 0;
}

static void expect_no_wrong_token(const char *what, const struct request *r) {
    const char *wrong = cluster_wrong_token(r, &alone);
    if (wrong) fail_msg("%s: %s", what, wrong);
}

/* A whole handoff, tried again as the router does while links come back; then nothing is held. */
static void honest(const char *what) {
    uint64_t end = td_now_ns() + CLUSTER_WAIT_MS * 1000000ull;
    char why[TD_TEXT_MAX] = "";
    for (int k = 0; k == 0 || td_now_ns() < end; k++) {
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        while (!request_over(r) && !r->prefill.failed && !r->decode.failed)
            uv_run(&cluster.loop, UV_RUN_ONCE);
        bool failed = r->prefill.failed || r->decode.failed;
        if (failed) cluster_cancel(&cluster, r);
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        bool whole = !failed && r->n_tokens == NEW_TOKENS;
        if (failed)
            snprintf(why, sizeof why, "%s",
                     (r->prefill.failed ? &r->prefill : &r->decode)->failure.text);
        cluster_forget(r);
        if (whole) {
            cluster.prefill.ledgers = cluster.decode.ledgers = 0;
            UNTIL(what, cluster_at_baseline, &cluster);
            return;
        }
        cluster_run_ms(&cluster, 100);
    }
    cluster_print_logs(&cluster);
    fail_msg("%s: no handoff works afterwards: %s", what, why);
}

static void test_same_bits(void **state) {
    (void)state;
    honest("honest");
    assert_true(cluster.decode.ledger.bytes_moved > 0);
    assert_int_equal(cluster.decode.ledger.handoffs_failed, 0);
}

/* Somewhere in the prompt's computing and moving, which take about as long as one handoff did. */
static void strike(struct request *r, struct worker *w, int signal, uint64_t span_ms) {
    while (!r->sent_prefill)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    cluster_run_ms(&cluster, next_random() % span_ms);
    kill(w->pid, signal);
}

static uint64_t span(void) {
    uint64_t t = uv_hrtime();
    honest("span");
    return (uv_hrtime() - t) / 1000000u + 1;
}

static void test_stopped(void **state) {
    (void)state;
    uint64_t ms = span();
    for (int i = 0; i < STRIKES; i++) {
        struct worker *w = i % 2 ? &cluster.decode : &cluster.prefill;
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        strike(r, w, SIGSTOP, ms);
        /* The living side ends its part without a word from the other. Only what decode reserved
         * for a handoff that had not begun is the router's to cancel. */
        uint64_t end = td_now_ns() + 2 * SILENCE_MS * 1000000ull;
        while (w == &cluster.prefill && !decode_done(r) && td_now_ns() < end)
            uv_run(&cluster.loop, UV_RUN_ONCE);
        if (w == &cluster.prefill && !decode_done(r)) cluster_cancel(&cluster, r);
        UNTIL(w->name, i % 2 ? prefill_done : decode_done, r);
        if (w == &cluster.prefill) {
            cluster.decode.ledgers = 0;
            UNTIL(w->name, no_quarantine, &cluster);
        }
        kill(w->pid, SIGCONT);
        cluster_cancel(&cluster, r);
        UNTIL(w->name, request_over, r);
        expect_no_wrong_token(w->name, r);
        cluster_forget(r);
        honest(w->name);
    }
}

static void test_killed(void **state) {
    (void)state;
    uint64_t ms = span();
    for (int i = 0; i < STRIKES; i++) {
        struct worker *w = i % 2 ? &cluster.decode : &cluster.prefill;
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        strike(r, w, SIGKILL, ms);
        cluster_kill(w); /* dead already: waits for it */
        while (w->conn)
            uv_run(&cluster.loop, UV_RUN_ONCE);
        cluster_cancel(&cluster, r); /* as the router does when a leg is gone */
        UNTIL(w->name, i % 2 ? prefill_done : decode_done, r);
        expect_no_wrong_token(w->name, r);
        cluster_forget(r);
        cluster_spawn(&cluster, w);
        UNTIL(w->name, w == &cluster.prefill ? prefill_up : decode_up, &cluster);
        honest(w->name);
    }
}

/* Its links are refused, by a sentence on both sides, and tried again; with the key it comes back.
 */
static void test_another_key(void **state) {
    (void)state;
    char path[100], log[120], line[1000];
    snprintf(path, sizeof path, "%s/key", cluster.dir);
    snprintf(log, sizeof log, "%s/%s.log", cluster.dir, cluster.prefill.name);
    cluster_kill(&cluster.prefill);
    while (cluster.prefill.conn)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    FILE *f = fopen(path, "r");
    char key[100];
    assert_non_null(f);
    size_t n = fread(key, 1, sizeof key, f);
    fclose(f);
    f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "not the secret that the others share\n");
    fclose(f);
    cluster_spawn(&cluster, &cluster.prefill);
    UNTIL("another key", came_again, &cluster);
    assert_null(cluster.prefill.conn);
    assert_non_null(strstr(cluster.stranger, "does not know"));
    f = fopen(log, "r");
    assert_non_null(f);
    int said = 0;
    while (fgets(line, sizeof line, f))
        said += strstr(line, "does not know") || strstr(line, "do not know its key");
    fclose(f);
    assert_int_equal(said, 1);
    cluster_kill(&cluster.prefill);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(key, 1, n, f), n);
    fclose(f);
    cluster_spawn(&cluster, &cluster.prefill);
    UNTIL("the right key", prefill_up, &cluster);
    honest("the right key");
}

static int start(void **state) {
    (void)state;
    for (int i = 0; i < PROMPT; i++)
        ids[i] = (int32_t)(3 + next_random() % VOCAB);
    cluster_start_with(&cluster, prefill_program, decode_program, model_dir, settings);
    struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, true, false);
    if (!cluster_until(&cluster, request_over, r) || !r->decode.finished) return -1;
    alone = *r;
    cluster_forget(r);
    return slab_moved(&cluster) ? -1 : 0;
}

static int stop(void **state) {
    (void)state;
    return cluster_stop(&cluster) ? 0 : -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_another_key),
    };
    if (!cluster_lane(&argc, argv)) return 1;
    if (argc < 4 || !cluster_tcp()) {
        fprintf(stderr, "usage: test_tcp PREFILL DECODE MODEL tcp [seed]\n");
        return 2;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, start, stop);
}

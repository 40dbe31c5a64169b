/* Real prefill and decode workers with the bundled model: what comes out after a handoff is, bit
 * for bit, what the decode worker computes alone; cancels in every phase give everything back;
 * either side may die and come back.
 *
 * usage: test_workers PREFILL DECODE MODEL [seed [test name pattern]] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/workers/cluster.h"

enum { PROMPT_MAX = 4000, VOCAB = 2000, NEW_TOKENS = 6 };

static const char *prefill_program, *decode_program, *model_dir;
static uint64_t seed;
static struct cluster cluster;
static int32_t ids[PROMPT_MAX];

static const struct td_sampling greedy = {.top_p = 1, .logprobs = true, .ignore_eos = true};

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int start_cluster(void **state) {
    (void)state;
    uint64_t r = seed;
    for (int i = 0; i < PROMPT_MAX; i++)
        ids[i] = (int32_t)(3 + next_random(&r) % VOCAB);
    cluster_start(&cluster, prefill_program, decode_program, model_dir);
    return 0;
}

static int stop_cluster(void **state) {
    (void)state;
    return cluster_stop(&cluster) ? 0 : -1;
}

static void settle(void) {
    for (int i = 0; i < CLUSTER_REQUESTS; i++)
        cluster_forget(&cluster.request[i]);
    if (!cluster_settles(&cluster)) {
        const struct td_msg_ledger *p = &cluster.prefill.ledger, *d = &cluster.decode.ledger;
        fail_msg("residue: prefill %u pages %u slots %u send slabs, decode %u pages %u slots %u "
                 "landing slabs in quarantine",
                 p->pages_owned, p->slots_owned, p->send_busy, d->pages_owned, d->slots_owned,
                 d->landing_quarantined);
    }
}

static struct request *run(uint32_t n, uint32_t max_new, const struct td_sampling *s,
                           bool colocated) {
    struct request *r = cluster_begin(&cluster, ids, n, max_new, s, colocated, false);
    assert_true(cluster_until(&cluster, request_over, r));
    return r;
}

static void expect_whole(const struct request *r) {
    const struct leg *bad = r->prefill.failed ? &r->prefill : &r->decode;
    if (bad->failed) fail_msg("%u tokens: %s", r->n_prompt, bad->failure.text);
    if (r->decode.reply.status != TD_OK) fail_msg("not admitted: %s", r->decode.reply.text);
    assert_false(r->disorder);
    assert_int_equal(r->n_tokens, r->max_new);
    assert_true(r->decode.finished || r->prefill.finished);
    const struct leg *l = r->decode.finished ? &r->decode : &r->prefill;
    assert_int_equal(l->finish.n_tokens, r->max_new);
    assert_int_equal(l->finish.reason, TD_FINISH_LENGTH);
}

static void expect_same(const struct request *a, const struct request *b) {
    expect_whole(a);
    expect_whole(b);
    for (uint32_t i = 0; i < a->n_tokens; i++) {
        const struct td_token *x = &a->token[i], *y = &b->token[i];
        if (x->id != y->id || memcmp(&x->logprob, &y->logprob, sizeof x->logprob) != 0 ||
            x->n_top != y->n_top || memcmp(x->top, y->top, x->n_top * sizeof x->top[0]) != 0)
            fail_msg("prompt of %u, token %u: %d (%.9g) after a handoff, %d (%.9g) alone",
                     a->n_prompt, i, x->id, (double)x->logprob, y->id, (double)y->logprob);
    }
}

/* ---- the same text ---- */

static void test_lengths(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1,   2,   3,   4,   5,   6,   7,   8,    9,   63,  126,
                                       127, 128, 129, 130, 254, 255, 256, 257,  258, 259, 382,
                                       384, 385, 510, 511, 512, 513, 514, 1023, 1025};
    for (size_t i = 0; i<sizeof lengths / sizeof lengths[0]; i += CLUSTER_SLOW> 1 ? 4 : 1) {
        struct request *a = run(lengths[i], NEW_TOKENS, &greedy, false);
        struct request *b = run(lengths[i], NEW_TOKENS, &greedy, true);
        expect_same(a, b);
        cluster_forget(a);
        cluster_forget(b);
    }
    settle();
}

static void test_sampling(void **state) {
    (void)state;
    struct td_sampling s = {.temperature = 1.3f,
                            .top_p = 0.95f,
                            .min_p = 0.001f,
                            .top_k = 200,
                            .seed = seed,
                            .logprobs = true,
                            .top_logprobs = 5,
                            .ignore_eos = true};
    bool differs = false;
    for (uint32_t n = 30; n < 34; n++) {
        s.seed++;
        struct request *a = run(n, 12, &s, false), *b = run(n, 12, &s, true);
        struct request *g = run(n, 12, &greedy, true);
        expect_same(a, b);
        for (uint32_t i = 0; i < 12; i++)
            differs |= a->token[i].id != g->token[i].id;
        assert_int_equal(a->token[0].n_top, 5);
        cluster_forget(a);
        cluster_forget(b);
        cluster_forget(g);
    }
    assert_true(differs); /* a temperature of 1.3 is no greedy choice */
    settle();
}

static void test_one_token_answer(void **state) {
    (void)state;
    struct request *a = cluster_begin(&cluster, ids, 300, 1, &greedy, false, false);
    while (!a->prefill.released)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    assert_true(a->prefill.finished);
    assert_int_equal(a->n_tokens, 1);
    cluster_cancel(&cluster, a); /* decode's part is not needed */
    assert_true(cluster_until(&cluster, request_over, a));
    struct request *b = run(300, 1, &greedy, true);
    assert_int_equal(a->token[0].id, b->token[0].id);
    settle();
}

static bool all_over(void *arg) {
    struct request **r = arg;
    for (; *r; r++)
        if (!request_over(*r)) return false;
    return true;
}

/* Many at once, of different lengths: batches, chunks and handoffs overlap. */
static void test_together(void **state) {
    (void)state;
    enum { N = 10 };
    static const uint32_t lengths[N] = {1, 700, 130, 255, 5, 257, 512, 64, 900, 33};
    uint32_t new = 20 / CLUSTER_SLOW;
    struct request *a[N + 1] = {0}, *b[N + 1] = {0};
    for (int i = 0; i < N; i++)
        a[i] = cluster_begin(&cluster, ids + i, lengths[i], new, &greedy, false, false);
    assert_true(cluster_until(&cluster, all_over, a));
    for (int i = 0; i < N; i++) { /* one after the other */
        b[i] = cluster_begin(&cluster, ids + i, lengths[i], new, &greedy, true, false);
        assert_true(cluster_until(&cluster, request_over, b[i]));
        expect_same(a[i], b[i]);
    }
    settle();
}

static void test_overlap(void **state) {
    (void)state;
    uint64_t moved = cluster.prefill.ledger.bytes_moved;
    uint64_t early = cluster.prefill.ledger.bytes_before_last_chunk;
    struct request *a = run(2000 / CLUSTER_SLOW + 500, 4, &greedy, false);
    expect_whole(a);
    settle();
    moved = cluster.prefill.ledger.bytes_moved - moved;
    early = cluster.prefill.ledger.bytes_before_last_chunk - early;
    print_message("a long prompt: %llu bytes moved, %llu before the last chunk ended\n",
                  (unsigned long long)moved, (unsigned long long)early);
    assert_true(early > 0 && early < moved);
}

/* Processor time of a process so far, in milliseconds. */
static uint64_t cpu_ms(pid_t pid) {
    char path[64], text[1000];
    unsigned long user = 0, kernel = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    const char *rest = strrchr(text, ')');
    assert_non_null(rest);
    assert_int_equal(
        sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &kernel), 2);
    return (user + kernel) * 1000 / (unsigned long)sysconf(_SC_CLK_TCK);
}

/* Linked and idle, nobody spins: neither the loop on UCX nor a compute thread. */
static void test_idle(void **state) {
    (void)state;
    expect_whole(run(600, 3, &greedy, false));
    settle();
    uint64_t p = cpu_ms(cluster.prefill.pid), d = cpu_ms(cluster.decode.pid);
    cluster_run_ms(&cluster, 1500);
    p = cpu_ms(cluster.prefill.pid) - p;
    d = cpu_ms(cluster.decode.pid) - d;
    print_message("idle for 1500 ms: prefill used %llu ms, decode %llu ms\n", (unsigned long long)p,
                  (unsigned long long)d);
    assert_true(p < 150 && d < 150);
}

/* ---- refusals ---- */

static void test_refusals(void **state) {
    (void)state;
    struct request *r = run(4000, 1000, &greedy, false);
    assert_int_equal(r->decode.reply.status, TD_TOO_LONG);
    assert_true(strlen(r->decode.reply.text) > 10);
    int32_t bad[3] = {1, 1 << 30, 2}; /* an id outside the vocabulary */
    r = cluster_begin(&cluster, bad, 3, 2, &greedy, true, false);
    assert_true(cluster_until(&cluster, request_over, r));
    assert_true(r->decode.failed || r->decode.reply.status != TD_OK);
    r = cluster_begin(&cluster, bad, 3, 2, &greedy, false, false);
    while (!r->prefill.failed)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    cluster_cancel(&cluster, r);
    assert_true(cluster_until(&cluster, request_over, r));
    settle();
    expect_same(run(20, 3, &greedy, false), run(20, 3, &greedy, true)); /* both still serve */
    settle();
}

/* ---- cancels ---- */

static bool has_reply(void *r) {
    return ((struct request *)r)->decode.replied;
}
static bool has_first(void *r) {
    return ((struct request *)r)->token[0].id >= 0;
}
static bool has_three(void *r) {
    return ((struct request *)r)->n_tokens >= 3;
}

static void test_cancels(void **state) {
    (void)state;
    bool (*const phase[])(void *) = {NULL, has_reply, has_first, has_three};
    for (int colocated = 0; colocated < 2; colocated++)
        for (int hold = 0; hold < 2; hold++)
            for (size_t k = 0; k < sizeof phase / sizeof phase[0]; k++) {
                if (hold && (colocated || k > 1)) continue;
                struct request *r = cluster_begin(&cluster, ids, 1500 / CLUSTER_SLOW, 200, &greedy,
                                                  colocated, hold);
                if (phase[k]) assert_true(cluster_until(&cluster, phase[k], r));
                cluster_cancel(&cluster, r);
                assert_true(cluster_until(&cluster, request_over, r));
                assert_true(r->n_tokens < 200);
                settle();
            }
    /* At random moments, several at once. */
    uint64_t random = seed;
    for (int round = 0; round < 12 / CLUSTER_SLOW; round++) {
        struct request *r[4];
        for (int i = 0; i < 4; i++)
            r[i] = cluster_begin(&cluster, ids + i, 600 + 100 * (uint32_t)i, 100, &greedy, i == 3,
                                 false);
        for (int i = 0; i < 4; i++) {
            cluster_run_ms(&cluster, next_random(&random) % 60);
            cluster_cancel(&cluster, r[i]);
        }
        for (int i = 0; i < 4; i++)
            assert_true(cluster_until(&cluster, request_over, r[i]));
        settle();
    }
    expect_same(run(777, 5, &greedy, false), run(777, 5, &greedy, true));
    settle();
}

/* An admission that nobody uses ends by its lease. */
static void test_lease(void **state) {
    (void)state;
    struct request *r = cluster_begin(&cluster, ids, 100, 10, &greedy, false, true);
    assert_true(cluster_until(&cluster, has_reply, r));
    assert_int_equal(r->decode.reply.status, TD_OK);
    while (!r->decode.failed)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    assert_int_equal(r->decode.failure.status, TD_TIMEOUT);
    settle();
}

/* ---- deaths ---- */

static bool prefill_up(void *c) {
    return ((struct cluster *)c)->prefill.conn != NULL;
}
static bool decode_up(void *c) {
    return ((struct cluster *)c)->decode.conn != NULL;
}
static bool decode_ended(void *r) {
    return ((struct request *)r)->decode.failed;
}
static bool prefill_ended(void *r) {
    return ((struct request *)r)->prefill.failed;
}

static void test_prefill_dies(void **state) {
    (void)state;
    for (int round = 0; round < 3; round++) {
        struct request *r =
            cluster_begin(&cluster, ids, 3000 / CLUSTER_SLOW, 50, &greedy, false, false);
        assert_true(cluster_until(&cluster, has_reply, r));
        cluster_run_ms(&cluster, 100 * (uint64_t)round); /* before the prompt is computed */
        cluster_kill(&cluster.prefill);
        r->hold = true; /* no more KEEP: when nothing was sent yet, only the lease ends it */
        assert_true(cluster_until(&cluster, decode_ended, r));
        cluster_spawn(&cluster, &cluster.prefill);
        assert_true(cluster_until(&cluster, prefill_up, &cluster));
        settle();
        expect_same(run(500, 5, &greedy, false), run(500, 5, &greedy, true));
        settle();
    }
}

static void test_decode_dies(void **state) {
    (void)state;
    struct request *r =
        cluster_begin(&cluster, ids, 3000 / CLUSTER_SLOW, 50, &greedy, false, false);
    assert_true(cluster_until(&cluster, has_reply, r));
    cluster_run_ms(&cluster, 200);
    cluster_kill(&cluster.decode);
    assert_true(cluster_until(&cluster, prefill_ended, r));
    cluster_spawn(&cluster, &cluster.decode);
    assert_true(cluster_until(&cluster, decode_up, &cluster));
    settle();
    expect_same(run(500, 5, &greedy, false), run(500, 5, &greedy, true));
    settle();
}

static void test_router_dies(void **state) {
    (void)state;
    struct request *r = cluster_begin(&cluster, ids, 1000, 3000, &greedy, false, false);
    assert_true(cluster_until(&cluster, has_first, r));
    cluster_unserve(&cluster);
    cluster_run_ms(&cluster, 100);
    cluster_serve(&cluster);
    assert_true(cluster_until(&cluster, cluster_linked, &cluster));
    uint64_t steps = cluster.decode.beat.steps;
    settle(); /* nobody works for a router that is gone */
    assert_true(cluster.decode.beat.steps < steps + 100);
    expect_same(run(400, 5, &greedy, false), run(400, 5, &greedy, true));
    settle();
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_one_token_answer),
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_idle),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_cancels),
        cmocka_unit_test(test_lease),
        cmocka_unit_test(test_prefill_dies),
        cmocka_unit_test(test_decode_dies),
        cmocka_unit_test(test_router_dies),
    };
    if (!cluster_lane(&argc, argv)) return 1;
    if (argc < 4) {
        fprintf(stderr, "usage: test_workers PREFILL DECODE MODEL [seed]\n");
        return 2;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : (uint64_t)time(NULL);
    if (argc > 5) cmocka_set_test_filter(argv[5]);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, start_cluster, stop_cluster);
}

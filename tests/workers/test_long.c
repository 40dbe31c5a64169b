/* A prompt of 22,016 tokens between real workers: how much of its KV state has reached decode
 * before the last chunk ends. A share of bytes, not of time; it falls only when the loop is kept
 * from its work for several chunks in a row.
 *
 * usage: test_long PREFILL DECODE MODEL [seed] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "tests/workers/cluster.h"

enum { PROMPT = 22016, VOCAB = 2000, NEW_TOKENS = 3, LEAST_PERCENT = 80 };

static const char *prefill_program, *decode_program, *model_dir;
static uint64_t seed;
static struct cluster cluster;
static int32_t ids[PROMPT];

static const struct td_sampling greedy = {.top_p = 1, .ignore_eos = true};
static const char *const settings[] = {"max_context=22528", "pool_pages=90", "max_running=2",
                                       "chunk_tokens=512", NULL};

static void test_most_is_there_before_the_end(void **state) {
    (void)state;
    struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
    assert_true(cluster_until(&cluster, request_over, r));
    const struct leg *bad = r->prefill.failed ? &r->prefill : &r->decode;
    if (bad->failed) fail_msg("%s", bad->failure.text);
    assert_int_equal(r->n_tokens, NEW_TOKENS);
    cluster.prefill.ledgers = cluster.decode.ledgers = 0; /* news from after now */
    assert_true(cluster_until(&cluster, cluster_at_baseline, &cluster));
    uint64_t moved = cluster.prefill.ledger.bytes_moved;
    uint64_t early = cluster.prefill.ledger.bytes_before_last_chunk;
    assert_true(moved > 0);
    print_message("%d tokens: %llu bytes moved, %.1f %% before the last chunk ended\n", PROMPT,
                  (unsigned long long)moved, 100.0 * (double)early / (double)moved);
    assert_int_equal(cluster.decode.ledger.bytes_moved, moved);
    assert_true(early * 100 >= moved * LEAST_PERCENT);
}

static int start(void **state) {
    (void)state;
    uint64_t z = seed;
    for (int i = 0; i < PROMPT; i++) {
        z = z * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)(3 + (z >> 33) % VOCAB);
    }
    cluster_start_with(&cluster, prefill_program, decode_program, model_dir, settings);
    return 0;
}

static int stop(void **state) {
    (void)state;
    return cluster_stop(&cluster) ? 0 : -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_most_is_there_before_the_end)};
    if (argc < 4) {
        fprintf(stderr, "usage: test_long PREFILL DECODE MODEL [seed]\n");
        return 2;
    }
    if (CLUSTER_SLOW > 1) {
        printf("skipped: 22,016 tokens take minutes under a sanitizer\n");
        return 77;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, start, stop);
}

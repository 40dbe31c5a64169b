/* Merging against its definition, written out naively, with random rules over few letters so that
 * merges overlap and cascade; lengths on both sides of the switch between the two forms. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/bpe.h"
#include "tests/common/text/tiny.h"

enum { RULES = 60, LONGEST = 400 };

struct rule {
    int32_t left, right;
};

static size_t naive(const struct rule *r, const int32_t *product, size_t rules, int32_t *id,
                    size_t n) {
    for (;;) {
        size_t best = rules, at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            for (size_t k = 0; k < best; k++) {
                if (r[k].left == id[i] && r[k].right == id[i + 1]) {
                    best = k;
                    at = i;
                }
            }
        }
        if (best == rules) return n;
        id[at] = product[best];
        memmove(id + at + 1, id + at + 2, (n - at - 2) * sizeof *id);
        n--;
    }
}

static void round_of_rules(uint64_t *seed) {
    struct td_bpe b;
    struct rule rules[RULES];
    int32_t product[RULES];
    uint32_t letters = 1 + tiny_random(seed, 4);
    assert_int_equal(td_bpe_init(&b, RULES), TD_OK);
    for (int i = 0; i < 256; i++) {
        b.byte_id[i] = i;
    }
    for (int32_t i = 0; i < RULES; i++) {
        /* Letters, then products; now and then one that only a later rule makes. */
        uint32_t have = letters + (tiny_random(seed, 8) ? b.n : RULES);
        do {
            uint32_t l = tiny_random(seed, have), r = tiny_random(seed, have);
            rules[i].left = (int32_t)(l < letters ? l : 256 + l - letters);
            rules[i].right = (int32_t)(r < letters ? r : 256 + r - letters);
        } while (td_bpe_add(&b, rules[i].left, rules[i].right, 256 + i) == TD_FORMAT);
        product[i] = 256 + i;
    }
    struct td_ids got = {0};
    for (int round = 0; round < 40; round++) {
        uint8_t piece[LONGEST];
        int32_t expected[LONGEST];
        size_t n = 1 + tiny_random(seed, round % 2 ? 60 : LONGEST);
        for (size_t i = 0; i < n; i++) {
            piece[i] = (uint8_t)tiny_random(seed, letters + (round % 5 == 0));
            expected[i] = piece[i];
        }
        size_t before = got.n;
        assert_int_equal(td_bpe_encode(&b, piece, n, &got), TD_OK);
        size_t want = naive(rules, product, RULES, expected, n);
        assert_int_equal(got.n - before, want);
        assert_memory_equal(got.ids + before, expected, want * sizeof *expected);
    }
    td_ids_free(&got);
    td_bpe_finish(&b);
}

static void merges_as_defined(void **state) {
    (void)state;
    uint64_t seed = tiny_seed();
    for (int i = 0; i < 60; i++) {
        round_of_rules(&seed);
    }
}

static void refuses_second_rule_for_a_pair(void **state) {
    (void)state;
    struct td_bpe b;
    assert_int_equal(td_bpe_init(&b, 2), TD_OK);
    assert_int_equal(td_bpe_add(&b, 1, 2, 256), TD_OK);
    assert_int_equal(td_bpe_add(&b, 1, 2, 257), TD_FORMAT);
    assert_int_equal(td_bpe_add(&b, 2, 1, 257), TD_OK);
    assert_int_equal(td_bpe_add(&b, 2, 2, 258), TD_TOO_LONG);
    td_bpe_finish(&b);
}

/* Quadratic merging of this piece would take hours; the test's time limit is the assertion. */
static void merges_a_long_piece_in_time(void **state) {
    (void)state;
    enum { N = 4 << 20 };
    struct td_bpe b;
    assert_int_equal(td_bpe_init(&b, 3), TD_OK);
    for (int i = 0; i < 256; i++) {
        b.byte_id[i] = i;
    }
    assert_int_equal(td_bpe_add(&b, 'a', 'a', 256), TD_OK);
    assert_int_equal(td_bpe_add(&b, 256, 256, 257), TD_OK);
    assert_int_equal(td_bpe_add(&b, 257, 257, 258), TD_OK);
    uint8_t *piece = malloc(N);
    assert_non_null(piece);
    memset(piece, 'a', N);
    struct td_ids got = {0};
    assert_int_equal(td_bpe_encode(&b, piece, N, &got), TD_OK);
    assert_int_equal(got.n, N / 8);
    free(piece);
    td_ids_free(&got);
    td_bpe_finish(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(merges_as_defined),
                                       cmocka_unit_test(refuses_second_rule_for_a_pair),
                                       cmocka_unit_test(merges_a_long_piece_in_time)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The tally counts each block once in any order; the manifest is refused for every value that is
 * not what the receiver has. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/kv/checksum.h"
#include "common/kv/manifest.h"

static uint64_t seed;

static uint64_t next_random(void) {
    seed += 0x9E3779B97F4A7C15u;
    return td_mix64(seed);
}

static struct td_kv_layout layout(void) {
    static const uint8_t ratio[] = {0, 0, 4, 128, 4, 4};
    struct td_kv_layout l;
    struct td_error err;
    assert_int_equal(td_kv_layout_init(&l, 6, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 1, 3, &err),
                     TD_OK);
    return l;
}

/* The header of block `index` of a prompt of n tokens; checksums follow from the index alone. */
static struct td_kv_block_header header(const struct td_kv_layout *l, uint32_t n, uint32_t index) {
    bool slot = index == td_kv_page_blocks(n);
    struct td_kv_block_header h = {.kind = slot ? TD_KV_SLOT_BLOCK : TD_KV_PAGE_BLOCK,
                                   .index = index};
    h.tokens = slot ? n : td_kv_block_tokens(n, index);
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        if (!td_kv_in_block(h.kind, f)) continue;
        h.rows[f] = td_kv_rows(l, f, h.tokens);
        h.bytes[f] = td_kv_bytes(l, f, h.tokens);
        h.checksum[f] = td_mix64(index * 8 + (uint32_t)f + 1);
    }
    return h;
}

/* All blocks, in a random order. */
static struct td_kv_tally tally(const struct td_kv_layout *l, uint32_t n) {
    static uint32_t order[TD_KV_MAX_BLOCKS];
    struct td_kv_tally t;
    struct td_error err;
    assert_int_equal(td_kv_tally_init(&t, n, &err), TD_OK);
    for (uint32_t i = 0; i < t.blocks; i++) {
        uint32_t j = (uint32_t)(next_random() % (i + 1));
        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < t.blocks; i++) {
        assert_false(td_kv_tally_complete(&t));
        struct td_kv_block_header h = header(l, n, order[i]);
        assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_OK);
    }
    assert_true(td_kv_tally_complete(&t));
    assert_int_equal(td_kv_tally_missing(&t), t.blocks);
    return t;
}

static void test_any_order(void **state) {
    (void)state;
    struct td_kv_layout l = layout();
    const uint32_t lengths[] = {1, 3, 4, 255, 256, 257, 5000, TD_KV_MAX_TOKENS};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct td_kv_tally a = tally(&l, lengths[i]), b = tally(&l, lengths[i]);
        assert_memory_equal(&a, &b, sizeof a);
        for (int f = 0; f < TD_KV_FAMILIES; f++) {
            assert_int_equal(a.family[f].rows, td_kv_rows(&l, f, lengths[i]));
            assert_int_equal(a.family[f].bytes, td_kv_bytes(&l, f, lengths[i]));
        }
    }
}

static void test_duplicates_gaps_strangers(void **state) {
    (void)state;
    struct td_kv_layout l = layout();
    struct td_kv_tally t, before;
    struct td_error err;
    assert_int_equal(td_kv_tally_init(&t, 0, &err), TD_INVALID);
    assert_int_equal(td_kv_tally_init(&t, TD_KV_MAX_TOKENS + 1, &err), TD_INVALID);
    assert_int_equal(td_kv_tally_init(&t, 20000, &err), TD_OK);
    assert_int_equal(t.blocks, 80);
    struct td_kv_block_header h;
    for (uint32_t i = 0; i < t.blocks; i++) {
        if (i == 70) continue;
        h = header(&l, 20000, i);
        assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_OK);
    }
    before = t;
    assert_int_equal(td_kv_tally_missing(&t), 70);
    assert_false(td_kv_tally_complete(&t));
    assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_PROTOCOL);
    assert_string_equal(err.text, "handoff: block 79: expected once, came again");
    h = header(&l, 20000, 3);
    h.index = 80;
    assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_PROTOCOL);
    h.index = UINT32_MAX;
    assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_PROTOCOL);
    h = header(&l, 20000, 79);
    h.index = 70; /* the slot block under a page block's number */
    assert_int_equal(td_kv_tally_add(&t, &h, &err), TD_PROTOCOL);
    assert_memory_equal(&t, &before, sizeof t);

    struct td_kv_expected known = {.prompt_tokens = 20000};
    struct td_kv_manifest m;
    assert_int_equal(td_kv_manifest_fill(&m, &l, &known, &t, &err), TD_INVALID);
    assert_non_null(strstr(err.text, "expected 80 blocks, counted 79, the first missing is 70"));
}

/* A handoff of which everything agrees. */
struct handoff {
    struct td_kv_layout l;
    struct td_kv_tally sent, got;
    struct td_kv_expected known;
    struct td_kv_manifest m;
};

static void handoff_init(struct handoff *d) {
    const uint32_t n = 1003; /* residue 3, open rows */
    struct td_error err;
    d->l = layout();
    d->sent = tally(&d->l, n);
    d->got = tally(&d->l, n);
    d->known = (struct td_kv_expected){.ticket = {0xAB, 42},
                                       .prefill_epoch = 0xCD,
                                       .prompt_hash = 0xEF,
                                       .prompt_tokens = n,
                                       .n_first = 2};
    assert_int_equal(td_kv_manifest_fill(&d->m, &d->l, &d->known, &d->sent, &err), TD_OK);
    d->m.n_first = 2;
    for (int i = 0; i < 2; i++) {
        d->m.first[i] = (struct td_kv_first_token){.token = 5, .logprob = -1, .n_top = 1};
        d->m.first[i].top[0] = (struct td_kv_top){5, -1};
    }
    assert_int_equal(d->m.next_position, n + 1);
}

static void verify(const struct handoff *d, td_status want, const char *words) {
    struct td_error err = {.text = ""};
    td_status st = td_kv_manifest_verify(&d->m, &d->l, &d->known, &d->got, &err);
    if (st != want || (want != TD_OK && !strstr(err.text, words)))
        fail_msg("expected %s with \"%s\", found %s: %s", td_status_name(want), words,
                 td_status_name(st), st ? err.text : "");
}

static void test_agreement(void **state) {
    (void)state;
    struct handoff d;
    handoff_init(&d);
    verify(&d, TD_OK, "");
    uint8_t matcher[4] = {0};
    d.m.matcher = matcher;
    d.m.matcher_len = sizeof matcher;
    verify(&d, TD_OK, "");
    d.m.first[1].logprob = -INFINITY;
    verify(&d, TD_OK, "");
}

static void test_families_differ(void **state) {
    (void)state;
    struct handoff good, d;
    handoff_init(&good);
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        char words[128];
        d = good;
        d.m.family[f].checksum ^= 1;
        snprintf(words, sizeof words, "%s: checksum sent %016llx, arrived %016llx",
                 td_kv_family_name(f), (unsigned long long)d.m.family[f].checksum,
                 (unsigned long long)d.got.family[f].checksum);
        verify(&d, TD_CORRUPT, words);
        d = good;
        d.m.family[f] = (struct td_kv_family_sum){0};
        snprintf(words, sizeof words, "%s: expected %llu rows, 0 sent, %llu arrived",
                 td_kv_family_name(f), (unsigned long long)td_kv_rows(&d.l, f, 1003),
                 (unsigned long long)td_kv_rows(&d.l, f, 1003));
        verify(&d, TD_CORRUPT, words);
        d = good;
        d.m.family[f].bytes--;
        verify(&d, TD_CORRUPT, td_kv_family_name(f));
        d = good;
        d.got.family[f].rows--;
        verify(&d, TD_CORRUPT, td_kv_family_name(f));
        d = good;
        d.m.family[f].rows = --d.got.family[f].rows;
        verify(&d, TD_CORRUPT, td_kv_family_name(f));
        /* Both sides agree on too little: the prompt's length knows better. */
        d = good;
        d.m.family[f] = d.got.family[f] = (struct td_kv_family_sum){0};
        verify(&d, TD_CORRUPT, td_kv_family_name(f));
    }
}

/* The same blocks, two of them with each other's rows. */
static void test_swapped_blocks(void **state) {
    (void)state;
    struct handoff d;
    struct td_error err;
    handoff_init(&d);
    assert_int_equal(td_kv_tally_init(&d.got, 1003, &err), TD_OK);
    for (uint32_t i = 0; i < d.got.blocks; i++) {
        struct td_kv_block_header h = header(&d.l, 1003, i < 2 ? 1 - i : i);
        h.index = i;
        assert_int_equal(td_kv_tally_add(&d.got, &h, &err), TD_OK);
    }
    verify(&d, TD_CORRUPT, "CSA entries: checksum");
}

static void test_values_differ(void **state) {
    (void)state;
    struct handoff good, d;
    handoff_init(&good);
#define CHANGED(change, status, words)                                                             \
    do {                                                                                           \
        d = good;                                                                                  \
        change;                                                                                    \
        verify(&d, status, words);                                                                 \
    } while (0)
    CHANGED(d.m.decode_epoch++, TD_STALE, "decode epoch");
    CHANGED(d.m.ticket--, TD_STALE, "ticket: expected 42, found 41");
    CHANGED(d.m.prefill_epoch++, TD_STALE, "prefill epoch");
    CHANGED(d.m.fingerprint++, TD_MISMATCH, "layout fingerprint");
    CHANGED(d.m.prompt_tokens++, TD_CORRUPT, "prompt tokens: expected 1003, found 1004");
    CHANGED(d.m.prompt_hash++, TD_CORRUPT, "prompt hash");
    CHANGED(d.m.blocks--, TD_CORRUPT, "number of blocks: expected 5, found 4");
    CHANGED(d.got.n++, TD_CORRUPT, "tokens of the counted blocks");
    CHANGED((d.got.seen--, d.got.have[0] &= ~UINT64_C(4)), TD_CORRUPT, "the first missing is 2");
    CHANGED(d.m.n_first = 1, TD_PROTOCOL, "number of first tokens: expected 2, found 1");
    CHANGED(d.m.n_first = d.known.n_first = TD_KV_MAX_FIRST + 1, TD_PROTOCOL, "at most 8");
    CHANGED(d.m.first[1].token = -1, TD_PROTOCOL, "first token 1");
    CHANGED(d.m.first[1].logprob = NAN, TD_PROTOCOL, "first token 1");
    CHANGED(d.m.first[0].n_top = TD_KV_MAX_TOP + 1, TD_PROTOCOL, "at most 20");
    CHANGED(d.m.first[0].top[0].logprob = NAN, TD_PROTOCOL, "first token 0");
    CHANGED(d.m.first[0].top[0].token = -7, TD_PROTOCOL, "first token 0");
    CHANGED(d.m.next_position--, TD_PROTOCOL, "next position");
    CHANGED(d.m.matcher_len = 1, TD_PROTOCOL, "matcher");
    CHANGED(d.m.matcher_len = TD_KV_MAX_MATCHER + 1, TD_PROTOCOL, "matcher");
#undef CHANGED
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_order),      cmocka_unit_test(test_duplicates_gaps_strangers),
        cmocka_unit_test(test_agreement),      cmocka_unit_test(test_families_differ),
        cmocka_unit_test(test_swapped_blocks), cmocka_unit_test(test_values_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

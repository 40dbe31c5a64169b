/* An engine over the plain CUDA kernels and one over the CPU walk through the same steps and give
 * the same bits: logits, what the indexer chose, wire blocks. Built twice: over the GPU (skipped
 * where there is none) and over the emulator of tests/kernels/cuda. */
#include "tests/kernels/engine_fixture.h"

#include <stdio.h>

#include "kernels/device.h"
#include "kernels/ops.h"

extern const struct td_backend TD_TEST_BACKEND;

/* Every page and slot as it would travel. */
static void same_blocks(struct td_engine *const *e, const uint32_t *tokens,
                        uint32_t (*pages)[TD_TEST_PAGES]) {
    const struct td_kv_layout *l = td_engine_layout(e[0]);
    size_t cap = td_kv_page_block_bytes_max(l), slot = td_kv_slot_block_bytes_max(l), len[2];
    struct td_kv_ticket t = {1, 2};
    struct td_error err;
    cap = slot > cap ? slot : cap;
    void *block[2] = {td_test_bytes(cap), td_test_bytes(cap)};
    for (uint32_t s = 0; s < 2; s++) {
        for (uint32_t p = 0; p < td_kv_page_blocks(tokens[s]); p++) {
            for (int i = 0; i < 2; i++)
                assert_int_equal(td_engine_pack_page(e[i], pages[s][p], t, p,
                                                     td_kv_block_tokens(tokens[s], p), block[i],
                                                     cap, &len[i], NULL, &err),
                                 TD_OK);
            td_test_same("page block", block[0], block[1], len[0]);
        }
        for (int i = 0; i < 2; i++)
            assert_int_equal(
                td_engine_pack_slot(e[i], s, t, tokens[s], block[i], cap, &len[i], NULL, &err),
                TD_OK);
        td_test_same("slot block", block[0], block[1], len[0]);
    }
    free(block[0]);
    free(block[1]);
}

/* Two sequences in uneven chunks, past the first HCA entry and past topk keys. */
static void walk(struct td_engine_options o) {
    static const uint32_t tokens[2] = {140, 30};
    static uint32_t pages[2][TD_TEST_PAGES];
    struct td_engine *e[2];
    struct td_error err;
    int32_t *ids = td_test_ids(tokens[0] + tokens[1]);
    uint32_t pos[2] = {0, 0};
    o.slots = o.max_runs = 2;
    o.max_tokens = 160;
    o.pages = 2 * TD_TEST_PAGES;
    for (uint32_t i = 0; i < 2 * TD_TEST_PAGES; i++)
        pages[i % 2][i / 2] = i;
    e[0] = td_test_engine(&o);
    o.backend = &TD_TEST_BACKEND;
    assert_int_equal(td_ops_mask("all", &o.force_ref, &err), TD_OK);
    e[1] = td_test_engine(&o);
    while (pos[0] < tokens[0] || pos[1] < tokens[1]) {
        static const uint32_t sizes[] = {0, 1, 2, 3, 5, 31, 64, 150};
        struct td_run run[2];
        uint32_t runs = 0, total = 0;
        for (uint32_t s = 0; s < 2; s++) {
            uint32_t n = sizes[td_test_below(8)], left = tokens[s] - pos[s];
            n = n < left ? n : left;
            if (n == 0 || total + n > o.max_tokens) continue;
            run[runs++] = (struct td_run){.slot = s,
                                          .pos = pos[s],
                                          .n = n,
                                          .ids = ids + s * tokens[0] + pos[s],
                                          .pages = pages[s],
                                          .want_logits = td_test_below(2)};
            total += n;
            pos[s] += n;
        }
        if (runs == 0) continue;
        const float *logits[2] = {NULL, NULL};
        uint32_t layers = td_engine_layout(e[0])->csa_layers;
        size_t chosen = (size_t)2 * layers * o.index_topk * sizeof(int32_t);
        struct td_capture c[2];
        for (int i = 0; i < 2; i++)
            c[i] = (struct td_capture){2, layers, o.index_topk, td_test_bytes(chosen)};
        for (int i = 0; i < 2; i++)
            if (td_engine_step(e[i], run, runs, &logits[i], &c[i], &err) != TD_OK)
                fail_msg("%s", err.text);
        size_t wanted = 0;
        for (uint32_t i = 0; i < runs; i++)
            wanted += run[i].want_logits;
        td_test_same("logits", logits[0], logits[1], wanted * td_test_logit_bytes());
        td_test_same("chosen entries", c[0].entries, c[1].entries, chosen);
        free(c[0].entries);
        free(c[1].entries);
    }
    same_blocks(e, tokens, pages);
    td_engine_destroy(e[0]);
    td_engine_destroy(e[1]);
    free(ids);
}

static void plain_numerics(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.row_dtype = TD_KV_ROW_FP32;
    o.key_dtype = TD_KV_KEY_FP32;
    o.index_topk = 20;
    walk(o);
}

static void ref_numerics_small_rows(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.ref = true;
    o.row_dtype = TD_KV_ROW_FP8;
    o.key_dtype = TD_KV_KEY_FP8;
    o.score_bf16 = true;
    o.index_topk = 17;
    walk(o);
}

static void ref_numerics_small_keys(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.ref = true;
    o.key_dtype = TD_KV_KEY_FP4;
    o.index_sim4 = true;
    o.index_topk = 17;
    walk(o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_numerics),
        cmocka_unit_test(ref_numerics_small_rows),
        cmocka_unit_test(ref_numerics_small_keys),
    };
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

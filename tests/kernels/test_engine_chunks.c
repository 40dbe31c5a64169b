/* One prompt in steps of any size, then decode: the same logits and the same stored state. */
#include <math.h>

#include "tests/kernels/engine_fixture.h"

static void chunks_case(bool ref, enum td_kv_row_dtype row, enum td_kv_key_dtype key, uint32_t n) {
    static const uint32_t chunks[] = {1, 3, 4, 5, 127, 128, 129, 256, 1024};
    enum { MORE = 3 };
    struct td_engine_options o = td_test_options();
    o.ref = ref;
    o.row_dtype = row;
    o.key_dtype = key;
    struct td_engine *whole = td_test_engine(&o);
    int32_t *ids = td_test_ids(n + MORE);
    float *want[MORE + 1];
    want[0] = td_test_keep(td_test_feed(whole, ids, 0, n, n));
    assert_true(isfinite(want[0][0]));
    for (uint32_t i = 0; i < MORE; i++)
        want[i + 1] = td_test_keep(td_test_feed(whole, ids, n + i, 1, 1));
    for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
        struct td_engine *e = td_test_engine(&o);
        td_test_same("logits of a prompt in chunks", want[0], td_test_feed(e, ids, 0, n, chunks[c]),
                     td_test_logit_bytes());
        for (uint32_t i = 0; i < MORE; i++)
            td_test_same("logits of decode after chunks", want[i + 1],
                         td_test_feed(e, ids, n + i, 1, 1), td_test_logit_bytes());
        td_test_same_state(whole, e);
        td_engine_destroy(e);
    }
    for (uint32_t i = 0; i <= MORE; i++)
        free(want[i]);
    free(ids);
    td_engine_destroy(whole);
}

static void chunk_edges_change_nothing(void **state) {
    (void)state;
    chunks_case(false, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 515);
    chunks_case(false, TD_KV_ROW_FP32, TD_KV_KEY_FP32, 262);
    chunks_case(false, TD_KV_ROW_BF16, TD_KV_KEY_FP8, 270);
    chunks_case(true, TD_KV_ROW_FP8, TD_KV_KEY_FP4, 270);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(chunk_edges_change_nothing)};
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

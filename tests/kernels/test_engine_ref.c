/* ref numerics in the whole engine: what storage types may and may not change, and what the
 * settings do at all. */
#include <math.h>

#include "kernels/ref/stored.h"
#include "tests/kernels/engine_fixture.h"

enum { N = 331, MORE = 3 }; /* past 4 * 64 tokens the index selects */

static struct td_engine_options ref_options(enum td_kv_row_dtype row, enum td_kv_key_dtype key) {
    struct td_engine_options o = td_test_options();
    o.ref = true;
    o.row_dtype = row;
    o.key_dtype = key;
    return o;
}

/* Logits [MORE + 1][vocab] of a prompt and of decoding after it. */
static float *run(const struct td_engine_options *o, const int32_t *ids, struct td_engine **ret) {
    struct td_engine *e = td_test_engine(o);
    float *logits = td_test_bytes((MORE + 1) * td_test_logit_bytes());
    size_t vocab = td_test_model()->config.vocab;
    memcpy(logits, td_test_feed(e, ids, 0, N, 200), td_test_logit_bytes());
    for (uint32_t i = 0; i < MORE; i++)
        memcpy(logits + (i + 1) * vocab, td_test_feed(e, ids, N + i, 1, 1), td_test_logit_bytes());
    assert_true(isfinite(logits[0]) && isfinite(logits[MORE * vocab]));
    if (ret)
        *ret = e;
    else
        td_engine_destroy(e);
    return logits;
}

static bool equal(const float *a, const float *b) {
    return memcmp(a, b, (MORE + 1) * td_test_logit_bytes()) == 0;
}

static void layer0_row(struct td_engine *e, uint32_t t, float *v) {
    const struct td_kv_layout *l = td_engine_layout(e);
    row_decode(td_kv_window_row(l, td_engine_slot(e, 0), 0, t), l->row_dtype, v);
}

/* In ref the 448 unrotated values are on the grid of FP8 rows: mixed rows lose what bf16 rows lose
 * in the 64 rotated ones, and nothing else. */
static void fp8_rows_lose_nothing(void **state) {
    (void)state;
    int32_t *ids = td_test_ids(N + MORE);
    struct td_engine *e8, *e16, *e32;
    struct td_engine_options o8 = ref_options(TD_KV_ROW_FP8, TD_KV_KEY_BF16), o16 = o8, o32 = o8;
    o16.row_dtype = TD_KV_ROW_BF16;
    o32.row_dtype = TD_KV_ROW_FP32;
    float *fp8 = run(&o8, ids, &e8), *bf16 = run(&o16, ids, &e16), *fp32 = run(&o32, ids, &e32);
    assert_true(equal(fp8, bf16));
    for (uint32_t t = N - 100; t < N; t++) {
        float a[512], b[512];
        layer0_row(e8, t, a);
        layer0_row(e32, t, b);
        td_test_same("unrotated values of fp8 and fp32 rows", a, b, 448 * sizeof *a);
        for (uint32_t i = 448; i < 512; i++)
            assert_true(a[i] == td_bf16_to_f32(td_f32_to_bf16(b[i])));
    }
    assert_false(equal(fp8, fp32)); /* the rotated values */
    o8.ref = o16.ref = false;
    float *plain8 = run(&o8, ids, NULL), *plain16 = run(&o16, ids, NULL);
    assert_false(equal(plain8, plain16)); /* in plain they do lose */
    assert_false(equal(plain16, bf16));
    float *all[] = {fp8, bf16, fp32, plain8, plain16};
    for (int i = 0; i < 5; i++)
        free(all[i]);
    td_engine_destroy(e8);
    td_engine_destroy(e16);
    td_engine_destroy(e32);
    free(ids);
}

/* Keys that went through sim4 are on the grid of every storage type that holds e2m1 times a power
 * of two. */
static void fp4_keys_lose_nothing_after_sim4(void **state) {
    (void)state;
    int32_t *ids = td_test_ids(N + MORE);
    static const enum td_kv_key_dtype types[] = {TD_KV_KEY_FP32, TD_KV_KEY_BF16, TD_KV_KEY_FP4};
    float *logits[3];
    for (int i = 0; i < 3; i++) {
        struct td_engine_options o = ref_options(TD_KV_ROW_FP8, types[i]);
        o.index_sim4 = true;
        logits[i] = run(&o, ids, NULL);
    }
    assert_true(equal(logits[0], logits[1]));
    assert_true(equal(logits[0], logits[2]));
    struct td_engine_options o = ref_options(TD_KV_ROW_FP8, TD_KV_KEY_FP32);
    float *off = run(&o, ids, NULL);
    assert_false(equal(logits[0], off));
    for (int i = 0; i < 3; i++)
        free(logits[i]);
    free(off);
    free(ids);
}

/* The reference table gives the same bits, is named, and does not count as other numerics. */
static void forced_ops(void **state) {
    (void)state;
    int32_t *ids = td_test_ids(N + MORE);
    struct td_engine_options o = ref_options(TD_KV_ROW_FP8, TD_KV_KEY_FP4);
    struct td_error err = {0};
    struct td_engine *a, *b;
    uint64_t ida, idb;
    float *want = run(&o, ids, &a);
    assert_int_equal(td_ops_mask("linear, round_fp8", &o.force_ref, &err), TD_OK);
    float *got = run(&o, ids, &b);
    assert_true(equal(want, got));
    td_test_same_state(a, b);
    assert_null(strstr(td_engine_numerics(a, &ida), "reference ops"));
    assert_non_null(strstr(td_engine_numerics(b, &idb), "reference ops linear round_fp8"));
    assert_true(ida == idb);
    td_engine_destroy(a);
    td_engine_destroy(b);
    free(want);
    free(got);
    free(ids);
}

/* Every setting that decides over bits is in the id. */
static void numerics_ids_differ(void **state) {
    (void)state;
    struct td_engine_options o[7];
    uint64_t id[7];
    for (int i = 0; i < 7; i++)
        o[i] = td_test_options();
    o[1].ref = true;
    o[2].index_sim4 = true;
    o[3].score_bf16 = true;
    o[4].row_dtype = TD_KV_ROW_FP8;
    o[5].key_dtype = TD_KV_KEY_FP4;
    o[6].index_topk++;
    for (int i = 0; i < 7; i++) {
        struct td_engine *e = td_test_engine(&o[i]);
        (void)td_engine_numerics(e, &id[i]);
        td_engine_destroy(e);
        for (int j = 0; j < i; j++)
            assert_true(id[i] != id[j]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp8_rows_lose_nothing),
        cmocka_unit_test(fp4_keys_lose_nothing_after_sim4),
        cmocka_unit_test(forced_ops),
        cmocka_unit_test(numerics_ids_differ),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

/* Weights made from a seed: a row is what its bytes say, sizes are what products need, and a model
 * of config.json alone computes numbers that the seed decides. */
#include <math.h>
#include <stdio.h>

#include "kernels/model/random.h"
#include "tests/kernels/engine_fixture.h"

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

static const struct {
    enum td_weight_format format;
    uint32_t rows, cols;
} shapes[] = {{TD_W_F32, 5, 33},          {TD_W_BF16, 7, 129},   {TD_W_BF16, 1, 100},
              {TD_W_FP8_BLOCK, 131, 200}, {TD_W_FP4, 9, 96},     {TD_W_FP4, 3, 416},
              {TD_W_NVFP4, 9, 96},        {TD_W_NVFP4, 130, 512}};

/* The whole tensor written out and read as a checkpoint is. */
static void rows_are_bytes(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct td_weight w = {
            .format = shapes[i].format, .rows = shapes[i].rows, .cols = shapes[i].cols};
        td_random_weight(3, "layers.4.ffn.experts.7.w1", &w);
        assert_int_not_equal(w.random, 0);
        struct td_weight stored = w;
        size_t n = td_weight_data_bytes(&w), scales = td_weight_scale_bytes(&w);
        void *data = td_test_bytes(n), *scale = td_test_bytes(scales + 1);
        struct td_random r = td_random_of(&w, false);
        td_random_bytes(&r, 0, n, data);
        if (scales) {
            r = td_random_of(&w, true);
            td_random_bytes(&r, 0, scales, scale);
        }
        stored.random = 0;
        stored.data = data;
        stored.scale = scale;
        float *a = td_test_poison(w.cols), *b = td_test_poison(w.cols);
        for (uint32_t row = 0; row < w.rows; row++) {
            td_weight_row(&w, row, a);
            td_weight_row(&stored, row, b);
            td_test_same("a row", a, b, w.cols * sizeof *a);
        }
        free(a);
        free(b);
        free(data);
        free(scale);
    }
}

/* Products with inputs of size 1 have about that size, in every format. */
static void matrices_keep_sizes(void **state) {
    (void)state;
    for (uint32_t f = TD_W_F32; f <= TD_W_NVFP4; f++) {
        struct td_weight w = {.format = (enum td_weight_format)f, .rows = 64, .cols = 2048};
        float *row = td_test_poison(w.cols);
        double sum = 0, square = 0;
        td_random_weight(11, "layers.0.attn.wq_a", &w);
        for (uint32_t r = 0; r < w.rows; r++) {
            td_weight_row(&w, r, row);
            for (uint32_t c = 0; c < w.cols; c++) {
                sum += (double)row[c];
                square += (double)row[c] * (double)row[c];
            }
        }
        double rms = sqrt(square / w.rows); /* of a product */
        assert_true(rms > 0.4 && rms < 1.1);
        assert_true(fabs(sum) / w.rows < 0.5);
        free(row);
    }
}

static void choices_differ(void **state) {
    (void)state;
    enum { VOCAB = 3000, K = 6, EXPERTS = 16 };
    static int64_t ids[VOCAB * K];
    uint32_t count[EXPERTS] = {0};
    td_random_ids(1, "layers.0.ffn.gate.tid2eid", VOCAB, K, EXPERTS, ids);
    for (uint32_t i = 0; i < VOCAB * K; i++) {
        assert_in_range(ids[i], 0, EXPERTS - 1);
        count[ids[i]]++;
        for (uint32_t j = i / K * K; j < i; j++)
            assert_int_not_equal(ids[i], ids[j]);
    }
    for (uint32_t e = 0; e < EXPERTS; e++)
        assert_in_range(count[e], VOCAB * K / EXPERTS / 2, VOCAB * K / EXPERTS * 2);
}

static float *logits_of(enum td_outline kind, uint64_t seed, uint64_t *ret_fingerprint) {
    enum { N = 150 };
    struct td_engine_options o = td_test_options();
    struct td_model *m;
    struct td_engine *e;
    const float *logits;
    int32_t ids[N];
    static const uint32_t page[] = {0};
    struct td_run run = {.n = N, .ids = ids, .pages = page, .want_logits = true};
    for (int i = 0; i < N; i++)
        ids[i] = 3 + i * 7;
    o.ref = kind != TD_OUTLINE_BF16;
    ok(td_model_random(&td_test_model()->config, kind, seed, &m, &err));
    assert_int_equal(m->config.quantised, kind != TD_OUTLINE_BF16);
    *ret_fingerprint = m->fingerprint;
    ok(td_engine_create(m, &o, &e, &err));
    ok(td_engine_step(e, &run, 1, &logits, NULL, &err));
    float *kept = td_test_keep(logits);
    td_engine_destroy(e);
    td_model_close(m);
    return kept;
}

static void the_seed_is_the_model(void **state) {
    (void)state;
    for (int kind = TD_OUTLINE_BF16; kind <= TD_OUTLINE_NVFP4; kind++) {
        uint64_t print[3];
        float *l[3];
        double square = 0;
        uint32_t vocab = td_test_model()->config.vocab;
        for (int i = 0; i < 3; i++)
            l[i] = logits_of((enum td_outline)kind, i == 2 ? 5 : 4, &print[i]);
        td_test_same("logits", l[0], l[1], td_test_logit_bytes());
        assert_int_not_equal(memcmp(l[0], l[2], td_test_logit_bytes()), 0);
        assert_int_equal(print[0], print[1]);
        assert_int_not_equal(print[0], print[2]);
        for (uint32_t i = 0; i < vocab; i++)
            square += (double)l[0][i] * (double)l[0][i];
        assert_true(square / vocab > 0.1 && square / vocab < 10);
        for (int i = 0; i < 3; i++)
            free(l[i]);
    }
}

static void settings_name_the_model(void **state) {
    (void)state;
    struct td_config c;
    struct td_model_config m;
    enum td_outline kind;
    td_config_defaults(&c);
    ok(td_config_set(&c, "model.dir=" TD_TEST_MODEL, &err));
    ok(td_config_set(&c, "random.layers=0,4,128,4", &err));
    ok(td_model_config_from(&c, &m, &kind, &err));
    assert_int_equal(m.layers, td_test_model()->config.layers); /* not without load_format */
    ok(td_config_set(&c, "load_format=random", &err));
    ok(td_config_set(&c, "random.format=fp4", &err));
    ok(td_model_config_from(&c, &m, &kind, &err));
    assert_int_equal(m.layers, 4);
    assert_int_equal(m.kind[2], TD_LAYER_HCA);
    assert_int_equal(m.draft_layers, 0);
    assert_true(m.hash_layers <= 4);
    assert_int_equal(kind, TD_OUTLINE_FP4);
    static const char *const bad[] = {"0,5", "4,", ",4", "4 128", "4;128", "x"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(c.random_layers, sizeof c.random_layers, "%s", bad[i]);
        assert_int_equal(td_model_config_from(&c, &m, &kind, &err), TD_CONFIG);
        assert_non_null(strstr(err.text, "random.layers"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_bytes),          cmocka_unit_test(matrices_keep_sizes),
        cmocka_unit_test(choices_differ),          cmocka_unit_test(the_seed_is_the_model),
        cmocka_unit_test(settings_name_the_model),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

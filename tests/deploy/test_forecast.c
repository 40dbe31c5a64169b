/* The formulas of predictions against numbers worked by hand for the real model: within the
 * rounding in which those are written down. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "deploy/tool/forecast.h"

enum { K = 1024 };

static const struct td_forecast_model flash = {
    .layers = 43,
    .csa_layers = 21,
    .hca_layers = 20,
    .hidden = 4096,
    .heads = 64,
    .head_dim = 512,
    .window = 128,
    .index_heads = 64,
    .index_dim = 128,
    .index_topk = 512,
    .experts = 256,
    .experts_per_token = 6,
    .dense_bytes = 7.77e9,
    .expert_bytes = 14.16e6,
    .parameters = 12.74e9,
    .row_bytes = 584,
    .key_bytes = 256,
};
static const struct td_forecast_rates pro = {.gpu_bytes = 1.45e12,
                                             .prefill_tokens = 7000,
                                             .floor_share = 0.60,
                                             .output_tokens = 1024,
                                             .link_bytes = 41e9,
                                             .reduction_s = 24e-6};

static void near(double found, double expected, double tolerance) {
    if (found < expected * (1 - tolerance) || found > expected * (1 + tolerance))
        fail_msg("expected %g to %g %%, found %g", expected, tolerance * 100, found);
}

static void experts(void **state) {
    (void)state;
    static const struct {
        double batch, distinct;
    } worked[] = {{1, 6}, {8, 44}, {16, 81}, {32, 136}, {64, 200}, {128, 244}};
    for (size_t i = 0; i < sizeof worked / sizeof worked[0]; i++)
        near(td_forecast_experts(&flash, worked[i].batch), worked[i].distinct, 0.01);
}

static void kv_of_a_request(void **state) {
    (void)state;
    static const struct {
        double tokens, fp8_keys, bf16_keys, bf16_rows;
    } worked[] = {{8 * K, 34.8e6, 40.1e6, 62e6},
                  {32 * K, 129e6, 151e6, 231e6},
                  {128 * K, 508e6, 593e6, 907e6},
                  {512 * K, 2022e6, 2363e6, 3613e6},
                  {K * K, 4041e6, 4723e6, 7220e6}};
    for (size_t i = 0; i < sizeof worked / sizeof worked[0]; i++) {
        struct td_forecast_model m = flash;
        near(td_forecast_kv_held(&m, worked[i].tokens), worked[i].bf16_keys, 0.005);
        m.key_bytes = 132;
        near(td_forecast_kv_held(&m, worked[i].tokens), worked[i].fp8_keys, 0.005);
        m.row_bytes = 1024, m.key_bytes = 256;
        near(td_forecast_kv_held(&m, worked[i].tokens), worked[i].bf16_rows, 0.005);
    }
}

/* Batch, GB per step at 8K and 128K, ms of four GPUs with the KV state split. */
static void steps(void **state) {
    (void)state;
    static const struct {
        double batch, gb[2], ms[2], ceiling[2];
    } worked[] = {{1, {11.6, 11.8}, {2.0, 2.0}, {500, 492}},
                  {8, {35.0, 36.4}, {6.0, 6.3}, {1324, 1273}},
                  {32, {91.5, 97.1}, {15.8, 16.7}, {2029, 1911}},
                  {64, {131, 142}, {22.6, 24.5}, {2834, 2609}},
                  {128, {159, 182}, {27.4, 31.3}, {4669, 4089}},
                  {256, {169, 214}, {29.1, 36.9}, {8794, 6939}}};
    for (size_t i = 0; i < sizeof worked / sizeof worked[0]; i++)
        for (int far = 0; far < 2; far++) {
            double b = worked[i].batch, tokens = far ? 128 * K : 8 * K;
            near(td_forecast_step_bytes(&flash, b, tokens), worked[i].gb[far] * 1e9, 0.02);
            double s = td_forecast_step_floor(&flash, &pro, b, tokens, 4, TD_FORECAST_KV_SPLIT);
            near(s, worked[i].ms[far] * 1e-3, 0.02);
            near(b / s, worked[i].ceiling[far], 0.02);
        }
}

static void replicated_state_is_read_by_every_rank(void **state) {
    (void)state;
    double read = 64 * td_forecast_kv_read(&flash, 128 * K);
    double split = td_forecast_rank_bytes(&flash, 64, 128 * K, 4, TD_FORECAST_KV_SPLIT);
    double whole = td_forecast_rank_bytes(&flash, 64, 128 * K, 4, TD_FORECAST_KV_REPLICATED);
    near(whole - split, read * 3 / 4, 1e-9);
    near(4 * split, td_forecast_step_bytes(&flash, 64, 128 * K), 1e-9);
    struct td_forecast_model m = flash;
    m.whole_bytes = 1e9;
    near(td_forecast_rank_bytes(&m, 64, 128 * K, 4, TD_FORECAST_KV_SPLIT) - split, 0.75e9, 1e-6);
    near(td_forecast_rank_bytes(&m, 8, 8 * K, 1, TD_FORECAST_KV_SPLIT),
         td_forecast_step_bytes(&m, 8, 8 * K), 1e-9);
    near(td_forecast_rank_bytes(&flash, 8, 8 * K, 1, TD_FORECAST_KV_REPLICATED),
         td_forecast_step_bytes(&flash, 8, 8 * K), 1e-9);
}

static void a_short_sequence_reads_what_it_has(void **state) {
    (void)state;
    near(td_forecast_kv_read(&flash, 64), 43 * 64 * 584.0 + 21 * 16 * 840.0 + 20 * 0.5 * 584, 1e-9);
}

static void flop_of_a_prompt_token(void **state) {
    (void)state;
    static const struct {
        double tokens, core, index, total;
    } worked[] = {{8 * K, 2.2, 0.35, 28.0},
                  {32 * K, 2.5, 1.4, 29.4},
                  {128 * K, 3.5, 5.6, 34.6},
                  {512 * K, 7.5, 22.6, 55.5},
                  {K * K, 12.9, 45.1, 83.4}};
    for (size_t i = 0; i < sizeof worked / sizeof worked[0]; i++) {
        struct td_forecast_flop f = td_forecast_flop(&flash, worked[i].tokens);
        near(f.weights, 25.5e9, 0.005);
        near(f.core, worked[i].core * 1e9, 0.015);
        near(f.index, worked[i].index * 1e9, 0.015);
        near(f.weights + f.core + f.index, worked[i].total * 1e9, 0.005);
    }
}

/* A chunk of 8,192 tokens on four GPUs: 86 times 67 MB in bf16, 2.45 ms each, 26 us a token. */
static void reductions(void **state) {
    (void)state;
    assert_int_equal(td_forecast_reductions(&flash), 86);
    double chunk = td_forecast_reduced_bytes(&flash, 8192, 2);
    near(chunk, 67e6, 0.005);
    double one = td_forecast_ring_bytes(chunk, 4) / pro.link_bytes;
    near(one, 2.45e-3, 0.005);
    near(86 * one, 0.21, 0.01);
    near(86 * one / 8192, 26e-6, 0.02);
    near(86 * 7.5e-6, 0.65e-3, 0.01);
    near(td_forecast_gather_bytes(chunk, 4), 3 * chunk, 1e-9);
    assert_true(td_forecast_ring_bytes(chunk, 1) == 0 && td_forecast_gather_bytes(chunk, 1) == 0);
    near(td_forecast_ring_bytes(chunk, 2), td_forecast_gather_bytes(chunk, 2), 1e-9);
}

/* GPU-seconds per request, the ratios of GPUs they ask for, and what a 4 + 4 split keeps. */
static void balance(void **state) {
    (void)state;
    static const struct {
        double tokens, prefill, decode, ratio, share;
    } worked[] = {{8 * K, 1.2, 2.4, 1.0 / 2, 0.74},
                  {32 * K, 4.7, 2.4, 2, 0.76},
                  {128 * K, 18.8, 2.6, 7, 0.57}};
    for (size_t i = 0; i < sizeof worked / sizeof worked[0]; i++) {
        double p = td_forecast_prefill_cost(&pro, worked[i].tokens);
        double d =
            td_forecast_decode_cost(&flash, &pro, 64, worked[i].tokens, 4, TD_FORECAST_KV_SPLIT);
        near(p, worked[i].prefill, 0.03);
        near(d, worked[i].decode, 0.03);
        near(p / d, worked[i].ratio, 0.05);
        struct td_forecast_balance b = td_forecast_balance(4, 4, p, d);
        near(b.share, worked[i].share, 0.01);
        assert_true(b.goodput == (b.prefill < b.decode ? b.prefill : b.decode));
        near(b.prefill, 4 / p, 1e-9);
        near(b.decode, 4 / d, 1e-9);
    }
    near(td_forecast_decode_cost(&flash, &pro, 64, 8 * K, 4, TD_FORECAST_KV_SPLIT), 1024 / 425.0,
         0.005);
    /* where GPUs stand as the costs do, nothing is lost */
    near(td_forecast_balance(2, 6, 1, 3).share, 1, 1e-9);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts),
        cmocka_unit_test(kv_of_a_request),
        cmocka_unit_test(steps),
        cmocka_unit_test(replicated_state_is_read_by_every_rank),
        cmocka_unit_test(a_short_sequence_reads_what_it_has),
        cmocka_unit_test(flop_of_a_prompt_token),
        cmocka_unit_test(reductions),
        cmocka_unit_test(balance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

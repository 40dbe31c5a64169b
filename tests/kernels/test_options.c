/* Settings to engine options: defaults resolved, what does not exist refused by name. */
#include "tests/kernels/fixture.h"

#include "kernels/engine.h"

static struct td_model_config model(bool quantised) {
    return (struct td_model_config){
        .index_topk = 64, .max_positions = 65536, .quantised = quantised};
}

static void defaults(void **state) {
    (void)state;
    struct td_config c;
    struct td_model_config m = model(false);
    struct td_engine_options o;
    struct td_error err;
    td_config_defaults(&c);
    assert_int_equal(td_engine_options_from(&c, &m, &o, &err), TD_OK);
    assert_int_equal(o.row_dtype, TD_KV_ROW_BF16);
    assert_int_equal(o.key_dtype, TD_KV_KEY_BF16);
    assert_int_equal(o.index_topk, 64);
    assert_int_equal(o.max_context, 65536);
    assert_int_equal(o.pages, 2 * 256);
    assert_int_equal(o.slots, 16);
    assert_int_equal(o.max_runs, 16);
    assert_int_equal(o.max_tokens, 512);
    assert_true(o.threads >= 1);
}

static void given_values(void **state) {
    (void)state;
    struct td_config c;
    struct td_model_config m = model(true);
    struct td_engine_options o;
    struct td_error err;
    static const char *const settings[] = {
        "numerics=plain",   "index_key_dtype=fp8", "kv_dtype=fp32",  "index_topk=1024",
        "max_context=1000", "max_running=40",      "chunk_tokens=8", "threads=3"};
    td_config_defaults(&c);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        assert_int_equal(td_config_set(&c, settings[i], &err), TD_OK);
    assert_int_equal(td_engine_options_from(&c, &m, &o, &err), TD_OK);
    assert_int_equal(o.row_dtype, TD_KV_ROW_FP32);
    assert_int_equal(o.key_dtype, TD_KV_KEY_FP8);
    assert_int_equal(o.index_topk, 1024);
    assert_int_equal(o.pages, 2 * 4);   /* 1,000 tokens are four pages, partly used */
    assert_int_equal(o.max_tokens, 40); /* one token of every running sequence fits */
    assert_int_equal(o.threads, 3);
}

static void refused(const char *setting, bool quantised, td_status want, const char *word) {
    struct td_config c;
    struct td_model_config m = model(quantised);
    struct td_engine_options o = {.threads = 12345};
    struct td_error err = {0};
    td_config_defaults(&c);
    if (setting) assert_int_equal(td_config_set(&c, setting, &err), TD_OK);
    assert_int_equal(td_engine_options_from(&c, &m, &o, &err), want);
    if (!strstr(err.text, word)) fail_msg("expected \"%s\" in: %s", word, err.text);
    assert_int_equal(o.threads, 12345);
}

static void what_does_not_exist(void **state) {
    (void)state;
    refused("numerics=ref", true, TD_UNSUPPORTED, "numerics=plain");
    refused(NULL, true, TD_UNSUPPORTED, "numerics=plain"); /* auto on a quantised checkpoint */
    refused("index_sim4=on", false, TD_UNSUPPORTED, "index_sim4");
    refused("index_key_dtype=fp4", false, TD_UNSUPPORTED, "index_key_dtype");
    refused("score_dtype=bf16", false, TD_UNSUPPORTED, "score_dtype");
    refused("kv_dtype=fp8", false, TD_UNSUPPORTED, "kv_dtype");
    refused("max_context=65537", false, TD_CONFIG, "65537");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(given_values),
        cmocka_unit_test(what_does_not_exist),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

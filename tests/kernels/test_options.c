/* Settings to engine options: every "auto" resolved, wrong values refused by name; and ops forced
 * to their reference by name. */
#include <stdio.h>

#include "tests/kernels/fixture.h"

#include "kernels/device.h"
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
    assert_false(o.ref);
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

static void wrong_values(void **state) {
    (void)state;
    refused("max_context=65537", false, TD_CONFIG, "65537");
    refused("max_context=1", false, TD_CONFIG, "at least 2");
    refused("force_ref=linear,softmax", false, TD_CONFIG, "softmax");
    refused("force_ref=linea", false, TD_CONFIG, "linea");
    refused("nvfp4_activations=on", false, TD_CONFIG, "expected numerics ref, found plain");
}

/* One place reads where ranks compute; without CUDA what is right is refused for that alone. */
static void devices(const char *name, uint64_t ranks, const char *word, uint32_t a, uint32_t b,
                    uint32_t last) {
    const struct td_backend *backend;
    uint32_t index[TD_MAX_RANKS];
    struct td_error err = {0};
    td_status st = td_backend_find(name, ranks, &backend, index, &err);
#ifndef TD_HAVE_CUDA
    if (!word && name[1] == 'u') word = "this build has no CUDA";
#endif
    assert_int_equal(st, word ? TD_CONFIG : TD_OK);
    if (word && !strstr(err.text, word)) fail_msg("expected \"%s\" in: %s", word, err.text);
    if (word && !strstr(word, "no CUDA")) return;
    assert_int_equal(index[0], a);
    if (ranks > 1) assert_int_equal(index[1], b);
    assert_int_equal(index[ranks - 1], last);
}

static void where_ranks_compute(void **state) {
    (void)state;
    devices("cpu", 8, NULL, 0, 0, 0);
    devices("cuda", 1, NULL, 0, 0, 0);
    devices("cuda", 4, NULL, 0, 1, 3);
    devices("cuda:2", 1, NULL, 2, 0, 2);
    devices("cuda:4", 4, NULL, 4, 5, 7);
    devices("cuda:3,1", 2, NULL, 3, 1, 1);
    devices("cuda:0,0", 2, NULL, 0, 0, 0);
    devices("cuda:248", 8, NULL, 248, 249, 255);
    devices("cuda:249", 8, "found 256 for the last of 8 ranks", 0, 0, 0);
    devices("cuda:1,2", 1, "one GPU for each of 1 ranks (tp), found 2", 0, 0, 0);
    devices("cuda:1,2", 4, "one GPU for each of 4 ranks (tp), found 2", 0, 0, 0);
    devices("cuda:0,1,2,3,4,5,6,7,0", 8, "found 9 in", 0, 0, 0);
    devices("cuda:", 1, "a number behind", 0, 0, 0);
    devices("cuda:1,", 2, "found cuda:1,", 0, 0, 0);
    devices("cuda:,1", 2, "found cuda:,1", 0, 0, 0);
    devices("cuda:1,-2", 2, "with commas between", 0, 0, 0);
    devices("cuda:256", 1, "from 0 to 255", 0, 0, 0);
    devices("cpu", 3, "1, 2, 4 or 8 ranks, found 3", 0, 0, 0);
    devices("cpu", 0, "found 0", 0, 0, 0);
    devices("cpu", 16, "found 16", 0, 0, 0);
    devices("cpu:0", 1, "expected cpu, cuda:N", 0, 0, 0);
    refused("tp=3", false, TD_CONFIG, "tp: expected 1, 2, 4 or 8 ranks, found 3");
}

static struct td_engine_options resolved(bool quantised, const char *const *settings) {
    struct td_config c;
    struct td_model_config m = model(quantised);
    struct td_engine_options o;
    struct td_error err = {0};
    td_config_defaults(&c);
    for (; *settings; settings++)
        if (td_config_set(&c, *settings, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_engine_options_from(&c, &m, &o, &err) != TD_OK) fail_msg("%s", err.text);
    return o;
}
#define RESOLVED(quantised, ...) resolved(quantised, (const char *const[]){__VA_ARGS__, NULL})

static void numerics(void **state) {
    (void)state;
    struct td_engine_options o = RESOLVED(true, "numerics=auto");
    assert_true(o.ref);
    assert_int_equal(o.row_dtype, TD_KV_ROW_FP8);
    assert_int_equal(o.key_dtype, TD_KV_KEY_BF16);
    assert_false(o.index_sim4);
    assert_false(o.score_bf16);
    o = RESOLVED(false, "numerics=auto");
    assert_false(o.ref);
    assert_int_equal(o.row_dtype, TD_KV_ROW_BF16);
    o = RESOLVED(false, "numerics=ref", "index_sim4=on", "index_key_dtype=fp4", "score_dtype=bf16");
    assert_true(o.ref);
    assert_true(o.index_sim4);
    assert_true(o.score_bf16);
    assert_int_equal(o.row_dtype, TD_KV_ROW_FP8);
    assert_int_equal(o.key_dtype, TD_KV_KEY_FP4);
    o = RESOLVED(true, "numerics=plain", "kv_dtype=fp8");
    assert_false(o.ref);
    assert_int_equal(o.row_dtype, TD_KV_ROW_FP8);
    assert_false(o.nvfp4_activations);
    assert_true(RESOLVED(true, "nvfp4_activations=on").nvfp4_activations);
    o = RESOLVED(true, "kv_dtype=bf16");
    assert_true(o.ref);
    assert_int_equal(o.row_dtype, TD_KV_ROW_BF16);
}

static void forced_ops(void **state) {
    (void)state;
    struct td_ops ops;
    char text[512];
    td_ops_init(&ops, RESOLVED(false, "force_ref=").force_ref);
    assert_memory_equal(&ops, td_ops_select(), sizeof ops);
    td_ops_init(&ops, RESOLVED(false, "force_ref=all").force_ref);
    ops.name = td_ops_ref.name; /* the table's own, not an op */
    assert_memory_equal(&ops, &td_ops_ref, sizeof ops);
    struct td_engine_options o = RESOLVED(false, "force_ref= attend,linear ,, linear");
    td_ops_init(&ops, o.force_ref);
    assert_ptr_equal(ops.linear, td_ops_ref.linear);
    assert_ptr_equal(ops.attend, td_ops_ref.attend);
    assert_ptr_equal(ops.embed, td_ops_select()->embed);
    assert_ptr_equal(ops.gather, td_ops_select()->gather);
    td_ops_names(o.force_ref, text, sizeof text);
    assert_string_equal(text, "linear attend");
    td_ops_names(RESOLVED(false, "force_ref=gather all").force_ref, text, sizeof text);
    assert_string_equal(text, "all");
}

/* Whether a line of /proc/cpuinfo that begins with `key` has `word`. */
static bool processor_has(const char *key, const char *word) {
    static char line[8192];
    bool found = false;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            for (char *save, *w = strtok_r(line, " \t\n:", &save); w;
                 w = strtok_r(NULL, " \t\n:", &save))
                found |= strcmp(w, word) == 0;
    if (f) fclose(f);
    return found;
}

static void tables_of_ops(void **state) {
    (void)state;
    uint32_t n = 0, avx2 = UINT32_MAX, avx512 = UINT32_MAX;
    for (; td_ops_table(n); n++) {
        for (uint32_t i = 0; i < n; i++)
            assert_ptr_not_equal(td_ops_table(i), td_ops_table(n));
        if (strcmp(td_ops_table(n)->name, "avx2") == 0) avx2 = n;
        if (strcmp(td_ops_table(n)->name, "avx512") == 0) avx512 = n;
    }
    assert_ptr_equal(td_ops_table(n - 1), &td_ops_ref);
    assert_ptr_equal(td_ops_table(0), td_ops_select());
    assert_null(td_ops_table(n + 1));
    if (avx512 == UINT32_MAX) return;
    assert_int_not_equal(avx2, UINT32_MAX);
    bool zen4 = processor_has("vendor_id", "AuthenticAMD") && processor_has("cpu family", "25");
    assert_int_equal(avx2 < avx512, zen4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),      cmocka_unit_test(given_values),
        cmocka_unit_test(wrong_values),  cmocka_unit_test(where_ranks_compute),
        cmocka_unit_test(numerics),      cmocka_unit_test(forced_ops),
        cmocka_unit_test(tables_of_ops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

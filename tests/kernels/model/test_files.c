/* Broken safetensors files, indexes and configurations: never a read outside the mapping (run
 * under AddressSanitizer too), always a sentence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "kernels/model/model.h"
#include "tests/kernels/model/maker.h"
#include "tests/kernels/model/refuse.h"

static const char file[] = "model.safetensors";

/* The whole file with header text `h` in place of the true header. */
static void write_header(const struct maker *m, const char *h) {
    maker_write_file(m, file, h, strlen(h), -1, m->data, m->bytes);
}

/* The true header with the first `from` replaced by `to` (heap). */
static char *edit(const struct maker *m, const char *from, const char *to) {
    char *h = maker_header(m, 0, m->n), *at = strstr(h, from);
    assert_non_null(at);
    size_t cap = strlen(h) + strlen(to) + 1;
    char *s = malloc(cap);
    snprintf(s, cap, "%.*s%s%s", (int)(at - h), h, to, at + strlen(from));
    free(h);
    return s;
}

#define REFUSE_EDIT(m, from, to, ...)                                                              \
    do {                                                                                           \
        char *edited = edit(m, from, to);                                                          \
        write_header(m, edited);                                                                   \
        free(edited);                                                                              \
        REFUSED(m, file, __VA_ARGS__);                                                             \
    } while (0)

static void lengths_are_checked(void **state) {
    (void)state;
    struct maker m;
    char path[160];
    maker_init(&m, MAKER_BF16);
    maker_write(&m);
    char *h = maker_header(&m, 0, m.n);
    size_t n = strlen(h);
    snprintf(path, sizeof path, "%s/%s", m.dir, file);
    maker_write_file(&m, file, h, n, INT64_MAX, m.data, m.bytes);
    REFUSED(&m, file, "header length: expected at most", "found 9223372036854775807");
    maker_write_file(&m, file, h, n, (int64_t)(n + m.bytes + 1), m.data, m.bytes);
    REFUSED(&m, file, "header length: expected at most");
    maker_write_file(&m, file, h, n, (int64_t)n - 9, m.data, m.bytes); /* JSON cut short */
    REFUSED(&m, file, "header: expected a JSON object");
    maker_write_file(&m, file, h, n, (int64_t)(n + 5), m.data, m.bytes); /* data taken as JSON */
    REFUSED(&m, file, "header: expected a JSON object");
    maker_write_file(&m, file, h, n, -1, m.data, m.bytes - 1); /* the data cut short */
    REFUSED(&m, file, "data_offsets: expected 0 <= begin <= end <=");
    for (int size = 0; size < 9; size++) {
        assert_int_equal(truncate(path, size), 0);
        if (size == 0)
            REFUSED(&m, file, "empty");
        else if (size < 8)
            REFUSED(&m, file, "8 bytes of the header length");
        else
            REFUSED(&m, file, "header length: expected at most 0");
        maker_write_file(&m, file, h, n, -1, m.data, m.bytes);
    }
    free(h);
    maker_finish(&m);
}

static void headers_must_be_json(void **state) {
    (void)state;
    struct maker m;
    maker_init(&m, MAKER_BF16);
    maker_write(&m);
    write_header(&m, "");
    REFUSED(&m, file, "expected a JSON object");
    write_header(&m, "[1, 2]");
    REFUSED(&m, file, "expected a JSON object", "another JSON value");
    write_header(&m, "{\"a\xff\": 1}");
    REFUSED(&m, file, "expected a JSON object", "byte 0xff");
    write_header(&m, "{\"a\\u0000b\": 1}");
    REFUSED(&m, file, "expected a JSON object");
    char *deep = malloc(1 << 20);
    memset(deep, '[', (1 << 20) - 1);
    deep[(1 << 20) - 1] = '\0';
    memcpy(deep, "{\"a\":", 5);
    write_header(&m, deep);
    REFUSED(&m, file, "expected a JSON object", "depth");
    free(deep);
    REFUSE_EDIT(&m, "\"head.weight\"", "\"embed.weight\"", "duplicate");
    REFUSE_EDIT(&m, "\"norm.weight\":{", "\"norm.weight\":7,\"x\":{", "tensor norm.weight",
                "expected an object");
    maker_finish(&m);
}

static void entries_are_checked(void **state) {
    (void)state;
    struct maker m;
    char offsets[64], to[128];
    maker_init(&m, MAKER_BF16);
    maker_write(&m);
    const struct maker_tensor *t = maker_find(&m, "head.weight");
    snprintf(offsets, sizeof offsets, "[%zu,%zu]", t->begin, t->end);
    static const char *const bad[] = {"[-2,1022]", "[2048,1024]",
                                      "[9223372036854774783,"
                                      "9223372036854775807]",
                                      "[4294967296,4294968320]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSE_EDIT(&m, offsets, bad[i], "tensor head.weight", "data_offsets: expected 0 <= begin");
    static const char *const odd[] = {"[1024]", "[1024,2048,1]", "[1024.0,2048.0]",
                                      "\"x\"",  "null",          "[\"1024\",2048]"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        REFUSE_EDIT(&m, offsets, odd[i], "tensor head.weight", "two integers");
    REFUSE_EDIT(&m, offsets, "[1024,99999999999999999999]", "expected a JSON object", "integer");
    snprintf(to, sizeof to, "[%zu,%zu]", t->begin, t->end - 2);
    REFUSE_EDIT(&m, offsets, to, "tensor head.weight", "as many bytes as BF16 [8, 64] has");
    snprintf(to, sizeof to, "[%zu,%zu]", t->begin - 2, t->end - 2);
    REFUSE_EDIT(&m, offsets, to, "tensor head.weight", "overlap with embed.weight");
    REFUSE_EDIT(&m, offsets, "[0,1024]", "weight", "overlap with");
    REFUSE_EDIT(&m, "[8,64]", "[4294967296,4294967296]", "embed.weight", "does not fit 64 bits");
    REFUSE_EDIT(&m, "[8,64]", "[4611686018427387904,2]", "embed.weight", "as many bytes as");
    REFUSE_EDIT(&m, "[8,64]", "[-8,-64]", "embed.weight", "integers of at least 0");
    REFUSE_EDIT(&m, "[8,64]", "[8,64.0]", "embed.weight", "integers of at least 0");
    REFUSE_EDIT(&m, "[8,64]", "[1,1,1,1,1,1,1,8,64]", "embed.weight", "at most 8 sizes");
    REFUSE_EDIT(&m, "[8,64]", "[8,64,1]", "embed.weight", "expected shape [8, 64]",
                "found [8, 64, 1]");
    REFUSE_EDIT(&m, "\"dtype\":\"BF16\"", "\"dtype\":16", "embed.weight",
                "dtype: expected a string");
    REFUSE_EDIT(&m, "\"dtype\":\"BF16\"", "\"dtype\":\"F32\"", "embed.weight", "as many bytes as");
    /* A name that would break the line or the terminal is shown harmless. */
    REFUSE_EDIT(&m, "\"embed.weight\":{\"dtype\":\"BF16\"", "\"e\\n\\u001b\":{\"dtype\":7",
                "tensor e??: dtype");
    maker_finish(&m);
}

static void random_damage_is_refused_or_harmless(void **state) {
    (void)state;
    const char *env = getenv("TANDEM_TEST_SEED");
    uint64_t seed = env ? strtoull(env, NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu (set TANDEM_TEST_SEED to repeat)\n", (unsigned long long)seed);
    struct maker m;
    maker_init(&m, MAKER_NVFP4);
    maker_write(&m);
    int refusals = 0;
    for (int i = 0; i < 300; i++) {
        char *h = maker_header(&m, 0, m.n);
        size_t n = strlen(h);
        for (int k = 0; k < 1 + i % 3; k++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            h[(seed >> 33) % n] = "0123456789[]{},:\"-. e\xf0"[(seed >> 20) % 22];
        }
        maker_write_file(&m, file, h, n, -1, m.data, m.bytes);
        free(h);
        struct td_model *model;
        struct td_error err;
        if (td_model_open(m.dir, &model, &err) == TD_OK) {
            float row[1024];
            td_weight_row(&model->layer[2].experts[1].w2, 63, row);
            td_model_close(model);
        } else {
            assert_in_range(strlen(err.text), 10, sizeof err.text - 1);
            refusals++;
        }
    }
    assert_true(refusals > 150);
    maker_finish(&m);
}

static void indexes_must_agree_with_their_shards(void **state) {
    (void)state;
    struct maker m;
    maker_init(&m, MAKER_BF16);
    static const char index[] = "model.safetensors.index.json";
    maker_write_shards(&m, "\"norm.weight\":\"a.safetensors\"",
                       "\"norm.weight\":\"b.safetensors\"");
    REFUSED(&m, index, "tensor norm.weight", "expected in b.safetensors", "found in a.safetensors");
    maker_write_shards(&m, "\"norm.weight\"", "\"norm.weights\"");
    REFUSED(&m, index, "tensor norm.weights", "found in no shard");
    maker_write_shards(&m, "\"norm.weight\":\"a.safetensors\",", "");
    REFUSED(&m, "a.safetensors", "tensor norm.weight", index);
    maker_write_shards(&m, "\"norm.weight\":\"a.", "\"norm.weight\":\"sub/a.");
    REFUSED(&m, index, "tensor norm.weight", "a file in this folder");
    maker_write_shards(&m, "\"norm.weight\":\"a.", "\"norm.weight\":\"../a.");
    REFUSED(&m, index, "tensor norm.weight", "a file in this folder");
    maker_write_shards(&m, "\"norm.weight\":\"a.safetensors\"", "\"norm.weight\":3");
    REFUSED(&m, index, "tensor norm.weight", "a file in this folder");
    maker_write_shards(&m, "\"weight_map\":{", "\"weight_mop\":{");
    REFUSED(&m, index, "weight_map");
    maker_write_shards(&m, "\"weight_map\":{", "\"weight_map\":[");
    REFUSED(&m, index, "expected JSON");
    maker_write_shards(&m, "\"norm.weight\":\"a.", "\"norm.weight\":\"c.");
    refuse(m.dir, TD_NOT_FOUND, WORDS("c.safetensors", "cannot be opened"));
    /* The same tensor in two shards. */
    maker_write_shards(&m, NULL, NULL);
    char *h = maker_header(&m, 0, m.n);
    maker_write_file(&m, "b.safetensors", h, strlen(h), -1, m.data, m.bytes);
    free(h);
    REFUSED(&m, "b.safetensors", "expected once", "a.safetensors");
    maker_finish(&m);
}

static void folders_must_hold_a_model(void **state) {
    (void)state;
    struct maker m;
    char path[160];
    maker_init(&m, MAKER_BF16);
    refuse(m.dir, TD_NOT_FOUND, WORDS("config.json"));
    maker_write_config(&m, NULL, NULL);
    refuse(m.dir, TD_NOT_FOUND, WORDS("model.safetensors", "found none"));
    snprintf(path, sizeof path, "%s/%s", m.dir, file);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    refuse(m.dir, TD_IO, WORDS(file, "regular file"));
    maker_finish(&m);
}

static void configurations_are_checked(void **state) {
    (void)state;
    static const char *const bad[][4] = {
        {"\"deepseek_v4\"", "\"deepseek_v3\"", "model_type: expected \"deepseek_v4\"", "v3"},
        {"\"head_dim\": 512", "\"head_dim\": 576", "head_dim: expected 512", "found 576"},
        {"\"sliding_window\": 128", "\"sliding_window\": 64", "sliding_window", "found 64"},
        {"\"hc_mult\": 4", "\"hc_mult\": 2", "hc_mult: expected 4", "found 2"},
        {"\"hidden_size\": 64", "\"hidden_size\": 64.5", "hidden_size: expected an integer",
         "64.5"},
        {"\"hidden_size\": 64", "\"hidden_size\": 0", "hidden_size", "found 0"},
        {"\"hidden_size\": 64,", "", "hidden_size", "found nothing"},
        {"\"hidden_size\": 64", "\"hidden_size\": 32", "hidden_size", ""},
        {"[0, 4, 128, 0]", "[0, 4]", "compress_ratios: expected an array of at least 3", "[0,4]"},
        {"[0, 4, 128, 0]", "[0, 8, 128]", "ratios 0, 4 or 128", "found 8"},
        {"[0, 4, 128, 0]", "[0, 4, 128, 4]", "0 after the last layer", "found 4"},
        {"\"num_experts_per_tok\": 1", "\"num_experts_per_tok\": 3", "from 1 to 2", "found 3"},
        {"\"index_topk\": 16", "\"index_topk\": 4096", "index_topk", "from 1 to 2048"},
        {"\"num_hidden_layers\": 3", "\"num_hidden_layers\": 1000", "num_hidden_layers", "1000"},
        {"\"num_attention_heads\": 2", "\"num_attention_heads\": 3", "o_groups", "divisor"},
        {"\"eos_token_id\": 1", "\"eos_token_id\": 8", "eos_token_id", "from 0 to 7"},
        {"\"norm_topk_prob\": true", "\"norm_topk_prob\": 1", "norm_topk_prob", "expected true"},
        {"\"type\": \"yarn\"", "\"type\": \"linear\"", "rope_scaling.type", "yarn"},
        {"\"factor\": 16", "\"factor\": \"16\"", "rope_scaling.factor", "a number"},
        {"\"rope_scaling\"", "\"rope_scalings\"", "rope_scaling: expected an object", "nothing"},
        {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", "rms_norm_eps", "a number from"},
        {"\"bos_token_id\"", "\"eos_token_id\"", "duplicate", ""},
        {"{\"model", "[\"model", "expected a JSON object", "line"},
    };
    struct maker m;
    maker_init(&m, MAKER_BF16);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct td_model_config c;
        struct td_error err = {0};
        maker_write_config(&m, bad[i][0], bad[i][1]);
        if (strstr(bad[i][1], ": 32")) { /* right by itself, wrong for the tensors */
            maker_write(&m);
            maker_write_config(&m, bad[i][0], bad[i][1]);
            assert_int_equal(td_model_config_load(m.dir, &c, &err), TD_OK);
            REFUSED(&m, "embed.weight", "expected shape [8, 32]", "found [8, 64]");
            continue;
        }
        assert_int_equal(td_model_config_load(m.dir, &c, &err), TD_FORMAT);
        expect_word(err.text, bad[i][2]);
        expect_word(err.text, bad[i][3]);
        expect_word(err.text, "config.json");
    }
    maker_finish(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths_are_checked),
        cmocka_unit_test(headers_must_be_json),
        cmocka_unit_test(entries_are_checked),
        cmocka_unit_test(random_damage_is_refused_or_harmless),
        cmocka_unit_test(indexes_must_agree_with_their_shards),
        cmocka_unit_test(folders_must_hold_a_model),
        cmocka_unit_test(configurations_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Loading, refusing what is not this kind of tokenizer, encoding with and without added tokens. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "common/text/tokenizer.h"
#include "tests/common/text/tiny.h"

static void assert_ids(const struct td_ids *got, size_t n, const int32_t *expected) {
    assert_int_equal(got->n, n);
    if (n) assert_memory_equal(got->ids, expected, n * sizeof *expected);
}

#define ASSERT_ENCODES(encode, t, text, ...)                                                       \
    do {                                                                                           \
        struct td_ids got_ = {0};                                                                  \
        const int32_t want_[] = {__VA_ARGS__};                                                     \
        assert_int_equal(encode(t, text, sizeof text - 1, &got_, NULL), TD_OK);                    \
        assert_ids(&got_, sizeof want_ / sizeof *want_, want_);                                    \
        td_ids_free(&got_);                                                                        \
    } while (0)

static void encodes_ordinary_text(void **state) {
    (void)state;
    struct td_tokenizer *t = tiny_tokenizer();
    ASSERT_ENCODES(td_tokenizer_encode, t, "aba", 258); /* "ab" first, then "aba" */
    ASSERT_ENCODES(td_tokenizer_encode, t, "bab", 'b', 256);
    ASSERT_ENCODES(td_tokenizer_encode, t, "x a\n\n", 'x', 259, 260);
    ASSERT_ENCODES(td_tokenizer_encode, t, "1234", 265, '4');
    /* The rule that makes "STOP" stands before the one that makes its right half. */
    ASSERT_ENCODES(td_tokenizer_encode, t, "STOP", 267);
    ASSERT_ENCODES(td_tokenizer_encode, t, "\xE6\xAF\x95\xF0\x9F\x99\x82", 262, 0x95, 261, 263);
    ASSERT_ENCODES(td_tokenizer_encode, t, "\xFF\xC3", 0xFF, 0xC3);
    ASSERT_ENCODES(td_tokenizer_encode, t, "a\0b", 'a', 0, 'b');
    struct td_ids none = {0};
    assert_int_equal(td_tokenizer_encode(t, NULL, 0, &none, NULL), TD_OK);
    assert_int_equal(none.n, 0);
    td_tokenizer_destroy(t);
}

/* Being in the vocabulary is not enough: merges must lead there. */
static void respects_merges_over_vocabulary(void **state) {
    (void)state;
    json_t *root = tiny_json();
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "xyz",
                        json_integer(900));
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), "bab",
                        json_integer(901));
    json_array_append_new(json_object_get(json_object_get(root, "model"), "merges"),
                          json_string("ba b")); /* never: "ab" is merged before "ba" */
    struct td_tokenizer *t = NULL;
    assert_int_equal(tiny_load(root, &t, NULL), TD_OK);
    ASSERT_ENCODES(td_tokenizer_encode, t, "xyz", 'x', 'y', 'z');
    ASSERT_ENCODES(td_tokenizer_encode, t, "bab", 'b', 256);
    td_tokenizer_destroy(t);
}

static void never_finds_added_tokens_in_ordinary_text(void **state) {
    (void)state;
    struct td_tokenizer *t = tiny_tokenizer();
    for (size_t i = 0; i < sizeof tiny_added / sizeof *tiny_added; i++) {
        struct td_ids got = {0};
        assert_int_equal(td_tokenizer_encode(t, tiny_added[i], strlen(tiny_added[i]), &got, NULL),
                         TD_OK);
        for (size_t k = 0; k < got.n; k++) {
            assert_false(td_tokenizer_is_special(t, got.ids[k]));
        }
        char *text = tiny_text(t, got.ids, got.n);
        assert_string_equal(text, tiny_added[i]);
        free(text);
        td_ids_free(&got);
    }
    td_tokenizer_destroy(t);
}

static void cuts_at_added_tokens_when_asked(void **state) {
    (void)state;
    json_t *root = tiny_json();
    tiny_add(root, 1000, "<t", true);
    tiny_add(root, 1001, "<think><think>", true);
    tiny_add(root, 1002, "k>b", false);
    struct td_tokenizer *t = NULL;
    assert_int_equal(tiny_load(root, &t, NULL), TD_OK);
    ASSERT_ENCODES(td_tokenizer_encode_added, t, "a<think>b", 'a', 1000, 'h', 'i', 'n', 1002);
    ASSERT_ENCODES(td_tokenizer_encode_added, t, "<think>c</think>", TINY_THINK, 'c',
                   TINY_THINK_END);
    ASSERT_ENCODES(td_tokenizer_encode_added, t, "<think><think><think><tx", 1001, TINY_THINK, 1000,
                   'x');
    ASSERT_ENCODES(td_tokenizer_encode_added, t, "a<｜User｜>ba", 'a', TINY_USER, 257);
    ASSERT_ENCODES(td_tokenizer_encode_added, t, "<｜User｜", '<', 0xEF, 0xBD, 0x9C, 'U', 's', 'e',
                   'r', 0xEF, 0xBD, 0x9C);
    td_tokenizer_destroy(t);
}

static void tells_about_ids(void **state) {
    (void)state;
    json_t *root = tiny_json();
    tiny_add(root, 1000, "<far>", false);
    struct td_tokenizer *t = NULL;
    assert_int_equal(tiny_load(root, &t, NULL), TD_OK);
    size_t n;
    assert_int_equal(td_tokenizer_size(t), 1001);
    assert_int_equal(td_tokenizer_max_bytes(t), 4);
    assert_int_equal(td_tokenizer_added(t, "<｜User｜>"), TINY_USER);
    assert_int_equal(td_tokenizer_added(t, "<｜begin▁of▁sentence｜>"), TINY_BOS);
    assert_int_equal(td_tokenizer_added(t, "<far>"), 1000);
    assert_int_equal(td_tokenizer_added(t, "aba"), -1);
    assert_memory_equal(td_tokenizer_bytes(t, 258, &n), "aba", 3);
    assert_int_equal(n, 3);
    assert_memory_equal(td_tokenizer_bytes(t, 1000, &n), "<far>", 5);
    assert_int_equal(n, 5);
    static const int32_t nothing[] = {-1, 999, 1001, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++) {
        assert_non_null(td_tokenizer_bytes(t, nothing[i], &n));
        assert_int_equal(n, 0);
        assert_true(td_tokenizer_is_special(t, nothing[i]));
    }
    assert_true(td_tokenizer_is_special(t, TINY_EOS));
    assert_false(td_tokenizer_is_special(t, 0));
    td_tokenizer_destroy(t);
}

static void gives_back_any_bytes(void **state) {
    (void)state;
    struct td_tokenizer *t = tiny_tokenizer();
    uint64_t seed = tiny_seed();
    struct td_ids ids = {0};
    for (int round = 0; round < 3000; round++) {
        char text[300];
        size_t n = tiny_random(&seed, sizeof text), at = 0, k;
        bool few = tiny_random(&seed, 2);
        for (size_t i = 0; i < n; i++) {
            text[i] = few ? "ab 1\n.\xE6\xAF\x95\xF0\x9F\x99\x82STOP<"[tiny_random(&seed, 18)]
                          : (char)tiny_random(&seed, 256);
        }
        ids.n = 0;
        assert_int_equal(td_tokenizer_encode(t, text, n, &ids, NULL), TD_OK);
        for (size_t i = 0; i < ids.n; i++) {
            const char *p = td_tokenizer_bytes(t, ids.ids[i], &k);
            assert_true(k > 0 && at + k <= n);
            assert_memory_equal(text + at, p, k);
            at += k;
        }
        assert_int_equal(at, n);
    }
    td_ids_free(&ids);
    td_tokenizer_destroy(t);
}

/* Edits of a good file, and what each must lead to. */
static json_t *step(json_t *root, size_t i) {
    return json_array_get(json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers"),
                          i);
}
static json_t *model(json_t *root) {
    return json_object_get(root, "model");
}
static json_t *last_added(json_t *root) {
    json_t *a = json_object_get(root, "added_tokens");
    return json_array_get(a, json_array_size(a) - 1);
}
static void other_digits(json_t *r) {
    json_object_set_new(json_object_get(step(r, 0), "pattern"), "Regex", json_string("\\p{N}"));
}
static void other_cjk(json_t *r) {
    json_object_set_new(json_object_get(step(r, 1), "pattern"), "Regex", json_string("[一-龥]+"));
}
static void longer_third(json_t *r) {
    char text[512];
    json_t *p = json_object_get(step(r, 2), "pattern");
    snprintf(text, sizeof text, "%s|x", json_string_value(json_object_get(p, "Regex")));
    json_object_set_new(p, "Regex", json_string(text));
}
static void removing(json_t *r) {
    json_object_set_new(step(r, 0), "behavior", json_string("Removed"));
}
static void inverted(json_t *r) {
    json_object_set_new(step(r, 1), "invert", json_true());
}
static void prefix_space(json_t *r) {
    json_object_set_new(step(r, 3), "add_prefix_space", json_true());
}
static void own_regex(json_t *r) {
    json_object_del(step(r, 3), "use_regex");
}
static void fifth_step(json_t *r) {
    json_array_append(json_object_get(json_object_get(r, "pre_tokenizer"), "pretokenizers"),
                      step(r, 0));
}
static void normalizer(json_t *r) {
    json_object_set_new(r, "normalizer", json_pack("{s:s}", "type", "NFC"));
}
static void template(json_t *r) {
    json_object_set_new(r, "post_processor", json_pack("{s:s}", "type", "TemplateProcessing"));
}
static void truncation(json_t *r) {
    json_object_set_new(r, "truncation", json_pack("{s:i}", "max_length", 5));
}
static void unigram(json_t *r) {
    json_object_set_new(model(r), "type", json_string("Unigram"));
}
static void fallback(json_t *r) {
    json_object_set_new(model(r), "byte_fallback", json_true());
}
static void ignore_merges(json_t *r) {
    json_object_set_new(model(r), "ignore_merges", json_true());
}
static void dropout(json_t *r) {
    json_object_set_new(model(r), "dropout", json_real(0.1));
}
static void lstrip(json_t *r) {
    json_object_set_new(last_added(r), "lstrip", json_true());
}
static void no_vocab(json_t *r) {
    json_object_del(model(r), "vocab");
}
static void missing_byte(json_t *r) {
    json_object_del(json_object_get(model(r), "vocab"), "Q");
}
static void id_twice(json_t *r) {
    json_object_set_new(json_object_get(model(r), "vocab"), "QQ", json_integer(7));
}
static void id_negative(json_t *r) {
    json_object_set_new(json_object_get(model(r), "vocab"), "QQ", json_integer(-1));
}
static void id_huge(json_t *r) {
    json_object_set_new(json_object_get(model(r), "vocab"), "QQ", json_integer((1 << 22) + 1));
}
static void id_text(json_t *r) {
    json_object_set_new(json_object_get(model(r), "vocab"), "QQ", json_string("7"));
}
static void strange_letter(json_t *r) {
    json_object_set_new(json_object_get(model(r), "vocab"), "毕", json_integer(2000));
}
static void merge_of_nothing(json_t *r) {
    json_array_append_new(json_object_get(model(r), "merges"), json_pack("[s, s]", "Q", "R"));
}
static void merge_of_three(json_t *r) {
    json_array_append_new(json_object_get(model(r), "merges"), json_string("a b a"));
}
static void merge_twice(json_t *r) {
    json_array_append_new(json_object_get(model(r), "merges"), json_string("a b"));
}
static void merge_number(json_t *r) {
    json_array_append_new(json_object_get(model(r), "merges"), json_integer(3));
}
static void added_twice(json_t *r) {
    tiny_add(r, 1000, "<think>", false);
}
static void added_on_base(json_t *r) {
    tiny_add(r, 258, "<other>", false);
}
static void added_empty(json_t *r) {
    tiny_add(r, 1000, "", false);
}

static const struct {
    void (*edit)(json_t *root);
    td_status expected;
    const char *says;
} bad[] = {
    {other_digits, TD_UNSUPPORTED, "pre_tokenizer step 0"},
    {other_cjk, TD_UNSUPPORTED, "pre_tokenizer step 1"},
    {longer_third, TD_UNSUPPORTED, "pre_tokenizer step 2"},
    {removing, TD_UNSUPPORTED, "Removed"},
    {inverted, TD_UNSUPPORTED, "pre_tokenizer step 1"},
    {prefix_space, TD_UNSUPPORTED, "pre_tokenizer step 3"},
    {own_regex, TD_UNSUPPORTED, "pre_tokenizer step 3"},
    {fifth_step, TD_UNSUPPORTED, "with 5"},
    {normalizer, TD_UNSUPPORTED, "NFC"},
    {template, TD_UNSUPPORTED, "TemplateProcessing"},
    {truncation, TD_UNSUPPORTED, "truncation"},
    {unigram, TD_UNSUPPORTED, "Unigram"},
    {fallback, TD_UNSUPPORTED, "byte_fallback"},
    {ignore_merges, TD_UNSUPPORTED, "ignore_merges"},
    {dropout, TD_UNSUPPORTED, "dropout"},
    {lstrip, TD_UNSUPPORTED, "lstrip"},
    {no_vocab, TD_FORMAT, "model.vocab"},
    {missing_byte, TD_FORMAT, "0x51"},
    {id_twice, TD_FORMAT, "'QQ'"},
    {id_negative, TD_FORMAT, "'QQ'"},
    {id_huge, TD_FORMAT, "expected an id of 0..4194304, found 4194305"},
    {id_text, TD_FORMAT, "'QQ'"},
    {strange_letter, TD_FORMAT, "alphabet"},
    {merge_of_nothing, TD_FORMAT, "merge 14"},
    {merge_of_three, TD_FORMAT, "merge 14"},
    {merge_twice, TD_FORMAT, "merge 14"},
    {merge_number, TD_FORMAT, "merge 14"},
    {added_twice, TD_FORMAT, "'<think>'"},
    {added_on_base, TD_FORMAT, "258"},
    {added_empty, TD_FORMAT, "id 1000"},
};

static void refuses_other_tokenizers(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *root = tiny_json();
        bad[i].edit(root);
        struct td_tokenizer *t = NULL;
        struct td_error err = {0};
        td_status st = tiny_load(root, &t, &err);
        if (st != bad[i].expected || !strstr(err.text, bad[i].says) || t) {
            fail_msg("edit %zu: expected %s with '%s', found %s: %s", i,
                     td_status_name(bad[i].expected), bad[i].says, td_status_name(st), err.text);
        }
    }
    struct td_tokenizer *t = NULL;
    struct td_error err;
    assert_int_equal(td_tokenizer_load("/nonexistent", &t, &err), TD_IO);
    assert_non_null(strstr(err.text, "/nonexistent/tokenizer.json"));
    td_tokenizer_destroy(NULL);
}

/* Readers share one tokenizer. */
static void *encode_often(void *arg) {
    static const char text[] = "aba 123 STOP\n\nabababa <think> ";
    struct td_ids ids = {0};
    int64_t sum = 0;
    for (int i = 0; i < 2000; i++) {
        ids.n = 0;
        if (td_tokenizer_encode(arg, text, sizeof text - 1, &ids, NULL) != TD_OK) break;
        for (size_t k = 0; k < ids.n; k++) {
            sum += ids.ids[k] * (int64_t)(k + 1);
        }
    }
    td_ids_free(&ids);
    return (void *)(intptr_t)sum;
}

static void serves_several_threads(void **state) {
    (void)state;
    struct td_tokenizer *t = tiny_tokenizer();
    pthread_t thread[4];
    void *alone = encode_often(t), *result;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&thread[i], NULL, encode_often, t), 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(thread[i], &result), 0);
        assert_ptr_equal(result, alone);
    }
    td_tokenizer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encodes_ordinary_text),
        cmocka_unit_test(respects_merges_over_vocabulary),
        cmocka_unit_test(never_finds_added_tokens_in_ordinary_text),
        cmocka_unit_test(cuts_at_added_tokens_when_asked),
        cmocka_unit_test(tells_about_ids),
        cmocka_unit_test(gives_back_any_bytes),
        cmocka_unit_test(refuses_other_tokenizers),
        cmocka_unit_test(serves_several_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

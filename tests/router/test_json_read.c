/* Clients' JSON to a tree: by hand, and beside jansson's own reader over mutations of what clients send. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "router/json_read.h"

static uint64_t seed;

static uint64_t draw(uint64_t *r) { /* xorshift64* */
    *r ^= *r >> 12;
    *r ^= *r << 25;
    *r ^= *r >> 27;
    return *r * 2685821657736338717ull;
}

/* The text in a heap block of its size, so that a sanitizer sees what is read behind it. */
static td_status read_exact(const char *text, size_t n, enum td_json_rules rules, json_t **ret,
                            struct td_error *err) {
    char *copy = malloc(n ? n : 1);
    assert_non_null(copy);
    memcpy(copy, text, n);
    td_status st = td_json_read(copy, n, rules, ret, err);
    free(copy);
    return st;
}

static json_t *take(const char *text) {
    json_t *v = NULL;
    struct td_error err = {0};
    td_status st = read_exact(text, strlen(text), TD_JSON_STRICT, &v, &err);
    if (st != TD_OK) fail_msg("%s: %s", text, err.text);
    return v;
}

static void refuse(const char *text, size_t n, const char *part) {
    json_t *v = NULL;
    struct td_error err = {0};
    assert_int_equal(read_exact(text, n, TD_JSON_STRICT, &v, &err), TD_FORMAT);
    assert_null(v);
    if (!strstr(err.text, part)) fail_msg("%.*s: expected '%s', found '%s'", (int)n, text, part, err.text);
}

#define REFUSE(text, part) refuse(text, sizeof text - 1, part)

static void test_strings(void **state) {
    (void)state;
    json_t *v = take(" [ \"\", \"a\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\uD83D\\uDE42z\", \"盐\\u0000\" , \"\x7f\"\n]\t\r");
    static const char escaped[] = "a\"\\/\b\f\n\r\té🙂z";
    assert_int_equal(json_array_size(v), 4);
    assert_string_equal(json_string_value(json_array_get(v, 0)), "");
    assert_string_equal(json_string_value(json_array_get(v, 1)), escaped);
    assert_int_equal(json_string_length(json_array_get(v, 2)), 4); /* three bytes and U+0000 */
    assert_memory_equal(json_string_value(json_array_get(v, 2)), "盐\0", 5);
    json_decref(v);
    REFUSE("\"a", "does not end");
    REFUSE("\"a\\", "escape");
    REFUSE("\"\\x\"", "escape");
    REFUSE("\"\\u12", "escape");
    REFUSE("\"\\u12g4\"", "escape");
    REFUSE("\"\\uD83D\"", "surrogate");
    REFUSE("\"\\uD83Dx\\uDE42\"", "surrogate");
    REFUSE("\"\\uD83D\\u0041\"", "surrogate");
    REFUSE("\"\\uDE42\"", "surrogate");
    REFUSE("\"\x1f\"", "control");
    REFUSE("\"\0\"", "control");
    REFUSE("\"\xC0\x80\"", "UTF-8");
    REFUSE("\"\xED\xA0\x80\"", "UTF-8");
    REFUSE("\"\xF4\x90\x80\x80\"", "UTF-8");
    REFUSE("\"\xE7\x9B", "UTF-8");
}

/* Keys and values with escapes share the place where they are put together. */
static void test_keys(void **state) {
    (void)state;
    json_t *v = take("{\"a\\tb\": \"c\\td\", \"e\\t\": {\"f\\t\": [\"g\\t\", \"h\\t\"]}, \"\": {}, \"plain\": \"i\\t\", \"j\":[]}");
    assert_string_equal(json_string_value(json_object_get(v, "a\tb")), "c\td");
    const json_t *f = json_object_get(json_object_get(v, "e\t"), "f\t");
    assert_string_equal(json_string_value(json_array_get(f, 0)), "g\t");
    assert_string_equal(json_string_value(json_array_get(f, 1)), "h\t");
    assert_int_equal(json_object_size(json_object_get(v, "")), 0);
    assert_string_equal(json_string_value(json_object_get(v, "plain")), "i\t");
    assert_int_equal(json_object_size(v), 5);
    json_decref(v);
    REFUSE("{\"a\":1,\"a\":2}", "duplicate");
    REFUSE("{\"a\\u0000\":1}", "U+0000");
    json_t *loose = NULL;
    static const char twice[] = "{\"a\":1,\"a\":123456789012345678901234567890}";
    assert_int_equal(read_exact(twice, sizeof twice - 1, TD_JSON_LOOSE, &loose, NULL), TD_OK);
    assert_true(json_real_value(json_object_get(loose, "a")) == 123456789012345678901234567890.0);
    json_decref(loose);
}

static void number(const char *text, json_int_t whole, double real) {
    json_t *v = take(text);
    if (json_is_real(v)) assert_true(json_real_value(v) == real);
    else assert_int_equal(json_integer_value(v), whole);
    assert_int_equal(json_is_real(v), real != 0 || strpbrk(text, ".eE") != NULL);
    json_decref(v);
}

static void test_numbers(void **state) {
    (void)state;
    number("0", 0, 0);
    number("-0", 0, 0);
    number("9223372036854775807", INT64_MAX, 0);
    number("-9223372036854775808", INT64_MIN, 0);
    number("0.0", 0, 0);
    number("-12.5e+1", 0, -125);
    number("1E2", 0, 100);
    number("0.100000000000000000000000000000000000000000000000000000000000000000001", 0, 0.1);
    REFUSE("9223372036854775808", "64 bits");
    REFUSE("-9223372036854775809", "64 bits");
    REFUSE("123456789012345678901", "64 bits");
    REFUSE("1e999", "double");
    static const char *const bad[] = {"-", "01", "-01", "1.", ".5", "1e", "1e+", "+1", "0x1", "1.e5", "NaN", "Infinity", "--1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse(bad[i], strlen(bad[i]), "byte");
}

static void test_shape(void **state) {
    (void)state;
    json_t *v = take("[true,false,null,[],{},[[{\"a\":[1,{}]}]]]");
    char *text = json_dumps(v, JSON_COMPACT);
    assert_string_equal(text, "[true,false,null,[],{},[[{\"a\":[1,{}]}]]]");
    free(text);
    json_decref(v);
    static const char *const bad[] = {"", " ", "[", "{", "[1", "[1,", "[1,]", "[,1]", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,",
                                      "{\"a\":1,}", "{,}", "{a:1}", "[1 2]", "[1}", "{\"a\":1]", "tru", "truex", "nul", "[1]x",
                                      "1 2", "]", "}", "{\"a\" 1}", "[1]]", "'a'", "//", "[1,\x01]"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse(bad[i], strlen(bad[i]), "byte");
    REFUSE("[1,\n 2,\n  x]", "(line 3, column 3, byte 10)");
}

static void test_depth(void **state) {
    (void)state;
    enum { MOST = TD_JSON_DEPTH_MAX };
    char *text = malloc(2 * MOST + 2);
    assert_non_null(text);
    memset(text, '[', MOST);
    memset(text + MOST, ']', MOST);
    json_t *v = NULL;
    assert_int_equal(read_exact(text, 2 * MOST, TD_JSON_STRICT, &v, NULL), TD_OK);
    json_decref(v);
    memset(text, '[', MOST + 1);
    memset(text + MOST + 1, ']', MOST + 1);
    refuse(text, 2 * MOST + 2, "too deep");
    free(text);
}

/* What clients send, damaged a little: jansson's reader is asked too. */
static void test_beside_jansson(void **state) {
    (void)state;
    static const char *const whole[] = {
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\\u00e9\\uD83D\\uDE42盐\\n\"}],\"n\":1,\"x\":[1.5e3,-0,null]}",
        "{\"a\":{\"b\":{\"c\":[[],[{}],\"\"]}},\"d\":true,\"e\":false,\"f\":123456789012345678,\"a b\":[0.1,1E-7]}",
        "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\",{\"k\\u0041\":\"v\"},[[[[1,2],3],4],5] , 6 ]"};
    static const char letters[] = "\"\\{}[]:,0123456789.eE+-truefalsn u\x80\xE7\x9B\xED\xA0\t\x01";
    uint64_t r = seed | 1;
    int took = 0, refused = 0;
    for (int k = 0; k < 200000; k++) {
        char text[256];
        const char *from = whole[draw(&r) % 3];
        size_t n = strlen(from);
        memcpy(text, from, n);
        for (uint64_t times = draw(&r) % 4; times > 0 && n > 1; times--) {
            size_t at = draw(&r) % n;
            uint64_t kind = draw(&r) % 3;
            if (kind == 0) text[at] = letters[draw(&r) % (sizeof letters - 1)];
            if (kind == 1) memmove(text + at, text + at + 1, --n - at);
            if (kind == 2) {
                memmove(text + at + 1, text + at, n++ - at);
                text[at] = letters[draw(&r) % (sizeof letters - 1)];
            }
        }
        json_t *ours = NULL;
        struct td_error err = {0};
        td_status st = read_exact(text, n, TD_JSON_STRICT, &ours, &err);
        json_t *theirs =
            json_loadb(text, n, JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
        if ((st == TD_OK) != (theirs != NULL) || (theirs && !json_equal(ours, theirs)))
            fail_msg("seed %llu: %.*s: %s", (unsigned long long)seed, (int)n, text, err.text);
        st == TD_OK ? took++ : refused++;
        json_decref(ours);
        json_decref(theirs);
    }
    assert_true(took > 20000 && refused > 20000);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strings), cmocka_unit_test(test_keys),  cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_shape),   cmocka_unit_test(test_depth), cmocka_unit_test(test_beside_jansson),
    };
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

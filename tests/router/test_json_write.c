/* The JSON writer: what it writes must read back as the same values. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <jansson.h>

#include "router/json_write.h"

static json_t *read_back(const struct td_json_out *w) {
    json_error_t e;
    json_t *v = json_loadb(w->p, w->n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (!v) print_message("%s: %.*s\n", e.text, (int)w->n, w->p);
    assert_non_null(v);
    return v;
}

static void test_structure(void **state) {
    (void)state;
    struct td_json_out w = {0};
    td_json_out_reset(&w);
    td_json_open(&w, '{');
    td_json_key(&w, "a");
    td_json_open(&w, '[');
    td_json_close(&w, ']');
    td_json_key(&w, "b");
    td_json_open(&w, '[');
    td_json_u64(&w, UINT64_MAX);
    td_json_i64(&w, INT64_MIN);
    td_json_bool(&w, true);
    td_json_bool(&w, false);
    td_json_null(&w);
    td_json_open(&w, '{');
    td_json_close(&w, '}');
    td_json_value(&w, "{\"x\":1}", 7);
    td_json_close(&w, ']');
    td_json_key(&w, "c");
    td_json_num(&w, 0.5);
    td_json_close(&w, '}');
    static const char want[] = "{\"a\":[],\"b\":[18446744073709551615,-9223372036854775808,true,"
                               "false,null,{},{\"x\":1}],\"c\":0.5}";
    assert_int_equal(w.n, sizeof want - 1);
    assert_memory_equal(w.p, want, w.n);
    td_json_out_free(&w);
}

static void test_numbers(void **state) {
    (void)state;
    static const double v[] = {0, -0.25, 1e-7, 123456789, 1e300, -1e-300, INFINITY, -INFINITY, NAN};
    struct td_json_out w = {0};
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        td_json_out_reset(&w);
        td_json_num(&w, v[i]);
        json_t *back = read_back(&w);
        double want = isfinite(v[i]) ? v[i] : -9999.0;
        assert_true(fabs(json_number_value(back) - want) <= 1e-8 * fabs(want));
        json_decref(back);
    }
    td_json_out_free(&w);
}

static void check_string(struct td_json_out *w, const char *s, size_t n, const char *want,
                         size_t want_n) {
    td_json_out_reset(w);
    td_json_str(w, s, n);
    assert_false(w->failed);
    json_t *back = read_back(w);
    assert_int_equal(json_string_length(back), want_n);
    assert_memory_equal(json_string_value(back), want, want_n);
    json_decref(back);
}

static void test_strings(void **state) {
    (void)state;
    struct td_json_out w = {0};
    char all[128];
    for (int i = 0; i < 128; i++)
        all[i] = (char)i;
    check_string(&w, all, sizeof all, all, sizeof all);
    check_string(&w, NULL, 0, "", 0);
    static const char text[] = "w\xC3\xB6rld \xF0\x9F\x99\x82 \xE4\xBD\xA0\xF4\x8F\xBF\xBF";
    check_string(&w, text, sizeof text - 1, text, sizeof text - 1);
#define BAD(in, out) check_string(&w, in, sizeof in - 1, out, sizeof out - 1)
    BAD("a\xFF"
        "b",
        "a\xEF\xBF\xBD"
        "b");
    BAD("a\xF0\x9F\x99", "a\xEF\xBF\xBD"); /* cut off: one for the subpart */
    BAD("\xF0\x9F\x99z", "\xEF\xBF\xBDz");
    BAD("\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD");                 /* overlong */
    BAD("\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"); /* surrogate */
    BAD("\xF4\x90\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
#undef BAD
    td_json_out_free(&w);
}

/* Any bytes give valid JSON; the buffer is not grown again for what fits. */
static void test_random_bytes(void **state) {
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    struct td_json_out w = {0};
    char s[300];
    for (int round = 0; round < 3000; round++) {
        size_t n = (size_t)rand_r(&seed) % sizeof s;
        for (size_t i = 0; i < n; i++)
            s[i] = (char)(rand_r(&seed) % 3 ? rand_r(&seed) % 256 : 0xF0);
        td_json_out_reset(&w);
        td_json_str(&w, s, n);
        json_decref(read_back(&w));
        assert_int_equal(w.cap, 4096);
    }
    td_json_out_free(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_structure),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_random_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

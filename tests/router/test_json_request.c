/* Typed reading of requests: what is accepted, and the words of what is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "router/json_request.h"

static struct td_api_error e;

static json_t *parse(const char *text) {
    json_t *root = NULL;
    assert_int_equal(td_request_parse(text, strlen(text), &root, &e), TD_OK);
    return root;
}

static void refuse(const char *text, size_t n, const char *part) {
    json_t *root = NULL;
    e = (struct td_api_error){0};
    assert_int_not_equal(td_request_parse(text, n, &root, &e), TD_OK);
    assert_null(root);
    assert_int_equal(e.status, 400);
    if (!strstr(e.message, part)) print_message("%s\n", e.message);
    assert_non_null(strstr(e.message, part));
}

static void test_parse(void **state) {
    (void)state;
    json_decref(parse("{\"a\": \"\\u0000\"}"));
    refuse("", 0, "empty");
    refuse("{\"a\": 1,\n\"b\": }", 15, "line 2");
    refuse("[1]", 3, "found an array");
    refuse("\"x\"", 3, "found the string");
    refuse("{\"a\":1} x", 9, "not valid JSON");
    refuse("{\"a\":1,\"a\":2}", 13, "duplicate");
    refuse("{\"a\":\"\xff\"}", 9, "not valid JSON");
    char deep[5000];
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    refuse(deep, sizeof deep, "not valid JSON");
}

#define WRONG(call, want)                                                                          \
    do {                                                                                           \
        e = (struct td_api_error){0};                                                              \
        assert_int_equal(call, TD_INVALID);                                                        \
        assert_int_equal(e.status, 400);                                                           \
        assert_string_equal(e.message, want);                                                      \
    } while (0)

static void test_fields(void **state) {
    (void)state;
    json_t *root =
        parse("{\"i\":5,\"f\":1.5,\"whole\":2.0,\"s\":\"word\",\"t\":true,\"z\":null,\"a\":[1],\"o\":{},"
              "\"neg\":-1,\"long\":\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"}");
    struct td_fields f = {root, "", &e}, deep = {root, "messages[2].", &e};
    uint64_t u = 77;
    double d = 77;
    bool b = false;
    const char *s = NULL;
    size_t n = 0;
    const json_t *v = NULL;
    assert_int_equal(td_field_u64(&f, "i", 0, 5, &u), TD_OK);
    assert_int_equal(u, 5);
    assert_int_equal(td_field_num(&f, "i", 0, 5, &d), TD_OK);
    assert_true(d == 5);
    assert_int_equal(td_field_num(&f, "f", 0, 5, &d), TD_OK);
    assert_true(d == 1.5);
    assert_int_equal(td_field_bool(&f, "t", &b), TD_OK);
    assert_true(b);
    assert_int_equal(td_field_str(&f, "s", &s, &n), TD_OK);
    assert_int_equal(n, 4);
    assert_int_equal(td_field_array(&f, "a", &v), TD_OK);
    assert_int_equal(td_field_object(&f, "o", &v), TD_OK);
    /* absent and null leave the default */
    u = 77;
    assert_int_equal(td_field_u64(&f, "z", 0, 5, &u), TD_OK);
    assert_int_equal(td_field_u64(&f, "none", 0, 5, &u), TD_OK);
    assert_int_equal(u, 77);
    WRONG(td_field_u64(&f, "i", 6, 9, &u), "i: expected an integer from 6 to 9, found 5");
    WRONG(td_field_u64(&f, "i", 0, 4, &u), "i: expected an integer from 0 to 4, found 5");
    WRONG(td_field_u64(&f, "neg", 0, 9, &u), "neg: expected an integer from 0 to 9, found -1");
    WRONG(td_field_u64(&f, "f", 0, 9, &u), "f: expected an integer from 0 to 9, found 1.5");
    WRONG(td_field_u64(&f, "whole", 0, 9, &u), "whole: expected an integer from 0 to 9, found 2.0");
    WRONG(td_field_u64(&f, "s", 0, 9, &u),
          "s: expected an integer from 0 to 9, found the string \"word\"");
    WRONG(td_field_num(&f, "t", 0, 2, &d), "t: expected a number from 0 to 2, found true");
    WRONG(td_field_num(&f, "i", 0, 2, &d), "i: expected a number from 0 to 2, found 5");
    WRONG(td_field_bool(&f, "i", &b), "i: expected true or false, found 5");
    WRONG(td_field_str(&f, "a", &s, &n), "a: expected a string, found an array");
    WRONG(td_field_array(&f, "o", &v), "o: expected an array, found an object");
    WRONG(td_field_object(&f, "long", &v), "long: expected an object, found a string");
    WRONG(td_field_str(&deep, "i", &s, &n), "messages[2].i: expected a string, found 5");
    assert_string_equal(e.param, "messages[2].i");
    json_decref(root);
}

static void test_known(void **state) {
    (void)state;
    static const struct td_param list[] = {
        {"read", TD_PARAM_READ, NULL},
        {"user", TD_PARAM_HARMLESS, NULL},
        {"zero", TD_PARAM_ZERO, NULL},
        {"one", TD_PARAM_ONE, NULL},
        {"off", TD_PARAM_FALSE, NULL},
        {"empty", TD_PARAM_EMPTY, NULL},
        {"word", TD_PARAM_WORD, "a|bc"},
        {"never", TD_PARAM_REFUSED, NULL},
        {0},
    };
    static const struct td_param more[] = {{"extra", TD_PARAM_READ, NULL}, {0}};
    static const char *const good[] = {
        "{}",
        "{\"read\":[1],\"user\":{\"x\":1},\"extra\":1}",
        "{\"zero\":0}",
        "{\"zero\":0.0}",
        "{\"one\":1}",
        "{\"off\":false}",
        "{\"empty\":[]}",
        "{\"empty\":{}}",
        "{\"empty\":\"\"}",
        "{\"word\":\"bc\"}",
        "{\"word\":{\"type\":\"a\"}}",
        "{\"word\":[\"a\"]}",
        "{\"never\":null}",
        "{\"zero\":null,\"one\":null,\"word\":null}",
    };
    static const char *const bad[] = {
        "{\"zero\":1}",     "{\"zero\":\"0\"}",    "{\"one\":2}",     "{\"one\":1.0}",
        "{\"off\":true}",   "{\"off\":0}",         "{\"empty\":[1]}", "{\"empty\":\"x\"}",
        "{\"word\":\"b\"}", "{\"word\":\"a|bc\"}", "{\"word\":\"\"}", "{\"word\":[\"a\",\"bc\"]}",
        "{\"never\":{}}",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        json_t *root = parse(good[i]);
        struct td_fields f = {root, "", &e};
        assert_int_equal(td_fields_known(&f, list, more), TD_OK);
        json_decref(root);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *root = parse(bad[i]);
        struct td_fields f = {root, "", &e};
        assert_int_equal(td_fields_known(&f, list, NULL), TD_INVALID);
        assert_string_equal(e.code, "unsupported_parameter");
        assert_non_null(strstr(bad[i], e.param));
        json_decref(root);
    }
    json_t *root = parse("{\"tempreature\":1}");
    struct td_fields f = {root, "", &e};
    WRONG(td_fields_known(&f, list, more), "unknown parameter 'tempreature'");
    assert_string_equal(e.code, "unknown_parameter");
    json_decref(root);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),
        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

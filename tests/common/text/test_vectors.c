/* Known ids of the real vocabulary: texts, a whole conversation, token counts that the official API
 * reported. V4's tokenizer is V3's file with V4's added tokens in place of V3's, which is how it is
 * made here. Skipped (77) without TANDEM_TEST_DATA. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/chat.h"
#include "tests/common/text/tiny.h"

static const struct {
    const char *text;
    int32_t ids[48];
} vectors[] = {
    {"Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ",
     {19923, 3,   223,   5464, 5008, 1175,  19,   940,   223, 19,  438,   223, 20,
      6113,  257, 76589, 131,  100,  76032, 1628, 76589, 131, 108, 76589, 131, 98}},
    {"Hello world", {19923, 2058}},
    {"  leading and   inner  spaces  ", {223, 6646, 305, 262, 11544, 223, 13564, 262}},
    {"a\n\nb\r\nc\t\td", {67, 271, 68, 204, 201, 69, 200, 51623}},
    {"12345678 3.14159", {6895, 18009, 2597, 223, 21, 16, 9926, 3318}},
    {"foo(bar);\n}\n", {40897, 10, 6515, 833, 1778}},
    {"don't I'm they'll", {20385, 1664, 342, 4571, 851, 5922}},
    {"日本語テキスト한국어", {88768, 17383, 20367, 24552, 5634, 17564, 9227}},
    {"x=>y;//c\n\n\n  z", {90, 19508, 91, 45676, 69, 6328, 223, 961}},
    {"àéîõü ñandú", {3221, 619, 11462, 7841, 2134, 110007, 458, 4180}},
    {"🙂🙂", {80300, 227, 80300, 227}},
    {"“，世界”。\n２０２４", {428, 303, 3427, 17014, 86093, 18237, 33095}},
    {"~tilde ^caret `tick`", {96, 31471, 8869, 8191, 86, 3608, 86, 1193, 66}},
    {"<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>",
     {128803, 30594, 128804, 128821, 36101, 128822, 7624, 1}},
    {"<tool_result>", {30, 72461, 46148, 32}},
    {"</tool_result>", {1718, 72461, 46148, 32}},
    {"\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter "
     "name=\"location\" string=\"true\">Beijing</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
     "</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
     {271,  30,   128825, 72461,  4941,   12548, 1018,   30,    128825, 40148, 5406,   2329,
      1281, 1133, 65,     50219,  3816,   30,    128825, 41523, 2329,   1281,  33182,  4,
      3418, 1281, 11476,  3320,   121458, 1718,  128825, 41523, 1018,   1718,  128825, 40148,
      5406, 1018, 1718,   128825, 72461,  4941,  12548,  32,    1}},
};

static json_t *v3_json(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/tokenizers/deepseek-v3/tokenizer.json",
             getenv("TANDEM_TEST_DATA"));
    return json_load_file(path, 0, NULL);
}

static int load(void **state) {
    json_t *root = v3_json();
    struct td_tokenizer *t = NULL;
    struct td_error err = {0};
    if (!root) return -1;
    tiny_add(root, 128821, "<think>", true);
    tiny_add(root, 128822, "</think>", true);
    tiny_add(root, 128825, "｜DSML｜", true);
    if (tiny_load(root, &t, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return -1;
    }
    *state = t;
    return 0;
}

static int unload(void **state) {
    td_tokenizer_destroy(*state);
    return 0;
}

static void assert_same(const struct td_ids *got, const int32_t *want, size_t n, const char *what) {
    for (size_t i = 0; i < n && i < got->n; i++) {
        if (got->ids[i] != want[i]) {
            fail_msg("%s, token %zu: expected %d, found %d", what, i, want[i], got->ids[i]);
        }
    }
    if (got->n != n) fail_msg("%s: expected %zu tokens, found %zu", what, n, got->n);
}

static void encodes_known_texts(void **state) {
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        size_t n = 48;
        while (vectors[i].ids[n - 1] == 0) {
            n--;
        }
        struct td_ids ids = {0};
        assert_int_equal(
            td_tokenizer_encode_added(*state, vectors[i].text, strlen(vectors[i].text), &ids, NULL),
            TD_OK);
        assert_same(&ids, vectors[i].ids, n, vectors[i].text);
        td_ids_free(&ids);
    }
}

#define TEXT(s) s, sizeof s - 1

static void encodes_a_known_conversation(void **state) {
    static const int32_t expected[] = {
        0,      3476, 477,  260,  11502, 22896, 16,    128803, 19923,  128804, 128822,
        23166,  1031, 3,    1730, 588,   342,   1694,  440,    33,     1,      128803,
        3085,   344,  270,  6102, 294,   8760,  33,    128804, 128821, 671,    3967,
        20407,  943,  270,  6102, 294,   8760,  16,    983,    344,    11111,  16,
        128822, 671,  6102, 294,  8760,  344,   11111, 16,     1};
    static const struct td_chat_message m[] = {
        {TD_CHAT_SYSTEM, TEXT("You are a helpful assistant."), NULL, 0},
        {TD_CHAT_USER, TEXT("Hello"), NULL, 0},
        {TD_CHAT_ASSISTANT, TEXT("Hi there! How can I help you?"), TEXT("The user said hello.")},
        {TD_CHAT_USER, TEXT("What is the capital of France?"), NULL, 0},
        {TD_CHAT_ASSISTANT, TEXT("The capital of France is Paris."),
         TEXT("The user asks about the capital of France. It is Paris.")}};
    struct td_chat c;
    struct td_chat_params p = {.thinking = true};
    struct td_ids ids = {0};
    td_chat_init(&c, *state);
    assert_int_equal(td_chat_encode(&c, &p, m, 5, &ids, NULL), TD_OK);
    assert_same(&ids, expected, sizeof expected / sizeof *expected, "conversation");
    td_ids_free(&ids);
}

static void counts_as_the_official_api_does(void **state) {
    static const struct td_chat_message m = {
        TD_CHAT_USER, TEXT("Rispondi in italiano con una frase: chi era Ada Lovelace?"), NULL, 0};
    struct td_chat c;
    struct td_chat_params p = {.thinking = false};
    struct td_ids ids = {0};
    td_chat_init(&c, *state);
    assert_int_equal(td_chat_encode(&c, &p, &m, 1, &ids, NULL), TD_OK);
    assert_int_equal(ids.n, 21);
    ids.n = 0;
    p = (struct td_chat_params){.thinking = true};
    assert_int_equal(td_chat_encode(&c, &p, &m, 1, &ids, NULL), TD_OK);
    size_t without = ids.n;
    p.effort = TD_EFFORT_MAX;
    ids.n = 0;
    assert_int_equal(td_chat_encode(&c, &p, &m, 1, &ids, NULL), TD_OK);
    assert_int_equal(ids.n - without, 79);
    td_ids_free(&ids);
}

/* A checkpoint without <think> serves what needs no <think>, and says what it lacks. */
static void v3_has_no_think_token(void **state) {
    (void)state;
    struct td_tokenizer *t = NULL;
    struct td_error err = {0};
    struct td_chat c;
    struct td_chat_params p = {.thinking = true};
    struct td_ids ids = {0};
    static const struct td_chat_message m = {TD_CHAT_USER, TEXT("Hello"), NULL, 0};
    assert_int_equal(tiny_load(v3_json(), &t, &err), TD_OK);
    td_chat_init(&c, t);
    assert_int_equal(c.user, 128803);
    assert_int_equal(td_chat_encode(&c, &p, &m, 1, &ids, &err), TD_UNSUPPORTED);
    assert_non_null(strstr(err.text, "<think>"));
    assert_int_equal(td_tokenizer_size(t), 128815);
    td_ids_free(&ids);
    td_tokenizer_destroy(t);
}

int main(void) {
    if (!getenv("TANDEM_TEST_DATA")) {
        printf("skipped: TANDEM_TEST_DATA is not set\n");
        return 77;
    }
    json_t *root = v3_json();
    if (!root) {
        printf("skipped: no tokenizers/deepseek-v3/tokenizer.json in TANDEM_TEST_DATA\n");
        return 77;
    }
    json_decref(root);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encodes_known_texts), cmocka_unit_test(encodes_a_known_conversation),
        cmocka_unit_test(counts_as_the_official_api_does), cmocka_unit_test(v3_has_no_think_token)};
    return cmocka_run_group_tests(tests, load, unload);
}

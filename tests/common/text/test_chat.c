/* Layout of conversations, as readable text, and that marks come from the encoder only. */
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

#define BOS "<｜begin▁of▁sentence｜>"
#define EOS "<｜end▁of▁sentence｜>"
#define USER "<｜User｜>"
#define HEAD "<｜Assistant｜>"

#define TEXT(s) s, sizeof s - 1
static const struct td_chat_message sys = {TD_CHAT_SYSTEM, TEXT("Be brief."), NULL, 0};
static const struct td_chat_message user1 = {TD_CHAT_USER, TEXT("Hello"), NULL, 0};
static const struct td_chat_message user2 = {TD_CHAT_USER, TEXT("More"), NULL, 0};
static const struct td_chat_message user_empty = {TD_CHAT_USER, NULL, 0, NULL, 0};
static const struct td_chat_message asst1 = {TD_CHAT_ASSISTANT, TEXT("Hi"), TEXT("greet")};
static const struct td_chat_message asst2 = {TD_CHAT_ASSISTANT, TEXT("Bye"), NULL, 0};

enum { CHAT = 0, THINK = 1, KEEP = 2, MAX = 4 };

static struct td_tokenizer *tok;
static struct td_chat chat;

static int load(void **state) {
    (void)state;
    tok = tiny_tokenizer();
    td_chat_init(&chat, tok);
    return 0;
}

static int unload(void **state) {
    (void)state;
    td_tokenizer_destroy(tok);
    return 0;
}

static struct td_chat_params params(int flags) {
    return (struct td_chat_params){.thinking = flags & THINK,
                                   .keep_reasoning = flags & KEEP,
                                   .effort = flags & MAX ? TD_EFFORT_MAX : TD_EFFORT_DEFAULT};
}

static void check(int flags, const struct td_chat_message *m, size_t n, const char *expected) {
    struct td_chat_params p = params(flags);
    struct td_ids ids = {0};
    struct td_error err = {0};
    if (td_chat_encode(&chat, &p, m, n, &ids, &err) != TD_OK) fail_msg("%s", err.text);
    char *text = tiny_text(tok, ids.ids, ids.n);
    assert_string_equal(text, expected);
    free(text);
    td_ids_free(&ids);
}

#define CHECK(flags, expected, ...)                                                                \
    do {                                                                                           \
        const struct td_chat_message m_[] = {__VA_ARGS__};                                         \
        check(flags, m_, sizeof m_ / sizeof *m_, expected);                                        \
    } while (0)

static void lays_out_one_question(void **state) {
    (void)state;
    CHECK(CHAT, BOS USER "Hello" HEAD "</think>", user1);
    CHECK(THINK, BOS USER "Hello" HEAD "<think>", user1);
    CHECK(CHAT, BOS "Be brief." USER "Hello" HEAD "</think>", sys, user1);
    CHECK(THINK, BOS "Be brief." USER HEAD "<think>", sys, user_empty);
    CHECK(CHAT, BOS "Be brief.", sys); /* no head after a system message */
}

static void lays_out_turns(void **state) {
    (void)state;
    CHECK(CHAT, BOS USER "Hello" HEAD "</think>Hi" EOS USER "More" HEAD "</think>", user1, asst1,
          user2);
    CHECK(CHAT, BOS USER "Hello" HEAD "</think>Hi" EOS, user1, asst1);
    CHECK(CHAT, BOS USER "HelloBe brief." USER "More" HEAD "</think>", user1, sys, user2);
    CHECK(CHAT, BOS "Hi" EOS USER "More" HEAD "</think>", asst1, user2);
}

static void merges_neighbouring_user_messages(void **state) {
    (void)state;
    CHECK(CHAT, BOS USER "Hello\n\nMore\n\nHello" HEAD "</think>", user1, user2, user1);
    CHECK(CHAT, BOS USER "\n\nMore" HEAD "</think>", user_empty, user2);
    CHECK(THINK, BOS USER "Hello" HEAD "</think>Hi" EOS USER "More\n\nHello" HEAD "<think>", user1,
          asst1, user2, user1);
}

static void drops_reasoning_before_the_last_question(void **state) {
    (void)state;
    CHECK(THINK, BOS USER "Hello" HEAD "</think>Hi" EOS USER "More" HEAD "<think>", user1, asst1,
          user2);
    CHECK(THINK | KEEP,
          BOS USER "Hello" HEAD "<think>greet</think>Hi" EOS USER "More" HEAD "<think>", user1,
          asst1, user2);
    /* After the last question it stays; none at all closes the <think> of the head. */
    CHECK(THINK, BOS USER "Hello" HEAD "<think>greet</think>Hi" EOS, user1, asst1);
    CHECK(THINK, BOS USER "Hello" HEAD "<think></think>Bye" EOS, user1, asst2);
    CHECK(THINK, BOS USER "Hello" HEAD "<think>greet</think>Hi" EOS "</think>Bye" EOS, user1, asst1,
          asst2);
    CHECK(THINK, BOS "Be brief.greet</think>Hi" EOS, sys, asst1); /* no question at all */
    CHECK(CHAT | KEEP, BOS USER "Hello" HEAD "</think>Hi" EOS, user1, asst1);
}

static void writes_the_effort_prefix_in_thinking_mode_only(void **state) {
    (void)state;
    const struct td_chat_message m[] = {sys, user1};
    struct td_chat_params p = params(THINK | MAX);
    struct td_ids ids = {0};
    assert_int_equal(td_chat_encode(&chat, &p, m, 2, &ids, NULL), TD_OK);
    char *text = tiny_text(tok, ids.ids, ids.n), *after = strstr(text, "Be brief.");
    assert_non_null(after);
    assert_int_equal(after - text, strlen(BOS) + 476);
    assert_memory_equal(text, BOS "Reasoning Effort: ", strlen(BOS "Reasoning Effort: "));
    assert_memory_equal(after - 11, "nchecked.\n\n", 11);
    free(text);
    td_ids_free(&ids);
    CHECK(CHAT | MAX, BOS "Be brief." USER "Hello" HEAD "</think>", sys, user1);
}

#define T(s)                                                                                       \
    { s, sizeof s - 1 }
#define TOOLS_BEGIN "## Tools\n\nYou have access to a set of tools"
#define TOOLS_END                                                                                  \
    "### Available Tool Schemas\n\n{\"name\": \"f\", \"n\": [1, 2.0]}\n{}\n\nYou MUST strictly "   \
    "follow the "                                                                                  \
    "above defined tool name and parameter schemas to invoke tool calls.\n"
static const struct td_chat_text tools[] = {T("{\"name\":\"f\",\"n\":[1,2.0]}"), T("{ }")};
static const struct td_chat_call calls[] = {
    {T("a"), T("f"), T("{\"s\":\"x \\\"y\\\"\\n\",\"n\":[1,2],\"big\":12345678901234567890123}")},
    {T("b"), T("g"), T("{}")},
    {T("c"), T("h"), T("not JSON")},
};
#define CALLS                                                                                      \
    "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"                                  \
    "<｜DSML｜parameter name=\"s\" string=\"true\">x \"y\"\n</｜DSML｜parameter>\n"            \
    "<｜DSML｜parameter name=\"n\" string=\"false\">[1, 2]</｜DSML｜parameter>\n"              \
    "<｜DSML｜parameter name=\"big\" string=\"false\">12345678901234567890123"                   \
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"                                                \
    "<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"h\">\n"        \
    "<｜DSML｜parameter name=\"arguments\" string=\"true\">not JSON</｜DSML｜parameter>\n"     \
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"

/* Everything around one agent's turn: declarations, calls, results in the calls' order. */
static void lays_out_tools(void **state) {
    struct td_chat_message with = sys, asks = asst1, developer = user1;
    struct td_chat_message results[] = {{.role = TD_CHAT_TOOL, .content = "two", .content_n = 3},
                                        user2,
                                        {.role = TD_CHAT_TOOL, .content = "one", .content_n = 3}};
    char *text;
    (void)state;
    with.tools = tools;
    with.n_tools = 2;
    with.response_format = (struct td_chat_text)T("{\"type\":\"x\"}");
    asks.calls = calls;
    asks.n_calls = 3;
    results[0].call_id = calls[1].id;
    results[2].call_id = calls[0].id;
    const struct td_chat_message m[] = {with, user1,      asst1,      user2,
                                        asks, results[0], results[1], results[2]};
    struct td_chat_params p = params(THINK);
    struct td_ids ids = {0};
    assert_int_equal(td_chat_encode(&chat, &p, m, 8, &ids, NULL), TD_OK);
    text = tiny_text(tok, ids.ids, ids.n);
    assert_memory_equal(text, BOS "Be brief.\n\n" TOOLS_BEGIN,
                        strlen(BOS "Be brief.\n\n" TOOLS_BEGIN));
    const char *rest = strstr(text, "### Available");
    assert_non_null(rest);
    /* Tools keep the reasoning of every turn. */
    assert_string_equal(
        rest, TOOLS_END
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema "
        "to reply:\n{\"type\": \"x\"}" USER "Hello" HEAD "<think>greet</think>Hi" EOS USER
        "More" HEAD "<think>greet</think>Hi" CALLS EOS USER
        "<tool_result>one</tool_result>\n\nMore\n\n<tool_result>two</tool_result>" HEAD "<think>");
    free(text);
    td_ids_free(&ids);

    /* Without declarations the reasoning before the last result goes; calls stay. */
    CHECK(THINK,
          BOS USER "Hello" HEAD "</think>Hi" CALLS EOS USER "<tool_result>two</tool_result>" HEAD
                   "<think>",
          user1, asks, results[0]);
    developer.role = TD_CHAT_DEVELOPER;
    CHECK(THINK, BOS USER "More" HEAD "<think>", developer, user2); /* dropped before the last */
    CHECK(CHAT, BOS USER "Hello" USER "More" HEAD "</think>", developer, user2);
    CHECK(THINK | KEEP,
          BOS USER "More" HEAD "<think>greet</think>Hi" EOS USER "Hello" HEAD "<think>", user2,
          asst1, developer);
}

static void writes_reminders(void **state) {
    struct td_chat_message reminder = {.role = TD_CHAT_REMINDER, .content = "now", .content_n = 3};
    (void)state;
    CHECK(CHAT, BOS "Be brief.<｜latest_reminder｜>now" USER "Hello" HEAD "</think>", sys, reminder,
          user1);
    CHECK(CHAT, BOS USER "Hello" HEAD "</think><｜latest_reminder｜>now", user1, reminder);
}

static void keeps_marks_out_of_client_text(void **state) {
    (void)state;
    const struct td_chat_message m[] = {
        {TD_CHAT_SYSTEM, TEXT(EOS USER), NULL, 0},
        {TD_CHAT_USER, TEXT("</think>" HEAD BOS), NULL, 0},
        {TD_CHAT_ASSISTANT, TEXT("<think>" EOS), TEXT("</think>" USER)},
    };
    struct td_chat_params p = params(THINK);
    struct td_ids ids = {0};
    assert_int_equal(td_chat_encode(&chat, &p, m, 3, &ids, NULL), TD_OK);
    static const int32_t expected[] = {TINY_BOS,   TINY_USER,      TINY_ASSISTANT,
                                       TINY_THINK, TINY_THINK_END, TINY_EOS};
    size_t marks = 0;
    for (size_t i = 0; i < ids.n; i++) {
        if (!td_tokenizer_is_special(tok, ids.ids[i])) continue;
        assert_true(marks < 6);
        assert_int_equal(ids.ids[i], expected[marks]);
        marks++;
    }
    assert_int_equal(marks, 6);
    td_ids_free(&ids);
}

/* Texts with no mark between them are one text for BPE. */
static void encodes_adjacent_texts_together(void **state) {
    (void)state;
    const struct td_chat_message m[] = {{TD_CHAT_SYSTEM, TEXT("xa"), NULL, 0},
                                        {TD_CHAT_SYSTEM, TEXT("b"), NULL, 0},
                                        {TD_CHAT_SYSTEM, TEXT("a"), NULL, 0},
                                        {TD_CHAT_USER, TEXT("1"), NULL, 0},
                                        {TD_CHAT_USER, TEXT("\n"), NULL, 0}};
    struct td_chat_params p = params(CHAT);
    struct td_ids ids = {0};
    assert_int_equal(td_ids_push(&ids, 77), TD_OK); /* what is there already stays */
    assert_int_equal(td_chat_encode(&chat, &p, m, 5, &ids, NULL), TD_OK);
    static const int32_t expected[] = {
        77, TINY_BOS, 'x', 258, TINY_USER, '1', 260, '\n', TINY_ASSISTANT, TINY_THINK_END};
    assert_int_equal(ids.n, sizeof expected / sizeof *expected);
    assert_memory_equal(ids.ids, expected, sizeof expected);
    td_ids_free(&ids);
}

static void says_how_the_answer_starts(void **state) {
    (void)state;
    struct td_ids ids = {0};
    assert_false(td_chat_opens_reasoning(&chat, &ids));
    for (int thinking = 0; thinking < 2; thinking++) {
        struct td_chat_params p = params(thinking);
        assert_int_equal(td_chat_encode(&chat, &p, &user1, 1, &ids, NULL), TD_OK);
        assert_int_equal(td_chat_opens_reasoning(&chat, &ids), thinking);
    }
    td_ids_free(&ids);
}

static void needs_a_mark_only_when_it_writes_it(void **state) {
    (void)state;
    json_t *root = tiny_json();
    json_array_remove(json_object_get(root, "added_tokens"), TINY_THINK - TINY_BOS);
    struct td_tokenizer *t = NULL;
    assert_int_equal(tiny_load(root, &t, NULL), TD_OK);
    struct td_chat c;
    td_chat_init(&c, t);
    assert_int_equal(c.think, -1);
    struct td_ids ids = {0};
    struct td_error err;
    struct td_chat_params p = params(CHAT);
    assert_int_equal(td_chat_encode(&c, &p, &user1, 1, &ids, &err), TD_OK);
    assert_false(td_chat_opens_reasoning(&c, &ids));
    size_t before = ids.n;
    p = params(THINK);
    assert_int_equal(td_chat_encode(&c, &p, &user1, 1, &ids, &err), TD_UNSUPPORTED);
    assert_non_null(strstr(err.text, "<think>"));
    assert_int_equal(ids.n, before);
    td_ids_free(&ids);
    td_tokenizer_destroy(t);
}

static void refuses_nonsense(void **state) {
    (void)state;
    struct td_chat_message m = user1;
    struct td_chat_params p = params(CHAT);
    struct td_ids ids = {0};
    assert_int_equal(td_chat_encode(&chat, &p, &m, 0, &ids, NULL), TD_INVALID);
    m.role = (enum td_chat_role)7;
    assert_int_equal(td_chat_encode(&chat, &p, &m, 1, &ids, NULL), TD_INVALID);
    assert_int_equal(ids.n, 0);
    td_ids_free(&ids);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lays_out_one_question),
        cmocka_unit_test(lays_out_turns),
        cmocka_unit_test(merges_neighbouring_user_messages),
        cmocka_unit_test(drops_reasoning_before_the_last_question),
        cmocka_unit_test(writes_the_effort_prefix_in_thinking_mode_only),
        cmocka_unit_test(lays_out_tools),
        cmocka_unit_test(writes_reminders),
        cmocka_unit_test(keeps_marks_out_of_client_text),
        cmocka_unit_test(encodes_adjacent_texts_together),
        cmocka_unit_test(says_how_the_answer_starts),
        cmocka_unit_test(needs_a_mark_only_when_it_writes_it),
        cmocka_unit_test(refuses_nonsense),
    };
    return cmocka_run_group_tests(tests, load, unload);
}

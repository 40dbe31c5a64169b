/* The output machine: the cases a reader would ask about. test_reply_text.c holds text against a
 * definition, token by token; reply_compare.py whole answers with calls. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/pyjson.h"
#include "common/text/reply.h"
#include "tests/common/text/tiny.h"

enum { LONGEST = 4096, DSML = TINY_SIZE };

static struct td_tokenizer *tok;
static struct td_chat chat;

static int load(void **state) {
    struct td_error err;
    json_t *root = tiny_json();
    tiny_add(root, DSML, "｜DSML｜", true);
    (void)state;
    if (tiny_load(root, &tok, &err) != TD_OK) return -1;
    td_chat_init(&chat, tok);
    return chat.dsml == DSML ? 0 : -1;
}

static int unload(void **state) {
    (void)state;
    td_tokenizer_destroy(tok);
    return 0;
}

#define STOPS(...)                                                                                 \
    (const struct td_stop[]) {                                                                     \
        __VA_ARGS__                                                                                \
    }
#define STOP(s)                                                                                    \
    { s, sizeof s - 1 }

static struct td_reply reply;

static void start(const struct td_reply_params *p) {
    struct td_error err;
    if (td_reply_init(&reply, p, &err) != TD_OK) fail_msg("%s", err.text);
}

/* What one step gave, as text: reasoning in (), a call as [name], its end as ;, arguments bare. */
static const char *step_text(void) {
    static char text[LONGEST];
    struct td_reply_event ev;
    size_t n = 0;
    while (td_reply_next(&reply, &ev)) {
        static const char *const before[] = {"(", "", "[", "", ""}, *const behind[] = {")", "", "]",
                                                                                       "", ";"};
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%.*s%s", before[ev.kind], (int)ev.n,
                              ev.text, behind[ev.kind]);
    }
    text[n] = 0;
    return text;
}

#define PUSH(id, expected)                                                                         \
    do {                                                                                           \
        td_reply_push(&reply, id);                                                                 \
        assert_string_equal(step_text(), expected);                                                \
    } while (0)

/* Text byte by byte, with ~ for the DSML mark and ^ for </think>; all that came of it. */
static const char *feed(const char *text) {
    static char all[LONGEST];
    size_t n = 0;
    for (; *text; text++) {
        td_reply_push(&reply, *text == '~' ? DSML : *text == '^' ? TINY_THINK_END : (uint8_t)*text);
        n += (size_t)snprintf(all + n, sizeof all - n, "%s", step_text());
    }
    all[n] = 0;
    return all;
}

static const char *end(bool cut) {
    td_reply_end(&reply, cut);
    return step_text();
}

static void holds_back_no_more_than_it_must(void **state) {
    struct td_reply_params p = {
        .chat = &chat, .stops = STOPS(STOP("STOP"), STOP("TOO"), STOP("abab")), .n_stops = 3};
    (void)state;
    start(&p);
    PUSH('x', "x");
    PUSH(266, ""); /* ST */
    PUSH('x', "STx");
    PUSH(256, ""); /* ab */
    PUSH('a', "");
    PUSH('a', "aba"); /* "aba" + "a": only the last a can begin anything */
    PUSH('S', "a");
    PUSH('T', "");
    PUSH('O', "");
    PUSH('O', "S"); /* TOO, which began inside STOP */
    assert_true(reply.stopped);
    PUSH('x', "");
    assert_string_equal(end(false), "");
    assert_int_equal(td_reply_finish(&reply, true), TD_REPLY_STOP);
    td_reply_free(&reply);
}

static void holds_code_points_together(void **state) {
    struct td_reply_params p = {.chat = &chat};
    (void)state;
    start(&p);
    PUSH(269, "c"); /* c and E6 */
    PUSH(0xAF, "");
    PUSH(TINY_EOS, ""); /* added tokens do not interrupt */
    PUSH(0x95, "毕");
    PUSH(261, ""); /* F0 9F */
    PUSH('x', "\xEF\xBF\xBDx");
    PUSH(0x80, "\xEF\xBF\xBD");
    PUSH(TINY_SIZE + 5, ""); /* an id that names nothing */
    PUSH(-1, "");
    PUSH(262, "");
    assert_string_equal(end(false), "\xEF\xBF\xBD");
    td_reply_free(&reply);

    start(&p);
    PUSH(269, "c");
    assert_string_equal(end(true), ""); /* cut by length: half a character is dropped */
    assert_int_equal(td_reply_finish(&reply, true), TD_REPLY_LENGTH);
    td_reply_free(&reply);
}

static void separates_reasoning(void **state) {
    struct td_reply_params p = {
        .chat = &chat, .reasoning = true, .stops = STOPS(STOP("ab")), .n_stops = 1};
    (void)state;
    start(&p);
    PUSH('\n', "");
    PUSH(256, "(ab)"); /* no stop string in reasoning, nothing held either */
    PUSH('\n', "");
    PUSH('a', "(\na)");
    PUSH(0xE6, "");
    assert_true(td_reply_in_reasoning(&reply));
    PUSH(TINY_THINK_END, "(\xEF\xBF\xBD)"); /* what was waiting is U+FFFD */
    assert_false(td_reply_in_reasoning(&reply));
    PUSH('\n', "");
    PUSH('b', "b"); /* the a before belonged to the reasoning */
    PUSH(TINY_THINK_END, "");
    PUSH('a', "");
    PUSH('b', "");
    assert_true(reply.stopped);
    td_reply_free(&reply);
}

#define CALLS "<~tool_calls>\n"
#define INVOKE(name) "<~invoke name=\"" name "\">\n"
#define PARAM(key, string, value)                                                                  \
    "<~parameter name=\"" key "\" string=\"" string "\">" value "</~parameter>\n"
#define INVOKED "</~invoke>\n"
#define CALLED "</~tool_calls>"

static void reads_calls(void **state) {
    struct td_reply_params p = {.chat = &chat, .reasoning = true, .calls = true};
    (void)state;
    start(&p);
    assert_string_equal(feed("hm\n^Look:\n\n" CALLS INVOKE("f") PARAM("a", "true", "x \"y\"\n")
                                 PARAM("b", "false", "[1, 2]")
                                     INVOKED INVOKE("g") "\n" INVOKED CALLED),
                        "(h)(m)Look:[f]{\"a\": \"x \\\"y\\\"\\n\", \"b\": [1, 2]};[g]{};");
    assert_string_equal(end(false), "");
    assert_int_equal(td_reply_finish(&reply, false), TD_REPLY_CALLS);
    assert_int_equal(reply.completed, 2);
    td_reply_free(&reply);

    start(&p); /* the model did not close its reasoning, nor open the wrapper */
    assert_string_equal(feed("hm\n" INVOKE("f") INVOKED CALLED "more"), "(h)(m)[f]{};");
    assert_true(reply.stopped);
    assert_int_equal(td_reply_finish(&reply, false), TD_REPLY_CALLS);
    td_reply_free(&reply);

    p.one_call = true;
    start(&p);
    assert_string_equal(feed("^" CALLS INVOKE("f") INVOKED INVOKE("g") INVOKED CALLED), "[f]{};");
    assert_int_equal(td_reply_finish(&reply, true), TD_REPLY_CALLS);
    td_reply_free(&reply);
}

static void takes_nothing_else_for_a_call(void **state) {
    static const char prose[] = "Write <~tool_calls> and <~invoke name=\"f\"> like so: "
                                "<~tool_calls>\n<~call, or <~invoke name=\"\"> or <~invoke>.";
    static const char seen[] =
        "Write <｜DSML｜tool_calls> and <｜DSML｜invoke name=\"f\"> like so: "
        "<｜DSML｜tool_calls>\n<｜DSML｜call, or <｜DSML｜invoke name=\"\"> or <｜DSML｜invoke>.";
    struct td_reply_params p = {.chat = &chat};
    (void)state;
    start(&p); /* no tools: nothing is parsed */
    assert_string_equal(feed(prose), seen);
    assert_int_equal(td_reply_finish(&reply, false), TD_REPLY_STOP);
    td_reply_free(&reply);

    p.calls = true;
    start(&p);
    assert_string_equal(feed("Use <~tool_calls> and <~call, or <~invoke name=\"f\" <<~invoke>."),
                        "Use <｜DSML｜tool_calls> and <｜DSML｜call, or <｜DSML｜invoke "
                        "name=\"f\" <<｜DSML｜invoke>.");
    assert_string_equal(feed("a < b, 2>&1, ｜DSML｜ <｜DSML｜invoke name=\"f\">"),
                        "a < b, 2>&1, ｜DSML｜ <｜DSML｜invoke name=\"f\">");
    assert_string_equal(feed("\n\n<~tool_ca"), "");
    assert_string_equal(end(false), "\n\n<｜DSML｜tool_ca"); /* the model ended so: it is text */
    td_reply_free(&reply);

    start(&p);
    assert_string_equal(feed("x\n\n<~tool_ca"), "x");
    assert_string_equal(end(true), ""); /* cut: a call was beginning */
    td_reply_free(&reply);
}

/* What a grammar promises is read as it promises it: a call that it did not see begin is none. */
static void begins_enforced_calls_with_the_wrapper(void **state) {
    struct td_reply_params p = {.chat = &chat, .reasoning = true, .calls = true, .enforced = true};
    (void)state;
    start(&p);
    assert_string_equal(feed("a" INVOKE("f") "^"),
                        "(a)(<)(｜DSML｜)(i)(n)(v)(o)(k)(e)( )(n)(a)(m)(e)"
                        "(=)(\")(f)(\")(>)");
    assert_string_equal(feed("b<~invoke name=\"f\">c"), "b<｜DSML｜invoke name=\"f\">c");
    assert_string_equal(feed(CALLS INVOKE("f") INVOKED CALLED), "[f]{};");
    td_reply_free(&reply);
}

static void stops_not_before_its_time(void **state) {
    struct td_reply_params p = {
        .chat = &chat, .stops = STOPS(STOP("ab")), .n_stops = 1, .min_ids = 3};
    (void)state;
    start(&p);
    PUSH(256, "ab"); /* ab in one token, and what began early is none later */
    PUSH('x', "x");
    PUSH('a', "a");
    PUSH('b', "b");
    PUSH('a', "");
    PUSH('b', "");
    assert_true(reply.stopped);
    td_reply_free(&reply);
}

static void reports_what_was_cut(void **state) {
    struct td_reply_params p = {.chat = &chat, .calls = true};
    (void)state;
    start(&p);
    assert_string_equal(feed(CALLS INVOKE("f") "<~parameter name=\"a\" string=\"true\">ab</"),
                        "[f]{\"a\": \"ab");
    assert_string_equal(end(true), "</");
    assert_int_equal(td_reply_finish(&reply, true), TD_REPLY_LENGTH);
    td_reply_free(&reply);

    start(&p);
    assert_string_equal(feed(CALLS INVOKE("f") "<~parameter name=\"a\" string=\"true\">ab</~par"),
                        "[f]{\"a\": \"ab");
    assert_string_equal(end(true), ""); /* a piece of the closing tag is no argument */
    td_reply_free(&reply);

    start(&p); /* one complete, one cut */
    feed(CALLS INVOKE("f") INVOKED INVOKE("g"));
    end(true);
    assert_int_equal(reply.completed, 1);
    assert_int_equal(td_reply_finish(&reply, true), TD_REPLY_LENGTH);
    td_reply_free(&reply);
}

static void stops_in_content_only(void **state) {
    struct td_reply_params p = {.chat = &chat,
                                .reasoning = true,
                                .calls = true,
                                .stops = STOPS(STOP("<"), STOP("\n\n"), STOP("tool"), STOP("DSML")),
                                .n_stops = 4};
    (void)state;
    start(&p); /* tags, and line ends before them, are not content; nor are values */
    assert_string_equal(
        feed("a<tool\n\n^Hi\n\n" CALLS INVOKE("f") PARAM("k", "true", "<tool\n\n") INVOKED CALLED),
        "(a)(<t)(o)(o)(l)Hi[f]{\"k\": \"<tool\\n\\n\"};");
    td_reply_free(&reply);

    start(&p);
    assert_string_equal(feed("^a <b"), "a "); /* it was no tag */
    assert_true(reply.stopped);
    td_reply_free(&reply);

    start(&p);
    assert_string_equal(feed("^a\n\n"), "a");
    assert_string_equal(end(false), "");
    assert_true(reply.stopped);
    td_reply_free(&reply);
}

/* A value may hold anything: closing tags in letters, names of added tokens, 50 kB. */
static void keeps_values_whole(void **state) {
    enum { LONG = 50000 };
    static const char piece[] =
        "2>&1 <b> </｜DSML｜parameter> </~invoke> <~invoke name=\"x\"> \" \\ \n";
    struct td_reply_params p = {.chat = &chat, .calls = true};
    struct td_bytes arguments = {0}, want = {0};
    struct td_reply_event ev;
    (void)state;
    start(&p);
    feed(CALLS INVOKE("f") "<~parameter name=\"a\" string=\"true\">");
    td_bytes_add(&want, "{\"a\": \"", 7);
    while (want.n < LONG) {
        for (const char *c = piece; *c; c++) {
            char buf[8];
            size_t n = 1;
            const char *s = *c == '~' ? "｜DSML｜" : td_pyjson_escape(c, 1, buf, &n);
            td_bytes_add(&want, s, *c == '~' ? strlen(s) : n);
            td_reply_push(&reply, *c == '~' ? DSML : (uint8_t)*c);
            while (td_reply_next(&reply, &ev)) {
                td_bytes_add(&arguments, ev.text, ev.n);
            }
        }
        static const char names[] = "<｜User｜><think></think>";
        static const int32_t ids[] = {TINY_USER, TINY_EOS, TINY_THINK, TINY_THINK_END};
        td_bytes_add(&want, names, sizeof names - 1); /* not end of text: it is the model's own */
        for (int i = 0; i < 4; i++) {
            td_reply_push(&reply, ids[i]);
            while (td_reply_next(&reply, &ev)) {
                td_bytes_add(&arguments, ev.text, ev.n);
            }
        }
    }
    td_bytes_add(&arguments, "\"}", 2);
    td_bytes_add(&want, "\"}", 2);
    assert_string_equal(feed("</~parameter>\n" INVOKED CALLED), "\"};");
    assert_int_equal(reply.completed, 1);
    /* The first piece came through `feed`. */
    assert_int_equal(arguments.n, want.n - 7);
    assert_memory_equal(arguments.p, want.p + 7, arguments.n);
    td_bytes_free(&arguments);
    td_bytes_free(&want);
    td_reply_free(&reply);
}

static void forgives_small_faults(void **state) {
    static const struct {
        const char *text, *found;
    } cases[] = {
        {CALLS INVOKE("f") PARAM("a", "true", "1") CALLED, "[f]{\"a\": \"1\"};"},
        {CALLS INVOKE("f") INVOKE("g") INVOKED CALLED, "[f]{};[g]{};"},
        {CALLS INVOKE("f") "<~parameter name=\"a\">1</~parameter>" INVOKED CALLED,
         "[f]{\"a\": \"1\"};"},
        {CALLS INVOKE("f") "<~parameter>1</~parameter>" INVOKED CALLED, "[f]{};"},
        {CALLS INVOKE("f") "<~parameter name=\"a\" string=\"true\">1</~parameter" INVOKED CALLED,
         "[f]{\"a\": \"1\"};"},
        {CALLS INVOKE("f") INVOKED "<~invoke>", "[f]{};"},
        {"<~tool_calls>  \n <~invoke  name=\"f\">" INVOKED CALLED, "[f]{};"},
        {CALLS INVOKE("f") INVOKED "and so on", "[f]{};"},
    };
    struct td_reply_params p = {.chat = &chat, .calls = true};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start(&p);
        const char *found = feed(cases[i].text);
        if (strcmp(found, cases[i].found) != 0) fail_msg("%s: found %s", cases[i].text, found);
        assert_int_equal(reply.stopped,
                         strstr(cases[i].text, "and so on") || strstr(cases[i].text, "<~invoke>"));
        assert_string_equal(end(false), "");
        assert_int_equal(td_reply_finish(&reply, false), TD_REPLY_CALLS);
        td_reply_free(&reply);
    }
}

static void refuses_bad_stop_strings(void **state) {
    struct td_error err;
    char longest[TD_STOP_BYTES_MAX + 1];
    memset(longest, 'a', sizeof longest);
    struct td_stop many[TD_STOP_MAX + 1],
        bad[] = {{"", 0}, {longest, sizeof longest}, STOP("\x95")};
    (void)state;
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        many[i] = (struct td_stop){longest, sizeof longest - 1};
    }
    struct td_reply_params p = {.chat = &chat, .stops = many, .n_stops = TD_STOP_MAX + 1};
    assert_int_equal(td_reply_init(&reply, &p, &err), TD_INVALID);
    td_reply_free(&reply);
    p.n_stops = TD_STOP_MAX;
    assert_int_equal(td_reply_init(&reply, &p, &err), TD_OK);
    td_reply_free(&reply);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        p.stops = &bad[i];
        p.n_stops = 1;
        assert_int_equal(td_reply_init(&reply, &p, &err), TD_INVALID);
        assert_non_null(strstr(err.text, "stop string 0"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(holds_back_no_more_than_it_must),
        cmocka_unit_test(holds_code_points_together),
        cmocka_unit_test(separates_reasoning),
        cmocka_unit_test(reads_calls),
        cmocka_unit_test(takes_nothing_else_for_a_call),
        cmocka_unit_test(begins_enforced_calls_with_the_wrapper),
        cmocka_unit_test(stops_not_before_its_time),
        cmocka_unit_test(reports_what_was_cut),
        cmocka_unit_test(stops_in_content_only),
        cmocka_unit_test(keeps_values_whole),
        cmocka_unit_test(forgives_small_faults),
        cmocka_unit_test(refuses_bad_stop_strings),
    };
    return cmocka_run_group_tests(tests, load, unload);
}

/* What a grammar allows is what the output machine reads: random walks through enforced answers,
 * with the DSML mark as a token and spelled, behind reasoning and without, pushed into the machine
 * token by token. Every finished walk is calls of declared tools whose arguments are JSON that
 * their schema allows, or content, and nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/grammar.h"
#include "common/text/reply.h"
#include "tests/common/text/tiny.h"

enum { DSML = TINY_SIZE, VOCAB = TINY_SIZE + 8, WALKS = 150, STEPS = 6000, CALLS_MAX = 400 };

static uint64_t seed;

#define SCHEMA(s) s, sizeof s - 1
static const struct td_grammar_tool tools[] = {
    {"book", 4,
     SCHEMA(
         "{\"type\":\"object\",\"additionalProperties\":false,\"required\":[\"room\",\"nights\"],"
         "\"properties\":{\"room\":{\"enum\":[\"single\",\"double\"]},\"nights\":{\"type\":"
         "\"integer\"},\"note\":{\"type\":\"string\"}}}")},
    {"hang up", 7,
     SCHEMA("{\"type\":\"object\",\"properties\":{},\"additionalProperties\":false}")},
    {"any", 3, NULL, 0},
};

/* One of the allowed tokens; ends and marks more often than by their number. */
static int32_t choose(const uint32_t *mask) {
    static const int32_t often[] = {DSML, TINY_THINK_END, '<', '}', '"', TINY_EOS};
    int32_t all[VOCAB];
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof often / sizeof *often && tiny_random(&seed, 3) == 0; i++)
        if (mask[often[i] / 32] >> (often[i] % 32) & 1) return often[i];
    for (int32_t id = 0; id < VOCAB; id++)
        if (mask[id / 32] >> (id % 32) & 1) all[n++] = id;
    assert_true(n > 0);
    return all[tiny_random(&seed, n)];
}

struct heard {
    struct td_bytes content, name[CALLS_MAX], arguments[CALLS_MAX];
    uint32_t calls, ends;
};

static void listen(struct td_reply *r, struct heard *h) {
    struct td_reply_event ev;
    while (td_reply_next(r, &ev)) {
        if (ev.kind == TD_REPLY_CONTENT) td_bytes_add(&h->content, ev.text, ev.n);
        if (ev.kind == TD_REPLY_CALL_END) h->ends++;
        if (ev.kind != TD_REPLY_CALL && ev.kind != TD_REPLY_ARGUMENTS) continue;
        assert_in_range(ev.call, 0, CALLS_MAX - 1);
        if (ev.call >= h->calls) h->calls = ev.call + 1;
        td_bytes_add(ev.kind == TD_REPLY_CALL ? &h->name[ev.call] : &h->arguments[ev.call], ev.text,
                     ev.n);
    }
}

static bool is(const struct td_bytes *b, const char *word) {
    return b->n == strlen(word) && memcmp(b->p, word, b->n) == 0;
}

/* NULL for what is JSON but not to this library: numbers beyond a double, keys with a NUL. */
static json_t *parse(const struct td_bytes *b) {
    json_error_t why;
    json_t *v = json_loadb(b->p, b->n,
                           JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &why);
    bool limit = strstr(why.text, "overflow") || strstr(why.text, "NUL byte in object key");
    if (!v && !limit) fail_msg("%.*s: %s", (int)b->n, b->p, why.text);
    return v;
}

static void check_object(const struct td_bytes *content) {
    json_t *v = parse(content);
    assert_true(!v || json_is_object(v));
    json_decref(v);
}

static void check_call(const struct td_bytes *name, const struct td_bytes *arguments) {
    json_t *v = parse(arguments);
    if (!v) return;
    assert_true(json_is_object(v));
    if (is(name, "book")) {
        const char *room = json_string_value(json_object_get(v, "room"));
        const json_t *note = json_object_get(v, "note");
        assert_true(room && (strcmp(room, "single") == 0 || strcmp(room, "double") == 0));
        assert_true(json_is_number(json_object_get(v, "nights")));
        assert_true(!note || json_is_string(note));
        assert_int_equal(json_object_size(v), note ? 3 : 2);
    } else if (is(name, "hang up")) {
        assert_int_equal(json_object_size(v), 0);
    } else {
        assert_true(is(name, "any"));
    }
    json_decref(v);
}

/* Returns whether the answer came to its end. */
static bool walk(struct td_grammars *store, const struct td_grammar *g, const struct td_chat *chat,
                 const struct td_grammar_spec *spec, struct heard *h) {
    const struct td_reply_params p = {.chat = chat,
                                      .reasoning = spec->reasoning,
                                      .calls = true,
                                      .one_call = spec->one_call,
                                      .enforced = true};
    uint32_t mask[(VOCAB + 31) / 32];
    struct td_matcher m;
    struct td_reply r;
    struct td_error err;
    int32_t id = -1;
    td_matcher_init(&m, g);
    if (td_reply_init(&r, &p, &err) != TD_OK) fail_msg("%s", err.text);
    for (int i = 0; i < STEPS && id != chat->eos && h->calls < CALLS_MAX - 1; i++) {
        td_grammars_mask(store, &m, mask);
        id = choose(mask);
        assert_true(td_grammars_token(store, &m, id));
        td_reply_push(&r, id);
        listen(&r, h);
    }
    bool ended = id == chat->eos;
    if (!spec->one_call) assert_false(r.stopped); /* nothing was left out */
    td_reply_end(&r, !ended);
    listen(&r, h);
    if (ended)
        assert_int_equal(td_reply_finish(&r, false), h->calls ? TD_REPLY_CALLS : TD_REPLY_STOP);
    td_reply_free(&r);
    return ended;
}

static uint32_t walks(struct td_tokenizer *t, struct td_grammar_spec spec, uint32_t *called) {
    struct td_chat chat;
    struct td_grammars *store;
    struct td_bytes bytes = {0};
    const struct td_grammar *g;
    struct td_error err;
    td_chat_init(&chat, t);
    spec.dsml_token = chat.dsml >= 0;
    const struct td_grammars_params p = {t, VOCAB, chat.eos, chat.dsml, chat.think_end, 2, 1 << 20};
    if (td_grammar_compile(&spec, &bytes, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_grammars_create(&p, &store, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_grammars_open(store, bytes.p, bytes.n, &g, &err) != TD_OK) fail_msg("%s", err.text);
    uint32_t ended = 0;
    for (uint32_t w = 0; w < WALKS; w++) {
        struct heard *h = calloc(1, sizeof *h);
        bool end = walk(store, g, &chat, &spec, h);
        ended += end;
        *called += h->ends;
        if (end) {
            assert_int_equal(h->ends, h->calls);
            assert_true(!spec.one_call || h->calls <= 1);
            if (spec.content == TD_CONTENT_NONE) assert_true(h->calls > 0 && h->content.n == 0);
            if (spec.content == TD_CONTENT_OBJECT && h->calls == 0) check_object(&h->content);
            if (spec.content == TD_CONTENT_OBJECT && h->calls > 0)
                assert_int_equal(h->content.n, 0);
        }
        for (uint32_t c = 0; c < h->calls; c++) {
            if (c < h->ends) check_call(&h->name[c], &h->arguments[c]);
            td_bytes_free(&h->name[c]);
            td_bytes_free(&h->arguments[c]);
        }
        td_bytes_free(&h->content);
        free(h);
    }
    td_grammars_destroy(store);
    td_bytes_free(&bytes);
    return ended;
}

static void what_is_allowed_is_what_is_read(void **state) {
    (void)state;
    struct td_error err;
    seed = tiny_seed();
    for (int marked = 0; marked < 2; marked++) {
        json_t *root = tiny_json();
        struct td_tokenizer *t;
        if (marked) tiny_add(root, DSML, "｜DSML｜", true);
        if (tiny_load(root, &t, &err) != TD_OK) fail_msg("%s", err.text);
        static const enum td_grammar_content contents[] = {TD_CONTENT_NONE, TD_CONTENT_TEXT,
                                                           TD_CONTENT_OBJECT};
        for (uint32_t k = 0; k < 3 * 2 * 2; k++) {
            const struct td_grammar_spec spec = {.content = contents[k % 3],
                                                 .tools = tools,
                                                 .n_tools = 3,
                                                 .one_call = k / 3 % 2,
                                                 .reasoning = k / 6};
            uint32_t called = 0, ended = walks(t, spec, &called);
            print_message("marked %d content %d one %d reasoning %d: %u ended, %u calls\n", marked,
                          (int)spec.content, spec.one_call, spec.reasoning, ended, called);
            assert_true(ended > WALKS / 10);
            if (spec.content == TD_CONTENT_NONE || marked) assert_true(called > WALKS / 20);
        }
        td_tokenizer_destroy(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_allowed_is_what_is_read)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

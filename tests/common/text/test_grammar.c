/* Masks against their definition: at every state of random walks the mask is exactly the tokens
 * that the matcher takes one by one, from a cache that is large, small, or too small for one
 * state. Further: any split of the bytes into tokens leads to the same position, a saved position
 * is the position, depth ends without a dead end. What schemas mean is grammar_compare.py's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/grammar.h"
#include "tests/common/text/tiny.h"

enum { DSML = TINY_SIZE, FIRST = TINY_SIZE + 1 };

/* Tokens that end strings, open several levels, cut characters and escapes. */
static const char *const pieces[] = {
    "{\"",   "\":",  "\": ",   "\",\"", "\", \"", "\"}",  "},{",      "[[",      "[[[[[[[[",  "]]",
    "\"]",   "{}",   "[]",     "},",    "]}",     "null", "true",     "false",   ",\n    ",   "\n  ",
    "  ",    "   ",  "\\u",    "\\ud8", "3d\\ud", "e00",  "\\\"",     "\\\\",    "u00",       "00e9",
    "\"\"",  "-1",   "12.5e",  "e+1",   "0.",     "99",   "\"a\":",   "\"b",     "a\":[{\"a", "\xE4\xB8",
    "\xAD",  "\xE4", "\xBD\xA0", "\xF0\x9F\x98", "\x80",  "name",     "=\"",     "\">\n",     "invoke",
    "parameter", "</", " string=\"", "true\">", "tool_calls>\n", "\n\n<", ">x</", "}}}}", "\"a\"", "{\"a\":1}",
    "2026-", "-01", "T00:", ":00", "Z\"", "\xEF\xBD\x9C", "\"x", "5\"",
};
enum { PIECES = sizeof pieces / sizeof *pieces, VOCAB = FIRST + PIECES + 40, WORDS = (VOCAB + 31) / 32 };

static struct td_tokenizer *tok;
static struct td_bytes text; /* a schema that is put together */
static uint64_t seed;

static int load(void **state) {
    (void)state;
    struct td_error err = {0};
    json_t *root = tiny_json();
    tiny_add(root, DSML, "｜DSML｜", true);
    for (int i = 0; i < PIECES; i++)
        tiny_add_base(root, FIRST + i, pieces[i]);
    if (tiny_load(root, &tok, &err) != TD_OK) fprintf(stderr, "%s\n", err.text);
    assert_non_null(tok);
    seed = tiny_seed();
    return 0;
}

static int unload(void **state) {
    (void)state;
    td_tokenizer_destroy(tok);
    td_bytes_free(&text);
    return 0;
}

static struct td_grammars *store(size_t mask_bytes, size_t max) {
    struct td_error err = {0};
    struct td_grammars *s = NULL;
    struct td_grammars_params p = {.t = tok,
                                   .vocab = VOCAB,
                                   .eos = TINY_EOS,
                                   .dsml = DSML,
                                   .think_end = TINY_THINK_END,
                                   .grammars_max = max,
                                   .mask_bytes = mask_bytes};
    if (td_grammars_create(&p, &s, &err) != TD_OK) fail_msg("%s", err.text);
    return s;
}

static const struct td_grammar *open_spec(struct td_grammars *s, const struct td_grammar_spec *spec) {
    struct td_error err = {0};
    struct td_bytes bytes = {0};
    const struct td_grammar *g = NULL;
    if (td_grammar_compile(spec, &bytes, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_grammars_open(s, bytes.p, bytes.n, &g, &err) != TD_OK) fail_msg("%s", err.text);
    td_bytes_free(&bytes);
    return g;
}

static bool has(const uint32_t *mask, int32_t id) { return mask[id / 32] >> (id % 32) & 1; }

static bool same(const struct td_matcher *a, const struct td_matcher *b) {
    uint8_t x[TD_MATCH_SAVED_MAX], y[TD_MATCH_SAVED_MAX];
    size_t n = td_matcher_save(a, x);
    return n == td_matcher_save(b, y) && memcmp(x, y, n) == 0;
}

/* ---- masks ---- */

static void check_mask(struct td_grammars *s, const struct td_matcher *m, uint32_t *mask) {
    td_grammars_mask(s, m, mask);
    int allowed = 0;
    for (int32_t id = 0; id < VOCAB; id++) {
        struct td_matcher next = *m;
        bool taken = td_grammars_token(s, &next, id);
        if (taken != has(mask, id))
            fail_msg("token %d: mask %d, matcher %d", id, has(mask, id), taken);
        if (!taken) assert_true(same(&next, m));
        allowed += taken;
    }
    assert_true(allowed > 0);
}

/* The same bytes one by one, and in random stretches, are the same position. */
static void check_split(const struct td_matcher *before, const struct td_matcher *after, int32_t id) {
    struct td_matcher by_byte = *before;
    size_t n;
    const char *p = td_tokenizer_bytes(tok, id, &n);
    if (td_tokenizer_is_special(tok, id)) return;
    for (size_t i = 0; i < n; i++)
        assert_true(td_matcher_bytes(&by_byte, p + i, 1));
    assert_true(same(&by_byte, after));
}

static void check_saved(const struct td_matcher *m) {
    struct td_error err = {0};
    struct td_matcher l;
    uint8_t p[TD_MATCH_SAVED_MAX];
    size_t n = td_matcher_save(m, p);
    assert_int_equal(td_matcher_load(&l, m->g, p, n, &err), TD_OK);
    assert_true(same(&l, m));
    if (n > 10) assert_int_equal(td_matcher_load(&l, m->g, p, n - 1, &err), TD_CORRUPT);
    p[3] ^= 1;
    assert_int_equal(td_matcher_load(&l, m->g, p, n, &err), TD_CORRUPT);
}

static int32_t choose(const uint32_t *mask) {
    int n = 0;
    for (int32_t id = 0; id < VOCAB; id++)
        n += has(mask, id);
    uint32_t k = tiny_random(&seed, (uint32_t)n);
    for (int32_t id = 0; id < VOCAB; id++)
        if (has(mask, id) && k-- == 0) return id;
    return -1;
}

static void walk(struct td_grammars *s, const struct td_grammar *g, int steps) {
    uint32_t mask[WORDS];
    struct td_matcher m, before;
    td_matcher_init(&m, g);
    for (int i = 0; i < steps && !m.ended; i++) {
        check_mask(s, &m, mask);
        assert_int_equal(has(mask, TINY_EOS), td_matcher_may_end(&m));
        int32_t id = choose(mask);
        before = m;
        assert_true(td_grammars_token(s, &m, id));
        if (id != TINY_EOS) check_split(&before, &m, id);
        check_saved(&m);
    }
    if (!m.ended) return;
    td_grammars_mask(s, &m, mask);
    for (int i = 0; i < WORDS; i++)
        assert_int_equal(mask[i], 0);
}

#define TEXT(t) .text = (t), .n = sizeof(t) - 1
#define SCHEMA(t) {.content = TD_CONTENT_SCHEMA, TEXT(t)}
#define TOOL(t, s) {.name = (t), .name_n = sizeof(t) - 1, .schema = (s), .schema_n = sizeof(s) - 1}

static const struct td_grammar_tool tools[] = {
    TOOL("name", "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"},\"b\":{\"type\":[\"string\","
                 "\"null\"],\"maxLength\":5,\"minLength\":2},\"c\":{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}},"
                 "\"required\":[\"a\"],\"additionalProperties\":false}"),
    TOOL("nam", "{\"properties\":{\"name\":{\"enum\":[\"x\",1,\"y</\"]},\"nam\":{\"pattern\":\"^[a-c<]+$\"}}}"),
    TOOL("any", ""),
};

static const struct td_grammar_spec specs[] = {
    {.content = TD_CONTENT_OBJECT},
    {.content = TD_CONTENT_OBJECT, .reasoning = true},
    SCHEMA("{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"maxLength\":6},\"b\":{\"type\":\"integer\"},"
           "\"name\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}},\"required\":[\"a\"],\"additionalProperties\":false}"),
    SCHEMA("{\"type\":\"string\",\"minLength\":3,\"maxLength\":9}"),
    SCHEMA("{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\"}}},{\"type\":\"object\","
           "\"properties\":{\"a\":{\"type\":\"string\",\"pattern\":\"^[ab]*$\"},\"b\":{\"type\":\"number\",\"minimum\":-1.5}},"
           "\"required\":[\"b\"]},{\"enum\":[\"ab\",[true,{\"a\":\"é\"}]]}]}"),
    SCHEMA("{\"type\":\"array\",\"items\":{\"type\":\"string\",\"format\":\"date-time\"},\"minItems\":1,\"maxItems\":3}"),
    {.content = TD_CONTENT_REGEX, TEXT("(name|nam=)*(\\d{2,3}[^<>]*x)?")},
    {.content = TD_CONTENT_NONE, .tools = tools, .n_tools = 3, .dsml_token = true},
    {.content = TD_CONTENT_TEXT, .tools = tools, .n_tools = 2, .dsml_token = true, .reasoning = true},
    {.content = TD_CONTENT_OBJECT, .tools = tools, .n_tools = 1, .dsml_token = true, .one_call = true},
    {.content = TD_CONTENT_TEXT, .tools = tools + 2, .n_tools = 1},
};
enum { SPECS = sizeof specs / sizeof *specs };

static void masks_are_what_the_matcher_takes(void **state) {
    (void)state;
    struct td_grammars *s = store(8 << 20, 2);
    for (int i = 0; i < 2 * SPECS; i++) {
        const struct td_grammar *g = open_spec(s, &specs[i % SPECS]);
        if (i % 2) (void)td_grammars_warm(s, g, 10000);
        for (int k = 0; k < 6; k++)
            walk(s, g, 60);
        td_grammars_close(s, g);
    }
    td_grammars_destroy(s);
}

/* ---- depth ---- */

static void depth_ends_without_a_dead_end(void **state) {
    (void)state;
    struct td_grammars *s = store(8 << 20, 4);
    const struct td_grammar *g = open_spec(s, &specs[0]);
    struct td_matcher m;
    uint32_t mask[WORDS];
    int depth = 0;
    td_matcher_init(&m, g);
    assert_true(td_matcher_bytes(&m, "{\"a\":", 5));
    for (; td_matcher_bytes(&m, "[", 1); depth++)
        check_mask(s, &m, mask);
    assert_in_range(depth, TD_MATCH_DEPTH - 4, TD_MATCH_DEPTH);
    assert_true(has(mask, ']'));
    for (; depth > 0; depth--) {
        check_mask(s, &m, mask);
        assert_true(td_matcher_bytes(&m, "]", 1));
    }
    assert_true(td_matcher_bytes(&m, "}", 1));
    assert_true(td_matcher_may_end(&m));
    td_grammars_close(s, g);
    td_grammars_destroy(s);
}

/* A level is entered only if what it still owes, four levels more, fits as well. */
static void depth_leaves_room_for_what_is_required(void **state) {
    (void)state;
#define NEST(t) "{\"type\":\"object\",\"properties\":{\"k\":" t "},\"required\":[\"k\"],\"additionalProperties\":false}"
    static const struct td_grammar_spec spec =
        SCHEMA("{\"type\":\"object\",\"properties\":{\"n\":{\"anyOf\":[{\"$ref\":\"#\"},{\"type\":\"null\"}]},\"k\":" NEST(
            NEST(NEST("{\"type\":\"null\"}"))) "},\"required\":[\"n\",\"k\"],\"additionalProperties\":false}");
    struct td_grammars *s = store(8 << 20, 4);
    const struct td_grammar *g = open_spec(s, &spec);
    struct td_matcher m;
    uint32_t mask[WORDS];
    int depth = 0;
    td_matcher_init(&m, g);
    for (; td_matcher_bytes(&m, "{\"n\":", 5); depth++)
        check_mask(s, &m, mask);
    assert_in_range(depth, TD_MATCH_DEPTH / 2, TD_MATCH_DEPTH);
    assert_true(td_matcher_bytes(&m, "null", 4));
    for (; depth > 0; depth--) {
        check_mask(s, &m, mask);
        assert_true(td_matcher_bytes(&m, ",\"k\":{\"k\":{\"k\":{\"k\":null}}}}", 28));
    }
    assert_true(td_matcher_may_end(&m));
    td_grammars_destroy(s);
}

/* ---- what JSON is ---- */

static bool accepts(const struct td_grammar *g, const char *p, size_t n) {
    struct td_matcher m;
    td_matcher_init(&m, g);
    return td_matcher_bytes(&m, p, n) && td_matcher_may_end(&m);
}

static void any_object(void **state) {
    (void)state;
    static const struct {
        const char *text;
        bool json;
    } t[] = {
        {"{}", true}, {"{ }", true}, {"{\n}", true}, {"{\"a\": 1, \"b\": [true, false, null]}", true},
        {"{\n    \"a\": {\n        \"b\": -0.5e+10\n    }\n}", true}, {"{\n\t\"a\": 1\n}", true},
        {"{\"a\":\"\\u00e9\\ud83d\\ude00 \\\" \\\\ \\/ \\b\\f\\n\\r\\t\"}", true},
        {"{\"\":\"é毕🙂\x7F\"}", true}, {"{\"a\":0}", true}, {"{\"a\":1E5}", true},
        {"", false}, {"[]", false}, {"{", false}, {"{\"a\"}", false}, {"{\"a\":}", false},
        {"{\"a\":1,}", false}, {"{,}", false}, {"{\"a\":01}", false}, {"{\"a\":1.}", false},
        {"{\"a\":.5}", false}, {"{\"a\":+1}", false}, {"{\"a\":-}", false}, {"{\"a\":1e}", false},
        {"{\"a\":\"\n\"}", false}, {"{\"a\":\"\\x\"}", false}, {"{\"a\":\"\\u12g4\"}", false},
        {"{\"a\":\"\\ud800\"}", false}, {"{\"a\":\"\\ude00\"}", false},
        {"{\"a\":\"\\ud83d\\u0041\"}", false}, {"{\"a\":\"\xC0\x80\"}", false},
        {"{\"a\":\"\xED\xA0\x80\"}", false}, {"{\"a\":\"\xF4\x90\x80\x80\"}", false},
        {"{\"a\":\"\xE6\xAF\"}", false}, {"{\"a\":tru}", false}, {"{}}", false}, {" {}", false},
        {"{}\n", false}, {"{'a':1}", false}, {"{\"a\":1 }", true}, {"{\"a\":1\n\n}", false},
        {"{\"a\" :1}", false}, {"{  }", false}, {"{\"a\":NaN}", false},
    };
    struct td_grammars *s = store(8 << 20, 4);
    const struct td_grammar *g = open_spec(s, &specs[0]);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (accepts(g, t[i].text, strlen(t[i].text)) != t[i].json)
            fail_msg("%s: expected %s", t[i].text, t[i].json ? "accepted" : "refused");
    td_grammars_destroy(s);
}

#define ONE(key, least)                                                                            \
    "{\"type\":\"object\",\"properties\":{\"" key "\":{\"type\":\"string\",\"minLength\":" least          \
    "}},\"required\":[\"" key "\"],\"additionalProperties\":false}"

/* One row per mechanism; what schemas mean in general is compared with jsonschema. */
static void what_schemas_allow(void **state) {
    (void)state;
    static const struct {
        struct td_grammar_spec spec;
        const char *text;
        bool allowed;
    } t[] = {
        {SCHEMA("{\"type\":\"string\",\"maxLength\":2}"), "\"é🙂\"", true},
        {SCHEMA("{\"type\":\"string\",\"maxLength\":2}"), "\"abc\"", false},
        {SCHEMA("{\"type\":\"string\",\"maxLength\":1}"), "\"\\ud83d\\ude00\"", true},
        {SCHEMA("{\"type\":\"string\",\"minLength\":2}"), "\"\\n\"", false},
        {SCHEMA("{\"type\":\"string\",\"minLength\":2}"), "\"\\n\\u000a\"", true},
        {SCHEMA("{\"anyOf\":[" ONE("a", "1") "," ONE("b", "3") "]}"), "{\"b\":\"xy\"}", false},
        {SCHEMA("{\"anyOf\":[" ONE("a", "1") "," ONE("b", "3") "]}"), "{\"a\":\"x\"}", true},
        {SCHEMA("{\"enum\":[\"a\",\"b\"],\"type\":\"string\"}"), "\"b\"", true},
        {SCHEMA("{\"enum\":[\"a\",\"b\"],\"type\":\"string\"}"), "\"c\"", false},
        {SCHEMA("{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}"), "-12", true},
        {SCHEMA("{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}"), "-13", false},
        {SCHEMA("{\"type\":\"integer\",\"minimum\":-12,\"maximum\":105}"), "106", false},
        {SCHEMA("{\"type\":\"number\",\"exclusiveMaximum\":0.5}"), "0.5", false},
        {SCHEMA("{\"type\":\"number\",\"exclusiveMaximum\":0.5}"), "0.49", true},
        {SCHEMA("{\"type\":\"array\",\"maxItems\":1}"), "[1,2]", false},
        {SCHEMA("{\"properties\":{\"a\":{},\"b\":{}},\"required\":[\"b\"],\"type\":\"object\"}"), "{\"a\":1}", false},
        {SCHEMA("{\"properties\":{\"a\":{},\"b\":{}},\"required\":[\"b\"],\"type\":\"object\"}"), "{\"b\":1,\"ab\":2}", true},
        {SCHEMA("{\"properties\":{\"a\":{\"type\":\"null\"}},\"type\":\"object\"}"), "{\"a\":1}", false},
        {SCHEMA("{\"type\":\"string\",\"pattern\":\"b+$\"}"), "\"abb\"", true},
        {SCHEMA("{\"type\":\"string\",\"pattern\":\"b+$\"}"), "\"abbc\"", false},
        {{.content = TD_CONTENT_REGEX, TEXT("[^a-c\\d]{2,3}")}, "xy", true},
        {{.content = TD_CONTENT_REGEX, TEXT("[^a-c\\d]{2,3}")}, "xyzz", false},
        {{.content = TD_CONTENT_REGEX, TEXT("[^a-c\\d]{2,3}")}, "x1", false},
    };
    struct td_grammars *s = store(1 << 20, 4);
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const struct td_grammar *g = open_spec(s, &t[i].spec);
        if (accepts(g, t[i].text, strlen(t[i].text)) != t[i].allowed)
            fail_msg("%s under %s: expected %d", t[i].text, t[i].spec.text, t[i].allowed);
        td_grammars_close(s, g);
    }
    td_grammars_destroy(s);
}

/* ---- limits ---- */

static void say(const char *p) { td_bytes_add(&text, p, strlen(p)); }

static struct td_grammar_spec said(void) {
    return (struct td_grammar_spec){.content = TD_CONTENT_SCHEMA, .text = text.p, .n = text.n};
}

/* Twenty readings side by side, more than are kept: what the mask allows is taken all the same. */
static void more_readings_than_are_kept(void **state) {
    (void)state;
    char one[256];
    text.n = 0;
    say("{\"anyOf\":[");
    for (int i = 0; i < TD_MATCH_PATHS + 4; i++) {
        snprintf(one, sizeof one,
                 "%s{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"object\",\"properties\":{\"a\":{"
                 "\"type\":\"integer\"},\"b%c\":{\"type\":\"null\"}},\"additionalProperties\":false}}}",
                 i ? "," : "", 'a' + i);
        say(one);
    }
    say("]}");
    struct td_grammars *s = store(8 << 20, 4);
    struct td_grammar_spec spec = said();
    const struct td_grammar *g = open_spec(s, &spec);
    struct td_matcher m;
    uint32_t mask[WORDS];
    td_matcher_init(&m, g);
    check_mask(s, &m, mask);
    for (const char *p = "{\"a\":"; *p; p++) {
        assert_true(td_matcher_bytes(&m, p, 1));
        check_mask(s, &m, mask);
    }
    /* The whole at once goes one way, byte by byte all ways that fit. */
    struct td_matcher all = m;
    assert_true(td_matcher_bytes(&all, "{\"a\":1", 6));
    assert_int_equal(all.n_paths, TD_MATCH_PATHS);
    assert_true(td_matcher_bytes(&m, "{\"bt", 4));
    assert_int_equal(m.n_paths, 1);
    for (int i = 0; i < 20; i++)
        walk(s, g, 40);
    td_grammars_destroy(s);
}

/* More places than the cache has entries: masks stay what they are. */
static void a_cache_that_is_too_small(void **state) {
    (void)state;
    char one[64];
    text.n = 0;
    say("{\"type\":\"object\",\"additionalProperties\":false,\"properties\":{");
    for (int i = 0; i < 300; i++) {
        snprintf(one, sizeof one, "%s\"%d name\":{}", i ? "," : "", i * 7919);
        say(one);
    }
    say("}}");
    struct td_grammars *s = store(1 << 20, 4);
    struct td_grammar_spec spec = said();
    const struct td_grammar *g = open_spec(s, &spec);
    assert_false(td_grammars_warm(s, g, 10000000));
    for (int i = 0; i < 40; i++)
        walk(s, g, 40);
    assert_true(td_grammars_bytes(s) < 3 << 20);
    td_grammars_destroy(s);
}

static void the_store_holds_what_is_in_use(void **state) {
    (void)state;
    struct td_error err = {0};
    struct td_grammars *s = store(1 << 20, 2);
    const struct td_grammar *a = open_spec(s, &specs[0]), *b = open_spec(s, &specs[3]), *c;
    struct td_bytes bytes = {0};
    assert_ptr_equal(open_spec(s, &specs[0]), a);
    assert_int_equal(td_grammar_compile(&specs[5], &bytes, &err), TD_OK);
    assert_int_equal(td_grammars_open(s, bytes.p, bytes.n, &c, &err), TD_BUSY);
    td_grammars_close(s, a);
    assert_int_equal(td_grammars_open(s, bytes.p, bytes.n, &c, &err), TD_BUSY); /* opened twice */
    td_grammars_close(s, b);
    assert_int_equal(td_grammars_open(s, bytes.p, bytes.n, &c, &err), TD_OK);
    walk(s, c, 30);
    walk(s, a, 30);
    td_bytes_free(&bytes);
    td_grammars_destroy(s);
}

/* Cut anywhere, or with a word that is another, compiled bytes do not open or do no harm. */
static void damaged_bytes(void **state) {
    (void)state;
    static uint32_t words[1 << 14];
    struct td_error err = {0};
    struct td_bytes bytes = {0};
    struct td_grammar g;
    assert_int_equal(td_grammar_compile(&specs[2], &bytes, &err), TD_OK);
    assert_true(bytes.n <= sizeof words);
    memcpy(words, bytes.p, bytes.n);
    assert_int_equal(td_grammar_open(words, bytes.n, &g, &err), TD_OK);
    for (size_t n = 0; n < bytes.n; n++)
        assert_int_equal(td_grammar_open(words, n, &g, &err), TD_CORRUPT);
    int refused = 0;
    for (int i = 0; i < 20000; i++) {
        size_t k = tiny_random(&seed, (uint32_t)(bytes.n / 4));
        uint32_t was = words[k];
        words[k] ^= 1u << tiny_random(&seed, 32);
        if (td_grammar_open(words, bytes.n, &g, &err) != TD_OK) {
            refused++;
        } else {
            struct td_matcher m;
            td_matcher_init(&m, &g);
            for (const char *p = "{\"a\":\"x\\u00e9\",\"name\":[{\"a\":\"\"}]}"; *p; p++)
                if (!td_matcher_bytes(&m, p, 1)) break;
        }
        words[k] = was;
    }
    assert_true(refused > 5000);
    td_bytes_free(&bytes);
}

static void what_is_too_much_is_said(void **state) {
    (void)state;
    struct td_error err = {0};
    struct td_bytes out = {0};
    text.n = 0;
    say("{\"enum\":[\"");
    while (text.n < TD_GRAMMAR_SOURCE_MAX)
        say("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
    say("\"]}");
    struct td_grammar_spec spec = said();
    assert_int_equal(td_grammar_compile(&spec, &out, &err), TD_TOO_LONG);
    spec = (struct td_grammar_spec){.content = TD_CONTENT_REGEX, TEXT("(a|b)*a(a|b){16}")};
    assert_int_equal(td_grammar_compile(&spec, &out, &err), TD_TOO_LONG);
    spec = (struct td_grammar_spec){.content = TD_CONTENT_TEXT};
    assert_int_equal(td_grammar_compile(&spec, &out, &err), TD_INVALID);
    static const struct td_grammar_tool bad[] = {TOOL("name", "{\"properties\":{\"a\":{\"not\":{}}}}")};
    spec = (struct td_grammar_spec){.tools = bad, .n_tools = 1, .dsml_token = true};
    assert_int_equal(td_grammar_compile(&spec, &out, &err), TD_UNSUPPORTED);
    assert_string_equal(err.text, "tool name: #/properties/a/not: cannot be enforced");
    assert_int_equal(out.n, 0);
}

static void say_times(const char *p, int n) {
    while (n-- > 0)
        say(p);
}

enum again { KEYS, POINTER, VALUES, REQUIRED };

/* A schema of which each reference reads a part again that is long in one way. */
static void say_again(enum again part, int references) {
    text.n = 0;
    say("{\"$defs\":{\"r\":");
    if (part == KEYS) {
        char key[32];
        say("{\"x-\":0");
        for (int i = 0; i < 2000; i++) {
            snprintf(key, sizeof key, ",\"x-%d\":0", i);
            say(key);
        }
        say("}");
    } else if (part == POINTER) {
        say("{\"$ref\":\"#/$defs/a");
        for (int i = 0; i < 40; i++) {
            say("/");
            say_times("k", 250);
        }
        say("\"},\"a\":");
        for (int i = 0; i < 40; i++) {
            say("{\"");
            say_times("k", 250);
            say("\":");
        }
        say("true");
        say_times("}", 40);
    } else if (part == VALUES) { /* two that are equal and not the same */
        say("{\"enum\":[[0");
        say_times(",0", 6000);
        say("]]},\"a\":{\"enum\":[[0");
        say_times(",0", 6000);
        say("]]}");
    } else {
        char name[16];
        say("{\"required\":[\"\"");
        for (int i = 0; i < 9000; i++) {
            snprintf(name, sizeof name, ",\"%d\"", i);
            say(name);
        }
        say("]}");
    }
    say("},\"type\":\"array\",\"allOf\":[{}");
    for (int i = 0; i < references; i++)
        say(part == VALUES && i % 2 ? ",{\"$ref\":\"#/$defs/a\"}" : ",{\"$ref\":\"#/$defs/r\"}");
    say("]}");
}

/* However often a small request has its schema read again, or its pattern: that is said instead. */
static void reading_again_is_bounded(void **state) {
    (void)state;
    static const struct {
        enum again part;
        int references;
    } t[] = {{KEYS, 2000}, {POINTER, 4000}, {VALUES, 4000}, {REQUIRED, 1}};
    struct td_error err = {0};
    struct td_bytes out = {0};
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        say_again(t[i].part, t[i].references);
        struct td_grammar_spec spec = said();
        td_status st = td_grammar_compile(&spec, &out, &err);
        if (st != TD_TOO_LONG || strcmp(err.text, "the schema is too complex") != 0)
            fail_msg("case %zu: %s, %s", i, td_status_name(st), st == TD_OK ? "" : err.text);
    }
    text.n = 0;
    say("(?<");
    say_times("n", 10000);
    say(">x){4000}");
    struct td_grammar_spec spec = said();
    spec.content = TD_CONTENT_REGEX;
    assert_int_equal(td_grammar_compile(&spec, &out, &err), TD_UNSUPPORTED);
    assert_non_null(strstr(err.text, "too long for its repetitions"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_readings_than_are_kept),
        cmocka_unit_test(a_cache_that_is_too_small),
        cmocka_unit_test(the_store_holds_what_is_in_use),
        cmocka_unit_test(damaged_bytes),
        cmocka_unit_test(what_is_too_much_is_said),
        cmocka_unit_test(reading_again_is_bounded),
        cmocka_unit_test(masks_are_what_the_matcher_takes),
        cmocka_unit_test(depth_ends_without_a_dead_end),
        cmocka_unit_test(depth_leaves_room_for_what_is_required),
        cmocka_unit_test(any_object),
        cmocka_unit_test(what_schemas_allow),
    };
    return cmocka_run_group_tests(tests, load, unload);
}

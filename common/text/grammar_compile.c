/* From what an answer may be to a compiled grammar: reads the schemas, draws the parts around
 * content and calls, and then all that they refer to. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

struct compile {
    struct td_gb b;
    const struct td_grammar_spec *spec;
    struct td_gs *schemas; /* [n_tools + 1] the content's last */
};

/* ---- reading ---- */

static json_t *read_json(struct td_gb *b, const char *text, size_t n) {
    json_error_t why;
    json_t *v = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
    if (!v) td_gb_fail(b, TD_INVALID, "the schema is not JSON: line %d: %.200s", why.line, why.text);
    if (v && !json_is_object(v) && !json_is_boolean(v))
        td_gb_fail(b, TD_INVALID, "expected a schema: an object, true or false");
    return v;
}

static void read_schemas(struct compile *c) {
    const struct td_grammar_spec *s = c->spec;
    size_t bytes = s->n;
    if (s->n_tools > TD_GRAMMAR_TOOLS_MAX)
        td_gb_fail(&c->b, TD_TOO_LONG, "%zu tools, more than %d", s->n_tools, TD_GRAMMAR_TOOLS_MAX);
    for (size_t i = 0; i < s->n_tools; i++)
        bytes += s->tools[i].schema_n;
    if (bytes > TD_GRAMMAR_SOURCE_MAX)
        td_gb_fail(&c->b, TD_TOO_LONG, "schemas and pattern of %zu bytes, more than %d", bytes,
                   TD_GRAMMAR_SOURCE_MAX);
    c->schemas = calloc(s->n_tools + 1, sizeof *c->schemas);
    if (!c->schemas) td_gb_fail(&c->b, TD_NO_MEMORY, "no memory for a grammar");
    for (size_t i = 0; i <= s->n_tools && c->b.st == TD_OK; i++) {
        bool content = i == s->n_tools;
        size_t n = content ? s->n : s->tools[i].schema_n;
        c->schemas[i].b = &c->b;
        if (content ? s->content != TD_CONTENT_SCHEMA : n == 0)
            c->schemas[i].root = json_true(); /* any */
        else
            c->schemas[i].root = read_json(&c->b, content ? s->text : s->tools[i].schema, n);
        td_gs_name_tool(&c->b, s, i);
    }
}

/* ---- drawing ---- */

/* Any bytes that do not hold `<` and the spelled mark, which lead on: Knuth, Morris and Pratt's
 * automaton, a state per length of what could become it. */
static void text_or_mark(struct td_gb *b, uint32_t from, uint32_t text_end, uint32_t calls) {
    static const char mark[] = "<｜DSML｜";
    enum { N = sizeof mark - 1 };
    uint32_t state[N + 1];
    size_t back[N + 1];
    back[0] = back[1] = 0;
    for (size_t i = 1, k = 0; i < N; i++) {
        while (k > 0 && mark[i] != mark[k])
            k = back[k];
        k += mark[i] == mark[k];
        back[i + 1] = k;
    }
    for (int i = 0; i < N; i++)
        state[i] = td_gb_new(b);
    state[N] = calls;
    td_gb_empty(b, from, state[0]);
    for (size_t i = 0; i < N; i++) {
        td_gb_empty(b, state[i], text_end);
        for (uint32_t c = 0; c < 256; c++) {
            size_t k = i;
            while (k > 0 && (unsigned char)mark[k] != c)
                k = back[k];
            k += (unsigned char)mark[k] == c;
            td_gb_range(b, state[i], state[k], c, c);
        }
    }
}

static void draw_content(struct compile *c, uint32_t at, uint32_t end) {
    struct td_gb *b = &c->b;
    const struct td_grammar_spec *s = c->spec;
    struct td_gs *schema = &c->schemas[s->n_tools];
    struct td_gs_list one = {0};
    switch (s->content) {
    case TD_CONTENT_NONE:
        break;
    case TD_CONTENT_TEXT:
        td_gb_empty(b, at, end);
        if (s->dsml_token) td_gb_call(b, at, end, TD_CORE_TEXT);
        break;
    case TD_CONTENT_OBJECT:
        td_gb_call(b, at, end, TD_CORE_OBJECT);
        break;
    case TD_CONTENT_REGEX:
        td_gb_pattern(b, at, end, s->text, s->n, &(struct td_gb_text_form){.room = TD_ROOM_ANY});
        break;
    case TD_CONTENT_SCHEMA:
        td_gs_list_add(b, &one, schema->root);
        td_gs_draw(schema, at, end, &one, TD_GS_ANY);
        free(one.p);
        break;
    }
}

static void draw_calls(struct compile *c, uint32_t at, uint32_t end) {
    struct td_gb *b = &c->b;
    const struct td_grammar_spec *s = c->spec;
    uint32_t calls = td_gb_new(b);
    if (s->content == TD_CONTENT_TEXT && s->dsml_token) {
        td_gb_call(b, at, calls, TD_CORE_CALLS);
    } else if (s->content == TD_CONTENT_TEXT) {
        text_or_mark(b, at, end, calls);
    } else if (s->dsml_token) {
        td_gb_range(b, td_gb_text(b, at, "\n\n<"), calls, TD_SYMBOL_DSML, TD_SYMBOL_DSML);
    } else {
        td_gb_empty(b, td_gb_text(b, at, "\n\n<｜DSML｜"), calls);
    }
    td_gs_calls(b, c->schemas, s, calls, end);
}

static uint32_t draw(struct compile *c) {
    struct td_gb *b = &c->b;
    const struct td_grammar_spec *s = c->spec;
    if (s->n_tools == 0 && (s->content == TD_CONTENT_NONE || s->content == TD_CONTENT_TEXT))
        td_gb_fail(b, TD_INVALID, "neither content nor calls to enforce");
    td_gb_core(b);
    uint32_t rule = td_gb_rule(b), start = td_gb_begin(b), at = start, end = td_gb_new(b);
    if (s->reasoning) {
        at = td_gb_new(b);
        td_gb_call(b, start, at, TD_CORE_REASONING);
    }
    if (b->st == TD_OK) draw_content(c, at, end);
    if (b->st == TD_OK && s->n_tools) draw_calls(c, at, end);
    if (b->st == TD_OK) td_gb_finish(b, rule, start, end, false);
    for (size_t i = 0; i <= s->n_tools && b->st == TD_OK; i++) {
        td_gs_finish(&c->schemas[i]);
        td_gs_name_tool(&c->b, s, i);
    }
    return rule;
}

td_status td_grammar_compile(const struct td_grammar_spec *s, struct td_bytes *out,
                             struct td_error *err) {
    struct compile c = {.b = {.err = err}, .spec = s};
    uint32_t root = 0;
    read_schemas(&c);
    if (c.b.st == TD_OK) root = draw(&c);
    td_status st = td_gb_pack(&c.b, root, out);
    for (size_t i = 0; c.schemas && i <= s->n_tools; i++) {
        td_gs_free(&c.schemas[i]);
        json_decref((json_t *)(uintptr_t)c.schemas[i].root);
    }
    free(c.schemas);
    td_gb_free(&c.b);
    return st;
}

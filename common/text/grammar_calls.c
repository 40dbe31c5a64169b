/* Calls of tools in the model's markup, exactly as the chat encoder writes them, with parameters in
 * the order of the tool's schema. A string is written as it is, everything else as JSON. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

enum { COLLECT_DEPTH = 64 };

struct call {
    struct td_gs *s;
    const struct td_grammar_spec *spec;
    uint32_t from, to;
};

static uint32_t mark(struct td_gb *b, const struct td_grammar_spec *spec, uint32_t from) {
    if (!spec->dsml_token) return td_gb_text(b, from, "｜DSML｜");
    uint32_t to = td_gb_new(b);
    td_gb_range(b, from, to, TD_SYMBOL_DSML, TD_SYMBOL_DSML);
    return to;
}

static uint32_t tag(struct td_gb *b, const struct td_grammar_spec *spec, uint32_t from,
                    const char *open, const char *text) {
    return td_gb_text(b, mark(b, spec, td_gb_text(b, from, open)), text);
}

/* ---- parameters ---- */

static void end_parameter(struct call *c, uint32_t from) {
    td_gb_empty(c->s->b, tag(c->s->b, c->spec, from, "</", "parameter>\n"), c->to);
}

/* A string's text. Where the mark is spelled, text that is counted or matched would have to be told
 * from the closing tag: such text then has no `<`. */
static void raw_string(struct td_gs *s, const struct td_gs_node *n, void *context) {
    struct call *c = context;
    struct td_gb *b = s->b;
    uint32_t behind = td_gb_new(b);
    if (!(n->types & TD_GS_STRING) || n->need > n->room) return;
    if (n->has_values) {
        for (size_t i = 0; i < n->values.n && b->st == TD_OK; i++) {
            const json_t *v = n->values.p[i];
            if (!json_is_string(v) || !td_gs_value_fits(s, n, v)) continue;
            td_gb_empty(b, td_gb_bytes(b, c->from, json_string_value(v), json_string_length(v)),
                        behind);
        }
        end_parameter(c, behind);
    } else if (n->pattern || n->format) {
        td_gs_pattern(s, c->from, behind, n, false, !c->spec->dsml_token);
        end_parameter(c, behind);
    } else if (c->spec->dsml_token) {
        td_gb_call_counted(b, c->from, behind, TD_CORE_RAW, n->need, n->room);
        td_gb_empty(b, td_gb_text(b, behind, "parameter>\n"), c->to);
    } else if (n->need || n->room != TD_ROOM_ANY) {
        td_gb_pattern(b, c->from, behind, "[^<]*", 5,
                      &(struct td_gb_text_form){.need = n->need, .room = n->room});
        end_parameter(c, behind);
    } else {
        td_gb_call(b, c->from, behind, TD_CORE_RAW_SPELT);
        td_gb_empty(b, td_gb_text(b, behind, ">\n"), c->to);
    }
}

/* From behind the key's closing quote. */
static void parameter_value(struct call *c, uint32_t from, uint32_t to, const struct td_gs_list *l) {
    struct td_gs *s = c->s;
    struct td_gs_node n;
    struct call string = {.s = s, .spec = c->spec, .to = to}, json = string;
    td_gs_node_init(&n);
    for (size_t i = 0; i < l->n; i++)
        td_gs_collect(s, &n, l->p[i], COLLECT_DEPTH);
    string.from = td_gb_text(s->b, from, " string=\"true\">");
    n.types &= TD_GS_STRING;
    td_gs_alternatives(s, &n, raw_string, &string);
    td_gs_node_free(&n);
    uint32_t behind = td_gb_new(s->b);
    json.from = td_gb_text(s->b, from, " string=\"false\">");
    td_gs_draw(s, json.from, behind, l, TD_GS_ANY & ~(uint32_t)TD_GS_STRING);
    end_parameter(&json, behind);
}

static uint32_t named_parameter(struct call *c, uint32_t from, const char *name,
                                const struct td_gs_list *l) {
    struct td_gb *b = c->s->b;
    uint32_t to = td_gb_new(b), key = tag(b, c->spec, from, "<", "parameter name=\"");
    for (const char *p = name; *p; p++)
        if (*p == '"' || *p == '<' || *p == '>' || (unsigned char)*p < ' ')
            td_gs_refuse(c->s, c->s->root, "properties",
                         "a parameter's name with a quote, < , > or a control character");
    parameter_value(c, td_gb_text(b, td_gb_text(b, key, name), "\""), to, l);
    return to;
}

static void parameters(struct td_gs *s, const struct td_gs_node *n, void *context) {
    struct call *c = context;
    struct td_gb *b = s->b;
    struct td_gs_names m = {0};
    struct td_gs_list more = {0};
    if (n->has_values) td_gs_refuse(s, s->root, "enum", "of whole arguments cannot be enforced");
    bool open = td_gs_member(s, n, NULL, &more);
    td_gs_names_of(s, n, &m);
    td_gs_check_counts(s, n, &m, open);
    uint32_t none = c->from, some = td_gb_new(b); /* without and with a parameter so far */
    for (size_t i = 0; i < m.n && b->st == TD_OK; i++) {
        struct td_gs_list l = {0};
        uint32_t begin = td_gb_new(b), next_none = td_gb_new(b), next_some = td_gb_new(b);
        td_gb_empty(b, none, begin);
        td_gb_empty(b, some, begin);
        if (td_gs_member(s, n, m.p[i], &l))
            td_gb_empty(b, named_parameter(c, begin, m.p[i], &l), next_some);
        free(l.p);
        if (!m.required[i]) {
            td_gb_empty(b, none, next_none);
            td_gb_empty(b, some, next_some);
        }
        none = next_none;
        some = next_some;
    }
    if (open && b->st == TD_OK) {
        uint32_t begin = td_gb_new(b), key_end = td_gb_new(b);
        td_gb_empty(b, none, begin);
        td_gb_empty(b, some, begin);
        td_gs_other_key(b, tag(b, c->spec, begin, "<", "parameter name=\""), key_end, &m, false);
        parameter_value(c, key_end, some, &more);
    }
    td_gb_empty(b, td_gb_text(b, none, "\n"), c->to); /* no parameter: an empty line */
    td_gb_empty(b, some, c->to);
    free(m.p);
    free(m.required);
    free(more.p);
}

/* ---- calls ---- */

static uint32_t tool(struct td_gs *s, const struct td_grammar_spec *spec,
                     const struct td_grammar_tool *t, uint32_t from) {
    struct td_gs_node n;
    struct call c = {.s = s, .spec = spec, .to = td_gb_new(s->b)};
    uint32_t at = tag(s->b, spec, from, "<", "invoke name=\"");
    c.from = td_gb_text(s->b, td_gb_bytes(s->b, at, t->name, t->name_n), "\">\n");
    td_gs_node_init(&n);
    td_gs_collect(s, &n, s->root, COLLECT_DEPTH);
    n.types &= TD_GS_OBJECT;
    td_gs_alternatives(s, &n, parameters, &c);
    td_gs_node_free(&n);
    return tag(s->b, spec, c.to, "</", "invoke>\n");
}

static bool name_fits(const struct td_grammar_tool *t) {
    for (size_t i = 0; i < t->name_n; i++)
        if (strchr("\"<>", t->name[i]) || (unsigned char)t->name[i] < ' ') return false;
    return t->name_n > 0 && t->name_n <= 128;
}

void td_gs_name_tool(struct td_gb *b, const struct td_grammar_spec *spec, size_t i) {
    if (b->st == TD_OK || i >= spec->n_tools || !b->err) return;
    char text[sizeof b->err->text];
    const struct td_grammar_tool *t = &spec->tools[i];
    int n = (int)(t->name_n < 128 ? t->name_n : 128);
    snprintf(text, sizeof text, "%s", b->err->text);
    b->st = td_fail(b->err, b->st, "tool %.*s: %.240s", n, t->name, text);
}

/* From behind <|DSML| to the end of the answer. */
void td_gs_calls(struct td_gb *b, struct td_gs *each, const struct td_grammar_spec *spec,
                 uint32_t from, uint32_t to) {
    uint32_t begin = td_gb_text(b, from, "tool_calls>\n"), behind = td_gb_new(b);
    for (size_t i = 0; i < spec->n_tools && b->st == TD_OK; i++) {
        if (!name_fits(&spec->tools[i]))
            td_gb_fail(b, TD_INVALID, "tool %zu: expected a name of 1 to 128 bytes without \" < >", i);
        td_gb_empty(b, tool(&each[i], spec, &spec->tools[i], begin), behind);
        td_gs_name_tool(b, spec, i);
    }
    if (!spec->one_call) td_gb_empty(b, behind, begin);
    td_gb_empty(b, tag(b, spec, behind, "</", "tool_calls>"), to);
}

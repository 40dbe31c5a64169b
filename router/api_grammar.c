/* See api_grammar.h. */
#include "router/api_grammar.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar.h"

enum { CHOICE_MAX = 256 };

/* Where a request says its form; `value` is borrowed from its JSON. */
struct source {
    enum td_api_form form;
    const json_t *value; /* schema, pattern, choices */
    const char *param;   /* whose field it is */
};

/* ---- reading ---- */

static td_status set_source(const struct td_fields *f, struct source *s, enum td_api_form form,
                            const json_t *value, const char *param) {
    if (s->form != TD_FORM_FREE)
        return td_api_refuse(f->e, 400, NULL, param, "%s and %s contradict: an answer has one form",
                             s->param, param);
    *s = (struct source){form, value, param};
    return TD_OK;
}

static td_status read_schema(const struct td_fields *f, const char *name, const char *param,
                             struct source *s) {
    const json_t *v = td_field(f, name);
    if (!v) return TD_OK;
    if (!json_is_object(v) && !json_is_string(v) && !json_is_boolean(v))
        return td_field_wrong(f, name, "a JSON schema");
    return set_source(f, s, TD_FORM_SCHEMA, v, param);
}

static td_status read_regex(const struct td_fields *f, const char *name, const char *param,
                            struct source *s) {
    const char *pattern = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, name, &pattern, &n));
    return pattern ? set_source(f, s, TD_FORM_REGEX, td_field(f, name), param) : TD_OK;
}

static td_status read_choice(const struct td_fields *f, const char *name, const char *param,
                             struct source *s) {
    const json_t *list = NULL;
    TD_TRY(td_field_array(f, name, &list));
    if (!list) return TD_OK;
    size_t n = json_array_size(list);
    bool fits = n >= 1 && n <= CHOICE_MAX;
    for (size_t i = 0; fits && i < n; i++)
        fits = json_string_length(json_array_get(list, i)) > 0;
    if (!fits) return td_field_wrong(f, name, "an array of 1 to 256 strings that are not empty");
    return set_source(f, s, TD_FORM_CHOICE, list, param);
}

static td_status read_json_schema(const struct td_fields *f, struct source *s) {
    static const struct td_param known[] = {{"name", TD_PARAM_READ, NULL},
                                            {"description", TD_PARAM_READ, NULL},
                                            {"schema", TD_PARAM_READ, NULL},
                                            {"strict", TD_PARAM_READ, NULL},
                                            {0}};
    const json_t *v = NULL;
    const char *text;
    size_t n;
    bool strict;
    TD_TRY(td_field_object(f, "json_schema", &v));
    if (!v) return td_field_wrong(f, "json_schema", "an object with a schema");
    struct td_fields j = {v, "response_format.json_schema.", f->e};
    TD_TRY(td_fields_known(&j, known, NULL));
    if (!td_field(&j, "name")) return td_field_wrong(&j, "name", "a string");
    TD_TRY(td_field_str(&j, "name", &text, &n));
    TD_TRY(td_field_str(&j, "description", &text, &n));
    TD_TRY(td_field_bool(&j, "strict", &strict)); /* enforced either way */
    if (!json_is_object(td_field(&j, "schema"))) return td_field_wrong(&j, "schema", "an object");
    return read_schema(&j, "schema", "response_format", s);
}

static td_status read_format(const struct td_fields *f, struct source *s) {
    static const struct td_param known[] = {
        {"type", TD_PARAM_READ, NULL}, {"json_schema", TD_PARAM_READ, NULL}, {0}};
    const json_t *v = NULL;
    const char *type = NULL;
    size_t n = 0;
    TD_TRY(td_field_object(f, "response_format", &v));
    if (!v) return TD_OK;
    struct td_fields r = {v, "response_format.", f->e};
    TD_TRY(td_fields_known(&r, known, NULL));
    TD_TRY(td_field_str(&r, "type", &type, &n));
    bool text = type && strcmp(type, "text") == 0,
         object = type && strcmp(type, "json_object") == 0;
    if (!text && !object && (!type || strcmp(type, "json_schema") != 0))
        return td_field_wrong(&r, "type", "text, json_object or json_schema");
    if (!text && !object) return read_json_schema(&r, s);
    if (td_field(&r, "json_schema"))
        return td_field_wrong(&r, "json_schema", "none, except with the type json_schema");
    return object ? set_source(f, s, TD_FORM_OBJECT, NULL, "response_format") : TD_OK;
}

static td_status read_structured(const struct td_fields *f, struct source *s) {
    static const struct td_param known[] = {{"json", TD_PARAM_READ, NULL},
                                            {"regex", TD_PARAM_READ, NULL},
                                            {"choice", TD_PARAM_READ, NULL},
                                            {"json_object", TD_PARAM_READ, NULL},
                                            {"grammar", TD_PARAM_REFUSED, NULL},
                                            {"structural_tag", TD_PARAM_REFUSED, NULL},
                                            {"whitespace_pattern", TD_PARAM_REFUSED, NULL},
                                            {"disable_fallback", TD_PARAM_HARMLESS, NULL},
                                            {"disable_any_whitespace", TD_PARAM_FALSE, NULL},
                                            {"disable_additional_properties", TD_PARAM_FALSE, NULL},
                                            {0}};
    static const char name[] = "structured_outputs";
    const json_t *v = NULL;
    bool object = false;
    TD_TRY(td_field_object(f, name, &v));
    if (!v) return TD_OK;
    struct td_fields o = {v, "structured_outputs.", f->e};
    TD_TRY(td_fields_known(&o, known, NULL));
    TD_TRY(read_schema(&o, "json", name, s));
    TD_TRY(read_regex(&o, "regex", name, s));
    TD_TRY(read_choice(&o, "choice", name, s));
    TD_TRY(td_field_bool(&o, "json_object", &object));
    return object ? set_source(f, s, TD_FORM_OBJECT, NULL, name) : TD_OK;
}

static td_status read_source(const struct td_fields *f, struct source *s) {
    *s = (struct source){.form = TD_FORM_FREE};
    TD_TRY(read_format(f, s));
    TD_TRY(read_structured(f, s));
    TD_TRY(read_schema(f, "guided_json", "guided_json", s));
    TD_TRY(read_regex(f, "guided_regex", "guided_regex", s));
    TD_TRY(read_regex(f, "regex", "regex", s));
    return read_choice(f, "guided_choice", "guided_choice", s);
}

td_status td_api_form_check(const struct td_fields *f, struct td_api_params *p) {
    struct source s;
    TD_TRY(read_source(f, &s));
    p->form = s.form;
    p->enforced = p->form != TD_FORM_FREE || p->force != TD_CALLS_AUTO || (p->calls && p->strict);
    if (!p->enforced || !p->sampling.ignore_eos) return TD_OK;
    return td_api_refuse(f->e, 400, NULL, "ignore_eos",
                         "ignore_eos: an answer with a form ends where the form ends; expected "
                         "false, found true");
}

/* ---- compiling ---- */

/* What a specification points to. */
struct spec {
    struct td_grammar_spec s;
    struct td_grammar_tool *tools;
    char **schemas; /* [n_tools] owned, as the tools' or NULL */
    bool loose;     /* there is a tool that is not strict */
    char *text;     /* owned */
    struct td_bytes pattern;
};

static void free_spec(struct spec *c) {
    for (size_t i = 0; c->schemas && i < c->s.n_tools; i++)
        free(c->schemas[i]);
    free(c->schemas);
    free(c->tools);
    free(c->text);
    td_bytes_free(&c->pattern);
}

/* One of several strings as a pattern. */
static td_status add_choices(struct spec *c, const json_t *list, struct td_api_error *e) {
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *p = json_string_value(json_array_get(list, i));
        size_t n = json_string_length(json_array_get(list, i));
        if (i > 0) td_bytes_add(&c->pattern, "|", 1);
        for (size_t k = 0; k < n; k++) {
            if (p[k] && strchr("\\^$.|?*+()[]{}/-", p[k])) td_bytes_add(&c->pattern, "\\", 1);
            td_bytes_add(&c->pattern, p + k, 1);
        }
    }
    c->s.content = TD_CONTENT_REGEX;
    c->s.text = c->pattern.p;
    c->s.n = c->pattern.n;
    return c->pattern.failed ? td_api_no_memory(e) : TD_OK;
}

static td_status add_content(struct spec *c, const struct source *s, struct td_api_error *e) {
    switch (s->form) {
    case TD_FORM_FREE:
        c->s.content = TD_CONTENT_TEXT;
        return TD_OK;
    case TD_FORM_OBJECT:
        c->s.content = TD_CONTENT_OBJECT;
        return TD_OK;
    case TD_FORM_CHOICE:
        return add_choices(c, s->value, e);
    default:
        c->s.content = s->form == TD_FORM_SCHEMA ? TD_CONTENT_SCHEMA : TD_CONTENT_REGEX;
        c->s.text = json_string_value(s->value); /* a schema's text, or a pattern */
        c->s.n = json_string_length(s->value);
        if (c->s.text) return TD_OK;
        c->text = json_dumps(s->value, JSON_COMPACT | JSON_ENCODE_ANY);
        c->s.text = c->text;
        c->s.n = c->text ? strlen(c->text) : 0;
        return c->text ? TD_OK : td_api_no_memory(e);
    }
}

/* A tool without parameters takes none. */
static td_status add_tool(struct spec *c, const json_t *tool, bool forced, struct td_api_error *e) {
    static const char none[] =
        "{\"type\":\"object\",\"properties\":{},\"additionalProperties\":false}";
    const json_t *function = json_object_get(tool, "function");
    const json_t *name = json_object_get(function, "name");
    const json_t *schema = json_object_get(function, "parameters");
    bool strict = json_is_true(json_object_get(function, "strict"));
    struct td_grammar_tool *t = &c->tools[c->s.n_tools];
    *t = (struct td_grammar_tool){.name = json_string_value(name),
                                  .name_n = json_string_length(name)};
    c->schemas[c->s.n_tools++] = NULL;
    c->loose |= !strict;
    if (!strict && !forced) return TD_OK;
    t->schema = none;
    t->schema_n = sizeof none - 1;
    if (!json_is_object(schema)) return TD_OK;
    t->schema = c->schemas[c->s.n_tools - 1] = json_dumps(schema, JSON_COMPACT);
    if (!t->schema) return td_api_no_memory(e);
    t->schema_n = strlen(t->schema);
    return TD_OK;
}

static td_status add_tools(struct spec *c, const json_t *root, const struct td_api_params *p,
                           struct td_api_error *e) {
    const json_t *tools = json_object_get(root, "tools");
    const json_t *choice = json_object_get(json_object_get(root, "tool_choice"), "function");
    const char *named = json_string_value(json_object_get(choice, "name"));
    size_t n = json_array_size(tools);
    c->tools = calloc(n, sizeof *c->tools);
    c->schemas = calloc(n, sizeof *c->schemas);
    if (!c->tools || !c->schemas) return td_api_no_memory(e);
    for (size_t i = 0; i < n; i++) {
        const json_t *tool = json_array_get(tools, i);
        const char *name =
            json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
        if (p->force == TD_CALLS_NAMED && strcmp(name, named) != 0) continue;
        TD_TRY(add_tool(c, tool, p->force != TD_CALLS_AUTO, e));
    }
    c->s.tools = c->tools;
    c->s.one_call = p->one_call || p->force == TD_CALLS_NAMED;
    return TD_OK;
}

/* The arguments of tools that are not strict may be any object. */
static void loosen(struct spec *c, const json_t *root) {
    const json_t *tools = json_object_get(root, "tools");
    for (size_t i = 0; i < c->s.n_tools; i++)
        for (size_t k = 0; k < json_array_size(tools); k++) {
            const json_t *f = json_object_get(json_array_get(tools, k), "function");
            if (strcmp(json_string_value(json_object_get(f, "name")), c->tools[i].name) == 0 &&
                !json_is_true(json_object_get(f, "strict")))
                c->tools[i].schema_n = 0;
        }
}

static td_status compile(struct spec *c, const json_t *root, const struct td_api_params *p,
                         const struct source *s, struct td_bytes *out, struct td_api_error *e) {
    struct td_error err;
    td_status st = td_grammar_compile(&c->s, out, &err);
    if ((st == TD_UNSUPPORTED || st == TD_TOO_LONG) && c->loose && p->force != TD_CALLS_AUTO) {
        loosen(c, root);
        st = td_grammar_compile(&c->s, out, &err);
    }
    if (st == TD_OK) return TD_OK;
    if (st == TD_NO_MEMORY) return td_api_no_memory(e);
    bool tool = strncmp(err.text, "tool ", 5) == 0 || !s->param || p->force != TD_CALLS_AUTO;
    const char *param = tool ? "tools" : s->param;
    return td_api_refuse(e, 400, st == TD_UNSUPPORTED ? "unsupported_value" : NULL, param, "%s: %s",
                         param, err.text);
}

td_status td_api_grammar_make(const json_t *root, const struct td_api_params *p,
                              const struct td_chat *chat, bool reasoning, struct td_bytes *out,
                              struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    struct source s;
    struct spec c = {.s = {.reasoning = reasoning, .dsml_token = chat->dsml >= 0}};
    if (!p->enforced) return TD_OK;
    TD_TRY(read_source(&f, &s));
    td_status st = p->calls ? add_tools(&c, root, p, e) : TD_OK;
    if (st == TD_OK && p->force == TD_CALLS_AUTO) st = add_content(&c, &s, e);
    if (st == TD_OK) st = compile(&c, root, p, &s, out, e);
    free_spec(&c);
    return st;
}

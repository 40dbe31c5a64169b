/* Declared tools: what a client may ask of them, and their functions as text for the prompt. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar.h"
#include "common/text/reply.h"
#include "router/api_messages.h"

enum { PATH_MAX_BYTES = 64 };

static const struct td_param tool_params[] = {
    {"type", TD_PARAM_WORD, "function"}, {"function", TD_PARAM_READ, NULL}, {0}};

/* A name that the model's markup can carry: it ends at a quote and has no escapes. */
static td_status check_name(const struct td_fields *f) {
    const char *name = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "name", &name, &n));
    bool fits = n > 0 && n <= TD_REPLY_NAME_MAX;
    for (size_t i = 0; fits && i < n; i++)
        if ((unsigned char)name[i] < ' ' || strchr("\"<>", name[i])) fits = false;
    if (fits) return TD_OK;
    char expected[80];
    snprintf(expected, sizeof expected, "a name of 1 to %d bytes without quotes, < and >",
             TD_REPLY_NAME_MAX);
    return td_field_wrong(f, "name", expected);
}

static td_status check_tool(const json_t *v, size_t i, struct td_api_params *p,
                            struct td_api_error *e) {
    char path[PATH_MAX_BYTES], inner[PATH_MAX_BYTES], found[40];
    snprintf(path, sizeof path, "tools[%zu]", i);
    if (!json_is_object(v))
        return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                             td_request_found(v, found));
    snprintf(path, sizeof path, "tools[%zu].", i);
    snprintf(inner, sizeof inner, "tools[%zu].function.", i);
    struct td_fields f = {v, path, e};
    const json_t *function = NULL, *parameters = NULL;
    const char *description;
    size_t n;
    bool strict = false;
    if (!td_field(&f, "type")) return td_field_wrong(&f, "type", "\"function\"");
    TD_TRY(td_fields_known(&f, tool_params, NULL));
    TD_TRY(td_field_object(&f, "function", &function));
    if (!function) return td_field_wrong(&f, "function", "an object");
    struct td_fields g = {function, inner, e};
    TD_TRY(check_name(&g));
    TD_TRY(td_field_str(&g, "description", &description, &n));
    TD_TRY(td_field_object(&g, "parameters", &parameters));
    TD_TRY(td_field_bool(&g, "strict", &strict));
    p->strict |= strict;
    return TD_OK;
}

static const json_t *name_of(const json_t *tools, size_t i) {
    return json_object_get(json_object_get(json_array_get(tools, i), "function"), "name");
}

/* Calls name their tool: two of one name could not be told apart. */
static td_status check_names(const json_t *tools, struct td_api_error *e) {
    for (size_t i = 0; i < json_array_size(tools); i++)
        for (size_t k = 0; k < i; k++) {
            if (!json_equal(name_of(tools, i), name_of(tools, k))) continue;
            char path[PATH_MAX_BYTES];
            snprintf(path, sizeof path, "tools[%zu].function.name", i);
            return td_api_refuse(e, 400, NULL, path,
                                 "%s: expected names that differ, found '%.40s' twice", path,
                                 json_string_value(name_of(tools, i)));
        }
    return TD_OK;
}

/* {"type": "function", "function": {"name": ...}} */
static td_status read_named(const struct td_fields *f, const json_t *v, const json_t *tools,
                            struct td_api_params *p) {
    static const struct td_param known[] = {{"name", TD_PARAM_READ, NULL}, {0}};
    const json_t *function = NULL;
    const char *name = NULL;
    size_t n = 0;
    struct td_fields c = {v, "tool_choice.", f->e};
    TD_TRY(td_fields_known(&c, tool_params, NULL));
    TD_TRY(td_field_object(&c, "function", &function));
    if (!function) return td_field_wrong(&c, "function", "an object with the name of a tool");
    struct td_fields g = {function, "tool_choice.function.", f->e};
    TD_TRY(td_fields_known(&g, known, NULL));
    TD_TRY(td_field_str(&g, "name", &name, &n));
    for (size_t i = 0; name && i < json_array_size(tools); i++)
        if (json_equal(name_of(tools, i), td_field(&g, "name"))) {
            p->force = TD_CALLS_NAMED;
            return TD_OK;
        }
    return td_field_wrong(&g, "name", "the name of one of the tools");
}

static td_status read_choice(const struct td_fields *f, const json_t *tools,
                             struct td_api_params *p) {
    const json_t *v = td_field(f, "tool_choice");
    const char *word = json_string_value(v);
    bool required = word && strcmp(word, "required") == 0;
    if (!v || (word && strcmp(word, "auto") == 0)) return TD_OK;
    if (word && strcmp(word, "none") == 0) {
        p->calls = false;
        return TD_OK;
    }
    if (!required && !json_is_object(v))
        return td_field_wrong(f, "tool_choice", "none, auto, required or a tool");
    if (json_array_size(tools) == 0)
        return td_field_wrong(f, "tool_choice", "none or auto where there are no tools");
    if (json_is_object(v)) return read_named(f, v, tools, p);
    p->force = TD_CALLS_REQUIRED;
    return TD_OK;
}

td_status td_api_tools_check(const struct td_fields *f, struct td_api_params *p) {
    const json_t *tools = NULL;
    bool parallel = true;
    TD_TRY(td_field_array(f, "tools", &tools));
    size_t n = json_array_size(tools);
    if (n > TD_GRAMMAR_TOOLS_MAX)
        return td_api_refuse(f->e, 400, NULL, "tools", "tools: expected at most %d, found %zu",
                             TD_GRAMMAR_TOOLS_MAX, n);
    for (size_t i = 0; i < n; i++)
        TD_TRY(check_tool(json_array_get(tools, i), i, p, f->e));
    TD_TRY(check_names(tools, f->e));
    p->calls = n > 0;
    TD_TRY(read_choice(f, tools, p));
    TD_TRY(td_field_bool(f, "parallel_tool_calls", &parallel));
    p->one_call = !parallel;
    return TD_OK;
}

td_status td_api_tools_read(const struct td_fields *f, struct td_api_chat *c,
                            const struct td_chat_text **ret, size_t *ret_n) {
    const json_t *tools = td_field(f, "tools");
    size_t n = json_array_size(tools);
    struct td_chat_text *texts = td_api_chat_own(c, calloc(n, sizeof *texts), f->e);
    if (!texts) return TD_INVALID;
    for (size_t i = 0; i < n; i++) {
        const json_t *function = json_object_get(json_array_get(tools, i), "function");
        char *text = td_api_chat_own(c, json_dumps(function, JSON_COMPACT), f->e);
        if (!text) return TD_INVALID;
        texts[i] = (struct td_chat_text){text, strlen(text)};
    }
    *ret = texts;
    *ret_n = n;
    return TD_OK;
}

/* Declared tools: what a client may ask of them, and their functions as text for the prompt. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static td_status check_tool(const json_t *v, size_t i, struct td_api_error *e) {
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
    if (!strict) return TD_OK;
    char name[96];
    td_field_name(&g, "strict", name);
    return td_api_refuse(e, 400, "unsupported_value", name,
                         "%s: arguments are not enforced here; expected false, found true", name);
}

static td_status read_choice(const struct td_fields *f, struct td_api_params *p) {
    const json_t *v = td_field(f, "tool_choice");
    const char *word = json_string_value(v), *type = NULL;
    if (json_is_object(v)) type = json_string_value(json_object_get(v, "type"));
    if (!v || (word && strcmp(word, "auto") == 0)) return TD_OK;
    if (word && strcmp(word, "none") == 0) {
        p->calls = false;
        return TD_OK;
    }
    if (!(word && strcmp(word, "required") == 0) && !type)
        return td_field_wrong(f, "tool_choice", "none or auto");
    return td_api_refuse(f->e, 400, "unsupported_value", "tool_choice",
                         "tool_choice: calls are not enforced here; expected none or auto, found "
                         "%.40s",
                         word ? word : type);
}

td_status td_api_tools_check(const struct td_fields *f, struct td_api_params *p) {
    const json_t *tools = NULL;
    bool parallel = true;
    TD_TRY(td_field_array(f, "tools", &tools));
    for (size_t i = 0; i < json_array_size(tools); i++)
        TD_TRY(check_tool(json_array_get(tools, i), i, f->e));
    p->calls = json_array_size(tools) > 0;
    TD_TRY(read_choice(f, p));
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

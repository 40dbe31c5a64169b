/* The items of the Responses API: messages, reasoning, calls and results side by side, as chat
 * messages, where reasoning and calls belong to the assistant's. */
#include <stdio.h>
#include <string.h>

#include "common/text/bytes.h"
#include "router/api_responses.h"
#include "router/json_build.h"

enum { PATH_BYTES = 80 };

/* ---- items of their own ---- */

static json_t *part(const char *type, const json_t *text) {
    return json_pack("{s:s, s:O}", "type", type, "text", (json_t *)(uintptr_t)text);
}

/* As a client sees them when it asks for the input of an answer: messages have parts, everything
 * an id. */
static td_status make_item(const json_t *v, size_t i, const char *id, json_t *out,
                           struct td_api_error *e) {
    char path[PATH_BYTES], found[40], own[96];
    snprintf(path, sizeof path, "input[%zu]", i);
    if (!json_is_object(v))
        return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                             td_request_found(v, found));
    json_t *item = json_copy((json_t *)(uintptr_t)v);
    TD_TRY(td_build_append(out, item, e));
    if (!json_is_string(json_object_get(item, "type"))) {
        if (json_object_get(item, "type") && !json_is_null(json_object_get(item, "type")))
            return TD_OK; /* refused where it is read */
        TD_TRY(td_build_put(item, "type", json_string("message"), e));
    }
    if (!json_is_string(json_object_get(item, "id"))) {
        snprintf(own, sizeof own, "item_%s_%zu", id, i);
        TD_TRY(td_build_put(item, "id", json_string(own), e));
    }
    const json_t *content = json_object_get(item, "content");
    if (!json_is_string(content)) return TD_OK;
    const char *role = json_string_value(json_object_get(item, "role"));
    bool assistant = role && strcmp(role, "assistant") == 0;
    json_t *parts = json_array();
    TD_TRY(td_build_append(parts, part(assistant ? "output_text" : "input_text", content), e));
    return td_build_put(item, "content", parts, e);
}

td_status td_response_items_make(const struct td_fields *f, const char *name, const char *id,
                                 json_t **ret) {
    const json_t *input = td_field(f, name);
    if (!json_is_string(input) && !json_is_array(input))
        return td_field_wrong(f, name, "a string or an array of items");
    json_t *out = json_array(), *message = NULL;
    td_status st = out ? TD_OK : td_api_no_memory(f->e);
    if (st == TD_OK && json_is_string(input)) {
        message = json_pack("{s:s, s:s, s:O}", "type", "message", "role", "user", "content",
                            (json_t *)(uintptr_t)input);
        st = message ? make_item(message, 0, id, out, f->e) : td_api_no_memory(f->e);
    }
    for (size_t i = 0; st == TD_OK && i < json_array_size(input); i++)
        st = make_item(json_array_get(input, i), i, id, out, f->e);
    json_decref(message);
    if (st == TD_OK)
        *ret = out;
    else
        json_decref(out);
    return st;
}

/* ---- what items mean ---- */

/* The conversation being put together; `open` is the assistant's message that more may join. */
struct turns {
    json_t *out;
    json_t *open; /* borrowed from `out`; NULL: none */
};

static td_status open_turn(struct turns *t, bool fresh, struct td_api_error *e) {
    if (t->open && !fresh) return TD_OK;
    t->open = json_pack("{s:s, s:s}", "role", "assistant", "content", "");
    return td_build_append(t->out, t->open, e);
}

static bool has_text(const struct turns *t, const char *key) {
    return t->open && json_string_length(json_object_get(t->open, key)) > 0;
}

static bool has_calls(const struct turns *t) {
    return t->open && json_object_get(t->open, "tool_calls");
}

static td_status need_text(const struct td_fields *f, const char *name, const char **ret,
                           size_t *ret_n) {
    *ret = NULL;
    TD_TRY(td_field_str(f, name, ret, ret_n));
    return *ret ? TD_OK : td_field_wrong(f, name, "a string");
}

static td_status refuse_type(const struct td_fields *f, const char *type) {
    char name[96];
    td_field_name(f, "type", name);
    return td_api_refuse(f->e, 400, "unsupported_value", name, "%s: '%.40s' is not supported here",
                         name, type);
}

static const struct td_param part_params[] = {{"type", TD_PARAM_READ, NULL},
                                              {"text", TD_PARAM_READ, NULL},
                                              {"annotations", TD_PARAM_HARMLESS, NULL},
                                              {"logprobs", TD_PARAM_HARMLESS, NULL},
                                              {"prompt_cache_breakpoint", TD_PARAM_HARMLESS, NULL},
                                              {0}};

/* `types`: 'a|b' of the parts that are text here. `other`: parts of another kind are named in a
 * result, as the chat's reading does; NULL: refused. */
static td_status read_parts(const struct td_fields *f, const char *name, const char *types,
                            json_t *other, struct td_bytes *out) {
    const json_t *list = NULL;
    TD_TRY(td_field_array(f, name, &list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        char path[PATH_BYTES], found[40];
        const char *type, *text;
        size_t n = 0;
        snprintf(path, sizeof path, "%.40s%s[%zu]", f->path, name, i);
        if (!json_is_object(v))
            return td_api_refuse(f->e, 400, NULL, path, "%s: expected an object, found %s", path,
                                 td_request_found(v, found));
        snprintf(path, sizeof path, "%.40s%s[%zu].", f->path, name, i);
        struct td_fields p = {v, path, f->e};
        TD_TRY(need_text(&p, "type", &type, &n));
        const char *at = strstr(types, type);
        bool known = n && at && (at == types || at[-1] == '|') && (at[n] == 0 || at[n] == '|');
        if (!known && !other) return refuse_type(&p, type);
        if (known) {
            TD_TRY(td_fields_known(&p, part_params, NULL));
            TD_TRY(need_text(&p, "text", &text, &n));
        }
        if (other) {
            TD_TRY(td_build_append(
                other,
                known ? json_pack("{s:s, s:o}", "type", "text", "text", json_stringn(text, n))
                      : json_pack("{s:s}", "type", type),
                f->e));
            continue;
        }
        if (out->n > 0) td_bytes_add(out, "\n\n", 2);
        td_bytes_add(out, text, n);
    }
    return out && out->failed ? td_api_no_memory(f->e) : TD_OK;
}

static json_t *string_of(const struct td_bytes *b) {
    return json_stringn(b->n ? b->p : "", b->n);
}

static td_status add_message(struct turns *t, const struct td_fields *f) {
    static const struct td_param known[] = {{"type", TD_PARAM_READ, NULL},
                                            {"role", TD_PARAM_READ, NULL},
                                            {"content", TD_PARAM_READ, NULL},
                                            {"id", TD_PARAM_HARMLESS, NULL},
                                            {"status", TD_PARAM_HARMLESS, NULL},
                                            {"phase", TD_PARAM_HARMLESS, NULL},
                                            {0}};
    const char *role;
    size_t n = 0;
    struct td_bytes text = {0};
    TD_TRY(td_fields_known(f, known, NULL));
    TD_TRY(need_text(f, "role", &role, &n));
    bool assistant = strcmp(role, "assistant") == 0;
    if (!assistant && strcmp(role, "user") != 0 && strcmp(role, "system") != 0 &&
        strcmp(role, "developer") != 0)
        return td_field_wrong(f, "role", "user, assistant, system or developer");
    if (!json_is_array(td_field(f, "content")))
        return td_field_wrong(f, "content", "a string or an array of parts");
    td_status st = read_parts(f, "content", "input_text|output_text|text", NULL, &text);
    if (st == TD_OK && assistant) {
        st = open_turn(t, has_text(t, "content") || has_calls(t), f->e);
        if (st == TD_OK) st = td_build_put(t->open, "content", string_of(&text), f->e);
    } else if (st == TD_OK) {
        t->open = NULL;
        st = td_build_append(
            t->out, json_pack("{s:s, s:o}", "role", role, "content", string_of(&text)), f->e);
    }
    td_bytes_free(&text);
    return st;
}

/* The text itself, or what stands in its summary when this server wrote it there. */
static td_status add_reasoning(struct turns *t, const struct td_fields *f) {
    static const struct td_param known[] = {{"type", TD_PARAM_READ, NULL},
                                            {"content", TD_PARAM_READ, NULL},
                                            {"summary", TD_PARAM_READ, NULL},
                                            {"encrypted_content", TD_PARAM_READ, NULL},
                                            {"id", TD_PARAM_HARMLESS, NULL},
                                            {"status", TD_PARAM_HARMLESS, NULL},
                                            {0}};
    struct td_bytes text = {0};
    TD_TRY(td_fields_known(f, known, NULL));
    td_status st = read_parts(f, "content", "reasoning_text", NULL, &text);
    if (st == TD_OK && text.n == 0) st = read_parts(f, "summary", "summary_text", NULL, &text);
    if (st == TD_OK && text.n == 0 && td_field(f, "encrypted_content")) {
        char name[96];
        st = td_api_refuse(f->e, 400, "unsupported_parameter",
                           td_field_name(f, "encrypted_content", name),
                           "%s: reasoning of another service cannot be read here", name);
    }
    if (st == TD_OK && text.n > 0) {
        st = open_turn(
            t, has_text(t, "reasoning_content") || has_text(t, "content") || has_calls(t), f->e);
        if (st == TD_OK) st = td_build_put(t->open, "reasoning_content", string_of(&text), f->e);
    }
    td_bytes_free(&text);
    return st;
}

static td_status add_call(struct turns *t, const struct td_fields *f) {
    static const struct td_param known[] = {
        {"type", TD_PARAM_READ, NULL},       {"call_id", TD_PARAM_READ, NULL},
        {"name", TD_PARAM_READ, NULL},       {"arguments", TD_PARAM_READ, NULL},
        {"id", TD_PARAM_HARMLESS, NULL},     {"status", TD_PARAM_HARMLESS, NULL},
        {"caller", TD_PARAM_HARMLESS, NULL}, {"namespace", TD_PARAM_EMPTY, NULL},
        {"async", TD_PARAM_FALSE, NULL},     {0}};
    const char *id, *name, *arguments;
    size_t id_n = 0, name_n = 0, arguments_n = 0;
    TD_TRY(td_fields_known(f, known, NULL));
    TD_TRY(need_text(f, "call_id", &id, &id_n));
    TD_TRY(need_text(f, "name", &name, &name_n));
    TD_TRY(need_text(f, "arguments", &arguments, &arguments_n));
    TD_TRY(open_turn(t, false, f->e));
    if (!has_calls(t)) TD_TRY(td_build_put(t->open, "tool_calls", json_array(), f->e));
    return td_build_append(json_object_get(t->open, "tool_calls"),
                           json_pack("{s:o, s:s, s:{s:o, s:o}}", "id", json_stringn(id, id_n),
                                     "type", "function", "function", "name",
                                     json_stringn(name, name_n), "arguments",
                                     json_stringn(arguments, arguments_n)),
                           f->e);
}

static td_status add_result(struct turns *t, const struct td_fields *f) {
    static const struct td_param known[] = {{"type", TD_PARAM_READ, NULL},
                                            {"call_id", TD_PARAM_READ, NULL},
                                            {"output", TD_PARAM_READ, NULL},
                                            {"name", TD_PARAM_HARMLESS, NULL},
                                            {"id", TD_PARAM_HARMLESS, NULL},
                                            {"status", TD_PARAM_HARMLESS, NULL},
                                            {"caller", TD_PARAM_HARMLESS, NULL},
                                            {"namespace", TD_PARAM_EMPTY, NULL},
                                            {0}};
    const char *id;
    size_t n = 0;
    TD_TRY(td_fields_known(f, known, NULL));
    TD_TRY(need_text(f, "call_id", &id, &n));
    const json_t *output = td_field(f, "output");
    if (!json_is_string(output) && !json_is_array(output))
        return td_field_wrong(f, "output", "a string or an array of parts");
    json_t *parts = json_is_array(output) ? json_array() : json_deep_copy(output);
    td_status st = parts ? TD_OK : td_api_no_memory(f->e);
    if (st == TD_OK && json_is_array(output))
        st = read_parts(f, "output", "input_text", parts, NULL);
    t->open = NULL;
    if (st == TD_OK)
        return td_build_append(t->out,
                               json_pack("{s:s, s:o, s:o}", "role", "tool", "tool_call_id",
                                         json_stringn(id, n), "content", parts),
                               f->e);
    json_decref(parts);
    return st;
}

td_status td_response_items_read(const json_t *items, json_t *messages, struct td_api_error *e) {
    static const struct {
        const char *type;
        td_status (*add)(struct turns *t, const struct td_fields *f);
    } kinds[] = {{"message", add_message},
                 {"reasoning", add_reasoning},
                 {"function_call", add_call},
                 {"function_call_output", add_result}};
    struct turns t = {.out = messages};
    size_t n_before = json_array_size(messages);
    /* What the model says next belongs to what it said last, also across answers. */
    json_t *last = n_before ? json_array_get(messages, n_before - 1) : NULL;
    const char *role = json_string_value(json_object_get(last, "role"));
    if (role && strcmp(role, "assistant") == 0) t.open = last;
    for (size_t i = 0; i < json_array_size(items); i++) {
        char path[PATH_BYTES];
        const char *type;
        size_t n = 0;
        snprintf(path, sizeof path, "input[%zu].", i);
        struct td_fields f = {json_array_get(items, i), path, e};
        TD_TRY(need_text(&f, "type", &type, &n));
        size_t k = 0;
        while (k < sizeof kinds / sizeof kinds[0] && strcmp(type, kinds[k].type) != 0)
            k++;
        if (k == sizeof kinds / sizeof kinds[0]) return refuse_type(&f, type);
        TD_TRY(kinds[k].add(&t, &f));
    }
    return TD_OK;
}

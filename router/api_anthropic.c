/* See api_anthropic.h. */
#include "router/api_anthropic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/bytes.h"
#include "router/api_params.h"
#include "router/json_build.h"

enum { PATH_BYTES = 64 };

static const struct td_param request_params[] = {
    {"model", TD_PARAM_READ, NULL},
    {"messages", TD_PARAM_READ, NULL},
    {"system", TD_PARAM_READ, NULL},
    {"max_tokens", TD_PARAM_READ, NULL},
    {"stop_sequences", TD_PARAM_READ, NULL},
    {"stream", TD_PARAM_READ, NULL},
    {"temperature", TD_PARAM_READ, NULL},
    {"top_k", TD_PARAM_READ, NULL},
    {"top_p", TD_PARAM_READ, NULL},
    {"tools", TD_PARAM_READ, NULL},
    {"tool_choice", TD_PARAM_READ, NULL},
    {"thinking", TD_PARAM_READ, NULL},
    {"output_config", TD_PARAM_READ, NULL},
    {"return_timings", TD_PARAM_READ, NULL},
    {"metadata", TD_PARAM_HARMLESS, NULL},
    {"cache_control", TD_PARAM_HARMLESS, NULL},
    {"service_tier", TD_PARAM_WORD, "auto|standard_only"},
    {"speed", TD_PARAM_WORD, "standard"},
    {"user_profile_id", TD_PARAM_HARMLESS, NULL},
    {"workspace_id", TD_PARAM_HARMLESS, NULL},
    {"diagnostics", TD_PARAM_EMPTY, NULL},
    {"inference_geo", TD_PARAM_REFUSED, NULL},
    {"container", TD_PARAM_REFUSED, NULL},
    {"context_management", TD_PARAM_EMPTY, NULL},
    {"mcp_servers", TD_PARAM_EMPTY, NULL},
    {0},
};

static td_status need_object(const json_t *v, const char *path, struct td_api_error *e) {
    char found[40];
    if (json_is_object(v)) return TD_OK;
    return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                         td_request_found(v, found));
}

/* ---- blocks ---- */

static const struct td_param text_params[] = {{"type", TD_PARAM_READ, NULL},
                                              {"text", TD_PARAM_READ, NULL},
                                              {"cache_control", TD_PARAM_HARMLESS, NULL},
                                              {"citations", TD_PARAM_EMPTY, NULL},
                                              {0}};
static const struct td_param thinking_params[] = {{"type", TD_PARAM_READ, NULL},
                                                  {"thinking", TD_PARAM_READ, NULL},
                                                  {"signature", TD_PARAM_HARMLESS, NULL},
                                                  {0}};
static const struct td_param use_params[] = {{"type", TD_PARAM_READ, NULL},
                                             {"id", TD_PARAM_READ, NULL},
                                             {"name", TD_PARAM_READ, NULL},
                                             {"input", TD_PARAM_READ, NULL},
                                             {"caller", TD_PARAM_HARMLESS, NULL},
                                             {"cache_control", TD_PARAM_HARMLESS, NULL},
                                             {0}};
/* A failed call says so in its text; the model's format has no other place for it. */
static const struct td_param result_params[] = {{"type", TD_PARAM_READ, NULL},
                                                {"tool_use_id", TD_PARAM_READ, NULL},
                                                {"content", TD_PARAM_READ, NULL},
                                                {"is_error", TD_PARAM_HARMLESS, NULL},
                                                {"cache_control", TD_PARAM_HARMLESS, NULL},
                                                {0}};

static td_status need_text(const struct td_fields *f, const char *name, const char **ret,
                           size_t *ret_n) {
    *ret = NULL;
    TD_TRY(td_field_str(f, name, ret, ret_n));
    return *ret ? TD_OK : td_field_wrong(f, name, "a string");
}

static td_status add_text(struct td_bytes *out, const struct td_fields *f,
                          const struct td_param *known, const char *name) {
    const char *text;
    size_t n = 0;
    TD_TRY(td_fields_known(f, known, NULL));
    TD_TRY(need_text(f, name, &text, &n));
    if (out->n > 0) td_bytes_add(out, "\n\n", 2);
    td_bytes_add(out, text, n);
    return out->failed ? td_api_no_memory(f->e) : TD_OK;
}

static td_status refuse_block(const struct td_fields *f, const char *type) {
    char name[96];
    td_field_name(f, "type", name);
    return td_api_refuse(f->e, 400, "unsupported_value", name, "%s: '%.40s' is not supported here",
                         name, type);
}

/* Blocks of text alone, or a string: of the system prompt and of results. */
static td_status plain_text(const struct td_fields *f, const char *name, struct td_bytes *out) {
    const json_t *v = td_field(f, name);
    char path[96];
    if (json_is_string(v)) {
        td_bytes_add(out, json_string_value(v), json_string_length(v));
        return out->failed ? td_api_no_memory(f->e) : TD_OK;
    }
    if (v && !json_is_array(v)) return td_field_wrong(f, name, "a string or an array of blocks");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *block = json_array_get(v, i);
        const char *type;
        size_t n = 0;
        snprintf(path, sizeof path, "%.64s%s[%zu]", f->path, name, i);
        TD_TRY(need_object(block, path, f->e));
        snprintf(path, sizeof path, "%.64s%s[%zu].", f->path, name, i);
        struct td_fields b = {block, path, f->e};
        TD_TRY(need_text(&b, "type", &type, &n));
        if (strcmp(type, "text") != 0) return refuse_block(&b, type);
        TD_TRY(add_text(out, &b, text_params, "text"));
    }
    return TD_OK;
}

static json_t *string_of(const struct td_bytes *b) {
    return json_stringn(b->n ? b->p : "", b->n);
}

/* ---- messages ---- */

/* The message being put together; `text` waits until another kind of block comes. */
struct turn {
    bool user;
    struct td_bytes text, thinking;
    json_t *calls; /* owned */
    json_t *out;   /* the chat's messages, borrowed */
};

static td_status add_result(struct turn *t, const struct td_fields *b) {
    struct td_bytes text = {0};
    const char *id;
    size_t n = 0;
    TD_TRY(td_fields_known(b, result_params, NULL));
    TD_TRY(need_text(b, "tool_use_id", &id, &n));
    td_status st = plain_text(b, "content", &text);
    if (st == TD_OK)
        st = td_build_append(t->out,
                             json_pack("{s:s, s:o, s:o}", "role", "tool", "tool_call_id",
                                       json_stringn(id, n), "content", string_of(&text)),
                             b->e);
    td_bytes_free(&text);
    return st;
}

static td_status add_use(struct turn *t, const struct td_fields *b) {
    const char *id, *name;
    const json_t *input = NULL;
    size_t id_n = 0, name_n = 0;
    TD_TRY(td_fields_known(b, use_params, NULL));
    TD_TRY(need_text(b, "id", &id, &id_n));
    TD_TRY(need_text(b, "name", &name, &name_n));
    TD_TRY(td_field_object(b, "input", &input));
    if (!input) return td_field_wrong(b, "input", "an object");
    char *arguments = json_dumps(input, JSON_COMPACT);
    if (!arguments) return td_api_no_memory(b->e);
    json_t *call =
        json_pack("{s:o, s:s, s:{s:o, s:s}}", "id", json_stringn(id, id_n), "type", "function",
                  "function", "name", json_stringn(name, name_n), "arguments", arguments);
    free(arguments);
    if (!t->calls) t->calls = json_array();
    return td_build_append(t->calls, call, b->e);
}

/* The user's text so far is a message; results stand beside it. */
static td_status flush_user(struct turn *t, struct td_api_error *e) {
    if (t->text.n == 0) return TD_OK;
    TD_TRY(td_build_append(
        t->out, json_pack("{s:s, s:o}", "role", "user", "content", string_of(&t->text)), e));
    t->text.n = 0;
    return TD_OK;
}

static td_status add_block(struct turn *t, const struct td_fields *b) {
    const char *type;
    size_t n = 0;
    TD_TRY(need_text(b, "type", &type, &n));
    if (strcmp(type, "text") == 0) return add_text(&t->text, b, text_params, "text");
    if (t->user && strcmp(type, "tool_result") == 0) {
        TD_TRY(flush_user(t, b->e));
        return add_result(t, b);
    }
    if (!t->user && strcmp(type, "thinking") == 0)
        return add_text(&t->thinking, b, thinking_params, "thinking");
    if (!t->user && strcmp(type, "tool_use") == 0) return add_use(t, b);
    return refuse_block(b, type);
}

static td_status finish_turn(struct turn *t, size_t blocks, struct td_api_error *e) {
    if (t->user) {
        if (blocks == 0 || t->text.n > 0)
            return td_build_append(
                t->out, json_pack("{s:s, s:o}", "role", "user", "content", string_of(&t->text)), e);
        return TD_OK;
    }
    json_t *m = json_pack("{s:s, s:o, s:o}", "role", "assistant", "content", string_of(&t->text),
                          "reasoning_content", string_of(&t->thinking));
    if (m && t->calls && json_object_set(m, "tool_calls", t->calls) != 0) {
        json_decref(m);
        m = NULL;
    }
    return td_build_append(t->out, m, e);
}

static td_status read_blocks(struct turn *t, const struct td_fields *f) {
    const json_t *v = td_field(f, "content");
    char path[96];
    if (json_is_string(v)) {
        td_bytes_add(&t->text, json_string_value(v), json_string_length(v));
        return t->text.failed ? td_api_no_memory(f->e) : finish_turn(t, 0, f->e);
    }
    if (!json_is_array(v)) return td_field_wrong(f, "content", "a string or an array of blocks");
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *block = json_array_get(v, i);
        snprintf(path, sizeof path, "%scontent[%zu]", f->path, i);
        TD_TRY(need_object(block, path, f->e));
        snprintf(path, sizeof path, "%scontent[%zu].", f->path, i);
        struct td_fields b = {block, path, f->e};
        TD_TRY(add_block(t, &b));
    }
    return finish_turn(t, json_array_size(v), f->e);
}

static td_status read_message(const json_t *v, size_t i, json_t *out, struct td_api_error *e) {
    static const struct td_param known[] = {
        {"role", TD_PARAM_READ, NULL}, {"content", TD_PARAM_READ, NULL}, {0}};
    char path[PATH_BYTES];
    const char *role;
    size_t n = 0;
    snprintf(path, sizeof path, "messages[%zu]", i);
    TD_TRY(need_object(v, path, e));
    snprintf(path, sizeof path, "messages[%zu].", i);
    struct td_fields f = {v, path, e};
    TD_TRY(td_fields_known(&f, known, NULL));
    TD_TRY(need_text(&f, "role", &role, &n));
    bool user = strcmp(role, "user") == 0;
    if (!user && strcmp(role, "assistant") != 0)
        return td_field_wrong(&f, "role", "user or assistant");
    struct turn t = {.user = user, .out = out};
    td_status st = read_blocks(&t, &f);
    td_bytes_free(&t.text);
    td_bytes_free(&t.thinking);
    json_decref(t.calls);
    return st;
}

static td_status read_messages(const struct td_fields *f, json_t *chat) {
    const json_t *list = NULL;
    struct td_bytes system = {0};
    json_t *out = json_array();
    TD_TRY(td_build_put(chat, "messages", out, f->e));
    TD_TRY(td_field_array(f, "messages", &list));
    td_status st = plain_text(f, "system", &system);
    if (st == TD_OK && system.n > 0)
        st = td_build_append(
            out, json_pack("{s:s, s:o}", "role", "system", "content", string_of(&system)), f->e);
    td_bytes_free(&system);
    for (size_t i = 0; st == TD_OK && i < json_array_size(list); i++)
        st = read_message(json_array_get(list, i), i, out, f->e);
    return st;
}

/* ---- tools ---- */

static td_status read_tool(const json_t *v, size_t i, json_t *out, struct td_api_error *e) {
    static const struct td_param known[] = {{"type", TD_PARAM_WORD, "custom"},
                                            {"name", TD_PARAM_READ, NULL},
                                            {"description", TD_PARAM_READ, NULL},
                                            {"input_schema", TD_PARAM_READ, NULL},
                                            {"cache_control", TD_PARAM_HARMLESS, NULL},
                                            {"strict", TD_PARAM_READ, NULL},
                                            {0}};
    char path[PATH_BYTES];
    const json_t *schema = NULL;
    snprintf(path, sizeof path, "tools[%zu]", i);
    TD_TRY(need_object(v, path, e));
    snprintf(path, sizeof path, "tools[%zu].", i);
    struct td_fields f = {v, path, e};
    TD_TRY(td_fields_known(&f, known, NULL));
    TD_TRY(td_field_object(&f, "input_schema", &schema));
    if (!schema) return td_field_wrong(&f, "input_schema", "an object");
    json_t *function = json_object();
    json_t *tool = json_pack("{s:s, s:o}", "type", "function", "function", function);
    TD_TRY(td_build_append(out, tool, e));
    TD_TRY(td_build_copy(&f, "name", function, "name"));
    TD_TRY(td_build_copy(&f, "description", function, "description"));
    TD_TRY(td_build_copy(&f, "strict", function, "strict"));
    return td_build_copy(&f, "input_schema", function, "parameters");
}

static td_status read_choice(const struct td_fields *f, json_t *chat) {
    static const struct td_param known[] = {{"type", TD_PARAM_READ, NULL},
                                            {"disable_parallel_tool_use", TD_PARAM_READ, NULL},
                                            {"name", TD_PARAM_READ, NULL},
                                            {0}};
    const json_t *v = NULL;
    const char *type;
    size_t n = 0;
    bool single = false;
    TD_TRY(td_field_object(f, "tool_choice", &v));
    if (!v) return TD_OK;
    struct td_fields c = {v, "tool_choice.", f->e};
    TD_TRY(td_fields_known(&c, known, NULL));
    TD_TRY(need_text(&c, "type", &type, &n));
    bool any = strcmp(type, "any") == 0, tool = strcmp(type, "tool") == 0;
    if (!any && !tool && strcmp(type, "auto") != 0 && strcmp(type, "none") != 0)
        return td_field_wrong(&c, "type", "auto, none, any or tool");
    TD_TRY(td_field_bool(&c, "disable_parallel_tool_use", &single));
    TD_TRY(td_build_put(chat, "parallel_tool_calls", json_boolean(!single), f->e));
    if (!tool) return td_build_put(chat, "tool_choice", json_string(any ? "required" : type), f->e);
    const char *name;
    TD_TRY(need_text(&c, "name", &name, &n));
    return td_build_put(
        chat, "tool_choice",
        json_pack("{s:s, s:{s:o}}", "type", "function", "function", "name", json_stringn(name, n)),
        f->e);
}

/* ---- format ---- */

static td_status read_format(const struct td_fields *output, json_t *chat) {
    static const struct td_param known[] = {
        {"type", TD_PARAM_WORD, "json_schema"}, {"schema", TD_PARAM_READ, NULL}, {0}};
    const json_t *v = NULL, *schema = NULL;
    TD_TRY(td_field_object(output, "format", &v));
    if (!v) return TD_OK;
    struct td_fields f = {v, "output_config.format.", output->e};
    TD_TRY(td_fields_known(&f, known, NULL));
    TD_TRY(td_field_object(&f, "schema", &schema));
    if (!schema || !td_field(&f, "type"))
        return td_field_wrong(output, "format", "a type json_schema with its schema");
    return td_build_put(chat, "response_format",
                        json_pack("{s:s, s:{s:s, s:o}}", "type", "json_schema", "json_schema",
                                  "name", "output", "schema", json_deep_copy(schema)),
                        f.e);
}

/* ---- thinking ---- */

/* The budget is a wish that this model cannot be told; max_tokens bounds reasoning and answer. */
static td_status read_thinking(const struct td_fields *f, json_t *chat) {
    static const struct td_param known[] = {{"type", TD_PARAM_READ, NULL},
                                            {"budget_tokens", TD_PARAM_HARMLESS, NULL},
                                            {"display", TD_PARAM_WORD, "summarized"},
                                            {0}};
    static const struct td_param config[] = {
        {"effort", TD_PARAM_READ, NULL}, {"format", TD_PARAM_READ, NULL}, {0}};
    const json_t *v = NULL, *output = NULL;
    const char *type = "disabled";
    size_t n = 0;
    TD_TRY(td_field_object(f, "thinking", &v));
    struct td_fields t = {v, "thinking.", f->e};
    if (v) {
        TD_TRY(td_fields_known(&t, known, NULL));
        TD_TRY(need_text(&t, "type", &type, &n));
    }
    bool on = strcmp(type, "enabled") == 0 || strcmp(type, "adaptive") == 0;
    if (!on && strcmp(type, "disabled") != 0)
        return td_field_wrong(&t, "type", "enabled, adaptive or disabled");
    TD_TRY(td_build_put(chat, "chat_template_kwargs", json_pack("{s:b}", "thinking", on), f->e));
    TD_TRY(td_field_object(f, "output_config", &output));
    if (!output) return TD_OK;
    struct td_fields o = {output, "output_config.", f->e};
    TD_TRY(td_fields_known(&o, config, NULL));
    TD_TRY(read_format(&o, chat));
    return on ? td_build_copy(&o, "effort", chat, "reasoning_effort") : TD_OK;
}

/* ---- the rest ---- */

static td_status read_rest(const struct td_fields *f, bool counting, json_t *chat) {
    static const char *const same[] = {"model", "max_tokens", "stream",        "temperature",
                                       "top_k", "top_p",      "return_timings"};
    double temperature = 0;
    TD_TRY(td_field_num(f, "temperature", 0, 1, &temperature));
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        TD_TRY(td_build_copy(f, same[i], chat, same[i]));
    if (!counting && !td_field(f, "max_tokens"))
        return td_field_wrong(f, "max_tokens", "an integer of at least 1");
    const json_t *stops = NULL;
    TD_TRY(td_field_array(f, "stop_sequences", &stops));
    TD_TRY(td_api_stops_check(f, "stop_sequences")); /* by the name that the client gave */
    return json_array_size(stops) ? td_build_copy(f, "stop_sequences", chat, "stop") : TD_OK;
}

td_status td_api_anthropic_read(const json_t *root, bool counting, json_t **ret,
                                struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    TD_TRY(td_fields_known(&f, request_params, NULL));
    json_t *chat = json_object();
    if (!chat) return td_api_no_memory(e);
    td_status st;
    TD_TRY_GOTO(read_rest(&f, counting, chat), drop_chat);
    TD_TRY_GOTO(read_messages(&f, chat), drop_chat);
    TD_TRY_GOTO(td_build_list(&f, "tools", chat, "tools", read_tool), drop_chat);
    TD_TRY_GOTO(read_choice(&f, chat), drop_chat);
    TD_TRY_GOTO(read_thinking(&f, chat), drop_chat);
    *ret = chat;
    return TD_OK;
drop_chat:
    json_decref(chat);
    return st;
}

static const char *error_type(int status) {
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
        return "overloaded_error";
    default:
        return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

void td_api_anthropic_error(struct td_json_out *w, const struct td_api_error *e) {
    td_json_open(w, '{');
    td_json_key(w, "type");
    td_json_text(w, "error");
    td_json_key(w, "error");
    td_json_open(w, '{');
    td_json_key(w, "type");
    td_json_text(w, error_type(e->status));
    td_json_key(w, "message");
    td_json_text(w, e->message);
    td_json_close(w, '}');
    td_json_close(w, '}');
}

void td_api_anthropic_error_reply(struct td_http_conn *c, const struct td_api_error *e,
                                  struct td_json_out *scratch) {
    td_json_out_reset(scratch);
    td_api_anthropic_error(scratch, e);
    td_api_error_send(c, e, scratch);
}

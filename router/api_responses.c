/* See api_responses.h. */
#include "router/api_responses.h"
#include "router/json_build.h"
#include "router/json_read.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct td_param request_params[] = {
    {"model", TD_PARAM_READ, NULL},
    {"input", TD_PARAM_READ, NULL},
    {"instructions", TD_PARAM_READ, NULL},
    {"previous_response_id", TD_PARAM_READ, NULL},
    {"store", TD_PARAM_READ, NULL},
    {"stream", TD_PARAM_READ, NULL},
    {"stream_options", TD_PARAM_READ, NULL},
    {"tools", TD_PARAM_READ, NULL},
    {"tool_choice", TD_PARAM_READ, NULL},
    {"parallel_tool_calls", TD_PARAM_READ, NULL},
    {"text", TD_PARAM_READ, NULL},
    {"reasoning", TD_PARAM_READ, NULL},
    {"max_output_tokens", TD_PARAM_READ, NULL},
    {"temperature", TD_PARAM_READ, NULL},
    {"top_p", TD_PARAM_READ, NULL},
    {"include", TD_PARAM_READ, NULL},
    {"top_logprobs", TD_PARAM_READ, NULL},
    {"metadata", TD_PARAM_READ, NULL},
    {"user", TD_PARAM_HARMLESS, NULL},
    {"safety_identifier", TD_PARAM_HARMLESS, NULL},
    {"prompt_cache_key", TD_PARAM_HARMLESS, NULL},
    {"prompt_cache_options", TD_PARAM_HARMLESS, NULL},
    {"prompt_cache_retention", TD_PARAM_HARMLESS, NULL},
    {"max_tool_calls", TD_PARAM_HARMLESS, NULL}, /* of tools that run here: there are none */
    {"service_tier", TD_PARAM_WORD, "auto|default"},
    {"truncation", TD_PARAM_WORD, "disabled"},
    {"background", TD_PARAM_FALSE, NULL},
    {"context_management", TD_PARAM_EMPTY, NULL},
    {"background_options", TD_PARAM_REFUSED, NULL},
    {"conversation", TD_PARAM_REFUSED, NULL},
    {"prompt", TD_PARAM_REFUSED, NULL},
    {"moderation", TD_PARAM_REFUSED, NULL},
    {"image", TD_PARAM_REFUSED, NULL},
    {"access_programs", TD_PARAM_REFUSED, NULL},
    /* of this server */
    {"seed", TD_PARAM_READ, NULL},
    {"stop", TD_PARAM_READ, NULL},
    {"top_k", TD_PARAM_READ, NULL},
    {"min_p", TD_PARAM_READ, NULL},
    {"ignore_eos", TD_PARAM_READ, NULL},
    {"logit_bias", TD_PARAM_READ, NULL},
    {"repetition_penalty", TD_PARAM_READ, NULL},
    {"presence_penalty", TD_PARAM_READ, NULL},
    {"frequency_penalty", TD_PARAM_READ, NULL},
    {"min_tokens", TD_PARAM_READ, NULL},
    {"chat_template_kwargs", TD_PARAM_READ, NULL},
    {"return_timings", TD_PARAM_READ, NULL},
    {0},
};

void td_responses_free(struct td_responses *r) {
    if (!r) return;
    if (r->held) td_response_store_drop(r->held, r->previous);
    free(r->input);
    td_json_out_free(&r->echo);
    free(r);
}

/* ---- the conversation ---- */

static td_status add_stored(const char *text, size_t n, const char *key, json_t *messages,
                            struct td_api_error *e) {
    json_t *v = NULL;
    if (td_json_read(text, n, TD_JSON_STRICT, &v, NULL) != TD_OK) return td_api_no_memory(e);
    td_status st = td_response_items_read(key ? json_object_get(v, key) : v, messages, e);
    json_decref(v);
    return st;
}

/* The conversation before, oldest answer first. */
static td_status add_history(const struct td_responses *r, json_t *messages,
                             struct td_api_error *e) {
    size_t n = 0;
    for (const struct td_stored *s = r->previous; s; s = s->previous)
        n++;
    const struct td_stored **all = malloc((n + 1) * sizeof *all);
    if (!all) return td_api_no_memory(e);
    size_t at = n;
    for (const struct td_stored *s = r->previous; s; s = s->previous)
        all[--at] = s;
    td_status st = TD_OK;
    for (; st == TD_OK && at < n; at++) {
        st = add_stored(all[at]->input, all[at]->input_n, NULL, messages, e);
        if (st == TD_OK)
            st = add_stored(all[at]->document, all[at]->document_n, "output", messages, e);
    }
    free(all);
    return st;
}

static td_status find_previous(const struct td_fields *f, const struct td_kept *kept,
                               struct td_responses *r) {
    struct td_response_store *store = kept->store;
    const char *id = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "previous_response_id", &id, &n));
    if (!id) return TD_OK;
    if (store && n == strlen(id)) r->previous = td_response_store_hold(store, kept->owner, id);
    r->held = store;
    if (r->previous && r->previous->conversation_n > kept->most)
        return td_api_refuse(f->e, 400, "context_length_exceeded", "previous_response_id",
                             "previous_response_id: the conversation is %llu bytes long; the limit is "
                             "%llu bytes, as for a request",
                             (unsigned long long)r->previous->conversation_n,
                             (unsigned long long)kept->most);
    if (r->previous) return TD_OK;
    return td_api_refuse(f->e, 404, "previous_response_not_found", "previous_response_id",
                         "previous_response_id: '%.60s' is not kept here: it never was, was "
                         "deleted, or made room for newer ones",
                         id);
}

static td_status read_store(const struct td_fields *f, struct td_response_store *store,
                            struct td_responses *r) {
    bool wanted = store != NULL;
    TD_TRY(td_field_bool(f, "store", &wanted));
    if (wanted && !store)
        return td_api_refuse(f->e, 400, "unsupported_value", "store",
                             "store: answers are not kept here (router.store_bytes is 0); "
                             "expected false, found true");
    r->store = wanted ? store : NULL;
    return TD_OK;
}

static td_status read_input(const struct td_fields *f, const char *id, struct td_responses *r,
                            json_t *chat) {
    const char *instructions = NULL;
    size_t n = 0;
    json_t *messages = json_array(), *items = NULL;
    TD_TRY(td_build_put(chat, "messages", messages, f->e));
    TD_TRY(td_field_str(f, "instructions", &instructions, &n));
    if (instructions &&
        json_array_append_new(messages, json_pack("{s:s, s:o}", "role", "system", "content",
                                                  json_stringn(instructions, n))) != 0)
        return td_api_no_memory(f->e);
    TD_TRY(add_history(r, messages, f->e));
    TD_TRY(td_response_items_make(f, "input", id, &items));
    td_status st = td_response_items_read(items, messages, f->e);
    if (st == TD_OK && r->store) {
        r->input = json_dumps(items, JSON_COMPACT);
        r->input_n = r->input ? strlen(r->input) : 0;
        if (!r->input) st = td_api_no_memory(f->e);
    }
    json_decref(items);
    return st;
}

/* ---- tools ---- */

static td_status read_tool(const json_t *v, size_t i, json_t *out, struct td_api_error *e) {
    static const struct td_param known[] = {{"type", TD_PARAM_WORD, "function"},
                                            {"name", TD_PARAM_READ, NULL},
                                            {"description", TD_PARAM_READ, NULL},
                                            {"parameters", TD_PARAM_READ, NULL},
                                            {"strict", TD_PARAM_READ, NULL},
                                            {"allowed_callers", TD_PARAM_WORD, "direct"},
                                            {"defer_loading", TD_PARAM_FALSE, NULL},
                                            {"async", TD_PARAM_FALSE, NULL},
                                            {"output_schema", TD_PARAM_HARMLESS, NULL},
                                            {0}};
    static const char *const same[] = {"name", "description", "parameters", "strict"};
    char path[64], found[40];
    snprintf(path, sizeof path, "tools[%zu]", i);
    if (!json_is_object(v))
        return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                             td_request_found(v, found));
    snprintf(path, sizeof path, "tools[%zu].", i);
    struct td_fields f = {v, path, e};
    if (!td_field(&f, "type")) return td_field_wrong(&f, "type", "\"function\"");
    TD_TRY(td_fields_known(&f, known, NULL));
    json_t *function = json_object();
    json_t *tool = json_pack("{s:s, s:o}", "type", "function", "function", function);
    if (json_array_append_new(out, tool) != 0) return td_api_no_memory(e);
    for (size_t k = 0; k < sizeof same / sizeof same[0]; k++)
        TD_TRY(td_build_copy(&f, same[k], function, same[k]));
    return TD_OK;
}

/* A word, or one function by its name, which the chat's form has one level deeper. */
static td_status read_choice(const struct td_fields *f, json_t *chat) {
    const json_t *v = td_field(f, "tool_choice");
    if (!json_is_object(v)) return td_build_copy(f, "tool_choice", chat, "tool_choice");
    const char *type = json_string_value(json_object_get(v, "type"));
    json_t *name = json_object_get(v, "name");
    if (!type || strcmp(type, "function") != 0 || !json_is_string(name))
        return td_field_wrong(f, "tool_choice",
                              "none, auto, required or {\"type\": \"function\", \"name\": ...}");
    return td_build_put(chat, "tool_choice",
                        json_pack("{s:s, s:{s:O}}", "type", "function", "function", "name", name),
                        f->e);
}

/* ---- reasoning, format, the rest ---- */

/* No second model writes summaries: what is given as one is the reasoning itself. */
static td_status read_reasoning(const struct td_fields *f, struct td_responses *r, json_t *chat) {
    static const struct td_param known[] = {{"effort", TD_PARAM_READ, NULL},
                                            {"summary", TD_PARAM_WORD, "auto|detailed"},
                                            {"generate_summary", TD_PARAM_WORD, "auto|detailed"},
                                            {"context", TD_PARAM_WORD, "auto"},
                                            {"mode", TD_PARAM_WORD, "standard"},
                                            {0}};
    const json_t *v = NULL;
    TD_TRY(td_field_object(f, "reasoning", &v));
    if (!v) return TD_OK;
    struct td_fields o = {v, "reasoning.", f->e};
    TD_TRY(td_fields_known(&o, known, NULL));
    r->summary = td_field(&o, "summary") || td_field(&o, "generate_summary");
    return td_build_copy(&o, "effort", chat, "reasoning_effort");
}

static td_status read_text(const struct td_fields *f, json_t *chat) {
    static const struct td_param known[] = {
        {"format", TD_PARAM_READ, NULL}, {"verbosity", TD_PARAM_WORD, "medium"}, {0}};
    static const struct td_param schema_params[] = {
        {"type", TD_PARAM_READ, NULL},   {"name", TD_PARAM_READ, NULL},
        {"schema", TD_PARAM_READ, NULL}, {"description", TD_PARAM_READ, NULL},
        {"strict", TD_PARAM_READ, NULL}, {0}};
    static const char *const same[] = {"name", "schema", "description", "strict"};
    const json_t *v = NULL, *format = NULL;
    TD_TRY(td_field_object(f, "text", &v));
    if (!v) return TD_OK;
    struct td_fields o = {v, "text.", f->e};
    TD_TRY(td_fields_known(&o, known, NULL));
    TD_TRY(td_field_object(&o, "format", &format));
    if (!format) return TD_OK;
    struct td_fields g = {format, "text.format.", f->e};
    const char *type = json_string_value(td_field(&g, "type"));
    if (!type || strcmp(type, "json_schema") != 0)
        return td_build_put(chat, "response_format", json_deep_copy(format), f->e);
    TD_TRY(td_fields_known(&g, schema_params, NULL));
    json_t *schema = json_object();
    TD_TRY(td_build_put(chat, "response_format",
                        json_pack("{s:s, s:o}", "type", "json_schema", "json_schema", schema),
                        f->e));
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        TD_TRY(td_build_copy(&g, same[i], schema, same[i]));
    return TD_OK;
}

/* Reasoning always stands in the open here, so who wants to send it back has it. */
static td_status read_include(const struct td_fields *f, json_t *chat) {
    const json_t *list = NULL;
    bool logprobs = false;
    TD_TRY(td_field_array(f, "include", &list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *word = json_string_value(json_array_get(list, i));
        if (word && strcmp(word, "message.output_text.logprobs") == 0)
            logprobs = true;
        else if (!word || strcmp(word, "reasoning.encrypted_content") != 0)
            return td_api_refuse(f->e, 400, "unsupported_value", "include",
                                 "include[%zu]: expected message.output_text.logprobs or "
                                 "reasoning.encrypted_content, found %.60s",
                                 i, word ? word : "no string");
    }
    if (logprobs) TD_TRY(td_build_put(chat, "logprobs", json_true(), f->e));
    const json_t *top = td_field(f, "top_logprobs");
    if (top && !logprobs && !(json_is_integer(top) && json_integer_value(top) == 0))
        return td_api_refuse(f->e, 400, NULL, "top_logprobs",
                             "top_logprobs: expected include to hold "
                             "message.output_text.logprobs, found it does not");
    return logprobs ? td_build_copy(f, "top_logprobs", chat, "top_logprobs") : TD_OK;
}

static td_status check_metadata(const struct td_fields *f) {
    enum { PAIRS_MAX = 16, KEY_MAX = 64, VALUE_MAX = 512 };
    const json_t *v = NULL;
    const char *key;
    json_t *value;
    TD_TRY(td_field_object(f, "metadata", &v));
    bool fits = !v || json_object_size(v) <= PAIRS_MAX;
    if (v)
        json_object_foreach((json_t *)(uintptr_t)v, key, value) fits =
            fits && strlen(key) <= KEY_MAX && json_is_string(value) &&
            json_string_length(value) <= VALUE_MAX;
    return fits ? TD_OK
                : td_field_wrong(f, "metadata",
                                 "up to 16 strings of at most 512 bytes with keys of at most 64");
}

static td_status read_rest(const struct td_fields *f, json_t *chat) {
    static const struct {
        const char *from, *to;
    } same[] = {{"model", "model"},
                {"max_output_tokens", "max_completion_tokens"},
                {"temperature", "temperature"},
                {"top_p", "top_p"},
                {"stream", "stream"},
                {"parallel_tool_calls", "parallel_tool_calls"},
                {"seed", "seed"},
                {"stop", "stop"},
                {"top_k", "top_k"},
                {"min_p", "min_p"},
                {"ignore_eos", "ignore_eos"},
                {"return_timings", "return_timings"},
                {"logit_bias", "logit_bias"},
                {"repetition_penalty", "repetition_penalty"},
                {"presence_penalty", "presence_penalty"},
                {"frequency_penalty", "frequency_penalty"},
                {"min_tokens", "min_tokens"},
                {"chat_template_kwargs", "chat_template_kwargs"}};
    static const struct td_param options[] = {{"include_obfuscation", TD_PARAM_FALSE, NULL}, {0}};
    const json_t *v = NULL;
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        TD_TRY(td_build_copy(f, same[i].from, chat, same[i].to));
    TD_TRY(td_field_object(f, "stream_options", &v));
    struct td_fields o = {v, "stream_options.", f->e};
    if (v) TD_TRY(td_fields_known(&o, options, NULL));
    return check_metadata(f);
}

td_status td_api_responses_read(const json_t *root, const struct td_kept *kept, const char *id,
                                json_t **ret_chat, struct td_responses **ret,
                                struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    TD_TRY(td_fields_known(&f, request_params, NULL));
    struct td_responses *r = *ret = calloc(1, sizeof *r);
    json_t *chat = json_object();
    td_status st = r && chat ? TD_OK : td_api_no_memory(e);
    if (st == TD_OK) st = read_rest(&f, chat);
    if (st == TD_OK) memcpy(r->owner, kept->owner, strlen(kept->owner) + 1);
    if (st == TD_OK) st = read_store(&f, kept->store, r);
    if (st == TD_OK) st = find_previous(&f, kept, r);
    if (st == TD_OK) st = read_input(&f, id, r, chat);
    if (st == TD_OK) st = td_build_list(&f, "tools", chat, "tools", read_tool);
    if (st == TD_OK) st = read_choice(&f, chat);
    if (st == TD_OK) st = read_reasoning(&f, r, chat);
    if (st == TD_OK) st = read_text(&f, chat);
    if (st == TD_OK) st = read_include(&f, chat);
    if (st == TD_OK)
        *ret_chat = chat;
    else
        json_decref(chat);
    return st;
}

/* ---- what the answer repeats ---- */

td_status td_api_responses_echo(struct td_responses *r, const json_t *root,
                                const struct td_api_params *p, struct td_api_error *e) {
    static const char *const nulls[] = {"instructions",
                                        "max_output_tokens",
                                        "max_tool_calls",
                                        "previous_response_id",
                                        "prompt_cache_key",
                                        "safety_identifier",
                                        "user"};
    static const struct {
        const char *key, *value; /* JSON */
    } defaults[] = {{"background", "false"},
                    {"metadata", "{}"},
                    {"parallel_tool_calls", "true"},
                    {"service_tier", "\"default\""},
                    {"text", "{\"format\":{\"type\":\"text\"}}"},
                    {"tool_choice", "\"auto\""},
                    {"tools", "[]"},
                    {"reasoning", "{\"effort\":null,\"summary\":null}"},
                    {"top_logprobs", "0"},
                    {"truncation", "\"disabled\""}};
    struct td_fields f = {root, "", e};
    json_t *out = json_object();
    int bad = out ? 0 : 1;
    for (size_t i = 0; !bad && i < sizeof nulls / sizeof nulls[0]; i++) {
        const json_t *v = td_field(&f, nulls[i]);
        bad |= json_object_set_new(out, nulls[i], v ? json_deep_copy(v) : json_null());
    }
    for (size_t i = 0; !bad && i < sizeof defaults / sizeof defaults[0]; i++) {
        const json_t *given = td_field(&f, defaults[i].key);
        const char *text = defaults[i].value;
        json_t *v = given ? json_deep_copy(given) : NULL;
        if (!given) bad |= td_json_read(text, strlen(text), TD_JSON_STRICT, &v, NULL) != TD_OK;
        bad |= json_object_set_new(out, defaults[i].key, v);
    }
    if (!bad) bad |= json_object_set_new(out, "store", json_boolean(r->store != NULL));
    char *text = bad ? NULL : json_dumps(out, JSON_COMPACT);
    json_decref(out);
    if (!text) return td_api_no_memory(e);
    td_json_raw(&r->echo, text + 1, strlen(text) - 2);
    free(text);
    r->echo.comma = true;
    td_json_key(&r->echo, "temperature");
    td_json_num(&r->echo, (double)p->sampling.temperature);
    td_json_key(&r->echo, "top_p");
    td_json_num(&r->echo, (double)p->sampling.top_p);
    return r->echo.failed ? td_api_no_memory(e) : TD_OK;
}

/* ---- errors ---- */

/* Replaces a name at the beginning of `s`, where the chat request's sentences have it. */
static void rename_start(char *s, size_t size, const char *from, const char *to) {
    char rest[512];
    size_t n = strlen(from);
    if (strncmp(s, from, n) != 0 || (s[n] && !strchr(" :.[", s[n]))) return;
    snprintf(rest, sizeof rest, "%s", s + n);
    snprintf(s, size, "%s%s", to, rest);
}

static void drop_function(char *s) {
    static const char inner[] = ".function.";
    char *at = strncmp(s, "tools[", 6) == 0 ? strstr(s, "].function.") : NULL;
    if (at) memmove(at + 1, at + sizeof inner - 1, strlen(at + sizeof inner - 1) + 1);
}

void td_api_responses_rename(struct td_api_error *e) {
    static const struct {
        const char *from, *to;
    } names[] = {{"messages", "input"},
                 {"max_completion_tokens", "max_output_tokens"},
                 {"reasoning_effort", "reasoning.effort"},
                 {"response_format.json_schema", "text.format"},
                 {"response_format", "text.format"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        rename_start(e->message, sizeof e->message, names[i].from, names[i].to);
        rename_start(e->param, sizeof e->param, names[i].from, names[i].to);
    }
    drop_function(e->message);
    drop_function(e->param);
}

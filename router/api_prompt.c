/* See api_prompt.h. */
#include "router/api_prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static td_status internal(struct td_api_error *e, const struct td_error *err) {
    if (err->status == TD_TOO_LONG)
        return td_api_refuse(e, 400, "context_length_exceeded", NULL, "%s", err->text);
    if (err->status == TD_INVALID) return td_api_refuse(e, 400, NULL, "messages", "%s", err->text);
    return td_api_refuse(e, 500, NULL, NULL, "%s", err->text);
}

/* ---- chat ---- */

static const struct td_param message_params[] = {
    {"role", TD_PARAM_READ, NULL},
    {"content", TD_PARAM_READ, NULL},
    {"reasoning_content", TD_PARAM_READ, NULL},
    /* what clients send back from an answer of theirs */
    {"refusal", TD_PARAM_EMPTY, NULL},
    {"annotations", TD_PARAM_EMPTY, NULL},
    {"audio", TD_PARAM_REFUSED, NULL},
    {"function_call", TD_PARAM_REFUSED, NULL},
    {"tool_calls", TD_PARAM_EMPTY, NULL},
    {"name", TD_PARAM_EMPTY, NULL},
    {0},
};

static const struct td_param part_params[] = {
    {"type", TD_PARAM_WORD, "text"}, {"text", TD_PARAM_READ, NULL}, {0}};

static td_status read_role(const struct td_fields *f, enum td_chat_role *ret) {
    const char *role = NULL;
    size_t n;
    char name[96];
    TD_TRY(td_field_str(f, "role", &role, &n));
    if (role && strcmp(role, "system") == 0)
        *ret = TD_CHAT_SYSTEM;
    else if (role && strcmp(role, "user") == 0)
        *ret = TD_CHAT_USER;
    else if (role && strcmp(role, "assistant") == 0)
        *ret = TD_CHAT_ASSISTANT;
    else if (role && (strcmp(role, "developer") == 0 || strcmp(role, "tool") == 0 ||
                      strcmp(role, "function") == 0))
        return td_api_refuse(f->e, 400, "unsupported_value", td_field_name(f, "role", name),
                             "%s: '%s' is not supported; system, user and assistant are", name,
                             role);
    else
        return td_field_wrong(f, "role", "system, user or assistant");
    return TD_OK;
}

/* Text parts, joined into *ret_owned. */
static td_status join_parts(const struct td_fields *f, const json_t *parts,
                            struct td_chat_message *m, char **ret_owned) {
    size_t total = 0, n = json_array_size(parts);
    char path[80];
    for (size_t i = 0; i < n; i++) {
        const json_t *part = json_array_get(parts, i);
        snprintf(path, sizeof path, "%scontent[%zu].", f->path, i);
        struct td_fields pf = {part, path, f->e};
        const char *text = NULL;
        size_t len = 0;
        if (!json_is_object(part)) {
            char found[40];
            path[strlen(path) - 1] = 0;
            return td_api_refuse(f->e, 400, NULL, path, "%s: expected an object, found %s", path,
                                 td_request_found(part, found));
        }
        if (!td_field(&pf, "type")) return td_field_wrong(&pf, "type", "\"text\"");
        TD_TRY(td_fields_known(&pf, part_params, NULL));
        TD_TRY(td_field_str(&pf, "text", &text, &len));
        if (!text) return td_field_wrong(&pf, "text", "a string");
        total += len + 2;
    }
    char *joined = malloc(total ? total : 1);
    if (!joined) return td_api_refuse(f->e, 503, NULL, NULL, "out of memory");
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *text = json_object_get(json_array_get(parts, i), "text");
        if (i > 0) {
            memcpy(joined + at, "\n\n", 2);
            at += 2;
        }
        memcpy(joined + at, json_string_value(text), json_string_length(text));
        at += json_string_length(text);
    }
    m->content = *ret_owned = joined;
    m->content_n = at;
    return TD_OK;
}

static td_status read_message(const json_t *v, const char *path, struct td_api_error *e,
                              struct td_chat_message *m, char **ret_owned) {
    struct td_fields f = {v, path, e};
    TD_TRY(read_role(&f, &m->role));
    TD_TRY(td_fields_known(&f, message_params, NULL));
    TD_TRY(td_field_str(&f, "reasoning_content", &m->reasoning, &m->reasoning_n));
    if (m->reasoning_n && m->role != TD_CHAT_ASSISTANT)
        return td_field_wrong(&f, "reasoning_content", "none, except on an assistant's message");
    const json_t *content = td_field(&f, "content");
    if (json_is_array(content)) return join_parts(&f, content, m, ret_owned);
    if (content && !json_is_string(content))
        return td_field_wrong(&f, "content", "a string or an array of text parts");
    if (!content && m->role != TD_CHAT_ASSISTANT)
        return td_field_wrong(&f, "content", "a string or an array of text parts");
    return td_field_str(&f, "content", &m->content, &m->content_n);
}

static td_status read_messages(const json_t *list, const struct td_api_params *p,
                               const struct td_chat *chat, struct td_chat_message *m, char **owned,
                               struct td_ids *out, struct td_api_error *e) {
    size_t n = json_array_size(list);
    char path[48];
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_object(v)) {
            char found[40];
            snprintf(path, sizeof path, "messages[%zu]", i);
            return td_api_refuse(e, 400, NULL, path, "%s: expected an object, found %s", path,
                                 td_request_found(v, found));
        }
        snprintf(path, sizeof path, "messages[%zu].", i);
        TD_TRY(read_message(v, path, e, &m[i], &owned[i]));
    }
    if (m[n - 1].role != TD_CHAT_USER)
        return td_api_refuse(e, 400, NULL, "messages",
                             "messages: expected the last message to be the user's, found the %s's",
                             m[n - 1].role == TD_CHAT_SYSTEM ? "system" : "assistant");
    struct td_chat_params cp = {.thinking = p->thinking, .effort = p->max_effort ? TD_EFFORT_MAX : TD_EFFORT_DEFAULT};
    struct td_error err;
    if (td_chat_encode(chat, &cp, m, n, out, &err) != TD_OK) return internal(e, &err);
    return TD_OK;
}

td_status td_api_chat_prompt(const json_t *root, const struct td_api_params *p,
                             const struct td_chat *chat, struct td_ids *out,
                             struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    const json_t *list = NULL;
    TD_TRY(td_field_array(&f, "messages", &list));
    size_t n = list ? json_array_size(list) : 0;
    if (n == 0) return td_field_wrong(&f, "messages", "an array of at least one message");
    struct td_chat_message *m = calloc(n, sizeof *m);
    char **owned = calloc(n, sizeof *owned);
    td_status st = m && owned ? read_messages(list, p, chat, m, owned, out, e)
                              : td_api_refuse(e, 503, NULL, NULL, "out of memory");
    for (size_t i = 0; owned && i < n; i++)
        free(owned[i]);
    free(owned);
    free(m);
    return st;
}

/* ---- completions ---- */

static td_status take_ids(const json_t *list, const struct td_chat *chat, struct td_ids *out,
                          struct td_api_error *e) {
    size_t n = json_array_size(list);
    int32_t size = td_tokenizer_size(chat->t);
    if (td_ids_reserve(out, n) != TD_OK) return td_api_refuse(e, 503, NULL, NULL, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        char found[40];
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= size)
            return td_api_refuse(e, 400, NULL, "prompt",
                                 "prompt[%zu]: expected a token id from 0 to %d, found %s", i,
                                 size - 1, td_request_found(v, found));
        out->ids[out->n++] = (int32_t)json_integer_value(v);
    }
    return TD_OK;
}

static td_status take_text(const json_t *text, const struct td_chat *chat, struct td_ids *out,
                           struct td_api_error *e) {
    struct td_error err;
    if (chat->bos >= 0 && td_ids_push(out, chat->bos) != TD_OK)
        return td_api_refuse(e, 503, NULL, NULL, "out of memory");
    if (td_tokenizer_encode(chat->t, json_string_value(text), json_string_length(text), out,
                            &err) != TD_OK)
        return internal(e, &err);
    if (out->n == 0)
        return td_api_refuse(e, 400, NULL, "prompt", "prompt: expected some text, found none");
    return TD_OK;
}

td_status td_api_completions_prompt(const json_t *root, const struct td_chat *chat,
                                    struct td_ids *out, struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    const json_t *v = td_field(&f, "prompt");
    const json_t *first = json_array_get(v, 0);
    if (json_is_string(first) || json_is_array(first)) {
        if (json_array_size(v) != 1)
            return td_api_refuse(e, 400, "unsupported_value", "prompt",
                                 "prompt: %zu prompts in one request are not supported; send one "
                                 "request for each",
                                 json_array_size(v));
        v = first;
        first = json_array_get(v, 0);
    }
    if (json_is_string(v)) return take_text(v, chat, out, e);
    if (json_is_array(v) && first) return take_ids(v, chat, out, e);
    return td_field_wrong(&f, "prompt", "a string or an array of token ids");
}

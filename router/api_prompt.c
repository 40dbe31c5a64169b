/* See api_prompt.h. */
#include "router/api_prompt.h"

#include <stdio.h>
#include <stdlib.h>

#include "router/api_messages.h"

static td_status internal(struct td_api_error *e, const struct td_error *err) {
    if (err->status == TD_TOO_LONG)
        return td_api_refuse(e, 400, "context_length_exceeded", NULL, "%s", err->text);
    if (err->status == TD_INVALID) return td_api_refuse(e, 400, NULL, "messages", "%s", err->text);
    return td_api_refuse(e, 500, NULL, NULL, "%s", err->text);
}

/* ---- chat ---- */

td_status td_api_chat_prompt(const json_t *root, const struct td_api_params *p,
                             const struct td_chat *chat, struct td_ids *out,
                             struct td_api_error *e) {
    struct td_chat_params cp = {
        .thinking = p->thinking, .effort = p->effort, .efforts = p->efforts};
    struct td_api_chat c;
    struct td_error err;
    td_status st = td_api_chat_read(root, p, &c, e);
    if (st == TD_OK && td_chat_encode(chat, &cp, c.m, c.n, out, &err) != TD_OK)
        st = internal(e, &err);
    td_api_chat_free(&c);
    return st;
}

/* ---- completions ---- */

void td_prompts_free(struct td_prompts *p) {
    for (uint32_t i = 0; i < p->n; i++) {
        td_ids_free(&p->p[i].ids);
        td_api_guide_free(&p->p[i].guide);
    }
    free(p->p);
    td_bytes_free(&p->grammar);
    *p = (struct td_prompts){0};
}

struct td_ids *td_prompts_add(struct td_prompts *p, struct td_api_error *e) {
    struct td_prompt *grown = realloc(p->p, (p->n + 1) * sizeof *grown);
    if (!grown) {
        (void)td_api_no_memory(e);
        return NULL;
    }
    p->p = grown;
    p->p[p->n] = (struct td_prompt){0};
    return &p->p[p->n++].ids;
}

uint64_t td_prompts_tokens(const struct td_prompts *p) {
    uint64_t n = 0;
    for (uint32_t i = 0; i < p->n; i++)
        n += p->p[i].ids.n;
    return n;
}

/* `path`: how the prompt is called in errors. */
static td_status take_ids(const json_t *list, const char *path, const struct td_chat *chat,
                          struct td_ids *out, struct td_api_error *e) {
    size_t n = json_array_size(list);
    int32_t size = td_tokenizer_size(chat->t);
    if (td_ids_reserve(out, n) != TD_OK) return td_api_no_memory(e);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        char found[40];
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= size)
            return td_api_refuse(e, 400, NULL, path,
                                 "%s[%zu]: expected a token id from 0 to %d, found %s", path, i,
                                 size - 1, td_request_found(v, found));
        out->ids[out->n++] = (int32_t)json_integer_value(v);
    }
    return TD_OK;
}

static td_status take_text(const json_t *text, const char *path, const struct td_chat *chat,
                           struct td_ids *out, struct td_api_error *e) {
    struct td_error err;
    if (chat->bos >= 0 && td_ids_push(out, chat->bos) != TD_OK) return td_api_no_memory(e);
    if (td_tokenizer_encode(chat->t, json_string_value(text), json_string_length(text), out,
                            &err) != TD_OK)
        return internal(e, &err);
    if (out->n == 0)
        return td_api_refuse(e, 400, NULL, path, "%s: expected some text, found none", path);
    return TD_OK;
}

static td_status take(const json_t *v, const char *path, const struct td_chat *chat,
                      struct td_prompts *out, struct td_api_error *e) {
    struct td_ids *ids = td_prompts_add(out, e);
    char found[40];
    if (!ids) return TD_INVALID;
    if (json_is_string(v)) return take_text(v, path, chat, ids, e);
    if (json_is_array(v) && json_array_size(v)) return take_ids(v, path, chat, ids, e);
    return td_api_refuse(e, 400, NULL, path,
                         "%s: expected a string or an array of token ids, found %s", path,
                         td_request_found(v, found));
}

td_status td_api_completions_prompts(const json_t *root, const struct td_chat *chat,
                                     struct td_prompts *out, struct td_api_error *e) {
    struct td_fields f = {root, "", e};
    const json_t *v = td_field(&f, "prompt");
    const json_t *first = json_array_get(v, 0);
    size_t n = json_array_size(v);
    char path[40];
    if (!json_is_string(first) && !json_is_array(first)) return take(v, "prompt", chat, out, e);
    if (n > TD_PROMPTS_MAX)
        return td_api_refuse(e, 400, NULL, "prompt",
                             "prompt: expected at most %d prompts in one request, found %zu",
                             TD_PROMPTS_MAX, n);
    for (size_t i = 0; i < n; i++) {
        snprintf(path, sizeof path, "prompt[%zu]", i);
        TD_TRY(take(json_array_get(v, i), path, chat, out, e));
    }
    return TD_OK;
}

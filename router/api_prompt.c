/* See api_prompt.h. */
#include "router/api_prompt.h"

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

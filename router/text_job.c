/* POST /tokenize, /detokenize and /v1/messages/count_tokens: what a text or a conversation is to
 * the model, without asking it. Made in the thread pool, since a prompt can be megabytes long;
 * nothing here needs a worker. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/api_anthropic.h"
#include "router/api_prompt.h"
#include "router/serve_parts.h"

struct td_text_job {
    struct td_conn_owner owner;
    struct td_serve *s;
    struct td_http_conn *conn; /* NULL: the client is gone */
    td_status (*answer)(struct td_text_job *j, const json_t *root);
    uv_work_t work;
    char *body; /* owned until the work is done */
    size_t body_n;
    struct td_json_out out;
    struct td_api_error error; /* status 0: none */
    void (*refuse)(struct td_http_conn *c, const struct td_api_error *e, struct td_json_out *w);
    uint64_t limit; /* tokens of a sequence, 0: not known */
};

/* ---- in the pool: only the job and what the loading job left are touched ---- */

static td_status check_model(const struct td_fields *f, const struct td_serve *s) {
    const char *model = NULL;
    size_t n = 0;
    TD_TRY(td_field_str(f, "model", &model, &n));
    if (!model || strcmp(model, s->defaults.model) == 0) return TD_OK;
    return td_api_refuse(f->e, 404, "model_not_found", "model",
                         "the model '%.100s' does not exist here; this server has '%s'", model,
                         s->defaults.model);
}

static td_status text_ids(const struct td_fields *f, const struct td_serve *s, struct td_ids *ids) {
    static const struct td_param known[] = {{"model", TD_PARAM_READ, NULL},
                                            {"prompt", TD_PARAM_READ, NULL},
                                            {"add_special_tokens", TD_PARAM_READ, NULL},
                                            {"return_token_strs", TD_PARAM_FALSE, NULL},
                                            {0}};
    const char *text = NULL;
    size_t n = 0;
    bool special = true;
    struct td_error err;
    TD_TRY(td_fields_known(f, known, NULL));
    TD_TRY(check_model(f, s));
    TD_TRY(td_field_bool(f, "add_special_tokens", &special));
    TD_TRY(td_field_str(f, "prompt", &text, &n));
    if (!text) return td_field_wrong(f, "prompt", "a string, or messages");
    if (special && s->chat.bos >= 0 && td_ids_push(ids, s->chat.bos) != TD_OK)
        return td_api_no_memory(f->e);
    if (td_tokenizer_encode(s->tokenizer, text, n, ids, &err) == TD_OK) return TD_OK;
    return td_api_refuse(f->e, err.status == TD_TOO_LONG ? 400 : 503, NULL, "prompt", "%s",
                         err.text);
}

/* The ids of a text, or of the prompt that a chat request would be. */
static td_status tokenize(struct td_text_job *j, const json_t *root) {
    struct td_fields f = {root, "", &j->error};
    struct td_api_params p;
    struct td_ids ids = {0};
    td_status st;
    if (td_field(&f, "messages")) {
        st = td_api_params_read(root, TD_API_CHAT, &j->s->defaults, &p, &j->error);
        if (st == TD_OK) st = td_api_chat_prompt(root, &p, &j->s->chat, &ids, &j->error);
    } else {
        st = text_ids(&f, j->s, &ids);
    }
    struct td_json_out *w = &j->out;
    td_json_open(w, '{');
    td_json_key(w, "count");
    td_json_u64(w, ids.n);
    td_json_key(w, "max_model_len");
    if (j->limit)
        td_json_u64(w, j->limit);
    else
        td_json_null(w);
    td_json_key(w, "tokens");
    td_json_open(w, '[');
    for (size_t i = 0; i < ids.n; i++)
        td_json_i64(w, ids.ids[i]);
    td_json_close(w, ']');
    td_json_close(w, '}');
    td_ids_free(&ids);
    return st;
}

/* The text of ids, names of added tokens included; bytes that are no text are U+FFFD. */
static td_status detokenize(struct td_text_job *j, const json_t *root) {
    static const struct td_param known[] = {
        {"model", TD_PARAM_READ, NULL}, {"tokens", TD_PARAM_READ, NULL}, {0}};
    struct td_fields f = {root, "", &j->error};
    const json_t *list = NULL;
    struct td_bytes text = {0};
    char found[40];
    int32_t size = td_tokenizer_size(j->s->tokenizer);
    TD_TRY(td_fields_known(&f, known, NULL));
    TD_TRY(check_model(&f, j->s));
    TD_TRY(td_field_array(&f, "tokens", &list));
    if (!list) return td_field_wrong(&f, "tokens", "an array of token ids");
    td_status st = TD_OK;
    uint64_t most = j->s->config->router_max_body; /* a few bytes may name a long token */
    for (size_t i = 0; st == TD_OK && text.n <= most && i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        size_t n;
        if (json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) < size) {
            const char *bytes =
                td_tokenizer_bytes(j->s->tokenizer, (int32_t)json_integer_value(v), &n);
            td_bytes_add(&text, bytes, n);
        } else {
            st = td_api_refuse(&j->error, 400, NULL, "tokens",
                               "tokens[%zu]: expected a token id from 0 to %d, found %s", i,
                               size - 1, td_request_found(v, found));
        }
    }
    if (st == TD_OK && text.n > most)
        st = td_api_refuse(&j->error, 400, NULL, "tokens",
                           "tokens: their text is %zu bytes long or longer; the limit is %llu bytes, as for a "
                           "request",
                           text.n, (unsigned long long)most);
    td_json_open(&j->out, '{');
    td_json_key(&j->out, "prompt");
    td_json_str(&j->out, text.n ? text.p : "", text.n);
    td_json_close(&j->out, '}');
    j->out.failed |= text.failed;
    td_bytes_free(&text);
    return st;
}

/* The prompt's length, of Anthropic's count_tokens. */
static td_status count(struct td_text_job *j, const json_t *root) {
    struct td_api_params p;
    struct td_ids ids = {0};
    json_t *chat = NULL;
    TD_TRY(td_api_anthropic_read(root, true, &chat, &j->error));
    td_status st = td_api_params_read(chat, TD_API_CHAT, &j->s->defaults, &p, &j->error);
    if (st == TD_OK) st = td_api_chat_prompt(chat, &p, &j->s->chat, &ids, &j->error);
    json_decref(chat);
    td_json_open(&j->out, '{');
    td_json_key(&j->out, "input_tokens");
    td_json_u64(&j->out, ids.n);
    td_json_close(&j->out, '}');
    td_ids_free(&ids);
    return st;
}

static void work(uv_work_t *w) {
    struct td_text_job *j = w->data;
    json_t *root = NULL;
    td_status st = td_request_parse(j->body, j->body_n, &root, &j->error);
    if (st == TD_OK) st = j->answer(j, root);
    if (j->error.status == 0 && (st != TD_OK || j->out.failed)) (void)td_api_no_memory(&j->error);
    json_decref(root);
    free(j->body);
    j->body = NULL;
}

/* ---- on the loop ---- */

static void gone(struct td_conn_owner *o) {
    struct td_text_job *j = TD_CONTAINER(o, struct td_text_job, owner);
    j->conn = NULL;
    (void)uv_cancel((uv_req_t *)&j->work); /* `worked` comes either way */
}

static void worked(uv_work_t *w, int status) {
    struct td_text_job *j = w->data;
    (void)status; /* cancelled only when the client is gone */
    j->s->n_text_jobs--;
    if (j->conn) {
        td_http_set_owner(j->conn, NULL);
        if (j->error.status)
            j->refuse(j->conn, &j->error, &j->s->scratch);
        else
            td_http_reply(j->conn, 200, "application/json", j->out.p, j->out.n);
    }
    td_json_out_free(&j->out);
    free(j->body);
    free(j);
}

static void refuse(struct td_serve *s, struct td_http_conn *c, int status, const char *code,
                   const char *text) {
    struct td_api_error e;
    (void)td_api_refuse(&e, status, code, NULL, "%s", text);
    e.retry_after_s = 1;
    td_api_error_reply(c, &e, &s->scratch);
}

static void start(struct td_serve *s, struct td_http_conn *c,
                  td_status (*answer)(struct td_text_job *j, const json_t *root)) {
    if (s->phase != TD_SERVE_RUNNING) {
        refuse(s, c, 503, "not_ready", "the tokenizer is not loaded yet");
        return;
    }
    if (s->n_text_jobs >= s->config->router_max_requests) {
        refuse(s, c, 429, "overloaded", "too many texts are in work; try again later");
        return;
    }
    struct td_text_job *j = calloc(1, sizeof *j);
    if (!j) {
        refuse(s, c, 503, NULL, "out of memory");
        return;
    }
    j->owner.gone = gone;
    j->s = s;
    j->conn = c;
    j->answer = answer;
    j->refuse = answer == count ? td_api_anthropic_error_reply : td_api_error_reply;
    j->limit = td_fleet_limit(td_flow_fleet(s->flow), s->config->router_colocate);
    j->body = td_http_take_body(c, &j->body_n);
    j->work.data = j;
    td_http_set_owner(c, &j->owner);
    s->n_text_jobs++;
    if (uv_queue_work(s->loop, &j->work, work, worked) != 0) {
        (void)td_api_no_memory(&j->error);
        worked(&j->work, 0);
    }
}

void td_api_tokenize(struct td_serve *s, struct td_http_conn *c) {
    start(s, c, tokenize);
}

void td_api_detokenize(struct td_serve *s, struct td_http_conn *c) {
    start(s, c, detokenize);
}

void td_api_count_tokens(struct td_serve *s, struct td_http_conn *c) {
    start(s, c, count);
}

/* See answer.h. */
#include "router/answer.h"

#include <stdlib.h>
#include <string.h>

td_status td_answer_init(struct td_answer *a, const struct td_api_params *p,
                         const struct td_chat *chat, const struct td_ids *prompt, const char *model,
                         struct td_error *err) {
    bool is_chat = p->kind == TD_API_CHAT;
    struct td_output_params op = {
        .t = chat->t,
        .reasoning = is_chat && td_chat_opens_reasoning(chat, prompt),
        .think_end = is_chat ? chat->think_end : -1,
        .stops = p->stops,
        .n_stops = p->n_stops,
    };
    a->params = *p;
    a->params.n_stops = 0;
    a->chat = chat;
    a->model = model;
    TD_TRY(td_output_init(&a->output, &op, err));
    a->output_ready = true;
    return TD_OK;
}

void td_answer_finish(struct td_answer *a) {
    if (a->output_ready) td_output_finish(&a->output);
    td_json_out_free(&a->content);
    td_json_out_free(&a->reasoning);
    free(a->tokens);
    *a = (struct td_answer){0};
}

static bool emit(struct td_answer *a, struct td_http_conn *c, struct td_json_out *w) {
    if (a->broken) return false;
    a->n_sent++;
    /* Without memory for a chunk the text would have a hole: the stream ends as broken. */
    if (td_sse_send(c, w) == TD_OK) return true;
    td_http_abort(c);
    a->broken = true;
    return false;
}

void td_answer_begin(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch) {
    if (!a->params.stream) return;
    td_http_begin(c, 200, TD_SSE_CONTENT_TYPE);
    if (a->params.kind != TD_API_CHAT) return;
    td_answer_chunk(a, scratch, TD_CHUNK_ROLE, "", 0, NULL);
    (void)emit(a, c, scratch);
}

static void give(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                 const struct td_output_event *ev) {
    if (!a->params.stream) {
        td_json_raw(&a->reasoning, ev->reasoning, ev->reasoning_n);
        td_json_raw(&a->content, ev->content, ev->content_n);
        return;
    }
    if (ev->reasoning_n) {
        td_answer_chunk(a, scratch, TD_CHUNK_REASONING, ev->reasoning, ev->reasoning_n, NULL);
        if (!emit(a, c, scratch)) return;
    }
    if (ev->content_n) {
        td_answer_chunk(a, scratch, TD_CHUNK_CONTENT, ev->content, ev->content_n, NULL);
        (void)emit(a, c, scratch);
    }
}

static void keep_logprobs(struct td_answer *a, const struct td_token *t) {
    if (!a->params.sampling.logprobs) return;
    /* End-of-text ends the answer and is no part of it. */
    if (t->id == a->chat->eos && !a->params.sampling.ignore_eos) return;
    if (a->n_tokens == a->cap_tokens) {
        uint32_t cap = a->cap_tokens ? 2 * a->cap_tokens : 16;
        struct td_token *grown = realloc(a->tokens, cap * sizeof *grown);
        if (!grown) {
            a->content.failed = true;
            return;
        }
        a->tokens = grown;
        a->cap_tokens = cap;
    }
    a->tokens[a->n_tokens++] = *t;
}

void td_answer_tokens(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                      const struct td_token *tokens, uint32_t n) {
    for (uint32_t i = 0; i < n && !a->stopped && !a->broken; i++) {
        struct td_output_event ev;
        if (a->output.reasoning) a->n_reasoning++;
        keep_logprobs(a, &tokens[i]);
        td_output_push(&a->output, tokens[i].id, &ev);
        a->stopped = ev.stopped;
        give(a, c, scratch, &ev);
    }
}

void td_answer_end(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                   enum td_finish reason, uint32_t n_prompt, uint32_t n_tokens) {
    struct td_output_event ev;
    const char *finish = reason == TD_FINISH_LENGTH && !a->stopped ? "length" : "stop";
    td_output_end(&a->output, reason == TD_FINISH_LENGTH, &ev);
    give(a, c, scratch, &ev);
    if (a->content.failed || a->reasoning.failed) {
        struct td_api_error e = {.status = 500, .message = "out of memory"};
        td_answer_fail(a, c, scratch, a->params.stream, &e);
        return;
    }
    if (!a->params.stream) {
        td_json_out_reset(scratch);
        td_answer_document(a, scratch, finish, n_prompt, n_tokens);
        td_http_reply(c, 200, "application/json", scratch->p, scratch->n);
        return;
    }
    td_answer_chunk(a, scratch, TD_CHUNK_LAST, "", 0, finish);
    if (!emit(a, c, scratch)) return;
    if (a->params.include_usage) {
        td_answer_usage_chunk(a, scratch, n_prompt, n_tokens);
        if (!emit(a, c, scratch)) return;
    }
    td_sse_done(c);
    td_http_end(c);
}

void td_answer_fail(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                    bool begun, const struct td_api_error *e) {
    if (!begun || !a->params.stream) {
        td_api_error_reply(c, e, scratch);
        return;
    }
    td_sse_open(scratch);
    td_api_error_write(scratch, e);
    if (emit(a, c, scratch)) td_http_abort(c);
}

/* See answer.h. */
#include "router/answer.h"

#include <stdlib.h>
#include <string.h>

td_status td_answer_init(struct td_answer *a, const struct td_api_params *p,
                         const struct td_chat *chat, const struct td_ids *prompt, const char *model,
                         struct td_error *err) {
    bool is_chat = p->kind == TD_API_CHAT;
    struct td_reply_params rp = {
        .chat = chat,
        .plain = !is_chat,
        .reasoning = is_chat && td_chat_opens_reasoning(chat, prompt),
        .calls = p->calls,
        .one_call = p->one_call,
        .stops = p->stops,
        .n_stops = p->n_stops,
    };
    a->params = *p;
    a->params.n_stops = 0;
    a->chat = chat;
    a->model = model;
    a->text.topk.n_prompt = (uint32_t)prompt->n;
    TD_TRY(td_reply_init(&a->text.reply, &rp, err));
    a->text.reply_ready = true;
    return TD_OK;
}

void td_answer_finish(struct td_answer *a) {
    if (a->text.reply_ready) td_reply_free(&a->text.reply);
    td_json_out_free(&a->text.content);
    td_json_out_free(&a->text.reasoning);
    td_topk_free(&a->text.topk);
    for (uint32_t i = 0; i < a->text.n_calls; i++) {
        td_json_out_free(&a->text.calls[i].name);
        td_json_out_free(&a->text.calls[i].arguments);
    }
    free(a->text.calls);
    free(a->text.tokens);
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
    td_answer_chunk(a, scratch, TD_CHUNK_ROLE, 0, "", 0, NULL);
    (void)emit(a, c, scratch);
}

static void keep_call(struct td_answer *a, const struct td_reply_event *ev) {
    if (ev->kind == TD_REPLY_CALL) {
        struct td_answer_call *grown =
            realloc(a->text.calls, (a->text.n_calls + 1) * sizeof *grown);
        if (!grown) {
            a->text.content.failed = true;
            return;
        }
        a->text.calls = grown;
        a->text.calls[a->text.n_calls++] = (struct td_answer_call){0};
    }
    if (ev->call >= a->text.n_calls) return; /* no memory for it */
    struct td_answer_call *call = &a->text.calls[ev->call];
    struct td_json_out *w = ev->kind == TD_REPLY_CALL ? &call->name : &call->arguments;
    td_json_raw(w, ev->text, ev->n);
    if (w->failed) a->text.content.failed = true;
}

/* Keeps what the last step of the output machine gave, or sends it. */
static void give(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch) {
    static const enum td_chunk chunks[] = {
        [TD_REPLY_REASONING] = TD_CHUNK_REASONING,
        [TD_REPLY_CONTENT] = TD_CHUNK_CONTENT,
        [TD_REPLY_CALL] = TD_CHUNK_CALL,
        [TD_REPLY_ARGUMENTS] = TD_CHUNK_ARGUMENTS,
    };
    struct td_reply_event ev;
    if (a->text.reply.failed) a->text.content.failed = true;
    while (td_reply_next(&a->text.reply, &ev)) {
        if (ev.kind == TD_REPLY_CALL_END) continue;
        if (a->params.stream) {
            td_answer_chunk(a, scratch, chunks[ev.kind], ev.call, ev.text, ev.n, NULL);
            if (!emit(a, c, scratch)) return;
        } else if (ev.kind == TD_REPLY_REASONING) {
            td_json_raw(&a->text.reasoning, ev.text, ev.n);
        } else if (ev.kind == TD_REPLY_CONTENT) {
            td_json_raw(&a->text.content, ev.text, ev.n);
        } else {
            keep_call(a, &ev);
        }
    }
}

static void keep_logprobs(struct td_answer *a, const struct td_token *t) {
    if (!a->params.sampling.logprobs) return;
    /* End-of-text ends the answer and is no part of it. */
    if (t->id == a->chat->eos && !a->params.sampling.ignore_eos) return;
    if (a->text.n_tokens == a->text.cap_tokens) {
        uint32_t cap = a->text.cap_tokens ? 2 * a->text.cap_tokens : 16;
        struct td_token *grown = realloc(a->text.tokens, cap * sizeof *grown);
        if (!grown) {
            a->text.content.failed = true;
            return;
        }
        a->text.tokens = grown;
        a->text.cap_tokens = cap;
    }
    a->text.tokens[a->text.n_tokens++] = *t;
}

/* Text may be held back for long while selections grow: then a chunk without text takes them. */
static void flush_topk(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch) {
    enum { WAITING_BYTES_MAX = 256 << 10 };
    if (!a->params.stream || a->text.topk.ready.n < WAITING_BYTES_MAX || a->broken) return;
    td_answer_chunk(a, scratch, TD_CHUNK_CONTENT, 0, "", 0, NULL);
    (void)emit(a, c, scratch);
}

void td_answer_tokens(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                      const struct td_token *tokens, const struct td_selection *selections,
                      uint32_t n) {
    for (uint32_t i = 0; i < n && !a->text.stopped && !a->broken; i++) {
        if (td_reply_in_reasoning(&a->text.reply)) a->text.n_reasoning++;
        keep_logprobs(a, &tokens[i]);
        if (a->params.sampling.selections)
            td_topk_add(&a->text.topk, selections ? &selections[i] : NULL);
        td_reply_push(&a->text.reply, tokens[i].id);
        a->text.stopped = a->text.reply.stopped;
        give(a, c, scratch);
        flush_topk(a, c, scratch);
    }
}

void td_answer_end(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                   enum td_finish reason, uint32_t n_prompt, uint32_t n_tokens) {
    static const char *const finishes[] = {
        [TD_REPLY_STOP] = "stop", [TD_REPLY_LENGTH] = "length", [TD_REPLY_CALLS] = "tool_calls"};
    bool cut = reason == TD_FINISH_LENGTH && !a->text.stopped;
    td_reply_end(&a->text.reply, cut);
    give(a, c, scratch);
    const char *finish = finishes[td_reply_finish(&a->text.reply, cut)];
    if (a->text.content.failed || a->text.reasoning.failed || a->text.topk.ready.failed) {
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
    td_answer_chunk(a, scratch, TD_CHUNK_LAST, 0, "", 0, finish);
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

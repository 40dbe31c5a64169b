/* See answer.h. */
#include "router/answer.h"

#include <stdlib.h>
#include <string.h>

#include "router/api_anthropic.h"

static void echo_prompt(struct td_json_out *w, const struct td_chat *chat,
                        const struct td_ids *prompt) {
    for (size_t i = 0; i < prompt->n; i++) {
        size_t n;
        if (td_tokenizer_is_special(chat->t, prompt->ids[i])) continue;
        const char *bytes = td_tokenizer_bytes(chat->t, prompt->ids[i], &n);
        td_json_raw(w, bytes, n);
    }
}

td_status td_answer_init(struct td_answer *a, const struct td_api_params *p,
                         const struct td_chat *chat, const struct td_prompts *prompts,
                         const char *model, struct td_error *err) {
    bool is_chat = p->kind != TD_API_COMPLETIONS;
    struct td_reply_params rp = {
        .chat = chat,
        .plain = !is_chat,
        .reasoning = is_chat && td_chat_opens_reasoning(chat, &prompts->p[0].ids),
        .calls = p->calls,
        .one_call = p->one_call,
        .stops = p->stops,
        .n_stops = p->n_stops,
        .enforced = p->enforced,
        .min_ids = p->min_new,
    };
    a->form = p->kind == TD_API_MESSAGES    ? &td_answer_messages
              : p->kind == TD_API_RESPONSES ? &td_answer_responses
                                            : NULL;
    a->params = *p;
    a->params.n_stops = 0;
    a->chat = chat;
    a->model = model;
    a->n_prompt = (uint32_t)td_prompts_tokens(prompts);
    uint32_t n = prompts->n * p->n;
    a->text = calloc(n, sizeof *a->text);
    if (!a->text) return td_fail(err, TD_NO_MEMORY, "no memory for %u choices", n);
    for (; a->n < n; a->n++) {
        struct td_answer_text *t = &a->text[a->n];
        const struct td_ids *prompt = &prompts->p[a->n / p->n].ids;
        t->topk.n_prompt = (uint32_t)prompt->n;
        if (p->echo) echo_prompt(&t->content, chat, prompt);
        if (t->content.failed) return td_fail(err, TD_NO_MEMORY, "no memory for the prompt's text");
        TD_TRY(td_reply_init(&t->reply, &rp, err));
        t->reply_ready = true;
    }
    return TD_OK;
}

static void free_text(struct td_answer_text *t) {
    if (t->reply_ready) td_reply_free(&t->reply);
    td_json_out_free(&t->content);
    td_json_out_free(&t->reasoning);
    td_topk_free(&t->topk);
    for (uint32_t i = 0; i < t->n_calls; i++) {
        td_json_out_free(&t->calls[i].name);
        td_json_out_free(&t->calls[i].arguments);
    }
    free(t->calls);
    free(t->tokens);
}

void td_answer_finish(struct td_answer *a) {
    for (uint32_t i = 0; i < a->n; i++)
        free_text(&a->text[i]);
    free(a->text);
    td_json_out_free(&a->head);
    td_responses_free(a->responses);
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
    if (a->form) {
        a->form->begin(a, scratch);
        (void)emit(a, c, scratch);
    } else {
        td_answer_head(a);
    }
    bool chat = a->params.kind == TD_API_CHAT;
    for (uint32_t i = 0; i < a->n && (chat || a->params.echo); i++) {
        struct td_json_out *echo = &a->text[i].content;
        td_answer_chunk(a, i, scratch, chat ? TD_CHUNK_ROLE : TD_CHUNK_CONTENT, 0, echo->p, echo->n,
                        NULL);
        td_json_out_free(echo);
        if (!emit(a, c, scratch)) return;
    }
}

static void keep_call(struct td_answer_text *t, const struct td_reply_event *ev) {
    if (ev->kind == TD_REPLY_CALL) {
        struct td_answer_call *grown = realloc(t->calls, (t->n_calls + 1) * sizeof *grown);
        if (!grown) {
            t->content.failed = true;
            return;
        }
        t->calls = grown;
        t->calls[t->n_calls++] = (struct td_answer_call){0};
    }
    if (ev->call >= t->n_calls) return; /* no memory for it */
    struct td_answer_call *call = &t->calls[ev->call];
    struct td_json_out *w = ev->kind == TD_REPLY_CALL ? &call->name : &call->arguments;
    td_json_raw(w, ev->text, ev->n);
    if (w->failed) t->content.failed = true;
}

static void keep(struct td_answer_text *t, const struct td_reply_event *ev) {
    if (ev->kind == TD_REPLY_REASONING)
        td_json_raw(&t->reasoning, ev->text, ev->n);
    else if (ev->kind == TD_REPLY_CONTENT)
        td_json_raw(&t->content, ev->text, ev->n);
    else
        keep_call(t, ev);
}

/* Keeps what the last step of the output machine gave, or sends it. */
static void give(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                 uint32_t choice) {
    static const enum td_chunk chunks[] = {
        [TD_REPLY_REASONING] = TD_CHUNK_REASONING,
        [TD_REPLY_CONTENT] = TD_CHUNK_CONTENT,
        [TD_REPLY_CALL] = TD_CHUNK_CALL,
        [TD_REPLY_ARGUMENTS] = TD_CHUNK_ARGUMENTS,
    };
    struct td_answer_text *t = &a->text[choice];
    struct td_reply_event ev;
    if (t->reply.failed) t->content.failed = true;
    while (td_reply_next(&t->reply, &ev)) {
        if (ev.kind == TD_REPLY_CALL_END) continue;
        if (!a->params.stream || (a->form && a->form->keeps)) keep(t, &ev);
        if (!a->params.stream) continue;
        if (a->form)
            a->form->event(a, scratch, &ev);
        else
            td_answer_chunk(a, choice, scratch, chunks[ev.kind], ev.call, ev.text, ev.n, NULL);
        if (!emit(a, c, scratch)) return;
    }
}

static void keep_logprobs(struct td_answer *a, struct td_answer_text *t,
                          const struct td_token *token) {
    if (!a->params.sampling.logprobs) return;
    /* Of the Responses API they belong to the message's text. */
    if (a->responses && (td_reply_in_reasoning(&t->reply) || t->n_calls)) return;
    /* End-of-text ends the answer and is no part of it. */
    if (token->id == a->chat->eos && !a->params.sampling.ignore_eos) return;
    if (t->n_tokens == t->cap_tokens) {
        uint32_t cap = t->cap_tokens ? 2 * t->cap_tokens : 16;
        struct td_token *grown = realloc(t->tokens, cap * sizeof *grown);
        if (!grown) {
            t->content.failed = true;
            return;
        }
        t->tokens = grown;
        t->cap_tokens = cap;
    }
    t->tokens[t->n_tokens++] = *token;
}

/* Text may be held back for long while selections grow: then a chunk without text takes them. */
static void flush_topk(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                       uint32_t choice) {
    enum { WAITING_BYTES_MAX = 256 << 10 };
    if (!a->params.stream || a->text[choice].topk.ready.n < WAITING_BYTES_MAX || a->broken) return;
    td_answer_chunk(a, choice, scratch, TD_CHUNK_CONTENT, 0, "", 0, NULL);
    (void)emit(a, c, scratch);
}

void td_answer_tokens(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                      uint32_t choice, const struct td_token *tokens,
                      const struct td_selection *selections, uint32_t n) {
    struct td_answer_text *t = &a->text[choice];
    for (uint32_t i = 0; i < n && !t->stopped && !a->broken; i++) {
        if (td_reply_in_reasoning(&t->reply)) t->n_reasoning++;
        keep_logprobs(a, t, &tokens[i]);
        if (a->params.sampling.selections)
            td_topk_add(&t->topk, selections ? &selections[i] : NULL);
        td_reply_push(&t->reply, tokens[i].id);
        t->stopped = t->reply.stopped;
        give(a, c, scratch, choice);
        flush_topk(a, c, scratch, choice);
    }
}

/* After the last choice. */
static void end_all(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch) {
    for (uint32_t i = 0; i < a->n; i++) {
        const struct td_answer_text *t = &a->text[i];
        if (!t->content.failed && !t->reasoning.failed && !t->topk.ready.failed) continue;
        struct td_api_error e = {.status = 500, .message = "out of memory"};
        td_answer_fail(a, c, scratch, a->params.stream, &e);
        return;
    }
    if (!a->params.stream) {
        td_json_out_reset(scratch);
        if (a->form)
            a->form->document(a, scratch, &a->text[0]);
        else
            td_answer_document(a, scratch);
        td_http_reply(c, 200, "application/json", scratch->p, scratch->n);
        return;
    }
    if (a->params.include_usage) {
        td_answer_usage_chunk(a, scratch);
        if (!emit(a, c, scratch)) return;
    }
    if (!a->form) td_sse_done(c);
    td_http_end(c);
}

void td_answer_end(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                   uint32_t choice, enum td_finish reason, uint32_t n_tokens) {
    static const char *const finishes[] = {
        [TD_REPLY_STOP] = "stop", [TD_REPLY_LENGTH] = "length", [TD_REPLY_CALLS] = "tool_calls"};
    struct td_answer_text *t = &a->text[choice];
    bool cut = reason == TD_FINISH_LENGTH && !t->stopped;
    td_reply_end(&t->reply, cut);
    give(a, c, scratch, choice);
    t->finish = finishes[td_reply_finish(&t->reply, cut)];
    t->n_sampled = n_tokens;
    a->n_ended++;
    if (a->params.stream) {
        if (a->form)
            a->form->last(a, scratch, t);
        else
            td_answer_chunk(a, choice, scratch, TD_CHUNK_LAST, 0, "", 0, t->finish);
        if (!emit(a, c, scratch)) return;
    }
    if (a->n_ended == a->n) end_all(a, c, scratch);
}

void td_answer_fail(struct td_answer *a, struct td_http_conn *c, struct td_json_out *scratch,
                    bool begun, const struct td_api_error *e) {
    if (!begun || !a->params.stream) {
        if (a->params.kind == TD_API_MESSAGES)
            td_api_anthropic_error_reply(c, e, scratch);
        else
            td_api_error_reply(c, e, scratch);
        return;
    }
    bool clean = a->form && a->form->error(a, scratch, e);
    if (!a->form) {
        td_sse_open(scratch);
        td_api_error_write(scratch, e);
    }
    if (!emit(a, c, scratch)) return;
    if (clean)
        td_http_end(c);
    else
        td_http_abort(c);
}

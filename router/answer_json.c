/* Answers and their chunks as the OpenAI API writes them. */
#include <stdio.h>
#include <string.h>

#include "router/answer.h"

static void token_text(struct td_json_out *w, const struct td_answer *a, int32_t id) {
    size_t n;
    const char *s = td_tokenizer_bytes(a->chat->t, id, &n);
    td_json_str(w, s, n);
}

static void token_bytes(struct td_json_out *w, const struct td_answer *a, int32_t id) {
    size_t n;
    const char *s = td_tokenizer_bytes(a->chat->t, id, &n);
    td_json_open(w, '[');
    for (size_t i = 0; i < n; i++)
        td_json_u64(w, (unsigned char)s[i]);
    td_json_close(w, ']');
}

static void chat_entry(struct td_json_out *w, const struct td_answer *a, int32_t id,
                       float logprob) {
    td_json_key(w, "token");
    token_text(w, a, id);
    td_json_key(w, "logprob");
    td_json_num(w, (double)logprob);
    td_json_key(w, "bytes");
    token_bytes(w, a, id);
}

void td_answer_logprobs(struct td_json_out *w, const struct td_answer *a,
                        const struct td_answer_text *t, uint32_t from) {
    td_json_open(w, '[');
    for (uint32_t i = from; i < t->n_tokens; i++) {
        const struct td_token *token = &t->tokens[i];
        td_json_open(w, '{');
        chat_entry(w, a, token->id, token->logprob);
        td_json_key(w, "top_logprobs");
        td_json_open(w, '[');
        for (uint32_t k = 0; k < token->n_top && k < a->params.sampling.top_logprobs; k++) {
            td_json_open(w, '{');
            chat_entry(w, a, token->top[k].id, token->top[k].logprob);
            td_json_close(w, '}');
        }
        td_json_close(w, ']');
        td_json_close(w, '}');
    }
    td_json_close(w, ']');
}

static void chat_logprobs(struct td_json_out *w, const struct td_answer *a,
                          const struct td_answer_text *t) {
    td_json_open(w, '{');
    td_json_key(w, "content");
    td_answer_logprobs(w, a, t, 0);
    td_json_key(w, "refusal");
    td_json_null(w);
    td_json_close(w, '}');
}

/* Code points that start in a token; a continuation byte belongs to the token before. */
static uint64_t code_points(const struct td_answer *a, int32_t id) {
    size_t n;
    const char *s = td_tokenizer_bytes(a->chat->t, id, &n);
    uint64_t count = 0;
    if (td_tokenizer_is_special(a->chat->t, id)) return 0;
    for (size_t i = 0; i < n; i++)
        if (((unsigned char)s[i] & 0xC0) != 0x80) count++;
    return count;
}

static void completion_tops(struct td_json_out *w, const struct td_answer *a,
                            const struct td_answer_text *t) {
    td_json_open(w, '[');
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        const struct td_token *token = &t->tokens[i];
        td_json_open(w, '{');
        for (uint32_t k = 0; k < token->n_top && k < a->params.sampling.top_logprobs; k++) {
            token_text(w, a, token->top[k].id);
            td_json_raw(w, ":", 1);
            w->comma = false;
            td_json_num(w, (double)token->top[k].logprob);
        }
        td_json_close(w, '}');
    }
    td_json_close(w, ']');
}

static void completion_logprobs(struct td_json_out *w, const struct td_answer *a,
                                const struct td_answer_text *t) {
    td_json_open(w, '{');
    td_json_key(w, "tokens");
    td_json_open(w, '[');
    for (uint32_t i = 0; i < t->n_tokens; i++)
        token_text(w, a, t->tokens[i].id);
    td_json_close(w, ']');
    td_json_key(w, "token_logprobs");
    td_json_open(w, '[');
    for (uint32_t i = 0; i < t->n_tokens; i++)
        td_json_num(w, (double)t->tokens[i].logprob);
    td_json_close(w, ']');
    td_json_key(w, "top_logprobs");
    if (a->params.sampling.top_logprobs)
        completion_tops(w, a, t);
    else
        td_json_null(w);
    td_json_key(w, "text_offset");
    td_json_open(w, '[');
    uint64_t at = t->text_offset;
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        td_json_u64(w, at);
        at += code_points(a, t->tokens[i].id);
    }
    td_json_close(w, ']');
    td_json_close(w, '}');
}

/* The field "logprobs" of a choice; what waited is written then. */
static void logprobs(struct td_json_out *w, const struct td_answer *a, struct td_answer_text *t) {
    td_json_key(w, "logprobs");
    if (!a->params.sampling.logprobs || (a->params.stream && t->n_tokens == 0)) {
        td_json_null(w);
        return;
    }
    if (a->params.kind == TD_API_CHAT)
        chat_logprobs(w, a, t);
    else
        completion_logprobs(w, a, t);
    for (uint32_t i = 0; i < t->n_tokens; i++)
        t->text_offset += code_points(a, t->tokens[i].id);
    t->n_tokens = 0;
}

/* The field "tandem" of a choice, when there is something to say. */
static void topk(struct td_json_out *w, const struct td_answer *a, struct td_answer_text *t) {
    if (!a->params.sampling.selections || (a->params.stream && t->topk.ready.n == 0)) return;
    td_topk_write(&t->topk, w);
}

static void head(struct td_json_out *w, const struct td_answer *a, const char *object) {
    td_json_open(w, '{');
    td_json_key(w, "id");
    td_json_text(w, a->id);
    td_json_key(w, "object");
    td_json_text(w, object);
    td_json_key(w, "created");
    td_json_i64(w, a->created);
    td_json_key(w, "model");
    td_json_text(w, a->model);
    if (a->fingerprint[0]) {
        td_json_key(w, "system_fingerprint");
        td_json_text(w, a->fingerprint);
    }
    td_json_key(w, "choices");
    td_json_open(w, '[');
}

static void finish_field(struct td_json_out *w, const char *finish) {
    td_json_key(w, "finish_reason");
    if (finish)
        td_json_text(w, finish);
    else
        td_json_null(w);
}

/* A prompt was computed once, whatever came of it. */
static void usage(struct td_json_out *w, const struct td_answer *a) {
    uint64_t sampled = 0, reasoning = 0;
    for (uint32_t i = 0; i < a->n; i++) {
        sampled += a->text[i].n_sampled;
        reasoning += a->text[i].n_reasoning;
    }
    td_json_key(w, "usage");
    td_json_open(w, '{');
    td_json_key(w, "prompt_tokens");
    td_json_u64(w, a->n_prompt);
    td_json_key(w, "completion_tokens");
    td_json_u64(w, sampled);
    td_json_key(w, "total_tokens");
    td_json_u64(w, a->n_prompt + sampled);
    if (a->params.kind == TD_API_CHAT) {
        td_json_key(w, "completion_tokens_details");
        td_json_open(w, '{');
        td_json_key(w, "reasoning_tokens");
        td_json_u64(w, reasoning);
        td_json_close(w, '}');
    }
    td_json_key(w, "prompt_tokens_details");
    td_json_open(w, '{');
    td_json_key(w, "cached_tokens"); /* no worker keeps prefixes */
    td_json_u64(w, 0);
    td_json_close(w, '}');
    if (a->params.timings) td_ledger_write(&a->ledger, w);
    td_json_close(w, '}');
}

static const char *chunk_object(const struct td_answer *a) {
    return a->params.kind == TD_API_CHAT ? "chat.completion.chunk" : "text_completion";
}

/* Unique in this router's life: the answer's own id, the choice's number but for the first, and the
 * number of the call in it. */
static void call_id(struct td_json_out *w, const struct td_answer *a, uint32_t choice,
                    uint32_t call) {
    char id[64];
    const char *own = strchr(a->id, '-');
    char which[16] = "";
    if (choice) snprintf(which, sizeof which, "c%u-", choice);
    snprintf(id, sizeof id, "call_%s%s%02x", own ? own + 1 : a->id, which, call);
    td_json_key(w, "id");
    td_json_text(w, id);
}

static void call_delta(struct td_json_out *w, const struct td_answer *a, uint32_t choice,
                       bool begins, uint32_t call, const char *text, size_t n) {
    td_json_key(w, "tool_calls");
    td_json_open(w, '[');
    td_json_open(w, '{');
    td_json_key(w, "index");
    td_json_u64(w, call);
    if (begins) {
        call_id(w, a, choice, call);
        td_json_key(w, "type");
        td_json_text(w, "function");
    }
    td_json_key(w, "function");
    td_json_open(w, '{');
    if (begins) {
        td_json_key(w, "name");
        td_json_str(w, text, n);
    }
    td_json_key(w, "arguments");
    td_json_str(w, text, begins ? 0 : n);
    td_json_close(w, '}');
    td_json_close(w, '}');
    td_json_close(w, ']');
}

static void chat_delta(struct td_json_out *w, const struct td_answer *a, uint32_t choice,
                       enum td_chunk kind, uint32_t call, const char *text, size_t n) {
    td_json_key(w, "delta");
    td_json_open(w, '{');
    if (kind == TD_CHUNK_CALL || kind == TD_CHUNK_ARGUMENTS) {
        call_delta(w, a, choice, kind == TD_CHUNK_CALL, call, text, n);
    } else if (kind != TD_CHUNK_LAST) {
        if (kind == TD_CHUNK_ROLE) {
            td_json_key(w, "role");
            td_json_text(w, "assistant");
        }
        td_json_key(w, kind == TD_CHUNK_REASONING ? "reasoning_content" : "content");
        td_json_str(w, text, n);
    }
    td_json_close(w, '}');
}

void td_answer_head(struct td_answer *a) {
    td_sse_open(&a->head);
    head(&a->head, a, chunk_object(a));
}

static void open_chunk(struct td_json_out *w, const struct td_answer *a) {
    td_json_out_reset(w);
    td_json_raw(w, a->head.p, a->head.n);
    w->failed |= a->head.failed;
}

void td_answer_chunk(struct td_answer *a, uint32_t choice, struct td_json_out *w,
                     enum td_chunk kind, uint32_t call, const char *text, size_t n,
                     const char *finish) {
    struct td_answer_text *t = &a->text[choice];
    open_chunk(w, a);
    td_json_open(w, '{');
    td_json_key(w, "index");
    td_json_u64(w, choice);
    if (a->params.kind == TD_API_CHAT) {
        chat_delta(w, a, choice, kind, call, text, n);
    } else {
        td_json_key(w, "text");
        td_json_str(w, text, n);
    }
    logprobs(w, a, t);
    topk(w, a, t);
    finish_field(w, finish);
    td_json_close(w, '}');
    td_json_close(w, ']');
    if (a->params.include_usage) {
        td_json_key(w, "usage");
        td_json_null(w);
    }
    td_json_close(w, '}');
}

void td_answer_usage_chunk(const struct td_answer *a, struct td_json_out *w) {
    open_chunk(w, a);
    td_json_close(w, ']');
    usage(w, a);
    td_json_close(w, '}');
}

static void whole_calls(struct td_json_out *w, const struct td_answer *a, uint32_t choice) {
    const struct td_answer_text *t = &a->text[choice];
    td_json_key(w, "tool_calls");
    td_json_open(w, '[');
    for (uint32_t i = 0; i < t->n_calls; i++) {
        td_json_open(w, '{');
        call_id(w, a, choice, i);
        td_json_key(w, "type");
        td_json_text(w, "function");
        td_json_key(w, "function");
        td_json_open(w, '{');
        td_json_key(w, "name");
        td_json_str(w, t->calls[i].name.p, t->calls[i].name.n);
        td_json_key(w, "arguments");
        td_json_str(w, t->calls[i].arguments.p, t->calls[i].arguments.n);
        td_json_close(w, '}');
        td_json_close(w, '}');
    }
    td_json_close(w, ']');
}

static void chat_message(struct td_json_out *w, const struct td_answer *a, uint32_t choice) {
    const struct td_answer_text *t = &a->text[choice];
    td_json_key(w, "message");
    td_json_open(w, '{');
    td_json_key(w, "role");
    td_json_text(w, "assistant");
    td_json_key(w, "content");
    if (t->n_calls && t->content.n == 0)
        td_json_null(w);
    else
        td_json_str(w, t->content.p, t->content.n);
    if (t->n_calls) whole_calls(w, a, choice);
    if (t->reasoning.n) {
        td_json_key(w, "reasoning_content");
        td_json_str(w, t->reasoning.p, t->reasoning.n);
    }
    td_json_key(w, "refusal");
    td_json_null(w);
    td_json_close(w, '}');
}

static void whole_choice(struct td_json_out *w, struct td_answer *a, uint32_t choice) {
    struct td_answer_text *t = &a->text[choice];
    td_json_open(w, '{');
    td_json_key(w, "index");
    td_json_u64(w, choice);
    if (a->params.kind == TD_API_CHAT) {
        chat_message(w, a, choice);
    } else {
        td_json_key(w, "text");
        td_json_str(w, t->content.p, t->content.n);
    }
    logprobs(w, a, t);
    topk(w, a, t);
    finish_field(w, t->finish);
    td_json_close(w, '}');
}

void td_answer_document(struct td_answer *a, struct td_json_out *w) {
    head(w, a, a->params.kind == TD_API_CHAT ? "chat.completion" : "text_completion");
    for (uint32_t i = 0; i < a->n; i++)
        whole_choice(w, a, i);
    td_json_close(w, ']');
    usage(w, a);
    td_json_close(w, '}');
}

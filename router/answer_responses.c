/* Answers as OpenAI's Responses API writes them: items (reasoning, a message, calls) instead of
 * fields, and a stream of numbered, named events that opens and closes each item and ends with the
 * whole response. One choice. The whole may also be kept for a later request. */
#include <stdio.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/answer.h"

enum { ITEM_NONE, ITEM_REASONING, ITEM_MESSAGE, ITEM_CALL };

static void field(struct td_json_out *w, const char *key, const char *value) {
    td_json_key(w, key);
    if (value)
        td_json_text(w, value);
    else
        td_json_null(w);
}

static void number(struct td_json_out *w, const char *key, uint64_t v) {
    td_json_key(w, key);
    td_json_u64(w, v);
}

static void text_field(struct td_json_out *w, const char *key, const struct td_json_out *text) {
    td_json_key(w, key);
    td_json_str(w, text ? text->p : "", text ? text->n : 0);
}

static void id_field(struct td_json_out *w, const struct td_answer *a, const char *key,
                     const char *prefix, uint32_t number) {
    char id[64];
    const char *own = strchr(a->id, '_');
    snprintf(id, sizeof id, "%s_%s%02x", prefix, own ? own + 1 : a->id, number);
    field(w, key, id);
}

/* ---- parts and items ---- */

/* `text` NULL: it only begins. */
static void message_part(struct td_json_out *w, const struct td_answer *a,
                         const struct td_answer_text *t, const struct td_json_out *text) {
    td_json_open(w, '{');
    field(w, "type", "output_text");
    text_field(w, "text", text);
    td_json_key(w, "annotations");
    td_json_open(w, '[');
    td_json_close(w, ']');
    td_json_key(w, "logprobs");
    td_answer_logprobs(w, a, t, text ? 0 : t->n_tokens);
    td_json_close(w, '}');
}

static void reasoning_part(struct td_json_out *w, const struct td_answer *a,
                           const struct td_json_out *text) {
    td_json_open(w, '{');
    field(w, "type", a->responses->summary ? "summary_text" : "reasoning_text");
    text_field(w, "text", text);
    td_json_close(w, '}');
}

static const char *item_prefix(uint8_t kind) {
    return kind == ITEM_REASONING ? "rs" : kind == ITEM_MESSAGE ? "msg" : "fc";
}

/* The item number `at`; `status` "in_progress": it begins, and is empty. */
static void item(struct td_json_out *w, const struct td_answer *a, const struct td_answer_text *t,
                 uint8_t kind, uint32_t at, uint32_t call, const char *status) {
    bool begins = strcmp(status, "in_progress") == 0;
    td_json_open(w, '{');
    id_field(w, a, "id", item_prefix(kind), at);
    if (kind == ITEM_REASONING) {
        bool summary = a->responses->summary;
        field(w, "type", "reasoning");
        td_json_key(w, summary ? "content" : "summary");
        td_json_open(w, '[');
        td_json_close(w, ']');
        td_json_key(w, summary ? "summary" : "content");
        td_json_open(w, '[');
        if (!begins) reasoning_part(w, a, &t->reasoning);
        td_json_close(w, ']');
    } else if (kind == ITEM_MESSAGE) {
        field(w, "type", "message");
        field(w, "role", "assistant");
        td_json_key(w, "content");
        td_json_open(w, '[');
        if (!begins) message_part(w, a, t, &t->content);
        td_json_close(w, ']');
    } else {
        field(w, "type", "function_call");
        id_field(w, a, "call_id", "call", call);
        text_field(w, "name", call < t->n_calls ? &t->calls[call].name : NULL);
        text_field(w, "arguments", !begins && call < t->n_calls ? &t->calls[call].arguments : NULL);
    }
    field(w, "status", status);
    td_json_close(w, '}');
}

/* ---- the whole ---- */

static bool is_cut(const struct td_answer_text *t) {
    return t->finish && strcmp(t->finish, "length") == 0;
}

static void output(struct td_json_out *w, const struct td_answer *a,
                   const struct td_answer_text *t) {
    bool reasons = t->reasoning.n > 0, speaks = t->content.n > 0;
    uint32_t n = (uint32_t)reasons + (uint32_t)speaks + t->n_calls, at = 0;
    td_json_key(w, "output");
    td_json_open(w, '[');
    for (; at < n; at++) {
        uint32_t call = at - (uint32_t)reasons - (uint32_t)speaks;
        uint8_t kind = reasons && at == 0                  ? ITEM_REASONING
                       : speaks && at == (uint32_t)reasons ? ITEM_MESSAGE
                                                           : ITEM_CALL;
        item(w, a, t, kind, at, call, is_cut(t) && at + 1 == n ? "incomplete" : "completed");
    }
    td_json_close(w, ']');
}

static void usage(struct td_json_out *w, const struct td_answer *a,
                  const struct td_answer_text *t) {
    td_json_key(w, "usage");
    td_json_open(w, '{');
    number(w, "input_tokens", a->n_prompt);
    td_json_key(w, "input_tokens_details");
    td_json_open(w, '{');
    number(w, "cached_tokens", 0);
    number(w, "cache_write_tokens", 0);
    td_json_close(w, '}');
    number(w, "output_tokens", t->n_sampled);
    td_json_key(w, "output_tokens_details");
    td_json_open(w, '{');
    number(w, "reasoning_tokens", t->n_reasoning);
    td_json_close(w, '}');
    number(w, "total_tokens", (uint64_t)a->n_prompt + t->n_sampled);
    if (a->params.timings) td_ledger_write(&a->ledger, w);
    td_json_close(w, '}');
}

static void error(struct td_json_out *w, const struct td_api_error *e) {
    td_json_key(w, "error");
    if (!e) {
        td_json_null(w);
        return;
    }
    td_json_open(w, '{');
    field(w, "code", e->status == 429 ? "rate_limit_exceeded" : "server_error");
    field(w, "message", e->message);
    td_json_close(w, '}');
}

/* `status` completed, incomplete, or in_progress and failed, which tell no output. */
static void response(struct td_json_out *w, const struct td_answer *a, const char *status,
                     const struct td_api_error *e) {
    const struct td_answer_text *t = &a->text[0];
    bool whole = strcmp(status, "completed") == 0 || strcmp(status, "incomplete") == 0;
    td_json_open(w, '{');
    field(w, "id", a->id);
    field(w, "object", "response");
    td_json_key(w, "created_at");
    td_json_i64(w, a->created);
    td_json_key(w, "completed_at");
    if (strcmp(status, "completed") == 0)
        td_json_i64(w, td_wall_s());
    else
        td_json_null(w);
    field(w, "status", status);
    error(w, e);
    td_json_key(w, "incomplete_details");
    if (strcmp(status, "incomplete") == 0) {
        td_json_open(w, '{');
        field(w, "reason", "max_output_tokens");
        td_json_close(w, '}');
    } else {
        td_json_null(w);
    }
    field(w, "model", a->model);
    td_json_value(w, a->responses->echo.p, a->responses->echo.n);
    if (whole) {
        output(w, a, t);
        usage(w, a, t);
    } else {
        td_json_key(w, "output");
        td_json_open(w, '[');
        td_json_close(w, ']');
        field(w, "usage", NULL);
    }
    td_json_close(w, '}');
}

static void keep(struct td_answer *a, const char *document, size_t n) {
    struct td_responses *r = a->responses;
    if (!r->store) return;
    td_status st = td_response_store_put(r->store, r->owner, a->id, r->previous, r->input, r->input_n,
                                         document, n);
    if (st != TD_OK) td_warn("response %s is not kept: %s", a->id, td_status_name(st));
}

static void responses_document(struct td_answer *a, struct td_json_out *w,
                               const struct td_answer_text *t) {
    response(w, a, is_cut(t) ? "incomplete" : "completed", NULL);
    if (!w->failed) keep(a, w->p, w->n);
}

/* ---- the stream ---- */

/* Starts an event behind what the buffer holds. */
static void event(struct td_json_out *w, struct td_answer *a, const char *type) {
    char head[80];
    if (w->n > 0) td_json_raw(w, "\n\n", 2);
    td_json_raw(w, head, (size_t)snprintf(head, sizeof head, "event: %s\ndata: ", type));
    w->comma = false;
    td_json_open(w, '{');
    field(w, "type", type);
    number(w, "sequence_number", a->responses->sequence++);
}

/* Returns where the response begins in `w`; it ends before the last bracket. */
static size_t response_event(struct td_json_out *w, struct td_answer *a, const char *status,
                             const struct td_api_error *e) {
    char type[40];
    snprintf(type, sizeof type, "response.%s", status);
    event(w, a, type);
    td_json_key(w, "response");
    size_t from = w->n;
    response(w, a, strcmp(status, "created") == 0 ? "in_progress" : status, e);
    td_json_close(w, '}');
    return from;
}

static void responses_begin(struct td_answer *a, struct td_json_out *w) {
    td_json_out_reset(w);
    (void)response_event(w, a, "created", NULL);
    (void)response_event(w, a, "in_progress", NULL);
}

/* An event about the open item. */
static void item_event(struct td_json_out *w, struct td_answer *a, const char *type) {
    event(w, a, type);
    number(w, "output_index", a->n_blocks - 1);
    id_field(w, a, "item_id", item_prefix(a->block), a->n_blocks - 1);
    if (a->block != ITEM_CALL)
        number(w,
               a->block == ITEM_REASONING && a->responses->summary ? "summary_index"
                                                                   : "content_index",
               0);
}

static void whole_item_event(struct td_json_out *w, struct td_answer *a, const char *type,
                             const char *status) {
    event(w, a, type);
    number(w, "output_index", a->n_blocks - 1);
    td_json_key(w, "item");
    item(w, a, &a->text[0], a->block, a->n_blocks - 1, a->responses->call, status);
    td_json_close(w, '}');
}

static void part_event(struct td_json_out *w, struct td_answer *a, bool done) {
    const struct td_answer_text *t = &a->text[0];
    static const char *const types[2][2] = {
        {"response.content_part.added", "response.content_part.done"},
        {"response.reasoning_summary_part.added", "response.reasoning_summary_part.done"}};
    bool reasoning = a->block == ITEM_REASONING;
    if (a->block == ITEM_CALL) return;
    item_event(w, a, types[reasoning && a->responses->summary][done]);
    td_json_key(w, "part");
    if (reasoning)
        reasoning_part(w, a, done ? &t->reasoning : NULL);
    else
        message_part(w, a, t, done ? &t->content : NULL);
    td_json_close(w, '}');
}

/* Of the open item: delta and done. */
static const char *text_type(const struct td_answer *a, bool done) {
    if (a->block == ITEM_MESSAGE)
        return done ? "response.output_text.done" : "response.output_text.delta";
    if (a->block == ITEM_CALL)
        return done ? "response.function_call_arguments.done"
                    : "response.function_call_arguments.delta";
    if (a->responses->summary)
        return done ? "response.reasoning_summary_text.done"
                    : "response.reasoning_summary_text.delta";
    return done ? "response.reasoning_text.done" : "response.reasoning_text.delta";
}

static void close_item(struct td_answer *a, struct td_json_out *w, const char *status) {
    const struct td_answer_text *t = &a->text[0];
    if (a->block == ITEM_NONE) return;
    item_event(w, a, text_type(a, true));
    if (a->block == ITEM_MESSAGE) {
        text_field(w, "text", &t->content);
        td_json_key(w, "logprobs");
        td_answer_logprobs(w, a, t, 0);
    } else if (a->block == ITEM_REASONING) {
        text_field(w, "text", &t->reasoning);
    } else {
        uint32_t call = a->responses->call;
        text_field(w, "name", call < t->n_calls ? &t->calls[call].name : NULL);
        text_field(w, "arguments", call < t->n_calls ? &t->calls[call].arguments : NULL);
    }
    td_json_close(w, '}');
    part_event(w, a, true);
    whole_item_event(w, a, "response.output_item.done", status);
    a->block = ITEM_NONE;
}

static void responses_event(struct td_answer *a, struct td_json_out *w,
                            const struct td_reply_event *ev) {
    static const uint8_t kinds[] = {[TD_REPLY_REASONING] = ITEM_REASONING,
                                    [TD_REPLY_CONTENT] = ITEM_MESSAGE,
                                    [TD_REPLY_CALL] = ITEM_CALL,
                                    [TD_REPLY_ARGUMENTS] = ITEM_CALL};
    struct td_responses *r = a->responses;
    td_json_out_reset(w);
    if (a->block != kinds[ev->kind] || ev->kind == TD_REPLY_CALL) {
        close_item(a, w, "completed");
        a->block = kinds[ev->kind];
        a->n_blocks++;
        r->call = ev->call;
        whole_item_event(w, a, "response.output_item.added", "in_progress");
        part_event(w, a, false);
    }
    if (ev->kind == TD_REPLY_CALL) return;
    item_event(w, a, text_type(a, false));
    td_json_key(w, "delta");
    td_json_str(w, ev->text, ev->n);
    if (a->block == ITEM_MESSAGE) {
        td_json_key(w, "logprobs");
        td_answer_logprobs(w, a, &a->text[0], r->n_logprobs);
        r->n_logprobs = a->text[0].n_tokens;
    }
    td_json_close(w, '}');
}

static void responses_last(struct td_answer *a, struct td_json_out *w,
                           const struct td_answer_text *t) {
    const char *status = is_cut(t) ? "incomplete" : "completed";
    td_json_out_reset(w);
    close_item(a, w, status);
    size_t from = response_event(w, a, status, NULL);
    if (!w->failed) keep(a, w->p + from, w->n - 1 - from);
}

static bool responses_error(struct td_answer *a, struct td_json_out *w,
                            const struct td_api_error *e) {
    td_json_out_reset(w);
    (void)response_event(w, a, "failed", e);
    return true;
}

const struct td_answer_form td_answer_responses = {.keeps = true,
                                                   .begin = responses_begin,
                                                   .event = responses_event,
                                                   .last = responses_last,
                                                   .document = responses_document,
                                                   .error = responses_error};

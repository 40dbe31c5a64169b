/* Answers as Anthropic's Messages API writes them: content blocks instead of fields, and a stream
 * of named events that opens and closes each block. One choice. */
#include <stdio.h>
#include <string.h>

#include "router/answer.h"
#include "router/api_anthropic.h"
#include "router/json_read.h"

enum { BLOCK_NONE, BLOCK_THINKING, BLOCK_TEXT, BLOCK_TOOL };

/* Starts an event behind what the buffer holds. */
static void event(struct td_json_out *w, const char *type) {
    char head[64];
    if (w->n > 0) td_json_raw(w, "\n\n", 2);
    td_json_raw(w, head, (size_t)snprintf(head, sizeof head, "event: %s\ndata: ", type));
    w->comma = false;
    td_json_open(w, '{');
    td_json_key(w, "type");
    td_json_text(w, type);
}

static void field(struct td_json_out *w, const char *key, const char *value) {
    td_json_key(w, key);
    if (value)
        td_json_text(w, value);
    else
        td_json_null(w);
}

static void call_id(struct td_json_out *w, const struct td_answer *a, uint32_t call) {
    char id[64];
    const char *own = strchr(a->id, '_');
    snprintf(id, sizeof id, "toolu_%s%02x", own ? own + 1 : a->id, call);
    field(w, "id", id);
}

/* `t` NULL: it only begins. */
static void usage(struct td_json_out *w, const struct td_answer *a,
                  const struct td_answer_text *t) {
    td_json_key(w, "usage");
    td_json_open(w, '{');
    td_json_key(w, "input_tokens");
    td_json_u64(w, a->n_prompt);
    td_json_key(w, "output_tokens");
    td_json_u64(w, t ? t->n_sampled : 0);
    if (t && a->params.timings) td_ledger_write(&a->ledger, w);
    td_json_close(w, '}');
}

static void reason(struct td_json_out *w, const struct td_answer_text *t) {
    size_t n = 0;
    const char *matched = NULL, *why = "end_turn";
    if (strcmp(t->finish, "tool_calls") == 0)
        why = "tool_use";
    else if (strcmp(t->finish, "length") == 0)
        why = "max_tokens";
    else
        matched = td_stops_matched(&t->reply.stops, &n);
    field(w, "stop_reason", matched ? "stop_sequence" : why);
    td_json_key(w, "stop_sequence");
    if (matched)
        td_json_str(w, matched, n);
    else
        td_json_null(w);
}

static void message_head(struct td_json_out *w, const struct td_answer *a) {
    field(w, "id", a->id);
    field(w, "type", "message");
    field(w, "role", "assistant");
    field(w, "model", a->model);
}

/* ---- the stream ---- */

static void messages_begin(struct td_answer *a, struct td_json_out *w) {
    td_json_out_reset(w);
    event(w, "message_start");
    td_json_key(w, "message");
    td_json_open(w, '{');
    message_head(w, a);
    td_json_key(w, "content");
    td_json_open(w, '[');
    td_json_close(w, ']');
    field(w, "stop_reason", NULL);
    field(w, "stop_sequence", NULL);
    usage(w, a, NULL);
    td_json_close(w, '}');
    td_json_close(w, '}');
}

static void block_event(struct td_json_out *w, const struct td_answer *a, const char *type) {
    event(w, type);
    td_json_key(w, "index");
    td_json_u64(w, a->n_blocks - 1);
}

static void close_block(struct td_answer *a, struct td_json_out *w) {
    if (a->block == BLOCK_NONE) return;
    block_event(w, a, "content_block_stop");
    td_json_close(w, '}');
    a->block = BLOCK_NONE;
}

static void open_block(struct td_answer *a, struct td_json_out *w, uint8_t kind,
                       const struct td_reply_event *ev) {
    close_block(a, w);
    a->block = kind;
    a->n_blocks++;
    block_event(w, a, "content_block_start");
    td_json_key(w, "content_block");
    td_json_open(w, '{');
    if (kind == BLOCK_THINKING) {
        field(w, "type", "thinking");
        field(w, "thinking", "");
        field(w, "signature", "");
    } else if (kind == BLOCK_TEXT) {
        field(w, "type", "text");
        field(w, "text", "");
    } else {
        field(w, "type", "tool_use");
        call_id(w, a, ev->call);
        td_json_key(w, "name");
        td_json_str(w, ev->text, ev->n);
        td_json_key(w, "input");
        td_json_open(w, '{');
        td_json_close(w, '}');
    }
    td_json_close(w, '}');
    td_json_close(w, '}');
}

static void messages_event(struct td_answer *a, struct td_json_out *w,
                           const struct td_reply_event *ev) {
    static const struct {
        uint8_t block;
        const char *type, *key;
    } kinds[] = {
        [TD_REPLY_REASONING] = {BLOCK_THINKING, "thinking_delta", "thinking"},
        [TD_REPLY_CONTENT] = {BLOCK_TEXT, "text_delta", "text"},
        [TD_REPLY_CALL] = {BLOCK_TOOL, NULL, NULL},
        [TD_REPLY_ARGUMENTS] = {BLOCK_TOOL, "input_json_delta", "partial_json"},
    };
    td_json_out_reset(w);
    if (a->block != kinds[ev->kind].block || ev->kind == TD_REPLY_CALL)
        open_block(a, w, kinds[ev->kind].block, ev);
    if (ev->kind == TD_REPLY_CALL) return;
    block_event(w, a, "content_block_delta");
    td_json_key(w, "delta");
    td_json_open(w, '{');
    field(w, "type", kinds[ev->kind].type);
    td_json_key(w, kinds[ev->kind].key);
    td_json_str(w, ev->text, ev->n);
    td_json_close(w, '}');
    td_json_close(w, '}');
}

static void messages_last(struct td_answer *a, struct td_json_out *w,
                          const struct td_answer_text *t) {
    td_json_out_reset(w);
    close_block(a, w);
    event(w, "message_delta");
    td_json_key(w, "delta");
    td_json_open(w, '{');
    reason(w, t);
    td_json_close(w, '}');
    usage(w, a, t);
    td_json_close(w, '}');
    event(w, "message_stop");
    td_json_close(w, '}');
}

static bool messages_error(struct td_answer *a, struct td_json_out *w,
                           const struct td_api_error *e) {
    (void)a;
    td_json_out_reset(w);
    td_json_raw(w, "event: error\ndata: ", 19);
    td_api_anthropic_error(w, e);
    return false;
}

/* ---- the whole ---- */

static void text_block(struct td_json_out *w, const char *type, const struct td_json_out *text) {
    td_json_open(w, '{');
    field(w, "type", type);
    td_json_key(w, type);
    td_json_str(w, text->p, text->n);
    if (strcmp(type, "thinking") == 0) field(w, "signature", "");
    td_json_close(w, '}');
}

static void tool_block(struct td_json_out *w, const struct td_answer *a,
                       const struct td_answer_text *t, uint32_t i) {
    td_json_open(w, '{');
    field(w, "type", "tool_use");
    call_id(w, a, i);
    td_json_key(w, "name");
    td_json_str(w, t->calls[i].name.p, t->calls[i].name.n);
    td_json_key(w, "input");
    /* What was cut, or written raw and wrong, is no JSON: the client gets it as text. */
    const struct td_json_out *arguments = &t->calls[i].arguments;
    json_t *v = NULL;
    if (td_json_read(arguments->p, arguments->n, TD_JSON_LOOSE, &v, NULL) == TD_OK) {
        td_json_value(w, arguments->p, arguments->n);
    } else {
        td_json_open(w, '{');
        td_json_key(w, "arguments");
        td_json_str(w, arguments->p, arguments->n);
        td_json_close(w, '}');
    }
    json_decref(v);
    td_json_close(w, '}');
}

static void messages_document(struct td_answer *a, struct td_json_out *w,
                              const struct td_answer_text *t) {
    td_json_out_reset(w);
    td_json_open(w, '{');
    message_head(w, a);
    td_json_key(w, "content");
    td_json_open(w, '[');
    if (t->reasoning.n) text_block(w, "thinking", &t->reasoning);
    if (t->content.n) text_block(w, "text", &t->content);
    for (uint32_t i = 0; i < t->n_calls; i++)
        tool_block(w, a, t, i);
    td_json_close(w, ']');
    reason(w, t);
    usage(w, a, t);
    td_json_close(w, '}');
}

const struct td_answer_form td_answer_messages = {.begin = messages_begin,
                                                  .event = messages_event,
                                                  .last = messages_last,
                                                  .document = messages_document,
                                                  .error = messages_error};

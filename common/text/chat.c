/* The conversation layout of DeepSeek-V4's first release. A prompt is built from segments: marks,
 * which are ids, and text between them. BPE must see each stretch of text in one piece, whatever
 * messages it came from, so text is collected until the next mark. */
#include "common/text/chat.h"

#include <stdlib.h>
#include <string.h>

static const char max_effort_text[] =
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n";

/* Text since the last mark: borrowed while it is one stretch, copied once it is several. */
struct builder {
    const struct td_chat *c;
    struct td_ids *out;
    struct td_error *err;
    const char *text;
    size_t n;
    char *joined; /* [cap] owned */
    size_t cap;
};

static td_status add_text(struct builder *b, const char *text, size_t n) {
    if (n == 0) return TD_OK;
    if (b->n == 0) {
        b->text = text;
        b->n = n;
        return TD_OK;
    }
    if (n > TD_TEXT_BYTES_MAX || b->n > TD_TEXT_BYTES_MAX - n) {
        return td_fail(b->err, TD_TOO_LONG, "prompt: expected at most %zu bytes of text",
                       TD_TEXT_BYTES_MAX);
    }
    bool borrowed = b->text != b->joined;
    if (b->n + n > b->cap) {
        size_t cap = 2 * (b->n + n);
        char *p = realloc(b->joined, cap);
        if (!p) return td_fail(b->err, TD_NO_MEMORY, "prompt: no memory for %zu bytes", cap);
        b->joined = p;
        b->cap = cap;
    }
    if (borrowed) memcpy(b->joined, b->text, b->n);
    memcpy(b->joined + b->n, text, n);
    b->text = b->joined;
    b->n += n;
    return TD_OK;
}

static td_status flush_text(struct builder *b) {
    size_t n = b->n;
    b->n = 0;
    return n ? td_tokenizer_encode(b->c->t, b->text, n, b->out, b->err) : TD_OK;
}

static td_status add_mark(struct builder *b, int32_t id, const char *name) {
    if (id < 0) {
        return td_fail(b->err, TD_UNSUPPORTED,
                       "prompt: expected the checkpoint's tokenizer to have a token %s, found none",
                       name);
    }
    TD_TRY(flush_text(b));
    td_status st = td_ids_push(b->out, id);
    return st == TD_OK ? TD_OK : td_fail(b->err, st, "prompt: no memory for its ids");
}

#define NAME_BOS "<｜begin▁of▁sentence｜>"
#define NAME_EOS "<｜end▁of▁sentence｜>"
#define NAME_USER "<｜User｜>"
#define NAME_ASSISTANT "<｜Assistant｜>"
#define NAME_THINK "<think>"
#define NAME_THINK_END "</think>"

void td_chat_init(struct td_chat *c, const struct td_tokenizer *t) {
    *c = (struct td_chat){
        .t = t,
        .bos = td_tokenizer_added(t, NAME_BOS),
        .eos = td_tokenizer_added(t, NAME_EOS),
        .user = td_tokenizer_added(t, NAME_USER),
        .assistant = td_tokenizer_added(t, NAME_ASSISTANT),
        .think = td_tokenizer_added(t, NAME_THINK),
        .think_end = td_tokenizer_added(t, NAME_THINK_END),
    };
}

static td_status add_head(struct builder *b, bool think) {
    TD_TRY(add_mark(b, b->c->assistant, NAME_ASSISTANT));
    return think ? add_mark(b, b->c->think, NAME_THINK)
                 : add_mark(b, b->c->think_end, NAME_THINK_END);
}

/* The user turn of messages[i..*ret_end), and the head of the answer if one follows. */
static td_status add_user(struct builder *b, const struct td_chat_message *m, size_t i, size_t n,
                          bool think, size_t *ret_end) {
    TD_TRY(add_mark(b, b->c->user, NAME_USER));
    TD_TRY(add_text(b, m[i].content, m[i].content_n));
    for (i++; i < n && m[i].role == TD_CHAT_USER; i++) {
        TD_TRY(add_text(b, "\n\n", 2));
        TD_TRY(add_text(b, m[i].content, m[i].content_n));
    }
    *ret_end = i;
    return i == n || m[i].role == TD_CHAT_ASSISTANT ? add_head(b, think) : TD_OK;
}

static td_status add_assistant(struct builder *b, const struct td_chat_message *m, bool reasoning) {
    if (reasoning) {
        TD_TRY(add_text(b, m->reasoning, m->reasoning_n));
        TD_TRY(add_mark(b, b->c->think_end, NAME_THINK_END));
    }
    TD_TRY(add_text(b, m->content, m->content_n));
    return add_mark(b, b->c->eos, NAME_EOS);
}

static td_status build(struct builder *b, const struct td_chat_params *p,
                       const struct td_chat_message *m, size_t n) {
    size_t after_last_user = 0; /* messages from here on lie after the last user message */
    for (size_t i = 0; i < n; i++) {
        if (m[i].role == TD_CHAT_USER) after_last_user = i + 1;
    }
    TD_TRY(add_mark(b, b->c->bos, NAME_BOS));
    if (p->thinking && p->max_effort) {
        TD_TRY(add_text(b, max_effort_text, sizeof max_effort_text - 1));
    }
    for (size_t i = 0, end; i < n; i = end) {
        end = i + 1;
        switch (m[i].role) {
        case TD_CHAT_SYSTEM:
            TD_TRY(add_text(b, m[i].content, m[i].content_n));
            break;
        case TD_CHAT_USER: {
            while (end < n && m[end].role == TD_CHAT_USER) {
                end++;
            }
            bool think = p->thinking && (p->keep_reasoning || end >= after_last_user);
            TD_TRY(add_user(b, m, i, n, think, &end));
            break;
        }
        case TD_CHAT_ASSISTANT:
            TD_TRY(add_assistant(b, &m[i],
                                 p->thinking && (p->keep_reasoning || i >= after_last_user)));
            break;
        default:
            return td_fail(b->err, TD_INVALID, "message %zu: expected a role of 0..2, found %d", i,
                           (int)m[i].role);
        }
    }
    return flush_text(b);
}

td_status td_chat_encode(const struct td_chat *c, const struct td_chat_params *p,
                         const struct td_chat_message *messages, size_t n, struct td_ids *out,
                         struct td_error *err) {
    if (n == 0) {
        return td_fail(err, TD_INVALID, "messages: expected at least one, found none");
    }
    size_t before = out->n;
    struct builder b = {.c = c, .out = out, .err = err};
    td_status st = build(&b, p, messages, n);
    free(b.joined);
    if (st != TD_OK) out->n = before;
    return st;
}

bool td_chat_opens_reasoning(const struct td_chat *c, const struct td_ids *prompt) {
    return prompt->n && c->think >= 0 && prompt->ids[prompt->n - 1] == c->think;
}

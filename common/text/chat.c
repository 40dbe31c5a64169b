/* The conversation layout of DeepSeek-V4's first release: one turn after the other. */
#include "common/text/chat.h"

#include <string.h>

#include "common/text/chat_parts.h"

void td_chat_init(struct td_chat *c, const struct td_tokenizer *t) {
    *c = (struct td_chat){
        .t = t,
        .bos = td_tokenizer_added(t, TD_NAME_BOS),
        .eos = td_tokenizer_added(t, TD_NAME_EOS),
        .user = td_tokenizer_added(t, TD_NAME_USER),
        .assistant = td_tokenizer_added(t, TD_NAME_ASSISTANT),
        .think = td_tokenizer_added(t, TD_NAME_THINK),
        .think_end = td_tokenizer_added(t, TD_NAME_THINK_END),
        .dsml = td_tokenizer_added(t, TD_NAME_DSML),
        .reminder = td_tokenizer_added(t, TD_NAME_REMINDER),
    };
}

/* Whether the answer to turn i, or turn i itself if it is an answer, shows its reasoning. */
static bool reasons(const struct td_chat_params *p, const struct td_chat_turns *t, size_t i) {
    if (!p->thinking) return false;
    return !t->drop || t->last_user == SIZE_MAX || i >= t->last_user;
}

/* The head of an answer stands behind a question when an answer follows or is to be made. */
static td_status add_head(struct td_chat_build *b, const struct td_chat_params *p,
                          const struct td_chat_turns *t, size_t i) {
    if (i + 1 < t->n && t->turns[i + 1].role != TD_CHAT_ASSISTANT &&
        t->turns[i + 1].role != TD_CHAT_REMINDER) {
        return TD_OK;
    }
    TD_TRY(td_chat_add_mark(b, b->c->assistant, TD_NAME_ASSISTANT));
    return reasons(p, t, i) ? td_chat_add_mark(b, b->c->think, TD_NAME_THINK)
                            : td_chat_add_mark(b, b->c->think_end, TD_NAME_THINK_END);
}

static td_status add_user(struct td_chat_build *b, const struct td_chat_turns *t,
                          const struct td_chat_turn *turn, const struct td_chat_message *m) {
    TD_TRY(td_chat_add_mark(b, b->c->user, TD_NAME_USER));
    for (size_t i = turn->at; i < turn->at + turn->n; i++) {
        const struct td_chat_message *one = &m[t->order[i]];
        bool result = one->role == TD_CHAT_TOOL;
        if (i > turn->at) TD_TRY(td_chat_add_text(b, "\n\n", 2));
        if (result) TD_TRY(td_chat_add_own(b, "<tool_result>"));
        TD_TRY(td_chat_add_text(b, one->content, one->content_n));
        if (result) TD_TRY(td_chat_add_own(b, "</tool_result>"));
    }
    return TD_OK;
}

static td_status add_developer(struct td_chat_build *b, const struct td_chat_message *m) {
    TD_TRY(td_chat_add_mark(b, b->c->user, TD_NAME_USER));
    TD_TRY(td_chat_add_text(b, m->content, m->content_n));
    return td_chat_add_blocks(b, m);
}

static td_status add_assistant(struct td_chat_build *b, const struct td_chat_message *m,
                               bool reasoning) {
    if (reasoning) {
        TD_TRY(td_chat_add_text(b, m->reasoning, m->reasoning_n));
        TD_TRY(td_chat_add_mark(b, b->c->think_end, TD_NAME_THINK_END));
    }
    TD_TRY(td_chat_add_text(b, m->content, m->content_n));
    TD_TRY(td_chat_add_calls(b, m));
    return td_chat_add_mark(b, b->c->eos, TD_NAME_EOS);
}

static td_status add_reminder(struct td_chat_build *b, const struct td_chat_message *m) {
    if (b->c->reminder >= 0)
        TD_TRY(td_chat_add_mark(b, b->c->reminder, TD_NAME_REMINDER));
    else
        TD_TRY(td_chat_add_own(b, TD_NAME_REMINDER));
    return td_chat_add_text(b, m->content, m->content_n);
}

static td_status add_turn(struct td_chat_build *b, const struct td_chat_params *p,
                          const struct td_chat_turns *t, size_t i,
                          const struct td_chat_message *m) {
    const struct td_chat_turn *turn = &t->turns[i];
    const struct td_chat_message *first = &m[turn->at];
    switch (turn->role) {
    case TD_CHAT_SYSTEM:
        TD_TRY(td_chat_add_text(b, first->content, first->content_n));
        return td_chat_add_blocks(b, first);
    case TD_CHAT_USER:
        TD_TRY(add_user(b, t, turn, m));
        return add_head(b, p, t, i);
    case TD_CHAT_DEVELOPER:
        TD_TRY(add_developer(b, first));
        return add_head(b, p, t, i);
    case TD_CHAT_ASSISTANT:
        return add_assistant(b, first, reasons(p, t, i));
    default:
        return add_reminder(b, first);
    }
}

static td_status build(struct td_chat_build *b, const struct td_chat_params *p,
                       const struct td_chat_message *m, size_t n) {
    struct td_chat_turns t;
    TD_TRY(td_chat_turns_make(p, m, n, &t, b->err));
    td_status st;
    TD_TRY_GOTO(td_chat_add_mark(b, b->c->bos, TD_NAME_BOS), free_turns);
    if (p->thinking) {
        TD_TRY_GOTO(td_chat_add_own(b, td_chat_effort_text(p->efforts, p->effort)), free_turns);
    }
    for (size_t i = 0; i < t.n; i++) {
        TD_TRY_GOTO(add_turn(b, p, &t, i, m), free_turns);
    }
    st = td_chat_flush(b);
free_turns:
    td_chat_turns_free(&t);
    return st;
}

td_status td_chat_encode(const struct td_chat *c, const struct td_chat_params *p,
                         const struct td_chat_message *messages, size_t n, struct td_ids *out,
                         struct td_error *err) {
    if (n == 0) {
        return td_fail(err, TD_INVALID, "messages: expected at least one, found none");
    }
    size_t before = out->n;
    struct td_chat_build b = {.c = c, .out = out, .err = err};
    td_status st = build(&b, p, messages, n);
    td_bytes_free(&b.joined);
    td_bytes_free(&b.scratch);
    if (st != TD_OK) out->n = before;
    return st;
}

bool td_chat_opens_reasoning(const struct td_chat *c, const struct td_ids *prompt) {
    return prompt->n && c->think >= 0 && prompt->ids[prompt->n - 1] == c->think;
}

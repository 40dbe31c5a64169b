/* What the files of the chat encoder share: the prompt being built, and the turns it is built
 * from. Included by chat*.c alone. */
#ifndef TD_COMMON_TEXT_CHAT_PARTS_H
#define TD_COMMON_TEXT_CHAT_PARTS_H

#include "common/text/bytes.h"
#include "common/text/chat.h"

#define TD_NAME_BOS "<｜begin▁of▁sentence｜>"
#define TD_NAME_EOS "<｜end▁of▁sentence｜>"
#define TD_NAME_USER "<｜User｜>"
#define TD_NAME_ASSISTANT "<｜Assistant｜>"
#define TD_NAME_THINK "<think>"
#define TD_NAME_THINK_END "</think>"
#define TD_NAME_DSML "｜DSML｜"
#define TD_NAME_REMINDER "<｜latest_reminder｜>"

/* ---- chat_build.c: a prompt is marks, which are ids, and text between them. BPE must see each
 * stretch of text in one piece, whatever it came from, so text is collected until the next mark */

struct td_chat_build {
    const struct td_chat *c;
    struct td_ids *out;
    struct td_error *err;
    const char *text; /* since the last mark: borrowed while it is one stretch, then in `joined` */
    size_t n;
    struct td_bytes joined;
    struct td_bytes scratch; /* for JSON before it is added */
};

/* `text` must live until the next mark is added. */
TD_MUST_USE td_status td_chat_add_text(struct td_chat_build *b, const char *text, size_t n);
/* The same for text that will not. */
TD_MUST_USE td_status td_chat_add_copy(struct td_chat_build *b, const char *text, size_t n);
/* TD_UNSUPPORTED when there is no such mark. */
TD_MUST_USE td_status td_chat_add_mark(struct td_chat_build *b, int32_t id, const char *name);
/* The server's own text: the names of <think>, </think> and the DSML mark in it are those marks
 * where the checkpoint has them. `text` is a constant. */
TD_MUST_USE td_status td_chat_add_own(struct td_chat_build *b, const char *text);
TD_MUST_USE td_status td_chat_flush(struct td_chat_build *b);

/* ---- chat_tools.c ---- */

/* The blocks behind a system's or developer's content. */
TD_MUST_USE td_status td_chat_add_blocks(struct td_chat_build *b, const struct td_chat_message *m);
/* The calls behind an assistant's content. */
TD_MUST_USE td_status td_chat_add_calls(struct td_chat_build *b, const struct td_chat_message *m);

/* ---- chat_effort.c ---- */

/* Text between begin-of-text and the first message; "" if none. */
const char *td_chat_effort_text(enum td_chat_effort_table table, enum td_chat_effort effort);

/* ---- chat_turns.c ---- */

/* One turn: messages[at .. at + n). n > 1 for user turns alone, whose messages are the user's and
 * results of tools. */
struct td_chat_turn {
    enum td_chat_role role; /* a TOOL message is in a USER turn */
    size_t at, n;
};

struct td_chat_turns {
    struct td_chat_turn *turns; /* [n] */
    size_t n;
    size_t last_user; /* turn of the last user or developer; SIZE_MAX: none */
    size_t *order;    /* [messages] which message's text stands at a place: results sorted by the
                       * calls they answer, all else where it was */
    bool drop;        /* reasoning before the last user turn is left out */
};

/* Merges, sorts and drops. */
TD_MUST_USE td_status td_chat_turns_make(const struct td_chat_params *p,
                                         const struct td_chat_message *m, size_t n,
                                         struct td_chat_turns *ret, struct td_error *err);
void td_chat_turns_free(struct td_chat_turns *t);

#endif

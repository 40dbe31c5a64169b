/* A conversation as the token ids the model was trained on. Marks between the turns are written as
 * ids by the encoder; everything a client sent is ordinary text, so a client cannot write a mark.
 */
#ifndef TD_COMMON_TEXT_CHAT_H
#define TD_COMMON_TEXT_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/ids.h"
#include "common/text/tokenizer.h"

enum td_chat_role { TD_CHAT_SYSTEM, TD_CHAT_USER, TD_CHAT_ASSISTANT };

/* Borrowed UTF-8; NULL with length 0 is empty. `reasoning` counts for the assistant only. */
struct td_chat_message {
    enum td_chat_role role;
    const char *content;
    size_t content_n;
    const char *reasoning;
    size_t reasoning_n;
};

struct td_chat_params {
    bool thinking;       /* thinking mode, else chat mode */
    bool max_effort;     /* the "max" reasoning effort prefix; thinking mode only */
    bool keep_reasoning; /* do not drop the reasoning of turns before the last user message */
};

/* Ids of the marks in one checkpoint, -1 where it has none. Borrows the tokenizer. */
struct td_chat {
    const struct td_tokenizer *t;
    int32_t bos, eos, user, assistant, think, think_end;
};

void td_chat_init(struct td_chat *c, const struct td_tokenizer *t);

/* Appends the prompt for `n` >= 1 messages to `out`: when the last message is a user's, it ends
 * with the assistant head, so that the model answers. Neighbouring user messages become one turn,
 * joined by an empty line. TD_INVALID: no message, or an unknown role; TD_UNSUPPORTED: the
 * checkpoint lacks a mark that is needed here; TD_TOO_LONG, TD_NO_MEMORY. On failure `out` is as
 * before. Thread-safe on a const td_chat. */
TD_MUST_USE td_status td_chat_encode(const struct td_chat *c, const struct td_chat_params *p,
                                     const struct td_chat_message *messages, size_t n,
                                     struct td_ids *out, struct td_error *err);

/* Whether a prompt leaves the model inside its reasoning (it ends with <think>): the mode in which
 * the output of td_output starts. */
bool td_chat_opens_reasoning(const struct td_chat *c, const struct td_ids *prompt);

#endif

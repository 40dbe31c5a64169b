/* A conversation as the token ids the model was trained on. Marks between the turns are written as
 * ids by the encoder; everything a client sent is ordinary text, so a client cannot write a mark.
 * A mark that a checkpoint does not have among its added tokens is ordinary text, except the six
 * without which there is no conversation (begin and end of text, the two roles, <think>, </think>).
 */
#ifndef TD_COMMON_TEXT_CHAT_H
#define TD_COMMON_TEXT_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/ids.h"
#include "common/text/tokenizer.h"

/* A DEVELOPER is a user whose message may carry tools; a TOOL message is the result of a call;
 * a REMINDER is the service's own note to the model. */
enum td_chat_role {
    TD_CHAT_SYSTEM,
    TD_CHAT_USER,
    TD_CHAT_ASSISTANT,
    TD_CHAT_DEVELOPER,
    TD_CHAT_TOOL,
    TD_CHAT_REMINDER,
};

/* Borrowed UTF-8; NULL with length 0 is empty. */
struct td_chat_text {
    const char *p;
    size_t n;
};

/* A call the assistant made. `arguments` is JSON text; what is not a JSON object is passed on as
 * one string parameter "arguments". */
struct td_chat_call {
    struct td_chat_text id, name, arguments;
};

/* Borrowed UTF-8; NULL with length 0 is empty. What does not belong to a message's role is not
 * looked at. */
struct td_chat_message {
    enum td_chat_role role;
    const char *content;
    size_t content_n;
    const char *reasoning; /* assistant */
    size_t reasoning_n;
    const struct td_chat_call *calls; /* assistant: [n_calls] */
    size_t n_calls;
    struct td_chat_text call_id;      /* tool: the call it answers */
    const struct td_chat_text *tools; /* system, developer: [n_tools] JSON of each function */
    size_t n_tools;
    struct td_chat_text response_format; /* system, developer: JSON, empty: none */
};

enum td_chat_effort { TD_EFFORT_DEFAULT, TD_EFFORT_LOW, TD_EFFORT_HIGH, TD_EFFORT_MAX };

/* What the efforts mean, by revision of the checkpoint. */
enum td_chat_effort_table {
    TD_EFFORTS_APRIL, /* first release: a prefix for MAX alone */
    TD_EFFORTS_0731,  /* refreshed weights: prefixes for HIGH and MAX */
};

struct td_chat_params {
    bool thinking;       /* thinking mode, else chat mode */
    bool keep_reasoning; /* do not drop the reasoning of turns before the last user message; so it
                          * is anyway when a message carries tools */
    enum td_chat_effort effort; /* thinking mode only */
    enum td_chat_effort_table efforts;
};

/* Ids of the marks in one checkpoint, -1 where it has none. Borrows the tokenizer. */
struct td_chat {
    const struct td_tokenizer *t;
    int32_t bos, eos, user, assistant, think, think_end, dsml, reminder;
};

void td_chat_init(struct td_chat *c, const struct td_tokenizer *t);

/* Appends the prompt for `n` >= 1 messages to `out`: when the last message is a user's, a
 * developer's or a tool's, it ends with the assistant head, so that the model answers. Neighbouring
 * user and tool messages become one turn, joined by an empty line, results in the order of the
 * calls they answer. TD_INVALID: no message, an unknown role, a developer without content, tools
 * or a response format that are not JSON; TD_UNSUPPORTED: the checkpoint lacks a mark that is
 * needed here; TD_TOO_LONG, TD_NO_MEMORY. On failure `out` is as before. Thread-safe on a const
 * td_chat. */
TD_MUST_USE td_status td_chat_encode(const struct td_chat *c, const struct td_chat_params *p,
                                     const struct td_chat_message *messages, size_t n,
                                     struct td_ids *out, struct td_error *err);

/* Whether a prompt leaves the model inside its reasoning (it ends with <think>): the mode in which
 * its answer starts. */
bool td_chat_opens_reasoning(const struct td_chat *c, const struct td_ids *prompt);

#endif

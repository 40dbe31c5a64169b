/* A conversation from a request's JSON to what the chat encoder takes: messages of all roles, their
 * tool calls and results, the declared tools. What cannot be said to the model is refused by name.
 *
 * Roles. `developer` is read as `system`, as the OpenAI API means it: instructions that must not be
 * dropped. (The model's own developer turn belongs to its makers' search and drops them.) */
#ifndef TD_ROUTER_API_MESSAGES_H
#define TD_ROUTER_API_MESSAGES_H

#include "common/text/chat.h"
#include "router/api_params.h"

/* Text is borrowed from the JSON or held in `owned`. */
struct td_api_chat {
    struct td_chat_message *m; /* [n] */
    size_t n;
    void **owned; /* [n_owned] */
    size_t n_owned, cap_owned;
};

/* `messages`, and `tools` unless p->calls says that there are none. 400 by name. Free the result
 * whatever happened. */
TD_MUST_USE td_status td_api_chat_read(const json_t *root, const struct td_api_params *p,
                                       struct td_api_chat *ret, struct td_api_error *e);
void td_api_chat_free(struct td_api_chat *c);

/* `tools`, `tool_choice` and `parallel_tool_calls`: whether calls may or must come. 400 for what is
 * malformed. */
TD_MUST_USE td_status td_api_tools_check(const struct td_fields *f, struct td_api_params *p);

/* Memory that lives as long as `c`; NULL: refused with 503. */
void *td_api_chat_own(struct td_api_chat *c, void *p, struct td_api_error *e);
/* JSON texts of the tools' functions. */
TD_MUST_USE td_status td_api_tools_read(const struct td_fields *f, struct td_api_chat *c,
                                        const struct td_chat_text **ret, size_t *ret_n);

#endif

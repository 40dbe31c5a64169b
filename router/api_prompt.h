/* From a request's JSON to the prompt's token ids. Runs in the thread pool: touches nothing but
 * its arguments. What a client wrote is ordinary text; the marks around it are the server's. */
#ifndef TD_ROUTER_API_PROMPT_H
#define TD_ROUTER_API_PROMPT_H

#include "common/text/chat.h"
#include "router/api_params.h"

/* `messages` and `tools` of /v1/chat/completions (api_messages.h). Errors are
 * refused with 400 by name, what the server lacks with 500. */
TD_MUST_USE td_status td_api_chat_prompt(const json_t *root, const struct td_api_params *p,
                                         const struct td_chat *chat, struct td_ids *out,
                                         struct td_api_error *e);

/* `prompt` of /v1/completions: a string (the server puts the begin-of-text mark before it), or
 * token ids, which are taken as they are. Several prompts in one request are refused. */
TD_MUST_USE td_status td_api_completions_prompt(const json_t *root, const struct td_chat *chat,
                                                struct td_ids *out, struct td_api_error *e);

#endif

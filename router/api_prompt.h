/* From a request's JSON to the prompt's token ids. Runs in the thread pool: touches nothing but
 * its arguments. What a client wrote is ordinary text; the marks around it are the server's. */
#ifndef TD_ROUTER_API_PROMPT_H
#define TD_ROUTER_API_PROMPT_H

#include "common/text/chat.h"
#include "router/api_guide.h"
#include "router/api_params.h"

/* `messages` and `tools` of /v1/chat/completions (api_messages.h). Errors are
 * refused with 400 by name, what the server lacks with 500. */
TD_MUST_USE td_status td_api_chat_prompt(const json_t *root, const struct td_api_params *p,
                                         const struct td_chat *chat, struct td_ids *out,
                                         struct td_api_error *e);

enum { TD_PROMPTS_MAX = 128 }; /* of one request */

/* The prompts of one request. */
struct td_prompt {
    struct td_ids ids;
    struct td_api_guide guide;
    struct td_sampling sampling; /* with its own seed and guide */
    uint32_t max_new;            /* its own output limit, filled in by the request's checks */
};
struct td_prompts {
    struct td_prompt *p; /* [n] */
    uint32_t n;
    struct td_bytes grammar; /* of the answers to all; empty: none */
};

void td_prompts_free(struct td_prompts *p);
/* Adds an empty one; NULL: out of memory, and said so. */
struct td_ids *td_prompts_add(struct td_prompts *p, struct td_api_error *e);
/* Tokens of all. */
uint64_t td_prompts_tokens(const struct td_prompts *p);

/* `prompt` of /v1/completions: a string (the server puts the begin-of-text mark before it), or
 * token ids, which are taken as they are; or up to TD_PROMPTS_MAX of either. */
TD_MUST_USE td_status td_api_completions_prompts(const json_t *root, const struct td_chat *chat,
                                                 struct td_prompts *out, struct td_api_error *e);

#endif

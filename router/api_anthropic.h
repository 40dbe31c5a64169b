/* Anthropic's Messages API on the same machinery: a request's JSON becomes that of a chat request,
 * so that there is one reading of conversations, tools and limits. What has no counterpart is
 * refused by its own name. Answers: answer_messages.c. */
#ifndef TD_ROUTER_API_ANTHROPIC_H
#define TD_ROUTER_API_ANTHROPIC_H

#include "router/json_request.h"

/* The chat request that says the same; the caller releases it. `counting`: of count_tokens, which
 * has no max_tokens. 400 by name, 503 without memory. */
TD_MUST_USE td_status td_api_anthropic_read(const json_t *root, bool counting, json_t **ret,
                                            struct td_api_error *e);

/* The error as this API writes it. */
void td_api_anthropic_error(struct td_json_out *w, const struct td_api_error *e);
/* The whole answer, as td_api_error_reply. */
void td_api_anthropic_error_reply(struct td_http_conn *c, const struct td_api_error *e,
                                  struct td_json_out *scratch);

#endif

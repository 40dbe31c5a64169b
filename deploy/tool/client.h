/* What the tools ask a running cluster over HTTP: GET, POST, one streamed chat completion. */
#ifndef TD_DEPLOY_TOOL_CLIENT_H
#define TD_DEPLOY_TOOL_CLIENT_H

#include <jansson.h>
#include <stdint.h>

#include "common/base/status.h"

/* GET url+path; *ret is the parsed JSON body (json_decref), *ret_http the HTTP status, both also
 * when that is an error status. TD_UNREACHABLE when nobody answers within `timeout_ms`; TD_FORMAT
 * when the body is not JSON. */
TD_MUST_USE td_status td_client_get(const char *url, const char *path, long timeout_ms,
                                    json_t **ret, long *ret_http, struct td_error *err);

/* POST of a JSON text; else as td_client_get. */
TD_MUST_USE td_status td_client_post(const char *url, const char *path, const char *json,
                                     long timeout_ms, json_t **ret, long *ret_http,
                                     struct td_error *err);
/* The message of an API error, or "HTTP <status>"; `buf` holds it. */
const char *td_client_message(const json_t *body, long http, char buf[300]);

/* The API key in `path` (the file's only line, mode 0600) goes with every request from now on. */
TD_MUST_USE td_status td_client_use_key(const char *path, struct td_error *err);

struct td_client_answer {
    char text[4096]; /* content, cut when longer */
    char finish[32]; /* finish_reason */
    uint32_t prompt_tokens, completion_tokens;
    double first_s, total_s; /* from sending to the first content and to the end */
};

enum { TD_CLIENT_MODEL_MAX = 256 };

/* Name of the first model the endpoint lists. */
TD_MUST_USE td_status td_client_model(const char *url, char ret[TD_CLIENT_MODEL_MAX],
                                      struct td_error *err);

/* Sends one user message, temperature 0, chat mode, streamed. An HTTP error status or an error
 * frame becomes the server's own sentence. */
TD_MUST_USE td_status td_client_chat(const char *url, const char *model, const char *user_text,
                                     uint32_t max_tokens, struct td_client_answer *ret,
                                     struct td_error *err);

#endif

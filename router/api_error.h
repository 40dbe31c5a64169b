/* Errors as OpenAI clients know them: a status and
 * {"error":{"message","type","param","code"}}. */
#ifndef TD_ROUTER_API_ERROR_H
#define TD_ROUTER_API_ERROR_H

#include <stdint.h>

#include "common/base/status.h"
#include "router/http_server.h"
#include "router/json_write.h"

struct td_api_error {
    int status; /* HTTP; 0: no error yet */
    char message[512];
    char param[96];         /* "" : null */
    char code[48];          /* "" : null */
    uint32_t retry_after_s; /* 0: no Retry-After */
};

/* Fills *e and returns TD_INVALID, so that refusing is one line. `code`, `param` may be NULL. */
td_status td_api_refuse(struct td_api_error *e, int status, const char *code, const char *param,
                        const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* 503 "out of memory". */
td_status td_api_no_memory(struct td_api_error *e);

/* {"error":{...}} as a JSON value. */
void td_api_error_write(struct td_json_out *w, const struct td_api_error *e);
/* The whole answer; `scratch` holds the error as it shall be written. */
void td_api_error_send(struct td_http_conn *c, const struct td_api_error *e,
                       const struct td_json_out *scratch);
/* The same in the form above; `scratch` is overwritten. */
void td_api_error_reply(struct td_http_conn *c, const struct td_api_error *e,
                        struct td_json_out *scratch);

#endif

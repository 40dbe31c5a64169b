/* See api_error.h. */
#include "router/api_error.h"

#include <stdarg.h>
#include <stdio.h>

td_status td_api_refuse(struct td_api_error *e, int status, const char *code, const char *param,
                        const char *fmt, ...) {
    va_list ap;
    *e = (struct td_api_error){.status = status};
    va_start(ap, fmt);
    vsnprintf(e->message, sizeof e->message, fmt, ap);
    va_end(ap);
    if (param) snprintf(e->param, sizeof e->param, "%s", param);
    if (code) snprintf(e->code, sizeof e->code, "%s", code);
    return TD_INVALID;
}

td_status td_api_no_memory(struct td_api_error *e) {
    return td_api_refuse(e, 503, NULL, NULL, "out of memory");
}

static const char *type_of(int status) {
    if (status == 401) return "authentication_error";
    if (status == 403) return "permission_error";
    if (status == 429) return "rate_limit_error";
    return status >= 500 ? "server_error" : "invalid_request_error";
}

void td_api_error_write(struct td_json_out *w, const struct td_api_error *e) {
    td_json_open(w, '{');
    td_json_key(w, "error");
    td_json_open(w, '{');
    td_json_key(w, "message");
    td_json_text(w, e->message);
    td_json_key(w, "type");
    td_json_text(w, type_of(e->status));
    td_json_key(w, "param");
    if (e->param[0])
        td_json_text(w, e->param);
    else
        td_json_null(w);
    td_json_key(w, "code");
    if (e->code[0])
        td_json_text(w, e->code);
    else
        td_json_null(w);
    td_json_close(w, '}');
    td_json_close(w, '}');
}

void td_api_error_send(struct td_http_conn *c, const struct td_api_error *e,
                       const struct td_json_out *scratch) {
    if (e->retry_after_s) {
        char s[16];
        snprintf(s, sizeof s, "%u", e->retry_after_s);
        td_http_add_header(c, "Retry-After", s);
    }
    td_http_reply(c, e->status, "application/json", scratch->p, scratch->failed ? 0 : scratch->n);
}

void td_api_error_reply(struct td_http_conn *c, const struct td_api_error *e,
                        struct td_json_out *scratch) {
    td_json_out_reset(scratch);
    td_api_error_write(scratch, e);
    td_api_error_send(c, e, scratch);
}

/* See sse.h. */
#include "router/sse.h"

void td_sse_open(struct td_json_out *w) {
    td_json_out_reset(w);
    td_json_raw(w, "data: ", 6);
}

td_status td_sse_send(struct td_http_conn *c, struct td_json_out *w) {
    td_json_raw(w, "\n\n", 2);
    if (w->failed) return TD_NO_MEMORY;
    td_http_write(c, w->p, w->n);
    return TD_OK;
}

void td_sse_keep_alive(struct td_http_conn *c) {
    td_http_write(c, ": keep-alive\n\n", 14);
}

void td_sse_done(struct td_http_conn *c) {
    td_http_write(c, "data: [DONE]\n\n", 14);
}

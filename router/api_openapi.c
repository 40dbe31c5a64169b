/* GET /openapi.json: what the endpoints take and answer (OpenAPI 3.1), written in openapi.json and
 * held against the running router by its tests. */
#include "router/serve_parts.h"

extern const char td_openapi[]; /* the file, made an array when the router is built */
extern const size_t td_openapi_n;

void td_api_openapi(struct td_serve *s, struct td_http_conn *c) {
    td_json_out_reset(&s->scratch);
    td_json_raw(&s->scratch, td_openapi, td_openapi_n);
    td_api_send(s, c, 200, "application/json");
}

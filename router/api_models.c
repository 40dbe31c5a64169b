/* GET /v1/models and /v1/models/NAME. */
#include <string.h>

#include "router/serve_parts.h"

static void write_model(struct td_json_out *w, const struct td_serve *s) {
    td_json_open(w, '{');
    td_json_key(w, "id");
    td_json_text(w, s->model);
    td_json_key(w, "object");
    td_json_text(w, "model");
    td_json_key(w, "created");
    td_json_i64(w, s->started_wall_s);
    td_json_key(w, "owned_by");
    td_json_text(w, "tandem");
    uint32_t limit =
        s->flow ? td_fleet_limit(td_flow_fleet(s->flow), s->config->router_colocate) : 0;
    if (limit) {
        td_json_key(w, "max_model_len");
        td_json_u64(w, limit);
    }
    td_json_close(w, '}');
}

void td_api_models(struct td_serve *s, struct td_http_conn *c, const char *name) {
    struct td_json_out *w = &s->scratch;
    if (name && strcmp(name, s->model) != 0) {
        struct td_api_error e;
        (void)td_api_refuse(&e, 404, "model_not_found", "model",
                            "the model '%.100s' does not exist here; this server has '%s'", name,
                            s->model);
        td_api_error_reply(c, &e, w);
        return;
    }
    td_json_out_reset(w);
    if (name) {
        write_model(w, s);
    } else {
        td_json_open(w, '{');
        td_json_key(w, "object");
        td_json_text(w, "list");
        td_json_key(w, "data");
        td_json_open(w, '[');
        write_model(w, s);
        td_json_close(w, ']');
        td_json_close(w, '}');
    }
    td_api_send(s, c, 200, "application/json");
}

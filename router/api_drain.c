/* POST /v1/cluster/drain and /resume: a worker gets no new work, or gets it again; what it has
 * goes on. It is how a role is taken away under load without anybody noticing.
 *
 * These change the cluster, so they are for people on this host: other addresses, browsers (a page
 * can make one post to a loopback address, and an Origin header shows that) and what a proxy passes
 * on are refused. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/json_request.h"
#include "router/serve_parts.h"

static td_status check_origin(const struct td_http_conn *c, struct td_api_error *e) {
    const char *added = td_access_indirect(c);
    if (added)
        return td_api_refuse(e, 403, "not_local", NULL,
                             "only a client on the router's host may change the cluster%s%s",
                             *added ? "; this request has the header " : "", added);
    const char *type = td_http_header(c, "content-type");
    static const char json[] = "application/json";
    if (!type || strncmp(type, json, sizeof json - 1) != 0)
        return td_api_refuse(e, 415, NULL, NULL, "content-type: expected %s, found %.60s", json,
                             type ? type : "none");
    return TD_OK;
}

static const struct td_fleet_worker *worker_named(const struct td_serve *s, const char *name) {
    const struct td_fleet *f = td_flow_fleet(s->flow);
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
        if (f->worker[i].epoch && strcmp(f->worker[i].name, name) == 0) return &f->worker[i];
    return NULL;
}

static td_status find(const struct td_serve *s, const json_t *body, char ret_name[TD_NAME_MAX],
                      struct td_api_error *e) {
    static const struct td_param known[] = {{"worker", TD_PARAM_READ, NULL}, {0}};
    const struct td_fields f = {body, "", e};
    const char *name = NULL;
    size_t n = 0;
    TD_TRY(td_fields_known(&f, known, NULL));
    TD_TRY(td_field_str(&f, "worker", &name, &n));
    if (!name) return td_field_wrong(&f, "worker", "the name of a worker, such as \"decode@0\"");
    if (!s->flow)
        return td_api_refuse(e, 503, "not_ready", NULL, "no worker can be connected yet: %s",
                             td_serve_not_ready(s));
    const struct td_fleet_worker *w = strlen(name) == n ? worker_named(s, name) : NULL;
    if (!w)
        return td_api_refuse(e, 404, "worker_not_found", "worker",
                             "no worker of the name %.60s is connected", name);
    memcpy(ret_name, w->name, TD_NAME_MAX);
    return TD_OK;
}

static void answer(struct td_serve *s, struct td_http_conn *c, const char *name) {
    struct td_json_out *out = &s->scratch;
    const struct td_fleet_worker *w = worker_named(s, name);
    td_json_out_reset(out);
    td_json_open(out, '{');
    td_json_key(out, "worker");
    td_json_text(out, name);
    td_json_key(out, "draining");
    td_json_bool(out, w && w->draining); /* its link may have been lost just now */
    td_json_key(out, "requests");
    td_json_u64(out, w ? w->legs : 0);
    td_json_close(out, '}');
    td_api_send(s, c, 200, "application/json");
}

static void set_draining(struct td_serve *s, struct td_http_conn *c, bool draining) {
    struct td_api_error e = {0};
    size_t n = 0;
    char *text = td_http_take_body(c, &n);
    json_t *body = NULL;
    char name[TD_NAME_MAX] = "";
    td_status st = check_origin(c, &e);
    if (st == TD_OK) st = td_request_parse(text, n, &body, &e);
    if (st == TD_OK) st = find(s, body, name, &e);
    if (st == TD_OK) {
        struct td_flow_event ev = {.kind = TD_FLOW_DRAIN,
                                   .now_ns = td_now_ns(),
                                   .drain = {.name = name, .draining = draining}};
        td_info("%s %s, as asked", name, draining ? "drains" : "takes work again");
        td_serve_step(s, &ev);
        answer(s, c, name);
    } else {
        td_api_error_reply(c, &e, &s->scratch);
    }
    json_decref(body);
    free(text);
}

void td_api_drain(struct td_serve *s, struct td_http_conn *c) {
    set_draining(s, c, true);
}

void td_api_resume(struct td_serve *s, struct td_http_conn *c) {
    set_draining(s, c, false);
}

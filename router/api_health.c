/* GET /health: the router lives and how far the service is; GET /ready: a request would be
 * answered, proven by a probe that went through the workers. */
#include <string.h>

#include "common/base/clock.h"
#include "router/serve_parts.h"

static void count_workers(const struct td_serve *s, uint32_t *prefill, uint32_t *decode,
                          uint64_t *steps) {
    const struct td_fleet *f = s->flow ? td_flow_fleet(s->flow) : NULL;
    for (int i = 0; f && i < TD_FLEET_WORKERS_MAX; i++) {
        const struct td_fleet_worker *w = &f->worker[i];
        if (!w->epoch) continue;
        *prefill += w->role == TD_ROLE_PREFILL;
        *decode += w->role == TD_ROLE_DECODE;
        *steps += w->beat.steps;
    }
}

void td_api_health(struct td_serve *s, struct td_http_conn *c) {
    static const char *const phase[] = {"loading", "running", "stopping"};
    struct td_json_out *w = &s->scratch;
    uint32_t prefill = 0, decode = 0;
    uint64_t steps = 0;
    const char *why = td_serve_not_ready(s);
    count_workers(s, &prefill, &decode, &steps);
    td_json_out_reset(w);
    td_json_open(w, '{');
    td_json_key(w, "status");
    td_json_text(w, "ok");
    td_json_key(w, "phase");
    td_json_text(w, phase[s->phase]);
    td_json_key(w, "ready");
    td_json_bool(w, !why);
    td_json_key(w, "waiting_for");
    if (why)
        td_json_text(w, why);
    else
        td_json_null(w);
    td_json_key(w, "uptime_s");
    td_json_num(w, (double)(td_now_ns() - s->started_ns) * 1e-9);
    td_json_key(w, "prefill_workers");
    td_json_u64(w, prefill);
    td_json_key(w, "decode_workers");
    td_json_u64(w, decode);
    td_json_key(w, "engine_steps");
    td_json_u64(w, steps);
    td_json_key(w, "requests_in_flight");
    td_json_u64(w, s->n_requests);
    td_json_close(w, '}');
    td_api_send(s, c, 200, "application/json");
}

void td_api_ready(struct td_serve *s, struct td_http_conn *c) {
    struct td_json_out *w = &s->scratch;
    const char *why = td_serve_not_ready(s);
    if (why) {
        struct td_api_error e;
        (void)td_api_refuse(&e, 503, "not_ready", NULL, "not ready: %s", why);
        e.retry_after_s = 1;
        td_api_error_reply(c, &e, w);
        return;
    }
    td_json_out_reset(w);
    td_json_open(w, '{');
    td_json_key(w, "ready");
    td_json_bool(w, true);
    td_json_close(w, '}');
    td_api_send(s, c, 200, "application/json");
}

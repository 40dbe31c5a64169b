/* GET /metrics. */
#include "router/serve_parts.h"

static size_t collect(const struct td_fleet *f, struct td_metrics_worker *out) {
    size_t n = 0;
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++) {
        const struct td_fleet_worker *w = &f->worker[i];
        if (!w->epoch) continue;
        out[n++] = (struct td_metrics_worker){
            .name = w->name,
            .role = w->role == TD_ROLE_PREFILL ? "prefill" : "decode",
            .running = w->beat.running,
            .waiting = w->beat.waiting,
            .queued_tokens = w->beat.queued_tokens,
            .free_slots = w->beat.free_slots,
            .free_pages = w->beat.free_pages,
            .steps = w->beat.steps,
            .pages_owned = w->ledger.pages_owned,
            .pages_shared = w->ledger.pages_shared,
            .slots_owned = w->ledger.slots_owned,
            .handoffs_ok = w->ledger.handoffs_ok,
            .handoffs_failed = w->ledger.handoffs_failed,
            .bytes_moved = w->ledger.bytes_moved,
        };
    }
    return n;
}

void td_api_metrics(struct td_serve *s, struct td_http_conn *c) {
    struct td_metrics_worker workers[TD_FLEET_WORKERS_MAX];
    struct td_metrics_gauges g = {.ready = !td_serve_not_ready(s),
                                  .in_flight = s->n_requests,
                                  .connections = td_http_server_connections(s->http),
                                  .statuses = td_http_server_statuses(s->http),
                                  .n_statuses = TD_HTTP_STATUSES,
                                  .workers = workers};
    if (s->responses) {
        struct td_response_store_counts kept;
        td_response_store_counts(s->responses, &kept);
        g.responses_kept = kept.kept;
        g.responses_bytes = kept.bytes;
        g.responses_evicted = kept.evicted;
    }
    if (s->flow) {
        struct td_flow_counts counts;
        td_flow_counts(s->flow, &counts);
        g.queued = counts.queued;
        g.n_workers = collect(td_flow_fleet(s->flow), workers);
    }
    td_json_out_reset(&s->scratch);
    td_metrics_write(&s->scratch, &s->metrics, &g);
    if (s->access.keys) td_api_keys_metrics(s->access.keys, &s->scratch);
    td_api_send(s, c, 200, TD_METRICS_CONTENT_TYPE);
}

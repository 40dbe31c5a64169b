/* Between the flow machine and the control links: worker messages and clocks become events,
 * actions become messages and deliveries. No decision is made here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "router/serve_parts.h"

/* ---- links ---- */

static struct td_serve_worker *worker_of(struct td_serve *s, uint64_t epoch) {
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
        if (s->workers[i].epoch == epoch) return &s->workers[i];
    return NULL;
}

static void worker_free(struct td_serve_worker *w) {
    free(w->settings);
    *w = (struct td_serve_worker){0};
}

static void send_message(struct td_serve *s, const struct td_flow_action *a) {
    struct td_serve_worker *w = worker_of(s, a->epoch);
    struct td_error err;
    if (!w || !w->conn) return;
    /* A link that does not take the message goes down, and on_down tells the flow. */
    if (td_conn_send(w->conn, &a->msg, &err) != TD_OK) td_warn("%s: %s", w->name, err.text);
}

static void close_link(struct td_serve *s, uint64_t epoch) {
    struct td_serve_worker *w = worker_of(s, epoch);
    if (!w) return;
    td_info("%s (epoch %016llx) was replaced by a newer process", w->name,
            (unsigned long long)epoch);
    if (w->conn) td_conn_close(w->conn);
    worker_free(w);
}

/* ---- actions ---- */

static void probed(struct td_serve *s, const struct td_flow_action *a) {
    const struct td_fleet *f = td_flow_fleet(s->flow);
    const struct td_fleet_worker *p = td_fleet_find(f, a->fail.pair.prefill);
    const struct td_fleet_worker *d = td_fleet_find(f, a->fail.pair.decode);
    const char *from = p ? p->name : a->fail.pair.prefill ? "(gone)" : "(alone)";
    const char *to = d ? d->name : "(gone)";
    if (a->fail.status == TD_OK) {
        s->last_probe[0] = 0;
        td_info("probe passed: %s > %s", from, to);
    } else {
        snprintf(s->last_probe, sizeof s->last_probe, "the probe of %s > %s failed: %.200s", from,
                 to, a->fail.text);
        td_warn("%s", s->last_probe);
    }
}

static void stalled(struct td_serve *s, uint64_t epoch, bool moves) {
    const struct td_fleet_worker *w = td_fleet_find(td_flow_fleet(s->flow), epoch);
    const char *name = w ? w->name : "(gone)";
    if (moves)
        td_info("%s: its engine advances again", name);
    else
        td_warn("%s: its engine has work and has not advanced for %llu ms: it gets nothing new",
                name, (unsigned long long)s->config->engine_timeout_ms);
}

static void act(struct td_serve *s, const struct td_flow_action *a) {
    switch (a->kind) {
    case TD_FLOW_SEND:
        send_message(s, a);
        break;
    case TD_FLOW_CLOSE_LINK:
        close_link(s, a->epoch);
        break;
    case TD_FLOW_HOLD:
        td_request_hold(a->user, a);
        break;
    case TD_FLOW_DELIVER:
        td_request_deliver(a->user, a);
        break;
    case TD_FLOW_END:
        td_request_end(a->user, a);
        break;
    case TD_FLOW_FAIL:
        td_request_fail(a->user, a);
        break;
    case TD_FLOW_PROBED:
        probed(s, a);
        break;
    case TD_FLOW_STALLED:
        stalled(s, a->epoch, a->moves);
        break;
    }
}

/* Most events leave the next deadline where it is. */
static void set_deadline(struct td_serve *s) {
    uint64_t at = td_flow_deadline(s->flow);
    if (at == s->deadline_ns) return;
    s->deadline_ns = at;
    if (at == UINT64_MAX)
        td_timer_stop(s->deadline);
    else
        td_timer_at(s->deadline, at);
}

void td_serve_step(struct td_serve *s, const struct td_flow_event *ev) {
    struct td_flow_action a;
    s->now_ns = ev->now_ns;
    td_flow_step(s->flow, ev);
    if (s->pumping) return; /* the pump below on this stack takes the actions */
    s->pumping = true;
    while (td_flow_next(s->flow, &a))
        act(s, &a);
    s->pumping = false;
    td_request_reap(s);
    set_deadline(s);
}

/* ---- events ---- */

static void on_deadline(void *user) {
    struct td_serve *s = user;
    struct td_flow_event ev = {.kind = TD_FLOW_TIMER, .now_ns = td_now_ns()};
    s->deadline_ns = UINT64_MAX;
    td_serve_step(s, &ev);
}

static td_status on_hello(void *user, const struct td_msg_hello *hello, char text[TD_TEXT_MAX]) {
    struct td_serve *s = user;
    td_status st = td_fleet_check(td_flow_fleet(s->flow), hello, text);
    if (st != TD_OK) td_warn("%s refused: %s", hello->name, text);
    return st;
}

static void on_up(void *user, struct td_conn *c, const struct td_msg *first) {
    struct td_serve *s = user;
    const struct td_msg_hello *h = &first->hello;
    struct td_serve_worker *w = worker_of(s, 0);
    if (!w) { /* td_fleet_check bounds the fleet; a link more can only be one that is going down */
        td_warn("%s: no room for its link", h->name);
        td_conn_close(c);
        return;
    }
    w->epoch = h->epoch;
    w->conn = c;
    snprintf(w->name, sizeof w->name, "%s", h->name);
    if (h->settings_len && (w->settings = malloc(h->settings_len))) {
        memcpy(w->settings, h->settings, h->settings_len);
        w->settings_len = h->settings_len;
    }
    td_conn_set_data(c, w);
    td_info("%s is up: epoch %016llx, pid %llu, %u tokens, %u pages, %u slots, numerics %s",
            h->name, (unsigned long long)h->epoch, (unsigned long long)h->pid, h->max_context,
            h->pages, h->slots, h->numerics);
    struct td_flow_event ev = {.kind = TD_FLOW_WORKER_UP, .now_ns = td_now_ns(), .hello = h};
    td_serve_step(s, &ev);
}

static void on_msg(void *user, struct td_conn *c, const struct td_msg *m) {
    struct td_flow_event ev = {.kind = TD_FLOW_MESSAGE,
                               .now_ns = td_now_ns(),
                               .worker = {.epoch = td_conn_peer_epoch(c), .msg = m}};
    td_serve_step(user, &ev);
}

static void on_down(void *user, struct td_conn *c, td_status why, const char *text) {
    struct td_serve *s = user;
    struct td_serve_worker *w = c ? td_conn_data(c) : NULL;
    if (!w) return;
    td_warn("%s is lost (%s): %s", w->name, td_status_name(why), text);
    s->metrics.worker_losses++;
    struct td_flow_event ev = {
        .kind = TD_FLOW_WORKER_DOWN, .now_ns = td_now_ns(), .worker = {.epoch = w->epoch}};
    worker_free(w);
    td_serve_step(s, &ev);
}

static void on_stranger(void *user, td_status why, const char *text) {
    struct td_serve *s = user;
    if (td_log_due(&s->stranger_ns)) td_warn("router.control: %s (%s)", text, td_status_name(why));
}

static const struct td_link_events link_events = {.on_hello = on_hello,
                                                  .on_up = on_up,
                                                  .on_msg = on_msg,
                                                  .on_down = on_down,
                                                  .on_stranger = on_stranger};

/* ---- start ---- */

enum {
    PROBE_NEW = 8,                           /* tokens a probe samples */
    WORKER_LINKS = 2 * TD_FLEET_WORKERS_MAX, /* with those that are being replaced or refused */
    ADMIT_WAIT_MS = 5000,
};

td_status td_serve_start_flow(struct td_serve *s, struct td_error *err) {
    const struct td_config *c = s->config;
    const uint64_t ns_per_ms = 1000000;
    struct td_flow_options o = {
        .fleet = {.max_workers = TD_FLEET_WORKERS_MAX,
                  .model = s->model,
                  .colocate = c->router_colocate,
                  .stall_ns = c->engine_timeout_ms * ns_per_ms},
        .max_requests = (uint32_t)c->router_max_requests,
        .lease_ns = c->lease_ms * ns_per_ms,
        .queue_ns = c->queue_timeout_ms * ns_per_ms,
        .admit_ns = ADMIT_WAIT_MS * ns_per_ms,
        .probe_ids = s->probe.ids,
        .probe_n = (uint32_t)s->probe.n,
        .probe_new = PROBE_NEW,
        .eos = s->chat.eos,
    };
    struct td_link_options lo = {.epoch = s->epoch,
                                 .role = TD_ROLE_ROUTER,
                                 .heartbeat_ms = (uint32_t)c->heartbeat_ms,
                                 .peer_timeout_ms = (uint32_t)c->peer_timeout_ms};
    char address[TD_CONFIG_STRING_MAX + 16];
    TD_TRY(td_flow_create(&o, &s->flow, err));
    s->deadline_ns = UINT64_MAX;
    if (td_timer_create(s->loop, on_deadline, s, &s->deadline) != TD_OK)
        return td_fail(err, TD_NO_MEMORY, "router: out of memory");
    snprintf(address, sizeof address, "%s/router.sock", c->run_dir);
    TD_TRY(td_link_server_create(s->loop, address, &lo, WORKER_LINKS, &link_events, s, &s->links,
                                 err));
    td_info("workers may dial %s", address);
    if (!c->router_control[0]) return TD_OK;
    lo.key = s->key;
    TD_TRY(td_link_server_create(s->loop, c->router_control, &lo,
                                 WORKER_LINKS + 2 * TD_LINK_STRANGERS_MAX, &link_events, s,
                                 &s->remote_links, err));
    td_warn(
        "workers may dial %s (port %u) with the cluster key; it must be a private network, since "
        "nothing is encrypted there",
        c->router_control, td_link_server_port(s->remote_links));
    return TD_OK;
}

const char *td_serve_not_ready(const struct td_serve *s) {
    if (s->phase == TD_SERVE_STOPPING) return "the router is stopping";
    if (s->phase == TD_SERVE_LOADING) return "the tokenizer is being loaded";
    const struct td_fleet *f = td_flow_fleet(s->flow);
    if (td_fleet_ready(f)) return NULL;
    bool prefill = s->config->router_colocate, decode = false, stalled = false;
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++) {
        if (!f->worker[i].epoch) continue;
        if (f->worker[i].stalled) stalled = true;
        if (f->worker[i].role == TD_ROLE_PREFILL) prefill = true;
        if (f->worker[i].role == TD_ROLE_DECODE) decode = true;
    }
    if (!decode) return "no decode worker is connected";
    if (!prefill) return "no prefill worker is connected";
    if (stalled) return "a worker's engine has work and does not advance";
    return s->last_probe[0] ? s->last_probe : "the probe of the workers has not ended yet";
}

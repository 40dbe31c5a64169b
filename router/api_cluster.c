/* GET /v1/cluster: what runs, with which settings, and who owns what. 64-bit identities are
 * written in hexadecimal, since many JSON readers keep 53 bits only. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "router/serve_parts.h"

static void text(struct td_json_out *w, const char *key, const char *value) {
    td_json_key(w, key);
    td_json_text(w, value);
}

static void number(struct td_json_out *w, const char *key, uint64_t value) {
    td_json_key(w, key);
    td_json_u64(w, value);
}

static void flag(struct td_json_out *w, const char *key, bool value) {
    td_json_key(w, key);
    td_json_bool(w, value);
}

static void hex(struct td_json_out *w, const char *key, uint64_t value) {
    char buf[20];
    snprintf(buf, sizeof buf, "%016" PRIx64, value);
    text(w, key, buf);
}

static const char *role_name(enum td_role role) {
    return role == TD_ROLE_PREFILL ? "prefill" : role == TD_ROLE_DECODE ? "decode" : "?";
}

static void write_router(struct td_json_out *w, const struct td_serve *s) {
    const char *why = td_serve_not_ready(s);
    td_json_key(w, "router");
    td_json_open(w, '{');
    hex(w, "epoch", s->epoch);
    number(w, "pid", (uint64_t)getpid());
    text(w, "model", s->model);
    flag(w, "ready", !why);
    td_json_key(w, "waiting_for");
    if (why)
        td_json_text(w, why);
    else
        td_json_null(w);
    td_json_key(w, "uptime_s");
    td_json_num(w, (double)(td_now_ns() - s->started_ns) * 1e-9);
    number(w, "probe_tokens", s->flow ? s->probe.n : 0);
    td_json_key(w, "settings");
    td_json_open(w, '{');
    const char *key;
    char value[TD_CONFIG_STRING_MAX];
    for (size_t i = 0; td_config_row(s->config, i, &key, value, NULL); i++)
        text(w, key, value);
    td_json_close(w, '}');
    td_json_close(w, '}');
}

/* "key = value" lines of a hello as an object. */
static void write_settings(struct td_json_out *w, const struct td_serve *s, uint64_t epoch) {
    const char *p = NULL, *end = NULL;
    for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
        if (s->workers[i].epoch == epoch && s->workers[i].settings) {
            p = s->workers[i].settings;
            end = p + s->workers[i].settings_len;
        }
    td_json_key(w, "settings");
    td_json_open(w, '{');
    while (p && p < end) {
        const char *eol = memchr(p, '\n', (size_t)(end - p));
        if (!eol) eol = end;
        const char *eq = memmem(p, (size_t)(eol - p), " = ", 3);
        if (eq) {
            td_json_str(w, p, (size_t)(eq - p));
            td_json_raw(w, ":", 1);
            w->comma = false;
            td_json_str(w, eq + 3, (size_t)(eol - eq - 3));
        }
        p = eol + 1;
    }
    td_json_close(w, '}');
}

static void write_ledger(struct td_json_out *w, const struct td_msg_ledger *l) {
    td_json_key(w, "ledger");
    td_json_open(w, '{');
    number(w, "pages_free", l->pages_free);
    number(w, "pages_owned", l->pages_owned);
    number(w, "pages_shared", l->pages_shared);
    number(w, "slots_free", l->slots_free);
    number(w, "slots_owned", l->slots_owned);
    number(w, "landing_free", l->landing_free);
    number(w, "landing_granted", l->landing_granted);
    number(w, "landing_quarantined", l->landing_quarantined);
    number(w, "send_free", l->send_free);
    number(w, "send_busy", l->send_busy);
    number(w, "handoffs_ok", l->handoffs_ok);
    number(w, "handoffs_failed", l->handoffs_failed);
    number(w, "bytes_moved", l->bytes_moved);
    number(w, "bytes_before_last_chunk", l->bytes_before_last_chunk);
    number(w, "cancels", l->cancels);
    td_json_close(w, '}');
}

static void write_worker(struct td_json_out *w, const struct td_serve *s,
                         const struct td_fleet_worker *k, uint64_t now) {
    td_json_open(w, '{');
    text(w, "name", k->name);
    text(w, "role", role_name(k->role));
    hex(w, "epoch", k->epoch);
    number(w, "pid", k->pid);
    text(w, "model", k->model);
    text(w, "numerics", k->numerics);
    hex(w, "numerics_id", k->numerics_id);
    hex(w, "fingerprint", k->fingerprint);
    number(w, "max_context", k->max_context);
    number(w, "max_running", k->max_running);
    number(w, "pages", k->pages);
    number(w, "page_tokens", k->page_tokens);
    number(w, "slots", k->slots);
    flag(w, "draining", k->draining);
    flag(w, "cooling", k->cool.until_ns > now);
    flag(w, "stalled", k->stalled);
    number(w, "failures", k->cool.failures);
    number(w, "legs", k->legs);
    number(w, "work_tokens", k->work_tokens);
    number(w, "running", k->beat.running);
    number(w, "waiting", k->beat.waiting);
    number(w, "queued_tokens", k->beat.queued_tokens);
    number(w, "free_pages", k->beat.free_pages);
    number(w, "free_slots", k->beat.free_slots);
    number(w, "engine_steps", k->beat.steps);
    td_json_key(w, "last_beat_s");
    td_json_num(w, k->beat_ns && now > k->beat_ns ? (double)(now - k->beat_ns) * 1e-9 : 0.0);
    write_ledger(w, &k->ledger);
    write_settings(w, s, k->epoch);
    td_json_close(w, '}');
}

static void write_pairs(struct td_json_out *w, const struct td_fleet *f, uint64_t now) {
    td_json_key(w, "pairs");
    td_json_open(w, '[');
    for (int d = 0; d < TD_FLEET_WORKERS_MAX; d++) {
        const struct td_fleet_worker *dec = &f->worker[d];
        if (!dec->epoch || dec->role != TD_ROLE_DECODE) continue;
        for (int p = 0; p < TD_FLEET_WORKERS_MAX; p++) {
            const struct td_fleet_worker *pre = &f->worker[p];
            if (!pre->epoch || pre->role != TD_ROLE_PREFILL) continue;
            td_json_open(w, '{');
            text(w, "prefill", pre->name);
            text(w, "decode", dec->name);
            flag(w, "proven", dec->proven >> p & 1);
            struct td_pair pair = {pre->epoch, dec->epoch};
            flag(w, "cooling", td_fleet_cool_until(f, pair) > now);
            flag(w, "same_numerics", td_fleet_same_numerics(f, pair));
            td_json_close(w, '}');
        }
    }
    td_json_close(w, ']');
}

static void write_requests(struct td_json_out *w, const struct td_serve *s, uint64_t now) {
    td_json_key(w, "requests");
    td_json_open(w, '[');
    TD_LIST_EACH (&s->requests, it) {
        const struct td_request *r = TD_CONTAINER(it, struct td_request, link);
        bool running = r->stage == TD_REQUEST_RUNNING; /* else its prompts are another thread's */
        td_json_open(w, '{');
        text(w, "id", r->answer.id);
        text(w, "request_id", r->request_id);
        text(w, "stage", !running ? "preparing" : r->n_tokens ? "streaming" : "waiting");
        number(w, "prompt_tokens", running ? td_prompts_tokens(&r->prompts) : 0);
        number(w, "tokens", r->n_tokens);
        number(w, "choices", running ? r->answer.n : 0);
        number(w, "choices_ended", running ? r->answer.n_ended : 0);
        td_json_key(w, "age_s");
        td_json_num(w, (double)(now - r->arrived_ns) * 1e-9);
        td_json_close(w, '}');
    }
    td_json_close(w, ']');
}

static void write_counts(struct td_json_out *w, const struct td_flow *f) {
    struct td_flow_counts c;
    td_flow_counts(f, &c);
    td_json_key(w, "counts");
    td_json_open(w, '{');
    number(w, "live", c.live);
    number(w, "queued", c.queued);
    number(w, "tombstones", c.tombstones);
    number(w, "submitted", c.submitted);
    number(w, "ended", c.ended);
    number(w, "failed", c.failed);
    number(w, "cancelled", c.cancelled);
    number(w, "retries", c.retries);
    number(w, "preempted", c.preempted);
    number(w, "busy", c.busy);
    number(w, "probes_passed", c.probes_passed);
    number(w, "probes_failed", c.probes_failed);
    number(w, "stale_dropped", c.stale_dropped);
    td_json_close(w, '}');
}

void td_api_cluster(struct td_serve *s, struct td_http_conn *c) {
    struct td_json_out *w = &s->scratch;
    uint64_t now = td_now_ns();
    td_json_out_reset(w);
    td_json_open(w, '{');
    write_router(w, s);
    if (s->flow) {
        const struct td_fleet *f = td_flow_fleet(s->flow);
        td_json_key(w, "workers");
        td_json_open(w, '[');
        for (int i = 0; i < TD_FLEET_WORKERS_MAX; i++)
            if (f->worker[i].epoch) write_worker(w, s, &f->worker[i], now);
        td_json_close(w, ']');
        write_pairs(w, f, now);
        write_counts(w, s->flow);
    }
    write_requests(w, s, now);
    td_json_close(w, '}');
    td_api_send(s, c, 200, "application/json");
}

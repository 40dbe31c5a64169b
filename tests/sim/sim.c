/* The world: time, chance, the random story of a seed, and what must hold at its end. */
#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

enum { BUSY_S = 6, MAX_TOKENS = 4096, EVENTS_MAX = 1000000 };

/* ---- chance ---- */

uint64_t sim_random(struct sim *s) {
    return td_mix64(s->rng += 0x9E3779B97F4A7C15u);
}
uint64_t sim_below(struct sim *s, uint64_t n) {
    return n == 0 ? 0 : sim_random(s) % n;
}
bool sim_chance(struct sim *s, uint32_t per_mille) {
    return per_mille > 0 && sim_below(s, 1000) < per_mille;
}
uint64_t sim_delay(struct sim *s) {
    if (!s->o.steady && sim_chance(s, 20)) return sim_below(s, 60 * SIM_MS);
    return 20 * SIM_US + sim_below(s, 2 * SIM_MS);
}

/* ---- what broke, what happened ---- */

void sim_broken(struct sim *s, const char *fmt, ...) {
    if (s->failure[0] != 0) return;
    int n = snprintf(s->failure, sizeof s->failure, "at %.6f s: ", (double)s->now / 1e9);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(s->failure + n, sizeof s->failure - (size_t)n, fmt, ap);
    va_end(ap);
}

void sim_note(struct sim *s, const char *fmt, ...) {
    char line[TD_TEXT_MAX + 128];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (s->o.trace) printf("%10.6f %s", (double)s->now / 1e9, line);
    s->trace = realloc(s->trace, s->trace_len + (size_t)n + 1);
    memcpy(s->trace + s->trace_len, line, (size_t)n + 1);
    s->trace_len += (size_t)n;
}

void sim_print(struct sim *s, const char *from, const char *to, const struct td_msg *m) {
    static const char *const names[] = {
        [TD_MSG_ADMIT] = "ADMIT",       [TD_MSG_ADMIT_REPLY] = "ADMIT_REPLY",
        [TD_MSG_KEEP] = "KEEP",         [TD_MSG_PREFILL] = "PREFILL",
        [TD_MSG_TOKENS] = "TOKENS",     [TD_MSG_FINISHED] = "FINISHED",
        [TD_MSG_FAILED] = "FAILED",     [TD_MSG_CANCEL] = "CANCEL",
        [TD_MSG_RELEASED] = "RELEASED", [TD_MSG_PEER_HELLO] = "PEER_HELLO",
        [TD_MSG_SLAB] = "SLAB",         [TD_MSG_PEER_WELCOME] = "PEER_WELCOME",
        [TD_MSG_CREDIT] = "CREDIT",     [TD_MSG_MANIFEST] = "MANIFEST",
        [TD_MSG_VERDICT] = "VERDICT",   [TD_MSG_ABORT] = "ABORT",
    };
    if ((size_t)m->type >= sizeof names / sizeof names[0] || names[m->type] == NULL) return;
    bool control = m->type < TD_MSG_PEER_HELLO;
    if (!s->o.trace && !(s->o.record && control && m->type != TD_MSG_KEEP)) return;
    char what[TD_TEXT_MAX + 64] = "";
    size_t cap = sizeof what;
    int n = 0;
    if (control) /* every control message here begins with its key */
        n = snprintf(what, cap, " %llx.%u", (unsigned long long)m->keep.key.request,
                     m->keep.key.attempt);
    /* Of a request with several choices: which one, but for the first. */
    uint32_t choice = m->type == TD_MSG_TOKENS     ? m->tokens.choice
                      : m->type == TD_MSG_FINISHED ? m->finished.choice
                                                   : 0;
    if (choice != 0) n += snprintf(what + n, cap - (size_t)n, "/%u", choice);
    uint32_t only = m->type == TD_MSG_FAILED   ? m->failed.only
                    : m->type == TD_MSG_CANCEL ? m->cancel.only
                                               : 0;
    if (only != 0) n += snprintf(what + n, cap - (size_t)n, "/%u", only - 1);
    uint32_t all = m->type == TD_MSG_ADMIT     ? m->admit.n
                   : m->type == TD_MSG_PREFILL ? m->prefill.n
                                               : 0;
    if (all > 1) n += snprintf(what + n, cap - (size_t)n, " n=%u", all);
    if (m->type == TD_MSG_TOKENS) snprintf(what + n, cap - (size_t)n, " #%u", m->tokens.index);
    if (m->type == TD_MSG_FAILED)
        snprintf(what + n, cap - (size_t)n, " %s", td_status_name(m->failed.status));
    if (m->type == TD_MSG_ADMIT_REPLY)
        snprintf(what + n, cap - (size_t)n, " %s", td_status_name(m->admit_reply.status));
    if (m->type == TD_MSG_SLAB)
        snprintf(what, cap, " ticket %llu", (unsigned long long)m->slab.ticket);
    if (m->type == TD_MSG_ABORT)
        snprintf(what, cap, " ticket %llu: %s", (unsigned long long)m->abort.ticket, m->abort.text);
    sim_note(s, "%s -> %s %s%s\n", from, to, names[m->type], what);
}

/* ---- time ---- */

static bool before(const struct sim_event *a, const struct sim_event *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void heap_push(struct sim *s, struct sim_event *e) {
    if (s->n_heap == s->cap_heap) {
        s->cap_heap = s->cap_heap == 0 ? 256 : 2 * s->cap_heap;
        s->heap = realloc(s->heap, s->cap_heap * sizeof *s->heap);
    }
    size_t i = s->n_heap++;
    for (; i > 0 && before(e, s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = e;
}

static struct sim_event *heap_pop(struct sim *s) {
    struct sim_event *top = s->heap[0], *last = s->heap[--s->n_heap];
    size_t i = 0;
    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= s->n_heap) break;
        if (k + 1 < s->n_heap && before(s->heap[k + 1], s->heap[k])) k++;
        if (!before(s->heap[k], last)) break;
        s->heap[i] = s->heap[k];
        i = k;
    }
    if (s->n_heap > 0) s->heap[i] = last;
    return top;
}

struct sim_event *sim_at(struct sim *s, uint64_t at, int worker,
                         void (*fn)(struct sim *, struct sim_event *)) {
    struct sim_event *e = calloc(1, sizeof *e);
    *e = (struct sim_event){.at = at, .order = s->order++, .worker = worker, .fn = fn};
    if (worker >= 0) e->life = s->worker[worker].life;
    heap_push(s, e);
    return e;
}

static void event_free(struct sim_event *e) {
    free(e->msg);
    free(e->blob);
    free(e->data);
    free(e);
}

void sim_run(struct sim *s, uint64_t at) {
    while (s->n_heap > 0 && s->heap[0]->at <= at && s->failure[0] == 0) {
        struct sim_event *e = heap_pop(s);
        struct sim_worker *w = e->worker >= 0 ? &s->worker[e->worker] : NULL;
        if (w != NULL && w->alive && w->life == e->life && w->frozen_until > e->at) {
            e->at = w->frozen_until;
            heap_push(s, e);
            continue;
        }
        s->now = e->at;
        if (++s->steps > EVENTS_MAX) sim_broken(s, "time stands still");
        if (w == NULL || (w->alive && w->life == e->life)) e->fn(s, e);
        event_free(e);
    }
    if (s->now < at) s->now = at;
}

static void *copy(const void *p, size_t n) {
    void *c = malloc(n);
    memcpy(c, p, n);
    return c;
}

void sim_copy_msg(struct sim_event *e, const struct td_msg *m) {
    e->msg = copy(m, sizeof *m);
    switch (m->type) {
    case TD_MSG_ADMIT:
        if (m->admit.ids == NULL) return;
        e->msg->admit.ids = e->blob = copy(m->admit.ids, m->admit.n_prompt * sizeof(int32_t));
        return;
    case TD_MSG_PREFILL:
        e->msg->prefill.ids = e->blob = copy(m->prefill.ids, m->prefill.n_prompt * sizeof(int32_t));
        e->msg->prefill.decode_address = e->data =
            copy(m->prefill.decode_address, m->prefill.decode_address_len);
        return;
    case TD_MSG_MOVED:
        e->msg->moved.xfer_address = e->data = copy(m->moved.xfer_address, m->moved.xfer_address_len);
        return;
    case TD_MSG_TOKENS:
        e->msg->tokens.tokens = e->blob =
            copy(m->tokens.tokens, m->tokens.n * sizeof(struct td_token));
        return;
    default:
        return;
    }
}

/* ---- a world ---- */

void sim_defaults(struct sim_options *o, uint64_t seed) {
    *o = (struct sim_options){
        .seed = seed, .prefills = 2, .decodes = 2, .clients = 40, .pages = 64, .slots = 8};
}

void sim_init(struct sim *s, const struct sim_options *o) {
    memset(s, 0, sizeof *s);
    s->o = *o;
    s->rng = td_mix64(o->seed + 1);
    static const uint8_t ratio[2] = {4, 128};
    struct td_error err;
    if (td_kv_layout_init(&s->layout, 2, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, o->pages, 7,
                          &err) != TD_OK)
        sim_broken(s, "%s", err.text);
    for (uint32_t k = 0; k < SIM_PROBE_N; k++)
        s->probe[k] = (int32_t)(2 + k);
    sim_router_start(s);
    s->n_workers = o->prefills + o->decodes;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        struct sim_worker *w = &s->worker[i];
        w->index = i;
        w->role = i < o->prefills ? TD_ROLE_PREFILL : TD_ROLE_DECODE;
        snprintf(w->name, sizeof w->name, "%s@%u", i < o->prefills ? "prefill" : "decode",
                 i < o->prefills ? i : i - o->prefills);
        sim_worker_start(s, w);
    }
}

void sim_finish(struct sim *s) {
    sim_router_stop(s);
    for (uint32_t i = 0; i < s->n_workers; i++)
        sim_worker_kill(s, &s->worker[i]);
    while (s->n_heap > 0)
        event_free(heap_pop(s));
    for (uint32_t i = 0; i < SIM_CLIENTS_MAX; i++)
        if (i % SIM_CHOICES == 0) free(s->client[i].ids);
    free(s->heap);
    free(s->link);
    free(s->trace);
}

/* ---- the story ---- */

static uint32_t some_length(struct sim *s) {
    uint32_t edge = (uint32_t)(256 * (1 + sim_below(s, 6)));
    switch (sim_below(s, 4)) {
    case 0:
        return 1 + (uint32_t)sim_below(s, 12);
    case 1:
        return edge - 2 + (uint32_t)sim_below(s, 5);
    default:
        return 1 + (uint32_t)sim_below(s, 1800);
    }
}

static void make_client(struct sim *s, uint32_t i) {
    struct sim_client *c = &s->client[SIM_CHOICES * i];
    c->s.n_prompt = some_length(s);
    c->s.max_new = sim_chance(s, 150) ? 1 : 1 + (uint32_t)sim_below(s, 60);
    if (sim_chance(s, s->o.reserve_new != 0 ? 400 : 40)) /* grows past a page */
        c->s.max_new = 600 + (uint32_t)sim_below(s, 600);
    if (sim_chance(s, 30)) c->s.n_prompt = MAX_TOKENS;
    c->too_long = c->s.n_prompt + c->s.max_new > MAX_TOKENS;
    c->s.sampling.seed = sim_random(s);
    static const struct td_guide guide;
    if (c->s.sampling.seed & 1) c->s.sampling.guide = &guide;
    /* Most answers end soon by themselves; without that a full pool would be rare. */
    c->s.sampling.ignore_eos = c->s.max_new > 600 && sim_chance(s, 700);
    c->s.whole = sim_chance(s, 300);
    c->s.colocate = s->o.colocate_some && sim_chance(s, 250);
    uint32_t most = s->o.choices < s->o.slots ? s->o.choices : s->o.slots;
    if (most > 1 && sim_chance(s, 400)) c->s.n = 1 + (uint32_t)sim_below(s, most);
    c->ids = malloc((c->s.n > 1 ? c->s.n : 1) * (c->s.n_prompt + c->s.max_new) * sizeof *c->ids);
    for (uint32_t k = 0; k < c->s.n_prompt; k++)
        c->ids[k] = (int32_t)(2 + sim_below(s, 997));
    c->s.ids = c->ids;
    for (uint32_t k = 0; k == 0 || k < c->s.n; k++)
        if (sim_chance(s, s->o.stops)) c[k].stop_after = 1 + (uint32_t)sim_below(s, c->s.max_new);
}

static void on_submit(struct sim *s, struct sim_event *e) {
    if (s->flow != NULL) sim_client_submit(s, (uint32_t)e->a);
}
static void on_cancel(struct sim *s, struct sim_event *e) {
    sim_client_cancel(s, (uint32_t)e->a);
}
static void on_start(struct sim *s, struct sim_event *e) {
    if (!s->worker[e->a].alive) sim_worker_start(s, &s->worker[e->a]);
}
static void on_kill(struct sim *s, struct sim_event *e) {
    sim_note(s, "%s is killed\n", s->worker[e->a].name);
    sim_worker_kill(s, &s->worker[e->a]);
    sim_at(s, s->now + 100 * SIM_MS + sim_below(s, SIM_S), -1, on_start)->a = e->a;
}
static void on_break_of(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (w->alive && w->life == e->b) sim_link_break(s, w);
}
static void on_freeze(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (!w->alive) return;
    uint64_t length = 50 * SIM_MS + sim_below(s, 1500 * SIM_MS);
    /* Never sooner than an earlier freeze ends: what waits for that end would be overtaken. */
    if (w->frozen_until < s->now + length) w->frozen_until = s->now + length;
    sim_note(s, "%s freezes\n", w->name);
    if (length < 600 * SIM_MS) return;
    struct sim_event *b = sim_at(s, s->now + 600 * SIM_MS, -1, on_break_of);
    b->a = e->a;
    b->b = w->life;
}
static void on_hang(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (!w->alive) return;
    w->hung_until = s->now + sim_below(s, 2500 * SIM_MS);
    sim_note(s, "the engine of %s hangs\n", w->name);
}
static void on_deaf(struct sim *s, struct sim_event *e) {
    sim_deafen(s, &s->worker[e->a]);
}
static void on_break(struct sim *s, struct sim_event *e) {
    sim_link_break(s, &s->worker[e->a]);
}
static void on_router_start(struct sim *s, struct sim_event *e) {
    (void)e;
    if (s->flow == NULL) sim_router_start(s);
}
static void on_router_restart(struct sim *s, struct sim_event *e) {
    (void)e;
    sim_note(s, "the router restarts\n");
    sim_router_stop(s);
    sim_at(s, s->now + sim_below(s, 300 * SIM_MS), -1, on_router_start);
}

static void plan(struct sim *s) {
    const struct {
        uint32_t n;
        void (*fn)(struct sim *, struct sim_event *);
    } troubles[] = {{s->o.kills, on_kill},
                    {s->o.freezes, on_freeze},
                    {s->o.hangs, on_hang},
                    {s->o.breaks, on_break},
                    {s->o.router_restarts, on_router_restart},
                    {s->o.deafs, on_deaf}};
    for (uint32_t i = 0; i < s->o.clients; i++) {
        make_client(s, i);
        uint64_t at = 100 * SIM_MS + sim_below(s, BUSY_S * SIM_S);
        sim_at(s, at, -1, on_submit)->a = i;
        if (sim_chance(s, s->o.cancels))
            sim_at(s, at + sim_below(s, 400 * SIM_MS), -1, on_cancel)->a = i;
    }
    for (size_t t = 0; t < sizeof troubles / sizeof troubles[0]; t++)
        for (uint32_t k = 0; k < troubles[t].n; k++)
            sim_at(s, 50 * SIM_MS + sim_below(s, BUSY_S * SIM_S), -1, troubles[t].fn)->a =
                sim_below(s, s->n_workers);
}

/* ---- what must hold at the end ---- */

static void check_worker(struct sim *s, const struct sim_worker *w) {
    struct td_msg_ledger l;
    if (!w->alive) {
        sim_broken(s, "%s is not back", w->name);
        return;
    }
    if (w->role == TD_ROLE_PREFILL)
        td_prefill_ledger(w->p, &l);
    else
        td_decode_ledger(w->d, &l);
    if (l.pages_owned + l.slots_owned + l.send_busy + l.landing_quarantined != 0)
        sim_broken(
            s,
            "%s is not at its baseline: %u pages, %u slots, %u send slabs in use, %u landing "
            "slabs quarantined",
            w->name, l.pages_owned, l.slots_owned, l.send_busy, l.landing_quarantined);
    if (w->ids != NULL) sim_broken(s, "%s holds ids of no request", w->name);
}

static void check_end(struct sim *s, bool quiet) {
    struct td_flow_counts c;
    td_flow_counts(s->flow, &c);
    if (quiet && c.retries != 0)
        sim_broken(s, "%llu attempts failed although nothing was wrong",
                   (unsigned long long)c.retries);
    for (uint32_t i = 0; i < SIM_CLIENTS_MAX; i++)
        if (s->client[i].state == SIM_LIVE)
            sim_broken(s, "request %llu never ended", (unsigned long long)s->client[i].s.request);
    if (c.live + c.queued + c.tombstones != 0)
        sim_broken(s, "the router holds %u requests, %u queued, %u tombstones", c.live, c.queued,
                   c.tombstones);
    if (!td_fleet_ready(td_flow_fleet(s->flow))) sim_broken(s, "the cluster is not ready again");
    for (uint32_t i = 0; i < TD_FLEET_WORKERS_MAX; i++) {
        const struct td_fleet_worker *w = &td_flow_fleet(s->flow)->worker[i];
        if (w->epoch != 0 && w->stalled) sim_broken(s, "%s is counted as stalled", w->name);
        if (w->epoch != 0 && (w->legs != 0 || w->work_tokens != 0))
            sim_broken(s, "%s is counted with %u legs and %llu tokens of work", w->name, w->legs,
                       (unsigned long long)w->work_tokens);
    }
    for (uint32_t i = 0; i < s->n_workers; i++)
        check_worker(s, &s->worker[i]);
}

bool sim_story(struct sim *s) {
    bool quiet = s->o.kills + s->o.freezes + s->o.hangs + s->o.breaks + s->o.router_restarts + s->o.deafs +
                     s->o.data_lost + s->o.put_fails + s->o.corrupt + s->o.forged ==
                 0;
    plan(s);
    for (uint32_t i = 0; quiet && i < s->o.clients; i++)
        s->client[SIM_CHOICES * i].must_end = true;
    sim_run(s, (BUSY_S + 2) * SIM_S);
    s->calm = true;
    s->calm_ns = s->now;
    sim_run(s, (BUSY_S + 12) * SIM_S);
    /* After the storm the cluster serves, and no page is missing. */
    for (uint32_t i = s->o.clients; i < s->o.clients + 4 && s->failure[0] == 0; i++) {
        make_client(s, i);
        s->client[SIM_CHOICES * i].must_end = true;
        sim_client_submit(s, i);
    }
    sim_run(s, (BUSY_S + 32) * SIM_S);
    if (s->failure[0] == 0) check_end(s, quiet);
    return s->failure[0] == 0;
}

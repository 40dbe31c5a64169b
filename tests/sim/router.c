/* The router's shell and its clients, who know what they must be told. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

/* ---- clients ---- */

static struct sim_client *client(struct sim *s, const struct td_flow_action *a) {
    struct sim_client *c = a->user;
    if (c != NULL) c += a->choice;
    if (c == NULL || a->choice >= SIM_CHOICES || c->number != a->choice ||
        c->s.request != a->request || c->state == SIM_UNBORN) {
        sim_broken(s, "an action for request %llu that nobody made",
                   (unsigned long long)a->request);
        return NULL;
    }
    if (c->state != SIM_LIVE) {
        sim_broken(s, "request %llu is told more after its end", (unsigned long long)a->request);
        return NULL;
    }
    return c;
}

static void on_stop(struct sim *s, struct sim_event *e) {
    struct sim_client *c = &s->client[e->a];
    if (c->state != SIM_LIVE || c->router_life != s->router_life || s->flow == NULL) return;
    c->stopped = true;
    struct td_flow_event ev = {.kind = TD_FLOW_STOP, .request = c->s.request + c->number};
    sim_router_step(s, &ev);
}

static void delivered(struct sim *s, const struct td_flow_action *a) {
    struct sim_client *c = client(s, a);
    if (c == NULL) return;
    if (a->deliver.index != c->delivered || a->deliver.n == 0)
        sim_broken(s, "request %llu: token %u expected, token %u delivered",
                   (unsigned long long)a->request, c->delivered, a->deliver.index);
    for (uint32_t k = 0; k < a->deliver.n; k++) {
        int32_t id = a->deliver.tokens[k].id;
        int32_t want = sim_sample(c->hash, c->s.n_prompt + c->delivered,
                                  td_choice_seed(c->s.sampling.seed, c->number));
        if (id != want)
            sim_broken(s, "request %llu: token %u: %d expected, %d delivered",
                       (unsigned long long)a->request, c->delivered, want, id);
        c->hash = sim_hash_id(c->hash, id);
        c->last = id;
        c->delivered++;
        if (c->delivered == c->stop_after)
            sim_at(s, s->now + sim_below(s, 5 * SIM_MS), -1, on_stop)->a =
                (uint64_t)(c - s->client);
    }
    if (c->delivered > c->s.max_new)
        sim_broken(s, "request %llu: %u tokens delivered of at most %u",
                   (unsigned long long)a->request, c->delivered, c->s.max_new);
}

/* The flow's own copy, from which a preempted request goes on. */
static bool answer_kept(const struct sim_client *c) {
    uint64_t hash = sim_hash_start();
    for (uint32_t k = 0; k < c->s.n_prompt + c->delivered; k++)
        hash = sim_hash_id(hash, k < c->s.n_prompt ? c->s.ids[k] : c->ids[k]);
    return hash == c->hash;
}

static const char *which(uint32_t choice) { /* but for the first */
    static char text[16];
    snprintf(text, sizeof text, "/%u", choice);
    return choice == 0 ? "" : text;
}

/* Where the time went adds up to the time. */
static void check_phases(struct sim *s, const struct td_flow_action *a,
                         const struct td_flow_times *t) {
    uint64_t sum = 0;
    for (int i = 0; i < TD_PHASES; i++)
        sum += t->phase_ns[i];
    if (sum != t->ended - t->submitted)
        sim_broken(s, "request %llu: phases of %llu ns in %llu ns", (unsigned long long)a->request,
                   (unsigned long long)sum, (unsigned long long)(t->ended - t->submitted));
}

static void ended(struct sim *s, const struct td_flow_action *a) {
    struct sim_client *c = client(s, a);
    if (c == NULL) return;
    c->state = SIM_ENDED;
    c->reason = a->end.reason;
    c->times = a->end.times;
    check_phases(s, a, &c->times);
    bool eos = c->delivered > 0 && c->last == SIM_EOS && !c->s.sampling.ignore_eos;
    bool right = a->end.n_tokens == c->delivered && a->end.n_prompt == c->s.n_prompt;
    if (a->end.reason == TD_FINISH_STOP)
        right = right && (eos || c->stopped);
    else
        right = right && !eos && c->delivered == c->s.max_new;
    if (!answer_kept(c))
        sim_broken(s, "request %llu: the ids behind its prompt are not those delivered",
                   (unsigned long long)a->request);
    if (!right)
        sim_broken(s, "request %llu: a clean end after %u tokens that is none",
                   (unsigned long long)a->request, c->delivered);
    sim_note(s, "request %llu%s ends with %u tokens\n", (unsigned long long)a->request,
             which(a->choice), c->delivered);
}

static void failed(struct sim *s, const struct td_flow_action *a) {
    struct sim_client *c = client(s, a);
    if (c == NULL) return;
    c->state = SIM_FAILED;
    c->status = a->fail.status;
    c->times = a->fail.times;
    check_phases(s, a, &c->times);
    if (a->fail.status == TD_OK || a->fail.text[0] == 0 || a->fail.n_tokens != c->delivered)
        sim_broken(s, "request %llu: a failure that does not say why",
                   (unsigned long long)a->request);
    /* An honest answer when there are few pages and everybody wants much, or when workers die and
     * hang. */
    bool scarce = s->o.pages < 64 || !c->must_end;
    bool early = !s->calm || c->times.submitted < s->calm_ns; /* it came when all did */
    bool shed = a->fail.status == TD_BUSY && c->delivered == 0 && scarce && early;
    if (c->too_long != (a->fail.status == TD_TOO_LONG) && !shed)
        sim_broken(s, "request %llu: %s", (unsigned long long)a->request, a->fail.text);
    if (c->must_end && !c->too_long && !shed)
        sim_broken(s, "request %llu fails although nothing was wrong: %s",
                   (unsigned long long)a->request, a->fail.text);
    if (a->fail.status == TD_BUSY && a->fail.retry_ms == 0)
        sim_broken(s, "request %llu: busy without a time to come back",
                   (unsigned long long)a->request);
    sim_note(s, "request %llu%s fails after %u tokens: %s\n", (unsigned long long)a->request,
             which(a->choice), c->delivered, td_status_name(a->fail.status));
}

static uint32_t choices(const struct sim_client *c) {
    return c->s.n > 1 ? c->s.n : 1;
}

void sim_client_submit(struct sim *s, uint32_t i) {
    struct sim_client *c = &s->client[SIM_CHOICES * i];
    uint32_t n = choices(c);
    uint64_t hash = sim_hash_start();
    for (uint32_t k = 0; k < c->s.n_prompt; k++)
        hash = sim_hash_id(hash, c->ids[k]);
    c->s.request = s->next_request + 1;
    c->s.user = c;
    s->next_request += n;
    for (uint32_t k = 0; k < n; k++) {
        c[k].s = c->s;
        c[k].number = k;
        c[k].ids = c->ids + k * (c->s.n_prompt + c->s.max_new);
        c[k].too_long = c->too_long;
        c[k].must_end = c->must_end;
        c[k].state = SIM_LIVE;
        c[k].router_life = s->router_life;
        c[k].hash = hash;
    }
    struct td_flow_event ev = {.kind = TD_FLOW_SUBMIT, .submit = c->s};
    sim_router_step(s, &ev);
}

void sim_client_cancel(struct sim *s, uint32_t i) {
    struct sim_client *c = &s->client[SIM_CHOICES * i];
    if (s->flow == NULL || c->router_life != s->router_life) return;
    bool live[SIM_CHOICES];
    for (uint32_t k = 0; k < choices(c); k++) {
        live[k] = c[k].state == SIM_LIVE;
        if (live[k]) c[k].state = SIM_GONE; /* all leave before the first CANCEL */
    }
    for (uint32_t k = 0; k < choices(c); k++) {
        struct td_flow_event ev = {.kind = TD_FLOW_CANCEL, .request = c->s.request + k};
        if (live[k]) sim_router_step(s, &ev);
    }
}

/* ---- the shell ---- */

static void on_timer(struct sim *s, struct sim_event *e) {
    if (s->flow == NULL || s->router_timer_at != e->a || s->router_life != e->b) return;
    s->router_timer_at = UINT64_MAX;
    struct td_flow_event ev = {.kind = TD_FLOW_TIMER};
    sim_router_step(s, &ev);
}

static void carry_out(struct sim *s, const struct td_flow_action *a) {
    switch (a->kind) {
    case TD_FLOW_SEND:
        sim_from_router(s, a->epoch, &a->msg);
        return;
    case TD_FLOW_CLOSE_LINK: /* the simulator's links end with their process */
        return;
    case TD_FLOW_HOLD:
        sim_broken(s, "request %llu: a selection that nobody asked for",
                   (unsigned long long)a->request);
        return;
    case TD_FLOW_DELIVER:
        delivered(s, a);
        return;
    case TD_FLOW_END:
        ended(s, a);
        return;
    case TD_FLOW_FAIL:
        failed(s, a);
        return;
    case TD_FLOW_PROBED:
        sim_note(s, "probe: %s\n", td_status_name(a->fail.status));
        if (a->fail.status == TD_CORRUPT && a->fail.text[0] != 0 &&
            strstr(a->fail.text, "differ") != NULL)
            sim_broken(s, "probe: %s", a->fail.text);
        return;
    case TD_FLOW_STALLED:
        sim_note(s, "an engine %s\n", a->moves ? "goes on" : "hangs");
        return;
    }
}

void sim_router_step(struct sim *s, struct td_flow_event *ev) {
    struct td_flow_action a;
    ev->now_ns = s->now;
    td_flow_step(s->flow, ev);
    while (td_flow_next(s->flow, &a))
        carry_out(s, &a);
    uint64_t deadline = td_flow_deadline(s->flow);
    if (deadline == UINT64_MAX || deadline >= s->router_timer_at) return;
    s->router_timer_at = deadline > s->now ? deadline : s->now + 1;
    struct sim_event *e = sim_at(s, s->router_timer_at, -1, on_timer);
    e->a = s->router_timer_at;
    e->b = s->router_life;
}

void sim_router_start(struct sim *s) {
    struct td_error err;
    const struct td_flow_options o = {
        .fleet = {.max_workers = SIM_WORKERS_MAX,
                  .model = "sim",
                  .cool_ns = 100 * SIM_MS,
                  .cool_max_ns = SIM_S,
                  .stall_ns = 500 * SIM_MS},
        .max_requests = 80,
        .lease_ns = 600 * SIM_MS,
        .queue_ns =
            16 * SIM_S, /* one worker of three slots, and forty requests of up to four choices */
        .admit_ns = 700 * SIM_MS,
        .probe_ids = s->probe,
        .probe_n = SIM_PROBE_N,
        .probe_new = 3,
        .eos = SIM_EOS,
    };
    s->router_life++;
    s->router_timer_at = UINT64_MAX;
    s->next_request = 0; /* a new router uses old numbers again */
    if (td_flow_create(&o, &s->flow, &err) != TD_OK) sim_broken(s, "router: %s", err.text);
}

void sim_router_stop(struct sim *s) {
    if (s->flow == NULL) return;
    for (uint32_t i = 0; i < s->n_workers; i++) {
        struct sim_worker *w = &s->worker[i];
        if (w->router_link == 0) continue;
        w->router_link = 0;
        sim_link_break(s, w);
    }
    for (uint32_t i = 0; i < SIM_CLIENTS_MAX; i++)
        if (s->client[i].state == SIM_LIVE) s->client[i].state = SIM_GONE;
    struct td_flow_counts counts;
    td_flow_counts(s->flow, &counts);
    s->preempted += counts.preempted;
    td_flow_destroy(s->flow);
    s->flow = NULL;
}

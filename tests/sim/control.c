/* Control links: ordered streams that do not lose but break. What is on its way when a side learns
 * of the break is gone. A doubled message stands for a sender that repeats itself. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

static struct sim_worker *by_epoch(struct sim *s, uint64_t epoch) {
    for (uint32_t i = 0; i < s->n_workers; i++)
        if (s->worker[i].alive && s->worker[i].epoch == epoch) return &s->worker[i];
    return NULL;
}

static uint64_t in_order(uint64_t *last, uint64_t at) {
    *last = at > *last ? at : *last + 1;
    return *last;
}

/* ---- dialling ---- */

static void on_hello_reply(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    w->my_link = (uint32_t)e->a;
    if (w->number != 0) sim_say_moved(s, w);
}

static void on_hello(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (!w->alive || w->life != e->b || w->dials != e->c) return;
    char text[TD_TEXT_MAX];
    const struct sim_address address = {w->epoch, w->number};
    struct td_msg_hello h = {
        .version = TD_PROTO_VERSION,
        .role = w->role,
        .epoch = w->epoch,
        .fingerprint = s->layout.fingerprint,
        .numerics_id = 1,
        .model = "sim",
        .max_context = 4096,
        .max_running = s->o.slots,
        .pages = s->o.pages,
        .page_tokens = td_kv_page_tokens(sim_split(s, w)),
        .slots = s->o.slots,
        .xfer_address = (const uint8_t *)&address,
        .xfer_address_len = sizeof address,
        .xfer_number = w->number,
    };
    memcpy(h.name, w->name, sizeof h.name);
    if (s->flow == NULL || td_fleet_check(td_flow_fleet(s->flow), &h, text) != TD_OK) {
        sim_dial(s, w, 100 * SIM_MS);
        return;
    }
    w->router_link = w->dials;
    struct sim_event *r = sim_at(s, in_order(&w->from_router_at, s->now + sim_delay(s)),
                                 (int)w->index, on_hello_reply);
    r->a = w->dials;
    struct td_flow_event ev = {.kind = TD_FLOW_WORKER_UP, .hello = &h};
    sim_router_step(s, &ev);
}

static void on_dial(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    w->dials++;
    struct sim_event *h =
        sim_at(s, in_order(&w->to_router_at, s->now + sim_delay(s)), -1, on_hello);
    h->a = w->index;
    h->b = w->life;
    h->c = w->dials;
}

void sim_dial(struct sim *s, struct sim_worker *w, uint64_t delay) {
    sim_at(s, s->now + delay, (int)w->index, on_dial);
}

/* ---- breaking ---- */

static void on_router_side_down(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (s->flow == NULL || e->c != s->router_life || w->router_link != e->b) return;
    if (w->router_link == 0) return;
    w->router_link = 0;
    struct td_flow_event ev = {.kind = TD_FLOW_WORKER_DOWN};
    ev.worker.epoch = e->d;
    sim_router_step(s, &ev);
}

static void on_worker_side_down(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    if (w->my_link != e->a) return; /* the reply never came: dial again all the same */
    w->my_link = 0;
    if (w->role == TD_ROLE_PREFILL) {
        struct td_prefill_event ev = {.kind = TD_PREFILL_ROUTER_DOWN};
        sim_prefill_step(s, w, &ev);
    } else {
        struct td_decode_event ev = {.kind = TD_DECODE_ROUTER_DOWN};
        sim_decode_step(s, w, &ev);
    }
    sim_dial(s, w, sim_below(s, 200 * SIM_MS));
}

void sim_link_break(struct sim *s, struct sim_worker *w) {
    if (w->router_link != 0) {
        struct sim_event *r = sim_at(s, s->now + sim_delay(s), -1, on_router_side_down);
        r->a = w->index;
        r->b = w->router_link;
        r->c = s->router_life;
        r->d = w->epoch;
    }
    if (w->alive) {
        /* After a reply that may still be under way. */
        uint32_t link = w->dials;
        struct sim_event *d = sim_at(s, in_order(&w->from_router_at, s->now + sim_delay(s)),
                                     (int)w->index, on_worker_side_down);
        d->a = link;
    }
}

/* ---- messages ---- */

static void on_at_router(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->a];
    if (s->flow == NULL || w->router_link == 0 || w->router_link != e->b || s->router_life != e->c)
        return;
    sim_print(s, w->name, "router", e->msg);
    struct td_flow_event ev = {.kind = TD_FLOW_MESSAGE};
    ev.worker.epoch = e->d;
    ev.worker.msg = e->msg;
    sim_router_step(s, &ev);
}

static void send_to_router(struct sim *s, struct sim_worker *w, const struct td_msg *m,
                           uint64_t at) {
    struct sim_event *e = sim_at(s, at, -1, on_at_router);
    e->a = w->index;
    e->b = w->my_link;
    e->c = s->router_life;
    e->d = w->epoch;
    sim_copy_msg(e, m);
}

void sim_to_router(struct sim *s, struct sim_worker *w, const struct td_msg *m) {
    if (w->my_link == 0) return;
    send_to_router(s, w, m, in_order(&w->to_router_at, s->now + sim_delay(s)));
    if (!s->calm && sim_chance(s, s->o.doubled))
        send_to_router(s, w, m, w->to_router_at + sim_below(s, 20 * SIM_MS));
}

void sim_say_moved(struct sim *s, struct sim_worker *w) {
    const struct sim_address address = {w->epoch, w->number};
    struct td_msg m = {.type = TD_MSG_MOVED};
    m.moved = (struct td_msg_moved){w->epoch, (const uint8_t *)&address, sizeof address, w->number};
    if (w->role == TD_ROLE_DECODE) sim_to_router(s, w, &m);
}

static const int32_t *keep_ids(struct sim_worker *w, const int32_t *ids, uint32_t n) {
    struct sim_ids *c = malloc(sizeof *c + n * sizeof *ids);
    memcpy(c->ids, ids, n * sizeof *ids);
    c->next = w->ids;
    w->ids = c;
    return c->ids;
}

/* What is in it is nothing to the machines; that each one comes back once is. */
static void keep_guide(struct sim_worker *w, struct td_sampling *s) {
    static const int32_t nothing[4];
    if (s->guide != NULL) s->guide = (const void *)keep_ids(w, nothing, 4);
}

static void on_at_worker(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    if (w->my_link == 0 || w->my_link != e->b) return;
    struct td_msg *m = e->msg;
    sim_print(s, "router", w->name, m);
    if (w->role == TD_ROLE_PREFILL) {
        if (m->type == TD_MSG_PREFILL) {
            m->prefill.ids = keep_ids(w, m->prefill.ids, m->prefill.n_prompt);
            keep_guide(w, &m->prefill.sampling);
        }
        struct td_prefill_event ev = {.kind = TD_PREFILL_MESSAGE, .msg = m};
        sim_prefill_step(s, w, &ev);
    } else {
        if (m->type == TD_MSG_ADMIT && m->admit.ids != NULL)
            m->admit.ids = keep_ids(w, m->admit.ids, m->admit.n_prompt);
        if (m->type == TD_MSG_ADMIT) keep_guide(w, &m->admit.sampling);
        struct td_decode_event ev = {.kind = TD_DECODE_MESSAGE, .msg = m};
        sim_decode_step(s, w, &ev);
    }
}

static void send_to_worker(struct sim *s, struct sim_worker *w, const struct td_msg *m,
                           uint64_t at) {
    struct sim_event *e = sim_at(s, at, (int)w->index, on_at_worker);
    e->b = w->router_link;
    sim_copy_msg(e, m);
}

void sim_from_router(struct sim *s, uint64_t epoch, const struct td_msg *m) {
    struct sim_worker *w = by_epoch(s, epoch);
    if (w == NULL || w->router_link == 0) return;
    send_to_worker(s, w, m, in_order(&w->from_router_at, s->now + sim_delay(s)));
    if (!s->calm && sim_chance(s, s->o.doubled))
        send_to_worker(s, w, m, w->from_router_at + sim_below(s, 20 * SIM_MS));
}

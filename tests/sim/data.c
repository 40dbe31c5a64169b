/* The data plane: links between prefill and decode, messages, and puts, which write into the other
 * process's memory whether it is awake or not, and may still do so after they were given up. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

static uint64_t in_order(uint64_t *last, uint64_t at) {
    *last = at > *last ? at : *last + 1;
    return *last;
}

static struct sim_link *by_id(struct sim *s, uint64_t id) {
    return id >= 1 && id <= s->n_link ? &s->link[id - 1] : NULL;
}

/* The newest link of this life of the prefill worker to that decode epoch, open on its side. */
static struct sim_link *of_prefill(struct sim *s, const struct sim_worker *p, uint64_t d_epoch) {
    for (size_t i = s->n_link; i-- > 0;)
        if (s->link[i].p == p->index && s->link[i].p_life == p->life &&
            s->link[i].d_epoch == d_epoch && s->link[i].p_open)
            return &s->link[i];
    return NULL;
}

static bool decode_alive(const struct sim *s, const struct sim_link *l) {
    return s->worker[l->d].alive && s->worker[l->d].life == l->d_life;
}

static bool prefill_alive(const struct sim *s, const struct sim_link *l) {
    return s->worker[l->p].alive && s->worker[l->p].life == l->p_life;
}

/* ---- losing ---- */

static void on_prefill_lost(struct sim *s, struct sim_event *e) {
    struct td_prefill_event ev = {.kind = TD_PREFILL_PEER_LOST};
    ev.peer.epoch = e->a;
    ev.peer.status = TD_PEER_LOST;
    struct sim_link *l = by_id(s, e->b);
    if (l != NULL && (!l->p_open || l->p_told)) return;
    if (l != NULL && s->worker[e->worker].deaf && decode_alive(s, l)) return;
    if (l != NULL) l->p_told = true;
    sim_prefill_step(s, &s->worker[e->worker], &ev);
}

static void tell_prefill(struct sim *s, struct sim_link *l) {
    if (!prefill_alive(s, l)) return;
    struct sim_event *e =
        sim_at(s, in_order(&l->to_p_at, s->now + sim_delay(s)), (int)l->p, on_prefill_lost);
    e->a = l->d_epoch;
    e->b = l->id;
}

static void on_decode_lost(struct sim *s, struct sim_event *e) {
    struct sim_link *l = by_id(s, e->a);
    if (l->d_told || (s->worker[e->worker].deaf && prefill_alive(s, l))) return;
    l->d_told = true;
    l->d_open = false;
    struct td_decode_event ev = {.kind = TD_DECODE_PEER_LOST};
    ev.peer.link = l->id;
    sim_decode_step(s, &s->worker[e->worker], &ev);
}

static void tell_decode(struct sim *s, struct sim_link *l) {
    if (!decode_alive(s, l)) return;
    struct sim_event *e =
        sim_at(s, in_order(&l->to_d_at, s->now + sim_delay(s)), (int)l->d, on_decode_lost);
    e->a = l->id;
}

static void on_exited(struct sim *s, struct sim_event *e) {
    struct td_decode_event ev = {.kind = TD_DECODE_PEER_EXITED};
    ev.peer.link = e->a;
    struct sim_worker *d = &s->worker[e->worker];
    sim_decode_step(s, d, &ev);
}

/* ---- connecting, closing ---- */

void sim_connect(struct sim *s, struct sim_worker *p, struct sim_address to) {
    uint64_t d_epoch = to.epoch;
    struct sim_worker *d = NULL;
    for (uint32_t i = 0; i < s->n_workers; i++)
        if (s->worker[i].alive && s->worker[i].epoch == d_epoch) d = &s->worker[i];
    /* At once, from inside the action: the machine must bear it. */
    if (d == NULL || d->number != to.number) {
        struct td_prefill_event ev = {.kind = TD_PREFILL_PEER_LOST};
        ev.peer.epoch = d_epoch;
        ev.peer.status = d == NULL ? TD_UNREACHABLE : TD_PEER_LOST;
        sim_prefill_step(s, p, &ev);
        return;
    }
    if (s->n_link == s->cap_link) {
        s->cap_link = s->cap_link == 0 ? 64 : 2 * s->cap_link;
        s->link = realloc(s->link, s->cap_link * sizeof *s->link);
    }
    s->link[s->n_link] = (struct sim_link){
        .id = s->n_link + 1,
        .p = p->index,
        .d = d->index,
        .p_life = p->life,
        .d_life = d->life,
        .p_epoch = p->epoch,
        .d_epoch = d_epoch,
        .p_open = true,
        .d_open = true,
    };
    s->n_link++;
}

static void on_closed(struct sim *s, struct sim_event *e) {
    for (size_t i = 0; i < sizeof s->put / sizeof s->put[0]; i++)
        if (s->put[i].used && s->put[i].link == e->b) { /* not yet quiet */
            struct sim_event *again = sim_at(s, s->now + SIM_MS, e->worker, on_closed);
            again->a = e->a;
            again->b = e->b;
            return;
        }
    struct td_prefill_event ev = {.kind = TD_PREFILL_PEER_CLOSED};
    ev.peer.epoch = e->a;
    sim_prefill_step(s, &s->worker[e->worker], &ev);
}

static void end_put(struct sim *s, struct sim_put *put, td_status status);

void sim_close_by_prefill(struct sim *s, struct sim_worker *p, uint64_t d_epoch) {
    struct sim_link *l = of_prefill(s, p, d_epoch);
    struct sim_event *e = sim_at(s, s->now + sim_delay(s), (int)p->index, on_closed);
    e->a = d_epoch;
    e->b = l != NULL ? l->id : UINT64_MAX;
    if (l != NULL) {
        l->p_open = false;
        tell_decode(s, l);
        for (size_t i = 0; i < sizeof s->put / sizeof s->put[0]; i++)
            if (s->put[i].used && s->put[i].link == l->id) end_put(s, &s->put[i], TD_CANCELLED);
    }
}

void sim_close_by_decode(struct sim *s, struct sim_worker *d, uint64_t link) {
    struct sim_link *l = by_id(s, link);
    (void)d;
    if (l == NULL) return;
    if (!l->d_open) return;
    l->d_open = false;
    l->d_told = true;
    tell_prefill(s, l);
}

void sim_data_death(struct sim *s, struct sim_worker *w) {
    for (size_t i = 0; i < s->n_link; i++) {
        struct sim_link *l = &s->link[i];
        if (l->d == w->index && l->d_life == w->life) tell_prefill(s, l);
        if (l->p != w->index || l->p_life != w->life || !decode_alive(s, l)) continue;
        /* Sometimes nothing is noticed but the silence; the exit is always proven in the end. */
        if (sim_chance(s, 700)) tell_decode(s, l);
        sim_at(s, s->now + sim_below(s, 2 * SIM_S), (int)l->d, on_exited)->a = l->id;
    }
    for (size_t i = 0; i < sizeof s->put / sizeof s->put[0]; i++)
        if (s->put[i].used && s->put[i].p == w->index) s->put[i].used = false;
}

/* ---- deafness ---- */

static void lose_link(struct sim *s, struct sim_worker *w, struct sim_link *l) {
    if (w->role == TD_ROLE_PREFILL && l->p == w->index && prefill_alive(s, l) && l->p_open) {
        sim_at(s, s->now, (int)l->p, on_prefill_lost)->a = l->d_epoch;
        if (!l->p_told) tell_decode(s, l);
    } else if (w->role == TD_ROLE_DECODE && l->d == w->index && decode_alive(s, l) && l->d_open) {
        sim_at(s, s->now, (int)l->d, on_decode_lost)->a = l->id;
        if (l->d_heard) tell_prefill(s, l); /* of the others it knows nothing */
    }
}

static void on_renewed(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    w->deaf = false;
    w->number++;
    sim_note(s, "%s hears again\n", w->name);
    for (size_t i = 0; i < s->n_link; i++)
        lose_link(s, w, &s->link[i]);
    sim_say_moved(s, w);
}

void sim_deafen(struct sim *s, struct sim_worker *w) {
    if (!w->alive || w->deaf) return;
    w->deaf = true;
    sim_note(s, "%s is deaf\n", w->name);
    sim_at(s, s->now + 100 * SIM_MS + sim_below(s, 800 * SIM_MS), (int)w->index, on_renewed);
}

/* ---- messages ---- */

static bool lost(struct sim *s, const struct td_msg *m) {
    if (s->lose != 0 && m->type == s->lose) {
        s->lose = 0;
        return true;
    }
    return !s->calm && sim_chance(s, s->o.data_lost);
}

static void on_at_decode(struct sim *s, struct sim_event *e) {
    struct sim_link *l = by_id(s, e->a);
    if (!l->d_open || s->worker[e->worker].deaf) return;
    l->d_heard = true;
    sim_print(s, s->worker[l->p].name, s->worker[l->d].name, e->msg);
    struct td_decode_event ev = {.kind = TD_DECODE_PEER_MESSAGE};
    ev.peer.link = l->id;
    ev.peer.msg = e->msg;
    sim_decode_step(s, &s->worker[e->worker], &ev);
    /* As the shell, which begins to watch a process at its hello. */
    if (e->msg->type == TD_MSG_PEER_HELLO && !prefill_alive(s, l))
        sim_at(s, s->now, e->worker, on_exited)->a = l->id;
}

static void to_decode(struct sim *s, struct sim_link *l, const struct td_msg *m, uint64_t at) {
    struct sim_event *e = sim_at(s, at, (int)l->d, on_at_decode);
    e->a = l->id;
    sim_copy_msg(e, m);
}

void sim_send_to_decode(struct sim *s, struct sim_worker *p, uint64_t d_epoch,
                        const struct td_msg *m) {
    struct sim_link *l = of_prefill(s, p, d_epoch);
    if (l == NULL || !decode_alive(s, l) || lost(s, m)) return;
    to_decode(s, l, m, in_order(&l->to_d_at, s->now + sim_delay(s)));
    if (!s->calm && sim_chance(s, s->o.doubled))
        to_decode(s, l, m, l->to_d_at + sim_below(s, 20 * SIM_MS));
}

static void on_at_prefill(struct sim *s, struct sim_event *e) {
    struct sim_link *l = by_id(s, e->a);
    if (!l->p_open || s->worker[e->worker].deaf) return;
    sim_print(s, s->worker[l->d].name, s->worker[l->p].name, e->msg);
    struct td_prefill_event ev = {.kind = TD_PREFILL_PEER_MESSAGE};
    ev.peer.epoch = l->d_epoch;
    ev.peer.msg = e->msg;
    sim_prefill_step(s, &s->worker[e->worker], &ev);
}

static void to_prefill(struct sim *s, struct sim_link *l, const struct td_msg *m, uint64_t at) {
    struct sim_event *e = sim_at(s, at, (int)l->p, on_at_prefill);
    e->a = l->id;
    sim_copy_msg(e, m);
}

/* A landing slab has two owners when it is granted while the earlier holder may still write. */
static void grant(struct sim *s, struct sim_worker *d, const struct sim_link *l, uint32_t first,
                  uint32_t n) {
    for (uint32_t k = first; k < first + n; k++) {
        for (size_t i = 0; i < sizeof s->put / sizeof s->put[0]; i++) {
            const struct sim_put *put = &s->put[i];
            if (!put->used || put->landing != k || put->written) continue;
            const struct sim_link *from = by_id(s, put->link);
            if (from->d == d->index && from->d_life == d->life && from->id != l->id)
                sim_broken(s, "%s: landing slab %u is granted while an earlier write is under way",
                           d->name, k);
        }
        if (d->slab_readers[k] != 0)
            sim_broken(s, "%s: landing slab %u is granted while it is unpacked", d->name, k);
        d->granted[k] = l->p_epoch;
    }
}

void sim_send_to_prefill(struct sim *s, struct sim_worker *d, uint64_t link,
                         const struct td_msg *m) {
    struct sim_link *l = by_id(s, link);
    if (l == NULL || l->d != d->index || l->d_life != d->life || !l->d_open) return;
    if (m->type == TD_MSG_PEER_WELCOME && m->peer_welcome.status == TD_OK)
        grant(s, d, l, (uint32_t)m->peer_welcome.slab_address[0], m->peer_welcome.n_slabs);
    if (!prefill_alive(s, l) || lost(s, m)) return;
    to_prefill(s, l, m, in_order(&l->to_p_at, s->now + sim_delay(s)));
    if (!s->calm && sim_chance(s, s->o.doubled))
        to_prefill(s, l, m, l->to_p_at + sim_below(s, 20 * SIM_MS));
}

/* ---- puts ---- */

static void on_write(struct sim *s, struct sim_event *e) {
    struct sim_put *put = &s->put[e->a];
    if (!put->used || put->link != e->b || put->p_life != e->c || put->written) return;
    put->written = true;
    struct sim_link *l = by_id(s, put->link);
    struct sim_worker *d = &s->worker[l->d];
    if (!decode_alive(s, l)) return;
    if (d->granted[put->landing] != l->p_epoch)
        sim_broken(s, "%s writes into landing slab %u of %s, which is not granted to it",
                   s->worker[l->p].name, put->landing, d->name);
    if (d->slab_readers[put->landing] != 0)
        sim_broken(s, "%s writes into landing slab %u of %s while it is unpacked",
                   s->worker[l->p].name, put->landing, d->name);
    d->slab[put->landing] = put->content;
}

static void report(struct sim *s, struct sim_put *put, enum td_prefill_event_kind kind,
                   td_status status, bool quiet) {
    struct sim_worker *p = &s->worker[put->p];
    struct td_prefill_event ev = {.kind = kind};
    ev.put.send_slab = put->send_slab;
    ev.put.status = status;
    ev.put.quiet = quiet;
    if (quiet) {
        p->slab_readers[put->send_slab]--;
        put->used = false;
    }
    sim_prefill_step(s, p, &ev);
}

static bool current(const struct sim_put *put, const struct sim_event *e) {
    return put->used && put->link == e->b && put->p_life == e->c;
}

static void on_quiet(struct sim *s, struct sim_event *e) {
    struct sim_put *put = &s->put[e->a];
    if (current(put, e)) report(s, put, TD_PREFILL_PUT_QUIET, TD_OK, true);
}

static struct sim_event *put_event(struct sim *s, struct sim_put *put, uint64_t at,
                                   void (*fn)(struct sim *, struct sim_event *)) {
    struct sim_event *e = sim_at(s, at, (int)put->p, fn); /* a frozen process does not write */
    e->a = (uint64_t)(put - s->put);
    e->b = put->link;
    e->c = put->p_life;
    return e;
}

static void on_failed(struct sim *s, struct sim_event *e) {
    struct sim_put *put = &s->put[e->a];
    if (!current(put, e)) return;
    bool quiet = sim_chance(s, 300);
    if (!quiet) put_event(s, put, s->now + sim_below(s, 20 * SIM_MS), on_quiet);
    report(s, put, TD_PREFILL_PUT_DONE, (td_status)e->d, quiet);
}

static void on_flushed(struct sim *s, struct sim_event *e) {
    struct sim_put *put = &s->put[e->a];
    if (!current(put, e) || put->cancelled) return;
    report(s, put, TD_PREFILL_PUT_DONE, TD_OK, true);
}

/* Given up: reported soon, quiet later; in between the write may still happen. */
static void end_put(struct sim *s, struct sim_put *put, td_status status) {
    if (put->cancelled) return;
    put->cancelled = true;
    put_event(s, put, s->now + sim_below(s, 10 * SIM_MS), on_failed)->d = status;
}

static void damage(struct sim *s, struct sim_put *put) {
    struct sim_block *b = &put->content.block[sim_below(s, put->content.n)];
    bool corrupt = !s->calm && sim_chance(s, s->o.corrupt);
    bool forged = !s->calm && sim_chance(s, s->o.forged);
    if (!corrupt && !forged) return;
    b->page.end ^= 1ull << sim_below(s, 64);
    b->slot.hash ^= 1ull << sim_below(s, 64);
    if (!forged) return;
    /* Well-formed: each family's checksum fits the content, only the sender's sums do not. */
    sim_reseal(b);
}

void sim_put(struct sim *s, struct sim_worker *p, const struct td_prefill_action *a) {
    struct sim_link *l = of_prefill(s, p, a->put.epoch);
    struct sim_put *put = s->put;
    while (put->used)
        put++;
    *put = (struct sim_put){
        .used = true,
        .p = p->index,
        .p_life = p->life,
        .send_slab = a->put.send_slab,
        .landing = (uint32_t)a->put.remote_address,
        .link = l != NULL ? l->id : 0,
        .content = p->slab[a->put.send_slab],
    };
    p->slab_readers[a->put.send_slab]++;
    if (l == NULL || !decode_alive(s, l)) {
        end_put(s, put, TD_PEER_LOST);
        return;
    }
    damage(s, put);
    uint64_t write = s->now + sim_delay(s);
    put_event(s, put, write, on_write);
    if (!s->calm && sim_chance(s, s->o.put_fails))
        end_put(s, put, TD_TIMEOUT);
    else
        put_event(s, put, write + 1 + sim_delay(s), on_flushed);
}

/* The life of a request, from the queue to a pair of workers; timers; workers that come and go.
 * Beside it: flow_leg.c (legs and ends), flow_tokens.c (what workers say), flow_probe.c
 * (readiness), flow_table.c (entries and clocks). */
#include "router/flow.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/kv/checksum.h"
#include "router/flow_parts.h"

td_status td_flow_create(const struct td_flow_options *o, struct td_flow **ret,
                         struct td_error *err) {
    assert(o->max_requests >= 1 && o->probe_new <= TD_FLOW_PROBE_TOKENS_MAX);
    assert(o->probe_n == 0 || o->probe_new >= 1);
    struct td_flow *f = calloc(1, sizeof *f);
    if (f == NULL) return td_fail(err, TD_NO_MEMORY, "flow: out of memory");
    f->o = *o;
    f->pump_ns = f->probe_ns = UINT64_MAX;
    f->next_probe = 1;
    td_fleet_init(&f->fleet, &o->fleet);
    td_status st = td_flow_table_create(f, err);
    if (st != TD_OK) {
        td_flow_destroy(f);
        return st;
    }
    *ret = f;
    return TD_OK;
}

void td_flow_destroy(struct td_flow *f) {
    if (f == NULL) return;
    td_fifo_destroy(&f->actions);
    free(f->bucket);
    free(f->table);
    free(f);
}

/* ---- from the queue to a pair ---- */

void td_flow_start(struct td_flow *f, struct request *r, struct td_pair pair) {
    /* A leg on a worker that has left would never be closed. */
    assert(td_fleet_find(&f->fleet, pair.decode) != NULL);
    r->attempt++;
    r->pair = pair;
    if (!r->has_prompt) memcpy(r->s.ids, r->prompt, r->s.n_prompt * sizeof *r->s.ids);
    r->has_prompt = true;
    if (td_flow_shown(r)) {
        r->base = r->delivered;
        r->fruitless = 0;
        r->prompt_hash = td_prompt_hash(r->s.ids, td_flow_n_prompt(r));
    }
    uint32_t n = td_flow_n_prompt(r), alone = pair.prefill == 0 ? n : 0;
    uint64_t work = (uint64_t)td_flow_work(r) * r->together + alone;
    r->decode = td_flow_leg_open(f, r, pair.decode, work);
    td_flow_leg(r, r->decode)->prompt = alone;
    /* Whoever asks beside it could take what it waits for. */
    if (r->refused > 0) td_fleet_asked(&f->fleet, pair.decode, true);
    td_flow_leg(r, r->decode)->asks = r->refused > 0;
    struct td_msg_admit *m = &td_flow_send(f, pair.decode, TD_MSG_ADMIT)->admit;
    m->key = (struct td_key){r->s.request, r->attempt};
    m->n_prompt = n;
    m->max_new = td_flow_max_new(r);
    m->n = r->together;
    m->sampling = td_flow_sampling(r);
    m->prompt_hash = r->prompt_hash;
    m->ids = pair.prefill == 0 ? r->s.ids : NULL;
    td_flow_to(f, r, ADMITTING, f->now_ns + f->o.admit_ns);
}

static bool too_long(struct td_flow *f, struct request *r, bool colocate) {
    uint64_t tokens = (uint64_t)r->s.n_prompt + r->s.max_new;
    uint32_t limit = td_fleet_limit(&f->fleet, colocate);
    if (limit == 0 || tokens <= limit) return false;
    char text[TD_TEXT_MAX];
    snprintf(text, sizeof text,
             "%u prompt tokens and up to %u output tokens make %llu, the limit is %u",
             r->s.n_prompt, r->s.max_new, (unsigned long long)tokens, limit);
    td_flow_fail(f, r, TD_TOO_LONG, 0, text);
    return true;
}

/* First come, first served, within a priority: when the first finds no room, nobody overtakes it. A request that no
 * proven pair could take at all does not hold up the others, nor does one whose earlier attempts'
 * workers have not let go, nor one that waits for what failed it to cool down. */
static void pump(struct td_flow *f) {
    if (!f->pump_due && f->now_ns < f->pump_ns) return;
    f->pump_due = false;
    f->pump_ns = UINT64_MAX;
    TD_LIST_EACH_SAFE (&f->queued.head, it, tmp) {
        struct request *r = TD_CONTAINER(it, struct request, link);
        bool colocate = r->s.colocate || f->o.fleet.colocate;
        struct td_pair pair;
        uint64_t when;
        if (!td_flow_leg_room(r) || too_long(f, r, colocate)) continue;
        const struct td_fleet_need need = {r->s.n_prompt, r->s.max_new, r->together};
        bool patient = r->failures > 0;
        td_status s = td_fleet_choose(&f->fleet, f->now_ns, need, colocate, patient, &pair, &when);
        if (s == TD_OK) {
            td_flow_start(f, r, pair);
        } else if (s == TD_BUSY) {
            uint64_t unused;
            if (when < f->pump_ns) f->pump_ns = when;
            if (!patient || td_fleet_choose(&f->fleet, f->now_ns, need, colocate, false, &pair,
                                            &unused) != TD_OK)
                return;
        }
    }
}

static void refuse(struct td_flow *f, const struct td_flow_submit *s, const char *text) {
    for (uint32_t c = 0; c == 0 || c < s->n; c++) {
        struct td_flow_action *a = td_fifo_push(&f->actions);
        a->kind = TD_FLOW_FAIL;
        a->request = s->request;
        a->choice = c;
        a->user = s->user;
        a->fail.status = TD_BUSY;
        a->fail.retry_ms = td_flow_retry_ms(f);
        a->fail.times = (struct td_flow_times){.submitted = f->now_ns, .ended = f->now_ns};
        snprintf(a->fail.text, sizeof a->fail.text, "%s", text);
        f->counts.failed++;
    }
}

static void submit(struct td_flow *f, const struct td_flow_submit *s) {
    assert(s->request != 0 && (s->request & TD_FLOW_PROBE_BIT) == 0);
    assert(s->n_prompt >= 1 && s->max_new >= 1 && s->n <= TD_CHOICES_MAX);
    assert(td_flow_find(f, s->request) == NULL);
    f->counts.submitted += s->n > 1 ? s->n : 1;
    uint32_t n = s->n > 1 ? s->n : 1;
    if (f->counts.live + n > f->o.max_requests) {
        refuse(f, s, "as many requests are in flight as router.max_requests allows");
        return;
    }
    if (f->counts.queued > 0 && td_flow_wait_ns(f) > f->o.queue_ns) {
        refuse(f, s, "those that wait already would use up the time a request may wait");
        return;
    }
    struct request *r = td_flow_take(f, s);
    if (r == NULL) {
        refuse(f, s, "too many ended requests still wait for their workers");
        return;
    }
    f->counts.live += n;
    r->prompt_hash = td_prompt_hash(s->ids, s->n_prompt);
    r->queue_deadline_ns = f->now_ns + f->o.queue_ns;
    td_flow_to(f, r, QUEUED, r->queue_deadline_ns);
}

/* ---- clocks ---- */

static void waited_too_long(struct td_flow *f, struct request *r) {
    bool served = td_fleet_ready(&f->fleet);
    if (served && r->delivered > 0) { /* preempted: older ones end, then it is its turn */
        r->queue_deadline_ns = f->now_ns + f->o.queue_ns;
        td_flow_to(f, r, QUEUED, r->queue_deadline_ns);
        return;
    }
    td_flow_fail(f, r, served ? TD_BUSY : TD_UNREACHABLE, td_flow_retry_ms(f),
                 served ? "no pair of workers had room in time" : "no pair of workers is ready");
}

static void not_admitted(struct td_flow *f, struct request *r) {
    td_flow_attempt_failed(f, r, TD_TIMEOUT, r->pair.decode,
                           "the decode worker did not answer the admission in time");
}

static void keep(struct td_flow *f, struct request *r) {
    if (r->last_word) {
        td_flow_to(f, r, ADMITTED, UINT64_MAX);
        return;
    }
    struct leg *l = td_flow_leg(r, r->decode);
    if (l->kept_ns != f->now_ns) /* one for all choices of an attempt */
        td_flow_send(f, r->pair.decode, TD_MSG_KEEP)->keep.key = td_flow_key(r, r->decode);
    l->kept_ns = f->now_ns;
    td_flow_to(f, r, ADMITTED, f->now_ns + r->keep_ns);
}

static void expire(struct td_flow *f, struct clocked *c,
                   void (*expired)(struct td_flow *, struct request *)) {
    if (c->next_ns > f->now_ns) return;
    c->next_ns = UINT64_MAX;
    TD_LIST_EACH_SAFE (&c->head, it, tmp) {
        struct request *r = TD_CONTAINER(it, struct request, link);
        if (r->deadline_ns <= f->now_ns)
            expired(f, r);
        else if (r->deadline_ns < c->next_ns)
            c->next_ns = r->deadline_ns;
    }
}

uint64_t td_flow_deadline(const struct td_flow *f) {
    const uint64_t all[] = {f->queued.next_ns,
                            f->admitting.next_ns,
                            f->admitted.next_ns,
                            f->pump_ns,
                            f->probe.active ? UINT64_MAX : f->probe_ns,
                            td_fleet_stall_at(&f->fleet)};
    uint64_t first = UINT64_MAX;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (all[i] < first) first = all[i];
    return first;
}

/* ---- workers that come and go ---- */

static void choice_lost(struct td_flow *f, struct request *r, bool decode) {
    bool prefill = !decode;
    if (decode && r->finished == 0)
        td_flow_attempt_failed(f, r, TD_PEER_LOST, 0, "the decode worker was lost");
    else if (prefill && !td_flow_shown(r))
        td_flow_attempt_failed(f, r, TD_PEER_LOST, 0, "the prefill worker was lost");
    else if (prefill && r->state == ADMITTED)
        r->last_word = true;
}

static void leg_lost(struct td_flow *f, struct request *host, int i) {
    struct request *all[TD_CHOICES_MAX];
    bool decode[TD_CHOICES_MAX];
    uint32_t n = td_flow_leg_choices(host, i, all);
    for (uint32_t k = 0; k < n; k++)
        decode[k] = all[k]->decode == i;
    td_flow_leg_close(f, host, i); /* whose entry may be free now */
    for (uint32_t k = 0; k < n; k++)
        choice_lost(f, all[k], decode[k]);
}

static void worker_down(struct td_flow *f, uint64_t epoch) {
    td_fleet_leave(&f->fleet, epoch);
    for (uint32_t k = 0; k < f->capacity; k++) {
        struct request *r = &f->table[k];
        for (int i = 0; i < LEGS_MAX && r->state != FREE; i++)
            if (r->leg[i].epoch == epoch) leg_lost(f, r, i);
    }
}

static void say_stalled(struct td_flow *f, uint64_t epoch, bool moves) {
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = TD_FLOW_STALLED;
    a->epoch = epoch;
    a->moves = moves;
    f->pump_due = true;
    f->probe_ns = 0;
}

/* Its links work, so the legs stay until it releases them: only what waits for it goes elsewhere. A
 * prefill worker that has computed the prompt is not waited for. */
static void engine_stalled(struct td_flow *f, uint64_t epoch) {
    say_stalled(f, epoch, false);
    for (uint32_t k = 0; k < f->capacity; k++) {
        struct request *r = &f->table[k];
        if (r->state == FREE || r->state == OVER) continue;
        bool decode = r->decode != NO_LEG && td_flow_leg(r, r->decode)->epoch == epoch;
        bool prefill = r->prefill != NO_LEG && td_flow_leg(r, r->prefill)->epoch == epoch;
        if ((decode && r->finished == 0) || (prefill && !td_flow_shown(r)))
            td_flow_attempt_failed(
                f, r, TD_TIMEOUT, 0, "the %s worker's engine has not advanced for %llu ms",
                decode ? "decode" : "prefill", (unsigned long long)(f->fleet.o.stall_ns / 1000000));
    }
}

static void worker_up(struct td_flow *f, const struct td_msg_hello *h) {
    uint64_t replaced;
    td_fleet_join(&f->fleet, f->now_ns, h, &replaced);
    f->probe_ns = 0;
    if (replaced == 0) return;
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = TD_FLOW_CLOSE_LINK;
    a->epoch = replaced;
    worker_down(f, replaced);
}

/* Who prefills hears of it at once, for the sake of links that nobody needs just now: what was
 * granted over them comes back only when they are made again. */
static void worker_moved(struct td_flow *f, uint64_t epoch, const struct td_msg_moved *m) {
    if (m->epoch != epoch || !td_fleet_moved(&f->fleet, m)) return;
    const struct td_fleet_worker *d = td_fleet_find(&f->fleet, epoch);
    for (uint64_t left = f->fleet.prefills; left != 0; left &= left - 1) {
        const struct td_fleet_worker *p = &f->fleet.worker[__builtin_ctzll(left)];
        td_flow_send(f, p->epoch, TD_MSG_MOVED)->moved =
            (struct td_msg_moved){epoch, d->xfer_address, d->xfer_address_len, d->xfer_number};
    }
    f->pump_due = true;
    f->probe_ns = 0;
}

/* ---- the step ---- */

static void worker_message(struct td_flow *f, uint64_t epoch, const struct td_msg *m) {
    if (m->type == TD_MSG_HEARTBEAT) {
        if (td_fleet_beat(&f->fleet, f->now_ns, &m->heartbeat)) say_stalled(f, epoch, true);
    } else if (m->type == TD_MSG_LEDGER)
        td_fleet_ledger(&f->fleet, epoch, &m->ledger);
    else if (m->type == TD_MSG_MOVED)
        worker_moved(f, epoch, &m->moved);
    else
        td_flow_message(f, epoch, m);
}

static void cancel(struct td_flow *f, uint64_t request) {
    struct request *r = td_flow_find(f, request);
    if (r == NULL || r->state == OVER) return;
    if (r->state == FOLLOWING) r = r->lead;
    f->counts.cancelled += r->together;
    td_flow_over(f, r);
}

static void stop(struct td_flow *f, uint64_t request) {
    struct request *r = td_flow_find(f, request);
    if (r != NULL && r->state != OVER && r->state != FOLLOWING) td_flow_end(f, r, TD_FINISH_STOP);
}

void td_flow_step(struct td_flow *f, const struct td_flow_event *ev) {
    assert(ev->now_ns >= f->now_ns);
    f->now_ns = ev->now_ns;
    switch (ev->kind) {
    case TD_FLOW_SUBMIT:
        submit(f, &ev->submit);
        break;
    case TD_FLOW_CANCEL:
        cancel(f, ev->request);
        break;
    case TD_FLOW_STOP:
        stop(f, ev->request);
        break;
    case TD_FLOW_MESSAGE:
        worker_message(f, ev->worker.epoch, ev->worker.msg);
        break;
    case TD_FLOW_WORKER_UP:
        worker_up(f, ev->hello);
        break;
    case TD_FLOW_WORKER_DOWN:
        worker_down(f, ev->worker.epoch);
        f->probe_ns = 0;
        break;
    case TD_FLOW_DRAIN:
        td_fleet_drain(&f->fleet, ev->drain.name, ev->drain.draining);
        f->probe_ns = 0;
        f->pump_due = true;
        break;
    case TD_FLOW_TIMER:
        expire(f, &f->queued, waited_too_long);
        expire(f, &f->admitting, not_admitted);
        expire(f, &f->admitted, keep);
        for (uint64_t e; (e = td_fleet_stall(&f->fleet, f->now_ns)) != 0;)
            engine_stalled(f, e);
        break;
    }
    td_flow_probe_pump(f);
    pump(f);
}

bool td_flow_next(struct td_flow *f, struct td_flow_action *ret) {
    return td_fifo_pop(&f->actions, ret);
}

const struct td_fleet *td_flow_fleet(const struct td_flow *f) {
    return &f->fleet;
}

void td_flow_counts(const struct td_flow *f, struct td_flow_counts *ret) {
    *ret = f->counts;
}

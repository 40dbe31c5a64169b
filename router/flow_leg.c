/* Legs, and the ways an attempt or a whole request ends. A leg outlives its attempt and even its
 * request: it is closed by RELEASED or by the end of its worker, never by forgetting. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "router/flow_parts.h"

#define MS_NS 1000000ull
enum { RETRY_MS_MIN = 100, RETRY_MS_MAX = 60000, RETRY_MS_UNKNOWN = 1000 };

struct td_msg *td_flow_send(struct td_flow *f, uint64_t epoch, enum td_msg_type type) {
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = TD_FLOW_SEND;
    a->epoch = epoch;
    a->msg.type = type;
    return &a->msg;
}

int td_flow_leg_open(struct td_flow *f, struct request *r, uint64_t epoch, uint64_t work) {
    int i = 0;
    while (r->leg[i].epoch != 0)
        i++;
    assert(i < LEGS_MAX && r->host == r);
    r->leg[i] = (struct leg){
        .epoch = epoch, .attempt = r->attempt, .choices = (1u << r->together) - 1, .work = work};
    td_fleet_began(&f->fleet, epoch, work);
    return i;
}

bool td_flow_leg_room(const struct request *r) {
    int room = 0;
    for (int i = 0; i < LEGS_MAX; i++)
        room += r->leg[i].epoch == 0;
    return room >= 2;
}

void td_flow_leg_did(struct td_flow *f, struct leg *l, uint64_t tokens) {
    if (tokens > l->work) tokens = l->work; /* an estimate: answers may outgrow it */
    l->work -= tokens;
    td_fleet_did(&f->fleet, l->epoch, tokens);
}

/* What the attempt's workers call it. */
static uint32_t bits(const struct request *r) {
    return r->host == r ? (1u << r->together) - 1 : 1u << r->number;
}

void td_flow_leg_done_all(struct td_flow *f, struct leg *l) {
    l->choices = 0;
    l->told = true;
    td_flow_leg_did(f, l, l->work);
}

bool td_flow_leg_in(struct request *r, int i) {
    return (td_flow_leg(r, i)->choices & bits(r)) != 0;
}

void td_flow_leg_done(struct td_flow *f, struct request *r, int i) {
    struct leg *l = td_flow_leg(r, i);
    if (!td_flow_leg_in(r, i)) return;
    l->choices &= ~bits(r);
    uint32_t work = td_flow_work(r), got = r->delivered - r->base;
    if (l->choices == 0)
        td_flow_leg_done_all(f, l);
    else if (i == r->decode && got < work) /* the others' part is left */
        td_flow_leg_did(f, l, work - got);
}

void td_flow_leg_leave(struct td_flow *f, struct request *r, int i) {
    if (i == NO_LEG) return;
    struct leg *l = td_flow_leg(r, i);
    bool told = l->told || !td_flow_leg_in(r, i);
    td_flow_leg_done(f, r, i);
    if (told) return;
    if (l->choices != 0 && i == r->prefill) return; /* nothing there is its own */
    struct td_msg_cancel *m = &td_flow_send(f, l->epoch, TD_MSG_CANCEL)->cancel;
    m->key = td_flow_key(r, i);
    m->only = l->choices == 0 ? 0 : (r->host == r ? 0 : r->number) + 1;
}

uint32_t td_flow_leg_choices(struct request *host, int i, struct request **ret) {
    uint32_t n = 0;
    for (uint32_t c = 0; c < TD_CHOICES_MAX; c++) {
        struct request *r = host->choice[c];
        if (r == NULL || r->host != host || r->state == OVER || r->state == FOLLOWING) continue;
        if (r->decode == i || r->prefill == i) ret[n++] = r;
    }
    return n;
}

void td_flow_part(struct td_flow *f, struct request *lead) {
    uint32_t n = lead->together;
    lead->together = 1;
    for (uint32_t c = 1; c < n; c++) {
        struct request *r = lead->choice[c];
        r->host = lead;
        r->prompt_hash = lead->prompt_hash;
        r->attempt = lead->attempt;
        r->refused = lead->refused;
        r->failures = lead->failures;
        r->pair = lead->pair;
        r->decode = lead->decode;
        r->prefill = lead->prefill;
        r->keep_ns = lead->keep_ns;
        r->last_word = lead->last_word;
        r->times = lead->times;
        r->phase = lead->phase;
        r->phase_since_ns = lead->phase_since_ns;
        td_flow_to(f, r, lead->state, lead->deadline_ns);
    }
}

static void give_if_done(struct td_flow *f, struct request *r) {
    if (r->state != OVER) return;
    for (int i = 0; i < LEGS_MAX; i++)
        if (r->leg[i].epoch != 0) return;
    f->counts.tombstones--;
    td_flow_give(f, r);
}

void td_flow_leg_answered(struct td_flow *f, struct leg *l) {
    if (!l->asks) return;
    l->asks = false;
    td_fleet_asked(&f->fleet, l->epoch, false);
    f->pump_due = true;
}

void td_flow_leg_close(struct td_flow *f, struct request *host, int i) {
    if (i == NO_LEG) return;
    td_flow_leg_answered(f, &host->leg[i]);
    td_fleet_ended(&f->fleet, host->leg[i].epoch, host->leg[i].work);
    host->leg[i].epoch = 0;
    f->pump_due = true;
    for (uint32_t c = 0; c < TD_CHOICES_MAX; c++) {
        struct request *r = host->choice[c];
        if (r == NULL || r->host != host) continue;
        if (r->decode == i) r->decode = NO_LEG;
        if (r->prefill == i) r->prefill = NO_LEG;
    }
    give_if_done(f, host);
}

static void drop_attempt(struct td_flow *f, struct request *r) {
    /* Decode has begun, so the handoff is done and prefill lets go by itself. */
    if (r->state == STREAMING && r->prefill != NO_LEG) td_flow_leg(r, r->prefill)->told = true;
    td_flow_leg_leave(f, r, r->decode);
    td_flow_leg_leave(f, r, r->prefill);
    r->decode = r->prefill = NO_LEG;
    r->host = r;
    r->n_held = r->finished_n = 0;
    r->finished = 0;
    r->last_word = false;
}

static void over(struct td_flow *f, struct request *r) {
    assert(r->state != FREE && r->state != OVER);
    drop_attempt(f, r);
    td_flow_to(f, r, OVER, 0);
    f->counts.tombstones++;
    if (!r->pinned) {
        f->counts.live--;
        /* How fast requests end when others wait: idle time says nothing about that. */
        if (f->was_queued) {
            uint64_t gap = f->now_ns - f->last_end_ns;
            f->end_gap_ns = f->end_gap_ns == 0 ? gap : (7 * f->end_gap_ns + gap) / 8;
        }
        f->was_queued = f->counts.queued > 0;
        f->last_end_ns = f->now_ns;
    }
    give_if_done(f, r);
}

void td_flow_over(struct td_flow *f, struct request *r) {
    for (uint32_t c = 1; c < r->together; c++)
        over(f, r->choice[c]);
    over(f, r);
}

uint64_t td_flow_wait_ns(const struct td_flow *f) {
    return f->end_gap_ns * (f->counts.queued + 1);
}

uint32_t td_flow_retry_ms(const struct td_flow *f) {
    if (f->end_gap_ns == 0) return RETRY_MS_UNKNOWN;
    uint64_t ms = td_flow_wait_ns(f) / MS_NS;
    return ms < RETRY_MS_MIN ? RETRY_MS_MIN : ms > RETRY_MS_MAX ? RETRY_MS_MAX : (uint32_t)ms;
}

static struct td_flow_action *say(struct td_flow *f, struct request *r,
                                  enum td_flow_action_kind kind) {
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = kind;
    a->request = r->s.request - r->number;
    a->choice = r->number;
    a->user = r->s.user;
    td_flow_phase(f, r, r->phase);
    r->times.ended = f->now_ns;
    r->times.attempts = r->attempt - r->refused;
    r->times.pair = r->pair;
    return a;
}

void td_flow_end(struct td_flow *f, struct request *r, enum td_finish reason) {
    if (!r->pinned) {
        struct td_flow_action *a = say(f, r, TD_FLOW_END);
        a->end.reason = reason;
        a->end.n_prompt = r->s.n_prompt;
        a->end.n_tokens = r->delivered;
        a->end.times = r->times;
        f->counts.ended++;
    }
    td_fleet_worked(&f->fleet, r->pair);
    bool probe = r->pinned;
    td_flow_over(f, r);
    if (probe) td_flow_probe_ended(f);
}

void td_flow_fail(struct td_flow *f, struct request *r, td_status s, uint32_t retry_ms,
                  const char *text) {
    char copy[TD_TEXT_MAX];
    snprintf(copy, sizeof copy, "%s", text);
    for (uint32_t c = 0; c < r->together && !r->pinned; c++) {
        struct td_flow_action *a = say(f, r->choice[c], TD_FLOW_FAIL);
        a->fail.status = s;
        a->fail.retry_ms = retry_ms;
        a->fail.n_tokens = r->choice[c]->delivered;
        a->fail.times = r->times;
        memcpy(a->fail.text, copy, sizeof copy);
        f->counts.failed++;
    }
    bool probe = r->pinned;
    td_flow_over(f, r);
    if (probe) td_flow_probe_failed(f, s, copy);
}

/* The request itself is at fault, or nobody: the worker goes on unblamed. */
static bool blameless(td_status s) {
    return s < TD_PEER_LOST && s != TD_CORRUPT && s != TD_TIMEOUT;
}

/* Something of the handoff, which takes two. */
static bool between_two(const struct request *r, td_status s) {
    return r->pair.prefill != 0 && r->state == ADMITTED &&
           (s == TD_CORRUPT || s == TD_TIMEOUT || s == TD_PEER_LOST || s == TD_MISMATCH ||
            s == TD_UNREACHABLE);
}

static void blame(struct td_flow *f, const struct request *r, td_status s, uint64_t epoch) {
    if (epoch == 0 || blameless(s) || r->pinned) return;
    if (between_two(r, s))
        td_fleet_way_failed(&f->fleet, r->pair, f->now_ns);
    else
        td_fleet_failed(&f->fleet, epoch, f->now_ns);
}

/* The last token came, and the worker was lost before it could say so. */
static enum td_finish complete(const struct td_flow *f, const struct request *r) {
    if (r->pinned || !td_flow_shown(r)) return 0;
    int32_t last = r->s.ids[r->s.n_prompt + r->delivered - 1];
    if (last == f->o.eos && !r->s.sampling.ignore_eos) return TD_FINISH_STOP;
    return r->delivered == r->s.max_new ? TD_FINISH_LENGTH : 0;
}

void td_flow_attempt_failed(struct td_flow *f, struct request *r, td_status s, uint64_t epoch,
                            const char *fmt, ...) {
    char text[TD_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    blame(f, r, s, epoch);
    enum td_finish reason = s != TD_PROTOCOL ? complete(f, r) : 0;
    if (reason != 0) {
        td_flow_end(f, r, reason);
        return;
    }
    bool preempted = s == TD_PREEMPTED;
    bool hopeless = s == TD_INVALID || s == TD_TOO_LONG || s == TD_UNSUPPORTED;
    if (!preempted) r->failures++;
    if (preempted && !td_flow_shown(r)) r->fruitless++;
    if (r->pinned || hopeless || r->failures >= TD_FLOW_ATTEMPTS_MAX ||
        r->fruitless >= TD_FLOW_FRUITLESS_MAX || (td_flow_shown(r) && !preempted && !r->s.whole)) {
        td_flow_fail(f, r, s, 0, text);
        return;
    }
    drop_attempt(f, r);
    *(preempted ? &f->counts.preempted : &f->counts.retries) += 1;
    r->queue_deadline_ns = f->now_ns + f->o.queue_ns;
    td_flow_to(f, r, QUEUED, r->queue_deadline_ns);
}

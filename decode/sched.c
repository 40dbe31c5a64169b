/* The decode scheduler: admission, the one way out, and the machine's surface. What goes into a
 * step is decided in sched_step.c. */
#include "decode/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "decode/sched_parts.h"

#define MS_NS 1000000ull
enum { RETRY_MS_MIN = 50, RETRY_MS_MAX = 10000, RETRY_MS_UNKNOWN = 1000 };

/* Of one step: FAILED, TOKENS, FINISHED, RELEASED, FREE_IDS, FREE_GUIDE, ABORT, COPY; per landing
 * slab: CREDIT, ABORT, UNPACK; per peer: WELCOME, CLOSE, BEAT, VERDICT. */
enum { ACTIONS_PER_SEQ = 10, ACTIONS_PER_PEER = 6, ACTIONS_PER_SLAB = 4 };

td_status td_decode_create(const struct td_decode_options *o, struct td_decode **ret,
                           struct td_error *err) {
    assert(o->slots >= 1 && o->max_tokens >= o->slots && o->max_context >= 2);
    struct td_decode *d = calloc(1, sizeof *d);
    if (d == NULL) return td_fail(err, TD_NO_MEMORY, "decode scheduler: out of memory");
    d->o = *o;
    if (d->o.reserve_new == 0) d->o.reserve_new = TD_DECODE_RESERVE_NEW;
    d->next_owner = d->next_ticket = 1;
    d->pages_per_seq = td_kv_pages(o->max_context, o->split);
    d->seq = calloc(o->slots, sizeof *d->seq);
    d->page_ids = calloc((size_t)o->slots * d->pages_per_seq, sizeof *d->page_ids);
    d->runs = calloc(o->slots, sizeof *d->runs);
    d->run_seq = calloc(o->slots, sizeof *d->run_seq);
    d->samples = calloc(o->slots, sizeof *d->samples);
    d->sample_seq = calloc(o->slots, sizeof *d->sample_seq);
    uint32_t actions = ACTIONS_PER_SEQ * o->slots +
                       o->max_peers * (ACTIONS_PER_PEER + ACTIONS_PER_SLAB * o->landing_slabs);
    td_status st = TD_NO_MEMORY;
    if (d->seq == NULL || d->page_ids == NULL || d->runs == NULL || d->run_seq == NULL ||
        d->samples == NULL || d->sample_seq == NULL ||
        !td_fifo_create(&d->actions, sizeof(struct td_decode_action), actions)) {
        td_fail(err, st, "decode scheduler: out of memory");
        goto destroy;
    }
    TD_TRY_GOTO(td_ledger_init(&d->pages, "page", o->pages, err), destroy);
    TD_TRY_GOTO(td_ledger_init(&d->slots, "slot", o->slots, err), destroy);
    TD_TRY_GOTO(td_receiver_create(&d->receiver, &d->o, &d->actions, err), destroy);
    *ret = d;
    return TD_OK;
destroy:
    td_decode_destroy(d);
    return st;
}

void td_decode_destroy(struct td_decode *d) {
    if (d == NULL) return;
    td_receiver_destroy(&d->receiver);
    td_ledger_finish(&d->slots);
    td_ledger_finish(&d->pages);
    td_fifo_destroy(&d->actions);
    free(d->sample_seq);
    free(d->samples);
    free(d->run_seq);
    free(d->runs);
    free(d->page_ids);
    free(d->seq);
    free(d);
}

static uint32_t number(const struct td_decode *d, const struct seq *s) {
    return (uint32_t)(s - d->seq);
}

/* ---- to the router ---- */

struct td_msg *td_decode_say(struct td_decode *d, enum td_msg_type type) {
    struct td_decode_action *a = td_fifo_push(&d->actions);
    a->kind = TD_DECODE_SEND;
    a->msg.type = type;
    return &a->msg;
}

static void free_ids(struct td_decode *d, const int32_t *ids) {
    if (ids == NULL) return;
    struct td_decode_action *a = td_fifo_push(&d->actions);
    a->kind = TD_DECODE_FREE_IDS;
    a->ids = ids;
}

/* Its choices hold it together. */
static void free_guide(struct td_decode *d, const struct td_guide *guide) {
    for (uint32_t i = 0; i < d->o.slots; i++)
        if (d->seq[i].state != FREE && d->seq[i].sampling.guide == guide) return;
    if (guide == NULL) return;
    struct td_decode_action *a = td_fifo_push(&d->actions);
    a->kind = TD_DECODE_FREE_GUIDE;
    a->guide = guide;
}

/* ---- the one way out ---- */

static void release(struct td_decode *d, struct seq *s) {
    uint32_t i = number(d, s);
    if (s->state != ENDING || s->step_n > 0 || !td_receiver_quiet(&d->receiver, i)) return;
    td_receiver_forget(&d->receiver, i);
    td_ledger_release(&d->pages, s->owner);
    if (s->shared != 0) td_ledger_release(&d->pages, s->shared);
    td_ledger_release(&d->slots, s->owner);
    free_ids(d, s->ids);
    s->state = FREE;
    free_guide(d, s->sampling.guide);
    if (!s->orphan && td_seq_find(d, s->key) == NULL) { /* the request's last choice */
        struct td_msg_released *m = &td_decode_say(d, TD_MSG_RELEASED)->released;
        uint64_t ready = s->computed_ns != 0 ? s->computed_ns : d->now_ns;
        m->key = s->key;
        *(s->alone ? &m->compute_ns : &m->transfer_ns) += ready - s->admitted_ns;
        m->compute_ns += d->now_ns - ready;
    }
}

void td_seq_retire(struct td_decode *d, struct seq *s, td_status why, const char *text) {
    if (s->state == FREE) return;
    s->state = ENDING;
    td_receiver_abort(&d->receiver, number(d, s), why, text);
    release(d, s);
}

static void retire_all(struct td_decode *d, struct td_key key, td_status why, const char *text) {
    for (struct seq *s = NULL; (s = td_seq_next_choice(d, key, s)) != NULL;)
        td_seq_retire(d, s, why, text);
}

void td_seq_fail(struct td_decode *d, struct seq *s, td_status why, const char *text) {
    bool all = s->n == 1 || s->state == RESERVED || s->state == PREFILLING;
    if (!s->orphan) {
        struct td_msg_failed *m = &td_decode_say(d, TD_MSG_FAILED)->failed;
        m->key = s->key;
        m->only = all ? 0 : s->choice + 1;
        m->status = why;
        snprintf(m->text, sizeof m->text, "%s", text);
    }
    if (all)
        retire_all(d, s->key, why, text);
    else
        td_seq_retire(d, s, why, text);
}

void td_seq_token(struct td_decode *d, struct seq *s, int32_t id) {
    s->last = id;
    s->produced++;
    bool stop = id == d->o.eos && !s->sampling.ignore_eos;
    if (!stop && s->produced < s->max_new) return;
    struct td_msg_finished *m = &td_decode_say(d, TD_MSG_FINISHED)->finished;
    m->key = s->key;
    m->choice = s->choice;
    m->reason = stop ? TD_FINISH_STOP : TD_FINISH_LENGTH;
    m->n_tokens = s->produced;
    td_seq_retire(d, s, TD_OK, "");
}

/* ---- admission ---- */

/* When the running sequence with the least left would end at its limit. */
static uint32_t retry_ms(const struct td_decode *d) {
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < d->o.slots; i++) {
        const struct seq *s = &d->seq[i];
        if (s->state == RUNNING && s->max_new - s->produced < least)
            least = s->max_new - s->produced;
    }
    if (least == UINT32_MAX || d->step_ns == 0) return RETRY_MS_UNKNOWN;
    uint64_t ms = least * d->step_ns / MS_NS;
    return ms < RETRY_MS_MIN ? RETRY_MS_MIN : ms > RETRY_MS_MAX ? RETRY_MS_MAX : (uint32_t)ms;
}

static void on_admit(struct td_decode *d, const struct td_msg_admit *m) {
    if (td_seq_find(d, m->key) != NULL) { /* a double */
        free_ids(d, m->ids);
        free_guide(d, m->sampling.guide);
        return;
    }
    struct td_error err = {.text = ""};
    struct plan plan;
    td_status st = td_decode_plan(d, m, &plan, &err);
    struct td_msg_admit_reply *r = &td_decode_say(d, TD_MSG_ADMIT_REPLY)->admit_reply;
    r->key = m->key;
    r->status = st;
    if (st != TD_OK) {
        snprintf(r->text, sizeof r->text, "%s", err.text);
        r->retry_ms = st == TD_BUSY ? retry_ms(d) : 0;
        free_ids(d, m->ids);
        free_guide(d, m->sampling.guide);
        return;
    }
    struct seq *s = td_decode_reserve(d, m, &plan);
    r->lease_ms = (uint32_t)(d->o.lease_ns / MS_NS);
    if (s->state != RESERVED) return;
    r->ticket = d->next_ticket++;
    const struct td_receiver_order o = {
        .ticket = r->ticket,
        .n_prompt = m->n_prompt,
        .n_first = s->n,
        .prompt_hash = m->prompt_hash,
        .pages = td_seq_pages(d, s),
        .slot = s->slot,
    };
    td_receiver_open(&d->receiver, d->now_ns, number(d, s), &o);
}

static void on_keep(struct td_decode *d, struct td_key key) {
    struct seq *s = td_seq_find(d, key);
    if (s != NULL && s->state == RESERVED) td_receiver_keep(&d->receiver, d->now_ns, number(d, s));
}

static void on_cancel(struct td_decode *d, const struct td_msg_cancel *m) {
    struct seq *s = NULL;
    if (td_seq_find(d, m->key) == NULL) { /* released before, or never here: true either way */
        td_decode_say(d, TD_MSG_RELEASED)->released.key = m->key;
        return;
    }
    d->cancels++;
    if (m->only == 0) {
        retire_all(d, m->key, TD_CANCELLED, "the router cancelled the request");
        return;
    }
    while ((s = td_seq_next_choice(d, m->key, s)) != NULL)
        if (s->choice == m->only - 1) td_seq_drop(d, s);
}

static void router_down(struct td_decode *d) {
    for (uint32_t i = 0; i < d->o.slots; i++) {
        d->seq[i].orphan = true;
        td_seq_retire(d, &d->seq[i], TD_CANCELLED, "the link to the router is lost");
    }
}

/* ---- what has come to its end, or may begin ---- */

/* Choices that were fed their token 0 may end at once. */
static void taken(struct td_decode *d, struct seq *lead, const struct td_receipt *t) {
    const struct td_key key = lead->key;
    td_seq_fork(d, lead);
    for (struct seq *s = NULL; (s = td_seq_next_choice(d, key, s)) != NULL;)
        if (s->state == RUNNING) td_seq_token(d, s, t->first[s->choice].id);
}

static void collect(struct td_decode *d) {
    for (uint32_t i = 0; i < d->o.slots; i++) {
        struct seq *s = &d->seq[i];
        const struct td_receipt *t = &d->receiver.receipt[i];
        if (s->state == ENDING) {
            release(d, s);
        } else if (s->state == RESERVED && t->state == TD_RECEIPT_OVER) {
            td_seq_fail(d, s, t->status, t->text);
        } else if (s->state == RESERVED && t->state == TD_RECEIPT_TAKEN) {
            taken(d, s, t);
        }
    }
}

/* ---- the step ---- */

void td_decode_step(struct td_decode *d, const struct td_decode_event *ev) {
    assert(ev->now_ns >= d->now_ns);
    d->now_ns = ev->now_ns;
    switch (ev->kind) {
    case TD_DECODE_MESSAGE:
        if (ev->msg->type == TD_MSG_ADMIT) on_admit(d, &ev->msg->admit);
        if (ev->msg->type == TD_MSG_KEEP) on_keep(d, ev->msg->keep.key);
        if (ev->msg->type == TD_MSG_CANCEL) on_cancel(d, &ev->msg->cancel);
        break;
    case TD_DECODE_ROUTER_DOWN:
        router_down(d);
        break;
    case TD_DECODE_STEP_DONE:
        td_decode_step_done(d, ev);
        break;
    case TD_DECODE_COPY_FAILED:
        td_decode_copy_failed(d, ev);
        break;
    case TD_DECODE_TIMER:
        td_receiver_timer(&d->receiver, d->now_ns);
        break;
    default:
        td_receiver_event(&d->receiver, ev);
    }
    collect(d);
    td_decode_run(d);
}

bool td_decode_next(struct td_decode *d, struct td_decode_action *ret) {
    return td_fifo_pop(&d->actions, ret);
}

uint64_t td_decode_deadline(const struct td_decode *d) {
    return td_receiver_deadline(&d->receiver);
}

/* ---- what others may see ---- */

uint32_t td_decode_peer_messages(const struct td_decode_options *o) {
    return 2 * o->slots + 2 * o->landing_slabs + TD_PEER_OWN_MESSAGES;
}

void td_decode_load(const struct td_decode *d, struct td_msg_heartbeat *ret) {
    ret->running = ret->waiting = 0;
    ret->queued_tokens = 0;
    for (uint32_t i = 0; i < d->o.slots; i++) {
        const struct seq *s = &d->seq[i];
        if (s->state == FREE) continue;
        *(s->state == RESERVED || s->state == JOINING ? &ret->waiting : &ret->running) += 1;
        if (s->state == PREFILLING) ret->queued_tokens += s->n_prompt - s->pos;
    }
    ret->free_pages = d->pages.count[TD_UNIT_FREE];
    ret->free_slots = d->slots.count[TD_UNIT_FREE];
    ret->steps = d->steps;
    ret->busy = d->stepping;
}

void td_decode_ledger(const struct td_decode *d, struct td_msg_ledger *ret) {
    *ret = (struct td_msg_ledger){
        .pages_free = d->pages.count[TD_UNIT_FREE],
        .pages_owned = d->pages.count[TD_UNIT_OWNED],
        .pages_shared = d->pages.shared,
        .slots_free = d->slots.count[TD_UNIT_FREE],
        .slots_owned = d->slots.count[TD_UNIT_OWNED],
        .handoffs_ok = d->receiver.handoffs_ok,
        .handoffs_failed = d->receiver.handoffs_failed,
        .bytes_moved = d->receiver.bytes_moved,
        .cancels = d->cancels,
    };
    for (uint32_t k = 0; k < d->o.max_peers; k++) {
        enum td_source_state s = d->receiver.peer[k].state;
        *(s == TD_SOURCE_FREE   ? &ret->landing_free
          : s == TD_SOURCE_OPEN ? &ret->landing_granted
                                : &ret->landing_quarantined) += d->o.landing_slabs;
    }
}

td_status td_decode_check(const struct td_decode *d, struct td_error *err) {
    TD_TRY(td_ledger_check(&d->pages, err));
    TD_TRY(td_ledger_check(&d->slots, err));
    uint32_t slots = 0;
    for (uint32_t i = 0; i < d->o.slots; i++) {
        const struct seq *s = &d->seq[i];
        if (s->state == FREE) {
            if (d->receiver.receipt[i].state != TD_RECEIPT_NONE)
                return td_fail(err, TD_INTERNAL, "entry %u: a receipt without a sequence", i);
            continue;
        }
        slots += td_ledger_holding(&d->slots, s->owner).owned;
    }
    if (slots != d->slots.count[TD_UNIT_OWNED])
        return td_fail(err, TD_INTERNAL, "%u of %u slots have a living owner", slots,
                       d->slots.count[TD_UNIT_OWNED]);
    return td_decode_check_pages(d, err);
}

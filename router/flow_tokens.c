/* What workers say about a request: admission, tokens, ends. Every message is looked up by request,
 * attempt and worker; what belongs to no open leg, or to a leg that is not the current one, is
 * dropped, except that RELEASED and refusals close old legs too. */
#include <string.h>

#include "router/flow_parts.h"

#define MS_NS 1000000ull

/* ---- tokens ---- */

static void deliver(struct td_flow *f, struct request *r, uint32_t index, uint32_t n,
                    const struct td_token *tokens, const struct td_selection *selections) {
    assert(index == r->delivered && n > 0);
    if (r->delivered == 0) r->times.first_token = f->now_ns;
    if (r->phase == TD_PHASE_PREFILL)
        td_flow_phase(f, r, r->state == ADMITTED ? TD_PHASE_TRANSFER : TD_PHASE_DECODE);
    for (uint32_t i = 0; i < n && !r->pinned; i++)
        r->s.ids[r->s.n_prompt + index + i] = tokens[i].id;
    r->delivered += n;
    if (r->decode != NO_LEG) td_flow_leg_did(f, td_flow_leg(r, r->decode), n);
    if (r->pinned) {
        for (uint32_t i = 0; i < n; i++)
            td_flow_probe_token(f, tokens[i].id);
        return;
    }
    struct td_flow_action *a = td_fifo_push(&f->actions);
    a->kind = TD_FLOW_DELIVER;
    a->request = r->s.request - r->number;
    a->choice = r->number;
    a->user = r->s.user;
    a->deliver.index = index;
    a->deliver.n = n;
    a->deliver.tokens = tokens;
    a->deliver.selections = selections;
}

/* Tokens that overtook token 0 wait here; the text side keeps what was selected for them. */
static void hold(struct td_flow *f, struct request *r, uint32_t index, uint32_t n,
                 const struct td_token *tokens, const struct td_selection *selections) {
    if (selections != NULL && !r->pinned) {
        struct td_flow_action *a = td_fifo_push(&f->actions);
        a->kind = TD_FLOW_HOLD;
        a->request = r->s.request - r->number;
        a->choice = r->number;
        a->user = r->s.user;
        a->hold.index = index;
        a->hold.n = n;
        a->hold.selections = selections;
        a->hold.first = r->n_held == 0;
    }
    memcpy(r->held + r->n_held, tokens, n * sizeof *tokens);
    r->n_held += n;
}

static void end_if_complete(struct td_flow *f, struct request *r) {
    if (r->finished == 0 || !td_flow_shown(r)) return;
    if (r->delivered == r->finished_n)
        td_flow_end(f, r, r->finished);
    else
        td_flow_attempt_failed(f, r, TD_PROTOCOL, r->pair.decode,
                               "the worker counts %u tokens in the answer, %u arrived",
                               r->finished_n, r->delivered);
}

static bool decode_prefills(const struct request *r) {
    return r->pair.prefill == 0;
}

static void first_token(struct td_flow *f, struct request *r, const struct td_msg_tokens *t) {
    if (t->index != 0 || t->n != 1 || td_flow_shown(r)) return; /* a double */
    struct leg *l = td_flow_leg(r, r->prefill);
    td_flow_leg_did(f, l, l->work);
    deliver(f, r, r->base, 1, t->tokens, t->selections);
    if (r->n_held > 0) deliver(f, r, r->base + 1, r->n_held, r->held, NULL);
    r->n_held = 0;
    end_if_complete(f, r);
}

static void decode_tokens(struct td_flow *f, struct request *r, const struct td_msg_tokens *t) {
    bool wait = !td_flow_shown(r) && !decode_prefills(r);
    uint64_t first = (uint64_t)r->base + t->index;
    uint32_t next = wait ? r->base + 1 + r->n_held : r->delivered;
    if (first > next) {
        td_flow_attempt_failed(f, r, TD_PROTOCOL, r->pair.decode,
                               "token %u of the answer is missing, token %llu arrived", next,
                               (unsigned long long)first);
        return;
    }
    if (first + t->n <= next) return; /* doubles */
    uint32_t skip = next - (uint32_t)first, n = t->n - skip;
    const struct td_selection *selections = t->selections ? t->selections + skip : NULL;
    if (n > r->s.max_new - next) {
        td_flow_attempt_failed(f, r, TD_PROTOCOL, r->pair.decode,
                               "more than the %u tokens that were asked for", r->s.max_new);
        return;
    }
    if (r->state == ADMITTED) td_flow_to(f, r, STREAMING, 0);
    if (r->phase == TD_PHASE_TRANSFER) td_flow_phase(f, r, TD_PHASE_DECODE);
    if (!wait) {
        /* The prompt is computed when its first token is here. */
        struct leg *l = td_flow_leg(r, r->decode);
        td_flow_leg_did(f, l, l->prompt);
        l->prompt = 0;
        deliver(f, r, next, n, t->tokens + skip, selections);
    } else if (r->n_held + n <= HOLD_MAX) {
        hold(f, r, next, n, t->tokens + skip, selections);
    } else {
        td_flow_attempt_failed(f, r, TD_TIMEOUT, r->pair.prefill,
                               "token 0 did not come while decode sent %u tokens", next + n - 1);
    }
}

/* ---- admission ---- */

static void send_prefill(struct td_flow *f, struct request *r, uint64_t ticket) {
    const struct td_fleet_worker *p = td_fleet_find(&f->fleet, r->pair.prefill);
    const struct td_fleet_worker *d = td_fleet_find(&f->fleet, r->pair.decode);
    if (p == NULL) {
        td_flow_attempt_failed(f, r, TD_UNREACHABLE, 0, "the prefill worker is gone");
        return;
    }
    assert(d != NULL); /* it just spoke */
    r->prefill = td_flow_leg_open(f, r, r->pair.prefill, td_flow_n_prompt(r));
    struct td_msg_prefill *m = &td_flow_send(f, r->pair.prefill, TD_MSG_PREFILL)->prefill;
    m->key = (struct td_key){r->s.request, r->attempt};
    m->n_prompt = td_flow_n_prompt(r);
    m->max_new = td_flow_max_new(r);
    m->n = r->together;
    m->sampling = td_flow_sampling(r);
    m->ids = r->s.ids;
    m->ticket = ticket;
    m->decode_epoch = d->epoch;
    memcpy(m->decode_name, d->name, sizeof m->decode_name);
    m->decode_address = d->xfer_address;
    m->decode_address_len = d->xfer_address_len;
    m->decode_number = d->xfer_number;
    td_flow_to(f, r, ADMITTED, f->now_ns + r->keep_ns);
}

static void admit_reply(struct td_flow *f, struct request *r, int leg,
                        const struct td_msg_admit_reply *m) {
    bool current = leg == r->decode && r->state == ADMITTING;
    uint64_t epoch = r->leg[leg].epoch;
    td_flow_leg_answered(f, &r->leg[leg]);
    if (m->status == TD_OK) {
        if (!current) return; /* its CANCEL is on the way */
        r->times.admitted = f->now_ns;
        td_flow_phase(f, r, TD_PHASE_PREFILL);
        uint64_t lease = m->lease_ms != 0 ? m->lease_ms * MS_NS : f->o.lease_ns;
        r->keep_ns = lease / 3;
        td_fleet_roomy(&f->fleet, epoch);
        if (decode_prefills(r))
            td_flow_to(f, r, STREAMING, 0);
        else
            send_prefill(f, r, m->ticket);
        return;
    }
    if (!current) {
        /* Refused while we gave it up: there is nothing to release. The CANCEL that crossed is
         * answered too, and finds no leg. */
        if (r->leg[leg].told && r->decode != leg) td_flow_leg_close(f, r, leg);
        return;
    }
    td_flow_leg_close(f, r, leg);
    if (m->status != TD_BUSY) {
        td_flow_attempt_failed(f, r, m->status, epoch, "%s", m->text);
        return;
    }
    f->counts.busy++;
    r->refused++;
    td_fleet_busy(&f->fleet, epoch, f->now_ns + (m->retry_ms != 0 ? m->retry_ms : 1) * MS_NS);
    if (r->pinned)
        td_flow_fail(f, r, TD_BUSY, m->retry_ms, m->text);
    else
        td_flow_to(f, r, QUEUED, r->queue_deadline_ns);
}

/* ---- ends ---- */

static void finished(struct td_flow *f, struct request *r, int leg,
                     const struct td_msg_finished *m) {
    uint64_t epoch = td_flow_leg(r, leg)->epoch;
    td_flow_leg_done(f, r, leg); /* it releases by itself */
    if (m->reason != TD_FINISH_STOP && m->reason != TD_FINISH_LENGTH) {
        td_flow_attempt_failed(f, r, TD_PROTOCOL, epoch, "finish reason %d", (int)m->reason);
        return;
    }
    if (leg == r->prefill && m->n_tokens != 1) {
        td_flow_attempt_failed(f, r, TD_PROTOCOL, epoch,
                               "prefill says the answer ends after %u tokens, not 1", m->n_tokens);
        return;
    }
    r->finished = m->reason;
    r->finished_n = r->base + m->n_tokens;
    end_if_complete(f, r);
}

/* Of one choice: the worker's part in it has ended. */
static void choice_failed(struct td_flow *f, struct request *r, int leg, uint64_t epoch,
                          td_status s, const char *text) {
    /* Decode does not know the ticket any more: it failed for a reason of its own, which counts, or
     * is gone, and either is on its way here. */
    bool echo = leg == r->prefill && s == TD_STALE && r->decode != NO_LEG && !r->pinned;
    if (leg == r->decode || (!td_flow_shown(r) && !echo)) {
        td_flow_attempt_failed(f, r, s, epoch, "%s", text);
    } else if (r->state == ADMITTED) {
        r->last_word = true; /* decode streams if it got everything, or lets the lease expire */
    }
}

static void leg_failed(struct td_flow *f, struct request *host, int leg,
                       const struct td_msg_failed *m) {
    struct request *all[TD_CHOICES_MAX];
    bool in[TD_CHOICES_MAX];
    uint64_t epoch = host->leg[leg].epoch;
    uint32_t n = td_flow_leg_choices(host, leg, all);
    for (uint32_t k = 0; k < n; k++)
        in[k] = td_flow_leg_in(all[k], leg);
    td_flow_leg_done_all(f, &host->leg[leg]);
    for (uint32_t k = 0; k < n; k++)
        if (in[k]) choice_failed(f, all[k], leg, epoch, m->status, m->text);
}

static const struct td_key *key_of(const struct td_msg *m) {
    switch (m->type) {
    case TD_MSG_ADMIT_REPLY:
        return &m->admit_reply.key;
    case TD_MSG_TOKENS:
        return &m->tokens.key;
    case TD_MSG_FINISHED:
        return &m->finished.key;
    case TD_MSG_FAILED:
        return &m->failed.key;
    case TD_MSG_RELEASED:
        return &m->released.key;
    default:
        return NULL;
    }
}

static void released(struct td_flow *f, struct request *host, int leg) {
    struct request *all[TD_CHOICES_MAX];
    uint64_t epoch = host->leg[leg].epoch;
    uint32_t n = td_flow_leg_choices(host, leg, all);
    for (uint32_t k = 0; k < n; k++) {
        struct request *r = all[k];
        bool owes = leg == r->decode ? r->finished == 0 : !td_flow_shown(r) && !r->last_word;
        if (owes)
            td_flow_attempt_failed(f, r, TD_PROTOCOL, epoch,
                                   "the worker let the request go unasked");
    }
    td_fleet_roomy(&f->fleet, epoch);
    td_flow_leg_close(f, host, leg);
}

/* The choice that a message means, when it still has something on that leg. */
static struct request *choice_of(struct td_flow *f, struct request *host, int leg,
                                 uint32_t number) {
    bool known = number < TD_CHOICES_MAX && (host->leg[leg].choices >> number & 1) != 0;
    if (known && host->state != OVER && host->together > 1 &&
        (leg == host->decode || leg == host->prefill))
        td_flow_part(f, host);
    struct request *r = known ? host->choice[number] : NULL;
    if (r == NULL || r->state == OVER || r->host != host) return NULL;
    return leg == r->decode || leg == r->prefill ? r : NULL;
}

static void tokens(struct td_flow *f, struct request *r, int leg, const struct td_msg_tokens *m) {
    if (leg == r->prefill)
        first_token(f, r, m);
    else if (r->state == ADMITTED || r->state == STREAMING)
        decode_tokens(f, r, m);
}

/* Of one choice. */
static void choice_message(struct td_flow *f, struct request *host, int leg,
                           const struct td_msg *m) {
    uint32_t number = m->type == TD_MSG_TOKENS     ? m->tokens.choice
                      : m->type == TD_MSG_FINISHED ? m->finished.choice
                                                   : m->failed.only - 1;
    struct request *r = choice_of(f, host, leg, number);
    if (r == NULL || (m->type == TD_MSG_FINISHED && r->finished != 0)) {
        f->counts.stale_dropped++;
    } else if (m->type == TD_MSG_TOKENS) {
        tokens(f, r, leg, &m->tokens);
    } else if (m->type == TD_MSG_FINISHED) {
        finished(f, r, leg, &m->finished);
    } else {
        uint64_t epoch = host->leg[leg].epoch;
        td_flow_leg_done(f, r, leg);
        choice_failed(f, r, leg, epoch, m->failed.status, m->failed.text);
    }
}

void td_flow_message(struct td_flow *f, uint64_t epoch, const struct td_msg *m) {
    const struct td_key *key = key_of(m);
    if (key == NULL) return;
    struct request *host = td_flow_find(f, key->request);
    int leg = NO_LEG;
    for (int i = 0; host != NULL && i < LEGS_MAX; i++)
        if (host->leg[i].epoch == epoch && host->leg[i].attempt == key->attempt) leg = i;
    if (leg == NO_LEG) {
        f->counts.stale_dropped++;
        return;
    }
    if (m->type == TD_MSG_ADMIT_REPLY)
        admit_reply(f, host, leg, &m->admit_reply);
    else if (m->type == TD_MSG_RELEASED)
        released(f, host, leg);
    else if (m->type == TD_MSG_FAILED && m->failed.only == 0 && !host->leg[leg].told)
        leg_failed(f, host, leg, &m->failed);
    else
        choice_message(f, host, leg, m);
}

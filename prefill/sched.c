/* The prefill scheduler: from the router's message to the engine's chunks and back. */
#include "prefill/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/list.h"
#include "common/kv/checksum.h"
#include "common/kv/ledger.h"
#include "prefill/handoff.h"

/* Of one step: FAILED, ABORT, RELEASED, FREE_IDS, STEP, PACK; TOKENS and FINISHED for every choice
 * of the one request that was computed. */
enum {
    ACTIONS_OF_CHOICES = 2 * TD_CHOICES_MAX,
    ACTIONS_PER_REQUEST = 6,
    ACTIONS_PER_PEER = 4,
    ACTIONS_PER_SLAB = 4
};

enum task_state {
    FREE,
    WAITING,   /* for pages and a slot */
    COMPUTING, /* the one whose chunks run */
    SENDING,   /* computed; the handoff goes on */
    ENDING,    /* goes when no step, pack or put uses its pages */
};

struct task {
    enum task_state state;
    struct td_link link; /* waiting ones, oldest first */
    struct td_key key;
    bool orphan;    /* of a router that is gone: tells nobody anything */
    uint64_t owner; /* in the ledgers; never reused */
    const int32_t *ids;
    uint32_t n_prompt, max_new;
    uint32_t n;                                  /* choices */
    struct td_sampling sampling[TD_CHOICES_MAX]; /* [n] */
    struct td_sender_order order;
    struct td_sender_address address; /* of the decode worker */
    uint32_t slot;
    uint32_t computed; /* tokens */
    uint64_t arrived_ns, began_ns, computed_ns;
};

struct td_prefill {
    struct td_prefill_options o;
    struct td_fifo actions;
    struct td_sender sender;
    struct td_ledger pages, slots;
    struct task *task;  /* [max_requests] */
    uint32_t *page_ids; /* [slots][pages_per_request] */
    uint32_t pages_per_request;
    struct td_link waiting;
    struct task *computing; /* or NULL */
    struct task *stepping;  /* whose chunk is in the engine, or NULL */
    uint32_t step_tokens;
    uint64_t next_owner, steps, cancels, now_ns;
};

td_status td_prefill_create(const struct td_prefill_options *o, struct td_prefill **ret,
                            struct td_error *err) {
    assert(o->chunk_tokens >= 1 && o->max_requests >= 1 && o->max_context >= 2);
    struct td_prefill *p = calloc(1, sizeof *p);
    if (p == NULL) return td_fail(err, TD_NO_MEMORY, "prefill scheduler: out of memory");
    p->o = *o;
    p->next_owner = 1;
    p->pages_per_request = td_kv_pages(o->max_context, o->split);
    p->task = calloc(o->max_requests, sizeof *p->task);
    p->page_ids = calloc((size_t)o->slots * p->pages_per_request, sizeof *p->page_ids);
    td_status st = TD_NO_MEMORY;
    if (p->task == NULL || p->page_ids == NULL ||
        !td_fifo_create(&p->actions, sizeof(struct td_prefill_action),
                        ACTIONS_OF_CHOICES + ACTIONS_PER_REQUEST * o->max_requests +
                            ACTIONS_PER_PEER * o->max_peers + ACTIONS_PER_SLAB * o->send_slabs)) {
        td_fail(err, st, "prefill scheduler: out of memory");
        goto destroy;
    }
    td_list_init(&p->waiting);
    for (uint32_t i = 0; i < o->max_requests; i++)
        td_list_init(&p->task[i].link);
    TD_TRY_GOTO(td_ledger_init(&p->pages, "page", o->pages, err), destroy);
    TD_TRY_GOTO(td_ledger_init(&p->slots, "slot", o->slots, err), destroy);
    TD_TRY_GOTO(td_sender_create(&p->sender, &p->o, &p->actions, err), destroy);
    *ret = p;
    return TD_OK;
destroy:
    td_prefill_destroy(p);
    return st;
}

void td_prefill_destroy(struct td_prefill *p) {
    if (p == NULL) return;
    td_sender_destroy(&p->sender);
    td_ledger_finish(&p->slots);
    td_ledger_finish(&p->pages);
    td_fifo_destroy(&p->actions);
    free(p->page_ids);
    free(p->task);
    free(p);
}

static uint32_t number(const struct td_prefill *p, const struct task *t) {
    return (uint32_t)(t - p->task);
}

static uint32_t *pages_of(const struct td_prefill *p, const struct task *t) {
    return p->page_ids + (size_t)t->slot * p->pages_per_request;
}

/* ---- to the router ---- */

static struct td_msg *say(struct td_prefill *p, enum td_msg_type type) {
    struct td_prefill_action *a = td_fifo_push(&p->actions);
    a->kind = TD_PREFILL_SEND;
    a->msg.type = type;
    return &a->msg;
}

static void say_failed(struct td_prefill *p, struct td_key key, td_status s, const char *text) {
    struct td_msg_failed *m = &say(p, TD_MSG_FAILED)->failed;
    m->key = key;
    m->status = s;
    snprintf(m->text, sizeof m->text, "%s", text);
}

static void free_ids(struct td_prefill *p, const int32_t *ids, const struct td_guide *guide) {
    struct td_prefill_action *a = td_fifo_push(&p->actions);
    a->kind = TD_PREFILL_FREE_IDS;
    a->lent.ids = ids;
    a->lent.guide = guide;
}

/* ---- the one way out ---- */

/* Lets go of everything as soon as nothing uses it. */
static void release(struct td_prefill *p, struct task *t) {
    uint32_t i = number(p, t);
    if (t->state != ENDING || p->stepping == t || !td_sender_quiet(&p->sender, i)) return;
    td_sender_forget(&p->sender, i);
    td_ledger_release(&p->pages, t->owner);
    td_ledger_release(&p->slots, t->owner);
    free_ids(p, t->ids, t->sampling[0].guide);
    if (!t->orphan) {
        struct td_msg_released *m = &say(p, TD_MSG_RELEASED)->released;
        m->key = t->key;
        uint64_t began = t->began_ns != 0 ? t->began_ns : p->now_ns;
        uint64_t computed = t->computed_ns != 0 ? t->computed_ns : p->now_ns;
        m->queue_ns = began - t->arrived_ns;
        m->compute_ns = t->began_ns != 0 ? computed - began : 0;
        m->transfer_ns = t->computed_ns != 0 ? p->now_ns - computed : 0;
    }
    t->state = FREE;
}

/* Whatever ends a task comes here; twice is fine. */
static void retire(struct td_prefill *p, struct task *t, td_status why, const char *text) {
    if (t->state == FREE) return;
    td_list_remove(&t->link);
    if (p->computing == t) p->computing = NULL;
    t->state = ENDING;
    td_sender_abort(&p->sender, number(p, t), why, text);
    release(p, t);
}

static void fail(struct td_prefill *p, struct task *t, td_status s, const char *text) {
    if (!t->orphan) say_failed(p, t->key, s, text);
    retire(p, t, s, text);
}

/* ---- from the router ---- */

static struct task *find(struct td_prefill *p, struct td_key key) {
    for (uint32_t i = 0; i < p->o.max_requests; i++) {
        struct task *t = &p->task[i];
        if (t->state != FREE && !t->orphan && t->key.request == key.request &&
            t->key.attempt == key.attempt)
            return t;
    }
    return NULL;
}

static td_status admissible(const struct td_prefill *p, const struct td_msg_prefill *m,
                            char *text) {
    uint64_t tokens = (uint64_t)m->n_prompt + m->max_new;
    if (m->n_prompt == 0 || m->max_new == 0 || m->ids == NULL || m->n > TD_CHOICES_MAX ||
        m->decode_address_len > TD_MSG_ADDRESS_MAX) {
        snprintf(text, TD_TEXT_MAX,
                 "an empty prompt, no output wanted, too many choices, or a bad address");
        return TD_INVALID;
    }
    if (tokens > p->o.max_context || td_kv_pages(m->n_prompt, p->o.split) > p->o.pages) {
        snprintf(text, TD_TEXT_MAX,
                 "%u prompt and %u output tokens: at most %u, with prompts of at most %llu",
                 m->n_prompt, m->max_new, p->o.max_context,
                 (unsigned long long)p->o.pages * td_kv_page_tokens(p->o.split));
        return TD_TOO_LONG;
    }
    return TD_OK;
}

static void refuse(struct td_prefill *p, const struct td_msg_prefill *m, td_status s,
                   const char *text) {
    say_failed(p, m->key, s, text);
    say(p, TD_MSG_RELEASED)->released.key = m->key;
    free_ids(p, m->ids, m->sampling.guide);
}

static void on_prefill(struct td_prefill *p, const struct td_msg_prefill *m) {
    char text[TD_TEXT_MAX] = "";
    if (find(p, m->key) != NULL) { /* a double */
        free_ids(p, m->ids, m->sampling.guide);
        return;
    }
    td_status s = admissible(p, m, text);
    struct task *t = NULL;
    for (uint32_t i = 0; i < p->o.max_requests && t == NULL; i++)
        if (p->task[i].state == FREE) t = &p->task[i];
    if (s == TD_OK && t == NULL) {
        s = TD_BUSY;
        snprintf(text, sizeof text, "%u prompts are waiting or under way", p->o.max_requests);
    }
    if (s != TD_OK) {
        refuse(p, m, s, text);
        return;
    }
    *t = (struct task){
        .state = WAITING,
        .key = m->key,
        .owner = p->next_owner++,
        .ids = m->ids,
        .n_prompt = m->n_prompt,
        .max_new = m->max_new,
        .n = m->n > 1 ? m->n : 1,
        .order = {.decode_epoch = m->decode_epoch,
                  .ticket = m->ticket,
                  .n_prompt = m->n_prompt,
                  .n_first = m->n > 1 ? m->n : 1,
                  .prompt_hash = td_prompt_hash(m->ids, m->n_prompt),
                  .seed = m->sampling.seed},
        .address = {.number = m->decode_number, .len = m->decode_address_len},
        .arrived_ns = p->now_ns,
    };
    for (uint32_t c = 0; c < t->n; c++) {
        t->sampling[c] = m->sampling;
        t->sampling[c].seed = td_choice_seed(m->sampling.seed, c);
    }
    if (m->decode_address_len != 0)
        memcpy(t->address.bytes, m->decode_address, m->decode_address_len);
    td_list_push_back(&p->waiting, &t->link);
}

/* Also for those that wait and were told an older address. */
static void on_moved(struct td_prefill *p, const struct td_msg_moved *m) {
    struct td_sender_address a = {.number = m->xfer_number, .len = m->xfer_address_len};
    if (a.len == 0 || a.len > TD_MSG_ADDRESS_MAX) return;
    memcpy(a.bytes, m->xfer_address, a.len);
    TD_LIST_EACH (&p->waiting, it) {
        struct task *t = TD_CONTAINER(it, struct task, link);
        if (t->order.decode_epoch == m->epoch && t->address.number < a.number) t->address = a;
    }
    td_sender_moved(&p->sender, m->epoch, &a);
}

/* Of the whole request: a choice alone has nothing here. */
static void on_cancel(struct td_prefill *p, struct td_key key) {
    struct task *t = find(p, key);
    if (t == NULL) { /* released before, or never here: true either way */
        say(p, TD_MSG_RELEASED)->released.key = key;
        return;
    }
    p->cancels++;
    retire(p, t, TD_CANCELLED, "the router cancelled the request");
}

static void router_down(struct td_prefill *p) {
    for (uint32_t i = 0; i < p->o.max_requests; i++) {
        p->task[i].orphan = true;
        retire(p, &p->task[i], TD_CANCELLED, "the link to the router is lost");
    }
}

/* ---- the engine ---- */

/* The oldest waiting one, if its whole prompt finds room. Later ones do not overtake it. */
static bool begin(struct td_prefill *p) {
    if (p->computing != NULL || td_list_empty(&p->waiting)) return false;
    struct task *t = TD_CONTAINER(p->waiting.next, struct task, link);
    uint32_t need = td_kv_pages(t->n_prompt, p->o.split);
    if (p->pages.count[TD_UNIT_FREE] < need || p->slots.count[TD_UNIT_FREE] == 0) return false;
    td_status a = td_ledger_take(&p->slots, t->owner, 1, &t->slot, NULL);
    td_status b = td_ledger_take(&p->pages, t->owner, need, pages_of(p, t), NULL);
    assert(a == TD_OK && b == TD_OK);
    (void)a, (void)b;
    td_list_remove(&t->link);
    t->state = COMPUTING;
    t->began_ns = p->now_ns;
    t->order.pages = pages_of(p, t);
    t->order.slot = t->slot;
    p->computing = t;
    td_sender_open(&p->sender, number(p, t), &t->order, &t->address);
    return true;
}

/* Chunks end on multiples of a wire block, except the last and those of a chunk size below that. */
static uint32_t chunk(uint32_t at, uint32_t n, uint32_t most) {
    if (n - at <= most) return n - at;
    uint32_t end = (at + most) / TD_KV_PAGE_TOKENS * TD_KV_PAGE_TOKENS;
    return end > at ? end - at : most;
}

static void run(struct td_prefill *p) {
    struct task *t = p->computing;
    if (p->stepping != NULL || t == NULL) return;
    p->stepping = t;
    p->step_tokens = chunk(t->computed, t->n_prompt, p->o.chunk_tokens);
    struct td_prefill_action *a = td_fifo_push(&p->actions);
    a->kind = TD_PREFILL_STEP;
    a->step.run = (struct td_run){
        .slot = t->slot,
        .pos = t->computed,
        .n = p->step_tokens,
        .ids = t->ids + t->computed,
        .pages = pages_of(p, t),
        .want_logits = t->computed + p->step_tokens == t->n_prompt,
    };
    a->step.n_samples = a->step.run.want_logits ? t->n : 0;
    a->step.sampling = t->sampling;
    a->step.position = t->n_prompt;
    a->step.owner = t->owner;
}

/* Token 0 of a choice; whether it is its last. */
static bool say_first(struct td_prefill *p, const struct task *t, uint32_t choice,
                      const struct td_token *first, const struct td_selection *selection) {
    bool stop = first->id == p->o.eos && !t->sampling[choice].ignore_eos;
    struct td_msg_tokens *m = &say(p, TD_MSG_TOKENS)->tokens;
    m->key = t->key;
    m->choice = choice;
    m->n = 1;
    m->tokens = first;
    m->selections = t->sampling[choice].selections ? selection : NULL;
    if (!stop && t->max_new > 1) return false;
    struct td_msg_finished *f = &say(p, TD_MSG_FINISHED)->finished;
    f->key = t->key;
    f->choice = choice;
    f->reason = stop ? TD_FINISH_STOP : TD_FINISH_LENGTH;
    f->n_tokens = 1;
    return true;
}

static void computed(struct td_prefill *p, struct task *t, const struct td_token *first,
                     const struct td_selection *selections) {
    uint32_t i = number(p, t), ended = 0;
    t->computed_ns = p->now_ns;
    p->computing = NULL;
    t->state = SENDING;
    for (uint32_t c = 0; c < t->n; c++)
        ended += say_first(p, t, c, &first[c], selections != NULL ? &selections[c] : NULL);
    if (ended < t->n) {
        td_sender_complete(&p->sender, i, first);
        return;
    }
    td_sender_drop(&p->sender, i);
    retire(p, t, TD_OK, "");
}

static void step_done(struct td_prefill *p, const struct td_prefill_event *ev) {
    struct task *t = p->stepping;
    assert(t != NULL);
    p->stepping = NULL;
    p->steps++;
    if (t->state == ENDING) return; /* what it computed is for nobody; it is let go below */
    if (ev->step.status != TD_OK) {
        char text[TD_TEXT_MAX];
        const char *why = ev->step.text;
        snprintf(text, sizeof text, "the engine could not compute the prompt%s%.200s",
                 why != NULL ? ": " : "", why != NULL ? why : "");
        fail(p, t, ev->step.status, text);
        return;
    }
    t->computed += p->step_tokens;
    if (t->computed == t->n_prompt)
        computed(p, t, ev->step.tokens, ev->step.selections);
    else
        td_sender_ready(&p->sender, number(p, t), t->computed);
}

/* ---- what has come to its end ---- */

static void collect(struct td_prefill *p) {
    for (uint32_t i = 0; i < p->o.max_requests; i++) {
        struct task *t = &p->task[i];
        const struct td_sender_ticket *k = &p->sender.ticket[i];
        if (t->state == ENDING)
            release(p, t);
        else if (t->state == FREE || k->state != TD_TICKET_OVER)
            continue;
        else if (k->status == TD_OK)
            retire(p, t, TD_OK, "");
        else
            fail(p, t, k->status, k->text);
    }
}

/* ---- the step ---- */

void td_prefill_step(struct td_prefill *p, const struct td_prefill_event *ev) {
    assert(ev->now_ns >= p->now_ns);
    p->now_ns = p->sender.now_ns = ev->now_ns;
    switch (ev->kind) {
    case TD_PREFILL_MESSAGE:
        if (ev->msg->type == TD_MSG_PREFILL) on_prefill(p, &ev->msg->prefill);
        if (ev->msg->type == TD_MSG_MOVED) on_moved(p, &ev->msg->moved);
        if (ev->msg->type == TD_MSG_CANCEL && ev->msg->cancel.only == 0)
            on_cancel(p, ev->msg->cancel.key);
        break;
    case TD_PREFILL_ROUTER_DOWN:
        router_down(p);
        break;
    case TD_PREFILL_STEP_DONE:
        step_done(p, ev);
        break;
    case TD_PREFILL_TIMER:
        td_sender_timer(&p->sender);
        break;
    default:
        td_sender_event(&p->sender, ev);
    }
    do {
        collect(p); /* a ticket may be over as soon as it is opened */
    } while (begin(p));
    run(p);
    td_sender_pump(&p->sender);
}

bool td_prefill_next(struct td_prefill *p, struct td_prefill_action *ret) {
    return td_fifo_pop(&p->actions, ret);
}

uint64_t td_prefill_deadline(const struct td_prefill *p) {
    return td_sender_deadline(&p->sender);
}

/* ---- what others may see ---- */

uint32_t td_prefill_peer_messages(const struct td_prefill_options *o) {
    return 2 * o->max_requests + o->send_slabs + TD_PEER_OWN_MESSAGES;
}

void td_prefill_load(const struct td_prefill *p, struct td_msg_heartbeat *ret) {
    ret->running = ret->waiting = 0;
    ret->queued_tokens = 0;
    for (uint32_t i = 0; i < p->o.max_requests; i++) {
        const struct task *t = &p->task[i];
        if (t->state == FREE) continue;
        *(t->state == WAITING ? &ret->waiting : &ret->running) += 1;
        if (t->state == WAITING || t->state == COMPUTING)
            ret->queued_tokens += t->n_prompt - t->computed;
    }
    ret->free_pages = p->pages.count[TD_UNIT_FREE];
    ret->free_slots = p->slots.count[TD_UNIT_FREE];
    ret->steps = p->steps;
    ret->busy = p->stepping != NULL || p->computing != NULL;
}

void td_prefill_ledger(const struct td_prefill *p, struct td_msg_ledger *ret) {
    *ret = (struct td_msg_ledger){
        .pages_free = p->pages.count[TD_UNIT_FREE],
        .pages_owned = p->pages.count[TD_UNIT_OWNED],
        .slots_free = p->slots.count[TD_UNIT_FREE],
        .slots_owned = p->slots.count[TD_UNIT_OWNED],
        .handoffs_ok = p->sender.handoffs_ok,
        .handoffs_failed = p->sender.handoffs_failed,
        .bytes_moved = p->sender.bytes_moved,
        .bytes_before_last_chunk = p->sender.bytes_early,
        .cancels = p->cancels,
    };
    for (uint32_t k = 0; k < p->o.send_slabs; k++)
        *(p->sender.slab[k].state == TD_SLAB_FREE ? &ret->send_free : &ret->send_busy) += 1;
}

td_status td_prefill_check(const struct td_prefill *p, struct td_error *err) {
    TD_TRY(td_ledger_check(&p->pages, err));
    TD_TRY(td_ledger_check(&p->slots, err));
    uint32_t pages = 0, slots = 0;
    for (uint32_t i = 0; i < p->o.max_requests; i++) {
        const struct task *t = &p->task[i];
        if (t->state == FREE) {
            if (p->sender.ticket[i].state != TD_TICKET_NONE)
                return td_fail(err, TD_INTERNAL, "entry %u: a ticket without a request", i);
            continue;
        }
        pages += td_ledger_holding(&p->pages, t->owner).owned;
        slots += td_ledger_holding(&p->slots, t->owner).owned;
    }
    if (pages != p->pages.count[TD_UNIT_OWNED] || slots != p->slots.count[TD_UNIT_OWNED])
        return td_fail(err, TD_INTERNAL, "%u of %u pages and %u of %u slots have a living owner",
                       pages, p->pages.count[TD_UNIT_OWNED], slots, p->slots.count[TD_UNIT_OWNED]);
    return TD_OK;
}

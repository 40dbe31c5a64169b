/* The choices of one request: what is reserved for them, what they share, and the moment from which
 * each is a sequence of its own. */
#include <string.h>

#include "decode/sched_parts.h"

struct seq *td_seq_next_choice(struct td_decode *d, struct td_key key, struct seq *s) {
    for (s = s == NULL ? d->seq : s + 1; s < d->seq + d->o.slots; s++)
        if (s->state != FREE && !s->orphan && s->key.request == key.request &&
            s->key.attempt == key.attempt)
            return s;
    return NULL;
}

struct seq *td_seq_find(struct td_decode *d, struct td_key key) {
    struct seq *first = td_seq_next_choice(d, key, NULL), *s = first;
    while (s != NULL && s->state == JOINING)
        s = td_seq_next_choice(d, key, s);
    return s != NULL ? s : first;
}

/* ---- admission ---- */

/* Decode writes at a position's own page. So the prompt's full pages are never written again, and
 * the first page a choice writes to is the prompt's last one, or, when that is full, the next. */
td_status td_decode_plan(const struct td_decode *d, const struct td_msg_admit *m, struct plan *ret,
                         struct td_error *err) {
    uint64_t tokens = (uint64_t)m->n_prompt + m->max_new;
    uint32_t n = m->n > 1 ? m->n : 1;
    if (m->n_prompt == 0 || m->max_new == 0)
        return td_fail(err, TD_INVALID, "an empty prompt, or no output wanted");
    if (tokens > d->o.max_context)
        return td_fail(err, TD_TOO_LONG,
                       "%u prompt and %u output tokens make %llu, the limit is %u", m->n_prompt,
                       m->max_new, (unsigned long long)tokens, d->o.max_context);
    if (n > d->o.slots || n > TD_CHOICES_MAX)
        return td_fail(err, TD_TOO_LONG, "%u choices need as many slots, there are %u", n,
                       d->o.slots);
    /* What does not fit alone would be preempted for ever, what does not fit together never run. */
    uint32_t all = td_kv_pages((uint32_t)tokens, d->o.split);
    uint32_t shared = n > 1 ? m->n_prompt / td_kv_page_tokens(d->o.split) : 0;
    uint32_t least = n > 1 ? shared + n : all;
    if (all > d->o.pages || least > d->o.pages)
        return td_fail(err, TD_TOO_LONG,
                       "%u prompt and %u output tokens of %u choice%s need %u pages, there are %u",
                       m->n_prompt, m->max_new, n, n == 1 ? "" : "s", all > least ? all : least,
                       d->o.pages);
    uint32_t extra = m->max_new < d->o.reserve_new ? m->max_new : d->o.reserve_new;
    uint32_t each = td_kv_pages(m->n_prompt + extra, d->o.split) - shared;
    if (each > (d->o.pages - shared) / n) each = (d->o.pages - shared) / n;
    *ret = (struct plan){n, shared, each};
    uint32_t need = shared + n * each;
    if (d->slots.count[TD_UNIT_FREE] < n && n == 1)
        return td_fail(err, TD_BUSY, "all %u slots are taken", d->o.slots);
    if (d->slots.count[TD_UNIT_FREE] < n)
        return td_fail(err, TD_BUSY, "%u slots are needed, %u are free", n,
                       d->slots.count[TD_UNIT_FREE]);
    if (d->pages.count[TD_UNIT_FREE] < need)
        return td_fail(err, TD_BUSY, "%u pages are needed, %u are free", need,
                       d->pages.count[TD_UNIT_FREE]);
    return TD_OK;
}

static struct seq *make(struct td_decode *d, const struct td_msg_admit *m, const struct plan *p,
                        uint32_t choice) {
    struct seq *s = d->seq;
    while (s->state != FREE)
        s++;
    *s = (struct seq){
        .state = choice > 0       ? JOINING
                 : m->ids != NULL ? PREFILLING
                                  : RESERVED,
        .key = m->key,
        .choice = choice,
        .n = p->n,
        .alone = m->ids != NULL,
        .owner = d->next_owner++,
        .ids = choice == 0 ? m->ids : NULL,
        .n_prompt = m->n_prompt,
        .max_new = m->max_new,
        .sampling = m->sampling,
        .n_pages = p->shared + p->each,
        .n_shared = p->shared,
        .admitted_ns = d->now_ns,
    };
    s->sampling.seed = td_choice_seed(m->sampling.seed, choice);
    td_status a = td_ledger_take(&d->slots, s->owner, 1, &s->slot, NULL);
    td_status b =
        td_ledger_take(&d->pages, s->owner, p->each, td_seq_pages(d, s) + p->shared, NULL);
    assert(a == TD_OK && b == TD_OK);
    (void)a, (void)b;
    return s;
}

struct seq *td_decode_reserve(struct td_decode *d, const struct td_msg_admit *m,
                              const struct plan *p) {
    struct seq *lead = make(d, m, p, 0);
    if (p->shared > 0) {
        lead->shared = d->next_owner++;
        td_status st =
            td_ledger_take(&d->pages, lead->shared, p->shared, td_seq_pages(d, lead), NULL);
        assert(st == TD_OK);
        (void)st;
        td_ledger_hold(&d->pages, lead->shared, p->n - 1);
    }
    for (uint32_t c = 1; c < p->n; c++) {
        struct seq *s = make(d, m, p, c);
        s->shared = lead->shared;
        memcpy(td_seq_pages(d, s), td_seq_pages(d, lead), p->shared * sizeof *d->page_ids);
    }
    return lead;
}

/* ---- from one prompt to n sequences ---- */

static void copy(struct td_decode *d, const struct seq *from, const struct seq *to) {
    struct td_decode_action *a = td_fifo_push(&d->actions);
    uint32_t each = td_kv_page_tokens(d->o.split);
    uint32_t last = from->n_prompt / each; /* the page written to next */
    a->kind = TD_DECODE_COPY;
    a->copy.from_slot = from->slot;
    a->copy.to_slot = to->slot;
    a->copy.page = from->n_prompt % each != 0;
    a->copy.from_page = td_seq_pages(d, from)[last];
    a->copy.to_page = td_seq_pages(d, to)[last];
}

void td_seq_fork(struct td_decode *d, struct seq *lead) {
    for (struct seq *s = NULL; (s = td_seq_next_choice(d, lead->key, s)) != NULL;) {
        if (s->state == JOINING) copy(d, lead, s);
        if (s != lead && s->state != JOINING) continue;
        s->state = RUNNING;
        s->computed_ns = d->now_ns;
        s->pos = s->n_prompt;
    }
    if (lead->dropped) td_seq_retire(d, lead, TD_CANCELLED, "the router cancelled this choice");
}

/* A step may have it already: then nobody hears what comes out. */
void td_decode_copy_failed(struct td_decode *d, const struct td_decode_event *ev) {
    for (struct seq *s = d->seq; s < d->seq + d->o.slots; s++)
        if (s->state == RUNNING && s->slot == ev->copy.to_slot)
            td_seq_fail(d, s, ev->copy.status, ev->copy.text);
}

static bool awaited(struct td_decode *d, const struct seq *lead) {
    for (struct seq *s = NULL; (s = td_seq_next_choice(d, lead->key, s)) != NULL;)
        if (s->state == JOINING) return true;
    return false;
}

void td_seq_drop(struct td_decode *d, struct seq *s) {
    const struct td_key key = s->key;
    if (s->state == RESERVED || s->state == PREFILLING)
        s->dropped = true;
    else
        td_seq_retire(d, s, TD_CANCELLED, "the router cancelled this choice");
    for (s = NULL; (s = td_seq_next_choice(d, key, s)) != NULL;)
        if (s->dropped && (s->state == RESERVED || s->state == PREFILLING) && !awaited(d, s))
            td_seq_retire(d, s, TD_CANCELLED, "the router cancelled the request");
}

/* ---- for tests ---- */

static td_status check_seq(const struct td_decode *d, const struct seq *s, uint32_t *ret_pages,
                           struct td_error *err) {
    const uint32_t *pages = td_seq_pages(d, s), i = (uint32_t)(s - d->seq);
    struct td_ledger_holding h = td_ledger_holding(&d->pages, s->owner);
    uint64_t owner;
    if (h.owned != s->n_pages - s->n_shared || (s->shared == 0) != (s->n_shared == 0))
        return td_fail(err, TD_INTERNAL, "entry %u: %u of its %u pages shared, %u in the ledger", i,
                       s->n_shared, s->n_pages, h.owned);
    for (uint32_t k = 0; k < s->n_pages; k++)
        if (td_ledger_state(&d->pages, pages[k], &owner) != TD_UNIT_OWNED ||
            owner != (k < s->n_shared ? s->shared : s->owner))
            return td_fail(err, TD_INTERNAL, "entry %u: its page %u is not its own", i, k);
    *ret_pages += h.owned;
    if (s->shared == 0) return TD_OK;
    uint32_t holders = 0;
    bool first = true;
    for (const struct seq *o = d->seq; o < d->seq + d->o.slots; o++) {
        if (o->state == FREE || o->shared != s->shared) continue;
        holders++;
        if (o < s) first = false;
    }
    h = td_ledger_holding(&d->pages, s->shared);
    if (h.owned != s->n_shared || h.holders != holders)
        return td_fail(err, TD_INTERNAL,
                       "entry %u: %u shared pages of %u holders, in the ledger %u of %u", i,
                       s->n_shared, holders, h.owned, h.holders);
    if (first) *ret_pages += h.owned;
    return TD_OK;
}

td_status td_decode_check_pages(const struct td_decode *d, struct td_error *err) {
    uint32_t pages = 0;
    for (const struct seq *s = d->seq; s < d->seq + d->o.slots; s++)
        if (s->state != FREE) TD_TRY(check_seq(d, s, &pages, err));
    if (pages != d->pages.count[TD_UNIT_OWNED])
        return td_fail(err, TD_INTERNAL, "%u of %u pages have a living owner", pages,
                       d->pages.count[TD_UNIT_OWNED]);
    return TD_OK;
}

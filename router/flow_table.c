/* The flow's table: entries found by request id, and lists of requests that share a clock. */
#include <stdlib.h>
#include <string.h>

#include "router/flow_parts.h"

enum {
    ACTIONS_PER_REQUEST = 6
}; /* of one step: two CANCEL, ADMIT or PREFILL, two DELIVER, an end */

static void clocked_init(struct clocked *c) {
    td_list_init(&c->head);
    c->next_ns = UINT64_MAX;
}

td_status td_flow_table_create(struct td_flow *f, struct td_error *err) {
    /* As many ended requests may wait for RELEASED as live ones run; a probe comes on top. */
    f->capacity = 2 * f->o.max_requests + 1;
    f->table = calloc(f->capacity, sizeof *f->table);
    f->bucket = calloc(f->capacity, sizeof *f->bucket);
    if (f->table == NULL || f->bucket == NULL ||
        !td_fifo_create(&f->actions, sizeof(struct td_flow_action),
                        ACTIONS_PER_REQUEST * f->capacity + 2 * TD_FLEET_WORKERS_MAX))
        return td_fail(err, TD_NO_MEMORY, "table of %u requests: out of memory", f->capacity);
    td_list_init(&f->free);
    clocked_init(&f->queued);
    clocked_init(&f->admitting);
    clocked_init(&f->admitted);
    for (uint32_t i = 0; i < f->capacity; i++) {
        f->bucket[i] = UINT32_MAX;
        td_list_push_back(&f->free, &f->table[i].link);
    }
    return TD_OK;
}

static uint32_t *bucket(struct td_flow *f, uint64_t id) {
    return &f->bucket[(id ^ id >> 32) % f->capacity];
}

struct request *td_flow_find(struct td_flow *f, uint64_t id) {
    for (uint32_t i = *bucket(f, id); i != UINT32_MAX; i = f->table[i].hash_next)
        if (f->table[i].s.request == id) return &f->table[i];
    return NULL;
}

static struct request *take(struct td_flow *f, const struct td_flow_submit *s, uint32_t number) {
    if (td_list_empty(&f->free)) return NULL;
    struct request *r = TD_CONTAINER(f->free.next, struct request, link);
    td_list_remove(&r->link);
    assert(r->state == FREE);
    /* All but the tokens held back, which n_held guards. */
    memset(r, 0, offsetof(struct request, held));
    td_list_init(&r->link);
    r->s = *s;
    r->s.request += number;
    r->s.ids += (size_t)number * (s->n_prompt + s->max_new);
    r->s.sampling.seed = td_choice_seed(s->sampling.seed, number);
    r->number = number;
    r->together = 1;
    r->has_prompt = number == 0;
    r->prompt = s->ids;
    r->lead = r->host = r->choice[0] = r;
    r->order = f->next_order++;
    r->decode = r->prefill = NO_LEG;
    r->times.submitted = r->phase_since_ns = f->now_ns;
    r->phase = TD_PHASE_QUEUE;
    uint32_t *b = bucket(f, r->s.request);
    r->hash_next = *b;
    *b = (uint32_t)(r - f->table);
    return r;
}

static void part_from_choices(struct request *r) {
    if (r->lead != r && r->lead != NULL) r->lead->choice[r->number] = NULL;
    for (uint32_t c = 1; r->lead == r && c < TD_CHOICES_MAX; c++)
        if (r->choice[c] != NULL) r->choice[c]->lead = NULL;
}

void td_flow_give(struct td_flow *f, struct request *r) {
    uint32_t me = (uint32_t)(r - f->table);
    uint32_t *p = bucket(f, r->s.request);
    while (*p != me)
        p = &f->table[*p].hash_next;
    *p = r->hash_next;
    r->state = FREE;
    part_from_choices(r);
    td_list_remove(&r->link);
    /* Last in, last out: an id that comes late finds no new request under its old entry soon. */
    td_list_push_back(&f->free, &r->link);
}

struct request *td_flow_take(struct td_flow *f, const struct td_flow_submit *s) {
    struct request *lead = take(f, s, 0);
    for (uint32_t c = 1; lead != NULL && c < s->n; c++) {
        struct request *r = take(f, s, c);
        if (r == NULL) {
            while (--c > 0)
                td_flow_give(f, lead->choice[c]);
            td_flow_give(f, lead);
            return NULL;
        }
        r->state = FOLLOWING;
        r->lead = lead;
        lead->choice[c] = r;
        lead->together = c + 1;
    }
    return lead;
}

static struct clocked *clock_of(struct td_flow *f, enum state state) {
    return state == QUEUED      ? &f->queued
           : state == ADMITTING ? &f->admitting
           : state == ADMITTED  ? &f->admitted
                                : NULL;
}

static bool goes_before(const struct request *a, const struct request *b) {
    if (a->s.priority != b->s.priority) return a->s.priority < b->s.priority;
    return a->order < b->order;
}

void td_flow_to(struct td_flow *f, struct request *r, enum state state, uint64_t deadline_ns) {
    struct clocked *from = clock_of(f, r->state), *to = clock_of(f, state);
    td_list_remove(&r->link);
    if (from != NULL && td_list_empty(&from->head)) from->next_ns = UINT64_MAX;
    if (r->state == QUEUED) f->counts.queued--;
    r->state = state;
    r->deadline_ns = deadline_ns;
    if (to == NULL) return;
    struct td_link *before = &to->head; /* the end, but in the queue by priority and age */
    if (state == QUEUED)
        while (before->prev != &to->head &&
               goes_before(r, TD_CONTAINER(before->prev, struct request, link)))
            before = before->prev;
    td_list_push_back(before, &r->link);
    if (state == QUEUED) {
        td_flow_phase(f, r, TD_PHASE_QUEUE);
        f->counts.queued++;
        f->pump_due = true;
    }
    if (deadline_ns < to->next_ns) to->next_ns = deadline_ns;
}

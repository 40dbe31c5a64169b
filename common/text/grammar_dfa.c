/* A drawn rule made deterministic by the subset construction, bytes and calls alike being symbols.
 * Work is counted, since the result can be exponentially larger than the drawing. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_build.h"

struct sets {
    uint32_t *pool; /* members of all sets, each set ascending */
    size_t n_pool, cap_pool;
    size_t *at; /* [n + 1] where each set begins */
    size_t n, cap_at;
    uint32_t *slots; /* [mask + 1] set number + 1 */
    size_t mask;
};

struct dfa {
    struct td_gb *b;
    uint32_t *first;           /* [n_nfa + 1] into `sorted` */
    struct td_gb_edge *sorted; /* by state */
    uint32_t *stamp;           /* [n_nfa] */
    uint32_t now;
    uint32_t *todo;   /* [n_nfa] */
    uint32_t *set;    /* [n_nfa] the set being put together */
    size_t n_set;
    struct sets sets;
    uint32_t end;

    struct td_gb_edge *out; /* of the state at hand */
    size_t n_out, cap_out;
};

static void *take(struct td_gb *b, size_t n, size_t size) {
    void *p = b->st == TD_OK ? calloc(n ? n : 1, size) : NULL;
    if (!p) td_gb_fail(b, TD_NO_MEMORY, "no memory for a grammar");
    return p;
}

/* ---- sets ---- */

static uint32_t hash(const uint32_t *p, size_t n) {
    uint64_t h = 0x9E3779B97F4A7C15ull ^ n;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0xFF51AFD7ED558CCDull, h ^= h >> 32;
    return (uint32_t)h;
}

static void slot_put(struct sets *s, uint32_t set) {
    size_t i = hash(s->pool + s->at[set], s->at[set + 1] - s->at[set]) & s->mask;
    while (s->slots[i])
        i = (i + 1) & s->mask;
    s->slots[i] = set + 1;
}

static bool more_slots(struct dfa *d) {
    struct sets *s = &d->sets;
    if (s->slots && (s->n + 1) * 2 < s->mask) return true;
    size_t want = s->slots ? (s->mask + 1) * 2 : 256;
    free(s->slots);
    s->slots = take(d->b, want, sizeof *s->slots);
    if (!s->slots) return false;
    s->mask = want - 1;
    for (uint32_t i = 0; i < s->n; i++)
        slot_put(s, i);
    return true;
}

/* Number of the set that d->set holds; a new one gets the next. */
static uint32_t intern(struct dfa *d) {
    struct sets *s = &d->sets;
    if (!more_slots(d)) return 0;
    size_t bytes = d->n_set * sizeof *d->set;
    size_t i = hash(d->set, d->n_set) & s->mask;
    for (; s->slots[i]; i = (i + 1) & s->mask) {
        uint32_t k = s->slots[i] - 1;
        if (s->at[k + 1] - s->at[k] == d->n_set &&
            (bytes == 0 || memcmp(s->pool + s->at[k], d->set, bytes) == 0))
            return k;
    }
    while (s->n_pool + d->n_set > s->cap_pool)
        if (!td_gb_grow(d->b, (void **)&s->pool, &s->cap_pool, s->cap_pool, sizeof *s->pool))
            return 0;
    if (!td_gb_grow(d->b, (void **)&s->at, &s->cap_at, s->n + 1, sizeof *s->at)) return 0;
    if (s->n == 0) s->at[0] = 0;
    if (bytes) memcpy(s->pool + s->n_pool, d->set, bytes);
    s->n_pool += d->n_set;
    s->at[s->n + 1] = s->n_pool;
    s->slots[i] = (uint32_t)++s->n;
    return (uint32_t)s->n - 1;
}

static void set_begin(struct dfa *d) {
    d->n_set = 0;
    d->now++;
}

/* Adds a state and what empty edges lead to; only states that something leaves, and the end, are
 * worth keeping. */
static void set_add(struct dfa *d, uint32_t state) {
    size_t n = 0;
    if (d->stamp[state] == d->now) return;
    d->stamp[state] = d->now;
    d->todo[n++] = state;
    while (n > 0) {
        uint32_t at = d->todo[--n];
        bool keep = at == d->end;
        for (uint32_t i = d->first[at]; i < d->first[at + 1]; i++) {
            const struct td_gb_edge *e = &d->sorted[i];
            d->b->work++;
            if (e->kind != TD_GB_EMPTY) {
                keep = true;
            } else if (d->stamp[e->to] != d->now) {
                d->stamp[e->to] = d->now;
                d->todo[n++] = e->to;
            }
        }
        if (keep) d->set[d->n_set++] = at;
    }
}

static int by_number(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static uint32_t set_end(struct dfa *d) {
    d->b->work += d->n_set * 8;
    if (d->b->work > TD_GB_WORK_MAX)
        td_gb_fail(d->b, TD_TOO_LONG,
                   "the grammar is too complex: its automaton needs too many states");
    if (d->n_set) qsort(d->set, d->n_set, sizeof *d->set, by_number);
    return intern(d);
}

/* ---- edges ---- */

static void out_edge(struct td_gb *b, uint32_t lo, uint32_t hi, uint8_t flags, uint32_t to) {
    if (!td_gb_grow(b, (void **)&b->edges, &b->cap_edges, b->n_edges, sizeof *b->edges)) return;
    b->edges[b->n_edges++] =
        (struct td_gb_out_edge){.lo = (uint16_t)lo, .hi = (uint16_t)hi, .flags = flags, .to = to};
}

static void out_call(struct td_gb *b, const struct td_gb_edge *e, uint32_t to) {
    if (!td_gb_grow(b, (void **)&b->calls, &b->cap_calls, b->n_calls, sizeof *b->calls)) return;
    b->calls[b->n_calls++] =
        (struct td_gb_call){.rule = e->rule, .to = to, .need = e->need, .room = e->room};
}

static void out_state(struct td_gb *b, bool accept) {
    if (b->n_states == TD_STATE_MAX)
        td_gb_fail(b, TD_TOO_LONG, "the grammar needs more than %d states", TD_STATE_MAX);
    if (!td_gb_grow(b, (void **)&b->states, &b->cap_states, b->n_states, sizeof *b->states)) return;
    b->states[b->n_states++] = (struct td_gb_state){
        .edge = (uint32_t)b->n_edges, .call = (uint32_t)b->n_calls, .accept = accept};
}

static int by_range(const void *a, const void *b) {
    const struct td_gb_edge *x = a, *y = b;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    if (x->kind == TD_GB_RANGE) return (x->lo > y->lo) - (x->lo < y->lo);
    if (x->rule != y->rule) return x->rule < y->rule ? -1 : 1;
    if (x->need != y->need) return x->need < y->need ? -1 : 1;
    return (x->room > y->room) - (x->room < y->room);
}

static size_t collect(struct dfa *d, uint32_t set) {
    const struct sets *s = &d->sets;
    d->n_out = 0;
    for (size_t i = s->at[set]; i < s->at[set + 1]; i++) {
        uint32_t at = s->pool[i];
        for (uint32_t k = d->first[at]; k < d->first[at + 1]; k++) {
            if (d->sorted[k].kind == TD_GB_EMPTY) continue;
            if (!td_gb_grow(d->b, (void **)&d->out, &d->cap_out, d->n_out, sizeof *d->out))
                return 0;
            d->out[d->n_out++] = d->sorted[k];
        }
    }
    d->b->work += d->n_out * 8;
    if (d->n_out) qsort(d->out, d->n_out, sizeof *d->out, by_range);
    size_t ranges = 0;
    while (ranges < d->n_out && d->out[ranges].kind == TD_GB_RANGE)
        ranges++;
    return ranges;
}

/* Cuts the symbols where a range begins or ends; in each stretch the same ranges hold. */
static void ranges_out(struct dfa *d, size_t n, uint32_t base) {
    bool cut[TD_SYMBOLS + 1] = {0};
    struct td_gb *b = d->b;
    size_t begun = 0, state_edges = b->n_edges;
    for (size_t i = 0; i < n; i++)
        cut[d->out[i].lo] = cut[d->out[i].hi + 1] = true;
    for (uint32_t lo = 0, hi; lo < TD_SYMBOLS && b->st == TD_OK; lo = hi + 1) {
        for (hi = lo; !cut[hi + 1] && hi + 1 < TD_SYMBOLS;)
            hi++;
        while (begun < n && d->out[begun].lo <= lo)
            begun++;
        set_begin(d);
        for (size_t i = 0; i < begun; i++)
            if (d->out[i].hi >= lo) set_add(d, d->out[i].to);
        b->work += begun;
        if (d->n_set == 0) continue;
        uint32_t to = base + set_end(d);
        struct td_gb_out_edge *last = b->n_edges > state_edges ? &b->edges[b->n_edges - 1] : NULL;
        if (last && last->to == to && last->hi + 1u == lo)
            last->hi = (uint16_t)hi;
        else
            out_edge(b, lo, hi, 0, to);
    }
}

static void calls_out(struct dfa *d, size_t from, uint32_t base) {
    for (size_t i = from, k; i < d->n_out && d->b->st == TD_OK; i = k) {
        set_begin(d);
        for (k = i; k < d->n_out && by_range(&d->out[i], &d->out[k]) == 0; k++)
            set_add(d, d->out[k].to);
        if (d->n_set) out_call(d->b, &d->out[i], base + set_end(d));
    }
}

/* ---- a rule ---- */

static bool sort_edges(struct dfa *d) {
    struct td_gb *b = d->b;
    d->first = take(b, (size_t)b->n_nfa + 2, sizeof *d->first);
    d->sorted = take(b, b->n_draw, sizeof *d->sorted);
    if (!d->first || !d->sorted) return false;
    for (size_t i = 0; i < b->n_draw; i++)
        d->first[b->draw[i].from + 2]++;
    for (uint32_t i = 2; i <= b->n_nfa + 1; i++)
        d->first[i] += d->first[i - 1];
    for (size_t i = 0; i < b->n_draw; i++)
        d->sorted[d->first[b->draw[i].from + 1]++] = b->draw[i];
    return true;
}

static void finished(struct td_gb *b, uint32_t rule, uint32_t start) {
    if (b->st == TD_OK) b->rules[rule] = (struct td_gb_rule){.start = start, .finished = true};
}

void td_gb_finish(struct td_gb *b, uint32_t rule, uint32_t start, uint32_t end, bool first) {
    struct dfa d = {.b = b, .end = end};
    uint32_t base = (uint32_t)b->n_states;
    uint32_t first_edge = (uint32_t)b->n_edges, first_call = (uint32_t)b->n_calls;
    d.stamp = take(b, b->n_nfa, sizeof *d.stamp);
    d.todo = take(b, b->n_nfa, sizeof *d.todo);
    d.set = take(b, b->n_nfa, sizeof *d.set);
    if (sort_edges(&d) && b->st == TD_OK) {
        set_begin(&d);
        set_add(&d, start);
        (void)set_end(&d);
    }
    for (uint32_t i = 0; b->st == TD_OK && i < d.sets.n; i++) {
        bool accept = false;
        for (size_t k = d.sets.at[i]; k < d.sets.at[i + 1]; k++)
            accept = accept || d.sets.pool[k] == end;
        out_state(b, accept);
        if (!accept || !first) {
            size_t ranges = collect(&d, i);
            ranges_out(&d, ranges, base);
            calls_out(&d, ranges, base);
        }
        if (b->st != TD_OK) break;
        struct td_gb_state *s = &b->states[b->n_states - 1];
        s->n_edges = (uint32_t)b->n_edges - s->edge;
        s->n_calls = (uint32_t)b->n_calls - s->call;
    }
    finished(b, rule, td_gb_merge(b, base, first_edge, first_call));
    free(d.first);
    free(d.sorted);
    free(d.stamp);
    free(d.todo);
    free(d.set);
    free(d.out);
    free(d.sets.pool);
    free(d.sets.at);
    free(d.sets.slots);
}

void td_gb_finish_as_is(struct td_gb *b, uint32_t rule, uint32_t start, const uint32_t *ends,
                        size_t n_ends) {
    struct dfa d = {.b = b};
    uint32_t base = (uint32_t)b->n_states;
    bool sorted = sort_edges(&d);
    for (uint32_t i = 0; sorted && b->st == TD_OK && i < b->n_nfa; i++) {
        bool accept = false;
        for (size_t k = 0; k < n_ends; k++)
            accept = accept || ends[k] == i;
        out_state(b, accept);
        if (b->st != TD_OK) break;
        uint32_t n = d.first[i + 1] - d.first[i];
        if (n) qsort(d.sorted + d.first[i], n, sizeof *d.sorted, by_range);
        for (uint32_t k = d.first[i]; k < d.first[i + 1]; k++) {
            const struct td_gb_edge *e = &d.sorted[k];
            if (e->kind == TD_GB_RANGE)
                out_edge(b, e->lo, e->hi, e->flags, base + e->to);
            else
                out_call(b, e, base + e->to);
        }
        if (b->st != TD_OK) break;
        struct td_gb_state *s = &b->states[b->n_states - 1];
        s->n_edges = (uint32_t)b->n_edges - s->edge;
        s->n_calls = (uint32_t)b->n_calls - s->call;
    }
    finished(b, rule, base + start);
    free(d.first);
    free(d.sorted);
}

/* Makes a finished rule smaller: states from which the same may follow become one. Alternatives
 * that differ at their beginning and agree at their end then share it, as do the bytes of UTF-8.
 *
 * States are taken in the order in which a depth-first walk leaves them, so that what follows a
 * state is known before it, except along cycles: a state that reaches one it has not left yet (other
 * than itself) stays as it is. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_build.h"

enum { NONE = UINT32_MAX, SELF = UINT32_MAX - 1 };

struct merge {
    struct td_gb *b;
    uint32_t base, n;
    uint32_t *same; /* [n] the state that stands for it, NONE: not left yet */
    uint32_t *next; /* [n] successors looked at */
    uint32_t *walk; /* [n] states being walked, the current one last */
    uint32_t *slots; /* [mask + 1] state + 1 */
    uint32_t mask;
};

static struct td_gb_state *state(const struct merge *m, uint32_t i) {
    return &m->b->states[m->base + i];
}

/* Successor k of a state, NONE behind the last. */
static uint32_t successor(const struct merge *m, const struct td_gb_state *s, uint32_t k) {
    if (k < s->n_edges) return m->b->edges[s->edge + k].to - m->base;
    k -= s->n_edges;
    return k < s->n_calls ? m->b->calls[s->call + k].to - m->base : NONE;
}

/* Lets the successors of a state be those that stand for them; false: one is not known yet. */
static bool settle(struct merge *m, uint32_t i) {
    struct td_gb_state *s = state(m, i);
    bool known = true;
    for (uint32_t k = 0; k < s->n_edges + s->n_calls; k++)
        known = known && (successor(m, s, k) == i || m->same[successor(m, s, k)] != NONE);
    if (!known) return false;
    uint32_t n = 0;
    for (uint32_t k = 0; k < s->n_edges; k++) {
        struct td_gb_out_edge e = m->b->edges[s->edge + k];
        struct td_gb_out_edge *last = n ? &m->b->edges[s->edge + n - 1] : NULL;
        if (e.to - m->base != i) e.to = m->base + m->same[e.to - m->base];
        if (last && last->to == e.to && last->hi + 1 == e.lo)
            last->hi = e.hi;
        else
            m->b->edges[s->edge + n++] = e;
    }
    s->n_edges = n;
    for (uint32_t k = 0; k < s->n_calls; k++) {
        uint32_t *to = &m->b->calls[s->call + k].to;
        if (*to - m->base != i) *to = m->base + m->same[*to - m->base];
    }
    return true;
}

static uint32_t target(const struct merge *m, uint32_t i, uint32_t to) {
    return to - m->base == i ? SELF : to;
}

static uint32_t hash(const struct merge *m, uint32_t i) {
    const struct td_gb_state *s = state(m, i);
    uint64_t h = s->accept + 2u;
    for (uint32_t k = 0; k < s->n_edges; k++) {
        const struct td_gb_out_edge *e = &m->b->edges[s->edge + k];
        h = (h ^ e->lo ^ (uint64_t)e->hi << 16 ^ (uint64_t)target(m, i, e->to) << 32) *
            0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
    }
    for (uint32_t k = 0; k < s->n_calls; k++) {
        const struct td_gb_call *c = &m->b->calls[s->call + k];
        h = (h ^ c->rule ^ (uint64_t)target(m, i, c->to) << 32) * 0xBF58476D1CE4E5B9ull;
        h = (h ^ c->need ^ (uint64_t)c->room << 32) * 0x94D049BB133111EBull;
        h ^= h >> 31;
    }
    return (uint32_t)(h >> 32);
}

static bool equal(const struct merge *m, uint32_t i, uint32_t j) {
    const struct td_gb_state *s = state(m, i), *t = state(m, j);
    if (s->accept != t->accept || s->n_edges != t->n_edges || s->n_calls != t->n_calls)
        return false;
    for (uint32_t k = 0; k < s->n_edges; k++) {
        const struct td_gb_out_edge *e = &m->b->edges[s->edge + k], *f = &m->b->edges[t->edge + k];
        if (e->lo != f->lo || e->hi != f->hi || target(m, i, e->to) != target(m, j, f->to))
            return false;
    }
    for (uint32_t k = 0; k < s->n_calls; k++) {
        const struct td_gb_call *c = &m->b->calls[s->call + k], *d = &m->b->calls[t->call + k];
        if (c->rule != d->rule || c->need != d->need || c->room != d->room ||
            target(m, i, c->to) != target(m, j, d->to))
            return false;
    }
    return true;
}

static void leave(struct merge *m, uint32_t i) {
    m->same[i] = i;
    m->b->work += 4;
    if (!settle(m, i)) return;
    uint32_t k = hash(m, i) & m->mask;
    for (; m->slots[k]; k = (k + 1) & m->mask) {
        if (!equal(m, i, m->slots[k] - 1)) continue;
        m->same[i] = m->slots[k] - 1;
        return;
    }
    m->slots[k] = i + 1;
}

static void walk(struct merge *m) {
    uint32_t n = 0;
    uint32_t *begun = m->next; /* 0: not yet; else successors looked at + 1 */
    m->walk[n++] = 0;
    begun[0] = 1;
    while (n > 0) {
        uint32_t i = m->walk[n - 1], to = successor(m, state(m, i), begun[i] - 1);
        if (to == NONE) {
            leave(m, i);
            n--;
            continue;
        }
        begun[i]++;
        if (begun[to]) continue;
        begun[to] = 1;
        m->walk[n++] = to;
    }
}

/* Writes the states that are left over the old ones. */
static void rewrite(struct merge *m, uint32_t first_edge, uint32_t first_call) {
    struct td_gb *b = m->b;
    uint32_t *number = m->next, n = 0;
    for (uint32_t i = 0; i < m->n; i++)
        if (m->same[i] == i) number[i] = n++;
    b->n_edges = first_edge;
    b->n_calls = first_call;
    for (uint32_t i = 0; i < m->n; i++) {
        struct td_gb_state s = *state(m, i);
        if (m->same[i] != i) continue;
        struct td_gb_state *to = state(m, number[i]);
        *to = s;
        to->edge = (uint32_t)b->n_edges;
        to->call = (uint32_t)b->n_calls;
        for (uint32_t k = 0; k < s.n_edges; k++) {
            struct td_gb_out_edge e = b->edges[s.edge + k];
            e.to = m->base + number[m->same[e.to - m->base]];
            b->edges[b->n_edges++] = e;
        }
        for (uint32_t k = 0; k < s.n_calls; k++) {
            struct td_gb_call c = b->calls[s.call + k];
            c.to = m->base + number[m->same[c.to - m->base]];
            b->calls[b->n_calls++] = c;
        }
    }
    b->n_states = m->base + n;
}

uint32_t td_gb_merge(struct td_gb *b, uint32_t base, uint32_t first_edge, uint32_t first_call) {
    struct merge m = {.b = b, .base = base, .n = (uint32_t)b->n_states - base, .mask = 1};
    if (b->st != TD_OK || m.n == 0) return base;
    while (m.mask < m.n * 2)
        m.mask *= 2;
    m.same = malloc(m.n * sizeof *m.same);
    m.next = calloc(m.n, sizeof *m.next);
    m.walk = calloc(m.n, sizeof *m.walk);
    m.slots = calloc(m.mask, sizeof *m.slots);
    m.mask--;
    uint32_t start = base;
    if (!m.same || !m.next || !m.walk || !m.slots) {
        td_gb_fail(b, TD_NO_MEMORY, "no memory for a grammar");
    } else {
        memset(m.same, 0xFF, m.n * sizeof *m.same);
        walk(&m);
        rewrite(&m, first_edge, first_call);
        start = base + m.next[m.same[0]];
    }
    free(m.same);
    free(m.next);
    free(m.walk);
    free(m.slots);
    return start;
}

/* From finished rules to a grammar's bytes: states without a way to the end go, what the root does
 * not reach goes (core rules stay), rules are ordered by what their beginnings call. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_build.h"

enum { DEAD = 255 };

struct pack {
    struct td_gb *b;
    uint8_t *depth;       /* [n_states] frames to the end of the rule, DEAD: there is no end */
    uint32_t *rule_order; /* [n_order] rules in their new order */
    size_t n_order;
    uint32_t *rule_id; /* [n_rules] new number + 1, 0: unreached */
    uint8_t *color;
    uint32_t *ways; /* [n_rules] to enter it */
    uint32_t *state_id;    /* [n_states] new number + 1 */
    uint32_t *state_order; /* [n_order_states] */
    size_t n_order_states;
    uint32_t *todo;      /* states */
    uint32_t *rule_todo;
};

/* Depths, by relaxation: most edges lead to later states, so few passes from the back settle it. */
static void depths(struct pack *p) {
    struct td_gb *b = p->b;
    bool changed = true;
    while (changed) {
        changed = false;
        for (size_t i = b->n_states; i-- > 0;) {
            const struct td_gb_state *s = &b->states[i];
            unsigned best = s->accept ? 0 : p->depth[i];
            for (uint32_t k = 0; k < s->n_edges; k++) {
                unsigned d = p->depth[b->edges[s->edge + k].to];
                best = d < best ? d : best;
            }
            for (uint32_t k = 0; k < s->n_calls; k++) {
                const struct td_gb_call *c = &b->calls[s->call + k];
                unsigned in = p->depth[b->rules[c->rule].start], behind = p->depth[c->to];
                if (in == DEAD || behind == DEAD) continue;
                unsigned d = in + 1 > behind ? in + 1 : behind;
                best = d < best ? d : best;
            }
            b->work += 1 + s->n_edges + s->n_calls;
            if (best == p->depth[i]) continue;
            p->depth[i] = (uint8_t)best;
            changed = true;
        }
    }
}

static bool call_lives(const struct pack *p, const struct td_gb_call *c) {
    return p->depth[p->b->rules[c->rule].start] != DEAD && p->depth[c->to] != DEAD;
}

/* Numbers the states of a rule that its start reaches. */
static void number_states(struct pack *p, uint32_t start) {
    struct td_gb *b = p->b;
    size_t n = 0;
    if (p->state_id[start]) return;
    p->todo[n++] = start;
    p->state_id[start] = 1;
    while (n > 0) {
        uint32_t at = p->todo[--n];
        const struct td_gb_state *s = &b->states[at];
        p->state_order[p->n_order_states++] = at;
        p->state_id[at] = (uint32_t)p->n_order_states;
        for (uint32_t k = s->n_edges; k-- > 0;) {
            uint32_t to = b->edges[s->edge + k].to;
            if (p->depth[to] == DEAD || p->state_id[to]) continue;
            p->state_id[to] = 1;
            p->todo[n++] = to;
        }
        for (uint32_t k = s->n_calls; k-- > 0;) {
            uint32_t to = b->calls[s->call + k].to;
            if (!call_lives(p, &b->calls[s->call + k]) || p->state_id[to]) continue;
            p->state_id[to] = 1;
            p->todo[n++] = to;
        }
    }
}

/* Marks the rules that living states of `rule` call, all the way. */
static void reach(struct pack *p, uint32_t root) {
    struct td_gb *b = p->b;
    size_t n = 0;
    p->rule_todo[n++] = root;
    p->color[root] = 1;
    while (n > 0) {
        uint32_t rule = p->rule_todo[--n];
        size_t from = p->n_order_states;
        number_states(p, b->rules[rule].start);
        for (size_t i = from; i < p->n_order_states; i++) {
            const struct td_gb_state *s = &b->states[p->state_order[i]];
            for (uint32_t k = 0; k < s->n_calls; k++) {
                const struct td_gb_call *c = &b->calls[s->call + k];
                if (!call_lives(p, c) || p->color[c->rule]) continue;
                p->color[c->rule] = 1;
                p->rule_todo[n++] = c->rule;
            }
        }
    }
}

/* Alternatives that lead to the same rules double the ways at each level; somebody could ask for
 * 2^30 of them in a few lines. */
static void count_ways(struct pack *p, uint32_t rule) {
    struct td_gb *b = p->b;
    const struct td_gb_state *s = &b->states[b->rules[rule].start];
    uint64_t ways = 1;
    for (uint32_t k = 0; k < s->n_calls; k++)
        if (call_lives(p, &b->calls[s->call + k])) ways += p->ways[b->calls[s->call + k].rule];
    if (ways > TD_WAYS_MAX)
        td_gb_fail(b, TD_TOO_LONG, "more than %d alternatives begin in one place", TD_WAYS_MAX);
    p->ways[rule] = (uint32_t)ways;
}

/* Rules whose start is called from another's start come before it. The graph's depth is bounded by
 * the number of rules, so the walk keeps its own stack. */
static void order(struct pack *p, uint32_t rule) {
    struct td_gb *b = p->b;
    size_t n = 0;
    if (p->color[rule] != 1) return;
    p->rule_todo[n++] = rule;
    while (n > 0) {
        uint32_t at = p->rule_todo[n - 1];
        const struct td_gb_state *s = &b->states[b->rules[at].start];
        bool below = false;
        p->color[at] = 2;
        for (uint32_t k = 0; k < s->n_calls && !below; k++) {
            const struct td_gb_call *c = &b->calls[s->call + k];
            if (!call_lives(p, c) || p->color[c->rule] == 3) continue;
            if (p->color[c->rule] == 2) {
                td_gb_fail(b, TD_UNSUPPORTED, "a schema refers to itself without anything between");
                return;
            }
            p->rule_todo[n++] = c->rule;
            below = true;
        }
        if (below) continue;
        p->color[at] = 3;
        n--;
        count_ways(p, at);
        p->rule_order[p->n_order++] = at;
        p->rule_id[at] = (uint32_t)p->n_order;
    }
}

/* ---- writing ---- */

static void word(struct td_bytes *out, uint32_t v) {
    uint8_t p[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    td_bytes_add(out, p, sizeof p);
}

static void write_lists(const struct pack *p, struct td_bytes *edges, struct td_bytes *calls,
                        struct td_bytes *states) {
    const struct td_gb *b = p->b;
    uint32_t n_edges = 0, n_calls = 0;
    for (size_t i = 0; i < p->n_order_states; i++) {
        const struct td_gb_state *s = &b->states[p->state_order[i]];
        uint32_t edge = n_edges, call = n_calls;
        for (uint32_t k = 0; k < s->n_edges; k++) {
            const struct td_gb_out_edge *e = &b->edges[s->edge + k];
            if (p->depth[e->to] == DEAD) continue;
            word(edges, e->lo | (uint32_t)e->hi << 9 | (uint32_t)e->flags << 18);
            word(edges, p->state_id[e->to] - 1);
            n_edges++;
        }
        for (uint32_t k = 0; k < s->n_calls; k++) {
            const struct td_gb_call *c = &b->calls[s->call + k];
            if (!call_lives(p, c)) continue;
            word(calls, p->rule_id[c->rule] - 1);
            word(calls, p->state_id[c->to] - 1);
            word(calls, c->need);
            word(calls, c->room);
            n_calls++;
        }
        bool final = s->accept && edge == n_edges && call == n_calls;
        word(states, edge);
        word(states, call);
        word(states, (s->accept ? TD_STATE_ACCEPT : 0u) | (final ? TD_STATE_FINAL : 0u) |
                         (uint32_t)p->depth[p->state_order[i]] << 8);
    }
    word(states, n_edges);
    word(states, n_calls);
    word(states, 0);
}

static void write_all(const struct pack *p, uint32_t root, uint32_t core, struct td_bytes *out) {
    struct td_bytes states = {0}, edges = {0}, calls = {0};
    write_lists(p, &edges, &calls, &states);
    size_t n = (TD_G_HEAD + p->n_order * TD_G_RULE) * 4 + states.n + edges.n + calls.n;
    if (states.failed || edges.failed || calls.failed) {
        td_gb_fail(p->b, TD_NO_MEMORY, "no memory for a grammar");
    } else if (n > TD_GRAMMAR_BYTES_MAX) {
        td_gb_fail(p->b, TD_TOO_LONG, "the grammar needs %zu bytes, more than %d", n,
                   TD_GRAMMAR_BYTES_MAX);
    } else {
        const uint32_t head[TD_G_HEAD] = {TD_GRAMMAR_MAGIC,
                                          (uint32_t)p->n_order,
                                          (uint32_t)p->n_order_states,
                                          (uint32_t)(edges.n / (TD_G_EDGE * 4)),
                                          (uint32_t)(calls.n / (TD_G_CALL * 4)),
                                          p->rule_id[root] - 1,
                                          core,
                                          0};
        for (int i = 0; i < TD_G_HEAD; i++)
            word(out, head[i]);
        for (size_t i = 0; i < p->n_order; i++) {
            word(out, p->state_id[p->b->rules[p->rule_order[i]].start] - 1);
            word(out, p->ways[p->rule_order[i]]);
        }
        td_bytes_add(out, states.p, states.n);
        td_bytes_add(out, edges.p, edges.n);
        td_bytes_add(out, calls.p, calls.n);
        if (out->failed) td_gb_fail(p->b, TD_NO_MEMORY, "no memory for a grammar");
    }
    td_bytes_free(&states);
    td_bytes_free(&edges);
    td_bytes_free(&calls);
}

static bool take(struct pack *p) {
    size_t states = p->b->n_states + 1, rules = p->b->n_rules + 1;
    p->depth = malloc(states);
    p->rule_order = calloc(rules, sizeof *p->rule_order);
    p->rule_id = calloc(rules, sizeof *p->rule_id);
    p->color = calloc(rules, 1);
    p->ways = calloc(rules, sizeof *p->ways);
    p->state_id = calloc(states, sizeof *p->state_id);
    p->state_order = calloc(states, sizeof *p->state_order);
    p->todo = calloc(states, sizeof *p->todo);
    p->rule_todo = calloc(rules, sizeof *p->rule_todo);
    if (!p->depth || !p->rule_order || !p->rule_id || !p->color || !p->ways || !p->state_id ||
        !p->state_order || !p->todo || !p->rule_todo) {
        td_gb_fail(p->b, TD_NO_MEMORY, "no memory for a grammar");
        return false;
    }
    memset(p->depth, DEAD, states);
    return true;
}

static void pack(struct pack *p, uint32_t root, struct td_bytes *out) {
    struct td_gb *b = p->b;
    depths(p);
    if (p->depth[b->rules[root].start] == DEAD) {
        td_gb_fail(b, TD_INVALID, "the schema allows no value");
        return;
    }
    if (p->depth[b->rules[root].start] >= TD_MATCH_DEPTH) {
        td_gb_fail(b, TD_TOO_LONG, "what the schema asks for is nested deeper than %d levels",
                   TD_MATCH_DEPTH);
        return;
    }
    for (uint32_t i = 0; i < TD_CORE_RULES; i++) { /* core rules call core rules only */
        number_states(p, b->rules[i].start);
        p->color[i] = 3;
        p->rule_order[p->n_order++] = i;
        p->rule_id[i] = (uint32_t)p->n_order;
        count_ways(p, i);
    }
    uint32_t core = (uint32_t)p->n_order_states;
    reach(p, root);
    for (uint32_t i = 0; i < b->n_rules && b->st == TD_OK; i++)
        order(p, i);
    if (b->st == TD_OK) write_all(p, root, core, out);
}

td_status td_gb_pack(struct td_gb *b, uint32_t root, struct td_bytes *out) {
    struct pack p = {.b = b};
    size_t before = out->n;
    for (size_t i = 0; i < b->n_rules && b->st == TD_OK; i++)
        if (!b->rules[i].finished) td_gb_fail(b, TD_INTERNAL, "a rule was not drawn");
    if (b->st == TD_OK && take(&p)) pack(&p, root, out);
    free(p.depth);
    free(p.rule_order);
    free(p.rule_id);
    free(p.color);
    free(p.ways);
    free(p.state_id);
    free(p.state_order);
    free(p.todo);
    free(p.rule_todo);
    if (b->st != TD_OK) {
        out->n = before;
        out->failed = false;
    }
    return b->st;
}

/* Checks the bytes of a compiled grammar before anything walks them. */
#include <string.h>

#include "common/text/grammar_impl.h"

static uint64_t hash(const uint8_t *p, size_t n) { /* FNV-1a over words */
    uint64_t h = 0xCBF29CE484222325ull;
    for (size_t i = 0; i + 4 <= n; i += 4) {
        uint32_t w;
        memcpy(&w, p + i, 4);
        h = (h ^ w) * 0x100000001B3ull;
    }
    return h ^ h >> 29;
}

static td_status bad(struct td_error *err, const char *what, uint64_t at) {
    return td_fail(err, TD_CORRUPT, "compiled grammar: %s, at %llu", what, (unsigned long long)at);
}

static td_status check_state(const struct td_grammar *g, uint32_t i, struct td_error *err) {
    const uint32_t *s = td_g_state(g, i), *next = s + TD_G_STATE;
    if (s[0] > next[0] || next[0] > g->n_edges || s[1] > next[1] || next[1] > g->n_calls)
        return bad(err, "a state's lists are out of order", i);
    bool accept = s[2] & TD_STATE_ACCEPT, leaves = s[0] < next[0] || s[1] < next[1];
    if (!accept && !leaves) return bad(err, "a state without a way on", i);
    if (((s[2] & TD_STATE_FINAL) != 0) != (accept && !leaves) || td_g_depth(s) >= TD_MATCH_DEPTH * 4)
        return bad(err, "a state's flags do not fit it", i);
    for (uint32_t k = s[0]; k < next[0]; k++) {
        const uint32_t *e = g->edges + (size_t)k * TD_G_EDGE;
        uint32_t lo = td_edge_lo(e), hi = td_edge_hi(e);
        if (lo > hi || hi >= TD_SYMBOLS || e[0] >> 18 > (TD_EDGE_CHAR | TD_EDGE_END) ||
            e[1] >= g->n_states)
            return bad(err, "an edge leads nowhere", k);
        if (k > s[0] && lo < td_edge_lo(e - TD_G_EDGE))
            return bad(err, "edges are out of order", k);
    }
    return TD_OK;
}

static td_status check_calls(const struct td_grammar *g, struct td_error *err) {
    for (uint32_t k = 0; k < g->n_calls; k++) {
        const uint32_t *c = g->calls + (size_t)k * TD_G_CALL;
        if (c[0] >= g->n_rules || c[1] >= g->n_states || c[2] >= TD_ROOM_ANY || c[3] > TD_ROOM_ANY ||
            c[2] > c[3])
            return bad(err, "a call leads nowhere", k);
        if (td_g_state(g, td_g_start(g, c[0]))[2] & TD_STATE_ACCEPT)
            return bad(err, "what is called may be empty", k);
    }
    return TD_OK;
}

/* Entering a rule may enter lower ones only, so it ends. */
static td_status check_rules(const struct td_grammar *g, struct td_error *err) {
    for (uint32_t r = 0; r < g->n_rules; r++) {
        if (td_g_start(g, r) >= g->n_states) return bad(err, "a rule begins nowhere", r);
    }
    for (uint32_t r = 0; r < g->n_rules; r++) {
        const uint32_t *s = td_g_state(g, td_g_start(g, r));
        uint64_t ways = 1;
        for (uint32_t k = s[1]; k < s[1 + TD_G_STATE]; k++) {
            uint32_t callee = g->calls[(size_t)k * TD_G_CALL];
            if (callee >= r) return bad(err, "rules enter each other", r);
            ways += g->rules[(size_t)callee * TD_G_RULE + 1];
        }
        if (ways > TD_WAYS_MAX || ways != g->rules[(size_t)r * TD_G_RULE + 1])
            return bad(err, "a rule has too many ways to enter it", r);
    }
    return TD_OK;
}

td_status td_grammar_open(const void *bytes, size_t n, struct td_grammar *ret_g,
                          struct td_error *err) {
    const uint32_t *w = bytes;
    struct td_grammar g = {.words = w};
    if (n < TD_G_HEAD * 4 || n % 4 != 0 || n > TD_GRAMMAR_BYTES_MAX || (uintptr_t)bytes % 4 != 0)
        return bad(err, "its length or place is impossible", n);
    if (w[0] != TD_GRAMMAR_MAGIC) return bad(err, "its first word is another one's", w[0]);
    g.n_rules = w[1], g.n_states = w[2], g.n_edges = w[3], g.n_calls = w[4];
    uint64_t words = TD_G_HEAD + (uint64_t)g.n_rules * TD_G_RULE + ((uint64_t)g.n_states + 1) * TD_G_STATE +
                     (uint64_t)g.n_edges * TD_G_EDGE + (uint64_t)g.n_calls * TD_G_CALL;
    if (words * 4 != n) return bad(err, "its lists and its length differ", n);
    if (w[5] >= g.n_rules || w[6] > g.n_states || g.n_states >= TD_STATE_MAX)
        return bad(err, "its root is missing", w[5]);
    g.rules = w + TD_G_HEAD;
    g.states = g.rules + (size_t)g.n_rules * TD_G_RULE;
    g.edges = g.states + ((size_t)g.n_states + 1) * TD_G_STATE;
    g.calls = g.edges + (size_t)g.n_edges * TD_G_EDGE;
    for (uint32_t i = 0; i < g.n_states; i++)
        TD_TRY(check_state(&g, i, err));
    if (td_g_state(&g, 0)[0] != 0 || td_g_state(&g, 0)[1] != 0)
        return bad(err, "its lists do not begin", 0);
    TD_TRY(check_rules(&g, err));
    TD_TRY(check_calls(&g, err));
    g.hash = hash(bytes, n);
    *ret_g = g;
    return TD_OK;
}

/* The compiled form of a grammar, private to its writer (grammar_pack.c), its checker
 * (grammar_open.c) and its readers (grammar_match.c, grammar_mask.c).
 *
 * A grammar is a set of rules. A rule is an automaton over symbols, which are bytes and marks (tokens
 * without text), and calls of rules. What a call enters takes at least one symbol. A path is a
 * stack of frames, one per rule that was entered; a call whose target is final leaves none.
 * Several edges or calls may fit a symbol, and an accepting state may also return: then there are
 * several paths.
 *
 * 32-bit words, little-endian:
 *     magic, rules, states, edges, calls, root rule, core states, 0
 *     rules  [n]      start state, ways to enter (itself and those of what its start calls)
 *     states [n + 1]  first edge, first call, flags | depth << 8; the last one ends the lists
 *     edges  [n]      lo | hi << 9 | flags << 18, target       ascending by lo inside a state
 *     calls  [n]      rule, target, need, room
 * A rule that the start state of another one calls has the lower number, so entering ends, and the
 * ways are bounded (WAYS_MAX), so it ends soon.
 *
 * Strings are counted in their frame, not in states: `need` characters must and `room` may still
 * come (ROOM_ANY: any number). A CHAR edge takes one of both, an END edge wants need to be 0. So all
 * strings of all grammars are the same few states, and masks computed for one serve all.
 *
 * `depth` of a state is how many more frames its shortest way to the end of its rule takes. Nobody
 * enters a state from which the end would not fit, so a bounded stack makes no dead ends. */
#ifndef TD_COMMON_TEXT_GRAMMAR_IMPL_H
#define TD_COMMON_TEXT_GRAMMAR_IMPL_H

#include "common/text/grammar.h"

#define TD_GRAMMAR_MAGIC 0x31474454u /* "TDG1" */

enum {
    TD_SYMBOL_DSML = 256,
    TD_SYMBOL_THINK_END,
    TD_SYMBOLS,

    TD_G_HEAD = 8, /* words */
    TD_G_RULE = 2,
    TD_G_STATE = 3,
    TD_G_EDGE = 2,
    TD_G_CALL = 4,

    TD_STATE_ACCEPT = 1,
    TD_STATE_FINAL = 2, /* accepts and nothing leaves it */

    TD_EDGE_CHAR = 1,
    TD_EDGE_END = 2,

    TD_WAYS_MAX = 4096,
    TD_STATE_MAX = 1 << 20,
    TD_ROOM_ANY = (1 << 20) - 1, /* need and room are below it */
};

/* Core rules stand first in every grammar, in this order and with the same states. */
enum {
    TD_CORE_GAP,        /* white space between JSON tokens */
    TD_CORE_STRING,     /* JSON string, counted */
    TD_CORE_RAW,        /* DSML string value and </|DSML|, counted; the mark is a token */
    TD_CORE_RAW_SPELT,  /* the same up to </|DSML|parameter, not counted; the mark is spelled */
    TD_CORE_REASONING,  /* any bytes and </think> */
    TD_CORE_TEXT,       /* any bytes, one at least */
    TD_CORE_CALLS,      /* any bytes and <|DSML|; the mark is a token */
    TD_CORE_OBJECT,
    TD_CORE_ARRAY,
    TD_CORE_VALUE,
    TD_CORE_RULES,
};

/* ---- frames: state | need << 24 | room << 44 ---- */

static inline uint64_t td_frame(uint32_t state, uint32_t need, uint32_t room) {
    return state | (uint64_t)need << 24 | (uint64_t)room << 44;
}
static inline uint32_t td_frame_state(uint64_t f) { return (uint32_t)(f & 0xFFFFFF); }
static inline uint32_t td_frame_need(uint64_t f) { return (uint32_t)(f >> 24 & 0xFFFFF); }
static inline uint32_t td_frame_room(uint64_t f) { return (uint32_t)(f >> 44); }

/* ---- reading ---- */

static inline const uint32_t *td_g_state(const struct td_grammar *g, uint32_t state) {
    return g->states + (size_t)state * TD_G_STATE;
}
static inline uint32_t td_g_start(const struct td_grammar *g, uint32_t rule) {
    return g->rules[(size_t)rule * TD_G_RULE];
}
static inline uint32_t td_g_depth(const uint32_t *state) { return state[2] >> 8; }

/* The frame behind an edge that `f` takes, or false when the edge's conditions do not hold. */
static inline bool td_edge_take(const uint32_t *edge, uint64_t f, uint64_t *ret_frame) {
    uint32_t flags = edge[0] >> 18, need = td_frame_need(f), room = td_frame_room(f);
    if (flags & TD_EDGE_END && need > 0) return false;
    if (flags & TD_EDGE_CHAR) {
        if (room == 0) return false;
        need -= need > 0;
        room -= room != TD_ROOM_ANY;
    }
    *ret_frame = td_frame(edge[1], need, room);
    return true;
}
static inline uint32_t td_edge_lo(const uint32_t *edge) { return edge[0] & 0x1FF; }
static inline uint32_t td_edge_hi(const uint32_t *edge) { return edge[0] >> 9 & 0x1FF; }

/* One symbol on a matcher; false and unchanged when no path takes it. */
bool td_matcher_symbol(struct td_matcher *m, uint32_t symbol);

#endif

/* A grammar under construction: rules are drawn as nondeterministic automata, one at a time, made
 * deterministic (grammar_dfa.c), and written when all are there (grammar_pack.c). Private to the
 * compiler.
 *
 * The first failure stays in `st`; after it every call does nothing, so who draws need not look at
 * each step. Calls count as symbols when a rule is made deterministic: alternatives that agree on
 * what comes, a nested rule included, are one state until they differ. */
#ifndef TD_COMMON_TEXT_GRAMMAR_BUILD_H
#define TD_COMMON_TEXT_GRAMMAR_BUILD_H

#include "common/text/grammar_impl.h"

enum {
    TD_GB_RULES_MAX = 1 << 14,
    TD_GB_NFA_MAX = 1 << 18,     /* states of one rule before it is deterministic */
    TD_GB_WORK_MAX = 30 << 20,   /* steps of one compilation: a few tenths of a second */
};

enum td_gb_kind { TD_GB_EMPTY, TD_GB_RANGE, TD_GB_CALL };

struct td_gb_edge { /* of the rule being drawn */
    uint32_t from, to;
    uint8_t kind, flags;
    uint16_t lo, hi;           /* RANGE */
    uint32_t rule, need, room; /* CALL */
};

struct td_gb_state { /* of finished rules */
    uint32_t edge, n_edges, call, n_calls;
    bool accept;
};

struct td_gb_out_edge {
    uint16_t lo, hi;
    uint8_t flags;
    uint32_t to;
};

struct td_gb_call {
    uint32_t rule, to, need, room;
};

struct td_gb_rule {
    uint32_t start;   /* a state, once it is finished */
    bool finished;
};

struct td_gb {
    td_status st;
    struct td_error *err;
    uint64_t work;

    struct td_gb_edge *draw; /* [n_draw] */
    size_t n_draw, cap_draw;
    uint32_t n_nfa;

    struct td_gb_rule *rules; /* [n_rules] */
    size_t n_rules, cap_rules;
    struct td_gb_state *states;
    size_t n_states, cap_states;
    struct td_gb_out_edge *edges;
    size_t n_edges, cap_edges;
    struct td_gb_call *calls;
    size_t n_calls, cap_calls;
};

void td_gb_free(struct td_gb *b);

/* Keeps the first failure. */
void td_gb_fail(struct td_gb *b, td_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Grows *p to hold one more element; false: failed. */
bool td_gb_grow(struct td_gb *b, void **p, size_t *cap, size_t n, size_t size);

/* ---- rules ---- */

uint32_t td_gb_rule(struct td_gb *b);
/* Begins to draw; returns the first state. */
uint32_t td_gb_begin(struct td_gb *b);
/* What was drawn from `start` to `end` is the rule, made deterministic; `first`: it ends where its
 * end is reached first. */
void td_gb_finish(struct td_gb *b, uint32_t rule, uint32_t start, uint32_t end, bool first);
/* The same without change, for what has counting edges; no empty edges. Several may end it. */
void td_gb_finish_as_is(struct td_gb *b, uint32_t rule, uint32_t start, const uint32_t *ends,
                        size_t n_ends);

/* Makes the states from `base` on, a rule whose start is the first of them, fewer; returns its new
 * start (grammar_merge.c). */
uint32_t td_gb_merge(struct td_gb *b, uint32_t base, uint32_t first_edge, uint32_t first_call);

/* ---- drawing ---- */

uint32_t td_gb_new(struct td_gb *b);
void td_gb_empty(struct td_gb *b, uint32_t from, uint32_t to);
void td_gb_range(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi);
void td_gb_range_flags(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi,
                       uint8_t flags);
void td_gb_call(struct td_gb *b, uint32_t from, uint32_t to, uint32_t rule);
void td_gb_call_counted(struct td_gb *b, uint32_t from, uint32_t to, uint32_t rule, uint32_t need,
                        uint32_t room);
/* These return the state behind. */
uint32_t td_gb_bytes(struct td_gb *b, uint32_t from, const char *p, size_t n);
uint32_t td_gb_text(struct td_gb *b, uint32_t from, const char *text);
/* Optional white space. */
uint32_t td_gb_gap(struct td_gb *b, uint32_t from);
/* Code points lo..hi (no surrogates among them) as UTF-8. */
void td_gb_code_points(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi);
/* The same as characters of a JSON string, each in its one spelling. */
void td_gb_json_points(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi);
/* Any JSON number. */
uint32_t td_gb_number(struct td_gb *b, uint32_t from);

/* ---- whole ---- */

/* Draws the core rules; first of all. */
void td_gb_core(struct td_gb *b);
/* Prunes, numbers, appends to `out`. TD_INVALID: the root allows nothing. */
td_status td_gb_pack(struct td_gb *b, uint32_t root, struct td_bytes *out);

#endif

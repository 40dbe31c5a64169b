/* Drawing the automata of a grammar's rules: states, edges, literals, ranges of code points. */
#include "common/text/grammar_build.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void td_gb_free(struct td_gb *b) {
    free(b->draw);
    free(b->rules);
    free(b->states);
    free(b->edges);
    free(b->calls);
    memset(b, 0, sizeof *b);
}

void td_gb_fail(struct td_gb *b, td_status st, const char *fmt, ...) {
    if (b->st != TD_OK) return;
    char text[sizeof b->err->text];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    b->st = td_fail(b->err, st, "%s", text);
}

bool td_gb_grow(struct td_gb *b, void **p, size_t *cap, size_t n, size_t size) {
    if (b->st != TD_OK) return false;
    if (n < *cap) return true;
    size_t want = *cap ? *cap * 2 : 64;
    void *q = realloc(*p, want * size);
    if (!q) {
        td_gb_fail(b, TD_NO_MEMORY, "no memory for a grammar");
        return false;
    }
    *p = q;
    *cap = want;
    return true;
}

/* ---- rules ---- */

uint32_t td_gb_rule(struct td_gb *b) {
    if (b->n_rules == TD_GB_RULES_MAX)
        td_gb_fail(b, TD_TOO_LONG, "the grammar needs more than %d rules", TD_GB_RULES_MAX);
    if (!td_gb_grow(b, (void **)&b->rules, &b->cap_rules, b->n_rules, sizeof *b->rules)) return 0;
    b->rules[b->n_rules] = (struct td_gb_rule){0};
    return (uint32_t)b->n_rules++;
}

uint32_t td_gb_begin(struct td_gb *b) {
    b->n_draw = 0;
    b->n_nfa = 0;
    return td_gb_new(b);
}

/* ---- drawing ---- */

uint32_t td_gb_new(struct td_gb *b) {
    if (b->n_nfa == TD_GB_NFA_MAX)
        td_gb_fail(b, TD_TOO_LONG, "a part of the grammar needs more than %d states",
                   TD_GB_NFA_MAX);
    return b->st == TD_OK ? b->n_nfa++ : 0;
}

static void edge(struct td_gb *b, const struct td_gb_edge *e) {
    if (!td_gb_grow(b, (void **)&b->draw, &b->cap_draw, b->n_draw, sizeof *b->draw)) return;
    b->draw[b->n_draw++] = *e;
}

void td_gb_empty(struct td_gb *b, uint32_t from, uint32_t to) {
    edge(b, &(struct td_gb_edge){.kind = TD_GB_EMPTY, .from = from, .to = to});
}

void td_gb_range_flags(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi,
                       uint8_t flags) {
    edge(b, &(struct td_gb_edge){.kind = TD_GB_RANGE,
                                 .from = from,
                                 .to = to,
                                 .lo = (uint16_t)lo,
                                 .hi = (uint16_t)hi,
                                 .flags = flags});
}

void td_gb_range(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi) {
    td_gb_range_flags(b, from, to, lo, hi, 0);
}

void td_gb_call_counted(struct td_gb *b, uint32_t from, uint32_t to, uint32_t rule, uint32_t need,
                        uint32_t room) {
    edge(b, &(struct td_gb_edge){.kind = TD_GB_CALL,
                                 .from = from,
                                 .to = to,
                                 .rule = rule,
                                 .need = need,
                                 .room = room});
}

void td_gb_call(struct td_gb *b, uint32_t from, uint32_t to, uint32_t rule) {
    td_gb_call_counted(b, from, to, rule, 0, TD_ROOM_ANY);
}

uint32_t td_gb_bytes(struct td_gb *b, uint32_t from, const char *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t to = td_gb_new(b);
        td_gb_range(b, from, to, (unsigned char)p[i], (unsigned char)p[i]);
        from = to;
    }
    return from;
}

uint32_t td_gb_text(struct td_gb *b, uint32_t from, const char *text) {
    return td_gb_bytes(b, from, text, strlen(text));
}

uint32_t td_gb_gap(struct td_gb *b, uint32_t from) {
    uint32_t to = td_gb_new(b);
    td_gb_empty(b, from, to);
    td_gb_call(b, from, to, TD_CORE_GAP);
    return to;
}

/* ---- code points ---- */

static int utf8(uint32_t c, uint8_t p[4]) {
    if (c < 0x80) {
        p[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        p[0] = (uint8_t)(0xC0 | c >> 6);
        p[1] = (uint8_t)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        p[0] = (uint8_t)(0xE0 | c >> 12);
        p[1] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
        p[2] = (uint8_t)(0x80 | (c & 0x3F));
        return 3;
    }
    p[0] = (uint8_t)(0xF0 | c >> 18);
    p[1] = (uint8_t)(0x80 | (c >> 12 & 0x3F));
    p[2] = (uint8_t)(0x80 | (c >> 6 & 0x3F));
    p[3] = (uint8_t)(0x80 | (c & 0x3F));
    return 4;
}

/* lo..hi of one length: cut where the bytes behind the first are not all of 80..BF. */
static void same_length(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi,
                        int n) {
    uint8_t p[4] = {0}, q[4] = {0};
    for (int i = 1; i < n; i++) {
        uint32_t low = (1u << (6 * i)) - 1;
        if ((lo & ~low) == (hi & ~low)) continue;
        if (lo & low) {
            same_length(b, from, to, lo, lo | low, n);
            same_length(b, from, to, (lo | low) + 1, hi, n);
            return;
        }
        if ((hi & low) != low) {
            same_length(b, from, to, lo, (hi & ~low) - 1, n);
            same_length(b, from, to, hi & ~low, hi, n);
            return;
        }
    }
    (void)utf8(lo, p);
    (void)utf8(hi, q);
    for (int i = 0; i < n; i++) {
        uint32_t next = i + 1 < n ? td_gb_new(b) : to;
        td_gb_range(b, from, next, p[i], q[i]);
        from = next;
    }
}

void td_gb_code_points(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi) {
    static const uint32_t last[4] = {0x7F, 0x7FF, 0xFFFF, 0x10FFFF};
    for (int n = 1; n <= 4 && lo <= hi; n++) {
        if (lo > last[n - 1]) continue;
        uint32_t end = hi < last[n - 1] ? hi : last[n - 1];
        same_length(b, from, to, lo, end, n);
        lo = end + 1;
    }
}

void td_gb_json_points(struct td_gb *b, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi) {
    static const char short_form[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    uint32_t raw = lo;
    for (uint32_t c = lo; c <= hi && c < 0x80; c++) {
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        if (c > raw) td_gb_code_points(b, from, to, raw, c - 1);
        raw = c + 1;
        char text[8];
        const char *form = short_form;
        while (*form && (uint32_t)*form != c)
            form += 2;
        if (*form && c)
            snprintf(text, sizeof text, "\\%c", form[1]);
        else
            snprintf(text, sizeof text, "\\u%04x", (unsigned)c);
        td_gb_empty(b, td_gb_text(b, from, text), to);
    }
    if (raw <= hi) td_gb_code_points(b, from, to, raw, hi);
}

/* Patterns: a regular subset of ECMA 262 as an automaton over code points, then drawn as bytes,
 * plain or as a JSON string's characters, with the number of characters bounded when asked.
 *
 * Taken: literals, ., classes, \d \w \s and their opposites (ASCII, as ECMA defines them; \s with
 * Unicode's spaces), escapes, groups, |, * + ? {m,n} and their lazy forms (the same language), ^
 * first and $ last in an alternative of the whole. Refused by name: look-around, back references,
 * \b, \p, anchors elsewhere. A repeated atom is read again for each copy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"
#include "common/text/unicode.h"

enum { STATES_MAX = 20000, EDGES_MAX = 100000, REPEAT_MAX = 10000, DEPTH_MAX = 50, RANGES_MAX = 512 };
enum { LAST = 0x10FFFF, EMPTY = UINT32_MAX };

struct edge {
    uint32_t from, to, lo, hi; /* lo EMPTY: none */
};

struct range {
    uint32_t lo, hi;
};

struct class {
    struct range r[RANGES_MAX];
    size_t n;
};

struct regex {
    const char *p, *end, *start;
    struct edge *edges; /* [n_edges] */
    size_t n_edges, cap_edges;
    uint32_t n_states;
    const char *wrong; /* why it cannot be taken; NULL: it can */
    const char *wrong_at;
    bool no_memory;
    int depth;
    uint64_t read; /* bytes, those of a copy again */
};

static void wrong(struct regex *r, const char *why) {
    if (!r->wrong) {
        r->wrong = why;
        r->wrong_at = r->p;
    }
}

static void spend(struct regex *r, uint64_t bytes) {
    r->read += bytes;
    if (r->read > TD_GB_WORK_MAX) wrong(r, "too long for its repetitions");
}

static uint32_t state(struct regex *r) {
    if (r->n_states == STATES_MAX) wrong(r, "too many states");
    return r->wrong ? 0 : r->n_states++;
}

static void add(struct regex *r, uint32_t from, uint32_t to, uint32_t lo, uint32_t hi) {
    if (r->wrong) return;
    if (r->n_edges == r->cap_edges) {
        size_t want = r->cap_edges ? r->cap_edges * 2 : 256;
        struct edge *e = want > EDGES_MAX * 2 ? NULL : realloc(r->edges, want * sizeof *e);
        if (!e) {
            r->no_memory = want <= EDGES_MAX * 2;
            wrong(r, "too many states");
            return;
        }
        r->edges = e;
        r->cap_edges = want;
    }
    r->edges[r->n_edges++] = (struct edge){from, to, lo, hi};
}

static void empty(struct regex *r, uint32_t from, uint32_t to) { add(r, from, to, EMPTY, 0); }

/* ---- classes ---- */

static void class_add(struct regex *r, struct class *c, uint32_t lo, uint32_t hi) {
    if (c->n == RANGES_MAX)
        wrong(r, "too many ranges in a class");
    else
        c->r[c->n++] = (struct range){lo, hi};
}

static int by_lo(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

static void class_not(struct regex *r, struct class *c) {
    struct class out = {.n = 0};
    uint32_t next = 0;
    if (c->n) qsort(c->r, c->n, sizeof *c->r, by_lo);
    for (size_t i = 0; i < c->n; i++) {
        if (c->r[i].lo > next) class_add(r, &out, next, c->r[i].lo - 1);
        if (c->r[i].hi + 1 > next) next = c->r[i].hi + 1;
    }
    if (next <= LAST) class_add(r, &out, next, LAST);
    *c = out;
}

static void class_union(struct regex *r, struct class *c, const struct class *with) {
    for (size_t i = 0; i < with->n; i++)
        class_add(r, c, with->r[i].lo, with->r[i].hi);
}

static void class_name(struct regex *r, char name, struct class *c) {
    static const struct range digit[] = {{'0', '9'}},
                              word[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                              space[] = {{9, 13},           {32, 32},         {0xA0, 0xA0},
                                         {0x1680, 0x1680},  {0x2000, 0x200A}, {0x2028, 0x2029},
                                         {0x202F, 0x202F},  {0x205F, 0x205F}, {0x3000, 0x3000},
                                         {0xFEFF, 0xFEFF}},
                              line[] = {{10, 10}, {13, 13}, {0x2028, 0x2029}};
    char low = (char)(name | 0x20);
    const struct range *p = low == 'd' ? digit : low == 'w' ? word : low == 's' ? space : line;
    size_t n = low == 'd' ? 1 : low == 'w' ? 4 : low == 's' ? 10 : 3;
    struct class one = {.n = 0};
    for (size_t i = 0; i < n; i++)
        class_add(r, &one, p[i].lo, p[i].hi);
    if (name != low) class_not(r, &one);
    class_union(r, c, &one);
}

/* All but surrogates, which no text has. */
static void class_edges(struct regex *r, const struct class *c, uint32_t from, uint32_t to) {
    for (size_t i = 0; i < c->n; i++) {
        uint32_t lo = c->r[i].lo, hi = c->r[i].hi;
        if (lo < 0xD800) add(r, from, to, lo, hi < 0xD800 ? hi : 0xD7FF);
        if (hi > 0xDFFF) add(r, from, to, lo > 0xDFFF ? lo : 0xE000, hi);
    }
}

/* ---- characters ---- */

static bool more(const struct regex *r) { return r->p < r->end && !r->wrong; }
static bool is(const struct regex *r, char c) { return more(r) && *r->p == c; }
static bool take(struct regex *r, char c) { return is(r, c) ? (r->p++, true) : false; }

static uint32_t character(struct regex *r) {
    uint32_t c = 0;
    int n = td_utf8_decode((const uint8_t *)r->p, (size_t)(r->end - r->p), &c);
    if (n <= 0) {
        wrong(r, "not UTF-8");
        return 0;
    }
    r->p += n;
    return c;
}

static uint32_t hex(struct regex *r, int n) {
    uint32_t v = 0;
    for (int i = 0; i < n; i++) {
        char c = more(r) ? *r->p : 0;
        int d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) {
            wrong(r, "hexadecimal digits expected");
            return 0;
        }
        v = v * 16 + (uint32_t)d;
        r->p++;
    }
    return v;
}

static uint32_t braced_hex(struct regex *r) {
    uint32_t v = 0;
    while (more(r) && *r->p != '}' && v <= LAST)
        v = v * 16 + hex(r, 1);
    if (!take(r, '}') || v > LAST) wrong(r, "a code point expected");
    return v;
}

/* Behind a backslash. True: one of the named classes was added to `c`; else *ret_c is it. */
static bool escape(struct regex *r, struct class *c, uint32_t *ret_c) {
    static const char from[] = "nrtfv", to[] = "\n\r\t\f\v";
    if (!more(r)) {
        wrong(r, "an escape without a character");
        return false;
    }
    char e = *r->p;
    if (strchr("dwsDWS", e)) {
        r->p++;
        class_name(r, e, c);
        return true;
    }
    const char *k = strchr(from, e);
    if (k) {
        r->p++;
        *ret_c = (uint32_t)to[k - from];
    } else if (e == 'x' || e == 'u') {
        r->p++;
        *ret_c = e == 'u' && take(r, '{') ? braced_hex(r) : hex(r, e == 'x' ? 2 : 4);
        if (*ret_c >= 0xD800 && *ret_c < 0xE000) wrong(r, "a surrogate");
    } else if (e == '0' && (r->p + 1 == r->end || r->p[1] < '0' || r->p[1] > '9')) {
        r->p++;
        *ret_c = 0;
    } else if ((e >= '0' && e <= '9') || (e >= 'a' && e <= 'z') || (e >= 'A' && e <= 'Z')) {
        wrong(r, e >= '1' && e <= '9' ? "a back reference" : "this escape");
    } else {
        *ret_c = character(r);
    }
    return false;
}

static void bracket(struct regex *r, struct class *c) {
    bool negated = take(r, '^');
    while (more(r) && *r->p != ']') {
        uint32_t lo = 0, hi = 0;
        bool named = take(r, '\\') ? (is(r, 'b') ? (r->p++, lo = 8, false) : escape(r, c, &lo))
                                   : (lo = character(r), false);
        if (named || !(is(r, '-') && r->p + 1 < r->end && r->p[1] != ']')) {
            if (!named) class_add(r, c, lo, lo);
            continue;
        }
        r->p++;
        if (take(r, '\\') ? escape(r, c, &hi) : (hi = character(r), false))
            wrong(r, "a class as the end of a range");
        if (hi < lo) wrong(r, "a range that runs backwards");
        class_add(r, c, lo, hi);
    }
    if (!take(r, ']')) wrong(r, "a class without its end");
    if (negated) class_not(r, c);
}

/* ---- expressions ---- */

static void alternatives(struct regex *r, uint32_t from, uint32_t to);

static void group(struct regex *r, uint32_t from, uint32_t to) {
    if (take(r, '?')) {
        bool named = is(r, '<') && r->p + 1 < r->end && r->p[1] != '=' && r->p[1] != '!';
        if (named)
            while (more(r) && *r->p != '>')
                r->p++;
        if (!take(r, named ? '>' : ':')) wrong(r, "look-around");
    }
    if (++r->depth > DEPTH_MAX) wrong(r, "groups nested too deep");
    alternatives(r, from, to);
    r->depth--;
    if (!take(r, ')')) wrong(r, "a group without its end");
}

static void atom(struct regex *r, uint32_t from, uint32_t to) {
    struct class c = {.n = 0};
    uint32_t one = 0;
    if (take(r, '(')) {
        group(r, from, to);
        return;
    }
    if (strchr("*+?{", *r->p)) {
        wrong(r, "a quantifier without an atom");
    } else if (strchr("^$", *r->p)) {
        wrong(r, "an anchor inside");
    } else if (take(r, '[')) {
        bracket(r, &c);
    } else if (take(r, '.')) {
        class_name(r, 'N', &c); /* all but line ends */
    } else if (take(r, '\\')) {
        if (!escape(r, &c, &one)) class_add(r, &c, one, one);
    } else {
        one = character(r);
        class_add(r, &c, one, one);
    }
    class_edges(r, &c, from, to);
}

static uint32_t number(struct regex *r) {
    uint32_t v = 0;
    if (!more(r) || *r->p < '0' || *r->p > '9') wrong(r, "a number expected");
    for (; more(r) && *r->p >= '0' && *r->p <= '9'; r->p++) {
        v = v * 10 + (uint32_t)(*r->p - '0');
        if (v > REPEAT_MAX) wrong(r, "too many repetitions");
    }
    return v;
}

/* Reads a quantifier; UINT32_MAX: no end. */
static void quantifier(struct regex *r, uint32_t *min, uint32_t *max) {
    *min = *max = 1;
    if (take(r, '*')) {
        *min = 0, *max = UINT32_MAX;
    } else if (take(r, '+')) {
        *max = UINT32_MAX;
    } else if (take(r, '?')) {
        *min = 0;
    } else if (take(r, '{')) {
        *min = *max = number(r);
        if (take(r, ',')) *max = is(r, '}') ? UINT32_MAX : number(r);
        if (!take(r, '}') || *max < *min) wrong(r, "a quantifier that is none");
    } else {
        return;
    }
    (void)take(r, '?');
}

/* Moves behind an atom without drawing it; what is wrong with it is found when it is drawn. */
static void skip_atom(struct regex *r) {
    int groups = 0;
    bool in_class = false;
    do {
        char c = *r->p++;
        if (c == '\\' && r->p < r->end) {
            c = *r->p++;
            if (c == 'x' || c == 'u') {
                bool braced = c == 'u' && r->p < r->end && *r->p == '{';
                for (int i = 0; r->p < r->end && (braced ? *r->p++ != '}' : i < (c == 'x' ? 2 : 4)); i++)
                    r->p += !braced;
            }
        } else if (in_class) {
            in_class = c != ']';
        } else if (c == '[') {
            in_class = true;
        } else if (c == '(') {
            groups++;
        } else if (c == ')') {
            groups--;
        } else if ((c & 0x80) != 0) {
            while (r->p < r->end && (*r->p & 0xC0) == 0x80)
                r->p++;
        }
    } while (r->p < r->end && (groups > 0 || in_class));
}

static uint32_t repeated(struct regex *r, uint32_t from) {
    const char *begin = r->p;
    uint32_t min, max;
    skip_atom(r);
    quantifier(r, &min, &max);
    const char *behind = r->p;
    uint64_t copy = (uint64_t)(behind - begin);
    spend(r, copy);
    uint32_t end = state(r), at = from;
    for (uint32_t i = 0; !r->wrong && (i < min || (i < max && max != UINT32_MAX)); i++) {
        uint32_t next = state(r);
        spend(r, copy);
        if (i >= min) empty(r, at, end);
        r->p = begin;
        atom(r, at, next);
        at = next;
    }
    if (max == UINT32_MAX && !r->wrong) {
        uint32_t loop = state(r), back = state(r);
        empty(r, at, loop);
        r->p = begin;
        atom(r, loop, back);
        empty(r, back, loop);
        at = loop;
    }
    empty(r, at, end);
    if (!r->wrong) r->p = behind;
    return end;
}

static void alternatives(struct regex *r, uint32_t from, uint32_t to) {
    do {
        uint32_t at = from;
        while (more(r) && *r->p != '|' && *r->p != ')')
            at = repeated(r, at);
        empty(r, at, to);
    } while (take(r, '|'));
}

static void anything(struct regex *r, uint32_t at) {
    struct class all = {.r = {{0, LAST}}, .n = 1};
    class_edges(r, &all, at, at);
}

/* The whole pattern: what is not anchored may have any text before or behind it. */
static void whole(struct regex *r, bool search, uint32_t from, uint32_t to) {
    do {
        uint32_t at = state(r), end = state(r);
        empty(r, from, at);
        if (!take(r, '^') && search) anything(r, at);
        uint32_t begin = state(r);
        empty(r, at, begin);
        at = begin;
        while (more(r) && *r->p != '|' && *r->p != '$') {
            if (*r->p == ')') wrong(r, "a group's end without its beginning");
            at = repeated(r, at);
        }
        bool anchored = take(r, '$');
        if (anchored && more(r) && *r->p != '|') wrong(r, "an anchor inside");
        empty(r, at, end);
        if (!anchored && search) anything(r, end);
        empty(r, end, to);
    } while (take(r, '|'));
    if (more(r)) wrong(r, "its end expected");
}

/* ---- drawing ---- */

static void around_less(struct td_gb *b, uint32_t from, uint32_t to, const struct edge *e) {
    if (e->lo < '<') td_gb_code_points(b, from, to, e->lo, '<' - 1);
    if (e->hi > '<') td_gb_code_points(b, from, to, '<' + 1, e->hi);
}

/* The automaton once per number of characters so far: up to `room`, or `need` when there is no
 * bound above, from where on it stays. */
static void draw(const struct regex *r, struct td_gb *b, const struct td_gb_text_form *f,
                 uint32_t from, uint32_t to, uint32_t accept) {
    uint32_t layers = (f->room == TD_ROOM_ANY ? f->need : f->room) + 1;
    uint64_t all = (uint64_t)layers * r->n_states;
    if (all > TD_GB_NFA_MAX / 2) {
        td_gb_fail(b, TD_TOO_LONG, "a pattern with these lengths needs too many states");
        return;
    }
    uint32_t base = b->n_nfa;
    for (uint64_t i = 0; i < all; i++)
        (void)td_gb_new(b);
    td_gb_empty(b, from, base);
    for (uint32_t k = 0; k < layers && b->st == TD_OK; k++) {
        uint32_t at = base + k * r->n_states;
        uint32_t next = k + 1 < layers ? at + r->n_states : at;
        bool last = k + 1 == layers && f->room != TD_ROOM_ANY;
        b->work += r->n_edges;
        for (size_t i = 0; i < r->n_edges; i++) {
            const struct edge *e = &r->edges[i];
            if (e->lo == EMPTY)
                td_gb_empty(b, at + e->from, at + e->to);
            else if (last)
                continue;
            else if (f->json)
                td_gb_json_points(b, at + e->from, next + e->to, e->lo, e->hi);
            else if (!f->no_less || e->lo > '<' || e->hi < '<')
                td_gb_code_points(b, at + e->from, next + e->to, e->lo, e->hi);
            else
                around_less(b, at + e->from, next + e->to, e);
        }
        if (k >= f->need) td_gb_empty(b, at + accept, to);
    }
}

void td_gb_pattern(struct td_gb *b, uint32_t from, uint32_t to, const char *p, size_t n,
                   const struct td_gb_text_form *f) {
    struct regex r = {.p = p, .end = p + n, .start = p};
    if (b->st != TD_OK) return;
    uint32_t begin = state(&r), accept = state(&r);
    whole(&r, f->search, begin, accept);
    b->work += r.read / 4;
    if (r.no_memory)
        td_gb_fail(b, TD_NO_MEMORY, "no memory for a pattern");
    else if (r.wrong)
        td_gb_fail(b, TD_UNSUPPORTED, "pattern: %s, at byte %td", r.wrong, r.wrong_at - r.start);
    else
        draw(&r, b, f, from, to, accept);
    free(r.edges);
}

/* ---- formats ---- */

#define YEAR "(\\d{3}[1-9]|\\d{2}[1-9]\\d|\\d[1-9]\\d{2}|[1-9]\\d{3})"
#define LEAP "(0[48]|[2468][048]|[13579][26])"
#define DATE                                                                                       \
    "(" YEAR "-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)"           \
    "|02-(0[1-9]|1\\d|2[0-8]))|(\\d\\d" LEAP "|" LEAP "00)-02-29)"
#define ZONE "(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?" ZONE
#define HMS "T(\\d+H(\\d+M(\\d+S)?)?|\\d+M(\\d+S)?|\\d+S)"
#define OCTET "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define ATOM "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define H "[0-9A-Fa-f]{1,4}"

static const char *const formats[][2] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"duration", "P(\\d+W|(\\d+D|\\d+Y(\\d+M(\\d+D)?)?|\\d+M(\\d+D)?)(" HMS ")?|" HMS ")"},
    {"uuid", "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"},
    {"ipv4", OCTET "(\\." OCTET "){3}"},
    {"ipv6", "(" H ":){7}" H "|(" H ":){1,6}:" H "|(" H ":){1,5}(:" H "){2}|(" H ":){1,4}(:" H
             "){3}|(" H ":){1,3}(:" H "){4}|(" H ":){1,2}(:" H "){5}|" H ":(:" H "){6}|:(:" H
             "){1,7}|(" H ":){1,7}:|::"},
    {"hostname", LABEL "(\\." LABEL "){0,3}"},
    {"email", ATOM "(\\." ATOM ")*@" LABEL "(\\." LABEL "){1,3}"},
};

const char *td_gb_format(const char *name) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(formats[i][0], name) == 0) return formats[i][1];
    return NULL;
}

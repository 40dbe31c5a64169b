/* The rules every grammar begins with: JSON without a schema, the strings that all schemas share,
 * and the free text around an answer's grammar. The same states in every grammar, so that masks
 * computed for them serve all. */
#include "common/text/grammar_build.h"

enum { SPACES = 32, TABS = 8 };

static void gap(struct td_gb *b) {
    uint32_t start = td_gb_begin(b), end = td_gb_new(b), line = td_gb_new(b), at = line;
    td_gb_range(b, start, end, ' ', ' ');
    td_gb_range(b, start, line, '\n', '\n');
    td_gb_empty(b, line, end);
    for (int i = 0; i < SPACES; i++) {
        at = td_gb_text(b, at, " ");
        td_gb_empty(b, at, end);
    }
    at = line;
    for (int i = 0; i < TABS; i++) {
        at = td_gb_text(b, at, "\t");
        td_gb_empty(b, at, end);
    }
    td_gb_finish(b, TD_CORE_GAP, start, end, false);
}

/* The bytes of one UTF-8 character of two bytes or more; its first byte counts it. */
static void long_characters(struct td_gb *b, uint32_t in) {
    static const struct {
        uint8_t lo, hi;       /* first byte */
        uint8_t lo2, hi2, n;  /* second one, bytes in all */
    } form[] = {{0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3}, {0xE1, 0xEC, 0x80, 0xBF, 3},
                {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3}, {0xF0, 0xF0, 0x90, 0xBF, 4},
                {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
    uint32_t last = td_gb_new(b), last2 = td_gb_new(b);
    td_gb_range(b, last, in, 0x80, 0xBF);
    td_gb_range(b, last2, last, 0x80, 0xBF);
    for (size_t i = 0; i < sizeof form / sizeof *form; i++) {
        uint32_t second = td_gb_new(b);
        td_gb_range_flags(b, in, second, form[i].lo, form[i].hi, TD_EDGE_CHAR);
        td_gb_range(b, second, form[i].n == 2 ? in : form[i].n == 3 ? last : last2, form[i].lo2,
                    form[i].hi2);
    }
}

static void hex(struct td_gb *b, uint32_t from, uint32_t to) {
    td_gb_range(b, from, to, '0', '9');
    td_gb_range(b, from, to, 'A', 'F');
    td_gb_range(b, from, to, 'a', 'f');
}

/* Behind a backslash and u: a code unit that is no surrogate, or two that are a pair. */
static void unit(struct td_gb *b, uint32_t from, uint32_t to) {
    uint32_t u[3], d = td_gb_new(b), pair[7];
    for (int i = 0; i < 3; i++)
        u[i] = td_gb_new(b);
    for (int i = 0; i < 7; i++)
        pair[i] = td_gb_new(b);
    td_gb_range(b, from, u[0], '0', '9');
    for (int c = 'A'; c <= 'a'; c += 'a' - 'A') { /* both cases */
        td_gb_range(b, from, u[0], (uint32_t)c, (uint32_t)c + 2);
        td_gb_range(b, from, d, (uint32_t)c + 3, (uint32_t)c + 3);
        td_gb_range(b, from, u[0], (uint32_t)c + 4, (uint32_t)c + 5);
        td_gb_range(b, d, pair[0], (uint32_t)c, (uint32_t)c + 1); /* DA, DB */
        td_gb_range(b, pair[4], pair[5], (uint32_t)c + 3, (uint32_t)c + 3);
        td_gb_range(b, pair[5], u[1], (uint32_t)c + 2, (uint32_t)c + 5); /* DC..DF */
    }
    td_gb_range(b, d, u[1], '0', '7');
    td_gb_range(b, d, pair[0], '8', '9');
    hex(b, u[0], u[1]);
    hex(b, u[1], u[2]);
    hex(b, u[2], to);
    hex(b, pair[0], pair[1]);
    hex(b, pair[1], pair[2]);
    td_gb_range(b, pair[2], pair[3], '\\', '\\');
    td_gb_range(b, pair[3], pair[4], 'u', 'u');
}

static void string(struct td_gb *b) {
    static const char escapes[] = "\"\\/bfnrt";
    uint32_t start = td_gb_begin(b), in = td_gb_new(b), end = td_gb_new(b);
    uint32_t escape = td_gb_new(b), u = td_gb_new(b);
    td_gb_range(b, start, in, '"', '"');
    td_gb_range_flags(b, in, end, '"', '"', TD_EDGE_END);
    td_gb_range_flags(b, in, in, ' ', '"' - 1, TD_EDGE_CHAR);
    td_gb_range_flags(b, in, in, '"' + 1, '\\' - 1, TD_EDGE_CHAR);
    td_gb_range_flags(b, in, in, '\\' + 1, 0x7F, TD_EDGE_CHAR);
    td_gb_range_flags(b, in, escape, '\\', '\\', TD_EDGE_CHAR);
    for (const char *p = escapes; *p; p++)
        td_gb_range(b, escape, in, (uint32_t)*p, (uint32_t)*p);
    td_gb_range(b, escape, u, 'u', 'u');
    unit(b, u, in);
    long_characters(b, in);
    td_gb_finish_as_is(b, TD_CORE_STRING, start, &end, 1);
}

/* `<` may be text or the beginning of the end: two paths until that is clear. */
static void raw(struct td_gb *b) {
    uint32_t in = td_gb_begin(b), less = td_gb_new(b), slash = td_gb_new(b), end = td_gb_new(b);
    td_gb_range_flags(b, in, in, 0, 0x7F, TD_EDGE_CHAR);
    td_gb_range_flags(b, in, less, '<', '<', TD_EDGE_END);
    td_gb_range(b, less, slash, '/', '/');
    td_gb_range(b, slash, end, TD_SYMBOL_DSML, TD_SYMBOL_DSML);
    long_characters(b, in);
    td_gb_finish_as_is(b, TD_CORE_RAW, in, &end, 1);
}

static void free_text(struct td_gb *b) {
    uint32_t in = td_gb_begin(b), end = td_gb_new(b);
    td_gb_range(b, in, in, 0, 0xFF);
    td_gb_range(b, in, end, TD_SYMBOL_THINK_END, TD_SYMBOL_THINK_END);
    td_gb_finish(b, TD_CORE_REASONING, in, end, false);

    in = td_gb_begin(b), end = td_gb_new(b);
    td_gb_range(b, in, end, 0, 0xFF);
    td_gb_range(b, end, end, 0, 0xFF);
    td_gb_finish(b, TD_CORE_TEXT, in, end, false);

    in = td_gb_begin(b);
    td_gb_range(b, in, in, 0, 0xFF);
    uint32_t less = td_gb_text(b, in, "<");
    end = td_gb_new(b);
    td_gb_range(b, less, end, TD_SYMBOL_DSML, TD_SYMBOL_DSML);
    td_gb_finish(b, TD_CORE_CALLS, in, end, false);

    in = td_gb_begin(b);
    td_gb_code_points(b, in, in, 0, 0xD7FF);
    td_gb_code_points(b, in, in, 0xE000, 0x10FFFF);
    end = td_gb_text(b, in, "</｜DSML｜parameter");
    td_gb_finish(b, TD_CORE_RAW_SPELT, in, end, true);
}

static void object(struct td_gb *b) {
    uint32_t start = td_gb_begin(b), end = td_gb_new(b);
    uint32_t in = td_gb_gap(b, td_gb_text(b, start, "{")), key = td_gb_new(b);
    uint32_t colon = td_gb_new(b), value = td_gb_new(b);
    td_gb_empty(b, in, key);
    td_gb_call(b, key, colon, TD_CORE_STRING);
    td_gb_call(b, td_gb_gap(b, td_gb_text(b, colon, ":")), value, TD_CORE_VALUE);
    td_gb_empty(b, td_gb_gap(b, td_gb_text(b, value, ",")), key);
    td_gb_empty(b, td_gb_text(b, td_gb_gap(b, value), "}"), end);
    td_gb_empty(b, td_gb_text(b, in, "}"), end);
    td_gb_finish(b, TD_CORE_OBJECT, start, end, false);
}

static void array(struct td_gb *b) {
    uint32_t start = td_gb_begin(b), end = td_gb_new(b);
    uint32_t in = td_gb_gap(b, td_gb_text(b, start, "[")), item = td_gb_new(b);
    uint32_t value = td_gb_new(b);
    td_gb_empty(b, in, item);
    td_gb_call(b, item, value, TD_CORE_VALUE);
    td_gb_empty(b, td_gb_gap(b, td_gb_text(b, value, ",")), item);
    td_gb_empty(b, td_gb_text(b, td_gb_gap(b, value), "]"), end);
    td_gb_empty(b, td_gb_text(b, in, "]"), end);
    td_gb_finish(b, TD_CORE_ARRAY, start, end, false);
}

uint32_t td_gb_number(struct td_gb *b, uint32_t from) {
    uint32_t sign = td_gb_new(b), whole = td_gb_new(b), digits = td_gb_new(b), end = td_gb_new(b);
    td_gb_empty(b, from, sign);
    td_gb_range(b, from, sign, '-', '-');
    td_gb_range(b, sign, whole, '0', '0');
    td_gb_range(b, sign, digits, '1', '9');
    td_gb_range(b, digits, digits, '0', '9');
    td_gb_empty(b, digits, whole);
    td_gb_empty(b, whole, end);
    uint32_t point = td_gb_text(b, whole, "."), fraction = td_gb_new(b);
    td_gb_range(b, point, fraction, '0', '9');
    td_gb_range(b, fraction, fraction, '0', '9');
    td_gb_empty(b, fraction, end);
    uint32_t e = td_gb_new(b), e_sign = td_gb_new(b), power = td_gb_new(b);
    td_gb_range(b, whole, e, 'e', 'e');
    td_gb_range(b, whole, e, 'E', 'E');
    td_gb_range(b, fraction, e, 'e', 'e');
    td_gb_range(b, fraction, e, 'E', 'E');
    td_gb_empty(b, e, e_sign);
    td_gb_range(b, e, e_sign, '+', '+');
    td_gb_range(b, e, e_sign, '-', '-');
    td_gb_range(b, e_sign, power, '0', '9');
    td_gb_range(b, power, power, '0', '9');
    td_gb_empty(b, power, end);
    return end;
}

static void value(struct td_gb *b) {
    uint32_t start = td_gb_begin(b), end = td_gb_new(b);
    td_gb_empty(b, td_gb_number(b, start), end);
    td_gb_empty(b, td_gb_text(b, start, "true"), end);
    td_gb_empty(b, td_gb_text(b, start, "false"), end);
    td_gb_empty(b, td_gb_text(b, start, "null"), end);
    td_gb_call(b, start, end, TD_CORE_STRING);
    td_gb_call(b, start, end, TD_CORE_OBJECT);
    td_gb_call(b, start, end, TD_CORE_ARRAY);
    td_gb_finish(b, TD_CORE_VALUE, start, end, false);
}

void td_gb_core(struct td_gb *b) {
    for (int i = 0; i < TD_CORE_RULES; i++)
        (void)td_gb_rule(b);
    gap(b);
    string(b);
    raw(b);
    free_text(b);
    object(b);
    array(b);
    value(b);
}

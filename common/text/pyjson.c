/* One pass over the text; a value is written while it is read. Nesting is a stack of bits, not
 * recursion, so depth costs no stack. */
#include "common/text/pyjson.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/unicode.h"

struct reader {
    const char *text;
    size_t n, at;
    struct td_error *err;
};

static td_status wrong(const struct reader *r, const char *expected) {
    return td_fail(r->err, TD_FORMAT, "JSON, byte %zu: expected %s, found %s", r->at, expected,
                   r->at < r->n ? "something else" : "the end");
}

static void skip_space(struct reader *r) {
    while (r->at < r->n && strchr(" \t\n\r", r->text[r->at]) && r->text[r->at]) {
        r->at++;
    }
}

static int peek(const struct reader *r) {
    return r->at < r->n ? (unsigned char)r->text[r->at] : -1;
}

static bool take(struct reader *r, char c) {
    if (peek(r) != (unsigned char)c) return false;
    r->at++;
    return true;
}

const char *td_pyjson_escape(const char *bytes, size_t n, char buf[8], size_t *ret_n) {
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    unsigned char c = (unsigned char)bytes[0];
    *ret_n = n;
    if (n > 1 || (c >= 0x20 && c != '"' && c != '\\')) return bytes;
    const char *at = c ? strchr(from, c) : NULL;
    *ret_n = at ? 2 : 6;
    if (at)
        snprintf(buf, 8, "\\%c", to[at - from]);
    else
        snprintf(buf, 8, "\\u%04x", c);
    return buf;
}

/* ---- strings ---- */

/* Four digits; -1: not four. */
static int32_t hex4(const struct reader *r, size_t at) {
    int32_t v = 0;
    if (r->n - at < 4) return -1;
    for (size_t i = at; i < at + 4; i++) {
        char c = r->text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        v = v * 16 + digit;
    }
    return v;
}

/* The code point of an escape; r->at is behind its backslash. */
static td_status read_escape(struct reader *r, char out[4], size_t *ret_n) {
    static const char from[] = "\"\\/nrtbf", to[] = "\"\\/\n\r\t\b\f";
    int c = peek(r);
    const char *at = c > 0 ? strchr(from, c) : NULL;
    *ret_n = 1;
    if (at) {
        out[0] = to[at - from];
        r->at++;
        return TD_OK;
    }
    if (!take(r, 'u')) return wrong(r, "an escape");
    int32_t v = hex4(r, r->at), low;
    if (v < 0) return wrong(r, "four hexadecimal digits");
    r->at += 4;
    bool pair = v >= 0xD800 && v < 0xDC00 && r->n - r->at >= 6 && r->text[r->at] == '\\' &&
                r->text[r->at + 1] == 'u' && (low = hex4(r, r->at + 2)) >= 0xDC00 && low < 0xE000;
    if (pair) {
        v = 0x10000 + ((v - 0xD800) << 10) + (low - 0xDC00);
        r->at += 6;
    }
    bool lone = v >= 0xD800 && v < 0xE000; /* half of a pair */
    *ret_n = td_utf8_encode(lone ? 0xFFFD : (uint32_t)v, out);
    return TD_OK;
}

/* Reads a string; its text goes out as it is, or with Python's escapes and quotes. */
static td_status read_string(struct reader *r, bool quoted, struct td_bytes *out) {
    if (!take(r, '"')) return wrong(r, "a string");
    if (quoted) td_bytes_add(out, "\"", 1);
    while (!take(r, '"')) {
        char buf[8], decoded[4];
        const char *p = r->text + r->at;
        size_t n;
        uint32_t cp;
        int len = r->at < r->n ? td_utf8_decode((const uint8_t *)p, r->n - r->at, &cp) : 0;
        if (len <= 0 || (unsigned char)*p < 0x20) return wrong(r, "a character of UTF-8 or \"");
        n = (size_t)len;
        r->at += n;
        if (*p == '\\') {
            TD_TRY(read_escape(r, decoded, &n));
            p = decoded;
        }
        if (quoted) p = td_pyjson_escape(p, n, buf, &n);
        td_bytes_add(out, p, n);
    }
    if (quoted) td_bytes_add(out, "\"", 1);
    return TD_OK;
}

/* ---- numbers and words ---- */

/* repr() of a finite float: 17 digits or fewer, whichever reads back first; positional from 1e-4
 * to 1e16. */
static void add_finite(struct td_bytes *out, double v) {
    char digits[32], buf[48];
    int precision = 1;
    do {
        snprintf(digits, sizeof digits, "%.*e", precision - 1, v);
    } while (precision++ < 17 && strtod(digits, NULL) != v);
    int exponent = (int)strtol(strchr(digits, 'e') + 1, NULL, 10);
    int n = precision - 2; /* digits behind the first */
    int len;
    if (exponent < -4 || exponent >= 16) {
        char *e = strchr(digits, 'e');
        len = snprintf(buf, sizeof buf, "%.*se%s%02d", (int)(e - digits), digits,
                       exponent < 0 ? "-" : "+", abs(exponent));
    } else {
        int decimals = n > exponent ? n - exponent : 1;
        len = snprintf(buf, sizeof buf, "%.*f", decimals, v);
    }
    td_bytes_add(out, buf, (size_t)len);
}

void td_pyjson_float(struct td_bytes *out, double v) {
    if (isfinite(v))
        add_finite(out, v);
    else if (isnan(v))
        td_bytes_add(out, "NaN", 3);
    else
        td_bytes_add(out, v < 0 ? "-Infinity" : "Infinity", v < 0 ? 9 : 8);
}

static size_t digits_at(const struct reader *r, size_t at) {
    size_t n = 0;
    while (at + n < r->n && r->text[at + n] >= '0' && r->text[at + n] <= '9') {
        n++;
    }
    return n;
}

static td_status read_number(struct reader *r, struct td_bytes *out) {
    size_t start = r->at;
    bool negative = take(r, '-'), is_float = false;
    size_t n = digits_at(r, r->at);
    if (n == 0) return wrong(r, "a value");
    r->at += peek(r) == '0' ? 1 : n; /* "01" is 0 and something else */
    if (peek(r) == '.' && (n = digits_at(r, r->at + 1)) > 0) {
        is_float = true;
        r->at += 1 + n;
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        size_t sign = r->at + 1 < r->n && strchr("+-", r->text[r->at + 1]) && r->text[r->at + 1];
        n = digits_at(r, r->at + 1 + sign);
        if (n > 0) {
            is_float = true;
            r->at += 1 + sign + n;
        }
    }
    n = r->at - start;
    if (!is_float) {
        bool zero = r->text[r->at - 1] == '0' && n == 1u + negative;
        if (zero)
            td_bytes_add(out, "0", 1); /* int("-0") is 0 */
        else
            td_bytes_add(out, r->text + start, n);
        return TD_OK;
    }
    char small[64], *copy = n < sizeof small ? small : malloc(n + 1);
    if (!copy) return td_fail(r->err, TD_NO_MEMORY, "JSON: no memory for a number");
    memcpy(copy, r->text + start, n);
    copy[n] = 0;
    td_pyjson_float(out, strtod(copy, NULL));
    if (copy != small) free(copy);
    return TD_OK;
}

static bool take_word(struct reader *r, const char *word, struct td_bytes *out) {
    size_t n = strlen(word);
    if (r->n - r->at < n || memcmp(r->text + r->at, word, n) != 0) return false;
    td_bytes_add(out, word, n);
    r->at += n;
    return true;
}

/* A value that holds no other. */
static td_status read_scalar(struct reader *r, struct td_bytes *out) {
    static const char *const words[] = {"true", "false", "null", "NaN", "Infinity", "-Infinity"};
    if (peek(r) == '"') return read_string(r, true, out);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (take_word(r, words[i], out)) return TD_OK;
    }
    return read_number(r, out);
}

/* ---- nesting ---- */

static td_status read_key(struct reader *r, struct td_bytes *out) {
    skip_space(r);
    TD_TRY(read_string(r, true, out));
    skip_space(r);
    if (!take(r, ':')) return wrong(r, "':'");
    td_bytes_add(out, ": ", 2);
    return TD_OK;
}

/* What follows a value inside its array or object: a comma and the next key, or the end. */
static td_status read_behind(struct reader *r, bool in_object, struct td_bytes *out, bool *closed) {
    skip_space(r);
    *closed = take(r, in_object ? '}' : ']');
    if (*closed) {
        td_bytes_add(out, in_object ? "}" : "]", 1);
        return TD_OK;
    }
    if (!take(r, ',')) return wrong(r, in_object ? "',' or '}'" : "',' or ']'");
    td_bytes_add(out, ", ", 2);
    return in_object ? read_key(r, out) : TD_OK;
}

/* Opens an array or object. *ret_empty: and closed it again. */
static td_status read_open(struct reader *r, bool is_object, struct td_bytes *out,
                           bool *ret_empty) {
    r->at++;
    td_bytes_add(out, is_object ? "{" : "[", 1);
    skip_space(r);
    *ret_empty = take(r, is_object ? '}' : ']');
    if (*ret_empty) {
        td_bytes_add(out, is_object ? "}" : "]", 1);
        return TD_OK;
    }
    return is_object ? read_key(r, out) : TD_OK;
}

static td_status read_value(struct reader *r, struct td_bytes *out) {
    uint8_t object[TD_PYJSON_DEPTH_MAX]; /* by depth: an object, not an array */
    size_t depth = 0;
    do {
        skip_space(r);
        bool closed = true;
        if (peek(r) == '{' || peek(r) == '[') {
            if (depth == TD_PYJSON_DEPTH_MAX)
                return td_fail(r->err, TD_TOO_LONG, "JSON: expected at most %d levels",
                               TD_PYJSON_DEPTH_MAX);
            object[depth] = peek(r) == '{';
            TD_TRY(read_open(r, object[depth], out, &closed));
            depth += !closed;
            if (!closed) continue;
        } else {
            TD_TRY(read_scalar(r, out));
        }
        while (closed && depth > 0) {
            TD_TRY(read_behind(r, object[depth - 1], out, &closed));
            depth -= closed;
        }
    } while (depth > 0);
    return out->failed ? td_fail(r->err, TD_NO_MEMORY, "JSON: no memory for its text") : TD_OK;
}

static td_status read_end(struct reader *r) {
    skip_space(r);
    return r->at == r->n ? TD_OK : wrong(r, "the end");
}

td_status td_pyjson(const char *text, size_t n, struct td_bytes *out, struct td_error *err) {
    struct reader r = {.text = text, .n = n, .err = err};
    size_t before = out->n;
    td_status st = read_value(&r, out);
    if (st == TD_OK) st = read_end(&r);
    if (st != TD_OK) out->n = before;
    return st;
}

/* ---- members ---- */

static td_status read_member(struct reader *r, struct td_pyjson_member *m) {
    m->key.n = m->value.n = 0;
    skip_space(r);
    TD_TRY(read_string(r, false, &m->key));
    skip_space(r);
    if (!take(r, ':')) return wrong(r, "':'");
    skip_space(r);
    m->is_string = peek(r) == '"';
    TD_TRY(m->is_string ? read_string(r, false, &m->value) : read_value(r, &m->value));
    if (m->key.failed || m->value.failed)
        return td_fail(r->err, TD_NO_MEMORY, "JSON: no memory for its text");
    return TD_OK;
}

td_status td_pyjson_next(const char *text, size_t n, struct td_pyjson_member *m, bool *ret_end,
                         struct td_error *err) {
    struct reader r = {.text = text, .n = n, .at = m->at, .err = err};
    bool first = m->at == 0;
    skip_space(&r);
    if (first && !take(&r, '{')) return wrong(&r, "an object");
    if (first) skip_space(&r);
    *ret_end = take(&r, '}');
    if (*ret_end) {
        TD_TRY(read_end(&r));
    } else {
        if (!first && !take(&r, ',')) return wrong(&r, "',' or '}'");
        TD_TRY(read_member(&r, m));
    }
    m->at = r.at;
    return TD_OK;
}

void td_pyjson_member_free(struct td_pyjson_member *m) {
    td_bytes_free(&m->key);
    td_bytes_free(&m->value);
}

/* See json_write.h. */
#include "router/json_write.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/put.h"
#include "common/text/unicode.h"

void td_json_out_reset(struct td_json_out *w) {
    w->n = 0;
    w->comma = w->failed = false;
}

void td_json_out_free(struct td_json_out *w) {
    free(w->p);
    *w = (struct td_json_out){0};
}

static bool room(struct td_json_out *w, size_t more) {
    if (more <= w->cap - w->n) return true;
    size_t cap = w->cap ? w->cap : 4096;
    while (cap - w->n < more)
        cap *= 2;
    char *p = realloc(w->p, cap);
    if (!p) {
        w->failed = true;
        return false;
    }
    w->p = p;
    w->cap = cap;
    return true;
}

void td_json_raw(struct td_json_out *w, const char *bytes, size_t n) {
    if (n == 0 || !room(w, n)) return;
    memcpy(w->p + w->n, bytes, n);
    w->n += n;
}

static void put(struct td_json_out *w, char c) {
    if (w->n == w->cap && !room(w, 1)) return;
    w->p[w->n++] = c;
}

static void value(struct td_json_out *w) {
    if (w->comma) put(w, ',');
    w->comma = true;
}

void td_json_value(struct td_json_out *w, const char *json, size_t n) {
    value(w);
    td_json_raw(w, json, n);
}

void td_json_open(struct td_json_out *w, char bracket) {
    value(w);
    put(w, bracket);
    w->comma = false;
}

void td_json_close(struct td_json_out *w, char bracket) {
    put(w, bracket);
    w->comma = true;
}

void td_json_key(struct td_json_out *w, const char *key) {
    value(w);
    put(w, '"');
    td_json_raw(w, key, strlen(key));
    td_json_raw(w, "\":", 2);
    w->comma = false;
}

static void escape(struct td_json_out *w, unsigned char c) {
    char buf[8];
    switch (c) {
    case '"':
        td_json_raw(w, "\\\"", 2);
        break;
    case '\\':
        td_json_raw(w, "\\\\", 2);
        break;
    case '\n':
        td_json_raw(w, "\\n", 2);
        break;
    case '\r':
        td_json_raw(w, "\\r", 2);
        break;
    case '\t':
        td_json_raw(w, "\\t", 2);
        break;
    default:
        td_json_raw(w, buf, (size_t)(td_put_hex(td_put(buf, "\\u"), c, 4) - buf));
    }
}

void td_json_str(struct td_json_out *w, const char *s, size_t n) {
    value(w);
    put(w, '"');
    size_t from = 0, i = 0;
    while (i < n) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\') {
            i++;
            continue;
        }
        uint32_t cp;
        int len = c < 0x80 ? -1 : td_utf8_decode((const uint8_t *)s + i, n - i, &cp);
        if (len > 0) {
            i += (size_t)len;
            continue;
        }
        td_json_raw(w, s + from, i - from);
        if (c < 0x80)
            escape(w, c);
        else
            td_json_raw(w, "\xEF\xBF\xBD", 3);
        /* One replacement for a maximal subpart; 0: all that is left is an incomplete one. */
        i = len == 0 ? n : i + (size_t)-len;
        from = i;
    }
    td_json_raw(w, s + from, n - from);
    put(w, '"');
}

void td_json_text(struct td_json_out *w, const char *s) {
    td_json_str(w, s, strlen(s));
}

void td_json_u64(struct td_json_out *w, uint64_t v) {
    char buf[24];
    value(w);
    td_json_raw(w, buf, (size_t)(td_put_u64(buf, v) - buf));
}

void td_json_i64(struct td_json_out *w, int64_t v) {
    char buf[24], *at = buf;
    if (v < 0) *at++ = '-';
    at = td_put_u64(at, v < 0 ? 0 - (uint64_t)v : (uint64_t)v);
    value(w);
    td_json_raw(w, buf, (size_t)(at - buf));
}

void td_json_num(struct td_json_out *w, double v) {
    char buf[40];
    value(w);
    if (!isfinite(v)) v = -9999.0;
    td_json_raw(w, buf, (size_t)snprintf(buf, sizeof buf, "%.9g", v));
}

void td_json_bool(struct td_json_out *w, bool v) {
    value(w);
    td_json_raw(w, v ? "true" : "false", v ? 4 : 5);
}

void td_json_null(struct td_json_out *w) {
    value(w);
    td_json_raw(w, "null", 4);
}

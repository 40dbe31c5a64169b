/* See json_read.h. A container is put into its parent when it opens, so whatever happens the root owns
 * everything. */
#include "router/json_read.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/unicode.h"

struct reader {
    const char *text, *end, *at;
    enum td_json_rules rules;
    char *scratch; /* [text's length] where strings with escapes are put together */
    json_t *open[TD_JSON_DEPTH_MAX]; /* [depth] the containers around `at`, borrowed */
    size_t depth;
    const char *key; /* [key_n] of the member being read: of the text, or of scratch's front */
    size_t key_n;
    struct td_error *err;
};

static td_status wrong(const struct reader *r, const char *expected) {
    size_t line = 1, column = 1;
    for (const char *p = r->text; p < r->at; p++) {
        column = *p == '\n' ? 1 : column + 1;
        line += *p == '\n';
    }
    return td_fail(r->err, TD_FORMAT, "%s (line %zu, column %zu, byte %zu)", expected, line, column,
                   (size_t)(r->at - r->text));
}

static td_status no_memory(const struct reader *r) {
    return td_fail(r->err, TD_NO_MEMORY, "no memory for JSON");
}

static void skip_space(struct reader *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

/* 0 at the end, where nothing that is looked for is 0. */
static char peek(const struct reader *r) {
    return r->at < r->end ? *r->at : 0;
}

/* ---- strings ---- */

static int hex4(const struct reader *r, const char *p) {
    int v = 0;
    if (r->end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i], low = (char)(c | 0x20);
        int digit = c >= '0' && c <= '9' ? c - '0' : low >= 'a' && low <= 'f' ? low - 'a' + 10 : -1;
        if (digit < 0) return -1;
        v = v << 4 | digit;
    }
    return v;
}

/* Behind a backslash; puts what it stands for behind `to`. */
static td_status read_escape(struct reader *r, char **to) {
    static const char plain[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    char c = peek(r);
    const char *known = c ? strchr(plain, c) : NULL;
    if (known) {
        *(*to)++ = means[known - plain];
        r->at++;
        return TD_OK;
    }
    int high = c == 'u' ? hex4(r, r->at + 1) : -1;
    if (high < 0) return wrong(r, "an escape that JSON does not have");
    uint32_t cp = (uint32_t)high;
    size_t n = 5;
    if (cp >= 0xD800 && cp < 0xE000) {
        bool more = cp < 0xDC00 && r->end - r->at >= 11 && r->at[5] == '\\' && r->at[6] == 'u';
        int low = more ? hex4(r, r->at + 7) : -1;
        if (low < 0xDC00 || low > 0xDFFF) return wrong(r, "half of a surrogate pair alone");
        cp = 0x10000 + ((cp - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
        n = 11;
    }
    *to += td_utf8_encode(cp, *to);
    r->at += n;
    return TD_OK;
}

/* Past bytes that stand for themselves. */
static td_status skip_plain(struct reader *r) {
    for (;;) {
        while (r->at < r->end && (unsigned char)*r->at >= 0x20 && (unsigned char)*r->at < 0x80 &&
               *r->at != '"' && *r->at != '\\')
            r->at++;
        if (r->at == r->end) return wrong(r, "a string does not end");
        if ((unsigned char)*r->at < 0x20) return wrong(r, "a control character in a string");
        if ((unsigned char)*r->at < 0x80) return TD_OK;
        uint32_t cp;
        int n = td_utf8_decode((const uint8_t *)r->at, (size_t)(r->end - r->at), &cp);
        if (n <= 0) return wrong(r, "a string that is not UTF-8");
        r->at += n;
    }
}

/* At its opening quote. *ret: in the text, or from scratch[from] on. */
static td_status read_string(struct reader *r, size_t from, const char **ret, size_t *ret_n) {
    const char *start = ++r->at;
    TD_TRY(skip_plain(r));
    if (*r->at == '"') {
        *ret = start;
        *ret_n = (size_t)(r->at++ - start);
        return TD_OK;
    }
    if (!r->scratch && !(r->scratch = malloc((size_t)(r->end - r->text)))) return no_memory(r);
    char *to = r->scratch + from; /* never longer than the text so far */
    while (*r->at != '"') {
        memcpy(to, start, (size_t)(r->at - start));
        to += r->at - start;
        r->at++;
        TD_TRY(read_escape(r, &to));
        start = r->at;
        TD_TRY(skip_plain(r));
    }
    memcpy(to, start, (size_t)(r->at - start));
    to += r->at++ - start;
    *ret = r->scratch + from;
    *ret_n = (size_t)(to - *ret);
    return TD_OK;
}

/* ---- numbers ---- */

static const char *digits(const struct reader *r, const char *p) {
    while (p < r->end && *p >= '0' && *p <= '9')
        p++;
    return p;
}

static td_status read_real(struct reader *r, const char *end, json_t **ret) {
    char small[64];
    size_t n = (size_t)(end - r->at);
    char *copy = n < sizeof small ? small : malloc(n + 1);
    if (!copy) return no_memory(r);
    memcpy(copy, r->at, n);
    copy[n] = 0;
    double v = strtod(copy, NULL);
    if (copy != small) free(copy);
    if (isinf(v)) return wrong(r, "a number beyond what a double holds");
    *ret = json_real(v);
    r->at = end;
    return *ret ? TD_OK : no_memory(r);
}

static td_status read_number(struct reader *r, json_t **ret) {
    bool negative = *r->at == '-';
    const char *first = r->at + negative, *end = digits(r, first);
    bool bad = end == first || (*first == '0' && end > first + 1), real = false;
    uint64_t v = 0, most = (uint64_t)INT64_MAX + negative;
    bool fits = true;
    for (const char *p = first; p < end; p++) {
        uint64_t digit = (uint64_t)(*p - '0');
        fits = fits && v <= (most - digit) / 10;
        v = v * 10 + digit;
    }
    if (!bad && end < r->end && *end == '.') {
        const char *from = end + 1;
        end = digits(r, from);
        bad = end == from;
        real = true;
    }
    if (!bad && end < r->end && (*end | 0x20) == 'e') {
        const char *from = end + 1;
        if (from < r->end && (*from == '+' || *from == '-')) from++;
        end = digits(r, from);
        bad = end == from;
        real = true;
    }
    if (bad) return wrong(r, "a number that JSON does not have");
    if (real || (!fits && r->rules == TD_JSON_LOOSE)) return read_real(r, end, ret);
    if (!fits) return wrong(r, "an integer of more than 64 bits");
    *ret = json_integer((json_int_t)(negative ? 0 - v : v));
    r->at = end;
    return *ret ? TD_OK : no_memory(r);
}

/* ---- values ---- */

static td_status read_word(struct reader *r, const char *word, json_t *value, json_t **ret) {
    size_t n = strlen(word);
    if ((size_t)(r->end - r->at) < n || memcmp(r->at, word, n) != 0)
        return wrong(r, "expected a value");
    r->at += n;
    *ret = value;
    return TD_OK;
}

/* A value, containers without what is in them. */
static td_status read_one(struct reader *r, json_t **ret) {
    const char *p;
    size_t n;
    switch (peek(r)) {
    case '"':
        /* The key may be in scratch, and waits for its value. */
        TD_TRY(read_string(r, r->depth && json_is_object(r->open[r->depth - 1]) ? r->key_n : 0, &p, &n));
        *ret = json_stringn_nocheck(p, n);
        return *ret ? TD_OK : no_memory(r);
    case '{':
    case '[':
        if (r->depth == TD_JSON_DEPTH_MAX) return wrong(r, "nested too deep");
        *ret = *r->at == '{' ? json_object() : json_array();
        r->at++;
        return *ret ? TD_OK : no_memory(r);
    case 't':
        return read_word(r, "true", json_true(), ret);
    case 'f':
        return read_word(r, "false", json_false(), ret);
    case 'n':
        return read_word(r, "null", json_null(), ret);
    case '-':
        return read_number(r, ret);
    default:
        if (peek(r) >= '0' && peek(r) <= '9') return read_number(r, ret);
        return wrong(r, "expected a value");
    }
}

static td_status read_key(struct reader *r) {
    const char *start = r->at;
    skip_space(r);
    if (peek(r) != '"') return wrong(r, "expected a key in quotes");
    start = r->at;
    TD_TRY(read_string(r, 0, &r->key, &r->key_n));
    if (memchr(r->key, 0, r->key_n)) {
        r->at = start;
        return wrong(r, "a key with the character U+0000");
    }
    skip_space(r);
    if (peek(r) != ':') return wrong(r, "expected ':'");
    r->at++;
    return TD_OK;
}

/* Puts a value, which it takes over, where it belongs. */
static td_status place(struct reader *r, json_t *v, json_t **root) {
    if (r->depth == 0) {
        *root = v;
        return TD_OK;
    }
    json_t *in = r->open[r->depth - 1];
    if (json_is_array(in)) return json_array_append_new(in, v) == 0 ? TD_OK : no_memory(r);
    size_t before = json_object_size(in);
    if (json_object_setn_new_nocheck(in, r->key, r->key_n, v) != 0) return no_memory(r);
    if (json_object_size(in) == before && r->rules == TD_JSON_STRICT)
        return wrong(r, "a duplicate key, before here");
    return TD_OK;
}

/* What follows a value, up to the next one: commas, keys, ends. */
static td_status go_on(struct reader *r, bool opened) {
    while (r->depth) {
        bool object = json_is_object(r->open[r->depth - 1]);
        skip_space(r);
        if (peek(r) == (object ? '}' : ']')) {
            r->at++;
            r->depth--;
            opened = false;
            continue;
        }
        if (!opened && peek(r) != ',')
            return wrong(r, object ? "expected ',' or '}'" : "expected ',' or ']'");
        r->at += !opened;
        return object ? read_key(r) : TD_OK;
    }
    return TD_OK;
}

static td_status read_all(struct reader *r, json_t **root) {
    do {
        json_t *v = NULL;
        skip_space(r);
        TD_TRY(read_one(r, &v));
        TD_TRY(place(r, v, root));
        bool opened = json_is_object(v) || json_is_array(v);
        if (opened) r->open[r->depth++] = v;
        /* An empty container begins and ends here. */
        TD_TRY(go_on(r, opened));
    } while (r->depth);
    skip_space(r);
    return r->at == r->end ? TD_OK : wrong(r, "something behind the value");
}

td_status td_json_read(const char *text, size_t n, enum td_json_rules rules, json_t **ret,
                       struct td_error *err) {
    struct reader r;
    r.text = r.at = text;
    r.end = n ? text + n : text;
    r.rules = rules;
    r.scratch = NULL;
    r.depth = r.key_n = 0;
    r.err = err;
    json_t *root = NULL;
    td_status st = read_all(&r, &root);
    free(r.scratch);
    if (st == TD_OK)
        *ret = root;
    else
        json_decref(root);
    return st;
}

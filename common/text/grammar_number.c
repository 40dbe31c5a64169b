/* Numbers between bounds, digit by digit. Bounds are decimals, compared as text: no rounding.
 *
 * Integers may be of any length. Fractions have no exponent and at most FRACTION_MAX digits where
 * the bounds include their ends, else EXCLUSIVE_MAX, so that a reader's double cannot round a value
 * onto a bound that it must not reach. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"
#include "common/text/pyjson.h"

enum { FRACTION_MAX = 17, EXCLUSIVE_MAX = 9 };

/* ---- decimals ---- */

bool td_decimal_of(const json_t *number, struct td_decimal *ret_d) {
    struct td_bytes text = {0};
    struct td_decimal d = {.set = true};
    char buf[32];
    if (json_is_integer(number)) {
        snprintf(buf, sizeof buf, "%lld", (long long)json_integer_value(number));
        td_bytes_add(&text, buf, strlen(buf));
    } else {
        td_pyjson_float(&text, json_real_value(number));
    }
    bool ok = !text.failed && !memchr(text.p, 'e', text.n) && text.n < sizeof d.whole;
    if (ok) {
        const char *p = text.p, *end = text.p + text.n;
        d.negative = *p == '-';
        p += d.negative;
        const char *point = memchr(p, '.', (size_t)(end - p));
        size_t whole = (size_t)((point ? point : end) - p);
        memcpy(d.whole, p, whole);
        size_t n = point ? (size_t)(end - point - 1) : 0;
        if (n) memcpy(d.fraction, point + 1, n);
        while (n > 0 && d.fraction[n - 1] == '0')
            d.fraction[--n] = 0;
        if (strcmp(d.whole, "0") == 0 && n == 0) d.negative = false;
    }
    td_bytes_free(&text);
    if (ok) *ret_d = d;
    return ok;
}

static int compare_magnitude(const struct td_decimal *a, const struct td_decimal *b) {
    size_t n = strlen(a->whole), m = strlen(b->whole);
    if (n != m) return n < m ? -1 : 1;
    int c = strcmp(a->whole, b->whole);
    return c ? c : strcmp(a->fraction, b->fraction); /* no zeros at the end: text order is right */
}

int td_decimal_compare(const struct td_decimal *a, const struct td_decimal *b) {
    if (a->negative != b->negative) return a->negative ? -1 : 1;
    int c = compare_magnitude(a, b);
    return a->negative ? -c : c;
}

/* ---- integers: magnitudes as digits ---- */

static uint32_t digit(struct td_gb *b, uint32_t from, char lo, char hi) {
    uint32_t to = td_gb_new(b);
    td_gb_range(b, from, to, (unsigned char)lo, (unsigned char)hi);
    return to;
}

static void digits(struct td_gb *b, uint32_t from, uint32_t to, size_t n) {
    for (size_t i = 0; i < n; i++)
        from = digit(b, from, '0', '9');
    td_gb_empty(b, from, to);
}

/* Numbers of exactly n digits between two of n digits. */
static void same_length(struct td_gb *b, uint32_t from, uint32_t to, const char *lo,
                        const char *hi, size_t n) {
    if (n == 0) {
        td_gb_empty(b, from, to);
        return;
    }
    if (*lo == *hi) {
        same_length(b, digit(b, from, *lo, *lo), to, lo + 1, hi + 1, n - 1);
        return;
    }
    static const char zeros[] = "000000000000000000000000", nines[] = "999999999999999999999999";
    same_length(b, digit(b, from, *lo, *lo), to, lo + 1, nines, n - 1);
    if (*lo + 1 < *hi) digits(b, digit(b, from, (char)(*lo + 1), (char)(*hi - 1)), to, n - 1);
    same_length(b, digit(b, from, *hi, *hi), to, zeros, hi + 1, n - 1);
}

/* Whole numbers lo..hi without sign; hi NULL: no end. */
static void magnitudes(struct td_gb *b, uint32_t from, uint32_t to, const char *lo,
                       const char *hi) {
    size_t n = strlen(lo), m = hi ? strlen(hi) : n + 1;
    if (m < n || (m == n && hi && strcmp(lo, hi) > 0)) return;
    char first[32], last[32];
    for (size_t k = n; k <= m && k < sizeof first - 1; k++) {
        memset(first, '0', k);
        memset(last, '9', k);
        first[0] = k == 1 ? '0' : '1';
        first[k] = last[k] = 0;
        if (!hi && k == m) {
            uint32_t at = digit(b, from, '1', '9');
            for (size_t i = 1; i < k; i++)
                at = digit(b, at, '0', '9');
            td_gb_range(b, at, at, '0', '9');
            td_gb_empty(b, at, to);
        } else {
            same_length(b, from, to, k == n ? lo : first, hi && k == m ? hi : last, k);
        }
    }
}

/* Digits as a number one higher (or lower; the caller knows that it is not 0). */
static void next_whole(const char *p, char out[32], int by) {
    size_t n = strlen(p);
    memcpy(out, p, n + 1);
    size_t i = n;
    while (i > 0) {
        i--;
        if (by > 0 ? out[i] < '9' : out[i] > '0') {
            out[i] = (char)(out[i] + by);
            break;
        }
        out[i] = by > 0 ? '0' : '9';
        if (i == 0 && by > 0) {
            memmove(out + 1, out, n + 1);
            out[0] = '1';
        }
    }
    if (out[0] == '0' && out[1]) memmove(out, out + 1, n);
}

/* Smallest (by 1) or largest (by -1) whole magnitude on the inner side of a bound's magnitude;
 * false: there is none. */
static bool inner(const struct td_decimal *d, int by, char out[32]) {
    bool exact = !*d->fraction && !d->exclusive;
    if (exact || (by < 0 && *d->fraction)) {
        memcpy(out, d->whole, sizeof d->whole);
        return true;
    }
    if (by < 0 && strcmp(d->whole, "0") == 0) return false;
    next_whole(d->whole, out, by);
    return true;
}

void td_gb_integer(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                   const struct td_decimal *hi) {
    char a[32] = "0", z[32];
    bool up = hi->set, any = true;
    /* from 0 upwards */
    if (!(up && hi->negative)) {
        if (lo->set && !lo->negative) any = inner(lo, 1, a);
        if (up) any = any && inner(hi, -1, z);
        if (any) magnitudes(b, from, to, a, up ? z : NULL);
    }
    /* below 0: magnitudes from -hi, 1 at least, to -lo */
    if (lo->set && !lo->negative) return;
    memcpy(a, "1", 2);
    any = true;
    if (up && hi->negative) any = inner(hi, 1, a);
    if (lo->set) any = any && inner(lo, -1, z);
    if (strcmp(a, "0") == 0) memcpy(a, "1", 2);
    if (any) magnitudes(b, td_gb_text(b, from, "-"), to, a, lo->set ? z : NULL);
}

/* ---- fractions ---- */

/* What stands behind the whole part, when that equals the lower bound's, the upper one's, both or
 * none (NULL). */
static void fraction(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                     const struct td_decimal *hi, int most) {
    size_t n = lo ? strlen(lo->fraction) : 0, m = hi ? strlen(hi->fraction) : 0;
    uint32_t at[4]; /* [lower bound equal so far | upper one << 1] */
    for (int k = 0; k < 4; k++)
        at[k] = td_gb_new(b);
    uint32_t start = (lo ? 1u : 0) | (hi ? 2u : 0);
    if (!(lo && (n > 0 || lo->exclusive)) && !(hi && m == 0 && hi->exclusive))
        td_gb_empty(b, from, to); /* no fraction */
    td_gb_range(b, from, at[start], '.', '.');
    for (int i = 0; i < most; i++) {
        uint32_t next[4];
        for (int k = 0; k < 4; k++)
            next[k] = td_gb_new(b);
        for (uint32_t k = 0; k < 4; k++)
            for (char c = '0'; c <= '9'; c++) {
                char l = lo && (size_t)i < n ? lo->fraction[i] : '0';
                char h = hi && (size_t)i < m ? hi->fraction[i] : '0';
                if ((k & 1 && c < l) || (k & 2 && c > h)) continue;
                uint32_t then = (k & 1 && c == l ? 1u : 0) | (k & 2 && c == h ? 2u : 0);
                td_gb_range(b, at[k], next[then], (unsigned char)c, (unsigned char)c);
            }
        for (uint32_t k = 0; k < 4; k++) {
            at[k] = next[k];
            if ((k & 1 && !lo) || (k & 2 && !hi)) continue;
            bool low = !(k & 1) || ((size_t)i + 1 >= n && !lo->exclusive);
            bool high = !(k & 2) || (size_t)i + 1 < m || !hi->exclusive;
            if (low && high) td_gb_empty(b, at[k], to);
        }
    }
}

/* Magnitudes lo..hi; not set: from 0, without end. */
static void reals(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                  const struct td_decimal *hi, int most) {
    const struct td_decimal zero = {.set = true, .whole = "0"};
    if (!lo->set) lo = &zero;
    if (hi->set && compare_magnitude(lo, hi) > 0) return;
    uint32_t whole = td_gb_new(b);
    char a[32], z[32];
    if (hi->set && strcmp(lo->whole, hi->whole) == 0) {
        fraction(b, td_gb_text(b, from, lo->whole), to, lo, hi, most);
        return;
    }
    fraction(b, td_gb_text(b, from, lo->whole), to, lo, NULL, most);
    if (hi->set) fraction(b, td_gb_text(b, from, hi->whole), to, NULL, hi, most);
    next_whole(lo->whole, a, 1);
    if (hi->set) next_whole(hi->whole, z, -1);
    magnitudes(b, from, whole, a, hi->set ? z : NULL);
    fraction(b, whole, to, NULL, NULL, most);
}

void td_gb_bounded(struct td_gb *b, uint32_t from, uint32_t to, const struct td_decimal *lo,
                   const struct td_decimal *hi) {
    const struct td_decimal none = {0};
    int most = lo->exclusive || hi->exclusive ? EXCLUSIVE_MAX : FRACTION_MAX;
    if (!(hi->set && hi->negative)) {
        /* 0 itself may be excluded from both sides */
        struct td_decimal at = lo->set && !lo->negative ? *lo : none;
        reals(b, from, to, &at, hi, most);
    }
    if (lo->set && !lo->negative) return;
    struct td_decimal at = hi->set && hi->negative ? *hi : none;
    if (hi->set && !hi->negative && hi->exclusive && compare_magnitude(hi, &(struct td_decimal){.whole = "0"}) == 0) {
        at = *hi; /* below 0 */
    }
    reals(b, td_gb_text(b, from, "-"), to, &at, lo, most);
}

/* Texts and numbers into a buffer that is known to be large enough: what is written for every request,
 * where reading a format costs more than writing. Each returns the place behind what it wrote; nothing
 * is terminated. */
#ifndef TD_COMMON_BASE_PUT_H
#define TD_COMMON_BASE_PUT_H

#include <stdint.h>
#include <string.h>

static inline char *td_put_bytes(char *at, const char *p, size_t n) {
    memcpy(at, p, n);
    return at + n;
}

static inline char *td_put(char *at, const char *text) {
    return td_put_bytes(at, text, strlen(text));
}

static inline char *td_put_u64(char *at, uint64_t v) { /* at most 20 bytes */
    char digits[20];
    size_t from = sizeof digits;
    do
        digits[--from] = (char)('0' + v % 10);
    while (v /= 10);
    return td_put_bytes(at, digits + from, sizeof digits - from);
}

/* At least `least` digits, at most 16. */
static inline char *td_put_hex(char *at, uint64_t v, int least) {
    int n = 1;
    while (n < 16 && v >> 4 * n)
        n++;
    for (n = n < least ? least : n; n-- > 0;)
        *at++ = "0123456789abcdef"[v >> 4 * n & 15];
    return at;
}

/* Nanoseconds as milliseconds with three decimals; at most 19 bytes. */
static inline char *td_put_ms(char *at, uint64_t ns) {
    uint64_t us = ns / 1000 + (ns % 1000 >= 500);
    at = td_put_u64(at, us / 1000);
    *at++ = '.';
    *at++ = (char)('0' + us / 100 % 10);
    *at++ = (char)('0' + us / 10 % 10);
    *at++ = (char)('0' + us % 10);
    return at;
}

#endif

/* UTF-8; decoding by the table of well-formed byte sequences (Unicode 3.9, table 3-7): the second
 * byte's range depends on the first, which excludes long forms, surrogates and > U+10FFFF. */
#include "common/text/unicode.h"

int td_utf8_decode(const uint8_t *p, size_t n, uint32_t *ret_cp) {
    uint8_t b = p[0];
    if (b < 0x80) {
        *ret_cp = b;
        return 1;
    }
    if (b < 0xC2 || b > 0xF4) return -1;
    int len = b < 0xE0 ? 2 : b < 0xF0 ? 3 : 4;
    uint8_t lo = b == 0xE0 ? 0xA0 : b == 0xF0 ? 0x90 : 0x80;
    uint8_t hi = b == 0xED ? 0x9F : b == 0xF4 ? 0x8F : 0xBF;
    uint32_t cp = b & (0x7Fu >> len);
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n) return 0;
        if (p[i] < lo || p[i] > hi) return -i;
        cp = cp << 6 | (p[i] & 0x3F);
        lo = 0x80;
        hi = 0xBF;
    }
    *ret_cp = cp;
    return len;
}

size_t td_utf8_encode(uint32_t cp, char out[4]) {
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    size_t n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i-- > 1; cp >>= 6)
        out[i] = (char)(0x80 | (cp & 63));
    out[0] = (char)(lead[n] | cp);
    return n;
}

bool td_utf8_valid(const char *text, size_t n) {
    const uint8_t *p = (const uint8_t *)text;
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = td_utf8_decode(p + i, n - i, &cp);
        if (len <= 0) return false;
        i += (size_t)len;
    }
    return true;
}

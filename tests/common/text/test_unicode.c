/* UTF-8 decoding against a definition by enumeration, and spot checks of the class table (which
 * compare_hf.py checks in full). */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/unicode.h"

static int write_utf8(uint32_t cp, uint8_t *p) {
    if (cp < 0x80) return p[0] = (uint8_t)cp, 1;
    int n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, cp >>= 6) {
        p[i] = (uint8_t)(0x80 | (cp & 63));
    }
    p[0] = (uint8_t)(0xF00 >> n | cp);
    return n;
}

/* [k]: which strings of k bytes begin the encoding of some code point, one bit each. */
static uint8_t *beginning[4];

static uint32_t number(const uint8_t *p, int k) {
    uint32_t v = 0;
    for (int i = 0; i < k; i++) {
        v = v << 8 | p[i];
    }
    return v;
}

static bool begins(const uint8_t *p, int k) {
    uint32_t v = number(p, k);
    return beginning[k][v / 8] >> v % 8 & 1;
}

static int enumerate(void **state) {
    (void)state;
    for (int k = 1; k < 4; k++) {
        beginning[k] = calloc((size_t)1 << (8 * k - 3), 1);
        if (!beginning[k]) return -1;
    }
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000) continue;
        uint8_t p[4];
        int n = write_utf8(cp, p);
        for (int k = 1; k < 4 && k <= n; k++) {
            uint32_t v = number(p, k);
            beginning[k][v / 8] |= (uint8_t)(1 << v % 8);
        }
    }
    return 0;
}

static int forget(void **state) {
    (void)state;
    for (int k = 1; k < 4; k++) {
        free(beginning[k]);
    }
    return 0;
}

static void decodes_every_code_point(void **state) {
    (void)state;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        if (cp >= 0xD800 && cp < 0xE000) continue;
        uint8_t p[4];
        uint32_t got = UINT32_MAX;
        int n = write_utf8(cp, p);
        assert_int_equal(td_utf8_decode(p, (size_t)n, &got), n);
        assert_int_equal(got, cp);
        for (int k = 1; k < n; k++) {
            assert_int_equal(td_utf8_decode(p, (size_t)k, &got), 0);
        }
    }
}

/* All strings of three bytes, each followed by a byte that continues and by one that does not. */
static void refuses_everything_else(void **state) {
    (void)state;
    for (uint32_t v = 0; v < 1u << 24; v++) {
        uint8_t p[4] = {(uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v, v & 1 ? 0x41 : 0x9A};
        uint32_t cp;
        int len = td_utf8_decode(p, 4, &cp);
        int subpart = 1;
        while (subpart < 3 && begins(p, subpart + 1)) {
            subpart++;
        }
        uint8_t back[4];
        if (len > 0) {
            if (write_utf8(cp, back) != len || memcmp(back, p, (size_t)len) != 0) {
                fail_msg("%06x decoded to U+%04X, %d bytes", v, cp, len);
            }
        } else if (len != -subpart) {
            fail_msg("%06x %02x: expected a subpart of %d, found %d", v, p[3], subpart, len);
        }
    }
}

static void knows_classes(void **state) {
    (void)state;
    assert_int_equal(td_unicode_class('a'), TD_UC_L);
    assert_int_equal(td_unicode_class(' '), TD_UC_SPACE);
    assert_int_equal(td_unicode_class('\r'), TD_UC_SPACE | TD_UC_EOL);
    assert_int_equal(td_unicode_class('\v'), TD_UC_SPACE);
    assert_int_equal(td_unicode_class('_'), TD_UC_P);
    assert_int_equal(td_unicode_class('$'), TD_UC_S);
    assert_int_equal(td_unicode_class(1), 0);
    assert_int_equal(td_unicode_class(0x85), TD_UC_SPACE);
    assert_int_equal(td_unicode_class(0x301), TD_UC_M);
    assert_int_equal(td_unicode_class(0x2163), TD_UC_N);
    assert_int_equal(td_unicode_class(0x3000), TD_UC_SPACE);
    assert_int_equal(td_unicode_class(0x3040), TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x3099), TD_UC_M | TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x30FB), TD_UC_P | TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x309B), TD_UC_S | TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x4E00), TD_UC_L | TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x9FA5), TD_UC_L | TD_UC_CJK);
    assert_int_equal(td_unicode_class(0x9FA6), TD_UC_L);
    assert_int_equal(td_unicode_class(0x1F642), TD_UC_S);
    assert_int_equal(td_unicode_class(0x10D40), TD_UC_N); /* new in Unicode 16 */
    assert_int_equal(td_unicode_class(0xE0100), TD_UC_M);
    assert_int_equal(td_unicode_class(0x10FFFF), 0);
}

/* Sizes of the classes in Unicode 16.0 (without surrogates, which no UTF-8 holds). */
static void has_classes_of_the_right_size(void **state) {
    (void)state;
    static const struct {
        uint8_t bit;
        uint32_t size;
    } expected[] = {{TD_UC_L, 141028}, {TD_UC_M, 2501},   {TD_UC_N, 1911}, {TD_UC_P, 855},
                    {TD_UC_S, 8514},   {TD_UC_SPACE, 25}, {TD_UC_EOL, 2},  {TD_UC_CJK, 21094}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        uint32_t size = 0;
        for (uint32_t cp = 0; cp < 0x110000; cp++) {
            size += (td_unicode_class(cp) & expected[i].bit) != 0;
        }
        assert_int_equal(size, expected[i].size);
    }
}

static void tells_valid_from_invalid(void **state) {
    (void)state;
    assert_true(td_utf8_valid("", 0));
    assert_true(td_utf8_valid("a\xE6\xAF\x95", 4));
    assert_false(td_utf8_valid("a\xE6\xAF\x95", 3));
    assert_false(td_utf8_valid("\xC0\x80", 2));
    assert_false(td_utf8_valid("\xED\xA0\x80", 3));
    assert_false(td_utf8_valid("\xF4\x90\x80\x80", 4));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decodes_every_code_point), cmocka_unit_test(refuses_everything_else),
        cmocka_unit_test(knows_classes), cmocka_unit_test(has_classes_of_the_right_size),
        cmocka_unit_test(tells_valid_from_invalid)};
    return cmocka_run_group_tests(tests, enumerate, forget);
}

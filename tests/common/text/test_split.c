/* Pieces of short texts, one per corner of the patterns (the expected pieces are Hugging Face's),
 * and bytes that are not UTF-8, about which it says nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/split.h"
#include "common/text/unicode.h"
#include "tests/common/text/tiny.h"

static const char *const cases[][12] = {
    {"Hello", " world"},
    {"don", "'t", " I", "'M"},
    {"a", "_b", " x", "=>", "y", ";//", "c"},
    {"123", "45", " ", "1", "a", "2"},
    {"\331\243\331\244\331\245", "\331\246\331\247\342\205\243"},
    {"a", " ", " b"},
    {"a", "   "},
    {"   \n", " ", " x"},
    {" \r\n\r\n", " y"},
    {"\n\n", "A"},
    {"x", " \n"},
    {"ab", "\001", "\002c", "\001"},
    {"\001\002", "1", "\001"},
    {" ", "\001a"},
    {"\302\240a", "\302\240", "\302\240b"},
    {"e\314\201\314\201f"},
    {"\314\201\314\202"},
    {"\346\227\245\346\234\254\343\202\253", "\343\203\273", "\343\202\277"},
    {"\343\202\237", "\343\202\240", "\343\203\274", "\343\201\200\343\202\227", "a"},
    {"\343\201\200", "\343\202\230\343\202\231"},
    {"\343\200\202\357\274\201\n\n", "\344\270\226"},
    {" !\r\n\r\n", "x"},
    {" ", " !", "a"},
    {".a", "1"},
    {"!!", "ab"},
    {"\342\200\246", "a", "\342\200\246", "b"},
    {"\357\274\221\357\274\222\357\274\223", "\357\274\224", "\345\271\264"},
    {" ", "3", "  ", "3"},
    {"x", "\342\200\213\303\251"},
    {"\360\237\231\202\360\237\231\202", " \360\237\231\202"},
    {"  ", "\344\270\226"},
    {"\343\200\200", "\344\270\226"},
    {"\342\200\250\n", "\342\200\250a"},
    {"~`|", "a"},
    {"a", "\302\205\302\205"},
    {"\360\240\200\200", "\344\270\226", "\360\240\200\200"},
    /* Not UTF-8: each byte is a character of no class. */
    {"a", "\200\377", "1"},
    {"a", "\346\257", "\346b"},
    {"\355\240", "\200a"},
};

static void cuts_as_the_patterns_do(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256] = "";
        for (int k = 0; cases[i][k]; k++) {
            memcpy(text + strlen(text), cases[i][k], strlen(cases[i][k]) + 1);
        }
        size_t at = 0, n = strlen(text);
        for (int k = 0; cases[i][k]; k++) {
            size_t len = td_split_piece((const uint8_t *)text + at, n - at);
            if (len != strlen(cases[i][k])) {
                fail_msg("case %zu, piece %d: expected %zu bytes, found %zu", i, k,
                         strlen(cases[i][k]), len);
            }
            at += len;
        }
        assert_int_equal(at, n);
    }
}

/* Any bytes: pieces cover the text, and never end inside a character. */
static void covers_random_bytes(void **state) {
    (void)state;
    static const char *const parts[] = {
        "a",    "1",    " ",        "\n",   "\r",   ".",       "\342\200\250", "\344\270\226",
        "\346", "\257", "\360\237", "\377", "\001", "\314\201"};
    uint64_t seed = tiny_seed();
    for (int round = 0; round < 20000; round++) {
        char text[128] = "";
        size_t n = 0, at = 0;
        for (uint32_t k = tiny_random(&seed, 24); k > 0; k--) {
            const char *p = parts[tiny_random(&seed, sizeof parts / sizeof *parts)];
            memcpy(text + n, p, strlen(p));
            n += strlen(p);
        }
        while (at < n) {
            size_t len = td_split_piece((const uint8_t *)text + at, n - at);
            assert_in_range(len, 1, n - at);
            for (size_t end = at + len; at < end;) {
                uint32_t cp;
                int k = td_utf8_decode((const uint8_t *)text + at, n - at, &cp);
                at += k > 0 ? (size_t)k : 1;
                assert_in_range(at, 1, end);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(cuts_as_the_patterns_do),
                                       cmocka_unit_test(covers_random_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

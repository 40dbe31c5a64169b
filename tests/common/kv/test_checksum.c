/* The checksum against its definition, and what it must notice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/kv/checksum.h"

static uint64_t seed;

static uint64_t next_random(void) {
    seed += 0x9E3779B97F4A7C15u;
    return td_mix64(seed);
}

static void fill(uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)next_random();
}

/* The definition, byte by byte and written without regard to speed. */
static int32_t half(const uint8_t *p, size_t len, size_t at) {
    uint32_t low = at < len ? p[at] : 0, high = at + 1 < len ? p[at + 1] : 0;
    int32_t v = (int32_t)(low | high << 8);
    return v < 0x8000 ? v : v - 0x10000;
}

static int32_t weight(uint32_t word, int k) {
    int32_t v = (int32_t)(td_checksum_weight(word) >> (16 * k) & 0xFFFF);
    return v < 0x8000 ? v : v - 0x10000;
}

static uint64_t definition(const uint8_t *p, size_t len) {
    uint64_t sum = 0;
    for (size_t block = 0; block * 1024 < len; block++) {
        int64_t a = 0, b = 0; /* far from overflow */
        for (uint32_t i = 0; i < 256; i++) {
            int64_t lo = half(p, len, block * 1024 + i * 4);
            int64_t hi = half(p, len, block * 1024 + i * 4 + 2);
            a += lo * weight(i, 0) + hi * weight(i, 1);
            b += lo * weight(i, 2) + hi * weight(i, 3);
        }
        uint64_t state = (uint64_t)(uint32_t)b << 32 | (uint32_t)a;
        sum += td_mix64(state ^ (block + 1) * 0x9E3779B97F4A7C15u);
    }
    return td_mix64(sum + td_mix64(len + 1));
}

/* By every way this processor has, in one piece. */
static void check_sets(const uint8_t *p, size_t len, uint64_t want) {
    const struct td_checksum_set *set;
    for (uint32_t i = 0; (set = td_checksum_set(i)) != NULL; i++) {
        struct td_checksum_run r = {0};
        set->lines(&r, NULL, p, len / 64, TD_CHECKSUM_READ);
        uint64_t found = td_checksum_finish(&r, p + len / 64 * 64, len % 64);
        if (found != want) fail_msg("%s, %zu bytes", set->name, len);
    }
}

static void test_definition(void **state) {
    (void)state;
    static uint8_t buf[9000];
    fill(buf, sizeof buf);
    for (size_t len = 0; len < 2200; len++) {
        uint64_t want = definition(buf + len % 7, len);
        assert_true(td_checksum(buf + len % 7, len) == want);
        check_sets(buf + len % 7, len, want);
    }
    check_sets(buf, sizeof buf, definition(buf, sizeof buf));
    memset(buf, 0x80, sizeof buf); /* the largest magnitudes and their products */
    for (size_t i = 0; i < sizeof buf; i += 2)
        buf[i] = 0;
    check_sets(buf, sizeof buf, definition(buf, sizeof buf));
    /* Frozen: a change of the definition is a change of the wire version. */
    for (size_t i = 0; i < 3000; i++)
        buf[i] = (uint8_t)(i * 7 + i / 256);
    assert_true(td_checksum_weight(0) == 0xE8BD15092A6ED3B9ull);
    assert_true(td_checksum_weight(255) == 0xCFF1D8D2A83499FDull);
    assert_true(td_checksum(buf, 3000) == 0x27C2DF430C6EBC8Bull);
    assert_true(td_checksum(buf, 64) == 0xC24357CFC2294DD8ull);
    assert_true(td_checksum(buf, 0) == 0xC31ABAFE38B52013ull);
}

/* What the header promises is arithmetic over the weights. */
static void test_weights(void **state) {
    (void)state;
    for (uint32_t i = 0; i < TD_CHECKSUM_WORDS; i++) {
        int64_t det = (int64_t)weight(i, 0) * weight(i, 3) - (int64_t)weight(i, 1) * weight(i, 2);
        assert_true(det & 1);
        for (uint32_t j = 0; j < i; j++) {
            int64_t a_lo = weight(i, 0) - weight(j, 0), a_hi = weight(i, 1) - weight(j, 1);
            int64_t b_lo = weight(i, 2) - weight(j, 2), b_hi = weight(i, 3) - weight(j, 3);
            det = a_lo * b_hi - a_hi * b_lo;
            assert_true(det % 65536 != 0);
        }
    }
}

/* In pieces of any number of lines, from and to any alignment, every way to copy: the same
 * checksum, the bytes where they belong and no others. */
static void test_copies(void **state) {
    (void)state;
    enum { MOST = 5000, ROOM = MOST + 256 };
    static _Alignas(64) uint8_t from[ROOM], to[ROOM];
    const struct td_checksum_set *set;
    for (uint32_t k = 0; (set = td_checksum_set(k)) != NULL; k++)
        for (int round = 0; round < 600; round++) {
            size_t at = round % 3 ? 64 : 64 + next_random() % 64, len = next_random() % MOST;
            size_t source = next_random() % 64, done = 0;
            enum td_checksum_copy copy = (enum td_checksum_copy)(next_random() % 3);
            struct td_checksum_run r = {0};
            fill(from, sizeof from);
            memset(to, 0xA5, sizeof to);
            while (len - done >= 64) {
                size_t lines = 1 + next_random() % (round % 2 ? 4 : 40);
                if (lines > (len - done) / 64) lines = (len - done) / 64;
                set->lines(&r, to + at + done, from + source + done, lines, copy);
                done += lines * 64;
            }
            td_checksum_settle();
            uint64_t want = definition(from + source, len);
            if (td_checksum_finish(&r, from + source + done, len - done) != want)
                fail_msg("%s: %zu bytes, copy %d", set->name, len, copy);
            for (size_t i = 0; i < sizeof to; i++) {
                bool inside = copy != TD_CHECKSUM_READ && i >= at && i < at + done;
                assert_int_equal(to[i], inside ? from[source + i - at] : 0xA5);
            }
        }
}

static void test_every_bit(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 3, 4, 5, 128, 132, 1023, 1024, 1025, 2500};
    uint8_t buf[2500];
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int zero = 0; zero < 2; zero++) {
            if (zero)
                memset(buf, 0, sizeof buf);
            else
                fill(buf, sizeof buf);
            uint64_t want = td_checksum(buf, sizes[s]);
            for (size_t bit = 0; bit < sizes[s] * 8; bit++) {
                buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
                assert_true(td_checksum(buf, sizes[s]) != want);
                buf[bit / 8] ^= (uint8_t)(1u << bit % 8);
            }
        }
}

/* One word changed in any way, and two words exchanged, are seen whatever the bits. */
static void test_words(void **state) {
    (void)state;
    uint32_t word[3 * TD_CHECKSUM_WORDS];
    for (int i = 0; i < 200000; i++) {
        size_t n = i % 2 ? TD_CHECKSUM_WORDS : 3 * TD_CHECKSUM_WORDS,
               block = next_random() % n / 256;
        if (i % 1000 == 0) fill((uint8_t *)word, sizeof word);
        uint64_t want = td_checksum(word, n * 4);
        size_t a = block * 256 + next_random() % 256, b = block * 256 + next_random() % 256;
        uint32_t old = word[a], change = (uint32_t)(next_random() >> next_random() % 32);
        if (change == 0) continue;
        word[a] ^= change;
        assert_true(td_checksum(word, n * 4) != want);
        word[a] = old;
        if (a == b) continue;
        old = word[b];
        word[b] = word[a] ^ change;
        want = td_checksum(word, n * 4);
        word[b] = word[a], word[a] ^= change;
        assert_true(td_checksum(word, n * 4) != want);
        word[a] = word[b], word[b] = old;
    }
}

static void test_truncation(void **state) {
    (void)state;
    uint8_t buf[4096] = {0}; /* zeros: the padding of a shorter stream looks the same */
    uint64_t seen[4097];
    for (size_t len = 0; len <= 4096; len++)
        seen[len] = td_checksum(buf, len);
    for (size_t len = 1; len <= 4096; len++)
        assert_true(seen[len] != seen[len - 1]);
    for (int i = 0; i < 2000; i++) {
        size_t a = next_random() % 4097, b = next_random() % 4097;
        if (a != b) assert_true(seen[a] != seen[b]);
    }
}

static void swap_bytes(uint8_t *a, uint8_t *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint8_t t = a[i];
        a[i] = b[i];
        b[i] = t;
    }
}

static void test_swaps(void **state) {
    (void)state;
    static uint8_t buf[64 * 2048];
    static const size_t rows[] = {4, 64, 128, 132, 256, 512, 1024, 2048};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (int i = 0; i < 300; i++) {
            fill(buf, 64 * rows[r]);
            size_t a = next_random() % 64, b = next_random() % 64;
            /* Every third time the two rows differ in one bit only, often a word's top bit. */
            if (a != b && i % 3 == 0) {
                memcpy(buf + b * rows[r], buf + a * rows[r], rows[r]);
                size_t at = next_random() % (rows[r] / 4) * 4 + 3;
                buf[b * rows[r] + at] ^= i % 2 ? 0x80 : 1;
            }
            uint64_t want = td_checksum(buf, 64 * rows[r]);
            swap_bytes(buf + a * rows[r], buf + b * rows[r], rows[r]);
            assert_true((td_checksum(buf, 64 * rows[r]) == want) == (a == b));
        }
}

/* Rows of 128 bytes equal but for the top bit of every word: 2^31 times an even number is 0, so
 * weights that differ by even numbers alone would see nothing. */
static void test_swap_of_top_bits(void **state) {
    (void)state;
    uint8_t buf[1024];
    for (uint32_t a = 0; a < 8; a++)
        for (uint32_t b = 0; b < a; b++) {
            fill(buf, sizeof buf);
            memcpy(buf + a * 128, buf + b * 128, 128);
            for (int i = 3; i < 128; i += 4)
                buf[a * 128 + i] ^= 0x80;
            uint64_t want = td_checksum(buf, sizeof buf);
            swap_bytes(buf + a * 128, buf + b * 128, 128);
            assert_true(td_checksum(buf, sizeof buf) != want);
        }
}

static void test_parts(void **state) {
    (void)state;
    uint64_t a = td_checksum("a", 1), b = td_checksum("b", 1);
    assert_true(td_checksum_part(a, 0) + td_checksum_part(b, 1) !=
                td_checksum_part(b, 0) + td_checksum_part(a, 1));
    assert_true(td_checksum_part(a, 0) != td_checksum_part(a, 1));
    assert_true(td_checksum_part(a, 0) != td_checksum_part(b, 0));
}

static void test_prompt_hash(void **state) {
    (void)state;
    const int32_t ids[] = {5, 6, 7}, swapped[] = {6, 5, 7}, padded[] = {5, 6, 7, 0};
    assert_true(td_prompt_hash(ids, 3) != td_prompt_hash(swapped, 3));
    assert_true(td_prompt_hash(ids, 3) != td_prompt_hash(ids, 2));
    assert_true(td_prompt_hash(ids, 3) != td_prompt_hash(padded, 4));
    assert_true(td_prompt_hash(ids, 3) == td_prompt_hash(padded, 3));
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Not a test: prints the rate beside memcpy's when asked to. */
static void bench(void) {
    size_t n = 64u << 20;
    uint8_t *a = malloc(n), *b = malloc(n);
    memset(a, 1, n);
    memset(b, 2, n);
    double copy = 1e9, check = 1e9;
    uint64_t sink = 0;
    for (int i = 0; i < 8; i++) {
        double t0 = seconds();
        memcpy(b, a, n);
        double t1 = seconds();
        sink += td_checksum(b, n);
        double t2 = seconds();
        if (t1 - t0 < copy) copy = t1 - t0;
        if (t2 - t1 < check) check = t2 - t1;
    }
    printf("64 MiB: memcpy %.2f GB/s, checksum %.2f GB/s (%016llx)\n", (double)n / copy * 1e-9,
           (double)n / check * 1e-9, (unsigned long long)sink);
    n = 128u << 10;
    double t0 = seconds();
    for (int i = 0; i < 2000; i++)
        sink += td_checksum(b + (sink & 64), n);
    printf("128 KiB in cache: checksum %.2f GB/s (%016llx)\n",
           2000 * (double)n / (seconds() - t0) * 1e-9, (unsigned long long)sink);
    free(a);
    free(b);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench();
        return 0;
    }
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definition), cmocka_unit_test(test_weights),
        cmocka_unit_test(test_copies),     cmocka_unit_test(test_words),
        cmocka_unit_test(test_every_bit),  cmocka_unit_test(test_truncation),
        cmocka_unit_test(test_swaps),      cmocka_unit_test(test_swap_of_top_bits),
        cmocka_unit_test(test_parts),      cmocka_unit_test(test_prompt_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

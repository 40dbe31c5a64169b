/* The small number formats against their definitions: every code decoded, every rounding boundary
 * tried, and random floats rounded by searching the whole grid. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

#include "kernels/model/numbers.h"

static uint64_t seed;

static uint32_t next_u32(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* e4m3 by the format's formula in double. */
static double e4m3_value(unsigned code) {
    unsigned exp = (code >> 3) & 15u, man = code & 7u;
    double mag = exp == 0 ? ldexp(man, -9) : ldexp(8.0 + man, (int)exp - 7 - 3);
    return code & 0x80u ? -mag : mag;
}

static void e4m3_decodes_every_code(void **state) {
    (void)state;
    for (unsigned c = 0; c < 256; c++) {
        float got = td_e4m3_to_f32((uint8_t)c);
        if ((c & 0x7fu) == 0x7fu) {
            assert_true(isnan(got));
            continue;
        }
        assert_true((double)got == e4m3_value(c));
        assert_int_equal(signbit(got) != 0, c >> 7);
        assert_int_equal(td_f32_to_e4m3(got), c);
    }
    assert_true(td_e4m3_to_f32(0x7e) == TD_E4M3_MAX);
}

static void e4m3_rounds_ties_to_even(void **state) {
    (void)state;
    for (unsigned c = 0; c < 0x7e; c++) {
        float lo = td_e4m3_to_f32((uint8_t)c), hi = td_e4m3_to_f32((uint8_t)(c + 1));
        float mid = 0.5f * (lo + hi); /* exact: neighbours differ in the last of 4 bits */
        unsigned even = (c & 1u) ? c + 1 : c;
        for (unsigned sign = 0; sign < 2; sign++) {
            float s = sign ? -1.0f : 1.0f;
            unsigned bit = sign << 7;
            assert_int_equal(td_f32_to_e4m3(s * mid), even | bit);
            assert_int_equal(td_f32_to_e4m3(s * nextafterf(mid, 0.0f)), c | bit);
            assert_int_equal(td_f32_to_e4m3(s * nextafterf(mid, 1e9f)), (c + 1) | bit);
        }
    }
    assert_int_equal(td_f32_to_e4m3(1e30f), 0x7e);
    assert_int_equal(td_f32_to_e4m3(-INFINITY), 0xfe);
    assert_int_equal(td_f32_to_e4m3(464.0f), 0x7e);
    assert_int_equal(td_f32_to_e4m3(1e-45f), 0x00);
    assert_int_equal(td_f32_to_e4m3(-1e-45f), 0x80);
    assert_int_equal(td_f32_to_e4m3(NAN) & 0x7f, 0x7f);
}

static void e4m3_rounds_random_floats_to_the_nearest(void **state) {
    (void)state;
    for (int i = 0; i < 20000; i++) {
        float x = ldexpf((float)next_u32() / 4294967296.0f + 1.0f, (int)(next_u32() % 20u) - 11);
        unsigned best = 0;
        for (unsigned c = 1; c < 0x7f; c++) {
            double d = fabs(e4m3_value(c) - (double)x), b = fabs(e4m3_value(best) - (double)x);
            if (d < b || (d == b && !(c & 1u))) best = c;
        }
        assert_int_equal(td_f32_to_e4m3(x), best);
    }
}

static void bf16_decodes_and_returns_every_code(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 65536; c++) {
        float v = td_bf16_to_f32((uint16_t)c);
        uint32_t exp = (c >> 7) & 255u, man = c & 127u;
        if (exp == 255 && man) {
            assert_true(isnan(v));
            assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(v))));
            continue;
        }
        double want = exp == 255 ? INFINITY
                      : exp == 0 ? ldexp(man, -133)
                                 : ldexp(128.0 + man, (int)exp - 134);
        assert_true((double)v == (c & 0x8000u ? -want : want));
        assert_int_equal(td_f32_to_bf16(v), c);
    }
}

static void bf16_rounds_ties_to_even(void **state) {
    (void)state;
    /* Between every two neighbours (the last pair: largest finite and infinity). */
    for (uint32_t c = 0; c < 0x7f80u; c++) {
        uint32_t mid = (c << 16) | 0x8000u;
        assert_int_equal(td_f32_to_bf16(td_bits_f32(mid)), (c & 1u) ? c + 1 : c);
        assert_int_equal(td_f32_to_bf16(td_bits_f32(mid - 1)), c);
        assert_int_equal(td_f32_to_bf16(td_bits_f32(mid + 1)), c + 1);
        assert_int_equal(td_f32_to_bf16(td_bits_f32(mid | 0x80000000u)),
                         ((c & 1u) ? c + 1 : c) | 0x8000u);
    }
    /* A NaN whose payload lies in the dropped half must not become infinity. */
    assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(td_bits_f32(0x7f800001u)))));
    assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(td_bits_f32(0xffffffffu)))));
}

static void e2m1_is_its_grid_and_rounds_ties_to_even(void **state) {
    (void)state;
    static const double grid[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (unsigned c = 0; c < 16; c++) {
        float v = td_e2m1_to_f32((uint8_t)c);
        assert_true((double)v == ((c & 8u) ? -grid[c & 7u] : grid[c & 7u]));
        assert_int_equal(td_f32_to_e2m1(v), c);
        assert_true(td_bits_f32(td_f32_bits(td_e2m1_to_f32((uint8_t)(c | 0xf0u)))) == v);
    }
    for (unsigned c = 0; c < 7; c++) {
        float mid = (float)(0.5 * (grid[c] + grid[c + 1]));
        assert_int_equal(td_f32_to_e2m1(mid), (c & 1u) ? c + 1 : c);
        assert_int_equal(td_f32_to_e2m1(nextafterf(mid, 0.0f)), c);
        assert_int_equal(td_f32_to_e2m1(nextafterf(mid, 9.0f)), c + 1);
        assert_int_equal(td_f32_to_e2m1(-nextafterf(mid, 9.0f)), (c + 1) | 8u);
    }
    assert_int_equal(td_f32_to_e2m1(1e9f), 7);
    assert_int_equal(td_f32_to_e2m1(-1e9f), 15);
}

static void e8m0_is_a_power_of_two(void **state) {
    (void)state;
    for (unsigned c = 0; c < 255; c++)
        assert_true((double)td_e8m0_to_f32((uint8_t)c) == ldexp(1.0, (int)c - 127));
    assert_true(isnan(td_e8m0_to_f32(255)));
}

int main(void) {
    const char *s = getenv("TANDEM_TEST_SEED");
    seed = s ? strtoull(s, NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu (set TANDEM_TEST_SEED to repeat)\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_decodes_every_code),
        cmocka_unit_test(e4m3_rounds_ties_to_even),
        cmocka_unit_test(e4m3_rounds_random_floats_to_the_nearest),
        cmocka_unit_test(bf16_decodes_and_returns_every_code),
        cmocka_unit_test(bf16_rounds_ties_to_even),
        cmocka_unit_test(e2m1_is_its_grid_and_rounds_ties_to_even),
        cmocka_unit_test(e8m0_is_a_power_of_two),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

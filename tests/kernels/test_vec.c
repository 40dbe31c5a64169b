/* The elementary functions of the definitions against the C library in double. */
#include <math.h>

#include "kernels/cpu/vec.h"
#include "kernels/ref/angle.h"
#include "tests/kernels/fixture.h"

/* Distance in units of the last place of the fp32 result. */
static double ulps(float got, double want) {
    int e;
    frexp(want, &e);
    return fabs((double)got - want) / ldexp(1.0, (e < -125 ? -125 : e) - 24);
}

static void exp_is_within_two_ulp(void **state) {
    (void)state;
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        float x = td_test_uniform(-87.3f, 88.7f);
        if (i % 4 == 0) x = td_test_uniform(-1.0f, 1.0f);
        worst = fmax(worst, ulps(exp1(x), exp((double)x)));
    }
    print_message("exp: worst %.3f ulp\n", worst);
    assert_true(worst <= 2.0);
}

static void exp_edges(void **state) {
    (void)state;
    assert_true(exp1(0.0f) == 1.0f);
    assert_true(exp1(-INFINITY) == 0.0f && exp1(-1e30f) == 0.0f);
    assert_true(exp1(INFINITY) == INFINITY && exp1(89.0f) == INFINITY);
    assert_true(isnan(exp1(NAN)));
    assert_true(ulps(exp1(-100.0f), exp(-100.0)) <= 2.0); /* subnormal */
    v8 x = {-1, 0, 1, 2, 3, -50, 80, -103}, y = exp8(x);
    for (int i = 0; i < 8; i++)
        assert_true(y[i] == exp1(x[i]));
}

static void softplus_and_sigmoid(void **state) {
    (void)state;
    double worst = 0, worst_sigmoid = 0;
    for (int i = 0; i < 200000; i++) {
        float x = td_test_uniform(-40.0f, 40.0f);
        double want = fmax(x, 0.0) + log1p(exp(-fabs((double)x)));
        worst = fmax(worst, ulps(softplus1(x), want));
        worst_sigmoid = fmax(worst_sigmoid, ulps(sigmoid1(x), 1.0 / (1.0 + exp(-(double)x))));
    }
    print_message("softplus: worst %.3f ulp, sigmoid: %.3f ulp\n", worst, worst_sigmoid);
    assert_true(worst <= 5.0 && worst_sigmoid <= 5.0);
}

static void cos_sin_is_correctly_rounded_nearly_always(void **state) {
    (void)state;
    double worst = 0;
    uint32_t wrong = 0, n = 300000;
    for (uint32_t i = 0; i < n; i++) {
        float x = i % 3 == 0 ? (float)td_test_below(1u << 20) : td_test_uniform(0.0f, 1048576.0f);
        if (i % 3 == 1) x = td_test_uniform(-7.0f, 7.0f);
        float c, s;
        cos_sin(x, &c, &s);
        double want_c = cos((double)x), want_s = sin((double)x);
        worst = fmax(worst, fmax(ulps(c, want_c), ulps(s, want_s)));
        wrong += (c != (float)want_c) + (s != (float)want_s);
    }
    print_message("cos, sin: worst %.4f ulp, %u of %u not equal to the rounded double\n", worst,
                  wrong, 2 * n);
    assert_true(worst <= 0.501 && wrong <= 2);
}

static void lane_sum_order(void **state) {
    (void)state;
    /* 2^24 + 1 - 2^24: which additions meet decides the result. */
    v8 v = {0x1p24f, 1.0f, 0, 0, 0, 0, -0x1p24f, 0};
    assert_true(sum8(v) == 1.0f);
    v8 w = {0x1p24f, 0, -0x1p24f, 0, 1.0f, 0, 0, 0};
    assert_true(sum8(w) == 0.0f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulp),
        cmocka_unit_test(exp_edges),
        cmocka_unit_test(softplus_and_sigmoid),
        cmocka_unit_test(cos_sin_is_correctly_rounded_nearly_always),
        cmocka_unit_test(lane_sum_order),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

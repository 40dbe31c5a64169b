/* The published frequency table, digit by digit. */
#include <math.h>

#include "kernels/rope_table.h"
#include "tests/kernels/fixture.h"

static const struct td_model_config config = {
    .rope_theta = 10000.0f,
    .compress_rope_theta = 160000.0f,
    .yarn_factor = 16.0f,
    .yarn_beta_fast = 32.0f,
    .yarn_beta_slow = 1.0f,
    .yarn_original_positions = 65536,
};

static void near_relative(float got, double want) {
    if (fabs((double)got - want) > 3e-7 * want)
        fail_msg("frequency: expected %.10g, found %.10g", want, (double)got);
}

static void yarn_values(void **state) {
    (void)state;
    static const struct {
        uint32_t i;
        double f;
    } want[] = {
        {0, 1.0},
        {1, 0.6876560219},
        {8, 0.05},
        {15, 3.635538584e-3},
        {16, 2.265625e-3},
        {17, 1.396801295e-3},
        {18, 8.496897268e-4},
        {19, 5.080819630e-4},
        {20, 2.969777783e-4},
        {21, 1.681799886e-4},
        {22, 9.086784295e-5},
        {23, 4.544423230e-5},
        {24, 1.953125e-5},
        {25, 5.372312671e-6},
        {28, 1.746928107e-6},
        {31, 5.680529037e-7},
    };
    float f[TD_ROPE_DIM / 2];
    td_rope_table(&config, true, f);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        near_relative(f[want[i].i], want[i].f);
}

static void plain_values(void **state) {
    (void)state;
    float f[TD_ROPE_DIM / 2];
    td_rope_table(&config, false, f);
    for (uint32_t i = 0; i < TD_ROPE_DIM / 2; i++)
        near_relative(f[i], pow(10000.0, -2.0 * i / 64.0));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(yarn_values),
        cmocka_unit_test(plain_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

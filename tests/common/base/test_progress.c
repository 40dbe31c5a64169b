/* When a line of progress is due. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/progress.h"

enum { MS = 1000000 };

static void one_line_per_tenth_and_second(void **state) {
    (void)state;
    struct td_progress p = {.what = "x"};
    uint64_t t = 5 * (uint64_t)MS;
    assert_false(td_progress_due(&p, 0, 1000, t));
    assert_false(td_progress_due(&p, 500, 1000, t + 999 * (uint64_t)MS)); /* too early */
    assert_true(td_progress_due(&p, 501, 1000, t + 1000 * (uint64_t)MS));
    assert_int_equal(p.tenths, 5);
    assert_false(td_progress_due(&p, 599, 1000, t + 9000 * (uint64_t)MS)); /* the same tenth */
    assert_true(td_progress_due(&p, 600, 1000, t + 9001 * (uint64_t)MS));
    assert_false(td_progress_due(&p, 999, 1000, t + 9002 * (uint64_t)MS));
    assert_true(td_progress_due(&p, 1000, 1000, t + 9003 * (uint64_t)MS)); /* the end at once */
    assert_int_equal(p.tenths, 10);
    assert_false(td_progress_due(&p, 1000, 1000, t + 99999 * (uint64_t)MS));
}

static void nothing_to_do_is_done(void **state) {
    (void)state;
    struct td_progress p = {.what = "x"};
    assert_true(td_progress_due(&p, 0, 0, 1));
    assert_int_equal(p.tenths, 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_line_per_tenth_and_second),
        cmocka_unit_test(nothing_to_do_is_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

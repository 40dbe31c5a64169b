/* The number of threads and the instruction set of the ops change no bit of logits or state. */
#include "tests/kernels/engine_fixture.h"

static void threads_case(bool ref) {
    enum { N = 269 };
    struct td_engine_options o = td_test_options();
    o.ref = o.index_sim4 = ref;
    if (ref) o.row_dtype = TD_KV_ROW_FP8;
    o.threads = 1;
    struct td_engine *one = td_test_engine(&o);
    int32_t *ids = td_test_ids(N);
    float *want = td_test_keep(td_test_feed(one, ids, 0, N, 200));
    for (uint32_t threads = 1; threads <= 4; threads++) {
        o.threads = threads;
        o.force_ref = threads == 1 ? ~(uint64_t)0 : 0;
        struct td_engine *e = td_test_engine(&o);
        td_test_same(o.force_ref ? "baseline ops" : "threads", want,
                     td_test_feed(e, ids, 0, N, 200), td_test_logit_bytes());
        td_test_same_state(one, e);
        uint64_t a, b;
        const char *first = td_engine_numerics(one, &a), *line = td_engine_numerics(e, &b);
        assert_true(a == b);
        if (!o.force_ref) assert_string_equal(first, line);
        td_engine_destroy(e);
    }
    free(want);
    free(ids);
    td_engine_destroy(one);
}

static void threads_and_instruction_sets_change_nothing(void **state) {
    (void)state;
    threads_case(false);
    threads_case(true);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_and_instruction_sets_change_nothing)};
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

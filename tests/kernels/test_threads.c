/* Every piece once, whatever the number of threads and pieces, over many short loops. */
#include <stdatomic.h>

#include "tests/kernels/fixture.h"

struct marks {
    _Atomic uint32_t *count;
    uint32_t *plain,
        round; /* what pieces write is the caller's afterwards: for the thread sanitizer */
    uint32_t threads;
    _Atomic uint32_t bad_thread;
};

static void mark(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    struct marks *m = (struct marks *)(uintptr_t)arg;
    if (thread >= m->threads) atomic_fetch_add(&m->bad_thread, 1);
    for (uint32_t i = begin; i < end; i++)
        atomic_fetch_add(&m->count[i], 1), m->plain[i] = m->round + i;
}

static void every_piece_once(void **state) {
    (void)state;
    enum { MAX = 5000 };
    static _Atomic uint32_t count[MAX];
    static uint32_t plain[MAX];
    static const uint32_t sizes[] = {0, 1, 2, 3, 7, 8, 9, 64, 1000, MAX};
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct td_threads *t;
        struct td_error err;
        assert_int_equal(td_threads_create(threads, &t, &err), TD_OK);
        assert_int_equal(td_threads_count(t), threads);
        for (uint32_t round = 0; round < 300; round++) {
            uint32_t n = sizes[round % (sizeof sizes / sizeof *sizes)];
            struct marks m = {.count = count, .plain = plain, .round = round, .threads = threads};
            memset((void *)count, 0, sizeof count);
            td_threads_run(t, mark, &m, n);
            assert_int_equal(atomic_load(&m.bad_thread), 0);
            for (uint32_t i = 0; i < MAX; i++)
                assert_int_equal(atomic_load(&count[i]), i < n);
            for (uint32_t i = 0; i < n; i++)
                assert_int_equal(plain[i], round + i);
        }
        td_threads_destroy(t);
    }
}

static void refuses_bad_counts(void **state) {
    (void)state;
    struct td_threads *t = NULL;
    struct td_error err;
    assert_int_equal(td_threads_create(0, &t, &err), TD_INVALID);
    assert_int_equal(td_threads_create(TD_MAX_THREADS + 1, &t, &err), TD_INVALID);
    assert_null(t);
    td_threads_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_piece_once),
        cmocka_unit_test(refuses_bad_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

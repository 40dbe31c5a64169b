/* A step of the engine allocates nothing: not the first one after creation, not a chunk, not a
 * decode step, on no thread, in no rank. This program's allocator counts; so does its mmap. */
#include "tests/kernels/engine_fixture.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
int main(void) {
    printf("skipped: a sanitizer has its own allocator\n");
    return 77;
}
#else

static _Atomic uint64_t taken;

/* What glibc's own entry points do, counted. */
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

void *malloc(size_t n) {
    atomic_fetch_add(&taken, 1);
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size) {
    atomic_fetch_add(&taken, 1);
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n) {
    atomic_fetch_add(&taken, 1);
    return __libc_realloc(p, n);
}
void *aligned_alloc(size_t align, size_t n) {
    atomic_fetch_add(&taken, 1);
    return __libc_memalign(align, n);
}
int posix_memalign(void **ret, size_t align, size_t n) {
    atomic_fetch_add(&taken, 1);
    *ret = __libc_memalign(align, n);
    return *ret ? 0 : ENOMEM;
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset) {
    atomic_fetch_add(&taken, 1);
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}

static void the_count_counts(void **state) {
    (void)state;
    void *(*volatile take[])(size_t) = {malloc};
    uint64_t before = atomic_load(&taken);
    void *p = take[0](100);
    void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(atomic_load(&taken) - before, 2);
    free(p);
    munmap(page, 4096);
}

/* Chunks, several sequences, logits and capture in every combination a server uses. */
static void steps(struct td_engine_options o) {
    enum { STREAMS = 3, CHUNK = 150, CHUNKS = 2, DECODE = 20 };
    static uint32_t pages[STREAMS][TD_TEST_PAGES];
    struct td_run run[STREAMS];
    struct td_error err;
    o.slots = o.max_runs = STREAMS;
    o.pages = STREAMS * TD_TEST_PAGES;
    o.index_topk = 20;
    int32_t *ids = td_test_ids(CHUNK * CHUNKS + DECODE);
    for (uint32_t i = 0; i < STREAMS * TD_TEST_PAGES; i++)
        pages[i % STREAMS][i / STREAMS] = i;
    struct td_engine *e = td_test_engine(&o);
    uint32_t layers = td_engine_layout(e)->csa_layers;
    struct td_capture capture = {STREAMS, layers, o.index_topk,
                                 td_test_bytes((size_t)STREAMS * layers * o.index_topk * 4)};
    uint64_t before = atomic_load(&taken);
    for (uint32_t step = 0; step < CHUNKS + DECODE; step++) {
        bool chunk = step < CHUNKS;
        uint32_t pos = chunk ? step * CHUNK : CHUNKS * CHUNK + step - CHUNKS;
        for (uint32_t i = 0; i < STREAMS; i++)
            run[i] = (struct td_run){.slot = i,
                                     .pos = pos,
                                     .n = chunk ? CHUNK : 1,
                                     .ids = ids + pos,
                                     .pages = pages[i],
                                     .want_logits = !chunk};
        const float *logits;
        if (td_engine_step(e, run, STREAMS, &logits, step % 2 ? &capture : NULL, &err) != TD_OK)
            fail_msg("%s", err.text);
    }
    assert_int_equal(atomic_load(&taken) - before, 0);
    free(capture.entries);
    td_engine_destroy(e);
    free(ids);
}

static void plain(void **state) {
    (void)state;
    steps(td_test_options());
}

static void ref_numerics(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.ref = true;
    o.row_dtype = TD_KV_ROW_FP8;
    o.key_dtype = TD_KV_KEY_FP4;
    o.index_sim4 = true;
    steps(o);
}

static void ranks(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.ranks = 2;
    o.ref = true;
    steps(o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks),
        cmocka_unit_test(the_count_counts),
        cmocka_unit_test(plain),
        cmocka_unit_test(ref_numerics),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}
#endif

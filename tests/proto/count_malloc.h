/* Counts calls of malloc, calloc and realloc of the whole process, shared libraries included, to
 * prove that a steady state allocates nothing. To be included by one source of a test. Sanitizers
 * bring their own allocator; there the count stays 0 and `test_counts_malloc` is false. */
#ifndef TD_TESTS_PROTO_COUNT_MALLOC_H
#define TD_TESTS_PROTO_COUNT_MALLOC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

static atomic_ulong test_mallocs;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const bool test_counts_malloc = false;
#else
static const bool test_counts_malloc = true;
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t m);
void *__libc_realloc(void *p, size_t n);
void *malloc(size_t n);
void *calloc(size_t n, size_t m);
void *realloc(void *p, size_t n);

void *malloc(size_t n) {
    atomic_fetch_add(&test_mallocs, 1);
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t m) {
    atomic_fetch_add(&test_mallocs, 1);
    return __libc_calloc(n, m);
}
void *realloc(void *p, size_t n) {
    atomic_fetch_add(&test_mallocs, 1);
    return __libc_realloc(p, n);
}
#endif

#endif

/* See fixture.h. */
#include "tests/kernels/fixture.h"

#include <math.h>
#include <stdio.h>
#include <time.h>

static uint64_t rng;

int td_test_seed(void **state) {
    (void)state;
    const char *given = getenv("TANDEM_TEST_SEED");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    rng = given ? strtoull(given, NULL, 10) : (uint64_t)t.tv_sec * 1000003u + (uint64_t)t.tv_nsec;
    printf("seed: TANDEM_TEST_SEED=%llu\n", (unsigned long long)rng);
    fflush(stdout);
    return 0;
}

/* splitmix64 */
bool td_test_has(const struct td_backend *b) {
    struct td_device d = {0};
    struct td_error err;
    td_status st = b->open(&d, 0, &err);
    if (d.backend) d.backend->close(&d);
    if (st != TD_OK) printf("skipped: %s\n", err.text);
    return st == TD_OK;
}

uint64_t td_test_next(void) {
    uint64_t z = (rng += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t td_test_below(uint32_t n) {
    return (uint32_t)(td_test_next() >> 33) % n;
}

float td_test_uniform(float lo, float hi) {
    return lo + (hi - lo) * ((float)(td_test_next() >> 40) * 0x1p-24f);
}

float *td_test_floats(size_t n, float lo, float hi) {
    float *p = malloc(n * sizeof *p);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++)
        p[i] = td_test_uniform(lo, hi);
    return p;
}

float *td_test_poison(size_t n) {
    float *p = malloc(n * sizeof *p);
    assert_non_null(p);
    memset(p, 0xff, n * sizeof *p);
    return p;
}

void *td_test_bytes(size_t n) {
    size_t padded = (n + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, padded ? padded : 64);
    assert_non_null(p);
    memset(p, 0, padded);
    return p;
}

struct td_matrix td_test_pack(const float *w, uint32_t rows, uint32_t cols) {
    bool bf16 = true;
    for (uint32_t o = 0; bf16 && o < rows; o++)
        bf16 = td_matrix_exact(w + (size_t)o * cols, cols);
    void *p = td_test_bytes(td_matrix_bytes(rows, cols, bf16));
    for (uint32_t o = 0; o < rows; o++)
        td_matrix_set_row(p, cols, bf16, o, w + (size_t)o * cols);
    return (struct td_matrix){.rows = rows, .cols = cols, .panels = p, .bf16 = bf16};
}

struct td_device td_test_device(uint32_t threads) {
    struct td_device d = {.scratch_stride = td_op_scratch(64, 64, 4096, true)};
    struct td_error err;
    assert_int_equal(td_threads_create(threads, &d.threads, &err), TD_OK);
    d.scratch = td_test_bytes(d.scratch_stride * threads);
    return d;
}

void td_test_device_finish(struct td_device *d) {
    td_threads_destroy(d->threads);
    free(d->scratch);
}

uint32_t td_test_tables(const struct td_ops *ret[2]) {
    ret[0] = &td_ops_ref;
    ret[1] = td_ops_select();
    return ret[1] == ret[0] ? 1 : 2;
}

void td_test_close(const char *what, const float *a, const double *b, size_t n, double tol) {
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)a[i] - b[i]) <= tol * fmax(1.0, fabs(b[i]))))
            fail_msg("%s: value %zu: expected %.9g, found %.9g", what, i, b[i], (double)a[i]);
}

void td_test_same(const char *what, const void *a, const void *b, size_t bytes) {
    const uint8_t *x = a, *y = b;
    for (size_t i = 0; i < bytes; i++)
        if (x[i] != y[i])
            fail_msg("%s: first difference at byte %zu of %zu: %02x and %02x", what, i, bytes, x[i],
                     y[i]);
}

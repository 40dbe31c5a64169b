/* What the kernel tests share: a printed seed, random arrays, a device, sequences with pages and
 * slots, and comparisons that show the first difference. */
#ifndef TD_TESTS_KERNELS_FIXTURE_H
#define TD_TESTS_KERNELS_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/device.h"
#include "kernels/ops.h"

/* Seeds the generator from TANDEM_TEST_SEED or the clock and prints it; a cmocka group setup. */
int td_test_seed(void **state);
uint64_t td_test_next(void);
uint32_t td_test_below(uint32_t n); /* 0..n-1 */
float td_test_uniform(float lo, float hi);

/* Can device 0 of this kind be opened? When not, prints "skipped: " and why. */
bool td_test_has(const struct td_backend *b);

/* Fresh arrays; freed by the caller. `td_test_poison` fills with a NaN pattern, so that an output
 * left unwritten is seen. */
float *td_test_floats(size_t n, float lo, float hi);
float *td_test_poison(size_t n);
void *td_test_bytes(size_t n); /* zeroed, 64-aligned */

/* w [rows, cols] row-major as panels; free `panels`. */
struct td_matrix td_test_pack(const float *w, uint32_t rows, uint32_t cols);

/* A device with `threads` threads and ample scratch. */
struct td_device td_test_device(uint32_t threads);
void td_test_device_finish(struct td_device *d);

/* The tables to test: the definitions, and the best fast one. */
uint32_t td_test_tables(const struct td_ops *ret[2]);

/* |a - b| <= tol * max(1, |b|) everywhere; else fails showing `what` and the place. */
void td_test_close(const char *what, const float *a, const double *b, size_t n, double tol);
void td_test_same(const char *what, const void *a, const void *b, size_t bytes);

#endif

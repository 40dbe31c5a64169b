/* One comparison of every op of every variant with the definition: what a case sees.
 *
 * A case is a function that makes its arguments and calls one op. It runs once with the definitions
 * on the CPU and once with the variant, from the same seed, so both see the same numbers. Arrays
 * are in the variant's memory: inputs must stay as they are, outputs start as poison and have to
 * come out alike, bytes around both must not be touched.
 *
 * A variant is a backend of kernels/device.h and one of its op tables; a new one is a line in
 * compare.c. */
#ifndef TD_TESTS_KERNELS_COMPARE_H
#define TD_TESTS_KERNELS_COMPARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"
#include "kernels/ops.h"

enum { TD_CASE_ARRAYS = 96, TD_CASE_GUARD = 256 };

enum td_array_kind {
    TD_IN,      /* must not change */
    TD_OUT,     /* bytes, compared to the bit */
    TD_SCRATCH, /* left as it may be; only what lies around it counts */
    TD_FLOATS, /* fp32, compared to the bit, or within the op's tolerance where a variant has one */
};

struct td_array {
    enum td_array_kind kind;
    size_t bytes;
    uint8_t *before; /* [guard, bytes, guard] as they were uploaded */
    void *memory;    /* the same in the variant's memory */
    uint8_t *after;  /* as they came back */
};

struct td_case {
    struct td_device *device;
    const struct td_ops *ops;
    uint64_t rng;
    uint32_t shape; /* which of the op's shapes; TD_CASE_BENCH: the one to measure */
    struct td_array array[TD_CASE_ARRAYS];
    uint32_t arrays;
    char text[160]; /* the shape in words, for failures */
    /* For measuring: what one call computes and moves at least. */
    double flops, bytes;
    double budget_s; /* 0: one call */
    double best_s;
    uint64_t calls, t0;
};
enum { TD_CASE_BENCH = 1000 };

typedef void td_case_fn(struct td_case *c);
struct td_op_cases {
    const char *op;
    td_case_fn *fn;
    uint32_t shapes;
    double tolerance; /* of fp32 results, relative to the greater of 1 and the value */
};
extern const struct td_op_cases td_cases_dense[], td_cases_kv[]; /* end with op NULL */

uint32_t td_case_below(struct td_case *c, uint32_t n); /* 0..n-1 */
float td_case_uniform(struct td_case *c, float lo, float hi);
/* Host arrays of random numbers, freed by td_case_put. */
float *td_case_floats(struct td_case *c, size_t n, float lo, float hi);
/* Copies `bytes` into the variant's memory, between guards. */
void *td_case_put(struct td_case *c, enum td_array_kind kind, const void *from, size_t bytes);
/* The same for random floats, and for outputs: poison. */
float *td_case_input(struct td_case *c, size_t n, float lo, float hi);
void *td_case_output(struct td_case *c, enum td_array_kind kind, size_t bytes);

/* Random weights as the variant's kernels take them: exact in bf16 or not. Freed with the case. */
struct td_matrix td_case_matrix(struct td_case *c, uint32_t rows, uint32_t cols, bool bf16);
/* [n] of them, in host memory. */
struct td_matrix *td_case_matrices(struct td_case *c, uint32_t n, uint32_t rows, uint32_t cols,
                                   bool bf16);

/* Whether to call once more. */
bool td_case_more(struct td_case *c);

/* Describes the shape, then calls the op as often as is wanted. */
#define TD_CASE_TEXT(c, ...) snprintf((c)->text, sizeof(c)->text, __VA_ARGS__)
#define TD_CASE_CALL(c, op, ...)                                                                   \
    do {                                                                                           \
        const struct td_##op##_args args_ = {__VA_ARGS__};                                         \
        while (td_case_more(c))                                                                    \
            (c)->ops->op((c)->device, &args_);                                                     \
    } while (0)

#endif

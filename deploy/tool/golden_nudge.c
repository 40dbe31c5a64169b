/* Noise in front of every rounding of ref numerics, like that of fp32 sums: it moves values across
 * the rounding boundaries they lie next to, and nothing else by more than itself. (On a layer's
 * input it would not: the first rounding swallows it.)
 *
 * A table of ops that adds the noise and calls the engine's own. One engine at a time has it. */
#include <math.h>

#include "deploy/tool/golden.h"
#include "kernels/ops.h"

static struct {
    struct td_ops under;
    uint64_t random;
    float size;  /* against the largest value of a row */
    bool shared; /* also on what other tokens read: rows, entries, keys */
} noise;

static void add_noise(float *x, size_t rows, size_t dim) {
    for (size_t i = 0; i < rows; i++, x += dim) {
        float most = 0;
        for (size_t k = 0; k < dim; k++)
            most = fmaxf(most, fabsf(x[k]));
        for (size_t k = 0; k < dim; k++) {
            noise.random = noise.random * 0x5851f42d4c957f2du + 0x14057b7ef767814fu;
            x[k] += most * noise.size * ((float)(int32_t)(noise.random >> 32) * 0x1p-31f);
        }
    }
}

static void round_fp8(const struct td_device *d, const struct td_round_fp8_args *a) {
    struct td_round_fp8_args own = *a;
    uint32_t n = a->rows ? *a->rows : a->n;
    size_t values = (size_t)n * a->dim;
    for (size_t i = 0; a->x != a->y && i < values; i++)
        a->y[i] = a->x[i];
    add_noise(a->y, n, a->dim);
    own.x = a->y;
    noise.under.round_fp8(d, &own);
}

static void index_query(const struct td_device *d, const struct td_index_query_args *a) {
    add_noise(a->q, (size_t)a->n * a->heads, TD_INDEX_DIM);
    noise.under.index_query(d, a);
}

/* The arrays below are intermediates that nothing else reads in this form. */

static void row_store(const struct td_device *d, const struct td_row_store_args *a) {
    if (noise.shared) add_noise((float *)(uintptr_t)a->kv, a->n, TD_HEAD_DIM);
    noise.under.row_store(d, a);
}

static void compress(const struct td_device *d, const struct td_compress_args *a) {
    size_t width = a->family == TD_KV_CSA     ? TD_KV_CSA_STATE_DIM
                   : a->family == TD_KV_INDEX ? TD_KV_INDEX_STATE_DIM
                                              : TD_KV_HCA_STATE_DIM;
    if (noise.shared) add_noise((float *)(uintptr_t)a->u, a->batch->n, width);
    noise.under.compress(d, a);
}

const struct td_ops *td_golden_nudge_ops(void) {
    static struct td_ops ops;
    td_ops_init(&noise.under, 0);
    ops = noise.under;
    ops.round_fp8 = round_fp8;
    ops.index_query = index_query;
    ops.row_store = row_store;
    ops.compress = compress;
    return &ops;
}

/* Sizes 2^-24 to 2^-20 in turn, without and with what tokens share. */
void td_golden_nudge(uint64_t seed) {
    noise.random = seed;
    noise.shared = seed % 2 == 0;
    noise.size = ldexpf(1, (int)(seed / 2 % 5) - 24);
}

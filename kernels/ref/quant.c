/* The rounding steps of `ref` numerics as ops of their own: inputs of linears, indexer queries. */
#include "kernels/ref/quant.h"

#include "kernels/ref/op.h"

static void round_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_round_fp8_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        fp8_round(a->x + (size_t)i * a->dim, a->y + (size_t)i * a->dim, a->dim, TD_BLOCK);
}

void TD_OP(round_fp8)(const struct td_device *d, const struct td_round_fp8_args *a) {
    td_threads_run(d->threads, round_rows, a, a->rows ? *a->rows : a->n);
}

static void nvfp4_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_round_nvfp4_args *a = arg;
    uint32_t e = 0;
    for (uint32_t r = begin; r < end; r++) {
        while (a->offset[e + 1] <= r)
            e++;
        size_t to = (size_t)r * a->dim;
        nvfp4_round(a->x + (size_t)(a->x_row ? a->x_row[r] : r) * a->dim, a->y + to, a->dim,
                    a->w[e].input_scale, a->codes.code ? a->codes.code + to / 2 : NULL,
                    a->codes.code ? a->codes.scale + to / 16 : NULL);
    }
}

void TD_OP(round_nvfp4)(const struct td_device *d, const struct td_round_nvfp4_args *a) {
    td_threads_run(d->threads, nvfp4_rows, a, a->offset[a->experts]);
}

static void query_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_index_query_args *a = arg;
    for (size_t i = (size_t)begin * a->heads; i < (size_t)end * a->heads; i++) {
        float *q = a->q + i * TD_INDEX_DIM;
        if (a->hadamard) hadamard128(q);
        if (a->sim4) sim4(q, TD_INDEX_DIM);
    }
}

void TD_OP(index_query)(const struct td_device *d, const struct td_index_query_args *a) {
    td_threads_run(d->threads, query_rows, a, a->n);
}

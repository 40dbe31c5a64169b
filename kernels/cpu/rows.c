/* Ops on single rows: norm, shard sums. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/norm.h"

static void norm_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_rms_norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        rms_norm_row8(a->x + i * a->x_stride, a->y + i * a->y_stride, a->w, a->dim, a->eps);
}

void TD_OP(rms_norm)(const struct td_device *d, const struct td_rms_norm_args *a) {
    td_threads_run(d->threads, norm_rows, a, a->n);
}

static void shard_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_add_shards_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t c = 0; c < a->dim; c++) {
            float sum = a->shard[(size_t)i * a->dim + c];
            for (uint32_t s = 1; s < a->shards; s++)
                sum += a->shard[((size_t)s * a->n + i) * a->dim + c];
            a->y[(size_t)i * a->dim + c] = sum;
        }
}

void TD_OP(add_shards)(const struct td_device *d, const struct td_add_shards_args *a) {
    td_threads_run(d->threads, shard_rows, a, a->n);
}

/* Ops on single rows: norm, shard sums. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/norm.h"
#include "kernels/cpu/tree.h"

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
    size_t i = (size_t)begin * a->dim, stop = (size_t)end * a->dim, all = (size_t)a->n * a->dim;
    for (; i + 8 <= stop; i += 8)
        store8(a->y + i, tree_sum8(a->shard + i, all, a->shards));
    for (; i < stop; i++)
        a->y[i] = tree_sum(a->shard + i, all, a->shards);
}

void TD_OP(add_shards)(const struct td_device *d, const struct td_add_shards_args *a) {
    td_threads_run(d->threads, shard_rows, a, a->n);
}

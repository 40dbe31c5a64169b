/* Ops on single rows: embedding, norm, gather, shard sums. */
#include "kernels/ref/math.h"
#include "kernels/ref/op.h"
#include "kernels/ref/sum.h"

static void embed_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_embed_args *a = arg;
    size_t hidden = a->w->cols;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t row = (uint32_t)a->ids[i] - a->first;
        if (row < a->w->rows)
            td_weight_row(a->w, row, a->y + i * hidden);
        else
            memset(a->y + i * hidden, 0, hidden * sizeof *a->y);
    }
}

void TD_OP(embed)(const struct td_device *d, const struct td_embed_args *a) {
    td_threads_run(d->threads, embed_rows, a, a->n);
}

static void expand_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_expand_args *a = arg;
    size_t hidden = a->hidden;
    for (size_t i = (size_t)begin * TD_HC_STREAMS; i < (size_t)end * TD_HC_STREAMS; i++)
        memcpy(a->x + i * hidden, a->y + i / TD_HC_STREAMS * hidden, hidden * sizeof *a->x);
}

void TD_OP(expand)(const struct td_device *d, const struct td_expand_args *a) {
    td_threads_run(d->threads, expand_rows, a, a->n);
}

static void norm_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_rms_norm_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        rms_norm_row(a->x + i * a->x_stride, a->y + i * a->y_stride, a->w, a->dim, a->eps);
}

void TD_OP(rms_norm)(const struct td_device *d, const struct td_rms_norm_args *a) {
    td_threads_run(d->threads, norm_rows, a, a->n);
}

static void gather_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_gather_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        memcpy(a->y + (size_t)i * a->dim, a->x + (size_t)a->index[i] * a->dim,
               a->dim * sizeof *a->y);
}

void TD_OP(gather)(const struct td_device *d, const struct td_gather_args *a) {
    td_threads_run(d->threads, gather_rows, a, a->n);
}

static void shard_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_add_shards_args *a = arg;
    for (size_t i = (size_t)begin * a->dim; i < (size_t)end * a->dim; i++)
        a->y[i] = tree_sum(a->shard + i, (size_t)a->n * a->dim, a->shards);
}

void TD_OP(add_shards)(const struct td_device *d, const struct td_add_shards_args *a) {
    td_threads_run(d->threads, shard_rows, a, a->n);
}

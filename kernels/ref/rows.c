/* Ops on single rows: embedding, norm, gather, shard sums. */
#include "kernels/ref/math.h"
#include "kernels/ref/op.h"

static void embed_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_embed_args *a = arg;
    size_t hidden = a->w->cols;
    for (uint32_t i = begin; i < end; i++) {
        float *x = a->x + i * TD_HC_STREAMS * hidden;
        td_weight_row(a->w, (uint32_t)a->ids[i], x);
        for (uint32_t s = 1; s < TD_HC_STREAMS; s++)
            memcpy(x + s * hidden, x, hidden * sizeof *x);
    }
}

void TD_OP(embed)(const struct td_device *d, const struct td_embed_args *a) {
    td_threads_run(d->threads, embed_rows, a, a->n);
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

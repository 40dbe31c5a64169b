/* Rotary position embedding, interleaved pairs. */
#include "kernels/ref/angle.h"
#include "kernels/cpu/op.h"

static void angle_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_rope_angles_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        rope_angles_row(a->row[i].pos, a->freq, a->cs + (size_t)i * TD_ROPE_DIM);
}

void TD_OP(rope_angles)(const struct td_device *d, const struct td_rope_angles_args *a) {
    td_threads_run(d->threads, angle_rows, a, a->n);
}

static void rotate_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_rope_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t h = 0; h < a->heads; h++) {
            float *x = a->x + ((size_t)i * a->heads + h) * a->dim;
            rope_row(x + a->dim - TD_ROPE_DIM, a->cs + (size_t)i * TD_ROPE_DIM, a->inverse);
        }
}

void TD_OP(rope)(const struct td_device *d, const struct td_rope_args *a) {
    td_threads_run(d->threads, rotate_rows, a, a->n);
}

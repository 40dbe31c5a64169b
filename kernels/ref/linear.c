/* Matrix products: linears, and the same for rows grouped by expert. */
#include "kernels/ref/op.h"
#include "kernels/ref/sum.h"

struct outputs {
    const struct td_matrix *w;
    const float *x;
    size_t x_stride, y_stride;
    const uint32_t *x_row; /* NULL: rows follow each other */
    float *y;
    uint32_t n;
};

/* Output o of every row. The weights of an output are decoded in pieces of whole blocks. */
static void output(const struct outputs *p, uint32_t o) {
    for (uint32_t begin = 0; begin < p->w->cols; begin += TD_BLOCK) {
        uint32_t k = p->w->cols - begin < TD_BLOCK ? p->w->cols - begin : TD_BLOCK;
        float w[TD_BLOCK];
        for (uint32_t i = 0; i < k; i++)
            w[i] = td_matrix_value(p->w, o, begin + i);
        for (uint32_t r = 0; r < p->n; r++) {
            const float *x = p->x + (p->x_row ? p->x_row[r] : r) * p->x_stride + begin;
            float *y = p->y + r * p->y_stride + o, sum = block_sum(x, 1, w, 1, k);
            *y = begin == 0 ? sum : *y + sum;
        }
    }
}

static void linear_outputs(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_linear_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const struct td_linear_part *part = a->part;
        uint32_t o = i;
        for (; o >= part->w->rows; part++)
            o -= part->w->rows;
        output(&(struct outputs){.w = part->w,
                                 .x = a->x + part->x_at,
                                 .x_stride = a->x_stride,
                                 .y = part->y,
                                 .y_stride = part->y_stride,
                                 .n = a->n},
               o);
    }
}

void TD_OP(linear)(const struct td_device *d, const struct td_linear_args *a) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < a->parts; i++)
        total += a->part[i].w->rows;
    td_threads_run(d->threads, linear_outputs, a, total);
}

static void expert_outputs(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_expert_linear_args *a = arg;
    uint32_t rows = a->w[0][0].rows;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t o = i % rows, e = i / rows % a->experts, part = i / rows / a->experts;
        uint32_t first = a->offset[e];
        struct outputs p = {.w = &a->w[part][e],
                            .x_stride = a->x_stride,
                            .y_stride = rows,
                            .y = a->y[part] + (size_t)first * rows,
                            .n = a->offset[e + 1] - first};
        p.x = a->x_row ? a->x : a->x + first * a->x_stride;
        p.x_row = a->x_row ? a->x_row + first : NULL;
        output(&p, o);
    }
}

void TD_OP(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    td_threads_run(d->threads, expert_outputs, a, a->w[0][0].rows * a->experts * a->parts);
}

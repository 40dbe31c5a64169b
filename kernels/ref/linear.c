/* Matrix products: linears, and the same for rows grouped by expert. */
#include "kernels/ref/op.h"
#include "kernels/ref/product.h"

enum { ROW_CHUNK = 96 }; /* rows of one piece: a multiple of PRODUCT_ROWS */

static uint32_t panels(const struct td_matrix *w) {
    return (w->rows + TD_PANEL - 1) / TD_PANEL;
}

/* Rows x[0..n-1] against one panel; y points at the panel's first output of row 0. */
static void panel_rows(const struct td_matrix *w, uint32_t panel, const float *const *x, uint32_t n,
                       float *y, size_t y_stride) {
    uint32_t left = w->rows - panel * TD_PANEL;
    float edge[PRODUCT_ROWS * TD_PANEL];
    struct product p = {
        .x_step = 1,
        .w = w->panels + (size_t)panel * w->cols * TD_PANEL,
        .w_step = TD_PANEL,
        .k = w->cols,
        .y = left >= TD_PANEL ? y : edge,
        .y_step = left >= TD_PANEL ? y_stride : TD_PANEL,
    };
    for (uint32_t i = 0; i < n; i++)
        p.x[i] = x[i];
    product16(&p, n);
    if (left >= TD_PANEL) return;
    for (uint32_t i = 0; i < n; i++)
        memcpy(y + i * y_stride, edge + i * TD_PANEL, left * sizeof *edge);
}

static void linear_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_linear_args *a = arg;
    uint32_t chunks = (a->n + ROW_CHUNK - 1) / ROW_CHUNK;
    for (uint32_t piece = begin; piece < end; piece++) {
        uint32_t panel = piece / chunks, row = piece % chunks * ROW_CHUNK;
        const struct td_linear_part *part = a->part;
        for (; panel >= panels(part->w); part++)
            panel -= panels(part->w);
        uint32_t stop = a->n - row < ROW_CHUNK ? a->n : row + ROW_CHUNK;
        for (; row < stop; row += PRODUCT_ROWS) {
            const float *x[PRODUCT_ROWS];
            uint32_t m = stop - row < PRODUCT_ROWS ? stop - row : PRODUCT_ROWS;
            for (uint32_t i = 0; i < m; i++)
                x[i] = a->x + (row + i) * a->x_stride;
            panel_rows(part->w, panel, x, m,
                       part->y + row * part->y_stride + (size_t)panel * TD_PANEL, part->y_stride);
        }
    }
}

void TD_OP(linear)(const struct td_device *d, const struct td_linear_args *a) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < a->parts; i++)
        total += panels(a->part[i].w);
    td_threads_run(d->threads, linear_pieces, a, total * ((a->n + ROW_CHUNK - 1) / ROW_CHUNK));
}

static void expert_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_expert_linear_args *a = arg;
    uint32_t per_expert = panels(&a->w[0][0]);
    for (uint32_t piece = begin; piece < end; piece++) {
        uint32_t e = piece / (per_expert * a->parts), part = piece / per_expert % a->parts;
        uint32_t panel = piece % per_expert, stop = a->offset[e + 1];
        const struct td_matrix *w = &a->w[part][e];
        for (uint32_t row = a->offset[e]; row < stop; row += PRODUCT_ROWS) {
            const float *x[PRODUCT_ROWS];
            uint32_t m = stop - row < PRODUCT_ROWS ? stop - row : PRODUCT_ROWS;
            for (uint32_t i = 0; i < m; i++)
                x[i] = a->x + (a->x_row ? a->x_row[row + i] : row + i) * a->x_stride;
            panel_rows(w, panel, x, m,
                       a->y[part] + (size_t)row * w->rows + (size_t)panel * TD_PANEL, w->rows);
        }
    }
}

void TD_OP(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    td_threads_run(d->threads, expert_pieces, a, panels(&a->w[0][0]) * a->parts * a->experts);
}

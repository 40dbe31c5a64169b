/* Matrix products: linears, and the same for rows grouped by expert.
 *
 * A piece is a chunk of rows against a group of panels. Chunks are outermost, so that the rows of
 * one chunk stay in the cache while the weights stream past them once; with one row the pieces are
 * groups of panels and the product runs at the speed of reading weights. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/tile.h"

enum {
    ROW_CHUNK = 96,             /* rows of one piece: a multiple of TILE_ROWS */
    PANEL_GROUP = TD_WIDTH / 2, /* panels of one piece: what a tile of one row takes together */
};

static uint32_t groups(const struct td_matrix *w) {
    return (td_matrix_panels(w) + PANEL_GROUP - 1) / PANEL_GROUP;
}

/* The rows of t against panel group `group`; y is output 0 of row 0. */
static void group_rows(const struct td_matrix *w, uint32_t group, struct tile *t, uint32_t rows,
                       float *y, size_t y_stride) {
    uint32_t panel = group * PANEL_GROUP, n = td_matrix_panels(w) - panel;
    n = n < PANEL_GROUP ? n : PANEL_GROUP;
    const enum tile_kind kind = w->bf16 ? TILE_BF16 : TILE_FP32;
    uint32_t left = w->rows - panel * TD_PANEL, whole = left / TD_PANEL < n ? left / TD_PANEL : n;
    t->k = w->cols;
    t->w_step = w->bf16 ? TD_PANEL / 2 : TD_PANEL;
    t->w_panel = w->cols * t->w_step;
    t->w = (const float *)w->panels + panel * t->w_panel;
    t->y = y + (size_t)panel * TD_PANEL;
    t->y_step = y_stride;
    if (whole > 0) tile_run(t, kind, rows, whole);
    if (whole == n) return;
    float edge[TILE_ROWS * TD_PANEL];
    y = t->y + (size_t)whole * TD_PANEL;
    t->w += whole * t->w_panel;
    t->y = edge;
    t->y_step = TD_PANEL;
    tile_run(t, kind, rows, 1);
    for (uint32_t i = 0; i < rows; i++)
        memcpy(y + i * y_stride, edge + i * TD_PANEL, left % TD_PANEL * sizeof *edge);
}

struct job {
    const struct td_linear_args *a;
    uint32_t chunks, groups; /* pieces: chunks * groups of all parts */
};

static void linear_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct job *job = arg;
    const struct td_linear_args *a = job->a;
    struct tile t;
    t.add = false;
    for (uint32_t piece = begin; piece < end; piece++) {
        uint32_t group = piece % job->groups, row = piece / job->groups * ROW_CHUNK;
        uint32_t stop = a->n - row < ROW_CHUNK ? a->n : row + ROW_CHUNK;
        const struct td_linear_part *part = a->part;
        for (; group >= groups(part->w); part++)
            group -= groups(part->w);
        for (; row < stop; row += TILE_ROWS) {
            uint32_t m = stop - row < TILE_ROWS ? stop - row : TILE_ROWS;
            for (uint32_t i = 0; i < m; i++)
                t.x[i] = a->x + (row + i) * a->x_stride + part->x_at;
            group_rows(part->w, group, &t, m, part->y + row * part->y_stride, part->y_stride);
        }
    }
}

void TD_OP(linear)(const struct td_device *d, const struct td_linear_args *a) {
    struct job job = {a, (a->n + ROW_CHUNK - 1) / ROW_CHUNK, 0};
    for (uint32_t i = 0; i < a->parts; i++)
        job.groups += groups(a->part[i].w);
    td_threads_run(d->threads, linear_pieces, &job, job.chunks * job.groups);
}

/* Pieces: experts, their parts, groups of panels. Few rows an expert: no chunks. */
static void expert_pieces(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_expert_linear_args *a = arg;
    uint32_t per_expert = groups(&a->w[0][0]);
    struct tile t;
    t.add = false;
    for (uint32_t piece = begin; piece < end; piece++) {
        uint32_t e = piece / (per_expert * a->parts), part = piece / per_expert % a->parts;
        uint32_t stop = a->offset[e + 1];
        const struct td_matrix *w = &a->w[part][e];
        for (uint32_t row = a->offset[e]; row < stop; row += TILE_ROWS) {
            uint32_t m = stop - row < TILE_ROWS ? stop - row : TILE_ROWS;
            for (uint32_t i = 0; i < m; i++)
                t.x[i] = a->x + (a->x_row ? a->x_row[row + i] : row + i) * a->x_stride;
            group_rows(w, piece % per_expert, &t, m, a->y[part] + (size_t)row * w->rows, w->rows);
        }
    }
}

void TD_OP(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    td_threads_run(d->threads, expert_pieces, a, groups(&a->w[0][0]) * a->parts * a->experts);
}

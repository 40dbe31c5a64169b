/* Matrix products in the reference's order: block sums of 128, one fmaf chain each. Weights are
 * decoded from their stored form while a block of them is brought to shared memory, so any format
 * and any cut of a matrix runs here. */
#include "kernels/cuda/op.h"

enum { ROWS = 16, OUTS = 16, THREADS = ROWS * OUTS, EXPERT_TILES = 8 };

struct part {
    struct td_weight w;
    uint32_t rows, cols, row, col;
    float *y;
    size_t y_stride, x_at;
};
struct parts {
    const float *x;
    size_t x_stride;
    uint32_t n;
    struct part part[TD_LINEAR_PARTS];
};

struct tile {
    float x[ROWS][TD_BLOCK + 1], w[OUTS][TD_BLOCK + 1];
};

/* y of one row and output a thread; row_at[r] is the input row of tile row r, or NULL. */
static __device__ void multiply(const float *x, size_t x_stride, const uint32_t *row_at,
                                uint32_t first, uint32_t rows, const struct part *p,
                                uint32_t first_out, struct tile *tile) {
    uint32_t t = threadIdx.x, r = t / OUTS, o = t % OUTS;
    float total = 0.0f;
    for (uint32_t begin = 0; begin < p->cols; begin += TD_BLOCK) {
        uint32_t k = p->cols - begin < TD_BLOCK ? p->cols - begin : TD_BLOCK;
        __syncthreads();
        for (uint32_t i = t; i < ROWS * TD_BLOCK; i += THREADS) {
            uint32_t at = i / TD_BLOCK, c = i % TD_BLOCK;
            if (c >= k) continue;
            if (at < rows) {
                uint32_t from = row_at ? row_at[first + at] : first + at;
                tile->x[at][c] = x[from * x_stride + begin + c];
            }
            if (first_out + at < p->rows)
                tile->w[at][c] =
                    td_weight_value(&p->w, p->row + first_out + at, p->col + begin + c);
        }
        __syncthreads();
        float sum = 0.0f;
        if (r < rows && first_out + o < p->rows)
            for (uint32_t i = 0; i < k; i++)
                sum = fmaf(tile->x[r][i], tile->w[o][i], sum);
        total = begin == 0 ? sum : total + sum;
    }
    if (r < rows && first_out + o < p->rows)
        p->y[(first + r) * p->y_stride + first_out + o] = total;
}

static __global__ void linear_tiles(struct parts a) {
    __shared__ struct tile tile;
    const struct part *p = &a.part[blockIdx.z];
    uint32_t first = blockIdx.y * ROWS, out = blockIdx.x * OUTS;
    if (out >= p->rows) return; /* the whole block */
    uint32_t rows = a.n - first < ROWS ? a.n - first : ROWS;
    multiply(a.x + p->x_at, a.x_stride, NULL, first, rows, p, out, &tile);
}

void TD_PLAIN(linear)(const struct td_device *d, const struct td_linear_args *a) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    uint32_t most = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        const struct td_matrix *w = a->part[i].w;
        p.part[i].w = w->stored;
        p.part[i].rows = w->rows;
        p.part[i].cols = w->cols;
        p.part[i].row = w->row;
        p.part[i].col = w->col;
        p.part[i].y = a->part[i].y;
        p.part[i].y_stride = a->part[i].y_stride;
        p.part[i].x_at = a->part[i].x_at;
        most = w->rows > most ? w->rows : most;
    }
    dim3 grid(td_ceil(most, OUTS), td_ceil(a->n, ROWS), a->parts);
    if (a->n && a->parts) TD_LAUNCH(d, "linear", linear_tiles, grid, THREADS, 0, p);
}

struct experts {
    const float *x;
    size_t x_stride;
    const uint32_t *x_row, *offset;
    uint32_t parts;
    const struct td_matrix *w[2];
    float *y[2];
};

static __global__ void expert_tiles(struct experts a) {
    __shared__ struct tile tile;
    uint32_t e = blockIdx.z / a.parts, which = blockIdx.z % a.parts, stop = a.offset[e + 1];
    const struct td_matrix *w = &a.w[which][e];
    struct part p = {.w = w->stored};
    p.rows = w->rows;
    p.cols = w->cols;
    p.row = w->row;
    p.col = w->col;
    p.y = a.y[which];
    p.y_stride = w->rows;
    for (uint32_t first = a.offset[e] + blockIdx.y * ROWS; first < stop;
         first += gridDim.y * ROWS) {
        uint32_t rows = stop - first < ROWS ? stop - first : ROWS;
        multiply(a.x, a.x_stride, a.x_row, first, rows, &p, blockIdx.x * OUTS, &tile);
    }
}

void TD_PLAIN(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    struct experts p = {.x = a->x, .x_stride = a->x_stride, .x_row = a->x_row, .offset = a->offset};
    p.parts = a->parts;
    for (uint32_t i = 0; i < a->parts; i++) {
        p.w[i] = a->w[i][0].device;
        p.y[i] = a->y[i];
    }
    dim3 grid(td_ceil(a->w[0][0].rows, OUTS), EXPERT_TILES, a->experts * a->parts);
    TD_LAUNCH(d, "expert_linear", expert_tiles, grid, THREADS, 0, p);
}

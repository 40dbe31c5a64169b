/* Matrix products on the tensor cores, bf16 inputs: the fast form of linear.cu.
 *
 * Weights are the 16 rows of a product, tokens its 8 columns, so that one token wastes little. A
 * weight goes from memory to registers as it is stored, 16 bytes a thread, and becomes bf16 there
 * (exactly; NVFP4's common factor is applied to the sum). Inputs are rounded to bf16; where weights
 * are bf16 (gate, compressors, head: what stays fp32 in the model's own code) what the rounding
 * left is a second bf16, multiplied too, low part first.
 *
 * One order of summation whatever the number of rows: K is cut into 8 contiguous parts of whole
 * 128s, a part is one chain of products in ascending k, and the parts are added in ascending order.
 * The 8 warps of a block are the parts. */
#include "kernels/cuda/mma.h"
#include "kernels/cuda/op.h"

enum { PARTS = 8, THREADS = 32 * PARTS, COLS = 8 };

struct part {
    struct td_weight w;
    uint32_t rows, cols, row, col;
    float *y;
    size_t y_stride;
};

/* How a thread's 16 bytes of a weight row are read: `len` values. */
template <int FORMAT> struct piece;

template <> struct piece<TD_W_BF16> {
    enum { len = 8 };
    uint4 raw;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        raw = *(const uint4 *)((const uint16_t *)w->data + (size_t)r * w->cols + c);
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = 0;
    }
    /* Values 4 j .. 4 j + 3. */
    __device__ void pairs(int j, uint32_t *low, uint32_t *high) const {
        *low = j ? raw.z : raw.x;
        *high = j ? raw.w : raw.y;
    }
};

template <> struct piece<TD_W_FP8_BLOCK> {
    enum { len = 16 };
    uint4 raw;
    uint32_t scale;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        raw = *(const uint4 *)((const uint8_t *)w->data + (size_t)r * w->cols + c);
        scale = td_e8m0_pair(
            ((const uint8_t *)w->scale)[(size_t)(r / 128) * ((w->cols + 127) / 128) + c / 128]);
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale = 0;
    }
    __device__ void pairs(int j, uint32_t *low, uint32_t *high) const {
        td_e4m3_pairs(j == 0 ? raw.x : j == 1 ? raw.y : j == 2 ? raw.z : raw.w, scale, low, high);
    }
};

template <> struct piece<TD_W_FP4> {
    enum { len = 32 };
    uint4 raw;
    uint32_t scale;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        raw = *(const uint4 *)((const uint8_t *)w->data + at / 2);
        scale = td_e8m0_pair(((const uint8_t *)w->scale)[at / 32]);
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale = 0;
    }
    __device__ void pairs(int j, uint32_t *low, uint32_t *high) const {
        uint32_t v = j / 2 == 0 ? raw.x : j / 2 == 1 ? raw.y : j / 2 == 2 ? raw.z : raw.w;
        td_e2m1_pairs(v >> j % 2 * 16 & 0xffffu, scale, low, high);
    }
};

template <> struct piece<TD_W_NVFP4> {
    enum { len = 32 };
    uint4 raw;
    uint32_t scale[2];
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        raw = *(const uint4 *)((const uint8_t *)w->data + at / 2);
        uint32_t two = *(const uint16_t *)((const uint8_t *)w->scale + at / 16);
        scale[0] = td_e4m3_pair((uint8_t)two);
        scale[1] = td_e4m3_pair((uint8_t)(two >> 8));
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale[0] = scale[1] = 0;
    }
    __device__ void pairs(int j, uint32_t *low, uint32_t *high) const {
        uint32_t v = j / 2 == 0 ? raw.x : j / 2 == 1 ? raw.y : j / 2 == 2 ? raw.z : raw.w;
        td_e2m1_pairs(v >> j % 2 * 16 & 0xffffu, scale[j / 4], low, high);
    }
};

/* A thread's pieces, at its k, times the inputs. */
template <int FORMAT, int MT, int NT>
static __device__ void step(const float *const in[NT], uint32_t k, uint32_t end, uint32_t rows,
                            const struct piece<FORMAT> w[MT][2], float c[MT][NT][4]) {
#pragma unroll
    for (int j = 0; j < piece<FORMAT>::len / 4; j++) {
        uint32_t b[NT][2], rest[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
            if (in[n] && k < end) v = *(const float4 *)(in[n] + k + 4 * j);
            b[n][0] = td_bf16_pair(v.x, v.y);
            b[n][1] = td_bf16_pair(v.z, v.w);
            if (FORMAT == TD_W_BF16) {
                rest[n][0] = td_bf16_rest(v.x, v.y, b[n][0]);
                rest[n][1] = td_bf16_rest(v.z, v.w, b[n][1]);
            }
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
            uint32_t a[4];
            w[m][0].pairs(j, &a[0], &a[2]);
            w[m][1].pairs(j, &a[1], &a[3]);
#pragma unroll
            for (int n = 0; n < NT; n++)
                if (n == 0 || n * COLS < rows) {
                    if (FORMAT == TD_W_BF16) td_mma(c[m][n], a, rest[n]);
                    td_mma(c[m][n], a, b[n]);
                }
        }
    }
}

/* Outputs out .. out + 16 MT - 1 of `rows` (up to 8 NT) input rows; row_at as in linear.cu.
 * `sums` is shared memory [PARTS][16][8 NT]. */
template <int FORMAT, int MT, int NT>
static __device__ void multiply(const float *x, size_t x_stride, const uint32_t *row_at,
                                uint32_t first, uint32_t rows, const struct part *p, uint32_t out,
                                float *sums) {
    typedef struct piece<FORMAT> piece_t;
    enum { LEN = piece_t::len, CHUNK = 4 * LEN, AHEAD = NT > 1 ? 1 : MT > 1 ? 2 : 128 / CHUNK };
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t len = (p->cols + 128 * PARTS - 1) / (128 * PARTS) * 128;
    uint32_t begin = warp * len, end = begin + len < p->cols ? begin + len : p->cols;
    float c[MT][NT][4];
    const float *in[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint32_t r = n * COLS + g;
        in[n] = r < rows ? x + (row_at ? row_at[first + r] : first + r) * x_stride : NULL;
#pragma unroll
        for (int m = 0; m < MT; m++)
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
    }
    for (uint32_t from = begin; from < end; from += AHEAD * CHUNK) {
        piece_t w[AHEAD][MT][2]; /* all on their way before the first is used */
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t r = out + m * 16 + h * 8 + g, k = from + i * CHUNK + t * LEN;
                    if (r < p->rows && k < end)
                        w[i][m][h].load(&p->w, p->row + r, p->col + k);
                    else
                        w[i][m][h].zero();
                }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            step<FORMAT, MT, NT>(in, from + i * CHUNK + t * LEN, end, rows, w[i], c);
    }
    float factor = FORMAT == TD_W_NVFP4 ? p->w.scale2 : 1.0f;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t o = g + i / 2 * 8, r = n * COLS + 2 * t + i % 2;
                sums[(warp * COLS * NT + r) * 16 + o] = c[m][n][i];
            }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < 16 * COLS * NT; i += THREADS) {
            uint32_t o = out + m * 16 + i % 16, r = i / 16;
            if (r >= rows || o >= p->rows) continue;
            float total = sums[i];
            for (uint32_t s = 1; s < PARTS; s++)
                total += sums[s * 16 * COLS * NT + i];
            if (FORMAT == TD_W_NVFP4) total *= factor;
            p->y[(first + r) * p->y_stride + o] = total;
        }
    }
}

template <int MT, int NT>
static __device__ void multiply_any(const float *x, size_t x_stride, const uint32_t *row_at,
                                    uint32_t first, uint32_t rows, const struct part *p,
                                    uint32_t out, float *sums) {
    if (p->w.format == TD_W_BF16)
        multiply<TD_W_BF16, MT, NT>(x, x_stride, row_at, first, rows, p, out, sums);
    else if (p->w.format == TD_W_FP8_BLOCK)
        multiply<TD_W_FP8_BLOCK, MT, NT>(x, x_stride, row_at, first, rows, p, out, sums);
    else if (p->w.format == TD_W_FP4)
        multiply<TD_W_FP4, MT, NT>(x, x_stride, row_at, first, rows, p, out, sums);
    else
        multiply<TD_W_NVFP4, MT, NT>(x, x_stride, row_at, first, rows, p, out, sums);
}

/* ---- linears ---- */

struct parts {
    const float *x;
    size_t x_stride;
    uint32_t n;
    struct part part[TD_LINEAR_PARTS];
};

template <int NT> static __global__ void __launch_bounds__(THREADS) linear_tiles(struct parts a) {
    __shared__ float sums[PARTS * 16 * COLS * NT];
    const struct part *p = &a.part[blockIdx.z];
    uint32_t first = blockIdx.y * COLS * NT, out = blockIdx.x * 16;
    if (out >= p->rows) return; /* the whole block */
    uint32_t rows = a.n - first < COLS * NT ? a.n - first : COLS * NT;
    multiply_any<1, NT>(a.x, a.x_stride, NULL, first, rows, p, out, sums);
}

/* Whether a thread's pieces are whole and aligned. */
static bool is_fast(const struct td_matrix *w, const float *x, size_t x_stride) {
    return w->stored.format != TD_W_F32 && w->cols % 32 == 0 && w->stored.cols % 32 == 0 &&
           w->col % 32 == 0 && (uintptr_t)x % 16 == 0 && x_stride % 4 == 0;
}

static struct part part_of(const struct td_matrix *w, float *y, size_t y_stride) {
    struct part p = {.w = w->stored};
    p.rows = w->rows;
    p.cols = w->cols;
    p.row = w->row;
    p.col = w->col;
    p.y = y;
    p.y_stride = y_stride;
    return p;
}

void TD_FAST(linear)(const struct td_device *d, const struct td_linear_args *a) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    struct td_linear_args rest = *a;
    uint32_t most = 0, fast = 0;
    rest.parts = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        const struct td_matrix *w = a->part[i].w;
        if (!is_fast(w, a->x, a->x_stride)) {
            rest.part[rest.parts++] = a->part[i];
            continue;
        }
        p.part[fast++] = part_of(w, a->part[i].y, a->part[i].y_stride);
        most = w->rows > most ? w->rows : most;
    }
    if (rest.parts) TD_PLAIN(linear)(d, &rest);
    if (!fast || !a->n) return;
    if (a->n <= COLS)
        TD_LAUNCH(d, "linear", linear_tiles<1>, dim3(td_ceil(most, 16), 1, fast), THREADS, 0, p);
    else
        TD_LAUNCH(d, "linear", linear_tiles<4>,
                  dim3(td_ceil(most, 16), td_ceil(a->n, 4 * COLS), fast), THREADS, 0, p);
}

/* ---- experts ---- */

struct experts {
    const float *x;
    size_t x_stride;
    const uint32_t *x_row, *offset;
    uint32_t parts, experts, outs;
    const struct td_matrix *w[2];
    float *y[2];
};

enum { EXPERT_MT = 2, EXPERT_NT = 4, EXPERT_OUTS = 16 * EXPERT_MT, EXPERT_ROWS = COLS * EXPERT_NT };

/* Experts that have rows, ascending, and the number of pieces of work before each: a piece is a
 * part, up to EXPERT_ROWS rows and EXPERT_OUTS outputs. */
struct work {
    uint16_t expert[TD_MAX_EXPERTS];
    uint32_t before[TD_MAX_EXPERTS + 1], count;
};

static __device__ void list_work(const struct experts *a, uint32_t per_rows, struct work *w) {
    if (threadIdx.x == 0) w->count = 0;
    for (uint32_t e = threadIdx.x; e < a->experts; e += THREADS)
        w->before[e + 1] = td_ceil(a->offset[e + 1] - a->offset[e], EXPERT_ROWS) * per_rows;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t count = 0, all = 0;
        for (uint32_t e = 0; e < a->experts; e++) {
            uint32_t own = w->before[e + 1];
            if (own == 0) continue;
            w->before[count] = all;
            w->expert[count++] = (uint16_t)e;
            all += own;
        }
        w->before[count] = all;
        w->count = count;
    }
    __syncthreads();
}

/* As many blocks as the chip holds; each takes every gridDim.x-th piece. */
static __global__ void __launch_bounds__(THREADS, 2) expert_tiles(struct experts a) {
    __shared__ float sums[PARTS * 16 * COLS * EXPERT_NT];
    __shared__ struct work work;
    uint32_t outs = td_ceil(a.outs, EXPERT_OUTS), per_rows = outs * a.parts;
    list_work(&a, per_rows, &work);
    for (uint32_t i = blockIdx.x; i < work.before[work.count]; i += gridDim.x) {
        uint32_t lo = 0, hi = work.count - 1;
        while (lo < hi) { /* the last one with before <= i */
            uint32_t mid = (lo + hi + 1) / 2;
            if (work.before[mid] <= i)
                lo = mid;
            else
                hi = mid - 1;
        }
        uint32_t e = work.expert[lo], left = i - work.before[lo], stop = a.offset[e + 1];
        uint32_t first = a.offset[e] + left / per_rows * EXPERT_ROWS,
                 which = left % per_rows / outs;
        const struct td_matrix *w = &a.w[which][e];
        struct part p = {.w = w->stored};
        p.rows = w->rows;
        p.cols = w->cols;
        p.row = w->row;
        p.col = w->col;
        p.y = a.y[which];
        p.y_stride = w->rows;
        uint32_t rows = stop - first < EXPERT_ROWS ? stop - first : EXPERT_ROWS;
        uint32_t out = left % outs * EXPERT_OUTS;
        if (rows <= COLS)
            multiply_any<EXPERT_MT, 1>(a.x, a.x_stride, a.x_row, first, rows, &p, out, sums);
        else
            multiply_any<EXPERT_MT, EXPERT_NT>(a.x, a.x_stride, a.x_row, first, rows, &p, out,
                                               sums);
    }
}

void TD_FAST(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    struct experts p = {.x = a->x, .x_stride = a->x_stride, .x_row = a->x_row, .offset = a->offset};
    for (uint32_t i = 0; i < a->parts; i++)
        if (!is_fast(&a->w[i][0], a->x, a->x_stride)) {
            TD_PLAIN(expert_linear)(d, a);
            return;
        }
    p.parts = a->parts;
    p.experts = a->experts;
    p.outs = a->w[0][0].rows;
    for (uint32_t i = 0; i < a->parts; i++) {
        p.w[i] = a->w[i][0].device;
        p.y[i] = a->y[i];
    }
    TD_LAUNCH(d, "expert_linear", expert_tiles, 2 * td_cuda_of(d)->processors, THREADS, 0, p);
}

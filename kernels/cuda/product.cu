/* Matrix products on the tensor cores with few rows, and the choice of a form; product.h has the
 * order of summation. The 8 warps of a block are the parts of K: a step of few rows has few
 * outputs, and its time is that of reading the weights. */
#include "kernels/cuda/product.h"

enum { THREADS = TD_PRODUCT_THREADS, COLS = TD_COLS, MANY = 64 };

/* What the warps, the parts of K, have of 16 outputs is added and written, of the first `outs`. */
template <int FORMAT, int NT>
static __device__ void add_parts(const float c[NT][4], uint32_t first, uint32_t rows,
                                 const struct td_part *p, uint32_t out, uint32_t outs,
                                 float *sums) {
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float factor = td_product_factor<FORMAT>(&p->w);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t o = g + i / 2 * 8, r = n * COLS + 2 * t + i % 2;
            sums[(warp * COLS * NT + r) * 16 + o] = c[n][i];
        }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 16 * COLS * NT; i += THREADS) {
        uint32_t o = out + i % 16, r = i / 16;
        float total = 0.0f;
        if (r >= rows || i % 16 >= outs || o >= p->rows) continue;
        for (uint32_t s = 0; s < TD_PARTS; s++)
            total += sums[s * 16 * COLS * NT + i];
        p->y[(first + r) * p->y_stride + o] = total * factor;
    }
}

/* Outputs out .. out + 16 MT - 1 of `rows` (up to 8 NT) input rows. `sums` is shared memory
 * [PARTS][16][8 NT]. */
template <int FORMAT, int MT, int NT>
static __device__ void multiply(const float *x, size_t x_stride, uint32_t first, uint32_t rows,
                                const struct td_part *p, uint32_t out, float *sums) {
    typedef struct td_piece<FORMAT> piece_t;
    enum {
        LEN = piece_t::LEN,
        CHUNK = 4 * LEN,
        AHEAD = CHUNK > 64                       ? 1
                : NT == 1 && FORMAT == TD_W_BF16 ? 4
                                                 : 2
    };
    uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t len = td_part_len(p->cols);
    uint32_t begin = warp * len, end = begin + len < p->cols ? begin + len : p->cols;
    float c[MT][NT][4], total[MT][NT][4];
    const float *in[NT];
    piece_t w[AHEAD][MT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint32_t r = n * COLS + g;
        in[n] = r < rows ? x + (first + r) * x_stride : NULL;
#pragma unroll
        for (int m = 0; m < MT; m++)
            for (int i = 0; i < 4; i++)
                c[m][n][i] = total[m][n][i] = 0.0f;
    }
    auto load = [&](int i, uint32_t from) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t r = out + m * 16 + h * 8 + g, k = from + t * LEN;
                if (r < p->rows && k < end)
                    w[i][m][h].load(&p->w, p->row + r, p->col + k);
                else
                    w[i][m][h].zero();
            }
    };
    /* bf16: all of a 128 at once; narrower ones are asked for as they are used. */
    constexpr bool rolling = !td_two<FORMAT>::inputs;
#pragma unroll
    for (int i = 0; rolling && i < AHEAD; i++)
        load(i, begin + i * CHUNK);
    for (uint32_t from = begin; from < end; from += AHEAD * CHUNK) {
#pragma unroll
        for (int i = 0; !rolling && i < AHEAD; i++)
            load(i, from + i * CHUNK);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
#pragma unroll
            for (int j = 0; j < LEN / 8; j++) {
                uint32_t k = from + i * CHUNK + t * LEN + 8 * j;
                uint4 v[NT], rest[NT];
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float4 lo = {0.0f, 0.0f, 0.0f, 0.0f}, hi = lo;
                    if (in[n] && k < end) {
                        lo = *(const float4 *)(in[n] + k);
                        hi = *(const float4 *)(in[n] + k + 4);
                    }
                    td_input_word<FORMAT>(lo, hi, &v[n], &rest[n]);
                }
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    struct td_word low, high;
                    w[i][m][0].word(j, &low);
                    w[i][m][1].word(j, &high);
#pragma unroll
                    for (int n = 0; n < NT; n++)
                        if (n == 0 || n * COLS < rows)
                            td_word_product<FORMAT>(c[m][n], &low, &high, v[n], rest[n]);
                }
            }
            if (rolling) load(i, from + (AHEAD + i) * CHUNK);
        }
        if (FORMAT == TD_W_F32 && (from - begin) % 128 + AHEAD * CHUNK == 128) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
                    td_end_part(total[m][n], c[m][n]);
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            td_end_part(total[m][n], c[m][n]);
#pragma unroll
    for (int m = 0; m < MT; m++)
        add_parts<FORMAT, NT>(total[m], first, rows, p, out + m * 16, 16, sums);
}

/* ---- fp32 weights and up to 8 rows: the streams' mix, whose few outputs have a long K ---- */

/* The parts of K are eight blocks side by side, since reading rows and weights would take one processor
 * ten times as long; a warp has every fourth 128 of a part, all of them on their way at once. What
 * the parts have meets in the first block's memory. The other 8 rows of a product stay empty, which
 * costs less than half of the blocks would. */
enum { LONG_OUTS = 8, LONG_THREADS = 128, LONG_WARPS = LONG_THREADS / 32, STRETCHES = 4 };
enum { LONG_SUMS = LONG_OUTS * COLS };
struct stretch {
    uint4 w[4][2][32], x[4][2][32]; /* of 32 inputs, 8 rows of 128 bytes by halves */
};
static __host__ __device__ inline uint32_t stretches_of(uint32_t cols) {
    return td_part_len(cols) / 128; /* of a part */
}
static size_t long_shared(uint32_t cols) {
    return LONG_WARPS * STRETCHES * sizeof(struct stretch) +
           (stretches_of(cols) + TD_PARTS) * LONG_SUMS * sizeof(float);
}

/* The 8 values of thread t in a row's 32. */
static __device__ inline void take_eight(const uint4 half[2][32], uint4 v[2]) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    v[0] = half[t / 2][g * 4 + t % 2 * 2];
    v[1] = half[t / 2][g * 4 + t % 2 * 2 + 1];
}

/* Of the 128 inputs of a stretch, outputs g and rows 2 t, 2 t + 1 to c[0], c[1]. */
static __device__ void multiply_stretch(const struct stretch *from, float c[4]) {
    c[0] = c[1] = c[2] = c[3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        struct td_word low, none = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        struct td_piece<TD_W_F32> piece;
        uint4 u[2], v, rest;
        take_eight(from->w[i], piece.raw);
        piece.word(0, &low);
        take_eight(from->x[i], u);
        float4 a = {td_bits_f32(u[0].x), td_bits_f32(u[0].y), td_bits_f32(u[0].z),
                    td_bits_f32(u[0].w)};
        float4 b = {td_bits_f32(u[1].x), td_bits_f32(u[1].y), td_bits_f32(u[1].z),
                    td_bits_f32(u[1].w)};
        td_input_word<TD_W_F32>(a, b, &v, &rest);
        td_word_product<TD_W_F32>(c, &low, &none, v, rest);
    }
}

struct parts {
    const float *x;
    size_t x_stride;
    uint32_t n;
    struct td_part part[TD_LINEAR_PARTS];
};

/* ---- FP8 weights and up to 8 rows ---- */

/* A block asks for the 64 KiB of its weights at once: a warp, which is a part of K, for four pieces
 * of 16 outputs and 128 inputs, of one tile of outputs or of more where K is short, and for the next
 * ones where K is long. */
struct piece {
    uint4 data[2][2][32]; /* 64 inputs; outputs g and g + 8 */
};
enum { PIECES = 4, PIECE = 128, BURST = TD_PARTS * PIECES * sizeof(struct piece) };

/* Pieces of a part in a row of weights; tiles of a block, so that its pieces are whole fours. */
static __host__ __device__ inline uint32_t pieces_of(uint32_t cols) {
    return cols / (TD_PARTS * PIECE);
}
static __host__ __device__ inline uint32_t tiles_of(uint32_t cols) {
    return pieces_of(cols) % 2 ? 4 : pieces_of(cols) % 4 ? 2 : 1;
}
static bool burst_fits(const struct td_device *d, const struct td_matrix *w) {
    return w->stored.format == TD_W_FP8_BLOCK && w->cols % (TD_PARTS * PIECE) == 0 &&
           w->col % PIECE == 0 && td_cuda_of(d)->shared_max > BURST + 8192;
}

static __device__ void multiply_burst(const float *x, size_t x_stride, uint32_t rows,
                                      const struct td_part *p, uint32_t out, float *sums,
                                      struct piece *ring) {
    enum { F = TD_W_FP8_BLOCK };
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t per = pieces_of(p->cols), all = per * tiles_of(p->cols), begin = warp * per * PIECE;
    const float *in = x + (g < rows ? g : 0) * x_stride + begin + t * 16; /* others' sums: nobody's */
    uint32_t last = p->rows - 1;
    uint8_t scale[PIECES][2];
    ring += warp * PIECES;
    auto copy = [&](uint32_t i, uint32_t slot) {
        uint32_t k = p->col + begin + i % per * PIECE, o = out + i / per * 16 + g;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t r = p->row + (o + 8 * h < last ? o + 8 * h : last);
            struct td_source from = td_piece<F>::source(&p->w, r, k + t * 16);
            td_copy_async(&ring[slot].data[0][h][lane], from.data, true);
            td_copy_async(&ring[slot].data[1][h][lane], from.data + 64, true);
            scale[slot][h] = *from.scale;
        }
    };
    auto read = [&](uint32_t i, float4 v[8]) {
        const float *from = in + i % per * PIECE;
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = *(const float4 *)(from + k / 4 * 64 + k % 4 * 4);
    };
#pragma unroll
    for (uint32_t i = 0; i < PIECES; i++) {
        copy(i, i);
        td_copy_commit();
    }
    float c[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
    float4 next[8];
    read(0, next);
    for (uint32_t from = 0; from < all; from += PIECES)
#pragma unroll
        for (uint32_t s = 0; s < PIECES; s++) {
            uint32_t i = from + s;
            uint4 v[4], unused;
#pragma unroll
            for (int k = 0; k < 4; k++)
                td_input_word<F>(next[2 * k], next[2 * k + 1], &v[k], &unused);
            if (i + 1 < all) read(i + 1, next);
            td_copy_wait<PIECES - 1>();
#pragma unroll
            for (int k = 0; k < 2; k++) {
                struct td_piece<F> w[2];
#pragma unroll
                for (int h = 0; h < 2; h++)
                    w[h].take(ring[s].data[k][h][lane], scale[s][h]);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    struct td_word low, high;
                    w[0].word(j, &low);
                    w[1].word(j, &high);
                    td_word_product<F>(c[0], &low, &high, v[2 * k + j], v[2 * k + j]);
                }
            }
            if (i + PIECES < all) copy(i + PIECES, s);
            td_copy_commit();
            if ((i + 1) % per) continue; /* the whole block */
            add_parts<F, 1>(c, 0, rows, p, out + i / per * 16, 16, sums);
            c[0][0] = c[0][1] = c[0][2] = c[0][3] = 0.0f;
        }
    td_copy_wait<0>();
}

static __global__ void __launch_bounds__(THREADS, 2)
    linear_burst(const __grid_constant__ struct parts a) {
    TD_SHARED(struct piece, ring);
    __shared__ float sums[TD_PARTS * 16 * COLS];
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t out = blockIdx.x * 16 * tiles_of(p->cols);
    if (out >= p->rows) return; /* the whole block */
    multiply_burst(a.x + p->x_at, a.x_stride, a.n, p, out, sums, ring);
}

/* ---- the forms ---- */

template <int MT, int NT>
static __global__ void __launch_bounds__(THREADS, NT == 1 ? 3 : 2)
    linear_tiles(const __grid_constant__ struct parts a) {
    __shared__ float sums[TD_PARTS * 16 * COLS * NT];
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t first = blockIdx.y * COLS * NT, out = blockIdx.x * 16 * MT;
    if (out >= p->rows) return; /* the whole block */
    uint32_t rows = a.n - first < COLS * NT ? a.n - first : COLS * NT;
#define FORM(f) multiply<f, MT, NT>(a.x + p->x_at, a.x_stride, first, rows, p, out, sums)
    if (p->w.format == TD_W_F32)
        FORM(TD_W_F32);
    else if (p->w.format == TD_W_BF16)
        FORM(TD_W_BF16);
    else if (p->w.format == TD_W_FP8_BLOCK)
        FORM(TD_W_FP8_BLOCK);
    else if (p->w.format == TD_W_FP4)
        FORM(TD_W_FP4);
    else
        FORM(TD_W_NVFP4);
#undef FORM
}

static __global__ void __launch_bounds__(LONG_THREADS, 1)
    linear_long(const __grid_constant__ struct parts a) {
    TD_SHARED(struct stretch, ring); /* [LONG_WARPS][STRETCHES], then sums of stretches and of parts */
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t own = blockIdx.x % TD_PARTS, out = blockIdx.x / TD_PARTS * LONG_OUTS;
    if (out >= p->rows) return; /* all parts */
    float *sum = (float *)(void *)(ring + LONG_WARPS * STRETCHES);
    float *part = sum + stretches_of(p->cols) * LONG_SUMS;
    uint32_t thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    uint32_t len = td_part_len(p->cols), begin = own * len;
    uint32_t end = begin + len < p->cols ? begin + len : p->cols;
    uint32_t count = begin < end ? td_ceil(end - begin, 128) : 0;
    bool output = out + g < p->rows, row = g < a.n;
    const float *w = (const float *)p->w.data +
                     (size_t)(p->row + out + (output ? g : 0)) * p->w.cols + p->col + 4 * t;
    const float *in = a.x + p->x_at + (row ? g : 0) * a.x_stride + 4 * t;
    ring += warp * STRETCHES;
    auto copy = [&](uint32_t which, uint32_t slot) { /* zeros beyond the end */
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t k = begin + which * 128 + i * 16;
            bool there = which < count && k < end;
            size_t at = there ? k : 0;
            td_copy_async(&ring[slot].w[i / 2][i % 2][lane], w + at, there && output);
            td_copy_async(&ring[slot].x[i / 2][i % 2][lane], in + at, there && row);
        }
        td_copy_commit();
    };
    for (uint32_t i = 0; i < STRETCHES; i++)
        copy(warp + i * LONG_WARPS, i);
    td_pair_sync(); /* all blocks are there */
    for (uint32_t i = warp, slot = 0; i < count; i += LONG_WARPS, slot = (slot + 1) % STRETCHES) {
        float c[4];
        td_copy_wait<STRETCHES - 1>();
        __syncwarp();
        multiply_stretch(&ring[slot], c);
        sum[i * LONG_SUMS + 2 * t * LONG_OUTS + g] = c[0];
        sum[i * LONG_SUMS + (2 * t + 1) * LONG_OUTS + g] = c[1];
        __syncwarp(); /* read by all */
        copy(i + STRETCHES * LONG_WARPS, slot);
    }
    td_copy_wait<0>();
    __syncthreads();
    if (thread < LONG_SUMS) {
        float total = 0.0f;
        for (uint32_t i = 0; i < count; i++)
            total += sum[i * LONG_SUMS + thread];
        ((float *)td_pair_memory(part, 0))[own * LONG_SUMS + thread] = total;
    }
    td_pair_sync();
    if (own != 0 || thread >= LONG_SUMS) return;
    float total = 0.0f;
    for (uint32_t s = 0; s < TD_PARTS; s++)
        total += part[s * LONG_SUMS + thread];
    uint32_t r = thread / LONG_OUTS, o = out + thread % LONG_OUTS;
    if (r < a.n && o < p->rows) p->y[r * p->y_stride + o] = total;
}

static struct parts parts_of(const struct td_linear_args *a, uint32_t *ret_most) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    *ret_most = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        p.part[i] = td_part_of(a->part[i].w, a->part[i].y, a->part[i].y_stride);
        p.part[i].x_at = a->part[i].x_at;
        *ret_most = p.part[i].rows > *ret_most ? p.part[i].rows : *ret_most;
    }
    return p;
}

static void burst(const struct td_device *d, const struct td_linear_args *a) {
    uint32_t most;
    struct parts p = parts_of(a, &most);
    dim3 grid(td_ceil(most, 16 * tiles_of(p.part[0].cols)), 1, a->parts);
    td_cuda_allow_shared(d, (const void *)linear_burst, BURST, "linear");
    TD_LAUNCH(d, "linear", linear_burst, grid, THREADS, BURST, p);
}

static void few(const struct td_device *d, const struct td_linear_args *a) {
    uint32_t most;
    struct parts p = parts_of(a, &most);
    bool long_k = a->n <= COLS;
    for (uint32_t i = 0; i < a->parts; i++)
        long_k = long_k && p.part[i].w.format == TD_W_F32;
    size_t shared = long_shared(p.part[0].cols);
    if (long_k && td_cuda_of(d)->shared_max > shared + 1024) {
        dim3 grid(td_ceil(most, LONG_OUTS) * TD_PARTS, 1, a->parts);
        td_cuda_allow_shared(d, (const void *)linear_long, shared, "linear");
        TD_LAUNCH_BESIDE(d, "linear", TD_PARTS, linear_long, grid, LONG_THREADS, shared, p);
    } else if (a->n <= COLS)
        TD_LAUNCH(d, "linear", (linear_tiles<1, 1>), dim3(td_ceil(most, 16), 1, a->parts), THREADS,
                  0, p);
    else
        TD_LAUNCH(d, "linear", (linear_tiles<1, 4>),
                  dim3(td_ceil(most, 16), td_ceil(a->n, 4 * COLS), a->parts), THREADS, 0, p);
}

/* All forms have the same bits. Many rows want many outputs: the mix of the streams, the one fp32
 * matrix, has 24. */
void TD_FAST(linear)(const struct td_device *d, const struct td_linear_args *a) {
    struct td_linear_args rest = *a, small = *a, fp8 = *a, many = *a;
    rest.parts = small.parts = fp8.parts = many.parts = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        const struct td_matrix *w = a->part[i].w;
        bool wide = w->rows > 32 && w->stored.format != TD_W_F32;
        struct td_linear_args *to = a->n > MANY && wide ? &many : &small;
        if (a->n <= COLS && burst_fits(d, w)) to = &fp8;
        if (!td_product_fits(w, a->x + a->part[i].x_at, a->x_stride)) to = &rest;
        to->part[to->parts++] = a->part[i];
    }
    if (rest.parts) TD_PLAIN(linear)(d, &rest);
    if (!a->n) return;
    if (small.parts) few(d, &small);
    if (fp8.parts) burst(d, &fp8);
    if (many.parts) td_cuda_linear_many(d, &many);
}

void TD_FAST(expert_linear)(const struct td_device *d, const struct td_expert_linear_args *a) {
    bool fits = a->w[0][0].stored.format != TD_W_F32;
    for (uint32_t i = 0; i < a->parts; i++)
        for (uint32_t e = 0; e < a->experts && fits; e++)
            fits = a->w[i][e].stored.format == a->w[0][0].stored.format &&
                   td_product_fits(&a->w[i][e], a->x, a->x_stride);
    if (!fits) {
        TD_PLAIN(expert_linear)(d, a);
        return;
    }
    if (td_cuda_experts_fp4(d, a)) return;
    bool few = td_cuda_experts_few(d, a);
    if (!few || a->most == 0 || a->most > COLS) td_cuda_experts_many(d, a, few ? COLS : 0);
}

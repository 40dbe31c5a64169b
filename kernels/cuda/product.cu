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
    float c[MT][NT][4];
    const float *in[NT];
    piece_t w[AHEAD][MT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint32_t r = n * COLS + g;
        in[n] = r < rows ? x + (first + r) * x_stride : NULL;
#pragma unroll
        for (int m = 0; m < MT; m++)
            c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
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
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
        add_parts<FORMAT, NT>(c[m], first, rows, p, out + m * 16, 16, sums);
}

/* The same for fp32 weights, 8 outputs and up to 8 rows: the streams' mix, whose few outputs have a
 * long K. There a block is alone on its processor and a warp nearly so: TOGETHER chunks are copied
 * in whole sectors and split together, so that steps of one fill the waits of another. The other 8
 * rows of a product stay empty, which costs less than half of the processors would. */
struct ring {
    uint4 w[2][32], x[2][32]; /* 8 rows of 128 bytes, by halves */
};
enum {
    LONG_OUTS = 8,
    TOGETHER = 4,
    AHEAD = 2 * TOGETHER,
    RINGS = TD_PARTS * AHEAD * sizeof(struct ring)
};

/* The 8 values of thread t in a row's 32. */
static __device__ inline void take_eight(const uint4 half[2][32], uint4 v[2]) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    v[0] = half[t / 2][g * 4 + t % 2 * 2];
    v[1] = half[t / 2][g * 4 + t % 2 * 2 + 1];
}

static __device__ void multiply_long(const float *x, size_t x_stride, uint32_t rows,
                                     const struct td_part *p, uint32_t out, float *sums,
                                     struct ring *ring) {
    enum { CHUNK = 32 };
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t len = td_part_len(p->cols), begin = warp * len;
    uint32_t end = begin + len < p->cols ? begin + len : p->cols;
    uint32_t chunks = begin < end ? (end - begin) / CHUNK : 0;
    bool output = out + g < p->rows, row = g < rows;
    const float *w = (const float *)p->w.data +
                     (size_t)(p->row + out + (output ? g : 0)) * p->w.cols + p->col + begin + 4 * t;
    const float *in = x + (row ? g : 0) * x_stride + begin + 4 * t;
    float c[1][4] = {{0.0f, 0.0f, 0.0f, 0.0f}};
    ring += warp * AHEAD;
    auto copy = [&](uint32_t from) { /* zeros beyond the last chunk */
#pragma unroll
        for (uint32_t chunk = from; chunk < from + TOGETHER; chunk++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                struct ring *to = &ring[chunk % AHEAD];
                size_t at = chunk < chunks ? chunk * CHUNK + 16 * i : 0;
                td_copy_async(&to->w[i][lane], w + at, chunk < chunks && output);
                td_copy_async(&to->x[i][lane], in + at, chunk < chunks && row);
            }
        td_copy_commit();
    };
    if (chunks) copy(0);
    if (chunks) copy(TOGETHER);
    for (uint32_t chunk = 0; chunk < chunks; chunk += TOGETHER) {
        const struct ring *from = &ring[chunk % AHEAD];
        struct td_word low[TOGETHER], none = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        uint4 v[TOGETHER], rest[TOGETHER];
        td_copy_wait<1>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            struct td_piece<TD_W_F32> piece;
            uint4 u[2];
            take_eight(from[i].w, piece.raw);
            piece.word(0, &low[i]);
            take_eight(from[i].x, u);
            float4 a = {td_bits_f32(u[0].x), td_bits_f32(u[0].y), td_bits_f32(u[0].z),
                        td_bits_f32(u[0].w)};
            float4 b = {td_bits_f32(u[1].x), td_bits_f32(u[1].y), td_bits_f32(u[1].z),
                        td_bits_f32(u[1].w)};
            td_input_word<TD_W_F32>(a, b, &v[i], &rest[i]);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            td_word_product<TD_W_F32>(c[0], &low[i], &none, v[i], rest[i]);
        __syncwarp(); /* read by all */
        copy(chunk + AHEAD);
    }
    td_copy_wait<0>();
    add_parts<TD_W_F32, 1>(c, 0, rows, p, out, LONG_OUTS, sums);
}

struct parts {
    const float *x;
    size_t x_stride;
    uint32_t n;
    struct td_part part[TD_LINEAR_PARTS];
};

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

static __global__ void __launch_bounds__(THREADS, 1)
    linear_long(const __grid_constant__ struct parts a) {
    TD_SHARED(struct ring, rings);
    __shared__ float sums[TD_PARTS * 16 * COLS];
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t out = blockIdx.x * LONG_OUTS;
    if (out >= p->rows) return; /* the whole block */
    multiply_long(a.x + p->x_at, a.x_stride, a.n, p, out, sums, rings);
}

static void few(const struct td_device *d, const struct td_linear_args *a) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    uint32_t most = 0;
    bool long_k = a->n <= COLS;
    for (uint32_t i = 0; i < a->parts; i++) {
        p.part[i] = td_part_of(a->part[i].w, a->part[i].y, a->part[i].y_stride);
        p.part[i].x_at = a->part[i].x_at;
        long_k = long_k && p.part[i].w.format == TD_W_F32;
        most = p.part[i].rows > most ? p.part[i].rows : most;
    }
    if (long_k && td_cuda_of(d)->shared_max > RINGS + 8192) {
        td_cuda_allow_shared(d, (const void *)linear_long, RINGS, "linear");
        TD_LAUNCH(d, "linear", linear_long, dim3(td_ceil(most, LONG_OUTS), 1, a->parts), THREADS, RINGS,
                  p);
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
    struct td_linear_args rest = *a, small = *a, many = *a;
    rest.parts = small.parts = many.parts = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        const struct td_matrix *w = a->part[i].w;
        bool wide = w->rows > 32 && w->stored.format != TD_W_F32;
        struct td_linear_args *to = a->n > MANY && wide ? &many : &small;
        if (!td_product_fits(w, a->x + a->part[i].x_at, a->x_stride)) to = &rest;
        to->part[to->parts++] = a->part[i];
    }
    if (rest.parts) TD_PLAIN(linear)(d, &rest);
    if (!a->n) return;
    if (small.parts) few(d, &small);
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

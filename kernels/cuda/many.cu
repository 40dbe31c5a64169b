/* Matrix products with many rows: linears of a prefill step and experts with more than a few rows.
 *
 * A block has 64 rows and 16 outputs for each of its 16 warps, and all of K. Weights go straight
 * to the registers of the warp that multiplies with them, and are decoded once per 64 rows; inputs
 * become bf16 once, in shared memory, 64 of K at a time in two buffers. The part of K at hand and
 * the sum of the parts before are in registers. On Hopper the product is the warp group's (wgmma),
 * with the same bits. */
#include "kernels/cuda/product.h"
#include "kernels/cuda/wgmma.h"

enum { WARPS = 16, THREADS = 32 * WARPS, NT = 8, ROWS = TD_COLS * NT, OUTS = 16 * WARPS };

template <int FORMAT> struct shape {
    enum {
        LEN = td_piece<FORMAT>::LEN,
        WORDS = LEN / 8,                   /* of a piece */
        PIECES = WORDS > 2 ? 1 : 2 / WORDS /* loaded together: for 64 of K, or 128 */
    };
};

/* 64 of K of every row as a tile of wgmma.h, by turns; then what rounding left. */
template <int FORMAT> struct inputs {
    uint16_t v[2][ROWS * TD_TILE];
    uint16_t rest[td_two<FORMAT>::inputs ? 2 : 1][td_two<FORMAT>::inputs ? ROWS * TD_TILE : 8];
};

/* Where word j (of 4) of a 128 begins for thread t. */
template <int FORMAT> static __device__ inline uint32_t word_at(uint32_t j, uint32_t t) {
    enum { LEN = shape<FORMAT>::LEN, WORDS = shape<FORMAT>::WORDS };
    return j / WORDS * 4 * LEN + t * LEN + j % WORDS * 8;
}

/* A thread brings one word of one row: 8 neighbours have 64 values side by side, or two halves. */
struct own {
    uint32_t row, t, j;
};
template <int FORMAT> static __device__ inline struct own own_word(void) {
    uint32_t word = threadIdx.x % 8;
    bool wide = shape<FORMAT>::WORDS > 1;
    struct own o = {threadIdx.x / 8, wide ? word / 2 : word % 4, wide ? word % 2 : word / 4};
    return o;
}

struct next {
    float4 v[2];
};

template <int FORMAT>
static __device__ inline void load_inputs(const float *in, uint32_t cols, uint32_t stage,
                                          struct next *to) {
    struct own own = own_word<FORMAT>();
    uint32_t k = stage / 2 * 128 + word_at<FORMAT>(stage % 2 * 2 + own.j, own.t);
    float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    to->v[0] = in && k < cols ? *(const float4 *)(in + k) : zero;
    to->v[1] = in && k < cols ? *(const float4 *)(in + k + 4) : zero;
}

/* Word j of thread t is two products' columns: pairs 2t and 2t + 8 of each. */
static __device__ inline void store_word(uint16_t *tile, struct own own, uint4 v) {
    uint32_t c = own.j * 32 + own.t * 2;
    *(uint32_t *)&tile[td_tile_at(own.row, c)] = v.x;
    *(uint32_t *)&tile[td_tile_at(own.row, c + 8)] = v.y;
    *(uint32_t *)&tile[td_tile_at(own.row, c + 16)] = v.z;
    *(uint32_t *)&tile[td_tile_at(own.row, c + 24)] = v.w;
}

template <int FORMAT>
static __device__ inline void store_inputs(const struct next *from, uint32_t stage,
                                           struct inputs<FORMAT> *x) {
    uint4 v, rest;
    td_input_word<FORMAT>(from->v[0], from->v[1], &v, &rest);
    store_word(x->v[stage % 2], own_word<FORMAT>(), v);
    if (td_two<FORMAT>::inputs) store_word(x->rest[stage % 2], own_word<FORMAT>(), rest);
}

/* c += a stage of weights x inputs, word by word. */
template <int FORMAT>
static __device__ inline void product(float c[4 * NT], const struct td_word low[2],
                                      const struct td_word high[2], const uint16_t *x,
                                      const uint16_t *rest, uint32_t rows) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n > 0 && n * TD_COLS >= rows) continue; /* the whole block */
            uint32_t b[4], l[4] = {0, 0, 0, 0},
                           at = td_tile_at(n * 8 + lane % 8, (j * 4 + lane / 8) * 8);
            td_load_rows(b, x + at);
            if (td_two<FORMAT>::inputs) td_load_rows(l, rest + at);
            uint4 v = {b[0], b[1], b[2], b[3]}, r = {l[0], l[1], l[2], l[3]};
            td_word_product<FORMAT>(c + 4 * n, &low[j], &high[j], v, r);
        }
}

#ifdef TD_HAS_WGMMA
/* The same by the warp group; until td_wgmma_wait neither weights nor c may be touched. */
template <int FORMAT>
static __device__ inline void group_product(float c[4 * NT], const struct td_word low[2],
                                            const struct td_word high[2], const uint16_t *x,
                                            const uint16_t *rest) {
    td_wgmma_begin();
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
            int i = 2 * step, k = j * 32 + step * 16;
            uint32_t a[4] = {low[j].v[i], high[j].v[i], low[j].v[i + 1], high[j].v[i + 1]};
            if (td_two<FORMAT>::inputs) td_wgmma_rows(c, a, rest, k);
            td_wgmma_rows(c, a, x, k);
        }
    td_wgmma_commit();
}
#endif

/* Outputs out .. out + OUTS - 1 of `rows` (up to 64) rows. */
template <int FORMAT, bool GROUPS>
static __device__ void multiply(const float *x, size_t x_stride, const uint32_t *row_at,
                                uint32_t first, uint32_t rows, const struct td_part *p,
                                uint32_t out, struct inputs<FORMAT> *s) {
    typedef struct shape<FORMAT> S;
    enum { LEN = S::LEN, WORDS = S::WORDS, PIECES = S::PIECES };
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = own_word<FORMAT>().row;
    uint32_t stages = td_ceil(p->cols, 128) * 2, per = td_part_len(p->cols) / 64, left = per;
    const float *in =
        own < rows ? x + (row_at ? row_at[first + own] : first + own) * x_stride : NULL;
    float c[4 * NT], total[4 * NT];
    struct td_piece<FORMAT> w[PIECES][2], ahead[PIECES][2];
    struct next next;
    out += threadIdx.x / 32 * 16;
    bool idle = out >= p->rows; /* the whole warp: it only brings inputs */
#pragma unroll
    for (int i = 0; i < 4 * NT; i++)
        c[i] = total[i] = 0.0f;
    auto load = [&](uint32_t k) {
#pragma unroll
        for (int i = 0; i < PIECES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t r = out + h * 8 + g, at = k + i * 4 * LEN + t * LEN;
                if (r < p->rows && at < p->cols)
                    ahead[i][h].load(&p->w, p->row + r, p->col + at);
                else
                    ahead[i][h].zero();
            }
    };
    load_inputs<FORMAT>(in, p->cols, 0, &next);
    load(0);
    __syncthreads(); /* the piece of work before may still be read */
    store_inputs(&next, 0, s);
    load_inputs<FORMAT>(in, p->cols, 1, &next);
#ifdef TD_HAS_WGMMA
    if (GROUPS) td_wgmma_publish();
#endif
    __syncthreads();
    for (uint32_t from = 0; from < stages; from += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t stage = from + half;
            struct td_word low[2], high[2];
            if (half == 0 || WORDS <= 2) {
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    w[i][0] = ahead[i][0];
                    w[i][1] = ahead[i][1];
                }
                load(WORDS > 2 ? (stage + 2) * 64 : (stage + 1) * 64);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int piece = WORDS > 2 ? 0 : j / WORDS;
                int word = WORDS > 2 ? half * 2 + j : j % WORDS;
                w[piece][0].word(word, &low[j]);
                w[piece][1].word(word, &high[j]);
            }
            const uint16_t *x64 = s->v[half], *rest = s->rest[td_two<FORMAT>::inputs ? half : 0];
#ifdef TD_HAS_WGMMA
            if (GROUPS) group_product<FORMAT>(c, low, high, x64, rest);
#endif
            if (!GROUPS && !idle) product<FORMAT>(c, low, high, x64, rest, rows);
            store_inputs(&next, stage + 1, s);
            load_inputs<FORMAT>(in, p->cols, stage + 2, &next);
#ifdef TD_HAS_WGMMA
            if (GROUPS) {
                td_wgmma_publish();
                td_wgmma_wait();
            }
#endif
            if (--left == 0) {
#pragma unroll
                for (int n = 0; n < NT; n++)
                    td_end_part(total + 4 * n, c + 4 * n);
                left = per;
            }
            __syncthreads();
        }
    float factor = td_product_factor<FORMAT>(&p->w);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        td_end_part(total + 4 * n, c + 4 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t o = out + g + i / 2 * 8, r = n * TD_COLS + 2 * t + i % 2;
            if (r < rows && o < p->rows)
                p->y[(first + r) * p->y_stride + o] = total[4 * n + i] * factor;
        }
    }
}

/* ---- linears ---- */

struct parts {
    const float *x;
    size_t x_stride;
    uint32_t n, parts;
    struct td_part part[TD_LINEAR_PARTS];
};

template <int FORMAT, bool GROUPS>
static __global__ void __launch_bounds__(THREADS, 1)
    linear_many(const __grid_constant__ struct parts a) {
    TD_SHARED(unsigned char, memory);
    struct inputs<FORMAT> *s = (struct inputs<FORMAT> *)td_tile_memory(memory);
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t first = blockIdx.y * ROWS, out = blockIdx.x * OUTS;
    if (out >= p->rows) return; /* the whole block */
    multiply<FORMAT, GROUPS>(a.x, a.x_stride, NULL, first, a.n - first < ROWS ? a.n - first : ROWS,
                             p, out, s);
}

template <int FORMAT>
static void linears_of(const struct td_device *d, const struct td_linear_args *a) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    uint32_t most = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        if (a->part[i].w->stored.format != FORMAT) continue;
        p.part[p.parts++] = td_part_of(a->part[i].w, a->part[i].y, a->part[i].y_stride);
        most = a->part[i].w->rows > most ? a->part[i].w->rows : most;
    }
    if (!p.parts) return;
    dim3 grid(td_ceil(most, OUTS), td_ceil(a->n, ROWS), p.parts);
    if (td_cuda_of(d)->major == 9)
        TD_LAUNCH(d, "linear", (linear_many<FORMAT, true>), grid, THREADS,
                  sizeof(struct inputs<FORMAT>) + TD_TILE_ROOM, p);
    else
        TD_LAUNCH(d, "linear", (linear_many<FORMAT, false>), grid, THREADS,
                  sizeof(struct inputs<FORMAT>) + TD_TILE_ROOM, p);
}

void td_cuda_linear_many(const struct td_device *d, const struct td_linear_args *a) {
    linears_of<TD_W_BF16>(d, a);
    linears_of<TD_W_FP8_BLOCK>(d, a);
    linears_of<TD_W_FP4>(d, a);
    linears_of<TD_W_NVFP4>(d, a);
}

/* ---- experts ---- */

/* As many blocks as the chip holds; each takes every gridDim.x-th piece. */
template <int FORMAT, bool GROUPS>
static __global__ void __launch_bounds__(THREADS, 1)
    experts_many(const __grid_constant__ struct td_experts a, uint32_t above) {
    TD_SHARED(unsigned char, memory);
    struct inputs<FORMAT> *s = (struct inputs<FORMAT> *)td_tile_memory(memory);
    __shared__ struct td_work work;
    uint32_t outs = td_ceil(a.outs, OUTS), per = outs * a.parts;
    td_list_work(&a, above, 0xffffffffu, ROWS, per, &work);
    for (uint32_t i = blockIdx.x; i < work.before[work.count]; i += gridDim.x) {
        uint32_t at = td_find_work(&work, i), e = work.expert[at], left = i - work.before[at];
        uint32_t first = a.offset[e] + left / per * ROWS, stop = a.offset[e + 1];
        uint32_t which = left % per / outs;
        const struct td_matrix *w = &a.w[which][e];
        struct td_part p = td_part_of(w, a.y[which], w->rows);
        multiply<FORMAT, GROUPS>(a.x, a.x_stride, a.x_row, first,
                                 stop - first < ROWS ? stop - first : ROWS, &p, left % outs * OUTS,
                                 s);
    }
}

template <int FORMAT>
static void experts_of(const struct td_device *d, const struct td_expert_linear_args *a,
                       uint32_t above) {
    struct td_experts p = td_experts_of(a);
    uint32_t blocks = td_cuda_of(d)->processors;
    if (td_cuda_of(d)->major == 9)
        TD_LAUNCH(d, "expert_linear", (experts_many<FORMAT, true>), blocks, THREADS,
                  sizeof(struct inputs<FORMAT>) + TD_TILE_ROOM, p, above);
    else
        TD_LAUNCH(d, "expert_linear", (experts_many<FORMAT, false>), blocks, THREADS,
                  sizeof(struct inputs<FORMAT>) + TD_TILE_ROOM, p, above);
}

void td_cuda_experts_many(const struct td_device *d, const struct td_expert_linear_args *a,
                          uint32_t above) {
    enum td_weight_format f = a->w[0][0].stored.format;
    if (f == TD_W_BF16)
        experts_of<TD_W_BF16>(d, a, above);
    else if (f == TD_W_FP8_BLOCK)
        experts_of<TD_W_FP8_BLOCK>(d, a, above);
    else if (f == TD_W_FP4)
        experts_of<TD_W_FP4>(d, a, above);
    else
        experts_of<TD_W_NVFP4>(d, a, above);
}

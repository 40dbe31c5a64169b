/* Matrix products with many rows: linears of a prefill step and experts with more than a few rows.
 *
 * A block has 64 or 128 rows and 16 outputs for each of its 16 warps, and all of K. Weights go
 * straight to the registers of the warp that multiplies with them, and are decoded once per block;
 * inputs become bf16 once, in shared memory, 64 of K at a time in two buffers. The part of K at
 * hand is in registers. On Hopper the product is the warp group's (wgmma), with the same bits;
 * there the sum of the parts before is in shared memory, which leaves registers for 128 rows. */
#include "kernels/cuda/product.h"
#include "kernels/cuda/wgmma.h"

enum { WARPS = 16, THREADS = 32 * WARPS, OUTS = 16 * WARPS, FEW_ROWS = 64, MANY_ROWS = 128 };

template <int FORMAT> struct shape {
    enum {
        LEN = td_piece<FORMAT>::LEN,
        WORDS = LEN / 8,                   /* of a piece */
        PIECES = WORDS > 2 ? 1 : 2 / WORDS /* loaded together: for 64 of K, or 128 */
    };
};

/* 64 of K of every row as a tile of wgmma.h, by turns; then what rounding left. */
template <int FORMAT, int ROWS> struct inputs {
    uint16_t v[2][ROWS * TD_TILE];
    uint16_t rest[td_two<FORMAT>::inputs ? 2 : 1][td_two<FORMAT>::inputs ? ROWS * TD_TILE : 8];
};
/* On Hopper also what the parts of K before came to, by threads. */
template <int FORMAT, bool GROUPS> struct memory {
    enum { ROWS = GROUPS ? MANY_ROWS : FEW_ROWS };
    struct inputs<FORMAT, ROWS> x;
    float4 total[GROUPS ? ROWS / TD_COLS : 1][GROUPS ? THREADS : 1];
};

/* Where word j (of 4) of a 128 begins for thread t. */
template <int FORMAT> static __device__ inline uint32_t word_at(uint32_t j, uint32_t t) {
    enum { LEN = shape<FORMAT>::LEN, WORDS = shape<FORMAT>::WORDS };
    return j / WORDS * 4 * LEN + t * LEN + j % WORDS * 8;
}

/* A thread brings one word of every 64th row: 8 neighbours have 64 values side by side, or two
 * halves. */
struct own {
    uint32_t row, t, j;
};
template <int FORMAT> static __device__ inline struct own own_word(void) {
    uint32_t word = threadIdx.x % 8;
    bool wide = shape<FORMAT>::WORDS > 1;
    struct own o = {threadIdx.x / 8, wide ? word / 2 : word % 4, wide ? word % 2 : word / 4};
    return o;
}

template <int ROWS> struct next {
    float4 v[ROWS / 64][2];
};

/* `in`: where the thread's rows begin, NULL beyond the last. */
template <int FORMAT, int ROWS>
static __device__ inline void load_inputs(const float *const in[ROWS / 64], uint32_t cols,
                                          uint32_t stage, struct next<ROWS> *to) {
    struct own own = own_word<FORMAT>();
    uint32_t k = stage / 2 * 128 + word_at<FORMAT>(stage % 2 * 2 + own.j, own.t);
    float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ROWS / 64; i++) {
        to->v[i][0] = in[i] && k < cols ? *(const float4 *)(in[i] + k) : zero;
        to->v[i][1] = in[i] && k < cols ? *(const float4 *)(in[i] + k + 4) : zero;
    }
}

/* Word j of thread t is two products' columns: pairs 2t and 2t + 8 of each. They lie in four pieces
 * whose places differ in two bits, since j 4 has none of them. */
static __device__ inline void store_word(uint16_t *tile, struct own own, uint4 v) {
    uint32_t at = td_tile_at(own.row, own.j * 32 + own.t * 2);
    *(uint32_t *)&tile[at] = v.x;
    *(uint32_t *)&tile[at ^ 8] = v.y;
    *(uint32_t *)&tile[at ^ 16] = v.z;
    *(uint32_t *)&tile[at ^ 24] = v.w;
}

template <int FORMAT, int ROWS, int ALL>
static __device__ inline void store_inputs(const struct next<ROWS> *from, uint32_t buffer,
                                           struct inputs<FORMAT, ALL> *x) {
    struct own own = own_word<FORMAT>();
#pragma unroll
    for (int i = 0; i < ROWS / 64; i++) {
        uint4 v, rest;
        td_input_word<FORMAT>(from->v[i][0], from->v[i][1], &v, &rest);
        store_word(x->v[buffer] + i * 64 * TD_TILE, own, v);
        if (td_two<FORMAT>::inputs) store_word(x->rest[buffer] + i * 64 * TD_TILE, own, rest);
    }
}

/* c += a stage of weights x inputs, word by word. */
template <int FORMAT, int ROWS>
static __device__ inline void product(float *c, const struct td_word low[2],
                                      const struct td_word high[2], const uint16_t *x,
                                      const uint16_t *rest, uint32_t rows) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int n = 0; n < ROWS / TD_COLS; n++) {
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
template <int ROWS> struct form_of {
    typedef struct td_wgmma_64 form;
};
template <> struct form_of<128> {
    typedef struct td_wgmma_128 form;
};

/* The same by the warp group; until td_wgmma_wait neither weights nor c may be touched. */
template <int FORMAT, int ROWS>
static __device__ inline void group_product(float *c, const struct td_word low[2],
                                            const struct td_word high[2], const uint16_t *x,
                                            const uint16_t *rest) {
    typename form_of<ROWS>::form form;
    td_wgmma_begin();
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
            int i = 2 * step, k = j * 32 + step * 16;
            uint32_t a[4] = {low[j].v[i], high[j].v[i], low[j].v[i + 1], high[j].v[i + 1]};
            if (td_two<FORMAT>::inputs) td_wgmma_rows(c, a, rest, k, form);
            td_wgmma_rows(c, a, x, k, form);
        }
    td_wgmma_commit();
}
#endif

/* Outputs out .. out + OUTS - 1 of `rows` (up to ROWS) rows. */
template <int FORMAT, bool GROUPS, int ROWS>
static __device__ void multiply(const float *x, size_t x_stride, const uint32_t *row_at,
                                uint32_t first, uint32_t rows, const struct td_part *p,
                                uint32_t out, struct memory<FORMAT, GROUPS> *s) {
    typedef struct shape<FORMAT> S;
    enum { LEN = S::LEN, WORDS = S::WORDS, PIECES = S::PIECES, NT = ROWS / TD_COLS };
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t stages = td_ceil(p->cols, 128) * 2, per = td_part_len(p->cols) / 64, left = per;
    const float *in[ROWS / 64];
    float c[4 * NT], total[GROUPS ? 4 : 4 * NT];
    struct td_piece<FORMAT> w[PIECES][2];
    struct next<ROWS> next;
    struct td_source from[2];
    bool valid[2], begun = false;
    out += threadIdx.x / 32 * 16;
    bool idle = out >= p->rows; /* the whole warp: it only brings inputs */
#pragma unroll
    for (int i = 0; i < ROWS / 64; i++) {
        uint32_t r = own_word<FORMAT>().row + i * 64;
        in[i] = r < rows ? x + (row_at ? row_at[first + r] : first + r) * x_stride : NULL;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t r = out + h * 8 + g;
        valid[h] = r < p->rows;
        from[h] = td_piece<FORMAT>::source(&p->w, p->row + (valid[h] ? r : 0), p->col + t * LEN);
    }
    uint32_t within = FORMAT == TD_W_FP8_BLOCK ? (p->col + t * LEN) % 128 : 0;
#pragma unroll
    for (int i = 0; i < 4 * NT; i++)
        c[i] = 0.0f;
    if (!GROUPS)
        for (int i = 0; i < 4 * NT; i++)
            total[i] = 0.0f;
    auto load = [&](uint32_t stage) { /* pieces that begin there */
#pragma unroll
        for (int i = 0; i < PIECES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t k = stage * 64 + i * 4 * LEN, scale = 0;
                size_t at = (size_t)k * 16 / LEN;
                if (!valid[h] || k + t * LEN >= p->cols) {
                    w[i][h].zero();
                    continue;
                }
                if (FORMAT == TD_W_FP8_BLOCK) scale = from[h].scale[(within + k) / 128];
                if (FORMAT == TD_W_FP4) scale = from[h].scale[k / 32];
                if (FORMAT == TD_W_NVFP4)
                    scale = *(const uint16_t *)(const void *)(from[h].scale + k / 16);
                w[i][h].take(*(const uint4 *)(const void *)(from[h].data + at), scale);
            }
    };
    /* The part of K at hand is added to those before. */
    auto end_part = [&](void) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if constexpr (!GROUPS) {
                td_end_part(total + 4 * n, c + 4 * n);
                continue;
            }
            float4 *at = &s->total[GROUPS ? n : 0][GROUPS ? threadIdx.x : 0];
            float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
            if (begun) v = *at;
            float sum[4] = {v.x, v.y, v.z, v.w};
            td_end_part(sum, c + 4 * n);
            v.x = sum[0];
            v.y = sum[1];
            v.z = sum[2];
            v.w = sum[3];
            *at = v;
        }
        begun = true;
    };
    load_inputs<FORMAT, ROWS>(in, p->cols, 0, &next);
    load(0);
    __syncthreads(); /* the piece of work before may still be read */
    store_inputs<FORMAT, ROWS>(&next, 0, &s->x);
    load_inputs<FORMAT, ROWS>(in, p->cols, 1, &next);
#ifdef TD_HAS_WGMMA
    if (GROUPS) td_wgmma_publish();
#endif
    __syncthreads();
    for (uint32_t stage = 0; stage < stages; stage += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            struct td_word low[2], high[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int piece = WORDS > 2 ? 0 : j / WORDS;
                int word = WORDS > 2 ? half * 2 + j : j % WORDS;
                w[piece][0].word(word, &low[j]);
                w[piece][1].word(word, &high[j]);
            }
            const uint16_t *x64 = s->x.v[half];
            const uint16_t *rest = s->x.rest[td_two<FORMAT>::inputs ? half : 0];
#ifdef TD_HAS_WGMMA
            if (GROUPS) group_product<FORMAT, ROWS>(c, low, high, x64, rest);
#endif
            if (!GROUPS && !idle) product<FORMAT, ROWS>(c, low, high, x64, rest, rows);
            if (half || WORDS <= 2) load(stage + half + 1);
            store_inputs<FORMAT, ROWS>(&next, half ^ 1, &s->x);
            load_inputs<FORMAT, ROWS>(in, p->cols, stage + half + 2, &next);
#ifdef TD_HAS_WGMMA
            if (GROUPS) {
                td_wgmma_publish();
                td_wgmma_wait();
            }
#endif
            if (--left == 0) {
                end_part();
                left = per;
            }
            __syncthreads();
        }
    end_part();
    float factor = td_product_factor<FORMAT>(&p->w);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float sum[4];
        if (GROUPS) {
            float4 v = s->total[GROUPS ? n : 0][GROUPS ? threadIdx.x : 0];
            sum[0] = v.x;
            sum[1] = v.y;
            sum[2] = v.z;
            sum[3] = v.w;
        } else {
            for (int i = 0; i < 4; i++)
                sum[i] = total[4 * n + i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t o = out + g + i / 2 * 8, r = n * TD_COLS + 2 * t + i % 2;
            if (r < rows && o < p->rows) p->y[(first + r) * p->y_stride + o] = sum[i] * factor;
        }
    }
}

/* As many of a call's rows as a block takes. */
template <int FORMAT, bool GROUPS>
static __device__ inline void multiply_rows(const float *x, size_t x_stride,
                                            const uint32_t *row_at, uint32_t first, uint32_t rows,
                                            const struct td_part *p, uint32_t out,
                                            struct memory<FORMAT, GROUPS> *s) {
    if (GROUPS && rows > FEW_ROWS)
        multiply<FORMAT, GROUPS, GROUPS ? MANY_ROWS : FEW_ROWS>(x, x_stride, row_at, first, rows, p,
                                                                out, s);
    else
        multiply<FORMAT, GROUPS, FEW_ROWS>(x, x_stride, row_at, first, rows, p, out, s);
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
    TD_SHARED(unsigned char, dynamic);
    struct memory<FORMAT, GROUPS> *s = (struct memory<FORMAT, GROUPS> *)td_tile_memory(dynamic);
    enum { ROWS = memory<FORMAT, GROUPS>::ROWS };
    const struct td_part *p = &a.part[blockIdx.z];
    uint32_t first = blockIdx.y * ROWS, out = blockIdx.x * OUTS;
    if (out >= p->rows) return; /* the whole block */
    multiply_rows<FORMAT, GROUPS>(a.x + p->x_at, a.x_stride, NULL, first,
                                  a.n - first < ROWS ? a.n - first : ROWS, p, out, s);
}

template <int FORMAT, bool GROUPS>
static void launch(const struct td_device *d, const struct parts *p, uint32_t most) {
    size_t shared = sizeof(struct memory<FORMAT, GROUPS>) + TD_TILE_ROOM;
    dim3 grid(td_ceil(most, OUTS), td_ceil(p->n, memory<FORMAT, GROUPS>::ROWS), p->parts);
    td_cuda_allow_shared(d, (const void *)linear_many<FORMAT, GROUPS>, shared, "linear");
    TD_LAUNCH(d, "linear", (linear_many<FORMAT, GROUPS>), grid, THREADS, shared, *p);
}

template <int FORMAT>
static void linears_of(const struct td_device *d, const struct td_linear_args *a) {
    struct parts p = {.x = a->x, .x_stride = a->x_stride, .n = a->n};
    struct td_linear_args own = *a;
    uint32_t most = 0;
    own.parts = 0;
    for (uint32_t i = 0; i < a->parts; i++) {
        if (a->part[i].w->stored.format != FORMAT) continue;
        own.part[own.parts++] = a->part[i];
        p.part[p.parts] = td_part_of(a->part[i].w, a->part[i].y, a->part[i].y_stride);
        p.part[p.parts++].x_at = a->part[i].x_at;
        most = a->part[i].w->rows > most ? a->part[i].w->rows : most;
    }
    if (!p.parts || td_cuda_linear_wide(d, &own)) return;
    if (td_cuda_of(d)->major == 9)
        launch<FORMAT, true>(d, &p, most);
    else
        launch<FORMAT, false>(d, &p, most);
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
    TD_SHARED(unsigned char, dynamic);
    struct memory<FORMAT, GROUPS> *s = (struct memory<FORMAT, GROUPS> *)td_tile_memory(dynamic);
    enum { ROWS = memory<FORMAT, GROUPS>::ROWS };
    __shared__ struct td_work work;
    uint32_t outs = td_ceil(a.outs, OUTS), per = outs * a.parts;
    td_list_work(&a, above, 0xffffffffu, ROWS, per, &work);
    for (uint32_t i = blockIdx.x; i < work.before[work.count]; i += gridDim.x) {
        uint32_t at = td_find_work(&work, i), e = work.expert[at], left = i - work.before[at];
        uint32_t first = a.offset[e] + left / per * ROWS, stop = a.offset[e + 1];
        uint32_t which = left % per / outs;
        const struct td_matrix *w = &a.w[which][e];
        struct td_part p = td_part_of(w, a.y[which], w->rows);
        multiply_rows<FORMAT, GROUPS>(a.x, a.x_stride, a.x_row, first,
                                      stop - first < ROWS ? stop - first : ROWS, &p,
                                      left % outs * OUTS, s);
    }
}

template <int FORMAT, bool GROUPS>
static void launch(const struct td_device *d, const struct td_experts *p, uint32_t above) {
    size_t shared = sizeof(struct memory<FORMAT, GROUPS>) + TD_TILE_ROOM;
    td_cuda_allow_shared(d, (const void *)experts_many<FORMAT, GROUPS>, shared, "expert_linear");
    TD_LAUNCH(d, "expert_linear", (experts_many<FORMAT, GROUPS>), td_cuda_of(d)->processors,
              THREADS, shared, *p, above);
}

template <int FORMAT>
static void experts_of(const struct td_device *d, const struct td_expert_linear_args *a,
                       uint32_t above) {
    struct td_experts p = td_experts_of(a);
    if (td_cuda_of(d)->major == 9)
        launch<FORMAT, true>(d, &p, above);
    else
        launch<FORMAT, false>(d, &p, above);
}

void td_cuda_experts_many(const struct td_device *d, const struct td_expert_linear_args *a,
                          uint32_t above) {
    enum td_weight_format f = a->w[0][0].stored.format;
    if (td_cuda_experts_wide(d, a, above)) return;
    if (f == TD_W_BF16)
        experts_of<TD_W_BF16>(d, a, above);
    else if (f == TD_W_FP8_BLOCK)
        experts_of<TD_W_FP8_BLOCK>(d, a, above);
    else if (f == TD_W_FP4)
        experts_of<TD_W_FP4>(d, a, above);
    else
        experts_of<TD_W_NVFP4>(d, a, above);
}

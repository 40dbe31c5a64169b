/* What the forms of a matrix product share: how a stored weight becomes a tensor core's operand,
 * and the one order of summation, whatever the number of rows.
 *
 * Weights are the 16 rows of a product, tokens its 8 columns, so that one token wastes little. A
 * weight goes from memory to registers as it is stored, 16 bytes a thread (a piece), and becomes
 * bf16 there, exactly up to a power of two that the sum is multiplied with at the end (NVFP4's
 * common factor goes the same way). Inputs are rounded to bf16; where weights are bf16 or fp32
 * (gate, compressors, head, mix: what stays fp32 in the model's own code) what the rounding left is
 * a second bf16, multiplied too, low parts first.
 *
 * K is cut into 8 contiguous parts of whole 128s; a part is one chain of products in ascending
 * pieces (with fp32 weights a chain ends with each 128, and a part is their sum in this order); the
 * parts are added in ascending order to zero. A thread t of a row's four holds the values LEN t ..
 * LEN t + LEN - 1 of every 4 LEN, in words of 8, a word being two products; which of the 8 share a
 * register is what their format unpacks with the fewest instructions. */
#ifndef TD_KERNELS_CUDA_PRODUCT_H
#define TD_KERNELS_CUDA_PRODUCT_H

#include "kernels/cuda/mma.h"
#include "kernels/cuda/op.h"

enum { TD_PARTS = 8, TD_PRODUCT_THREADS = 256, TD_COLS = 8 };

/* A matrix to multiply with and where its outputs go. */
struct td_part {
    struct td_weight w;
    uint32_t rows, cols, row, col;
    float *y;
    size_t y_stride, x_at;
};

static __host__ __device__ inline struct td_part td_part_of(const struct td_matrix *w, float *y,
                                                            size_t y_stride) {
    struct td_part p = {};
    p.w = w->stored;
    p.rows = w->rows;
    p.cols = w->cols;
    p.row = w->row;
    p.col = w->col;
    p.y = y;
    p.y_stride = y_stride;
    return p;
}

/* Inputs of a part of K: whole 128s. */
static __host__ __device__ inline uint32_t td_part_len(uint32_t cols) {
    return (cols + 128 * TD_PARTS - 1) / (128 * TD_PARTS) * 128;
}

/* Whether inputs are two bf16 values each. */
template <int FORMAT> struct td_two {
    static constexpr bool inputs = FORMAT == TD_W_BF16 || FORMAT == TD_W_F32;
};

/* 8 weights of a row: four bf16 pairs; of fp32 ones also what rounding left. */
struct td_word {
    uint32_t v[4], rest[4];
};

/* Where a row's pieces begin: 16 bytes each, and their scales. */
struct td_source {
    const uint8_t *data, *scale;
};

/* load(): absolute row and column; source() and take() the same in two steps. word(j):
 * values 8 j .. 8 j + 7, times 2^-SHIFT. */
template <int FORMAT> struct td_piece;

template <> struct td_piece<TD_W_F32> {
    enum { LEN = 8, SHIFT = 0 };
    uint4 raw[2];
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        const uint4 *from = (const uint4 *)((const float *)w->data + (size_t)r * w->cols + c);
        raw[0] = from[0];
        raw[1] = from[1];
    }
    __device__ void zero() {
        raw[0].x = raw[0].y = raw[0].z = raw[0].w = 0;
        raw[1] = raw[0];
    }
    static __device__ void split(uint32_t low, uint32_t high, uint32_t *v, uint32_t *rest) {
        float a = td_bits_f32(low), b = td_bits_f32(high);
        *v = td_bf16_pair(a, b);
        *rest = td_bf16_rest(a, b, *v);
    }
    __device__ void word(int j, struct td_word *to) const {
        (void)j;
        split(raw[0].x, raw[0].y, &to->v[0], &to->rest[0]);
        split(raw[0].z, raw[0].w, &to->v[1], &to->rest[1]);
        split(raw[1].x, raw[1].y, &to->v[2], &to->rest[2]);
        split(raw[1].z, raw[1].w, &to->v[3], &to->rest[3]);
    }
};

template <> struct td_piece<TD_W_BF16> {
    enum { LEN = 8, SHIFT = 0 };
    uint4 raw;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        raw = *(const uint4 *)((const uint16_t *)w->data + (size_t)r * w->cols + c);
    }
    static __device__ struct td_source source(const struct td_weight *w, uint32_t r, uint32_t c) {
        struct td_source s = {
            (const uint8_t *)w->data + ((size_t)r * w->cols + c) * sizeof(uint16_t), NULL};
        return s;
    }
    __device__ void take(uint4 data, uint32_t scales) {
        (void)scales;
        raw = data;
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = 0;
    }
    __device__ void word(int j, struct td_word *to) const {
        (void)j;
        to->v[0] = raw.x;
        to->v[1] = raw.y;
        to->v[2] = raw.z;
        to->v[3] = raw.w;
    }
};

/* e8m0 2^(b - 127) as bf16 twice, times 2^by. Scales so large that this is out of range are cut;
 * no weight is 2^60. */
static __device__ inline uint32_t td_e8m0_pair_by(uint32_t b, uint32_t by) {
    uint32_t e = b + by;
    return (e < 254u ? e : 254u) * 0x00800080u;
}

template <> struct td_piece<TD_W_FP8_BLOCK> {
    enum { LEN = 16, SHIFT = 60 };
    uint4 raw;
    uint32_t scale;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        raw = *(const uint4 *)((const uint8_t *)w->data + (size_t)r * w->cols + c);
        scale = ((const uint8_t *)w->scale)[(size_t)(r / 128) * ((w->cols + 127) / 128) + c / 128];
    }
    static __device__ struct td_source source(const struct td_weight *w, uint32_t r, uint32_t c) {
        struct td_source s = {(const uint8_t *)w->data + (size_t)r * w->cols + c,
                              (const uint8_t *)w->scale +
                                  (size_t)(r / 128) * ((w->cols + 127) / 128) + c / 128};
        return s;
    }
    __device__ void take(uint4 data, uint32_t scales) {
        raw = data;
        scale = scales;
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale = 0;
    }
    /* The seven bits of magnitude are a bf16 that is 2^120 too small, subnormal ones too. */
    static __device__ void four(uint32_t d, uint32_t s, uint32_t *even, uint32_t *odd) {
        *even = td_bf16_mul((d << 8 & 0x80008000u) | (d << 4 & 0x07f007f0u), s);
        *odd = td_bf16_mul((d & 0x80008000u) | (d >> 4 & 0x07f007f0u), s);
    }
    __device__ void word(int j, struct td_word *to) const {
        uint32_t s = td_e8m0_pair_by(scale, 120 - SHIFT);
        four(j ? raw.z : raw.x, s, &to->v[0], &to->v[1]);
        four(j ? raw.w : raw.y, s, &to->v[2], &to->v[3]);
    }
};

/* The pairs (0, 4), (1, 5), (2, 6), (3, 7) of eight nibbles: three bits of magnitude are a bf16
 * that is 2^126 too small. */
static __device__ inline void td_e2m1_word(uint32_t w, uint32_t s, uint32_t v[4]) {
    v[0] = td_bf16_mul((w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u), s);
    v[1] = td_bf16_mul((w << 8 & 0x80008000u) | (w << 2 & 0x01c001c0u), s);
    v[2] = td_bf16_mul((w << 4 & 0x80008000u) | (w >> 2 & 0x01c001c0u), s);
    v[3] = td_bf16_mul((w & 0x80008000u) | (w >> 6 & 0x01c001c0u), s);
}

template <> struct td_piece<TD_W_FP4> {
    enum { LEN = 32, SHIFT = 60 };
    uint4 raw;
    uint32_t scale;
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        raw = *(const uint4 *)((const uint8_t *)w->data + at / 2);
        scale = ((const uint8_t *)w->scale)[at / 32];
    }
    static __device__ struct td_source source(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        struct td_source s = {(const uint8_t *)w->data + at / 2,
                              (const uint8_t *)w->scale + at / 32};
        return s;
    }
    __device__ void take(uint4 data, uint32_t scales) {
        raw = data;
        scale = scales;
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale = 0;
    }
    __device__ void word(int j, struct td_word *to) const {
        td_e2m1_word(j == 0   ? raw.x
                     : j == 1 ? raw.y
                     : j == 2 ? raw.z
                              : raw.w,
                     td_e8m0_pair_by(scale, 126 - SHIFT), to->v);
    }
};

template <> struct td_piece<TD_W_NVFP4> {
    enum { LEN = 32, SHIFT = 9 }; /* so that 2^117 times the greatest scale, 448, is a bf16 */
    uint4 raw;
    uint32_t scale; /* two e4m3 bytes */
    __device__ void load(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        raw = *(const uint4 *)((const uint8_t *)w->data + at / 2);
        scale = *(const uint16_t *)((const uint8_t *)w->scale + at / 16);
    }
    static __device__ struct td_source source(const struct td_weight *w, uint32_t r, uint32_t c) {
        size_t at = (size_t)r * w->cols + c;
        struct td_source s = {(const uint8_t *)w->data + at / 2,
                              (const uint8_t *)w->scale + at / 16};
        return s;
    }
    __device__ void take(uint4 data, uint32_t scales) {
        raw = data;
        scale = scales;
    }
    __device__ void zero() {
        raw.x = raw.y = raw.z = raw.w = scale = 0;
    }
    __device__ void word(int j, struct td_word *to) const {
        uint32_t d = (scale | scale << 8) & 0x00ff00ffu;
        d = (d << 8 & 0x80008000u) | (d << 4 & 0x07f007f0u);
        d = td_bf16_mul(td_bf16_mul(d, 0x7b807b80u), 0x7a007a00u); /* 2^120, 2^117 */
        d = j / 2 ? d >> 16 | (d & 0xffff0000u) : (d & 0xffffu) | d << 16;
        td_e2m1_word(j == 0 ? raw.x : j == 1 ? raw.y : j == 2 ? raw.z : raw.w, d, to->v);
    }
};

/* What a sum is multiplied with at the end. */
template <int FORMAT> static __device__ inline float td_product_factor(const struct td_weight *w) {
    if (FORMAT == TD_W_NVFP4) return w->scale2 * 512.0f;
    return td_piece<FORMAT>::SHIFT == 0 ? 1.0f : 0x1p60f;
}

/* 8 inputs as a word of this format's weights has them, and what rounding left. */
template <int FORMAT>
static __device__ inline void td_input_word(float4 a, float4 b, uint4 *v, uint4 *rest) {
    float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    if (FORMAT == TD_W_FP8_BLOCK) {
        x[1] = a.z;
        x[2] = a.y;
        x[5] = b.z;
        x[6] = b.y;
    } else if (FORMAT == TD_W_FP4 || FORMAT == TD_W_NVFP4) {
        x[1] = b.x;
        x[2] = a.y;
        x[3] = b.y;
        x[4] = a.z;
        x[5] = b.z;
        x[6] = a.w;
    }
    v->x = td_bf16_pair(x[0], x[1]);
    v->y = td_bf16_pair(x[2], x[3]);
    v->z = td_bf16_pair(x[4], x[5]);
    v->w = td_bf16_pair(x[6], x[7]);
    if (!td_two<FORMAT>::inputs) return;
    rest->x = td_bf16_rest(x[0], x[1], v->x);
    rest->y = td_bf16_rest(x[2], x[3], v->y);
    rest->z = td_bf16_rest(x[4], x[5], v->z);
    rest->w = td_bf16_rest(x[6], x[7], v->w);
}

/* c += the words of rows g and g + 8 times an input word. */
template <int FORMAT>
static __device__ inline void td_word_product(float c[4], const struct td_word *low,
                                              const struct td_word *high, uint4 x, uint4 rest) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
        int i = 2 * step;
        uint32_t a[4] = {low->v[i], high->v[i], low->v[i + 1], high->v[i + 1]};
        uint32_t b[2] = {step ? x.z : x.x, step ? x.w : x.y};
        uint32_t l[2] = {step ? rest.z : rest.x, step ? rest.w : rest.y};
        if (td_two<FORMAT>::inputs) td_mma(c, a, l);
        if (FORMAT == TD_W_F32) {
            uint32_t left[4] = {low->rest[i], high->rest[i], low->rest[i + 1], high->rest[i + 1]};
            td_mma(c, left, b);
        }
        td_mma(c, a, b);
    }
}

/* Adds a part to the sum and starts the next. */
static __device__ inline void td_end_part(float total[4], float c[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        total[i] += c[i];
        c[i] = 0.0f;
    }
}

/* ---- the forms, and when they serve ---- */

/* Whether a thread's pieces are whole and aligned. */
static inline bool td_product_fits(const struct td_matrix *w, const float *x, size_t x_stride) {
    return w->cols % 32 == 0 && w->stored.cols % 32 == 0 && w->col % 32 == 0 &&
           (uintptr_t)x % 16 == 0 && x_stride % 4 == 0;
}

#ifdef TD_CUDA_EMULATED
#define td_cuda_linear_many td_emulated_linear_many
#define td_cuda_experts_many td_emulated_experts_many
#define td_cuda_experts_few td_emulated_experts_few
#define td_cuda_linear_wide td_emulated_linear_wide
#define td_cuda_experts_wide td_emulated_experts_wide
#define td_cuda_experts_fp4 td_emulated_experts_fp4
#endif

/* Products with one input of many rows; all parts fit, and none is fp32. */
void td_cuda_linear_many(const struct td_device *d, const struct td_linear_args *a);
/* The experts with more than `above` rows; all have one format, which fits
 * and is not fp32. */
void td_cuda_experts_many(const struct td_device *d, const struct td_expert_linear_args *a,
                          uint32_t above);
/* The same on Hopper for chunks of a prefill. False where this form does not serve, or there is no
 * room for the inputs: nothing was done. */
bool td_cuda_linear_wide(const struct td_device *d, const struct td_linear_args *a);
bool td_cuda_experts_wide(const struct td_device *d, const struct td_expert_linear_args *a,
                          uint32_t above);
/* The experts with up to TD_COLS rows. False where this form does not serve: nothing was done. */
bool td_cuda_experts_few(const struct td_device *d, const struct td_expert_linear_args *a);
/* All experts, by the codes of their inputs; all have one format, which fits. False where this form
 * does not serve: there are no codes, weights are not NVFP4, or the chip is not Blackwell. */
bool td_cuda_experts_fp4(const struct td_device *d, const struct td_expert_linear_args *a);

/* ---- rows of experts ---- */

struct td_experts {
    const float *x;
    size_t x_stride;
    const uint32_t *x_row, *offset;
    uint32_t parts, experts, outs;
    const struct td_matrix *w[2];
    float *y[2];
};

static inline struct td_experts td_experts_of(const struct td_expert_linear_args *a) {
    struct td_experts p = {};
    p.x = a->x;
    p.x_stride = a->x_stride;
    p.x_row = a->x_row;
    p.offset = a->offset;
    p.parts = a->parts;
    p.experts = a->experts;
    p.outs = a->w[0][0].rows;
    for (uint32_t i = 0; i < a->parts; i++) {
        p.w[i] = a->w[i][0].device;
        p.y[i] = a->y[i];
    }
    return p;
}

/* Experts with more than `above` and up to `upto` rows, ascending, and the pieces of work before
 * each: `per` for every `tile` rows. */
struct td_work {
    uint16_t expert[TD_MAX_EXPERTS];
    uint32_t before[TD_MAX_EXPERTS + 1], count, rows[TD_MAX_EXPERTS];
};

static __device__ inline void td_list_work(const struct td_experts *a, uint32_t above,
                                           uint32_t upto, uint32_t tile, uint32_t per,
                                           struct td_work *w) {
    for (uint32_t e = threadIdx.x; e < a->experts; e += TD_PRODUCT_THREADS)
        w->rows[e] = a->offset[e + 1] - a->offset[e];
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t lane = threadIdx.x, count = 0, all = 0;
        for (uint32_t from = 0; from < a->experts; from += 32) {
            uint32_t e = from + lane, rows = e < a->experts ? w->rows[e] : 0;
            bool taken = rows > above && rows <= upto;
            uint32_t own = taken ? td_ceil(rows, tile) * per : 0, sum = own;
            for (uint32_t by = 1; by < 32; by *= 2) {
                uint32_t o = __shfl_sync(0xffffffffu, sum, (int)((lane - by) & 31u));
                sum += lane >= by ? o : 0;
            }
            uint32_t mask = __ballot_sync(0xffffffffu, taken);
            uint32_t at = count + (uint32_t)__popc(mask & ((1u << lane) - 1u));
            if (taken) {
                w->expert[at] = (uint16_t)e;
                w->before[at] = all + sum - own;
            }
            all += __shfl_sync(0xffffffffu, sum, 31);
            count += (uint32_t)__popc(mask);
        }
        if (lane == 0) {
            w->before[count] = all;
            w->count = count;
        }
    }
    __syncthreads();
}

/* Which of the listed experts piece i of the work belongs to. */
static __device__ inline uint32_t td_find_work(const struct td_work *w, uint32_t i) {
    uint32_t lo = 0, hi = w->count - 1;
    while (lo < hi) { /* the last one with before <= i */
        uint32_t mid = (lo + hi + 1) / 2;
        if (w->before[mid] <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

#endif

/* Experts whose weights and inputs are both NVFP4, on Blackwell's block-scaled tensor cores: stored
 * nibbles and scales go into the instruction as they are. NOT YET RUN ON THE CHIP: compiled for it,
 * and computed by the emulator of the tests.
 *
 * A block has 16 outputs for each of its 8 warps and 8 or 64 rows of one expert, and all of K: 128
 * of it at a time come to shared memory, a few stages ahead, and are operands there as they lie
 * (mma_fp4.h). A lane brings the scales of one product of two for weights (thread-id-a), of one of
 * four for inputs (thread-id-b: two tiles of 8 rows, two halves of the 128), a stage ahead too,
 * from memory to the register that the instruction reads.
 *
 * Order of the sum: product.h's parts of K, the same in both forms; in a part one chain of
 * instructions, 64 of K each, ascending. Which of the rows of a step share a block changes nothing:
 * a row is a column of the instruction. */
#include "kernels/cuda/mma_fp4.h"
#include "kernels/cuda/product.h"

enum {
    THREADS = TD_PRODUCT_THREADS,
    WARPS = THREADS / 32,
    OUTS = 16 * WARPS,
    STEP = 128,             /* of K in a stage */
    PIECES = STEP / 2 / 16, /* of 16 bytes in a row of a stage */
    FEW = TD_COLS,
    MANY = 64
};

template <int ROWS> struct stage { uint8_t w[OUTS * STEP / 2], x[ROWS * STEP / 2]; };

/* Two blocks fit into the 100 KiB of a processor. */
template <int ROWS> struct depth {
    enum { STAGES = ROWS > TD_COLS ? 3 : 4 };
};

struct codes {
    struct td_experts e;
    const uint8_t *code, *scale; /* of the inputs: struct td_nvfp4_codes */
};

#ifdef TD_HAS_MMA_FP4

/* Where a piece of a row lies in a stage, so that 8 rows' pieces meet no bank twice. */
static __device__ inline uint32_t piece_at(uint32_t row, uint32_t piece) {
    return row * (STEP / 2) + (piece ^ row / 2 % PIECES) * 16;
}

/* The scales of 64 values at `at`, of which `left` are there (a multiple of 32, or none). Rows of
 * an odd number of 32s have their scales 2-aligned. */
static __device__ inline uint32_t four_scales(const uint8_t *at, uint32_t left, bool aligned) {
    const uint16_t *two = (const uint16_t *)(const void *)at;
    if (left == 0) return 0;
    if (left < 64) return two[0];
    return aligned ? *(const uint32_t *)(const void *)at : two[0] | (uint32_t)two[1] << 16;
}

/* Outputs out .. out + OUTS - 1 of `rows` (up to ROWS) rows from `first`. */
template <int ROWS>
static __device__ void multiply(const struct codes *a, const struct td_matrix *w, float *y,
                                uint32_t first, uint32_t rows, uint32_t out,
                                struct stage<ROWS> *s) {
    enum { NT = ROWS / TD_COLS, PAIRS = (NT + 1) / 2, STAGES = depth<ROWS>::STAGES };
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    uint32_t cols = w->cols, stride = w->stored.cols, steps = td_ceil(cols, STEP);
    uint32_t per = td_part_len(cols) / STEP, left = per;
    bool aligned = stride % 64 == 0 && w->col % 64 == 0;
    float c[NT][4], total[NT][4];
    uint32_t sw, sx[PAIRS];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            c[n][i] = total[n][i] = 0.0f;
    /* A thread copies one piece of every 64th row: weights from `data`, inputs from `code`. */
    uint32_t row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const uint8_t *data = (const uint8_t *)w->stored.data +
                          ((size_t)(w->row + out + row) * stride + w->col + piece * 32) / 2;
    const uint8_t *code = a->code + ((size_t)(first + row) * cols + piece * 32) / 2;
    auto copy = [&](uint32_t step) {
        struct stage<ROWS> *to = &s[step % STAGES];
        bool there =
            step * STEP + piece * 32 < cols; /* else zeros, as beyond the outputs and rows */
#pragma unroll
        for (uint32_t i = 0; i < OUTS; i += THREADS / PIECES) {
            bool valid = there && out + row + i < w->rows;
            const uint8_t *from = data + ((size_t)i * stride + step * STEP) / 2;
            td_copy_async(to->w + piece_at(row + i, piece), valid ? from : a->code, valid);
        }
        if (row < ROWS) {
            bool valid = there && row < rows;
            td_copy_async(to->x + piece_at(row, piece), valid ? code + step * STEP / 2 : a->code,
                          valid);
        }
        td_copy_commit();
    };
    uint32_t o = warp * 16 + t % 2 * 8 + g, r = t / 2 * TD_COLS + g; /* whose scales are brought */
    const uint8_t *data_scale = (const uint8_t *)w->stored.scale +
                                ((size_t)(w->row + out + o) * stride + w->col + t / 2 * 64) / 16;
    const uint8_t *code_scale = a->scale + ((size_t)(first + r) * cols + t % 2 * 64) / 16;
    auto load_scales = [&](uint32_t step) {
        uint32_t k = step * STEP + t / 2 * 64;
        uint32_t there = out + o < w->rows && k < cols ? cols - k : 0;
        sw = four_scales(data_scale + step * STEP / 16, there, aligned);
        k = step * STEP + t % 2 * 64;
        there = k < cols ? cols - k : 0;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) /* 16 rows on: as many bytes as there are columns */
            sx[p] = four_scales(code_scale + step * STEP / 16 + (size_t)p * cols,
                                p * 2 * TD_COLS + r < rows ? there : 0, cols % 64 == 0);
    };
    __syncthreads(); /* the work before may still be read */
#pragma unroll
    for (uint32_t i = 0; i < STAGES - 1; i++)
        copy(i);
    load_scales(0);
    for (uint32_t step = 0; step < steps; step++) {
        const struct stage<ROWS> *at = &s[step % STAGES];
        uint32_t own[2][4], scale = sw, scales[PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            scales[p] = sx[p];
        td_copy_wait<STAGES - 2>();
        __syncthreads(); /* everyone's copies are there; the stage before was read by all */
        copy(step + STAGES - 1);
        load_scales(step + 1);
#pragma unroll
        for (int half = 0; half < 2; half++)
            td_load_rows(own[half],
                         (const uint16_t *)(const void *)(at->w + piece_at(warp * 16 + lane % 16,
                                                                           2 * half + lane / 16)));
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n > 0 && n * TD_COLS >= rows) continue; /* the whole block */
            uint32_t b[4];
            td_load_rows(b,
                         (const uint16_t *)(const void *)(at->x + piece_at(n * TD_COLS + lane % 8,
                                                                           lane / 8)));
            if (n % 2 == 0) {
                td_mma_fp4<0, 0>(c[n], own[0], b, scale, scales[n / 2]);
                td_mma_fp4<1, 1>(c[n], own[1], b + 2, scale, scales[n / 2]);
            } else {
                td_mma_fp4<0, 2>(c[n], own[0], b, scale, scales[n / 2]);
                td_mma_fp4<1, 3>(c[n], own[1], b + 2, scale, scales[n / 2]);
            }
        }
        if (--left == 0) {
#pragma unroll
            for (int n = 0; n < NT; n++)
                td_end_part(total[n], c[n]);
            left = per;
        }
    }
    td_copy_wait<0>();
    float factor = w->stored.scale2 * w->input_scale;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        td_end_part(total[n], c[n]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t at = out + warp * 16 + g + i / 2 * 8, row = n * TD_COLS + 2 * t + i % 2;
            if (row < rows && at < w->rows)
                y[(size_t)(first + row) * w->rows + at] = total[n][i] * factor;
        }
    }
}

#endif

/* The experts with more than `above` and up to `upto` rows; each block takes every gridDim.x-th
 * piece of the work. */
template <int ROWS>
static __global__ void __launch_bounds__(THREADS, 2)
    experts_fp4(const __grid_constant__ struct codes a, uint32_t above, uint32_t upto) {
#ifdef TD_HAS_MMA_FP4
    TD_SHARED(struct stage<ROWS>, stages);
    __shared__ struct td_work work;
    uint32_t outs = td_ceil(a.e.outs, OUTS), per = outs * a.e.parts;
    td_list_work(&a.e, above, upto, ROWS, per, &work);
    for (uint32_t i = blockIdx.x; i < work.before[work.count]; i += gridDim.x) {
        uint32_t at = td_find_work(&work, i), e = work.expert[at], left = i - work.before[at];
        uint32_t first = a.e.offset[e] + left / per * ROWS, stop = a.e.offset[e + 1];
        uint32_t which = left % per / outs;
        multiply<ROWS>(&a, &a.e.w[which][e], a.e.y[which], first,
                       stop - first < ROWS ? stop - first : ROWS, left % outs * OUTS, stages);
    }
#endif
}

template <int ROWS>
static void launch(const struct td_device *d, const struct codes *p, uint32_t above,
                   uint32_t upto) {
    size_t shared = depth<ROWS>::STAGES * sizeof(struct stage<ROWS>);
    td_cuda_allow_shared(d, (const void *)experts_fp4<ROWS>, shared, "expert_linear");
    TD_LAUNCH(d, "expert_linear", experts_fp4<ROWS>, 2 * td_cuda_of(d)->processors, THREADS, shared,
              *p, above, upto);
}

bool td_cuda_experts_fp4(const struct td_device *d, const struct td_expert_linear_args *a) {
    struct codes p = {td_experts_of(a), a->codes.code, a->codes.scale};
    if (!p.code || td_cuda_of(d)->major != 12 || a->w[0][0].stored.format != TD_W_NVFP4)
        return false;
    launch<FEW>(d, &p, 0, FEW);
    if (a->most == 0 || a->most > FEW) launch<MANY>(d, &p, FEW, 0xffffffffu);
    return true;
}

/* Experts with few rows: what a decode step has, and its time is that of reading weights. A warp
 * has 16 outputs and all of K, so that nothing is exchanged and it always has loads on their way; a
 * block has a contiguous share of all the chip's work, and the rows of the expert it is at in
 * shared memory as operands of the tensor cores. */
#include "kernels/cuda/product.h"

enum { THREADS = TD_PRODUCT_THREADS, WARPS = THREADS / 32, COLS = TD_COLS, AHEAD = 4 };

/* Rows first .. first + rows - 1 as operands: word j of chunk c of lane l at
 * x[(c * words + j) * 32 + l]. Lanes of rows beyond are not read. */
template <int FORMAT>
static __device__ void stage(const struct td_experts *a, uint32_t first, uint32_t rows,
                             uint32_t cols, uint4 *x) {
    enum { LEN = td_piece<FORMAT>::LEN, WORDS = LEN / 8 };
    for (uint32_t i = threadIdx.x; i < rows * (cols / 8); i += THREADS) {
        uint32_t r = i / (cols / 8), k = i % (cols / 8) * 8;
        const float *in = a->x + (a->x_row ? a->x_row[first + r] : first + r) * a->x_stride + k;
        uint32_t chunk = k / (4 * LEN), t = k / LEN % 4, j = k / 8 % WORDS;
        uint4 unused;
        td_input_word<FORMAT>(*(const float4 *)in, *(const float4 *)(in + 4),
                              &x[(chunk * WORDS + j) * 32 + r * 4 + t], &unused);
    }
}

/* What a warp has on its way: a thread copies what it will read. Two chunks are asked for together:
 * they are 128 bytes side by side of every row, and memory opens a row once for both. */
struct ring {
    uint4 data[AHEAD][2][32];
};

/* Outputs out .. out + 15 of the staged rows. */
template <int FORMAT>
static __device__ void multiply(const struct td_part *p, uint32_t out, const uint4 *x,
                                uint32_t first, uint32_t rows, struct ring *ring) {
    enum { LEN = td_piece<FORMAT>::LEN, CHUNK = 4 * LEN, WORDS = LEN / 8 };
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t chunks = td_ceil(p->cols, CHUNK), per = td_part_len(p->cols) / CHUNK, left = per;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    bool live = g < rows, valid[2];
    struct td_source from[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t r = out + h * 8 + g;
        valid[h] = r < p->rows;
        from[h] = td_piece<FORMAT>::source(&p->w, p->row + (valid[h] ? r : 0), p->col + t * LEN);
    }
    /* FP8: a scale is that of 128 values. */
    uint32_t within = FORMAT == TD_W_FP8_BLOCK ? (p->col + t * LEN) % 128 : 0;
    auto scale_of = [&](int h, uint32_t chunk) -> uint32_t {
        if (!valid[h] || chunk * CHUNK + t * LEN >= p->cols) return 0;
        if (FORMAT == TD_W_NVFP4)
            return *(const uint16_t *)(const void *)(from[h].scale + chunk * 8);
        return from[h].scale[FORMAT == TD_W_FP4 ? chunk * 4 : (within + chunk * CHUNK) / 128];
    };
    auto copy = [&](uint32_t chunk, uint32_t slot) {
        bool there = chunk * CHUNK + t * LEN < p->cols;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool wanted = valid[h] && there;
            td_copy_async(&ring->data[slot][h][lane], from[h].data + (there ? chunk * 64 : 0),
                          wanted);
        }
    };
    uint32_t scale[AHEAD][2]; /* on their way as long as what they scale */
    auto copy_two = [&](uint32_t chunk, int slot) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            copy(chunk + i, slot + i);
            scale[slot + i][0] = scale_of(0, chunk + i);
            scale[slot + i][1] = scale_of(1, chunk + i);
        }
        td_copy_commit();
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i += 2)
        copy_two(i, i);
    for (uint32_t begin = 0; begin < chunks; begin += AHEAD)
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; i++) {
            uint32_t chunk = begin + i;
            if (chunk >= chunks) continue; /* the whole warp */
            struct td_piece<FORMAT> w[2];
            if (i % 2 == 0) td_copy_wait<AHEAD / 2 - 1>();
#pragma unroll
            for (int h = 0; h < 2; h++)
                w[h].take(ring->data[i][h][lane], scale[i][h]);
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                uint4 v = {0, 0, 0, 0};
                struct td_word low, high;
                if (live && chunk * CHUNK + t * LEN < p->cols)
                    v = x[(chunk * WORDS + j) * 32 + lane];
                w[0].word(j, &low);
                w[1].word(j, &high);
                td_word_product<FORMAT>(c, &low, &high, v, v);
            }
            if (--left == 0) {
                td_end_part(total, c);
                left = per;
            }
            if (i % 2 == 1) copy_two(chunk + AHEAD - 1, i - 1); /* where this one was */
        }
    td_copy_wait<0>();
    td_end_part(total, c);
    float factor = td_product_factor<FORMAT>(&p->w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t o = out + g + i / 2 * 8, r = 2 * t + i % 2;
        if (r < rows && o < p->rows) p->y[(first + r) * p->y_stride + o] = total[i] * factor;
    }
}

template <int FORMAT>
static __global__ void __launch_bounds__(THREADS, 2)
    stream_experts(const __grid_constant__ struct td_experts a, uint32_t cols) {
    TD_SHARED(struct ring,
              rings); /* of every warp; then operands, [cols in whole chunks / 8][COLS] */
    uint4 *x = (uint4 *)(void *)(rings + WARPS);
    __shared__ struct td_work work;
    uint32_t tiles = td_ceil(a.outs, 16), staged = TD_MAX_EXPERTS;
    td_list_work(&a, 0, COLS, COLS, tiles * a.parts, &work);
    uint64_t all = work.before[work.count];
    uint32_t at = (uint32_t)(all * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)(all * (blockIdx.x + 1) / gridDim.x);
    while (at < end) {
        uint32_t which = td_find_work(&work, at), e = work.expert[which];
        uint32_t left = at - work.before[which], tile = left % tiles;
        uint32_t stop = end - at < tiles - tile ? end - at : tiles - tile; /* of this matrix */
        uint32_t first = a.offset[e], rows = a.offset[e + 1] - first;
        which = left / tiles;
        if (e != staged) {
            __syncthreads();
            stage<FORMAT>(&a, first, rows, cols, x);
            __syncthreads();
            staged = e;
        }
        const struct td_matrix *w = &a.w[which][e];
        struct td_part p = td_part_of(w, a.y[which], w->rows);
        for (uint32_t i = threadIdx.x / 32; i < stop; i += WARPS)
            multiply<FORMAT>(&p, (tile + i) * 16, x, first, rows, &rings[threadIdx.x / 32]);
        at += stop;
    }
}

template <int FORMAT>
static void launch(const struct td_device *d, const struct td_experts *p, uint32_t cols,
                   size_t shared) {
    td_cuda_allow_shared(d, (const void *)stream_experts<FORMAT>, shared, "expert_linear");
    TD_LAUNCH(d, "expert_linear", stream_experts<FORMAT>, 2 * td_cuda_of(d)->processors, THREADS,
              shared, *p, cols);
}

bool td_cuda_experts_few(const struct td_device *d, const struct td_expert_linear_args *a) {
    struct td_experts p = td_experts_of(a);
    uint32_t cols = a->w[0][0].cols;
    enum td_weight_format f = a->w[0][0].stored.format;
    size_t shared =
        WARPS * sizeof(struct ring) + (size_t)td_ceil(cols, 128) * 128 * COLS * sizeof(uint16_t);
    if (shared > td_cuda_of(d)->shared_max - sizeof(struct td_work) - 1024) return false;
    if (f == TD_W_FP8_BLOCK)
        launch<TD_W_FP8_BLOCK>(d, &p, cols, shared);
    else if (f == TD_W_FP4)
        launch<TD_W_FP4>(d, &p, cols, shared);
    else if (f == TD_W_NVFP4)
        launch<TD_W_NVFP4>(d, &p, cols, shared);
    else
        return false;
    return true;
}

/* Experts with few rows: what a decode step has, and its time is that of reading weights. A warp
 * has 16 outputs and all of K, so that nothing is exchanged; what it reads goes on from the end of
 * one such tile into the next without a pause. A block has a contiguous share of all the chip's
 * tiles, of which its warps take the next one when they are through with theirs, and the rows of the
 * experts it is at in shared memory as operands of the tensor cores. */
#include "kernels/cuda/product.h"

enum { THREADS = TD_PRODUCT_THREADS, WARPS = THREADS / 32, COLS = TD_COLS, AHEAD = 4 };

/* Rows first .. first + rows - 1 as operands, from place `at` of 8 on: word j of chunk c of place p
 * and thread t at x[((c * words + j) * COLS + p) * 4 + t]. */
template <int FORMAT>
static __device__ void stage(const struct td_experts *a, uint32_t first, uint32_t rows, uint32_t at,
                             uint32_t cols, uint4 *x) {
    enum { LEN = td_piece<FORMAT>::LEN, WORDS = LEN / 8 };
    for (uint32_t i = threadIdx.x; i < rows * (cols / 8); i += THREADS) {
        uint32_t r = i / (cols / 8), k = i % (cols / 8) * 8;
        const float *in = a->x + (a->x_row ? a->x_row[first + r] : first + r) * a->x_stride + k;
        uint32_t chunk = k / (4 * LEN), t = k / LEN % 4, j = k / 8 % WORDS;
        uint4 unused;
        td_input_word<FORMAT>(*(const float4 *)in, *(const float4 *)(in + 4),
                              &x[((chunk * WORDS + j) * COLS + at + r) * 4 + t], &unused);
    }
}

/* What a warp has on its way: a thread copies what it will read. Two chunks are asked for together:
 * they are 128 bytes side by side of every row, and memory opens a row once for both. */
struct ring {
    uint4 data[AHEAD][2][32];
};

/* Of a block: its work, and where rows of the listed experts are staged. */
struct share {
    struct td_work work;
    uint8_t place[TD_MAX_EXPERTS];
    uint32_t next; /* the tile that nobody has */
};

/* A thread's part of a tile: outputs g and g + 8 of 16, which are `step` bytes apart. Outputs that
 * a matrix does not have are its last one, multiplied in vain. */
struct tile {
    const uint8_t *data, *scale;
    uint32_t data_step, scale_step, within; /* within: FP8, the first column of 128 */
    float *y;
    uint32_t outs, rows, place;
    float factor;
};

template <int FORMAT>
static __device__ struct tile tile_of(const struct td_experts *a, const struct share *s,
                                      uint32_t i) {
    enum { LEN = td_piece<FORMAT>::LEN };
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, tiles = td_ceil(a->outs, 16);
    uint32_t which = td_find_work(&s->work, i), e = s->work.expert[which];
    uint32_t left = i - s->work.before[which], out = left % tiles * 16;
    const struct td_matrix *w = &a->w[left / tiles][e];
    struct td_weight stored = w->stored;
    uint32_t row = w->row, col = w->col + t * LEN, last = w->rows - 1;
    uint32_t low = out + g < last ? out + g : last, high = out + g + 8 < last ? out + g + 8 : last;
    struct td_source from = td_piece<FORMAT>::source(&stored, row + low, col);
    struct td_source next = td_piece<FORMAT>::source(&stored, row + high, col);
    struct tile p;
    p.data = from.data;
    p.scale = from.scale;
    p.data_step = (uint32_t)(next.data - from.data);
    p.scale_step = (uint32_t)(next.scale - from.scale);
    p.within = col % 128;
    p.y = a->y[left / tiles] + (size_t)a->offset[e] * (last + 1) + out;
    p.outs = last + 1 - out;
    p.rows = s->work.rows[e];
    p.place = s->place[which];
    p.factor = td_product_factor<FORMAT>(&stored);
    return p;
}

/* Tiles up to `stop`, of experts that are staged. WHOLE: rows of weights are whole rounds. */
template <int FORMAT, bool WHOLE>
static __device__ void walk(const struct td_experts *a, struct share *s, uint32_t stop,
                            uint32_t cols, const uint4 *x, struct ring *ring) {
    enum { LEN = td_piece<FORMAT>::LEN, CHUNK = 4 * LEN, WORDS = LEN / 8 };
    uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t chunks = td_ceil(cols, CHUNK), per = td_part_len(cols) / CHUNK;
    uint32_t scale[AHEAD][2]; /* on their way as long as what they scale */
    auto take = [&]() {
        uint32_t i = lane == 0 ? atomicAdd(&s->next, 1u) : 0;
        return __shfl_sync(0xffffffffu, i, 0);
    };
    auto copy_two = [&](const struct tile *from, uint32_t first, int slot, bool wanted) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t chunk = first + i;
            bool there = wanted && (WHOLE || chunk * CHUNK + t * LEN < cols);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint8_t *at = from->scale + h * from->scale_step;
                td_copy_async(&ring->data[slot + i][h][lane],
                              from->data + h * from->data_step + (there ? chunk * 64 : 0), there);
                scale[slot + i][h] = 0;
                if (!there) continue;
                if (FORMAT == TD_W_NVFP4)
                    scale[slot + i][h] = *(const uint16_t *)(const void *)(at + chunk * 8);
                else if (FORMAT == TD_W_FP4)
                    scale[slot + i][h] = at[chunk * 4];
                else
                    scale[slot + i][h] = at[(from->within + chunk * CHUNK) / 128];
            }
        }
        td_copy_commit();
    };
    uint32_t i = take();
    if (i >= stop) return; /* the whole warp */
    struct tile now = tile_of<FORMAT>(a, s, i);
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot += 2)
        copy_two(&now, slot, slot, true);
    for (bool more = true; more;) {
        struct tile then = now;
        i = take();
        more = i < stop;
        if (more) then = tile_of<FORMAT>(a, s, i);
        struct tile from = now; /* of what is asked for */
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        uint32_t left = per;
        /* threads of rows that are not there read the first one's, and nobody their sums */
        const uint4 *in = x + (now.place + (g < now.rows ? g : 0)) * 4 + t;
        for (uint32_t begin = 0; begin < chunks; begin += AHEAD) {
            uint32_t ahead = begin + AHEAD;
            bool wanted = true;
            if (ahead >= chunks) { /* the next tile's first */
                from = then;
                ahead = 0;
                wanted = more;
            }
#pragma unroll
            for (uint32_t k = 0; k < AHEAD; k++) {
                uint32_t chunk = begin + k;
                if (k % 2 == 0) td_copy_wait<AHEAD / 2 - 1>();
                if (WHOLE || chunk < chunks) { /* the whole warp */
                    struct td_piece<FORMAT> w[2];
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        w[h].take(ring->data[k][h][lane], scale[k][h]);
#pragma unroll
                    for (int j = 0; j < WORDS; j++) {
                        uint4 v = {0, 0, 0, 0};
                        struct td_word low, high;
                        if (WHOLE || chunk * CHUNK + t * LEN < cols)
                            v = in[(chunk * WORDS + j) * COLS * 4];
                        w[0].word(j, &low);
                        w[1].word(j, &high);
                        td_word_product<FORMAT>(c, &low, &high, v, v);
                    }
                    if (--left == 0) {
                        td_end_part(total, c);
                        left = per;
                    }
                }
                if (k % 2 == 1) copy_two(&from, ahead + k - 1, k - 1, wanted);
            }
        }
        td_end_part(total, c);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t o = g + k / 2 * 8, r = 2 * t + k % 2;
            if (r < now.rows && o < now.outs) now.y[(size_t)r * a->outs + o] = total[k] * now.factor;
        }
        now = then;
    }
    td_copy_wait<0>();
}

template <int FORMAT, bool WHOLE>
static __global__ void __launch_bounds__(THREADS, 2)
    stream_experts(const __grid_constant__ struct td_experts a, uint32_t cols) {
    TD_SHARED(struct ring, rings); /* of every warp; then operands, [cols in whole chunks / 8][COLS] */
    uint4 *x = (uint4 *)(void *)(rings + WARPS);
    __shared__ struct share s;
    td_list_work(&a, 0, COLS, COLS, td_ceil(a.outs, 16) * a.parts, &s.work);
    uint64_t all = s.work.before[s.work.count];
    uint32_t at = (uint32_t)(all * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)(all * (blockIdx.x + 1) / gridDim.x);
    while (at < end) {
        uint32_t which = td_find_work(&s.work, at), staged = 0;
        __syncthreads();
        for (; which < s.work.count && s.work.before[which] < end; which++) {
            uint32_t e = s.work.expert[which], rows = s.work.rows[e];
            if (staged + rows > COLS) break;
            if (threadIdx.x == 0) s.place[which] = (uint8_t)staged;
            stage<FORMAT>(&a, a.offset[e], rows, staged, cols, x);
            staged += rows;
        }
        uint32_t stop = s.work.before[which] < end ? s.work.before[which] : end;
        if (threadIdx.x == 0) s.next = at;
        __syncthreads();
        walk<FORMAT, WHOLE>(&a, &s, stop, cols, x, &rings[threadIdx.x / 32]);
        at = stop;
    }
}

template <int FORMAT, bool WHOLE>
static void launch(const struct td_device *d, const struct td_experts *p, uint32_t cols,
                   size_t shared) {
    td_cuda_allow_shared(d, (const void *)stream_experts<FORMAT, WHOLE>, shared, "expert_linear");
    TD_LAUNCH(d, "expert_linear", (stream_experts<FORMAT, WHOLE>), 2 * td_cuda_of(d)->processors,
              THREADS, shared, *p, cols);
}

template <int FORMAT>
static void choose(const struct td_device *d, const struct td_experts *p, uint32_t cols,
                   size_t shared) {
    if (cols % (AHEAD * 4 * td_piece<FORMAT>::LEN) == 0)
        launch<FORMAT, true>(d, p, cols, shared);
    else
        launch<FORMAT, false>(d, p, cols, shared);
}

bool td_cuda_experts_few(const struct td_device *d, const struct td_expert_linear_args *a) {
    struct td_experts p = td_experts_of(a);
    uint32_t cols = a->w[0][0].cols;
    enum td_weight_format f = a->w[0][0].stored.format;
    size_t shared =
        WARPS * sizeof(struct ring) + (size_t)td_ceil(cols, 128) * 128 * COLS * sizeof(uint16_t);
    if (shared > td_cuda_of(d)->shared_max - sizeof(struct share) - 1024) return false;
    if (f == TD_W_FP8_BLOCK)
        choose<TD_W_FP8_BLOCK>(d, &p, cols, shared);
    else if (f == TD_W_FP4)
        choose<TD_W_FP4>(d, &p, cols, shared);
    else if (f == TD_W_NVFP4)
        choose<TD_W_NVFP4>(d, &p, cols, shared);
    else
        return false;
    return true;
}

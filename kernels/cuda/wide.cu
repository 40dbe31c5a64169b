/* Matrix products with many rows on Hopper: the linears of a prefill chunk and its experts.
 *
 * A block has 128 outputs and up to 192 rows, and walks through its share of the call's tiles. One
 * warp group brings: weights are copied as they are stored, decoded to bf16 once per block and laid
 * into shared memory as an operand; inputs are copied there by the hardware in one piece, because a
 * pass before has laid them out as operands, in memory that nobody needs meanwhile. Two warp groups
 * multiply, 64 outputs each. The part of K at hand and the sum of those before are in registers,
 * which the group that brings leaves to them. The order of the sum is product.h's, and so are the
 * bits. */
#include "kernels/cuda/gate.h"
#include "kernels/cuda/product.h"

enum {
    OUTS = 128,
    ROWS = 192,
    GROUP = 128, /* threads of a warp group */
    THREADS = 3 * GROUP,
    AHEAD = 3, /* units of weights on their way, 4 pieces a thread each */
    /* Registers of a thread: at launch as many for all; then more for those that multiply, out of
     * what those that bring leave. */
    LAUNCHED = 65536 / THREADS / 8 * 8,
    MULTIPLY = 216,
    BRING = 72,
    LEAST_ROWS = 256,
    LEAST_MOST = 1024, /* rows that an expert may have */
};

static_assert(2 * MULTIPLY + BRING <= 3 * LAUNCHED,
              "more registers than there are: a wait for ever");

/* ---- inputs as operands ---- */

/* Rows of x as tiles: of every 64 of K all rows, 128 bytes each, as wgmma.h has them. */
struct layout {
    const float *x;
    size_t x_stride;
    uint16_t *tiles;
    size_t rest; /* values from there to what rounding left, where inputs are two values */
    uint32_t n, all, cols; /* rows that are there (unless by experts); of a plane; of K */
    const uint32_t *x_row, *offset;
    uint32_t experts;
    size_t x_at[TD_LINEAR_PARTS];
};

/* Where the rows of an expert begin: multiples of 8, so that the swizzle is the tile's. */
static __host__ __device__ inline uint32_t tile_row(uint32_t offset, uint32_t e) {
    return ((offset + 7) & ~7u) + 8 * e;
}

/* A warp has two rows, a thread 8 of every 128 values; they become a word of the format and lie in
 * four of the tile's pieces. */
enum { LAY_THREADS = 256, LAY_WARPS = LAY_THREADS / 32 };
template <int FORMAT>
static __global__ void __launch_bounds__(LAY_THREADS)
    lay_rows(const __grid_constant__ struct layout a) {
    enum { LEN = td_piece<FORMAT>::LEN };
    __shared__ __align__(16) uint32_t piece[2][LAY_WARPS][2][16][4];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / 16, u = lane % 16;
    uint32_t row = blockIdx.x * 2 * LAY_WARPS + warp * 2 + half, n = a.n, to = row, turn = 0;
    if (a.offset) {
        n = a.offset[a.experts];
        if (blockIdx.x * 2 * LAY_WARPS >= n) return; /* the whole block */
        uint32_t lo = 0, hi = a.experts - 1;
        while (lo < hi) { /* the last one that begins at or before the row */
            uint32_t mid = (lo + hi + 1) / 2;
            if (a.offset[mid] <= row)
                lo = mid;
            else
                hi = mid - 1;
        }
        to = tile_row(a.offset[lo], lo) + row - a.offset[lo];
    }
    bool there = row < n;
    const float *x = a.x + a.x_at[blockIdx.y] +
                     (size_t)(there && a.x_row ? a.x_row[row]
                              : there          ? row
                                               : 0) *
                         a.x_stride;
    uint16_t *tiles = a.tiles + (size_t)blockIdx.y * a.all * a.cols;
    /* which word of the 128, and where its four pairs go */
    uint32_t k = u * 8, t = k / LEN % 4, word = k / (4 * LEN) * (LEN / 8) + k % LEN / 8;
    uint32_t plane = word / 2, first = word % 2 * 4;
#pragma unroll 4
    for (uint32_t from = 0; from < a.cols; from += 128, turn ^= 1) {
        float4 v = {0.0f, 0.0f, 0.0f, 0.0f}, w = v;
        if (there) {
            v = *(const float4 *)(x + from + k);
            w = *(const float4 *)(x + from + k + 4);
        }
        uint4 r, rest;
        td_input_word<FORMAT>(v, w, &r, &rest);
        uint32_t(*at)[4] = piece[turn][warp][half];
        at[plane * 8 + first][t] = r.x;
        at[plane * 8 + first + 1][t] = r.y;
        at[plane * 8 + first + 2][t] = r.z;
        at[plane * 8 + first + 3][t] = r.w;
        __syncwarp();
        if (there)
            *(uint4 *)&tiles[((size_t)(from / 64 + u / 8) * a.all + to) * TD_TILE +
                             (u % 8 ^ to % 8) * 8] = *(const uint4 *)at[u];
        if (!td_two<FORMAT>::inputs) continue;
        turn ^= 1;
        at = piece[turn][warp][half];
        at[plane * 8 + first][t] = rest.x;
        at[plane * 8 + first + 1][t] = rest.y;
        at[plane * 8 + first + 2][t] = rest.z;
        at[plane * 8 + first + 3][t] = rest.w;
        __syncwarp();
        if (there)
            *(uint4 *)&tiles[a.rest + ((size_t)(from / 64 + u / 8) * a.all + to) * TD_TILE +
                             (u % 8 ^ to % 8) * 8] = *(const uint4 *)at[u];
    }
}

template <int FORMAT>
static void lay(const struct td_device *d, const struct layout *a, uint32_t regions,
                const char *op) {
    TD_LAUNCH(d, op, lay_rows<FORMAT>, dim3(td_ceil(a->n, 2 * LAY_WARPS), regions), LAY_THREADS, 0,
              *a);
}

static void lay_inputs(const struct td_device *d, enum td_weight_format f, const struct layout *a,
                       uint32_t regions, const char *op) {
    if (f == TD_W_FP8_BLOCK)
        lay<TD_W_FP8_BLOCK>(d, a, regions, op);
    else if (f == TD_W_BF16)
        lay<TD_W_BF16>(d, a, regions, op);
    else
        lay<TD_W_NVFP4>(d, a, regions, op); /* FP4's order, too */
}

/* ---- products ---- */

/* TWO: inputs are two values each. Then weights go through registers alone. */
template <bool TWO> struct stage {
    uint16_t w[OUTS * TD_TILE], x[ROWS * TD_TILE], rest[(TWO ? ROWS : 8) * TD_TILE];
};
static_assert(sizeof(struct stage<false>) % TD_TILE_ROOM == 0 &&
                  sizeof(struct stage<true>) % TD_TILE_ROOM == 0,
              "the hardware's swizzle goes by addresses");
template <bool TWO> struct memory {
    enum { STAGES = TWO ? 3 : 4 }; /* of 64 of K */
    struct stage<TWO> stage[STAGES];
    uint4 raw[TWO ? 1 : AHEAD + 1][4][GROUP]; /* a thread copies what it will decode */
#ifdef TD_HAS_WGMMA
    struct td_gate full[STAGES], empty[STAGES];
#endif
};

/* Of a tile: outputs out .. of the part, rows first .. first + rows - 1 of y, whose inputs begin at
 * x. `plane`: values from one 64 of K to the next. */
struct tile {
    struct td_part p;
    uint32_t out, first, rows;
    const uint16_t *x;
    size_t plane, rest;
};

/* Rows of each of the tiles that `rows` are cut into. */
static __host__ __device__ inline uint32_t tile_rows(uint32_t rows) {
    uint32_t tiles = (rows + ROWS - 1) / ROWS;
    return ((rows + tiles - 1) / tiles + 7) & ~7u;
}

#ifdef TD_HAS_WGMMA
/* Where the ring of stages is. */
struct turn {
    uint32_t at, round;
};
template <bool TWO> static __device__ inline void step(struct turn *t) {
    if (++t->at == memory<TWO>::STAGES) {
        t->at = 0;
        t->round ^= 1;
    }
}

/* A word of a row of weights, as an operand. */
static __device__ inline void store_word(uint16_t *w, uint32_t row, uint32_t at64,
                                         const struct td_word *v) {
    uint32_t at = td_tile_at(row, at64);
    *(uint32_t *)&w[at] = v->v[0];
    *(uint32_t *)&w[at ^ 8] = v->v[1];
    *(uint32_t *)&w[at ^ 16] = v->v[2];
    *(uint32_t *)&w[at ^ 24] = v->v[3];
}

/* Weights that are bf16, and inputs that are two values. */
static __device__ void bring_two(const struct tile *tile, struct memory<true> *s,
                                 struct turn *turn) {
    typedef struct td_piece<TD_W_BF16> piece_t;
    const struct td_part *p = &tile->p;
    uint32_t thread = threadIdx.x % GROUP, row = thread / 4, t = thread % 4;
    uint32_t stages = p->cols / 64, bytes = ((tile->rows + 7) & ~7u) * TD_TILE * 2;
    const uint8_t *from[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t r = tile->out + row + i * 32;
        from[i] = piece_t::source(&p->w, p->row + (r < p->rows ? r : 0), p->col + t * 8).data;
    }
    piece_t next[4][2];
    auto load =
        [&](uint32_t stage) { /* beyond the last output a row that nobody writes */
                              if (stage >= stages) return;
#pragma unroll
                              for (int i = 0; i < 4; i++)
#pragma unroll
                                  for (int j = 0; j < 2; j++)
                                      next[i][j].take(
                                          *(const uint4 *)(const void *)(from[i] +
                                                                         (size_t)stage * 128 +
                                                                         j * 64),
                                          0);
        };
    load(0);
    for (uint32_t i = 0; i < stages; i++) {
        struct stage<true> *to = &s->stage[turn->at];
        td_gate_wait(&s->empty[turn->at], turn->round ^ 1);
        if (thread == 0) {
            td_gate_expect(&s->full[turn->at], 2 * bytes);
            td_gate_copy(to->x, tile->x + i * tile->plane, bytes, &s->full[turn->at]);
            td_gate_copy(to->rest, tile->x + tile->rest + i * tile->plane, bytes,
                         &s->full[turn->at]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                struct td_word v;
                next[k][j].word(0, &v);
                store_word(to->w + k * 32 * TD_TILE, row, (uint32_t)j * 32 + t * 2, &v);
            }
        load(i + 1);
        td_wgmma_publish();
        __syncwarp();
        if (thread % 32 == 0) td_gate_arrive(&s->full[turn->at]);
        step<true>(turn);
    }
}

template <int FORMAT>
static __device__ void bring(const struct tile *tile, struct memory<false> *s, struct turn *turn) {
    typedef struct td_piece<FORMAT> piece_t;
    enum { LEN = piece_t::LEN, UNIT = 4 * LEN, HALVES = UNIT / 64 };
    const struct td_part *p = &tile->p;
    uint32_t thread = threadIdx.x % GROUP, row = thread / 4, t = thread % 4;
    uint32_t units = p->cols / UNIT, bytes = ((tile->rows + 7) & ~7u) * TD_TILE * 2;
    size_t pitch = (size_t)p->w.cols * 16 / LEN * 32; /* 32 rows */
    size_t scale_pitch = FORMAT == TD_W_FP8_BLOCK ? 0
                         : FORMAT == TD_W_FP4     ? (size_t)p->w.cols
                                                  : (size_t)p->w.cols * 2;
    uint32_t here = tile->out + row < p->rows ? tile->out + row : 0;
    struct td_source from = piece_t::source(&p->w, p->row + here, p->col + t * LEN);
    uint32_t valid = 0;
    for (uint32_t i = 0; i < 4; i++)
        valid |= (tile->out + row + i * 32 < p->rows ? 1u : 0u) << i;
    auto copy = [&](uint32_t unit) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            bool wanted = unit < units && (valid >> i & 1u);
            td_copy_async(&s->raw[unit % (AHEAD + 1)][i][thread],
                          from.data + (wanted ? i * pitch + (size_t)unit * 64 : 0), wanted);
        }
        td_copy_commit();
    };
    auto load_scales = [&](uint32_t unit, uint32_t scale[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            scale[i] = 0;
            if (unit >= units || !(valid >> i & 1u)) continue;
            const uint8_t *at = from.scale + i * scale_pitch;
            if (FORMAT == TD_W_FP8_BLOCK) scale[i] = at[unit / 2];
            if (FORMAT == TD_W_FP4) scale[i] = at[unit * 4];
            if (FORMAT == TD_W_NVFP4) scale[i] = *(const uint16_t *)(const void *)(at + unit * 8);
        }
    };
    uint32_t scale[4], next[4];
    for (uint32_t i = 0; i < AHEAD; i++)
        copy(i);
    load_scales(0, scale);
    load_scales(1, next);
    for (uint32_t unit = 0; unit < units; unit++) {
        piece_t w[4];
        td_copy_wait<AHEAD - 1>();
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i].take(s->raw[unit % (AHEAD + 1)][i][thread], scale[i]);
        copy(unit + AHEAD);
#pragma unroll
        for (int i = 0; i < 4; i++)
            scale[i] = next[i];
        load_scales(unit + 2, next);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            struct stage<false> *to = &s->stage[turn->at];
            td_gate_wait(&s->empty[turn->at], turn->round ^ 1);
            if (thread == 0) {
                td_gate_expect(&s->full[turn->at], bytes);
                td_gate_copy(to->x, tile->x + (size_t)(unit * HALVES + half) * tile->plane, bytes,
                             &s->full[turn->at]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    struct td_word v;
                    w[i].word(half * 2 + j, &v);
                    store_word(to->w + i * 32 * TD_TILE, row, (uint32_t)j * 32 + t * 2, &v);
                }
            td_wgmma_publish();
            __syncwarp();
            if (thread % 32 == 0) td_gate_arrive(&s->full[turn->at]);
            step<false>(turn);
        }
    }
    td_copy_wait<0>();
}

static __device__ inline void bring_tile(const struct tile *tile, struct memory<true> *s,
                                         struct turn *turn) {
    bring_two(tile, s, turn);
}
static __device__ inline void bring_tile(const struct tile *tile, struct memory<false> *s,
                                         struct turn *turn) {
    if (tile->p.w.format == TD_W_FP8_BLOCK)
        bring<TD_W_FP8_BLOCK>(tile, s, turn);
    else if (tile->p.w.format == TD_W_FP4)
        bring<TD_W_FP4>(tile, s, turn);
    else
        bring<TD_W_NVFP4>(tile, s, turn);
}

/* The 64 outputs of warp group `side` for up to N rows. */
template <int N, bool TWO>
static __device__ void multiply(const struct tile *tile, uint32_t side, struct memory<TWO> *s,
                                struct turn *turn) {
    const struct td_part *p = &tile->p;
    uint32_t stages = p->cols / 64, per = td_part_len(p->cols) / 64, lane = threadIdx.x % 32;
    float c[N / 2], total[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        c[i] = total[i] = 0.0f;
    for (uint32_t begin = 0; begin < stages; begin += per) {
        uint32_t end = begin + per < stages ? begin + per : stages, before = 0;
        for (uint32_t i = begin; i < end; i++) {
            struct stage<TWO> *at = &s->stage[turn->at];
            const uint16_t *w = at->w + side * 64 * TD_TILE;
            td_gate_wait(&s->full[turn->at], turn->round);
            td_wgmma_begin();
#pragma unroll
            for (uint32_t k = 0; k < 64; k += 16) {
                if (TWO) td_wgmma_tiles<N>(c, w, at->rest, k, i > begin || k > 0);
                td_wgmma_tiles<N>(c, w, at->x, k, TWO || i > begin || k > 0);
            }
            td_wgmma_commit();
            if (i > begin) {
                td_wgmma_left<1>();
                if (lane == 0) td_gate_arrive(&s->empty[before]);
            }
            before = turn->at;
            step<TWO>(turn);
        }
        td_wgmma_left<0>();
        if (lane == 0) td_gate_arrive(&s->empty[before]);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            total[i] += c[i];
    }
    float factor = TWO                         ? 1.0f
                   : p->w.format == TD_W_NVFP4 ? td_product_factor<TD_W_NVFP4>(&p->w)
                                               : td_product_factor<TD_W_FP8_BLOCK>(&p->w);
    uint32_t g = lane / 4, t = lane % 4;
    uint32_t out = tile->out + side * 64 + threadIdx.x / 32 % 4 * 16 + g;
    float *y = p->y + (size_t)(tile->first + 2 * t) * p->y_stride + out;
    bool low = out < p->rows, high = out + 8 < p->rows;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        uint32_t r = i / 4 * 8 + 2 * t + i % 2;
        float *to = y + (size_t)(i / 4 * 8 + i % 2) * p->y_stride + i / 2 % 2 * 8;
        if (r < tile->rows && (i / 2 % 2 ? high : low)) *to = total[i] * factor;
    }
}

template <bool TWO>
static __device__ inline void multiply_tile(const struct tile *tile, uint32_t side,
                                            struct memory<TWO> *s, struct turn *turn) {
    if (tile->rows > 160)
        multiply<192>(tile, side, s, turn);
    else if (tile->rows > 128)
        multiply<160>(tile, side, s, turn);
    else if (tile->rows > 96)
        multiply<128>(tile, side, s, turn);
    else if (tile->rows > 64)
        multiply<96>(tile, side, s, turn);
    else if (tile->rows > 32)
        multiply<64>(tile, side, s, turn);
    else
        multiply<32>(tile, side, s, turn);
}

/* All of a block's tiles: tile_of(i) for every gridDim.x-th i below `tiles`. */
template <bool TWO, class TILE>
static __device__ inline void walk(uint32_t tiles, const TILE &tile_of, struct memory<TWO> *s) {
    struct turn turn = {0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < memory<TWO>::STAGES; i++) {
            td_gate_init(&s->full[i], GROUP / 32 + 1);
            td_gate_init(&s->empty[i], 2 * GROUP / 32);
        }
        td_gate_publish();
    }
    __syncthreads();
    uint32_t group = threadIdx.x / GROUP;
    if (group == 2) {
        td_registers_less<BRING>();
        for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
            struct tile tile = tile_of(i);
            bring_tile(&tile, s, &turn);
        }
    } else {
        td_registers_more<MULTIPLY>();
        for (uint32_t i = blockIdx.x; i < tiles; i += gridDim.x) {
            struct tile tile = tile_of(i);
            multiply_tile(&tile, group, s, &turn);
        }
    }
}
#endif

/* ---- linears ---- */

struct linears {
    const uint16_t *tiles;
    uint32_t n, all, each, parts; /* rows; of a plane; of a tile */
    size_t rest;
    uint32_t before[TD_LINEAR_PARTS + 1], region[TD_LINEAR_PARTS];
    struct td_part part[TD_LINEAR_PARTS];
};

template <bool TWO>
static __global__ void __launch_bounds__(THREADS, 1)
    linear_wide(const __grid_constant__ struct linears a) {
#ifdef TD_HAS_WGMMA
    TD_SHARED(unsigned char, dynamic);
    struct memory<TWO> *s = (struct memory<TWO> *)td_tile_memory(dynamic);
    walk(
        a.before[a.parts],
        [&](uint32_t i) {
            uint32_t part = 0;
            while (i >= a.before[part + 1])
                part++;
            i -= a.before[part];
            struct tile t;
            t.p = a.part[part];
            uint32_t outs = td_ceil(t.p.rows, OUTS);
            t.out = i % outs * OUTS;
            t.first = i / outs * a.each;
            t.rows = a.n - t.first < a.each ? a.n - t.first : a.each;
            t.plane = (size_t)a.all * TD_TILE;
            t.rest = a.rest;
            t.x = a.tiles + (size_t)a.region[part] * a.all * t.p.cols + (size_t)t.first * TD_TILE;
            return t;
        },
        s);
#endif
}

/* Whether a matrix is whole blocks of 128 of K, and of outputs where scales are. */
static bool fits(const struct td_matrix *w) {
    enum td_weight_format f = w->stored.format;
    if (f == TD_W_F32) return false;
    if (w->cols % 128 || w->col % 128 || w->stored.cols % 128) return false;
    return f != TD_W_FP8_BLOCK || w->row % 128 == 0;
}

static bool has_room(const struct td_device *d) {
    return td_cuda_of(d)->major == 9 && td_cuda_of(d)->shared_max >= sizeof(struct memory<false>) +
                                                                         TD_TILE_ROOM +
                                                                         sizeof(struct td_work);
}

template <bool TWO> static void launch(const struct td_device *d, const struct linears *p) {
    size_t shared = sizeof(struct memory<TWO>) + TD_TILE_ROOM;
    td_cuda_allow_shared(d, (const void *)linear_wide<TWO>, shared, "linear");
    TD_LAUNCH(d, "linear", linear_wide<TWO>, td_cuda_of(d)->processors, THREADS, shared, *p);
}

bool td_cuda_linear_wide(const struct td_device *d, const struct td_linear_args *a) {
    struct layout l = {};
    struct linears p = {};
    uint32_t regions = 0;
    enum td_weight_format f = a->part[0].w->stored.format;
    if (a->n < LEAST_ROWS || !has_room(d)) return false;
    l.x = a->x;
    l.x_stride = a->x_stride;
    l.n = p.n = a->n;
    l.all = p.all = (a->n + 7) & ~7u;
    l.cols = a->part[0].w->cols;
    p.each = tile_rows(a->n);
    p.parts = a->parts;
    for (uint32_t i = 0; i < a->parts; i++) {
        const struct td_matrix *w = a->part[i].w;
        if (w->stored.format != f || !fits(w)) return false;
        p.part[i] = td_part_of(w, a->part[i].y, a->part[i].y_stride);
        uint32_t r = 0;
        while (r < regions && l.x_at[r] != a->part[i].x_at)
            r++;
        if (r == regions) l.x_at[regions++] = a->part[i].x_at;
        p.region[i] = r;
        p.before[i + 1] = p.before[i] + td_ceil(w->rows, OUTS) * td_ceil(a->n, p.each);
    }
    l.rest = p.rest = (size_t)regions * l.all * l.cols;
    if ((f == TD_W_BF16 ? 2 : 1) * p.rest * sizeof(uint16_t) > a->spare.bytes) return false;
    l.tiles = (uint16_t *)a->spare.at;
    p.tiles = l.tiles;
    lay_inputs(d, f, &l, regions, "linear");
    if (f == TD_W_BF16)
        launch<true>(d, &p);
    else
        launch<false>(d, &p);
    return true;
}

/* ---- experts ---- */

static __global__ void __launch_bounds__(THREADS, 1)
    experts_wide(const __grid_constant__ struct td_experts a, const uint16_t *tiles, uint32_t all,
                 uint32_t above) {
#ifdef TD_HAS_WGMMA
    TD_SHARED(unsigned char, dynamic);
    struct memory<false> *s = (struct memory<false> *)td_tile_memory(dynamic);
    __shared__ struct td_work work;
    uint32_t outs = td_ceil(a.outs, OUTS), per = outs * a.parts;
    td_list_work(&a, above, 0xffffffffu, ROWS, per, &work);
    walk(
        work.before[work.count],
        [&](uint32_t i) {
            uint32_t at = td_find_work(&work, i), e = work.expert[at], left = i - work.before[at];
            uint32_t begin = a.offset[e], rows = work.rows[e], each = tile_rows(rows);
            uint32_t skip = left / per * each, which = left % per / outs;
            const struct td_matrix *w = &a.w[which][e];
            struct tile t;
            t.p = td_part_of(w, a.y[which], w->rows);
            t.out = left % outs * OUTS;
            t.first = begin + skip;
            t.rows = rows - skip < each ? rows - skip : each;
            t.plane = (size_t)all * TD_TILE;
            t.rest = 0;
            t.x = tiles + (size_t)(tile_row(begin, e) + skip) * TD_TILE;
            return t;
        },
        s);
#endif
}

bool td_cuda_experts_wide(const struct td_device *d, const struct td_expert_linear_args *a,
                          uint32_t above) {
    struct layout l = {};
    if (a->all == 0 || a->most < LEAST_MOST || !has_room(d)) return false;
    for (uint32_t i = 0; i < a->parts; i++)
        for (uint32_t e = 0; e < a->experts; e++)
            if (!fits(&a->w[i][e]) || a->w[i][e].stored.format == TD_W_BF16) return false;
    struct td_experts p = td_experts_of(a);
    l.x = a->x;
    l.x_stride = a->x_stride;
    l.x_row = a->x_row;
    l.offset = a->offset;
    l.experts = a->experts;
    l.n = a->all;
    l.all = tile_row(a->all, a->experts);
    l.cols = a->w[0][0].cols;
    l.tiles = (uint16_t *)a->spare.at;
    if ((size_t)l.all * l.cols * sizeof(uint16_t) > a->spare.bytes) return false;
    lay_inputs(d, a->w[0][0].stored.format, &l, 1, "expert_linear");
    size_t shared = sizeof(struct memory<false>) + TD_TILE_ROOM;
    td_cuda_allow_shared(d, (const void *)experts_wide, shared, "expert_linear");
    TD_LAUNCH(d, "expert_linear", experts_wide, td_cuda_of(d)->processors, THREADS, shared, p,
              l.tiles, l.all, above);
    return true;
}

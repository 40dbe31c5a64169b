/* Lightning indexer on the tensor cores: the fast form of index.cu for bf16 keys; queries are
 * rounded to bf16 too.
 *
 * A warp scores 32 keys at a time, straight from their pages to registers. With many queries a
 * block is one of them and keeps the best in shared memory as it goes. With few, blocks share a
 * query's keys, warps wait for nobody, scores go to a workspace of a fixed size, their upper digits
 * to a histogram, and a second launch selects (select.h). A score is the same bits in both forms:
 * heads in eights, ascending, then the four threads of a key.
 */
#include "kernels/cuda/mma.h"
#include "kernels/cuda/select.h"

enum {
    THREADS = TD_TOPK_THREADS,
    D = TD_INDEX_DIM,
    ROOM = 1024,       /* candidates beside the kept ones before the list is cut */
    PAD = D + 32, /* values between heads: eight threads that load 16 bytes of two meet 32 banks */
    SIDE = 2,          /* eights of heads multiplied side by side */
    TILE_KEYS = 256,   /* of a block */
    MOST_BLOCKS = 264, /* of split queries: two for every processor */
};
static_assert(MOST_BLOCKS / TD_INDEX_SPLIT_ROWS > 1, "each is split");

struct index {
    struct td_op_batch b;
    struct td_kv_layout kv;
    uint32_t layer, heads, topk, splits;
    const float *q, *wt;
    float wt_scale;
    bool score_bf16;
    int32_t *selected;
    uint64_t *candidate;
    uint32_t *score, stride; /* [rows, stride] */
    uint32_t *histogram;     /* [rows, TD_SELECT_BINS] */
};

/* Candidates a list has room for: whole 16 bytes. */
static __host__ __device__ inline size_t list_room(uint32_t topk) {
    return (topk + ROOM + THREADS + 1) & ~(size_t)1;
}
/* Heads, filled up with some of weight 0. */
static __host__ __device__ inline uint32_t lanes_of(uint32_t heads) {
    return td_ceil(heads, 8 * SIDE) * 8 * SIDE;
}

/* Keys key .. key + 31 of a page as two operands of 16, in registers: a thread has 8 values side by
 * side of every 32 of rows g and g + 8. */
struct keys {
    uint4 v[2][2][D / 32];
};

/* The page of keys key .. key + 31: looked up before it is needed. */
static __device__ uint32_t page_of(const struct td_op_run *run, uint32_t key, uint32_t stop) {
    return key < stop ? run->pages[key / TD_KV_CSA_PER_PAGE] : 0;
}

static __device__ void load_keys(const struct index *a, uint32_t page, uint32_t key, uint32_t stop,
                                 struct keys *k) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint16_t *from = (const uint16_t *)td_kv_index_key(&a->kv, a->b.pool, a->layer, page,
                                                             key % TD_KV_CSA_PER_PAGE);
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                uint32_t row = m * 16 + h * 8 + g;
                uint4 zero = {0, 0, 0, 0};
                k->v[m][h][c] = key + row < stop
                                    ? *(const uint4 *)(from + (size_t)row * D + c * 32 + t * 8)
                                    : zero;
            }
}

/* The score of the warp's key that is this lane's: 16 (t / 2) + 8 (t % 2) + g. Two eights of heads
 * are multiplied side by side, since a product waits for the one before. */
static __device__ float score_keys(const struct keys *k, const uint16_t *q, const float *wt,
                                   uint32_t heads) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    for (uint32_t h = 0; h < heads; h += 8 * SIDE) {
        float c[SIDE][2][4];
#pragma unroll
        for (int s = 0; s < SIDE; s++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    c[s][m][r] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++)
#pragma unroll
            for (int s = 0; s < SIDE; s++) {
                uint4 v = *(const uint4 *)(q + (h + s * 8 + g) * PAD + i * 32 + t * 8);
                uint32_t first[2] = {v.x, v.y}, second[2] = {v.z, v.w};
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint4 r0 = k->v[m][0][i], r1 = k->v[m][1][i];
                    uint32_t a0[4] = {r0.x, r1.x, r0.y, r1.y}, a1[4] = {r0.z, r1.z, r0.w, r1.w};
                    td_mma(c[s][m], a0, first);
                    td_mma(c[s][m], a1, second);
                }
            }
#pragma unroll
        for (int s = 0; s < SIDE; s++) {
            float w0 = wt[h + s * 8 + 2 * t], w1 = wt[h + s * 8 + 2 * t + 1];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float d0 = c[s][m][2 * r], d1 = c[s][m][2 * r + 1];
                    sum[m][r] = fmaf(w0, d0 > 0.0f ? d0 : 0.0f, sum[m][r]);
                    sum[m][r] = fmaf(w1, d1 > 0.0f ? d1 : 0.0f, sum[m][r]);
                }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 1);
            sum[m][r] += __shfl_xor_sync(0xffffffffu, sum[m][r], 2);
        }
    float upper = t % 2 ? sum[1][1] : sum[1][0], lower = t % 2 ? sum[0][1] : sum[0][0];
    return t < 2 ? lower : upper;
}
static __device__ inline uint32_t key_of_lane(void) {
    uint32_t t = threadIdx.x % 4;
    return t * 8 + threadIdx.x % 32 / 4;
}

/* A query's weights and bf16 values to shared memory. */
static __device__ void load_query(const struct index *a, uint32_t i, uint32_t lanes, float *wt,
                                  uint16_t *q) {
    for (uint32_t h = threadIdx.x; h < lanes; h += THREADS)
        wt[h] = h < a->heads ? a->wt[(size_t)i * a->heads + h] * a->wt_scale : 0.0f;
    for (uint32_t c = threadIdx.x * 4; c < lanes * D; c += THREADS * 4) {
        float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
        if (c / D < a->heads) v = *(const float4 *)(a->q + (size_t)i * a->heads * D + c);
        uint2 both = {td_f32_to_bf16(v.x) | (uint32_t)td_f32_to_bf16(v.y) << 16,
                      td_f32_to_bf16(v.z) | (uint32_t)td_f32_to_bf16(v.w) << 16};
        *(uint2 *)(void *)(q + c / D * PAD + c % D) = both;
    }
}

static __device__ void write_selected(const struct index *a, uint32_t i, uint32_t count,
                                      const uint64_t *list) {
    for (uint32_t e = threadIdx.x; e < a->topk; e += THREADS)
        td_put_chosen(a->selected, a->candidate, (size_t)i * a->topk + e, e < count, list[e]);
}

/* One query a block. */
static __global__ void __launch_bounds__(THREADS, 2)
    keep_rows(const __grid_constant__ struct index a) {
    TD_SHARED(uint64_t, list); /* [list_room], wt [lanes], q [lanes, PAD] */
    __shared__ struct td_topk k;
    __shared__ float score[TILE_KEYS];
    uint32_t lanes = lanes_of(a.heads), i = blockIdx.x, t = threadIdx.x;
    float *wt = (float *)(void *)(list + list_room(a.topk));
    uint16_t *q = (uint16_t *)(void *)(wt + lanes);
    uint32_t visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO, warp = t / 32;
    const struct td_op_run *run = &a.b.run[a.b.row[i].run];
    if (visible <= a.topk) { /* the whole block */
        int32_t *to = a.selected + (size_t)i * a.topk;
        for (uint32_t e = t; !a.candidate && e < a.topk; e += THREADS)
            to[e] = e < visible ? (int32_t)e : -1;
        return;
    }
    visible = td_own_keys(&a.b, visible);
    load_query(&a, i, lanes, wt, q);
    if (t == 0) k.floor = 0;
    struct keys keys;
    uint32_t own = warp * 32, count = 0, turn = 0, page = page_of(run, own, visible);
    load_keys(&a, page, own, visible, &keys);
    page = page_of(run, own + TILE_KEYS, visible);
    __syncthreads();
    for (uint32_t at = 0; at < visible; at += TILE_KEYS, turn++) {
        own += TILE_KEYS;
        score[warp * 32 + key_of_lane()] = score_keys(&keys, q, wt, lanes);
        load_keys(&a, page, own, visible, &keys);
        page = page_of(run, own + TILE_KEYS, visible);
        __syncthreads();
        uint64_t c = td_candidate(score[t], a.score_bf16, td_own_entry(&a.b, at + t));
        count = td_topk_add(&k, list, turn, count, c, at + t < visible);
        if (count >= a.topk + ROOM) count = td_topk_cut(&k, list, count, a.topk);
    }
    count = td_topk_cut(&k, list, count, a.topk);
    __syncthreads();
    write_selected(&a, i, count, list);
}

/* Several blocks a query: scores as the upper words of candidates, and how often each of their upper
 * digits occurs. */
static __global__ void __launch_bounds__(THREADS, 2)
    score_rows(const __grid_constant__ struct index a) {
    TD_SHARED(float, wt); /* [lanes], q [lanes, PAD] */
    __shared__ uint32_t bin[TD_SELECT_BINS];
    uint32_t lanes = lanes_of(a.heads), i = blockIdx.y, t = threadIdx.x;
    uint16_t *q = (uint16_t *)(void *)(wt + lanes);
    uint32_t visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO, warp = t / 32;
    const struct td_op_run *run = &a.b.run[a.b.row[i].run];
    td_launch_next();
    if (visible <= a.topk) return; /* the whole block */
    visible = td_own_keys(&a.b, visible);
    uint32_t span = (visible + a.splits * TILE_KEYS - 1) / (a.splits * TILE_KEYS) * TILE_KEYS;
    uint32_t begin = blockIdx.x * span, end = begin + span < visible ? begin + span : visible;
    if (begin >= end) return; /* the whole block */
    struct keys keys;
    uint32_t own = begin + warp * 32, page = page_of(run, own, end);
    load_keys(&a, page, own, end, &keys);
    page = page_of(run, own + TILE_KEYS, end);
    load_query(&a, i, lanes, wt, q);
    for (uint32_t c = t; c < TD_SELECT_BINS; c += THREADS)
        bin[c] = 0;
    __syncthreads();
    uint32_t *to = a.score + (size_t)i * a.stride;
    while (own < end) {
        float score = score_keys(&keys, q, wt, lanes);
        uint32_t key = own + key_of_lane();
        own += TILE_KEYS;
        load_keys(&a, page, own, end, &keys);
        page = page_of(run, own + TILE_KEYS, end);
        if (key < end) {
            uint32_t word = (uint32_t)(td_candidate(score, a.score_bf16, 0) >> 32);
            to[key] = word;
            atomicAdd(&bin[word >> (32 - TD_SELECT_DIGIT)], 1u);
        }
    }
    __syncthreads();
    for (uint32_t c = t; c < TD_SELECT_BINS; c += THREADS)
        if (bin[c]) atomicAdd(a.histogram + (size_t)i * TD_SELECT_BINS + c, bin[c]);
}

static void select_of_few(const struct td_device *d, struct index *p, uint32_t n, size_t shared) {
    struct td_select s = {.b = p->b, .topk = p->topk, .stride = p->stride};
    s.bf16 = p->score_bf16;
    s.score = p->score;
    s.histogram = p->histogram;
    s.selected = p->selected;
    s.candidate = p->candidate;
    TD_LAUNCH(d, "index", score_rows, dim3(p->splits, n), THREADS, shared, *p);
    TD_LAUNCH_NEXT(d, "index", td_select_rows, n, TD_SELECT_THREADS, 0, s);
}

static void advance(struct index *p, uint32_t rows) {
    p->b.row += rows;
    p->q += (size_t)rows * p->heads * D;
    p->wt += (size_t)rows * p->heads;
    p->selected += (size_t)rows * p->topk;
    if (p->candidate) p->candidate += (size_t)rows * p->topk;
}

void TD_FAST(index)(const struct td_device *d, const struct td_index_args *a) {
    struct index p = {.b = *a->batch, .kv = *a->batch->kv};
    uint32_t lanes = lanes_of(a->heads), n = a->rows;
    size_t query = lanes * (sizeof(float) + PAD * sizeof(uint16_t));
    size_t shared = list_room(a->topk) * sizeof(uint64_t) + query;
    if (p.kv.key_dtype != TD_KV_KEY_BF16 || shared > td_cuda_of(d)->shared_max - 4096) {
        TD_PLAIN(index)(d, a);
        return;
    }
    if (n == 0) return;
    uint32_t keys = td_ceil(p.b.max_pos + 1, TD_CSA_RATIO);
    if (p.b.split)
        keys = (keys / TD_KV_CSA_PER_PAGE >> p.b.split) * TD_KV_CSA_PER_PAGE + TD_KV_CSA_PER_PAGE;
    uint32_t tiles = td_ceil(keys, TILE_KEYS);
    p.layer = a->layer;
    p.heads = a->heads;
    p.topk = a->topk;
    p.q = a->q;
    p.wt = a->wt;
    p.wt_scale = a->wt_scale;
    p.score_bf16 = a->score_bf16;
    p.selected = a->selected;
    advance(&p, a->first);
    p.candidate = a->candidate;
    p.stride = (keys + 3) & ~3u;
    p.score = (uint32_t *)a->workspace;
    p.histogram = td_cuda_of(d)->index_bins;
    if (n > TD_INDEX_SPLIT_ROWS || p.stride > TD_INDEX_SCORES) {
        td_cuda_allow_shared(d, (const void *)keep_rows, shared, "index");
        TD_LAUNCH(d, "index", keep_rows, n, THREADS, shared, p);
        return;
    }
    uint32_t most = TD_INDEX_SCORES / p.stride;
    for (uint32_t from = 0; from < n; from += most, advance(&p, most)) {
        uint32_t rows = n - from < most ? n - from : most;
        p.splits = MOST_BLOCKS / rows < tiles ? MOST_BLOCKS / rows : tiles;
        select_of_few(d, &p, rows, query);
    }
}

/* Lightning indexer on the tensor cores: the fast form of index.cu for bf16 keys; queries are
 * rounded to bf16 too.
 *
 * A block scores 256 keys at a time, 32 a warp, straight from their pages to registers, and keeps
 * the best of its range in shared memory. With few queries a query's keys are split over blocks;
 * what each keeps is unique, so splitting changes nothing, and a second launch cuts the union. A
 * score is the same bits in any form: heads in eights, ascending, then the four threads of a key.
 */
#include "kernels/cuda/mma.h"
#include "kernels/cuda/topk.h"

enum {
    THREADS = TD_TOPK_THREADS,
    D = TD_INDEX_DIM,
    ROOM = 1024,       /* candidates beside the kept ones before the list is cut */
    MERGE_ROOM = 2048, /* the same where splits are merged */
    PAD = D + 8,       /* values between queries in shared memory */
    TILE_KEYS = 256,   /* of a block */
    MOST_BLOCKS = 264, /* of split queries: two for every processor; bounds the workspace */
    MOST_SPLITS = 16
};

struct index {
    struct td_op_batch b;
    struct td_kv_layout kv;
    uint32_t layer, heads, topk, splits;
    const float *q, *wt;
    float wt_scale;
    bool score_bf16;
    int32_t *selected;
    uint64_t *candidate;
    uint64_t *kept;  /* [rows, splits, topk] */
    uint64_t *least; /* [rows, splits] what a split kept is greater */
    uint32_t *count; /* [rows, splits] */
};

/* Candidates a list has room for: whole 16 bytes. */
static __host__ __device__ inline size_t list_room(uint32_t topk, uint32_t room) {
    return (topk + room + THREADS + 1) & ~(size_t)1;
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

/* Scores of the warp's 32 keys to score[0..31]. */
static __device__ void score_keys(const struct keys *k, const uint16_t *q, const float *wt,
                                  uint32_t heads, float *score) {
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    for (uint32_t h = 0; h < heads; h += 8) {
        float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            uint4 v = *(const uint4 *)(q + (h + g) * PAD + i * 32 + t * 8);
            uint32_t first[2] = {v.x, v.y}, second[2] = {v.z, v.w};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint4 r0 = k->v[m][0][i], r1 = k->v[m][1][i];
                uint32_t a0[4] = {r0.x, r1.x, r0.y, r1.y}, a1[4] = {r0.z, r1.z, r0.w, r1.w};
                td_mma(c[m], a0, first);
                td_mma(c[m], a1, second);
            }
        }
        float w0 = wt[h + 2 * t], w1 = wt[h + 2 * t + 1];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float d0 = c[m][2 * r], d1 = c[m][2 * r + 1];
                sum[m][r] = fmaf(w0, d0 > 0.0f ? d0 : 0.0f, sum[m][r]);
                sum[m][r] = fmaf(w1, d1 > 0.0f ? d1 : 0.0f, sum[m][r]);
            }
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float s = sum[m][r];
            s += __shfl_xor_sync(0xffffffffu, s, 1);
            s += __shfl_xor_sync(0xffffffffu, s, 2);
            if (t == 0) score[m * 16 + r * 8 + g] = s;
        }
}

static __device__ void write_selected(const struct index *a, uint32_t i, uint32_t count,
                                      const uint64_t *list) {
    for (uint32_t e = threadIdx.x; e < a->topk; e += THREADS)
        td_put_chosen(a->selected, a->candidate, (size_t)i * a->topk + e, e < count, list[e]);
}

static __global__ void __launch_bounds__(THREADS, 2)
    score_rows(const __grid_constant__ struct index a) {
    TD_SHARED(uint64_t, list); /* [list_room], wt [lanes], q [lanes, PAD] */
    __shared__ struct td_topk k;
    __shared__ float score[TILE_KEYS];
    uint32_t lanes = (a.heads + 7) & ~7u, i = blockIdx.y, split = blockIdx.x, t = threadIdx.x;
    float *wt = (float *)(void *)(list + list_room(a.topk, ROOM));
    uint16_t *q = (uint16_t *)(void *)(wt + lanes);
    uint32_t visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO, warp = t / 32;
    const struct td_op_run *run = &a.b.run[a.b.row[i].run];
    if (visible <= a.topk) { /* the whole block */
        int32_t *to = a.selected + (size_t)i * a.topk;
        for (uint32_t e = t; !a.candidate && split == 0 && e < a.topk; e += THREADS)
            to[e] = e < visible ? (int32_t)e : -1;
        return;
    }
    visible = td_own_keys(&a.b, visible);
    uint32_t span = (visible + a.splits * TILE_KEYS - 1) / (a.splits * TILE_KEYS) * TILE_KEYS;
    uint32_t begin = split * span, end = begin + span < visible ? begin + span : visible;
    for (uint32_t h = t; h < lanes; h += THREADS)
        wt[h] = h < a.heads ? a.wt[(size_t)i * a.heads + h] * a.wt_scale : 0.0f;
    for (uint32_t c = t; c < lanes * D; c += THREADS)
        q[c / D * PAD + c % D] =
            c / D < a.heads ? td_f32_to_bf16(a.q[(size_t)i * a.heads * D + c]) : (uint16_t)0;
    if (t == 0) k.floor = 0;
    struct keys keys;
    uint32_t own = begin + warp * 32, count = 0, turn = 0, page = page_of(run, own, end);
    load_keys(&a, page, own, end, &keys);
    page = page_of(run, own + TILE_KEYS, end);
    __syncthreads();
    for (uint32_t at = begin; at < end; at += TILE_KEYS, turn++) {
        own += TILE_KEYS;
        score_keys(&keys, q, wt, lanes, score + warp * 32);
        load_keys(&a, page, own, end, &keys);
        page = page_of(run, own + TILE_KEYS, end);
        __syncthreads();
        uint64_t c = td_candidate(score[t], a.score_bf16, td_own_entry(&a.b, at + t));
        count = td_topk_add(&k, list, turn, count, c, at + t < end);
        if (count >= a.topk + ROOM) count = td_topk_cut(&k, list, count, a.topk);
    }
    count = td_topk_cut(&k, list, count, a.topk);
    __syncthreads();
    if (a.splits == 1) {
        write_selected(&a, i, count, list);
        return;
    }
    size_t part = (size_t)i * a.splits + split;
    for (uint32_t e = t; e < count; e += THREADS)
        a.kept[part * a.topk + e] = list[e];
    if (t == 0) {
        a.count[part] = count;
        a.least[part] = k.floor;
    }
}

/* The best of what the splits of a query kept; splits ascend, and entries in them. Candidates are
 * asked for eight at a time: one after the other would be a wait each. */
static __global__ void __launch_bounds__(THREADS)
    merge_rows(const __grid_constant__ struct index a) {
    TD_SHARED(uint64_t, list); /* [list_room] */
    __shared__ struct td_topk k;
    __shared__ uint32_t kept[MOST_SPLITS];
    uint32_t i = blockIdx.x, t = threadIdx.x, visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO;
    uint32_t per = td_ceil(a.topk, THREADS), count = 0, turn = 0;
    if (visible <= a.topk) return; /* the whole block */
    if (t < 32) {
        /* The least that a full split kept: topk others are not less. */
        uint64_t least = t < a.splits ? a.least[(size_t)i * a.splits + t] : 0;
        if (t < a.splits) kept[t] = a.count[(size_t)i * a.splits + t];
        for (int by = 16; by > 0; by /= 2) {
            uint64_t o = __shfl_xor_sync(0xffffffffu, least, by);
            least = o > least ? o : least;
        }
        if (t == 0) k.floor = least;
    }
    __syncthreads();
    const uint64_t *from = a.kept + (size_t)i * a.splits * a.topk;
    for (uint32_t at = 0; at < a.splits * per; at += 8) {
        uint64_t c[8];
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            uint32_t split = (at + j) / per, e = (at + j) % per * THREADS + t;
            c[j] = split < a.splits && e < kept[split] ? from[(size_t)split * a.topk + e] : 0;
        }
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            count = td_topk_add(&k, list, turn++, count, c[j], c[j] != 0);
            if (count >= a.topk + MERGE_ROOM) count = td_topk_cut(&k, list, count, a.topk);
        }
    }
    count = td_topk_cut(&k, list, count, a.topk);
    __syncthreads();
    write_selected(&a, i, count, list);
}

size_t TD_FAST(index_workspace)(uint32_t topk) {
    return MOST_BLOCKS * ((topk + 1) * sizeof(uint64_t) + sizeof(uint32_t));
}

void TD_FAST(index)(const struct td_device *d, const struct td_index_args *a) {
    struct index p = {.b = *a->batch, .kv = *a->batch->kv};
    uint32_t lanes = (a->heads + 7) & ~7u, n = a->rows;
    size_t lists = list_room(a->topk, ROOM) * sizeof(uint64_t);
    size_t shared = lists + lanes * (sizeof(float) + PAD * sizeof(uint16_t));
    if (p.kv.key_dtype != TD_KV_KEY_BF16 || shared > td_cuda_of(d)->shared_max - 4096) {
        TD_PLAIN(index)(d, a);
        return;
    }
    if (n == 0) return;
    uint32_t keys = (p.b.max_pos + 1) / TD_CSA_RATIO + 1;
    if (p.b.split)
        keys = (keys / TD_KV_CSA_PER_PAGE >> p.b.split) * TD_KV_CSA_PER_PAGE + TD_KV_CSA_PER_PAGE;
    uint32_t tiles = td_ceil(keys, TILE_KEYS);
    p.splits = MOST_BLOCKS / n < tiles ? MOST_BLOCKS / n : tiles;
    p.splits = p.splits < 1 ? 1 : p.splits > MOST_SPLITS ? (uint32_t)MOST_SPLITS : p.splits;
    p.layer = a->layer;
    p.heads = a->heads;
    p.topk = a->topk;
    p.b.row += a->first;
    p.q = a->q + (size_t)a->first * a->heads * D;
    p.wt = a->wt + (size_t)a->first * a->heads;
    p.wt_scale = a->wt_scale;
    p.score_bf16 = a->score_bf16;
    p.selected = a->selected + (size_t)a->first * a->topk;
    p.candidate = a->candidate;
    p.kept = (uint64_t *)a->workspace;
    p.least = p.kept + (size_t)MOST_BLOCKS * a->topk;
    p.count = (uint32_t *)(void *)(p.least + MOST_BLOCKS);
    td_cuda_allow_shared(d, (const void *)score_rows, shared, "index");
    for (uint32_t from = 0; from < n; from += 65535) { /* of grid.y */
        struct index part = p;
        uint32_t rows = n - from < 65535 ? n - from : 65535;
        part.b.row += from;
        part.q += (size_t)from * a->heads * D;
        part.wt += (size_t)from * a->heads;
        part.selected += (size_t)from * a->topk;
        if (part.candidate) part.candidate += (size_t)from * a->topk;
        TD_LAUNCH(d, "index", score_rows, dim3(p.splits, rows), THREADS, shared, part);
    }
    if (p.splits == 1) return;
    lists = list_room(a->topk, MERGE_ROOM) * sizeof(uint64_t);
    td_cuda_allow_shared(d, (const void *)merge_rows, lists, "index");
    TD_LAUNCH(d, "index", merge_rows, n, THREADS, lists, p);
}

/* Lightning indexer: scores of all visible keys, kept one tile at a time, and a running top-k.
 *
 * Queries of one sequence are scored together, at most TD_INDEX_ROWS of them. Per tile of keys
 * two loops run: scores (pieces = groups of keys), then the update of every query's best list
 * (pieces = queries). A candidate is one 64-bit number, score order above, low entry first below,
 * so any two differ and the chosen set is unique however the work is cut. */
#include "kernels/ref/op.h"
#include "kernels/ref/product.h"
#include "kernels/scratch.h"
#include "kernels/ref/stored.h"

enum { D = TD_INDEX_DIM };

/* Best candidates of one query, by ascending entry. */
struct best {
    uint64_t floor; /* only greater candidates matter; 0 until the list was cut once */
    uint32_t count;
};

struct block {
    const struct td_device *d;
    const struct td_index_args *a;
    const struct td_op_run *run;
    uint32_t row, rows;    /* step rows row..row+rows-1 */
    uint32_t width;        /* query columns: 1, 8 or 16; columns beyond `rows` are zero */
    uint32_t lanes;        /* width * heads rounded up to 8; lane h * width + r */
    uint32_t tile, keys;   /* first key and number of keys of the current tile */
    float *q;              /* [D][lanes] */
    float *wt;             /* [heads][width], scaled */
    float *score;          /* [TD_INDEX_TILE][width] */
    struct best *best;     /* [TD_INDEX_ROWS] */
    uint64_t *list, *sort; /* [TD_INDEX_ROWS][topk + TD_INDEX_TILE] */
};

static uint32_t visible(const struct block *b, uint32_t r) {
    return (b->a->batch->row[b->row + r].pos + 1) / TD_CSA_RATIO;
}

/* Monotone: a < b as floats exactly when as numbers; -0 equals +0. */
static uint64_t candidate(float score, bool bf16, uint32_t entry) {
    if (bf16) score = td_bf16_to_f32(td_f32_to_bf16(score));
    uint32_t u = td_f32_bits(score + 0.0f);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - entry);
}

/* Adds a key's heads up for every query: fmaf chain over heads from 0. */
static void add_heads(const struct block *b, const float *dot, float *score) {
    if (b->width == 1) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < b->a->heads; h++)
            sum = fmaf(b->wt[h], dot[h] > 0.0f ? dot[h] : 0.0f, sum);
        *score = sum;
        return;
    }
    for (uint32_t r = 0; r < b->width; r += 8) {
        v8 sum = splat8(0.0f);
        for (uint32_t h = 0; h < b->a->heads; h++) {
            uint32_t at = h * b->width + r;
            sum = fma8(load8(b->wt + at), max8(load8(dot + at), splat8(0.0f)), sum);
        }
        store8(score + r, sum);
    }
}

static void score_groups(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct block *b = arg;
    const struct td_op_batch *batch = b->a->batch;
    float *key = op_scratch(b->d, thread);        /* [TD_INDEX_KEYS][D] */
    float *dot = key + (size_t)TD_INDEX_KEYS * D; /* [PRODUCT_ROWS_NARROW][lanes] */
    for (uint32_t group = begin; group < end; group++) {
        uint32_t first = group * TD_INDEX_KEYS;
        uint32_t n = b->keys - first < TD_INDEX_KEYS ? b->keys - first : TD_INDEX_KEYS;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t w = b->tile + first + i;
            key_decode(td_kv_index_key(batch->kv, batch->pool, b->a->layer,
                                       b->run->pages[w / TD_KV_CSA_PER_PAGE],
                                       w % TD_KV_CSA_PER_PAGE),
                       batch->kv->key_dtype, key + (size_t)i * D);
        }
        struct product p = {
            .x_step = 1, .w = b->q, .w_step = b->lanes, .k = D, .y = dot, .y_step = b->lanes};
        uint32_t step = b->lanes >= 16 ? PRODUCT_ROWS : PRODUCT_ROWS_NARROW;
        for (uint32_t i = 0; i < n; i += step) {
            uint32_t m = n - i < step ? n - i : step;
            product_lanes(&p, key + (size_t)i * D, D, m, b->lanes);
            for (uint32_t j = 0; j < m; j++)
                add_heads(b, dot + (size_t)j * b->lanes,
                          b->score + (size_t)(first + i + j) * b->width);
        }
    }
}

/* The k-th greatest of v[0..n-1], 1 <= k <= n, all different; v is reordered. */
static uint64_t kth_greatest(uint64_t *v, uint32_t n, uint32_t k) {
    uint32_t lo = 0, hi = n - 1, want = k - 1;
    while (lo < hi) {
        uint64_t pivot = v[lo + (hi - lo) / 2];
        uint32_t i = lo, j = hi;
        for (;;) {
            while (v[i] > pivot)
                i++;
            while (v[j] < pivot)
                j--;
            if (i >= j) break;
            uint64_t t = v[i];
            v[i++] = v[j];
            v[j--] = t;
        }
        /* v[lo..j] >= pivot >= v[j + 1..hi] */
        if (want <= j)
            hi = j;
        else
            lo = j + 1;
    }
    return v[want];
}

/* Cuts the list to the topk greatest, order of entries kept. */
static void cut(const struct td_index_args *a, struct best *best, uint64_t *list, uint64_t *sort) {
    if (best->count <= a->topk) return;
    memcpy(sort, list, best->count * sizeof *list);
    best->floor = kth_greatest(sort, best->count, a->topk);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < best->count; i++)
        if (list[i] >= best->floor) list[kept++] = list[i];
    best->count = kept;
}

static void update_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct block *b = arg;
    size_t capacity = b->a->topk + TD_INDEX_TILE;
    for (uint32_t r = begin; r < end; r++) {
        uint64_t *list = b->list + r * capacity, *sort = b->sort + r * capacity;
        struct best *best = &b->best[r];
        uint32_t stop = visible(b, r);
        uint32_t n = stop <= b->tile ? 0 : stop - b->tile < b->keys ? stop - b->tile : b->keys;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t c =
                candidate(b->score[(size_t)i * b->width + r], b->a->score_bf16, b->tile + i);
            if (c > best->floor) list[best->count++] = c;
        }
        cut(b->a, best, list, sort);
        if (stop > b->tile + b->keys) continue;
        int32_t *to = b->a->selected + (size_t)(b->row + r) * b->a->topk;
        for (uint32_t i = 0; i < b->a->topk; i++)
            to[i] = i < best->count ? (int32_t)(0xffffffffu - (uint32_t)list[i]) : -1;
    }
}

/* Queries as columns, heads outer, so that a key row meets all of them in one product. */
static void pack_queries(struct block *b) {
    const struct td_index_args *a = b->a;
    memset(b->q, 0, (size_t)D * b->lanes * sizeof *b->q);
    memset(b->wt, 0, (size_t)b->lanes * sizeof *b->wt);
    for (uint32_t r = 0; r < b->rows; r++)
        for (uint32_t h = 0; h < a->heads; h++) {
            size_t row = b->row + r, lane = h * b->width + r;
            const float *q = a->q + (row * a->heads + h) * D;
            b->wt[lane] = a->wt[row * a->heads + h] * a->wt_scale;
            for (uint32_t k = 0; k < D; k++)
                b->q[k * b->lanes + lane] = q[k];
        }
}

static void take_all(const struct block *b) {
    for (uint32_t r = 0; r < b->rows; r++) {
        int32_t *to = b->a->selected + (size_t)(b->row + r) * b->a->topk;
        for (uint32_t i = 0; i < b->a->topk; i++)
            to[i] = i < visible(b, r) ? (int32_t)i : -1;
    }
}

static void index_block(struct block *b) {
    const struct td_index_args *a = b->a;
    uint32_t last = visible(b, b->rows - 1);
    if (last <= a->topk) {
        take_all(b);
        return;
    }
    b->width = b->rows == 1 ? 1 : b->rows <= 8 ? 8 : 16;
    b->lanes = td_lanes(b->width * a->heads);
    pack_queries(b);
    memset(b->best, 0, TD_INDEX_ROWS * sizeof *b->best);
    for (b->tile = 0; b->tile < last; b->tile += TD_INDEX_TILE) {
        b->keys = last - b->tile < TD_INDEX_TILE ? last - b->tile : TD_INDEX_TILE;
        td_threads_run(b->d->threads, score_groups, b,
                       (b->keys + TD_INDEX_KEYS - 1) / TD_INDEX_KEYS);
        td_threads_run(b->d->threads, update_rows, b, b->rows);
    }
}

void TD_OP(index)(const struct td_device *d, const struct td_index_args *a) {
    size_t lanes = (size_t)TD_INDEX_ROWS * td_lanes(a->heads);
    struct block b = {.d = d, .a = a, .q = a->workspace};
    b.wt = b.q + D * lanes;
    b.score = b.wt + lanes;
    b.list = (uint64_t *)(void *)(b.score + (size_t)TD_INDEX_TILE * TD_INDEX_ROWS);
    b.sort = b.list + TD_INDEX_ROWS * (size_t)(a->topk + TD_INDEX_TILE);
    b.best = (struct best *)(void *)(b.sort + TD_INDEX_ROWS * (size_t)(a->topk + TD_INDEX_TILE));
    for (uint32_t i = 0; i < a->batch->runs; i++) {
        b.run = &a->batch->run[i];
        for (uint32_t at = 0; at < b.run->n; at += TD_INDEX_ROWS) {
            b.row = b.run->first + at;
            b.rows = b.run->n - at < TD_INDEX_ROWS ? b.run->n - at : TD_INDEX_ROWS;
            index_block(&b);
        }
    }
}

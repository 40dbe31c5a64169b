/* Lightning indexer: scores of all visible keys, kept one tile at a time, and a running top-k.
 *
 * Queries of one sequence are scored together, at most TD_INDEX_ROWS of them: as lanes of a product
 * with the keys as rows. A lone query has too few heads for that; it takes four keys side by side
 * (split.h), so that every head fills four lanes. Per tile of keys two loops run: scores (pieces =
 * groups of keys), then the update of the queries' best lists (pieces = vectors of queries). A
 * candidate is one 64-bit number, score order above, low entry first below, so any two differ and
 * the chosen set is unique however the work is cut. Most keys fall below what a full list holds
 * already: they are dropped eight at a time.
 *
 * Where ranks share the keys, those of this rank are counted without the others' (`own`): page j of
 * them is pages[j] of the run. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/split.h"
#include "kernels/cpu/stored.h"
#include "kernels/cpu/tile.h"
#include "kernels/scratch.h"

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
    uint32_t panels;       /* of 16 lanes; lane h * width + r, or 4 * h and the three next ones */
    uint32_t tile, keys;   /* first key and number of keys of the current tile */
    bool pairs;            /* lone query, bf16 keys: keys stay bf16 */
    float *q;              /* [panels][D][16] */
    float *wt;             /* [heads][width], scaled */
    float *score;          /* [TD_INDEX_TILE][width] */
    struct best *best;     /* [TD_INDEX_ROWS] */
    uint64_t *list, *sort; /* [TD_INDEX_ROWS][topk + TD_INDEX_TILE] */
};

static uint32_t visible(const struct block *b, uint32_t r) {
    return (b->a->batch->row[b->row + r].pos + 1) / TD_CSA_RATIO;
}

/* The rank's pages are every (1 << split)-th one from this. */
static uint32_t first_page(const struct td_op_batch *b) {
    return td_kv_page_rank(b->rank, b->split); /* its own inverse */
}
/* How many of the visible keys the rank has. */
static uint32_t own(const struct block *b, uint32_t r) {
    const struct td_op_batch *batch = b->a->batch;
    uint32_t n = visible(b, r), pages = n / TD_KV_CSA_PER_PAGE, first = first_page(batch);
    uint32_t full = (pages + (1u << batch->split) - 1 - first) >> batch->split;
    uint32_t open = td_op_has_page(batch, pages) ? n % TD_KV_CSA_PER_PAGE : 0;
    return full * TD_KV_CSA_PER_PAGE + open;
}
/* The entry of the rank's key w. */
static uint32_t entry_of(const struct block *b, uint32_t w) {
    const struct td_op_batch *batch = b->a->batch;
    uint32_t page = (w / TD_KV_CSA_PER_PAGE << batch->split) + first_page(batch);
    return page * TD_KV_CSA_PER_PAGE + w % TD_KV_CSA_PER_PAGE;
}

/* As a number with the order of scores; -0 is +0. */
TD_INLINE i8 ordered8(v8 score) {
    i8 i = (i8)(score + splat8(0.0f));
    return i ^ ((i >> 31) & 0x7fffffff);
}

static uint64_t candidate(int32_t ordered, uint32_t entry) {
    return (uint64_t)((uint32_t)ordered ^ 0x80000000u) << 32 | (0xffffffffu - entry);
}

TD_INLINE v8 round_bf16(v8 x) {
    u8 u = (u8)x, nan = (u8)(x != x);
    u8 rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return (v8)((select_u8(nan, u | 0x400000u, rounded)) & 0xffff0000u);
}

/* Scores of one key, or with a lone query of eight keys, whose dots of a head start at a and b:
 * fmaf chain over heads from 0. */
TD_INLINE v8 add_heads(const struct block *b, const float *wt, const float *lo, const float *hi,
                       size_t dot_step, uint32_t wt_step, bool lone) {
    v8 sum = splat8(0.0f);
    for (uint32_t h = 0; h < b->a->heads; h++) {
        v8 dot = join8(lo + h * dot_step, hi + h * dot_step);
        v8 w = lone ? splat8(wt[h]) : load8(wt + h * wt_step);
        sum = fma8(w, max8(dot, splat8(0.0f)), sum);
    }
    return b->a->score_bf16 ? round_bf16(sum) : sum;
}

static const void *key_at(const struct block *b, uint32_t w) {
    const struct td_op_batch *batch = b->a->batch;
    return td_kv_index_key(batch->kv, batch->pool, b->a->layer,
                           b->run->pages[w / TD_KV_CSA_PER_PAGE], w % TD_KV_CSA_PER_PAGE);
}

/* Scores of keys first..first+n-1 of the tile for many queries. */
static void score_many(const struct block *b, uint32_t first, uint32_t n, float *key, float *dot) {
    for (uint32_t i = 0; i < n; i++)
        key_decode8(key_at(b, b->tile + first + i), b->a->batch->kv->key_dtype,
                    key + (size_t)i * D);
    struct tile t = {.w = b->q,
                     .w_step = TD_PANEL,
                     .w_panel = (size_t)D * TD_PANEL,
                     .k = D,
                     .y = dot,
                     .y_step = (size_t)b->panels * TD_PANEL};
    for (uint32_t i = 0; i < n; i += TILE_ROWS) {
        uint32_t m = n - i < TILE_ROWS ? n - i : TILE_ROWS;
        for (uint32_t j = 0; j < m; j++)
            t.x[j] = key + (size_t)(i + j) * D;
        tile_run(&t, TILE_FP32, m, b->panels);
        for (uint32_t j = 0; j < m; j++)
            for (uint32_t r = 0; r < b->width; r += 8) {
                const float *at = dot + j * t.y_step + r;
                store8(b->score + (size_t)(first + i + j) * b->width + r,
                       add_heads(b, b->wt + r, at, at + 4, b->width, b->width, false));
            }
    }
}

/* The same for a lone query. Keys beyond n in the last four are read as the last one. */
static void score_lone(const struct block *b, uint32_t first, uint32_t n, float *key, float *dot) {
    uint32_t quads = (n + 3) / 4, size = b->pairs ? D / 2 : D;
    size_t y_step = (size_t)b->panels * TD_PANEL;
    for (uint32_t i = 0; i < quads; i++) {
        float plain[4][D];
        const float *part[4];
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t w = 4 * i + j < n ? 4 * i + j : n - 1;
            part[j] = key_at(b, b->tile + first + w);
            if (b->pairs) continue;
            key_decode8(part[j], b->a->batch->kv->key_dtype, plain[j]);
            part[j] = plain[j];
        }
        split4(part, size, key + (size_t)i * 4 * size, 4);
    }
    struct tile t = {
        .w = b->q, .w_step = TD_PANEL, .w_panel = (size_t)D * TD_PANEL, .k = D, .y_step = y_step};
    uint32_t step = b->pairs ? TILE_ROWS_PAIRS : TILE_ROWS;
    for (uint32_t i = 0; i < quads; i += step) {
        uint32_t m = quads - i < step ? quads - i : step;
        for (uint32_t j = 0; j < m; j++)
            t.x[j] = key + (size_t)(i + j) * 4 * size;
        t.y = dot + i * y_step;
        tile_run(&t, b->pairs ? TILE_QUAD_BF16 : TILE_QUAD, m, b->panels);
    }
    for (uint32_t i = 0; i < quads; i += 2) {
        const float *lo = dot + i * y_step, *hi = i + 1 < quads ? lo + y_step : lo;
        store8(b->score + first + 4 * (size_t)i, add_heads(b, b->wt, lo, hi, 4, 0, true));
    }
}

static void score_groups(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct block *b = arg;
    float *key = op_scratch(b->d, thread);        /* [TD_INDEX_KEYS][D] */
    float *dot = key + (size_t)TD_INDEX_KEYS * D; /* [rows of a product][panels][16] */
    for (uint32_t group = begin; group < end; group++) {
        uint32_t first = group * TD_INDEX_KEYS;
        uint32_t n = b->keys - first < TD_INDEX_KEYS ? b->keys - first : TD_INDEX_KEYS;
        if (b->width == 1)
            score_lone(b, first, n, key, dot);
        else
            score_many(b, first, n, key, dot);
    }
}

/* How many of the n scores are not below `least`; n is a multiple of 8. */
TD_INLINE uint32_t count_from(const int32_t *score, uint32_t n, int32_t least) {
    i8 total = {0}, t = least - (i8){0};
    for (uint32_t i = 0; i < n; i += 8) {
        i8 v;
        memcpy(&v, score + i, sizeof v);
        total -= v >= t;
    }
    uint32_t sum = 0;
    for (int i = 0; i < 8; i++)
        sum += (uint32_t)total[i];
    return sum;
}

/* Cuts the list to the topk greatest, order of entries kept. The least score that stays is found
 * bit by bit, by counting: no branch depends on a score. Of equal ones the first stay. */
static void cut(const struct td_index_args *a, struct best *best, uint64_t *list, uint64_t *sort) {
    if (best->count <= a->topk) return;
    int32_t *score = (int32_t *)sort;
    uint32_t n = (best->count + 7) & ~7u, least = 0, kept = 0;
    for (uint32_t i = 0; i < best->count; i++)
        score[i] = (int32_t)((uint32_t)(list[i] >> 32) ^ 0x80000000u);
    for (uint32_t i = best->count; i < n; i++)
        score[i] = INT32_MIN; /* never counted: bit by bit `least` only grows from one */
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1)
        if (count_from(score, n, (int32_t)((least | bit) ^ 0x80000000u)) >= a->topk) least |= bit;
    uint32_t greater =
        least == UINT32_MAX ? 0 : count_from(score, n, (int32_t)((least + 1) ^ 0x80000000u));
    uint32_t equal = a->topk - greater;
    for (uint32_t i = 0; i < best->count; i++) {
        uint64_t c = list[i];
        uint32_t high = (uint32_t)(c >> 32);
        bool stays = high > least || (high == least && equal > 0);
        equal -= high == least && stays;
        list[kept] = c;
        kept += stays;
        if (stays && high == least) best->floor = c;
    }
    best->count = kept;
}

static size_t capacity(const struct td_index_args *a) {
    return a->topk + TD_INDEX_TILE;
}

/* A key that passed the look at its score alone. The list is cut when it has grown by as much as
 * it keeps; returns whether it was. */
static bool add(const struct block *b, uint32_t r, uint64_t c) {
    struct best *best = &b->best[r];
    uint64_t *list = b->list + r * capacity(b->a);
    if (c <= best->floor) return false;
    list[best->count++] = c;
    uint32_t slack = b->a->topk < 64 ? 64 : b->a->topk < TD_INDEX_TILE ? b->a->topk : TD_INDEX_TILE;
    if (best->count < b->a->topk + slack) return false;
    cut(b->a, best, list, b->sort + r * capacity(b->a));
    return true;
}

/* The least score that may matter, as a number in the order of scores. */
static int32_t floor_score(const struct block *b, uint32_t r) {
    uint64_t floor = b->best[r].floor;
    return floor == 0 ? INT32_MIN : (int32_t)((uint32_t)(floor >> 32) ^ 0x80000000u);
}

/* Lanes of `v` not below those of `floor`, as bits. */
TD_INLINE uint32_t not_below(i8 v, i8 floor) {
    i8 below = v < floor;
#if defined(__AVX__)
    return ~(uint32_t)_mm256_movemask_ps((__m256)below) & 0xffu;
#else
    uint32_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits |= (uint32_t)(below[i] == 0) << i;
    return bits;
#endif
}

/* Queries r..r+7. */
static void update_many(const struct block *b, uint32_t r) {
    i8 floor;
    for (uint32_t i = 0; i < 8; i++)
        floor[i] = r + i < b->rows ? floor_score(b, r + i) : INT32_MAX;
    for (uint32_t i = 0; i < b->keys; i++) {
        i8 ordered = ordered8(load8(b->score + (size_t)i * b->width + r));
        for (uint32_t bits = not_below(ordered, floor); bits != 0; bits &= bits - 1) {
            uint32_t j = (uint32_t)__builtin_ctz(bits), row = r + j;
            if (row >= b->rows || b->tile + i >= own(b, row)) continue;
            if (add(b, row, candidate(ordered[j], entry_of(b, b->tile + i))))
                floor[j] = floor_score(b, row);
        }
    }
}

static void update_lone(const struct block *b) {
    int32_t floor = floor_score(b, 0);
    for (uint32_t i = 0; i < b->keys; i += 8) {
        i8 ordered = ordered8(load8(b->score + i)), least = floor - (i8){0};
        for (uint32_t bits = not_below(ordered, least); bits != 0; bits &= bits - 1) {
            uint32_t j = (uint32_t)__builtin_ctz(bits);
            if (i + j >= b->keys) break;
            if (add(b, 0, candidate(ordered[j], entry_of(b, b->tile + i + j))))
                floor = floor_score(b, 0);
        }
    }
}

/* What was found for query r, as it is wanted. */
static void put_best(const struct block *b, uint32_t r, const uint64_t *list) {
    const struct td_index_args *a = b->a;
    uint32_t count = b->best[r].count;
    if (a->candidate && visible(b, r) <= a->topk) return;
    if (a->candidate) {
        uint64_t *to = a->candidate + (size_t)(b->row + r - a->first) * a->topk;
        memcpy(to, list, count * sizeof *to);
        memset(to + count, 0, (a->topk - count) * sizeof *to);
        return;
    }
    int32_t *to = a->selected + (size_t)(b->row + r) * a->topk;
    for (uint32_t i = 0; i < a->topk; i++)
        to[i] = i < count ? (int32_t)td_index_entry(list[i]) : -1;
}

/* Pieces: vectors of eight queries. */
static void update_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct block *b = arg;
    for (uint32_t piece = begin; piece < end; piece++) {
        if (b->width == 1)
            update_lone(b);
        else
            update_many(b, piece * 8);
        for (uint32_t r = piece * 8; r < piece * 8 + 8 && r < b->rows; r++) {
            if (own(b, r) > b->tile + b->keys) continue;
            uint64_t *list = b->list + r * capacity(b->a);
            cut(b->a, &b->best[r], list, b->sort + r * capacity(b->a));
            put_best(b, r, list);
        }
    }
}

/* Queries as columns, heads outer, so that a key meets all of them in one product. */
static void pack_queries(struct block *b) {
    const struct td_index_args *a = b->a;
    uint32_t copies = b->width == 1 ? 4 : 1;
    memset(b->q, 0, (size_t)b->panels * D * TD_PANEL * sizeof *b->q);
    memset(b->wt, 0, (size_t)b->width * a->heads * sizeof *b->wt);
    for (uint32_t r = 0; r < b->rows; r++)
        for (uint32_t h = 0; h < a->heads; h++) {
            size_t row = b->row + r;
            const float *q = a->q + (row * a->heads + h) * D;
            b->wt[h * b->width + r] = a->wt[row * a->heads + h] * a->wt_scale;
            for (uint32_t i = 0; i < copies; i++) {
                uint32_t lane = (h * b->width + r) * copies + i;
                float *to = b->q + (size_t)(lane / TD_PANEL) * D * TD_PANEL + lane % TD_PANEL;
                for (uint32_t k = 0; k < D; k++)
                    to[k * TD_PANEL] = q[k];
            }
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
    uint32_t last = own(b, b->rows - 1);
    if (visible(b, b->rows - 1) <= a->topk) {
        if (!a->candidate) take_all(b);
        return;
    }
    b->width = b->rows == 1 ? 1 : b->rows <= 8 ? 8 : 16;
    b->panels = (a->heads * (b->width == 1 ? 4 : b->width) + TD_PANEL - 1) / TD_PANEL;
    b->pairs = b->width == 1 && a->batch->kv->key_dtype == TD_KV_KEY_BF16;
    pack_queries(b);
    memset(b->best, 0, TD_INDEX_ROWS * sizeof *b->best);
    for (uint32_t r = 0; last == 0 && r < b->rows; r++)
        put_best(b, r, b->list);
    for (b->tile = 0; b->tile < last; b->tile += TD_INDEX_TILE) {
        b->keys = last - b->tile < TD_INDEX_TILE ? last - b->tile : TD_INDEX_TILE;
        td_threads_run(b->d->threads, score_groups, b,
                       (b->keys + TD_INDEX_KEYS - 1) / TD_INDEX_KEYS);
        td_threads_run(b->d->threads, update_rows, b, (b->rows + 7) / 8);
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
        uint32_t end = a->first + a->rows;
        b.run = &a->batch->run[i];
        b.row = b.run->first > a->first ? b.run->first : a->first;
        end = b.run->first + b.run->n < end ? b.run->first + b.run->n : end;
        for (; b.row < end; b.row += TD_INDEX_ROWS) {
            b.rows = end - b.row < TD_INDEX_ROWS ? end - b.row : TD_INDEX_ROWS;
            index_block(&b);
        }
    }
}

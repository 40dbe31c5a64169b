/* Cases of the ops on KV state: rows, compressors, indexer, sparse core. */
#include "tests/kernels/compare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ref/stored.h"

enum { RUNS = 3, MAX_PAGES = 24, LAYERS = 3, SWA = 0, CSA = 1, HCA = 2 };

static bool bench(const struct td_case *c) {
    return c->shape >= TD_CASE_BENCH;
}

/* Sequences with a history, in the variant's memory. */
struct world {
    struct td_kv_layout kv;
    struct td_op_batch batch;
    void *slot[RUNS];
};

static void random_row(struct td_case *c, const struct td_kv_layout *kv, struct td_kv_row to) {
    float v[TD_KV_ROW_DIM];
    for (uint32_t i = 0; i < TD_KV_ROW_DIM; i++)
        v[i] = td_case_uniform(c, -1, 1);
    row_encode(v, kv->row_dtype, to);
}

static void fill_pool(struct td_case *c, const struct td_kv_layout *kv, void *pool) {
    float key[TD_KV_KEY_DIM];
    for (uint32_t p = 0; p < kv->pages; p++) {
        for (uint32_t i = 0; i < TD_KV_CSA_PER_PAGE; i++) {
            random_row(c, kv, td_kv_csa_row(kv, pool, CSA, p, i));
            for (uint32_t k = 0; k < TD_KV_KEY_DIM; k++)
                key[k] = td_case_uniform(c, -1, 1);
            key_encode(key, kv->key_dtype, td_kv_index_key(kv, pool, CSA, p, i));
        }
        for (uint32_t i = 0; i < TD_KV_HCA_PER_PAGE; i++)
            random_row(c, kv, td_kv_hca_row(kv, pool, HCA, p, i));
    }
}

static void fill_slot(struct td_case *c, const struct td_kv_layout *kv, void *slot) {
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t t = 0; t < TD_KV_WINDOW_ROWS; t++)
            random_row(c, kv, td_kv_window_row(kv, slot, l, t));
    float *state = (float *)(void *)((uint8_t *)slot + kv->slot_csa);
    for (size_t i = 0; i < (kv->slot_bytes - kv->slot_csa) / sizeof *state; i++)
        state[i] = td_case_uniform(c, -2, 2);
}

static void *must(void *p) {
    if (!p) abort();
    return p;
}

/* Runs of n[i] tokens at pos[i]; their pages lie anywhere in a pool of just as many. The batch's
 * split and rank are as they are wanted. */
static void make_world(struct td_case *c, struct world *w, enum td_kv_row_dtype row,
                       enum td_kv_key_dtype key, uint32_t runs, const uint32_t *pos,
                       const uint32_t *n, enum td_array_kind pool_kind) {
    uint32_t split = w->batch.split, rank = w->batch.rank;
    static const uint8_t ratio[LAYERS] = {0, TD_CSA_RATIO, TD_HCA_RATIO};
    uint32_t pages = 0, page[RUNS * MAX_PAGES], at = 0;
    struct td_op_run run[RUNS];
    struct td_error err;
    memset(w, 0, sizeof *w);
    w->batch.split = split;
    w->batch.rank = rank;
    for (uint32_t i = 0; i < runs; i++)
        pages += td_kv_pages(pos[i] + n[i], split);
    for (uint32_t i = 0; i < pages; i++) {
        uint32_t j = td_case_below(c, i + 1);
        page[i] = page[j];
        page[j] = i;
    }
    if (td_kv_layout_init(&w->kv, LAYERS, ratio, row, key, pages, 1, &err) != TD_OK) abort();
    void *pool = must(aligned_alloc(64, (w->kv.pool_bytes + 63) & ~(size_t)63));
    memset(pool, 0, w->kv.pool_bytes);
    fill_pool(c, &w->kv, pool);
    w->batch.pool = td_case_put(c, pool_kind, pool, w->kv.pool_bytes);
    free(pool);
    for (uint32_t i = 0; i < runs; i++) {
        void *slot = must(aligned_alloc(64, (w->kv.slot_bytes + 63) & ~(size_t)63));
        uint32_t own = td_kv_pages(pos[i] + n[i], split);
        memset(slot, 0, w->kv.slot_bytes);
        fill_slot(c, &w->kv, slot);
        w->slot[i] = td_case_put(c, pool_kind, slot, w->kv.slot_bytes);
        free(slot);
        run[i] =
            (struct td_op_run){.first = w->batch.n, .n = n[i], .pos = pos[i], .slot = w->slot[i]};
        run[i].pages = td_case_put(c, TD_IN, page + at, own * sizeof *page);
        at += own;
        w->batch.n += n[i];
        if (pos[i] + n[i] - 1 > w->batch.max_pos) w->batch.max_pos = pos[i] + n[i] - 1;
    }
    struct td_op_row *rows = must(malloc(w->batch.n * sizeof *rows));
    for (uint32_t i = 0, r = 0; i < runs; i++)
        for (uint32_t t = 0; t < n[i]; t++)
            rows[r++] = (struct td_op_row){i, pos[i] + t};
    w->batch.kv = &w->kv;
    w->batch.runs = runs;
    w->batch.row = td_case_put(c, TD_IN, rows, w->batch.n * sizeof *rows);
    /* Addresses differ from variant to variant: nothing to compare, so not an array of the case's
     * outputs; it is an input like the others. */
    w->batch.run = td_case_put(c, TD_IN, run, runs * sizeof *run);
    free(rows);
}

static bool odd_neighbours(const struct td_case *c) {
    return c->shape == 5 || c->shape == 7;
}

/* A few runs around the edges of windows, entries and pages; `far`: past a tile of keys; `shared`:
 * the pages are those of one of 1 to 8 ranks. */
static void any_world(struct td_case *c, struct world *w, bool far, bool shared,
                      enum td_array_kind pool_kind) {
    static const uint32_t starts[] = {0, 1, 3, 4, 100, 127, 128, 129, 255, 256, 511, 700};
    static const uint32_t counts[] = {1, 1, 2, 5, 16, 17, 40, 130};
    static const enum td_kv_row_dtype row[] = {TD_KV_ROW_BF16, TD_KV_ROW_FP32, TD_KV_ROW_FP8};
    static const enum td_kv_key_dtype key[] = {TD_KV_KEY_BF16, TD_KV_KEY_FP32, TD_KV_KEY_FP8,
                                               TD_KV_KEY_FP4};
    uint32_t runs = bench(c) ? 1 : 1 + c->shape % RUNS, pos[RUNS], n[RUNS];
    for (uint32_t i = 0; i < runs; i++) {
        pos[i] = starts[td_case_below(c, 12)];
        n[i] = counts[td_case_below(c, 8)];
    }
    for (uint32_t i = 0; c->shape % 4 == 0 && i < runs; i++)
        n[i] = 1 + (n[i] - 1) % 3; /* these have many heads, and the definitions are slow */
    if (odd_neighbours(c)) { /* of pieces of 32 tokens 27 are left over: so are rows of a tile */
        pos[0] = 200;
        n[0] = 155;
    }
    if (far) {
        pos[0] = 4 * (TD_INDEX_TILE + td_case_below(c, 200));
        n[0] = 1 + (n[0] - 1) % 17;
    }
    if (bench(c)) {
        pos[0] = 4096;
        n[0] = 64;
    }
    w->batch.split = shared && !bench(c) ? td_case_below(c, TD_KV_MAX_SPLIT + 1) : 0;
    w->batch.rank = td_case_below(c, 1u << w->batch.split);
    make_world(c, w, bench(c) ? TD_KV_ROW_BF16 : row[td_case_below(c, 3)],
               bench(c) ? TD_KV_KEY_BF16 : key[td_case_below(c, 4)], runs, pos, n, pool_kind);
    TD_CASE_TEXT(c, "%u runs, first %u tokens from %u, row type %d, key type %d, rank %u of %u",
                 runs, n[0], pos[0], (int)w->kv.row_dtype, (int)w->kv.key_dtype, w->batch.rank,
                 1u << w->batch.split);
}

/* ---- rotation ---- */

static void random_freq(struct td_case *c, const float **ret) {
    float freq[TD_ROPE_DIM / 2];
    for (uint32_t j = 0; j < TD_ROPE_DIM / 2; j++)
        freq[j] = td_case_uniform(c, 0, 1) / (1.0f + (float)(j * j));
    *ret = td_case_put(c, TD_IN, freq, sizeof freq);
}

static void rope_angles(struct td_case *c) {
    uint32_t n = bench(c) ? 512 : 1 + td_case_below(c, 40);
    struct td_op_row row[512];
    const float *freq;
    for (uint32_t i = 0; i < n; i++)
        row[i] = (struct td_op_row){0, td_case_below(c, 1u << 20)};
    random_freq(c, &freq);
    c->bytes = (double)n * 64 * 4;
    TD_CASE_TEXT(c, "n %u", n);
    TD_CASE_CALL(c, rope_angles, .row = td_case_put(c, TD_IN, row, n * sizeof *row), .freq = freq,
                 .cs = td_case_output(c, TD_FLOATS, (size_t)n * 64 * 4), .n = n);
}

static void rope(struct td_case *c) {
    uint32_t n = bench(c) ? 64 : 1 + td_case_below(c, 20),
             heads = bench(c) ? 64 : 1 + td_case_below(c, 5);
    uint32_t dim = td_case_below(c, 2) ? 512 : 128;
    size_t floats = (size_t)n * heads * dim;
    float *x = td_case_floats(c, floats, -1, 1);
    float *there = td_case_put(c, TD_FLOATS, x, floats * 4);
    free(x);
    c->bytes = (double)n * heads * 64 * 8;
    TD_CASE_TEXT(c, "n %u, %u heads of %u", n, heads, dim);
    TD_CASE_CALL(c, rope, .x = there, .cs = td_case_input(c, (size_t)n * 64, -1, 1), .n = n,
                 .heads = heads, .dim = dim, .inverse = td_case_below(c, 2));
}

/* ---- rows and compressors ---- */

static void row_store(struct td_case *c) {
    struct world w;
    any_world(c, &w, false, false, TD_IN);
    bool sim8 = td_case_below(c, 2);
    c->bytes = (double)w.batch.n * (2048 + w.kv.row_bytes);
    TD_CASE_CALL(c, row_store, .kv = td_case_input(c, (size_t)w.batch.n * 512, -9, 9),
                 .rows = td_case_output(c, TD_OUT, (size_t)w.batch.n * w.kv.row_bytes),
                 .layout = &w.kv, .n = w.batch.n, .sim8 = sim8);
}

/* This step's own rows as stored. */
static const void *own_rows(struct td_case *c, const struct world *w) {
    size_t bytes = (size_t)w->batch.n * w->kv.row_bytes;
    void *rows = must(malloc(bytes));
    for (uint32_t i = 0; i < w->batch.n; i++)
        random_row(c, &w->kv, td_kv_dense_row(&w->kv, rows, i));
    const void *there = td_case_put(c, TD_IN, rows, bytes);
    free(rows);
    return there;
}

static void ring_write(struct td_case *c) {
    struct world w;
    any_world(c, &w, false, false, TD_OUT);
    c->bytes = (double)w.batch.n * 2 * w.kv.row_bytes;
    TD_CASE_CALL(c, ring_write, .batch = &w.batch, .layer = c->shape % LAYERS,
                 .rows = own_rows(c, &w));
}

static void compress(struct td_case *c) {
    static const enum td_kv_family families[] = {TD_KV_CSA, TD_KV_INDEX, TD_KV_HCA};
    static const uint32_t dims[] = {512, 128, 512}, widths[] = {1024, 256, 512},
                          ratios[] = {4, 4, 128};
    uint32_t f = bench(c) ? 0 : td_case_below(c, 3);
    struct world w;
    const float *freq;
    any_world(c, &w, false, c->shape % 2, TD_OUT);
    random_freq(c, &freq);
    size_t floats = (size_t)w.batch.n * widths[f];
    float *g = td_case_floats(c, floats, -4, 4);
    float *there = td_case_put(c, TD_FLOATS, g, floats * 4);
    free(g);
    c->bytes = (double)floats * 16;
    TD_CASE_CALL(c, compress, .batch = &w.batch, .layer = f == 2 ? HCA : CSA, .family = families[f],
                 .u = td_case_input(c, floats, -2, 2), .g = there,
                 .ape = td_case_input(c, (size_t)ratios[f] * widths[f], -1, 1),
                 .norm = td_case_input(c, dims[f], 0, 2), .freq = freq, .eps = 1e-6f,
                 .sim8 = td_case_below(c, 2), .hadamard = td_case_below(c, 2),
                 .sim4 = td_case_below(c, 2));
}

static void index_query(struct td_case *c) {
    uint32_t n = bench(c) ? 64 : 1 + td_case_below(c, 20),
             heads = bench(c) ? 64 : 1 + td_case_below(c, 5);
    size_t floats = (size_t)n * heads * TD_INDEX_DIM;
    float *q = td_case_floats(c, floats, -3, 3);
    float *there = td_case_put(c, TD_FLOATS, q, floats * 4);
    free(q);
    c->bytes = (double)floats * 8;
    TD_CASE_TEXT(c, "n %u, %u heads", n, heads);
    TD_CASE_CALL(c, index_query, .q = there, .n = n, .heads = heads,
                 .hadamard = bench(c) || td_case_below(c, 2), .sim4 = td_case_below(c, 2));
}

/* ---- indexer and sparse core ---- */

static void index_of(struct td_case *c) {
    static const uint32_t heads_of[] = {1, 2, 3, 4, 5, 8, 64};
    uint32_t heads = bench(c) ? 64 : heads_of[td_case_below(c, c->shape % 4 ? 6 : 7)];
    uint32_t topk = bench(c) ? 512 : 1 + td_case_below(c, 200);
    struct world w;
    bool shared = !bench(c) && c->shape % 3 == 1; /* candidates are wanted */
    any_world(c, &w, c->shape % 4 == 3, shared, TD_IN);
    /* Few different values: ties. */
    size_t floats = (size_t)w.batch.n * heads * TD_INDEX_DIM;
    float *q = td_case_floats(c, floats, -1, 1);
    for (size_t i = 0; c->shape % 5 == 0 && i < floats; i++)
        q[i] = 0;
    const float *there = td_case_put(c, TD_IN, q, floats * 4);
    free(q);
    size_t workspace = c->device->backend->index_workspace(heads, topk, w.batch.n);
    void *space = td_case_output(c, TD_SCRATCH, workspace);
    /* Some rows of the step: all, none, the last ones, any. */
    uint32_t first = 0, some = w.batch.n;
    if (!bench(c) && c->shape % 8 > 4) first = td_case_below(c, w.batch.n);
    if (!bench(c) && c->shape % 8 == 4) some = 0;
    if (!bench(c) && c->shape % 8 > 4) some -= first;
    if (!bench(c) && c->shape % 8 > 5) some = td_case_below(c, some + 1);
    c->flops = 2.0 * w.batch.n * heads * TD_INDEX_DIM * (w.batch.max_pos / 4.0);
    c->bytes = (double)w.kv.key_bytes * (w.batch.max_pos / 4.0);
    TD_CASE_CALL(c, index, .batch = &w.batch, .layer = CSA, .first = first, .rows = some,
                 .q = there, .wt = td_case_input(c, (size_t)w.batch.n * heads, -1, 1),
                 .wt_scale = 0.3f, .heads = heads, .topk = topk, .score_bf16 = td_case_below(c, 2),
                 .selected = td_case_output(c, TD_OUT, (size_t)w.batch.n * topk * 4),
                 .candidate =
                     shared ? td_case_output(c, TD_OUT, (size_t)(some + 1) * topk * 8) : NULL,
                 .workspace = space);
}

/* Ascending entries, then -1, as the indexer leaves them. */
static const int32_t *random_selection(struct td_case *c, const struct world *w,
                                       const uint32_t *pos, uint32_t topk) {
    size_t n = (size_t)w->batch.n * topk;
    int32_t *selected = must(malloc(n * sizeof *selected));
    for (uint32_t i = 0; i < w->batch.n; i++) {
        uint32_t visible = (pos[i] + 1) / TD_CSA_RATIO, count = 0;
        for (uint32_t e = 0; e < visible && count < topk; e++)
            if (visible <= topk || visible - e <= topk - count || td_case_below(c, 3) == 0)
                selected[(size_t)i * topk + count++] = (int32_t)e;
        for (; count < topk; count++)
            selected[(size_t)i * topk + count] = -1;
    }
    const int32_t *there = td_case_put(c, TD_IN, selected, n * sizeof *selected);
    free(selected);
    return there;
}

/* Of the rows, as they were put. */
static uint32_t *positions(const struct td_case *c, const struct world *w) {
    uint32_t *pos = must(malloc(w->batch.n * sizeof *pos)), r = 0;
    for (uint32_t i = 0; i < c->arrays; i++)
        if (c->array[i].bytes == w->batch.n * sizeof(struct td_op_row) &&
            (const uint8_t *)c->array[i].memory + TD_CASE_GUARD == (const uint8_t *)w->batch.row)
            for (const struct td_op_row *row = (const void *)(c->array[i].before + TD_CASE_GUARD);
                 r < w->batch.n; r++)
                pos[r] = row[r].pos;
    return pos;
}

/* Rows of the step: all, or any. */
static void some_rows(struct td_case *c, const struct world *w, uint32_t *first, uint32_t *rows) {
    *first = bench(c) || c->shape % 4 < 2 ? 0 : td_case_below(c, w->batch.n);
    *rows = w->batch.n - *first;
    if (!bench(c) && c->shape % 4 == 3) *rows = td_case_below(c, *rows + 1);
}

static void attend(struct td_case *c) {
    static const uint32_t heads_of[] = {1, 2, 3, 4, 5, 7, 13, 64};
    uint32_t heads = bench(c)            ? 64
                     : odd_neighbours(c) ? 1
                                         : heads_of[td_case_below(c, c->shape % 4 ? 7 : 8)];
    uint32_t layer = bench(c) ? CSA : c->shape % LAYERS,
             topk = bench(c) ? 512 : 1 + td_case_below(c, 300);
    bool window = !bench(c) && c->shape / LAYERS % 3 == 1; /* the window's part alone */
    struct world w;
    any_world(c, &w, false, window, TD_IN);
    uint32_t *pos = positions(c, &w);
    const int32_t *selected = layer == CSA ? random_selection(c, &w, pos, topk) : NULL;
    for (uint32_t i = 0; i < w.batch.n; i++) {
        uint32_t set = pos[i] < 127 ? pos[i] + 1 : 128, seen = (pos[i] + 1) / 4;
        if (layer == HCA) set += (pos[i] + 1) / 128;
        if (layer == CSA) set += seen < topk ? seen : topk;
        c->flops += 4.0 * heads * TD_HEAD_DIM * set;
    }
    free(pos);
    c->bytes = (double)w.batch.n * heads * TD_HEAD_DIM * 8;
    TD_CASE_CALL(c, attend, .batch = &w.batch, .layer = layer, .heads = heads,
                 .q = td_case_input(c, (size_t)w.batch.n * heads * TD_HEAD_DIM, -1, 1),
                 .rows = own_rows(c, &w), .sink = td_case_input(c, heads, -1, 1),
                 .selected = selected, .topk = topk,
                 .o = td_case_output(c, TD_FLOATS, (size_t)w.batch.n * heads * TD_HEAD_DIM * 4),
                 .ml = window ? td_case_output(c, TD_FLOATS, (size_t)w.batch.n * heads * 2 * 4)
                              : NULL);
}

/* ---- entries that ranks share ---- */

/* Lists as ranks leave them, with scores of which many are equal. */
static const uint64_t *random_candidates(struct td_case *c, const struct world *w, uint32_t first,
                                         uint32_t rows, uint32_t topk) {
    uint32_t ranks = 1u << w->batch.split, *pos = positions(c, w);
    size_t n = (size_t)ranks * rows * topk + 1;
    uint64_t *list = must(malloc(n * sizeof *list));
    memset(list, 0, n * sizeof *list);
    for (uint32_t r = 0; r < ranks; r++)
        for (uint32_t i = 0; i < rows; i++) {
            uint64_t *to = list + ((size_t)r * rows + i) * topk;
            uint32_t visible = (pos[first + i] + 1) / TD_CSA_RATIO, count = 0;
            for (uint32_t e = 0; e < visible && visible > topk && count < topk; e++) {
                float score = (float)td_case_below(c, 40) * 0.5f - 10;
                if (td_kv_page_rank(e / TD_KV_CSA_PER_PAGE, w->batch.split) == r)
                    to[count++] = td_index_candidate(td_f32_bits(score), e);
            }
        }
    free(pos);
    const uint64_t *there = td_case_put(c, TD_IN, list, n * sizeof *list);
    free(list);
    return there;
}

static void index_merge(struct td_case *c) {
    uint32_t topk = bench(c) ? 512 : 1 + td_case_below(c, 100), first, rows;
    struct world w;
    any_world(c, &w, false, true, TD_IN);
    some_rows(c, &w, &first, &rows);
    c->bytes = (double)w.batch.n * topk * (8u << w.batch.split);
    TD_CASE_CALL(c, index_merge, .batch = &w.batch, .first = first, .rows = rows,
                 .ranks = 1u << w.batch.split, .topk = topk,
                 .candidate = random_candidates(c, &w, first, rows, topk),
                 .selected = td_case_output(c, TD_OUT, (size_t)w.batch.n * topk * 4));
}

static void attend_part(struct td_case *c) {
    static const uint32_t heads_of[] = {1, 2, 3, 5, 8};
    uint32_t heads = bench(c) ? 64 : heads_of[td_case_below(c, c->shape % 4 ? 4 : 5)];
    uint32_t layer = c->shape % 2 ? HCA : CSA, first, rows;
    uint32_t topk = bench(c) ? 512 : 1 + td_case_below(c, 300);
    struct world w;
    any_world(c, &w, false, true, TD_IN);
    some_rows(c, &w, &first, &rows);
    uint32_t *pos = positions(c, &w), ranks = 1u << w.batch.split;
    const int32_t *selected = layer == CSA ? random_selection(c, &w, pos, topk) : NULL;
    free(pos);
    size_t part = td_attend_part_floats(rows, heads);
    c->flops = 4.0 * rows * ranks * heads * TD_HEAD_DIM * topk / ranks;
    c->bytes = (double)rows * ranks * heads * TD_HEAD_DIM * 8;
    TD_CASE_CALL(c, attend_part, .batch = &w.batch, .layer = layer, .first = first, .rows = rows,
                 .ranks = ranks, .heads = heads,
                 .q = td_case_input(c, (size_t)ranks * rows * heads * TD_HEAD_DIM + 1, -1, 1),
                 .selected = selected, .topk = topk,
                 .part = td_case_output(c, TD_FLOATS, (ranks * part + 1) * 4));
}

static void attend_merge(struct td_case *c) {
    uint32_t n = bench(c) ? 64 : 1 + td_case_below(c, 12), heads = bench(c) ? 64 : 1 + c->shape % 5;
    uint32_t ranks = 1u << td_case_below(c, TD_KV_MAX_SPLIT + 1), first = td_case_below(c, n);
    uint32_t rows = bench(c) ? n - (first = 0) : 1 + td_case_below(c, n - first);
    size_t each = td_attend_part_floats(rows, heads), values = (size_t)rows * heads * TD_HEAD_DIM;
    float *part = td_case_floats(c, ranks * each, -3, 3);
    float *ml = td_case_floats(c, (size_t)n * heads * 2, 0.5f, 3);
    float *o = td_case_floats(c, (size_t)n * heads * TD_HEAD_DIM, -3, 3);
    for (uint32_t r = 0; r < ranks; r++) /* m: some equal, some far apart; l: some are empty */
        for (size_t i = 0; i < (size_t)rows * heads; i++) {
            float *at = part + r * each + values + 2 * i;
            uint32_t kind = td_case_below(c, 5);
            at[0] = kind < 2 ? 1.0f : kind == 2 ? -200.0f : at[0];
            at[1] = td_case_uniform(c, 0.5f, 9);
            if (kind == 4) at[0] = at[1] = 0.0f;
        }
    const float *parts = td_case_put(c, TD_IN, part, ranks * each * 4);
    const float *own = td_case_put(c, TD_IN, ml, (size_t)n * heads * 2 * 4);
    float *there = td_case_put(c, TD_FLOATS, o, (size_t)n * heads * TD_HEAD_DIM * 4);
    free(part);
    free(ml);
    free(o);
    c->bytes = (double)values * 4 * (ranks + 2);
    TD_CASE_TEXT(c, "rows %u.. of %u, %u of them, %u heads, %u ranks", first, n, rows, heads,
                 ranks);
    TD_CASE_CALL(c, attend_merge, .first = first, .rows = rows, .ranks = ranks, .heads = heads,
                 .part = parts, .ml = own, .o = there);
}

const struct td_op_cases td_cases_kv[] = {
    {"rope_angles", rope_angles, 6, 1e-6},
    {"rope", rope, 8, 1e-5},
    {"row_store", row_store, 12, 0},
    {"ring_write", ring_write, 12, 0},
    {"compress", compress, 24, 1e-5},
    {"index_query", index_query, 8, 1e-5},
    {"index", index_of, 32, 0},
    {"attend", attend, 48, 1e-5},
    {"index_merge", index_merge, 24, 0},
    {"attend_part", attend_part, 40, 1e-5},
    {"attend_merge", attend_merge, 24, 1e-5},
    {0},
};

/* Ranks that share entries, rank after rank on one device: what the indexer chooses and what the
 * sparse core gives has the same bits for 1, 2, 4 and 8 ranks and however the rows are cut; the
 * plain kernels have the definitions' bits, the fast ones are as near to them as where nothing is
 * shared. A rank's pool has NaNs where it has no pages. Built like test_cuda.c. */
#include <math.h>
#include <stdio.h>

#include "kernels/model/numbers.h"
#include "tests/kernels/device_arrays.h"
#include "tests/kernels/sequences.h"

extern const struct td_backend TD_TEST_BACKEND;

enum {
    HEADS = 16, /* of all ranks */
    D = TD_HEAD_DIM,
    ARRAYS = 128,
    SPLITS = TD_KV_MAX_SPLIT + 1,
};

/* Where ops run, and what was taken there. */
struct place {
    struct td_device d;
    struct td_ops ops;
    const void *array[ARRAYS];
    uint32_t arrays;
};
static struct place host, plain, fast;

static void *put(struct place *p, const void *from, size_t bytes) {
    void *there = td_test_put(&p->d, from, bytes);
    assert_true(p->arrays < ARRAYS);
    p->array[p->arrays++] = there;
    return there;
}

static void *put_poison(struct place *p, size_t bytes) {
    float *poison = td_test_poison(bytes / sizeof *poison);
    void *there = put(p, poison, bytes);
    free(poison);
    return there;
}

/* What was put after the first `keep`. */
static void give(struct place *p, uint32_t keep) {
    while (p->arrays > keep)
        td_test_give(&p->d, p->array[--p->arrays]);
}

/* ---- a step, and a rank's view of it ---- */

struct step {
    struct td_sequences s;
    uint32_t layer, topk;
    int32_t *selected;
};

static void copy_page(const struct td_kv_layout *kv, void *to, uint32_t to_page, void *from,
                      uint32_t from_page) {
    for (uint32_t i = 0; i < TD_KV_CSA_PER_PAGE; i++) {
        td_kv_row_copy(kv, td_kv_csa_row(kv, to, 1, to_page, i),
                       td_kv_csa_row(kv, from, 1, from_page, i));
        memcpy(td_kv_index_key(kv, to, 1, to_page, i), td_kv_index_key(kv, from, 1, from_page, i),
               kv->key_bytes);
    }
    for (uint32_t i = 0; i < TD_KV_HCA_PER_PAGE; i++)
        td_kv_row_copy(kv, td_kv_hca_row(kv, to, 2, to_page, i),
                       td_kv_hca_row(kv, from, 2, from_page, i));
}

/* Page `a` of a sequence goes to where page a >> split was. */
static struct td_op_batch view(struct place *p, struct step *st, uint32_t split, uint32_t rank) {
    struct td_sequences *s = &st->s;
    struct td_op_batch b = s->batch;
    struct td_op_run run[TD_SEQ_MAX];
    void *pool = td_test_bytes(s->kv.pool_bytes);
    uint8_t *slots = put(p, s->slots, s->kv.slot_bytes * s->count);
    uint32_t *pages = put(p, s->pages, sizeof s->pages);
    memset(pool, 0xff, s->kv.pool_bytes);
    for (uint32_t i = 0; i < b.runs; i++) {
        const uint32_t *own = s->run[i].pages;
        uint32_t used = (s->run[i].pos + s->run[i].n - 1) / TD_KV_PAGE_TOKENS + 1;
        for (uint32_t a = 0; a < used; a++)
            if (td_kv_page_rank(a, split) == rank)
                copy_page(&s->kv, pool, own[a >> split], s->pool, own[a]);
        run[i] = s->run[i];
        run[i].pages = pages + (own - s->pages[0]);
        run[i].slot = slots + ((uint8_t *)s->run[i].slot - (uint8_t *)s->slots);
    }
    b.split = split;
    b.rank = rank;
    b.pool = put(p, pool, s->kv.pool_bytes);
    b.run = put(p, run, b.runs * sizeof *run);
    b.row = put(p, s->row, b.n * sizeof *s->row);
    free(pool);
    return b;
}

static void random_rows(struct step *st) {
    struct td_sequences *s = &st->s;
    uint32_t all = s->kv.pages * TD_KV_CSA_PER_PAGE;
    float *any = td_test_floats((size_t)all * D, -1, 1);
    uint8_t *dense = td_test_bytes((size_t)all * s->kv.row_bytes);
    struct td_row_store_args store = {.kv = any, .rows = dense, .layout = &s->kv, .n = all};
    host.ops.row_store(&host.d, &store);
    for (uint32_t r = 0; r < all; r++) {
        struct td_kv_row from = td_kv_dense_row(&s->kv, dense, r);
        uint32_t page = r / TD_KV_CSA_PER_PAGE, e = r % TD_KV_CSA_PER_PAGE;
        td_kv_row_copy(&s->kv, td_kv_csa_row(&s->kv, s->pool, 1, page, e), from);
        if (e < TD_KV_HCA_PER_PAGE)
            td_kv_row_copy(&s->kv, td_kv_hca_row(&s->kv, s->pool, 2, page, e), from);
        for (uint32_t i = 0; r < TD_KV_WINDOW_ROWS && i < s->count; i++)
            td_kv_row_copy(
                &s->kv,
                td_kv_window_row(&s->kv, (uint8_t *)s->slots + s->kv.slot_bytes * i, st->layer, r),
                td_kv_dense_row(&s->kv, dense, r + 128 * i));
    }
    free(any);
    free(dense);
}

/* Small whole numbers: every sum is exact, so that the order does not matter and scores are often
 * equal. */
static void whole_keys(struct step *st) {
    struct td_sequences *s = &st->s;
    for (uint32_t p = 0; p < s->kv.pages; p++)
        for (uint32_t e = 0; e < TD_KV_CSA_PER_PAGE; e++) {
            uint16_t *key = td_kv_index_key(&s->kv, s->pool, 1, p, e);
            for (uint32_t i = 0; i < TD_INDEX_DIM; i++)
                key[i] = td_f32_to_bf16((float)td_test_below(5) - 2);
        }
}

static void choose(struct step *st) {
    st->selected = td_test_bytes(st->s.batch.n * st->topk * sizeof *st->selected);
    for (uint32_t i = 0; i < st->s.batch.n; i++) {
        uint32_t visible = (st->s.row[i].pos + 1) / TD_CSA_RATIO, count = 0;
        int32_t *to = st->selected + (size_t)i * st->topk;
        for (uint32_t w = 0; w < visible && count < st->topk; w++)
            if (td_test_below(visible) < st->topk) to[count++] = (int32_t)w;
        while (count < st->topk)
            to[count++] = -1;
    }
}

static void start(struct step *st, enum td_kv_row_dtype type, uint32_t layer, uint32_t topk,
                  const uint32_t pos[3], const uint32_t n[3]) {
    *st = (struct step){.layer = layer, .topk = topk};
    td_sequences_init(&st->s, 3, type, TD_KV_KEY_BF16);
    memcpy(st->s.pos, pos, 3 * sizeof *pos);
    td_sequences_step(&st->s, n);
    random_rows(st);
    choose(st);
}

static void finish(struct step *st) {
    td_sequences_finish(&st->s);
    free(st->selected);
}

/* ---- the sparse core ---- */

struct inputs {
    float *q, *sink; /* [n, HEADS, 512], [HEADS] */
    void *rows;
};

/* Heads first .. first + heads - 1 of rows from .. from + n - 1. */
static float *some_heads(const float *q, uint32_t from, uint32_t n, uint32_t first,
                         uint32_t heads) {
    float *to = td_test_poison((size_t)n * heads * D);
    for (uint32_t i = 0; i < n; i++)
        memcpy(to + (size_t)i * heads * D, q + ((size_t)(from + i) * HEADS + first) * D,
               (size_t)heads * D * sizeof *to);
    return to;
}

/* Parts of rows from .. from + n - 1, [ranks from] [ranks for], as they are exchanged. */
static float *all_parts(struct place *p, struct step *st, const struct td_op_batch *b,
                        const struct inputs *in, uint32_t from, uint32_t n) {
    uint32_t ranks = 1u << b->split, heads = HEADS / ranks, kept = p->arrays;
    size_t floats = td_attend_part_floats(n, heads), row = (size_t)n * heads * D;
    float *q = td_test_poison(ranks * row), *all = td_test_poison(ranks * ranks * floats);
    for (uint32_t r = 0; r < ranks; r++) {
        float *of = some_heads(in->q, from, n, r * heads, heads);
        memcpy(q + r * row, of, row * sizeof *q);
        free(of);
    }
    struct td_attend_part_args a = {.layer = st->layer,
                                    .first = from,
                                    .rows = n,
                                    .ranks = ranks,
                                    .heads = heads,
                                    .topk = st->topk};
    a.q = put(p, q, ranks * row * sizeof *q);
    if (st->layer == 1)
        a.selected = put(p, st->selected, st->s.batch.n * st->topk * sizeof *st->selected);
    for (uint32_t r = 0; r < ranks; r++) {
        a.batch = &b[r];
        a.part = put_poison(p, ranks * floats * sizeof *all);
        p->ops.attend_part(&p->d, &a);
        td_test_get(&p->d, all + r * ranks * floats, a.part, ranks * floats * sizeof *all);
    }
    give(p, kept);
    free(q);
    return all;
}

/* o [n, HEADS, 512] of 1 << split ranks, rows in slices of `slice`. */
static float *attend(struct place *p, struct step *st, const struct inputs *in, uint32_t split,
                     uint32_t slice) {
    uint32_t ranks = 1u << split, heads = HEADS / ranks, n = st->s.batch.n;
    size_t bytes = (size_t)n * heads * D * sizeof(float);
    struct td_op_batch b[TD_MAX_RANKS];
    struct td_attend_args w[TD_MAX_RANKS];
    float *o = td_test_poison((size_t)n * HEADS * D), *part = td_test_poison((size_t)n * heads * D);
    for (uint32_t r = 0; r < ranks; r++) {
        float *q = some_heads(in->q, 0, n, r * heads, heads);
        b[r] = view(p, st, split, r);
        w[r] = (struct td_attend_args){.batch = &b[r],
                                       .layer = st->layer,
                                       .heads = heads,
                                       .q = put(p, q, bytes),
                                       .rows = put(p, in->rows, n * st->s.kv.row_bytes),
                                       .sink = put(p, in->sink + r * heads, heads * 4),
                                       .o = put_poison(p, bytes),
                                       .ml = put_poison(p, (size_t)n * heads * 8)};
        p->ops.attend(&p->d, &w[r]);
        free(q);
    }
    for (uint32_t from = 0; from < n; from += slice) {
        uint32_t rows = n - from < slice ? n - from : slice, kept = p->arrays;
        size_t floats = td_attend_part_floats(rows, heads);
        float *all = all_parts(p, st, b, in, from, rows), *own = td_test_poison(ranks * floats);
        for (uint32_t r = 0; r < ranks; r++) {
            for (uint32_t of = 0; of < ranks; of++)
                memcpy(own + of * floats, all + (of * ranks + r) * floats, floats * sizeof *own);
            struct td_attend_merge_args m = {.first = from,
                                             .rows = rows,
                                             .ranks = ranks,
                                             .heads = heads,
                                             .part = put(p, own, ranks * floats * sizeof *own),
                                             .ml = w[r].ml,
                                             .o = w[r].o};
            p->ops.attend_merge(&p->d, &m);
            give(p, kept);
        }
        free(all);
        free(own);
    }
    for (uint32_t r = 0; r < ranks; r++) {
        td_test_get(&p->d, part, w[r].o, bytes);
        for (uint32_t i = 0; i < n; i++)
            memcpy(o + ((size_t)i * HEADS + r * heads) * D, part + (size_t)i * heads * D,
                   (size_t)heads * D * sizeof *o);
    }
    give(p, 0);
    free(part);
    return o;
}

/* Of one rank and of 1 << split. */
static void same_attention(struct step *st, uint32_t many, bool plain_too) {
    uint32_t n = st->s.batch.n;
    size_t floats = (size_t)n * HEADS * D;
    struct inputs in = {.q = td_test_floats(floats, -1, 1), .sink = td_test_floats(HEADS, -1, 1)};
    float *kv = td_test_floats((size_t)n * D, -1, 1), *first = NULL;
    in.rows = td_test_bytes(n * st->s.kv.row_bytes);
    struct td_row_store_args store = {.kv = kv, .rows = in.rows, .layout = &st->s.kv, .n = n};
    host.ops.row_store(&host.d, &store);
    for (size_t i = 0; i < floats; i++)
        in.q[i] = td_bf16_to_f32(td_f32_to_bf16(in.q[i]));
    float *want = attend(&host, st, &in, 0, n);
    for (uint32_t split = 0; split <= many; split += many) {
        uint32_t slice = split == 0 ? n : 1 + td_test_below(n);
        float *got = attend(&fast, st, &in, split, slice);
        for (size_t i = 0; i < floats; i++)
            if (!(fabsf(got[i] - want[i]) <= 4e-3f))
                fail_msg("layer %u, split %u, value %zu: expected %.9g, found %.9g", st->layer,
                         split, i, (double)want[i], (double)got[i]);
        if (first) td_test_same("fast", first, got, floats * sizeof *got);
        if (first)
            free(got);
        else
            first = got;
        if (!plain_too || split == 0) continue;
        got = attend(&plain, st, &in, split, slice);
        td_test_same("plain", want, got, floats * sizeof *got);
        free(got);
    }
    free(want);
    free(first);
    free(kv);
    free(in.q);
    free(in.sink);
    free(in.rows);
}

/* Rows that see nothing, some shards, all; and the edges of a page. */
static void sets(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        enum td_kv_row_dtype type = i % 2 ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16;
        uint32_t far = td_test_below((TD_SEQ_PAGES - 1) * TD_KV_PAGE_TOKENS);
        if (i > 1) /* one entry of a page whose shard has another number */
            far = TD_KV_PAGE_TOKENS * (8 * td_test_below(2) + (i == 2 ? 1 : 6)) + 128 +
                  td_test_below(127);
        uint32_t pos[3] = {i % 2 ? 2 : 511, 300 + td_test_below(900), far};
        struct step st;
        start(&st, type, 1 + (uint32_t)i / 2, 70, pos, (uint32_t[]){1, i == 0, 1});
        same_attention(&st, 1 + (uint32_t)i % 3, i != 2);
        finish(&st);
    }
}

/* All entries of a shard and some others: more than a block takes. */
static void a_long_shard(void **state) {
    (void)state;
    enum { PAGES = 3 * TD_SEQ_PAGES, TOPK = 640 };
    struct step st;
    uint32_t pos = PAGES * TD_KV_PAGE_TOKENS - 2, count = 0, more = 0;
    start(&st, TD_KV_ROW_BF16, 1, TOPK, (uint32_t[]){1, 1, 1}, (uint32_t[]){1, 0, 0});
    st.s.run[0].pos = st.s.row[0].pos = st.s.batch.max_pos = pos; /* through all three's pages */
    for (uint32_t w = 0; w < (pos + 1) / TD_CSA_RATIO; w++)
        if (td_kv_shard(w / TD_KV_CSA_PER_PAGE) == 0 || (w % 77 == 0 && more++ < 40))
            st.selected[count++] = (int32_t)w;
    assert_in_range(count, 577, TOPK);
    same_attention(&st, 3, false);
    finish(&st);
}

/* ---- the indexer ---- */

struct queries {
    uint32_t heads;
    float *q, *wt;
};

static int32_t *chosen(struct place *p, struct step *st, const struct queries *in, uint32_t split,
                       uint32_t slice) {
    uint32_t ranks = 1u << split, n = st->s.batch.n, topk = st->topk;
    int32_t *selected = td_test_bytes((size_t)n * topk * sizeof *selected);
    struct td_op_batch b[TD_MAX_RANKS];
    for (uint32_t r = 0; r < ranks; r++)
        b[r] = view(p, st, split, r);
    struct td_index_args a = {.layer = 1,
                              .q = put(p, in->q, (size_t)n * in->heads * TD_INDEX_DIM * 4),
                              .wt = put(p, in->wt, (size_t)n * in->heads * 4),
                              .wt_scale = 0.25f,
                              .heads = in->heads,
                              .topk = topk};
    size_t space = p->d.backend->index_workspace(in->heads, topk, n);
    a.workspace = put(p, NULL, space);
    struct td_index_merge_args m = {.batch = &b[0], .ranks = ranks, .topk = topk};
    m.selected = put_poison(p, (size_t)n * topk * sizeof *selected);
    for (uint32_t from = 0; from < n; from += slice) {
        uint32_t rows = n - from < slice ? n - from : slice, kept = p->arrays;
        size_t bytes = (size_t)rows * topk * sizeof(uint64_t);
        uint64_t *all = td_test_bytes(ranks * bytes);
        a.first = m.first = from;
        a.rows = m.rows = rows;
        for (uint32_t r = 0; r < ranks; r++) {
            a.batch = &b[r];
            a.candidate = put_poison(p, bytes);
            p->ops.index(&p->d, &a);
            td_test_get(&p->d, all + r * bytes / sizeof *all, a.candidate, bytes);
        }
        m.candidate = put(p, all, ranks * bytes);
        p->ops.index_merge(&p->d, &m);
        td_test_get(&p->d, selected, m.selected, 4);
        give(p, kept);
        free(all);
    }
    td_test_get(&p->d, selected, m.selected, (size_t)n * topk * sizeof *selected);
    give(p, 0);
    return selected;
}

static void choices_of(uint32_t heads, uint32_t topk, const uint32_t pos[3], const uint32_t n[3]) {
    struct step st;
    start(&st, TD_KV_ROW_BF16, 1, topk, pos, n);
    whole_keys(&st);
    size_t rows = st.s.batch.n, floats = rows * heads * TD_INDEX_DIM;
    struct queries in = {heads, td_test_floats(floats, -2, 2), td_test_floats(rows * heads, -4, 4)};
    for (size_t i = 0; i < floats; i++)
        in.q[i] = rintf(in.q[i]);
    for (size_t i = 0; i < rows * heads; i++)
        in.wt[i] = rintf(in.wt[i]);
    int32_t *want = td_test_bytes(rows * topk * sizeof *want);
    struct td_index_args all = {.batch = &st.s.batch,
                                .layer = 1,
                                .rows = st.s.batch.n,
                                .q = in.q,
                                .wt = in.wt,
                                .wt_scale = 0.25f,
                                .heads = heads,
                                .topk = topk,
                                .selected = want,
                                .workspace = td_test_bytes(td_index_workspace(heads, topk))};
    host.ops.index(&host.d, &all);
    for (uint32_t split = 0; split < SPLITS; split++)
        for (int form = 0; form < 2; form++) {
            struct place *p = form ? &plain : &fast;
            if (form && split != 1) continue;
            int32_t *got = chosen(p, &st, &in, split, 1 + td_test_below((uint32_t)rows));
            td_test_same("chosen entries", want, got, rows * topk * sizeof *want);
            free(got);
        }
    free(all.workspace);
    free(want);
    free(in.q);
    free(in.wt);
    finish(&st);
}

static void choices(void **state) {
    (void)state;
    const uint32_t most = TD_SEQ_PAGES * TD_KV_PAGE_TOKENS;
    choices_of(8, 33, (uint32_t[]){td_test_below(most), 100, 700}, (uint32_t[]){1, 2, 1});
    choices_of(3, 400, (uint32_t[]){most - 1, 1596, 1600}, (uint32_t[]){1, 1, 5});
    choices_of(2, 1, (uint32_t[]){0, 12, td_test_below(most)}, (uint32_t[]){0, 1, 1});
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets),
        cmocka_unit_test(a_long_shard),
        cmocka_unit_test(choices),
    };
    struct td_error err;
    uint64_t all;
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    host.d = td_test_device(1);
    host.d.backend = &td_backend_cpu;
    host.ops = td_ops_ref;
    if (TD_TEST_BACKEND.open(&fast.d, 0, &err) != TD_OK ||
        TD_TEST_BACKEND.open(&plain.d, 0, &err) != TD_OK ||
        td_ops_mask("all", &all, &err) != TD_OK ||
        fast.d.backend->ops(&fast.d, 0, &fast.ops, &err) != TD_OK ||
        plain.d.backend->ops(&plain.d, all, &plain.ops, &err) != TD_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests(tests, td_test_seed, NULL);
    fast.d.backend->close(&fast.d);
    plain.d.backend->close(&plain.d);
    td_test_device_finish(&host.d);
    return failed;
}

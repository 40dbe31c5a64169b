/* The indexer's choice equals a full sort, ties included, whatever the context, the top-k, the
 * batch and the instruction set; scores equal the formula. */
#include <math.h>

#include "kernels/ref/stored.h"
#include "tests/kernels/sequences.h"

static struct td_device dev;
static const struct td_ops *table[2];
static uint32_t tables;

enum { D = TD_INDEX_DIM, LAYER = 1 };

struct ranked {
    double score;
    uint32_t entry;
};

static int by_score(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->entry < y->entry ? -1 : 1;
}

static int by_entry(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

static void choose_formula(const float *q, const float *wt, const float *keys, uint32_t heads,
                           bool bf16, uint32_t visible, uint32_t topk, int32_t *to) {
    struct ranked *all = malloc((visible + 1) * sizeof *all);
    assert_non_null(all);
    for (uint32_t w = 0; w < visible; w++) {
        all[w] = (struct ranked){0, w};
        for (uint32_t h = 0; h < heads; h++) {
            double dot = 0;
            for (uint32_t k = 0; k < D; k++)
                dot += (double)q[h * D + k] * keys[(size_t)w * D + k];
            all[w].score += wt[h] * 0.25 * fmax(dot, 0);
        }
        /* Sums of small integers are exact in fp32, so this rounds once. */
        if (bf16) all[w].score = (double)td_bf16_to_f32(td_f32_to_bf16((float)all[w].score)) + 0.0;
    }
    qsort(all, visible, sizeof *all, by_score);
    uint32_t n = visible < topk ? visible : topk;
    for (uint32_t i = 0; i < topk; i++)
        to[i] = i < n ? (int32_t)all[i].entry : -1;
    qsort(to, n, sizeof *to, by_entry);
    free(all);
}

/* Small integers: every sum is exact in fp32, so equal scores are common and order is decided by
 * the rule alone. */
static float small_integer(void) {
    return (float)td_test_below(5) - 2.0f;
}

static void exact_case(uint32_t heads, uint32_t topk, const uint32_t *start, const uint32_t *n,
                       enum td_kv_key_dtype type, bool bf16) {
    struct td_sequences s;
    td_sequences_init(&s, 2, TD_KV_ROW_BF16, type);
    float *keys[2];
    uint32_t total = n[0] + n[1];
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t count = (start[i] + n[i]) / 4;
        s.pos[i] = start[i];
        keys[i] = td_test_bytes((size_t)(count + 1) * D * sizeof(float));
        for (uint32_t w = 0; w < count; w++) {
            float *v = keys[i] + (size_t)w * D;
            for (uint32_t k = 0; k < D; k++)
                v[k] = td_test_below(4) ? 0 : small_integer();
            key_encode(v, type, td_kv_index_key(&s.kv, s.pool, LAYER, s.pages[i][w / 64], w % 64));
        }
    }
    td_sequences_step(&s, n);
    float *q = td_test_bytes((size_t)total * heads * D * sizeof *q);
    float *wt = td_test_bytes((size_t)total * heads * sizeof *wt);
    for (size_t i = 0; i < (size_t)total * heads * D; i++)
        q[i] = td_test_below(4) ? 0 : small_integer();
    for (uint32_t i = 0; i < total * heads; i++)
        wt[i] =
            bf16 ? (float)td_test_below(121) - 60.0f : small_integer(); /* more bits than bf16 */
    int32_t *got = td_test_bytes((size_t)total * topk * sizeof *got), *want = malloc(topk * 4);
    size_t space = td_index_workspace(heads, topk);
    uint8_t *workspace = td_test_bytes(space + 64);
    for (uint32_t t = 0; t < tables; t++) {
        memset(got, 0x55, (size_t)total * topk * sizeof *got);
        memset(workspace, 0xa5, space + 64);
        struct td_index_args a = {.batch = &s.batch,
                                  .rows = s.batch.n,
                                  .layer = LAYER,
                                  .q = q,
                                  .wt = wt,
                                  .wt_scale = 0.25f,
                                  .heads = heads,
                                  .topk = topk,
                                  .score_bf16 = bf16,
                                  .selected = got,
                                  .workspace = workspace};
        table[t]->index(&dev, &a);
        for (uint32_t i = 0; i < 64; i++)
            assert_int_equal(workspace[space + i], 0xa5);
        for (uint32_t i = 0; i < total; i++) {
            uint32_t seq = i >= n[0], pos = s.batch.row[i].pos;
            choose_formula(q + (size_t)i * heads * D, wt + (size_t)i * heads, keys[seq], heads,
                           bf16, (pos + 1) / 4, topk, want);
            if (memcmp(want, got + (size_t)i * topk, topk * sizeof *want) != 0)
                fail_msg("heads %u, topk %u, position %u: not the full sort's choice", heads, topk,
                         pos);
        }
    }
    free(workspace);
    free(want);
    free(got);
    free(wt);
    free(q);
    free(keys[0]);
    free(keys[1]);
    td_sequences_finish(&s);
}

static void equals_full_sort(void **state) {
    (void)state;
    static const struct {
        uint32_t heads, topk, start[2], n[2];
    } cases[] = {
        {1, 1, {0, 0}, {9, 7}},           {4, 1, {4090, 4095}, {20, 1}},
        {4, 64, {250, 255}, {40, 1}},     {4, 64, {4094, 4099}, {5, 17}},
        {4, 64, {4, 5000}, {1, 33}},      {3, 100, {6000, 1}, {9, 16}},
        {64, 512, {5900, 2040}, {3, 20}}, {4, 2048, {6000, 2048}, {8, 1}},
        {9, 1024, {4093, 4092}, {12, 8}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        exact_case(cases[i].heads, cases[i].topk, cases[i].start, cases[i].n, TD_KV_KEY_FP32,
                   false);
        exact_case(cases[i].heads, cases[i].topk, cases[i].start, cases[i].n, TD_KV_KEY_BF16,
                   false);
        exact_case(cases[i].heads, cases[i].topk, cases[i].start, cases[i].n, TD_KV_KEY_BF16, true);
        exact_case(cases[i].heads, cases[i].topk, cases[i].start, cases[i].n, TD_KV_KEY_FP4, false);
    }
}

/* All keys equal: the lowest entries win, even across many tiles. */
static void equal_scores_take_the_lowest(void **state) {
    (void)state;
    enum { HEADS = 2, TOPK = 70, POS = 5500 };
    struct td_sequences s;
    td_sequences_init(&s, 1, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    float *v = td_test_floats(D, -1, 1), *q = td_test_floats(HEADS * D, -1, 1), wt[HEADS] = {1, -1};
    s.pos[0] = POS;
    for (uint32_t w = 0; w < (POS + 1) / 4; w++)
        key_encode(v, TD_KV_KEY_BF16,
                   td_kv_index_key(&s.kv, s.pool, LAYER, s.pages[0][w / 64], w % 64));
    td_sequences_step(&s, (uint32_t[]){1});
    int32_t got[TOPK];
    void *workspace = td_test_bytes(td_index_workspace(HEADS, TOPK));
    struct td_index_args a = {.batch = &s.batch,
                              .rows = s.batch.n,
                              .layer = LAYER,
                              .q = q,
                              .wt = wt,
                              .wt_scale = 1.0f,
                              .heads = HEADS,
                              .topk = TOPK,
                              .selected = got,
                              .workspace = workspace};
    for (uint32_t t = 0; t < tables; t++) {
        table[t]->index(&dev, &a);
        for (int32_t i = 0; i < TOPK; i++)
            assert_int_equal(got[i], i);
    }
    free(workspace);
    free(q);
    free(v);
    td_sequences_finish(&s);
}

/* score = sum over heads of wt * max(q . k, 0), of one query and many keys: with both transformed
 * the same up to fp32 rounding of the transforms. */
static void same_scores(const float *q, const float *h, const float *wt, const float *keys,
                        uint32_t heads) {
    for (uint32_t w = 0; w < 300; w++) {
        const float *k = keys + (size_t)w * D;
        double plain = 0, turned = 0, size = 0;
        float hk[D];
        memcpy(hk, k, sizeof hk);
        hadamard128(hk);
        for (uint32_t i = 0; i < heads; i++) {
            double a = 0, b = 0;
            for (uint32_t c = 0; c < D; c++) {
                a += (double)q[i * D + c] * (double)k[c];
                b += (double)h[i * D + c] * (double)hk[c];
                size += fabs((double)q[i * D + c] * (double)k[c]);
            }
            plain += (double)wt[i] * fmax(a, 0);
            turned += (double)wt[i] * fmax(b, 0);
        }
        if (fabs(plain - turned) > 1e-7 * size)
            fail_msg("score of entry %u: %.9g plain, %.9g transformed", w, plain, turned);
    }
}

/* Queries and keys both transformed: the same scores up to rounding, so all but entries that differ
 * by less than that are the same. Only one of the two transformed is another matter. */
static void hadamard_on_both_changes_nothing(void **state) {
    (void)state;
    enum { HEADS = 4, TOPK = 64, POS = 4500, N = 16, KEYS = (POS + N) / 4 };
    struct td_sequences s;
    td_sequences_init(&s, 1, TD_KV_ROW_BF16, TD_KV_KEY_FP32);
    float *keys = td_test_floats((size_t)KEYS * D, -1, 1), *wt = td_test_floats(N * HEADS, -1, 1);
    float *q = td_test_floats((size_t)N * HEADS * D, -1, 1);
    int32_t *chosen[3];
    void *workspace = td_test_bytes(td_index_workspace(HEADS, TOPK));
    s.pos[0] = POS;
    td_sequences_step(&s, (uint32_t[]){N});
    for (int mode = 0; mode < 3; mode++) { /* neither, both, only queries */
        chosen[mode] = td_test_bytes(N * TOPK * 4);
        for (uint32_t w = 0; w < KEYS; w++) {
            float v[D];
            memcpy(v, keys + (size_t)w * D, sizeof v);
            if (mode == 1) hadamard128(v);
            key_encode(v, TD_KV_KEY_FP32,
                       td_kv_index_key(&s.kv, s.pool, LAYER, s.pages[0][w / 64], w % 64));
        }
        float *h = memcpy(td_test_bytes((size_t)N * HEADS * D * 4), q, (size_t)N * HEADS * D * 4);
        struct td_index_query_args iq = {.q = h, .n = N, .heads = HEADS, .hadamard = mode > 0};
        table[0]->index_query(&dev, &iq);
        struct td_index_args a = {.batch = &s.batch,
                                  .rows = s.batch.n,
                                  .layer = LAYER,
                                  .q = h,
                                  .wt = wt,
                                  .wt_scale = 0.1f,
                                  .heads = HEADS,
                                  .topk = TOPK,
                                  .selected = chosen[mode],
                                  .workspace = workspace};
        table[0]->index(&dev, &a);
        if (mode == 1) same_scores(q, h, wt, keys, HEADS);
        free(h);
    }
    uint32_t both = 0, one = 0;
    for (uint32_t r = 0; r < N * TOPK; r++)
        for (uint32_t j = 0; j < TOPK; j++) {
            both += chosen[0][r] == chosen[1][r / TOPK * TOPK + j];
            one += chosen[0][r] == chosen[2][r / TOPK * TOPK + j];
        }
    assert_in_range(both, N * TOPK - 3, N * TOPK);
    assert_in_range(one, 0, N * TOPK / 2);
    for (int mode = 0; mode < 3; mode++)
        free(chosen[mode]);
    free(workspace);
    free(wt);
    free(q);
    free(keys);
    td_sequences_finish(&s);
}

/* A query's choice is the same alone and among others (prefill and decode forms), and when only a
 * stretch of the step's rows is asked for. */
static void alone_or_together(void **state) {
    (void)state;
    enum { HEADS = 4, TOPK = 64, POS = 4500, N = 37 };
    struct td_sequences s;
    td_sequences_init(&s, 1, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    for (uint32_t w = 0; w < (POS + N) / 4; w++) {
        float *v = td_test_floats(D, -1, 1);
        key_encode(v, TD_KV_KEY_BF16,
                   td_kv_index_key(&s.kv, s.pool, LAYER, s.pages[0][w / 64], w % 64));
        free(v);
    }
    float *q = td_test_floats((size_t)N * HEADS * D, -1, 1), *wt = td_test_floats(N * HEADS, -1, 1);
    int32_t *all = td_test_bytes(N * TOPK * 4), one[TOPK];
    void *workspace = td_test_bytes(td_index_workspace(HEADS, TOPK));
    struct td_index_args a = {.batch = &s.batch,
                              .layer = LAYER,
                              .q = q,
                              .wt = wt,
                              .wt_scale = 0.1f,
                              .heads = HEADS,
                              .topk = TOPK,
                              .selected = all,
                              .workspace = workspace};
    s.pos[0] = POS;
    td_sequences_step(&s, (uint32_t[]){N});
    a.rows = N;
    table[tables - 1]->index(&dev, &a);
    for (uint32_t t = 0; t < tables; t++)
        for (uint32_t r = 0; r < 4; r++) { /* stretches of the step's rows; one of none */
            uint32_t from[] = {0, 13, 13, 30, N};
            int32_t *part = td_test_bytes(N * TOPK * 4);
            memset(part, 0x55, N * TOPK * 4);
            a.first = from[r];
            a.rows = from[r + 1] - from[r];
            a.selected = part;
            table[t]->index(&dev, &a);
            for (uint32_t i = 0; i < N * TOPK; i++)
                assert_int_equal(part[i], i / TOPK < a.first || i / TOPK >= a.first + a.rows
                                              ? 0x55555555
                                              : all[i]);
            free(part);
        }
    a.first = 0;
    a.rows = 1;
    a.selected = one;
    for (uint32_t t = 0; t < tables; t++)
        for (uint32_t i = 0; i < N; i++) {
            s.pos[0] = POS + i;
            td_sequences_step(&s, (uint32_t[]){1});
            a.q = q + (size_t)i * HEADS * D;
            a.wt = wt + (size_t)i * HEADS;
            table[t]->index(&dev, &a);
            td_test_same("choice alone and together", one, all + (size_t)i * TOPK, sizeof one);
        }
    free(workspace);
    free(all);
    free(wt);
    free(q);
    td_sequences_finish(&s);
}

static int setup(void **state) {
    dev = td_test_device(2);
    tables = td_test_tables(table);
    return td_test_seed(state);
}

static int teardown(void **state) {
    (void)state;
    td_test_device_finish(&dev);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_full_sort),
        cmocka_unit_test(equal_scores_take_the_lowest),
        cmocka_unit_test(hadamard_on_both_changes_nothing),
        cmocka_unit_test(alone_or_together),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

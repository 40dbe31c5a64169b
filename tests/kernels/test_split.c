/* kv_layout = split: workers of 1, 2, 4 and 8 ranks that share a sequence's entries have the same
 * bits in every numerics, format and setting, choose what a worker with all entries chooses, and
 * have so many times smaller pools; what one of them packs, another of any size goes on from. */
#include <math.h>

#include "tests/kernels/ranks_fixture.h"

enum {
    CONTEXT = 2048,
    LONG = 790, /* tokens of the first prompt: four wire blocks, on four of eight ranks; the second
                   has two */
};

static struct td_error err;

static void ok(td_status st) {
    td_ranks_ok(st, &err);
}

static struct td_engine_options options(const struct td_engine_options *as, uint32_t ranks) {
    struct td_engine_options o = td_ranks_options(as, ranks, CONTEXT);
    o.kv_split = true;
    o.pages = SEQUENCES * td_kv_pages(CONTEXT, td_engine_split(&o));
    return o;
}

/* Every entry and key of a worker of one rank is on the rank that has its page, and only there. */
static void same_entries(struct td_engine *one, struct td_engine *many) {
    const struct td_kv_layout *a = &one->layout, *b = &many->layout;
    size_t cap = td_kv_page_block_bytes_max(a), len, other_len;
    uint8_t *want = td_test_bytes(cap), *got = td_test_bytes(cap);
    const struct td_kv_ticket t = {0};
    assert_in_range(b->pool_bytes * many->ranks,
                    a->pool_bytes, /* families start on multiples of 64 */
                    a->pool_bytes + 256 * many->ranks);
    for (uint32_t i = 0; i < td_kv_page_blocks(LONG); i++) {
        uint32_t tokens = td_kv_block_tokens(LONG, i);
        ok(td_kv_pack_page(a, one->rank[0].pool, i * SEQUENCES, t, i, tokens, want, cap, &len, NULL,
                           &err));
        for (uint32_t r = 0; r < many->ranks; r++) {
            ok(td_kv_pack_page(b, many->rank[r].pool, (i >> many->split) * SEQUENCES, t, i, tokens,
                               got, cap, &other_len, NULL, &err));
            assert_int_equal(len, other_len);
            bool same = memcmp(want, got, len) == 0;
            assert_int_equal(same, r == td_kv_page_rank(i, many->split));
        }
    }
    for (uint32_t r = 0; r < many->ranks; r++)
        td_test_same("slots", one->rank[0].slots, many->rank[r].slots, a->slot_bytes * SEQUENCES);
    free(want);
    free(got);
}

/* The first sequence's choices do not depend on how its entries are kept; logits nearly so. */
static void like_replicated(const struct td_model *m, const struct td_engine_options *as,
                            const int32_t *ids, const struct td_record *want) {
    struct td_engine_options o = options(as, 1);
    o.kv_split = false;
    struct td_engine *e = td_ranks_engine(m, &o);
    struct td_record r = td_ranks_life(e, ids, LONG, LONG);
    double most = 0;
    for (size_t i = 0; i < (size_t)r.n * r.vocab; i++)
        most = fmax(most, fabs((double)r.logits[i] - want->logits[i]));
    assert_true(most > 0); /* another order of summation */
    assert_true(most < 1e-3);
    td_test_same("choices", r.entries, want->entries, r.chosen * sizeof *r.entries);
    td_ranks_drop(&r);
    td_engine_destroy(e);
}

static void same_bits(const struct td_model *m, const struct td_engine_options *as, uint32_t most) {
    static const uint32_t chunks[] = {LONG / 2, 300, 137, 264};
    int32_t *ids = td_test_bytes((LONG + DECODE + 8) * sizeof *ids);
    for (uint32_t i = 0; i < LONG + DECODE + 8; i++)
        ids[i] = (int32_t)td_test_below(m->config.vocab);
    struct td_engine_options o = options(as, 1);
    struct td_engine *one = td_ranks_engine(m, &o);
    struct td_record want = td_ranks_life(one, ids, LONG, chunks[0]);
    assert_true(isfinite(want.logits[0]) && want.logits[0] != want.logits[1]);
    assert_non_null(strstr(td_engine_numerics(one, NULL), "entries in 8 parts"));
    if (!as->ref && as->row_dtype == TD_KV_ROW_FP32) like_replicated(m, as, ids, &want);
    for (uint32_t ranks = 2, i = 1; ranks <= most; ranks *= 2, i++) {
        o = options(as, ranks);
        struct td_engine *many = td_ranks_engine(m, &o);
        struct td_record got = td_ranks_life(many, ids, LONG, chunks[i]);
        td_ranks_same(&want, &got);
        same_entries(one, many);
        uint64_t id, same;
        assert_string_equal(td_engine_numerics(many, &same), td_engine_numerics(one, &id));
        assert_int_equal(same, id);
        td_ranks_drop(&got);
        td_engine_destroy(many);
    }
    td_ranks_drop(&want);
    td_engine_destroy(one);
    free(ids);
}

static struct td_engine_options plain(void) {
    return td_test_options();
}

static struct td_engine_options ref(void) {
    struct td_engine_options o = td_test_options();
    o.ref = true;
    o.row_dtype = TD_KV_ROW_FP8;
    return o;
}

static void the_bundled_model(void **state) {
    (void)state;
    struct td_engine_options o = plain();
    o.row_dtype = TD_KV_ROW_FP32;
    o.key_dtype = TD_KV_KEY_FP32;
    same_bits(td_test_model(), &o, 2);
}

/* Those that have entries. */
static struct td_model_config two_layers(uint32_t lora) {
    struct td_model_config c = td_ranks_config(lora, 16);
    c.layers = 2;
    c.kind[0] = TD_LAYER_CSA;
    c.kind[1] = TD_LAYER_HCA;
    return c;
}

static void random_models(enum td_outline kind, uint32_t lora, const struct td_engine_options *o) {
    struct td_model_config c = two_layers(lora);
    struct td_model *m;
    ok(td_model_random(&c, kind, 1 + td_test_below(1000), &m, &err));
    same_bits(m, o, 8);
    td_model_close(m);
}

static void bf16_weights(void **state) {
    (void)state;
    struct td_engine_options o = plain();
    random_models(TD_OUTLINE_BF16, 128, &o);
}

static void fp8_and_fp4_weights(void **state) {
    (void)state;
    struct td_engine_options o = ref();
    o.index_sim4 = o.score_bf16 = true;
    o.key_dtype = TD_KV_KEY_FP4;
    random_models(TD_OUTLINE_FP4, 32, &o); /* z is merged */
}

static void reference_ops(void **state) {
    (void)state;
    struct td_engine_options as = ref(), o;
    const struct td_model *m = td_test_model();
    enum { N = 270 };
    int32_t *ids = td_test_ids(N + DECODE + 8);
    struct td_record r[2];
    for (int i = 0; i < 2; i++) {
        o = options(&as, 2);
        if (i)
            ok(td_ops_mask("index,compress,attend,index_merge,attend_part,attend_merge",
                           &o.force_ref, &err));
        struct td_engine *e = td_ranks_engine(m, &o);
        r[i] = td_ranks_life(e, ids, N, 135);
        td_engine_destroy(e);
    }
    td_ranks_same(&r[0], &r[1]);
    td_ranks_drop(&r[0]);
    td_ranks_drop(&r[1]);
    free(ids);
}

/* ---- handoffs between workers of any size ---- */

static void state_moves_between_sizes(void **state) {
    (void)state;
    enum { N = 780 };
    struct td_model_config c = two_layers(64);
    struct td_engine_options as = plain(), o; /* ref would round a wrong order away */
    struct td_model *m;
    ok(td_model_random(&c, TD_OUTLINE_FP4, 5, &m, &err));
    int32_t ids[N + 1];
    float *want = td_test_poison(c.vocab), *got = td_test_poison(c.vocab);
    for (uint32_t i = 0; i <= N; i++)
        ids[i] = (int32_t)td_test_below(c.vocab);
    static const uint32_t size[][2] = {{1, 1}, {2, 4}, {4, 1}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        uint32_t pages[MOST_PAGES];
        o = options(&as, size[i][0]);
        struct td_engine *from = td_ranks_engine(m, &o);
        o = options(&as, size[i][1]);
        struct td_engine *to = td_ranks_engine(m, &o);
        for (uint32_t p = 0; p < MOST_PAGES; p++)
            pages[p] = p;
        for (uint32_t pos = 0; pos < N; pos += 390) {
            struct td_run run = {.pos = pos, .n = 390, .ids = ids + pos, .pages = pages};
            ok(td_engine_step(from, &run, 1, NULL, NULL, &err));
        }
        td_ranks_hand_over(from, to, N, to->o.pages / SEQUENCES);
        td_ranks_go_on(to, ids, N, i ? got : want);
        if (i) td_test_same("logits", want, got, c.vocab * sizeof *want);
        td_engine_destroy(from);
        td_engine_destroy(to);
    }
    free(want);
    free(got);
    td_model_close(m);
}

/* ---- plans ---- */

/* What reaches a rank in a step of `rows`, by the sizes of what is exchanged. */
static void what_is_exchanged(void **state) {
    (void)state;
    struct td_model_config c = td_ranks_config(128, 16);
    struct td_engine_options as = plain();
    struct td_model *m;
    ok(td_model_outline(&c, TD_OUTLINE_BF16, &m, &err));
    for (uint32_t rows = 1; rows <= 200; rows += 199) {
        for (uint32_t ranks = 1; ranks <= 8; ranks *= 2) {
            struct td_engine_options o = options(&as, ranks);
            uint64_t split, all, sums = (uint64_t)(2 * c.layers + 1) * 2 * rows * c.hidden * 4;
            ok(td_engine_exchanged(m, &o, rows, &split, &err));
            o.kv_split = false;
            ok(td_engine_exchanged(m, &o, rows, &all, &err));
            uint64_t chosen = rows < 16 ? 0 : (uint64_t)2 * rows * TOPK * 4;
            assert_int_equal(all, (sums + chosen) / ranks * (ranks - 1));
            uint64_t heads = c.heads / ranks;
            uint64_t parts = 0; /* in slices of up to 128 rows, each a multiple of 16 bytes */
            for (uint32_t left = rows; left > 0; left -= left < 128 ? left : 128)
                parts += td_attend_part_floats(left < 128 ? left : 128, (uint32_t)heads) * 4;
            uint64_t of_each = 3 * (rows * heads * 512 * 4 + parts) + 2 * (uint64_t)rows * TOPK * 8;
            assert_int_equal(split, sums / ranks * (ranks - 1) + of_each * (ranks - 1));
        }
    }
    td_model_close(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bundled_model),         cmocka_unit_test(bf16_weights),
        cmocka_unit_test(fp8_and_fp4_weights),       cmocka_unit_test(reference_ops),
        cmocka_unit_test(state_moves_between_sizes), cmocka_unit_test(what_is_exchanged),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

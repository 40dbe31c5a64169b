/* A worker of 1, 2, 4 and 8 ranks has the same bits: logits, what the indexer chose, and pool and
 * slots of every rank, in every numerics, format and setting, whatever the steps are cut into. */
#include <math.h>

#include "tests/kernels/ranks_fixture.h"

enum {
    CONTEXT = 512,
    PAGES = CONTEXT / TD_KV_PAGE_TOKENS,
    LONG = 265, /* tokens of the first prompt; the second has half */
};

static struct td_error err;

static void ok(td_status st) {
    td_ranks_ok(st, &err);
}

static struct td_engine_options options(const struct td_engine_options *as, uint32_t ranks) {
    return td_ranks_options(as, ranks, CONTEXT);
}

/* The state of every rank. */
static void same_state(struct td_engine *one, struct td_engine *many) {
    const struct td_kv_layout *l = td_engine_layout(one);
    for (uint32_t i = 0; i < many->ranks; i++) {
        td_test_same("pool", one->rank[0].pool, many->rank[i].pool, l->pool_bytes);
        td_test_same("slots", one->rank[0].slots, many->rank[i].slots, l->slot_bytes * SEQUENCES);
    }
}

/* Ranks 2 .. `most` against one, each in steps of another size: more rows than ranks divide among
 * them and fewer. */
static void same_bits(const struct td_model *m, const struct td_engine_options *as, uint32_t most) {
    static const uint32_t chunks[] = {LONG, 100, 13, 40};
    int32_t *ids = td_test_bytes((LONG + DECODE + 8) * sizeof *ids);
    for (uint32_t i = 0; i < LONG + DECODE + 8; i++)
        ids[i] = (int32_t)td_test_below(m->config.vocab);
    struct td_engine_options o = options(as, 1);
    struct td_engine *one = td_ranks_engine(m, &o);
    struct td_record want = td_ranks_life(one, ids, LONG, chunks[0]);
    assert_true(isfinite(want.logits[0]) && want.logits[0] != want.logits[1]);
    assert_true(want.entries[0] >= 0);
    uint64_t id;
    td_engine_numerics(one, &id);
    for (uint32_t ranks = 2, i = 1; ranks <= most; ranks *= 2, i++) {
        o = options(as, ranks);
        struct td_engine *many = td_ranks_engine(m, &o);
        struct td_record got = td_ranks_life(many, ids, LONG, chunks[i]);
        uint64_t same;
        td_ranks_same(&want, &got);
        same_state(one, many);
        assert_string_equal(td_engine_numerics(many, &same), td_engine_numerics(one, NULL));
        assert_int_equal(same, id); /* workers of different size pair up */
        td_ranks_drop(&got);
        td_engine_destroy(many);
    }
    td_ranks_drop(&want);
    td_engine_destroy(one);
    free(ids);
}

/* ---- numerics, formats, settings ---- */

static struct td_engine_options plain(void) {
    struct td_engine_options o = td_test_options();
    return o;
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
    same_bits(td_test_model(), &o, 2);
    o.row_dtype = TD_KV_ROW_FP32;
    o.key_dtype = TD_KV_KEY_FP32;
    same_bits(td_test_model(), &o, 2);
    o = ref();
    same_bits(td_test_model(), &o, 2); /* z is merged: 64 values of a rank are half a group */
    o.key_dtype = TD_KV_KEY_FP4;
    o.index_sim4 = o.score_bf16 = true;
    same_bits(td_test_model(), &o, 2);
}

static void random_models(enum td_outline kind, uint32_t lora, uint32_t experts,
                          const struct td_engine_options *o) {
    struct td_model_config c = td_ranks_config(lora, experts);
    struct td_model *m;
    ok(td_model_random(&c, kind, 1 + td_test_below(1000), &m, &err));
    same_bits(m, o, 8);
    td_model_close(m);
}

static void bf16_weights(void **state) {
    (void)state;
    struct td_engine_options o = plain();
    random_models(TD_OUTLINE_BF16, 128, 16, &o);
    o.key_dtype = TD_KV_KEY_FP8;
    random_models(TD_OUTLINE_BF16, 128, 12, &o); /* 1 or 2 experts a shard */
}

static void fp8_and_fp4_weights(void **state) {
    (void)state;
    struct td_engine_options o = ref();
    random_models(TD_OUTLINE_FP4, 128, 16, &o);
    o.index_sim4 = true;
    o.key_dtype = TD_KV_KEY_FP4;
    random_models(TD_OUTLINE_FP4, 32, 16, &o); /* z is merged */
    o = plain();
    random_models(TD_OUTLINE_FP4, 64, 6, &o); /* shards, and ranks, without an expert */
}

static void nvfp4_weights(void **state) {
    (void)state;
    struct td_engine_options o = ref();
    random_models(TD_OUTLINE_NVFP4, 128, 16, &o);
    o.nvfp4_activations = true;
    o.score_bf16 = true;
    random_models(TD_OUTLINE_NVFP4, 128, 13, &o);
}

/* Ops from the definitions give the same too, and so do the reference table's collectives' order.
 */
static void reference_ops(void **state) {
    (void)state;
    struct td_engine_options o = ref();
    ok(td_ops_mask("all", &o.force_ref, &err));
    same_bits(td_test_model(), &o, 2);
}

/* ---- wire blocks between workers of different size ---- */

static void state_moves_between_sizes(void **state) {
    (void)state;
    enum { N = 270 };
    struct td_model_config c = td_ranks_config(64, 8);
    struct td_engine_options as = ref(), o;
    struct td_model *m;
    ok(td_model_random(&c, TD_OUTLINE_FP4, 5, &m, &err));
    int32_t ids[N + 1];
    float *want = td_test_poison(c.vocab), *got = td_test_poison(c.vocab);
    for (uint32_t i = 0; i <= N; i++)
        ids[i] = (int32_t)td_test_below(c.vocab);
    static const uint32_t size[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 2}, {2, 4}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        o = options(&as, size[i][0]);
        struct td_engine *from = td_ranks_engine(m, &o);
        o = options(&as, size[i][1]);
        struct td_engine *to = td_ranks_engine(m, &o);
        td_test_feed(from, ids, 0, N, 90);
        td_ranks_hand_over(from, to, N, PAGES);
        td_ranks_go_on(to, ids, N, i ? got : want);
        if (i) td_test_same("logits", want, got, c.vocab * sizeof *want);
        for (uint32_t r = 1; r < to->ranks; r++) {
            td_test_same("pool", to->rank[0].pool, to->rank[r].pool, to->layout.pool_bytes);
            td_test_same("slots", to->rank[0].slots, to->rank[r].slots,
                         to->layout.slot_bytes * SEQUENCES);
        }
        td_engine_destroy(from);
        td_engine_destroy(to);
    }
    free(want);
    free(got);
    td_model_close(m);
}

/* ---- one layer alone ---- */

static void a_layer_alone(void **state) {
    (void)state;
    enum { N = 150 };
    const struct td_model *m = td_test_model();
    size_t hidden = m->config.hidden, streams = TD_HC_STREAMS * hidden;
    float *x = td_test_floats(N * streams, -1, 1), *out[2][3];
    int32_t ids[N] = {0}, *selected[2];
    for (uint32_t layer = 0; layer < m->config.layers; layer++) {
        for (int i = 0; i < 2; i++) {
            struct td_engine_options as = ref(), o = options(&as, 1 + (uint32_t)i);
            o.max_tokens = 64;
            struct td_engine *e = td_ranks_engine(m, &o);
            out[i][0] = td_test_poison(N * hidden);
            out[i][1] = td_test_poison(N * hidden);
            out[i][2] = td_test_poison(N * streams);
            selected[i] = td_test_bytes(N * TOPK * sizeof *selected[i]);
            struct td_layer_tap tap = {layer,     N,         ids,       x,
                                       out[i][0], out[i][1], out[i][2], selected[i]};
            ok(td_engine_layer(e, &tap, &err));
            td_engine_destroy(e);
        }
        td_test_same("attn_out", out[0][0], out[1][0], N * hidden * 4);
        td_test_same("ffn_out", out[0][1], out[1][1], N * hidden * 4);
        td_test_same("x_out", out[0][2], out[1][2], N * streams * 4);
        td_test_same("selected", selected[0], selected[1], N * TOPK * 4);
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < 3; k++)
                free(out[i][k]);
            free(selected[i]);
        }
    }
    free(x);
}

/* ---- refusals ---- */

static void refused(const struct td_engine_options *o, td_status want, const char *word) {
    struct td_engine *e;
    assert_int_equal(td_engine_create(td_test_model(), o, &e, &err), want);
    if (!strstr(err.text, word)) fail_msg("expected \"%s\" in: %s", word, err.text);
}

static void what_cannot_be_shared(void **state) {
    (void)state;
    struct td_engine_options o = td_test_options();
    o.threads = 8;
    o.ranks = 4;
    refused(&o, TD_CONFIG, "4 ranks share the model's 2 output groups");
    o.ranks = 3;
    refused(&o, TD_CONFIG, "1, 2, 4 or 8 ranks, found 3");
    o.ranks = 2;
    o.threads = 1;
    refused(&o, TD_CONFIG, "threads: expected one for each of 2 ranks");
    o.threads = 2;
    o.device[1] = 1;
    refused(&o, TD_CONFIG, "rank 1 (cpu): device: expected cpu");
    o.device[1] = 0;
    o.pool_memory = &o;
    refused(&o, TD_INVALID, "one of 2 ranks");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bundled_model),   cmocka_unit_test(bf16_weights),
        cmocka_unit_test(fp8_and_fp4_weights), cmocka_unit_test(nvfp4_weights),
        cmocka_unit_test(reference_ops),       cmocka_unit_test(state_moves_between_sizes),
        cmocka_unit_test(a_layer_alone),       cmocka_unit_test(what_cannot_be_shared),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

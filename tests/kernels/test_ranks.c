/* A worker of 1, 2, 4 and 8 ranks has the same bits: logits, what the indexer chose, and pool and
 * slots of every rank, in every numerics, format and setting, whatever the steps are cut into. */
#include <math.h>

#include "kernels/engine_parts.h"
#include "tests/kernels/engine_fixture.h"

enum {
    SEQUENCES = 2,
    CONTEXT = 512,
    PAGES = CONTEXT / TD_KV_PAGE_TOKENS,
    DECODE = 4,
    TOPK = 12,
    LONG = 265, /* tokens of the first prompt; the second has half */
};

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

/* Shapes that 8 ranks can share. */
static struct td_model_config shared_config(uint32_t lora, uint32_t experts) {
    static const enum td_layer_kind kind[] = {TD_LAYER_SWA, TD_LAYER_CSA, TD_LAYER_HCA,
                                              TD_LAYER_CSA};
    struct td_model_config c = td_test_model()->config;
    c.heads = lora == 128 ? 8 : 16;
    c.o_groups = 8;
    c.o_lora_rank = lora;
    c.experts = experts;
    c.vocab = 1003; /* no multiple of anything */
    c.layers = sizeof kind / sizeof *kind;
    memcpy(c.kind, kind, sizeof kind);
    return c;
}

static struct td_engine_options options(const struct td_engine_options *as, uint32_t ranks) {
    struct td_engine_options o = *as;
    o.index_topk = TOPK;
    o.max_context = CONTEXT;
    o.slots = o.max_runs = SEQUENCES;
    o.pages = SEQUENCES * PAGES;
    o.max_tokens = 2 * LONG;
    o.ranks = ranks;
    o.threads = ranks > 2 ? ranks : 2; /* one rank alone has two */
    return o;
}

/* What a worker gave: logits and choices of every step that wanted them, by sequence. */
struct record {
    uint32_t n, vocab, chosen;
    float *logits;
    int32_t *entries;
};

/* Both prompts side by side in steps of `chunk` rows of each, then decode together; the last step
 * of each prompt and every decode step are recorded. */
static struct record life(struct td_engine *e, const int32_t *ids, uint32_t chunk) {
    static uint32_t pages[SEQUENCES][PAGES];
    uint32_t layers = td_engine_layout(e)->csa_layers, vocab = e->model->config.vocab;
    uint32_t length[SEQUENCES] = {LONG, LONG / 2}, pos[SEQUENCES] = {0};
    struct record r = {.vocab = vocab, .chosen = layers * TOPK};
    r.logits = td_test_bytes((size_t)(DECODE + 1) * SEQUENCES * vocab * sizeof *r.logits);
    r.entries = td_test_bytes((size_t)(DECODE + 1) * SEQUENCES * r.chosen * sizeof *r.entries);
    int32_t *chosen = td_test_bytes((size_t)SEQUENCES * r.chosen * sizeof *chosen);
    struct td_capture capture = {SEQUENCES, layers, TOPK, chosen};
    uint32_t recorded[SEQUENCES] = {0};
    for (uint32_t i = 0; i < SEQUENCES * PAGES; i++)
        pages[i % SEQUENCES][i / SEQUENCES] = i;
    while (recorded[0] <= DECODE || recorded[1] <= DECODE) {
        struct td_run run[SEQUENCES];
        uint32_t n = 0, of[SEQUENCES], wanted = 0;
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            if (recorded[s] > DECODE) continue;
            uint32_t left = pos[s] < length[s] ? length[s] - pos[s] : 1;
            uint32_t m = left < chunk ? left : chunk;
            run[n++] = (struct td_run){.slot = s,
                                       .pos = pos[s],
                                       .n = m,
                                       .ids = ids + 7 * s + pos[s],
                                       .pages = pages[s],
                                       .want_logits = pos[s] + m >= length[s]};
            pos[s] += m;
            if (run[n - 1].want_logits) of[wanted++] = s;
        }
        const float *logits;
        ok(td_engine_step(e, run, n, &logits, &capture, &err));
        for (uint32_t i = 0; i < wanted; i++) {
            size_t at = (size_t)of[i] * (DECODE + 1) + recorded[of[i]]++;
            memcpy(r.logits + at * vocab, logits + (size_t)i * vocab, vocab * sizeof *logits);
            memcpy(r.entries + at * r.chosen, chosen + (size_t)i * r.chosen,
                   r.chosen * sizeof *chosen);
        }
    }
    r.n = (DECODE + 1) * SEQUENCES;
    free(chosen);
    return r;
}

static void drop(struct record *r) {
    free(r->logits);
    free(r->entries);
}

static void same_record(const struct record *a, const struct record *b) {
    td_test_same("logits", a->logits, b->logits, (size_t)a->n * a->vocab * sizeof *a->logits);
    td_test_same("choices", a->entries, b->entries, (size_t)a->n * a->chosen * sizeof *a->entries);
}

/* The state of every rank. */
static void same_state(struct td_engine *one, struct td_engine *many) {
    const struct td_kv_layout *l = td_engine_layout(one);
    for (uint32_t i = 0; i < many->ranks; i++) {
        td_test_same("pool", one->rank[0].pool, many->rank[i].pool, l->pool_bytes);
        td_test_same("slots", one->rank[0].slots, many->rank[i].slots, l->slot_bytes * SEQUENCES);
    }
}

static struct td_engine *engine(const struct td_model *m, const struct td_engine_options *o) {
    struct td_engine *e;
    ok(td_engine_create(m, o, &e, &err));
    return e;
}

/* Ranks 2 .. `most` against one, each in steps of another size: more rows than ranks divide among
 * them and fewer. */
static void same_bits(const struct td_model *m, const struct td_engine_options *as, uint32_t most) {
    static const uint32_t chunks[] = {LONG, 100, 13, 40};
    int32_t *ids = td_test_bytes((LONG + DECODE + 8) * sizeof *ids);
    for (uint32_t i = 0; i < LONG + DECODE + 8; i++)
        ids[i] = (int32_t)td_test_below(m->config.vocab);
    struct td_engine_options o = options(as, 1);
    struct td_engine *one = engine(m, &o);
    struct record want = life(one, ids, chunks[0]);
    assert_true(isfinite(want.logits[0]) && want.logits[0] != want.logits[1]);
    assert_true(want.entries[0] >= 0);
    uint64_t id;
    td_engine_numerics(one, &id);
    for (uint32_t ranks = 2, i = 1; ranks <= most; ranks *= 2, i++) {
        o = options(as, ranks);
        struct td_engine *many = engine(m, &o);
        struct record got = life(many, ids, chunks[i]);
        uint64_t same;
        same_record(&want, &got);
        same_state(one, many);
        assert_string_equal(td_engine_numerics(many, &same), td_engine_numerics(one, NULL));
        assert_int_equal(same, id); /* workers of different size pair up */
        drop(&got);
        td_engine_destroy(many);
    }
    drop(&want);
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
    struct td_model_config c = shared_config(lora, experts);
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

/* A prompt from `from` to `to`, block by block; then `to` decodes. */
static void hand_over(struct td_engine *from, struct td_engine *to, uint32_t n) {
    const struct td_kv_layout *l = td_engine_layout(from);
    static uint32_t pages[PAGES];
    size_t cap = td_kv_page_block_bytes_max(l), len;
    if (cap < td_kv_slot_block_bytes_max(l)) cap = td_kv_slot_block_bytes_max(l);
    uint8_t *block = td_test_bytes(cap);
    struct td_kv_ticket ticket = {0};
    struct td_kv_block_header h;
    for (uint32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    for (uint32_t i = 0; i < td_kv_page_blocks(n); i++) {
        ok(td_engine_pack_page(from, pages[i], ticket, i, td_kv_block_tokens(n, i), block, cap,
                               &len, &h, &err));
        ok(td_engine_unpack_page(to, block, len, ticket, n, i, pages[i], &h, &err));
        block[len - 1] ^= 1; /* and one that was damaged on its way */
        assert_int_equal(td_engine_unpack_page(to, block, len, ticket, n, i, PAGES + i, &h, &err),
                         TD_CORRUPT);
    }
    ok(td_engine_pack_slot(from, 0, ticket, n, block, cap, &len, &h, &err));
    ok(td_engine_unpack_slot(to, block, len, ticket, n, 0, &h, &err));
    free(block);
}

/* Decode after a handoff, with pages and slot copied to others first as for a second choice. */
static void go_on(struct td_engine *e, const int32_t *ids, uint32_t n, float *ret) {
    static const uint32_t copied[PAGES] = {PAGES, PAGES + 1};
    for (uint32_t i = 0; i < PAGES; i++)
        ok(td_engine_copy_page(e, i, PAGES + i, &err));
    ok(td_engine_copy_slot(e, 0, 1, &err));
    const float *logits;
    struct td_run run = {
        .slot = 1, .pos = n, .n = 1, .ids = ids + n, .pages = copied, .want_logits = true};
    ok(td_engine_step(e, &run, 1, &logits, NULL, &err));
    memcpy(ret, logits, e->model->config.vocab * sizeof *ret);
}

static void state_moves_between_sizes(void **state) {
    (void)state;
    enum { N = 270 };
    struct td_model_config c = shared_config(64, 8);
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
        struct td_engine *from = engine(m, &o);
        o = options(&as, size[i][1]);
        struct td_engine *to = engine(m, &o);
        td_test_feed(from, ids, 0, N, 90);
        hand_over(from, to, N);
        go_on(to, ids, N, i ? got : want);
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
            struct td_engine *e = engine(m, &o);
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

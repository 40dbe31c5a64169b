/* A worker whose ranks have a device each has the bits of a worker of one: logits, what the indexer
 * chose, pool and slots of every rank; in steps that are launched and in recorded ones; and when
 * ranks share the entries of a sequence. Built twice: over GPUs (skipped where there is none; ranks
 * share one, and have one each where there are more) and over the emulator. */
#include <stdio.h>

#include "kernels/engine_parts.h"
#include "kernels/model/numbers.h"
#include "kernels/ops.h"
#include "tests/kernels/device_arrays.h"
#include "tests/kernels/engine_fixture.h"

extern const struct td_backend TD_TEST_BACKEND;

enum {
    SEQUENCES = 2,
    CONTEXT = 256,
    LONG_CONTEXT =
        1024, /* where ranks share entries: the first sequence begins in its third page, */
    PAGES = LONG_CONTEXT / TD_KV_PAGE_TOKENS,
    TAIL = 2, /* so many tokens before its end */
    TOPK = 12,
#ifdef TD_TEST_EMULATED /* a token takes a tenth of a second, and ranks run by turns */
    EMULATED = 1,
    PROMPT = 13,
    SECOND = 4,
    SHARED = 5, /* tokens there */
    DECODE = 2,
#else
    EMULATED = 0,
    PROMPT = 141, /* past the first HCA entry */
    SECOND = 9,
    SHARED = 200,
    DECODE = 5,
#endif
};

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

/* ---- engines ---- */

static struct td_engine_options options(bool ref, uint32_t ranks, bool share) {
    struct td_engine_options o = td_test_options();
    o.backend = &TD_TEST_BACKEND;
    o.ref = ref;
    o.row_dtype = ref ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16;
    o.index_topk = TOPK;
    o.max_context = CONTEXT;
    o.slots = o.max_runs = o.pages = SEQUENCES;
    o.max_tokens = EMULATED ? 12 : 80;
    o.ranks = ranks;
    for (uint32_t i = 0; i < ranks; i++)
        o.device[i] = share ? 0 : i;
    return o;
}

static struct td_engine *engine(const struct td_model *m, const struct td_engine_options *o) {
    struct td_engine *e;
    ok(td_engine_create(m, o, &e, &err));
    return e;
}

/* Shapes that 8 ranks can share. */
static struct td_model *random_model(enum td_outline kind) {
    struct td_model_config c = td_test_model()->config;
    struct td_model *m;
    c.heads = 16;
    c.o_groups = 8;
    c.o_lora_rank = 32; /* rounding groups of 128 span ranks */
    c.experts = 12;     /* 1 or 2 a shard */
    c.vocab = 1003;     /* no multiple of anything */
    ok(td_model_random(&c, kind, 7, &m, &err));
    return m;
}

/* ---- steps ---- */

struct life {
    uint32_t pos[SEQUENCES], length[SEQUENCES]; /* so far, of the prompt */
    uint32_t page[SEQUENCES][PAGES];
    const int32_t *ids;
};

/* The next `n` tokens of both, or fewer where a prompt ends; what came of them on both engines. */
static void same_step(struct td_engine *const e[2], struct life *l, uint32_t n, bool decode) {
    uint32_t layers = td_engine_layout(e[0])->csa_layers, runs = 0;
    size_t bytes = (size_t)SEQUENCES * layers * TOPK * sizeof(int32_t);
    const float *logits[2];
    struct td_run run[SEQUENCES];
    struct td_capture c[2];
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        uint32_t left = decode ? 1 : l->length[s] - l->pos[s], m = left < n ? left : n;
        if (m == 0) continue;
        run[runs++] = (struct td_run){.slot = s,
                                      .pos = l->pos[s],
                                      .n = m,
                                      .ids = l->ids + CONTEXT * s + l->pos[s] % CONTEXT,
                                      .pages = l->page[s],
                                      .want_logits = true};
        l->pos[s] += m;
    }
    for (int i = 0; i < 2; i++) {
        c[i] = (struct td_capture){SEQUENCES, layers, TOPK, td_test_bytes(bytes)};
        ok(td_engine_step(e[i], run, runs, &logits[i], &c[i], &err));
    }
    td_test_same("logits", logits[0], logits[1],
                 runs * e[0]->model->config.vocab * sizeof *logits[0]);
    td_test_same("choices", c[0].entries, c[1].entries, bytes);
    free(c[0].entries);
    free(c[1].entries);
}

static void *fetched(struct td_device *d, const void *there, size_t bytes) {
    void *here = td_test_bytes(bytes);
    td_download(d, here, there, bytes);
    ok(d->backend->wait(d, TD_LANE_STEP, &err));
    return here;
}

static void same_state(struct td_engine *one, struct td_engine *many) {
    const struct td_kv_layout *l = td_engine_layout(one);
    const size_t size[] = {l->pool_bytes, l->slot_bytes * SEQUENCES};
    for (int slots = 0; slots < 2; slots++) {
        struct td_rank *r = one->rank;
        void *want = fetched(&r->f.device, slots ? r->slots : r->pool, size[slots]);
        for (uint32_t i = 0; i < many->ranks; i++) {
            r = &many->rank[i];
            void *got = fetched(&r->f.device, slots ? r->slots : r->pool, size[slots]);
            td_test_same(slots ? "slots" : "pool", want, got, size[slots]);
            free(got);
        }
        free(want);
    }
}

/* Prompts in steps of fewer rows than ranks and of more, then decode. */
static void same_steps(struct td_engine *const e[2], struct life l) {
    static const uint32_t chunk[] = {EMULATED ? 7 : 40, 3, 70, 1, 40};
    int32_t *ids = td_test_bytes(2 * SEQUENCES * CONTEXT * sizeof *ids);
    for (uint32_t i = 0; i < 2 * SEQUENCES * CONTEXT; i++)
        ids[i] = (int32_t)td_test_below(e[0]->model->config.vocab);
    l.ids = ids;
    for (size_t i = 0; l.pos[0] < l.length[0]; i = (i + 1) % 5)
        same_step(e, &l, chunk[i], false);
    for (int i = 0; i < DECODE; i++)
        same_step(e, &l, 1, true);
    free(ids);
}

static void same_life(struct td_engine *one, struct td_engine *many) {
    struct td_engine *e[] = {one, many};
    same_steps(e, (struct life){.length = {PROMPT, SECOND}, .page = {{1}, {0}}});
    same_state(one, many);
}

/* ---- ranks that share entries ---- */

/* Random entries and keys of the first sequence's full pages, and of the one that is open, to both
 * engines, block by block as they come from a wire. */
static void begin(struct td_engine *const e[2], const struct life *l) {
    const struct td_kv_layout *kv = td_engine_layout(e[0]);
    size_t cap = td_kv_page_block_bytes_max(kv), len;
    const uint32_t rows = TD_KV_CSA_PER_PAGE + TD_KV_HCA_PER_PAGE, n = l->pos[0];
    struct td_device host = td_test_device(1);
    uint8_t *pool = td_test_bytes(kv->pool_bytes), *block = td_test_bytes(cap);
    uint8_t *dense = td_test_bytes((size_t)rows * kv->row_bytes);
    const struct td_kv_ticket ticket = {0};
    for (uint32_t i = 0; i < td_kv_page_blocks(n); i++) {
        for (uint32_t layer = 0; layer < kv->layers; layer++) {
            float *any = td_test_floats((size_t)rows * TD_KV_ROW_DIM, -1, 1);
            struct td_row_store_args store = {.kv = any, .rows = dense, .layout = kv, .n = rows};
            td_ops_select()->row_store(&host, &store);
            for (uint32_t k = 0; kv->ratio[layer] == TD_CSA_RATIO && k < TD_KV_CSA_PER_PAGE; k++) {
                uint16_t *key = td_kv_index_key(kv, pool, layer, 0, k);
                td_kv_row_copy(kv, td_kv_csa_row(kv, pool, layer, 0, k),
                               td_kv_dense_row(kv, dense, k));
                for (uint32_t c = 0; c < TD_KV_KEY_DIM; c++)
                    key[c] = td_f32_to_bf16(td_test_uniform(-1, 1));
            }
            for (uint32_t k = 0; kv->ratio[layer] == TD_HCA_RATIO && k < TD_KV_HCA_PER_PAGE; k++)
                td_kv_row_copy(kv, td_kv_hca_row(kv, pool, layer, 0, k),
                               td_kv_dense_row(kv, dense, TD_KV_CSA_PER_PAGE + k));
            free(any);
        }
        ok(td_kv_pack_page(kv, pool, 0, ticket, i, td_kv_block_tokens(n, i), block, cap, &len, NULL,
                           &err));
        for (int k = 0; k < 2; k++)
            ok(td_engine_unpack_page(e[k], block, len, ticket, n, i, l->page[0][i >> e[k]->split],
                                     NULL, &err));
    }
    td_test_device_finish(&host);
    free(pool);
    free(block);
    free(dense);
}

/* What one packs is what the other packs; slots are the same on every rank. */
static void same_shares(struct td_engine *const e[2], const struct life *l, uint32_t n) {
    const struct td_kv_layout *kv = td_engine_layout(e[0]);
    size_t cap = td_kv_page_block_bytes_max(kv), len[2], slots = kv->slot_bytes * SEQUENCES;
    uint8_t *block[2] = {td_test_bytes(cap), td_test_bytes(cap)};
    const struct td_kv_ticket ticket = {0};
    for (uint32_t i = 0; i < td_kv_page_blocks(n); i++) {
        for (int k = 0; k < 2; k++)
            ok(td_engine_pack_page(e[k], l->page[0][i >> e[k]->split], ticket, i,
                                   td_kv_block_tokens(n, i), block[k], cap, &len[k], NULL, &err));
        assert_int_equal(len[0], len[1]);
        td_test_same("a page", block[0], block[1], len[0]);
    }
    void *want = fetched(&e[0]->rank[0].f.device, e[0]->rank[0].slots, slots);
    for (uint32_t i = 0; i < e[1]->ranks; i++) {
        void *got = fetched(&e[1]->rank[i].f.device, e[1]->rank[i].slots, slots);
        td_test_same("slots", want, got, slots);
        free(got);
    }
    free(want);
    free(block[0]);
    free(block[1]);
}

static struct td_engine *sharing(const struct td_model *m, uint32_t ranks, bool ref, bool share,
                                 uint64_t forced) {
    struct td_engine_options o = options(ref, ranks, share);
    o.force_ref = forced;
    o.kv_split = true;
    o.max_context = LONG_CONTEXT;
    o.pages = SEQUENCES * PAGES; /* more than are used */
    return engine(m, &o);
}

/* One rank and several, which all share a sequence of four pages and have one of the other. */
static void same_shared_life(const struct td_model *m, bool ref, uint32_t most, uint64_t forced) {
    uint32_t devices = td_test_devices(&TD_TEST_BACKEND);
    const uint32_t from = 3 * TD_KV_PAGE_TOKENS - TAIL;
    struct life l = {
        .pos = {from, 0}, .length = {from + SHARED, 2}, .page = {{5, 1, 3, 7}, {0, 2, 4, 6}}};
    for (uint32_t ranks = 2; ranks <= most; ranks *= 2)
        for (int share = 0; share < 2; share++) {
            if (!share && ranks > devices) continue;
            if (EMULATED && share) continue;
            struct td_engine *e[2] = {sharing(m, 1, ref, true, forced),
                                      sharing(m, ranks, ref, share, forced)};
            begin(e, &l);
            same_steps(e, l);
            same_shares(e, &l, from + SHARED + DECODE);
            assert_true(td_engine_destroy(e[0]));
            assert_true(td_engine_destroy(e[1]));
        }
}

/* `most` ranks and fewer against one, on a device each and sharing one. */
static void same_bits(const struct td_model *m, bool ref, uint32_t most, uint64_t forced) {
    uint32_t devices = td_test_devices(&TD_TEST_BACKEND);
    struct td_engine_options o = options(ref, 1, true);
    o.force_ref = forced;
    struct td_engine *one = engine(m, &o);
    for (uint32_t ranks = 2; ranks <= most; ranks *= 2)
        for (int share = 0; share < 2; share++) {
            if (!share && ranks > devices) continue;
            if (EMULATED && share) continue;
            for (int eager = 0; eager < 2; eager++) {
                o = options(ref, ranks, share);
                o.force_ref = forced;
                o.eager = eager;
                struct td_engine *many = engine(m, &o);
                print_message("    %u ranks on %s, %s\n", ranks,
                              share ? "one device" : "a device each",
                              eager ? "launched" : "recorded");
                same_life(one, many);
                assert_true(td_engine_destroy(many));
                if (ranks > 2 || EMULATED) break;
            }
        }
    assert_true(td_engine_destroy(one));
}

static void the_bundled_model(void **state) {
    (void)state;
    if (!EMULATED) same_bits(td_test_model(), false, 2, 0);
    same_bits(td_test_model(), true, 2, 0);
}

static void definitions_as_ops(void **state) {
    uint64_t all;
    (void)state;
    ok(td_ops_mask("all", &all, &err));
    same_bits(td_test_model(), true, 2, all);
}

static void random_models(void **state) {
    (void)state;
    if (EMULATED) return;
    struct td_model *m = random_model(TD_OUTLINE_BF16);
    same_bits(m, false, 8, 0);
    td_model_close(m);
    m = random_model(TD_OUTLINE_FP4);
    same_bits(m, true, 8, 0);
    td_model_close(m);
}

static void shared_entries(void **state) {
    uint64_t all;
    (void)state;
    ok(td_ops_mask("all", &all, &err));
    same_shared_life(td_test_model(), true, 2, all); /* quick to emulate */
    if (EMULATED) return;
    same_shared_life(td_test_model(), false, 2, 0);
    struct td_model *m = random_model(TD_OUTLINE_FP4);
    same_shared_life(m, true, 8, 0);
    td_model_close(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bundled_model),
        cmocka_unit_test(definitions_as_ops),
        cmocka_unit_test(random_models),
        cmocka_unit_test(shared_entries),
    };
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

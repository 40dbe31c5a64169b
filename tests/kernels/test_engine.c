/* One sequence through the engine: decode equals prefill, earlier contents of memory do not
 * matter, state moves; bad steps are refused without a trace; memory is bounded. */
#include <math.h>

#include "tests/kernels/engine_fixture.h"

static void decode_equals_prefill(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 2, 3, 4, 5, 7, 8, 126, 127, 128, 129, 255, 256, 300};
    struct td_engine_options o = td_test_options();
    struct td_engine *e = td_test_engine(&o);
    int32_t *ids = td_test_ids(301);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint32_t n = lengths[i];
        float *want = td_test_keep(td_test_feed(e, ids, 0, n + 1, n + 1));
        td_test_feed(e, ids, 0, n, n);
        td_test_same("decode of token N and prefill of N+1", want, td_test_feed(e, ids, n, 1, 1),
                     td_test_logit_bytes());
        free(want);
    }
    free(ids);
    td_engine_destroy(e);
}

/* Memory of the caller, full of NaN patterns, in place of fresh zeros; then a second sequence in
 * the place of the first. */
static void earlier_contents_do_not_matter(void **state) {
    (void)state;
    enum { N = 420 };
    struct td_engine_options o = td_test_options();
    struct td_engine *clean = td_test_engine(&o);
    const struct td_kv_layout *l = td_engine_layout(clean);
    int32_t *ids = td_test_ids(N), *other = td_test_ids(N + 50);
    float *want = td_test_keep(td_test_feed(clean, ids, 0, N, N));
    o.pool_memory = td_test_bytes(l->pool_bytes);
    o.slot_memory = td_test_bytes(l->slot_bytes);
    memset(o.pool_memory, 0xff, l->pool_bytes);
    memset(o.slot_memory, 0xff, l->slot_bytes);
    struct td_engine *dirty = td_test_engine(&o);
    assert_ptr_equal(td_engine_pool(dirty), o.pool_memory);
    assert_ptr_equal(td_engine_slot(dirty, 0), o.slot_memory);
    td_test_same("logits over dirty memory", want, td_test_feed(dirty, ids, 0, N, N),
                 td_test_logit_bytes());
    td_test_feed(dirty, other, 0, N + 50, 64);
    td_test_same("logits after another sequence", want, td_test_feed(dirty, ids, 0, N, N),
                 td_test_logit_bytes());
    free(want);
    free(ids);
    free(other);
    td_engine_destroy(dirty);
    td_engine_destroy(clean);
    free(o.pool_memory);
    free(o.slot_memory);
}

/* A sequence's state is its slot and its pages, nothing else: copied, it continues elsewhere. */
static void state_moves_between_engines(void **state) {
    (void)state;
    static const uint32_t lengths[] = {1, 6, 127, 131, 256, 397};
    struct td_engine_options o = td_test_options();
    struct td_engine *a = td_test_engine(&o), *b = td_test_engine(&o);
    const struct td_kv_layout *l = td_engine_layout(a);
    int32_t *ids = td_test_ids(410);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint32_t n = lengths[i];
        td_test_feed(a, ids, 0, n, n);
        memcpy(td_engine_pool(b), td_engine_pool(a), l->pool_bytes);
        memcpy(td_engine_slot(b, 0), td_engine_slot(a, 0), l->slot_bytes);
        for (uint32_t t = 0; t < 9; t++) {
            float *want = td_test_keep(td_test_feed(a, ids, n + t, 1, 1));
            td_test_same("logits after a move", want, td_test_feed(b, ids, n + t, 1, 1),
                         td_test_logit_bytes());
            free(want);
        }
    }
    free(ids);
    td_engine_destroy(a);
    td_engine_destroy(b);
}

static void refused(struct td_engine *e, struct td_run run, const char *word) {
    struct td_error err = {0};
    const float *logits = NULL;
    assert_int_equal(td_engine_step(e, &run, 1, &logits, NULL, &err), TD_INVALID);
    if (!strstr(err.text, word)) fail_msg("expected \"%s\" in: %s", word, err.text);
    assert_null(logits);
}

static void bad_steps_leave_no_trace(void **state) {
    (void)state;
    enum { N = 300 };
    struct td_engine_options o = td_test_options();
    o.slots = o.max_runs = 2;
    struct td_engine *e = td_test_engine(&o), *untouched = td_test_engine(&o);
    int32_t *ids = td_test_ids(TD_TEST_CONTEXT + 1);
    uint32_t pages[TD_TEST_PAGES + 1] = {0, 1, 2, 3, 4, 5, 6, 7, 0};
    td_test_feed(e, ids, 0, N, N);
    td_test_feed(untouched, ids, 0, N, N);
    struct td_run good = {.pos = N, .n = 5, .ids = ids + N, .pages = pages, .want_logits = true};
    struct td_run bad = good;
    bad.slot = 2;
    refused(e, bad, "slot");
    bad = good;
    bad.n = 0;
    refused(e, bad, "positions");
    bad.n = 1025;
    refused(e, bad, "at most 1024 tokens");
    bad.n = 5;
    bad.pos = TD_TEST_CONTEXT - 4;
    refused(e, bad, "context");
    bad.pos = UINT32_MAX - 1;
    refused(e, bad, "context");
    bad = good;
    pages[1] = TD_TEST_PAGES;
    refused(e, bad, "page 1");
    pages[1] = 1;
    int32_t wrong[5] = {1, 2, -1, 3, 4};
    bad.ids = wrong;
    refused(e, bad, "token at position 302");
    wrong[2] = (int32_t)td_test_model()->config.vocab;
    refused(e, bad, "token at position 302");
    struct td_error err;
    struct td_run two[2] = {good, good};
    assert_int_equal(td_engine_step(e, two, 2, NULL, NULL, &err), TD_INVALID); /* one slot twice */
    assert_non_null(strstr(err.text, "run 1: slot"));
    struct td_run three[3] = {good, good, good};
    assert_int_equal(td_engine_step(e, three, 3, NULL, NULL, &err), TD_INVALID);
    assert_int_equal(td_engine_step(e, two, 0, NULL, NULL, &err), TD_INVALID);
    struct td_capture small = {.runs = 0, .csa_layers = 3, .topk = 64};
    assert_int_equal(td_engine_step(e, &good, 1, NULL, &small, &err), TD_INVALID);
    td_test_same_state(e, untouched);
    float *want = td_test_keep(td_test_feed(untouched, ids, N, 5, 5));
    td_test_same("logits after refusals", want, td_test_feed(e, ids, N, 5, 5),
                 td_test_logit_bytes());
    free(want);
    free(ids);
    td_engine_destroy(e);
    td_engine_destroy(untouched);
}

static void index_workspace_is_fixed(void **state) {
    (void)state;
    struct td_engine_memory m[2];
    for (int i = 0; i < 2; i++) {
        struct td_engine_options o = td_test_options();
        o.max_context = i ? 49152 : 8192;
        o.pages = o.max_context / TD_KV_PAGE_TOKENS;
        struct td_engine *e = td_test_engine(&o);
        td_engine_memory(e, &m[i]);
        td_engine_destroy(e);
    }
    print_message("index workspace: %zu bytes at 8K tokens, %zu at 48K\n", m[0].index_workspace,
                  m[1].index_workspace);
    assert_true(m[0].index_workspace > 0);
    assert_int_equal(m[0].index_workspace, m[1].index_workspace);
    assert_true(m[1].pool > m[0].pool && m[0].weights == m[1].weights && m[0].slots == m[1].slots);
}

/* Layers fed with each other's streams, cut into steps or not, and the choice of the last one. */
static void layers_alone(void **state) {
    (void)state;
    enum { N = 301 };
    const struct td_model_config *c = &td_test_model()->config;
    struct td_engine_options o = td_test_options();
    struct td_engine *whole = td_test_engine(&o);
    o.max_tokens = 100;
    struct td_engine *cut = td_test_engine(&o);
    int32_t *ids = td_test_ids(N);
    size_t streams = (size_t)N * 4 * c->hidden, out = (size_t)N * c->hidden;
    float *x = td_test_floats(streams, -1, 1), *y[2], *a[2], *f[2];
    int32_t *sel[2];
    for (int i = 0; i < 2; i++) {
        y[i] = td_test_poison(streams);
        a[i] = td_test_poison(out);
        f[i] = td_test_poison(out);
        sel[i] = malloc((size_t)N * o.index_topk * sizeof **sel);
    }
    for (uint32_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < 2; i++) {
            struct td_layer_tap tap = {.layer = l,
                                       .n = N,
                                       .ids = ids,
                                       .x_in = x,
                                       .x_out = y[i],
                                       .attn_out = a[i],
                                       .ffn_out = f[i],
                                       .selected = sel[i]};
            struct td_error err;
            assert_int_equal(td_engine_layer(i ? cut : whole, &tap, &err), TD_OK);
        }
        td_test_same("streams of a layer", y[0], y[1], streams * sizeof *x);
        td_test_same("attention output", a[0], a[1], out * sizeof *x);
        td_test_same("feed-forward output", f[0], f[1], out * sizeof *x);
        assert_true(isfinite(y[0][streams - 1]));
        if (c->kind[l] == TD_LAYER_CSA) {
            const int32_t *last = sel[0] + (size_t)(N - 1) * o.index_topk;
            td_test_same("choice", sel[0], sel[1], (size_t)N * o.index_topk * sizeof **sel);
            assert_int_equal(sel[0][0], -1); /* the first token sees no entry */
            for (uint32_t k = 0; k < o.index_topk; k++)
                assert_true(last[k] >= (k ? last[k - 1] + 1 : 0) && last[k] < (N + 0) / 4);
        }
        memcpy(x, y[0], streams * sizeof *x);
    }
    for (int i = 0; i < 2; i++) {
        free(y[i]);
        free(a[i]);
        free(f[i]);
        free(sel[i]);
    }
    free(x);
    free(ids);
    td_engine_destroy(whole);
    td_engine_destroy(cut);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode_equals_prefill),
        cmocka_unit_test(earlier_contents_do_not_matter),
        cmocka_unit_test(state_moves_between_engines),
        cmocka_unit_test(bad_steps_leave_no_trace),
        cmocka_unit_test(index_workspace_is_fixed),
        cmocka_unit_test(layers_alone),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

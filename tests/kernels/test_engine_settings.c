/* Settings of the whole engine on a small random checkpoint: every op forced to its reference
 * alone, and every size of index_topk. */
#include <stdio.h>
#include <string.h>

#include "tests/kernels/random_model.h"

/* Past the first HCA entry, across a page, and with more CSA entries than are chosen. */
enum { N = 290, MORE = 3, LONG = 1030, TOPK_MAX = 2048 };

static struct maker maker;
static struct td_model *model;
static int32_t *ids;

static struct td_engine *create(const struct td_engine_options *o) {
    struct td_engine *e = NULL;
    struct td_error err = {0};
    if (td_engine_create(model, o, &e, &err) != TD_OK) fail_msg("%s", err.text);
    return e;
}

/* Positions pos..end-1 in one step; the logits of the last one, and its choice. */
static const float *feed(struct td_engine *e, uint32_t pos, uint32_t end,
                         struct td_capture *capture) {
    static uint32_t pages[RANDOM_CONTEXT / TD_KV_PAGE_TOKENS];
    struct td_error err = {0};
    const float *logits = NULL;
    for (uint32_t i = 0; i < sizeof pages / sizeof *pages; i++)
        pages[i] = i;
    struct td_run r = {
        .pos = pos, .n = end - pos, .ids = ids + pos, .pages = pages, .want_logits = true};
    if (td_engine_step(e, &r, 1, &logits, capture, &err) != TD_OK) fail_msg("%s", err.text);
    return logits;
}

static void results(struct td_engine *e, float ret[MORE + 1][RANDOM_VOCAB]) {
    memcpy(ret[0], feed(e, 0, N, NULL), sizeof ret[0]);
    for (uint32_t i = 0; i < MORE; i++)
        memcpy(ret[i + 1], feed(e, N + i, N + i + 1, NULL), sizeof ret[0]);
}

static void forced_alone(struct td_engine_options o) {
    static const char *const names[] = {
#define X(op) #op,
        TD_OPS_MAP(X)
#undef X
    };
    static float want[MORE + 1][RANDOM_VOCAB], got[MORE + 1][RANDOM_VOCAB];
    struct td_engine *fast = create(&o);
    results(fast, want);
    uint64_t fast_id, id;
    const char *plain = td_engine_numerics(fast, &fast_id);
    for (uint32_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct td_error err = {0};
        char word[64];
        assert_int_equal(td_ops_mask(names[i], &o.force_ref, &err), TD_OK);
        assert_true(o.force_ref == (uint64_t)1 << i);
        struct td_engine *e = create(&o);
        results(e, got);
        td_test_same(names[i], want, got, sizeof want);
        td_test_same(names[i], td_engine_pool(fast), td_engine_pool(e),
                     td_engine_layout(e)->pool_bytes);
        td_test_same(names[i], td_engine_slot(fast, 0), td_engine_slot(e, 0),
                     td_engine_layout(e)->slot_bytes);
        const char *line = td_engine_numerics(e, &id);
        snprintf(word, sizeof word, "; reference ops %s", names[i]);
        assert_true(id == fast_id && strncmp(line, plain, strlen(plain)) == 0);
        assert_string_equal(line + strlen(plain), word);
        td_engine_destroy(e);
    }
    td_engine_destroy(fast);
}

/* Each op is taken from the reference table once, while the others are the fastest there are: the
 * same bits in logits and stored state. In numerics that use all ops, and in those that round
 * nothing, where no difference can be lost. */
static void each_op_forced_alone(void **state) {
    (void)state;
    struct td_engine_options o = td_test_random_options(RANDOM_CONTEXT);
    o.nvfp4_activations = o.index_sim4 = true;
    forced_alone(o);
    o = td_test_random_options(RANDOM_CONTEXT);
    o.ref = false;
    o.row_dtype = TD_KV_ROW_FP32;
    o.key_dtype = TD_KV_KEY_FP32;
    forced_alone(o);
}

/* min(index_topk, visible) entries are chosen, ascending and visible; a larger index_topk than
 * there are entries changes nothing but the numerics id, a smaller one does. */
static void every_size_of_index_topk(void **state) {
    (void)state;
    static const uint32_t sizes[] = {1, 2, 3, 63, 64, 256, 257, 258, 2047, TOPK_MAX};
    static float all[RANDOM_VOCAB];
    static int32_t chosen[TOPK_MAX];
    struct td_engine_options o = td_test_random_options(RANDOM_CONTEXT);
    uint32_t visible = LONG / 4;
    uint64_t ids_of[10];
    o.max_tokens = LONG;
    assert_int_equal(visible, 257);
    for (int i = 9; i >= 0; i--) { /* the largest first: it has everything */
        o.index_topk = sizes[i];
        struct td_engine *e = create(&o);
        struct td_capture c = {.runs = 1, .csa_layers = 1, .topk = sizes[i], .entries = chosen};
        const float *logits = feed(e, 0, LONG, &c);
        uint32_t n = sizes[i] < visible ? sizes[i] : visible;
        for (uint32_t k = 0; k < sizes[i]; k++) {
            assert_true(k < n ? chosen[k] >= 0 && (uint32_t)chosen[k] < visible : chosen[k] == -1);
            assert_true(k == 0 || k >= n || chosen[k - 1] < chosen[k]);
        }
        if (i == 9) memcpy(all, logits, sizeof all);
        assert_true((memcmp(all, logits, sizeof all) == 0) == (sizes[i] >= visible));
        (void)td_engine_numerics(e, &ids_of[i]);
        for (int k = 9; k > i; k--)
            assert_true(ids_of[k] != ids_of[i]);
        td_engine_destroy(e);
    }
    static const uint32_t outside[] = {0, TOPK_MAX + 1};
    for (int i = 0; i < 2; i++) {
        struct td_engine *e = NULL;
        struct td_error err = {0};
        o.index_topk = outside[i];
        assert_int_equal(td_engine_create(model, &o, &e, &err), TD_CONFIG);
        assert_non_null(strstr(err.text, "index_topk: expected 1 to 2048, found"));
    }
}

static int setup(void **state) {
    float unused[RANDOM_LAYERS][RANDOM_EXPERTS][2];
    int r = td_test_seed(state);
    maker_init(&maker, MAKER_NVFP4);
    td_test_random_fill(&maker, unused);
    model = td_test_random_open(&maker);
    ids = td_test_random_ids(LONG);
    return r;
}

static int teardown(void **state) {
    (void)state;
    free(ids);
    td_model_close(model);
    maker_finish(&maker);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_op_forced_alone),
        cmocka_unit_test(every_size_of_index_topk),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

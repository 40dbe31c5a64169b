/* See engine_fixture.h. */
#include "tests/kernels/engine_fixture.h"

const struct td_model *td_test_model(void) {
    static struct td_model *model;
    struct td_error err = {0};
    const char *dir = getenv("TANDEM_TEST_MODEL"); /* where the tree was carried elsewhere */
    if (!dir) dir = TD_TEST_MODEL;
    if (!model && td_model_open(dir, &model, &err) != TD_OK) fail_msg("%s: %s", dir, err.text);
    return model;
}

struct td_engine_options td_test_options(void) {
    return (struct td_engine_options){
        .row_dtype = TD_KV_ROW_BF16,
        .key_dtype = TD_KV_KEY_BF16,
        .index_topk = td_test_model()->config.index_topk,
        .max_context = TD_TEST_CONTEXT,
        .pages = TD_TEST_PAGES,
        .slots = 1,
        .max_tokens = 1024,
        .max_runs = 1,
        .threads = 2,
    };
}

struct td_engine *td_test_engine(const struct td_engine_options *o) {
    struct td_engine *e = NULL;
    struct td_error err = {0};
    if (td_engine_create(td_test_model(), o, &e, &err) != TD_OK) fail_msg("%s", err.text);
    return e;
}

int32_t *td_test_ids(uint32_t n) {
    int32_t *ids = malloc(n * sizeof *ids);
    assert_non_null(ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)td_test_below(td_test_model()->config.vocab);
    return ids;
}

const float *td_test_feed(struct td_engine *e, const int32_t *ids, uint32_t pos, uint32_t n,
                          uint32_t chunk) {
    static uint32_t pages[TD_TEST_PAGES];
    const float *logits = NULL;
    for (uint32_t i = 0; i < TD_TEST_PAGES; i++)
        pages[i] = i;
    for (uint32_t end = pos + n; pos < end;) {
        uint32_t m = end - pos < chunk ? end - pos : chunk;
        struct td_run run = {
            .pos = pos, .n = m, .ids = ids + pos, .pages = pages, .want_logits = pos + m == end};
        struct td_error err = {0};
        if (td_engine_step(e, &run, 1, &logits, NULL, &err) != TD_OK) fail_msg("%s", err.text);
        pos += m;
    }
    return logits;
}

size_t td_test_logit_bytes(void) {
    return td_test_model()->config.vocab * sizeof(float);
}

float *td_test_keep(const float *logits) {
    return memcpy(td_test_bytes(td_test_logit_bytes()), logits, td_test_logit_bytes());
}

void td_test_same_state(struct td_engine *a, struct td_engine *b) {
    const struct td_kv_layout *l = td_engine_layout(a);
    td_test_same("pool", td_engine_pool(a), td_engine_pool(b), l->pool_bytes);
    td_test_same("slot", td_engine_slot(a, 0), td_engine_slot(b, 0), l->slot_bytes);
}

/* See random_model.h. */
#include "tests/kernels/random_model.h"

#include <stdio.h>
#include <string.h>

static void put_floats(struct maker *m, const struct maker_tensor *t, float lo, float hi) {
    size_t unit = strcmp(t->dtype, "F32") == 0 ? 4 : 2;
    for (size_t at = t->begin; at < t->end; at += unit) {
        float v = td_test_uniform(lo, hi);
        memcpy(m->data + at, (const char *)&v + (4 - unit), unit); /* bf16: the upper half */
    }
}

static void put_bytes(struct maker *m, const struct maker_tensor *t, uint32_t lo, uint32_t n) {
    for (size_t at = t->begin; at < t->end; at++)
        m->data[at] = (uint8_t)(lo + td_test_below(n));
}

static bool ends(const char *s, const char *with) {
    size_t n = strlen(s), m = strlen(with);
    return n >= m && strcmp(s + n - m, with) == 0;
}

static void fill_tensor(struct maker *m, const struct maker_tensor *t) {
    if (strcmp(t->dtype, "I64") == 0) return;
    if (ends(t->name, "norm.weight"))
        put_floats(m, t, 0.5f, 1.5f);
    else if (ends(t->name, "weight_scale_2"))
        put_floats(m, t, 0.01f, 0.03f);
    else if (strcmp(t->dtype, "F8_E8M0") == 0)
        put_bytes(m, t, 120, 3); /* 2^-7 .. 2^-5 */
    else if (strcmp(t->dtype, "U8") == 0)
        put_bytes(m, t, 0, 256);
    else if (ends(t->name, ".weight_scale"))
        put_bytes(m, t, 0x28, 0x18); /* 0.25 .. 1.75 */
    else if (strcmp(t->dtype, "F8_E4M3") == 0)
        for (size_t at = t->begin; at < t->end; at++)
            m->data[at] = (uint8_t)(td_test_below(0x48) | td_test_below(2) << 7);
    else
        put_floats(m, t, -0.3f, 0.3f);
}

/* As calibration sets it: the greatest input the linear met, over 6 * 448. */
static void put_input_scales(struct maker *m, float input_scale[RANDOM_LAYERS][RANDOM_EXPERTS][2]) {
    static const char *const linear[] = {"w1", "w3", "w2"};
    char name[96];
    for (int l = 0; l < RANDOM_LAYERS; l++)
        for (int e = 0; e < RANDOM_EXPERTS; e++) {
            input_scale[l][e][0] = td_test_uniform(0.5f, 4) / 2688;
            input_scale[l][e][1] = td_test_uniform(0.01f, 0.3f) / 2688;
            for (int i = 0; i < 3; i++) {
                snprintf(name, sizeof name, "layers.%d.ffn.experts.%d.%s.input_scale", l, e,
                         linear[i]);
                memcpy(m->data + maker_find(m, name)->begin, &input_scale[l][e][i == 2], 4);
            }
        }
}

void td_test_random_fill(struct maker *m, float input_scale[RANDOM_LAYERS][RANDOM_EXPERTS][2]) {
    for (size_t i = 0; i < m->n; i++)
        fill_tensor(m, &m->t[i]);
    put_input_scales(m, input_scale);
}

struct td_model *td_test_random_open(const struct maker *m) {
    struct td_model *model = NULL;
    struct td_error err = {0};
    maker_write(m);
    if (td_model_open(m->dir, &model, &err) != TD_OK) fail_msg("%s", err.text);
    return model;
}

struct td_engine_options td_test_random_options(uint32_t max_context) {
    return (struct td_engine_options){.row_dtype = TD_KV_ROW_FP8,
                                      .key_dtype = TD_KV_KEY_BF16,
                                      .ref = true,
                                      .index_topk = 4,
                                      .max_context = max_context,
                                      .pages =
                                          (max_context + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS,
                                      .slots = 1,
                                      .max_tokens = 512,
                                      .max_runs = 1,
                                      .threads = 2};
}

int32_t *td_test_random_ids(uint32_t n) {
    int32_t *ids = td_test_bytes(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)td_test_below(RANDOM_VOCAB);
    return ids;
}

/* NVFP4 activations in the whole engine, on a small random checkpoint in which every expert has
 * calibrated scales of its own: an engine with the setting against one without, whose expert
 * products round their inputs here, by a second formulation and from the numbers the test wrote. */
#include <math.h>
#include <string.h>

#include "tests/kernels/random_model.h"

enum {
    LAYERS = RANDOM_LAYERS,
    EXPERTS = RANDOM_EXPERTS,
    VOCAB = RANDOM_VOCAB,
    GROUP = 16,
    N = 45,
    MORE = 4
};

static struct maker maker;
static float input_scale[LAYERS][EXPERTS][2]; /* of w1 and w3, of w2 */

/* ---- the second formulation ---- */

static uint32_t calls; /* of expert_linear: two per layer */

static double nearest(double x, const double *grid, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) { /* ties: the even code; the grid ascends */
        double a = fabs(x - grid[i]), b = fabs(x - grid[best]);
        if (a < b || (a == b && i % 2 == 0)) best = i;
    }
    return grid[best];
}

static float rounded_step(const float *x, float scale) {
    static double e4m3[127];
    if (e4m3[126] == 0)
        for (int b = 1; b < 127; b++)
            e4m3[b] = b < 8 ? ldexp(b, -9) : ldexp(1 + (b & 7) / 8.0, (b >> 3) - 7);
    float most = 0;
    for (int i = 0; i < GROUP; i++)
        most = fmaxf(most, fabsf(x[i]));
    return (float)nearest((double)(most / 6 / scale), e4m3, 127) * scale;
}

static void round_row(const float *x, float *y, uint32_t dim, float scale) {
    static const double e2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    for (uint32_t g = 0; g < dim; g += GROUP) {
        float step = rounded_step(x + g, scale);
        for (uint32_t i = g; i < g + GROUP; i++)
            y[i] =
                step > 0
                    ? copysignf((float)nearest(fabs((double)(x[i] / step)), e2m1, 8), x[i]) * step
                    : 0;
    }
}

static void expert_linear(const struct td_device *d, const struct td_expert_linear_args *a) {
    static float in[N * RANDOM_HIDDEN];
    struct td_expert_linear_args b = *a;
    uint32_t layer = calls / 2 % LAYERS, down = calls % 2, dim = a->w[0][0].cols;
    calls++;
    assert_int_equal(dim, down ? RANDOM_INNER : RANDOM_HIDDEN);
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t r = a->offset[e]; r < a->offset[e + 1]; r++)
            round_row(a->x + (a->x_row ? a->x_row[r] : r) * a->x_stride, in + (size_t)r * dim, dim,
                      input_scale[layer][e][down]);
    b.x = in;
    b.x_stride = dim;
    b.x_row = NULL;
    td_ops_select()->expert_linear(d, &b);
}

/* ---- the engines ---- */

static struct td_engine_options options(bool on) {
    struct td_engine_options o = td_test_random_options(256);
    o.nvfp4_activations = on;
    return o;
}

/* Logits [MORE + 1][VOCAB] of a prompt in two chunks and of decoding after it. */
static void run(const struct td_model *m, const struct td_engine_options *o, const int32_t *ids,
                float *ret, uint64_t *ret_id) {
    static const uint32_t cut[] = {0, 19, N, N + 1, N + 2, N + 3, N + 4};
    struct td_engine *e = NULL;
    struct td_error err = {0};
    const uint32_t page = 0;
    const float *logits;
    if (td_engine_create(m, o, &e, &err) != TD_OK) fail_msg("%s", err.text);
    for (int i = 0; i < 6; i++) {
        struct td_run r = {.pos = cut[i],
                           .n = cut[i + 1] - cut[i],
                           .ids = ids + cut[i],
                           .pages = &page,
                           .want_logits = true};
        if (td_engine_step(e, &r, 1, &logits, NULL, &err) != TD_OK) fail_msg("%s", err.text);
        if (i > 0) memcpy(ret + (i - 1) * VOCAB, logits, VOCAB * sizeof *logits);
    }
    const char *line = td_engine_numerics(e, ret_id);
    assert_true((strstr(line, "nvfp4 in experts") != NULL) == o->nvfp4_activations);
    td_engine_destroy(e);
}

static void rounds_by_each_experts_scale(void **state) {
    (void)state;
    static float on[(MORE + 1) * VOCAB], off[(MORE + 1) * VOCAB], second[(MORE + 1) * VOCAB];
    int32_t *ids = td_test_random_ids(N + MORE);
    uint64_t on_id, off_id, id;
    struct td_model *m = td_test_random_open(&maker);
    struct td_engine_options o = options(true);
    run(m, &o, ids, on, &on_id);
    o = options(false);
    run(m, &o, ids, off, &off_id);
    struct td_ops ops = *td_ops_select();
    ops.expert_linear = expert_linear;
    o.ops = &ops;
    calls = 0;
    run(m, &o, ids, second, &id);
    assert_int_equal(calls, 6 * LAYERS * 2);
    for (int i = 0; i < (MORE + 1) * VOCAB; i++)
        assert_true(isfinite(on[i]));
    td_test_same("logits with NVFP4 activations", on, second, sizeof on);
    assert_memory_not_equal(on, off, sizeof on);
    assert_true(on_id != off_id && id == off_id);
    free(ids);
    td_model_close(m);
}

static void refused(const struct td_model *m, const char *words) {
    struct td_engine *e = NULL;
    struct td_error err = {0};
    struct td_engine_options o = options(true);
    assert_int_equal(td_engine_create(m, &o, &e, &err), TD_UNSUPPORTED);
    if (!strstr(err.text, words)) fail_msg("expected \"%s\" in: %s", words, err.text);
    o.nvfp4_activations = false;
    assert_int_equal(td_engine_create(m, &o, &e, &err), TD_OK);
    td_engine_destroy(e);
}

static void refuses_checkpoints_without_scales(void **state) {
    (void)state;
    const struct maker_tensor *t = maker_find(&maker, "layers.2.ffn.experts.1.w3.input_scale");
    float other = 2 * input_scale[2][1][0];
    memcpy(maker.data + t->begin, &other, 4);
    struct td_model *m = td_test_random_open(&maker);
    refused(m, "layers.2.ffn.experts.1: expected one input_scale for w1 and w3");
    td_model_close(m);
    maker_remove(&maker, "layers.2.ffn.experts.1.w3.input_scale");
    m = td_test_random_open(&maker);
    refused(m, "layers.2.ffn.experts.1.w3: expected an NVFP4 weight with an input_scale, found no");
    td_model_close(m);
    maker_finish(&maker);
    maker_init(&maker, MAKER_FP8FP4);
    m = td_test_random_open(&maker);
    refused(m, "layers.0.ffn.experts.0.w1: expected an NVFP4 weight with an input_scale, found "
               "another format");
    td_model_close(m);
}

static int setup(void **state) {
    int r = td_test_seed(state);
    maker_init(&maker, MAKER_NVFP4);
    td_test_random_fill(&maker, input_scale);
    return r;
}

static int teardown(void **state) {
    (void)state;
    maker_finish(&maker);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounds_by_each_experts_scale),
        cmocka_unit_test(refuses_checkpoints_without_scales),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

/* A rank's share where a device keeps tensors as they are stored: every matrix of every rank is its
 * part of the whole tensor, whatever it is stored as, from bytes and made from a seed; and no more
 * is taken than a share with its cuts. The device is the CPU that says its memory is another's. */
#include "kernels/model/random.h"
#include "kernels/packed.h"
#include "tests/kernels/engine_fixture.h"

static struct td_error err;

static void ok(td_status st) {
    if (st != TD_OK) fail_msg("%s", err.text);
}

static struct td_model_config config(uint32_t lora, uint32_t experts) {
    struct td_model_config c = td_test_model()->config;
    c.heads = 16;
    c.o_groups = 8;
    c.o_lora_rank = lora;
    c.experts = experts;
    c.vocab = 1003;
    c.layers = 2;
    c.hash_layers = 1;
    c.kind[0] = TD_LAYER_SWA;
    c.kind[1] = TD_LAYER_CSA;
    return c;
}

/* Bytes in place of a function; the model's own from now on. */
static void write_out(struct td_weight *w) {
    size_t data = td_weight_data_bytes(w), scales = td_weight_scale_bytes(w);
    if (w->format == TD_W_NONE) return;
    struct td_random r = td_random_of(w, false);
    void *bytes = td_test_bytes(data);
    td_random_bytes(&r, 0, data, bytes);
    w->data = bytes;
    if (scales) {
        r = td_random_of(w, true);
        bytes = td_test_bytes(scales);
        td_random_bytes(&r, 0, scales, bytes);
        w->scale = bytes;
    }
    w->random = 0;
}

static void drop(struct td_weight *w) {
    free((void *)(uintptr_t)w->data);
    free((void *)(uintptr_t)w->scale);
    w->data = w->scale = NULL;
}

/* Those that ranks share. */
static void each_shared(struct td_model *m, void (*fn)(struct td_weight *w)) {
    fn(&m->embed);
    fn(&m->head);
    for (uint32_t l = 0; l < m->config.layers; l++) {
        struct td_layer_weights *w = &m->layer[l];
        fn(&w->wq_b);
        fn(&w->wo_a);
        fn(&w->wo_b);
        fn(&w->sink);
        for (uint32_t e = 0; e < m->config.experts; e++) {
            fn(&w->experts[e].w1);
            fn(&w->experts[e].w2);
            fn(&w->experts[e].w3);
        }
    }
}

/* The matrix is rows row.. and columns col.. of w. */
static void same_part(const char *what, const struct td_matrix *m, const struct td_weight *w,
                      uint32_t row, uint32_t col) {
    static float whole[16384], part[16384];
    assert_in_range(w->cols, 1, 16384);
    assert_true(m->row + m->rows <= m->stored.rows && m->col + m->cols <= m->stored.cols);
    for (uint32_t r = 0; r < m->rows; r++) {
        td_weight_row(w, row + r, whole);
        td_weight_row(&m->stored, m->row + r, part);
        td_test_same(what, whole + col, part + m->col, m->cols * sizeof *whole);
    }
}

static void check_layer(const struct td_model *m, const struct td_packed_model *p, uint32_t l) {
    const struct td_layer_weights *w = &m->layer[l];
    const struct td_packed_layer *to = &p->layer[l];
    const struct td_share *own = &p->share;
    uint32_t lora = m->config.o_lora_rank;
    assert_int_equal(to->wq_b.rows, own->heads * TD_HEAD_DIM);
    same_part("wq_b", &to->wq_b, &w->wq_b, own->head * TD_HEAD_DIM, 0);
    for (uint32_t g = 0; g < own->groups; g++) {
        same_part("wo_a", &to->wo_a[g], &w->wo_a, (own->group + g) * lora, 0);
        same_part("wo_b", &to->wo_b[g], &w->wo_b, 0, (own->group + g) * lora);
    }
    float sink[64];
    td_weight_row(&w->sink, 0, sink);
    td_test_same("sink", sink + own->head, to->sink, own->heads * sizeof *sink);
    for (uint32_t e = 0; e < own->experts; e++) {
        const struct td_expert_weights *x = &w->experts[own->expert + e];
        same_part("w1", &to->w1[e], &x->w1, 0, 0);
        same_part("w3", &to->w3[e], &x->w3, 0, 0);
        same_part("w2", &to->w2[e], &x->w2, 0, 0);
    }
    same_part("wq_a", &to->wq_a, &w->wq_a, 0, 0); /* whole on every rank */
}

static size_t check_rank(const struct td_model *m, uint32_t rank, uint32_t ranks) {
    static struct td_backend apart;
    struct td_packed_model *p;
    apart = td_backend_cpu;
    apart.host = false;
    struct td_device d = {.backend = &apart, .rank = rank, .ranks = ranks};
    ok(td_packed_plan(m, &d, &p, &err));
    ok(td_packed_fill(p, &err));
    const struct td_share *own = &p->share;
    static float whole[4096], part[4096];
    assert_int_equal(p->embed.rows, own->tokens);
    for (uint32_t t = 0; t < own->tokens; t++) {
        td_weight_row(&m->embed, own->token + t, whole);
        td_weight_row(&p->embed, t, part);
        td_test_same("embed", whole, part, m->config.hidden * sizeof *whole);
    }
    same_part("head", &p->head, &m->head, own->token, 0);
    for (uint32_t l = 0; l < m->config.layers; l++)
        check_layer(m, p, l);
    size_t bytes = p->bytes;
    td_packed_destroy(p);
    assert_int_equal(d.taken, 0);
    return bytes;
}

/* The shares follow each other and are everything. */
static void check_shares(const struct td_model_config *c, uint32_t ranks) {
    struct td_share at = {0};
    for (uint32_t r = 0; r < ranks; r++) {
        struct td_share s = td_share_of(c, r, ranks);
        assert_int_equal(s.group, at.group);
        assert_int_equal(s.head, at.head);
        assert_int_equal(s.expert, at.expert);
        assert_int_equal(s.token, at.token);
        for (uint32_t e = s.expert; e < s.expert + s.experts; e++)
            assert_in_range(e * c->o_groups / c->experts, s.group, s.group + s.groups - 1);
        at = (struct td_share){.group = s.group + s.groups,
                               .head = s.head + s.heads,
                               .expert = s.expert + s.experts,
                               .token = s.token + s.tokens};
    }
    assert_int_equal(at.group, c->o_groups);
    assert_int_equal(at.head, c->heads);
    assert_int_equal(at.expert, c->experts);
    assert_int_equal(at.token, c->vocab);
}

static void shares_of(enum td_outline kind, uint32_t lora, uint32_t experts) {
    struct td_model_config c = config(lora, experts);
    for (int bytes = 0; bytes < 2; bytes++) {
        struct td_model *m;
        ok(td_model_random(&c, kind, 3, &m, &err));
        if (bytes) each_shared(m, write_out);
        size_t whole = check_rank(m, 0, 1);
        for (uint32_t ranks = 2; ranks <= 8; ranks *= 2) {
            check_shares(&c, ranks);
            for (uint32_t r = 0; r < ranks; r++)
                assert_true(check_rank(m, r, ranks) < whole);
        }
        if (bytes) each_shared(m, drop);
        td_model_close(m);
    }
}

static void every_format(void **state) {
    (void)state;
    shares_of(TD_OUTLINE_BF16, 128, 16);
    shares_of(TD_OUTLINE_FP4, 128, 16);
    shares_of(TD_OUTLINE_NVFP4, 128, 13);
}

/* Output groups that begin inside a block of FP8 scales. */
static void cuts_inside_blocks(void **state) {
    (void)state;
    shares_of(TD_OUTLINE_FP4, 32, 6);
    shares_of(TD_OUTLINE_FP4, 48, 8);
    shares_of(TD_OUTLINE_BF16, 24, 8);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format),
        cmocka_unit_test(cuts_inside_blocks),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

/* Ops on token rows against plain formulas in double; both instruction sets give the same bits. */
#include <math.h>

#include "tests/kernels/fixture.h"

static struct td_device dev;
static const struct td_ops *table[2];
static uint32_t tables;

/* Runs `call` with every table into out and compares bits. */
#define ALL_TABLES(what, op, args, out, bytes)                                                     \
    do {                                                                                           \
        void *first_ = td_test_bytes(bytes);                                                       \
        for (uint32_t t_ = 0; t_ < tables; t_++) {                                                 \
            memset(out, 0xff, bytes);                                                              \
            table[t_]->op(&dev, args);                                                             \
            if (t_ == 0)                                                                           \
                memcpy(first_, out, bytes);                                                        \
            else                                                                                   \
                td_test_same(what ": the two instruction sets", first_, out, bytes);               \
        }                                                                                          \
        free(first_);                                                                              \
    } while (0)

static void linear(void **state) {
    (void)state;
    static const uint32_t ns[] = {1, 2, 5, 6, 7, 13, 97}, outs[] = {1, 15, 16, 17, 24, 40},
                          ins[] = {1, 64, 127, 128, 129, 300};
    for (uint32_t c = 0; c < 40; c++) {
        uint32_t n = ns[td_test_below(7)], o1 = outs[td_test_below(6)], o2 = outs[td_test_below(6)];
        uint32_t k = ins[td_test_below(6)], stride = k + td_test_below(3);
        float *x = td_test_floats((size_t)n * stride, -1, 1);
        float *w[2] = {td_test_floats((size_t)o1 * k, -1, 1),
                       td_test_floats((size_t)o2 * k, -1, 1)};
        struct td_matrix m[2] = {td_test_pack(w[0], o1, k), td_test_pack(w[1], o2, k)};
        size_t total = (size_t)n * (o1 + o2);
        float *y = td_test_poison(total);
        struct td_linear_args a = {.x = x,
                                   .x_stride = stride,
                                   .n = n,
                                   .parts = 2,
                                   .part = {{&m[0], y, o1, 0}, {&m[1], y + (size_t)n * o1, o2, 0}}};
        ALL_TABLES("linear", linear, &a, y, total * sizeof *y);
        double *want = malloc(total * sizeof *want), *at = want;
        for (uint32_t p = 0; p < 2; p++)
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t o = 0; o < m[p].rows; o++) {
                    double sum = 0;
                    for (uint32_t j = 0; j < k; j++)
                        sum += (double)x[(size_t)i * stride + j] * w[p][(size_t)o * k + j];
                    *at++ = sum;
                }
        td_test_close("linear", y, want, total, 2e-5);
        free(want);
        free(y);
        free((void *)m[0].panels);
        free((void *)m[1].panels);
        free(w[0]);
        free(w[1]);
        free(x);
    }
}

/* The frozen order itself, written out for one output. */
static void linear_order(void **state) {
    (void)state;
    enum { K = 300, N = 17 };
    float *x = td_test_floats((size_t)N * K, -1, 1), *w = td_test_floats(K, -1, 1), y[N];
    struct td_matrix m = td_test_pack(w, 1, K);
    struct td_linear_args a = {.x = x, .x_stride = K, .n = N, .parts = 1, .part = {{&m, y, 1, 0}}};
    ALL_TABLES("linear order", linear, &a, y, sizeof y);
    for (uint32_t i = 0; i < N; i++) {
        float total = 0;
        for (uint32_t b = 0; b < K; b += TD_BLOCK) {
            float acc = 0;
            for (uint32_t k = b; k < K && k < b + TD_BLOCK; k++)
                acc = fmaf(x[i * K + k], w[k], acc);
            total = b ? total + acc : acc;
        }
        assert_true(y[i] == total);
    }
    free((void *)m.panels);
    free(w);
    free(x);
}

static void expert_linear(void **state) {
    (void)state;
    enum { E = 5, K = 200, O = 24, X = 9, R = 23 };
    uint32_t offset[E + 1] = {0, 0, 8, 9, 9, R}, x_row[R];
    float *x = td_test_floats((size_t)X * K, -1, 1), *w[E], *y = td_test_poison(R * O);
    struct td_matrix m[E];
    for (uint32_t e = 0; e < E; e++) {
        w[e] = td_test_floats((size_t)O * K, -1, 1);
        m[e] = td_test_pack(w[e], O, K);
    }
    for (uint32_t r = 0; r < R; r++)
        x_row[r] = td_test_below(X);
    struct td_expert_linear_args a = {.x = x,
                                      .x_stride = K,
                                      .x_row = x_row,
                                      .offset = offset,
                                      .experts = E,
                                      .parts = 1,
                                      .w = {m},
                                      .y = {y}};
    ALL_TABLES("expert_linear", expert_linear, &a, y, R * O * sizeof *y);
    /* The same bits as the plain product of that row and matrix. */
    for (uint32_t e = 0; e < E; e++)
        for (uint32_t r = offset[e]; r < offset[e + 1]; r++) {
            float one[O];
            struct td_linear_args l = {.x = x + (size_t)x_row[r] * K,
                                       .x_stride = K,
                                       .n = 1,
                                       .parts = 1,
                                       .part = {{&m[e], one, O, 0}}};
            table[tables - 1]->linear(&dev, &l);
            td_test_same("expert_linear against linear", one, y + (size_t)r * O, sizeof one);
        }
    for (uint32_t e = 0; e < E; e++) {
        free((void *)m[e].panels);
        free(w[e]);
    }
    free(y);
    free(x);
}

static void rms_norm(void **state) {
    (void)state;
    for (uint32_t dim = 16; dim <= 1024; dim *= 2) {
        enum { N = 5 };
        float *x = td_test_floats((size_t)N * dim, -3, 3), *w = td_test_floats(dim, 0, 2);
        float *y = td_test_poison((size_t)N * dim);
        double *want = malloc((size_t)N * dim * sizeof *want);
        for (int weighted = 0; weighted < 2; weighted++) {
            struct td_rms_norm_args a = {.x = x,
                                         .x_stride = dim,
                                         .y = y,
                                         .y_stride = dim,
                                         .w = weighted ? w : NULL,
                                         .n = N,
                                         .dim = dim,
                                         .eps = 1e-6f};
            ALL_TABLES("rms_norm", rms_norm, &a, y, (size_t)N * dim * sizeof *y);
            for (uint32_t i = 0; i < N; i++) {
                double sum = 0;
                for (uint32_t c = 0; c < dim; c++)
                    sum += (double)x[i * dim + c] * x[i * dim + c];
                for (uint32_t c = 0; c < dim; c++)
                    want[i * dim + c] =
                        x[i * dim + c] / sqrt(sum / dim + 1e-6) * (weighted ? w[c] : 1.0);
            }
            td_test_close("rms_norm", y, want, (size_t)N * dim, 1e-6);
        }
        free(want);
        free(y);
        free(w);
        free(x);
    }
}

/* The printed formulas of s.5, in double. */
static void hc_formula(const float *x, const float *m, const float *base, const float *scale,
                       uint32_t hidden, double *y, double *post, double comb[4][4]) {
    double ss = 0, pre[4], r;
    for (uint32_t c = 0; c < 4 * hidden; c++)
        ss += (double)x[c] * x[c];
    r = 1 / sqrt(ss / (4 * hidden) + 1e-6);
    for (int i = 0; i < 4; i++) {
        pre[i] = 1 / (1 + exp(-(m[i] * r * scale[0] + base[i]))) + 1e-6;
        post[i] = 2 / (1 + exp(-(m[4 + i] * r * scale[1] + base[4 + i])));
        double sum = 0, max = -INFINITY;
        for (int k = 0; k < 4; k++) {
            comb[i][k] = m[8 + 4 * i + k] * r * scale[2] + base[8 + 4 * i + k];
            max = fmax(max, comb[i][k]);
        }
        for (int k = 0; k < 4; k++)
            sum += comb[i][k] = exp(comb[i][k] - max);
        for (int k = 0; k < 4; k++)
            comb[i][k] = comb[i][k] / sum + 1e-6;
    }
    for (int it = 0; it < 20; it++) {
        for (int j = 0; it && j < 4; j++) {
            double sum = comb[j][0] + comb[j][1] + comb[j][2] + comb[j][3] + 1e-6;
            for (int k = 0; k < 4; k++)
                comb[j][k] /= sum;
        }
        for (int k = 0; k < 4; k++) {
            double sum = comb[0][k] + comb[1][k] + comb[2][k] + comb[3][k] + 1e-6;
            for (int j = 0; j < 4; j++)
                comb[j][k] /= sum;
        }
    }
    for (uint32_t c = 0; c < hidden; c++) {
        y[c] = 0;
        for (int s = 0; s < 4; s++)
            y[c] += pre[s] * x[s * hidden + c];
    }
}

static void hyper_connections(void **state) {
    (void)state;
    enum { N = 7, H = 48 };
    float *x = td_test_floats(N * 4 * H, -2, 2), *m = td_test_floats(N * 24, -4, 4);
    float *o = td_test_floats(N * H, -1, 1), base[24], scale[3] = {0.7f, -0.4f, 1.3f};
    float *out = td_test_poison(N * (H + 4 + 16));
    float *y = out, *post = out + N * H, *comb = post + N * 4;
    for (int i = 0; i < 24; i++)
        base[i] = td_test_uniform(-1, 1);
    struct td_hc_pre_args a = {.x = x,
                               .m = m,
                               .base = base,
                               .scale = scale,
                               .y = y,
                               .post = post,
                               .comb = comb,
                               .n = N,
                               .hidden = H,
                               .iters = 20,
                               .eps = 1e-6f,
                               .hc_eps = 1e-6f};
    ALL_TABLES("hc_pre", hc_pre, &a, out, N * (H + 4 + 16) * sizeof *out);
    float *mixed = td_test_bytes(N * 4 * H * sizeof *mixed), *first = NULL;
    for (uint32_t t = 0; t < tables; t++) {
        memcpy(mixed, x, N * 4 * H * sizeof *x);
        struct td_hc_post_args p = {
            .x = mixed, .o = o, .post = post, .comb = comb, .n = N, .hidden = H};
        table[t]->hc_post(&dev, &p);
        if (!first) first = memcpy(td_test_bytes(N * 4 * H * 4), mixed, N * 4 * H * 4);
        td_test_same("hc_post", first, mixed, N * 4 * H * sizeof *x);
    }
    for (uint32_t i = 0; i < N; i++) {
        double wy[H], wpost[4], wcomb[4][4], wx[4 * H];
        hc_formula(x + i * 4 * H, m + i * 24, base, scale, H, wy, wpost, wcomb);
        td_test_close("hc_pre y", y + i * H, wy, H, 3e-6);
        td_test_close("hc_pre post", post + i * 4, wpost, 4, 3e-6);
        td_test_close("hc_pre comb", comb + i * 16, &wcomb[0][0], 16, 3e-6);
        for (int k = 0; k < 4; k++) {
            const float *own = comb + i * 16 + k; /* ours, not the formula's */
            double sum = (double)own[0] + (double)own[4] + (double)own[8] + (double)own[12];
            assert_true(fabs(sum - 1) < 1e-5);
            for (uint32_t c = 0; c < H; c++) {
                wx[k * H + c] = wpost[k] * o[i * H + c];
                for (int j = 0; j < 4; j++) /* source j, destination k */
                    wx[k * H + c] += wcomb[j][k] * x[(i * 4 + j) * H + c];
            }
        }
        td_test_close("hc_post", mixed + i * 4 * H, wx, 4 * H, 1e-5);
    }
    free(first);
    free(mixed);
    free(out);
    free(o);
    free(m);
    free(x);
}

static void hc_head(void **state) {
    (void)state;
    enum { N = 3, H = 32 };
    float *x = td_test_floats(N * 4 * H, -2, 2), *m = td_test_floats(N * 4, -4, 4);
    float base[4] = {0.1f, -0.2f, 0.3f, 0.9f}, scale = 0.6f, y[N * H];
    struct td_hc_head_args a = {.x = x,
                                .m = m,
                                .base = base,
                                .scale = &scale,
                                .y = y,
                                .n = N,
                                .hidden = H,
                                .eps = 1e-6f,
                                .hc_eps = 1e-6f};
    ALL_TABLES("hc_head", hc_head, &a, y, sizeof y);
    for (uint32_t i = 0; i < N; i++) {
        double ss = 0, want[H] = {0};
        for (uint32_t c = 0; c < 4 * H; c++)
            ss += (double)x[i * 4 * H + c] * x[i * 4 * H + c];
        for (int s = 0; s < 4; s++) {
            double v = m[i * 4 + s] / sqrt(ss / (4 * H) + 1e-6) * scale + base[s];
            for (uint32_t c = 0; c < H; c++)
                want[c] += (1 / (1 + exp(-v)) + 1e-6) * x[(i * 4 + s) * H + c];
        }
        td_test_close("hc_head", y + i * H, want, H, 3e-6);
    }
    free(m);
    free(x);
}

/* All of the vocabulary, then a rank's rows of it: ids of others are zeros, no negative ones. */
static void embed_and_gather(void **state) {
    (void)state;
    enum { V = 11, H = 32, N = 6, FIRST = 4 };
    float *w = td_test_floats(V * H, -1, 1), *x = td_test_poison(N * 4 * H),
          *y = td_test_poison(N * H), none[H] = {0};
    struct td_weight view = {.format = TD_W_F32, .rows = V, .cols = H, .data = w};
    int32_t ids[N] = {0, 10, 3, 3, 7, 1};
    struct td_embed_args a = {.w = &view, .ids = ids, .y = y, .n = N};
    ALL_TABLES("embed", embed, &a, y, N * H * sizeof *y);
    for (uint32_t i = 0; i < N; i++)
        td_test_same("embed", y + i * H, w + ids[i] * H, H * sizeof *y);
    struct td_expand_args e = {.y = y, .x = x, .n = N, .hidden = H};
    ALL_TABLES("expand", expand, &e, x, N * 4 * H * sizeof *x);
    for (uint32_t i = 0; i < N * 4; i++)
        td_test_same("expand", x + i * H, w + ids[i / 4] * H, H * sizeof *x);
    view.rows = 6; /* 4..9 */
    view.data = w + FIRST * H;
    a.first = FIRST;
    ALL_TABLES("embed", embed, &a, y, N * H * sizeof *y);
    for (uint32_t i = 0; i < N; i++)
        td_test_same("embed", y + i * H, ids[i] == 7 ? w + 7 * H : none, H * sizeof *y);
    uint32_t index[3] = {9, 0, 9};
    struct td_gather_args g = {.x = w, .index = index, .y = y, .n = 3, .dim = H};
    ALL_TABLES("gather", gather, &g, y, 3 * H * sizeof *y);
    for (uint32_t i = 0; i < 3; i++)
        td_test_same("gather", y + i * H, w + index[i] * H, H * sizeof *y);
    free(y);
    free(x);
    free(w);
}

/* The bits of the tree, and of ranks that sum a stretch of the shards each. */
static void add_shards(void **state) {
    (void)state;
    enum { S = 8, N = 4, D = 27, ALL = N * D };
    float *shard = td_test_floats(S * ALL, -1, 1), y[ALL], part[2][ALL];
    struct td_add_shards_args a = {.shard = shard, .y = y, .shards = 3, .n = N, .dim = D};
    ALL_TABLES("add_shards", add_shards, &a, y, sizeof y);
    for (uint32_t i = 0; i < ALL; i++)
        assert_true(y[i] == shard[i] + (shard[ALL + i] + shard[2 * ALL + i]));
    a.shards = 6; /* two ranks with an odd number each */
    ALL_TABLES("add_shards", add_shards, &a, y, sizeof y);
    for (uint32_t r = 0; r < 2; r++)
        table[0]->add_shards(&dev, &(struct td_add_shards_args){shard + r * 3 * ALL, part[r],
                                                                .shards = 3, .n = N, .dim = D});
    for (uint32_t i = 0; i < ALL; i++)
        assert_true(y[i] == part[0][i] + part[1][i]);
    a.shards = S;
    ALL_TABLES("add_shards", add_shards, &a, y, sizeof y);
    for (uint32_t i = 0; i < ALL; i++) {
        const float *x = shard + i;
        assert_true(y[i] == ((x[0] + x[ALL]) + (x[2 * ALL] + x[3 * ALL])) +
                                ((x[4 * ALL] + x[5 * ALL]) + (x[6 * ALL] + x[7 * ALL])));
    }
    free(shard);
}

static int setup(void **state) {
    dev = td_test_device(2);
    tables = td_test_tables(table);
    return td_test_seed(state);
}

static int teardown(void **state) {
    (void)state;
    td_test_device_finish(&dev);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear),
        cmocka_unit_test(linear_order),
        cmocka_unit_test(expert_linear),
        cmocka_unit_test(rms_norm),
        cmocka_unit_test(hyper_connections),
        cmocka_unit_test(hc_head),
        cmocka_unit_test(embed_and_gather),
        cmocka_unit_test(add_shards),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

/* Routing, grouping, activation and the sum over shards, against plain formulas; and the same by
 * ranks that have some of the experts. */
#include <math.h>

#include "tests/kernels/fixture.h"

static struct td_device dev;
static const struct td_ops *table[2];
static uint32_t tables;

enum { N = 37, E = 16, K = 4, V = 50, H = 32 };

static double score_of(float logit) {
    return sqrt(fmax(logit, 0.0) + log1p(exp(-fabs((double)logit))));
}

/* Expert e is among the k best by rank: fewer than k experts beat it. */
static uint32_t rank_of(const float *logits, const float *bias, uint32_t e) {
    uint32_t better = 0;
    double mine = score_of(logits[e]) + bias[e];
    for (uint32_t o = 0; o < E; o++) {
        double other = score_of(logits[o]) + bias[o];
        better += other > mine || (other == mine && o < e);
    }
    return better;
}

static void route_by_score(void **state) {
    (void)state;
    float *logits = td_test_floats(N * E, -6, 6), *bias = td_test_floats(E, -0.5f, 0.5f);
    for (uint32_t t = 0; t < tables; t++) {
        uint32_t expert[N * K];
        float weight[N * K];
        struct td_route_args a = {.logits = logits,
                                  .bias = bias,
                                  .n = N,
                                  .experts = E,
                                  .k = K,
                                  .scale = 1.5f,
                                  .expert = expert,
                                  .weight = weight};
        table[t]->route(&dev, &a);
        for (uint32_t i = 0; i < N; i++) {
            double sum = 0, want[K];
            for (uint32_t j = 0; j < K; j++) {
                uint32_t e = expert[i * K + j];
                assert_true(e < E && (j == 0 || expert[i * K + j - 1] < e));
                assert_true(rank_of(logits + i * E, bias, e) < K);
                sum += score_of(logits[i * E + e]);
            }
            for (uint32_t j = 0; j < K; j++)
                want[j] = score_of(logits[i * E + expert[i * K + j]]) / sum * 1.5;
            td_test_close("route weight", weight + i * K, want, K, 2e-6);
        }
    }
    free(bias);
    free(logits);
}

static void route_ties_take_the_lower(void **state) {
    (void)state;
    float logits[E] = {0}, bias[E] = {0}, weight[K];
    uint32_t expert[K];
    struct td_route_args a = {.logits = logits,
                              .bias = bias,
                              .n = 1,
                              .experts = E,
                              .k = K,
                              .scale = 1.0f,
                              .expert = expert,
                              .weight = weight};
    for (uint32_t t = 0; t < tables; t++) {
        table[t]->route(&dev, &a);
        for (uint32_t j = 0; j < K; j++)
            assert_int_equal(expert[j], j);
    }
}

static void route_by_token(void **state) {
    (void)state;
    int64_t tid[V * K];
    int32_t ids[N];
    float *logits = td_test_floats(N * E, -6, 6), weight[N * K];
    uint32_t expert[N * K];
    for (uint32_t v = 0; v < V; v++)
        for (uint32_t j = 0; j < K; j++) /* distinct, in no order */
            tid[v * K + j] = (v + (K - j) * 3) % E;
    for (uint32_t i = 0; i < N; i++)
        ids[i] = (int32_t)td_test_below(V);
    struct td_route_args a = {.logits = logits,
                              .tid2eid = tid,
                              .ids = ids,
                              .n = N,
                              .experts = E,
                              .k = K,
                              .scale = 1.5f,
                              .expert = expert,
                              .weight = weight};
    for (uint32_t t = 0; t < tables; t++) {
        table[t]->route(&dev, &a);
        for (uint32_t i = 0; i < N; i++) {
            double sum = 0;
            for (uint32_t j = 0; j < K; j++) {
                uint32_t found = 0;
                assert_true(j == 0 || expert[i * K + j - 1] < expert[i * K + j]);
                for (uint32_t q = 0; q < K; q++)
                    found += tid[ids[i] * K + q] == expert[i * K + j];
                assert_int_equal(found, 1);
                sum += weight[i * K + j];
            }
            assert_true(fabs(sum - 1.5) < 1e-6);
        }
    }
    free(logits);
}

static void group_rows(void **state) {
    (void)state;
    uint32_t expert[N * K], offset[E + 1], token[N * K], place[N * K];
    float weight[N * K], row_weight[N * K];
    for (uint32_t i = 0; i < N * K; i++) {
        expert[i] = td_test_below(E - 1); /* the last expert stays empty */
        weight[i] = (float)i;
    }
    struct td_group_args a = {.expert = expert,
                              .weight = weight,
                              .n = N,
                              .k = K,
                              .count = E,
                              .offset = offset,
                              .token = token,
                              .row_weight = row_weight,
                              .place = place};
    for (uint32_t t = 0; t < tables; t++) {
        table[t]->group(&dev, &a);
        assert_int_equal(offset[0], 0);
        assert_int_equal(offset[E], N * K);
        assert_int_equal(offset[E - 1], N * K);
        for (uint32_t i = 0; i < N * K; i++) {
            uint32_t row = place[i];
            assert_true(row >= offset[expert[i]] && row < offset[expert[i] + 1]);
            assert_int_equal(token[row], i / K);
            assert_true(row_weight[row] == weight[i]);
        }
        for (uint32_t e = 0; e < E; e++)
            for (uint32_t r = offset[e]; r + 1 < offset[e + 1]; r++)
                assert_true(token[r] <= token[r + 1]);
    }
}

/* Experts first..first + count - 1: their rows in the order of the whole, from 0; nothing else is
 * touched. */
static void group_of_a_range(void **state) {
    (void)state;
    static const uint32_t range[][2] = {{0, E}, {0, 5}, {5, 3}, {8, 8}, {E - 1, 1}, {7, 0}};
    uint32_t expert[N * K], offset[2][E + 1], token[2][N * K], place[2][N * K];
    float weight[N * K], row_weight[2][N * K];
    for (uint32_t i = 0; i < N * K; i++) {
        expert[i] = td_test_below(E - 1);
        weight[i] = (float)i;
    }
    struct td_group_args a = {.expert = expert, .weight = weight, .n = N, .k = K, .count = E};
    a.offset = offset[0];
    a.token = token[0];
    a.row_weight = row_weight[0];
    a.place = place[0];
    td_ops_ref.group(&dev, &a);
    a.offset = offset[1];
    a.token = token[1];
    a.row_weight = row_weight[1];
    a.place = place[1];
    for (uint32_t t = 0; t < tables; t++)
        for (uint32_t r = 0; r < sizeof range / sizeof *range; r++) {
            uint32_t first = range[r][0], count = range[r][1], from = offset[0][first];
            uint32_t rows = offset[0][first + count] - from;
            memset(offset[1], 0xff, sizeof offset[1]);
            memset(token[1], 0xff, sizeof token[1]);
            memset(row_weight[1], 0xff, sizeof row_weight[1]);
            memset(place[1], 0xff, sizeof place[1]);
            a.first = first;
            a.count = count;
            table[t]->group(&dev, &a);
            for (uint32_t e = 0; e <= E; e++)
                assert_int_equal(offset[1][e],
                                 e > count ? UINT32_MAX : offset[0][first + e] - from);
            td_test_same("tokens", token[1], token[0] + from, rows * 4);
            td_test_same("weights", row_weight[1], row_weight[0] + from, rows * 4);
            for (uint32_t i = rows; i < N * K; i++)
                assert_int_equal(token[1][i], UINT32_MAX);
            for (uint32_t i = 0; i < N * K; i++) {
                bool own = expert[i] >= first && expert[i] < first + count;
                assert_int_equal(place[1][i], own ? place[0][i] - from : UINT32_MAX);
            }
        }
}

static void swiglu_clamps(void **state) {
    (void)state;
    float *a = td_test_floats(N * H, -30, 30), *b = td_test_floats(N * H, -30, 30);
    float *w = td_test_floats(N, 0, 2), *out = td_test_poison(N * H), *first = NULL;
    double want[N * H];
    for (uint32_t i = 0; i < N * H; i++) {
        double g = fmin(a[i], 10.0), u = fmax(-10.0, fmin(b[i], 10.0));
        want[i] = g / (1 + exp(-g)) * u * w[i / H];
    }
    for (uint32_t t = 0; t < tables; t++) {
        struct td_swiglu_args s = {
            .a = a, .b = b, .weight = w, .t = out, .n = N, .inner = H, .limit = 10.0f};
        table[t]->swiglu(&dev, &s);
        td_test_close("swiglu", out, want, N * H, 1e-6);
        if (!first) first = memcpy(td_test_bytes(N * H * 4), out, N * H * 4);
        td_test_same("swiglu", first, out, N * H * sizeof *out);
        s.weight = NULL;
        s.t = memcpy(out, a, N * H * sizeof *a); /* in place, no weight */
        s.a = out;
        table[t]->swiglu(&dev, &s);
        for (uint32_t i = 0; i < N * H; i++)
            assert_true(fabs(out[i] * (double)w[i / H] - want[i]) <= 1e-5 * fmax(1, fabs(want[i])));
    }
    /* Rows that do not count stay as they are. */
    for (uint32_t t = 0; t < tables; t++)
        for (uint32_t rows = 0; rows <= N; rows += N) {
            struct td_swiglu_args s = {.a = a,
                                       .b = b,
                                       .weight = w,
                                       .t = out,
                                       .rows = &rows,
                                       .n = N,
                                       .inner = H,
                                       .limit = 10.0f};
            memset(out, 0xff, N * H * sizeof *out);
            table[t]->swiglu(&dev, &s);
            if (rows == N) td_test_same("swiglu", first, out, N * H * sizeof *out);
            for (uint32_t i = 0; rows == 0 && i < N * H; i++)
                assert_true(isnan(out[i]));
        }
    free(first);
    free(out);
    free(w);
    free(b);
    free(a);
}

/* Whole experts on ranks: the tree of the shards, and partial sums of ranks added in its order give
 * the same bits. Places of other ranks' experts are never looked at. */
static void combine_is_a_tree_of_shards(void **state) {
    (void)state;
    enum { SHARDS = 4, ALL = N * H };
    float *rows = td_test_floats(N * K * H, -1, 1), *shared = td_test_floats(ALL, -1, 1);
    uint32_t expert[N * K], place[N * K], own[N * K];
    float y[ALL], part[SHARDS][ALL];
    for (uint32_t i = 0; i < N; i++) {
        uint32_t step = E / K;
        for (uint32_t j = 0; j < K; j++)
            expert[i * K + j] = j * step + td_test_below(step);
        if (i == 0) /* a token with nothing in all but the last shard */
            for (uint32_t j = 0; j < K; j++)
                expert[j] = E - K + j;
    }
    for (uint32_t i = 0; i < N * K; i++)
        place[i] = (i * 7 + 3) % (N * K);
    struct td_combine_args a = {.rows = rows,
                                .expert = expert,
                                .hidden = H,
                                .n = N,
                                .k = K,
                                .experts = E,
                                .shards = SHARDS};
    for (uint32_t t = 0; t < tables; t++) {
        memset(y, 0xff, sizeof y);
        a.place = place;
        a.shared = shared;
        a.y = y;
        a.first_shard = 0;
        a.shards_here = SHARDS;
        table[t]->combine(&dev, &a);
        for (uint32_t i = 0; i < ALL; i++) {
            float sum[SHARDS] = {0};
            for (uint32_t j = 0; j < K; j++) {
                uint32_t at = i / H * K + j;
                sum[expert[at] * SHARDS / E] += rows[place[at] * H + i % H];
            }
            assert_true(y[i] == ((sum[0] + sum[1]) + (sum[2] + sum[3])) + shared[i]);
        }
        a.shared = NULL;
        a.place = own;
        for (uint32_t ranks = 2; ranks <= SHARDS; ranks *= 2) {
            a.shards_here = SHARDS / ranks;
            for (uint32_t r = 0; r < ranks; r++) {
                a.first_shard = r * a.shards_here;
                a.y = part[r];
                for (uint32_t i = 0; i < N * K; i++)
                    own[i] = expert[i] * ranks / E == r ? place[i] : UINT32_MAX;
                table[t]->combine(&dev, &a);
            }
            for (uint32_t i = 0; i < ALL; i++) {
                float low = ranks == 2 ? part[0][i] : part[0][i] + part[1][i];
                float high = ranks == 2 ? part[1][i] : part[2][i] + part[3][i];
                assert_true(y[i] == (low + high) + shared[i]);
            }
        }
    }
    free(shared);
    free(rows);
}

/* Every expert lies in the shard whose experts td_shard_expert bounds. */
static void shards_have_ranges_of_experts(void **state) {
    (void)state;
    for (uint32_t experts = 1; experts < 40; experts++)
        for (uint32_t shards = 1; shards <= 16; shards++) {
            assert_int_equal(td_shard_expert(0, shards, experts), 0);
            assert_int_equal(td_shard_expert(shards, shards, experts), experts);
            for (uint32_t e = 0; e < experts; e++) {
                uint32_t s = e * shards / experts;
                assert_in_range(e, td_shard_expert(s, shards, experts),
                                td_shard_expert(s + 1, shards, experts) - 1);
            }
        }
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
        cmocka_unit_test(route_by_score),
        cmocka_unit_test(route_ties_take_the_lower),
        cmocka_unit_test(route_by_token),
        cmocka_unit_test(group_rows),
        cmocka_unit_test(group_of_a_range),
        cmocka_unit_test(swiglu_clamps),
        cmocka_unit_test(combine_is_a_tree_of_shards),
        cmocka_unit_test(shards_have_ranges_of_experts),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

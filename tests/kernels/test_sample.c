/* Sampling against its plain definition (sort, cut, normalise, walk), known answers of the
 * generator, the distribution itself, and the edges of every parameter. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "kernels/sample.h"

enum { MAX_VOCAB = 2048 };

static uint64_t seed;
static float work[2 * MAX_VOCAB];

static uint32_t next_u32(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static double next_unit(void) {
    return next_u32() / 4294967296.0;
}

static struct td_sampled sample(const float *logits, uint32_t n, const struct td_sample_params *p,
                                uint64_t position) {
    struct td_sampled s;
    struct td_error err;
    assert_int_equal(td_sample(logits, NULL, n, p, position, work, &s, &err), TD_OK);
    assert_in_range(s.token, 0, n - 1);
    return s;
}

/* ---- the definition ---- */

static const float *sort_logits;
static int by_logit(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    if (sort_logits[x] != sort_logits[y]) return sort_logits[x] > sort_logits[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

static double uniform(uint64_t s, uint64_t position) {
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0}, r[4];
    td_philox(c, (uint32_t[2]){(uint32_t)s, (uint32_t)(s >> 32)}, r);
    return ldexp((double)(((uint64_t)r[0] << 21) ^ (r[1] >> 11)), -53);
}

/* Sorted ids, their probabilities at the temperature, and how many survive the filters. `margin`
 * tells how close a probability came to a cut. */
static uint32_t define(const float *logits, uint32_t n, const struct td_sample_params *p,
                       uint32_t *ids, double *prob, double *margin) {
    double total = 0, at = 0;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    sort_logits = logits;
    qsort(ids, n, sizeof *ids, by_logit);
    uint32_t kept = p->top_k && p->top_k < n ? p->top_k : n;
    for (uint32_t i = 0; i < n; i++)
        prob[i] = exp(((double)logits[ids[i]] - (double)logits[ids[0]]) / (double)p->temperature);
    for (uint32_t i = 0; i < kept; i++)
        total += prob[i];
    *margin = 1;
    if (p->top_p < 1.0f) {
        uint32_t k = 0;
        do {
            at += prob[k++] / total;
            *margin = fmin(*margin, fabs(at - (double)p->top_p));
        } while (k < kept && at < (double)p->top_p);
        kept = k;
    }
    uint32_t k = 0;
    for (; k < kept && prob[k] >= (double)p->min_p * prob[0]; k++)
        ;
    for (uint32_t i = 1; i < n && p->min_p > 0; i++)
        *margin = fmin(*margin, fabs(prob[i] - (double)p->min_p));
    return k;
}

static void random_logits(float *logits, uint32_t n) {
    double spread = 0.1 + 8.0 * next_unit();
    for (uint32_t i = 0; i < n; i++) {
        logits[i] = (float)(spread * (next_unit() + next_unit() + next_unit() - 1.5));
        if (next_u32() % 16 == 0 && i) logits[i] = logits[i - 1];
        if (next_u32() % 40 == 0 && i) logits[i] = -INFINITY;
    }
}

static void agrees_with_the_definition(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    static uint32_t ids[MAX_VOCAB];
    static double prob[MAX_VOCAB];
    int compared = 0, walked = 0;
    for (int i = 0; i < 4000; i++) {
        uint32_t n = 1 + next_u32() % (i % 8 ? 60 : MAX_VOCAB);
        random_logits(logits, n);
        struct td_sample_params p = {.temperature = (float)(0.05 + 2 * next_unit()),
                                     .top_p = next_u32() % 2 ? 1.0f : (float)next_unit(),
                                     .min_p = next_u32() % 2 ? 0.0f : (float)next_unit() * 0.3f,
                                     .top_k = next_u32() % 2 ? 0 : next_u32() % (n + 2),
                                     .seed = next_u32()};
        double margin;
        uint32_t kept = define(logits, n, &p, ids, prob, &margin);
        if (margin < 1e-5) continue; /* either side of a cut is right */
        uint64_t position = next_u32();
        struct td_sampled s = sample(logits, n, &p, position);
        uint32_t rank = 0;
        while (ids[rank] != (uint32_t)s.token)
            rank++;
        assert_in_range(rank, 0, kept - 1);
        assert_true(prob[rank] > 0);
        compared++;
        bool filtered = (p.top_k && p.top_k < n) || p.top_p < 1.0f || p.min_p > 0.0f;
        if (!filtered) continue; /* walks in the order of ids: see the chi-square test */
        double total = 0, before = 0, u = uniform(p.seed, position);
        for (uint32_t k = 0; k < kept; k++)
            total += prob[k];
        for (uint32_t k = 0; k < rank; k++)
            before += prob[k];
        assert_true(u >= before / total - 1e-5 && u <= (before + prob[rank]) / total + 1e-5);
        walked++;
    }
    assert_true(compared > 3000 && walked > 2000);
}

static void greedy_takes_the_lowest_of_equals(void **state) {
    (void)state;
    float logits[] = {-1, 3, 2, 3, -INFINITY, 3};
    struct td_sample_params p = {.temperature = 0, .top_p = 0.5f, .top_k = 3, .seed = 9};
    for (uint64_t pos = 0; pos < 50; pos++)
        assert_int_equal(sample(logits, 6, &p, pos).token, 1);
}

static void edges_of_the_filters(void **state) {
    (void)state;
    float logits[] = {1, 5, 4.9f, 5, 2, -INFINITY};
    struct td_sample_params p = {.temperature = 1, .top_p = 1};
    int seen[6] = {0}, equals[6] = {0};
    for (uint64_t pos = 0; pos < 2000; pos++) {
        p.seed = pos * 77;
        p.top_p = 0; /* one is always kept: the lowest id of the best */
        assert_int_equal(sample(logits, 6, &p, pos).token, 1);
        p.top_p = 1;
        p.min_p = 1; /* only tokens as likely as the best */
        equals[sample(logits, 6, &p, pos).token]++;
        p.min_p = 0;
        p.top_k = 1;
        assert_int_equal(sample(logits, 6, &p, pos).token, 1);
        p.top_k = 6;
        seen[sample(logits, 6, &p, pos).token]++;
        p.top_k = 0;
    }
    assert_true(seen[0] > 0 && seen[2] > 0 && seen[4] > 0 && seen[1] > 300 && seen[3] > 300);
    assert_int_equal(seen[5], 0);
    assert_int_equal(equals[1] + equals[3], 2000);
    assert_true(equals[1] > 800 && equals[3] > 800);
    p.temperature = 1e-45f; /* smallest positive: as good as greedy among the best */
    int t = sample(logits, 6, &p, 3).token;
    assert_true(t == 1 || t == 3);
    assert_int_equal(sample(logits, 1, &p, 3).token, 0);
}

/* Pearson's statistic of `draws` tokens against `prob`; expected about k - 1, its deviation
 * sqrt(2 (k - 1)). */
static void check_chi_square(const float *logits, uint32_t n, struct td_sample_params p,
                             const double *prob) {
    enum { DRAWS = 200000 };
    uint32_t count[16] = {0}, cells = 0;
    double chi = 0;
    for (uint32_t i = 0; i < DRAWS; i++)
        count[sample(logits, n, &p, 1000 + i).token]++;
    for (uint32_t i = 0; i < n; i++) {
        double want = prob[i] * DRAWS;
        if (want == 0) assert_int_equal(count[i], 0);
        if (want == 0) continue;
        chi += (count[i] - want) * (count[i] - want) / want;
        cells++;
    }
    double deviation = (chi - (cells - 1)) / sqrt(2.0 * (cells - 1));
    printf("chi-square %.2f over %u cells (%.2f deviations)\n", chi, cells, deviation);
    assert_true(fabs(deviation) < 4);
}

static void draws_follow_the_distribution(void **state) {
    (void)state;
    float logits[10] = {0.3f, -1, 2, 1.5f, 0, -2, 1, 0.7f, -0.4f, 1.9f};
    double prob[10], total = 0;
    struct td_sample_params p = {.temperature = 0.8f, .top_p = 1, .seed = 20250101};
    for (int i = 0; i < 10; i++)
        total += prob[i] = exp((double)logits[i] / (double)p.temperature);
    for (int i = 0; i < 10; i++)
        prob[i] /= total;
    check_chi_square(logits, 10, p, prob);
    /* top_k 4 leaves tokens 2, 9, 3, 6 */
    double four[10] = {0}, part = prob[2] + prob[9] + prob[3] + prob[6];
    for (int i = 0; i < 4; i++)
        four[(int[]){2, 9, 3, 6}[i]] = prob[(int[]){2, 9, 3, 6}[i]] / part;
    p.top_k = 4;
    check_chi_square(logits, 10, p, four);
}

static void log_probabilities_are_of_the_unmodified_distribution(void **state) {
    (void)state;
    static float logits[MAX_VOCAB];
    static uint32_t ids[MAX_VOCAB];
    static double prob[MAX_VOCAB];
    for (int i = 0; i < 200; i++) {
        uint32_t n = 1 + next_u32() % MAX_VOCAB;
        random_logits(logits, n);
        struct td_sample_params p = {.temperature = 1, .top_p = 1},
                                q = {.temperature = (float)(next_u32() % 3),
                                     .top_p = 0.5f,
                                     .top_k = 7,
                                     .seed = next_u32(),
                                     .logprobs = true,
                                     .top_logprobs = next_u32() % (TD_SAMPLE_MAX_TOP + 1)};
        double margin, total = 0;
        define(logits, n, &p, ids, prob, &margin);
        for (uint32_t k = 0; k < n; k++)
            total += prob[k];
        struct td_sampled s = sample(logits, n, &q, 5), bare;
        double want = (double)(logits[s.token] - logits[ids[0]]) - log(total);
        assert_true(fabs((double)s.logprob - want) < 2e-6 * fmax(1, fabs(want)));
        assert_int_equal(s.n_top, q.top_logprobs < n ? q.top_logprobs : n);
        for (uint32_t k = 0; k < s.n_top; k++) {
            assert_int_equal(s.top[k].id, ids[k]);
            want = (double)(logits[ids[k]] - logits[ids[0]]) - log(total);
            if (isinf(want))
                assert_true((double)s.top[k].logprob == want);
            else
                assert_true(fabs((double)s.top[k].logprob - want) < 2e-6 * fmax(1, fabs(want)));
        }
        q.logprobs = false;
        q.top_logprobs = 0;
        bare = sample(logits, n, &q, 5);
        assert_int_equal(bare.token, s.token);
        assert_int_equal(bare.n_top, 0);
    }
}

static void depends_on_seed_and_position_alone(void **state) {
    (void)state;
    float logits[64];
    int other_seed = 0, other_position = 0;
    for (int i = 0; i < 64; i++)
        logits[i] = (float)(i % 7) * 0.1f;
    struct td_sample_params p = {.temperature = 1, .top_p = 1, .seed = 1}, q = p;
    q.seed = 1 + (1ull << 40);
    for (uint64_t pos = 0; pos < 500; pos++) {
        int t = sample(logits, 64, &p, pos).token;
        memset(work, 0xa5, sizeof work); /* whatever the workspace held */
        assert_int_equal(sample(logits, 64, &p, pos).token, t);
        other_seed += sample(logits, 64, &q, pos).token != t;
        other_position += sample(logits, 64, &p, pos + (1ull << 32)).token != t;
    }
    assert_true(other_seed > 400 && other_position > 400);
}

static void refuses_what_is_no_distribution(void **state) {
    (void)state;
    struct td_sampled s = {.token = -7};
    struct td_error err;
    struct td_sample_params p = {.temperature = 1, .top_p = 1};
    float logits[5] = {1, 2, NAN, 0, 1};
    for (int greedy = 0; greedy < 2; greedy++) {
        p.temperature = greedy ? 0 : 1;
        logits[2] = NAN;
        assert_int_equal(td_sample(logits, NULL, 5, &p, 0, work, &s, &err), TD_INTERNAL);
        assert_non_null(strstr(err.text, "nan at token 2"));
        logits[2] = INFINITY;
        assert_int_equal(td_sample(logits, NULL, 5, &p, 0, work, &s, &err), TD_INTERNAL);
        assert_non_null(strstr(err.text, "inf at token 2"));
    }
    for (int i = 0; i < 5; i++)
        logits[i] = -INFINITY;
    assert_int_equal(td_sample(logits, NULL, 5, &p, 0, work, &s, &err), TD_INTERNAL);
    assert_int_equal(s.token, -7); /* written on success only */
}

static void check_names_the_parameter(void **state) {
    (void)state;
    const struct td_sample_params good = {.temperature = 1, .top_p = 1};
    struct {
        struct td_sample_params p;
        const char *word;
    } bad[] = {
        {{.temperature = -1, .top_p = 1}, "temperature"},
        {{.temperature = NAN, .top_p = 1}, "temperature"},
        {{.temperature = INFINITY, .top_p = 1}, "temperature"},
        {{.temperature = 1, .top_p = 1.5f}, "top_p"},
        {{.temperature = 1, .top_p = NAN}, "top_p"},
        {{.temperature = 1, .top_p = 1, .min_p = -0.1f}, "min_p"},
        {{.temperature = 1, .top_p = 1, .logprobs = true, .top_logprobs = 21}, "top_logprobs"},
        {{.temperature = 1, .top_p = 1, .top_logprobs = 2}, "top_logprobs"},
    };
    struct td_error err;
    assert_int_equal(td_sample_params_check(&good, &err), TD_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(td_sample_params_check(&bad[i].p, &err), TD_INVALID);
        assert_non_null(strstr(err.text, bad[i].word));
    }
}

/* Known answers published with the generator. */
static void philox_known_answers(void **state) {
    (void)state;
    static const uint32_t kat[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t r[4];
        td_philox(kat[i], kat[i] + 4, r);
        assert_memory_equal(r, kat[i] + 6, sizeof r);
    }
}

int main(void) {
    const char *s = getenv("TANDEM_TEST_SEED");
    seed = s ? strtoull(s, NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu (set TANDEM_TEST_SEED to repeat)\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(edges_of_the_filters),
        cmocka_unit_test(agrees_with_the_definition),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(log_probabilities_are_of_the_unmodified_distribution),
        cmocka_unit_test(depends_on_seed_and_position_alone),
        cmocka_unit_test(refuses_what_is_no_distribution),
        cmocka_unit_test(check_names_the_parameter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

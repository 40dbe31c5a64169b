/* What shapes the choice of a token: bias, penalties, the end that may not come yet. Against the
 * definitions, over whole answers, and whatever way an answer was cut into attempts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "kernels/guide.h"
#include "kernels/sampler.h"
#include "kernels/shape.h"

enum { VOCAB = 97, EOS = 1, LENGTH = 40, PROMPT = 12 };

static uint64_t seed = 20;

static uint32_t next_u32(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static float next_logit(void) {
    return (float)((int32_t)(next_u32() % 2001) - 1000) / 128;
}

/* ---- one row ---- */

/* The sentences of shape.h, one id at a time. */
static float define(const struct td_shape *s, const float *logits, uint32_t id) {
    float l = logits[id];
    for (uint32_t i = 0; i < s->n_bias; i++)
        if ((uint32_t)s->bias_id[i] == id) l += s->bias[i];
    uint32_t in_answer = s->counts ? s->counts[id] & ~TD_COUNT_PROMPT : 0;
    bool anywhere = s->counts && s->counts[id] != 0;
    if (anywhere) l = l > 0 ? l / s->repetition : l * s->repetition;
    if (in_answer > 0) l = (l - s->frequency * (float)in_answer) - s->presence;
    if (s->mask && (s->mask[id / 32] & 1u << id % 32) == 0) l = -INFINITY;
    return id == (uint32_t)s->excluded ? -INFINITY : l;
}

static void test_shape(void **state) {
    (void)state;
    for (int round = 0; round < 300; round++) {
        float logits[VOCAB], got[VOCAB], bias[5];
        int32_t bias_id[5] = {0, VOCAB - 1, VOCAB, 1 << 30, 50}; /* two are no ids here */
        uint32_t counts[VOCAB], mask[(VOCAB + 31) / 32];
        for (uint32_t i = 0; i < VOCAB; i++) {
            logits[i] = next_u32() % 20 ? next_logit() : -INFINITY;
            counts[i] = next_u32() % 3 ? 0 : next_u32() % 4;
            if (next_u32() % 4 == 0) counts[i] |= TD_COUNT_PROMPT;
        }
        for (uint32_t i = 0; i < 5; i++)
            bias[i] = next_logit();
        for (uint32_t i = 0; i < sizeof mask / sizeof *mask; i++)
            mask[i] = next_u32();
        const struct td_shape s = {
            .n_bias = round & 1 ? 5 : 0,
            .bias_id = bias_id,
            .bias = bias,
            .counts = round & 2 ? counts : NULL,
            .frequency = next_logit() / 4,
            .presence = next_logit() / 4,
            .repetition = 0.5f + (float)(next_u32() % 100) / 50,
            .mask = round & 4 ? mask : NULL,
            .excluded = round & 8 ? (int32_t)(next_u32() % VOCAB) : -1,
        };
        td_shape_logits(logits, VOCAB, &s, got);
        for (uint32_t i = 0; i < VOCAB; i++)
            assert_true(got[i] == define(&s, logits, i));
        td_shape_logits(logits, VOCAB, &s, logits); /* in place */
        assert_memory_equal(logits, got, sizeof got);
    }
}

/* ---- whole answers ---- */

static struct td_samplers samplers;
static int32_t prompt_ids[3];                  /* what would be chosen at three positions */
static float rows[PROMPT + LENGTH + 1][VOCAB]; /* logits of each position */

static int setup(void **state) {
    (void)state;
    struct td_error err;
    for (uint32_t p = 0; p < PROMPT + LENGTH + 1; p++)
        for (uint32_t i = 0; i < VOCAB; i++)
            rows[p][i] = next_logit() / 16; /* close enough to each other for penalties to matter */
    for (uint32_t k = 0; k < 3; k++) {
        const float *row = rows[PROMPT + 7 * k];
        for (int32_t i = 0; i < VOCAB; i++)
            if (row[i] > row[prompt_ids[k]]) prompt_ids[k] = i;
    }
    const struct td_samplers_params p = {.slots = 3, .vocab = VOCAB, .eos = EOS};
    return td_samplers_init(&samplers, &p, &err);
}

static int teardown(void **state) {
    (void)state;
    td_samplers_finish(&samplers);
    return 0;
}

static int32_t draw(const struct td_sampling *s, uint32_t position, uint32_t slot, uint64_t owner,
                    int32_t fed) {
    const struct td_worker_sample sample = {s, position, 0, slot, owner, fed};
    struct td_token t;
    struct td_error err;
    td_samplers_follow(&samplers, &sample, 1);
    td_samplers_wait(&samplers);
    if (td_samplers_draw(&samplers, rows[position], &sample, &t, &err) != TD_OK)
        fail_msg("%s", err.text);
    return t.id;
}

/* An answer from position PROMPT on, of which `n` tokens are there: the rest of it. */
static void answer(const struct td_sampling *s, uint32_t slot, uint64_t owner, int32_t *tokens,
                   uint32_t n) {
    int32_t fed = -1;
    for (; n < LENGTH; n++) {
        tokens[n] = draw(s, PROMPT + n, slot, owner, fed);
        fed = tokens[n];
    }
}

/* By the definitions alone: all tokens so far are counted anew for each. */
static void expect_answer(const struct td_sampling *s, int32_t *tokens) {
    for (uint32_t n = 0; n < LENGTH; n++) {
        uint32_t counts[VOCAB] = {0}, best = 0;
        float l[VOCAB];
        for (uint32_t i = 0; s->guide && i < s->guide->n_prompt_ids; i++)
            counts[s->guide->prompt_id[i]] = TD_COUNT_PROMPT;
        for (uint32_t i = 0; i < n; i++)
            counts[tokens[i]]++;
        const struct td_shape shape = {
            .n_bias = s->guide ? s->guide->n_bias : 0,
            .bias_id = s->guide ? s->guide->bias_id : NULL,
            .bias = s->guide ? s->guide->bias : NULL,
            .counts = counts,
            .frequency = s->frequency_penalty,
            .presence = s->presence_penalty,
            .repetition = s->repetition_penalty != 0 ? s->repetition_penalty : 1,
            .excluded = PROMPT + n < s->end_from ? EOS : -1,
        };
        for (uint32_t i = 0; i < VOCAB; i++) {
            l[i] = define(&shape, rows[PROMPT + n], i);
            if (l[i] > l[best]) best = i;
        }
        tokens[n] = (int32_t)best;
    }
}

static const int32_t biased[2] = {7, EOS};
static const float biases[2] = {0.2f, 0.3f};
static const struct td_guide guide = {
    .n_bias = 2, .bias_id = biased, .bias = biases, .n_prompt_ids = 3, .prompt_id = prompt_ids};
static const float early[2] = {0, 50};
static const struct td_guide end = {.n_bias = 2, .bias_id = biased, .bias = early};
static const struct td_sampling wishes[] = {
    {.top_p = 1, .frequency_penalty = 0.05f},
    {.top_p = 1, .presence_penalty = -0.4f},
    {.top_p = 1, .repetition_penalty = 1.3f, .guide = &guide},
    {.top_p = 1, .frequency_penalty = -0.7f, .presence_penalty = 0.3f, .guide = &guide},
    {.top_p = 1, .guide = &end, .end_from = PROMPT + 11},
    {.top_p = 1, .end_from = PROMPT + 1000, .repetition_penalty = 0.8f},
};
enum { WISHES = sizeof wishes / sizeof *wishes };

static void test_answers(void **state) {
    (void)state;
    int32_t plain[LENGTH];
    const struct td_sampling greedy = {.top_p = 1};
    answer(&greedy, 0, 1, plain, 0);
    uint64_t owner = 2;
    for (uint32_t w = 0; w < WISHES; w++) {
        int32_t expected[LENGTH], got[LENGTH], beside[LENGTH];
        expect_answer(&wishes[w], expected);
        answer(&wishes[w], w % 3, owner++, got, 0);
        assert_memory_equal(got, expected, sizeof got);
        if (memcmp(got, plain, sizeof got) == 0) fail_msg("wish %u changes nothing", w);
        /* the same place for another sequence, and two side by side */
        const struct td_sampling *other = &wishes[(w + 1) % WISHES];
        int32_t a = -1, b = -1;
        for (uint32_t n = 0; n < LENGTH; n++) {
            a = got[n] = draw(&wishes[w], PROMPT + n, w % 3, owner, a);
            b = beside[n] = draw(other, PROMPT + n, (w + 1) % 3, owner + 1, b);
        }
        owner += 2;
        assert_memory_equal(got, expected, sizeof got);
        expect_answer(other, expected);
        assert_memory_equal(beside, expected, sizeof got);
    }
    int32_t last[LENGTH];
    answer(&wishes[4], 0, owner, last, 0);
    for (uint32_t n = 0; n < LENGTH; n++)
        assert_true((last[n] == EOS) == (n >= 11));
}

/* Whoever goes on with an answer is told its tokens, and gives the same ones from there. Token 0 is
 * another worker's: the next sampling is the first one here, and its run fed a token. */
static void test_attempts(void **state) {
    (void)state;
    uint64_t owner = 1000;
    for (uint32_t w = 0; w < WISHES; w++) {
        int32_t expected[LENGTH], got[LENGTH];
        answer(&wishes[w], 0, owner++, expected, 0);
        for (uint32_t cut = 0; cut < LENGTH; cut++) {
            struct td_sampling again = wishes[w];
            again.n_said = cut;
            again.said = cut ? expected : NULL;
            memcpy(got, expected, sizeof got);
            answer(&again, 1, owner++, got, cut);
            assert_memory_equal(got, expected, sizeof got);
            if (cut + 1 == LENGTH) continue;
            memcpy(got, expected, sizeof got);
            got[cut + 1] = draw(&again, PROMPT + cut + 1, 2, owner++, expected[cut]);
            assert_int_equal(got[cut + 1], expected[cut + 1]);
        }
    }
}

/* Choices of a prompt draw their first token in one place, one after the other. */
static void test_choices(void **state) {
    (void)state;
    struct td_sampling s = wishes[2];
    s.temperature = 1;
    int32_t first[8];
    for (uint32_t again = 0; again < 2; again++)
        for (uint32_t c = 0; c < 8; c++) {
            s.seed = td_choice_seed(7, c);
            int32_t id = draw(&s, PROMPT, 0, again ? 3000 + c : 2000, -1);
            if (again) assert_int_equal(id, first[c]);
            first[c] = id;
        }
}

/* Logprobs are the model's, whatever shapes the choice. */
static void test_logprobs(void **state) {
    (void)state;
    struct td_sampling s = {.top_p = 1, .logprobs = true, .top_logprobs = 3};
    struct td_token plain, shaped;
    struct td_error err;
    struct td_worker_sample sample = {&s, PROMPT, 0, 0, 1, -1};
    assert_int_equal(td_samplers_draw(&samplers, rows[PROMPT], &sample, &plain, &err), TD_OK);
    const int32_t id[1] = {plain.id};
    const float bias[1] = {-100};
    const struct td_guide away = {.n_bias = 1, .bias_id = id, .bias = bias};
    s.guide = &away;
    assert_int_equal(td_samplers_draw(&samplers, rows[PROMPT], &sample, &shaped, &err), TD_OK);
    assert_int_equal(shaped.id, plain.top[1].id);
    assert_true(shaped.logprob == plain.top[1].logprob);
    assert_memory_equal(shaped.top, plain.top, 3 * sizeof *plain.top);
}

/* A step's samples by several threads: the tokens that one would draw, each error its own sample's.
 */
static void test_threads(void **state) {
    (void)state;
    enum { N = 60, THREADS = 4, BAD = 17 };
    const struct td_samplers_params p = {
        .slots = 3, .vocab = VOCAB, .eos = EOS, .threads = THREADS};
    struct td_samplers many;
    struct td_sampling s[N];
    struct td_worker_sample sample[N];
    struct td_token alone, together[N];
    struct td_error err, failed[N];
    const int32_t id[1] = {5};
    const float bias[1] = {2};
    const struct td_guide g = {.n_bias = 1, .bias_id = id, .bias = bias};
    assert_int_equal(td_samplers_init(&many, &p, &err), TD_OK);
    for (uint32_t i = 0; i < N; i++) {
        s[i] = (struct td_sampling){.temperature = i % 3 ? 1 : 0,
                                    .top_p = i % 2 ? 0.8f : 1,
                                    .seed = i,
                                    .guide = i % 5 ? NULL : &g,
                                    .logprobs = i % 7 == 0};
        if (i == BAD) s[i].top_p = 2;
        sample[i] = (struct td_worker_sample){&s[i], i, i % (PROMPT + LENGTH), 0, 0, -1};
    }
    for (int again = 0; again < 20; again++) {
        memset(together, 0, sizeof together);
        td_samplers_draw_all(&many, rows[0], sample, N, together, failed);
        for (uint32_t i = 0; i < N; i++) {
            memset(&alone, 0, sizeof alone);
            td_status st =
                td_samplers_draw(&samplers, rows[sample[i].row], &sample[i], &alone, &err);
            assert_int_equal(st, i == BAD ? TD_INVALID : TD_OK);
            assert_int_equal(failed[i].status, st);
            if (st == TD_OK) assert_memory_equal(&alone, &together[i], sizeof alone);
        }
    }
    td_samplers_finish(&many);
}

static void test_copies(void **state) {
    (void)state;
    struct td_error err;
    uint8_t grammar[] = {1, 2, 3, 4, 5};
    int32_t said[3] = {9, 8, 7}, id[2] = {1, 2};
    float bias[2] = {0.5f, -1};
    struct td_guide g = {.n_bias = 2,
                         .bias_id = id,
                         .bias = bias,
                         .n_prompt_ids = 3,
                         .prompt_id = prompt_ids,
                         .grammar_n = 5,
                         .grammar = grammar};
    struct td_sampling s = {.guide = &g, .n_said = 3, .said = said}, none = {.top_p = 1};
    assert_int_equal(td_guide_take(&s, &err), TD_OK);
    memset(said, 0, sizeof said);
    memset(id, 0, sizeof id);
    memset(bias, 0, sizeof bias);
    memset(grammar, 0, sizeof grammar);
    memset(&g, 0, sizeof g);
    assert_true(s.said[0] == 9 && s.said[2] == 7 && s.n_said == 3);
    assert_true(s.guide->bias_id[1] == 2 && s.guide->bias[1] == -1 && s.guide->n_bias == 2);
    assert_memory_equal(s.guide->prompt_id, prompt_ids, sizeof prompt_ids);
    assert_memory_equal(s.guide->grammar, ((const uint8_t[]){1, 2, 3, 4, 5}), 5);
    assert_int_equal((uintptr_t)s.guide->grammar % 4, 0);
    td_guide_give(s.guide);
    s = (struct td_sampling){.n_said = 3, .said = prompt_ids}; /* alone */
    assert_int_equal(td_guide_take(&s, &err), TD_OK);
    assert_non_null(s.guide);
    assert_memory_equal(s.said, prompt_ids, sizeof prompt_ids);
    td_guide_give(s.guide);
    assert_int_equal(td_guide_take(&none, &err), TD_OK);
    assert_null(none.guide);
    td_guide_give(none.guide);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shape),    cmocka_unit_test(test_answers),
        cmocka_unit_test(test_attempts), cmocka_unit_test(test_choices),
        cmocka_unit_test(test_logprobs), cmocka_unit_test(test_threads),
        cmocka_unit_test(test_copies),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

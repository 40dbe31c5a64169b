/* Answers under a grammar, drawn from random logits: what comes is what the grammar allows, it ends
 * where the grammar may end, whatever way it is cut into attempts and whatever is drawn beside it;
 * and what goes wrong with a grammar is its own sequence's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>

#include "common/text/chat.h"
#include "common/text/grammar.h"
#include "kernels/sampler.h"

enum { LENGTH = 120, PROMPT = 5, SLOTS = 3, ANSWERS = 40 };

static struct td_tokenizer *tokenizer;
static struct td_chat chat;
static struct td_samplers samplers;
static struct td_bytes object, answered;
static uint32_t vocab;
static float *row; /* of one position */
static struct td_guide guide;

/* The same logits for a position of an answer, however often and by whom they are asked for. A few
 * letters are made likely, or strings would be what nobody has seen. */
static const float *logits_of(uint64_t answer, uint32_t position) {
    uint64_t x = answer * 1000003 + position;
    for (uint32_t i = 0; i < vocab; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        row[i] = (float)((int32_t)(x >> 40 & 2047) - 1024) / 128;
        size_t n;
        const char *text = td_tokenizer_bytes(tokenizer, (int32_t)i, &n);
        if (n == 1 && strchr("\"{}[]:,", text[0])) row[i] += 5;
    }
    return row;
}

static int setup(void **state) {
    (void)state;
    struct td_error err;
    if (td_tokenizer_load(TD_TEST_MODEL, &tokenizer, &err) != TD_OK) fail_msg("%s", err.text);
    td_chat_init(&chat, tokenizer);
    vocab = (uint32_t)td_tokenizer_size(tokenizer) + 40; /* rows that name nothing */
    row = calloc(vocab, sizeof *row);
    const struct td_grammar_spec spec = {.content = TD_CONTENT_OBJECT,
                                         .dsml_token = chat.dsml >= 0};
    if (td_grammar_compile(&spec, &object, &err) != TD_OK) fail_msg("%s", err.text);
    guide =
        (struct td_guide){.grammar_n = (uint32_t)object.n, .grammar = (const uint8_t *)object.p};
    const struct td_samplers_params p = {.slots = SLOTS,
                                         .vocab = vocab,
                                         .eos = chat.eos,
                                         .tokenizer = tokenizer,
                                         .mask_bytes = 1 << 20};
    if (td_samplers_init(&samplers, &p, &err) != TD_OK) fail_msg("%s", err.text);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    td_samplers_finish(&samplers);
    td_tokenizer_destroy(tokenizer);
    td_bytes_free(&object);
    td_bytes_free(&answered);
    free(row);
    return 0;
}

static td_status draw(const struct td_worker_sample *p, const float *logits, int32_t *ret,
                      struct td_error *err) {
    struct td_token t;
    td_samplers_follow(&samplers, p, 1);
    td_samplers_wait(&samplers);
    td_status st = td_samplers_draw(&samplers, logits, p, &t, err);
    *ret = st == TD_OK ? t.id : -1;
    return st;
}

static int32_t must_draw(const struct td_sampling *s, uint64_t answer, uint32_t at, uint32_t slot,
                         uint64_t owner, int32_t fed) {
    const struct td_worker_sample p = {s, PROMPT + at, 0, slot, owner, fed};
    struct td_error err;
    int32_t id;
    if (draw(&p, logits_of(answer, at), &id, &err) != TD_OK) fail_msg("%s", err.text);
    return id;
}

/* Draws from token `n` on, up to the end; returns the length. */
static uint32_t answer(const struct td_sampling *s, uint64_t seed, uint32_t slot, uint64_t owner,
                       int32_t *ids, uint32_t n) {
    for (int32_t fed = -1; n < LENGTH; n++) {
        fed = ids[n] = must_draw(s, seed, n, slot, owner, fed);
        if (fed == chat.eos) return n + 1;
    }
    return n;
}

static struct td_sampling wish(uint64_t seed) {
    return (struct td_sampling){.top_p = seed % 3 ? 1 : 0.9f,
                                .temperature = seed % 4 ? 1 : 0,
                                .seed = seed,
                                .guide = &guide};
}

static void check_json(const int32_t *ids, uint32_t n) {
    answered.n = 0;
    for (uint32_t i = 0; i + 1 < n; i++) {
        size_t len;
        const char *text = td_tokenizer_bytes(tokenizer, ids[i], &len);
        assert_false(td_tokenizer_is_special(tokenizer, ids[i]));
        td_bytes_add(&answered, text, len);
    }
    json_error_t why;
    json_t *v = json_loadb(answered.p, answered.n, JSON_ALLOW_NUL, &why);
    if (!json_is_object(v)) fail_msg("%.*s: %s", (int)answered.n, answered.p, why.text);
    json_decref(v);
}

static void test_answers(void **state) {
    (void)state;
    uint32_t ended = 0, members = 0;
    for (uint64_t a = 1; a <= ANSWERS; a++) {
        const struct td_sampling s = wish(a);
        int32_t ids[LENGTH];
        uint32_t n = answer(&s, a, a % SLOTS, a, ids, 0);
        if (ids[n - 1] != chat.eos) continue;
        check_json(ids, n);
        ended++;
        members += n > 4;
    }
    print_message("%u of %d ended, %u with members\n", ended, ANSWERS, members);
    assert_true(ended > ANSWERS / 4 && members > 3);
}

/* Cut anywhere; by the worker that begins anew, and by the one that was handed token 0. */
static void test_attempts(void **state) {
    (void)state;
    uint64_t owner = 1000;
    for (uint64_t a = 1; a <= 6; a++) {
        const struct td_sampling s = wish(a);
        int32_t want[LENGTH], got[LENGTH];
        uint32_t n = answer(&s, a, 0, owner++, want, 0);
        for (uint32_t cut = 0; cut < n; cut += 1 + cut / 8) {
            struct td_sampling again = s;
            again.n_said = cut;
            again.said = want;
            memcpy(got, want, sizeof got);
            assert_int_equal(answer(&again, a, 1, owner++, got, cut), n);
            assert_memory_equal(got, want, n * sizeof *want);
            if (cut + 1 < n)
                assert_int_equal(must_draw(&again, a, cut + 1, 2, owner++, want[cut]),
                                 want[cut + 1]);
        }
    }
}

/* Steps of three sequences, one of them without a grammar: each as alone. */
static void test_mixed_step(void **state) {
    (void)state;
    struct td_sampling s[SLOTS] = {wish(1), wish(7), wish(5)};
    int32_t want[SLOTS][LENGTH], fed[SLOTS] = {-1, -1, -1};
    uint32_t length[SLOTS];
    s[1].guide = NULL;
    for (uint32_t k = 0; k < SLOTS; k++)
        length[k] = answer(&s[k], k + 1, k, 2000 + k, want[k], 0);
    for (uint32_t n = 0; n < LENGTH; n++) {
        struct td_worker_sample p[SLOTS];
        uint32_t of[SLOTS], m = 0;
        for (uint32_t k = 0; k < SLOTS; k++)
            if (n < length[k]) {
                of[m] = k;
                p[m++] = (struct td_worker_sample){&s[k], PROMPT + n, 0, k, 3000 + k, fed[k]};
            }
        td_samplers_follow(&samplers, p, m);
        td_samplers_wait(&samplers);
        for (uint32_t i = 0; i < m; i++) {
            struct td_token t;
            struct td_error err;
            uint32_t k = of[i];
            if (td_samplers_draw(&samplers, logits_of(k + 1, n), &p[i], &t, &err) != TD_OK)
                fail_msg("%s", err.text);
            assert_int_equal(t.id, want[k][n]);
            fed[k] = t.id;
        }
    }
}

/* The end may be long wanted, and comes when it may; a form that is complete ends before
 * min_tokens. */
static void test_ends(void **state) {
    (void)state;
    struct td_sampling s = wish(4); /* greedy */
    const int32_t id[1] = {chat.eos};
    const float bias[1] = {100};
    struct td_guide eager = guide;
    eager.n_bias = 1;
    eager.bias_id = id;
    eager.bias = bias;
    s.guide = &eager;
    int32_t ids[LENGTH];
    uint32_t n = answer(&s, 4, 0, 4000, ids, 0);
    assert_int_equal(ids[n - 1], chat.eos);
    check_json(ids, n);
    s.end_from = PROMPT + LENGTH;
    n = answer(&s, 4, 0, 4001, ids, 0);
    if (ids[n - 1] == chat.eos) check_json(ids, n);
}

static void expect_error(const struct td_worker_sample *p, const float *logits, td_status want,
                         const char *word) {
    struct td_error err;
    int32_t id;
    assert_int_equal(draw(p, logits, &id, &err), want);
    if (!strstr(err.text, word)) fail_msg("'%s' says nothing of '%s'", err.text, word);
    /* and the next sequence there is fine */
    const struct td_sampling s = wish(1);
    must_draw(&s, 1, 0, p->slot, 1u << 20, -1);
}

static void test_faults(void **state) {
    (void)state;
    struct td_sampling s = wish(3);
    const int32_t wrong[2] = {chat.eos, chat.eos};
    uint32_t junk[4] = {1, 2, 3, 4};
    struct td_guide bad = {.grammar_n = sizeof junk, .grammar = (const uint8_t *)junk};
    struct td_worker_sample p = {&s, PROMPT, 0, 1, 5000, -1};
    /* nothing that the grammar allows has a chance */
    for (uint32_t i = 0; i < vocab; i++)
        row[i] = -INFINITY;
    row[chat.eos] = 3;
    expect_error(&p, row, TD_INVALID, "finite");
    /* tokens that are not the grammar's */
    s.said = wrong;
    s.n_said = 1;
    p.owner++;
    expect_error(&p, logits_of(1, 0), TD_CORRUPT, "grammar");
    s.said = NULL;
    s.n_said = 0;
    p.owner++;
    p.fed = chat.eos;
    expect_error(&p, logits_of(1, 0), TD_CORRUPT, "grammar");
    /* nothing comes behind the end */
    int32_t whole[LENGTH];
    s.said = whole;
    for (uint64_t a = 1; s.n_said == 0 || whole[s.n_said - 1] != chat.eos; a++) {
        const struct td_sampling first = wish(a);
        s.n_said = answer(&first, a, 0, 5100 + a, whole, 0);
    }
    p.fed = -1;
    p.owner++;
    expect_error(&p, logits_of(1, 0), TD_INVALID, "no token");
    s.said = NULL;
    s.n_said = 0;
    s.guide = &bad;
    p.owner++;
    expect_error(&p, logits_of(1, 0), TD_CORRUPT, "grammar");
}

/* Many more grammars than are kept, one after the other in one place. */
static void test_many_grammars(void **state) {
    (void)state;
    struct td_error err;
    for (uint64_t i = 0; i < 80; i++) {
        char pattern[16];
        struct td_bytes bytes = {0};
        snprintf(pattern, sizeof pattern, "a%u", (unsigned)i);
        const struct td_grammar_spec spec = {
            .content = TD_CONTENT_REGEX, .text = pattern, .n = strlen(pattern)};
        if (td_grammar_compile(&spec, &bytes, &err) != TD_OK) fail_msg("%s", err.text);
        const struct td_guide g = {.grammar_n = (uint32_t)bytes.n,
                                   .grammar = (const uint8_t *)bytes.p};
        const struct td_sampling s = {.top_p = 1, .guide = &g};
        size_t n;
        const char *text = td_tokenizer_bytes(tokenizer, must_draw(&s, 1, 0, 0, 6000 + i, -1), &n);
        assert_true(n > 0 && memcmp(text, pattern, n) == 0);
        td_bytes_free(&bytes);
    }
}

/* A folder without a tokenizer. */
static void test_no_store(void **state) {
    (void)state;
    struct td_samplers bare;
    struct td_error err;
    const struct td_samplers_params q = {.slots = 1, .vocab = vocab, .eos = chat.eos};
    const struct td_sampling s = wish(1), plain = {.top_p = 1};
    struct td_worker_sample p = {&s, PROMPT, 0, 0, 1, -1};
    struct td_token t;
    assert_int_equal(td_samplers_init(&bare, &q, &err), TD_OK);
    td_samplers_follow(&bare, &p, 1);
    td_samplers_wait(&bare);
    assert_int_equal(td_samplers_draw(&bare, logits_of(1, 0), &p, &t, &err), TD_UNSUPPORTED);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    p.sampling = &plain;
    td_samplers_follow(&bare, &p, 1);
    td_samplers_wait(&bare);
    assert_int_equal(td_samplers_draw(&bare, logits_of(1, 0), &p, &t, &err), TD_OK);
    td_samplers_finish(&bare);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers),       cmocka_unit_test(test_attempts),
        cmocka_unit_test(test_mixed_step),    cmocka_unit_test(test_ends),
        cmocka_unit_test(test_faults),        cmocka_unit_test(test_no_store),
        cmocka_unit_test(test_many_grammars),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

/* What goes wrong in one sequence of a step stays in it. */
#include "kernels/worker_engine.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/kernels/engine_fixture.h"

enum { PROMPT = 150, SEQS = 3, POISONED = 1 };

static void open_engine(struct td_worker_engine *w) {
    struct td_config c;
    struct td_error err;
    td_config_defaults(&c);
    snprintf(c.model_dir, sizeof c.model_dir, "%s", TD_TEST_MODEL);
    c.max_context = 1024;
    c.pool_pages = SEQS;
    c.max_running = SEQS;
    c.threads = 2;
    if (td_worker_engine_open(w, &c, NULL, &err) != TD_OK) fail_msg("%s", err.text);
}

/* A step of one run per sequence: the prompt, or the token sampled before. */
static void step(struct td_worker_engine *w, const int32_t *prompt, struct td_token *tokens,
                 struct td_error *failed) {
    static const struct td_sampling greedy = {.top_p = 1};
    static const uint32_t page[SEQS] = {0, 1, 2};
    struct td_worker_sample sample[SEQS];
    struct td_run run[SEQS];
    struct td_error err;
    for (uint32_t i = 0; i < SEQS; i++) {
        uint32_t at = prompt ? 0 : PROMPT;
        run[i] = (struct td_run){.slot = i,
                                 .pos = at,
                                 .n = prompt ? PROMPT : 1,
                                 .ids = prompt ? prompt + i * PROMPT : &tokens[i].id,
                                 .pages = &page[i],
                                 .want_logits = true};
        sample[i] = (struct td_worker_sample){&greedy, at + run[i].n, i};
    }
    struct td_token next[SEQS];
    memset(next, 0, sizeof next);
    if (td_worker_engine_step(w, run, SEQS, sample, SEQS, next, NULL, failed, &err) != TD_OK)
        fail_msg("%s", err.text);
    memcpy(tokens, next, sizeof next);
}

static void test_nan_in_one_sequence(void **state) {
    (void)state;
    int32_t *prompt = td_test_ids(SEQS * PROMPT);
    struct td_token sound[SEQS], tokens[SEQS];
    struct td_error failed[SEQS];
    for (int poisoned = 0; poisoned < 2; poisoned++) {
        struct td_worker_engine w;
        open_engine(&w);
        step(&w, prompt, tokens, failed);
        for (uint32_t i = 0; i < SEQS; i++)
            assert_int_equal(failed[i].status, TD_OK);
        /* All bits set is a NaN in every stored type. */
        if (poisoned) memset(td_engine_slot(w.engine, POISONED), 0xff, w.layout->slot_bytes);
        step(&w, NULL, tokens, failed);
        for (uint32_t i = 0; i < SEQS; i++) {
            if (!poisoned) {
                assert_int_equal(failed[i].status, TD_OK);
                sound[i] = tokens[i];
            } else if (i == POISONED) {
                assert_int_equal(failed[i].status, TD_INTERNAL);
                assert_non_null(strstr(failed[i].text, "logits: expected numbers, found"));
            } else {
                assert_int_equal(failed[i].status, TD_OK);
                assert_int_equal(tokens[i].id, sound[i].id);
            }
        }
        td_worker_engine_close(&w);
    }
    free(prompt);
}

/* ---- selections ---- */

enum { LONG = 301, DECODED = 3 }; /* past 4 * 64 tokens not all entries are selected */

/* What the second engine's own record says of one row. */
static void same_selection(const struct td_selection *s, const struct td_capture *c, uint32_t row,
                           uint32_t position) {
    static const uint32_t csa[] = {2, 4, 5};
    uint32_t visible = (position + 1) / 4, at = 0;
    assert_int_equal(s->n_layers, 3);
    for (uint32_t l = 0; l < 3; l++) {
        const int32_t *want = c->entries + ((size_t)row * 3 + l) * c->topk;
        assert_int_equal(s->layer[l], csa[l]);
        assert_int_equal(s->count[l], visible < c->topk ? visible : c->topk);
        for (uint32_t i = 0; i < s->count[l]; i++, at++) {
            assert_int_equal(s->entry[at], want[i]);
            assert_true(s->entry[at] < visible && (i == 0 || want[i - 1] < want[i]));
        }
    }
    assert_int_equal(s->n_entries, at);
}

/* Sequence 1 does not ask; 0 and 2 do, of which 2 has two choices at first. */
static void test_selections(void **state) {
    (void)state;
    static const struct td_sampling asks = {.top_p = 1, .selections = true}, silent = {.top_p = 1};
    static const uint32_t length[SEQS] = {LONG, 40, 257}, pages[SEQS][2] = {{0, 1}, {2}, {3, 4}};
    int32_t *ids = td_test_ids(LONG + DECODED);
    struct td_worker_engine w;
    struct td_config config;
    struct td_error err, failed[4];
    struct td_engine *other = NULL;
    td_config_defaults(&config);
    snprintf(config.model_dir, sizeof config.model_dir, "%s", TD_TEST_MODEL);
    config.max_context = 1024;
    config.pool_pages = 5;
    config.max_running = SEQS;
    config.chunk_tokens = 1024;
    config.threads = 2;
    if (td_worker_engine_open(&w, &config, NULL, &err) != TD_OK) fail_msg("%s", err.text);
    if (td_engine_create(w.model, &w.options, &other, &err) != TD_OK) fail_msg("%s", err.text);
    int32_t *entries = td_test_bytes(SEQS * 3 * 64 * sizeof *entries);
    struct td_capture capture = {.runs = SEQS, .csa_layers = 3, .topk = 64, .entries = entries};
    const struct td_selection *before = NULL;
    struct td_selection kept = {0};
    uint32_t kept_entry[3 * 64];
    for (uint32_t step = 0; step <= DECODED; step++) {
        struct td_run run[SEQS];
        struct td_worker_sample sample[4];
        struct td_token tokens[4];
        const struct td_selection *got = &kept;
        for (uint32_t i = 0; i < SEQS; i++) {
            uint32_t at = step ? length[i] + step - 1 : 0, n = step ? 1 : length[i];
            run[i] = (struct td_run){i, at, n, ids + at, pages[i], true};
            sample[i] = (struct td_worker_sample){i == 1 ? &silent : &asks, at + n, i};
        }
        sample[3] = sample[2];
        if (td_worker_engine_step(&w, run, SEQS, sample, step ? 3 : 4, tokens, &got, failed, &err))
            fail_msg("%s", err.text);
        if (td_engine_step(other, run, SEQS, NULL, &capture, &err) != TD_OK)
            fail_msg("%s", err.text);
        same_selection(&got[0], &capture, 0, length[0] + step - 1);
        same_selection(&got[2], &capture, 2, length[2] + step - 1);
        if (step == 0) same_selection(&got[3], &capture, 2, length[2] - 1);
        /* the last step's are still there */
        if (before) {
            assert_int_equal(before[0].n_entries, kept.n_entries);
            assert_memory_equal(before[0].entry, kept_entry, kept.n_entries * sizeof *kept_entry);
        }
        before = got;
        kept = got[0];
        memcpy(kept_entry, kept.entry, kept.n_entries * sizeof *kept_entry);
        /* nobody asks */
        if (step < DECODED) continue;
        for (uint32_t i = 0; i < SEQS; i++) {
            run[i].pos++;
            sample[i].sampling = &silent;
        }
        if (td_worker_engine_step(&w, run, SEQS, sample, SEQS, tokens, &got, failed, &err))
            fail_msg("%s", err.text);
        assert_null(got);
    }
    char text[1024];
    td_worker_engine_memory_text(&w, 0, text, sizeof text);
    assert_non_null(strstr(text, "selections"));
    free(entries);
    free(ids);
    td_engine_destroy(other);
    td_worker_engine_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nan_in_one_sequence),
                                       cmocka_unit_test(test_selections)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

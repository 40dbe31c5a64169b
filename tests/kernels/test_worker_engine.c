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
        sample[i] = (struct td_worker_sample){&greedy, at + run[i].n};
    }
    struct td_token next[SEQS];
    memset(next, 0, sizeof next);
    if (td_worker_engine_step(w, run, SEQS, sample, SEQS, next, failed, &err) != TD_OK)
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
                assert_int_equal(failed[i].status, TD_CORRUPT);
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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nan_in_one_sequence)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Requests that go on after a worker let them go: preempted ones, and whole answers whose worker
 * died. */
#include "tests/router/flow_harness.h"

/* Tokens 10, 11, ... by their number in the answer, so that a token's place can be told. */
static const char *numbered(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t index,
                            uint32_t n, uint32_t number) {
    struct td_token t[16];
    memset(t, 0, sizeof t);
    for (uint32_t i = 0; i < n; i++)
        t[i].id = (int32_t)(10 + number + i);
    return from(epoch,
                (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{r, attempt}, index, n, t}});
}

static void test_preempted_goes_on_where_it_was(void **state) {
    (void)state;
    under_way();
    uint64_t hash = last_admit.prompt_hash;
    numbered(P, 1, 1, 0, 1, 0);
    released(P, 1, 1);
    numbered(D, 1, 1, 1, 2, 1);
    after(30);
    assert_string_equal(failed(D, 1, 1, TD_PREEMPTED), "3 ADMIT 1.2\n");
    after(4);
    assert_int_equal(last_admit.n_prompt, 11);
    assert_int_equal(last_admit.max_new, 7);
    assert_int_not_equal(last_admit.prompt_hash, hash);
    const int32_t answer[3] = {10, 11, 12};
    assert_memory_equal(prompt + 8, answer, sizeof answer);
    assert_string_equal(numbered(D, 1, 1, 3, 1, 3), ""); /* late, of the old attempt */
    released(D, 1, 1);
    assert_string_equal(admitted(D, 1, 2), "1 PREFILL 1.2\n");
    after(5);
    assert_string_equal(numbered(D, 1, 2, 1, 1, 4), ""); /* overtakes token 3 */
    assert_string_equal(numbered(P, 1, 2, 0, 1, 3), "GIVE 1 #3+1\nGIVE 1 #4+1\n");
    assert_string_equal(numbered(P, 1, 2, 0, 1, 3), ""); /* a double */
    assert_string_equal(numbered(D, 1, 2, 1, 6, 4), "GIVE 1 #5+5\n");
    assert_int_equal(last_id, 19);
    after(6);
    assert_string_equal(finished(D, 1, 2, 7), "END 1 length 10\n");
    assert_string_equal(phases(), "queue 4 prefill 5 transfer 0 decode 36");
    assert_int_equal(counts().preempted, 1);
    assert_int_equal(counts().retries, 0);
}

/* Who counts tokens is told those that stand at the prompt's end; who does not, is not. */
static void test_preempted_says_what_was_said(void **state) {
    (void)state;
    static const struct td_guide guide;
    const struct td_sampling wishes[] = {{.frequency_penalty = 1},
                                         {.presence_penalty = -1},
                                         {.repetition_penalty = 2},
                                         {.guide = &guide},
                                         {.seed = 4}};
    for (uint64_t r = 1; r <= 5; r++) {
        char admit[32];
        snprintf(admit, sizeof admit, "3 ADMIT %llu.1\n", (unsigned long long)r);
        const char *got = step((struct td_flow_event){.kind = TD_FLOW_SUBMIT,
                                                      .submit = {.request = r,
                                                                 .ids = prompt,
                                                                 .n_prompt = 8,
                                                                 .max_new = 10,
                                                                 .sampling = wishes[r - 1]}});
        assert_string_equal(got, admit);
        admitted(D, r, 1);
        assert_int_equal(last_admit.sampling.n_said, 0);
        numbered(P, r, 1, 0, 1, 0);
        released(P, r, 1);
        numbered(D, r, 1, 1, 2, 1);
        failed(D, r, 1, TD_PREEMPTED);
        const int32_t answer[3] = {10, 11, 12};
        assert_int_equal(last_admit.sampling.n_said, r < 5 ? 3 : 0);
        if (r < 5) assert_memory_equal(last_admit.sampling.said, answer, sizeof answer);
        released(D, r, 1);
        admitted(D, r, 2);
        assert_int_equal(last_prefill.sampling.n_said, r < 5 ? 3 : 0);
        if (r < 5) assert_memory_equal(last_prefill.sampling.said, answer, sizeof answer);
        numbered(P, r, 2, 0, 1, 3);
        finished(P, r, 2, 1);
        released(P, r, 2);
        released(D, r, 2);
    }
}

static void test_preempted_however_often(void **state) {
    (void)state;
    under_way();
    for (uint32_t attempt = 1; attempt <= 9; attempt++) {
        tokens(P, 1, attempt, 0, 1);
        released(P, 1, attempt);
        assert_non_null(strstr(failed(D, 1, attempt, TD_PREEMPTED), " ADMIT 1."));
        assert_int_equal(last_admit.max_new, 10 - attempt);
        released(D, 1, attempt);
        admitted(D, 1, attempt + 1);
    }
    assert_string_equal(tokens(P, 1, 10, 0, 1), "GIVE 1 #9+1\n");
    assert_string_equal(finished(P, 1, 10, 1), "END 1 length 10\n3 CANCEL 1.10\n");
}

static void test_preempted_for_nothing(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    uint32_t attempt = 1;
    for (; strstr(failed(D, 1, attempt, TD_PREEMPTED), "FAIL") == NULL; attempt++) {
        released(D, 1, attempt);
        admitted(D, 1, attempt + 1);
        released(P, 1, attempt);
        assert_in_range(attempt, 1, 100);
    }
    assert_int_equal(attempt, 1 + TD_FLOW_FRUITLESS_MAX); /* the first gave a token */
}

static void test_preempted_waits_while_others_run(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    failed(D, 1, 1, TD_PREEMPTED);
    assert_string_equal(busy(D, 1, 2), "");
    for (uint32_t attempt = 3; attempt < 43; attempt++) { /* 2,000 ms; the queue's clock is 1,000 */
        char again[32];
        snprintf(again, sizeof again, "3 ADMIT 1.%u\n", attempt);
        assert_string_equal(after(50), again);
        busy(D, 1, attempt);
    }
    assert_int_equal(counts().failed, 0);
    down(D);
    assert_string_equal(after(2000), "FAIL 1 UNREACHABLE retry\n"); /* nobody is left to wait for */
}

/* Workers that do not let go take no more than the table has room for, and hold up nobody else. */
static void test_preempted_waits_for_its_old_legs(void **state) {
    (void)state;
    under_way();
    uint32_t attempt = 1;
    for (; attempt < 20; attempt++) {
        tokens(P, 1, attempt, 0, 1);
        if (strstr(failed(D, 1, attempt, TD_PREEMPTED), "ADMIT") == NULL) break;
        admitted(D, 1, attempt + 1);
    }
    assert_int_equal(attempt, TD_FLOW_ATTEMPTS_MAX);
    assert_string_equal(submit(2), "3 ADMIT 2.1\n");
    assert_string_equal(released(D, 1, 1), "");
    assert_string_equal(released(P, 1, 1), "3 ADMIT 1.4\n");
}

static void test_prefill_only_echoes_a_preemption(void **state) {
    (void)state;
    under_way();
    assert_string_equal(failed(P, 1, 1, TD_STALE), ""); /* decode does not know the ticket... */
    assert_string_equal(released(P, 1, 1), "");
    assert_string_equal(failed(D, 1, 1, TD_PREEMPTED), "3 ADMIT 1.2\n"); /* ...since it did this */
    assert_int_equal(counts().retries, 0);
    admitted(D, 1, 2);
    failed(P, 1, 2, TD_STALE);
    assert_string_equal(after(100), ""); /* no KEEP: at the latest the lease tells */
    assert_string_equal(failed(D, 1, 2, TD_TIMEOUT), "");
    assert_string_equal(after(1), "3 ADMIT 1.3\n");
}

static void test_answer_was_complete(void **state) {
    (void)state;
    struct td_token last = {.id = EOS};
    under_way();
    tokens(P, 1, 1, 0, 1);
    from(D, (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{1, 1}, 1, 1, &last}});
    /* Only the word that it is the end was lost. */
    assert_string_equal(down(D), "END 1 stop 2\n");
    up(TD_ROLE_DECODE, D);
    submit_n(2, 8, 1, false);
    admitted(D, 2, 1);
    tokens(P, 2, 1, 0, 1);
    assert_string_equal(failed(D, 2, 1, TD_PREEMPTED), "END 2 length 1\n1 CANCEL 2.1\n");
}

static void test_whole_answer_survives_its_workers(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    step((struct td_flow_event){
        .kind = TD_FLOW_SUBMIT,
        .submit = {.request = 1, .ids = prompt, .n_prompt = 8, .max_new = 10, .whole = true}});
    admitted(D, 1, 1);
    tokens(P, 1, 1, 0, 1);
    tokens(D, 1, 1, 1, 2);
    assert_string_equal(down(D), "4 ADMIT 1.2\n");
    assert_int_equal(last_admit.n_prompt, 11);
    admitted(D2, 1, 2);
    assert_string_equal(tokens(P, 1, 2, 0, 1), "GIVE 1 #3+1\n");
    /* Not for ever. */
    failed(D2, 1, 2, TD_INTERNAL);
    after(1);
    admitted(D2, 1, 3);
    assert_non_null(strstr(failed(D2, 1, 3, TD_INTERNAL), "FAIL 1 INTERNAL"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_preempted_goes_on_where_it_was),    T(test_preempted_says_what_was_said),
        T(test_preempted_however_often),           T(test_preempted_for_nothing),
        T(test_preempted_waits_while_others_run),  T(test_preempted_waits_for_its_old_legs),
        T(test_prefill_only_echoes_a_preemption),  T(test_answer_was_complete),
        T(test_whole_answer_survives_its_workers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

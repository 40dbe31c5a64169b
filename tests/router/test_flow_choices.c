/* Requests with several choices: one attempt as long as they are one, each its own way afterwards.
 */
#include "tests/router/flow_harness.h"

#include "common/kv/checksum.h"

enum { N_PROMPT = 8, MAX_NEW = 10, STRIDE = N_PROMPT + MAX_NEW };

static const char *submit_choices(uint64_t request, uint32_t n, bool whole, bool colocate) {
    return step((struct td_flow_event){.kind = TD_FLOW_SUBMIT,
                                       .submit = {.request = request,
                                                  .ids = prompt,
                                                  .n_prompt = N_PROMPT,
                                                  .max_new = MAX_NEW,
                                                  .n = n,
                                                  .sampling = {.seed = 5},
                                                  .whole = whole,
                                                  .colocate = colocate}});
}

/* Tokens of choice c, the first one with id 10 * c + index. */
static const char *give(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t choice,
                        uint32_t index, uint32_t n) {
    struct td_token t[16];
    memset(t, 0, sizeof t);
    for (uint32_t i = 0; i < n; i++)
        t[i].id = (int32_t)(10 * choice + index + i);
    return from(epoch, (struct td_msg){.type = TD_MSG_TOKENS,
                                       .tokens = {{r, attempt}, index, n, t, choice}});
}
static const char *ends(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t choice, uint32_t n) {
    return from(epoch, (struct td_msg){.type = TD_MSG_FINISHED,
                                       .finished = {{r, attempt}, TD_FINISH_LENGTH, n, choice}});
}
static const char *fails(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t choice,
                         td_status s) {
    return from(epoch, (struct td_msg){.type = TD_MSG_FAILED,
                                       .failed = {{r, attempt}, s, "it broke", choice + 1}});
}

static void admit_three(bool whole) {
    assert_string_equal(submit_choices(1, 3, whole, false), "3 ADMIT 1.1 n=3\n");
    assert_true(last_admit.sampling.seed == 5);
    assert_string_equal(admitted(D, 1, 1), "1 PREFILL 1.1 n=3\n");
}
/* All have their token 0, and decode runs. */
static void three_run(bool whole) {
    admit_three(whole);
    for (uint32_t c = 0; c < 3; c++)
        give(P, 1, 1, c, 0, 1);
    released(P, 1, 1);
    for (uint32_t c = 0; c < 3; c++)
        give(D, 1, 1, c, 1, 1);
}
static void assert_nothing_left(void) {
    assert_int_equal(counts().live + counts().queued + counts().tombstones, 0);
    for (int i = 0; i < 2; i++) {
        const struct td_fleet_worker *w = td_fleet_find(td_flow_fleet(flow), i == 0 ? P : D);
        if (w != NULL) assert_int_equal(w->legs + w->work_tokens, 0);
    }
}

static void test_one_prefill_three_answers(void **state) {
    (void)state;
    admit_three(false);
    assert_int_equal(counts().live, 3);
    assert_string_equal(give(P, 1, 1, 0, 0, 1), "GIVE 1 #0+1\n");
    assert_string_equal(give(D, 1, 1, 2, 1, 2), ""); /* overtakes its token 0 */
    assert_string_equal(give(D, 1, 1, 0, 1, 1), "GIVE 1 #1+1\n");
    assert_string_equal(give(P, 1, 1, 2, 0, 1), "GIVE 1/2 #0+1\nGIVE 1/2 #1+2\n");
    assert_string_equal(give(P, 1, 1, 1, 0, 1), "GIVE 1/1 #0+1\n");
    assert_string_equal(give(P, 1, 1, 1, 0, 1), ""); /* a double */
    assert_string_equal(give(P, 1, 1, 3, 0, 1), ""); /* there is no such choice */
    assert_string_equal(give(P, 1, 1, 40, 0, 1), "");
    released(P, 1, 1);
    assert_string_equal(give(D, 1, 1, 1, 1, 9), "GIVE 1/1 #1+9\n");
    assert_string_equal(ends(D, 1, 1, 1, 10), "END 1/1 length 10\n"); /* decode knows */
    assert_string_equal(ends(D, 1, 1, 1, 10), "");
    assert_int_equal(counts().live, 2);
    assert_string_equal(give(D, 1, 1, 2, 3, 7), "GIVE 1/2 #3+7\n");
    assert_string_equal(ends(D, 1, 1, 2, 10), "END 1/2 length 10\n");
    assert_string_equal(give(D, 1, 1, 0, 2, 8), "GIVE 1 #2+8\n");
    assert_string_equal(ends(D, 1, 1, 0, 10), "END 1 length 10\n");
    assert_string_equal(released(D, 1, 1), "");
    assert_nothing_left();
    assert_int_equal(prompt[2 * STRIDE + N_PROMPT + 3],
                     23); /* kept behind its own prompt's place */
}

/* What they had in common is in the time of each. */
static void test_phases(void **state) {
    (void)state;
    submit_choices(1, 2, false, false);
    after(4);
    admitted(D, 1, 1);
    after(6);
    give(P, 1, 1, 0, 0, 1);
    after(2);
    give(P, 1, 1, 1, 0, 1);
    released(P, 1, 1);
    after(3);
    give(D, 1, 1, 0, 1, 1);
    give(D, 1, 1, 1, 1, 1);
    after(5);
    ends(D, 1, 1, 0, 2);
    assert_string_equal(phases(), "queue 4 prefill 6 transfer 5 decode 5");
    after(1);
    ends(D, 1, 1, 1, 2);
    assert_string_equal(phases(), "queue 4 prefill 8 transfer 3 decode 6");
    released(D, 1, 1);
    assert_nothing_left();
}

static void test_stop_of_one(void **state) {
    (void)state;
    three_run(false);
    assert_string_equal(tell(TD_FLOW_STOP, 2), "END 1/1 stop 2\n3 CANCEL 1.1/1\n");
    assert_string_equal(tell(TD_FLOW_STOP, 2), "");
    assert_string_equal(give(D, 1, 1, 1, 2, 1), ""); /* crossed */
    assert_string_equal(tell(TD_FLOW_STOP, 1), "END 1 stop 2\n3 CANCEL 1.1/0\n");
    assert_string_equal(give(D, 1, 1, 2, 2, 1), "GIVE 1/2 #2+1\n");
    assert_string_equal(tell(TD_FLOW_STOP, 3), "END 1/2 stop 3\n3 CANCEL 1.1\n");
    released(D, 1, 1);
    assert_nothing_left();
}

/* The first token of one ends it while the prompt is still on its way to decode. */
static void test_first_token_ends_one(void **state) {
    (void)state;
    admit_three(false);
    give(P, 1, 1, 0, 0, 1);
    assert_string_equal(ends(P, 1, 1, 0, 1), "END 1 length 1\n3 CANCEL 1.1/0\n");
    assert_string_equal(ends(D, 1, 1, 0, 1), ""); /* decode says so too, when it gets there */
    give(P, 1, 1, 1, 0, 1);
    give(P, 1, 1, 2, 0, 1);
    /* The lease is kept for those that go on, once for all. */
    assert_string_equal(after(100), "3 KEEP 1.1\n");
    assert_string_equal(give(D, 1, 1, 2, 1, 1), "GIVE 1/2 #1+1\n");
    assert_string_equal(after(100), "3 KEEP 1.1\n"); /* choice 1 has not heard of decode */
}

static void test_client_leaves(void **state) {
    (void)state;
    submit_choices(1, 3, false, false); /* before they part one CANCEL is for all */
    assert_string_equal(tell(TD_FLOW_CANCEL, 2), "3 CANCEL 1.1\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 1), "");
    assert_int_equal(counts().cancelled, 3);
    assert_int_equal(counts().live, 0);
    released(D, 1, 1);
    assert_nothing_left();
    assert_string_equal(submit_choices(4, 3, false, false), "3 ADMIT 4.1 n=3\n");
    admitted(D, 4, 1);
    give(P, 4, 1, 0, 0, 1);
    assert_string_equal(tell(TD_FLOW_CANCEL, 4), "3 CANCEL 4.1/0\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 5), "3 CANCEL 4.1/1\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 6), "3 CANCEL 4.1\n1 CANCEL 4.1\n");
    released(D, 4, 1);
    released(P, 4, 1);
    assert_nothing_left();
}

static void test_retried_together_before_the_first_token(void **state) {
    (void)state;
    up(TD_ROLE_PREFILL, P2);
    admit_three(false);
    assert_string_equal(failed(P, 1, 1, TD_INTERNAL), "3 CANCEL 1.1\n3 ADMIT 1.2 n=3\n");
    released(P, 1, 1);
    released(D, 1, 1);
    assert_string_equal(admitted(D, 1, 2), "2 PREFILL 1.2 n=3\n");
    assert_string_equal(give(P2, 1, 2, 1, 0, 1), "GIVE 1/1 #0+1\n");
    assert_string_equal(give(P2, 1, 2, 0, 0, 1), "GIVE 1 #0+1\n");
    /* What two have seen, the third has not: it alone has another try. */
    assert_string_equal(failed(P2, 1, 2, TD_INTERNAL), "3 CANCEL 1.2/2\n");
    assert_string_equal(after(2), "3 ADMIT 3.3\n");
    assert_true(last_admit.sampling.seed == td_choice_seed(5, 2));
    assert_memory_equal(prompt + 2 * STRIDE, prompt, N_PROMPT * sizeof *prompt);
    assert_true(last_admit.prompt_hash == td_prompt_hash(prompt, N_PROMPT));
}

static void test_no_pair_in_time_fails_all(void **state) {
    (void)state;
    down(D);
    assert_string_equal(submit_choices(1, 3, false, false), "");
    assert_int_equal(counts().queued, 1);
    assert_string_equal(after(1001), "FAIL 1 UNREACHABLE retry\nFAIL 1/1 UNREACHABLE retry\n"
                                     "FAIL 1/2 UNREACHABLE retry\n");
    assert_nothing_left();
}

static void test_refused(void **state) {
    (void)state;
    submit_choices(1, 2, false, false);
    assert_string_equal(submit_choices(3, 2, false, false),
                        "FAIL 3 BUSY retry\nFAIL 3/1 BUSY retry\n");
    assert_string_equal(submit(5), "3 ADMIT 5.1\n"); /* three in all */
    assert_string_equal(failed(D, 1, 1, TD_TOO_LONG), "FAIL 1 TOO_LONG \nFAIL 1/1 TOO_LONG \n");
    assert_string_equal(
        from(D,
             (struct td_msg){.type = TD_MSG_ADMIT_REPLY,
                             .admit_reply = {.key = {5, 1}, .status = TD_TOO_LONG, .text = "no"}}),
        "FAIL 5 TOO_LONG \n");
}

/* The last choice makes room: it comes back alone, as what it is, and the others never notice. */
static void test_preempted_alone(void **state) {
    (void)state;
    three_run(false);
    assert_string_equal(fails(D, 1, 1, 2, TD_PREEMPTED), "3 ADMIT 3.2\n");
    assert_int_equal(last_admit.n_prompt, N_PROMPT + 2);
    assert_int_equal(last_admit.max_new, MAX_NEW - 2);
    assert_true(last_admit.sampling.seed == td_choice_seed(5, 2));
    const int32_t answer[2] = {20, 21};
    assert_true(last_admit.prompt_hash == td_prompt_hash(prompt + 2 * STRIDE, N_PROMPT + 2));
    assert_memory_equal(prompt + 2 * STRIDE, prompt, N_PROMPT * sizeof *prompt);
    assert_memory_equal(prompt + 2 * STRIDE + N_PROMPT, answer, sizeof answer);
    assert_string_equal(give(D, 1, 1, 2, 2, 1), ""); /* of what is over */
    assert_string_equal(give(D, 1, 1, 0, 2, 8), "GIVE 1 #2+8\n");
    assert_string_equal(ends(D, 1, 1, 0, 10), "END 1 length 10\n");
    assert_string_equal(admitted(D, 3, 2), "1 PREFILL 3.2\n");
    give(P, 3, 2, 0, 0, 1);
    released(P, 3, 2);
    assert_string_equal(ends(D, 1, 1, 1, 2), "END 1/1 length 2\n");
    assert_string_equal(released(D, 1, 1), ""); /* of those that stayed; choice 2 goes on */
    assert_string_equal(give(D, 3, 2, 0, 1, 7), "GIVE 1/2 #3+7\n");
    assert_string_equal(ends(D, 3, 2, 0, 8), "END 1/2 length 10\n");
    released(D, 3, 2);
    assert_nothing_left();
    assert_int_equal(counts().preempted, 1);
    assert_int_equal(counts().ended, 3);
}

/* All of them in turn, choice 0 too; its first attempt's leg is still the others' then. */
static void test_all_preempted(void **state) {
    (void)state;
    three_run(true);
    assert_non_null(strstr(fails(D, 1, 1, 0, TD_PREEMPTED), "3 ADMIT 1.2\n"));
    assert_non_null(strstr(fails(D, 1, 1, 2, TD_PREEMPTED), "3 ADMIT 3.2\n"));
    assert_string_equal(give(D, 1, 1, 1, 2, 1), "GIVE 1/1 #2+1\n");
    admitted(D, 1, 2);
    give(P, 1, 2, 0, 0, 1);
    give(D, 1, 2, 0, 1, 7);
    assert_string_equal(ends(D, 1, 2, 0, 8), "END 1 length 10\n");
    released(P, 1, 2);
    released(D, 1, 2);
    assert_non_null(strstr(fails(D, 1, 1, 1, TD_PREEMPTED), "3 ADMIT 2.2\n"));
    released(D, 1, 1);
    admitted(D, 2, 2);
    admitted(D, 3, 2);
    give(P, 2, 2, 0, 0, 1);
    give(P, 3, 2, 0, 0, 1);
    assert_string_equal(give(D, 2, 2, 0, 1, 6), "GIVE 1/1 #4+6\n");
    assert_string_equal(give(D, 3, 2, 0, 1, 7), "GIVE 1/2 #3+7\n");
    assert_string_equal(ends(D, 2, 2, 0, 7), "END 1/1 length 10\n");
    assert_string_equal(ends(D, 3, 2, 0, 8), "END 1/2 length 10\n");
    for (uint64_t r = 2; r <= 3; r++)
        released(P, r, 2), released(D, r, 2);
    assert_nothing_left();
}

/* Streams end in an honest failure, each; whole answers go on, each by itself. */
static void test_decode_dies(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    three_run(false);
    tell(TD_FLOW_STOP, 1); /* the entry of choice 0 waits for the leg alone */
    assert_string_equal(down(D), "FAIL 1/1 PEER_LOST \nFAIL 1/2 PEER_LOST \n");
    assert_nothing_left();
}
static void test_decode_dies_under_whole_answers(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    three_run(true);
    ends(D, 1, 1, 1, 2); /* what has ended is not done again */
    assert_string_equal(down(D), "4 ADMIT 1.2\n4 ADMIT 3.2\n");
    assert_int_equal(last_admit.n_prompt, N_PROMPT + 2);
    assert_int_equal(counts().retries, 2);
}

static void test_colocated(void **state) {
    (void)state;
    assert_string_equal(submit_choices(1, 2, false, true), "3 ADMIT 1.1 n=2\n");
    assert_int_equal(td_fleet_find(td_flow_fleet(flow), D)->work_tokens, 8 + 2 * 10);
    admitted(D, 1, 1);
    assert_string_equal(give(D, 1, 1, 0, 0, 1), "GIVE 1 #0+1\n");
    assert_int_equal(td_fleet_find(td_flow_fleet(flow), D)->work_tokens, 2 * 10 - 1);
    assert_string_equal(give(D, 1, 1, 1, 0, 1), "GIVE 1/1 #0+1\n");
    assert_int_equal(td_fleet_find(td_flow_fleet(flow), D)->work_tokens, 2 * 9);
    assert_string_equal(tell(TD_FLOW_STOP, 2), "END 1/1 stop 1\n3 CANCEL 1.1/1\n");
    assert_int_equal(td_fleet_find(td_flow_fleet(flow), D)->work_tokens, 9);
    assert_string_equal(tell(TD_FLOW_CANCEL, 1), "3 CANCEL 1.1\n");
    released(D, 1, 1);
    assert_nothing_left();
}

/* The worker is done with the key while one of its choices is not. */
static void test_released_too_early(void **state) {
    (void)state;
    three_run(false);
    ends(D, 1, 1, 0, 2);
    assert_string_equal(released(D, 1, 1), "FAIL 1/1 PROTOCOL \n3 CANCEL 1.1/1\n"
                                           "FAIL 1/2 PROTOCOL \n3 CANCEL 1.1\n");
    assert_nothing_left();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_one_prefill_three_answers),
        T(test_phases),
        T(test_stop_of_one),
        T(test_first_token_ends_one),
        T(test_client_leaves),
        T(test_retried_together_before_the_first_token),
        T(test_no_pair_in_time_fails_all),
        T(test_refused),
        T(test_preempted_alone),
        T(test_all_preempted),
        T(test_decode_dies),
        T(test_decode_dies_under_whole_answers),
        T(test_colocated),
        T(test_released_too_early),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

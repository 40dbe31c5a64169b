/* Decode scheduling: admission, batches, positions, growth, and the one way out. */
#include "tests/decode/harness.h"

/* Admits request `r` and gives it a verified handoff of `n` tokens with token 0 = 7. */
static void handed_off(uint64_t r, uint32_t n, uint32_t max_new) {
    assert_non_null(strstr(admit(r, n, max_new), " OK"));
    uint32_t pages = td_kv_page_blocks(n);
    slab(1, ticket, 0, 0, pages);
    unpacked(0, n, 0, pages);
    slab(1, ticket, 0, pages, 1);
    unpacked(0, n, pages, 1);
    assert_non_null(strstr(manifest(1, ticket, n, 5, 7), "peer VERDICT OK\n"));
}

static void test_first_steps_after_a_handoff(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    handed_off(1, 300, 4);
    /* Token 0 is fed at position N, token 1 comes out. */
    assert_string_equal(said, "peer VERDICT OK\nSTEP 300+1\n");
    assert_string_equal(computed(8), "TOKENS 1 #1\nSTEP 301+1\n");
    assert_string_equal(computed(8), "TOKENS 1 #2\nSTEP 302+1\n");
    assert_string_equal(computed(8), "TOKENS 1 #3\nFINISHED 1 length 4\nRELEASED 1\n");
    assert_int_equal(ledger().pages_owned + ledger().slots_owned, 0);
}

static void test_end_of_text(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    handed_off(1, 10, 100);
    assert_string_equal(computed(EOS), "TOKENS 1 #1\nFINISHED 1 stop 2\nRELEASED 1\n");
}

static void test_self_prefill_beside_running_ones(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    handed_off(1, 10, 100);
    assert_string_equal(admit_ids(2, 700, 5), "ADMITTED 2 OK\n");
    /* The budget is 300: one token and a chunk that ends on a page. */
    assert_string_equal(computed(8), "TOKENS 1 #1\nSTEP 11+1 0+256\n");
    assert_string_equal(computed(8), "TOKENS 1 #2\nSTEP 12+1 256+256\n");
    assert_string_equal(admit_ids(3, 10, 5), "ADMITTED 3 OK\n");
    assert_string_equal(computed(8), "TOKENS 1 #3\nSTEP 13+1 512+188\n");
    assert_string_equal(computed(8), "TOKENS 1 #4\nTOKENS 2 #0\nSTEP 14+1 700+1 0+10\n");
    assert_string_equal(computed(8), "TOKENS 1 #5\nTOKENS 2 #1\nTOKENS 3 #0\n"
                                     "STEP 15+1 701+1 10+1\n");
}

/* With each token of who asked goes its own selection, and none with the others'. */
static void test_selections(void **state) {
    (void)state;
    struct td_msg m = {.type = TD_MSG_ADMIT,
                       .admit = {.key = {2, 1},
                                 .n_prompt = 20,
                                 .max_new = 5,
                                 .n = 2,
                                 .ids = ids,
                                 .sampling = {.selections = true}}};
    admit_ids(1, 10, 5);
    from_router(m);
    assert_string_equal(computed(8), "TOKENS 1 #0\nSTEP 10+1 0+20x2\n");
    struct td_token t[3] = {{.id = 8}, {.id = 8}, {.id = 8}};
    const struct td_selection s[3] = {{.n_entries = 7}, {.n_entries = 8}, {.n_entries = 9}};
    const struct td_decode_event ev = {.kind = TD_DECODE_STEP_DONE,
                                       .step = {.tokens = t, .selections = s}};
    assert_string_equal(step(ev), "COPY slot 1 to 2, page 1 to 2\nTOKENS 1 #1\n"
                                  "TOKENS 2 #0 selection 8\nTOKENS 2/1 #0 selection 9\n"
                                  "STEP 11+1 20+1 20+1\n");
    assert_string_equal(step(ev), "TOKENS 1 #2\nTOKENS 2 #1 selection 8\n"
                                  "TOKENS 2/1 #1 selection 9\nSTEP 12+1 21+1 21+1\n");
}

static void test_admission_limits(void **state) {
    (void)state;
    assert_string_equal(admit(1, 2000, 49), "ADMITTED 1 TOO_LONG\n");
    assert_string_equal(admit(1, 2000, 48), "ADMITTED 1 OK\n"); /* 8 of 12 pages */
    assert_int_equal(ledger().pages_owned, 8);
    assert_string_equal(admit(1, 2000, 48), "");                         /* a double */
    assert_string_equal(admit(2, 1000, 500), "ADMITTED 2 BUSY retry\n"); /* 1000 + 100: 5 pages */
    assert_string_equal(admit(3, 900, 500), "ADMITTED 3 OK\n");          /* 4 pages */
    assert_string_equal(admit_ids(4, 10, 5), "ADMITTED 4 BUSY retry\n");
    assert_int_equal(ids_back, 1);
    cancel(1);
    for (uint64_t r = 5; r < 8; r++)
        assert_non_null(strstr(admit(r, 1, 1), " OK"));
    assert_string_equal(admit(8, 1, 1), "ADMITTED 8 BUSY retry\n"); /* no slot */
}

static void test_lease(void **state) {
    (void)state;
    admit(1, 10, 5);
    admit(2, 10, 5);
    after(99);
    assert_string_equal(keep(1), "");
    assert_string_equal(after(1), "FAILED 2 TIMEOUT\nRELEASED 2\n");
    assert_string_equal(after(99), "FAILED 1 TIMEOUT\nRELEASED 1\n");
    assert_string_equal(keep(1), "");
}

static void test_cancel_waits_for_the_step(void **state) {
    (void)state;
    admit_ids(1, 200, 5);
    assert_string_equal(said, "ADMITTED 1 OK\nSTEP 0+200\n");
    assert_string_equal(cancel(1), "");
    assert_string_equal(cancel(1), "");
    assert_int_equal(ledger().pages_owned, 1);
    assert_int_equal(ids_back, 0);
    assert_string_equal(computed(8), "RELEASED 1\n");
    assert_int_equal(ids_back, 1);
    assert_string_equal(cancel(1), "RELEASED 1\n");
    assert_string_equal(cancel(9), "RELEASED 9\n");
}

static void test_full_pool_preempts_the_youngest(void **state) {
    (void)state;
    admit_ids(1, 1000, 600); /* 5 pages: full after 280 more tokens */
    for (int i = 0; i < 4; i++)
        computed(8);
    admit_ids(2, 1200, 300); /* 6 pages */
    admit(3, 10, 5);         /* the last one; waits for its handoff */
    for (int i = 0; i < 290 && strstr(said, "FAILED") == NULL; i++) {
        keep(3);
        computed(8);
    }
    /* The oldest needed the page and goes on; the youngest had not begun to run. */
    assert_non_null(strstr(said, "FAILED 3 PREEMPTED\nRELEASED 3\nSTEP 1280+1 "));
}

static void test_age_is_the_requests(void **state) {
    (void)state;
    admit_ids(5, 1000, 600); /* 5 pages, admitted first */
    for (int i = 0; i < 4; i++)
        computed(8);
    admit_ids(2, 1200, 300); /* 6 pages */
    admit_ids(3, 10, 280);   /* the last one */
    for (int i = 0; i < 290 && strstr(said, "FAILED") == NULL; i++)
        computed(8);
    /* The youngest needs a page: it was there first, but it makes room itself. */
    assert_non_null(strstr(said, "FAILED 5 PREEMPTED\nRELEASED 5\nSTEP "));
    assert_null(strstr(said, " 1280+1"));
    assert_int_equal(ledger().slots_owned, 2);
}

static void test_preempted_handoff_keeps_its_pages_until_it_is_quiet(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit_ids(1, 1000, 600);
    for (int i = 0; i < 4; i++)
        computed(8);
    admit(2, 1750, 40); /* 7 pages: none is free */
    assert_int_equal(ledger().pages_free, 0);
    assert_non_null(strstr(slab(1, ticket, 0, 0, 6), "UNPACK 0+6"));
    for (int i = 0; i < 290 && strstr(said, "FAILED") == NULL; i++) {
        keep(2);
        computed(8);
    }
    /* An unpack still writes there: the older one waits and takes no part in a step. */
    assert_string_equal(said, "TOKENS 1 #280\nFAILED 2 PREEMPTED\npeer ABORT PREEMPTED\n");
    assert_int_equal(ledger().pages_owned, 12);
    assert_string_equal(unpacked(0, 1750, 0, 6), "peer CREDIT 0\nRELEASED 2\nSTEP 1280+1\n");
}

static void test_what_does_not_fit_alone_is_not_begun(void **state) {
    (void)state;
    end(NULL);
    assert_int_equal(begin_with(4, 0), 0);
    assert_string_equal(admit_ids(1, 500, 525), "ADMITTED 1 TOO_LONG\n");
    assert_string_equal(admit_ids(2, 500, 524), "ADMITTED 2 OK\nSTEP 0+256\n");
    for (int i = 0; i < 530 && strstr(said, "FINISHED") == NULL; i++)
        computed(8);
    assert_non_null(strstr(said, "FINISHED 2 length 524"));
}

static void test_failed_step_fails_who_was_in_it(void **state) {
    (void)state;
    admit_ids(1, 10, 5);
    admit_ids(2, 10, 5); /* not in this step */
    assert_string_equal(
        step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE,
                                      .step = {.status = TD_INTERNAL, .text = "no air"}}),
        "FAILED 1 INTERNAL\nRELEASED 1\nSTEP 0+10\n");
    assert_string_equal(failed_text, "the engine could not compute a step: no air");
}

/* A NaN among the logits of one sequence says nothing of those that were in the step with it. */
static void test_failed_sampling_fails_that_sequence(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    handed_off(1, 10, 100);
    handed_off(2, 20, 100); /* not in this step */
    computed(8);
    assert_string_equal(said, "TOKENS 1 #1\nSTEP 11+1 20+1\n");
    const struct td_token t[2] = {{.id = 8}, {.id = 9}};
    const struct td_error failed[2] = {{.status = TD_INTERNAL, .text = "NaN"}, {.status = TD_OK}};
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE,
                                                      .step = {.tokens = t, .failed = failed}}),
                        "FAILED 1 INTERNAL\nRELEASED 1\nTOKENS 2 #1\nSTEP 21+1\n");
    assert_string_equal(failed_text, "NaN");
}

static void test_router_down(void **state) {
    (void)state;
    admit_ids(1, 10, 5);
    admit(2, 10, 5);
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_ROUTER_DOWN}), "");
    assert_string_equal(admit_ids(1, 20, 5), "ADMITTED 1 OK\n"); /* of a new router */
    assert_string_equal(computed(8), "STEP 0+20\n");
    assert_int_equal(ids_back, 1);
    assert_int_equal(ledger().slots_owned, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_first_steps_after_a_handoff),
        T(test_end_of_text),
        T(test_self_prefill_beside_running_ones),
        T(test_selections),
        T(test_admission_limits),
        T(test_lease),
        T(test_cancel_waits_for_the_step),
        T(test_full_pool_preempts_the_youngest),
        T(test_age_is_the_requests),
        T(test_preempted_handoff_keeps_its_pages_until_it_is_quiet),
        T(test_what_does_not_fit_alone_is_not_begun),
        T(test_failed_step_fails_who_was_in_it),
        T(test_failed_sampling_fails_that_sequence),
        T(test_router_down),
    };
    (void)peer;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

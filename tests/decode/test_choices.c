/* Several choices of one request: what they share, when they part, and who lets go of what. */
#include "tests/decode/harness.h"

static const char *cancel_only(uint64_t request, uint32_t choice) {
    return from_router((struct td_msg){.type = TD_MSG_CANCEL,
                                       .cancel = {.key = {request, 1}, .only = choice + 1}});
}

/* All blocks of an admitted prompt, and the manifest with a token 0 for each choice. */
static const char *hand_off(uint32_t n_prompt, const int32_t *first, uint32_t n) {
    uint32_t pages = td_kv_page_blocks(n_prompt);
    slab(1, ticket, 0, 0, pages);
    unpacked(0, n_prompt, 0, pages);
    slab(1, ticket, 0, pages, 1);
    unpacked(0, n_prompt, pages, 1);
    return manifest_n(1, ticket, n_prompt, 5, first, n);
}
static const char *running(uint64_t r, uint32_t n_prompt, uint32_t max_new, uint32_t n) {
    static const int32_t first[8] = {7, 8, 9, 10, 11, 12, 13, 14};
    assert_non_null(strstr(admit_n(r, n_prompt, max_new, n, NULL), " OK"));
    return hand_off(n_prompt, first, n);
}

static void expect(uint32_t owned, uint32_t shared, uint32_t slots) {
    struct td_msg_ledger l = ledger();
    assert_int_equal(l.pages_owned, owned);
    assert_int_equal(l.pages_shared, shared);
    assert_int_equal(l.slots_owned, slots);
}

static void test_full_pages_are_shared(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    /* Two full pages once; the third, which is not full, for each. */
    assert_string_equal(admit_n(1, 700, 50, 3, NULL), "ADMITTED 1 OK\n");
    expect(5, 2, 3);
    const int32_t first[3] = {7, 8, 9};
    assert_string_equal(hand_off(700, first, 3),
                        "peer VERDICT OK\nCOPY slot 0 to 1, page 0 to 3\n"
                        "COPY slot 0 to 2, page 0 to 4\nSTEP 700+1 700+1 700+1\n");
    assert_string_equal(computed(8), "TOKENS 1 #1\nTOKENS 1/1 #1\nTOKENS 1/2 #1\n"
                                     "STEP 701+1 701+1 701+1\n");
    cancel(1);
    computed(8);
    expect(0, 0, 0);
}

/* A prompt that ends with a page: the next page is written to first, and nothing is copied. */
static void test_no_open_page(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_string_equal(running(1, 512, 5, 2),
                        "peer VERDICT OK\nCOPY slot 0 to 1\nSTEP 512+1 512+1\n");
    expect(4, 2, 2);
}

/* Everything is inside one page that is not full. */
static void test_nothing_to_share(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_string_equal(running(2, 255, 5, 2),
                        "peer VERDICT OK\nCOPY slot 0 to 1, page 0 to 2\nSTEP 255+1 255+1\n");
    expect(4, 0, 2);
}

/* Choice c has its own seed, the same whoever prefills. */
static void test_seeds(void **state) {
    (void)state;
    struct td_msg m = {.type = TD_MSG_ADMIT,
                       .admit = {.key = {1, 1},
                                 .n_prompt = 10,
                                 .max_new = 5,
                                 .n = 3,
                                 .ids = ids,
                                 .sampling = {.seed = UINT64_MAX}}};
    assert_string_equal(from_router(m), "ADMITTED 1 OK\nSTEP 0+10x3\n");
    for (uint32_t again = 0; again < 2; again++) {
        assert_int_equal(step_samples, 3);
        assert_true(step_seeds[0] == UINT64_MAX); /* as with one choice */
        assert_true(step_seeds[1] == UINT64_MAX + 0x9E3779B97F4A7C15u);
        assert_true(step_seeds[2] == UINT64_MAX + 2 * 0x9E3779B97F4A7C15u);
        computed(8);
    }
}

static const struct td_guide guide;

static const char *admit_guided(uint64_t r, uint32_t n_prompt, uint32_t n, const int32_t *with) {
    struct td_msg m = {.type = TD_MSG_ADMIT,
                       .admit = {.key = {r, 1},
                                 .n_prompt = n_prompt,
                                 .max_new = 5,
                                 .n = n,
                                 .ids = with,
                                 .sampling = {.guide = &guide}}};
    return from_router(m);
}

/* All choices hold it, and it goes with the last of them, once. */
static void test_guide(void **state) {
    (void)state;
    admit_guided(1, 10, 3, ids);
    assert_string_equal(admit_guided(1, 10, 3, ids), ""); /* a double brings its own */
    assert_int_equal(guides_back, 0);                     /* here the same, which is in use */
    for (uint32_t k = 0; k < 3; k++) {
        assert_true(step_owners[k] != 0 && step_fed[k] == -1);
        for (uint32_t i = 0; i < k; i++)
            assert_true(step_owners[k] != step_owners[i] && step_slots[k] != step_slots[i]);
    }
    uint64_t owner = step_owners[1];
    uint32_t slot = step_slots[1];
    const int32_t first[3] = {EOS, 8, 9};
    computed_each(first);
    assert_true(step_owners[0] == owner && step_slots[0] == slot);
    assert_true(step_fed[0] == 8 && step_fed[1] == 9);
    const int32_t second[2] = {10, EOS};
    computed_each(second);
    assert_int_equal(guides_back, 0);
    assert_int_equal(step_fed[0], 10);
    assert_string_equal(cancel(1), "");
    assert_string_equal(computed(8), "RELEASED 1\n");
    assert_int_equal(guides_back, 1);
    assert_ptr_equal(last_guide_back, &guide);
    assert_string_equal(admit_guided(2, 5000, 1, NULL), "ADMITTED 2 TOO_LONG\n");
    assert_int_equal(guides_back, 2);
}

static void test_self_prefill(void **state) {
    (void)state;
    admit_n(1, 300, 4, 3, ids);
    assert_string_equal(said, "ADMITTED 1 OK\nSTEP 0+300x3\n");
    const int32_t first[3] = {8, EOS, 9};
    /* One of them ends with its first token. */
    assert_string_equal(computed_each(first), "COPY slot 0 to 1, page 0 to 2\n"
                                              "COPY slot 0 to 2, page 0 to 3\n"
                                              "TOKENS 1 #0\nTOKENS 1/1 #0\nFINISHED 1/1 stop 1\n"
                                              "TOKENS 1/2 #0\nSTEP 300+1 300+1\n");
    expect(3, 1, 2);
    assert_string_equal(computed(8), "TOKENS 1 #1\nTOKENS 1/2 #1\nSTEP 301+1 301+1\n");
    computed(8);
    assert_string_equal(computed(8), "TOKENS 1 #3\nFINISHED 1 length 4\n"
                                     "TOKENS 1/2 #3\nFINISHED 1/2 length 4\nRELEASED 1\n");
    assert_int_equal(ids_back, 1);
    expect(0, 0, 0);
}

static void test_one_ends_early(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    running(1, 700, 50, 3);
    const int32_t second[3] = {8, EOS, 8};
    assert_string_equal(computed_each(second), "TOKENS 1 #1\nTOKENS 1/1 #1\nFINISHED 1/1 stop 2\n"
                                               "TOKENS 1/2 #1\nSTEP 701+1 701+1\n");
    expect(4, 2, 2); /* its slot and its page are free, the prompt's are not */
    assert_string_equal(cancel_only(1, 0), "");
    assert_string_equal(computed(8), "TOKENS 1/2 #2\nSTEP 702+1\n");
    expect(3, 0, 1); /* the last one holds them alone */
    assert_string_equal(cancel_only(1, 0), "");
    assert_string_equal(cancel_only(1, 2), "");
    assert_string_equal(computed(8), "RELEASED 1\n");
    expect(0, 0, 0);
    assert_string_equal(cancel_only(1, 2), "RELEASED 1\n");
}

/* Choice 0 leaves while the prompt is on its way into its pages: the others still get them. */
static void test_first_leaves_before_the_handoff(void **state) {
    (void)state;
    const int32_t first[3] = {7, 8, 9};
    from_peer(1, hello(PREFILL));
    admit_n(1, 700, 50, 3, NULL);
    assert_string_equal(cancel_only(1, 0), "");
    assert_string_equal(cancel_only(1, 1), "");
    expect(4, 2, 2);
    assert_string_equal(hand_off(700, first, 3),
                        "peer VERDICT OK\nCOPY slot 0 to 2, page 0 to 4\nSTEP 700+1\n");
    expect(3, 0, 1);
    assert_string_equal(computed(8), "TOKENS 1/2 #1\nSTEP 701+1\n");
    cancel(1);
    computed(8);
    /* When all have left one by one, nobody waits. */
    admit_n(2, 700, 50, 2, NULL);
    assert_string_equal(cancel_only(2, 0), "");
    assert_string_equal(cancel_only(2, 1), "RELEASED 2\n");
    expect(0, 0, 0);
}

/* One leaves while its first token is computed: its slot is not given away under the step. */
static void test_leaves_during_the_step(void **state) {
    (void)state;
    admit_n(1, 200, 5, 2, ids);
    assert_string_equal(said, "ADMITTED 1 OK\nSTEP 0+200x2\n");
    assert_string_equal(cancel_only(1, 1), "");
    expect(2, 0, 2);
    assert_string_equal(computed(8), "TOKENS 1 #0\nSTEP 200+1\n");
    expect(1, 0, 1);
    admit_n(2, 200, 5, 2, ids);
    computed(8);
    assert_string_equal(cancel_only(2, 0), "");
    assert_string_equal(computed(8), "COPY slot 1 to 2, page 1 to 2\nTOKENS 1 #2\nTOKENS 2/1 #0\n"
                                     "STEP 202+1 200+1\n");
}

static void test_all_leave(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit_n(1, 700, 50, 3, NULL);
    slab(1, ticket, 0, 0, 3);
    assert_string_equal(cancel(1), "peer ABORT CANCELLED\n");
    expect(3, 0, 1); /* an unpack still writes into choice 0's */
    assert_string_equal(unpacked(0, 700, 0, 3), "peer CREDIT 0\nRELEASED 1\n");
    expect(0, 0, 0);
}

static void test_failed_handoff_fails_all(void **state) {
    (void)state;
    const int32_t first[2] = {7, 8};
    from_peer(1, hello(PREFILL));
    admit_n(1, 300, 5, 3, NULL);
    assert_string_equal(hand_off(300, first, 2), "peer VERDICT PROTOCOL\nFAILED 1 PROTOCOL\n"
                                                 "RELEASED 1\n");
    admit_n(2, 300, 5, 2, NULL);
    assert_string_equal(after(100), "FAILED 2 TIMEOUT\nRELEASED 2\n");
    expect(0, 0, 0);
}

static void test_failed_step(void **state) {
    (void)state;
    admit_n(1, 10, 5, 2, ids);
    computed(8);
    admit_n(2, 10, 5, 2, ids); /* not in this step */
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE,
                                                      .step = {.status = TD_INTERNAL}}),
                        "FAILED 1/0 INTERNAL\nFAILED 1/1 INTERNAL\nRELEASED 1\nSTEP 0+10x2\n");
    /* Before they part one failure is that of all. */
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE,
                                                      .step = {.status = TD_INTERNAL}}),
                        "FAILED 2 INTERNAL\nRELEASED 2\n");
    expect(0, 0, 0);
}

/* The state of one choice could not be copied: it fails alone, though a step has it already. */
static void test_failed_copy(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_non_null(strstr(running(1, 700, 50, 3), "STEP 700+1 700+1 700+1\n"));
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_COPY_FAILED,
                                                      .copy = {1, TD_INTERNAL, "no device"}}),
                        "FAILED 1/1 INTERNAL\n");
    assert_string_equal(failed_text, "no device");
    expect(5, 2, 3);
    assert_string_equal(computed(8), "TOKENS 1 #1\nTOKENS 1/2 #1\nSTEP 701+1 701+1\n");
    expect(4, 2, 2);
}

/* NaN for one of them. */
static void test_failed_sampling(void **state) {
    (void)state;
    admit_n(1, 10, 5, 2, ids);
    const struct td_token t[2] = {{.id = 8}, {.id = 9}};
    const struct td_error failed[2] = {{.status = TD_INTERNAL, .text = "NaN"}, {.status = TD_OK}};
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_STEP_DONE,
                                                      .step = {.tokens = t, .failed = failed}}),
                        "COPY slot 0 to 1, page 0 to 1\nFAILED 1/0 INTERNAL\nTOKENS 1/1 #0\n"
                        "STEP 10+1\n");
    assert_string_equal(failed_text, "NaN");
}

/* A full pool takes the last choice first, then the one before it, and never the oldest. */
static void test_preempts_the_last_choice(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    running(1, 1000, 700, 3); /* 3 + 3 * 2 pages, full at 1280 */
    expect(9, 3, 3);
    admit_ids(4, 457, 700); /* 3 pages: none is left */
    expect(12, 3, 4);
    for (int i = 0; i < 300 && strstr(said, "FAILED") == NULL; i++)
        computed(8);
    assert_non_null(strstr(said, "FAILED 4 PREEMPTED\nRELEASED 4\nSTEP 1280+1 1280+1 1280+1\n"));
    expect(12, 3, 3);
    computed(8);
    for (int i = 0; i < 300 && strstr(said, "FAILED") == NULL; i++)
        computed(8);
    /* At 1536 each of three wants a page: the last one's three serve the other two. */
    assert_non_null(strstr(said, "FAILED 1/2 PREEMPTED\nSTEP 1536+1 1536+1\n"));
    expect(11, 3, 2);
    for (int i = 0; i < 300 && strstr(said, "FINISHED") == NULL; i++)
        computed(8);
    assert_non_null(strstr(said, "FINISHED 1 length 700\n"));
    assert_non_null(strstr(said, "FINISHED 1/1 length 700\nRELEASED 1\n"));
    expect(0, 0, 0);
}

static void test_admission(void **state) {
    (void)state;
    assert_string_equal(admit_n(1, 10, 5, 5, NULL), "ADMITTED 1 TOO_LONG\n"); /* 4 slots */
    /* 1000 + 100 tokens: 3 pages, and 2 for each. */
    assert_string_equal(admit_n(1, 1000, 500, 4, NULL), "ADMITTED 1 OK\n");
    expect(11, 3, 4);
    assert_string_equal(admit_n(1, 1000, 500, 4, NULL), ""); /* a double */
    cancel(1);
    admit(2, 10, 5);
    assert_string_equal(admit_n(3, 10, 5, 4, NULL), "ADMITTED 3 BUSY retry\n"); /* 3 slots free */
    assert_string_equal(admit_n(3, 1000, 500, 3, NULL), "ADMITTED 3 OK\n");
    cancel(2);
    cancel(3);
    /* 7 pages and 2 for each are more than there are: less room to grow is reserved. */
    assert_string_equal(admit_n(4, 1900, 140, 4, NULL), "ADMITTED 4 OK\n");
    expect(11, 7, 4);
    cancel(4);
    /* What cannot run together at all is not begun. */
    end(NULL);
    assert_int_equal(begin_with(8, 0), 0);
    assert_string_equal(admit_n(5, 1400, 20, 4, NULL), "ADMITTED 5 TOO_LONG\n");
    assert_string_equal(admit_n(6, 1400, 20, 3, NULL), "ADMITTED 6 OK\n");
    expect(8, 5, 3);
}

/* Two ranks share the entries: a page has 512 tokens. */
static void test_pages_of_several_ranks(void **state) {
    end(state);
    assert_int_equal(begin_with(8, 1), 0);
    from_peer(1, hello(PREFILL));
    /* 1100 + 50 tokens: two full pages once, one for each of three. */
    assert_string_equal(admit_n(1, 1100, 50, 3, NULL), "ADMITTED 1 OK\n");
    expect(5, 2, 3);
    const int32_t first[3] = {7, 8, 9};
    assert_string_equal(hand_off(1100, first, 3),
                        "peer VERDICT OK\nCOPY slot 0 to 1, page 0 to 3\n"
                        "COPY slot 0 to 2, page 0 to 4\nSTEP 1100+1 1100+1 1100+1\n");
    assert_non_null(strstr(admit_n(2, 1500, 100, 1, NULL), "ADMITTED 2 BUSY"));
    assert_string_equal(admit_n(3, 500, 60, 1, NULL), "ADMITTED 3 OK\n");
    expect(7, 2, 4);
    cancel(1);
    computed(8);
    expect(2, 0, 1);
}

static void test_router_down(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    running(1, 700, 50, 3);
    admit_ids(2, 10, 5);
    assert_string_equal(step((struct td_decode_event){.kind = TD_DECODE_ROUTER_DOWN}), "");
    expect(5, 2, 3);
    assert_string_equal(computed(8), "");
    expect(0, 0, 0);
    assert_int_equal(ids_back, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_full_pages_are_shared),
        T(test_no_open_page),
        T(test_nothing_to_share),
        T(test_seeds),
        T(test_guide),
        T(test_self_prefill),
        T(test_one_ends_early),
        T(test_first_leaves_before_the_handoff),
        T(test_leaves_during_the_step),
        T(test_all_leave),
        T(test_failed_handoff_fails_all),
        T(test_failed_step),
        T(test_failed_copy),
        T(test_failed_sampling),
        T(test_preempts_the_last_choice),
        T(test_admission),
        T(test_pages_of_several_ranks),
        T(test_router_down),
    };
    (void)peer, (void)keep, (void)manifest;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

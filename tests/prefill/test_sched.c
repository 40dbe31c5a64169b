/* Prefill scheduling: chunks, order, room, and the one way out. */
#include "tests/prefill/harness.h"

static void test_chunks_end_on_pages(void **state) {
    (void)state;
    assert_string_equal(prefill(1, 1300), "CONNECT\npeer HELLO\nSTEP 0+512\n");
    assert_string_equal(computed(0), "STEP 512+512\n");
    assert_string_equal(computed(0), "STEP 1024+276 sample\n");
    assert_string_equal(computed(42), "TOKENS 1 #0\n");
}

static void test_short_prompt_is_one_chunk(void **state) {
    (void)state;
    assert_string_equal(prefill(1, 600), "CONNECT\npeer HELLO\nSTEP 0+600 sample\n");
}

static void test_next_one_computes_while_the_first_is_sent(void **state) {
    (void)state;
    prefill(1, 100);
    assert_string_equal(prefill(2, 100), "");
    assert_string_equal(computed(42), "TOKENS 1 #0\nSTEP 0+100 sample\n");
}

static void test_room_first_come_first_served(void **state) {
    (void)state;
    prefill(1, 9 * 256); /* of 16 pages */
    assert_string_equal(prefill(2, 8 * 256), "");
    assert_string_equal(prefill(3, 10), "");
    for (int i = 0; i < 5; i++)
        computed(42);
    assert_string_equal(said, "TOKENS 1 #0\n"); /* 2 finds no room, 3 does not overtake it */
    assert_int_equal(ledger().pages_owned, 9);
    assert_string_equal(cancel(1), "RELEASED 1\nSTEP 0+512\n");
    assert_int_equal(ids_back, 1);
}

static void test_refusals(void **state) {
    (void)state;
    assert_string_equal(prefill(1, 4090), "FAILED 1 TOO_LONG\nRELEASED 1\n");
    assert_string_equal(prefill(1, 0), "FAILED 1 INVALID\nRELEASED 1\n");
    for (uint64_t r = 1; r <= 4; r++)
        prefill(r, 10);
    assert_string_equal(prefill(5, 10), "FAILED 5 BUSY\nRELEASED 5\n");
    assert_int_equal(ids_back, 3);
    assert_string_equal(prefill(4, 10), ""); /* a double gives its ids back */
    assert_int_equal(ids_back, 4);
}

static void test_first_token_ends_it(void **state) {
    (void)state;
    prefill(1, 10);
    assert_string_equal(computed(EOS), "TOKENS 1 #0\nFINISHED 1 1\nRELEASED 1\n");
    prefill_max(2, 10, 1);
    assert_string_equal(computed(42), "TOKENS 2 #0\nFINISHED 2 1\nRELEASED 2\n");
    assert_int_equal(ledger().pages_owned + ledger().slots_owned, 0);
}

/* Each choice has a token 0 of its own, from a seed of its own. */
static void test_choices(void **state) {
    (void)state;
    const int32_t some[3] = {42, EOS, 43}, none[2] = {EOS, EOS};
    assert_string_equal(prefill_n(1, 600, 10, 3), "CONNECT\npeer HELLO\nSTEP 0+600 sample 3\n");
    for (uint32_t c = 0; c < 3; c++)
        assert_true(step_seeds[c] == td_choice_seed(0, c));
    assert_true(step_seeds[0] == 0 && step_seeds[1] != 0 && step_seeds[2] == 2 * step_seeds[1]);
    assert_string_equal(computed_each(some, 3), "TOKENS 1 #0\nTOKENS 1/1 #0\nFINISHED 1/1 1\n"
                                                "TOKENS 1/2 #0\n");
    assert_int_equal(ledger().pages_owned, 3); /* two of them want the handoff */
    prefill_n(2, 10, 10, 2);
    assert_string_equal(computed_each(none, 2), "TOKENS 2 #0\nFINISHED 2 1\nTOKENS 2/1 #0\n"
                                                "FINISHED 2/1 1\nRELEASED 2\n");
    struct td_msg m = {.type = TD_MSG_CANCEL, .cancel = {.key = {1, 1}, .only = 1}};
    assert_string_equal(step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m}), "");
    assert_int_equal(ledger().pages_owned, 3); /* the others still want it */
    assert_string_equal(cancel(1), "RELEASED 1\n");
}

static void test_cancel_waits_for_the_step(void **state) {
    (void)state;
    prefill(1, 2000);
    prefill(2, 10);
    assert_string_equal(cancel(1), "");            /* the engine still writes its pages */
    assert_string_equal(cancel(1), "");            /* twice is fine */
    assert_int_equal(ledger().pages_owned, 8 + 1); /* 2 has its page already */
    assert_int_equal(ids_back, 0);
    assert_string_equal(computed(0), "RELEASED 1\nSTEP 0+10 sample\n"); /* one chunk, no more */
    assert_int_equal(ids_back, 1);
    assert_string_equal(cancel(1), "RELEASED 1\n"); /* nothing is held: so it is said again */
}

static bool busy(void) {
    struct td_msg_heartbeat beat;
    td_prefill_load(machine, &beat);
    return beat.busy;
}

/* What a hung engine is judged by: the step under way counts though nobody wants it any more, and
 * who waits for room that handoffs hold does not wait for the engine. */
static void test_busy_is_the_engine(void **state) {
    (void)state;
    assert_false(busy());
    prefill(1, 2000);
    assert_true(busy());
    assert_string_equal(cancel(1), "");
    assert_true(busy());
    assert_string_equal(computed(0), "RELEASED 1\n");
    assert_false(busy());
    prefill(2, 3000);
    prefill(3, 3000); /* no room beside it */
    while (busy())
        computed(42);
    struct td_msg_heartbeat beat;
    td_prefill_load(machine, &beat);
    assert_true(beat.waiting == 1 && beat.running == 1 && beat.queued_tokens == 3000);
    assert_string_equal(cancel(2), "RELEASED 2\nSTEP 0+512\n");
    assert_true(busy());
}

static void test_engine_failure(void **state) {
    (void)state;
    prefill(1, 10);
    assert_string_equal(step((struct td_prefill_event){.kind = TD_PREFILL_STEP_DONE,
                                                       .step = {.status = TD_INTERNAL}}),
                        "FAILED 1 INTERNAL\nRELEASED 1\n");
}

static void test_router_down(void **state) {
    (void)state;
    prefill(1, 10);
    prefill(2, 10);
    assert_string_equal(step((struct td_prefill_event){.kind = TD_PREFILL_ROUTER_DOWN}), "");
    /* A new router may use the same key while the old request still ends. */
    assert_string_equal(prefill(1, 20), "");
    assert_string_equal(computed(42), "STEP 0+20 sample\n");
    assert_string_equal(computed(42), "TOKENS 1 #0\n");
    assert_int_equal(ids_back, 2);
}

/* With token 0 of each choice goes what was selected at the prompt's last token, if asked for. */
static void test_selections(void **state) {
    (void)state;
    struct td_msg m = {.type = TD_MSG_PREFILL,
                       .prefill = {.key = {1, 1},
                                   .n_prompt = 600,
                                   .max_new = 5,
                                   .n = 2,
                                   .ids = ids,
                                   .decode_epoch = DECODE}};
    struct td_token t[2] = {{.id = 8}, {.id = 9}};
    const struct td_selection s[2] = {{.n_entries = 7}, {.n_entries = 8}};
    const struct td_prefill_event ev = {.kind = TD_PREFILL_STEP_DONE,
                                        .step = {.tokens = t, .selections = s}};
    step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
    assert_string_equal(step(ev), "TOKENS 1 #0\nTOKENS 1/1 #0\n");
    m.prefill.key.request = 2;
    m.prefill.sampling.selections = true;
    step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
    assert_string_equal(step(ev), "TOKENS 2 #0 selection 7\nTOKENS 2/1 #0 selection 8\n");
}

/* The guide goes where its ids go; the owner tells prompts apart. */
static void test_guide(void **state) {
    (void)state;
    const struct td_guide guide = {0}, other = {0};
    struct td_msg m = {.type = TD_MSG_PREFILL,
                       .prefill = {.key = {1, 1},
                                   .n_prompt = 10,
                                   .max_new = 5,
                                   .ids = ids,
                                   .decode_epoch = DECODE,
                                   .sampling = {.guide = &guide}}};
    step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
    uint64_t owner = step_owner;
    assert_true(owner != 0);
    m.prefill.sampling.guide = &other; /* a double has its own */
    step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
    assert_ptr_equal(last_guide_back, &other);
    assert_string_equal(computed(EOS), "TOKENS 1 #0\nFINISHED 1 1\nRELEASED 1\n");
    assert_ptr_equal(last_guide_back, &guide);
    prefill(2, 10);
    assert_true(step_owner != 0 && step_owner != owner);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_chunks_end_on_pages),
        T(test_short_prompt_is_one_chunk),
        T(test_next_one_computes_while_the_first_is_sent),
        T(test_room_first_come_first_served),
        T(test_refusals),
        T(test_first_token_ends_it),
        T(test_choices),
        T(test_selections),
        T(test_guide),
        T(test_cancel_waits_for_the_step),
        T(test_busy_is_the_engine),
        T(test_engine_failure),
        T(test_router_down),
    };
    (void)welcome, (void)packed, (void)put_done, (void)put_quiet, (void)credit, (void)verdict;
    (void)peer, (void)after, (void)settle;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

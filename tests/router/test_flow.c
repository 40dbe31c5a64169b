/* The life of a request, one event at a time. */
#include "tests/router/flow_harness.h"

static void test_plain_life(void **state) {
    (void)state;
    under_way();
    assert_string_equal(after(100), "3 KEEP 1.1\n");
    assert_string_equal(tokens(P, 1, 1, 0, 1), "GIVE 1 #0+1\n");
    assert_string_equal(released(P, 1, 1), "");
    assert_string_equal(tokens(D, 1, 1, 1, 2), "GIVE 1 #1+2\n");
    assert_int_equal(td_flow_deadline(flow), UINT64_MAX);        /* decode runs: no KEEP any more */
    assert_string_equal(tokens(D, 1, 1, 1, 3), "GIVE 1 #3+1\n"); /* doubles are cut off */
    assert_string_equal(finished(D, 1, 1, 4), "END 1 length 4\n");
    assert_int_equal(counts().tombstones, 1);
    assert_string_equal(released(D, 1, 1), "");
    assert_int_equal(counts().tombstones + counts().live, 0);
}

static void test_decode_overtakes_prefill(void **state) {
    (void)state;
    under_way();
    assert_string_equal(tokens(D, 1, 1, 1, 1), "");
    assert_string_equal(tokens(D, 1, 1, 2, 2), "");
    assert_string_equal(finished(D, 1, 1, 4), "");
    assert_string_equal(tokens(P, 1, 1, 0, 1), "GIVE 1 #0+1\nGIVE 1 #1+3\nEND 1 length 4\n");
}

static void test_first_token_ends_it(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    assert_string_equal(finished(P, 1, 1, 1), "END 1 length 1\n3 CANCEL 1.1\n");
    released(P, 1, 1);
    released(D, 1, 1);
    assert_int_equal(counts().tombstones, 0);
}

static void test_colocated(void **state) {
    (void)state;
    assert_string_equal(submit_n(1, 8, 10, true), "3 ADMIT 1.1\n");
    assert_string_equal(admitted(D, 1, 1), "");
    assert_string_equal(tokens(D, 1, 1, 0, 2), "GIVE 1 #0+2\n");
    assert_string_equal(finished(D, 1, 1, 2), "END 1 length 2\n");
}

static void test_phases(void **state) {
    (void)state;
    submit(1);
    after(3);
    busy(D, 1, 1); /* asks again in 50 ms */
    assert_string_equal(after(50), "3 ADMIT 1.2\n");
    after(7);
    admitted(D, 1, 2);
    after(20);
    tokens(P, 1, 2, 0, 1);
    after(5);
    released(P, 1, 2);
    tokens(D, 1, 2, 1, 1);
    after(40);
    tokens(D, 1, 2, 2, 1);
    after(2);
    assert_string_equal(finished(D, 1, 2, 3), "END 1 length 3\n");
    assert_string_equal(phases(), "queue 60 prefill 20 transfer 5 decode 42");
    released(D, 1, 2);
    submit(2); /* the handoff is over before token 0 is here */
    admitted(D, 2, 1);
    after(9);
    tokens(D, 2, 1, 1, 1);
    after(1);
    tokens(P, 2, 1, 0, 1);
    after(4);
    finished(D, 2, 1, 2);
    assert_string_equal(phases(), "queue 0 prefill 10 transfer 0 decode 4");
    released(D, 2, 1);
    submit_n(3, 8, 10, true); /* nothing is handed over */
    after(1);
    admitted(D, 3, 1);
    after(6);
    tokens(D, 3, 1, 0, 1);
    after(8);
    finished(D, 3, 1, 1);
    assert_string_equal(phases(), "queue 1 prefill 6 transfer 0 decode 8");
}

static void test_too_long_with_both_numbers(void **state) {
    (void)state;
    assert_string_equal(submit_n(1, 8, 93, false), "FAIL 1 TOO_LONG \n");
    assert_string_equal(submit_n(2, 8, 92, false), "3 ADMIT 2.1\n");
}

static void test_busy_waits_then_says_when(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    submit(1);
    assert_string_equal(busy(D, 1, 1), "4 ADMIT 1.2\n"); /* another one first */
    assert_string_equal(busy(D2, 1, 2), "");
    assert_string_equal(submit(2), ""); /* nobody overtakes */
    assert_string_equal(after(50), "3 ADMIT 1.3\n4 ADMIT 2.1\n");
    busy(D, 1, 3);
    busy(D2, 2, 1);
    for (int i = 0; i < 20 && strstr(said, "FAIL") == NULL; i++) {
        after(50);
        for (uint32_t attempt = 1; attempt < 60; attempt++)
            for (uint64_t r = 1; r <= 2 && strstr(said, "FAIL") == NULL; r++) {
                busy(D, r, attempt);
                if (strstr(said, "FAIL") == NULL) busy(D2, r, attempt);
            }
    }
    assert_non_null(strstr(said, "FAIL 1 BUSY retry"));
}

static void test_a_place_that_frees_up_is_used_at_once(void **state) {
    (void)state;
    under_way();
    submit(2);
    assert_string_equal(busy(D, 2, 1), "");
    tokens(P, 1, 1, 0, 1);
    tokens(D, 1, 1, 1, 1);
    finished(D, 1, 1, 2);
    assert_string_equal(released(D, 1, 1), "3 ADMIT 2.2\n");
}

/* What decode had no room for was no attempt of the request: the log says how many there were. */
static void test_busy_is_no_attempt(void **state) {
    (void)state;
    submit(1);
    for (uint32_t attempt = 1; attempt < 9; attempt++) {
        busy(D, 1, attempt);
        after(50);
    }
    admitted(D, 1, 9);
    failed(P, 1, 9, TD_CANCELLED);
    released(P, 1, 9);
    released(D, 1, 9);
    after(10);
    admitted(D, 1, 10);
    tokens(P, 1, 10, 0, 1);
    assert_string_equal(finished(P, 1, 10, 1), "END 1 length 1\n3 CANCEL 1.10\n");
    assert_int_equal(last_times.attempts, 2);
}

/* A step of the only decode worker fails and takes two sequences with it. They wait for it to cool
 * down, for as long as one failure says; whoever comes meanwhile is served. */
static void test_one_faulty_step_does_not_stop_the_service(void **state) {
    (void)state;
    submit(1), submit(2);
    admitted(D, 1, 1), admitted(D, 2, 1);
    assert_non_null(strstr(failed(D, 1, 1, TD_INTERNAL), "1 CANCEL 1.1\n"));
    assert_null(strstr(said, "ADMIT"));
    assert_null(strstr(failed(D, 2, 1, TD_INTERNAL), "ADMIT"));
    released(D, 1, 1), released(D, 2, 1), released(P, 1, 1);
    assert_string_equal(submit(3), "3 ADMIT 3.1\n");
    assert_string_equal(after(1), "3 ADMIT 1.2\n3 ADMIT 2.2\n"); /* cool_ns of the harness */
}

static void test_too_many_requests(void **state) {
    (void)state;
    submit(1), submit(2), submit(3);
    assert_string_equal(submit(4), "FAIL 4 BUSY retry\n");
}

static void run_to_end(uint64_t r, uint32_t attempt, uint64_t ms) {
    admitted(D, r, attempt);
    tokens(P, r, attempt, 0, 1);
    tokens(D, r, attempt, 1, 1);
    now += ms * MS;
    finished(D, r, attempt, 2);
}

/* What was refused before is asked for alone: whoever asks beside it could take what it waits for.
 */
static void test_nobody_overtakes_who_was_refused(void **state) {
    (void)state;
    submit(1), submit(2);
    admitted(D, 2, 1), busy(D, 1, 1);
    assert_string_equal(submit(3), "");              /* D is full for 50 ms */
    assert_string_equal(after(50), "3 ADMIT 1.2\n"); /* and not asked for 3 */
    assert_string_equal(busy(D, 1, 2), "");
    assert_string_equal(after(50), "3 KEEP 2.1\n3 ADMIT 1.3\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 2), "3 CANCEL 2.1\n1 CANCEL 2.1\n");
    assert_string_equal(released(D, 2, 1), "");
    assert_string_equal(admitted(D, 1, 3), "1 PREFILL 1.3\n3 ADMIT 3.1\n");
    /* Neither does one that gives up while it asks. */
    busy(D, 3, 1);
    submit(4);
    assert_string_equal(after(50), "3 ADMIT 3.2\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 3), "3 CANCEL 3.2\n");
    assert_string_equal(released(D, 3, 2), "3 ADMIT 4.1\n");
}

/* Of those that wait; who is asking is not interrupted. */
static void test_priority(void **state) {
    (void)state;
    submit(1);
    busy(D, 1, 1);
    assert_string_equal(submit_later(2, 2), "");
    assert_string_equal(submit_later(3, 1), "");
    assert_string_equal(after(50), "3 ADMIT 1.2\n");
    assert_string_equal(admitted(D, 1, 2), "1 PREFILL 1.2\n3 ADMIT 3.1\n3 ADMIT 2.1\n");
    busy(D, 3, 1), busy(D, 2, 1);
    run_to_end(1, 2, 10);
    released(P, 1, 2);
    released(D, 1, 2); /* 3 asks again, alone */
    assert_string_equal(submit(4), "");
    assert_string_equal(busy(D, 3, 2), "");
    assert_string_equal(after(50), "3 ADMIT 4.1\n3 ADMIT 3.3\n");
}

static void test_shed_early(void **state) {
    (void)state;
    submit(1), submit(2), submit(3);
    busy(D, 2, 1), busy(D, 3, 1);
    run_to_end(1, 1, 10); /* two wait: from here on ends are counted */
    assert_string_equal(released(D, 1, 1), "3 ADMIT 2.2\n");
    assert_string_equal(admitted(D, 2, 2), "1 PREFILL 2.2\n3 ADMIT 3.2\n");
    busy(D, 3, 2);
    run_to_end(2, 2, 600);
    busy(D, 3, 3);
    /* One waits, and requests end every 600 ms: a wait of 1,200 ms would be too long. */
    assert_string_equal(submit(4), "FAIL 4 BUSY retry\n");
}

static void test_no_worker_in_time(void **state) {
    (void)state;
    down(P);
    assert_string_equal(submit(1), "");
    assert_string_equal(after(999), "");
    assert_string_equal(after(1), "FAIL 1 UNREACHABLE retry\n");
}

static void test_failure_before_the_first_token_moves_on(void **state) {
    (void)state;
    up(TD_ROLE_PREFILL, P2);
    under_way();
    /* The old attempt is cancelled on both legs before the new one starts. */
    assert_string_equal(failed(P, 1, 1, TD_INTERNAL), "3 CANCEL 1.1\n3 ADMIT 1.2\n");
    assert_string_equal(admitted(D, 1, 2), "2 PREFILL 1.2\n");
    assert_string_equal(tokens(P, 1, 1, 0, 1), ""); /* late, of the old attempt */
    assert_string_equal(tokens(P2, 1, 2, 0, 1), "GIVE 1 #0+1\n");
    assert_string_equal(released(D, 1, 1), "");
    assert_string_equal(tokens(D, 1, 2, 1, 1), "GIVE 1 #1+1\n");
}

static void test_held_tokens_die_with_their_attempt(void **state) {
    (void)state;
    struct td_token old = {.id = 10}, new = {.id = 11};
    under_way();
    from(D, (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{1, 1}, 1, 1, &old}});
    failed(P, 1, 1, TD_PREEMPTED);
    admitted(D, 1, 2);
    from(D, (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{1, 2}, 1, 1, &new}});
    assert_string_equal(tokens(P, 1, 2, 0, 1), "GIVE 1 #0+1\nGIVE 1 #1+1\n");
    assert_int_equal(last_id, 11);
}

/* Tokens first.. of an attempt, the k-th selected with `mark` + k entries. */
static const char *selected(uint64_t epoch, uint32_t attempt, uint32_t first, uint32_t n,
                            uint32_t mark) {
    static struct td_token t[4];
    struct td_selection s[4];
    for (uint32_t k = 0; k < n; k++)
        s[k] = (struct td_selection){.n_entries = mark + k};
    return from(epoch, (struct td_msg){.type = TD_MSG_TOKENS,
                                       .tokens = {{1, attempt}, first, n, t, .selections = s}});
}

/* What was selected goes with its token, each once, whatever overtakes or is repeated, and in
 * whatever attempt. */
static void test_selections(void **state) {
    (void)state;
    under_way();
    assert_string_equal(selected(D, 1, 1, 1, 5), "HOLD 1 #1+1 with 5 first\n");
    assert_string_equal(selected(D, 1, 1, 1, 5), "");
    assert_string_equal(selected(D, 1, 1, 3, 5), "HOLD 1 #2+2 with 6\n");
    failed(P, 1, 1, TD_PREEMPTED);
    admitted(D, 1, 2);
    assert_string_equal(selected(D, 2, 1, 1, 25), "HOLD 1 #1+1 with 25 first\n");
    assert_string_equal(selected(P, 2, 0, 1, 24), "GIVE 1 #0+1 with 24\nGIVE 1 #1+1\n");
    assert_string_equal(selected(P, 2, 0, 1, 24), "");
    assert_string_equal(selected(D, 2, 1, 3, 25), "GIVE 1 #2+2 with 26\n");
    /* The next attempt counts from the fourth token. */
    failed(D, 1, 2, TD_PREEMPTED);
    released(D, 1, 2);
    released(P, 1, 2);
    admitted(D, 1, 3);
    assert_string_equal(selected(D, 3, 1, 1, 35), "HOLD 1 #5+1 with 35 first\n");
    assert_string_equal(selected(P, 3, 0, 1, 34), "GIVE 1 #4+1 with 34\nGIVE 1 #5+1\n");
}

static void test_more_tokens_than_asked_for(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    tokens(D, 1, 1, 1, 8);
    assert_non_null(strstr(tokens(D, 1, 1, 9, 2), "FAIL 1 PROTOCOL"));
    assert_int_equal(prompt[8 + 10], 0);
}

static void test_three_attempts(void **state) {
    (void)state;
    for (uint32_t attempt = 1; attempt <= 3; attempt++) {
        if (attempt == 1) submit(1);
        assert_non_null(strstr(said, "ADMIT"));
        admitted(D, 1, attempt);
        failed(P, 1, attempt, TD_INTERNAL);
        if (attempt < 3) after(1); /* cooling */
    }
    assert_string_equal(said, "FAIL 1 INTERNAL \n3 CANCEL 1.3\n");
}

static void test_worker_lost_before_the_first_token(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    under_way();
    assert_string_equal(down(D), "1 CANCEL 1.1\n4 ADMIT 1.2\n");
}

static void test_decode_lost_after_the_first_token(void **state) {
    (void)state;
    up(TD_ROLE_DECODE, D2);
    under_way();
    tokens(P, 1, 1, 0, 1);
    assert_string_equal(down(D), "FAIL 1 PEER_LOST \n1 CANCEL 1.1\n");
}

static void test_prefill_lost_after_the_first_token(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    assert_string_equal(down(P), "");
    assert_string_equal(after(100), "");                         /* no KEEP: the lease decides */
    assert_string_equal(tokens(D, 1, 1, 1, 1), "GIVE 1 #1+1\n"); /* the handoff was complete */
    assert_string_equal(finished(D, 1, 1, 2), "END 1 length 2\n");
}

static void test_handoff_failed_after_the_first_token(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    assert_string_equal(failed(P, 1, 1, TD_TIMEOUT), "");
    assert_string_equal(failed(D, 1, 1, TD_TIMEOUT), "FAIL 1 TIMEOUT \n");
}

static void test_missing_token_is_no_answer(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    assert_string_equal(tokens(D, 1, 1, 2, 1), "FAIL 1 PROTOCOL \n3 CANCEL 1.1\n1 CANCEL 1.1\n");
    end(NULL);
    begin(NULL);
    under_way();
    tokens(P, 1, 1, 0, 1);
    tokens(D, 1, 1, 1, 1);
    assert_non_null(strstr(finished(D, 1, 1, 3), "FAIL 1 PROTOCOL"));
}

static void test_cancel_in_every_phase(void **state) {
    (void)state;
    submit(1);
    assert_string_equal(tell(TD_FLOW_CANCEL, 1), "3 CANCEL 1.1\n");
    assert_string_equal(tell(TD_FLOW_CANCEL, 1), ""); /* twice */
    assert_string_equal(admitted(D, 1, 1), "");       /* the reply that crossed it */
    assert_int_equal(counts().tombstones, 1);
    released(D, 1, 1);
    assert_int_equal(counts().tombstones, 0);
    submit(2);
    admitted(D, 2, 1);
    assert_string_equal(tell(TD_FLOW_CANCEL, 2), "3 CANCEL 2.1\n1 CANCEL 2.1\n");
    assert_string_equal(tokens(P, 2, 1, 0, 1), "");
    released(P, 2, 1);
    assert_int_equal(counts().tombstones, 1);
    down(D); /* as good as a release */
    assert_int_equal(counts().tombstones, 0);
}

static void test_stop_string(void **state) {
    (void)state;
    under_way();
    tokens(P, 1, 1, 0, 1);
    released(P, 1, 1);
    tokens(D, 1, 1, 1, 1);
    assert_string_equal(tell(TD_FLOW_STOP, 1), "END 1 stop 2\n3 CANCEL 1.1\n");
    assert_string_equal(tokens(D, 1, 1, 2, 1), "");
}

static void test_admission_without_an_answer(void **state) {
    (void)state;
    submit(1);
    assert_string_equal(after(500), "3 CANCEL 1.1\n");
    assert_string_equal(after(1), "3 ADMIT 1.2\n");
}

/* Lets probe request `id` run to its end; disaggregated when prefill is not 0. */
static void probe(uint64_t id, uint64_t prefill, int32_t second) {
    struct td_token t[2] = {{.id = 20}, {.id = second}};
    uint64_t r = TD_FLOW_PROBE_BIT | id;
    admitted(D, r, 1);
    uint32_t at = 0;
    if (prefill != 0) {
        from(prefill, (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{r, 1}, 0, 1, t}});
        at = 1;
    }
    from(D, (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{r, 1}, at, 2 - at, t + at}});
    finished(D, r, 1, 2);
}

static void test_probe_decides_readiness(void **state) {
    (void)state;
    end(NULL);
    assert_int_equal(begin_with(8), 0);
    up(TD_ROLE_DECODE, D);
    assert_false(td_fleet_ready(td_flow_fleet(flow)));
    assert_string_equal(up(TD_ROLE_PREFILL, P), "3 ADMIT 8000000000000001.1\n");
    assert_string_equal(submit(1), ""); /* not before the pair has proven itself */
    probe(1, P, 21);
    assert_non_null(strstr(said, "3 ADMIT 8000000000000002.1\n"));
    probe(2, 0, 99); /* the decode worker alone says something else */
    assert_non_null(strstr(said, "PROBED CORRUPT"));
    assert_false(td_fleet_ready(td_flow_fleet(flow)));
    assert_string_equal(after(1), "3 ADMIT 8000000000000003.1\n"); /* and again, later */
    probe(3, P, 21);
    probe(4, 0, 21);
    assert_non_null(strstr(said, "PROBED OK"));
    assert_non_null(strstr(said, "3 ADMIT 1.1\n"));
    assert_true(td_fleet_ready(td_flow_fleet(flow)));
}

/* A pair whose limit is below the probe's prompt is asked a shorter question, the same of both. */
static void test_probe_fits_the_pair(void **state) {
    (void)state;
    end(NULL);
    assert_int_equal(begin_with(8), 0);
    max_context = 6;
    up(TD_ROLE_DECODE, D);
    max_context = 100;
    assert_string_equal(up(TD_ROLE_PREFILL, P), "3 ADMIT 8000000000000001.1\n");
    assert_int_equal(last_admit.n_prompt + last_admit.max_new, 6);
    probe(1, P, 21);
    assert_int_equal(last_admit.n_prompt + last_admit.max_new, 6);
    probe(2, 0, 21);
    assert_non_null(strstr(said, "PROBED OK"));
    down(D);
    assert_string_equal(up(TD_ROLE_DECODE, D2), "4 ADMIT 8000000000000003.1\n");
    assert_int_equal(last_admit.n_prompt, 8);
}

/* What prefill could not compute (a NaN in its logits) is no fault of the way to decode: prefill cools
 * down, for every decode worker. */
static void test_prefill_at_fault_alone(void **state) {
    (void)state;
    const td_status faults[] = {TD_INTERNAL, TD_CORRUPT};
    up(TD_ROLE_DECODE, D2);
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t r = i + 1;
        submit(r);
        uint64_t d = strtoull(said, NULL, 10), other = D + D2 - d;
        char again[32];
        admitted(d, r, 1);
        snprintf(again, sizeof again, "%llu ADMIT %llu.2\n", (unsigned long long)other,
                 (unsigned long long)r);
        failed(P, r, 1, faults[i]);
        if (faults[i] == TD_CORRUPT)
            assert_non_null(strstr(said, again));
        else
            assert_null(strstr(said, "ADMIT"));
        released(P, r, 1), released(d, r, 1);
        tell(TD_FLOW_CANCEL, r);
        after(2);
    }
}

/* A decode worker's new address goes to everybody who prefills, and with every later PREFILL. */
static void test_another_address(void **state) {
    (void)state;
    up(TD_ROLE_PREFILL, P2);
    const struct td_msg m = {.type = TD_MSG_MOVED,
                             .moved = {D, (const uint8_t *)"there", 5, 1}};
    assert_string_equal(from(D2, m), ""); /* of somebody else */
    assert_string_equal(from(D, m), "1 MOVED 3 there\n2 MOVED 3 there\n");
    assert_string_equal(from(D, m), ""); /* a double */
    submit(1);
    admitted(D, 1, 1);
    assert_int_equal(last_prefill.decode_number, 1);
    assert_int_equal(last_prefill.decode_address_len, 5);
    assert_memory_equal(last_prefill.decode_address, "there", 5);
}

static void test_replaced_worker(void **state) {
    (void)state;
    under_way();
    struct td_msg_hello h = {.version = TD_PROTO_VERSION,
                             .role = TD_ROLE_DECODE,
                             .epoch = 9,
                             .name = "worker3",
                             .model = "m",
                             .max_context = 100,
                             .max_running = 1};
    assert_string_equal(step((struct td_flow_event){.kind = TD_FLOW_WORKER_UP, .hello = &h}),
                        "CLOSE 3\n1 CANCEL 1.1\n9 ADMIT 1.2\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_plain_life),
        T(test_decode_overtakes_prefill),
        T(test_first_token_ends_it),
        T(test_selections),
        T(test_colocated),
        T(test_phases),
        T(test_too_long_with_both_numbers),
        T(test_busy_waits_then_says_when),
        T(test_a_place_that_frees_up_is_used_at_once),
        T(test_busy_is_no_attempt),
        T(test_one_faulty_step_does_not_stop_the_service),
        T(test_too_many_requests),
        T(test_nobody_overtakes_who_was_refused),
        T(test_priority),
        T(test_shed_early),
        T(test_no_worker_in_time),
        T(test_failure_before_the_first_token_moves_on),
        T(test_held_tokens_die_with_their_attempt),
        T(test_more_tokens_than_asked_for),
        T(test_three_attempts),
        T(test_worker_lost_before_the_first_token),
        T(test_decode_lost_after_the_first_token),
        T(test_prefill_lost_after_the_first_token),
        T(test_handoff_failed_after_the_first_token),
        T(test_missing_token_is_no_answer),
        T(test_cancel_in_every_phase),
        T(test_stop_string),
        T(test_admission_without_an_answer),
        T(test_probe_decides_readiness),
        T(test_probe_fits_the_pair),
        T(test_prefill_at_fault_alone),
        T(test_another_address),
        T(test_replaced_worker),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

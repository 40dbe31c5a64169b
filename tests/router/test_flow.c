/* The life of a request, one event at a time. Actions are compared as text:
 *   "3 ADMIT 1.1"  a message to worker 3 with its key;  "GIVE 1 #0+1"  tokens for the client. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "router/flow.h"

#define MS 1000000ull
enum { P = 1, P2 = 2, D = 3, D2 = 4, EOS = 99 };

static struct td_flow *flow;
static uint64_t now;
static char said[4096];
static uint64_t last_ticket;
static int32_t last_id; /* delivered */
static int32_t prompt[8 + 100] = {5, 6, 7, 8, 9, 10, 11, 12};
static struct td_msg_admit last_admit;

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...) {
    size_t n = strlen(said);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(said + n, sizeof said - n, fmt, ap);
    va_end(ap);
}

static void say_action(const struct td_flow_action *a) {
    unsigned long long r = a->request, e = a->epoch;
    switch (a->kind) {
    case TD_FLOW_SEND: {
        const char *name = a->msg.type == TD_MSG_ADMIT     ? "ADMIT"
                           : a->msg.type == TD_MSG_KEEP    ? "KEEP"
                           : a->msg.type == TD_MSG_PREFILL ? "PREFILL"
                                                           : "CANCEL";
        const struct td_key *k = &a->msg.keep.key; /* first in all four */
        say("%llu %s %llx.%u\n", e, name, (unsigned long long)k->request, k->attempt);
        if (a->msg.type == TD_MSG_ADMIT) last_admit = a->msg.admit;
        if (a->msg.type == TD_MSG_PREFILL) last_ticket = a->msg.prefill.ticket;
        return;
    }
    case TD_FLOW_CLOSE_LINK:
        say("CLOSE %llu\n", e);
        return;
    case TD_FLOW_DELIVER:
        last_id = a->deliver.tokens[a->deliver.n - 1].id;
        say("GIVE %llu #%u+%u\n", r, a->deliver.index, a->deliver.n);
        return;
    case TD_FLOW_END:
        say("END %llu %s %u\n", r, a->end.reason == TD_FINISH_STOP ? "stop" : "length",
            a->end.n_tokens);
        return;
    case TD_FLOW_FAIL:
        say("FAIL %llu %s %s\n", r, td_status_name(a->fail.status),
            a->fail.retry_ms != 0 ? "retry" : "");
        return;
    case TD_FLOW_PROBED:
        say("PROBED %s\n", td_status_name(a->fail.status));
        return;
    }
}

/* Takes an event, returns what came of it. */
static const char *step(struct td_flow_event ev) {
    struct td_flow_action a;
    said[0] = 0;
    ev.now_ns = now;
    td_flow_step(flow, &ev);
    while (td_flow_next(flow, &a))
        say_action(&a);
    return said;
}

static const char *up(enum td_role role, uint64_t epoch) {
    struct td_msg_hello h = {.version = TD_PROTO_VERSION,
                             .role = role,
                             .epoch = epoch,
                             .model = "m",
                             .max_context = 100,
                             .max_running = 4};
    snprintf(h.name, sizeof h.name, "worker%llu", (unsigned long long)epoch);
    return step((struct td_flow_event){.kind = TD_FLOW_WORKER_UP, .hello = &h});
}
static const char *down(uint64_t epoch) {
    return step((struct td_flow_event){.kind = TD_FLOW_WORKER_DOWN, .worker = {.epoch = epoch}});
}
static const char *submit_n(uint64_t request, uint32_t n_prompt, uint32_t max_new, bool colocate) {
    return step((struct td_flow_event){.kind = TD_FLOW_SUBMIT,
                                       .submit = {.request = request,
                                                  .ids = prompt,
                                                  .n_prompt = n_prompt,
                                                  .max_new = max_new,
                                                  .colocate = colocate}});
}
static const char *submit(uint64_t request) {
    return submit_n(request, 8, 10, false);
}
static const char *from(uint64_t epoch, struct td_msg m) {
    return step((struct td_flow_event){.kind = TD_FLOW_MESSAGE, .worker = {epoch, &m}});
}
static const char *admitted(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(epoch, (struct td_msg){
                           .type = TD_MSG_ADMIT_REPLY,
                           .admit_reply = {.key = {r, attempt}, .ticket = 77, .lease_ms = 300}});
}
static const char *busy(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(
        epoch,
        (struct td_msg){.type = TD_MSG_ADMIT_REPLY,
                        .admit_reply = {.key = {r, attempt}, .status = TD_BUSY, .retry_ms = 50}});
}
static const char *tokens(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t index,
                          uint32_t n) {
    static struct td_token t[64];
    return from(epoch,
                (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{r, attempt}, index, n, t}});
}
static const char *finished(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t n) {
    return from(epoch, (struct td_msg){.type = TD_MSG_FINISHED,
                                       .finished = {{r, attempt}, TD_FINISH_LENGTH, n}});
}
static const char *failed(uint64_t epoch, uint64_t r, uint32_t attempt, td_status s) {
    return from(epoch,
                (struct td_msg){.type = TD_MSG_FAILED, .failed = {{r, attempt}, s, "it broke"}});
}
static const char *released(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(epoch, (struct td_msg){.type = TD_MSG_RELEASED, .released = {.key = {r, attempt}}});
}
static const char *after(uint64_t ms) {
    now += ms * MS;
    return step((struct td_flow_event){.kind = TD_FLOW_TIMER});
}
static const char *tell(enum td_flow_event_kind kind, uint64_t request) {
    return step((struct td_flow_event){.kind = kind, .request = request});
}
static struct td_flow_counts counts(void) {
    struct td_flow_counts c;
    td_flow_counts(flow, &c);
    return c;
}

static int begin_with(uint32_t probe_n) {
    const struct td_flow_options o = {
        .fleet = {.max_workers = 8, .cool_ns = MS, .cool_max_ns = MS},
        .max_requests = 3,
        .lease_ns = 300 * MS,
        .queue_ns = 1000 * MS,
        .admit_ns = 500 * MS,
        .probe_ids = prompt,
        .probe_n = probe_n,
        .probe_new = 2,
        .eos = EOS,
    };
    now = 1;
    return td_flow_create(&o, &flow, NULL) == TD_OK ? 0 : -1;
}
static int begin(void **state) {
    (void)state;
    if (begin_with(0) != 0) return -1;
    up(TD_ROLE_PREFILL, P);
    up(TD_ROLE_DECODE, D);
    return 0;
}
static int end(void **state) {
    (void)state;
    td_flow_destroy(flow);
    return 0;
}

/* To the point where prefill and decode both work on request 1. */
static void under_way(void) {
    assert_string_equal(submit(1), "3 ADMIT 1.1\n");
    assert_string_equal(admitted(D, 1, 1), "1 PREFILL 1.1\n");
    assert_int_equal(last_ticket, 77);
}

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

static void test_shed_early(void **state) {
    (void)state;
    submit(1), submit(2), submit(3);
    busy(D, 2, 1), busy(D, 3, 1);
    run_to_end(1, 1, 10); /* two wait: from here on ends are counted */
    assert_non_null(strstr(released(D, 1, 1), "3 ADMIT 2.2\n3 ADMIT 3.2\n"));
    busy(D, 2, 2);
    run_to_end(3, 2, 600);
    busy(D, 2, 3);
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
    assert_string_equal(failed(D, 1, 1, TD_PREEMPTED), "3 ADMIT 1.2\n");
    assert_int_equal(last_admit.n_prompt, 11);
    assert_int_equal(last_admit.max_new, 7);
    assert_int_not_equal(last_admit.prompt_hash, hash);
    const int32_t answer[3] = {10, 11, 12};
    assert_memory_equal(prompt + 8, answer, sizeof answer);
    assert_string_equal(numbered(D, 1, 1, 3, 1, 3), ""); /* late, of the old attempt */
    released(D, 1, 1);
    assert_string_equal(admitted(D, 1, 2), "1 PREFILL 1.2\n");
    assert_string_equal(numbered(D, 1, 2, 1, 1, 4), ""); /* overtakes token 3 */
    assert_string_equal(numbered(P, 1, 2, 0, 1, 3), "GIVE 1 #3+1\nGIVE 1 #4+1\n");
    assert_string_equal(numbered(P, 1, 2, 0, 1, 3), ""); /* a double */
    assert_string_equal(numbered(D, 1, 2, 1, 6, 4), "GIVE 1 #5+5\n");
    assert_int_equal(last_id, 19);
    assert_string_equal(finished(D, 1, 2, 7), "END 1 length 10\n");
    assert_int_equal(counts().preempted, 1);
    assert_int_equal(counts().retries, 0);
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

#define T(f) cmocka_unit_test_setup_teardown(f, begin, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_plain_life),
        T(test_decode_overtakes_prefill),
        T(test_first_token_ends_it),
        T(test_colocated),
        T(test_too_long_with_both_numbers),
        T(test_busy_waits_then_says_when),
        T(test_a_place_that_frees_up_is_used_at_once),
        T(test_too_many_requests),
        T(test_shed_early),
        T(test_no_worker_in_time),
        T(test_failure_before_the_first_token_moves_on),
        T(test_held_tokens_die_with_their_attempt),
        T(test_preempted_goes_on_where_it_was),
        T(test_preempted_however_often),
        T(test_preempted_for_nothing),
        T(test_preempted_waits_while_others_run),
        T(test_preempted_waits_for_its_old_legs),
        T(test_prefill_only_echoes_a_preemption),
        T(test_answer_was_complete),
        T(test_whole_answer_survives_its_workers),
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
        T(test_replaced_worker),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

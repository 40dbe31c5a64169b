/* A handoff between real workers, disturbed exactly when a message passes: the process on one side
 * stopped or killed, or the message lost, doubled, late. Nothing may hang, no token may be wrong,
 * a silent peer's landing slabs stay in quarantine, shown in the ledger, until it is quiet or
 * proven dead, and at the end everything is where it was.
 *
 * usage: test_peers PREFILL DECODE MODEL [seed [test name pattern]] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/xfer/xfer.h"
#include "tests/workers/relay.h"

/* Two chunks and a rest; one page block suffices where the kernels are slow. */
enum { PROMPT = CLUSTER_SLOW > 1 ? 130 : 520, VOCAB = 2000, NEW_TOKENS = 5 };

static const char *prefill_program, *decode_program, *model_dir;
static uint64_t seed;
static struct cluster cluster;
static struct relay relay;
static int32_t ids[PROMPT];
static struct request alone; /* what decode says without a handoff */

static const struct td_sampling greedy = {.top_p = 1, .logprobs = true, .ignore_eos = true};

/* Every one of them is waited for, and none may pass while an honest process waits its turn for a
 * processor: the machine has other tests to run. The lease covers a chunk's computing too. */
static const char *const settings[] = {"peer_timeout_ms=3000", "transfer_timeout_ms=4000",
                                       "lease_ms=8000", NULL};

/* The moments of a handoff. */
static const struct step {
    const char *name;
    enum td_msg_type type;
    bool slot_block, greeting;
} steps[] = {
    {"hello", TD_MSG_PEER_HELLO, false, true}, {"welcome", TD_MSG_PEER_WELCOME, false, true},
    {"first slab", TD_MSG_SLAB, false, false}, {"first credit", TD_MSG_CREDIT, false, false},
    {"slot's slab", TD_MSG_SLAB, true, false}, {"manifest", TD_MSG_MANIFEST, false, false},
    {"verdict", TD_MSG_VERDICT, false, false},
};
enum { STEPS = sizeof steps / sizeof steps[0] };

/* ---- waiting ---- */

static bool has_reply(void *r) {
    return ((struct request *)r)->decode.replied;
}
static bool prefill_done(void *r) {
    return ((struct request *)r)->prefill.released;
}
static bool decode_done(void *r) {
    return ((struct request *)r)->decode.released;
}
static bool in_quarantine(void *c) {
    return ((struct cluster *)c)->decode.ledger.landing_quarantined > 0;
}
static bool no_quarantine(void *c) {
    return ((struct cluster *)c)->decode.ledger.landing_quarantined == 0;
}
static uint64_t welcomes_before;
static bool greeted_again(void *r) {
    return ((struct relay *)r)->welcomes > welcomes_before;
}
static bool prefill_holds_nothing(void *arg) {
    const struct cluster *c = arg;
    const struct td_msg_ledger *l = &c->prefill.ledger;
    return l->pages_owned == 0 && l->slots_owned == 0 && l->send_busy == 0;
}
static bool decode_holds_nothing(void *arg) {
    const struct cluster *c = arg;
    return c->decode.ledger.pages_owned == 0 && c->decode.ledger.slots_owned == 0;
}

static void settle(const char *what) {
    if (!cluster_settles(&cluster)) fail_msg("%s: never at rest", what);
}

/* ---- one handoff ---- */

static void expect_no_wrong_token(const char *what, const struct request *r) {
    const char *wrong = cluster_wrong_token(r, &alone);
    if (wrong) fail_msg("%s: %s", what, wrong);
    if (r->decode.finished && r->n_tokens + (r->token[0].id < 0) != NEW_TOKENS)
        fail_msg("%s: finished with %u tokens", what, r->n_tokens);
}

static bool retryable(td_status st) {
    return st == TD_PEER_LOST || st == TD_TIMEOUT || st == TD_STALE || st == TD_BUSY;
}

/* A handoff that nobody disturbs; tried again, as the router does, while links come back. */
static void honest(const char *what) {
    uint64_t end = td_now_ns() + CLUSTER_WAIT_MS * 1000000ull;
    relay_arm(&relay, 0, false, RELAY_PASS);
    for (int k = 0; k == 0 || td_now_ns() < end; k++) {
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, false);
        while (!request_over(r) && !r->prefill.failed && !r->decode.failed)
            uv_run(&cluster.loop, UV_RUN_ONCE);
        const struct leg *bad = r->prefill.failed ? &r->prefill : &r->decode;
        bool failed = bad->failed;
        if (failed) {
            if (!retryable(bad->failure.status))
                fail_msg("%s: afterwards: %s", what, bad->failure.text);
            print_message("%s: try %d: %s\n", what, k, bad->failure.text);
            cluster_cancel(&cluster, r);
        }
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        bool whole = !failed && r->n_tokens == NEW_TOKENS;
        cluster_forget(r);
        if (whole) return;
        cluster_run_ms(&cluster, 100);
    }
    cluster_print_logs(&cluster);
    fail_msg("%s: no handoff works afterwards", what);
}

static bool hit_or_failed(void *arg) {
    const struct request *r = arg;
    return relay.hit || r->prefill.failed || r->decode.failed;
}

/* Begins a handoff; returns when the armed message has passed. Tried again when it failed before:
 * a link that was ended may still be coming back. */
static struct request *disturb(const struct step *s, enum relay_action action) {
    uint64_t end = td_now_ns() + CLUSTER_WAIT_MS * 1000000ull;
    for (int k = 0; k == 0 || td_now_ns() < end; k++) {
        struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, true);
        UNTIL(s->name, has_reply, r);
        assert_int_equal(r->decode.reply.status, TD_OK);
        relay_arm(&relay, s->type, s->slot_block, action);
        if (s->greeting) {
            relay_break(&relay); /* prefill greets again */
            UNTIL(s->name, relay_hit, &relay);
        }
        cluster_send_prefill(&cluster, r);
        UNTIL(s->name, hit_or_failed, r);
        if (relay.hit) return r;
        cluster_cancel(&cluster, r);
        UNTIL(s->name, request_over, r);
        cluster_forget(r);
    }
    fail_msg("%s: the moment never came", s->name);
    return NULL;
}

static void strike(struct worker *w, int signal) {
    relay.pid = w->pid;
    relay.signal = signal;
}

/* ---- stopped ---- */

static void test_prefill_stops(void **state) {
    (void)state;
    for (int i = 0; i<STEPS; i += CLUSTER_SLOW> 1 ? 2 : 1) {
        const char *what = steps[i].name;
        strike(&cluster.prefill, SIGSTOP);
        struct request *r = disturb(&steps[i], RELAY_SIGNAL);
        UNTIL(what, in_quarantine, &cluster);
        UNTIL(what, decode_done, r); /* without a word from prefill */
        UNTIL(what, decode_holds_nothing, &cluster);
        if (!r->decode.finished && !r->decode.failed) fail_msg("%s: neither text nor error", what);
        cluster_run_ms(&cluster, 200);
        if (!in_quarantine(&cluster)) fail_msg("%s: its slabs were given away", what);
        cluster_cancel(&cluster, r);
        kill(cluster.prefill.pid, SIGCONT);
        UNTIL(what, no_quarantine, &cluster); /* it greets again by itself */
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        cluster_forget(r);
        honest(what);
        settle(what);
    }
}

static void test_decode_stops(void **state) {
    (void)state;
    for (int i = 0; i<STEPS; i += CLUSTER_SLOW> 1 ? 2 : 1) {
        const char *what = steps[i].name;
        strike(&cluster.decode, SIGSTOP);
        uint64_t verdicts = relay.verdicts;
        struct request *r = disturb(&steps[i], RELAY_SIGNAL);
        UNTIL(what, prefill_done, r); /* without a word from decode */
        UNTIL(what, prefill_holds_nothing, &cluster);
        bool verdict = relay.verdicts > verdicts; /* it may have come before the signal */
        if (steps[i].type == TD_MSG_VERDICT) assert_true(verdict);
        if (r->prefill.failed == verdict)
            fail_msg("%s: prefill %s", what, verdict ? r->prefill.failure.text : "did not fail");
        if (r->prefill.failed && !retryable(r->prefill.failure.status))
            fail_msg("%s: %s", what, r->prefill.failure.text);
        if (!verdict) cluster_cancel(&cluster, r);
        kill(cluster.decode.pid, SIGCONT);
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        if (verdict && !r->decode.finished) fail_msg("%s: decode did not go on", what);
        cluster_forget(r);
        honest(what);
        settle(what);
    }
}

/* Stopped, quarantined, then killed: only the proven exit gives the slabs back. */
static void test_stopped_prefill_dies(void **state) {
    (void)state;
    strike(&cluster.prefill, SIGSTOP);
    struct request *r = disturb(&steps[2], RELAY_SIGNAL);
    UNTIL("stopped", in_quarantine, &cluster);
    UNTIL("stopped", decode_done, r);
    assert_true(r->decode.failed);
    assert_int_equal(r->decode.failure.status, TD_PEER_LOST);
    cluster_kill(&cluster.prefill);
    UNTIL("dead", no_quarantine, &cluster);
    cluster_forget(r);
    cluster_spawn(&cluster, &cluster.prefill);
    UNTIL("again", cluster_linked, &cluster);
    honest("stopped, then dead");
    settle("stopped, then dead");
}

/* ---- killed ---- */

static bool prefill_up(void *c) {
    return ((struct cluster *)c)->prefill.conn != NULL;
}
static bool decode_up(void *c) {
    return ((struct cluster *)c)->decode.conn != NULL;
}

static void revive(struct worker *w, bool (*up)(void *), const char *what) {
    cluster_kill(w); /* dead already: this waits for it */
    while (w->conn)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    cluster_spawn(&cluster, w);
    UNTIL(what, up, &cluster);
}

static void test_prefill_dies(void **state) {
    (void)state;
    for (int i = 0; i<STEPS; i += CLUSTER_SLOW> 1 ? 3 : 1) {
        const char *what = steps[i].name;
        strike(&cluster.prefill, SIGKILL);
        struct request *r = disturb(&steps[i], RELAY_SIGNAL);
        UNTIL(what, decode_done, r);
        if (!r->decode.finished && !r->decode.failed) fail_msg("%s: neither text nor error", what);
        expect_no_wrong_token(what, r);
        cluster_forget(r);
        revive(&cluster.prefill, prefill_up, what);
        honest(what);
        settle(what);
    }
}

static void test_decode_dies(void **state) {
    (void)state;
    for (int i = 0; i<STEPS; i += CLUSTER_SLOW> 1 ? 3 : 1) {
        const char *what = steps[i].name;
        strike(&cluster.decode, SIGKILL);
        uint64_t verdicts = relay.verdicts;
        struct request *r = disturb(&steps[i], RELAY_SIGNAL);
        UNTIL(what, prefill_done, r);
        UNTIL(what, prefill_holds_nothing, &cluster);
        bool verdict = relay.verdicts > verdicts; /* it may have come before the signal */
        if (steps[i].type == TD_MSG_VERDICT) assert_true(verdict);
        if (r->prefill.failed == verdict)
            fail_msg("%s: %s", what, r->prefill.failed ? r->prefill.failure.text : "no error");
        expect_no_wrong_token(what, r);
        cluster_forget(r);
        revive(&cluster.decode, decode_up, what);
        honest(what);
        settle(what);
    }
}

/* ---- messages ---- */

/* A message that is lost is found by what comes next, or by a deadline. */
static void expect_whole(const char *what, struct request *r) {
    UNTIL(what, request_over, r);
    if (r->prefill.failed || r->decode.failed)
        fail_msg("%s: %s", what, (r->prefill.failed ? &r->prefill : &r->decode)->failure.text);
    assert_int_equal(r->n_tokens, NEW_TOKENS);
    expect_no_wrong_token(what, r);
    cluster_forget(r);
}

/* Manifest and verdict are said again until they are answered; what else is lost ends the attempt,
 * save a credit, of one slab, where the others may suffice. With SLAB or CREDIT a landing slab is
 * lost: prefill misses it by its deadline, whatever became of the attempt, and only a new link
 * brings it back. That is waited for, or it would strike a later handoff. */
static void test_lost(void **state) {
    (void)state;
    for (int i = 0; i<STEPS; i += CLUSTER_SLOW> 1 ? 2 : 1) {
        const char *what = steps[i].name;
        struct request *r = disturb(&steps[i], RELAY_DROP);
        welcomes_before = relay.welcomes;
        if (steps[i].type == TD_MSG_MANIFEST || steps[i].type == TD_MSG_VERDICT) {
            expect_whole(what, r);
            honest(what);
            settle(what);
            continue;
        }
        while (!r->prefill.failed && !r->decode.failed && !request_over(r))
            uv_run(&cluster.loop, UV_RUN_ONCE);
        if (!r->prefill.failed && !r->decode.failed && steps[i].type != TD_MSG_CREDIT)
            fail_msg("%s: its loss was not noticed", what);
        cluster_cancel(&cluster, r);
        UNTIL(what, request_over, r);
        expect_no_wrong_token(what, r);
        cluster_forget(r);
        if (steps[i].type == TD_MSG_SLAB || steps[i].type == TD_MSG_CREDIT)
            UNTIL(what, greeted_again, &relay);
        honest(what);
        settle(what);
    }
}

static void test_doubled(void **state) {
    (void)state;
    for (int i = 0; i < STEPS; i++) {
        if (!steps[i].greeting) expect_whole(steps[i].name, disturb(&steps[i], RELAY_TWICE));
        settle(steps[i].name);
    }
    for (int i = 0; i < STEPS; i++) {
        if (!steps[i].greeting) continue;
        struct request *r = disturb(&steps[i], RELAY_TWICE);
        UNTIL(steps[i].name, request_over, r);
        expect_no_wrong_token(steps[i].name, r);
        cluster_forget(r);
        honest(steps[i].name);
        settle(steps[i].name);
    }
}

/* The slot's SLAB behind the manifest. */
static void test_late(void **state) {
    (void)state;
    struct request *r = disturb(&steps[4], RELAY_LATE);
    while (!r->decode.failed)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    assert_int_equal(r->decode.failure.status, TD_CORRUPT);
    UNTIL("late", prefill_done, r);
    assert_true(r->prefill.failed);
    cluster_forget(r);
    honest("late");
    settle("late");
}

static int start(void **state) {
    (void)state;
    uint64_t z = seed;
    for (int i = 0; i < PROMPT; i++) {
        z = z * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)(3 + (z >> 33) % VOCAB);
    }
    cluster_open(&cluster, prefill_program, decode_program, model_dir, settings);
    relay_open(&relay, &cluster);
    cluster_launch(&cluster);
    struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, true, false);
    if (!cluster_until(&cluster, request_over, r) || !r->decode.finished) return -1;
    alone = *r;
    cluster_forget(r);
    honest("at first");
    return relay.passed > 0 ? 0 : -1;
}

static int stop(void **state) {
    (void)state;
    relay_close(&relay);
    return cluster_stop(&cluster) ? 0 : -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lost),         cmocka_unit_test(test_doubled),
        cmocka_unit_test(test_late),         cmocka_unit_test(test_prefill_stops),
        cmocka_unit_test(test_decode_stops), cmocka_unit_test(test_stopped_prefill_dies),
        cmocka_unit_test(test_prefill_dies), cmocka_unit_test(test_decode_dies),
    };
    if (!cluster_lane(&argc, argv)) return 1;
    if (argc < 4) {
        fprintf(stderr, "usage: test_peers PREFILL DECODE MODEL [seed [test name pattern]]\n");
        return 2;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : (uint64_t)time(NULL);
    if (argc > 5) cmocka_set_test_filter(argv[5]);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, start, stop);
}

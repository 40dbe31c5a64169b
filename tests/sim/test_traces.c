/* A few stories in full: what is said, in which order, when nothing goes wrong and when something
 * does. Exact, because the simulator's time and chance are fixed by the seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/sim/sim.h"

static struct sim world;

static void begin_with(uint32_t prefills, uint32_t decodes, uint32_t pages) {
    struct sim_options o;
    sim_defaults(&o, 1);
    if (pages != 0) {
        o.pages = pages;
        o.reserve_new = 16;
    }
    o.prefills = prefills;
    o.decodes = decodes;
    o.steady = true;
    o.record = true;
    sim_init(&world, &o);
    sim_run(&world, SIM_S); /* probes */
    assert_true(td_fleet_ready(td_flow_fleet(world.flow)));
    world.trace_len = 0;
}

static void begin(uint32_t prefills, uint32_t decodes) {
    begin_with(prefills, decodes, 0);
}

static void submit_n(uint32_t n_prompt, uint32_t max_new, uint32_t n) {
    struct sim_client *c = &world.client[0];
    c->s.n = n;
    c->s.n_prompt = n_prompt;
    c->s.max_new = max_new;
    c->s.sampling.seed = 3;
    c->s.sampling.ignore_eos = true;
    c->ids = malloc((n > 1 ? n : 1) * (n_prompt + max_new) * sizeof *c->ids);
    for (uint32_t k = 0; k < n_prompt; k++)
        c->ids[k] = (int32_t)(2 + k % 900);
    c->s.ids = c->ids;
    sim_client_submit(&world, 0);
}

static void submit(uint32_t n_prompt, uint32_t max_new) {
    submit_n(n_prompt, max_new, 1);
}

static struct sim_worker *worker(const char *name) {
    for (uint32_t i = 0; i < world.n_workers; i++)
        if (strcmp(world.worker[i].name, name) == 0) return &world.worker[i];
    fail();
    return NULL;
}

static void run_ms(uint64_t ms) {
    sim_run(&world, world.now + ms * SIM_MS);
    assert_string_equal(world.failure, "");
}

static bool said(const char *what) {
    return world.trace_len > 0 && strstr(world.trace, what) != NULL;
}

/* Every worker holds nothing. */
static void assert_baseline(void) {
    struct td_flow_counts c;
    td_flow_counts(world.flow, &c);
    assert_int_equal(c.live + c.tombstones, 0);
    for (uint32_t i = 0; i < world.n_workers; i++) {
        struct td_msg_ledger l;
        if (world.worker[i].role == TD_ROLE_PREFILL)
            td_prefill_ledger(world.worker[i].p, &l);
        else
            td_decode_ledger(world.worker[i].d, &l);
        assert_int_equal(l.pages_owned + l.slots_owned + l.send_busy + l.landing_quarantined, 0);
    }
}

static void test_nothing_goes_wrong(void **state) {
    (void)state;
    begin(1, 1);
    submit(700, 3);
    run_ms(500);
    assert_string_equal(world.trace, "router -> decode@0 ADMIT 1.1\n"
                                     "decode@0 -> router ADMIT_REPLY 1.1 OK\n"
                                     "router -> prefill@0 PREFILL 1.1\n"
                                     "prefill@0 -> router TOKENS 1.1 #0\n"
                                     "decode@0 -> router TOKENS 1.1 #1\n"
                                     "prefill@0 -> router RELEASED 1.1\n"
                                     "decode@0 -> router TOKENS 1.1 #2\n"
                                     "decode@0 -> router FINISHED 1.1\n"
                                     "request 1 ends with 3 tokens\n"
                                     "decode@0 -> router RELEASED 1.1\n");
    assert_baseline();
    sim_finish(&world);
}

static void test_one_token_needs_no_decode(void **state) {
    (void)state;
    begin(1, 1);
    submit(10, 1);
    run_ms(500);
    assert_string_equal(world.trace, "router -> decode@0 ADMIT 1.1\n"
                                     "decode@0 -> router ADMIT_REPLY 1.1 OK\n"
                                     "router -> prefill@0 PREFILL 1.1\n"
                                     "prefill@0 -> router TOKENS 1.1 #0\n"
                                     "prefill@0 -> router FINISHED 1.1\n"
                                     "request 1 ends with 1 tokens\n"
                                     "prefill@0 -> router RELEASED 1.1\n"
                                     "router -> decode@0 CANCEL 1.1\n"
                                     "decode@0 -> router RELEASED 1.1\n");
    assert_baseline();
    sim_finish(&world);
}

static void test_prefill_dies_before_the_first_token(void **state) {
    (void)state;
    begin(2, 1);
    submit(2000, 5);
    run_ms(10);
    struct sim_worker *first = worker(said("prefill@0 PREFILL 1.1") ? "prefill@0" : "prefill@1");
    const char *other = first == worker("prefill@0") ? "prefill@1" : "prefill@0";
    assert_true(said("PREFILL 1.1"));
    sim_worker_kill(&world, first);
    run_ms(500);
    char again[64];
    snprintf(again, sizeof again, "router -> %s PREFILL 1.2\n", other);
    assert_true(said("router -> decode@0 CANCEL 1.1\n"));
    assert_true(said(again));
    assert_true(said("request 1 ends with 5 tokens\n"));
    assert_int_equal(world.client[0].times.attempts, 2);
    sim_worker_start(&world, first);
    run_ms(3000);
    assert_baseline();
    sim_finish(&world);
}

static void test_decode_dies_in_the_middle(void **state) {
    (void)state;
    begin(1, 2);
    submit(600, 400);
    run_ms(150);
    assert_in_range(world.client[0].delivered, 2, 399);
    sim_worker_kill(&world,
                    worker(said("decode@0 -> router TOKENS 1.1") ? "decode@0" : "decode@1"));
    run_ms(500);
    assert_int_equal(world.client[0].state, SIM_FAILED); /* never a clean end */
    assert_int_equal(world.client[0].status, TD_PEER_LOST);
    sim_finish(&world);
}

static void test_client_leaves_during_prefill(void **state) {
    (void)state;
    begin(1, 1);
    submit(3000, 5);
    run_ms(20);
    assert_true(said("router -> prefill@0 PREFILL 1.1\n"));
    sim_client_cancel(&world, 0);
    run_ms(50); /* one chunk of 512 tokens takes about 12 ms */
    assert_true(said("prefill@0 -> router RELEASED 1.1\n"));
    assert_true(said("decode@0 -> router RELEASED 1.1\n"));
    assert_baseline();
    sim_finish(&world);
}

static void test_frozen_prefill_and_its_landing_slabs(void **state) {
    (void)state;
    begin(1, 1);
    struct td_msg_ledger l;
    worker("prefill@0")->frozen_until = world.now + 2 * SIM_S;
    run_ms(1000);
    td_decode_ledger(worker("decode@0")->d, &l);
    assert_int_equal(l.landing_quarantined, 3); /* it may still write */
    assert_int_equal(l.landing_granted, 0);
    run_ms(2000);
    td_decode_ledger(worker("decode@0")->d, &l);
    assert_int_equal(l.landing_quarantined, 0); /* it came back and said that it does not */
    assert_int_equal(l.landing_granted, 3);
    sim_finish(&world);
}

/* Its loop still beats and its link still works, so only the steps that do not come betray it. */
static void test_hung_decode_engine(void **state) {
    (void)state;
    begin(1, 2);
    world.client[0].s.whole = true; /* nothing is shown before the end: it moves on */
    submit(700, 400);
    run_ms(100);
    bool first = said("router -> decode@0 ADMIT 1.1\n");
    struct sim_worker *hung = worker(first ? "decode@0" : "decode@1");
    hung->hung_until = world.now + 3 * SIM_S;
    run_ms(450);
    assert_false(said("an engine hangs\n")); /* a long step is no hang yet */
    run_ms(300);
    assert_true(said("an engine hangs\n"));
    assert_true(td_fleet_find(td_flow_fleet(world.flow), hung->epoch)->stalled);
    assert_true(said(first ? "router -> decode@1 ADMIT 1.2\n" : "router -> decode@0 ADMIT 1.2\n"));
    run_ms(1900);
    assert_true(said("request 1 ends with 400 tokens\n"));
    assert_false(said("an engine goes on\n"));
    run_ms(1000);
    assert_true(said("an engine goes on\n"));
    assert_false(td_fleet_find(td_flow_fleet(world.flow), hung->epoch)->stalled);
    assert_baseline();
    sim_finish(&world);
}

static void test_hung_prefill_engine(void **state) {
    (void)state;
    begin(2, 1);
    submit(2000, 5);
    run_ms(10);
    bool first = said("prefill@0 PREFILL 1.1");
    worker(first ? "prefill@0" : "prefill@1")->hung_until = world.now + 3 * SIM_S;
    run_ms(1500);
    assert_true(
        said(first ? "router -> prefill@1 PREFILL 1.2\n" : "router -> prefill@0 PREFILL 1.2\n"));
    assert_true(said("request 1 ends with 5 tokens\n"));
    run_ms(2000);
    assert_baseline();
    sim_finish(&world);
}

/* Where there is no other, what was shown ends at once, and in an error. */
static void test_hung_engine_of_the_only_decode_worker(void **state) {
    (void)state;
    begin(1, 1);
    submit(600, 400);
    run_ms(150);
    assert_in_range(world.client[0].delivered, 2, 399);
    worker("decode@0")->hung_until = world.now + 3 * SIM_S;
    run_ms(800);
    assert_int_equal(world.client[0].state, SIM_FAILED);
    assert_int_equal(world.client[0].status, TD_TIMEOUT);
    assert_false(td_fleet_ready(td_flow_fleet(world.flow)));
    run_ms(2500);
    assert_true(td_fleet_ready(td_flow_fleet(world.flow)));
    assert_baseline();
    sim_finish(&world);
}

/* Its peer's greetings go unheard for longer than the first few last, and nobody asks for it. */
static void test_frozen_decode_and_its_landing_slabs(void **state) {
    (void)state;
    begin(1, 1);
    struct td_msg_ledger l;
    worker("decode@0")->frozen_until = world.now + 5 * SIM_S;
    run_ms(5100);
    td_decode_ledger(worker("decode@0")->d, &l);
    assert_int_equal(l.landing_quarantined, 3); /* its clocks came first, and the link was lost */
    run_ms(7000);
    td_decode_ledger(worker("decode@0")->d, &l);
    assert_int_equal(l.landing_quarantined, 0);
    assert_int_equal(l.landing_granted, 3);
    sim_finish(&world);
}

/* Decode goes on with what it took, and prefill learns that it did: nothing is told the router that
 * was not so, nothing runs twice, nobody is blamed. */
static void lose_one(enum td_msg_type type) {
    begin(1, 1);
    struct td_msg_ledger p, d, before;
    td_prefill_ledger(worker("prefill@0")->p, &before);
    world.lose = type;
    submit(700, 20);
    run_ms(1000);
    assert_int_equal(world.lose, 0); /* it was lost */
    assert_false(said("FAILED"));
    assert_false(said("1.2"));
    assert_true(said("request 1 ends with 20 tokens\n"));
    td_prefill_ledger(worker("prefill@0")->p, &p);
    td_decode_ledger(worker("decode@0")->d, &d);
    assert_int_equal(p.handoffs_ok, before.handoffs_ok + 1);
    assert_int_equal(p.handoffs_ok, d.handoffs_ok);
    assert_int_equal(p.handoffs_failed + d.handoffs_failed, 0);
    assert_baseline();
    sim_finish(&world);
}
static void test_lost_verdict(void **state) {
    (void)state;
    lose_one(TD_MSG_VERDICT);
}
static void test_lost_manifest(void **state) {
    (void)state;
    lose_one(TD_MSG_MANIFEST);
}

/* ---- several choices ---- */

static void test_choices(void **state) {
    (void)state;
    begin(1, 1);
    submit_n(700, 2, 3);
    run_ms(500);
    assert_string_equal(world.trace, "router -> decode@0 ADMIT 1.1 n=3\n"
                                     "decode@0 -> router ADMIT_REPLY 1.1 OK\n"
                                     "router -> prefill@0 PREFILL 1.1 n=3\n"
                                     "prefill@0 -> router TOKENS 1.1 #0\n"
                                     "prefill@0 -> router TOKENS 1.1/1 #0\n"
                                     "prefill@0 -> router TOKENS 1.1/2 #0\n"
                                     "prefill@0 -> router RELEASED 1.1\n"
                                     "decode@0 -> router TOKENS 1.1 #1\n"
                                     "decode@0 -> router FINISHED 1.1\n"
                                     "request 1 ends with 2 tokens\n"
                                     "decode@0 -> router TOKENS 1.1/1 #1\n"
                                     "decode@0 -> router FINISHED 1.1/1\n"
                                     "request 1/1 ends with 2 tokens\n"
                                     "decode@0 -> router TOKENS 1.1/2 #1\n"
                                     "decode@0 -> router FINISHED 1.1/2\n"
                                     "request 1/2 ends with 2 tokens\n"
                                     "decode@0 -> router RELEASED 1.1\n");
    assert_baseline();
    sim_finish(&world);
}

static void test_one_choice_stops_early(void **state) {
    (void)state;
    begin(1, 1);
    struct td_msg_ledger l;
    world.client[1].stop_after = 3;
    submit_n(700, 200, 3);
    run_ms(150);
    assert_true(said("router -> decode@0 CANCEL 1.1/1\n"));
    assert_int_equal(world.client[1].state, SIM_ENDED);
    td_decode_ledger(worker("decode@0")->d, &l);
    assert_int_equal(l.slots_owned, 2);
    assert_int_equal(l.pages_shared, 2); /* of 2 + 3 * 2 */
    assert_int_equal(l.pages_owned, 6);
    run_ms(1000);
    assert_true(said("request 1 ends with 200 tokens\n"));
    assert_true(said("request 1/2 ends with 200 tokens\n"));
    assert_baseline();
    sim_finish(&world);
}

static void test_choices_cancelled_midway(void **state) {
    (void)state;
    begin(1, 1);
    submit_n(700, 400, 3);
    run_ms(150);
    assert_in_range(world.client[2].delivered, 2, 399);
    world.trace_len = 0;
    sim_client_cancel(&world, 0);
    run_ms(50);
    assert_true(said("router -> decode@0 CANCEL 1.1/0\n"));
    assert_true(said("router -> decode@0 CANCEL 1.1/1\n"));
    assert_true(said("router -> decode@0 CANCEL 1.1\n"));
    assert_true(said("decode@0 -> router RELEASED 1.1\n"));
    assert_baseline();
    sim_finish(&world);
}

/* Twelve pages: three choices fill them at position 1536. The last one makes room, comes back with
 * what it had when there is room, and all three are what they would have been (the client checks
 * every token). */
static void test_a_choice_is_preempted(void **state) {
    (void)state;
    begin_with(1, 1, 12);
    submit_n(1000, 600, 3);
    run_ms(2000);
    assert_true(said("decode@0 -> router FAILED 1.1/2 PREEMPTED\n"));
    assert_true(said("router -> decode@0 ADMIT 3.2\n"));
    assert_false(said("FAILED 1.1/1"));
    assert_false(said("FAILED 1.1/0"));
    run_ms(4000);
    for (uint32_t c = 0; c < 3; c++) {
        assert_int_equal(world.client[c].state, SIM_ENDED);
        assert_int_equal(world.client[c].delivered, 600);
    }
    assert_baseline();
    sim_finish(&world);
}

static void test_decode_dies_under_choices(void **state) {
    (void)state;
    for (int whole = 0; whole < 2; whole++) {
        begin(1, 2);
        world.client[0].s.whole = whole;
        world.client[1].stop_after = 2; /* has its answer before */
        submit_n(600, 200, 3);
        run_ms(150);
        sim_worker_kill(&world,
                        worker(said("decode@0 -> router TOKENS 1.1") ? "decode@0" : "decode@1"));
        run_ms(2000);
        assert_int_equal(world.client[1].state, SIM_ENDED);
        for (uint32_t c = 0; c < 3; c += 2) { /* a stream never ends cleanly then */
            assert_int_equal(world.client[c].state, whole ? SIM_ENDED : SIM_FAILED);
            if (whole) assert_int_equal(world.client[c].delivered, 200);
        }
        assert_true(said("PREFILL 1.2\n") == (whole == 1));
        assert_true(said("PREFILL 3.2\n") == (whole == 1));
        assert_false(said("PREFILL 2.2\n"));
        sim_finish(&world);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_goes_wrong),
        cmocka_unit_test(test_one_token_needs_no_decode),
        cmocka_unit_test(test_prefill_dies_before_the_first_token),
        cmocka_unit_test(test_decode_dies_in_the_middle),
        cmocka_unit_test(test_client_leaves_during_prefill),
        cmocka_unit_test(test_frozen_prefill_and_its_landing_slabs),
        cmocka_unit_test(test_hung_decode_engine),
        cmocka_unit_test(test_hung_prefill_engine),
        cmocka_unit_test(test_hung_engine_of_the_only_decode_worker),
        cmocka_unit_test(test_frozen_decode_and_its_landing_slabs),
        cmocka_unit_test(test_lost_verdict),
        cmocka_unit_test(test_lost_manifest),
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_one_choice_stops_early),
        cmocka_unit_test(test_choices_cancelled_midway),
        cmocka_unit_test(test_a_choice_is_preempted),
        cmocka_unit_test(test_decode_dies_under_choices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

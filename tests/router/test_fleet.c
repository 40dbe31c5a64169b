/* The fleet: who may join, which pair is chosen, how failures are remembered and forgotten. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "router/fleet.h"

#define S 1000000000ull

static struct td_fleet fleet;
static char text[TD_TEXT_MAX];

static void begin(void) {
    const struct td_fleet_options o = {
        .max_workers = 6, .model = "m", .cool_ns = S, .cool_max_ns = 4 * S};
    td_fleet_init(&fleet, &o);
}

static struct td_msg_hello hello(enum td_role role, const char *name, uint64_t epoch) {
    struct td_msg_hello h = {.version = TD_PROTO_VERSION,
                             .role = role,
                             .epoch = epoch,
                             .fingerprint = 7,
                             .numerics_id = 9,
                             .model = "m",
                             .numerics = "avx2",
                             .max_context = 1000,
                             .max_running = 4};
    memcpy(h.name, name, strlen(name));
    return h;
}

static struct td_fleet_need need(uint32_t n_prompt) {
    return (struct td_fleet_need){.n_prompt = n_prompt};
}

static uint64_t join(enum td_role role, const char *name, uint64_t epoch) {
    struct td_msg_hello h = hello(role, name, epoch);
    uint64_t replaced;
    assert_int_equal(td_fleet_check(&fleet, &h, text), TD_OK);
    td_fleet_join(&fleet, 0, &h, &replaced);
    return replaced;
}

static bool beat(uint64_t now_ns, uint64_t epoch, bool busy, uint64_t steps) {
    const struct td_msg_heartbeat b = {
        .epoch = epoch, .running = 1, .queued_tokens = 9, .busy = busy, .steps = steps};
    return td_fleet_beat(&fleet, now_ns, &b);
}

/* prefill 1, 2; decode 3, 4; all pairs proven */
static void four(void) {
    begin();
    join(TD_ROLE_PREFILL, "p0", 1);
    join(TD_ROLE_PREFILL, "p1", 2);
    join(TD_ROLE_DECODE, "d0", 3);
    join(TD_ROLE_DECODE, "d1", 4);
    for (uint64_t p = 1; p <= 2; p++)
        for (uint64_t d = 3; d <= 4; d++)
            td_fleet_proven(&fleet, (struct td_pair){p, d});
}

static void assert_refused(struct td_msg_hello h, td_status status, const char *words) {
    assert_int_equal(td_fleet_check(&fleet, &h, text), status);
    assert_non_null(strstr(text, words));
}

static void test_hello(void **state) {
    (void)state;
    begin();
    join(TD_ROLE_PREFILL, "p0", 1);
    struct td_msg_hello h = hello(TD_ROLE_DECODE, "d0", 2);
    h.version = 99;
    assert_refused(h, TD_PROTOCOL, "version: expected 1, found 99");
    h = hello(TD_ROLE_ROUTER, "d0", 2);
    assert_refused(h, TD_PROTOCOL, "role");
    h = hello(TD_ROLE_DECODE, "d0", 0);
    assert_refused(h, TD_PROTOCOL, "epoch");
    h = hello(TD_ROLE_DECODE, "d0", 1);
    assert_refused(h, TD_BUSY, "still connected");
    h = hello(TD_ROLE_DECODE, "d0", 2);
    memcpy(h.model, "other", 6);
    assert_refused(h, TD_MISMATCH, "expected m, found other");
    h = hello(TD_ROLE_DECODE, "d0", 2);
    h.fingerprint = 8;
    assert_refused(h, TD_MISMATCH, "fingerprint");
    h = hello(TD_ROLE_DECODE, "d0", 2);
    h.numerics_id = 8;
    memcpy(h.numerics, "sse", 4);
    assert_refused(h, TD_MISMATCH, "expected 'avx2' as on p0, found 'sse'");
    for (uint64_t e = 2; e <= 6; e++)
        join(TD_ROLE_DECODE, (char[]){'d', (char)('0' + e), 0}, e);
    assert_refused(hello(TD_ROLE_DECODE, "late", 7), TD_BUSY, "full with 6");
}

static void test_one_process_of_a_name(void **state) {
    (void)state;
    four();
    /* The older one is alive: thrown out, it would dial again and throw out the newer one. */
    assert_refused(hello(TD_ROLE_PREFILL, "p0", 11), TD_BUSY, "is connected");
    td_fleet_leave(&fleet, 1);
    assert_int_equal(join(TD_ROLE_PREFILL, "p0", 11), 0);
    assert_null(td_fleet_find(&fleet, 1));
    assert_non_null(td_fleet_find(&fleet, 11));
    struct td_pair pair;
    uint64_t when;
    /* The new process has proven nothing: only p1 is chosen, and a probe is due. */
    td_fleet_began(&fleet, 2, 500);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 2);
    assert_true(td_fleet_probe_due(&fleet, 0, &pair, &when));
    assert_int_equal(pair.prefill, 11);
}

static void test_least_outstanding_tokens(void **state) {
    (void)state;
    four();
    struct td_pair pair;
    uint64_t when;
    td_fleet_began(&fleet, 1, 100); /* one long prompt weighs more than ... */
    td_fleet_began(&fleet, 2, 10);  /* ... three short ones */
    td_fleet_began(&fleet, 2, 10);
    td_fleet_began(&fleet, 2, 10);
    td_fleet_began(&fleet, 3, 50);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 2);
    assert_int_equal(pair.decode, 4);
    td_fleet_did(&fleet, 1, 90);
    td_fleet_ended(&fleet, 3, 50);
    td_fleet_began(&fleet, 4, 1);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 1);
    assert_int_equal(pair.decode, 3);
}

static void test_busy_and_draining(void **state) {
    (void)state;
    four();
    struct td_pair pair;
    uint64_t when;
    td_fleet_busy(&fleet, 3, 5 * S);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.decode, 4);
    assert_true(td_fleet_drain(&fleet, "d1", true));
    assert_false(td_fleet_drain(&fleet, "nobody", true));
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_BUSY);
    assert_int_equal(when, 5 * S);
    assert_int_equal(td_fleet_choose(&fleet, 5 * S, need(10), false, false, &pair, &when), TD_OK);
    td_fleet_roomy(&fleet, 3);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when), TD_OK);
}

static td_status choose(uint64_t now, bool patient, struct td_pair *ret_pair, uint64_t *ret_when) {
    return td_fleet_choose(&fleet, now, need(10), false, patient, ret_pair, ret_when);
}

static void test_cooling(void **state) {
    (void)state;
    four();
    struct td_pair pair;
    uint64_t when;
    td_fleet_drain(&fleet, "d1", true);
    for (int i = 0; i < 16; i++) /* one step fails, and sixteen sequences with it */
        td_fleet_failed(&fleet, 3, 10 * S);
    assert_int_equal(td_fleet_find(&fleet, 3)->cool.until_ns, 11 * S);
    assert_int_equal(choose(10 * S, true, &pair, &when), TD_BUSY);
    assert_int_equal(when, 11 * S);
    assert_int_equal(choose(10 * S, false, &pair, &when), TD_OK); /* the service goes on */
    td_fleet_drain(&fleet, "d1", false);
    assert_int_equal(choose(10 * S, false, &pair, &when), TD_OK);
    assert_int_equal(pair.decode, 4); /* but not there while there is another */
    td_fleet_busy(&fleet, 4, 20 * S);
    assert_int_equal(choose(10 * S, false, &pair, &when), TD_BUSY); /* not even a full one */
    assert_int_equal(when, 11 * S);
    /* It doubles up to its bound, is forgotten after a success, and never lasts. */
    td_fleet_failed(&fleet, 3, 11 * S);
    assert_int_equal(td_fleet_find(&fleet, 3)->cool.until_ns, 13 * S);
    td_fleet_failed(&fleet, 3, 13 * S);
    td_fleet_failed(&fleet, 3, 17 * S);
    assert_int_equal(td_fleet_find(&fleet, 3)->cool.until_ns, 21 * S);
    td_fleet_worked(&fleet, (struct td_pair){1, 3});
    td_fleet_failed(&fleet, 3, 30 * S);
    assert_int_equal(td_fleet_find(&fleet, 3)->cool.until_ns, 31 * S);
}

static void test_a_way_cools_alone(void **state) {
    (void)state;
    four();
    struct td_pair pair;
    uint64_t when;
    td_fleet_way_failed(&fleet, (struct td_pair){1, 3}, 0);
    td_fleet_began(&fleet, 4, 100);
    assert_int_equal(choose(0, true, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 2); /* the decode worker itself is not blamed ... */
    assert_int_equal(pair.decode, 3);
    td_fleet_ended(&fleet, 4, 100);
    td_fleet_began(&fleet, 2, 100);
    td_fleet_began(&fleet, 3, 1);
    assert_int_equal(choose(0, true, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 1); /* ... nor the prefill worker */
    assert_int_equal(pair.decode, 4);
    /* A new process starts with a clean slate. */
    td_fleet_leave(&fleet, 3);
    join(TD_ROLE_DECODE, "d0", 13);
    assert_int_equal(td_fleet_cool_until(&fleet, (struct td_pair){1, 13}), 0);
}

static bool moved(uint64_t epoch, uint32_t number, const char *address) {
    const struct td_msg_moved m = {epoch, (const uint8_t *)address, strlen(address), number};
    return td_fleet_moved(&fleet, &m);
}

static void test_another_address(void **state) {
    (void)state;
    four();
    const struct td_fleet_worker *w = td_fleet_find(&fleet, 3);
    td_fleet_way_failed(&fleet, (struct td_pair){1, 3}, 0);
    td_fleet_way_failed(&fleet, (struct td_pair){1, 4}, 0);
    assert_true(moved(3, 1, "there"));
    assert_int_equal(w->xfer_address_len, 5);
    assert_memory_equal(w->xfer_address, "there", 5);
    assert_int_equal(w->xfer_number, 1);
    /* What failed on the way there failed on the way to the old one. */
    assert_int_equal(td_fleet_cool_until(&fleet, (struct td_pair){1, 3}), 0);
    assert_int_not_equal(td_fleet_cool_until(&fleet, (struct td_pair){1, 4}), 0);
    /* An older one, the same again, nobody, none, and who is not dialed. */
    assert_true(moved(3, 3, "later"));
    assert_false(moved(3, 2, "late"));
    assert_false(moved(3, 3, "same"));
    assert_false(moved(9, 1, "nobody"));
    assert_false(moved(3, 4, ""));
    assert_false(moved(1, 1, "prefill"));
    assert_memory_equal(w->xfer_address, "later", 5);
}

static void test_limits_and_readiness(void **state) {
    (void)state;
    begin();
    struct td_pair pair;
    uint64_t when;
    assert_int_equal(td_fleet_limit(&fleet, false), 0);
    join(TD_ROLE_DECODE, "d0", 3);
    assert_int_equal(td_fleet_limit(&fleet, false), 0); /* any worker is not enough */
    assert_false(td_fleet_ready(&fleet));
    struct td_msg_hello h = hello(TD_ROLE_PREFILL, "p0", 1);
    h.max_context = 600;
    uint64_t replaced;
    td_fleet_join(&fleet, 0, &h, &replaced);
    assert_int_equal(td_fleet_limit(&fleet, false), 600); /* the smaller of both */
    assert_int_equal(td_fleet_limit(&fleet, true), 1000);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(10), false, false, &pair, &when),
                     TD_UNREACHABLE);
    assert_true(td_fleet_probe_due(&fleet, 0, &pair, &when));
    td_fleet_proven(&fleet, pair);
    assert_true(td_fleet_ready(&fleet));
    assert_false(td_fleet_probe_due(&fleet, 0, &pair, &when));
    assert_int_equal(td_fleet_choose(&fleet, 0, need(601), false, false, &pair, &when),
                     TD_UNREACHABLE);
    assert_int_equal(td_fleet_choose(&fleet, 0, need(601), true, false, &pair, &when), TD_OK);
    assert_int_equal(pair.prefill, 0);
}

/* A slot for each, the full pages once, a page for each. */
static void test_choices(void **state) {
    (void)state;
    begin();
    struct td_pair pair;
    uint64_t when, replaced;
    struct td_msg_hello h = hello(TD_ROLE_DECODE, "d0", 3), g = hello(TD_ROLE_DECODE, "d1", 4);
    h.slots = 4, h.pages = 6;
    g.slots = 16, g.pages = 5;
    join(TD_ROLE_PREFILL, "p0", 1);
    td_fleet_join(&fleet, 0, &h, &replaced);
    td_fleet_proven(&fleet, (struct td_pair){1, 3});
    struct td_fleet_need need = {.n_prompt = 255, .max_new = 10};
    assert_int_equal(td_fleet_choices(&fleet, need, false), 4); /* slots */
    td_fleet_join(&fleet, 0, &g, &replaced);
    td_fleet_proven(&fleet, (struct td_pair){1, 4});
    assert_int_equal(td_fleet_choices(&fleet, need, false), 5);
    need.n_prompt = 512;
    assert_int_equal(td_fleet_choices(&fleet, need, false), 4);
    need.n_prompt = 1000;
    assert_int_equal(td_fleet_choices(&fleet, need, false), 0); /* 1010 tokens */
    need.max_new = 0;
    assert_int_equal(td_fleet_choices(&fleet, need, false), 3);
    /* Only d0 can hold three, though d1 has less to do. */
    td_fleet_began(&fleet, 3, 100);
    need.choices = 2;
    assert_int_equal(td_fleet_choose(&fleet, 0, need, false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.decode, 4);
    need.choices = 3;
    assert_int_equal(td_fleet_choose(&fleet, 0, need, false, false, &pair, &when), TD_OK);
    assert_int_equal(pair.decode, 3);
    need.choices = 4;
    assert_int_equal(td_fleet_choose(&fleet, 0, need, false, false, &pair, &when), TD_UNREACHABLE);
    /* Pages of four ranks that share them: the prompt is inside one. */
    struct td_msg_hello s = hello(TD_ROLE_DECODE, "d2", 5);
    s.slots = 16, s.pages = 4, s.page_tokens = 1024;
    td_fleet_join(&fleet, 0, &s, &replaced);
    td_fleet_proven(&fleet, (struct td_pair){1, 5});
    assert_int_equal(td_fleet_choices(&fleet, need, false), 4);
}

/* Nothing but the word that the engine is busy counts, whatever else waits or runs there. */
static void test_stalled_until_it_steps(void **state) {
    (void)state;
    four();
    fleet.o.stall_ns = 3 * S;
    beat(1 * S, 1, false, 5);
    beat(9 * S, 1, false, 5);
    assert_true(td_fleet_stall_at(&fleet) == UINT64_MAX);
    beat(10 * S, 1, true, 5);
    assert_true(td_fleet_stall_at(&fleet) == 13 * S);
    beat(12 * S, 1, true, 6);
    assert_true(td_fleet_stall_at(&fleet) == 15 * S);
    beat(14 * S, 1, true, 6);
    assert_true(td_fleet_stall(&fleet, 15 * S - 1) == 0);
    assert_true(td_fleet_stall(&fleet, 15 * S) == 1);
    assert_true(td_fleet_stall_at(&fleet) == UINT64_MAX);
    assert_false(beat(16 * S, 1, true, 6));
    assert_true(fleet.worker[0].stalled);
    assert_true(beat(17 * S, 1, true, 7));
    assert_false(fleet.worker[0].stalled);
}

/* Workers that leave are in no pair, nor is what takes their entries in another role. */
static void test_entry_changes_role(void **state) {
    (void)state;
    four();
    td_fleet_leave(&fleet, 3);
    td_fleet_leave(&fleet, 4);
    assert_false(td_fleet_ready(&fleet));
    assert_int_equal(td_fleet_limit(&fleet, false), 0);
    assert_int_equal(td_fleet_limit(&fleet, true), 0);
    join(TD_ROLE_PREFILL, "p2", 5);
    assert_int_equal(td_fleet_limit(&fleet, true), 0);
    td_fleet_leave(&fleet, 1);
    join(TD_ROLE_DECODE, "d2", 6);
    assert_int_equal(td_fleet_limit(&fleet, true), 1000);
    struct td_pair pair;
    uint64_t when, seen = 0;
    while (td_fleet_probe_due(&fleet, 0, &pair, &when)) {
        assert_int_equal(pair.decode, 6);
        assert_true(pair.prefill == 2 || pair.prefill == 5);
        assert_int_equal(seen & 1ull << pair.prefill, 0);
        seen |= 1ull << pair.prefill;
        td_fleet_proven(&fleet, pair);
    }
    assert_int_equal(seen, 1ull << 2 | 1ull << 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_one_process_of_a_name),
        cmocka_unit_test(test_least_outstanding_tokens),
        cmocka_unit_test(test_busy_and_draining),
        cmocka_unit_test(test_cooling),
        cmocka_unit_test(test_a_way_cools_alone),
        cmocka_unit_test(test_another_address),
        cmocka_unit_test(test_limits_and_readiness),
        cmocka_unit_test(test_choices),
        cmocka_unit_test(test_stalled_until_it_steps),
        cmocka_unit_test(test_entry_changes_role),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

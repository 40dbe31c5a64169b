/* The receiving half: who is let in, what is taken, and when a landing slab is free again. */
#include "tests/decode/harness.h"

static void test_greeting(void **state) {
    (void)state;
    struct td_msg m = hello(PREFILL);
    m.peer_hello.version = 9;
    assert_string_equal(from_peer(1, m), "peer WELCOME PROTOCOL\n");
    m = hello(PREFILL);
    m.peer_hello.decode_epoch = 1; /* means a process that was here before */
    assert_string_equal(from_peer(2, m), "peer WELCOME STALE\n");
    m = hello(PREFILL);
    m.peer_hello.fingerprint++;
    assert_string_equal(from_peer(3, m), "peer WELCOME MISMATCH\n");
    m = hello(PREFILL);
    m.peer_hello.numerics_id++;
    assert_string_equal(from_peer(4, m), "peer WELCOME MISMATCH\n");
    assert_string_equal(from_peer(5, hello(PREFILL)), "peer WELCOME OK\n");
    assert_string_equal(from_peer(5, hello(PREFILL)), ""); /* a double */
    assert_string_equal(from_peer(6, hello(PREFILL2)), "peer WELCOME OK\n");
    assert_string_equal(from_peer(7, hello(52)), "peer WELCOME BUSY\n"); /* bounded */
    assert_int_equal(ledger().landing_granted, 4);
}

static void test_slabs_in_order_and_once(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 600, 5);
    assert_string_equal(slab(1, ticket, 0, 0, 2), "UNPACK 0+2 from 0\n");
    assert_string_equal(slab(1, ticket, 0, 0, 2), ""); /* while it is unpacked */
    assert_string_equal(slab(1, ticket, 1, 0, 2), ""); /* the same blocks again */
    assert_string_equal(slab(1, ticket, 7, 2, 1), ""); /* no such slab */
    assert_string_equal(unpacked(0, 600, 0, 2), "peer CREDIT 0\n");
    assert_string_equal(slab(1, ticket, 1, 3, 1), /* block 2 was lost */
                        "peer CREDIT 1\npeer ABORT PROTOCOL\nFAILED 1 PROTOCOL\nRELEASED 1\n");
}

static void test_manifest_waits_for_the_last_unpack(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 300, 5);
    slab(1, ticket, 0, 0, 2);
    assert_string_equal(slab(1, ticket, 1, 2, 1), "UNPACK 2+1 from 1\n");
    assert_string_equal(unpacked(1, 300, 2, 1), "peer CREDIT 1\n");
    assert_string_equal(manifest(1, ticket, 300, 5, 7), "");
    assert_string_equal(unpacked(0, 300, 0, 2), "peer CREDIT 0\npeer VERDICT OK\nSTEP 300+1\n");
    assert_int_equal(ledger().handoffs_ok, 1);
}

static void test_manifest_again_after_a_lost_verdict(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 2);
    slab(1, ticket, 0, 0, 2);
    unpacked(0, 10, 0, 2);
    manifest(1, ticket, 10, 5, 7);
    assert_string_equal(manifest(1, ticket, 10, 5, 7), "peer VERDICT OK\n");
    computed(8); /* the answer is complete, and the ticket's place is free */
    assert_int_equal(ledger().slots_owned, 0);
    assert_string_equal(manifest(1, ticket, 10, 5, 7), "peer VERDICT OK\n");
    assert_int_equal(ledger().handoffs_ok, 1);
    admit(2, 10, 5);
    slab(1, ticket, 0, 0, 2);
    unpacked(0, 10, 0, 2);
    manifest(1, ticket, 10, 6, 7); /* another prompt */
    assert_string_equal(manifest(1, ticket, 10, 6, 7), "peer VERDICT CORRUPT\n");
    assert_int_equal(ledger().handoffs_failed, 1);
}

static void test_manifest_that_does_not_fit(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 300, 5);
    slab(1, ticket, 0, 0, 2);
    unpacked(0, 300, 0, 2);
    assert_string_equal(manifest(1, ticket, 300, 5, 7), /* the slot is missing */
                        "peer VERDICT CORRUPT\nFAILED 1 CORRUPT\nRELEASED 1\n");
    admit(2, 10, 5);
    slab(1, ticket, 0, 0, 2);
    unpacked(0, 10, 0, 2);
    assert_string_equal(manifest(1, ticket, 10, 6, 7), /* another prompt */
                        "peer VERDICT CORRUPT\nFAILED 2 CORRUPT\nRELEASED 2\n");
    assert_int_equal(ledger().handoffs_failed, 2);
}

static void test_damaged_block(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5);
    slab(1, ticket, 0, 0, 2);
    assert_string_equal(
        step((struct td_decode_event){
            .kind = TD_DECODE_UNPACKED,
            .unpacked = {.landing_slab = 0, .status = TD_CORRUPT, .text = "block 0: CSA"}}),
        "peer CREDIT 0\npeer ABORT CORRUPT\nFAILED 1 CORRUPT\nRELEASED 1\n");
}

static void test_unknown_tickets(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_string_equal(slab(1, 99, 0, 0, 1), "peer CREDIT 0\npeer ABORT STALE\n");
    assert_string_equal(manifest(1, 99, 10, 5, 7), "peer ABORT STALE\n");
    assert_string_equal(slab(3, 99, 0, 0, 1), ""); /* never greeted */
    admit(1, 10, 5);
    from_peer(2, hello(PREFILL2));
    slab(1, ticket, 0, 0, 1);
    assert_string_equal(slab(2, ticket, 0, 1, 1), "peer CREDIT 0\npeer ABORT STALE\n"); /* whose? */
}

static void test_cancel_waits_for_the_unpack(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5);
    slab(1, ticket, 0, 0, 2);
    assert_string_equal(cancel(1), "peer ABORT CANCELLED\n");
    assert_int_equal(ledger().pages_owned, 1);
    assert_string_equal(unpacked(0, 10, 0, 2), "peer CREDIT 0\nRELEASED 1\n");
    assert_string_equal(manifest(1, ticket, 10, 5, 7), "peer ABORT STALE\n");
}

static void test_abort_by_prefill(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5); /* nothing was sent yet */
    from_peer(1,
              (struct td_msg){.type = TD_MSG_ABORT, .abort = {PREFILL, ticket, TD_TIMEOUT, "x"}});
    assert_string_equal(said, "FAILED 1 TIMEOUT\nRELEASED 1\n");
}

static void test_quarantine_until_the_exit_is_proven(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5);
    slab(1, ticket, 0, 0, 2);
    assert_string_equal(peer(TD_DECODE_PEER_LOST, 1), "CLOSE 1\nFAILED 1 PEER_LOST\n");
    assert_int_equal(ledger().landing_quarantined, 2);
    assert_string_equal(peer(TD_DECODE_PEER_LOST, 1), "");
    assert_string_equal(peer(TD_DECODE_PEER_EXITED, 1), "");
    assert_int_equal(ledger().landing_quarantined, 2); /* it is still being read */
    unpacked(0, 10, 0, 2);
    assert_non_null(strstr(said, "RELEASED 1\n"));
    assert_int_equal(ledger().landing_free, 4);
}

/* tcp: decode itself has closed the link, and only decode writes. */
static void test_quarantine_until_the_link_is_quiet(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5);
    slab(1, ticket, 0, 0, 2);
    assert_string_equal(peer(TD_DECODE_PEER_LOST, 1), "CLOSE 1\nFAILED 1 PEER_LOST\n");
    assert_int_equal(ledger().landing_quarantined, 2);
    assert_string_equal(peer(TD_DECODE_PEER_QUIET, 1), "");
    assert_int_equal(ledger().landing_quarantined, 2); /* one of them is still being read */
    unpacked(0, 10, 0, 2);
    assert_int_equal(ledger().landing_free, 4);
    /* The end of a link that has been replaced says nothing about the new one. */
    from_peer(2, hello(PREFILL));
    from_peer(3, hello(PREFILL));
    assert_string_equal(peer(TD_DECODE_PEER_QUIET, 2), "");
    assert_int_equal(ledger().landing_granted, 2);
}

static void test_quarantine_until_it_greets_again(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    admit(1, 10, 5);
    slab(1, ticket, 0, 0, 2);
    after(2000);
    assert_non_null(strstr(said, "CLOSE 1\n")); /* silent */
    assert_int_equal(ledger().landing_quarantined, 2);
    assert_string_equal(from_peer(2, hello(PREFILL)), ""); /* its old slab is still being read */
    assert_string_equal(unpacked(0, 10, 0, 2), "peer CREDIT 0\npeer WELCOME OK\nRELEASED 1\n");
    assert_int_equal(ledger().landing_granted, 2);
    assert_string_equal(from_peer(1, hello(PREFILL)), ""); /* late, of the link before */
    assert_string_equal(peer(TD_DECODE_PEER_LOST, 1), "");
    assert_int_equal(ledger().landing_granted, 2);
}

static void test_beats(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_string_equal(after(1000), "peer BEAT\n");
    from_peer(1, (struct td_msg){.type = TD_MSG_PEER_BEAT});
    assert_string_equal(after(1000), "peer BEAT\n");
    assert_string_equal(after(1000), "CLOSE 1\n");
}

/* A process that was stopped, or got no processor, does not take its own absence for the peer's;
 * from then on the peer's silence counts. */
static void test_own_absence(void **state) {
    (void)state;
    from_peer(1, hello(PREFILL));
    assert_string_equal(after(10000), "peer BEAT\n");
    assert_string_equal(after(999), "");
    assert_string_equal(after(1), "CLOSE 1\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_greeting),
        T(test_slabs_in_order_and_once),
        T(test_manifest_waits_for_the_last_unpack),
        T(test_manifest_again_after_a_lost_verdict),
        T(test_manifest_that_does_not_fit),
        T(test_damaged_block),
        T(test_unknown_tickets),
        T(test_cancel_waits_for_the_unpack),
        T(test_abort_by_prefill),
        T(test_quarantine_until_the_exit_is_proven),
        T(test_quarantine_until_the_link_is_quiet),
        T(test_quarantine_until_it_greets_again),
        T(test_beats),
        T(test_own_absence),
    };
    (void)admit_ids, (void)keep, (void)computed;
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The sending half: slabs, credits, order, and nothing freed before it is quiet. */
#include "tests/prefill/harness.h"

/* Prompt of 3 pages (two full, one of 88 tokens), computed, peer open. A slab holds 4 page blocks:
 * the slot's block of this small layout is that large. */
static void computed_600(uint32_t slabs) {
    prefill(1, 600);
    welcome(slabs);
    settle();
    computed(42);
}

static void test_whole_handoff(void **state) {
    (void)state;
    computed_600(2);
    assert_string_equal(said, "TOKENS 1 #0\nPACK 0+3 in 0\nPACK 3+1 in 1 slot\n");
    assert_string_equal(packed(1, 600, 3, 1), "PUT 1 to 1\n");
    assert_string_equal(packed(0, 600, 0, 3), "PUT 0 to 0\n");
    /* Flushed in another order: SLAB still goes in block order, and MANIFEST last. */
    assert_string_equal(put_done(1, TD_OK, true), "");
    assert_string_equal(put_done(0, TD_OK, true),
                        "peer SLAB 0+3 in 0\npeer SLAB 3+1 in 1\npeer MANIFEST 4\n");
    assert_int_equal(ledger().send_busy, 0);
    assert_int_equal(ledger().pages_owned, 3); /* until decode has taken it */
    assert_string_equal(verdict(1, TD_OK), "RELEASED 1\n");
    assert_int_equal(ledger().pages_owned, 0);
    assert_int_equal(ledger().handoffs_ok, 1);
    assert_int_equal(ledger().bytes_moved, 200);
    assert_int_equal(ledger().bytes_before_last_chunk, 0);
}

static void test_manifest_has_every_choice(void **state) {
    (void)state;
    const int32_t first[3] = {42, EOS, 43};
    prefill_n(1, 600, 10, 3);
    welcome(2);
    settle();
    computed_each(first, 3);
    packed(0, 600, 0, 3);
    put_done(0, TD_OK, true);
    packed(1, 600, 3, 1);
    assert_string_equal(put_done(1, TD_OK, true), "peer SLAB 3+1 in 1\npeer MANIFEST 4 42 1 43\n");
}

static void test_blocks_leave_while_the_next_chunk_computes(void **state) {
    (void)state;
    prefill(1, 1300);
    welcome(2);
    assert_string_equal(computed(0), "STEP 512+512\nPACK 0+2 in 0\n");
    packed(0, 1300, 0, 2);
    assert_string_equal(put_done(0, TD_OK, true), "peer SLAB 0+2 in 0\n");
    assert_int_equal(ledger().bytes_before_last_chunk, 100);
}

static void test_credits(void **state) {
    (void)state;
    computed_600(1);
    assert_string_equal(said, "TOKENS 1 #0\nPACK 0+3 in 0\n"); /* one landing slab, one pack */
    packed(0, 600, 0, 3);
    put_done(0, TD_OK, true);
    assert_string_equal(credit(2, 0, 0), ""); /* of another ticket */
    assert_string_equal(credit(1, 0, 2), ""); /* of another use */
    assert_string_equal(credit(1, 9, 0), ""); /* of no slab */
    assert_string_equal(credit(1, 0, 0), "PACK 3+1 in 0 slot\n");
    assert_string_equal(credit(1, 0, 0), ""); /* a double */
}

static void test_cancel_waits_for_the_put(void **state) {
    (void)state;
    computed_600(2);
    packed(0, 600, 0, 3);
    assert_string_equal(cancel(1), "peer ABORT CANCELLED\n");
    assert_int_equal(ledger().pages_owned, 3);
    assert_string_equal(packed(1, 600, 3, 1), ""); /* packed, but goes nowhere */
    assert_string_equal(put_done(0, TD_OK, true), "RELEASED 1\n");
    assert_int_equal(ledger().send_busy + ledger().pages_owned, 0);
    /* Both landing slabs are still ours. */
    prefill(2, 600);
    assert_string_equal(computed(42), "TOKENS 2 #0\nPACK 0+3 in 0\nPACK 3+1 in 1 slot\n");
}

static void test_failed_put_closes_the_link(void **state) {
    (void)state;
    computed_600(2);
    packed(0, 600, 0, 3);
    packed(1, 600, 3, 1);
    assert_string_equal(put_done(0, TD_TIMEOUT, false), "CLOSE\nFAILED 1 TIMEOUT\n");
    assert_int_equal(ledger().pages_owned, 3);
    assert_string_equal(put_done(1, TD_CANCELLED, true), "");
    assert_int_equal(ledger().send_busy, 1); /* slab 0 may still be read */
    assert_string_equal(put_quiet(0), "RELEASED 1\n");
    /* Now the writes are over, and decode is told by a new greeting. */
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT\npeer HELLO\n");
}

static void test_greeting_in_vain(void **state) {
    (void)state;
    prefill(1, 10);
    assert_string_equal(after(100), "CLOSE\nFAILED 1 TIMEOUT\n"); /* the engine still computes */
    assert_string_equal(computed(42), "RELEASED 1\n");
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT\npeer HELLO\n");
    after(100);
    peer(TD_PREFILL_PEER_CLOSED);
    after(100);
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), ""); /* after three it rests */
    assert_string_equal(after(99), "");
    assert_string_equal(after(1), "CONNECT\npeer HELLO\n");
    assert_string_equal(after(100), "CLOSE\n");
    peer(TD_PREFILL_PEER_CLOSED);
    assert_string_equal(after(199), ""); /* a longer rest each time */
    assert_string_equal(after(1), "CONNECT\npeer HELLO\n");
    after(100);
    peer(TD_PREFILL_PEER_CLOSED);
    prefill(2, 10); /* who is needed is greeted at once */
    assert_non_null(strstr(said, "CONNECT\npeer HELLO\n"));
    for (int k = 0; k < 12; k++) { /* but there is a longest rest */
        after(100);
        peer(TD_PREFILL_PEER_CLOSED);
        if (k == 0) computed(42);
        assert_in_range(td_prefill_deadline(machine) - now, 1, 32 * 100 * MS);
        assert_string_equal(after(32 * 100), "CONNECT\npeer HELLO\n");
    }
}

static void test_resting_peers_make_room(void **state) {
    (void)state;
    for (uint64_t epoch = DECODE; epoch < DECODE + 5; epoch++) { /* there is room for two */
        struct td_msg m = {.type = TD_MSG_PREFILL,
                           .prefill = {.key = {epoch, 1},
                                       .n_prompt = 10,
                                       .max_new = 5,
                                       .ids = ids,
                                       .ticket = epoch,
                                       .decode_epoch = epoch}};
        step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
        assert_non_null(strstr(said, "CONNECT\npeer HELLO\n"));
        for (int k = 0; k < 3; k++) {
            after(100);
            step((struct td_prefill_event){.kind = TD_PREFILL_PEER_CLOSED,
                                           .peer = {.epoch = epoch}});
        }
        computed(42);
    }
}

static void test_refused_peer(void **state) {
    (void)state;
    prefill(1, 10);
    from_peer((struct td_msg){
        .type = TD_MSG_PEER_WELCOME,
        .peer_welcome = {.prefill_epoch = ME, .status = TD_MISMATCH, .text = "other layout"}});
    assert_string_equal(said, "CLOSE\nFAILED 1 MISMATCH\n");
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), ""); /* not again */
}

static const char *moved(uint8_t number) {
    struct td_msg m = {.type = TD_MSG_MOVED, .moved = {DECODE, &number, 1, number}};
    return step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
}

/* Decode has another address: its link begins anew there, in whatever state it is. */
static void test_another_address(void **state) {
    (void)state;
    dial = 1;
    prefill(1, 10);
    assert_non_null(strstr(said, "CONNECT 1\npeer HELLO\n"));
    assert_string_equal(moved(1), ""); /* no news */
    /* Greeting, at an address that nobody answers any more: what was sent nothing goes along. */
    assert_string_equal(moved(2), "CLOSE\n");
    assert_string_equal(computed(42), "TOKENS 1 #0\n");
    assert_string_equal(moved(3), ""); /* while it is being closed */
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT 3\npeer HELLO\n");
    assert_non_null(strstr(welcome(2), "PACK 0+1 in 0\nPACK 1+1 in 1 slot\n"));
    settle();
    /* Open; who was told an older address does not lead back. */
    dial = 2;
    prefill(2, 10);
    assert_null(strstr(said, "CLOSE"));
    assert_string_equal(packed(0, 10, 0, 1), "PUT 0 to 0\n");
    assert_string_equal(packed(1, 10, 1, 1), "PUT 1 to 1\n");
    assert_string_equal(moved(4), "CLOSE\nFAILED 1 PEER_LOST\nFAILED 2 PEER_LOST\n");
    assert_string_equal(put_done(0, TD_CANCELLED, true), "");
    assert_string_equal(put_done(1, TD_CANCELLED, true), "RELEASED 1\n");
    assert_string_equal(computed(42), "RELEASED 2\n");
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT 4\npeer HELLO\n");
    /* Resting. */
    for (int k = 0; k < 3; k++) {
        after(100);
        peer(TD_PREFILL_PEER_CLOSED);
    }
    assert_string_equal(after(1), "");
    assert_string_equal(moved(5), "CONNECT 5\npeer HELLO\n");
    after(100); /* there as often as elsewhere */
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT 5\npeer HELLO\n");
    /* A request brings the news as well. */
    welcome(2);
    settle();
    dial = 6;
    assert_string_equal(prefill(3, 10), "CLOSE\nFAILED 3 PEER_LOST\nRELEASED 3\n");
    assert_string_equal(peer(TD_PREFILL_PEER_CLOSED), "CONNECT 6\npeer HELLO\n");
}

/* Who waits for pages while the news comes dials the new one. */
static void test_another_address_while_waiting(void **state) {
    (void)state;
    struct td_msg m = {.type = TD_MSG_PREFILL,
                       .prefill = {.key = {1, 1},
                                   .n_prompt = 10,
                                   .max_new = 5,
                                   .ids = ids,
                                   .ticket = 1,
                                   .decode_epoch = DECODE + 1}};
    step((struct td_prefill_event){.kind = TD_PREFILL_MESSAGE, .msg = &m});
    dial = 1;
    assert_string_equal(prefill(2, 10), "");
    assert_string_equal(moved(2), "");
    computed(42);
    assert_non_null(strstr(said, "CONNECT 2\npeer HELLO\n"));
}

static void test_silence_and_beats(void **state) {
    (void)state;
    computed_600(2);
    assert_string_equal(after(40), "peer BEAT\n");
    packed(0, 600, 0, 3);
    packed(1, 600, 3, 1);
    put_done(0, TD_OK, true);
    put_done(1, TD_OK, true); /* manifest sent */
    after(60);
    credit(1, 0, 0);
    credit(1, 1, 3);
    assert_string_equal(after(39), "peer MANIFEST 4\n"); /* asks again */
    assert_string_equal(after(1), "peer ABORT TIMEOUT\npeer BEAT\nFAILED 1 TIMEOUT\nRELEASED 1\n");
    for (int k = 0; k < 3; k++)
        assert_string_equal(after(40), "peer BEAT\n");
    assert_string_equal(after(39), ""); /* heard 199 ms ago */
    assert_string_equal(after(1), "CLOSE\n");
}

/* A process that was stopped, or got no processor, does not take its own absence for the peer's;
 * from then on the peer's silence counts. */
static void test_own_absence(void **state) {
    (void)state;
    computed_600(2);
    assert_string_equal(after(40), "peer BEAT\n");
    assert_string_equal(after(1000), "peer BEAT\n");
    assert_string_equal(after(40), "peer BEAT\n");
    assert_string_equal(after(40), "peer BEAT\n");
    assert_string_equal(after(40), "CLOSE\nFAILED 1 TIMEOUT\n");
}

static void test_credit_that_never_comes(void **state) {
    (void)state;
    computed_600(2);
    packed(0, 600, 0, 3);
    packed(1, 600, 3, 1);
    put_done(0, TD_OK, true);
    cancel(1);
    put_done(1, TD_OK, true);
    assert_int_equal(ledger().pages_owned, 0);
    assert_string_equal(after(100), "CLOSE\n"); /* nobody waits for it but the slab itself */
}

static void test_bad_verdict_and_abort(void **state) {
    (void)state;
    computed_600(2);
    assert_string_equal(verdict(1, TD_OK), /* before the manifest */
                        "peer ABORT PROTOCOL\nFAILED 1 PROTOCOL\n");
    packed(0, 600, 0, 3);
    assert_string_equal(packed(1, 600, 3, 1), "RELEASED 1\n");
    prefill(2, 600);
    computed(42);
    from_peer((struct td_msg){.type = TD_MSG_ABORT, .abort = {DECODE, 102, TD_CORRUPT, "bad"}});
    assert_string_equal(said, "FAILED 2 CORRUPT\n");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_whole_handoff),
        T(test_manifest_has_every_choice),
        T(test_blocks_leave_while_the_next_chunk_computes),
        T(test_credits),
        T(test_cancel_waits_for_the_put),
        T(test_failed_put_closes_the_link),
        T(test_greeting_in_vain),
        T(test_resting_peers_make_room),
        T(test_refused_peer),
        T(test_another_address),
        T(test_another_address_while_waiting),
        T(test_silence_and_beats),
        T(test_own_absence),
        T(test_credit_that_never_comes),
        T(test_bad_verdict_and_abort),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

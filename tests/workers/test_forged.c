/* Faults in the handoff, put into good data and sent to a real decode worker over the real data
 * plane: in each of the seven families, in the slot's previous window, in the manifest, and in the
 * messages around them. Each must end as FAILED at the router, without a token; afterwards nothing
 * is held and an honest handoff gives the text that decode gives alone.
 *
 * What no receiver can see is not tested here: a sender that computes wrong state and describes it
 * rightly, such as zeros where a previous window was, with block checksum and manifest to match.
 * The same zeros with an honest manifest are found, and so is a window that is left out.
 *
 * usage: test_forged PREFILL DECODE MODEL [seed] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/kv/checksum.h"
#include "common/xfer/xfer.h"
#include "tests/workers/forger.h"

/* 643 = 2 * 256 + 131: three page blocks, a full window, open rows in all three states. */
enum { PROMPT = 643, PAGES = 3, SLOT = PAGES, MANIFEST = PAGES + 1, VOCAB = 2000, NEW_TOKENS = 5 };
enum { WINDOW_ROWS = 4 }; /* previous CSA window, per layer */

static const char *settings[CLUSTER_SETTINGS + 1]; /* of both workers */
static const char *prefill_program, *decode_program, *model_dir;
static uint64_t seed, random_state;
static struct cluster cluster;
static struct forger forger;
static int32_t ids[PROMPT];
static struct request alone; /* what decode says without a handoff */
static int cases;

static const struct td_sampling greedy = {.top_p = 1, .logprobs = true, .ignore_eos = true};

static uint64_t next_random(void) { /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* ---- one handoff ---- */

static bool has_reply(void *r) {
    return ((struct request *)r)->decode.replied;
}

static struct request *admit(void) {
    struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, false, true);
    assert_true(cluster_until(&cluster, has_reply, r));
    if (r->decode.reply.status != TD_OK) fail_msg("not admitted: %s", r->decode.reply.text);
    return r;
}

static void settle(void) {
    if (!cluster_settles(&cluster))
        fail_msg("decode still holds %u pages and %u slots", cluster.decode.ledger.pages_owned,
                 cluster.decode.ledger.slots_owned);
}

/* Sends `h` and expects that decode finds the fault with this status (or the other). */
static void expect_found(const char *what, struct forged *h, struct request *r, td_status want,
                         td_status or) {
    assert_true(forger_send(&forger, h));
    if (!cluster_until(&cluster, request_over, r)) fail_msg("%s: no end", what);
    if (r->n_tokens != 0 || r->decode.finished) fail_msg("%s: became text", what);
    if (!r->decode.failed) fail_msg("%s: released without an error", what);
    td_status st = r->decode.failure.status;
    if ((st != want && st != or) || strlen(r->decode.failure.text) < 10)
        fail_msg("%s: expected %s or %s, found %s: %s", what, td_status_name(want),
                 td_status_name(or), td_status_name(st), r->decode.failure.text);
    cluster_forget(r);
    cases++;
}

/* The sender was told as well. */
static void expect_told(const char *what) {
    if (!forger.over || forger.status == TD_OK) fail_msg("%s: the sender was not told", what);
}

static void expect_good(struct request *r) {
    if (!cluster_until(&cluster, request_over, r)) fail_msg("an honest handoff has no end");
    if (r->decode.failed) fail_msg("an honest handoff failed: %s", r->decode.failure.text);
    assert_true(forger.over);
    assert_int_equal(forger.status, TD_OK);
    assert_int_equal(r->n_tokens, NEW_TOKENS - 1);
    assert_int_equal(forger.first.id, alone.token[0].id);
    for (int i = 1; i < NEW_TOKENS; i++)
        if (r->token[i].id != alone.token[i].id ||
            memcmp(&r->token[i].logprob, &alone.token[i].logprob, sizeof(float)) != 0)
            fail_msg("token %d: %d after a handoff, %d alone", i, r->token[i].id,
                     alone.token[i].id);
    cluster_forget(r);
}

static void honest(void) {
    struct request *r = admit();
    assert_true(forger_send(&forger, forger_make(&forger, r->decode.reply.ticket)));
    expect_good(r);
    settle();
}

/* ---- faults of a block ---- */

enum fault {
    DROPPED,
    DROPPED_SEALED, /* sealed: header and its checksums tell the same lie */
    TRUNCATED,
    TRUNCATED_SEALED,
    BIT,
    BIT_SEALED, /* only the manifest knows better */
    SWAPPED,
    SWAPPED_SEALED,
    STALE_EPOCH,
    STALE_TICKET,
    COUNT_UP,
    COUNT_DOWN,
    FAULTS,
};
static const char *const fault_name[FAULTS] = {
    "dropped",   "dropped, header agrees", "truncated",      "truncated, header agrees",
    "one bit",   "one bit, sealed",        "blocks swapped", "blocks swapped, sealed",
    "old epoch", "another ticket",         "a row too many", "a row too few",
};

static bool in_pages(int family) {
    return td_kv_in_block(TD_KV_PAGE_BLOCK, family);
}

static void exchange(uint8_t *a, uint8_t *b, size_t n) {
    assert_int_not_equal(memcmp(a, b, n), 0);
    for (size_t i = 0; i < n; i++) {
        uint8_t t = a[i];
        a[i] = b[i];
        b[i] = t;
    }
}

static void reseal(struct forged_block *b, int family) {
    b->header.checksum[family] = td_checksum(forged_family(b, family), b->header.bytes[family]);
    forged_seal(b);
}

/* Families of pages: the same family of two blocks. Families of the slot: two checksum blocks. */
static void swap(struct forged *h, int family, bool sealed) {
    struct forged_block *b = &h->block[in_pages(family) ? 0 : SLOT], *c = b;
    uint8_t *at = forged_family(b, family);
    if (in_pages(family)) {
        c = &h->block[1];
        exchange(at, forged_family(c, family), b->header.bytes[family]);
    } else {
        exchange(at, at + TD_CHECKSUM_BLOCK, TD_CHECKSUM_BLOCK);
    }
    if (!sealed) return;
    reseal(b, family);
    if (c != b) reseal(c, family);
}

static void cut_rows(struct forged_block *b, int family, uint64_t rows, bool sealed) {
    struct td_kv_block_header *h = &b->header;
    size_t n = h->bytes[family] / h->rows[family] * rows;
    forged_cut(b, forged_family(b, family) + h->bytes[family] - n, n);
    if (!sealed) return;
    h->rows[family] -= rows;
    h->bytes[family] -= n;
    h->body_bytes -= n;
    reseal(b, family);
}

static void spoil(struct forged *h, int family, enum fault fault) {
    uint32_t index = in_pages(family) ? (uint32_t)(next_random() % PAGES) : SLOT;
    struct forged_block *b = &h->block[index];
    assert_true(b->header.rows[family] > 0 && b->header.bytes[family] > 0);
    switch (fault) {
    case DROPPED:
    case DROPPED_SEALED:
        cut_rows(b, family, b->header.rows[family], fault == DROPPED_SEALED);
        break;
    case TRUNCATED:
    case TRUNCATED_SEALED:
        cut_rows(b, family, 1, fault == TRUNCATED_SEALED);
        break;
    case BIT:
    case BIT_SEALED:
        forged_family(b, family)[next_random() % b->header.bytes[family]] ^=
            (uint8_t)(1 << next_random() % 8);
        if (fault == BIT_SEALED) reseal(b, family);
        break;
    case SWAPPED:
    case SWAPPED_SEALED:
        swap(h, family, fault == SWAPPED_SEALED);
        break;
    case STALE_EPOCH:
        b->header.epoch ^= 1;
        forged_seal(b);
        break;
    case STALE_TICKET:
        b->header.ticket--;
        forged_seal(b);
        break;
    case COUNT_UP:
        b->header.rows[family]++;
        forged_seal(b);
        break;
    case COUNT_DOWN:
        b->header.rows[family]--;
        forged_seal(b);
        break;
    case FAULTS:
        break;
    }
    forged_measure(h);
}

static td_status status_of(enum fault fault) {
    switch (fault) {
    case STALE_EPOCH:
    case STALE_TICKET:
        return TD_STALE;
    case DROPPED_SEALED:
    case TRUNCATED_SEALED:
    case COUNT_UP:
    case COUNT_DOWN:
        return TD_PROTOCOL;
    default:
        return TD_CORRUPT;
    }
}

static void test_families(void **state) {
    (void)state;
    for (int family = 0; family < TD_KV_FAMILIES; family++) {
        for (int fault = 0; fault < FAULTS; fault++) {
            char what[100];
            snprintf(what, sizeof what, "%s: %s", td_kv_family_name(family), fault_name[fault]);
            struct request *r = admit();
            struct forged *h = forger_make(&forger, r->decode.reply.ticket);
            spoil(h, family, (enum fault)fault);
            expect_found(what, h, r, status_of((enum fault)fault), status_of((enum fault)fault));
            expect_told(what);
        }
        settle();
        honest();
    }
}

/* The first four rows of each CSA layer's state are the window before the open rows. */
static void test_previous_window(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        int family = k ? TD_KV_INDEX_STATE : TD_KV_CSA_STATE;
        for (int way = 0; way < 3; way++) { /* left out; left out with a header; zeros */
            struct request *r = admit();
            struct forged *h = forger_make(&forger, r->decode.reply.ticket);
            struct forged_block *b = &h->block[SLOT];
            uint32_t layers = forger.engine.layout->csa_layers;
            size_t layer = b->header.bytes[family] / layers;
            /* Previous rows hold one half, open rows both. */
            size_t row = layer / (WINDOW_ROWS + 2 * (PROMPT % 4)), n = WINDOW_ROWS * row;
            for (uint32_t y = layers; y-- > 0;) {
                uint8_t *at = forged_family(b, family) + y * layer;
                if (way == 2)
                    memset(at, 0, n);
                else
                    forged_cut(b, at, n);
            }
            if (way == 1) {
                b->header.rows[family] -= layers * WINDOW_ROWS;
                b->header.bytes[family] -= layers * n;
                b->header.body_bytes -= layers * n;
            }
            if (way > 0) reseal(b, family);
            forged_measure(h);
            td_status want = way == 1 ? TD_PROTOCOL : TD_CORRUPT;
            expect_found("previous window", h, r, want, want);
            expect_told("previous window");
        }
    }
    settle();
    honest();
}

/* ---- faults of the manifest ---- */

typedef void spoil_manifest(struct td_msg_manifest *m);
#define SPOIL(name, what)                                                                          \
    static void name(struct td_msg_manifest *m) {                                                  \
        what;                                                                                      \
    }
SPOIL(old_decode, m->decode_epoch ^= 1)
SPOIL(old_prefill, m->epoch ^= 1)
SPOIL(longer, m->n_prompt++)
SPOIL(shorter, m->n_prompt--)
SPOIL(more_blocks, m->n_blocks++)
SPOIL(fewer_blocks, m->n_blocks--)
SPOIL(other_prompt, m->prompt_hash ^= 1ull << 40)
SPOIL(other_layout, m->fingerprint ^= 2)
SPOIL(six_families, m->n_families--)
SPOIL(no_first, m->n_first = 0)
SPOIL(two_first, m->n_first = 2)
SPOIL(position, m->next_position--)
#undef SPOIL

static const struct {
    const char *name;
    spoil_manifest *spoil;
    td_status want;
} manifest_faults[] = {
    {"decode epoch", old_decode, TD_STALE},       {"prefill epoch", old_prefill, TD_STALE},
    {"prompt longer", longer, TD_CORRUPT},        {"prompt shorter", shorter, TD_CORRUPT},
    {"blocks + 1", more_blocks, TD_CORRUPT},      {"blocks - 1", fewer_blocks, TD_CORRUPT},
    {"prompt hash", other_prompt, TD_CORRUPT},    {"fingerprint", other_layout, TD_MISMATCH},
    {"six families", six_families, TD_CORRUPT},   {"no first token", no_first, TD_PROTOCOL},
    {"two first tokens", two_first, TD_PROTOCOL}, {"next position", position, TD_PROTOCOL},
};

static void try_manifest(const char *what, struct request *r, struct forged *h, td_status want) {
    expect_found(what, h, r, want, want);
    expect_told(what);
}

static void test_manifest(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof manifest_faults / sizeof manifest_faults[0]; i++) {
        struct request *r = admit();
        struct forged *h = forger_make(&forger, r->decode.reply.ticket);
        manifest_faults[i].spoil(&h->manifest.manifest);
        try_manifest(manifest_faults[i].name, r, h, manifest_faults[i].want);
    }
    for (int family = 0; family < TD_KV_FAMILIES; family++)
        for (int k = 0; k < 4; k++) {
            struct request *r = admit();
            struct forged *h = forger_make(&forger, r->decode.reply.ticket);
            struct td_msg_family *m = &h->manifest.manifest.family[family];
            if (k == 0) m->rows--;
            if (k == 1) m->bytes++;
            if (k == 2) m->checksum ^= 1ull << next_random() % 64;
            if (k == 3) *m = (struct td_msg_family){0};
            try_manifest(td_kv_family_name(family), r, h, TD_CORRUPT);
        }
    settle();
    honest();
}

/* ---- faults of the messages ---- */

static struct forged *begin(struct request **r) {
    *r = admit();
    return forger_make(&forger, (*r)->decode.reply.ticket);
}

static void test_order(void **state) {
    (void)state;
    struct request *r;
    for (uint32_t lost = 0; lost <= SLOT; lost++) { /* put, but never announced */
        struct forged *h = begin(&r);
        h->step[lost].say = false;
        td_status want = lost == SLOT ? TD_CORRUPT : TD_PROTOCOL; /* SLOT: the manifest shows it */
        expect_found("a slab was never announced", h, r, want, want);
        expect_told("a slab was never announced");
    }
    for (uint32_t k = 0; k < SLOT; k++) { /* neighbours change places */
        struct forged *h = begin(&r);
        struct forged_step s = h->step[k];
        h->step[k] = h->step[k + 1];
        h->step[k + 1] = s;
        expect_found("slabs out of order", h, r, TD_PROTOCOL, TD_PROTOCOL);
        expect_told("slabs out of order");
    }
    struct forged *h = begin(&r); /* two blocks change places under the right messages */
    h->step[0].block = 1;
    h->step[1].block = 0;
    forged_measure(h);
    expect_found("two blocks swapped", h, r, TD_PROTOCOL, TD_PROTOCOL);
    h = begin(&r);
    struct forged_step last = h->step[MANIFEST];
    h->step[MANIFEST] = h->step[SLOT];
    h->step[SLOT] = last;
    expect_found("the manifest before the slot", h, r, TD_CORRUPT, TD_CORRUPT);
    settle();
    honest();
}

static void test_wrong_slab(void **state) {
    (void)state;
    struct request *r;
    for (int k = 0; k < 6; k++) {
        struct forged *h = begin(&r);
        struct td_msg_slab *m = &h->step[1].slab;
        if (k == 0) m->n_blocks = 0;
        if (k == 1) m->n_blocks = 2; /* more than its bytes hold */
        if (k == 2) m->n_blocks = UINT32_MAX;
        if (k == 3) m->bytes--;
        if (k == 4) m->bytes = UINT64_MAX;
        if (k == 5) m->bytes = forger.welcome.slab_bytes; /* what lay behind it before */
        expect_found("a wrong SLAB", h, r, TD_PROTOCOL, TD_CORRUPT);
        expect_told("a wrong SLAB");
    }
    settle();
    honest();
}

/* Doubles are harmless, whichever message it is. */
static void test_doubles(void **state) {
    (void)state;
    struct request *r;
    for (uint32_t twice = 0; twice <= MANIFEST; twice++) {
        struct forged *h = begin(&r);
        memmove(&h->step[twice + 1], &h->step[twice], (h->n_steps - twice) * sizeof h->step[0]);
        h->n_steps++;
        h->step[twice + 1].block = UINT32_MAX; /* only the message comes again */
        assert_true(forger_send(&forger, h));
        expect_good(r);
    }
    settle();
}

/* What never comes is ended by the lease; what nobody admitted gets an answer and no page. */
static void test_lost_for_good(void **state) {
    (void)state;
    struct request *r, *s, *t;
    struct forged *h = begin(&r);
    forged_no_step(h, MANIFEST);
    assert_true(forger_send(&forger, h));
    h = begin(&s);
    h->step[2].slab.slab = TD_LANDING_SLABS_MAX; /* a landing slab that does not exist */
    h->n_steps = 3;
    assert_true(forger_send(&forger, h));
    h = begin(&t);
    h->manifest.manifest.ticket += 1000;
    for (uint32_t k = 0; k < h->n_steps; k++)
        h->step[k].slab.ticket += 1000;
    forger.ticket += 1000;
    assert_true(forger_send(&forger, h));
    while (!forger.over)
        uv_run(&cluster.loop, UV_RUN_ONCE);
    assert_int_equal(forger.status, TD_STALE);
    h->n_steps = 0;
    expect_found("no manifest", h, r, TD_TIMEOUT, TD_TIMEOUT);
    expect_found("a slab that is none", h, s, TD_TIMEOUT, TD_TIMEOUT);
    expect_found("another ticket's slabs", h, t, TD_TIMEOUT, TD_TIMEOUT);
    settle();
    forger_hang_up(&forger); /* a slab said for no landing slab is never credited */
    assert_true(forger_greet(&forger, cluster.decode.epoch));
    honest();
}

/* A sender that means an earlier decode process, or has another layout or other numerics. */
static void test_stale_greeting(void **state) {
    (void)state;
    forger_hang_up(&forger);
    assert_false(forger_greet(&forger, cluster.decode.epoch ^ 1));
    assert_true(forger.welcomed);
    assert_int_equal(forger.welcome.status, TD_STALE);
    forger_hang_up(&forger);
    forger.engine.numerics_id ^= 1;
    assert_false(forger_greet(&forger, cluster.decode.epoch));
    assert_int_equal(forger.welcome.status, TD_MISMATCH);
    forger.engine.numerics_id ^= 1;
    forger_hang_up(&forger);
    assert_true(forger_greet(&forger, cluster.decode.epoch));
    honest();
    print_message("%d faults found\n", cases);
}

static bool in_quarantine(void *arg) {
    return ((struct cluster *)arg)->decode.ledger.landing_quarantined > 0;
}

/* Bytes that are no message end the link in the middle of a handoff. The sender lives and might
 * still write: its landing slabs stay in quarantine until it greets again. */
static void test_nonsense(void **state) {
    (void)state;
    struct request *r;
    struct forged *h = begin(&r);
    h->n_steps = 2;
    assert_true(forger_send(&forger, h));
    assert_int_equal(td_xfer_send(forger.peer, "\x01nonsense", 9, td_now_ns() + 5u * 1000000000u),
                     TD_OK);
    h->n_steps = 0;
    expect_found("nonsense", h, r, TD_PEER_LOST, TD_PROTOCOL);
    /* tcp: decode has closed the link, and only decode writes there */
    if (!cluster_tcp()) assert_true(cluster_until(&cluster, in_quarantine, &cluster));
    forger_hang_up(&forger);
    cluster_run_ms(&cluster, 150);
    /* shm: hanging up proves nothing */
    assert_int_equal(in_quarantine(&cluster), !cluster_tcp());
    assert_true(forger_greet(&forger, cluster.decode.epoch));
    settle();
    honest();
}

static int start(void **state) {
    (void)state;
    random_state = seed;
    for (int i = 0; i < PROMPT; i++)
        ids[i] = (int32_t)(3 + next_random() % VOCAB);
    forger_compute(&forger, model_dir, settings, ids, PROMPT, seed);
    cluster_start_with(&cluster, prefill_program, decode_program, model_dir, settings);
    forger_open(&forger, &cluster);
    struct request *r = cluster_begin(&cluster, ids, PROMPT, NEW_TOKENS, &greedy, true, false);
    if (!cluster_until(&cluster, request_over, r) || !r->decode.finished) return -1;
    alone = *r;
    cluster_forget(r);
    return forger_greet(&forger, cluster.decode.epoch) ? 0 : -1;
}

static int stop(void **state) {
    (void)state;
    forger_close(&forger);
    return cluster_stop(&cluster) ? 0 : -1;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),       cmocka_unit_test(test_previous_window),
        cmocka_unit_test(test_manifest),       cmocka_unit_test(test_order),
        cmocka_unit_test(test_wrong_slab),     cmocka_unit_test(test_doubles),
        cmocka_unit_test(test_lost_for_good),  cmocka_unit_test(test_nonsense),
        cmocka_unit_test(test_stale_greeting),
    };
    if (!cluster_lane(&argc, argv)) return 1;
    for (uint32_t n = 0; argc > 4 && strchr(argv[argc - 1], '=') && n < CLUSTER_SETTINGS; n++)
        settings[n] = argv[--argc];
    if (argc < 4) {
        fprintf(stderr, "usage: test_forged PREFILL DECODE MODEL [seed] [SETTING=VALUE...]\n");
        return 2;
    }
    prefill_program = argv[1];
    decode_program = argv[2];
    model_dir = argv[3];
    seed = argc > 4 ? strtoull(argv[4], NULL, 10) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, start, stop);
}

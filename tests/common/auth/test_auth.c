/* The cluster key and its challenge: honest exchanges, and everything a stranger may try. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/auth/challenge.h"

static struct td_cluster_key *key, *other_key;
static uint8_t nonces;

static struct td_cluster_key *make(char fill, size_t len) {
    char bytes[TD_KEY_MAX + 1];
    struct td_error err;
    struct td_cluster_key *k = NULL;
    memset(bytes, fill, sizeof bytes);
    if (td_cluster_key_make(bytes, len, &k, &err) != TD_OK) fail_msg("%s", err.text);
    return k;
}

/* Key and text of RFC 4231's test case 6; the label's 0 byte is hashed too, so the value is that of
 * Python's hmac over b"\0" + text. */
static void test_mac(void **state) {
    (void)state;
    static const uint8_t want[] = {0x01, 0xdb, 0xa7, 0xa9, 0xb6, 0x14, 0xf2, 0xd9, 0xe4, 0xbc, 0x01,
                                   0x9f, 0x28, 0x23, 0x4a, 0xd9, 0x07, 0x53, 0x76, 0xb9, 0x03, 0x6f,
                                   0x9b, 0x08, 0x40, 0x0f, 0x63, 0x9c, 0xd4, 0x86, 0xfe, 0x55};
    static const char text[] = "Test Using Larger Than Block-Size Key - Hash Key First";
    uint8_t mac[TD_MAC_BYTES], again[TD_MAC_BYTES];
    struct td_cluster_key *k = make((char)0xaa, 131);
    assert_int_equal(td_cluster_key_mac(k, "", text, sizeof text - 1, mac), TD_OK);
    assert_memory_equal(mac, want, sizeof want);
    assert_int_equal(td_cluster_key_mac(k, "", text, sizeof text - 1, again), TD_OK);
    assert_memory_equal(mac, again, sizeof mac);
    assert_int_equal(td_cluster_key_mac(k, "T", text + 1, sizeof text - 2, again), TD_OK);
    assert_memory_not_equal(mac, again, sizeof mac);
    td_cluster_key_free(k);
}

/* ---- the exchange ---- */

struct side {
    struct td_challenge c;
    uint8_t out[TD_CHALLENGE_MAX];
    size_t len;
    struct td_error err;
};

static const struct td_challenge_party prefill = {2, 0x1111}, decode = {3, 0x2222};

static void begin(struct side *s, const struct td_cluster_key *k, enum td_challenge_side side,
                  enum td_challenge_purpose purpose, uint64_t channel) {
    uint8_t nonce[TD_NONCE_BYTES];
    memset(nonce, ++nonces, sizeof nonce);
    td_challenge_init(&s->c, k, side, purpose, channel,
                      side == TD_CHALLENGE_HOST ? decode : prefill, nonce);
    s->len = 0;
}

static td_status take(struct side *s, const void *bytes, size_t len) {
    return td_challenge_take(&s->c, bytes, len, s->out, &s->len, &s->err);
}

static td_status hear(struct side *s, const struct side *from) {
    uint8_t copy[TD_CHALLENGE_MAX];
    memcpy(copy, from->out, from->len);
    return take(s, copy, from->len);
}

static void pair(struct side *c, struct side *h, const struct td_cluster_key *ck,
                 const struct td_cluster_key *hk) {
    begin(c, ck, TD_CHALLENGE_CALLER, TD_CHALLENGE_DATA, 7);
    begin(h, hk, TD_CHALLENGE_HOST, TD_CHALLENGE_DATA, 7);
    c->len = td_challenge_open(&c->c, c->out);
}

static void test_honest(void **state) {
    (void)state;
    struct side c, h;
    uint8_t t[4][TD_TOKEN_BYTES];
    pair(&c, &h, key, key);
    assert_int_equal(td_challenge_token(&c.c, TD_CHALLENGE_CALLER, t[0]), TD_INVALID);
    assert_int_equal(hear(&h, &c), TD_OK);
    assert_int_equal(hear(&c, &h), TD_OK);
    assert_false(h.c.done || c.c.done);
    assert_int_equal(hear(&h, &c), TD_OK);
    assert_true(h.c.done);
    assert_false(c.c.done);
    assert_int_equal(hear(&c, &h), TD_OK);
    assert_true(c.c.done);
    assert_int_equal(c.len, 0);
    assert_int_equal(h.c.party[0].role, prefill.role);
    assert_true(h.c.party[0].epoch == prefill.epoch && c.c.party[1].epoch == decode.epoch);
    assert_int_equal(td_challenge_token(&c.c, TD_CHALLENGE_CALLER, t[0]), TD_OK);
    assert_int_equal(td_challenge_token(&h.c, TD_CHALLENGE_CALLER, t[1]), TD_OK);
    assert_int_equal(td_challenge_token(&c.c, TD_CHALLENGE_HOST, t[2]), TD_OK);
    assert_int_equal(td_challenge_token(&h.c, TD_CHALLENGE_HOST, t[3]), TD_OK);
    assert_memory_equal(t[0], t[1], TD_TOKEN_BYTES);
    assert_memory_equal(t[2], t[3], TD_TOKEN_BYTES);
    assert_memory_not_equal(t[0], t[2], TD_TOKEN_BYTES);
    assert_int_equal(take(&h, c.out, 40), TD_PROTOCOL); /* nothing follows */
}

static void test_wrong_key(void **state) {
    (void)state;
    struct side c, h;
    pair(&c, &h, other_key, key);
    assert_int_equal(hear(&h, &c), TD_OK);
    assert_int_equal(hear(&c, &h), TD_OK);
    assert_int_equal(hear(&h, &c), TD_MISMATCH);
    assert_non_null(strstr(h.err.text, "cluster_key_file"));
    assert_int_equal(hear(&c, &h), TD_MISMATCH); /* told so */
    assert_non_null(strstr(c.err.text, "cluster_key_file"));
    assert_false(h.c.done || c.c.done);
    assert_int_equal(hear(&h, &c), TD_PROTOCOL); /* no second try */
}

/* A host without the key learns the caller's proof, which is of no use to it as a host. */
static void test_false_host(void **state) {
    (void)state;
    struct side c, h;
    pair(&c, &h, key, other_key);
    assert_int_equal(hear(&h, &c), TD_OK);
    assert_int_equal(hear(&c, &h), TD_OK);
    uint8_t proof[TD_CHALLENGE_MAX];
    size_t len = c.len;
    memcpy(proof, c.out, len);
    /* As it came, then dressed as the host's own: kind and side are bytes 5 and 7. */
    struct side again = c;
    assert_int_equal(take(&again, proof, len), TD_PROTOCOL);
    proof[5] = 4;
    proof[7] = TD_CHALLENGE_HOST;
    assert_int_equal(take(&c, proof, len), TD_MISMATCH);
    assert_false(c.c.done || again.c.done);
}

/* A stranger who answers a caller with the caller's own words, and one who lets a host answer
 * itself through a second connection. */
static void test_reflected(void **state) {
    (void)state;
    struct side c, h, h2;
    pair(&c, &h, key, key);
    uint8_t echo[TD_CHALLENGE_MAX];
    memcpy(echo, c.out, c.len);
    struct side again = c;
    assert_int_equal(take(&again, echo, c.len), TD_PROTOCOL);
    echo[5] = 2;
    echo[7] = TD_CHALLENGE_HOST;
    assert_int_equal(take(&c, echo, c.len), TD_PROTOCOL);
    assert_non_null(strstr(c.err.text, "our own challenge"));

    pair(&c, &h, other_key, key); /* the stranger takes part as a caller */
    begin(&h2, key, TD_CHALLENGE_HOST, TD_CHALLENGE_DATA, 7);
    assert_int_equal(hear(&h, &c), TD_OK);
    memcpy(echo, h.out, h.len); /* h's challenge as a caller's hello to h2 */
    echo[5] = 1;
    echo[7] = TD_CHALLENGE_CALLER;
    assert_int_equal(take(&h2, echo, h.len), TD_OK);
    /* h2 wants a caller's proof before it gives one: there is nothing to bring back to h. */
    assert_int_equal(h2.len, 56);
    memcpy(echo, h2.out, h2.len);
    assert_int_equal(take(&h, echo, h2.len), TD_PROTOCOL);
    assert_false(h.c.done || h2.c.done);
}

static void test_replayed(void **state) {
    (void)state;
    struct side c, h, h2;
    uint8_t hello[TD_CHALLENGE_MAX], proof[TD_CHALLENGE_MAX];
    pair(&c, &h, key, key);
    memcpy(hello, c.out, c.len);
    size_t hello_len = c.len;
    assert_int_equal(hear(&h, &c), TD_OK);
    assert_int_equal(hear(&c, &h), TD_OK);
    memcpy(proof, c.out, c.len);
    begin(&h2, key, TD_CHALLENGE_HOST, TD_CHALLENGE_DATA, 7);
    assert_int_equal(take(&h2, hello, hello_len), TD_OK);
    assert_int_equal(take(&h2, proof, c.len), TD_MISMATCH);
}

/* Each bound thing alone makes the proofs differ. */
static void test_bound(void **state) {
    (void)state;
    for (int what = 0; what < 4; what++) {
        struct side c, h;
        begin(&c, key, TD_CHALLENGE_CALLER, TD_CHALLENGE_DATA, what == 0 ? 8 : 7);
        begin(&h, key, TD_CHALLENGE_HOST, TD_CHALLENGE_DATA, 7);
        c.len = td_challenge_open(&c.c, c.out);
        if (what == 1) c.out[8] ^= 1;  /* role under way */
        if (what == 2) c.out[16] ^= 1; /* epoch */
        if (what == 3) c.out[24] ^= 1; /* nonce */
        assert_int_equal(hear(&h, &c), TD_OK);
        assert_int_equal(hear(&c, &h), TD_OK);
        if (hear(&h, &c) != TD_MISMATCH) fail_msg("case %d was taken", what);
    }
    struct side c, h;
    begin(&c, key, TD_CHALLENGE_CALLER, TD_CHALLENGE_CONTROL, 7);
    begin(&h, key, TD_CHALLENGE_HOST, TD_CHALLENGE_DATA, 7);
    c.len = td_challenge_open(&c.c, c.out);
    assert_int_equal(hear(&h, &c), TD_PROTOCOL);
    assert_int_equal(h.len, 0);
}

/* Every message cut at every length, longer by a byte, and with every bit turned. */
static void test_damaged(void **state) {
    (void)state;
    struct side c, h, *to[] = {&h, &c, &h, &c}, *from[] = {&c, &h, &c, &h};
    for (int message = 0; message < 4; message++) {
        pair(&c, &h, key, key);
        for (int i = 0; i < message; i++)
            assert_int_equal(hear(to[i], from[i]), TD_OK);
        uint8_t m[TD_CHALLENGE_MAX + 1] = {0};
        size_t len = from[message]->len;
        memcpy(m, from[message]->out, len);
        for (size_t n = 0; n <= len + 1; n++) {
            struct side s = *to[message];
            if (n == len) continue;
            if (take(&s, m, n) == TD_OK) fail_msg("message %d of %zu bytes was taken", message, n);
            assert_false(s.c.done);
        }
        for (size_t bit = 0; bit < 8 * len; bit++) {
            struct side s = *to[message];
            m[bit / 8] ^= (uint8_t)(1 << bit % 8);
            td_status st = take(&s, m, len);
            m[bit / 8] ^= (uint8_t)(1 << bit % 8);
            /* Openings carry free bytes, which the proofs then find (test_bound). */
            if (st == TD_OK && message >= 2) fail_msg("message %d, bit %zu", message, bit);
            if (st != TD_OK && strlen(s.err.text) < 20) fail_msg("no sentence");
        }
    }
}

/* ---- the file ---- */

static char path[64];

static void write_file(size_t len, mode_t mode) {
    int fd;
    unlink(path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (size_t i = 0; i < len; i++)
        fputc('a' + (int)(i % 26), f);
    fputs(" \n\n", f);
    fd = fileno(f);
    assert_int_equal(fchmod(fd, mode), 0);
    fclose(f);
}

static td_status load(struct td_error *err) {
    struct td_cluster_key *k = NULL;
    td_status st = td_cluster_key_load(path, &k, err);
    td_cluster_key_free(k);
    return st;
}

static void test_file(void **state) {
    (void)state;
    struct td_error err;
    snprintf(path, sizeof path, "/tmp/td-key-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    static const mode_t good[] = {0600, 0400, 0640, 0440}, bad[] = {0644, 0604, 0606, 0660, 0601};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        write_file(TD_KEY_MIN, good[i]);
        if (load(&err) != TD_OK) fail_msg("%s", err.text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        write_file(TD_KEY_MIN, bad[i]);
        if (load(&err) != TD_CONFIG) fail_msg("mode %o was taken", (unsigned)bad[i]);
        assert_non_null(strstr(err.text, "mode 0600"));
    }
    print_message("%s\n", err.text);
    write_file(TD_KEY_MIN - 1, 0600);
    assert_int_equal(load(&err), TD_CONFIG);
    assert_non_null(strstr(err.text, "found 31"));
    print_message("%s\n", err.text);
    write_file(TD_KEY_MAX + 1, 0600);
    assert_int_equal(load(&err), TD_CONFIG);
    write_file(TD_KEY_MAX, 0600);
    assert_int_equal(load(&err), TD_CONFIG); /* with what follows it */
    unlink(path);
    assert_int_equal(load(&err), TD_CONFIG);
    print_message("%s\n", err.text);
    assert_non_null(strstr(err.text, "urandom"));
    snprintf(path, sizeof path, "/dev/null");
    assert_int_equal(load(&err), TD_CONFIG);
    /* White space at the end does not count: a file copied by an editor is the same key. */
    struct td_cluster_key *a = NULL;
    uint8_t x[TD_MAC_BYTES], y[TD_MAC_BYTES];
    snprintf(path, sizeof path, "/tmp/td-key-%d", (int)getpid());
    write_file(40, 0600);
    assert_int_equal(td_cluster_key_load(path, &a, &err), TD_OK);
    assert_int_equal(td_cluster_key_mac(a, "l", "m", 1, x), TD_OK);
    td_cluster_key_free(a);
    char bytes[40];
    for (int i = 0; i < 40; i++)
        bytes[i] = (char)('a' + i % 26);
    assert_int_equal(td_cluster_key_make(bytes, 40, &a, &err), TD_OK);
    assert_int_equal(td_cluster_key_mac(a, "l", "m", 1, y), TD_OK);
    assert_memory_equal(x, y, sizeof x);
    td_cluster_key_free(a);
    unlink(path);
}

static int setup(void **state) {
    (void)state;
    key = make('k', TD_KEY_MIN);
    other_key = make('o', TD_KEY_MIN);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    td_cluster_key_free(key);
    td_cluster_key_free(other_key);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mac),       cmocka_unit_test(test_honest),
        cmocka_unit_test(test_wrong_key), cmocka_unit_test(test_false_host),
        cmocka_unit_test(test_reflected), cmocka_unit_test(test_replayed),
        cmocka_unit_test(test_bound),     cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_file),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

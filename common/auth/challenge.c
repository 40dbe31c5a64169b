/* The challenge machine. Messages are packed structs of fixed size without padding, little-endian
 * as every host of a cluster is (another order fails at the magic). */
#include "common/auth/challenge.h"

#include <string.h>

#include "common/auth/secret.h"

#define MAGIC 0x43584454u /* "TDXC" */
enum { VERSION = 1 };

enum kind { HELLO = 1, CHALLENGE, CALLER_PROOF, HOST_PROOF, REFUSED };

struct head {
    uint32_t magic;
    uint8_t version, kind, purpose, side;
};

struct opening { /* HELLO, CHALLENGE */
    struct head head;
    uint32_t role, reserved;
    uint64_t epoch;
    uint8_t nonce[TD_NONCE_BYTES];
};

struct proof {
    struct head head;
    uint8_t mac[TD_MAC_BYTES];
};

struct transcript { /* what a proof is about */
    uint32_t version, purpose;
    uint64_t channel;
    uint64_t role[2], epoch[2];
    uint8_t nonce[2][TD_NONCE_BYTES];
};

_Static_assert(sizeof(struct opening) == 56 && sizeof(struct proof) == 40, "no padding");
_Static_assert(sizeof(struct transcript) == 48 + 2 * TD_NONCE_BYTES, "no padding");
_Static_assert(sizeof(struct opening) <= TD_CHALLENGE_MAX, "the longest message");

static int of(enum td_challenge_side side) {
    return side == TD_CHALLENGE_HOST;
}

static struct head head_of(const struct td_challenge *c, enum kind kind) {
    return (struct head){MAGIC, VERSION, (uint8_t)kind, (uint8_t)c->purpose, (uint8_t)c->side};
}

void td_challenge_init(struct td_challenge *c, const struct td_cluster_key *key,
                       enum td_challenge_side side, enum td_challenge_purpose purpose,
                       uint64_t channel, struct td_challenge_party self,
                       const uint8_t nonce[TD_NONCE_BYTES]) {
    *c = (struct td_challenge){.key = key, .side = side, .purpose = purpose, .channel = channel};
    c->party[of(side)] = self;
    memcpy(c->nonce[of(side)], nonce, TD_NONCE_BYTES);
    c->next = side == TD_CHALLENGE_HOST ? HELLO : CHALLENGE;
}

static size_t put_opening(const struct td_challenge *c, enum kind kind, uint8_t *out) {
    struct opening m = {.head = head_of(c, kind),
                        .role = c->party[of(c->side)].role,
                        .epoch = c->party[of(c->side)].epoch};
    memcpy(m.nonce, c->nonce[of(c->side)], sizeof m.nonce);
    memcpy(out, &m, sizeof m);
    return sizeof m;
}

size_t td_challenge_open(struct td_challenge *c, uint8_t out[TD_CHALLENGE_MAX]) {
    return put_opening(c, HELLO, out);
}

static td_status mac(const struct td_challenge *c, const char *label, uint8_t out[TD_MAC_BYTES]) {
    struct transcript t = {.version = VERSION, .purpose = c->purpose, .channel = c->channel};
    for (int i = 0; i < 2; i++) {
        t.role[i] = c->party[i].role;
        t.epoch[i] = c->party[i].epoch;
        memcpy(t.nonce[i], c->nonce[i], TD_NONCE_BYTES);
    }
    return td_cluster_key_mac(c->key, label, &t, sizeof t, out);
}

static const char *proof_label(enum td_challenge_side side) {
    return side == TD_CHALLENGE_HOST ? "tandem proof of host" : "tandem proof of caller";
}

static td_status put_proof(const struct td_challenge *c, uint8_t *out, size_t *ret_len) {
    struct proof m = {.head = head_of(c, c->side == TD_CHALLENGE_HOST ? HOST_PROOF : CALLER_PROOF)};
    TD_TRY(mac(c, proof_label(c->side), m.mac));
    memcpy(out, &m, sizeof m);
    *ret_len = sizeof m;
    return TD_OK;
}

static td_status take_opening(struct td_challenge *c, const void *bytes, struct td_error *err) {
    struct opening m;
    memcpy(&m, bytes, sizeof m);
    int other = !of(c->side);
    c->party[other] = (struct td_challenge_party){m.role, m.epoch};
    memcpy(c->nonce[other], m.nonce, TD_NONCE_BYTES);
    /* Ours is random and new: whoever says the same is only an echo. */
    if (memcmp(c->nonce[0], c->nonce[1], TD_NONCE_BYTES) == 0)
        return td_fail(err, TD_PROTOCOL, "cluster key: the other side sent our own challenge back");
    return TD_OK;
}

static td_status take_proof(const struct td_challenge *c, const void *bytes, struct td_error *err) {
    struct proof m;
    uint8_t want[TD_MAC_BYTES];
    memcpy(&m, bytes, sizeof m);
    TD_TRY(mac(c,
               proof_label(c->side == TD_CHALLENGE_HOST ? TD_CHALLENGE_CALLER : TD_CHALLENGE_HOST),
               want));
    if (td_secret_equal(m.mac, want, sizeof want)) return TD_OK;
    return td_fail(err, TD_MISMATCH,
                   "cluster key: the other side does not know ours (cluster_key_file must be the "
                   "same everywhere)");
}

static size_t expected_size(int kind) {
    return kind == HELLO || kind == CHALLENGE ? sizeof(struct opening) : sizeof(struct proof);
}

static td_status check_head(const struct td_challenge *c, const struct head *h, size_t len,
                            struct td_error *err) {
    enum td_challenge_side other =
        c->side == TD_CHALLENGE_HOST ? TD_CHALLENGE_CALLER : TD_CHALLENGE_HOST;
    if (h->magic != MAGIC || h->version != VERSION)
        return td_fail(err, TD_PROTOCOL,
                       "cluster key: expected a challenge of version %d, found other bytes",
                       VERSION);
    if (h->purpose != c->purpose || h->side != other)
        return td_fail(err, TD_PROTOCOL,
                       "cluster key: expected side %d for purpose %d, found side %d for %d", other,
                       c->purpose, h->side, h->purpose);
    if (h->kind == REFUSED && len == sizeof *h)
        return td_fail(err, TD_MISMATCH,
                       "cluster key: the other side says that we do not know its key "
                       "(cluster_key_file must be the same everywhere)");
    if (h->kind != c->next || len != expected_size(c->next))
        return td_fail(err, TD_PROTOCOL,
                       "cluster key: expected message %d of %zu bytes, found %d of %zu", c->next,
                       expected_size(c->next), h->kind, len);
    return TD_OK;
}

static td_status answer(struct td_challenge *c, const void *bytes, uint8_t *out, size_t *ret_len,
                        struct td_error *err) {
    switch (c->next) {
    case HELLO:
        TD_TRY(take_opening(c, bytes, err));
        *ret_len = put_opening(c, CHALLENGE, out);
        c->next = CALLER_PROOF;
        return TD_OK;
    case CHALLENGE:
        TD_TRY(take_opening(c, bytes, err));
        c->next = HOST_PROOF;
        return put_proof(c, out, ret_len);
    case CALLER_PROOF:
        TD_TRY(take_proof(c, bytes, err));
        TD_TRY(put_proof(c, out, ret_len));
        c->done = true;
        return TD_OK;
    default: /* HOST_PROOF */
        TD_TRY(take_proof(c, bytes, err));
        c->done = true;
        return TD_OK;
    }
}

td_status td_challenge_take(struct td_challenge *c, const void *bytes, size_t len,
                            uint8_t out[TD_CHALLENGE_MAX], size_t *ret_len, struct td_error *err) {
    struct head h;
    *ret_len = 0;
    if (c->done || c->refused)
        return td_fail(err, TD_PROTOCOL, "cluster key: the exchange was over already");
    if (len < sizeof h) {
        c->refused = true;
        return td_fail(err, TD_PROTOCOL, "cluster key: expected at least %zu bytes, found %zu",
                       sizeof h, len);
    }
    memcpy(&h, bytes, sizeof h);
    td_status st = check_head(c, &h, len, err);
    bool told = st == TD_OK; /* who talks nonsense gets no answer */
    if (st == TD_OK) st = answer(c, bytes, out, ret_len, err);
    if (st == TD_INTERNAL) td_fail(err, st, "cluster key: OpenSSL's HMAC failed");
    if (st == TD_OK) return TD_OK;
    c->refused = true;
    *ret_len = 0;
    if (told) {
        h = head_of(c, REFUSED);
        memcpy(out, &h, sizeof h);
        *ret_len = sizeof h;
    }
    return st;
}

td_status td_challenge_token(const struct td_challenge *c, enum td_challenge_side side,
                             uint8_t token[TD_TOKEN_BYTES]) {
    uint8_t full[TD_MAC_BYTES];
    if (!c->done) return TD_INVALID;
    TD_TRY(mac(c, side == TD_CHALLENGE_HOST ? "tandem token of host" : "tandem token of caller",
               full));
    memcpy(token, full, TD_TOKEN_BYTES);
    return TD_OK;
}

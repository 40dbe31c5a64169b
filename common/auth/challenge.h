/* Proof, both ways, that two processes hold the same cluster key, before they say anything else.
 * A pure machine: bytes in, bytes out; the caller brings randomness, sockets and clocks.
 *
 *   caller                               host
 *   HELLO  who I am, my nonce      ->
 *                                  <-    CHALLENGE  who I am, my nonce
 *   PROOF  of both, as caller      ->                                     the caller is proven
 *                                  <-    PROOF  of both, as host          the host is proven
 *
 * A proof is an HMAC over everything said by both sides (purpose, channel, roles, epochs, nonces)
 * under a label of its side: what one side said proves nothing when it is sent back, what was said
 * on one connection proves nothing on another, and who dials in without the key is given nothing
 * that was made with it. Both end with the same two tokens, one per direction, which were never
 * sent. */
#ifndef TD_COMMON_AUTH_CHALLENGE_H
#define TD_COMMON_AUTH_CHALLENGE_H

#include "common/auth/key.h"

enum {
    TD_NONCE_BYTES = 32,
    TD_TOKEN_BYTES = 16,
    TD_CHALLENGE_MAX = 64, /* bytes of the longest message */
};

enum td_challenge_side { TD_CHALLENGE_CALLER = 1, TD_CHALLENGE_HOST = 2 };
enum td_challenge_purpose { TD_CHALLENGE_CONTROL = 1, TD_CHALLENGE_DATA = 2 };

/* Who speaks: a role as the upper layer numbers it, and its process's epoch. */
struct td_challenge_party {
    uint32_t role;
    uint64_t epoch;
};

struct td_challenge {
    const struct td_cluster_key *key;
    enum td_challenge_side side;
    enum td_challenge_purpose purpose;
    uint64_t channel;
    struct td_challenge_party party[2]; /* caller, host */
    uint8_t nonce[2][TD_NONCE_BYTES];
    int next;     /* the message that is expected */
    bool done;    /* the other side is proven, and so are we */
    bool refused; /* it did not prove itself, or said that we did not */
};

/* `nonce` must be fresh random bytes. `channel` names the connection to both sides, 0: none. */
void td_challenge_init(struct td_challenge *c, const struct td_cluster_key *key,
                       enum td_challenge_side side, enum td_challenge_purpose purpose,
                       uint64_t channel, struct td_challenge_party self,
                       const uint8_t nonce[TD_NONCE_BYTES]);
/* The caller's first message. */
size_t td_challenge_open(struct td_challenge *c, uint8_t out[TD_CHALLENGE_MAX]);
/* Takes what the other side said; *ret_len bytes of `out` are to be sent to it, 0: none, also when
 * it fails: a side that is refused is told so. PROTOCOL: no message of this exchange, or not the
 * next one. MISMATCH: the keys differ. After a failure the exchange is over. */
TD_MUST_USE td_status td_challenge_take(struct td_challenge *c, const void *bytes, size_t len,
                                        uint8_t out[TD_CHALLENGE_MAX], size_t *ret_len,
                                        struct td_error *err);
/* Done: the secret of what `side` sends on this connection. */
TD_MUST_USE td_status td_challenge_token(const struct td_challenge *c, enum td_challenge_side side,
                                         uint8_t token[TD_TOKEN_BYTES]);

#endif

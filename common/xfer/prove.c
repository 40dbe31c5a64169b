/* How a link of the tcp lane opens: both ends prove that they know the cluster key (common/auth),
 * bound to the link's id, both roles and both epochs, and end with a token per direction that every
 * later head carries. Until then a link takes nothing but the next word of the challenge, and the
 * upper layer of the side that was called has not heard of it. */
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "common/auth/secret.h"
#include "common/base/clock.h"
#include "common/xfer/internal.h"

static const char greeting_label[] = "tandem greeting";

td_status td_xfer_prove_start(struct td_xfer_peer *peer, enum td_challenge_side side,
                              struct td_error *err) {
    const struct td_xfer *x = peer->x;
    uint8_t nonce[TD_NONCE_BYTES];
    if (getrandom(nonce, sizeof nonce, 0) != sizeof nonce)
        return td_fail(err, TD_IO, "getrandom: no random bytes for the challenge");
    td_challenge_init(&peer->challenge, x->options.key, side, TD_CHALLENGE_DATA, peer->id,
                      (struct td_challenge_party){x->options.role, x->options.epoch}, nonce);
    peer->prove_by_ns = td_now_ns() + (uint64_t)TD_XFER_PROVE_MS * 1000000u;
    return TD_OK;
}

/* ---- greeting
 * ----------------------------------------------------------------------------------*/

struct greeted {       /* what the greeting's mac is over */
    uint64_t link, to; /* the address it was sent to, so that it greets no other process */
    uint8_t challenge[TD_CHALLENGE_MAX];
};
_Static_assert(sizeof(struct greeted) == 16 + TD_CHALLENGE_MAX, "no padding under a mac");

static td_status greeting_mac(const struct td_xfer *x, uint64_t link, uint64_t to,
                              const struct td_xfer_greeting *g, uint8_t mac[TD_MAC_BYTES]) {
    struct greeted text = {.link = link, .to = to};
    memcpy(text.challenge, g->challenge, sizeof text.challenge);
    return td_cluster_key_mac(x->options.key, greeting_label, &text, sizeof text, mac);
}

void td_xfer_hello(struct td_xfer_peer *peer) {
    struct td_xfer *x = peer->x;
    if (td_xfer_lane_chosen() == TD_XFER_SHM) {
        td_xfer_note_send(&peer->hello, TD_XFER_HELLO, x->queue.address, x->queue.address_len);
        return;
    }
    struct td_xfer_greeting *g = &peer->greeting;
    g->challenge_len = (uint32_t)td_challenge_open(&peer->challenge, g->challenge);
    if (greeting_mac(x, peer->id, peer->to, g, g->mac) != TD_OK) {
        td_xfer_peer_fail(peer, TD_INTERNAL, "the greeting cannot be signed");
        return;
    }
    td_xfer_note_send(&peer->hello, TD_XFER_HELLO, g, sizeof *g);
}

static struct td_xfer_peer *caller_at(const struct td_xfer *x, ucp_ep_h ep) {
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (ep && peer->called && peer->id == 0 && peer->ep == ep && peer->state == TD_XFER_OPEN)
            return peer;
    }
    return NULL;
}

void td_xfer_greeted(struct td_xfer *x, const struct td_xfer_head *hello, ucp_ep_h from,
                     const void *bytes, size_t len) {
    struct td_xfer_greeting g;
    uint8_t mac[TD_MAC_BYTES];
    struct td_error err;
    struct td_xfer_peer *peer = caller_at(x, from);
    if (!peer || hello->link == 0 || td_xfer_peer_find(x, hello->link)) {
        x->counts.stale_dropped++;
        return;
    }
    bool good = len == sizeof g;
    if (good) memcpy(&g, bytes, sizeof g);
    good = good && g.challenge_len <= TD_CHALLENGE_MAX &&
           greeting_mac(x, hello->link, x->random, &g, mac) == TD_OK &&
           td_secret_equal(mac, g.mac, sizeof mac);
    if (!good) {
        td_xfer_stranger(x, "somebody greeted us who does not know our cluster key "
                            "(cluster_key_file must be the same everywhere)");
        td_xfer_peer_discard(peer);
        return;
    }
    peer->id = hello->link;
    if (td_xfer_prove_start(peer, TD_CHALLENGE_HOST, &err) != TD_OK)
        td_xfer_peer_discard(peer);
    else
        td_xfer_prove(peer, g.challenge, g.challenge_len);
}

void td_xfer_stranger(struct td_xfer *x, const char *sentence) {
    x->counts.malformed_dropped++;
    if (x->options.on_stranger) x->options.on_stranger(x->options.user, sentence);
}

/* ---- the challenge
 * -----------------------------------------------------------------------------*/

static void say(struct td_xfer_peer *peer, const uint8_t *bytes, size_t len) {
    if (peer->keys_said == 2) return;
    uint32_t i = peer->keys_said++;
    memcpy(peer->key_bytes[i], bytes, len);
    td_xfer_note_send(&peer->key[i], TD_XFER_KEY, peer->key_bytes[i], len);
}

static td_status take_tokens(struct td_xfer_peer *peer) {
    bool caller = peer->challenge.side == TD_CHALLENGE_CALLER;
    TD_TRY(td_challenge_token(&peer->challenge, TD_CHALLENGE_CALLER,
                              caller ? peer->token_out : peer->token_in));
    return td_challenge_token(&peer->challenge, TD_CHALLENGE_HOST,
                              caller ? peer->token_in : peer->token_out);
}

static void give_up(struct td_xfer_peer *peer, td_status why, const char *sentence) {
    if (!peer->called) {
        td_xfer_peer_fail(peer, why, sentence);
        return;
    }
    td_xfer_stranger(peer->x, sentence);
    td_xfer_peer_discard(peer);
}

void td_xfer_prove(struct td_xfer_peer *peer, const void *bytes, size_t len) {
    uint8_t out[TD_CHALLENGE_MAX];
    size_t out_len;
    struct td_error err;
    struct td_xfer *x = peer->x;
    if (peer->proven || peer->id == 0 || td_xfer_lane_chosen() == TD_XFER_SHM) {
        x->counts.malformed_dropped++;
        return;
    }
    td_status st = td_challenge_take(&peer->challenge, bytes, len, out, &out_len, &err);
    if (out_len) say(peer, out, out_len);
    if (st == TD_OK && peer->challenge.done) {
        st = take_tokens(peer);
        if (st != TD_OK) td_fail(&err, st, "cluster key: no tokens");
    }
    if (st == TD_OK && peer->challenge.done) st = td_xfer_ep_lanes(peer->ep, peer->lanes, &err);
    if (st != TD_OK) {
        give_up(peer, st, err.text);
        return;
    }
    if (!peer->challenge.done) return;
    if (peer->called && td_xfer_peers_full(x)) { /* it calls again */
        td_xfer_peer_discard(peer);
        return;
    }
    peer->proven = true;
    if (peer->called) {
        peer->x->options.on_accept(peer->x->options.user, peer);
        return; /* it may have been closed in there */
    }
    td_xfer_messages_pump(peer);
    td_xfer_pieces_pump(peer);
}

bool td_xfer_token_is_good(const struct td_xfer_peer *peer, const uint8_t token[TD_TOKEN_BYTES]) {
    if (td_xfer_lane_chosen() == TD_XFER_SHM) return true;
    return peer->proven && td_secret_equal(token, peer->token_in, TD_TOKEN_BYTES);
}

uint64_t td_xfer_prove_expire(struct td_xfer *x, uint64_t now_ns) {
    uint64_t next = UINT64_MAX;
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->proven || peer->state != TD_XFER_OPEN) continue;
        if (peer->prove_by_ns > now_ns) {
            if (peer->prove_by_ns < next) next = peer->prove_by_ns;
            continue;
        }
        x->counts.timeouts++;
        give_up(peer, TD_TIMEOUT,
                "the challenge of the cluster key was not finished in time: the other side is "
                "stopped or unreachable, or its cluster_key_file differs");
    }
    return next;
}

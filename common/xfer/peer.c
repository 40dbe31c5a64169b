/* Links: opened by one side with an address, accepted by the other from the greeting, closed by
 * force. Each side owns an endpoint of its own with an error handler; UCX's reply endpoints have
 * neither a handler nor an owner who could close them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/xfer/internal.h"

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t s) {
    (void)ep;
    struct td_xfer_peer *peer = arg;
    char text[sizeof peer->sentence];
    snprintf(text, sizeof text, "%s%s", ucs_status_string(s),
             peer->proven || peer->called
                 ? ""
                 : ", before it had proven the cluster key (which may be another there: "
                   "cluster_key_file)");
    td_xfer_peer_fail(peer, TD_PEER_LOST, text);
}

void td_xfer_peer_fail(struct td_xfer_peer *peer, td_status why, const char *sentence) {
    if (peer->state != TD_XFER_OPEN) return;
    peer->state = TD_XFER_LOST;
    peer->lost_due = true;
    peer->why = why;
    snprintf(peer->sentence, sizeof peer->sentence, "%s", sentence);
    peer->x->attention = true;
    peer->x->counts.peers_lost++;
    if (td_xfer_lane_chosen() == TD_XFER_TCP) td_xfer_pieces_end(peer);
}

struct td_xfer_peer *td_xfer_peer_find(const struct td_xfer *x, uint64_t id) {
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->id == id) return peer;
    }
    return NULL;
}

void td_xfer_peer_settle(struct td_xfer_peer *peer) {
    td_xfer_remotes_drop(peer);
    if (UCS_PTR_IS_PTR(peer->close_request)) ucp_request_free(peer->close_request);
    peer->close_request = NULL;
}

/* Mapped, not from malloc: after the first large free that would come from the heap and be cleared,
 * and every slot of every later link would be resident though few are ever written. */
static size_t slots_bytes(const struct td_xfer *x) {
    return x->options.sends_per_peer * sizeof(struct td_xfer_slot);
}

static struct td_xfer_slot *take_slots(const struct td_xfer *x) {
    void *p =
        mmap(NULL, slots_bytes(x), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void give_slots(struct td_xfer_peer *peer) {
    if (peer->slots) munmap(peer->slots, slots_bytes(peer->x));
}

void td_xfer_peer_free(struct td_xfer_peer *peer) {
    struct td_xfer *x = peer->x;
    td_list_remove(&peer->link);
    x->counts.peers--;
    give_slots(peer);
    free(peer->assembly);
    free(peer);
}

static td_status create_endpoint(struct td_xfer_peer *peer, const void *ucx_address,
                                 struct td_error *err) {
    /* UCX wants its bytes aligned as malloc's are. */
    uint64_t copy[TD_XFER_ADDRESS_MAX / 8];
    struct td_xfer_envelope e;
    memcpy(&e, ucx_address, sizeof e);
    memcpy(copy, (const char *)ucx_address + sizeof e, e.inner);
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = (const ucp_address_t *)copy,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_endpoint_error, .arg = peer}};
    if (td_xfer_lane_chosen() == TD_XFER_TCP) {
        params.field_mask &= ~(uint64_t)UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
        return td_xfer_door_call(peer, copy, e.inner, &params, err);
    }
    td_xfer_ucx_forget();
    peer->made = td_xfer_made_next(peer->x, ucx_address);
    ucs_status_t s = ucp_ep_create(peer->x->queue.worker, &params, &peer->ep);
    if (s == UCS_OK) return TD_OK;
    TD_TRY(td_xfer_origin_check(&e.origin, "transfer address", err));
    return td_fail(err, TD_PEER_LOST,
                   "process %u: it lives and cannot be reached, perhaps at another address by now: "
                   "%s. %s",
                   e.origin.pid, ucs_status_string(s), td_xfer_ucx_said());
}

static struct td_xfer_peer *new_peer(struct td_xfer *x, uint64_t id) {
    struct td_xfer_peer *peer = calloc(1, sizeof *peer);
    if (!peer) return NULL;
    peer->x = x;
    peer->id = id;
    peer->worker = x->queue.worker;
    peer->slots = take_slots(x);
    peer->assembly = malloc(TD_XFER_MESSAGE_MAX);
    if (!peer->slots || !peer->assembly) {
        give_slots(peer);
        free(peer->assembly);
        free(peer);
        return NULL;
    }
    peer->made_ns = td_now_ns();
    peer->hello.peer = peer->ack.peer = peer->bye.peer = peer->landed_note.peer = peer;
    peer->key[0].peer = peer->key[1].peer = peer;
    peer->proven = td_xfer_lane_chosen() == TD_XFER_SHM;
    td_list_init(&peer->requests);
    td_list_init(&peer->remotes);
    td_list_push_back(&x->peers, &peer->link);
    x->counts.peers++;
    return peer;
}

void td_xfer_peer_discard(struct td_xfer_peer *peer) {
    peer->refused = true;
    peer->said_bye = true;
    td_xfer_peer_close(peer);
}

/* Both ways to a peer end here: endpoint, then its lanes checked. */
static td_status open_peer(struct td_xfer *x, uint64_t id, const void *address, size_t len,
                           struct td_xfer_peer **ret_peer, struct td_error *err) {
    struct td_xfer_envelope e;
    if (len > TD_XFER_ADDRESS_MAX)
        return td_fail(err, TD_PROTOCOL, "transfer address: expected at most %d bytes, found %zu",
                       TD_XFER_ADDRESS_MAX, len);
    TD_TRY(td_xfer_unseal(address, len, TD_XFER_ADDRESS_MAGIC, "transfer address", &e, err));
    struct td_xfer_peer *peer = new_peer(x, id);
    if (!peer) return td_fail(err, TD_NO_MEMORY, "no memory for another peer");
    td_status st;
    TD_TRY_GOTO(create_endpoint(peer, address, err), free_peer);
    /* Its process may have ended between the check and the mapping of its memory, and the id may
     * have found a new owner: look again now that the mapping holds. */
    TD_TRY_GOTO(td_xfer_origin_check(&e.origin, "transfer address", err), close_peer);
    /* Over TCP UCX chooses them when the other side has answered (prove.c). */
    if (peer->proven) TD_TRY_GOTO(td_xfer_ep_lanes(peer->ep, peer->lanes, err), close_peer);
    *ret_peer = peer;
    return TD_OK;
close_peer:
    td_xfer_peer_discard(peer);
    return st;
free_peer:
    td_xfer_peer_free(peer);
    return st;
}

td_status td_xfer_connect(struct td_xfer *x, const void *address, size_t len,
                          struct td_xfer_peer **ret_peer, struct td_error *err) {
    if (td_xfer_peers_full(x))
        return td_fail(err, TD_BUSY, "links to peers: all %u are open or closing",
                       x->options.max_peers);
    if (len == x->queue.address_len && memcmp(address, x->queue.address, len) == 0)
        return td_fail(err, TD_INVALID, "transfer address: expected another's, found our own");
    uint64_t id;
    if (getrandom(&id, sizeof id, 0) != sizeof id)
        return td_fail(err, TD_IO, "getrandom: no random link id");
    struct td_xfer_peer *peer;
    TD_TRY(open_peer(x, id, address, len, &peer, err));
    td_status st = peer->proven ? TD_OK : td_xfer_prove_start(peer, TD_CHALLENGE_CALLER, err);
    if (st != TD_OK) {
        td_xfer_peer_discard(peer);
        return st;
    }
    td_xfer_hello(peer);
    *ret_peer = peer;
    return TD_OK;
}

/* Callers who have not proven anything; they are nobody's. Of these in the challenge, and the one that
 * has been for longest. */
static uint32_t strangers(const struct td_xfer *x, uint32_t *ret_open,
                          struct td_xfer_peer **ret_oldest) {
    uint32_t n = 0;
    *ret_open = 0;
    *ret_oldest = NULL;
    TD_LIST_EACH (&x->peers, it) { /* by age */
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->proven || !peer->called) continue;
        n++;
        if (peer->state != TD_XFER_OPEN) continue;
        if (*ret_open == 0) *ret_oldest = peer;
        ++*ret_open;
    }
    return n;
}

bool td_xfer_peers_full(const struct td_xfer *x) {
    uint32_t open;
    struct td_xfer_peer *oldest;
    return x->counts.peers - strangers(x, &open, &oldest) >= x->options.max_peers;
}

/* Makes up for greetings that were never seen; what fails now fails for the link as well. */
static void catch_up(struct td_xfer *x, uint32_t theirs, const void *address, size_t len) {
    struct td_xfer_envelope e;
    struct td_xfer_peer *peer = NULL;
    if (td_xfer_unseal(address, len, TD_XFER_ADDRESS_MAGIC, "transfer address", &e, NULL) != TD_OK)
        return;
    for (uint32_t n = td_xfer_made_behind(x, address, theirs); n > 0; n--) {
        if (open_peer(x, 0, address, len, &peer, NULL) != TD_OK) return;
        td_xfer_peer_discard(peer);
    }
}

td_status td_xfer_peer_called(struct td_xfer *x, ucp_conn_request_h request) {
    uint32_t open;
    struct td_xfer_peer *oldest;
    bool full = td_xfer_peers_full(x) || strangers(x, &open, &oldest) >= TD_XFER_STRANGERS_MAX;
    if (!full && open >= TD_XFER_UNPROVEN_MAX) {
        td_xfer_stranger(x, "callers who do not prove the cluster key make room for others");
        td_xfer_peer_discard(oldest);
    }
    struct td_xfer_peer *peer = full ? NULL : new_peer(x, 0);
    if (!peer) {
        (void)ucp_listener_reject(x->listener, request);
        return TD_BUSY;
    }
    peer->called = true;
    peer->prove_by_ns = td_now_ns() + (uint64_t)TD_XFER_PROVE_MS * 1000000u;
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .conn_request = request,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_endpoint_error, .arg = peer}};
    if (ucp_ep_create(x->queue.worker, &params, &peer->ep) == UCS_OK) return TD_OK;
    td_xfer_peer_free(peer); /* it is gone already */
    return TD_UNREACHABLE;
}

void td_xfer_peer_accept(struct td_xfer *x, const struct td_xfer_head *hello, const void *address,
                         size_t len) {
    uint64_t id = hello->link;
    /* A full house still opens the link, to say no. Twice the limit bounds that as well. */
    if (id == 0 || td_xfer_peer_find(x, id) || x->counts.peers >= 2 * x->options.max_peers) {
        x->counts.stale_dropped++;
        return;
    }
    bool full = x->counts.peers >= x->options.max_peers;
    struct td_xfer_peer *peer = NULL;
    struct td_error err;
    catch_up(x, hello->made, address, len);
    td_status st = open_peer(x, id, address, len, &peer, &err);
    if (st != TD_OK) {
        /* Whoever greeted is gone already, or sent bytes nobody can answer. */
        if (st == TD_PROTOCOL)
            x->counts.malformed_dropped++;
        else
            x->counts.stale_dropped++;
        return;
    }
    if (full) {
        peer->refused = true;
        td_xfer_peer_close(peer);
        return;
    }
    x->options.on_accept(x->options.user, peer);
}

static void close_endpoint(struct td_xfer_peer *peer) {
    if (td_xfer_lane_chosen() == TD_XFER_TCP && !peer->x->destroying &&
        td_now_ns() - peer->made_ns < (uint64_t)TD_XFER_SETTLE_MS * 1000000u)
        return; /* the sweep comes back to it */
    ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    peer->close_request = ucp_ep_close_nbx(peer->ep, &force);
    peer->ep = NULL;
    peer->ep_closed = true;
}

void td_xfer_peer_close(struct td_xfer_peer *peer) {
    if (peer->state == TD_XFER_CLOSING) {
        if (peer->x->destroying && !peer->ep_closed) close_endpoint(peer);
        return;
    }
    bool was_open = peer->state == TD_XFER_OPEN;
    peer->state = TD_XFER_CLOSING;
    peer->lost_due = false;
    peer->x->attention = true;
    peer->x->moved = true;
    if (was_open && !peer->said_bye && peer->proven)
        td_xfer_note_send(&peer->bye, TD_XFER_BYE, NULL, 0);
    close_endpoint(peer);
    if (td_xfer_lane_chosen() == TD_XFER_TCP) td_xfer_pieces_end(peer);
}

static bool close_finished(struct td_xfer_peer *peer) {
    if (!peer->ep_closed) close_endpoint(peer);
    if (!peer->ep_closed) return false;
    if (peer->close_rounds < TD_XFER_CLOSE_ROUNDS) {
        peer->close_rounds++;
        return false;
    }
    if (UCS_PTR_IS_PTR(peer->close_request) &&
        ucp_request_check_status(peer->close_request) == UCS_INPROGRESS)
        return false;
    return td_list_empty(&peer->requests) && peer->requests_open == 0 && peer->slots_pending == 0 &&
           peer->notes_busy == 0 && peer->pieces_used == 0;
}

/* One step for one peer; true when a callback ran, after which the list may have changed. */
static bool sweep_one(struct td_xfer *x, struct td_xfer_peer *peer) {
    if (peer->lost_due) {
        peer->lost_due = false;
        if (!peer->proven && peer->called) { /* nobody knows it */
            td_xfer_peer_discard(peer);
            return true;
        }
        x->options.on_lost(x->options.user, peer, peer->why, peer->sentence);
        return true;
    }
    if (peer->state != TD_XFER_CLOSING) return false;
    if (td_xfer_requests_cancel(peer)) return true;
    if (!close_finished(peer)) return false;
    td_xfer_peer_settle(peer);
    if (!peer->refused) x->options.on_closed(x->options.user, peer);
    td_xfer_peer_free(peer);
    return true;
}

unsigned td_xfer_peers_sweep(struct td_xfer *x) {
    unsigned n = 0;
    bool again = true;
    while (again) {
        again = false;
        TD_LIST_EACH (&x->peers, it) {
            if (!sweep_one(x, TD_CONTAINER(it, struct td_xfer_peer, link))) continue;
            n++;
            again = true;
            break;
        }
    }
    x->attention = false;
    TD_LIST_EACH (&x->peers, it) {
        const struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->lost_due || peer->state == TD_XFER_CLOSING) x->attention = true;
    }
    return n;
}

void td_xfer_peer_set_user(struct td_xfer_peer *peer, void *user) {
    peer->user = user;
}

void *td_xfer_peer_user(const struct td_xfer_peer *peer) {
    return peer->user;
}

void td_xfer_lanes(const struct td_xfer_peer *peer, char *buf) {
    memcpy(buf, peer->lanes, sizeof peer->lanes);
}

/* Puts of the tcp lane. A put is cut into pieces, each one active message that fits a single
 * message of UCX's TCP, so that it is sent from the caller's memory without a copy and found whole
 * in the receive buffer. The receiver copies it into its region if the link was granted that place:
 * no other process ever writes there, and once a link is closed on the receiver's side nothing of
 * it can arrive any more. The last piece of a put is answered with the number of pieces that have
 * landed, which is what a flush waits for.
 *
 * (UCX's own put over TCP, and its rendezvous for large messages, both write where the peer says; a
 * message of several of UCX's fragments is collected in a buffer as large as the sender says.) */
#include <string.h>

#include "common/xfer/internal.h"

enum { PIECE_ID = 1 }; /* UCX's id of this active message */

static void on_sent(void *request, ucs_status_t s, void *user);

static struct td_xfer_piece *free_piece(struct td_xfer_peer *peer) {
    for (int i = 0; i < TD_XFER_PIECES; i++)
        if (!peer->pieces[i].req) return &peer->pieces[i];
    return NULL;
}

static bool is_flush(const struct td_xfer_req *req) {
    return req->local == NULL;
}

static bool has_landed(const struct td_xfer_peer *peer, uint32_t pieces) {
    return (int32_t)(peer->landed - pieces) >= 0;
}

/* Reported requests send nothing more: their caller has given up the put, and with it the link. */
static bool all_given(const struct td_xfer_req *req) {
    return is_flush(req) || req->reported || req->sent == req->len;
}

static bool is_complete(const struct td_xfer_peer *peer, const struct td_xfer_req *req) {
    if (req->pending > 0 || !all_given(req)) return false;
    return !is_flush(req) || has_landed(peer, req->after);
}

static void post(struct td_xfer_peer *peer, struct td_xfer_piece *p, struct td_xfer_req *req) {
    uint64_t left = req->len - req->sent;
    uint32_t n = left < TD_XFER_PIECE_BYTES ? (uint32_t)left : TD_XFER_PIECE_BYTES;
    p->req = req;
    p->head = (struct td_xfer_piece_head){.magic = TD_XFER_HEAD_MAGIC,
                                          .version = TD_XFER_VERSION,
                                          .kind = TD_XFER_PIECE,
                                          .last = n == left,
                                          .link = peer->id,
                                          .sequence = peer->pieces_out++,
                                          .bytes = n,
                                          .region = req->region,
                                          .offset = req->offset + req->sent};
    memcpy(p->head.token, peer->token_out, TD_TOKEN_BYTES);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb = {.send = on_sent},
                                 .user_data = p};
    const uint8_t *from = req->local + req->sent;
    req->sent += n;
    req->pending++;
    peer->pieces_used++;
    ucs_status_ptr_t r =
        ucp_am_send_nbx(peer->ep, PIECE_ID, &p->head, sizeof p->head, from, n, &param);
    if (UCS_PTR_IS_PTR(r)) return;
    p->req = NULL;
    req->pending--;
    peer->pieces_used--;
    if (UCS_PTR_IS_ERR(r))
        td_xfer_peer_fail(peer, TD_PEER_LOST, ucs_status_string(UCS_PTR_STATUS(r)));
}

void td_xfer_pieces_pump(struct td_xfer_peer *peer) {
    if (!peer->proven) return;
    TD_LIST_EACH_SAFE (&peer->requests, it, tmp) {
        struct td_xfer_req *req = TD_CONTAINER(it, struct td_xfer_req, link);
        while (peer->state == TD_XFER_OPEN && !all_given(req)) {
            struct td_xfer_piece *p = free_piece(peer);
            if (!p) return; /* what follows keeps its order */
            post(peer, p, req);
        }
        if (peer->state != TD_XFER_OPEN) return; /* td_xfer_pieces_end was here */
        if (is_complete(peer, req)) td_xfer_req_finish(req, TD_OK);
    }
}

static void on_sent(void *request, ucs_status_t s, void *user) {
    struct td_xfer_piece *p = user;
    struct td_xfer_req *req = p->req;
    struct td_xfer_peer *peer = req->peer;
    p->req = NULL;
    peer->pieces_used--;
    req->pending--;
    ucp_request_free(request);
    if (peer->state != TD_XFER_OPEN) { /* quiet with its last piece */
        if (req->pending == 0)
            td_xfer_req_finish(req, peer->state == TD_XFER_CLOSING ? TD_CANCELLED : TD_PEER_LOST);
    } else if (s != UCS_OK) {
        td_xfer_peer_fail(peer, TD_PEER_LOST, ucs_status_string(s));
    } else {
        peer->x->pump_due = true;
    }
}

/* Not from the callbacks: UCX's TCP then has room for a moment, and what is posted in there
 * overtakes what waits for it. */
void td_xfer_pieces_go_on(struct td_xfer *x) {
    x->pump_due = false;
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->state == TD_XFER_OPEN) td_xfer_pieces_pump(peer);
    }
}

void td_xfer_pieces_post(struct td_xfer_peer *peer, struct td_xfer_req *req) {
    req->sent = 0;
    req->pending = 0;
    if (is_flush(req)) {
        /* All that is given and will be given for the puts before it. */
        req->after = peer->pieces_out;
        TD_LIST_EACH (&peer->requests, it) {
            const struct td_xfer_req *r = TD_CONTAINER(it, struct td_xfer_req, link);
            if (!all_given(r))
                req->after +=
                    (uint32_t)((r->len - r->sent + TD_XFER_PIECE_BYTES - 1) / TD_XFER_PIECE_BYTES);
        }
    }
    td_list_push_back(&peer->requests, &req->link);
    td_xfer_pieces_pump(peer);
}

void td_xfer_pieces_end(struct td_xfer_peer *peer) {
    TD_LIST_EACH_SAFE (&peer->requests, it, tmp) {
        struct td_xfer_req *req = TD_CONTAINER(it, struct td_xfer_req, link);
        if (req->pending == 0)
            td_xfer_req_finish(req, peer->state == TD_XFER_CLOSING ? TD_CANCELLED : TD_PEER_LOST);
    }
}

void td_xfer_landed(struct td_xfer_peer *peer, uint32_t pieces) {
    if (pieces - peer->landed > peer->pieces_out - peer->landed) {
        td_xfer_peer_fail(peer, TD_PROTOCOL, "more pieces have landed than were sent");
        return;
    }
    peer->landed = pieces;
    td_xfer_pieces_pump(peer);
}

/* ---- receiving
 * ---------------------------------------------------------------------------------*/

static bool head_is_good(const struct td_xfer_piece_head *h, size_t head_len, size_t len) {
    return head_len == sizeof *h && h->magic == TD_XFER_HEAD_MAGIC &&
           h->version == TD_XFER_VERSION && h->kind == TD_XFER_PIECE && h->bytes == len &&
           len > 0 && len <= TD_XFER_PIECE_BYTES;
}

static bool is_granted(const struct td_xfer_grant *g, const struct td_xfer_piece_head *h) {
    return g->region && g->region->id == h->region && h->offset >= g->offset &&
           h->bytes <= g->bytes && h->offset - g->offset <= g->bytes - h->bytes;
}

/* Inside UCX, since the bytes live no longer; nothing but the region is touched. */
static ucs_status_t on_piece(void *arg, const void *header, size_t header_length, void *data,
                             size_t len, const ucp_am_recv_param_t *param) {
    struct td_xfer *x = arg;
    struct td_xfer_piece_head h;
    if (header_length == sizeof h) memcpy(&h, header, sizeof h);
    if (x->destroying || !head_is_good(&h, header_length, len) ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        x->counts.malformed_dropped++;
        return UCS_OK;
    }
    struct td_xfer_peer *peer = td_xfer_peer_find(x, h.link);
    if (!peer || peer->state != TD_XFER_OPEN) {
        x->counts.stale_dropped++;
        return UCS_OK;
    }
    if (!td_xfer_token_is_good(peer, h.token)) {
        x->counts.malformed_dropped++;
        return UCS_OK;
    }
    if (h.sequence != peer->pieces_in) {
        td_xfer_peer_fail(peer, TD_PROTOCOL, "a piece of a put is missing or out of order");
        return UCS_OK;
    }
    if (!is_granted(&peer->grant, &h)) {
        td_xfer_peer_fail(peer, TD_PROTOCOL, "a put outside of what was granted to the peer");
        return UCS_OK;
    }
    memcpy((uint8_t *)peer->grant.region->base + h.offset, data, len);
    peer->pieces_in++;
    if (h.last) peer->landed_due = true;
    return UCS_OK;
}

void td_xfer_landed_say(struct td_xfer *x) {
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (!peer->landed_due || peer->state != TD_XFER_OPEN || peer->landed_note.busy) continue;
        peer->landed_due = false;
        td_xfer_note_send(&peer->landed_note, TD_XFER_LANDED, NULL, 0);
    }
}

td_status td_xfer_pieces_start(struct td_xfer *x, struct td_error *err) {
    /* Not persistent: copied at once, from UCX's own receive buffer. */
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = PIECE_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_piece,
        .arg = x};
    ucs_status_t s = ucp_worker_set_am_recv_handler(x->queue.worker, &param);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: no active messages: %s", ucs_status_string(s));
    return TD_OK;
}

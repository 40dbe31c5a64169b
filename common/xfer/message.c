/* Small messages. Cut into fragments of one FIFO element each and acknowledged by count, so that a
 * link never holds more elements of the receiver's FIFO than its window: see internal.h for why.
 * UCX's own fragments are not used: they name the receiver's endpoint by a number that is
 * mispaired after some close-and-reconnect sequences; ours name the link. */
#include <string.h>

#include "common/xfer/internal.h"

static uint32_t fragments_of(size_t len) {
    return len == 0 ? 1 : (uint32_t)((len + TD_XFER_FRAGMENT - 1) / TD_XFER_FRAGMENT);
}

static void fill_head(struct td_xfer_peer *peer, struct td_xfer_head *head,
                      enum td_xfer_kind kind) {
    *head = (struct td_xfer_head){.magic = TD_XFER_HEAD_MAGIC,
                                  .version = TD_XFER_VERSION,
                                  .kind = (uint8_t)kind,
                                  .link = peer->id,
                                  .acked = peer->received,
                                  .made = peer->made};
    if (kind == TD_XFER_LANDED) head->sequence = peer->pieces_in;
    if (peer->proven) memcpy(head->token, peer->token_out, sizeof head->token);
    peer->received_acked = peer->received;
}

/* Returns true when UCX keeps the bytes until `done` is called with `user`. */
static bool post(struct td_xfer_peer *peer, const struct td_xfer_head *head, const void *payload,
                 size_t len, ucp_send_nbx_callback_t done, void *user) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA |
                                                 UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb = {.send = done},
                                 .user_data = user};
    /* So that the receiver learns which of its endpoints called. */
    if (head->kind == TD_XFER_HELLO && td_xfer_lane_chosen() == TD_XFER_TCP)
        param.flags |= UCP_AM_SEND_FLAG_REPLY;
    ucs_status_ptr_t r =
        ucp_am_send_nbx(peer->ep, TD_XFER_MESSAGE_ID, head, sizeof *head, payload, len, &param);
    if (UCS_PTR_IS_ERR(r))
        td_xfer_peer_fail(peer, TD_PEER_LOST, ucs_status_string(UCS_PTR_STATUS(r)));
    return UCS_PTR_IS_PTR(r);
}

static bool ack_is_due(const struct td_xfer_peer *peer) {
    return peer->state == TD_XFER_OPEN &&
           peer->received - peer->received_acked >= TD_XFER_ACK_EVERY;
}

static void note_done(void *request, ucs_status_t s, void *user) {
    (void)s;
    struct td_xfer_note *note = user;
    struct td_xfer_peer *peer = note->peer;
    note->busy = false;
    peer->notes_busy--;
    ucp_request_free(request);
    /* One that came due meanwhile: the other side may be waiting for nothing else. */
    if (note == &peer->ack && ack_is_due(peer)) td_xfer_note_send(note, TD_XFER_ACK, NULL, 0);
    if (note == &peer->landed_note && peer->landed_due) td_xfer_landed_say(peer->x);
}

void td_xfer_note_send(struct td_xfer_note *note, enum td_xfer_kind kind, const void *payload,
                       size_t len) {
    if (note->busy) return;
    fill_head(note->peer, &note->head, kind);
    if (!post(note->peer, &note->head, payload, len, note_done, note)) return;
    note->busy = true;
    note->peer->notes_busy++;
}

/* Slots leave in order: a later one may be finished before the oldest. */
static void retire_slots(struct td_xfer_peer *peer) {
    uint32_t cap = peer->x->options.sends_per_peer;
    while (peer->slots_used) {
        struct td_xfer_slot *slot = &peer->slots[peer->slot_first];
        if (slot->posted < fragments_of(slot->len) || slot->pending) return;
        peer->slot_first = (peer->slot_first + 1) % cap;
        peer->slots_used--;
    }
}

static void fragment_done(void *request, ucs_status_t s, void *user) {
    (void)s;
    struct td_xfer_slot *slot = user;
    slot->pending--;
    slot->peer->slots_pending--;
    ucp_request_free(request);
    retire_slots(slot->peer);
}

static void post_fragment(struct td_xfer_peer *peer, struct td_xfer_slot *slot) {
    uint32_t n = slot->posted++;
    struct td_xfer_head *head = &slot->heads[n];
    fill_head(peer, head, TD_XFER_DATA);
    head->fragment = (uint8_t)n;
    head->fragments = (uint8_t)fragments_of(slot->len);
    head->bytes = slot->len;
    head->sequence = peer->sent++;
    uint32_t at = n * TD_XFER_FRAGMENT;
    uint32_t len = slot->len - at < TD_XFER_FRAGMENT ? slot->len - at : TD_XFER_FRAGMENT;
    slot->pending++;
    peer->slots_pending++;
    if (!post(peer, head, slot->bytes + at, len, fragment_done, slot)) {
        slot->pending--;
        peer->slots_pending--;
    }
}

/* Gives UCX what the window allows, oldest message first. */
void td_xfer_messages_pump(struct td_xfer_peer *peer) {
    if (!peer->proven) return;
    uint32_t cap = peer->x->options.sends_per_peer;
    for (uint32_t i = 0; i < peer->slots_used && peer->state == TD_XFER_OPEN; i++) {
        struct td_xfer_slot *slot = &peer->slots[(peer->slot_first + i) % cap];
        while (slot->posted < fragments_of(slot->len)) {
            if (peer->sent - peer->acked >= TD_XFER_WINDOW || peer->state != TD_XFER_OPEN)
                goto retire;
            post_fragment(peer, slot);
        }
    }
retire:
    retire_slots(peer);
}

td_status td_xfer_send(struct td_xfer_peer *peer, const void *bytes, size_t len,
                       uint64_t deadline_ns) {
    if (len > TD_XFER_MESSAGE_MAX) return TD_TOO_LONG;
    if (peer->state != TD_XFER_OPEN) return TD_PEER_LOST;
    uint32_t cap = peer->x->options.sends_per_peer;
    if (peer->slots_used == cap) return TD_BUSY;
    /* The same few slots again: a ring that went on would in time touch all of them. */
    if (peer->slots_used == 0) peer->slot_first = 0;
    struct td_xfer_slot *slot = &peer->slots[(peer->slot_first + peer->slots_used) % cap];
    slot->peer = peer;
    slot->deadline_ns = deadline_ns;
    slot->len = (uint32_t)len;
    slot->posted = slot->pending = 0;
    if (len) memcpy(slot->bytes, bytes, len);
    peer->slots_used++;
    peer->x->counts.messages_out++;
    td_xfer_messages_pump(peer);
    return peer->state == TD_XFER_OPEN ? TD_OK : TD_PEER_LOST;
}

/* ---- receiving -------------------------------------------------------------------------------*/

static bool head_is_good(const struct td_xfer_head *h, size_t head_len, size_t len) {
    if (head_len != sizeof *h || h->magic != TD_XFER_HEAD_MAGIC || h->version != TD_XFER_VERSION)
        return false;
    switch (h->kind) {
    case TD_XFER_HELLO:
        return len > 0 && len <= TD_XFER_ADDRESS_MAX;
    case TD_XFER_ACK:
    case TD_XFER_BYE:
    case TD_XFER_LANDED:
    case TD_XFER_WORD:
        return len == 0;
    case TD_XFER_KEY:
        return len > 0 && len <= TD_CHALLENGE_MAX;
    case TD_XFER_DATA:
        break;
    default:
        return false;
    }
    if (h->bytes > TD_XFER_MESSAGE_MAX || h->fragments != fragments_of(h->bytes) ||
        h->fragment >= h->fragments)
        return false;
    uint32_t left = h->bytes - (uint32_t)h->fragment * TD_XFER_FRAGMENT;
    return len == (left < TD_XFER_FRAGMENT ? left : TD_XFER_FRAGMENT);
}

static ucs_status_t on_active_message(void *arg, const void *header, size_t header_length,
                                      void *data, size_t len, const ucp_am_recv_param_t *param) {
    struct td_xfer *x = arg;
    struct td_xfer_head head;
    x->heard = true;
    if (header_length == sizeof head) memcpy(&head, header, sizeof head);
    /* The eager data flag also says that nothing of ours asks the peer for memory. */
    if (!head_is_good(&head, header_length, len) || x->destroying ||
        (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        x->counts.malformed_dropped++;
        return UCS_OK;
    }
    if (head.kind == TD_XFER_WORD) return UCS_OK; /* our own: that it came is all */
    /* Cannot fill (TD_XFER_INBOX); if it did, the gap in the sequence ends the link. */
    if (x->inbox_used == TD_XFER_INBOX) return UCS_OK;
    bool keep = len > 0 && (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA);
    if (len > 0 && !keep) return UCS_OK;
    x->inbox[x->inbox_used++] =
        (struct td_xfer_inbound){.head = head, .data = keep ? data : NULL, .len = len};
    if (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP)
        x->inbox[x->inbox_used - 1].from = param->reply_ep;
    return keep ? UCS_INPROGRESS : UCS_OK;
}

static ucs_status_t on_late_message(void *arg, const void *header, size_t header_length, void *data,
                                    size_t len, const ucp_am_recv_param_t *param) {
    (void)arg, (void)header, (void)header_length, (void)data, (void)len, (void)param;
    return UCS_OK;
}

static ucs_status_t set_handler(ucp_worker_h worker, ucp_am_recv_callback_t cb, void *arg) {
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = TD_XFER_MESSAGE_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA,
        .cb = cb,
        .arg = arg};
    return ucp_worker_set_am_recv_handler(worker, &param);
}

void td_xfer_message_end(ucp_worker_h worker) {
    (void)set_handler(worker, on_late_message, NULL); /* replaces one, which cannot fail */
}

td_status td_xfer_message_start(struct td_xfer *x, ucp_worker_h worker, struct td_error *err) {
    ucs_status_t s = set_handler(worker, on_active_message, x);
    if (s != UCS_OK)
        return td_fail(err, TD_CONFIG, "UCX: no active messages: %s", ucs_status_string(s));
    return TD_OK;
}

/* False: the peer has broken the protocol. */
static bool take_ack(struct td_xfer_peer *peer, uint32_t acked) {
    if (acked - peer->acked > peer->sent - peer->acked) return false;
    if (acked == peer->acked) return true;
    peer->acked = acked;
    td_xfer_messages_pump(peer);
    return true;
}

static void deliver_data(struct td_xfer *x, struct td_xfer_peer *peer,
                         const struct td_xfer_inbound *in) {
    const struct td_xfer_head *h = &in->head;
    /* An empty message has no data; its pointer is still one that may be copied from. */
    const void *bytes = in->data ? in->data : peer->assembly;
    if (h->sequence != peer->received || h->fragment != peer->assembly_next ||
        (h->fragment > 0 && h->bytes != peer->assembly_len)) {
        td_xfer_peer_fail(peer, TD_PROTOCOL, "a message fragment is missing or out of order");
        return;
    }
    peer->received++;
    if (h->fragments > 1) {
        memcpy(peer->assembly + (size_t)h->fragment * TD_XFER_FRAGMENT, in->data, in->len);
        peer->assembly_len = h->bytes;
        peer->assembly_next = (uint8_t)(h->fragment + 1);
        bytes = peer->assembly;
    }
    if (h->fragment + 1 == h->fragments) {
        peer->assembly_next = 0;
        x->counts.messages_in++;
        x->options.on_message(x->options.user, peer, bytes, h->bytes);
    }
}

static void deliver(struct td_xfer *x, const struct td_xfer_inbound *in) {
    const struct td_xfer_head *h = &in->head;
    if (h->kind == TD_XFER_HELLO && td_xfer_lane_chosen() == TD_XFER_TCP) {
        td_xfer_greeted(x, h, in->from, in->data, in->len);
        return;
    }
    if (h->kind == TD_XFER_HELLO) {
        td_xfer_peer_accept(x, h, in->data, in->len);
        return;
    }
    struct td_xfer_peer *peer = td_xfer_peer_find(x, h->link);
    if (!peer || peer->state != TD_XFER_OPEN) {
        x->counts.stale_dropped++;
        return;
    }
    if (h->kind == TD_XFER_KEY) {
        td_xfer_prove(peer, in->data, in->len);
        return;
    }
    if (!td_xfer_token_is_good(peer, h->token)) {
        x->counts.malformed_dropped++;
        return;
    }
    if (!take_ack(peer, h->acked)) {
        td_xfer_peer_fail(peer, TD_PROTOCOL, "acknowledged more than was sent");
        return;
    }
    if (h->kind == TD_XFER_BYE) {
        peer->said_bye = true;
        td_xfer_peer_fail(peer, TD_PEER_LOST, "the peer closed the link");
    }
    if (h->kind == TD_XFER_LANDED && peer->state == TD_XFER_OPEN) td_xfer_landed(peer, h->sequence);
    if (h->kind == TD_XFER_DATA && peer->state == TD_XFER_OPEN) deliver_data(x, peer, in);
}

/* What was consumed and not told by a message meanwhile. Not in deliver(): its peer may be closed
 * by the callback, and one acknowledgement serves a burst. */
static void acknowledge(struct td_xfer *x) {
    TD_LIST_EACH (&x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (ack_is_due(peer)) td_xfer_note_send(&peer->ack, TD_XFER_ACK, NULL, 0);
    }
}

unsigned td_xfer_inbox_deliver(struct td_xfer *x) {
    unsigned n = x->inbox_used;
    while (x->inbox_taken < x->inbox_used) {
        struct td_xfer_inbound *in = &x->inbox[x->inbox_taken++];
        deliver(x, in);
        if (in->data) ucp_am_data_release(x->queue.worker, in->data);
        in->data = NULL;
    }
    x->inbox_used = x->inbox_taken = 0;
    if (n) acknowledge(x);
    return n;
}

void td_xfer_inbox_drop(struct td_xfer *x) {
    for (uint32_t i = x->inbox_taken; i < x->inbox_used; i++)
        if (x->inbox[i].data) ucp_am_data_release(x->queue.worker, x->inbox[i].data);
    x->inbox_used = x->inbox_taken = 0;
}

/* Shared by the files of this folder only: the structs behind xfer.h. */
#ifndef TD_COMMON_XFER_INTERNAL_H
#define TD_COMMON_XFER_INTERNAL_H

#include <ucp/api/ucp.h>

#include "common/xfer/wire.h"
#include "common/xfer/xfer.h"

enum {
    /* Fragments that may be in the receiver's FIFO, or on their way, per link and direction. With
     * acknowledgements, greetings and UCX's own wire-up at most 23 elements per link; PEERS_MAX
     * links then fit TD_XFER_FIFO elements. The point: a FIFO that can fill holds back flush and
     * close of every link to it, for ever when its owner is dead or stopped. */
    TD_XFER_WINDOW = 16,
    TD_XFER_PER_LINK = 23,
    TD_XFER_FIFO = 2048,
    TD_XFER_PEERS_MAX = 80,
    TD_XFER_ACK_EVERY = 4,
    TD_XFER_SENDS_MAX = 4096,
    /* UCX takes at most 16 elements per progress call; all are delivered before the next. */
    TD_XFER_INBOX = 64,
    /* UCX unmaps a closed endpoint's memory from progress, a call or two later. */
    TD_XFER_CLOSE_ROUNDS = 3,
    TD_XFER_MADE_MAX = 256, /* addresses whose endpoints are counted (pairing.c) */
    TD_XFER_CATCH_UP_MAX = 16,
};
_Static_assert(TD_XFER_PER_LINK *TD_XFER_PEERS_MAX <= TD_XFER_FIFO, "FIFOs cannot fill");
_Static_assert(TD_XFER_WINDOW - (TD_XFER_ACK_EVERY - 1) >= TD_XFER_FRAGMENTS_MAX,
               "the largest message always finds room in the end");

struct td_xfer_slot { /* one message under way */
    struct td_xfer_peer *peer;
    uint64_t deadline_ns;
    uint32_t len;
    uint32_t posted;  /* fragments given to UCX */
    uint32_t pending; /* of these not finished */
    struct td_xfer_head heads[TD_XFER_FRAGMENTS_MAX];
    uint8_t bytes[TD_XFER_MESSAGE_MAX];
};

struct td_xfer_note { /* HELLO, ACK or BYE under way */
    struct td_xfer_peer *peer;
    struct td_xfer_head head;
    bool busy;
};

enum td_xfer_state { TD_XFER_OPEN, TD_XFER_LOST, TD_XFER_CLOSING };

struct td_xfer_peer {
    struct td_xfer *x;
    struct td_link link; /* in x->peers */
    uint64_t id;         /* of the link; 0: not one, closing since it was made (pairing.c) */
    uint32_t made;       /* endpoints towards the same address before this one */
    ucp_ep_h ep;
    void *user;
    enum td_xfer_state state;
    bool lost_due; /* on_lost has to be called */
    bool refused;  /* the upper layer never saw it: no callbacks */
    bool said_bye; /* by the other side: it needs none from us */
    td_status why;
    char sentence[192];
    void *close_request;
    uint32_t close_rounds;

    struct td_link requests; /* with UCX */
    uint32_t requests_open;  /* not yet delivered as quiet */
    struct td_link remotes;

    /* Ring of messages, oldest at `slot_first`. */
    struct td_xfer_slot *slots;
    uint32_t slot_first, slots_used, notes_busy, slots_pending;
    struct td_xfer_note hello, ack, bye;
    uint32_t sent, acked;              /* fragments: given to UCX; consumed over there */
    uint32_t received, received_acked; /* fragments: consumed here; of these told */
    uint8_t *assembly;                 /* TD_XFER_MESSAGE_MAX; a message of several fragments */
    uint32_t assembly_len;
    uint8_t assembly_next;
    char lanes[TD_XFER_LANES_MAX];
};

struct td_xfer_inbound {
    struct td_xfer_head head;
    void *data; /* kept from UCX until delivered; NULL when empty */
    size_t len;
};

struct td_xfer_made {
    uint64_t address_sum; /* of the envelope */
    uint64_t used;        /* 0: never */
    uint32_t count;
};

struct td_xfer {
    struct td_xfer_options options;
    ucp_context_h context;
    ucp_worker_h worker;
    int fd;
    uint8_t address[TD_XFER_ADDRESS_MAX];
    size_t address_len;
    struct td_xfer_made made[TD_XFER_MADE_MAX];
    uint64_t made_clock;
    struct td_link peers, regions;
    struct td_link done; /* requests UCX has finished, to be delivered */
    struct td_xfer_inbound inbox[TD_XFER_INBOX];
    uint32_t inbox_used, inbox_taken;
    bool attention;   /* some peer has lost_due or is closing */
    bool busy_before; /* last arm found UCX busy */
    bool moved;       /* something happened since */
    bool inside;      /* callbacks are running */
    bool destroying;
    struct td_xfer_counts counts;
};

struct td_xfer_region {
    struct td_xfer *x;
    struct td_link link;
    ucp_mem_h memory;
    void *base;
    size_t bytes;
    uint8_t key[TD_XFER_KEY_MAX];
    size_t key_len;
};

struct td_xfer_remote {
    struct td_xfer_peer *peer;
    struct td_link link;
    ucp_rkey_h rkey;
    uint64_t base, bytes;
};

/* env.c */
TD_MUST_USE td_status td_xfer_env_check(struct td_error *err);
/* The last thing UCX complained about since td_xfer_ucx_forget(), "" when nothing. */
void td_xfer_ucx_forget(void);
const char *td_xfer_ucx_said(void);
TD_MUST_USE td_status td_xfer_ep_lanes(ucp_ep_h ep, char *buf, struct td_error *err);
td_status td_xfer_from_ucs(ucs_status_t s);

/* peer.c */
struct td_xfer_peer *td_xfer_peer_find(const struct td_xfer *x, uint64_t id);
/* A connector's HELLO came in. */
void td_xfer_peer_accept(struct td_xfer *x, const struct td_xfer_head *hello, const void *address,
                         size_t len);
/* Marks an open link as lost; on_lost follows from the next sweep. */
void td_xfer_peer_fail(struct td_xfer_peer *peer, td_status why, const char *sentence);
/* Reports losses, finishes closes; returns the number of callbacks run. */
unsigned td_xfer_peers_sweep(struct td_xfer *x);
/* Gives back what a closed peer still holds of UCX, while the worker lives. */
void td_xfer_peer_settle(struct td_xfer_peer *peer);
void td_xfer_peer_free(struct td_xfer_peer *peer);

/* pairing.c; `address` is unsealed */
/* The number of the endpoint that is made now. */
uint32_t td_xfer_made_next(struct td_xfer *x, const void *address);
/* How many endpoints to make and close before the next one is number `theirs`. */
uint32_t td_xfer_made_behind(struct td_xfer *x, const void *address, uint32_t theirs);

/* message.c */
TD_MUST_USE td_status td_xfer_message_start(struct td_xfer *x, struct td_error *err);
unsigned td_xfer_inbox_deliver(struct td_xfer *x);
void td_xfer_inbox_drop(struct td_xfer *x);
void td_xfer_note_send(struct td_xfer_note *note, enum td_xfer_kind kind, const void *payload,
                       size_t len);

/* put.c */
unsigned td_xfer_done_deliver(struct td_xfer *x);
/* Reports every request of a closing peer that is not reported yet. */
unsigned td_xfer_requests_cancel(struct td_xfer_peer *peer);
void td_xfer_remotes_drop(struct td_xfer_peer *peer);

#endif

/* Shared by the files of this folder only: the structs behind xfer.h. */
#ifndef TD_COMMON_XFER_INTERNAL_H
#define TD_COMMON_XFER_INTERNAL_H

#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include "common/xfer/ear.h"
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
    /* shm: UCX takes at most 16 elements per progress call; all are delivered before the next. tcp:
     * it takes what 16 sockets hold, and a window is all that a link has under way. */
    TD_XFER_INBOX = TD_XFER_FIFO,
    /* UCX unmaps a closed endpoint's memory from progress, a call or two later. */
    TD_XFER_CLOSE_ROUNDS = 3,
    TD_XFER_MADE_MAX = 256, /* addresses whose endpoints are counted (pairing.c) */
    TD_XFER_CATCH_UP_MAX = 16,
    /* tcp lane: a piece travels as one message of UCX's TCP, so it is bounded by its receive
     * buffer, which should stay in the processor's cache until it is copied. */
    TD_XFER_PIECE_BYTES = 65536,
    TD_XFER_PIECES = 16,      /* of a link with UCX at one time */
    /* Callers in the challenge at one time: whoever knows the key has proven it within a round trip,
     * so the oldest of more is silent and leaves. With those that are leaving: STRANGERS. */
    TD_XFER_UNPROVEN_MAX = 8,
    TD_XFER_STRANGERS_MAX = 64,
    /* tcp: an endpoint is not closed sooner. UCX 1.13's connection manager remembers an event of a
     * socket by its number; when that is closed while it still connects, the event may be given to
     * the next socket of the number, where it is a failed assertion and the end of the process. */
    TD_XFER_SETTLE_MS = 100,
    TD_XFER_PROVE_MS = 5000, /* for the challenge, from the first word to the last */
    TD_XFER_PLUGS_MAX = 512, /* descriptors that old queues left behind (queue.c): six each */
    TD_XFER_MESSAGE_ID = 0,  /* UCX's id of our only active message */
};
/* And words to ourselves. */
_Static_assert(TD_XFER_PER_LINK *TD_XFER_PEERS_MAX + 100 <= TD_XFER_FIFO, "FIFOs cannot fill");
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

struct td_xfer_piece {       /* of a put, under way */
    struct td_xfer_req *req; /* NULL: free */
    struct td_xfer_piece_head head;
};

struct td_xfer_grant { /* region NULL: none */
    struct td_xfer_region *region;
    uint64_t offset, bytes;
};

enum td_xfer_state { TD_XFER_OPEN, TD_XFER_LOST, TD_XFER_CLOSING };

struct td_xfer_peer {
    struct td_xfer *x;
    struct td_link link; /* in x->peers */
    uint64_t id;         /* of the link; 0: not one, closing since it was made (pairing.c) */
    uint32_t made;       /* endpoints towards the same address before this one */
    ucp_ep_h ep;
    ucp_worker_h worker; /* whose endpoint it is: ours, or one that was given up (queue.c) */
    void *user;
    enum td_xfer_state state;
    bool lost_due; /* on_lost has to be called */
    bool refused;  /* the upper layer never saw it: no callbacks */
    bool said_bye; /* by the other side: it needs none from us */
    td_status why;
    char sentence[192];
    bool ep_closed;
    uint64_t made_ns; /* tcp: when the endpoint was made */
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

    /* tcp lane; on the shm lane every link is proven from the start */
    bool proven;
    bool called; /* it called us */
    struct td_challenge challenge;
    uint64_t prove_by_ns;
    uint64_t to; /* we called it: the random number of its address */
    struct td_xfer_greeting greeting;
    struct td_xfer_note key[2], landed_note; /* a side says at most two words of the challenge */
    uint8_t key_bytes[2][TD_CHALLENGE_MAX];
    uint32_t keys_said;
    uint8_t token_out[TD_TOKEN_BYTES], token_in[TD_TOKEN_BYTES];
    struct td_xfer_grant grant;
    struct td_xfer_piece pieces[TD_XFER_PIECES];
    uint32_t pieces_used, pieces_out, landed; /* with UCX; given to UCX; known to be over there */
    uint32_t pieces_in;
    bool landed_due;
};

struct td_xfer_inbound {
    struct td_xfer_head head;
    ucp_ep_h from; /* HELLO on the tcp lane: the endpoint it came over */
    void *data;    /* kept from UCX until delivered; NULL when empty */
    size_t len;
};

struct td_xfer_made {
    uint64_t address_sum; /* of the envelope */
    uint64_t used;        /* 0: never */
    uint32_t count;
};

struct td_xfer_queue { /* what we receive from */
    ucp_worker_h worker; /* NULL: none */
    ucp_ep_h self;       /* shm lane: towards us */
    int fd;              /* UCX's event descriptor */
    uint8_t address[TD_XFER_ADDRESS_MAX];
    size_t address_len;
};

struct td_xfer {
    struct td_xfer_options options;
    ucp_context_h context;
    struct td_xfer_queue queue;
    int fd; /* the queue's, under a number that stays */
    /* shm lane: is the queue still read? */
    struct td_xfer_queue old; /* given up; its links are being closed */
    struct td_ear ear;
    bool waiting;   /* the last arm found UCX busy */
    bool heard;     /* something came since the last look */
    bool word_busy; /* with UCX */
    struct td_xfer_head word;
    uint32_t plugs;
    int plug[TD_XFER_PLUGS_MAX]; /* 0: none */
    char lanes[TD_XFER_LANES_MAX]; /* of the link to ourselves */
    /* tcp lane */
    ucp_listener_h listener;
    ucp_conn_request_h caller[TD_XFER_UNPROVEN_MAX]; /* to be opened outside of UCX */
    uint32_t callers;
    uint64_t random; /* in our address */
    struct td_xfer_made made[TD_XFER_MADE_MAX];
    uint64_t made_clock;
    struct td_link peers, regions;
    struct td_link done; /* requests UCX has finished, to be delivered */
    struct td_xfer_inbound inbox[TD_XFER_INBOX];
    uint32_t inbox_used, inbox_taken;
    bool pump_due;    /* a link may give UCX more pieces */
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
    ucp_mem_h memory; /* NULL on the tcp lane */
    uint64_t id;      /* tcp: what peers call it; random */
    void *base;
    size_t bytes;
    uint8_t key[TD_XFER_KEY_MAX];
    size_t key_len;
};

struct td_xfer_remote {
    struct td_xfer_peer *peer;
    struct td_link link;
    ucp_rkey_h rkey; /* NULL on the tcp lane */
    uint64_t region; /* tcp */
    uint64_t base, bytes;
};

/* env.c */
TD_MUST_USE td_status td_xfer_env_check(struct td_error *err);
enum td_xfer_lane td_xfer_lane_chosen(void);
const char *td_xfer_device(void); /* of the tcp lane */
/* Address and netmask of an interface, in network order. CONFIG: none of that name is up and has an
 * IPv4 address. */
TD_MUST_USE td_status td_xfer_interface(const char *name, struct in_addr *ret_address,
                                        struct in_addr *ret_mask, struct td_error *err);
const char *td_xfer_lane_name(uint32_t lane);
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
/* tcp lane: somebody called. A link without id, of which the upper layer has not heard. */
TD_MUST_USE td_status td_xfer_peer_called(struct td_xfer *x, ucp_conn_request_h request);
/* Marks an open link as lost; on_lost follows from the next sweep. */
void td_xfer_peer_fail(struct td_xfer_peer *peer, td_status why, const char *sentence);
/* Reports losses, finishes closes; returns the number of callbacks run. */
unsigned td_xfer_peers_sweep(struct td_xfer *x);
/* Gives back what a closed peer still holds of UCX, while the worker lives. */
void td_xfer_peer_settle(struct td_xfer_peer *peer);
void td_xfer_peer_free(struct td_xfer_peer *peer);

/* As many links as options.max_peers allows; strangers do not count. */
bool td_xfer_peers_full(const struct td_xfer *x);
/* Nobody hears of its end, neither the upper layer nor the other side. */
void td_xfer_peer_discard(struct td_xfer_peer *peer);

/* prove.c: the challenge of the tcp lane */
TD_MUST_USE td_status td_xfer_prove_start(struct td_xfer_peer *peer, enum td_challenge_side side,
                                          struct td_error *err);
/* The connector's HELLO; on the shm lane the bare address. */
void td_xfer_hello(struct td_xfer_peer *peer);
/* tcp lane: a HELLO came in over the endpoint `from`. */
void td_xfer_greeted(struct td_xfer *x, const struct td_xfer_head *hello, ucp_ep_h from,
                     const void *bytes, size_t len);
/* The next word of the other side's. */
void td_xfer_prove(struct td_xfer_peer *peer, const void *bytes, size_t len);
void td_xfer_stranger(struct td_xfer *x, const char *sentence);
bool td_xfer_token_is_good(const struct td_xfer_peer *peer, const uint8_t token[TD_TOKEN_BYTES]);
/* Gives up links that did not prove themselves in time; returns the next such time. */
uint64_t td_xfer_prove_expire(struct td_xfer *x, uint64_t now_ns);

/* door.c: endpoints of the tcp lane */
TD_MUST_USE td_status td_xfer_door_open(struct td_xfer *x, struct td_error *err);
void td_xfer_door_close(struct td_xfer *x);
/* Makes peer->ep; `inner` is UCX's part of an address. */
TD_MUST_USE td_status td_xfer_door_call(struct td_xfer_peer *peer, const void *inner, size_t len,
                                        ucp_ep_params_t *params, struct td_error *err);
/* Opens those who called. Returns their number. */
unsigned td_xfer_door_answer(struct td_xfer *x);

/* fence.c: whom UCX's TCP port answers */
enum { TD_XFER_PORTS_MAX = 64 };
struct td_xfer_ports { /* listening sockets of this process */
    int n, fd[TD_XFER_PORTS_MAX];
};
void td_xfer_fence_look(struct td_xfer_ports *ports);
/* Those that came since `before` answer only the subnet of `device`. */
TD_MUST_USE td_status td_xfer_fence(const struct td_xfer_ports *before, const char *device,
                                    struct td_error *err);

/* piece.c: puts of the tcp lane */
TD_MUST_USE td_status td_xfer_pieces_start(struct td_xfer *x, struct td_error *err);
/* Takes the request, which begin() has prepared. */
void td_xfer_pieces_post(struct td_xfer_peer *peer, struct td_xfer_req *req);
/* Gives UCX what the window allows. */
void td_xfer_pieces_pump(struct td_xfer_peer *peer);
/* The same for every link for which UCX has room again. */
void td_xfer_pieces_go_on(struct td_xfer *x);
/* The link is lost or closing: what UCX does not hold is finished. */
void td_xfer_pieces_end(struct td_xfer_peer *peer);
void td_xfer_landed(struct td_xfer_peer *peer, uint32_t pieces);
void td_xfer_landed_say(struct td_xfer *x);

/* pairing.c; `address` is unsealed */
/* The number of the endpoint that is made now. */
uint32_t td_xfer_made_next(struct td_xfer *x, const void *address);
/* How many endpoints to make and close before the next one is number `theirs`. */
uint32_t td_xfer_made_behind(struct td_xfer *x, const void *address, uint32_t theirs);

/* queue.c */
TD_MUST_USE td_status td_xfer_queue_open(struct td_xfer *x, const struct td_xfer_ports *before,
                                         struct td_error *err);
void td_xfer_queue_close(struct td_xfer *x);
/* Once a turn of the loop, when all that has come was taken: takes a new queue when this one is
 * read no more. Runs on_renewed; losses follow from the next sweep. */
void td_xfer_queue_look(struct td_xfer *x, uint64_t now_ns);
/* Gives back an old one when no link has an endpoint there any more. */
void td_xfer_queue_retire(struct td_xfer *x);

/* message.c */
TD_MUST_USE td_status td_xfer_message_start(struct td_xfer *x, ucp_worker_h worker,
                                            struct td_error *err);
/* What still comes is dropped. */
void td_xfer_message_end(ucp_worker_h worker);
unsigned td_xfer_inbox_deliver(struct td_xfer *x);
void td_xfer_inbox_drop(struct td_xfer *x);
void td_xfer_note_send(struct td_xfer_note *note, enum td_xfer_kind kind, const void *payload,
                       size_t len);
/* Gives UCX what the window of messages allows. */
void td_xfer_messages_pump(struct td_xfer_peer *peer);

/* put.c */
/* UCX has let go of it, or never had it: `status` is reported at the next delivery. */
void td_xfer_req_finish(struct td_xfer_req *req, td_status status);
unsigned td_xfer_done_deliver(struct td_xfer *x);
/* Reports every request of a closing peer that is not reported yet. */
unsigned td_xfer_requests_cancel(struct td_xfer_peer *peer);
void td_xfer_remotes_drop(struct td_xfer_peer *peer);

#endif

/* The sending half of the handoff: peers, credits, send slabs, tickets. A part of the prefill
 * machine (prefill/sched.h), which opens a ticket per request and is told when it is over.
 *
 *   blocks become ready -> PACK into a send slab, for which a landing slab is reserved at once
 *   -> PUT, flushed -> SLAB, in block order -> CREDIT returns the landing slab
 *   slot's block last, alone -> MANIFEST when every SLAB was said -> VERDICT ends the ticket
 *
 * A landing slab is ours until SLAB is said and decode's from then until its CREDIT: a ticket that
 * dies with puts under way keeps its send slabs until they are quiet, and the landing slabs are
 * still ours afterwards. A failed put means the link is broken: the peer is closed, and with
 * PEER_CLOSED everything of it is quiet. Then we greet again although nobody needs the peer just
 * now: decode keeps our landing slabs in quarantine until it hears that our writes are over, and
 * may itself be the one that is stopped just now. A resting peer gives its entry to one that is
 * needed. A decode worker that had to take a new address (common/xfer) is greeted there as soon as
 * the link to the old one is closed.
 * Nothing here waits without a clock. */
#ifndef TD_PREFILL_HANDOFF_H
#define TD_PREFILL_HANDOFF_H

#include "common/base/fifo.h"
#include "common/kv/manifest.h"
#include "prefill/sched.h"

/* Greetings one after the other; then a rest before each, of one transfer_ns and doubling up to
 * REST_MAX of them, for as long as the peer can be reached at all: one that was stopped for an hour
 * shall be told after that hour. */
enum { TD_PEER_TRIES = 3, TD_PEER_REST_MAX = 32 };
/* A manifest without a verdict is repeated this often until its deadline. */
enum { TD_MANIFEST_TIMES = 4 };

enum td_peer_state {
    TD_PEER_FREE,
    TD_PEER_GREETING,
    TD_PEER_OPEN,
    TD_PEER_CLOSING,
    TD_PEER_RESTING, /* no link; greeted again when somebody needs it or the rest is over */
};

enum td_landing_state { TD_LANDING_OURS, TD_LANDING_RESERVED, TD_LANDING_THEIRS };

struct td_sender_landing {
    enum td_landing_state state;
    uint64_t address;
    uint64_t ticket; /* THEIRS: with first_block, which use of it */
    uint32_t first_block;
    uint64_t deadline_ns; /* THEIRS: of the CREDIT */
};

struct td_sender_address { /* where a decode worker is dialed */
    uint32_t number;       /* the higher of two is the newer one */
    size_t len;
    uint8_t bytes[TD_MSG_ADDRESS_MAX];
};

struct td_sender_peer {
    uint64_t epoch;
    struct td_sender_address address;
    enum td_peer_state state;
    bool again;           /* greet once more when closed: only that frees the slabs granted to us */
    bool refused;         /* by a WELCOME that says so, or by us */
    uint32_t tries;       /* greetings since the peer was last open */
    bool closed;          /* CLOSING: the link is; a pack under way still names the entry */
    uint32_t slabs;       /* send slabs that name the entry */
    uint64_t deadline_ns; /* GREETING: the WELCOME; RESTING: the next greeting */
    uint64_t heard_ns, beat_ns, seq;
    uint64_t slab_bytes; /* usable: the smaller of both sides' */
    uint32_t n_landing;
    struct td_sender_landing landing[TD_LANDING_SLABS_MAX];
};

enum td_slab_state {
    TD_SLAB_FREE,
    TD_SLAB_PACKING,
    TD_SLAB_PUTTING,
    TD_SLAB_FLUSHED, /* its SLAB waits for that of an earlier block */
    TD_SLAB_UNQUIET, /* the put failed but may still read */
};

struct td_sender_slab {
    enum td_slab_state state;
    uint32_t ticket, peer, landing; /* entries */
    uint32_t first_block, n_blocks;
    uint64_t bytes;
};

enum td_ticket_state { TD_TICKET_NONE, TD_TICKET_OPEN, TD_TICKET_OVER };

/* What the scheduler says at open. Pointers live until the ticket is over and quiet. */
struct td_sender_order {
    uint64_t decode_epoch, ticket;
    uint32_t n_prompt;
    uint32_t n_first; /* choices */
    uint64_t prompt_hash, seed;
    const uint32_t *pages; /* of the sequence: page blocks, 1 << split in each */
    uint32_t slot;
};

struct td_sender_ticket {
    enum td_ticket_state state;
    struct td_sender_order o;
    uint32_t peer;         /* entry */
    uint32_t page_blocks;  /* the slot's block has this number */
    uint32_t ready;        /* blocks that may be packed, slot's included at the end */
    uint32_t packed, told; /* blocks given to PACK; blocks whose SLAB was said */
    uint32_t slabs;        /* send slabs in use */
    bool complete;         /* tokens 0 are known */
    bool manifest;         /* sent, perhaps again */
    struct td_token first[TD_FIRST_TOKENS_MAX]; /* [o.n_first] */
    uint64_t deadline_ns; /* of the VERDICT; UINT64_MAX: the manifest is not sent */
    uint64_t ask_ns;      /* then the manifest is said again: one of the two may be lost */
    struct td_kv_tally tally;
    td_status status; /* OVER */
    char text[TD_TEXT_MAX];
};

struct td_sender {
    const struct td_prefill_options *o;
    struct td_fifo *actions;         /* of the machine */
    struct td_sender_peer *peer;     /* [max_peers] */
    struct td_sender_slab *slab;     /* [send_slabs] */
    struct td_sender_ticket *ticket; /* [max_requests], by the scheduler's entry number */
    uint32_t next_ticket;            /* who is asked first for the next free slab */
    uint64_t now_ns;                 /* of the event being handled; set by the scheduler */
    uint64_t handoffs_ok, handoffs_failed, bytes_moved, bytes_early;
};

TD_MUST_USE td_status td_sender_create(struct td_sender *s, const struct td_prefill_options *o,
                                       struct td_fifo *actions, struct td_error *err);
void td_sender_destroy(struct td_sender *s);

/* ---- from the scheduler; `i` is its entry number ---- */

/* Connects to the peer if need be. */
void td_sender_open(struct td_sender *s, uint32_t i, const struct td_sender_order *o,
                    const struct td_sender_address *address);
/* The decode worker has this address; its link begins anew there if that is news. */
void td_sender_moved(struct td_sender *s, uint64_t epoch, const struct td_sender_address *address);
/* The first `tokens` tokens of the prompt are in the pool. */
void td_sender_ready(struct td_sender *s, uint32_t i, uint32_t tokens);
/* All are, the slot too, and these are token 0 of each choice, [n_first]. */
void td_sender_complete(struct td_sender *s, uint32_t i, const struct td_token *first);
/* Ends an open ticket; decode is told. Repeatable. */
void td_sender_abort(struct td_sender *s, uint32_t i, td_status status, const char *text);
/* The same without a word to decode: the router cancels the admission, and an ABORT that overtook
 * the answer would make it look failed. */
void td_sender_drop(struct td_sender *s, uint32_t i);
/* Over, and nothing reads its pages any more; true also when it was never opened. */
bool td_sender_quiet(const struct td_sender *s, uint32_t i);
/* Forgets a quiet ticket. */
void td_sender_forget(struct td_sender *s, uint32_t i);

/* ---- from outside ---- */

/* PACKED, PUT_DONE, PUT_QUIET, PEER_*. */
void td_sender_event(struct td_sender *s, const struct td_prefill_event *ev);
void td_sender_timer(struct td_sender *s);
uint64_t td_sender_deadline(const struct td_sender *s);
/* Gives out free slabs; after every step. */
void td_sender_pump(struct td_sender *s);

#endif

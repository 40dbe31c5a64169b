/* The receiving half of the handoff: peers, landing slabs, tickets, the verdict. A part of the
 * decode machine (decode/sched.h), which opens a ticket per admission.
 *
 *   SLAB -> UNPACK (every block verified, copied into the sequence's pages) -> CREDIT
 *   MANIFEST -> compared with what was unpacked and with what was admitted -> VERDICT
 *
 * Blocks come in order; a doubled SLAB is dropped, a missing one ends the ticket. A MANIFEST may be
 * repeated by a sender that heard no verdict: it gets the same one again. Landing slabs are
 * granted to a peer as a whole. When its link ends, the process may still write into them: they are
 * quarantined until it greets again (it does so only when its writes are quiet), is proven dead, or,
 * where this process does the writing (tcp lane), until its link is closed here.
 * Pages never wait for that, since no other process can write into the pool. */
#ifndef TD_DECODE_HANDOFF_H
#define TD_DECODE_HANDOFF_H

#include "common/base/fifo.h"
#include "common/base/list.h"
#include "common/kv/manifest.h"
#include "decode/sched.h"

enum td_source_state {
    TD_SOURCE_FREE,
    TD_SOURCE_OPEN,
    TD_SOURCE_QUARANTINED, /* its landing slabs may still be written to */
    TD_SOURCE_GONE,        /* proven quiet; an unpack under way still reads a slab */
};

struct td_receiver_slab {
    bool unpacking;
    uint32_t ticket; /* entry */
    uint64_t number; /* of the ticket: for the CREDIT */
    uint32_t first_block, n_blocks;
};

struct td_receiver_peer {
    enum td_source_state state;
    uint64_t epoch;
    td_link_id link;   /* the newest */
    bool owes_welcome; /* granted when the last unpack from the earlier link is done */
    uint64_t heard_ns, beat_ns, seq;
    uint32_t unpacking; /* slabs */
    struct td_receiver_slab slab[TD_LANDING_SLABS_MAX];
};

enum td_receipt_state {
    TD_RECEIPT_NONE,
    TD_RECEIPT_OPEN,  /* the lease runs */
    TD_RECEIPT_TAKEN, /* verified: the sequence may run */
    TD_RECEIPT_OVER,  /* failed or aborted: `status`, `text` */
};

/* What the scheduler says at open; `pages` lives until the receipt is quiet. */
struct td_receiver_order {
    uint64_t ticket;
    uint32_t n_prompt;
    uint32_t n_first; /* choices */
    uint64_t prompt_hash;
    const uint32_t *pages; /* of the sequence: page blocks, 1 << split in each */
    uint32_t slot;
};

struct td_receipt {
    enum td_receipt_state state;
    struct td_receiver_order o;
    uint32_t peer;       /* entry; UINT32_MAX: nobody has sent for it yet */
    uint32_t next_block; /* expected in the next SLAB */
    uint32_t unpacking;  /* slabs */
    uint64_t lease_ns;   /* when it expires */
    struct td_kv_tally tally;
    bool has_manifest; /* waits for the last UNPACKED */
    struct td_msg_manifest manifest;
    struct td_token first[TD_FIRST_TOKENS_MAX]; /* TAKEN: [n_first] */
    td_status status;
    char text[TD_TEXT_MAX];
};

/* The last verdicts, by ticket modulo their number. */
enum { TD_VERDICTS_KEPT = 256 };
struct td_receiver_verdict {
    uint64_t ticket; /* 0: none */
    td_status status;
};

struct td_receiver {
    const struct td_decode_options *o;
    struct td_fifo *actions;       /* of the machine */
    struct td_receiver_peer *peer; /* [max_peers] */
    struct td_receipt *receipt;    /* [slots], by the scheduler's entry number */
    struct td_receiver_verdict verdict[TD_VERDICTS_KEPT];
    uint64_t handoffs_ok, handoffs_failed, bytes_moved;
};

TD_MUST_USE td_status td_receiver_create(struct td_receiver *r, const struct td_decode_options *o,
                                         struct td_fifo *actions, struct td_error *err);
void td_receiver_destroy(struct td_receiver *r);

/* ---- from the scheduler; `i` is its entry number ---- */

void td_receiver_open(struct td_receiver *r, uint64_t now_ns, uint32_t i,
                      const struct td_receiver_order *o);
/* The lease starts again. */
void td_receiver_keep(struct td_receiver *r, uint64_t now_ns, uint32_t i);
/* Ends an open receipt; a peer that has sent for it is told. Repeatable. */
void td_receiver_abort(struct td_receiver *r, uint32_t i, td_status status, const char *text);
/* Not open, and no unpack writes its pages; true also when it was never opened. */
bool td_receiver_quiet(const struct td_receiver *r, uint32_t i);
/* Forgets a quiet receipt. */
void td_receiver_forget(struct td_receiver *r, uint32_t i);

/* ---- from outside ---- */

/* UNPACKED, PEER_*. */
void td_receiver_event(struct td_receiver *r, const struct td_decode_event *ev);
void td_receiver_timer(struct td_receiver *r, uint64_t now_ns);
uint64_t td_receiver_deadline(const struct td_receiver *r);

#endif

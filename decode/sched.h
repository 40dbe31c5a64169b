/* The decode worker's step machine: who is admitted, who runs in the next step, who owns which
 * page. The receiving half of the handoff (decode/handoff.h) is a part of it, so a shell and the
 * simulator drive one machine.
 *
 *   ADMIT -> reserved (pages, slot, lease) -> handoff verified -> running -> FINISHED, RELEASED
 *   ADMIT with ids -> prefilling by itself -> running -> FINISHED, RELEASED
 *
 * A request has n choices: sequences of one prompt, each with a slot, a seed and an end of its own.
 * All are reserved at ADMIT: the full pages of the prompt once, held by all of them, since nothing
 * is written there any more; whatever may be written (the prompt's last page when it is not full,
 * the slot, room to grow) for each. The prompt comes into the first one's slot and pages and is
 * copied for the others when it is verified or computed: until then they are one, afterwards each
 * goes its own way and lets go of its own.
 *
 * A step is one token for every running sequence and, in what is left of the token budget, a chunk
 * of one self-prefilled prompt. After a handoff of N tokens with token 0 sampled, the next step
 * feeds token 0 at position N and samples token 1 (position N + 1). A sequence never runs without
 * a manifest that agrees. Whatever ends a sequence goes through one retire path that may run twice:
 * pages and slot go back when no step and no unpack uses them, then RELEASED is sent.
 *
 * A full pool preempts the youngest sequence, running or not: FAILED(PREEMPTED), and the router
 * admits it again as a new attempt, with the tokens it has shown at the end of the prompt. Age is
 * the request's, not the admission's, so a sequence that comes back is not the youngest for ever;
 * of the choices of one request the last is the youngest, and it alone makes room; the oldest
 * always runs, and since nothing is admitted that all pages together could not hold, it ends. Pages
 * that a preempted handoff still unpacks into are waited for: who needs one sits steps out until
 * then.
 *
 * Use: td_decode_step(event), then td_decode_next() until false; carrying out an action may call
 * td_decode_step() again. Pointers in an event must live until the actions have been taken. */
#ifndef TD_DECODE_SCHED_H
#define TD_DECODE_SCHED_H

#include "decode/events.h"

enum { TD_DECODE_RESERVE_NEW = 4096 };

struct td_decode_options {
    uint64_t epoch; /* ours, random */
    uint64_t numerics_id;
    bool mixed_numerics;               /* a prefill peer of another numerics id is let in */
    const struct td_kv_layout *layout; /* outlives the machine */
    uint32_t split;                    /* a page has td_kv_page_tokens(split) tokens */
    uint32_t pages, slots;             /* of the engine; slots bounds the sequences */
    uint32_t max_context;              /* prompt and output of one sequence */
    uint32_t
        reserve_new; /* output tokens reserved at admission, at most; 0: TD_DECODE_RESERVE_NEW */
    uint32_t max_tokens;               /* of one step; >= slots (asserted) */
    int32_t eos;                       /* id of end-of-text; -1: none */
    uint32_t max_peers, landing_slabs; /* landing slabs per peer, <= TD_LANDING_SLABS_MAX */
    uint64_t slab_bytes;
    uint64_t lease_ns;
    uint64_t beat_ns;         /* between our beats to each peer */
    uint64_t peer_timeout_ns; /* silence of a peer */
};

struct td_decode;
TD_MUST_USE td_status td_decode_create(const struct td_decode_options *o, struct td_decode **ret,
                                       struct td_error *err);
void td_decode_destroy(struct td_decode *d);

void td_decode_step(struct td_decode *d, const struct td_decode_event *ev);
bool td_decode_next(struct td_decode *d, struct td_decode_action *ret);
/* When a TIMER event is wanted; UINT64_MAX: never. */
uint64_t td_decode_deadline(const struct td_decode *d);

/* Most messages to one peer that may wait for it at a time: a VERDICT and an ABORT for every
 * sequence, a CREDIT and an ABORT for every landing slab, and what the link says for itself. */
uint32_t td_decode_peer_messages(const struct td_decode_options *o);

/* Fills the load, for a heartbeat that is about to be sent, and the ledger beside it. */
void td_decode_load(const struct td_decode *d, struct td_msg_heartbeat *ret);
void td_decode_ledger(const struct td_decode *d, struct td_msg_ledger *ret);
/* From scratch: no page, slot or slab has two owners, none is lost, counts agree. For tests. */
TD_MUST_USE td_status td_decode_check(const struct td_decode *d, struct td_error *err);

#endif

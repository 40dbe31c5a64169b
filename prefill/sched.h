/* The prefill worker's step machine: which chunk the engine computes next, who owns which page, and
 * when a request may be forgotten. The sending half of the handoff (prefill/handoff.h) is a part of
 * it, so a shell and the simulator drive one machine.
 *
 *   PREFILL -> waiting -> (pages for the whole prompt and a slot) computing -> sending -> RELEASED
 *
 * First come, first served; one chunk in the engine at a time; while a prompt's last blocks are on
 * their way the next prompt computes. Chunks end on multiples of 256 tokens except the last. Token
 * 0 goes to the router at once and waits for no transfer. Whatever ends a request goes through one
 * retire path that may run twice: pages and slot go back when no step, pack or put uses them.
 *
 * Use: td_prefill_step(event), then td_prefill_next() until false; carrying out an action may call
 * td_prefill_step() again. Pointers in an event must live until the actions have been taken. */
#ifndef TD_PREFILL_SCHED_H
#define TD_PREFILL_SCHED_H

#include "prefill/events.h"

struct td_prefill_options {
    uint64_t epoch; /* ours, random */
    uint64_t numerics_id;
    const struct td_kv_layout *layout; /* outlives the machine */
    uint32_t split;                    /* a page has td_kv_page_tokens(split) tokens */
    uint32_t pages, slots;             /* of the engine */
    uint32_t max_context;              /* prompt tokens and output, of one request */
    uint32_t max_requests;             /* waiting ones included; more are refused with BUSY */
    uint32_t chunk_tokens;
    int32_t eos; /* id of end-of-text; -1: none */
    uint32_t send_slabs;
    uint64_t slab_bytes; /* holds at least one slot block and one page block (asserted) */
    uint32_t max_peers;
    uint64_t transfer_ns; /* hello's answer, one slab until its credit, manifest until verdict */
    uint64_t beat_ns;     /* between our beats to each peer */
    uint64_t peer_timeout_ns; /* silence of a peer */
};

struct td_prefill;
TD_MUST_USE td_status td_prefill_create(const struct td_prefill_options *o, struct td_prefill **ret,
                                        struct td_error *err);
void td_prefill_destroy(struct td_prefill *p);

void td_prefill_step(struct td_prefill *p, const struct td_prefill_event *ev);
bool td_prefill_next(struct td_prefill *p, struct td_prefill_action *ret);
/* When a TIMER event is wanted; UINT64_MAX: never. */
uint64_t td_prefill_deadline(const struct td_prefill *p);

/* Most messages to one peer that may wait for it at a time: an ABORT and a MANIFEST for every
 * request, a SLAB for every send slab, and what the link says for itself. */
uint32_t td_prefill_peer_messages(const struct td_prefill_options *o);

/* Fills the load, for a heartbeat that is about to be sent, and the ledger beside it. */
void td_prefill_load(const struct td_prefill *p, struct td_msg_heartbeat *ret);
void td_prefill_ledger(const struct td_prefill *p, struct td_msg_ledger *ret);
/* From scratch: no page, slot or slab has two owners, none is lost, counts agree. For tests. */
TD_MUST_USE td_status td_prefill_check(const struct td_prefill *p, struct td_error *err);

#endif

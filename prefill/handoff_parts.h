/* Inside the sending half: what its two files share. Not for others. */
#ifndef TD_PREFILL_HANDOFF_PARTS_H
#define TD_PREFILL_HANDOFF_PARTS_H

#include "prefill/handoff.h"

/* handoff.c */
void td_ticket_over(struct td_sender *s, uint32_t i, td_status status, const char *text);
/* Says the manifest of a ticket whose SLABs are all said. */
void td_ticket_manifest(struct td_sender *s, uint32_t i);
/* A slab nobody reads any more; a landing slab reserved for it is ours again. */
void td_slab_free(struct td_sender *s, uint32_t k);

/* handoff_peer.c */
/* Entry of the peer, connecting if it is new; UINT32_MAX when the table is full. */
uint32_t td_peer_for(struct td_sender *s, uint64_t epoch, const struct td_sender_address *address);
struct td_msg *td_peer_send(struct td_sender *s, uint32_t peer, enum td_msg_type type);
/* Its tickets end, its link is closed. Repeatable. */
void td_peer_lost(struct td_sender *s, uint32_t peer, td_status status, const char *text);
/* Frees the entry of a closed peer that no slab names any more, or greets it again. */
void td_peer_forget(struct td_sender *s, uint32_t peer);
void td_peer_event(struct td_sender *s, const struct td_prefill_event *ev);

#endif

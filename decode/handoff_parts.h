/* Inside the receiving half: what its two files share. Not for others. */
#ifndef TD_DECODE_HANDOFF_PARTS_H
#define TD_DECODE_HANDOFF_PARTS_H

#include "decode/handoff.h"

/* handoff.c */
void td_receipt_over(struct td_receiver *r, uint32_t i, td_status status, const char *text);
/* The open receipt of a ticket; UINT32_MAX: none. */
uint32_t td_receipt_find(const struct td_receiver *r, uint64_t ticket);
void td_receipt_slab(struct td_receiver *r, uint64_t now_ns, uint32_t peer,
                     const struct td_msg_slab *m);
void td_receipt_manifest(struct td_receiver *r, uint32_t peer, const struct td_msg_manifest *m);

/* handoff_peer.c */
struct td_msg *td_source_send(struct td_receiver *r, uint32_t peer, enum td_msg_type type);
void td_source_abort(struct td_receiver *r, uint32_t peer, uint64_t ticket, td_status status,
                     const char *text);
/* An unpack from one of its slabs has ended. */
void td_source_unpacked(struct td_receiver *r, uint32_t peer);
void td_source_event(struct td_receiver *r, const struct td_decode_event *ev);

#endif

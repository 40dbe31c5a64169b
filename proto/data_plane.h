/* The data plane of a worker on its loop: UCX links (common/xfer) that carry messages of
 * proto/msg.h. Drives UCX's progress from libuv without spinning while nothing happens.
 *
 * Puts, regions and peers are common/xfer's own (td_plane_xfer); this adds the codec and the
 * waking. Everything belongs to the loop's thread. */
#ifndef TD_PROTO_DATA_PLANE_H
#define TD_PROTO_DATA_PLANE_H

#include <uv.h>

#include "common/xfer/xfer.h"
#include "proto/msg.h"

struct td_plane;

/* All come from the loop; as in td_xfer_options, with messages decoded. */
struct td_plane_events {
    void (*on_accept)(void *user, struct td_xfer_peer *peer); /* NULL: every caller is refused */
    void (*on_message)(void *user, struct td_xfer_peer *peer, const struct td_msg *m);
    /* Also for a message that is none (PROTOCOL). The peer still has to be closed. */
    void (*on_lost)(void *user, struct td_xfer_peer *peer, td_status why, const char *text);
    void (*on_closed)(void *user, struct td_xfer_peer *peer);
    /* tcp lane, may be NULL: somebody greeted who does not know the cluster key. */
    void (*on_stranger)(void *user, const char *text);
    /* shm lane, may be NULL: nothing could be received any more. OK: the address is another one now,
     * and every link is lost, as on_lost says of each; else it is tried again. */
    void (*on_renewed)(void *user, td_status status, const char *text);
};

struct td_plane_options {
    uint32_t max_peers;
    uint32_t sends_per_peer; /* messages that may be under way to one peer; one more is BUSY */
    /* tcp lane: the cluster key, which outlives the plane, and who we are in the challenge. */
    const struct td_cluster_key *key;
    enum td_role role;
    uint64_t epoch;
};

/* td_xfer_env must have been called. `events` is kept by pointer. */
TD_MUST_USE td_status td_plane_create(uv_loop_t *loop, const struct td_plane_events *events,
                                      void *user, const struct td_plane_options *o,
                                      struct td_plane **ret, struct td_error *err);
/* Without callbacks; regions must have been freed. NULL is fine. */
void td_plane_destroy(struct td_plane *p);

struct td_xfer *td_plane_xfer(struct td_plane *p);

/* As td_xfer_send: BUSY, PEER_LOST. */
TD_MUST_USE td_status td_plane_send(struct td_plane *p, struct td_xfer_peer *peer,
                                    const struct td_msg *m, uint64_t deadline_ns,
                                    struct td_error *err);

#endif

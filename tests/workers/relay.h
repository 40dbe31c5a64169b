/* Between a real prefill and a real decode worker: prefill is told the relay's address, the relay
 * dials decode, and every message of the data plane passes through here. So a test can lose, double
 * or delay one message, or stop or kill a process exactly when a message passes. Slabs do not pass:
 * prefill writes into decode's memory as ever, by the key that WELCOME carries. */
#ifndef TD_TESTS_WORKERS_RELAY_H
#define TD_TESTS_WORKERS_RELAY_H

#include "proto/data_plane.h"
#include "tests/workers/cluster.h"

enum { RELAY_PAIRS = 16 };

enum relay_action {
    RELAY_PASS,
    RELAY_DROP,
    RELAY_TWICE,
    RELAY_LATE,   /* after the next one in its direction, beats not counted */
    RELAY_SIGNAL, /* `signal` to `pid`, then the message passes */
};

struct relay_pair {
    struct td_xfer_peer *near, *far; /* prefill's side, decode's side */
};

struct relay {
    struct cluster *c;
    struct td_plane *plane;
    struct relay_pair pair[RELAY_PAIRS];
    /* what to do, once */
    enum td_msg_type type;
    bool slot_block; /* of SLABs: only that of the slot's block */
    enum relay_action action;
    pid_t pid;
    int signal;
    bool hit;
    bool is_late; /* `late` waits for the next message to `late_to` */
    struct td_msg late;
    struct td_xfer_peer *late_to;
    unsigned renewals;
    uint64_t passed, welcomes, verdicts; /* messages; the last two: those that said OK */
};

/* td_xfer_env must have been called, the cluster is open. From now on its prefill dials the relay.
 */
void relay_open(struct relay *r, struct cluster *c);
void relay_close(struct relay *r);
/* Ends both sides of every link. */
void relay_break(struct relay *r);
/* What shall happen to the next message of this type. */
void relay_arm(struct relay *r, enum td_msg_type type, bool slot_block, enum relay_action action);
bool relay_hit(void *r);

#endif

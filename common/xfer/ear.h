/* When a process has become deaf. UCX's shared memory (1.13.1) receives from one queue whose senders
 * take a place before they fill it. One that is killed or stopped in between, or that fails there,
 * leaves the queue unread for everybody, and UCX does not notice. Its owner can see two things: UCX
 * says for a while that there is something to do, and nothing comes; and a word that the owner
 * says to itself through the same queue does not come either. The first may have other reasons (a
 * message waits for room at a peer), the second has none.
 *
 * Pure: no clock, no UCX. Asked once a turn of the loop; what it costs while all is well is a few
 * comparisons. */
#ifndef TD_COMMON_XFER_EAR_H
#define TD_COMMON_XFER_EAR_H

#include <stdbool.h>
#include <stdint.h>

enum {
    TD_EAR_ASK_MS = 50, /* silence, with something to do, before the word is said */
    /* And before the queue is given up: a sender that lost its processor in between fills its place
     * when it gets it back, and giving up costs every link. */
    TD_EAR_DEAF_MS = 1000,
    /* Most that counts between two looks: our own absence is nobody's silence. */
    TD_EAR_LOOK_MS = 20,
};

struct td_ear { /* zeroed: a new queue */
    uint64_t looked_ns, silent_ns;
    bool asked;
};

enum td_ear_verdict {
    TD_EAR_FINE,
    TD_EAR_ASK,  /* say the word now */
    TD_EAR_DEAF, /* this queue will not be read again; said again a TD_EAR_DEAF_MS later */
};

/* `waiting`: UCX says that there is something to do. `heard`: something came since the last look, the
 * word included. */
enum td_ear_verdict td_ear_look(struct td_ear *e, uint64_t now_ns, bool waiting, bool heard);

#endif

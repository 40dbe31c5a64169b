/* What the tests and the benchmark of common/xfer share: one end of a link that records its
 * callbacks, a loop that drives several ends as a role would, and a real second process. */
#ifndef TD_TESTS_COMMON_XFER_ENDS_H
#define TD_TESTS_COMMON_XFER_ENDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/xfer/xfer.h"

enum { ENDS_WAIT_MS = 60000 }; /* for what must happen: only a hang takes so long */

struct end {
    struct td_xfer *x;
    struct td_cluster_key *key;
    struct td_xfer_peer *peer; /* the last one accepted or connected */
    unsigned accepted, lost, closed, messages, strangers;
    td_status why;
    char sentence[200];
    uint8_t last[TD_XFER_MESSAGE_MAX];
    size_t last_len;
    bool echo;          /* send every message back */
    unsigned echo_busy; /* echoes refused */
    bool expires;       /* td_xfer_expire is called in every turn, as a role does */
    unsigned renewed;   /* times it took a new queue, or tried */
    td_status renewed_status;
    void (*on_lost)(struct end *e, struct td_xfer_peer *peer);
    void (*on_accept)(struct end *e, struct td_xfer_peer *peer);
    void (*on_message)(struct end *e, struct td_xfer_peer *peer, const void *bytes, size_t len);
    unsigned polls; /* times the loop was told to poll */
    unsigned
        missed; /* times it slept in vain: there was work, and the descriptor had not said so */
};

/* Sets UCX up for the lane that the first argument names, "tcp" (on the loopback interface) or
 * "shm", or for shm when it names none; the receiver's process gets the same. Returns the number of
 * arguments used. */
int ends_lane(int argc, char **argv);
bool ends_tcp(void);
/* The cluster key of ends opened from now on; "" for the usual one. tcp lane. */
void ends_key(const char *text);

void end_open(struct end *e, uint32_t max_peers, uint32_t sends_per_peer);
void end_close(struct end *e);
void end_connect(struct end *e, const void *address, size_t len);

/* Progresses all ends, sleeping on their descriptors when told to, until `done(user)` or the time
 * is over; returns whether it was. */
bool ends_run(struct end **ends, size_t n, bool (*done)(void *user), void *user, unsigned ms);

/* A request that counts its callbacks. */
struct want {
    struct td_xfer_req req;
    unsigned done, quiet;
    td_status status;
};
void want_init(struct want *w, uint64_t deadline_ns);
bool want_is_quiet(void *want);

/* Fills with, or compares to, a stream that differs at every 8 bytes and for every seed. */
void pattern_fill(void *p, size_t len, uint64_t seed);
bool pattern_is(const void *p, size_t len, uint64_t seed);

/* Open descriptors of this process, and a few of the looking. */
unsigned descriptors(void);

/* ---- the other process: this program run again with "receiver"
 * ----------------------------------*/

enum { RECEIVER_REGION = 16 << 20 };

enum op { OP_HELLO = 1, OP_VERIFY, OP_OK, OP_BAD };
struct order { /* the messages between a test and its receiver; HELLO's answer: seed is `missed` */
    uint64_t op, epoch, offset, len, seed;
};

struct receiver {
    pid_t pid;
    uint8_t address[TD_XFER_ADDRESS_MAX], key[TD_XFER_KEY_MAX];
    uint64_t address_len, key_len;
    uint64_t epoch;
};

void receiver_start(struct receiver *r);
/* The same, and it connects to `address` and sends an OP_OK with its epoch. */
void sender_start(struct receiver *r, const void *address, size_t len);
/* Kills (if alive) and reaps. */
void receiver_stop(struct receiver *r);
int receiver_main(void);

#endif

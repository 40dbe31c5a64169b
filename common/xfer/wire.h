/* What td_xfer itself puts on the wire and into address and key bytes. Fixed layouts without
 * padding, little-endian, which all hosts of a cluster are (another order fails at the magic).
 * Bytes from outside are checked here before UCX, which does not check, sees them. */
#ifndef TD_COMMON_XFER_WIRE_H
#define TD_COMMON_XFER_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/auth/challenge.h"
#include "common/base/status.h"
#include "common/xfer/xfer.h"

enum {
    /* Also stands for UCX's FIFO figures (env.c), which both sides of a link must share: a sender
     * maps the receiver's FIFO by its own. Raise it when they change. */
    TD_XFER_VERSION = 3,
    /* One fragment is one element of the receiver's FIFO (8256 bytes less UCX's and our heads). */
    TD_XFER_FRAGMENT = 8000,
    TD_XFER_FRAGMENTS_MAX = 9, /* 65536 / 8000 rounded up */
};

enum td_xfer_kind {
    TD_XFER_HELLO = 1, /* payload: the sender's address; tcp: td_xfer_greeting. Opens a link */
    TD_XFER_DATA,      /* payload: one fragment of a message */
    TD_XFER_ACK,       /* `acked` alone */
    TD_XFER_BYE,       /* the link is closed */
    /* tcp lane: */
    TD_XFER_KEY,    /* payload: the next message of the challenge */
    TD_XFER_LANDED, /* `sequence` pieces were copied into the region */
    TD_XFER_PIECE,  /* td_xfer_piece_head; payload: bytes of a put */
    /* shm lane: */
    TD_XFER_WORD, /* of a process to itself; says that its queue is read */
};

#define TD_XFER_HEAD_MAGIC 0x46584454u /* "TDXF" */

/* In front of every active message. */
struct td_xfer_head {
    uint32_t magic;
    uint8_t version;
    uint8_t kind;
    uint8_t fragment, fragments;   /* DATA: this one and how many make the message */
    uint64_t link;                 /* random, chosen by the side that connected */
    uint32_t sequence;             /* DATA: counts fragments of this direction */
    uint32_t acked;                /* fragments of the other direction that were consumed */
    uint32_t bytes;                /* DATA: of the whole message */
    uint32_t made;                 /* HELLO: endpoints made towards the receiver before this one */
    uint8_t token[TD_TOKEN_BYTES]; /* tcp: of this direction; 0 in HELLO and KEY */
};
_Static_assert(sizeof(struct td_xfer_head) == 32 + TD_TOKEN_BYTES, "no padding on the wire");

/* tcp lane: in front of each piece of a put. The receiver copies it, if it was granted the place.
 */
struct td_xfer_piece_head {
    uint32_t magic;
    uint8_t version;
    uint8_t kind;
    uint8_t last; /* of its put: LANDED is awaited */
    uint8_t reserved;
    uint64_t link;
    uint32_t sequence; /* counts pieces of this direction */
    uint32_t bytes;
    uint64_t region, offset;
    uint8_t token[TD_TOKEN_BYTES];
};
_Static_assert(sizeof(struct td_xfer_piece_head) == 40 + TD_TOKEN_BYTES, "no padding on the wire");

/* tcp lane: payload of HELLO. The mac, over link, challenge and the address it is meant for, keeps
 * strangers from learning or holding anything; that it is fresh the challenge proves. */
struct td_xfer_greeting {
    uint8_t mac[TD_MAC_BYTES];
    uint8_t challenge[TD_CHALLENGE_MAX];
    uint32_t challenge_len, reserved;
};
_Static_assert(sizeof(struct td_xfer_greeting) == 40 + TD_CHALLENGE_MAX, "no padding on the wire");

/* Who packed some bytes: a process by id and start time, for a process id alone is reused. */
struct td_xfer_origin {
    uint64_t start; /* clock ticks after boot, field 22 of /proc/PID/stat */
    uint32_t pid;
    uint32_t reserved;
};

/* In front of UCX's bytes in an address (base, bytes 0) or a key. */
struct td_xfer_envelope {
    uint32_t magic; /* says address or key */
    uint16_t version;
    uint16_t memory;              /* key: enum td_xfer_memory */
    uint32_t inner;               /* bytes of UCX's part */
    uint32_t lane;                /* enum td_xfer_lane */
    struct td_xfer_origin origin; /* of another host on the tcp lane, where it says nothing */
    uint64_t base, bytes;         /* key: the region in its owner's address space */
    uint64_t sum;                 /* FNV-1a of all the rest, UCX's part included */
};
_Static_assert(sizeof(struct td_xfer_envelope) == 56, "no padding on the wire");

#define TD_XFER_ADDRESS_MAGIC 0x41584454u /* "TDXA" */
#define TD_XFER_KEY_MAGIC 0x4b584454u     /* "TDXK" */

/* Writes envelope and `inner` bytes to `out`, which holds `cap`; returns the total length. Fills
 * magic, version, lane, inner, origin and sum of *envelope itself. */
TD_MUST_USE td_status td_xfer_seal(struct td_xfer_envelope *envelope, uint32_t magic,
                                   const void *inner, size_t inner_len, void *out, size_t cap,
                                   size_t *ret_len, struct td_error *err);

/* Checks bytes from outside. PROTOCOL: damaged or of another version. MISMATCH: of another lane
 * than ours. UNREACHABLE: the process that packed them has ended (shm). `what` names them in the
 * sentence. UCX's part follows the envelope.
 */
TD_MUST_USE td_status td_xfer_unseal(const void *bytes, size_t len, uint32_t magic,
                                     const char *what, struct td_xfer_envelope *ret_envelope,
                                     struct td_error *err);

/* UNREACHABLE when the process is gone or its id belongs to another one now. On the tcp lane always
 * OK: it may be of another host, and UCX finds out by connecting. */
TD_MUST_USE td_status td_xfer_origin_check(const struct td_xfer_origin *origin, const char *what,
                                           struct td_error *err);

#endif

/* What td_xfer itself puts on the wire and into address and key bytes. Fixed layouts without
 * padding, host byte order: both ends are on one host (a lane between hosts adds its own
 * version). Bytes from outside are checked here before UCX, which does not check, sees them. */
#ifndef TD_COMMON_XFER_WIRE_H
#define TD_COMMON_XFER_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum {
    /* Also stands for UCX's FIFO figures (env.c), which both sides of a link must share: a sender
     * maps the receiver's FIFO by its own. Raise it when they change. */
    TD_XFER_VERSION = 2,
    /* One fragment is one element of the receiver's FIFO (8256 bytes less UCX's and our heads). */
    TD_XFER_FRAGMENT = 8000,
    TD_XFER_FRAGMENTS_MAX = 9, /* 65536 / 8000 rounded up */
};

enum td_xfer_kind {
    TD_XFER_HELLO = 1, /* payload: the sender's address. Opens a link */
    TD_XFER_DATA,      /* payload: one fragment of a message */
    TD_XFER_ACK,       /* `acked` alone */
    TD_XFER_BYE,       /* the link is closed */
};

#define TD_XFER_HEAD_MAGIC 0x46584454u /* "TDXF" */

/* In front of every active message. */
struct td_xfer_head {
    uint32_t magic;
    uint8_t version;
    uint8_t kind;
    uint8_t fragment, fragments; /* DATA: this one and how many make the message */
    uint64_t link;               /* random, chosen by the side that connected */
    uint32_t sequence;           /* DATA: counts fragments of this direction */
    uint32_t acked;              /* fragments of the other direction that were consumed */
    uint32_t bytes;              /* DATA: of the whole message */
    uint32_t made;               /* HELLO: endpoints made towards the receiver before this one */
};
_Static_assert(sizeof(struct td_xfer_head) == 32, "no padding on the wire");

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
    uint16_t memory; /* key: enum td_xfer_memory */
    uint32_t inner;  /* bytes of UCX's part */
    uint32_t reserved;
    struct td_xfer_origin origin;
    uint64_t base, bytes; /* key: the region in its owner's address space */
    uint64_t sum;         /* FNV-1a of all the rest, UCX's part included */
};
_Static_assert(sizeof(struct td_xfer_envelope) == 56, "no padding on the wire");

#define TD_XFER_ADDRESS_MAGIC 0x41584454u /* "TDXA" */
#define TD_XFER_KEY_MAGIC 0x4b584454u     /* "TDXK" */

/* Writes envelope and `inner` bytes to `out`, which holds `cap`; returns the total length. Fills
 * magic, version, inner, origin and sum of *envelope itself. */
TD_MUST_USE td_status td_xfer_seal(struct td_xfer_envelope *envelope, uint32_t magic,
                                   const void *inner, size_t inner_len, void *out, size_t cap,
                                   size_t *ret_len, struct td_error *err);

/* Checks bytes from outside. PROTOCOL: damaged or of another version. UNREACHABLE: the process
 * that packed them has ended. `what` names them in the sentence. UCX's part follows the envelope.
 */
TD_MUST_USE td_status td_xfer_unseal(const void *bytes, size_t len, uint32_t magic,
                                     const char *what, struct td_xfer_envelope *ret_envelope,
                                     struct td_error *err);

/* UNREACHABLE when the process is gone or its id belongs to another one now. */
TD_MUST_USE td_status td_xfer_origin_check(const struct td_xfer_origin *origin, const char *what,
                                           struct td_error *err);

#endif

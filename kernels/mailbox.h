/* What the ranks of a worker take on each of their devices to tell each other small things
 * (kernels/cuda/comm.cu); also for planning in builds without CUDA. */
#ifndef TD_KERNELS_MAILBOX_H
#define TD_KERNELS_MAILBOX_H

#include <stddef.h>

#include "kernels/device.h"

enum {
    TD_MAIL_BLOCKS = 32,                   /* of a kernel, at most */
    TD_MAIL_ROOM = 64 << 10,               /* bytes from one rank to one block, twice */
    TD_MAIL_FLAGS = 4096,                  /* bytes before the rooms: a flag per block and rank */
    TD_MAIL_CHECK = 4096,                  /* bytes that join sends to see that they arrive */
    TD_MAIL_OWN = 256 + 2 * TD_MAIL_CHECK, /* bytes of no peer's: counts; sent and received */
};

/* What peers write: flags, then [TD_MAIL_BLOCKS][2][ranks][TD_MAIL_ROOM]. */
static inline size_t td_mailbox_bytes(uint32_t ranks) {
    return TD_MAIL_FLAGS + (size_t)TD_MAIL_BLOCKS * 2 * ranks * TD_MAIL_ROOM;
}
/* All that td_backend.join takes of a CUDA device, at most; what NCCL takes itself comes to it. */
static inline size_t td_join_bytes(uint32_t ranks) {
    return TD_MAIL_OWN + td_mailbox_bytes(ranks);
}

#endif

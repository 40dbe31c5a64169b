/* What the parts of the collectives share: the kernels of small ones (comm.cu), large ones
 * (comm_large.cu), and how ranks come together and part (comm_join.cu). */
#ifndef TD_KERNELS_CUDA_COMM_H
#define TD_KERNELS_CUDA_COMM_H

#include <pthread.h>

#include "kernels/cuda/nccl.h"
#include "kernels/cuda/op.h"

extern "C" {
#include "kernels/mailbox.h"
}

/* Memory of the host that the device reads and writes while kernels run. */
struct td_mail_host {
    uint32_t broken;  /* 1: nobody waits any more */
    uint32_t missing; /* 1 + the rank that was waited for in vain */
    uint32_t left;    /* `broken` when waiting ended, not the limit */
};

/* The argument of every kernel: all mailboxes as this device sees them. */
struct td_mail {
    unsigned char *box[TD_MAX_RANKS];
    uint32_t *count; /* [TD_MAIL_BLOCKS] epochs; then 1 when somebody did not come */
    struct td_mail_host *host;
    uint64_t limit; /* ns of waiting */
    uint32_t rank;
};

/* td_device.comm */
struct td_comm {
    struct td_mail mail;
    uint32_t ranks, blocks;   /* blocks: of a kernel, at most; the same for all */
    int device[TD_MAX_RANKS]; /* of each rank */
    int processors;
    unsigned char *box, *own; /* td_mailbox_bytes and TD_MAIL_OWN */
    bool box_on_host;         /* some ranks cannot reach each other's memory */
    /* Where NCCL adds what has at least `large` bytes; else NULL. */
    const struct td_nccl *nccl;
    struct td_nccl_id id;     /* rank 0's */
    void *carrier;            /* NCCL's communicator; NULL from the moment it is broken off */
    pthread_mutex_t queueing; /* held while it is given something to do */
    int error;                /* NCCL's first */
    size_t large;
};

static inline struct td_comm *td_comm_of(const struct td_device *d) {
    return (struct td_comm *)d->comm;
}

/* A sum of two ranks, y not add; `comm` is the carrier. */
void td_cuda_reduce_large(const struct td_device *d, void *comm,
                          const struct td_all_reduce_args *a);

#endif

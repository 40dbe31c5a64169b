/* The part of NCCL that large sums use (comm_large.cu), found when a worker of several ranks
 * starts: a build needs none of it, and a machine without it does the same with mailboxes. */
#ifndef TD_KERNELS_CUDA_NCCL_H
#define TD_KERNELS_CUDA_NCCL_H

#ifndef TD_CUDA_EMULATED
#include <cuda_runtime.h>
#endif
#include <stddef.h>

/* NCCL's numbers, which do not change. */
enum { TD_NCCL_OK = 0, TD_NCCL_IN_PROGRESS = 7, TD_NCCL_FLOATS = 7, TD_NCCL_SUM = 0 };

struct td_nccl_id {
    char internal[128];
};

/* NCCL's functions: 0 or an error; `comm` is a rank's. */
struct td_nccl {
    int (*get_version)(int *ret);
    int (*get_id)(struct td_nccl_id *ret);
    int (*init_rank)(void **ret_comm, int ranks, struct td_nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*abort)(void *comm);
    int (*async_error)(void *comm, int *ret);
    const char *(*error_text)(int error);
    int (*all_reduce)(const void *x, void *y, size_t n, int type, int op, void *comm,
                      cudaStream_t stream);
};

/* NULL: this machine has none. */
const struct td_nccl *td_nccl_find(void);

#endif

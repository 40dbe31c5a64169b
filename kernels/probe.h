/* What a kind of GPU can be asked before anything is built on it: whether this build has kernels
 * for it, whether it computes, and whether bytes arrive as they left between host and GPU, between
 * two GPUs and in a collective of all of them. For `tandem doctor`; engines do not need it.
 *
 * Every call may hang or end the process when the hardware or its driver is at fault: callers run
 * them in a process of their own with a time limit. GPUs are numbered as in the setting `device`.
 * Rates are in 10^9 bytes a second. */
#ifndef TD_KERNELS_PROBE_H
#define TD_KERNELS_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_gpu_seen {
    char name[96];
    char bus[32]; /* PCI address "00000000:41:00.0", as /sys and the driver's library know it */
    int major, minor;
    uint64_t bytes, free;
};

/* Pinned memory to the GPU and back: [0] to it, [1] from it. */
struct td_gpu_host {
    double rate[2];
    uint64_t wrong; /* 32-bit words that came back different */
};

/* [0]: from the first GPU to the second, [1]: back. */
struct td_gpu_pair {
    bool peer[2];         /* that GPU can address the other's memory */
    uint64_t copied[2];   /* wrong 32-bit words after the copy engine */
    uint64_t stored[2];   /* after stores of a kernel into the other's memory; 0 where not peers */
    uint64_t loaded[2];   /* after loads by a kernel from the other's memory; likewise */
    double rate[2], both; /* alone; both ways at once, the sum */
};

struct td_gpu_reduce {
    char stage[40]; /* what is being done: kept up to date, for whoever has to end the process */
    int version;    /* 22803: 2.28.3 */
    uint64_t wrong; /* values of all ranks */
    double seconds; /* of the sum, communicators made */
};

struct td_backend;

struct td_gpu_probe {
    const char *built_for;            /* architectures, "sm_90a sm_120a" */
    const struct td_backend *backend; /* what engines open; NULL: an emulation has none */
    /* CONFIG with a sentence when there are none to be used. */
    td_status (*count)(uint32_t *ret, struct td_error *err);
    td_status (*look)(uint32_t gpu, struct td_gpu_seen *ret, struct td_error *err);
    /* NO_KERNEL when this build has none for it; *ret: of which architecture they are (90, 120). */
    td_status (*kernels)(uint32_t gpu, int *ret, struct td_error *err);
    /* A kernel writes `bytes`, the host compares. */
    td_status (*compute)(uint32_t gpu, size_t bytes, uint64_t *ret_wrong, struct td_error *err);
    /* `bytes`, `times` times each way. */
    td_status (*host)(uint32_t gpu, size_t bytes, uint32_t times, struct td_gpu_host *ret,
                      struct td_error *err);
    td_status (*pair)(uint32_t a, uint32_t b, size_t bytes, uint32_t times, struct td_gpu_pair *ret,
                      struct td_error *err);
    /* Sums `bytes` of fp32 over `n` GPUs by the collectives' library, which is loaded by name;
     * NOT_FOUND when there is none. */
    td_status (*reduce)(const uint32_t *gpu, uint32_t n, size_t bytes, struct td_gpu_reduce *ret,
                        struct td_error *err);
};

#ifdef TD_HAVE_CUDA
extern const struct td_gpu_probe td_gpu_probe_cuda;
#endif

#endif

/* What every CUDA source includes: the runtime, the op table's C contracts, launches and the few
 * primitives of a block that the kernels share.
 *
 * Kernels are launched through TD_LAUNCH and take dynamic shared memory through TD_SHARED, so that
 * the same sources also build as plain C++ for the emulator of the tests (TD_CUDA_EMULATED), which
 * runs every thread of a block on the host: layouts, barriers and bits are checked without a GPU.
 */
#ifndef TD_KERNELS_CUDA_RT_H
#define TD_KERNELS_CUDA_RT_H

#ifndef TD_CUDA_EMULATED
#include <cuda_runtime.h>
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern "C" {
#include "kernels/ops.h"
}

/* Of a lane: the first since it was reported, and the op that met it. */
struct td_cuda_fault {
    cudaError_t error;
    const char *at;
};

enum { TD_CUDA_KERNELS = 32 }; /* with more shared memory than a default */

/* td_device.state */
struct td_cuda {
    int index;
    cudaStream_t stream[TD_LANES];
    cudaEvent_t mark[TD_LANES][2];
    struct td_cuda_fault fault[TD_LANES];
    int processors, major, minor;
    size_t shared_max;                    /* bytes of dynamic shared memory a block may have */
    const void *allowed[TD_CUDA_KERNELS]; /* by td_cuda_allow_shared */
    bool blocking;                        /* wait after every op, to find the faulty one */
    struct td_attend_left *attend;        /* workspace of the sparse core (attend.h) */
    uint32_t *index_bins; /* of the indexer (select.h), left zeroed by its kernels */
};

static inline struct td_cuda *td_cuda_of(const struct td_device *d) {
    return (struct td_cuda *)d->state;
}

/* Notes a lane's first fault; `op` has static storage. */
void td_cuda_check(const struct td_device *d, enum td_lane lane, const char *op);
/* What the calling thread does next is done on the device: a thread's device is a number of its
 * own, and ranks, their loaders and the thread of the KV lane come and go. */
void td_cuda_on(const struct td_device *d, enum td_lane lane);
/* Has a rank waited for another in vain? A sentence, once and for ever. */
td_status td_cuda_missing(const struct td_device *d, struct td_error *err);
/* Lets a kernel have `bytes` of dynamic shared memory, where that is more than a default. Asked at
 * every launch; the driver hears of it once, which an engine's start brings about. It allows the
 * most there is, since ranks that share a device have one setting. */
void td_cuda_allow_shared(const struct td_device *d, const void *kernel, size_t bytes,
                          const char *op);

#ifndef TD_CUDA_EMULATED
#define TD_SHARED(type, name)                                                                      \
    extern __shared__ __align__(16) unsigned char td_dynamic_shared[];                             \
    type *name = (type *)(void *)td_dynamic_shared
#define TD_LAUNCH_IN(d, lane, op, kernel, grid, block, shared, ...)                                \
    do {                                                                                           \
        td_cuda_on(d, lane);                                                                       \
        kernel<<<grid, block, shared, td_cuda_of(d)->stream[lane]>>>(__VA_ARGS__);                 \
        td_cuda_check(d, lane, op);                                                                \
    } while (0)
/* Each `beside` (up to 8) blocks that follow each other in a row of the grid run at once and reach
 * each other's dynamic shared memory; a multiple of them. Pairs: two. */
#define TD_LAUNCH_PAIRS(d, op, ...) TD_LAUNCH_BESIDE(d, op, 2, __VA_ARGS__)
#define TD_LAUNCH_BESIDE(d, op, beside, kernel, grid, block, shared, ...)                          \
    do {                                                                                           \
        cudaLaunchConfig_t config = {};                                                            \
        cudaLaunchAttribute pairs = {};                                                            \
        pairs.id = cudaLaunchAttributeClusterDimension;                                            \
        pairs.val.clusterDim.x = beside;                                                           \
        pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;                                       \
        config.gridDim = grid;                                                                     \
        config.blockDim = block;                                                                   \
        config.dynamicSmemBytes = shared;                                                          \
        config.stream = td_cuda_of(d)->stream[TD_LANE_STEP];                                       \
        config.attrs = &pairs;                                                                     \
        config.numAttrs = 1;                                                                       \
        td_cuda_on(d, TD_LANE_STEP);                                                               \
        cudaLaunchKernelEx(&config, kernel, __VA_ARGS__);                                          \
        td_cuda_check(d, TD_LANE_STEP, op);                                                        \
    } while (0)
/* A kernel of the step lane that may begin while the one launched before it runs: what does not
 * depend on it comes before td_launch_wait, which all its threads call. */
#define TD_LAUNCH_NEXT(d, op, kernel, grid, block, shared, ...)                                    \
    do {                                                                                           \
        cudaLaunchConfig_t config = {};                                                            \
        cudaLaunchAttribute early = {};                                                            \
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;                             \
        early.val.programmaticStreamSerializationAllowed = 1;                                      \
        config.gridDim = grid;                                                                     \
        config.blockDim = block;                                                                   \
        config.dynamicSmemBytes = shared;                                                          \
        config.stream = td_cuda_of(d)->stream[TD_LANE_STEP];                                       \
        config.attrs = &early;                                                                     \
        config.numAttrs = 1;                                                                       \
        td_cuda_on(d, TD_LANE_STEP);                                                               \
        cudaLaunchKernelEx(&config, kernel, __VA_ARGS__);                                          \
        td_cuda_check(d, TD_LANE_STEP, op);                                                        \
    } while (0)
/* In the kernel before: the next one's blocks may come as soon as there is room for them. */
static __device__ inline void td_launch_next(void) {
    asm volatile("griddepcontrol.launch_dependents;");
}
/* Until the kernel before has ended and what it wrote is seen. */
static __device__ inline void td_launch_wait(void) {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}
/* A barrier of the blocks of a pair (or of more), by all threads of all; what was written before it
 * is seen behind it. */
static __device__ inline void td_pair_sync(void) {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;"
                 :
                 :
                 : "memory");
}
/* Where block `rank` of them has what this block has at p. */
static __device__ inline void *td_pair_memory(void *p, uint32_t rank) {
    void *r;
    asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank));
    return r;
}
#endif
#define TD_LAUNCH(d, op, ...) TD_LAUNCH_IN(d, TD_LANE_STEP, op, __VA_ARGS__)

static __host__ __device__ inline uint32_t td_ceil(size_t n, size_t by) {
    return (uint32_t)((n + by - 1) / by);
}

#endif

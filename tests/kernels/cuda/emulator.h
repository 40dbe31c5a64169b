/* CUDA's language and runtime as plain C++ on the host, as far as kernels/cuda uses them; included
 * before everything else when those sources are built for tests without a GPU.
 *
 * Every thread of a block is a fiber with a stack of its own; a barrier lets the others run. So a
 * missing barrier shows (fibers run in ascending order in even blocks and in descending order in
 * odd ones), a barrier that not all threads reach ends the program with a sentence, and results are
 * those of the same arithmetic. Blocks (or pairs of them) run one after the other, in the host
 * thread that launches them; threads with kernels of their own run beside each other, so that ranks
 * meet. Devices are numbers: what is done to one while another is the thread's ends the program.
 * Not a model of memory or time. */
#ifndef TD_TESTS_KERNELS_CUDA_EMULATOR_H
#define TD_TESTS_KERNELS_CUDA_EMULATOR_H

#include <functional>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/kernels/cuda/fp4.h"

/* Beside the real backend in one program. */
#define td_backend_cuda td_backend_emulated
#define td_cuda_check td_emulated_check
#define td_cuda_on td_emulated_on
#define td_cuda_missing td_emulated_missing
#define td_cuda_reduce_large td_emulated_reduce_large
#define td_nccl_find td_emulated_nccl_find
#define td_cuda_allow_shared td_emulated_allow_shared
#define TD_CUDA_EMULATED
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static __thread
#define __constant__ static
#define __grid_constant__
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {
    }
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
struct __align__(8) float2 {
    float x, y;
};

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

/* Runs `body` for every thread of every block, `beside` (1 to 8) blocks of x at a time. */
void td_emulate(dim3 grid, dim3 block, size_t shared, unsigned beside,
                const std::function<void()> &body);
void *td_emulate_shared(void);
/* All lanes' `bytes` (up to 32) to everyone's `all` [32][bytes]. */
void td_emulate_exchange(const void *mine, size_t bytes, void *all);

/* A thread that waits for another block or rank lets the others run. */
void td_emulate_yield(void);
/* A thread that waits for others of its block lets them run; something came to pass. When nothing
 * does any more the program ends. */
void td_emulate_stand(void);
void td_emulate_went(void);
uint64_t td_emulate_ns(void);
/* From now on emulated time goes `times` as fast as the clock. */
extern "C" void td_emulate_hurry(unsigned times);

void td_emulate_group_sync(void); /* of 128 threads */
void td_pair_sync(void);
void *td_pair_memory(void *p, unsigned rank);
void __syncthreads(void);
void __syncwarp(unsigned mask = 0xffffffffu);

#define TD_SHARED(type, name) type *name = (type *)td_emulate_shared()
/* Runs a launch, or keeps it while a stream is captured. */
void td_emulate_launch(std::function<void()> launch);
/* A launch with its arguments as they are now. */
template <class... P, class... A>
static inline void td_emulate_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                                     unsigned beside, A... a) {
    td_emulate_launch([=] { td_emulate(grid, block, shared, beside, [=] { kernel(a...); }); });
}
#define TD_EMULATE_LAUNCH(d, lane, op, kernel, grid, block, shared, beside, ...)                   \
    do {                                                                                           \
        td_cuda_on(d, lane);                                                                       \
        td_emulate_on(td_cuda_of(d)->stream[lane], op);                                            \
        td_emulate_allowed((const void *)kernel, shared);                                          \
        td_emulate_kernel(kernel, grid, block, shared, beside, __VA_ARGS__);                       \
        td_cuda_check(d, lane, op);                                                                \
    } while (0)
#define TD_LAUNCH_IN(d, lane, op, kernel, grid, block, shared, ...)                                \
    TD_EMULATE_LAUNCH(d, lane, op, kernel, grid, block, shared, 1, __VA_ARGS__)
#define TD_LAUNCH_NEXT(d, op, kernel, grid, block, shared, ...)                                    \
    TD_EMULATE_LAUNCH(d, TD_LANE_STEP, op, kernel, grid, block, shared, 1, __VA_ARGS__)
static inline void td_launch_next(void) {
}
static inline void td_launch_wait(void) {
}
#define TD_LAUNCH_PAIRS(d, op, ...) TD_LAUNCH_BESIDE(d, op, 2, __VA_ARGS__)
/* Not for kernels with __shared__ variables: there is one of each for all blocks. */
#define TD_LAUNCH_BESIDE(d, op, beside, kernel, grid, block, shared, ...)                          \
    TD_EMULATE_LAUNCH(d, TD_LANE_STEP, op, kernel, grid, block, shared, beside, __VA_ARGS__)

template <class T> static inline T td_emulate_shuffle(T v, unsigned from, unsigned width = 32) {
    T all[32];
    (void)width;
    td_emulate_exchange(&v, sizeof v, all);
    return all[from & 31u];
}
template <class T> static inline T __shfl_sync(unsigned, T v, int lane) {
    return td_emulate_shuffle(v, (unsigned)lane);
}
template <class T> static inline T __shfl_xor_sync(unsigned, T v, int mask) {
    return td_emulate_shuffle(v, (threadIdx.x & 31u) ^ (unsigned)mask);
}
template <class T> static inline T __shfl_down_sync(unsigned, T v, unsigned by) {
    unsigned lane = threadIdx.x & 31u;
    return td_emulate_shuffle(v, lane + by < 32 ? lane + by : lane);
}
static inline unsigned __ballot_sync(unsigned, int p) {
    unsigned char mine = p != 0, all[32];
    unsigned mask = 0;
    td_emulate_exchange(&mine, 1, all);
    for (unsigned i = 0; i < 32; i++)
        mask |= (unsigned)all[i] << i;
    return mask;
}
static inline unsigned __match_any_sync(unsigned, unsigned v) {
    unsigned all[32], mask = 0;
    td_emulate_exchange(&v, sizeof v, all);
    for (unsigned i = 0; i < 32; i++)
        mask |= (unsigned)(all[i] == v) << i;
    return mask;
}
static inline int __popc(unsigned v) {
    return __builtin_popcount(v);
}
static inline int __clz(int v) {
    return v ? __builtin_clz((unsigned)v) : 32;
}
static inline unsigned atomicAdd(unsigned *p, unsigned v) {
    unsigned old = *p;
    *p = old + v;
    return old;
}
static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline void __threadfence(void) {
}
static inline void __threadfence_system(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
template <class T> static inline T __ldcg(const T *p) {
    return *p;
}
template <class T> static inline T __ldg(const T *p) {
    return *p;
}

/* ---- runtime ---- */

typedef int cudaError_t;
enum {
    cudaSuccess,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidDevice = 101,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorStreamCaptureUnsupported = 900
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaStreamNonBlocking, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaHostAllocDefault, cudaHostAllocPortable, cudaHostAllocMapped };
enum { TD_EMULATED_DEVICES = 8 };
typedef struct td_emulated_stream {
    int device;
} * cudaStream_t;
struct cudaDeviceProp {
    int multiProcessorCount, major, minor;
    size_t sharedMemPerBlockOptin;
};
#define CUDART_VERSION 0

static inline const char *cudaGetErrorString(cudaError_t) {
    return "an emulated fault";
}
static inline cudaError_t cudaGetLastError(void) {
    return cudaSuccess;
}
static inline cudaError_t cudaDeviceGetPCIBusId(char *buf, int cap, int index) {
    snprintf(buf, (size_t)cap, "0000:%02X:00.0", 0xf0 + index); /* nothing is there */
    return cudaSuccess;
}
static inline cudaError_t cudaGetDeviceCount(int *n) {
    *n = TD_EMULATED_DEVICES;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int);
void td_emulate_on(cudaStream_t s, const char *what);
void td_emulate_allowed(const void *kernel, size_t shared);
/* Hopper, or with TD_EMULATE=12 Blackwell: what shared memory there is, and which forms serve. */
static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    const char *major = getenv("TD_EMULATE");
    *p = cudaDeviceProp{2, 9, 0, 227 * 1024};
    if (major && strcmp(major, "12") == 0) *p = cudaDeviceProp{2, 12, 0, 99 * 1024};
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned);
bool td_emulate_capturing(void);
typedef cudaStream_t cudaEvent_t;
enum { cudaEventDisableTiming };
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
static inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return cudaSuccess;
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return td_emulate_capturing() ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, int, int bytes);
struct cudaFuncAttributes {
    size_t sharedSizeBytes;
};
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *f, const void *) {
    *f = cudaFuncAttributes{0};
    return cudaSuccess;
}
/* Of the thread's device, a card of 8 GB. */
cudaError_t cudaMemGetInfo(size_t *left, size_t *all);
cudaError_t cudaMalloc(void **p, size_t n);
cudaError_t cudaFree(void *p);
static inline cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) {
    *p = aligned_alloc(256, (n + 255) & ~(size_t)255);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
static inline cudaError_t cudaFreeHost(void *p) {
    free(p);
    return cudaSuccess;
}
/* Whole pages, once; with TD_EMULATE_PIN=0 a driver that pins nothing. */
enum { cudaHostRegisterPortable = 1 };
cudaError_t cudaHostRegister(void *p, size_t n, unsigned);
cudaError_t cudaHostUnregister(void *p);

/* A graph is the list of launches of a captured stream; only launches can be captured. */
typedef struct td_emulated_graph *cudaGraph_t;
typedef struct td_emulated_graph *cudaGraphExec_t;
typedef struct td_emulated_node *cudaGraphNode_t;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long);
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

static inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
    td_emulate_on(s, "memory");
    if (td_emulate_capturing()) return cudaErrorStreamCaptureUnsupported;
    memset(p, v, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind,
                                          cudaStream_t s) {
    td_emulate_on(s, "a copy");
    if (td_emulate_capturing()) return cudaErrorStreamCaptureUnsupported;
    memcpy(to, from, n);
    return cudaSuccess;
}
static inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from,
                                            size_t from_pitch, size_t width, size_t rows,
                                            cudaMemcpyKind, cudaStream_t s) {
    td_emulate_on(s, "a copy");
    if (td_emulate_capturing()) return cudaErrorStreamCaptureUnsupported;
    for (size_t i = 0; i < rows; i++)
        memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    return cudaSuccess;
}

#endif

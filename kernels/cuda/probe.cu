/* Questions to CUDA devices (kernels/probe.h): patterns that depend on a seed and on the place, so
 * that a stale, shifted or missing byte shows, written and counted by kernels, copied by every way
 * that an engine or NCCL uses. Everything of a call is made and given back in it. */
#ifndef TD_CUDA_EMULATED
#include <cuda_runtime.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern "C" {
#include "kernels/device.h"
#include "kernels/probe.h"
}
#include "kernels/cuda/probe_nccl.h"

enum { THREADS = 256, BLOCKS = 64 };

/* Launched without the op table's device: there is none yet. The emulation has its own. */
#ifndef PROBE_LAUNCH
#define PROBE_LAUNCH(kernel, stream, ...) kernel<<<BLOCKS, THREADS, 0, stream>>>(__VA_ARGS__)
#endif

static __host__ __device__ inline uint32_t pattern(uint32_t seed, uint32_t i) {
    uint32_t v = (i + seed) * 2654435761u;
    return v ^ v >> 15;
}

static __global__ void write_pattern(uint32_t *to, uint32_t words, uint32_t seed) {
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < words; i += THREADS * BLOCKS)
        to[i] = pattern(seed, i);
}

static __global__ void count_wrong(const uint32_t *from, uint32_t words, uint32_t seed,
                                   unsigned *wrong) {
    unsigned mine = 0;
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < words; i += THREADS * BLOCKS)
        mine += from[i] != pattern(seed, i);
    if (mine) atomicAdd(wrong, mine);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static td_status fail(struct td_error *err, const char *what, uint32_t gpu, cudaError_t e) {
    return td_fail(err, TD_IO, "%s: cuda:%u: %s", what, gpu, cudaGetErrorString(e));
}

/* One GPU's part of a question. */
struct end {
    int gpu;
    cudaStream_t stream;
    uint32_t *from, *to;
    unsigned *wrong;
};

static void end_close(struct end *x) {
    cudaSetDevice(x->gpu);
    cudaFree(x->from);
    cudaFree(x->to);
    cudaFree(x->wrong);
    if (x->stream) cudaStreamDestroy(x->stream);
    *x = end{};
}

static cudaError_t end_open(struct end *x, uint32_t gpu, size_t bytes) {
    *x = end{};
    x->gpu = (int)gpu;
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&x->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaMalloc((void **)&x->from, bytes);
    if (e == cudaSuccess) e = cudaMalloc((void **)&x->to, bytes);
    if (e == cudaSuccess) e = cudaMalloc((void **)&x->wrong, sizeof *x->wrong);
    return e;
}

static cudaError_t wait(const struct end *x) {
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e == cudaSuccess) e = cudaGetLastError(); /* of a launch */
    return e == cudaSuccess ? cudaStreamSynchronize(x->stream) : e;
}

/* `x` writes a pattern to any memory it reaches. */
static cudaError_t put_pattern(const struct end *x, uint32_t *to, size_t bytes, uint32_t seed) {
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e != cudaSuccess) return e;
    PROBE_LAUNCH(write_pattern, x->stream, to, (uint32_t)(bytes / 4), seed);
    return wait(x);
}

/* `x` counts in any memory it reaches; *ret is added to. */
static cudaError_t compare(const struct end *x, const uint32_t *from, size_t bytes, uint32_t seed,
                           uint64_t *ret) {
    unsigned wrong = 0;
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e == cudaSuccess) e = cudaMemsetAsync(x->wrong, 0, sizeof wrong, x->stream);
    if (e != cudaSuccess) return e;
    PROBE_LAUNCH(count_wrong, x->stream, from, (uint32_t)(bytes / 4), seed, x->wrong);
    e = wait(x);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(&wrong, x->wrong, sizeof wrong, cudaMemcpyDeviceToHost, x->stream);
    if (e == cudaSuccess) e = wait(x);
    *ret += wrong;
    return e;
}

/* ---- one GPU ---- */

static td_status probe_count(uint32_t *ret, struct td_error *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess)
        return td_fail(err, TD_CONFIG, "no GPU can be used: %s", cudaGetErrorString(e));
    *ret = (uint32_t)n;
    return TD_OK;
}

static td_status probe_look(uint32_t gpu, struct td_gpu_seen *ret, struct td_error *err) {
    cudaDeviceProp p;
    size_t left = 0, all = 0;
    memset(ret, 0, sizeof *ret);
    cudaError_t e = cudaDeviceGetPCIBusId(ret->bus, sizeof ret->bus, (int)gpu);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, (int)gpu);
    if (e == cudaSuccess) {
        snprintf(ret->name, sizeof ret->name, "%.90s", p.name);
        ret->major = p.major;
        ret->minor = p.minor;
        e = cudaSetDevice((int)gpu); /* from here on it has a context */
    }
    if (e == cudaSuccess) e = cudaMemGetInfo(&left, &all);
    ret->bytes = all;
    ret->free = left;
    return e == cudaSuccess ? TD_OK : fail(err, "opening it", gpu, e);
}

static td_status probe_kernels(uint32_t gpu, int *ret, struct td_error *err) {
    cudaFuncAttributes a;
    cudaError_t e = cudaSetDevice((int)gpu);
    /* All sources are built for the same list. */
    if (e == cudaSuccess) e = cudaFuncGetAttributes(&a, (const void *)write_pattern);
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();
        return td_fail(err, TD_NO_KERNEL, "cuda:%u: %s", gpu, cudaGetErrorString(e));
    }
    if (e != cudaSuccess) return fail(err, "loading kernels", gpu, e);
    *ret = a.binaryVersion;
    return TD_OK;
}

static td_status probe_compute(uint32_t gpu, size_t bytes, uint64_t *ret, struct td_error *err) {
    enum { SEED = 17 };
    struct end x;
    uint32_t *back = NULL;
    *ret = 0;
    cudaError_t e = end_open(&x, gpu, bytes);
    if (e == cudaSuccess) e = cudaHostAlloc((void **)&back, bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) e = put_pattern(&x, x.from, bytes, SEED);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(back, x.from, bytes, cudaMemcpyDeviceToHost, x.stream);
    if (e == cudaSuccess) e = wait(&x);
    for (uint32_t i = 0; e == cudaSuccess && i < bytes / 4; i++)
        *ret += back[i] != pattern(SEED, i);
    cudaFreeHost(back);
    end_close(&x);
    return e == cudaSuccess ? TD_OK : fail(err, "running a kernel", gpu, e);
}

static td_status probe_host(uint32_t gpu, size_t bytes, uint32_t times, struct td_gpu_host *ret,
                            struct td_error *err) {
    enum { SEED = 29 };
    struct end x;
    uint32_t *there = NULL, *back = NULL;
    memset(ret, 0, sizeof *ret);
    cudaError_t e = end_open(&x, gpu, bytes);
    if (e == cudaSuccess) e = cudaHostAlloc((void **)&there, bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) e = cudaHostAlloc((void **)&back, bytes, cudaHostAllocDefault);
    if (e == cudaSuccess) {
        for (uint32_t i = 0; i < bytes / 4; i++)
            there[i] = pattern(SEED, i);
        memset(back, 0, bytes);
    }
    for (int way = 0; way < 2 && e == cudaSuccess; way++) {
        double from = 0;
        for (uint32_t t = 0; t <= times && e == cudaSuccess; t++) {
            if (t == 1) { /* the first one warms up: links leave their idle speed */
                e = wait(&x);
                from = seconds();
            }
            if (e != cudaSuccess) break;
            e = way == 0 ? cudaMemcpyAsync(x.to, there, bytes, cudaMemcpyHostToDevice, x.stream)
                         : cudaMemcpyAsync(back, x.to, bytes, cudaMemcpyDeviceToHost, x.stream);
        }
        if (e == cudaSuccess) e = wait(&x);
        ret->rate[way] = (double)bytes * times / (seconds() - from) / 1e9;
    }
    if (e == cudaSuccess) e = compare(&x, x.to, bytes, SEED, &ret->wrong);
    for (uint32_t i = 0; e == cudaSuccess && i < bytes / 4; i++)
        ret->wrong += back[i] != pattern(SEED, i);
    cudaFreeHost(there);
    cudaFreeHost(back);
    end_close(&x);
    return e == cudaSuccess ? TD_OK : fail(err, "copying from and to pinned memory", gpu, e);
}

/* ---- two GPUs ---- */

static cudaError_t become_peers(const struct end *x, const struct end *y, bool *ret) {
    int can = 0;
    cudaError_t e = cudaDeviceCanAccessPeer(&can, x->gpu, y->gpu);
    if (e == cudaSuccess && can) {
        e = cudaSetDevice(x->gpu);
        if (e == cudaSuccess) e = cudaDeviceEnablePeerAccess(y->gpu, 0);
        if (e == cudaErrorPeerAccessAlreadyEnabled) {
            cudaGetLastError();
            e = cudaSuccess;
        }
    }
    *ret = can != 0;
    return e;
}

/* x's memory to y's; queued on x. */
static cudaError_t send(const struct end *x, const struct end *y, size_t bytes) {
    return cudaMemcpyPeerAsync(y->to, y->gpu, x->from, x->gpu, bytes, x->stream);
}

/* Each byte is wrong before it is right: what does not arrive shows. */
static cudaError_t one_way(const struct end *x, const struct end *y, size_t bytes, uint32_t seed,
                           int way, struct td_gpu_pair *ret) {
    cudaError_t e = put_pattern(x, x->from, bytes, seed);
    if (e == cudaSuccess) e = put_pattern(y, y->to, bytes, ~seed);
    if (e == cudaSuccess) e = send(x, y, bytes);
    if (e == cudaSuccess) e = wait(x);
    if (e == cudaSuccess) e = compare(y, y->to, bytes, seed, &ret->copied[way]);
    if (e != cudaSuccess || !ret->peer[way]) return e;
    /* As NCCL does it: kernels of one write to the other's memory, and read from it. */
    e = put_pattern(x, y->to, bytes, seed + 1);
    if (e == cudaSuccess) e = compare(y, y->to, bytes, seed + 1, &ret->stored[way]);
    if (e == cudaSuccess) e = compare(x, y->to, bytes, seed + 1, &ret->loaded[way]);
    return e;
}

/* Copies x to y, and the other way at the same time where `both`. */
static cudaError_t timed(const struct end *x, const struct end *y, bool both, size_t bytes,
                         uint32_t times, double *ret) {
    cudaError_t e = send(x, y, bytes);
    if (e == cudaSuccess && both) e = send(y, x, bytes);
    if (e == cudaSuccess) e = wait(x);
    if (e == cudaSuccess) e = wait(y);
    double from = seconds();
    for (uint32_t t = 0; t < times && e == cudaSuccess; t++) {
        e = send(x, y, bytes);
        if (e == cudaSuccess && both) e = send(y, x, bytes);
    }
    if (e == cudaSuccess) e = wait(x);
    if (e == cudaSuccess) e = wait(y);
    *ret = (double)bytes * times * (both ? 2 : 1) / (seconds() - from) / 1e9;
    return e;
}

static td_status probe_pair(uint32_t a, uint32_t b, size_t bytes, uint32_t times,
                            struct td_gpu_pair *ret, struct td_error *err) {
    struct end x, y;
    memset(ret, 0, sizeof *ret);
    cudaError_t e = end_open(&x, a, bytes), f = end_open(&y, b, bytes);
    if (e == cudaSuccess) e = f;
    if (e == cudaSuccess) e = become_peers(&x, &y, &ret->peer[0]);
    if (e == cudaSuccess) e = become_peers(&y, &x, &ret->peer[1]);
    if (e == cudaSuccess) e = one_way(&x, &y, bytes, 1000 * a + b, 0, ret);
    if (e == cudaSuccess) e = one_way(&y, &x, bytes, 1000 * b + a, 1, ret);
    if (e == cudaSuccess) e = timed(&x, &y, false, bytes, times, &ret->rate[0]);
    if (e == cudaSuccess) e = timed(&y, &x, false, bytes, times, &ret->rate[1]);
    if (e == cudaSuccess) e = timed(&x, &y, true, bytes, times, &ret->both);
    end_close(&x);
    end_close(&y);
    if (e == cudaSuccess) return TD_OK;
    return td_fail(err, TD_IO, "copying between cuda:%u and cuda:%u: %s", a, b,
                   cudaGetErrorString(e));
}

/* ---- all of them ---- */

enum { RANKS_MAX = 64 };

/* Whole numbers: any order of summation gives the same. */
static __host__ __device__ inline float addend(uint32_t rank, uint32_t i) {
    return (float)((rank + 1) * (i % 61 + 1));
}

static __global__ void write_addends(float *to, uint32_t n, uint32_t rank) {
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < n; i += THREADS * BLOCKS)
        to[i] = addend(rank, i);
}

static cudaError_t fill_addends(const struct end *x, uint32_t words, uint32_t rank) {
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e != cudaSuccess) return e;
    PROBE_LAUNCH(write_addends, x->stream, (float *)x->from, words, rank);
    return wait(x);
}

static cudaError_t wrong_sums(const struct end *x, uint32_t words, uint32_t n, float *back,
                              uint64_t *ret) {
    cudaError_t e = cudaSetDevice(x->gpu);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(back, x->to, words * sizeof(float), cudaMemcpyDeviceToHost, x->stream);
    if (e == cudaSuccess) e = wait(x);
    for (uint32_t i = 0; e == cudaSuccess && i < words; i++)
        *ret += back[i] != addend(n * (n + 1) / 2 - 1, i); /* 1 + ... + n times its number */
    return e;
}

static void now(struct td_gpu_reduce *r, const char *stage) {
    snprintf(r->stage, sizeof r->stage, "%s", stage);
}

static td_status sum_over(const struct td_probe_nccl *lib, struct end *x, uint32_t n,
                          uint32_t words, struct td_gpu_reduce *ret, struct td_error *err) {
    void *comm[RANKS_MAX] = {0};
    int gpu[RANKS_MAX];
    cudaError_t e = cudaSuccess;
    float *back = (float *)malloc(words * sizeof(float));
    for (uint32_t i = 0; i < n; i++) {
        gpu[i] = x[i].gpu;
        if (e == cudaSuccess) e = fill_addends(&x[i], words, i);
    }
    now(ret, "making the ranks' communicators");
    int bad = e == cudaSuccess && back ? lib->init_all(comm, (int)n, gpu) : 0;
    if (bad == 0) now(ret, "summing over the ranks");
    double from = seconds();
    if (e == cudaSuccess && back && bad == 0) bad = lib->group_start();
    for (uint32_t i = 0; e == cudaSuccess && back && bad == 0 && i < n; i++)
        bad = lib->all_reduce(x[i].from, x[i].to, words, TD_NCCL_FLOAT, TD_NCCL_SUM, comm[i],
                              x[i].stream);
    if (e == cudaSuccess && back && bad == 0) bad = lib->group_end();
    for (uint32_t i = 0; e == cudaSuccess && bad == 0 && i < n; i++)
        e = wait(&x[i]);
    ret->seconds = seconds() - from;
    for (uint32_t i = 0; back && e == cudaSuccess && bad == 0 && i < n; i++)
        e = wrong_sums(&x[i], words, n, back, &ret->wrong);
    free(back);
    td_status st = TD_OK;
    if (!back)
        st = td_fail(err, TD_NO_MEMORY, "no memory to compare sums");
    else if (bad)
        st = td_fail(err, TD_IO, "%s: %s", ret->stage, lib->error_string(bad));
    else if (e != cudaSuccess)
        st = td_fail(err, TD_IO, "%s: %s", ret->stage, cudaGetErrorString(e));
    if (st == TD_OK) now(ret, "ending the communicators");
    for (uint32_t i = 0; i < n; i++)
        if (comm[i]) (st == TD_OK ? lib->destroy : lib->abort)(comm[i]);
    return st;
}

static td_status probe_reduce(const uint32_t *gpu, uint32_t n, size_t bytes,
                              struct td_gpu_reduce *ret, struct td_error *err) {
    struct td_probe_nccl lib = {};
    struct end x[RANKS_MAX];
    memset(ret, 0, sizeof *ret);
    if (n == 0 || n > RANKS_MAX)
        return td_fail(err, TD_INVALID, "expected 1 to %d GPUs, found %u", RANKS_MAX, n);
    now(ret, "loading the library");
    TD_TRY(td_probe_nccl_load(&lib, err));
    lib.get_version(&ret->version);
    cudaError_t e = cudaSuccess;
    memset(x, 0, sizeof x);
    for (uint32_t i = 0; i < n && e == cudaSuccess; i++)
        e = end_open(&x[i], gpu[i], bytes);
    td_status st = e == cudaSuccess
                       ? sum_over(&lib, x, n, (uint32_t)(bytes / 4), ret, err)
                       : td_fail(err, TD_IO, "memory for a sum: %s", cudaGetErrorString(e));
    for (uint32_t i = 0; i < n; i++)
        if (x[i].wrong || x[i].stream) end_close(&x[i]);
    if (st == TD_OK) now(ret, "done");
    return st;
}

#ifdef TD_CUDA_EMULATED
#define PROBE_BACKEND NULL
#else
#define PROBE_BACKEND &td_backend_cuda
#endif

extern "C" {
extern const struct td_gpu_probe td_gpu_probe_cuda;
const struct td_gpu_probe td_gpu_probe_cuda = {
    "sm_90a sm_120a", PROBE_BACKEND, probe_count, probe_look,   probe_kernels,
    probe_compute,    probe_host,    probe_pair,  probe_reduce,
};
}

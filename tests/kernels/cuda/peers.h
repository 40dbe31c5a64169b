/* Several emulated GPUs that can be at fault, for kernels/cuda/probe.cu: the emulator has one,
 * which is perfect. TD_PEERS says what there is and what is wrong with it, words separated by
 * spaces:
 *
 *   gpus=N          (1)                 none              no driver
 *   copy=A>B        that way one word of a copy arrives wrong
 *   drop=A>B        a copy that way does not arrive
 *   hang=A>B        a copy that way never ends
 *   die=A>B         a copy that way ends the process
 *   lost=A>B        a copy that way is an error of the driver
 *   far=A>B         A cannot address B's memory
 *   mad=A           kernels of A give a wrong value in their first word
 *   old=A           there are no kernels for A
 *   stuck=A         opening A never ends
 *   arch=M          compute capability M.0 (9) */
#ifndef TD_TESTS_KERNELS_CUDA_PEERS_H
#define TD_TESTS_KERNELS_CUDA_PEERS_H

#include "tests/kernels/cuda/emulator.h"

#include <stdio.h>
#include <unistd.h>

#define td_gpu_probe_cuda td_gpu_probe_emulated

/* Names by macros: the emulator may come to have some of them. */
#define cudaErrorNoDevice 100
#define cudaErrorInvalidDevice 101
#define cudaErrorPeerAccessAlreadyEnabled 704
#define cudaErrorNoKernelImageForDevice 209
#define cudaErrorInvalidDeviceFunction 98
#define cudaErrorIllegalAddress 700

static int peers_current;

/* Whether TD_PEERS has "word" or "word=at", "word=at>to". */
static bool peers_say(const char *word, int at = -1, int to = -1) {
    char want[64], have[256];
    const char *all = getenv("TD_PEERS");
    if (to >= 0)
        snprintf(want, sizeof want, " %s=%d>%d ", word, at, to);
    else if (at >= 0)
        snprintf(want, sizeof want, " %s=%d ", word, at);
    else
        snprintf(want, sizeof want, " %s ", word);
    snprintf(have, sizeof have, " %s ", all ? all : "");
    return strstr(have, want) != NULL;
}

static int peers_number(const char *word, int missing) {
    const char *all = getenv("TD_PEERS"), *at = all ? strstr(all, word) : NULL;
    return at ? (int)strtol(at + strlen(word), NULL, 10) : missing;
}

[[noreturn]] static void peers_hang() {
    for (;;)
        pause();
}

static inline const char *peers_error(cudaError_t e) {
    return e == cudaErrorNoDevice                 ? "no CUDA-capable device is detected"
           : e == cudaErrorNoKernelImageForDevice ? "no kernel image is available"
                                                  : "an emulated fault";
}
#define cudaGetErrorString peers_error

static cudaError_t peers_count(int *n) {
    *n = peers_number("gpus=", 1);
    return peers_say("none") ? cudaErrorNoDevice : (int)cudaSuccess;
}
#define cudaGetDeviceCount peers_count

static cudaError_t peers_set(int gpu) {
    if (peers_say("stuck", gpu)) peers_hang();
    peers_current = gpu;
    return cudaSuccess;
}
#define cudaSetDevice peers_set

struct peers_prop {
    char name[64];
    int major, minor;
};
#define cudaDeviceProp peers_prop
static cudaError_t peers_properties(peers_prop *p, int gpu) {
    *p = peers_prop{};
    snprintf(p->name, sizeof p->name, "Emulated %d", gpu);
    p->major = peers_number("arch=", 9);
    return cudaSuccess;
}
#define cudaGetDeviceProperties peers_properties

static cudaError_t peers_bus(char *bus, int cap, int gpu) {
    if (gpu >= peers_number("gpus=", 1)) return cudaErrorInvalidDevice;
    snprintf(bus, (size_t)cap, "0000:%02X:00.0", 0x40 + gpu);
    return cudaSuccess;
}
#define cudaDeviceGetPCIBusId peers_bus

struct peers_attributes {
    int binaryVersion;
};
#define cudaFuncAttributes peers_attributes
static cudaError_t peers_function(cudaFuncAttributes *a, const void *) {
    if (peers_say("old", peers_current)) return cudaErrorNoKernelImageForDevice;
    a->binaryVersion = peers_number("arch=", 9) * 10;
    return cudaSuccess;
}
#define cudaFuncGetAttributes peers_function

static cudaError_t peers_can(int *can, int gpu, int peer) {
    *can = !peers_say("far", gpu, peer);
    return cudaSuccess;
}
#define cudaDeviceCanAccessPeer peers_can

static cudaError_t peers_enable(int, unsigned) {
    return cudaSuccess;
}
#define cudaDeviceEnablePeerAccess peers_enable

static cudaError_t peers_copy(void *to, int gpu, const void *from, int own, size_t n,
                              cudaStream_t) {
    if (peers_say("hang", own, gpu)) peers_hang();
    if (peers_say("die", own, gpu)) abort();
    if (peers_say("lost", own, gpu)) return cudaErrorIllegalAddress;
    if (!peers_say("drop", own, gpu)) memcpy(to, from, n);
    if (peers_say("copy", own, gpu)) ((unsigned char *)to)[n / 2] ^= 0x40;
    return cudaSuccess;
}
#define cudaMemcpyPeerAsync peers_copy

/* A launch on the current GPU; the first argument of a kernel that writes is where. */
template <class T> static inline void peers_spoil(T *to) {
    if (peers_say("mad", peers_current)) *(unsigned *)(void *)to ^= 1u;
}
template <class T> static inline void peers_spoil(const T *) {
}
template <class... P, class First, class... A>
static inline void peers_launch(void (*kernel)(P...), dim3 grid, dim3 block, First first, A... a) {
    td_emulate_kernel(kernel, grid, block, 0, 1, first, a...);
    peers_spoil(first);
}
#define PROBE_LAUNCH(kernel, stream, ...) peers_launch(kernel, BLOCKS, THREADS, __VA_ARGS__)

#endif

/* Fibers, barriers and the loop over blocks; devices, their memory and captured streams. */
#include "tests/kernels/cuda/emulator.h"

#include <map>
#include <mutex>
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include <vector>

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

enum { MOST = 1024, STACK = 64 << 10 };

/* Saves the callee-saved registers and goes on where `to` was left. */
extern "C" void td_emulate_switch(void **from, void *to);
__asm__(".text\n.globl td_emulate_switch\ntd_emulate_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

struct barrier {
    unsigned count, turn;
};
struct fiber {
    void *sp;
    bool done;
};

/* Of the host thread: its kernels run in it, beside those of other threads. */
__thread fiber fibers[MOST];
__thread char *stacks;
__thread unsigned threads, blocks, current, arrived; /* threads of one of the blocks at hand */
__thread unsigned first_block;
__thread size_t apart; /* of their dynamic shared memory */
__thread void *scheduler;
__thread barrier pair_barrier, block_barrier[8], group_barrier[MOST / 128], warp_barrier[MOST / 32];
__thread unsigned char slots[MOST / 32][32][32];
__thread const std::function<void()> *work;
__thread void *dynamic;
__thread int device; /* cudaSetDevice */

struct memory {
    bool used;
    ~memory() {
        free(stacks);
        free(dynamic);
    }
};
thread_local memory ended; /* with the thread */

void place(unsigned t) {
    current = t;
    blockIdx.x = first_block + t / threads;
    threadIdx.x = t % threads % blockDim.x;
    threadIdx.y = t % threads / blockDim.x;
}

void yield() {
    unsigned me = current;
    td_emulate_switch(&fibers[me].sp, scheduler);
    place(me);
}

void wait(barrier *b, unsigned n) {
    unsigned turn = b->turn;
    arrived++;
    if (++b->count == n) {
        b->count = 0;
        b->turn++;
        return;
    }
    while (b->turn == turn)
        yield();
}

void entry() {
    (*work)();
    fibers[current].done = true;
    arrived++;
    td_emulate_switch(&fibers[current].sp, scheduler);
}

[[noreturn]] void wrong(const char *what, int found, int expected) {
    fprintf(stderr, "emulator: %s of device %d while device %d is the thread's\n", what, expected,
            found);
    abort();
}

void start(unsigned t) {
    void **sp = (void **)(stacks + (size_t)(t + 1) * STACK);
    *--sp = NULL; /* the alignment of a call */
    *--sp = (void *)entry;
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    fibers[t].sp = sp;
    fibers[t].done = false;
}

void run_blocks(bool backwards) {
    unsigned all = threads * blocks, left = all;
    pair_barrier = barrier{0, 0};
    memset(block_barrier, 0, sizeof block_barrier);
    memset(group_barrier, 0, sizeof group_barrier);
    memset(warp_barrier, 0, sizeof warp_barrier);
    for (unsigned t = 0; t < all; t++)
        start(t);
    while (left > 0) {
        arrived = left = 0;
        for (unsigned i = 0; i < all; i++) {
            unsigned t = backwards ? all - 1 - i : i;
            if (fibers[t].done) continue;
            place(t);
            td_emulate_switch(&scheduler, fibers[t].sp);
            left += !fibers[t].done;
        }
        if (left > 0 && arrived == 0) {
            fprintf(stderr, "emulator: a barrier that not all of %u threads reach\n", all);
            abort();
        }
    }
}

} // namespace

void td_emulate(dim3 grid, dim3 block, size_t shared, unsigned beside,
                const std::function<void()> &body) {
    threads = block.x * block.y * block.z;
    blocks = beside;
    if (threads == 0 || threads * blocks > MOST || grid.x % blocks || threads % 32 || grid.y > 65535 || grid.z > 65535 ||
        grid.x == 0 || grid.y == 0 || grid.z == 0 || shared > 227 * 1024) {
        fprintf(stderr, "emulator: a launch of %u x %u x %u blocks, %u threads, %zu bytes\n",
                grid.x, grid.y, grid.z, threads, shared);
        abort();
    }
    if (!stacks) stacks = (char *)aligned_alloc(64, (size_t)MOST * STACK);
    ended.used = true;
    apart = (shared + 64 + 1023) & ~(size_t)1023;
    dynamic = realloc(dynamic, apart * blocks);
    memset(dynamic, 0xff, apart * blocks);
    work = &body;
    blockDim = uint3{block.x, block.y, block.z};
    gridDim = uint3{grid.x, grid.y, grid.z};
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x += blocks) {
                blockIdx = uint3{x, y, z};
                first_block = x;
                run_blocks((x / blocks + y + z) % 2);
            }
}

void *td_emulate_shared(void) {
    uintptr_t p = ((uintptr_t)dynamic + 63) & ~(uintptr_t)63;
    return (void *)(p + current / threads * apart);
}

void *td_pair_memory(void *p, unsigned rank) {
    return (char *)p + ((ptrdiff_t)rank - (ptrdiff_t)(current / threads)) * (ptrdiff_t)apart;
}

void td_emulate_exchange(const void *mine, size_t bytes, void *all) {
    unsigned warp = current / 32;
    memcpy(slots[warp][current % 32], mine, bytes);
    wait(&warp_barrier[warp], 32);
    for (unsigned i = 0; i < 32; i++)
        memcpy((char *)all + i * bytes, slots[warp][i], bytes);
    wait(&warp_barrier[warp], 32);
}

void __syncthreads(void) {
    wait(&block_barrier[current / threads], threads);
}

void td_emulate_group_sync(void) {
    wait(&group_barrier[current / 128], 128);
}

void td_pair_sync(void) {
    wait(&pair_barrier, threads * blocks);
}

void __syncwarp(unsigned) {
    wait(&warp_barrier[current / 32], 32);
}

void td_emulate_yield(void) {
    arrived++; /* something else may come to pass */
    sched_yield();
    yield();
}

void td_emulate_stand(void) {
    yield();
}

void td_emulate_went(void) {
    arrived++;
}

static uint64_t speed = 1;

uint64_t td_emulate_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) *
           __atomic_load_n(&speed, __ATOMIC_RELAXED);
}

void td_emulate_hurry(unsigned times) {
    __atomic_store_n(&speed, times, __ATOMIC_RELAXED);
}

/* ---- devices ---- */

static const size_t card = (size_t)8 << 30, usual_shared = 48 << 10;
struct piece {
    size_t bytes;
    int device;
};
static std::mutex lock; /* of all that follows */
static std::map<void *, piece> pieces;
static size_t taken[TD_EMULATED_DEVICES];
static std::map<std::pair<int, const void *>, size_t> allowed;
static bool reach[TD_EMULATED_DEVICES][TD_EMULATED_DEVICES];

void td_emulate_on(cudaStream_t s, const char *what) {
    if (s->device != device) wrong(what, device, s->device);
}

void td_emulate_allowed(const void *kernel, size_t shared) {
    std::lock_guard<std::mutex> l(lock);
    if (shared <= usual_shared || allowed[{device, kernel}] >= shared) return;
    fprintf(stderr, "emulator: a launch with %zu bytes of shared memory, device %d allows %zu\n",
            shared, device, allowed[{device, kernel}]);
    abort();
}

cudaError_t cudaFuncSetAttribute(const void *kernel, int, int bytes) {
    std::lock_guard<std::mutex> l(lock);
    allowed[{device, kernel}] = (size_t)bytes;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int i) {
    if (i < 0 || i >= TD_EMULATED_DEVICES) return cudaErrorInvalidDevice;
    device = i;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
    *s = new td_emulated_stream{device};
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    td_emulate_on(s, "a stream's end");
    delete s;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    return cudaStreamCreateWithFlags(e, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
    return cudaStreamDestroy(e);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    td_emulate_on(s, "a mark");
    if (e->device != s->device) wrong("a mark", s->device, e->device);
    return cudaSuccess;
}

/* Not with TD_EMULATE_PEERS=0. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    const char *peers = getenv("TD_EMULATE_PEERS");
    *can = !peers || strcmp(peers, "0") != 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    std::lock_guard<std::mutex> l(lock);
    if (reach[device][peer]) return cudaErrorPeerAccessAlreadyEnabled;
    reach[device][peer] = true;
    return cudaSuccess;
}

/* ---- device memory ---- */

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    std::lock_guard<std::mutex> l(lock);
    *all = card;
    *left = card - taken[device];
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) {
    std::lock_guard<std::mutex> l(lock);
    n = (n + 255) & ~(size_t)255;
    *p = n <= card - taken[device] ? aligned_alloc(256, n) : NULL;
    if (!*p) return cudaErrorMemoryAllocation;
    pieces[*p] = piece{n, device};
    taken[device] += n;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    std::lock_guard<std::mutex> l(lock);
    if (!p) return cudaSuccess;
    if (pieces[p].device != device) wrong("memory", device, pieces[p].device);
    taken[device] -= pieces[p].bytes;
    pieces.erase(p);
    free(p);
    return cudaSuccess;
}

/* ---- pinned memory ---- */

static std::map<char *, size_t> pinned;

cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
    std::lock_guard<std::mutex> l(lock);
    const char *pins = getenv("TD_EMULATE_PIN");
    char *at = (char *)p;
    if ((pins && strcmp(pins, "0") == 0) || (uintptr_t)p % 4096 != 0 || n == 0)
        return cudaErrorMemoryAllocation;
    for (auto &[first, bytes] : pinned)
        if (at < first + bytes && first < at + n) return cudaErrorHostMemoryAlreadyRegistered;
    pinned[at] = n;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p) {
    std::lock_guard<std::mutex> l(lock);
    if (pinned.erase((char *)p) == 1) return cudaSuccess;
    fprintf(stderr, "emulator: memory is unpinned that was not pinned\n");
    abort();
}

/* ---- captured streams ---- */

struct td_emulated_graph {
    std::vector<std::function<void()>> launches;
    int device;
};
static __thread td_emulated_graph *capturing;

bool td_emulate_capturing(void) {
    return capturing != NULL;
}

void td_emulate_launch(std::function<void()> launch) {
    if (capturing)
        capturing->launches.push_back(launch);
    else
        launch();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    td_emulate_on(s, "a recording");
    if (capturing) return cudaErrorStreamCaptureUnsupported;
    capturing = new td_emulated_graph;
    capturing->device = device;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    td_emulate_on(s, "a recording");
    *graph = capturing;
    capturing = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *n) {
    *n = graph->launches.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    if (graph->device != device) wrong("a recording", device, graph->device);
    *exec = new td_emulated_graph(*graph);
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t s) {
    td_emulate_on(s, "a recording");
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) {
    td_emulate_on(s, "a recorded step");
    for (auto &launch : exec->launches)
        launch();
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}

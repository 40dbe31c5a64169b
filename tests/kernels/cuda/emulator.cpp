/* Fibers, barriers and the loop over blocks; device memory and captured streams. */
#include "tests/kernels/cuda/emulator.h"

#include <map>
#include <stdio.h>
#include <vector>

uint3 threadIdx, blockIdx, blockDim, gridDim;

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

fiber fibers[MOST];
char *stacks;
unsigned threads, current, arrived;
void *scheduler;
barrier block_barrier, warp_barrier[MOST / 32];
unsigned char slots[MOST / 32][32][32];
const std::function<void()> *work;
void *dynamic;

void place(unsigned t) {
    current = t;
    threadIdx.x = t % blockDim.x;
    threadIdx.y = t / blockDim.x;
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

void start(unsigned t) {
    void **sp = (void **)(stacks + (size_t)(t + 1) * STACK);
    *--sp = NULL; /* the alignment of a call */
    *--sp = (void *)entry;
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    fibers[t].sp = sp;
    fibers[t].done = false;
}

void run_block(bool backwards) {
    unsigned left = threads;
    memset(&block_barrier, 0, sizeof block_barrier);
    memset(warp_barrier, 0, sizeof warp_barrier);
    for (unsigned t = 0; t < threads; t++)
        start(t);
    while (left > 0) {
        arrived = left = 0;
        for (unsigned i = 0; i < threads; i++) {
            unsigned t = backwards ? threads - 1 - i : i;
            if (fibers[t].done) continue;
            place(t);
            td_emulate_switch(&scheduler, fibers[t].sp);
            left += !fibers[t].done;
        }
        if (left > 0 && arrived == 0) {
            fprintf(stderr, "emulator: a barrier that not all of %u threads reach\n", threads);
            abort();
        }
    }
}

} // namespace

void td_emulate(dim3 grid, dim3 block, size_t shared, const std::function<void()> &body) {
    threads = block.x * block.y * block.z;
    if (threads == 0 || threads > MOST || threads % 32 || grid.y > 65535 || grid.z > 65535 ||
        grid.x == 0 || grid.y == 0 || grid.z == 0 || shared > 227 * 1024) {
        fprintf(stderr, "emulator: a launch of %u x %u x %u blocks, %u threads, %zu bytes\n",
                grid.x, grid.y, grid.z, threads, shared);
        abort();
    }
    if (!stacks) stacks = (char *)aligned_alloc(64, (size_t)MOST * STACK);
    dynamic = realloc(dynamic, shared + 64);
    memset(dynamic, 0xff, shared + 64);
    work = &body;
    blockDim = uint3{block.x, block.y, block.z};
    gridDim = uint3{grid.x, grid.y, grid.z};
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = uint3{x, y, z};
                run_block((x + y + z) % 2);
            }
}

void *td_emulate_shared(void) {
    return (void *)(((uintptr_t)dynamic + 63) & ~(uintptr_t)63);
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
    wait(&block_barrier, threads);
}

void __syncwarp(unsigned) {
    wait(&warp_barrier[current / 32], 32);
}

/* ---- device memory ---- */

static const size_t card = (size_t)8 << 30;
static std::map<void *, size_t> pieces;
static size_t taken;

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *all = card;
    *left = card - taken;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t n) {
    n = (n + 255) & ~(size_t)255;
    *p = n <= card - taken ? aligned_alloc(256, n) : NULL;
    if (!*p) return cudaErrorMemoryAllocation;
    pieces[*p] = n;
    taken += n;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    taken -= pieces[p];
    pieces.erase(p);
    free(p);
    return cudaSuccess;
}

/* ---- captured streams ---- */

struct td_emulated_graph {
    std::vector<std::function<void()>> launches;
};
static td_emulated_graph *capturing;

bool td_emulate_capturing(void) {
    return capturing != NULL;
}

void td_emulate_launch(std::function<void()> launch) {
    if (capturing)
        capturing->launches.push_back(launch);
    else
        launch();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (capturing) return cudaErrorStreamCaptureUnsupported;
    capturing = new td_emulated_graph;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
    *graph = capturing;
    capturing = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *, size_t *n) {
    *n = graph->launches.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    *exec = new td_emulated_graph(*graph);
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) {
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
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

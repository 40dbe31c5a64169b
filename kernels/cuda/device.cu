/* A CUDA device as a backend: memory, copies, streams, faults, recordings, and its op table. */
#include "kernels/cuda/attend.h"
#include "kernels/model/random.h"
#include "kernels/scratch.h"

#include <stdlib.h>

/* Bumped whenever a kernel here changes a bit of any result. */
enum { OPS_VERSION = 5 };

extern "C" const struct td_backend td_backend_cuda;

static td_status fail(struct td_error *err, td_status st, const char *what, cudaError_t e) {
    return td_fail(err, st, "%s: CUDA: %s", what, cudaGetErrorString(e));
}

static void note(struct td_cuda_fault *f, cudaError_t e, const char *at) {
    if (e == cudaSuccess || f->error != cudaSuccess) return;
    f->error = e;
    f->at = at;
}

void td_cuda_check(const struct td_device *d, enum td_lane lane, const char *op) {
    struct td_cuda *c = td_cuda_of(d);
    cudaError_t e = cudaGetLastError();
    if (c->blocking && e == cudaSuccess) e = cudaStreamSynchronize(c->stream[lane]);
    note(&c->fault[lane], e, op);
}

void td_cuda_on(const struct td_device *d, enum td_lane lane) {
    struct td_cuda *c = td_cuda_of(d);
    note(&c->fault[lane], cudaSetDevice(c->index), "a device");
}

void td_cuda_allow_shared(const struct td_device *d, const void *kernel, size_t bytes,
                          const char *op) {
    struct td_cuda *c = td_cuda_of(d);
    cudaFuncAttributes f;
    uint32_t i = 0;
    if (bytes <= 32 * 1024) return; /* with static shared memory below the default 48 KiB */
    while (i < TD_CUDA_KERNELS - 1 && c->allowed[i] && c->allowed[i] != kernel)
        i++;
    if (c->allowed[i] == kernel) return;
    c->allowed[i] = kernel;
    td_cuda_on(d, TD_LANE_STEP);
    cudaError_t e = cudaFuncGetAttributes(&f, kernel);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)(c->shared_max - f.sharedSizeBytes));
    note(&c->fault[TD_LANE_STEP], e, op);
}

/* ---- open, close ---- */

static td_status find(uint32_t index, struct td_error *err) {
    int count = 0;
    /* Kernels that are loaded when they first run take device memory then. The driver reads these
     * once, at the first call. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    /* Streams that share one of the driver's queues wait for each other; ranks of one device, whose
     * kernels wait for each other, must not. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess)
        return td_fail(err, TD_CONFIG,
                       "device: cuda:%u: no GPU can be used here: %s (nvidia-smi shows what the "
                       "driver sees); expected device = cpu or a machine with a GPU",
                       index, cudaGetErrorString(e));
    if (index < (uint32_t)count) return TD_OK;
    return td_fail(err, TD_CONFIG, "device: cuda:%u: this machine has %d GPUs, numbered from 0",
                   index, count);
}

static void cuda_close(struct td_device *d) {
    struct td_cuda *c = td_cuda_of(d);
    if (!c) return;
    cudaSetDevice(c->index);
    for (int i = 0; i < TD_LANES; i++) {
        for (int k = 0; k < 2; k++)
            if (c->mark[i][k]) cudaEventDestroy(c->mark[i][k]);
        if (c->stream[i]) cudaStreamDestroy(c->stream[i]);
    }
    cudaFree(c->attend);
    cudaFree(c->index_bins);
    free(c);
    d->state = NULL;
}

static td_status cuda_open(struct td_device *d, uint32_t index, struct td_error *err) {
    cudaDeviceProp p;
    TD_TRY(find(index, err));
    struct td_cuda *c = (struct td_cuda *)calloc(1, sizeof *c);
    if (!c) return td_fail(err, TD_NO_MEMORY, "no memory for a device");
    d->backend = &td_backend_cuda;
    d->state = c;
    c->index = (int)index;
    cudaError_t e = cudaSetDevice(c->index);
    if (e == cudaSuccess) e = cudaGetDeviceProperties(&p, c->index);
    for (int i = 0; i < TD_LANES && e == cudaSuccess; i++)
        e = cudaStreamCreateWithFlags(&c->stream[i], cudaStreamNonBlocking);
    for (int i = 0; i < 2 * TD_LANES && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&c->mark[i / 2][i % 2], cudaEventDisableTiming);
    if (e != cudaSuccess) return fail(err, TD_IO, "device", e);
    c->processors = p.multiProcessorCount;
    c->major = p.major;
    c->minor = p.minor;
    c->shared_max = p.sharedMemPerBlockOptin;
    /* Planned with the context. */
    e = cudaMalloc((void **)&c->attend, td_cuda_attend_bytes());
    if (e == cudaSuccess)
        e = cudaMemsetAsync(c->attend, 0, td_cuda_attend_bytes(), c->stream[TD_LANE_STEP]);
    if (e == cudaSuccess) e = cudaMalloc((void **)&c->index_bins, TD_INDEX_BINS_BYTES);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(c->index_bins, 0, TD_INDEX_BINS_BYTES, c->stream[TD_LANE_STEP]);
    if (e != cudaSuccess) {
        cuda_close(d);
        return fail(err, TD_NO_MEMORY, "device", e);
    }
    return TD_OK;
}

static td_status cuda_memory(uint32_t index, uint64_t *ret_bytes, uint64_t *ret_free,
                             struct td_error *err) {
    size_t left = 0, all = 0;
    TD_TRY(find(index, err));
    cudaError_t e = cudaSetDevice((int)index);
    if (e == cudaSuccess) e = cudaMemGetInfo(&left, &all);
    if (e != cudaSuccess) return fail(err, TD_IO, "device", e);
    *ret_bytes = all;
    *ret_free = left;
    return TD_OK;
}

static void cuda_pci(uint32_t index, char *buf, size_t cap) {
    if (find(index, NULL) == TD_OK &&
        cudaDeviceGetPCIBusId(buf, (int)cap, (int)index) == cudaSuccess)
        return;
    cudaGetLastError();
    buf[0] = 0;
}

/* ---- memory ---- */

static td_status cuda_take(struct td_device *d, size_t bytes, const char *what, void **ret,
                           struct td_error *err) {
    size_t left = 0, all = 0;
    if (d->sealed) return td_fail(err, TD_INTERNAL, "%s: memory is taken at start only", what);
    cudaError_t e = cudaSetDevice(td_cuda_of(d)->index);
    if (e == cudaSuccess) e = cudaMalloc(ret, bytes ? bytes : 256);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        cudaMemGetInfo(&left, &all);
        return td_fail(err, TD_NO_MEMORY,
                       "%s: expected %zu bytes of GPU memory, %zu of %zu are free", what, bytes,
                       left, all);
    }
    if (e == cudaSuccess)
        e = cudaMemsetAsync(*ret, 0, bytes ? bytes : 256, td_cuda_of(d)->stream[TD_LANE_STEP]);
    if (e != cudaSuccess) return fail(err, TD_IO, what, e);
    d->taken += bytes;
    return TD_OK;
}

static void cuda_give(struct td_device *d, void *memory, size_t bytes) {
    if (!memory) return;
    cudaSetDevice(td_cuda_of(d)->index);
    cudaFree(memory);
    d->taken -= bytes;
}

static td_status cuda_take_host(struct td_device *d, size_t bytes, const char *what, void **ret,
                                struct td_error *err) {
    cudaError_t e = cudaSetDevice(td_cuda_of(d)->index);
    if (e == cudaSuccess) e = cudaHostAlloc(ret, bytes ? bytes : 64, cudaHostAllocDefault);
    if (e != cudaSuccess) return fail(err, TD_NO_MEMORY, what, e);
    memset(*ret, 0, bytes);
    return TD_OK;
}

static void cuda_give_host(struct td_device *d, void *memory) {
    if (!memory) return;
    cudaSetDevice(td_cuda_of(d)->index);
    cudaFreeHost(memory);
}

/* Shared memory and private memory alike; a rank on another device copies from it as well. */
static td_status cuda_pin(struct td_device *d, void *memory, size_t bytes, struct td_error *err) {
    cudaError_t e = cudaSetDevice(td_cuda_of(d)->index);
    if (e == cudaSuccess) e = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
    if (e == cudaSuccess) return TD_OK;
    cudaGetLastError(); /* no fault of what is queued next */
    return td_fail(err, TD_NO_MEMORY, "%zu bytes cannot be pinned: CUDA: %s", bytes,
                   cudaGetErrorString(e));
}

static void cuda_unpin(struct td_device *d, void *memory) {
    cudaSetDevice(td_cuda_of(d)->index);
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

/* ---- copies ---- */

static void copy(struct td_device *d, enum td_lane lane, const struct td_copy *c,
                 enum cudaMemcpyKind kind) {
    struct td_cuda *cuda = td_cuda_of(d);
    cudaError_t e;
    td_cuda_on(d, lane);
    if (c->rows == 1)
        e = cudaMemcpyAsync(c->to, c->from, c->width, kind, cuda->stream[lane]);
    else
        e = cudaMemcpy2DAsync(c->to, c->to_pitch, c->from, c->from_pitch, c->width, c->rows, kind,
                              cuda->stream[lane]);
    note(&cuda->fault[lane], e, "a copy");
}

static void cuda_upload(struct td_device *d, enum td_lane lane, const struct td_copy *c) {
    copy(d, lane, c, cudaMemcpyHostToDevice);
}

static void cuda_download(struct td_device *d, enum td_lane lane, const struct td_copy *c) {
    copy(d, lane, c, cudaMemcpyDeviceToHost);
}

static td_status cuda_wait(struct td_device *d, enum td_lane lane, struct td_error *err) {
    struct td_cuda *c = td_cuda_of(d);
    td_cuda_on(d, lane);
    note(&c->fault[lane], cudaStreamSynchronize(c->stream[lane]), "a step");
    struct td_cuda_fault f = c->fault[lane];
    c->fault[lane].error = cudaSuccess;
    if (f.error != cudaSuccess) return fail(err, TD_IO, f.at, f.error);
    return lane == TD_LANE_STEP ? td_cuda_missing(d, err) : TD_OK;
}

/* ---- random tensors ---- */

enum { FILL_THREADS = 256 };

/* Byte i of the tensor. */
static __device__ uint8_t random_byte(const struct td_random *r, size_t i) {
    return (uint8_t)(td_random_word(r, i / 8) >> 8 * (i % 8));
}

/* 8 bytes a thread: one word of the tensor where pieces begin and end with words, else bytes. */
static __global__ void fill_words(struct td_random r, struct td_fill f) {
    uint8_t *to = (uint8_t *)f.to;
    size_t at = 8 * ((size_t)blockIdx.x * FILL_THREADS + threadIdx.x), bytes = f.width * f.rows;
    bool words = (f.from | (f.rows > 1 ? f.width | f.pitch : 0)) % 8 == 0;
    if (words && at + 8 <= bytes) {
        size_t from = f.from + at / f.width * f.pitch + at % f.width;
        *(uint64_t *)(void *)(to + at) = td_random_word(&r, from / 8);
    } else {
        for (size_t i = at; i < at + 8 && i < bytes; i++)
            to[i] = random_byte(&r, f.from + i / f.width * f.pitch + i % f.width);
    }
}

static void cuda_fill(struct td_device *d, const struct td_random *r, const struct td_fill *f) {
    uint32_t blocks = td_ceil(f->width * f->rows, 8 * FILL_THREADS);
    if (blocks) TD_LAUNCH(d, "a tensor", fill_words, blocks, FILL_THREADS, 0, *r, *f);
}

/* ---- recordings ---- */

struct td_recording {
    cudaGraphExec_t graph;
};

static td_status cuda_record(struct td_device *d, struct td_error *err) {
    td_cuda_on(d, TD_LANE_STEP);
    cudaError_t e = cudaStreamBeginCapture(td_cuda_of(d)->stream[TD_LANE_STEP],
                                           cudaStreamCaptureModeThreadLocal);
    return e == cudaSuccess ? TD_OK : fail(err, TD_IO, "a recording", e);
}

static void cuda_forget(struct td_device *d, struct td_recording *r) {
    if (!r) return;
    td_cuda_on(d, TD_LANE_STEP);
    if (r->graph) cudaGraphExecDestroy(r->graph);
    free(r);
}

/* Its memory on the device is taken now, not when it first runs. */
static cudaError_t instantiate(struct td_cuda *c, cudaGraph_t graph, struct td_recording *r) {
    cudaError_t e = cudaGraphInstantiate(&r->graph, graph, 0);
    if (e == cudaSuccess) e = cudaGraphUpload(r->graph, c->stream[TD_LANE_STEP]);
    return e;
}

static td_status cuda_keep(struct td_device *d, struct td_recording **ret_recording,
                           uint32_t *ret_launches, struct td_error *err) {
    struct td_cuda *c = td_cuda_of(d);
    struct td_recording *r = NULL;
    cudaGraph_t graph = NULL;
    size_t nodes = 0;
    td_cuda_on(d, TD_LANE_STEP);
    cudaError_t e = cudaStreamEndCapture(c->stream[TD_LANE_STEP], &graph);
    if (c->fault[TD_LANE_STEP].error != cudaSuccess) e = c->fault[TD_LANE_STEP].error;
    if (e == cudaSuccess) e = cudaGraphGetNodes(graph, NULL, &nodes);
    if (e == cudaSuccess && ret_recording) {
        r = (struct td_recording *)calloc(1, sizeof *r);
        e = r ? instantiate(c, graph, r) : cudaErrorMemoryAllocation;
    }
    if (graph) cudaGraphDestroy(graph);
    if (e != cudaSuccess) {
        cuda_forget(d, r);
        return fail(err, TD_IO, "a recording", e);
    }
    if (ret_recording) *ret_recording = r;
    if (ret_launches) *ret_launches = (uint32_t)nodes;
    return TD_OK;
}

static void cuda_replay(struct td_device *d, const struct td_recording *r) {
    struct td_cuda *c = td_cuda_of(d);
    td_cuda_on(d, TD_LANE_STEP);
    note(&c->fault[TD_LANE_STEP], cudaGraphLaunch(r->graph, c->stream[TD_LANE_STEP]),
         "a recorded step");
}

/* ---- marks ---- */

static void cuda_mark(struct td_device *d, enum td_lane lane, uint32_t i) {
    struct td_cuda *c = td_cuda_of(d);
    td_cuda_on(d, lane);
    note(&c->fault[lane], cudaEventRecord(c->mark[lane][i], c->stream[lane]), "a mark");
}

static void cuda_reach(struct td_device *d, enum td_lane lane, uint32_t i) {
    struct td_cuda *c = td_cuda_of(d);
    td_cuda_on(d, lane);
    note(&c->fault[lane], cudaEventSynchronize(c->mark[lane][i]), "a copy");
}

/* ---- ops ---- */

#define X(op) TD_PLAIN(op),
static const struct td_ops plain = {"cuda plain", TD_OPS_MAP(X)};
#undef X

static td_status cuda_ops(struct td_device *d, uint64_t force_ref, struct td_ops *ret,
                          struct td_error *err) {
    (void)d;
    uint64_t bit = 1;
    *ret = plain;
    ret->name = "cuda";
#define X(op) ret->op = TD_FAST(op);
    TD_FAST_MAP(X)
#undef X
#define X(op)                                                                                      \
    if (force_ref & bit) ret->op = plain.op;                                                       \
    if (!ret->op) return td_fail(err, TD_UNSUPPORTED, "cuda: op %s has no kernel", #op);           \
    bit <<= 1;
    TD_OPS_MAP(X)
#undef X
    return TD_OK;
}

static size_t cuda_index_workspace(uint32_t heads, uint32_t topk, uint32_t rows) {
    (void)heads;
    (void)topk;
    (void)rows;
    return td_index_workspace_cuda();
}

static void cuda_describe(const struct td_device *d, char *buf, size_t cap) {
    const struct td_cuda *c = td_cuda_of(d);
    snprintf(buf, cap, "bf16 products; cuda ops %d; sm_%d%d; toolkit %d", OPS_VERSION, c->major,
             c->minor, CUDART_VERSION);
}

extern "C" {
const struct td_backend td_backend_cuda = {
    .name = "cuda",
    .host = false,
    .open = cuda_open,
    .close = cuda_close,
    .memory = cuda_memory,
    .take = cuda_take,
    .give = cuda_give,
    .take_host = cuda_take_host,
    .give_host = cuda_give_host,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .upload = cuda_upload,
    .download = cuda_download,
    .wait = cuda_wait,
    .fill = cuda_fill,
    .record = cuda_record,
    .keep = cuda_keep,
    .replay = cuda_replay,
    .forget = cuda_forget,
    .join = TD_FAST(join),
    .leave = TD_FAST(leave),
    .all_reduce = TD_FAST(all_reduce),
    .all_gather = TD_FAST(all_gather),
    .all_to_all = TD_FAST(all_to_all),
    .break_off = TD_FAST(break_off),
    .mark = cuda_mark,
    .reach = cuda_reach,
    .pack = TD_FAST(pack),
    .unpack = TD_FAST(unpack),
    .sum = TD_FAST(sum),
    .ops = cuda_ops,
    .index_workspace = cuda_index_workspace,
    .pci = cuda_pci,
    .describe = cuda_describe,
};
}

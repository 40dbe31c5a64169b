/* Wire blocks where the pool is: rows gathered into one stretch and scattered from it, and the
 * checksum of common/kv/checksum.h. What lies where comes as a list from common/kv, which alone
 * knows offsets; the host adds up the shares, takes the verdict and writes the header. */
#include "kernels/cuda/op.h"

extern "C" {
#include "common/kv/checksum.h"
#include "common/kv/wire.h"
}

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    SPLIT = 8, /* blocks that share a move: the longest are half a megabyte */
    WORDS = TD_CHECKSUM_WORDS / 32,
};

template <class T>
static __device__ void copy_part(unsigned char *to, const unsigned char *from, uint64_t bytes) {
    const uint64_t step = (uint64_t)SPLIT * THREADS;
    for (uint64_t i = (uint64_t)blockIdx.y * THREADS + threadIdx.x; i < bytes / sizeof(T);
         i += step)
        ((T *)(void *)to)[i] = ((const T *)(const void *)from)[i];
}

/* blockIdx.x: which move. */
static __global__ void __launch_bounds__(THREADS)
    rows_kernel(unsigned char *stretch, unsigned char *own, const struct td_kv_move *move,
                bool pack) {
    struct td_kv_move m = move[blockIdx.x];
    unsigned char *to = pack ? stretch + m.body : own + m.own;
    const unsigned char *from = pack ? own + m.own : stretch + m.body;
    if ((((uintptr_t)to | (uintptr_t)from | m.bytes) & 15) == 0)
        copy_part<uint4>(to, from, m.bytes);
    else
        copy_part<uint32_t>(to, from, m.bytes);
}

/* blockIdx.x: which share; blockIdx.y: which stretch. A warp takes a block of 1,024 bytes, a lane
 * every 32nd of its words. */
static __global__ void __launch_bounds__(THREADS) sum_kernel(struct td_sums s) {
    TD_SHARED(uint64_t, part); /* [WARPS] */
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t *p = (const uint32_t *)s.stretch[blockIdx.y];
    uint64_t words = s.bytes[blockIdx.y] / 4, sum = 0, weight[WORDS];
#pragma unroll
    for (uint32_t k = 0; k < WORDS; k++)
        weight[k] = td_checksum_weight(k * 32 + lane);
    for (uint64_t n = blockIdx.x * WARPS + warp; n * TD_CHECKSUM_WORDS < words;
         n += TD_SUM_SHARES * WARPS) {
        uint32_t a = 0, b = 0;
#pragma unroll
        for (uint32_t k = 0; k < WORDS; k++) {
            uint64_t i = n * TD_CHECKSUM_WORDS + k * 32 + lane;
            uint32_t w = i < words ? p[i] : 0;
            int32_t lo = (int16_t)(uint16_t)w, hi = (int16_t)(uint16_t)(w >> 16);
            a += (uint32_t)(lo * (int16_t)(uint16_t)weight[k]) +
                 (uint32_t)(hi * (int16_t)(uint16_t)(weight[k] >> 16));
            b += (uint32_t)(lo * (int16_t)(uint16_t)(weight[k] >> 32)) +
                 (uint32_t)(hi * (int16_t)(uint16_t)(weight[k] >> 48));
        }
        for (int step = 16; step > 0; step /= 2) {
            a += __shfl_xor_sync(0xffffffffu, a, step);
            b += __shfl_xor_sync(0xffffffffu, b, step);
        }
        sum += td_checksum_contribution(a, b, n);
    }
    if (lane == 0) part[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (uint32_t i = 1; i < WARPS; i++)
        sum += part[i];
    s.share[blockIdx.y * TD_SUM_SHARES + blockIdx.x] = sum;
}

static void move_rows(struct td_device *d, const struct td_wire_rows *r, bool pack) {
    if (r->n == 0) return;
    TD_LAUNCH_IN(d, TD_LANE_KV, pack ? "pack" : "unpack", rows_kernel, dim3(r->n, SPLIT),
                 dim3(THREADS), 0, (unsigned char *)r->stretch, (unsigned char *)r->own, r->move,
                 pack);
}

extern "C" void TD_FAST(pack)(struct td_device *d, const struct td_wire_rows *r) {
    move_rows(d, r, true);
}

extern "C" void TD_FAST(unpack)(struct td_device *d, const struct td_wire_rows *r) {
    move_rows(d, r, false);
}

extern "C" void TD_FAST(sum)(struct td_device *d, const struct td_sums *s) {
    struct td_sums sums = *s;
    if (s->n == 0) return;
    TD_LAUNCH_IN(d, TD_LANE_KV, "checksum", sum_kernel, dim3(TD_SUM_SHARES, s->n), dim3(THREADS),
                 WARPS * sizeof(uint64_t), sums);
}

/* Hopper's pipelines between the warp groups of a block: barriers in shared memory that count
 * arrivals and bytes (mbarrier), stretches of memory copied without threads (bulk), registers that
 * one warp group leaves to another, and wgmma with both operands in shared memory. Beside their
 * definitions for the emulator. */
#ifndef TD_KERNELS_CUDA_GATE_H
#define TD_KERNELS_CUDA_GATE_H

#include "kernels/cuda/wgmma.h"

#ifdef TD_CUDA_EMULATED
struct td_gate {
    uint32_t expected, left, turn;
    int64_t bytes;
};
static inline void td_gate_settle(struct td_gate *g) {
    td_emulate_went();
    if (g->left || g->bytes) return;
    g->left = g->expected;
    g->turn ^= 1;
}
static inline void td_gate_init(struct td_gate *g, uint32_t arrivals) {
    *g = td_gate{arrivals, arrivals, 0, 0};
}
static inline void td_gate_publish(void) {
}
static inline void td_gate_arrive(struct td_gate *g) {
    g->left--;
    td_gate_settle(g);
}
/* Arrives, and lets the gate wait for so many bytes too. */
static inline void td_gate_expect(struct td_gate *g, uint32_t bytes) {
    g->bytes += bytes;
    g->left--;
    td_gate_settle(g);
}
/* Until the gate's turn number `turn` (0, 1, 0, ..) has ended. */
static inline void td_gate_wait(struct td_gate *g, uint32_t turn) {
    while (g->turn == turn)
        td_emulate_stand();
    td_emulate_went();
}
/* `bytes`, a multiple of 16, to shared memory, told to the gate. */
static inline void td_gate_copy(void *to, const void *from, uint32_t bytes, struct td_gate *g) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) abort();
    memcpy(to, from, bytes);
    g->bytes -= bytes;
    td_gate_settle(g);
}
template <int REGISTERS> static inline void td_registers_more(void) {
}
template <int REGISTERS> static inline void td_registers_less(void) {
}
template <int LEFT> static inline void td_wgmma_left(void) {
}
/* c (+)= a b^T, 64 x N: values k .. k + 15 of 64 rows of a and of N of b. */
template <int N>
static inline void td_wgmma_tiles(float *c, const uint16_t *a, const uint16_t *b, uint32_t k,
                                  bool add) {
    uint32_t warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if ((uintptr_t)a % 1024 || (uintptr_t)b % 1024) abort(); /* the swizzle goes by addresses */
    for (uint32_t i = 0; i < N / 2; i++) {
        uint32_t row = warp * 16 + g + i / 2 % 2 * 8, col = i / 4 * 8 + 2 * t + i % 2;
        if (!add) c[i] = 0.0f;
        for (uint32_t j = k; j < k + 16; j++)
            c[i] += td_bf16_to_f32(a[td_tile_at(row, j)]) * td_bf16_to_f32(b[td_tile_at(col, j)]);
    }
}
#elif defined(TD_HAS_WGMMA)
struct td_gate {
    uint64_t v;
};
static __device__ inline uint32_t td_gate_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
static __device__ inline void td_gate_init(struct td_gate *g, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(td_gate_at(g)), "r"(arrivals)
                 : "memory");
}
/* By who initialised gates, before the barrier behind which others use them. */
static __device__ inline void td_gate_publish(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    td_wgmma_publish();
}
static __device__ inline void td_gate_arrive(struct td_gate *g) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(td_gate_at(g)) : "memory");
}
static __device__ inline void td_gate_expect(struct td_gate *g, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(td_gate_at(g)),
                 "r"(bytes)
                 : "memory");
}
static __device__ inline void td_gate_wait(struct td_gate *g, uint32_t turn) {
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "WAIT:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t"
                 "@p bra DONE;\n\tbra WAIT;\n\tDONE:\n\t}" ::"r"(td_gate_at(g)),
                 "r"(turn)
                 : "memory");
}
static __device__ inline void td_gate_copy(void *to, const void *from, uint32_t bytes,
                                           struct td_gate *g) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(td_gate_at(to)),
                 "l"(from), "r"(bytes), "r"(td_gate_at(g))
                 : "memory");
}
template <int REGISTERS> static __device__ inline void td_registers_more(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> static __device__ inline void td_registers_less(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
/* Until all but LEFT of the groups that were committed have ended. */
template <int LEFT> static __device__ inline void td_wgmma_left(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
/* clang-format off */
#define TD_C16(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]),       \
    "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7]), "+f"(c[i + 8]), "+f"(c[i + 9]),                \
    "+f"(c[i + 10]), "+f"(c[i + 11]), "+f"(c[i + 12]), "+f"(c[i + 13]), "+f"(c[i + 14]),           \
    "+f"(c[i + 15])
#define TD_N32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TD_N64 TD_N32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TD_N96 TD_N64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TD_N128 TD_N96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TD_N160 TD_N128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TD_N192 TD_N160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TD_TILES(n, left, right, add_, ...)                                                        \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add_ ", 0;\n\t"                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" TD_N##n "}, " left   \
                 ", " right ", p, 1, 1, 0, 0;\n\t}"                                                \
                 : __VA_ARGS__ : "l"(l), "l"(r), "r"((int)add))
/* clang-format on */
template <int N>
static __device__ inline void td_wgmma_tiles(float *c, const uint16_t *a, const uint16_t *b,
                                             uint32_t k, bool add) {
    uint64_t l = td_wgmma_operand(a + k, 16, 1024), r = td_wgmma_operand(b + k, 16, 1024);
    if constexpr (N == 32)
        TD_TILES(32, "%16", "%17", "%18", TD_C16(0));
    else if constexpr (N == 64)
        TD_TILES(64, "%32", "%33", "%34", TD_C16(0), TD_C16(16));
    else if constexpr (N == 96)
        TD_TILES(96, "%48", "%49", "%50", TD_C16(0), TD_C16(16), TD_C16(32));
    else if constexpr (N == 128)
        TD_TILES(128, "%64", "%65", "%66", TD_C16(0), TD_C16(16), TD_C16(32), TD_C16(48));
    else if constexpr (N == 160)
        TD_TILES(160, "%80", "%81", "%82", TD_C16(0), TD_C16(16), TD_C16(32), TD_C16(48),
                 TD_C16(64));
    else
        TD_TILES(192, "%96", "%97", "%98", TD_C16(0), TD_C16(16), TD_C16(32), TD_C16(48),
                 TD_C16(64), TD_C16(80));
}
#undef TD_TILES
#undef TD_C16
#endif

#endif

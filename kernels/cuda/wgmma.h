/* Hopper's products of a warp group (wgmma, bf16), beside their definitions for the emulator.
 *
 * Operands in shared memory are tiles of 64 values (128 bytes) a row, 1024-aligned, whose 16-byte
 * pieces lie at piece ^ (row % 8): the hardware's 128-byte swizzle. A thread of warp w of the group
 * has rows 16 w + g and 16 w + g + 8 of a result, columns 8 i + 2t and 8 i + 2t + 1, as in mma.h.
 */
#ifndef TD_KERNELS_CUDA_WGMMA_H
#define TD_KERNELS_CUDA_WGMMA_H

#include "kernels/cuda/mma.h"

/* Values of a tile's row, and the place of value (row, c) in the tile. */
enum { TD_TILE = 64 };
static __host__ __device__ inline uint32_t td_tile_at(uint32_t row, uint32_t c) {
    return row * TD_TILE + ((c / 8 ^ row % 8) * 8 + c % 8);
}

/* Dynamic shared memory from where tiles may begin; ask for TD_TILE_ROOM bytes more. */
enum { TD_TILE_ROOM = 1024 };
static __device__ inline void *td_tile_memory(void *p) {
#ifdef TD_CUDA_EMULATED
    return (void *)(((uintptr_t)p + TD_TILE_ROOM - 1) & ~(uintptr_t)(TD_TILE_ROOM - 1));
#else /* a compiler that sees where it comes from addresses it as shared memory */
    return (char *)p + (0u - (uint32_t)__cvta_generic_to_shared(p)) % TD_TILE_ROOM;
#endif
}

/* Says which form is meant. */
struct td_wgmma_64 {};
struct td_wgmma_128 {};

/* A build for sm_90a has the instructions; others never launch the kernels that need them. */
#ifdef TD_CUDA_EMULATED
#define TD_HAS_WGMMA
static inline void td_wgmma_begin(void) {
}
static inline void td_wgmma_end(void) {
}
/* c += a b^T, 64 x 64: 16 values k .. k + 15 of 64 rows of a and of b. */
static inline void td_wgmma_dots(float c[32], const uint16_t *a, const uint16_t *b, uint32_t k) {
    uint32_t warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (uint32_t i = 0; i < 32; i++) {
        uint32_t row = warp * 16 + g + i / 2 % 2 * 8, col = i / 4 * 8 + 2 * t + i % 2;
        for (uint32_t j = k; j < k + 16; j++)
            c[i] += td_bf16_to_f32(a[td_tile_at(row, j)]) * td_bf16_to_f32(b[td_tile_at(col, j)]);
    }
}
/* c += a b: a is 16 columns in registers, c [n] this thread's sums, at(j, col) what stands in row j
 * of the 16 of b. */
template <typename F>
static inline void td_wgmma_emulate(float *c, uint32_t n, const uint32_t a[4], F at) {
    struct {
        uint32_t v[4];
    } mine = {{a[0], a[1], a[2], a[3]}}, all[32];
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    td_emulate_exchange(&mine, sizeof mine, all);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t col = i / 4 * 8 + 2 * t + i % 2;
        for (uint32_t j = 0; j < 16; j++) {
            uint32_t pair = all[g * 4 + j % 8 / 2].v[i / 2 % 2 + j / 8 * 2];
            c[i] += td_bf16_to_f32((uint16_t)(pair >> j % 2 * 16)) * td_bf16_to_f32(at(j, col));
        }
    }
}
/* c += a b, 64 x 256: a is 16 columns in registers, b rows k .. k + 15 of four tiles `next` values
 * apart. */
static inline void td_wgmma_sums(float c[128], const uint32_t a[4], const uint16_t *b, uint32_t k,
                                 uint32_t next) {
    td_wgmma_emulate(c, 128, a, [=](uint32_t j, uint32_t col) {
        return b[col / 64 * next + td_tile_at(k + j, col % 64)];
    });
}
/* c += a b^T, 64 x 64: a is 16 columns in registers, b 16 values k .. k + 15 of 64 rows. */
static inline void td_wgmma_rows(float c[32], const uint32_t a[4], const uint16_t *b, uint32_t k,
                                 struct td_wgmma_64) {
    td_wgmma_emulate(c, 32, a, [=](uint32_t j, uint32_t col) { return b[td_tile_at(col, k + j)]; });
}
/* The same with 128 rows of b. */
static inline void td_wgmma_rows(float c[64], const uint32_t a[4], const uint16_t *b, uint32_t k,
                                 struct td_wgmma_128) {
    td_wgmma_emulate(c, 64, a, [=](uint32_t j, uint32_t col) { return b[td_tile_at(col, k + j)]; });
}
static inline void td_wgmma_commit(void) {
}
static inline void td_wgmma_wait(void) {
}
/* Ordinary writes to shared memory, before the barrier after which operands are read. */
static inline void td_wgmma_publish(void) {
}
/* A barrier of this warp group. */
static inline void td_wgmma_sync(void) {
    td_emulate_group_sync();
}
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define TD_HAS_WGMMA
#endif

#if defined(TD_HAS_WGMMA) && !defined(TD_CUDA_EMULATED)
static __device__ inline void td_wgmma_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ inline void td_wgmma_end(void) {
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::
                     : "memory");
}
static __device__ inline void td_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
static __device__ inline void td_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
static __device__ inline void td_wgmma_publish(void) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
static __device__ inline void td_wgmma_sync(void) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}
/* Tiles with the 128-byte swizzle; `leading` and `stride` in bytes. */
static __device__ inline uint64_t td_wgmma_operand(const void *at, uint32_t leading,
                                                   uint32_t stride) {
    uint32_t p = (uint32_t)__cvta_generic_to_shared(at);
    return (uint64_t)(p >> 4 & 0x3fffu) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
static __device__ inline void td_wgmma_dots(float c[32], const uint16_t *a, const uint16_t *b,
                                            uint32_t k) {
    uint64_t left = td_wgmma_operand(a + k, 16, 1024), right = td_wgmma_operand(b + k, 16, 1024);
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
                   "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
                   "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]),
                   "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                   "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),
                   "+f"(c[30]), "+f"(c[31])
                 : "l"(left), "l"(right));
}
static __device__ inline void td_wgmma_rows(float c[32], const uint32_t a[4], const uint16_t *b,
                                            uint32_t k, struct td_wgmma_64) {
    uint64_t right = td_wgmma_operand(b + k, 16, 1024);
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
                   "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
                   "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]),
                   "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                   "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),
                   "+f"(c[30]), "+f"(c[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
}
static __device__ inline void td_wgmma_rows(float c[64], const uint32_t a[4], const uint16_t *b,
                                            uint32_t k, struct td_wgmma_128) {
    uint64_t right = td_wgmma_operand(b + k, 16, 1024);
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]),
          "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]),
          "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]),
          "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]),
          "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]),
          "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),
          "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]),
          "+f"(c[62]), "+f"(c[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
}
static __device__ inline void td_wgmma_sums(float c[128], const uint32_t a[4], const uint16_t *b,
                                            uint32_t k, uint32_t next) {
    uint64_t right = td_wgmma_operand(b + k * TD_TILE, next * 2, 1024);
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
        "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
        "%126, %127}, "
        "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
          "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
          "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
          "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
          "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
          "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
          "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
          "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]),
          "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]),
          "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]),
          "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]),
          "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]), "+f"(c[97]),
          "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]),
          "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]),
          "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]),
          "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), "+f"(c[121]),
          "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right));
}
#endif

#endif

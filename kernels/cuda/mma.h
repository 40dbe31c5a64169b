/* bf16 pairs and the tensor cores' 16 x 8 x 16 product (mma.sync, the same on Hopper and on
 * Blackwell). In a warp, with g = lane / 4 and t = lane % 4, the operands of one product are
 *   a[0], a[1]  rows g and g + 8, k = 2t, 2t + 1      a[2], a[3]  the same rows, k = 2t + 8, 2t + 9
 *   b[0]        column g, k = 2t, 2t + 1              b[1]        column g, k = 2t + 8, 2t + 9
 *   c[0], c[1]  row g, columns 2t, 2t + 1             c[2], c[3]  row g + 8
 * A sum over k is the same whatever k a place stands for, as long as a and b agree: kernels give a
 * thread the k that lie side by side in memory. */
#ifndef TD_KERNELS_CUDA_MMA_H
#define TD_KERNELS_CUDA_MMA_H

#include "kernels/cuda/num.h"

#ifdef TD_CUDA_EMULATED
static inline uint32_t td_bf16_pair(float low, float high) {
    return td_f32_to_bf16(low) | (uint32_t)td_f32_to_bf16(high) << 16;
}
static inline uint32_t td_bf16_mul(uint32_t a, uint32_t b) {
    return td_bf16_pair(td_bf16_to_f32((uint16_t)a) * td_bf16_to_f32((uint16_t)b),
                        td_bf16_to_f32((uint16_t)(a >> 16)) * td_bf16_to_f32((uint16_t)(b >> 16)));
}
static inline void td_mma(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    struct {
        uint32_t v[6];
    } mine = {{a[0], a[1], a[2], a[3], b[0], b[1]}}, all[32];
    td_emulate_exchange(&mine, sizeof mine, all);
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t row = g + i / 2 * 8, col = 2 * t + i % 2;
        for (uint32_t k = 0; k < 16; k++) {
            const uint32_t *at = all[row % 8 * 4 + k % 8 / 2].v, shift = k % 2 * 16;
            const uint32_t *bt = all[col * 4 + k % 8 / 2].v;
            c[i] += td_bf16_to_f32((uint16_t)(at[row / 8 + k / 8 * 2] >> shift)) *
                    td_bf16_to_f32((uint16_t)(bt[4 + k / 8] >> shift));
        }
    }
}
/* The 8 x 8 matrix at lanes 8 j .. 8 j + 7's row addresses, transposed, is operand part j. */
static inline void td_load_transposed(uint32_t b[4], const uint16_t *row) {
    const uint16_t *all[32];
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    td_emulate_exchange(&row, sizeof row, all);
    for (uint32_t j = 0; j < 4; j++)
        b[j] = all[8 * j + 2 * t][g] | (uint32_t)all[8 * j + 2 * t + 1][g] << 16;
    __syncwarp();
}
/* The 8 x 8 matrix at lanes 8 j .. 8 j + 7's row addresses is operand part j. */
static inline void td_load_rows(uint32_t b[4], const uint16_t *row) {
    const uint16_t *all[32];
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    td_emulate_exchange(&row, sizeof row, all);
    for (uint32_t j = 0; j < 4; j++)
        b[j] = all[8 * j + g][2 * t] | (uint32_t)all[8 * j + g][2 * t + 1] << 16;
    __syncwarp();
}
/* See below. */
static inline void td_copy_async(void *to, const void *from, bool valid) {
    if (valid)
        memcpy(to, from, 16);
    else
        memset(to, 0, 16);
}
static inline void td_copy_async8(void *to, const void *from, bool valid) {
    if (valid)
        memcpy(to, from, 8);
    else
        memset(to, 0, 8);
}
static inline void td_copy_commit(void) {
}
static inline float td_exp2(float x) {
    return exp2f(x);
}
template <int LEFT> static inline void td_copy_wait(void) {
}
#else
/* 16 bytes to shared memory without a register, zeros when not `valid`; a thread waits until all
 * but the LEFT latest of its groups are there. */
static __device__ inline void td_copy_async(void *to, const void *from, bool valid) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to), bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
static __device__ inline void td_copy_async8(void *to, const void *from, bool valid) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(to), bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :
                 : "r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
/* 2^x, the device's own; 2^0 is 1, results below 2^-126 are 0. */
static __device__ inline float td_exp2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static __device__ inline void td_copy_commit(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> static __device__ inline void td_copy_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
static __device__ inline void td_load_transposed(uint32_t b[4], const uint16_t *row) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(at)
                 : "memory");
}
static __device__ inline void td_load_rows(uint32_t b[4], const uint16_t *row) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(at)
                 : "memory");
}
static __device__ inline uint32_t td_bf16_pair(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
static __device__ inline uint32_t td_bf16_mul(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
static __device__ inline void td_mma(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

/* What rounding to `pair` left of two values, as bf16. */
static __device__ inline uint32_t td_bf16_rest(float low, float high, uint32_t pair) {
    return td_bf16_pair(low - td_bits_f32(pair << 16), high - td_bits_f32(pair & 0xffff0000u));
}

/* The low and the high pair of four e4m3 bytes, as bf16 (no NaNs among them): the seven bits of
 * magnitude are a bf16 that is 2^120 too small, subnormal ones too. */
static __device__ inline void td_e4m3_pairs(uint32_t four, uint32_t scale, uint32_t *low,
                                            uint32_t *high) {
    const uint32_t up = 0x7b807b80u; /* 2^120, twice */
    uint32_t a = (four & 0xffu) | (four & 0xff00u) << 8, b = four >> 16;
    b = (b & 0xffu) | (b & 0xff00u) << 8;
    a = (a & 0x00800080u) << 8 | (a & 0x007f007fu) << 4;
    b = (b & 0x00800080u) << 8 | (b & 0x007f007fu) << 4;
    *low = td_bf16_mul(td_bf16_mul(a, up), scale);
    *high = td_bf16_mul(td_bf16_mul(b, up), scale);
}

/* A scale byte as bf16, twice. */
static __device__ inline uint32_t td_e8m0_pair(uint8_t b) {
    uint32_t s = b == 0 ? 0x0040u : (uint32_t)b << 7;
    return s | s << 16;
}

#endif

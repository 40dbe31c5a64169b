/* Blackwell's block-scaled product of FP4 operands (mma.sync, kind mxf4nvf4, 16 x 8 x 64, a ue4m3
 * scale for every 16 of K): c[m][n] += sum over k of a[m][k] sa[m][k / 16] b[k][n] sb[k / 16][n].
 * NOT YET RUN ON THE CHIP: the layout below is the documentation's, and what the emulator of the
 * tests computes from it; test_cuda_fp4 finds every place again on a GPU that has the
 * instruction.
 *
 * Who holds what, in lane 4g + t (PTX ISA 9.1, "Matrix Fragments for mma.m16n8k64" and "Block
 * Scaling for mma.sync" with its figures on the choice of SF_A and SF_B). A register has 8 nibbles,
 * the lowest k in the lowest bits; a scale register has 4 bytes, byte j for k = 16j .. 16j + 15.
 *
 *   a[0]  row g,     k = 8t .. 8t + 7           a[2]  row g,     k = 32 + 8t .. 32 + 8t + 7
 *   a[1]  row g + 8, k = 8t .. 8t + 7           a[3]  row g + 8, k = 32 + 8t .. 32 + 8t + 7
 *   b[0]  column g,  k = 8t .. 8t + 7           b[1]  column g,  k = 32 + 8t .. 32 + 8t + 7
 *   sa    counts in lanes t = 2 thread-id-a (row g) and 2 thread-id-a + 1 (row g + 8)
 *   sb    counts in lanes t = thread-id-b (column g)
 *   c[0], c[1]  row g, columns 2t, 2t + 1       c[2], c[3]  row g + 8, the same columns
 *
 *   selector      values with scale_vec::4X    which
 *   byte-id-a     0                            all four bytes count
 *   thread-id-a   0, 1                         the pair of a quad's lanes whose sa counts
 *   byte-id-b     0                            all four bytes count
 *   thread-id-b   0, 1, 2, 3                   the lane of a quad whose sb counts
 *
 * So a lane can bring the scales of one of two products for a, of one of four for b. Products of
 * two e2m1 values and sums of 16 of them, times both scales, are exact in fp32; in what order the
 * instruction adds the four blocks to c, and how it rounds there, is not said. */
#ifndef TD_KERNELS_CUDA_MMA_FP4_H
#define TD_KERNELS_CUDA_MMA_FP4_H

#include "kernels/cuda/mma.h"

/* A build for sm_120a has the instruction; others never launch the kernels that need it. */
#ifdef TD_CUDA_EMULATED
#define TD_HAS_MMA_FP4
template <int THREAD_A, int THREAD_B>
static inline void td_mma_fp4(float c[4], const uint32_t a[4], const uint32_t b[2], uint32_t sa,
                              uint32_t sb) {
    struct td_fp4_lane mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, sa, sb}, all[32];
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    td_emulate_exchange(&mine, sizeof mine, all);
    for (uint32_t i = 0; i < 4; i++)
        c[i] = td_fp4_sum(all, THREAD_A, THREAD_B, g + i / 2 * 8, 2 * t + i % 2, c[i]);
}
#elif defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define TD_HAS_MMA_FP4
template <int THREAD_A, int THREAD_B>
static __device__ inline void td_mma_fp4(float c[4], const uint32_t a[4], const uint32_t b[2],
                                         uint32_t sa, uint32_t sb) {
    asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col"
        ".f32.e2m1.e2m1.f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3}, %10, {0, %12}, %11, {0, %13};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sa), "r"(sb),
          "n"(THREAD_A), "n"(THREAD_B));
}
#endif

#endif

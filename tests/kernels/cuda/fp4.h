/* The definition of Blackwell's block-scaled FP4 product, for the emulator: operands as the 32
 * lanes hold them (the table is in kernels/cuda/mma_fp4.h), one result. The 16 products of a block
 * and their sum, times both scales, are exact in fp32; the four blocks are added to c in ascending
 * order, each sum rounded. (The chip's own order is not documented.) */
#ifndef TD_TESTS_KERNELS_CUDA_FP4_H
#define TD_TESTS_KERNELS_CUDA_FP4_H

#include <stdint.h>

struct td_fp4_lane {
    uint32_t a[4], b[2], sa, sb;
};

/* c + the sum for row 0..15 and column 0..7; `thread_a` 0..1 and `thread_b` 0..3 are the selectors.
 */
float td_fp4_sum(const struct td_fp4_lane lane[32], uint32_t thread_a, uint32_t thread_b,
                 uint32_t row, uint32_t column, float c);

#endif

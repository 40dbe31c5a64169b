/* See fp4.h. */
#include "tests/kernels/cuda/fp4.h"

#include "kernels/model/numbers.h"

static float value(uint32_t reg, uint32_t k) {
    return td_e2m1_to_f32((uint8_t)(reg >> k % 8 * 4 & 15u));
}

/* ue4m3: there is no sign. */
static float scale(uint32_t reg, uint32_t block) {
    return td_e4m3_to_f32((uint8_t)(reg >> block * 8 & 0x7fu));
}

float td_fp4_sum(const struct td_fp4_lane lane[32], uint32_t thread_a, uint32_t thread_b,
                 uint32_t row, uint32_t column, float c) {
    uint32_t sa = lane[row % 8 * 4 + 2 * thread_a + row / 8].sa;
    uint32_t sb = lane[column * 4 + thread_b].sb;
    for (uint32_t block = 0; block < 4; block++) {
        float sum = 0.0f;
        for (uint32_t k = 16 * block; k < 16 * block + 16; k++) {
            const struct td_fp4_lane *a = &lane[row % 8 * 4 + k % 32 / 8];
            const struct td_fp4_lane *b = &lane[column * 4 + k % 32 / 8];
            sum += value(a->a[row / 8 + k / 32 * 2], k) * value(b->b[k / 32], k);
        }
        c += sum * (scale(sa, block) * scale(sb, block));
    }
    return c;
}

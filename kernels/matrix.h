/* A weight matrix in the layout of a device's kernels; on the CPU panels of 16 outputs,
 * input-major.
 *
 * Values that are all exact in bf16 (a checkpoint's bf16, FP8 and FP4 weights with power-of-two
 * scales) are held as bf16 panels, because a product with few rows is bound by reading them; others
 * as fp32. Both mean the same floats: what is read back is what was packed. */
#ifndef TD_KERNELS_MATRIX_H
#define TD_KERNELS_MATRIX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/model/numbers.h"
#include "kernels/model/weight.h"

enum { TD_PANEL = 16 }; /* outputs side by side in a panel */

/* CPU: fp32 panels [ceil(rows / 16)][cols][16], or bf16 panels [ceil(rows / 16)][cols][8][2] with
 * outputs j and j + 8 of the panel as the low and high half of one 32-bit word, so that a shift and
 * a mask widen them. Outputs beyond `rows` are zero. 64-aligned.
 * Other devices: a tensor as the checkpoint stores it, in device memory, 64-aligned; the matrix is
 * its rows row.. and columns col... In an array of experts `device` is the array's copy there. */
struct td_matrix {
    uint32_t rows, cols; /* [out, in] */
    const void *panels;
    bool bf16; /* how panels are held */
    struct td_weight stored;
    uint32_t row, col;
    const struct td_matrix *device;
    bool fp8_input;    /* stored as FP8 or FP4: ref numerics rounds what it is multiplied with */
    float input_scale; /* stored as NVFP4: of round_nvfp4; else 0 */
};

static inline uint32_t td_matrix_panels(const struct td_matrix *m) {
    return (m->rows + TD_PANEL - 1) / TD_PANEL;
}

static inline size_t td_matrix_bytes(uint32_t rows, uint32_t cols, bool bf16) {
    return (size_t)(rows + TD_PANEL - 1) / TD_PANEL * cols * TD_PANEL * (bf16 ? 2 : 4);
}

/* Index of the value of output o and input k. */
static inline size_t td_matrix_at(uint32_t cols, bool bf16, uint32_t o, uint32_t k) {
    size_t group = ((size_t)(o / TD_PANEL) * cols + k) * TD_PANEL;
    uint32_t j = o % TD_PANEL;
    return group + (bf16 ? j % 8 * 2 + j / 8 : j);
}

static inline float td_matrix_value(const struct td_matrix *m, uint32_t o, uint32_t k) {
    size_t at = td_matrix_at(m->cols, m->bf16, o, k);
    return m->bf16 ? td_bf16_to_f32(((const uint16_t *)m->panels)[at])
                   : ((const float *)m->panels)[at];
}

/* Whether all n values are exact in bf16. */
static inline bool td_matrix_exact(const float *v, uint32_t n) {
    uint32_t lost = 0;
    for (uint32_t i = 0; i < n; i++)
        lost |= td_f32_bits(v[i]);
    return (lost & 0xffffu) == 0;
}

/* Writes output o's row [cols] into panels; the caller has zeroed them. */
static inline void td_matrix_set_row(void *panels, uint32_t cols, bool bf16, uint32_t o,
                                     const float *row) {
    uint16_t *half = (uint16_t *)panels; /* C++ reads this too */
    float *full = (float *)panels;
    for (uint32_t k = 0; k < cols; k++) {
        size_t at = td_matrix_at(cols, bf16, o, k);
        if (bf16)
            half[at] = (uint16_t)(td_f32_bits(row[k]) >> 16);
        else
            full[at] = row[k];
    }
}

#endif

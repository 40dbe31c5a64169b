/* The one product loop: block sums of `rows` rows against 8 or 16 outputs side by side.
 *
 * y[r][j] = block sum over k of x[r][k] * w[k][j]  (kernels/ops.h). Linears, index scores, q.k and
 * probability-times-rows all end here, so prefill and decode have one order of summation. How
 * many rows share a pass over w changes speed only: every output has its own chain. */
#ifndef TD_KERNELS_CPU_PRODUCT_H
#define TD_KERNELS_CPU_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"
#include "kernels/cpu/vec.h"

enum { PRODUCT_ROWS = 6, PRODUCT_ROWS_NARROW = 8 }; /* rows per pass with 16 and with 8 outputs */

struct product {
    const float *x[8]; /* row starts */
    size_t x_step;     /* floats from x[r][k] to x[r][k + 1] */
    const float *w;
    size_t w_step; /* floats from w[k] to w[k + 1] */
    uint32_t k;
    float *y;
    size_t y_step; /* floats from y[r] to y[r + 1] */
    bool add;      /* y already holds the sum of earlier blocks */
};

/* `rows` and `nv` are constants at every call, so the loops over them unroll into registers. */
TD_INLINE void product_fixed(const struct product *p, int rows, int nv) {
    const float *x[8];
    for (int r = 0; r < rows; r++)
        x[r] = p->x[r];
    for (uint32_t begin = 0; begin < p->k; begin += TD_BLOCK) {
        uint32_t end = p->k - begin < TD_BLOCK ? p->k : begin + TD_BLOCK;
        v8 acc[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++)
                acc[r][v] = splat8(0.0f);
        const float *w = p->w + begin * p->w_step;
        size_t at = begin * p->x_step;
        for (uint32_t k = begin; k < end; k++, w += p->w_step, at += p->x_step) {
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int v = 0; v < nv; v++)
                    acc[r][v] = fma8(splat8(x[r][at]), load8(w + 8 * v), acc[r][v]);
        }
        bool first = begin == 0 && !p->add;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++) {
                float *y = p->y + (size_t)r * p->y_step + 8 * v;
                store8(y, first ? acc[r][v] : load8(y) + acc[r][v]);
            }
    }
}

/* 16 outputs; rows 1..PRODUCT_ROWS. */
static inline void product16(const struct product *p, uint32_t rows) {
    switch (rows) {
    case 1:
        product_fixed(p, 1, 2);
        break;
    case 2:
        product_fixed(p, 2, 2);
        break;
    case 3:
        product_fixed(p, 3, 2);
        break;
    case 4:
        product_fixed(p, 4, 2);
        break;
    case 5:
        product_fixed(p, 5, 2);
        break;
    default:
        product_fixed(p, 6, 2);
        break;
    }
}

/* 8 outputs; rows 1..PRODUCT_ROWS_NARROW. */
static inline void product8(const struct product *p, uint32_t rows) {
    switch (rows) {
    case 1:
        product_fixed(p, 1, 1);
        break;
    case 2:
        product_fixed(p, 2, 1);
        break;
    case 3:
        product_fixed(p, 3, 1);
        break;
    case 4:
        product_fixed(p, 4, 1);
        break;
    case 5:
        product_fixed(p, 5, 1);
        break;
    case 6:
        product_fixed(p, 6, 1);
        break;
    case 7:
        product_fixed(p, 7, 1);
        break;
    default:
        product_fixed(p, 8, 1);
        break;
    }
}

/* `rows` rows (x[r] = x + r * x_row) against `lanes` outputs, a multiple of 8; w and y hold the
 * lanes of one k, one row, side by side. */
static inline void product_lanes(struct product *p, const float *x, size_t x_row, uint32_t rows,
                                 uint32_t lanes) {
    const float *w = p->w;
    float *y = p->y;
    uint32_t step = lanes >= 16 ? PRODUCT_ROWS : PRODUCT_ROWS_NARROW;
    for (uint32_t r = 0; r < rows; r += step) {
        uint32_t m = rows - r < step ? rows - r : step;
        for (uint32_t i = 0; i < m; i++)
            p->x[i] = x + (r + i) * x_row;
        for (uint32_t l = 0; l < lanes; l += 16) {
            p->w = w + l;
            p->y = y + r * p->y_step + l;
            if (lanes - l >= 16)
                product16(p, m);
            else
                product8(p, m);
        }
    }
    p->w = w;
    p->y = y;
}

#endif

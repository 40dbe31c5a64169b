/* The one product loop of the fast kernels: block sums of a few rows against panels of 16 lanes.
 *
 *   y[r][j] = block sum over k of x[r][k] * w[k][j]      (kernels/ops.h)
 *
 * Lanes are outputs, so every lane is its own chain and the vector's width changes no bit: the same
 * source is compiled for 8 and for 16 lanes. Three kinds of operands:
 *   TILE_FP32  x[r][k] against fp32 lanes
 *   TILE_BF16  x[r][k] against bf16 panels (kernels/matrix.h), widened in registers
 *   TILE_QUAD  four chains a row: lane j takes x[r][k][j % 4], for products whose outputs are too
 *              few to fill a vector; there is one block (k <= 128)
 *   TILE_QUAD_BF16  the same with bf16 fours: a 32-bit word holds k (even, low half) and k + 1
 *   TILE_BAND  as FP32, but every row has a range of its own: k = from[r]..from[r] + span - 1,
 * `from` ascending, and the range is one block. Attention of neighbours, whose windows overlap
 *   TILE_BAND_BF16  the same with bf16 panels
 * How many rows and panels share a pass changes speed only: enough chains to hide the latency of
 * fma, few enough to stay in registers. */
#ifndef TD_KERNELS_CPU_TILE_H
#define TD_KERNELS_CPU_TILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/vec.h"
#include "kernels/ops.h"

#if !defined(TD_WIDTH) && defined(__AVX512F__)
#define TD_WIDTH 16
#elif !defined(TD_WIDTH)
#define TD_WIDTH 8
#endif

typedef float vl __attribute__((vector_size(4 * TD_WIDTH)));
typedef uint32_t ul __attribute__((vector_size(4 * TD_WIDTH)));

enum {
    PANEL_VECTORS = TD_PANEL / TD_WIDTH,
    TILE_ROWS = TD_WIDTH == 16 ? 12 : 6,       /* registers: 32 or 16 */
    TILE_ROWS_PAIRS = TD_WIDTH == 16 ? 12 : 5, /* of TILE_QUAD_BF16, which needs two more */
};

enum tile_kind { TILE_FP32, TILE_BF16, TILE_QUAD, TILE_QUAD_BF16, TILE_BAND, TILE_BAND_BF16 };

struct tile {
    const float *x[TILE_ROWS]; /* row starts */
    const float *w;            /* of panel 0; bf16 panels are addressed as 32-bit words */
    size_t w_step, w_panel;    /* words from w[k] to w[k + 1], from a panel to the next */
    uint32_t k;
    float *y;
    size_t y_step;                  /* floats from y[r] to y[r + 1]; panels lie side by side */
    bool add;                       /* y already holds the sum of earlier blocks */
    uint32_t from[TILE_ROWS], span; /* of a band; k does not count */
};

/* Rows 1..TILE_ROWS against any number of panels. Compiled once per instruction set (tile.c). */
#define TILE_PASTE2(isa) td_tile_run_##isa
#define TILE_PASTE(isa) TILE_PASTE2(isa)
#define tile_run TILE_PASTE(TD_ISA)
void tile_run(const struct tile *t, enum tile_kind kind, uint32_t rows, uint32_t panels);

#endif

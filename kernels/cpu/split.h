/* Four arrays side by side and back: to[4 * k + b] = part b [k].
 *
 * A product whose outputs are too few to fill a vector takes four chains a row instead (TILE_QUAD
 * of tile.h): the four 128-blocks of an attention row, or four indexer keys. */
#ifndef TD_KERNELS_CPU_SPLIT_H
#define TD_KERNELS_CPU_SPLIT_H

#include "kernels/cpu/stored.h"
#include "kernels/cpu/vec.h"

/* The 4x4 transpose in each half: in[m] = four values of m, twice; out[i] = value i of all m. */
TD_INLINE void transpose4(const v8 *in, v8 *out) {
    v8 a = __builtin_shufflevector(in[0], in[1], 0, 8, 1, 9, 4, 12, 5, 13);
    v8 b = __builtin_shufflevector(in[0], in[1], 2, 10, 3, 11, 6, 14, 7, 15);
    v8 c = __builtin_shufflevector(in[2], in[3], 0, 8, 1, 9, 4, 12, 5, 13);
    v8 d = __builtin_shufflevector(in[2], in[3], 2, 10, 3, 11, 6, 14, 7, 15);
    out[0] = __builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13);
    out[1] = __builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
    out[2] = __builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13);
    out[3] = __builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15);
}

/* n is a multiple of 8; `step` floats from a four to the next. */
TD_INLINE void split4(const float *const *part, uint32_t n, float *to, size_t step) {
    for (uint32_t k = 0; k < n; k += 8) {
        v8 in[4], t[4];
        for (int b = 0; b < 4; b++)
            in[b] = load8(part[b] + k);
        transpose4(in, t);
        for (int i = 0; i < 4; i++, to += step)
            memcpy(to, &t[i], 16);
        for (int i = 0; i < 4; i++, to += step)
            memcpy(to, (const float *)&t[i] + 4, 16);
    }
}

/* The inverse for n = 128, each value divided by `by`. `paired`: from[] holds, per four k, both
 * even ones and then both odd ones, as a product with bf16 panels leaves them. */
TD_INLINE void join4_divided(const float *from, bool paired, float by, float *const *part) {
    for (uint32_t k = 0; k < 128; k += 8) {
        v8 f[4], in[4], t[4];
        for (int i = 0; i < 4; i++)
            f[i] = load8(from + 4 * k + 8 * i);
        if (paired) { /* k, k + 2 | k + 1, k + 3 | k + 4, k + 6 | k + 5, k + 7 */
            in[0] = __builtin_shufflevector(f[0], f[2], 0, 1, 2, 3, 8, 9, 10, 11);
            in[1] = __builtin_shufflevector(f[1], f[3], 0, 1, 2, 3, 8, 9, 10, 11);
            in[2] = __builtin_shufflevector(f[0], f[2], 4, 5, 6, 7, 12, 13, 14, 15);
            in[3] = __builtin_shufflevector(f[1], f[3], 4, 5, 6, 7, 12, 13, 14, 15);
        } else { /* k, k + 1 | k + 2, k + 3 | ... */
            in[0] = __builtin_shufflevector(f[0], f[2], 0, 1, 2, 3, 8, 9, 10, 11);
            in[1] = __builtin_shufflevector(f[0], f[2], 4, 5, 6, 7, 12, 13, 14, 15);
            in[2] = __builtin_shufflevector(f[1], f[3], 0, 1, 2, 3, 8, 9, 10, 11);
            in[3] = __builtin_shufflevector(f[1], f[3], 4, 5, 6, 7, 12, 13, 14, 15);
        }
        transpose4(in, t);
        for (int b = 0; b < 4; b++)
            store8(part[b] + k, t[b] / splat8(by));
    }
}

#endif

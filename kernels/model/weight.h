/* One matrix of the checkpoint as stored, and its exact meaning as floats.
 *
 * A td_weight is a view into a mapped file: nothing is converted at load. Backends pack it into
 * their private layout once; td_weight_row is the definition they are compared with. Formulas:
 * the checkpoint formats of DeepSeek-V4 (e4m3 with e8m0 per 128x128 block; e2m1 with e8m0 per row
 * and 32 inputs) and NVFP4 (e2m1, e4m3 per row and 16 inputs, one fp32 factor). */
#ifndef TD_KERNELS_MODEL_WEIGHT_H
#define TD_KERNELS_MODEL_WEIGHT_H

#include <stddef.h>
#include <stdint.h>

enum td_weight_format {
    TD_W_NONE, /* absent */
    TD_W_F32,
    TD_W_BF16,
    TD_W_FP8_BLOCK, /* e4m3 [rows, cols]; scale e8m0 [ceil(rows/128), ceil(cols/128)] */
    TD_W_FP4,       /* e2m1 pairs [rows, cols/2], low nibble first; scale e8m0 [rows, cols/32] */
    TD_W_NVFP4,     /* e2m1 pairs [rows, cols/2]; scale e4m3 [rows, cols/16]; times scale2 */
};

/* The range of weights that are computed: random.h. */
enum td_random_kind {
    TD_RANDOM_MATRIX, /* by the number of inputs */
    TD_RANDOM_ONE,    /* 0.5 to 1.5 */
    TD_RANDOM_ZERO,   /* -1/16 to 1/16: what decides over experts is their matrix */
};

struct td_weight {
    enum td_weight_format format;
    uint32_t rows, cols; /* [out, in]; a vector has rows == 1 */
    enum td_random_kind random_kind;
    uint64_t random;     /* 0, or the key its bytes are computed from: then it has none */
    uint32_t random_row; /* of the tensor that is computed: row 0 of this one */
    const void *data;    /* element-aligned at most; little-endian */
    const void *scale;   /* NULL when the format has none */
    float scale2;        /* NVFP4: weight_scale_2 */
    float input_scale; /* NVFP4: calibrated activation scale, for rounded activations alone; 0: the
                          checkpoint has none */
};

/* Row `r` as fp32, `cols` values to `ret`. Exact: every format's value is representable except
 * NVFP4's product with scale2, which is rounded once (e2m1 * e4m3 is exact). */
void td_weight_row(const struct td_weight *w, uint32_t r, float *ret);

/* Bytes behind `data` and `scale`. */
size_t td_weight_data_bytes(const struct td_weight *w);
size_t td_weight_scale_bytes(const struct td_weight *w);

/* Rows first..first+rows-1 of an unquantised matrix, as a view. */
struct td_weight td_weight_rows(const struct td_weight *w, uint32_t first, uint32_t rows);

#endif

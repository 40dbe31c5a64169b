/* Rows of stored matrices as floats: the definition of every weight format. */
#include "kernels/model/weight.h"

#include <assert.h>
#include <string.h>

#include "kernels/model/numbers.h"
#include "kernels/model/random.h"

enum { FP8_BLOCK = 128, FP4_GROUP = 32, NVFP4_GROUP = 16 };

static void row_bf16(const struct td_weight *w, uint32_t r, float *ret) {
    const uint8_t *p = (const uint8_t *)w->data + (size_t)r * w->cols * 2;
    for (uint32_t c = 0; c < w->cols; c++) {
        uint16_t h;
        memcpy(&h, p + 2 * (size_t)c, sizeof h);
        ret[c] = td_bf16_to_f32(h);
    }
}

static void row_fp8(const struct td_weight *w, uint32_t r, float *ret) {
    const uint8_t *p = (const uint8_t *)w->data + (size_t)r * w->cols;
    size_t blocks = (w->cols + FP8_BLOCK - 1) / FP8_BLOCK;
    const uint8_t *scale = (const uint8_t *)w->scale + r / FP8_BLOCK * blocks;
    for (uint32_t c = 0; c < w->cols; c++)
        ret[c] = td_e4m3_to_f32(p[c]) * td_e8m0_to_f32(scale[c / FP8_BLOCK]);
}

static float e2m1_at(const uint8_t *row, uint32_t c) {
    return td_e2m1_to_f32((uint8_t)(row[c / 2] >> (c % 2 * 4)));
}

static void row_fp4(const struct td_weight *w, uint32_t r, float *ret) {
    const uint8_t *p = (const uint8_t *)w->data + (size_t)r * (w->cols / 2);
    const uint8_t *scale = (const uint8_t *)w->scale + (size_t)r * (w->cols / FP4_GROUP);
    for (uint32_t c = 0; c < w->cols; c++)
        ret[c] = e2m1_at(p, c) * td_e8m0_to_f32(scale[c / FP4_GROUP]);
}

static void row_nvfp4(const struct td_weight *w, uint32_t r, float *ret) {
    const uint8_t *p = (const uint8_t *)w->data + (size_t)r * (w->cols / 2);
    const uint8_t *scale = (const uint8_t *)w->scale + (size_t)r * (w->cols / NVFP4_GROUP);
    for (uint32_t c = 0; c < w->cols; c++)
        ret[c] = e2m1_at(p, c) * td_e4m3_to_f32(scale[c / NVFP4_GROUP]) * w->scale2;
}

/* Bytes of `values` values and of their scales. */
static size_t data_bytes(enum td_weight_format f, size_t values) {
    return f == TD_W_F32         ? 4 * values
           : f == TD_W_BF16      ? 2 * values
           : f == TD_W_FP8_BLOCK ? values
                                 : values / 2;
}

/* In pieces of whole groups, as if each were a row that is stored. */
static void row_random(const struct td_weight *w, uint32_t r, float *ret) {
    enum { PIECE = FP8_BLOCK };
    uint8_t data[PIECE * sizeof(float)], scale[PIECE / NVFP4_GROUP];
    struct td_random of_data = td_random_of(w, false), of_scale = td_random_of(w, true);
    size_t blocks = (w->cols + FP8_BLOCK - 1) / FP8_BLOCK, first = (size_t)r * w->cols;
    for (uint32_t c = 0; c < w->cols; c += PIECE) {
        uint32_t n = w->cols - c < PIECE ? w->cols - c : PIECE;
        const struct td_weight piece = {.format = w->format,
                                        .rows = 1,
                                        .cols = n,
                                        .data = data,
                                        .scale = scale,
                                        .scale2 = w->scale2};
        td_random_bytes(&of_data, data_bytes(w->format, first + c), data_bytes(w->format, n), data);
        if (w->format == TD_W_FP8_BLOCK)
            td_random_bytes(&of_scale, r / FP8_BLOCK * blocks + c / FP8_BLOCK, 1, scale);
        else if (w->format == TD_W_FP4)
            td_random_bytes(&of_scale, (first + c) / FP4_GROUP, n / FP4_GROUP, scale);
        else if (w->format == TD_W_NVFP4)
            td_random_bytes(&of_scale, (first + c) / NVFP4_GROUP, n / NVFP4_GROUP, scale);
        td_weight_row(&piece, 0, ret + c);
    }
}

void td_weight_row(const struct td_weight *w, uint32_t r, float *ret) {
    assert(r < w->rows);
    if (w->random) {
        row_random(w, w->random_row + r, ret);
        return;
    }
    switch (w->format) {
    case TD_W_NONE:
        assert(!"a row of an absent weight");
        break;
    case TD_W_F32:
        memcpy(ret, (const uint8_t *)w->data + (size_t)r * w->cols * 4, (size_t)w->cols * 4);
        break;
    case TD_W_BF16:
        row_bf16(w, r, ret);
        break;
    case TD_W_FP8_BLOCK:
        row_fp8(w, r, ret);
        break;
    case TD_W_FP4:
        row_fp4(w, r, ret);
        break;
    case TD_W_NVFP4:
        row_nvfp4(w, r, ret);
        break;
    }
}

size_t td_weight_data_bytes(const struct td_weight *w) {
    return w->format == TD_W_NONE ? 0 : data_bytes(w->format, (size_t)w->rows * w->cols);
}

size_t td_weight_scale_bytes(const struct td_weight *w) {
    size_t rows = w->rows, cols = w->cols;
    switch (w->format) {
    case TD_W_FP8_BLOCK:
        return (rows + FP8_BLOCK - 1) / FP8_BLOCK * ((cols + FP8_BLOCK - 1) / FP8_BLOCK);
    case TD_W_FP4:
        return rows * (cols / FP4_GROUP);
    case TD_W_NVFP4:
        return rows * (cols / NVFP4_GROUP);
    default:
        return 0;
    }
}

struct td_weight td_weight_rows(const struct td_weight *w, uint32_t first, uint32_t rows) {
    assert(w->format == TD_W_F32 || w->format == TD_W_BF16);
    assert(first <= w->rows && rows <= w->rows - first);
    struct td_weight part = *w;
    size_t unit = w->format == TD_W_F32 ? 4 : 2;
    part.rows = rows;
    part.random_row += first;
    if (w->data) part.data = (const uint8_t *)w->data + (size_t)first * w->cols * unit;
    return part;
}

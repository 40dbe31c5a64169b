/* Tensors of a checkpoint as checked weights. The format of a matrix follows from its dtype and
 * its siblings' names alone; config.json differs between revisions of the same files. */
#include "kernels/model/bind.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/model/random.h"

enum { FP8_BLOCK = 128, FP4_GROUP = 32, NVFP4_GROUP = 16, FULL_NAME = 192 };

/* ---- without files ---- */

static void full_name(const struct td_binder *b, const char *name, const char *suffix,
                      char ret[FULL_NAME]) {
    snprintf(ret, FULL_NAME, "%s%s%s", b->prefix, name, suffix);
}

static td_status outlined(struct td_binder *b, const char *name, enum td_weight_format format,
                          uint32_t rows, uint32_t cols, struct td_weight *ret) {
    char full[FULL_NAME];
    full_name(b, name, "", full);
    *ret = (struct td_weight){.format = format, .rows = rows, .cols = cols};
    if (b->random) td_random_weight(b->seed, full, ret);
    b->bytes += td_weight_data_bytes(ret) + td_weight_scale_bytes(ret);
    if (format == TD_W_NVFP4) b->bytes += 2 * sizeof(float); /* the factor, the input scale */
    return TD_OK;
}

static enum td_weight_format outlined_linear(const struct td_binder *b, const char *name) {
    if (b->kind == TD_OUTLINE_BF16) return TD_W_BF16;
    if (strncmp(name, "ffn.experts.", strlen("ffn.experts.")) != 0) return TD_W_FP8_BLOCK;
    return b->kind == TD_OUTLINE_FP4 ? TD_W_FP4 : TD_W_NVFP4;
}

/* ---- in files ---- */

static td_status wrong(const struct td_binder *b, const struct td_tensor *t, const char *expected,
                       const char *found) {
    char shown[104];
    return td_fail(b->err, TD_FORMAT, "%.120s: tensor %s: expected %.90s, found %.80s",
                   t->file->path, td_name_text(t->stored, shown), expected, found);
}

static bool has(const struct td_binder *b, const char *name, const char *suffix) {
    char full[FULL_NAME];
    full_name(b, name, suffix, full);
    return td_files_find(b->files, full) != NULL;
}

bool td_bind_has(const struct td_binder *b, const char *name) {
    return b->files && has(b, name, "");
}

/* Finds a tensor that must exist and counts it as used. */
static td_status take(struct td_binder *b, const char *name, const char *suffix,
                      struct td_tensor **ret) {
    char full[FULL_NAME];
    full_name(b, name, suffix, full);
    struct td_tensor *t = td_files_find(b->files, full);
    if (!t) {
        const char *note = b->files->renamed ? " (its official name)" : "";
        td_fail(b->err, TD_FORMAT, "%.150s: tensor %s%s: expected by config.json, found nothing",
                b->files->source, full, note);
        return TD_FORMAT; /* said here so that the compiler sees that *ret was not forgotten */
    }
    t->used = true;
    b->bytes += t->bytes;
    *ret = t;
    return TD_OK;
}

/* Shape [rows, cols]; a vector (rows == 1) is stored with rank 1, a matrix of one row with 2. */
static td_status check_shape(const struct td_binder *b, const struct td_tensor *t, uint64_t rows,
                             uint64_t cols, bool vector) {
    uint64_t want[2] = {vector ? cols : rows, cols};
    uint32_t rank = vector ? 1 : 2;
    char found[128], expected[128], with[160];
    if (t->rank == rank && t->shape[0] == want[0] && (vector || t->shape[1] == want[1]))
        return TD_OK;
    if (vector && t->rank == 2 && t->shape[0] == 1 && t->shape[1] == cols) return TD_OK;
    snprintf(with, sizeof with, "shape %s", td_shape_text(want, rank, expected));
    return wrong(b, t, with, td_shape_text(t->shape, t->rank, found));
}

static td_status check_dtype(const struct td_binder *b, const struct td_tensor *t,
                             enum td_dtype want, const char *name) {
    return t->dtype == want ? TD_OK : wrong(b, t, name, t->dtype_name);
}

/* One NaN code in a weight makes every product with its row NaN: found here, where the tensor has
 * a name. A pass at the speed of memory; the bytes are needed anyway. */
static td_status refuse_nan_weights(const struct td_binder *b, const struct td_tensor *t) {
    enum { BLOCK = 1 << 16 };
    char found[64];
    for (size_t at = 0; at < t->bytes; at += BLOCK) {
        size_t n = t->bytes - at < BLOCK ? t->bytes - at : BLOCK, nans = 0;
        for (size_t i = 0; i < n; i++)
            nans |= (t->data[at + i] & 0x7fu) == 0x7fu;
        if (!nans) continue;
        while ((t->data[at] & 0x7fu) != 0x7fu)
            at++;
        snprintf(found, sizeof found, "the NaN code %d at byte %zu", t->data[at], at);
        return wrong(b, t, "weights that are numbers", found);
    }
    return TD_OK;
}

static td_status refuse_byte(const struct td_binder *b, const struct td_tensor *t, int byte) {
    if (!memchr(t->data, byte, t->bytes)) return TD_OK;
    char found[32];
    snprintf(found, sizeof found, "the NaN code %d", byte);
    return wrong(b, t, "scales that are numbers", found);
}

/* The block scales of `name` in sibling `suffix`. */
static td_status bind_scales(struct td_binder *b, const char *name, const char *suffix,
                             enum td_dtype dtype, uint64_t rows, uint64_t cols,
                             struct td_weight *w) {
    struct td_tensor *t;
    bool e8m0 = dtype == TD_DTYPE_F8_E8M0;
    TD_TRY(take(b, name, suffix, &t));
    TD_TRY(check_dtype(b, t, dtype, e8m0 ? "F8_E8M0" : "F8_E4M3"));
    TD_TRY(check_shape(b, t, rows, cols, false));
    if (e8m0) {
        TD_TRY(refuse_byte(b, t, 255));
    } else {
        TD_TRY(refuse_byte(b, t, 0x7f));
        TD_TRY(refuse_byte(b, t, 0xff));
    }
    w->scale = t->data; /* bytes: any alignment */
    return TD_OK;
}

/* One F32 number of shape [] or [1]. */
static td_status bind_scalar(struct td_binder *b, const char *name, const char *suffix,
                             float *ret) {
    struct td_tensor *t;
    char found[128];
    TD_TRY(take(b, name, suffix, &t));
    TD_TRY(check_dtype(b, t, TD_DTYPE_F32, "F32"));
    if (t->rank > 1 || t->bytes != sizeof(float))
        return wrong(b, t, "one number (shape [])", td_shape_text(t->shape, t->rank, found));
    memcpy(ret, t->data, sizeof *ret);
    if (isfinite(*ret) && *ret > 0.0f) return TD_OK;
    snprintf(found, sizeof found, "%g", (double)*ret);
    return wrong(b, t, "a positive number", found);
}

static td_status check_groups(const struct td_binder *b, const struct td_tensor *t, uint32_t cols,
                              uint32_t group) {
    if (cols % group == 0) return TD_OK;
    char expected[80], found[32];
    snprintf(expected, sizeof expected, "an input size that is a multiple of %u", group);
    snprintf(found, sizeof found, "%u", cols);
    return wrong(b, t, expected, found);
}

static td_status bind_fp4(struct td_binder *b, const char *name, const struct td_tensor *t,
                          struct td_weight *w) {
    w->format = TD_W_FP4;
    TD_TRY(check_groups(b, t, w->cols, FP4_GROUP));
    TD_TRY(check_shape(b, t, w->rows, w->cols / 2, false));
    return bind_scales(b, name, ".scale", TD_DTYPE_F8_E8M0, w->rows, w->cols / FP4_GROUP, w);
}

static td_status bind_nvfp4(struct td_binder *b, const char *name, const struct td_tensor *t,
                            struct td_weight *w) {
    w->format = TD_W_NVFP4;
    TD_TRY(check_groups(b, t, w->cols, NVFP4_GROUP));
    TD_TRY(check_shape(b, t, w->rows, w->cols / 2, false));
    TD_TRY(
        bind_scales(b, name, ".weight_scale", TD_DTYPE_F8_E4M3, w->rows, w->cols / NVFP4_GROUP, w));
    TD_TRY(bind_scalar(b, name, ".weight_scale_2", &w->scale2));
    /* Only rounded activations need it, and files made for weight-only use leave it out. */
    if (!has(b, name, ".input_scale")) return TD_OK;
    return bind_scalar(b, name, ".input_scale", &w->input_scale);
}

static td_status bind_fp8(struct td_binder *b, const char *name, const struct td_tensor *t,
                          struct td_weight *w) {
    w->format = TD_W_FP8_BLOCK;
    TD_TRY(check_shape(b, t, w->rows, w->cols, false));
    TD_TRY(refuse_nan_weights(b, t));
    return bind_scales(b, name, ".scale", TD_DTYPE_F8_E8M0, (w->rows + FP8_BLOCK - 1) / FP8_BLOCK,
                       (w->cols + FP8_BLOCK - 1) / FP8_BLOCK, w);
}

static td_status bind_unquantised(struct td_binder *b, const struct td_tensor *t, bool vector,
                                  struct td_weight *w) {
    w->format = t->dtype == TD_DTYPE_F32 ? TD_W_F32 : TD_W_BF16;
    TD_TRY(check_shape(b, t, w->rows, w->cols, vector));
    return td_files_aligned(b->files, t, &w->data, b->err);
}

td_status td_bind_linear(struct td_binder *b, const char *name, uint32_t rows, uint32_t cols,
                         struct td_weight *ret) {
    struct td_tensor *t;
    b->quantised |= !b->files && b->kind != TD_OUTLINE_BF16;
    if (!b->files) return outlined(b, name, outlined_linear(b, name), rows, cols, ret);
    TD_TRY(take(b, name, ".weight", &t));
    struct td_weight w = {.rows = rows, .cols = cols, .data = t->data};
    if (t->dtype == TD_DTYPE_BF16 || t->dtype == TD_DTYPE_F32)
        TD_TRY(bind_unquantised(b, t, false, &w));
    else if (t->dtype == TD_DTYPE_F8_E4M3)
        TD_TRY(bind_fp8(b, name, t, &w));
    else if (t->dtype == TD_DTYPE_I8)
        TD_TRY(bind_fp4(b, name, t, &w));
    else if (t->dtype == TD_DTYPE_U8)
        TD_TRY(bind_nvfp4(b, name, t, &w));
    else
        return wrong(b, t, "BF16, F32, F8_E4M3, I8 or U8", t->dtype_name);
    b->quantised |= w.format != TD_W_BF16 && w.format != TD_W_F32;
    *ret = w;
    return TD_OK;
}

td_status td_bind_stack(struct td_binder *b, const char *name, uint32_t n, uint32_t rows,
                        uint32_t cols, struct td_weight *ret) {
    struct td_tensor *t;
    char found[128], expected[128], with[160];
    TD_TRY(take(b, name, "", &t));
    if (t->dtype != TD_DTYPE_BF16 && t->dtype != TD_DTYPE_F32)
        return wrong(b, t, "BF16 or F32 (quantised experts one by one)", t->dtype_name);
    uint64_t want[3] = {n, rows, cols};
    if (t->rank != 3 || memcmp(t->shape, want, sizeof want) != 0) {
        snprintf(with, sizeof with, "shape %s", td_shape_text(want, 3, expected));
        return wrong(b, t, with, td_shape_text(t->shape, t->rank, found));
    }
    struct td_weight w = {
        .format = t->dtype == TD_DTYPE_F32 ? TD_W_F32 : TD_W_BF16, .rows = n * rows, .cols = cols};
    TD_TRY(td_files_aligned(b->files, t, &w.data, b->err));
    *ret = w;
    return TD_OK;
}

td_status td_bind_plain(struct td_binder *b, const char *name, uint32_t rows, uint32_t cols,
                        struct td_weight *ret) {
    struct td_tensor *t;
    if (!b->files) return outlined(b, name, TD_W_BF16, rows, cols, ret);
    TD_TRY(take(b, name, "", &t));
    if (t->dtype != TD_DTYPE_BF16 && t->dtype != TD_DTYPE_F32)
        return wrong(b, t, "BF16 or F32", t->dtype_name);
    struct td_weight w = {.rows = rows, .cols = cols};
    TD_TRY(bind_unquantised(b, t, rows == 1, &w));
    *ret = w;
    return TD_OK;
}

td_status td_bind_f32(struct td_binder *b, const char *name, uint32_t rows, uint32_t cols,
                      struct td_weight *ret) {
    struct td_tensor *t;
    if (!b->files) return outlined(b, name, TD_W_F32, rows, cols, ret);
    TD_TRY(take(b, name, "", &t));
    TD_TRY(check_dtype(b, t, TD_DTYPE_F32, "F32"));
    struct td_weight w = {.rows = rows, .cols = cols};
    TD_TRY(bind_unquantised(b, t, rows == 1, &w));
    *ret = w;
    return TD_OK;
}

td_status td_bind_ids(struct td_binder *b, const char *name, uint32_t rows, uint32_t cols,
                      uint32_t limit, const int64_t **ret) {
    static const int64_t none = 0; /* says that the layer has ids; nobody reads it */
    struct td_tensor *t;
    const void *data;
    if (!b->files) {
        b->bytes += (size_t)rows * cols * sizeof **ret;
        *ret = &none;
        if (!b->random) return TD_OK;
        char full[FULL_NAME];
        full_name(b, name, "", full);
        td_random_ids(b->seed, full, rows, cols, limit, b->ids);
        *ret = b->ids;
        b->ids += (size_t)rows * cols;
        return TD_OK;
    }
    TD_TRY(take(b, name, "", &t));
    TD_TRY(check_dtype(b, t, TD_DTYPE_I64, "I64"));
    TD_TRY(check_shape(b, t, rows, cols, false));
    TD_TRY(td_files_aligned(b->files, t, &data, b->err));
    const int64_t *ids = data;
    for (size_t i = 0; i < (size_t)rows * cols; i++) {
        if (ids[i] >= 0 && ids[i] < (int64_t)limit) continue;
        char expected[64], found[64];
        snprintf(expected, sizeof expected, "values from 0 to %u", limit - 1);
        snprintf(found, sizeof found, "%lld at [%zu, %zu]", (long long)ids[i], i / cols, i % cols);
        return wrong(b, t, expected, found);
    }
    *ret = ids;
    return TD_OK;
}

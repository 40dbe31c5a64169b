/* Taking tensors out of a checkpoint: by name, with dtype, shape and scales checked. Private to
 * the loader. */
#ifndef TD_KERNELS_MODEL_BIND_H
#define TD_KERNELS_MODEL_BIND_H

#include "kernels/model/checkpoint.h"
#include "kernels/model/model.h"

struct td_binder {
    /* NULL: no tensor is looked for; every one gets the format that `kind` says, shape as asked,
     * and no bytes (td_model_outline). */
    struct td_model_files *files;
    enum td_outline kind;
    bool random; /* with bytes computed from the name and the seed (td_model_random) */
    uint64_t seed;
    int64_t *ids;    /* room for the next tensor of ids */
    char prefix[64]; /* "layers.3." in front of every name below */
    size_t bytes;    /* of all tensors taken */
    bool quantised;  /* some matrix was F8_E4M3, I8 or U8 */
    struct td_error *err;
};

/* A matrix used in products, `name` without ".weight": BF16, F32, F8_E4M3 with .scale, I8 with
 * .scale, or U8 with .weight_scale, .weight_scale_2 and .input_scale. Scales and e4m3
 * weights that are NaN codes are refused. */
TD_MUST_USE td_status td_bind_linear(struct td_binder *b, const char *name, uint32_t rows,
                                     uint32_t cols, struct td_weight *ret);
bool td_bind_has(const struct td_binder *b, const char *name);
/* `n` matrices in one tensor [n, rows, cols], full name, BF16 or F32: as one matrix of n * rows
 * rows. */
TD_MUST_USE td_status td_bind_stack(struct td_binder *b, const char *name, uint32_t n,
                                    uint32_t rows, uint32_t cols, struct td_weight *ret);
/* A tensor that is never quantised, full name: BF16 or F32. rows == 1 stands for a vector. */
TD_MUST_USE td_status td_bind_plain(struct td_binder *b, const char *name, uint32_t rows,
                                    uint32_t cols, struct td_weight *ret);
/* F32 only, full name. */
TD_MUST_USE td_status td_bind_f32(struct td_binder *b, const char *name, uint32_t rows,
                                  uint32_t cols, struct td_weight *ret);
/* I64 [rows, cols] with every value in 0..limit-1. */
TD_MUST_USE td_status td_bind_ids(struct td_binder *b, const char *name, uint32_t rows,
                                  uint32_t cols, uint32_t limit, const int64_t **ret);

#endif

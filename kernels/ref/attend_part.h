/* The merging of two parts of a softmax, as kernels/ops.h has it. */
#ifndef TD_KERNELS_REF_ATTEND_PART_H
#define TD_KERNELS_REF_ATTEND_PART_H

#include <string.h>

#include "kernels/ops.h"
#include "kernels/ref/math.h"

/* Floats of a part of one row and head. */
enum { TD_PART_FLOATS = TD_HEAD_DIM + 2 };

/* What merging does with the values of a part, `own`, and of another: own stays (keep), the other's
 * are taken (take), or the ones of the lesser maximum are multiplied with the factor and added to
 * the others: greater says that own's maximum is. */
struct part_factor {
    bool keep, take, greater;
    float factor;
};

/* Merges m and l into `ml`. */
static inline struct part_factor merge_scalars(float *ml, const float *other) {
    struct part_factor f = {.keep = other[1] == 0.0f, .take = ml[1] == 0.0f};
    if (f.keep) return f;
    f.greater = !f.take && !(ml[0] < other[0]);
    f.factor = f.take ? 0.0f : exp1(f.greater ? other[0] - ml[0] : ml[0] - other[0]);
    ml[1] = f.take      ? other[1]
            : f.greater ? fmaf(other[1], f.factor, ml[1])
                        : fmaf(ml[1], f.factor, other[1]);
    if (!f.greater) ml[0] = other[0];
    return f;
}

static inline void merge_part(float *ml, float *acc, const float *other_ml, const float *other) {
    const struct part_factor f = merge_scalars(ml, other_ml);
    if (f.keep) return;
    for (uint32_t k = 0; k < TD_HEAD_DIM; k++)
        acc[k] = f.take      ? other[k]
                 : f.greater ? fmaf(other[k], f.factor, acc[k])
                             : fmaf(acc[k], f.factor, other[k]);
}

#endif

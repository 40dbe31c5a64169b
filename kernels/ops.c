/* Choice of the op table, and the sizes of the ops' working memory. */
#include "kernels/ops.h"

#include "kernels/ref/scratch.h"

const struct td_ops *td_ops_select(void) {
#ifdef TD_HAVE_V3
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &td_ops_v3;
#endif
    return &td_ops_base;
}

static size_t round64(size_t n) {
    return (n + 63) & ~(size_t)63;
}

size_t td_index_workspace(uint32_t heads, uint32_t topk) {
    size_t lanes = (size_t)TD_INDEX_ROWS * td_lanes(heads);
    size_t floats = lanes * (TD_INDEX_DIM + 1) + (size_t)TD_INDEX_TILE * TD_INDEX_ROWS;
    /* Per query: two lists of topk + a tile of 64-bit candidates, and 16 bytes of bookkeeping. */
    size_t lists = (size_t)TD_INDEX_ROWS * (2 * ((size_t)topk + TD_INDEX_TILE) * 8 + 16);
    return round64(floats * sizeof(float) + lists);
}

size_t td_op_scratch(uint32_t heads, uint32_t index_heads, uint32_t max_entries) {
    size_t lanes = td_lanes(heads), set = TD_WINDOW + (size_t)max_entries;
    size_t rows = (size_t)TD_ATTEND_BLOCKS * TD_BLOCK + TD_ATTEND_SPAN;
    size_t attend = rows * TD_ATTEND_ROW + (TD_HEAD_DIM + set) * lanes;
    size_t index =
        (size_t)TD_INDEX_KEYS * TD_INDEX_DIM + 8 * (size_t)TD_INDEX_ROWS * td_lanes(index_heads);
    return round64((attend > index ? attend : index) * sizeof(float));
}

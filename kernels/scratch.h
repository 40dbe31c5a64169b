/* Sizes that an op and the memory planner must agree on. */
#ifndef TD_KERNELS_SCRATCH_H
#define TD_KERNELS_SCRATCH_H

#include "kernels/ops.h"

enum {
    TD_ATTEND_ROW = TD_HEAD_DIM + 16, /* floats between decoded rows: not a power of two, so that
                                         a column of a block spreads over the cache */
    TD_ATTEND_BLOCKS = 2,             /* decoded blocks kept for the second pass */
    TD_ATTEND_SPAN = TD_WINDOW + 64,  /* decoded window rows kept for the next tokens */
    TD_ATTEND_NEAR = 32,              /* tokens whose windows are taken together at most, and */
    TD_ATTEND_QUERIES = 128,          /* their heads at most */
    TD_ATTEND_DOTS = 12 * TD_ATTEND_SPAN, /* dots of a tile's rows */
    TD_INDEX_KEYS = 64,                   /* keys decoded together */
};

/* The indexer's workspace on a GPU, where few queries share the processors. */
enum {
    TD_INDEX_SCORES = 8 << 20,           /* held at once: 32 queries at a million tokens */
    TD_INDEX_SPLIT_ROWS = 132,           /* queries in a launch at most, each with */
    TD_INDEX_DIGIT = 11,                 /* the bits of a score */
    TD_INDEX_BINS = 1 << TD_INDEX_DIGIT, /* that are counted */
    TD_INDEX_BINS_BYTES = TD_INDEX_SPLIT_ROWS * TD_INDEX_BINS * sizeof(uint32_t),
};
static inline size_t td_index_workspace_cuda(void) {
    return TD_INDEX_SCORES * sizeof(uint32_t);
}

/* Heads or queries side by side: whole vectors of 8. */
static inline uint32_t td_lanes(uint32_t n) {
    return (n + 7) & ~7u;
}

#endif

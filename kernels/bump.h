/* Plans and takes one block of memory with the same code: a first pass without a base counts, a
 * second pass hands out pieces. So the plan cannot disagree with the use. */
#ifndef TD_KERNELS_BUMP_H
#define TD_KERNELS_BUMP_H

#include <stddef.h>
#include <stdint.h>

struct td_bump {
    uint8_t *base; /* 64-aligned, or NULL while counting */
    size_t used;
};

/* 64-aligned; NULL while counting. */
static inline void *td_bump_take(struct td_bump *b, size_t bytes) {
    void *at = b->base ? b->base + b->used : NULL;
    b->used += (bytes + 63) & ~(size_t)63;
    return at;
}

#endif

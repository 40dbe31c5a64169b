/* Between the checksum's definition and its vector forms. */
#ifndef TD_COMMON_KV_CHECKSUM_SETS_H
#define TD_COMMON_KV_CHECKSUM_SETS_H

#include <stdbool.h>

#include "common/kv/checksum.h"

/* td_checksum_weight, apart and as vectors want them: a_lo, a_hi of word 0, of word 1, ...; b the
 * same. 64-aligned. */
struct td_checksum_weights {
    int16_t a[2 * TD_CHECKSUM_WORDS], b[2 * TD_CHECKSUM_WORDS];
};
extern const struct td_checksum_weights td_checksum_weights;

void td_checksum_lines_plain(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                             enum td_checksum_copy copy);
#ifdef __x86_64__
enum {
    TD_CHECKSUM_AHEAD = 4096, /* bytes, as the others */
    TD_CHECKSUM_LINES_AHEAD = 3072,
    TD_CHECKSUM_LINES_AHEAD_FAR = 4096,
};
/* What to ask for ahead of time: each line that is read, or one of each block of those and every
 * other line that a near copy writes (checksum_x86.c says why). */
enum td_checksum_ask { TD_CHECKSUM_ASK_LINES, TD_CHECKSUM_ASK_BLOCKS };
static inline enum td_checksum_ask td_checksum_asks(void) {
    return __builtin_cpu_is("amd") ? TD_CHECKSUM_ASK_LINES : TD_CHECKSUM_ASK_BLOCKS;
}
/* At line i of a block; called with constants. */
static inline __attribute__((always_inline)) void td_checksum_ask(enum td_checksum_ask what,
                                                                  size_t i, const uint8_t *from,
                                                                  const uint8_t *to,
                                                                  enum td_checksum_copy copy) {
    const bool lines = what == TD_CHECKSUM_ASK_LINES;
    if (lines && copy == TD_CHECKSUM_FAR)
        __builtin_prefetch(from + TD_CHECKSUM_LINES_AHEAD_FAR);
    else if (lines)
        __builtin_prefetch(from + TD_CHECKSUM_LINES_AHEAD);
    if (!lines && i == 0) __builtin_prefetch(from + TD_CHECKSUM_AHEAD);
    if (!lines && i % 2 == 0 && copy == TD_CHECKSUM_NEAR)
        __builtin_prefetch(to + TD_CHECKSUM_AHEAD, 1);
}
void td_checksum_lines_avx2(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                            enum td_checksum_copy copy);
void td_checksum_lines_vnni(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                            enum td_checksum_copy copy);
#endif

#endif

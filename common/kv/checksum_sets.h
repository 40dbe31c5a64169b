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
/* Whether a near copy asks for the lines it will write (checksum_x86.c). */
static inline bool td_checksum_asks(void) {
    return !__builtin_cpu_is("amd");
}
void td_checksum_lines_avx2(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                            enum td_checksum_copy copy);
void td_checksum_lines_vnni(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                            enum td_checksum_copy copy);
#endif

#endif

/* Byte pair merging of one piece, from its bytes to token ids. */
#ifndef TD_COMMON_TEXT_BPE_H
#define TD_COMMON_TEXT_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/ids.h"

struct td_bpe_slot {
    uint64_t pair; /* left id << 32 | right id */
    uint32_t rank; /* TD_BPE_NONE: free slot */
};

#define TD_BPE_NONE UINT32_MAX

/* Merge rules; constant after the last td_bpe_add. */
struct td_bpe {
    int32_t byte_id[256];
    struct td_bpe_slot *slots; /* [mask + 1] open addressing, at most half full */
    uint32_t mask;
    int32_t *product; /* [n] rank -> id of the merged token */
    uint32_t n, cap;
};

/* Room for `cap` rules, cap < 2^24. After a failure td_bpe_finish is allowed. */
TD_MUST_USE td_status td_bpe_init(struct td_bpe *b, uint32_t cap);
void td_bpe_finish(struct td_bpe *b);

/* Adds the rule of the next rank. TD_FORMAT: the pair has a rule already. */
TD_MUST_USE td_status td_bpe_add(struct td_bpe *b, int32_t left, int32_t right, int32_t product);

/* Appends the ids of a piece of n bytes: merges the adjacent pair of least rank, the leftmost
 * among equals, until no pair has a rule. O(n log n). TD_NO_MEMORY leaves `out` as it was. */
TD_MUST_USE td_status td_bpe_encode(const struct td_bpe *b, const uint8_t *piece, size_t n,
                                    struct td_ids *out);

#endif

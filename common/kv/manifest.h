/* The record that ends a handoff, and the count that proves it.
 *
 * Both sides feed a tally with the header of every block, in any order; each block counts exactly
 * once. Prefill puts its totals into the manifest; decode compares them with its own, and with what
 * N tokens must leave in each family. Decode never samples without a manifest that agrees. */
#ifndef TD_COMMON_KV_MANIFEST_H
#define TD_COMMON_KV_MANIFEST_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/kv/layout.h"
#include "common/kv/wire.h"

enum {
    TD_KV_MAX_TOKENS = 1 << 20, /* of one prompt */
    TD_KV_MAX_BLOCKS = TD_KV_MAX_TOKENS / TD_KV_PAGE_TOKENS + 1,
    TD_KV_MAX_TOP = 20,        /* alternatives with a logprob */
    TD_KV_MAX_FIRST = 8,       /* first tokens of one prompt */
    TD_KV_MAX_MATCHER = 65536, /* bytes */
};

/* One family over the whole handoff. `checksum` is the sum over blocks of td_checksum_part(the
 * block's checksum of this family, the block's index), so it depends on which block is where. */
struct td_kv_family_sum {
    uint64_t rows, bytes, checksum;
};

/* Caller-owned, no pointers. About 700 bytes. */
struct td_kv_tally {
    uint32_t n;      /* prompt tokens */
    uint32_t blocks; /* expected, slot block included */
    uint32_t seen;
    struct td_kv_family_sum family[TD_KV_FAMILIES];
    uint64_t have[(TD_KV_MAX_BLOCKS + 63) / 64];
};

/* `n` 1..TD_KV_MAX_TOKENS; INVALID otherwise. */
TD_MUST_USE td_status td_kv_tally_init(struct td_kv_tally *t, uint32_t n, struct td_error *err);
/* PROTOCOL, changing nothing, when the block was counted before or is not one of this handoff's. */
TD_MUST_USE td_status td_kv_tally_add(struct td_kv_tally *t, const struct td_kv_block_header *h,
                                      struct td_error *err);
static inline bool td_kv_tally_complete(const struct td_kv_tally *t) {
    return t->seen == t->blocks;
}
/* First block not yet counted; t->blocks when there is none. */
uint32_t td_kv_tally_missing(const struct td_kv_tally *t);

struct td_kv_top {
    int32_t token;
    float logprob;
};

struct td_kv_first_token {
    int32_t token;
    float logprob; /* natural logarithm */
    uint32_t n_top;
    struct td_kv_top top[TD_KV_MAX_TOP]; /* most probable first */
};

/* Plain values; how it is encoded is the protocol's business. */
struct td_kv_manifest {
    uint64_t decode_epoch, ticket;
    uint64_t prefill_epoch;
    uint64_t fingerprint; /* of the layout */
    uint64_t prompt_hash; /* td_prompt_hash of the N ids */
    uint32_t prompt_tokens;
    uint32_t blocks; /* slot block included */
    struct td_kv_family_sum family[TD_KV_FAMILIES];
    uint32_t n_first;
    struct td_kv_first_token first[TD_KV_MAX_FIRST];
    uint64_t seed;          /* of the sampler's counter-based generator */
    uint64_t next_position; /* of the next token to sample: N + 1 */
    const uint8_t *matcher; /* [matcher_len] grammar state; not owned; NULL when empty */
    uint32_t matcher_len;
};

/* What the receiver knows by itself. */
struct td_kv_expected {
    struct td_kv_ticket ticket;
    uint64_t prefill_epoch;
    uint64_t prompt_hash;
    uint32_t prompt_tokens;
    uint32_t n_first;
};

/* Prefill: everything that follows from the blocks. The caller adds first tokens, sampler and
 * matcher state. INVALID when the tally is not complete. */
TD_MUST_USE td_status td_kv_manifest_fill(struct td_kv_manifest *m, const struct td_kv_layout *l,
                                          const struct td_kv_expected *known,
                                          const struct td_kv_tally *t, struct td_error *err);

/* Decode: OK only if every value agrees. The sentence names the thing and both values.
 * STALE: ticket or epochs; MISMATCH: layout; CORRUPT: prompt, blocks or families that are missing
 * or different; PROTOCOL: values outside their limits. */
TD_MUST_USE td_status td_kv_manifest_verify(const struct td_kv_manifest *m,
                                            const struct td_kv_layout *l,
                                            const struct td_kv_expected *known,
                                            const struct td_kv_tally *t, struct td_error *err);

#endif

/* Which rank of a worker has which page, where ranks share the entries of a sequence.
 *
 * A page of 256 tokens, the wire block, is what is given out. By its absolute index in the sequence
 * it belongs to one of 8 logical shards, whatever the number of ranks, and 1 << split ranks (1, 2,
 * 4 or 8) have an equal stretch of the shards each. The shards are numbered so that 1 << split
 * neighbouring pages are on as many ranks: the host keeps one page number for all of them, which is
 * a page of 256 << split tokens, and no rank's pool fills before another's. */
#ifndef TD_COMMON_KV_SPLIT_H
#define TD_COMMON_KV_SPLIT_H

#include <stdint.h>

#include "common/base/hd.h"
#include "common/kv/layout.h"

enum { TD_KV_SHARDS = 8, TD_KV_MAX_SPLIT = 3 };

/* The shard of page `a`: the lowest three bits of `a`, reversed. Its own inverse below 8: the pages
 * of shard s are td_kv_shard(s), td_kv_shard(s) + 8, ... */
TD_HD static inline uint32_t td_kv_shard(uint32_t a) {
    return (a & 1) << 2 | (a & 2) | (a & 4) >> 2;
}
/* The rank that has the pages of a shard, of 1 << split ranks. */
TD_HD static inline uint32_t td_kv_shard_rank(uint32_t shard, uint32_t split) {
    return shard >> (TD_KV_MAX_SPLIT - split);
}
/* The rank that has page `a`. */
TD_HD static inline uint32_t td_kv_page_rank(uint32_t a, uint32_t split) {
    return td_kv_shard_rank(td_kv_shard(a), split);
}
/* Tokens of what the host calls a page. */
TD_HD static inline uint32_t td_kv_page_tokens(uint32_t split) {
    return (uint32_t)TD_KV_PAGE_TOKENS << split;
}
/* Such pages of n tokens. */
TD_HD static inline uint32_t td_kv_pages(uint32_t n, uint32_t split) {
    return n / td_kv_page_tokens(split) + (n % td_kv_page_tokens(split) != 0);
}

/* `pages`: the host's pages of a sequence, from that of block `first` on. That of block i. */
static inline uint32_t td_kv_page_of_block(const uint32_t *pages, uint32_t first, uint32_t i,
                                           uint32_t split) {
    return pages[(i >> split) - (first >> split)];
}

#endif

/* The running top-k of the indexer, by one block: a list of 64-bit candidates in shared memory,
 * ascending by entry, cut to the k greatest when a tile of new ones was added. Any two candidates
 * differ, so the chosen set is unique however the work is cut. */
#ifndef TD_KERNELS_CUDA_TOPK_H
#define TD_KERNELS_CUDA_TOPK_H

#include "kernels/cuda/op.h"

enum { TD_TOPK_THREADS = 256 };

/* In shared memory, besides the list; how long that is every thread knows. */
struct td_topk {
    uint64_t floor; /* only greater candidates matter; 0 until the list was cut once */
    uint32_t want, digit;
    uint32_t bin[256], differ[TD_TOPK_THREADS / 32];
    uint32_t warp[2][TD_TOPK_THREADS / 32]; /* by turns, so that one barrier is enough */
};

static __device__ inline uint64_t td_candidate(float score, bool bf16, uint32_t entry) {
    if (bf16) score = td_bf16_to_f32(td_f32_to_bf16(score));
    return td_index_candidate(td_f32_bits(score), entry);
}

/* ---- the keys that a rank has, numbered without gaps; of a rank that has all, by entry ---- */

/* The first page that is the rank's; every 1 << split-th from there is. */
static __device__ inline uint32_t td_own_page(const struct td_op_batch *b) {
    return td_kv_shard(b->rank << (TD_KV_MAX_SPLIT - b->split));
}
/* How many of the first `visible` keys are the rank's. */
static __device__ inline uint32_t td_own_keys(const struct td_op_batch *b, uint32_t visible) {
    uint32_t own = td_own_page(b), pages = visible / TD_KV_CSA_PER_PAGE, all = (1u << b->split) - 1;
    uint32_t keys = ((pages + all - own) >> b->split) * TD_KV_CSA_PER_PAGE;
    return keys + ((pages & all) == own ? visible % TD_KV_CSA_PER_PAGE : 0);
}
/* The entry of the rank's key x, which lies in run->pages[x / TD_KV_CSA_PER_PAGE]. */
static __device__ inline uint32_t td_own_entry(const struct td_op_batch *b, uint32_t x) {
    uint32_t page = (x / TD_KV_CSA_PER_PAGE << b->split) + td_own_page(b);
    return page * TD_KV_CSA_PER_PAGE + x % TD_KV_CSA_PER_PAGE;
}

/* Entry e of what is kept of row i, of `count`: chosen or, with `candidate`, one of the rank's. */
static __device__ inline void td_put_chosen(int32_t *selected, uint64_t *candidate, size_t at,
                                            bool there, uint64_t c) {
    if (candidate)
        candidate[at] = there ? c : 0;
    else
        selected[at] = there ? (int32_t)td_index_entry(c) : -1;
}

/* The place of this thread's item among those of all threads that keep one, in thread order;
 * *ret_all is their number. `turn` alternates from call to call. */
static __device__ inline uint32_t td_topk_place(struct td_topk *k, uint32_t turn, bool keep,
                                                uint32_t *ret_all) {
    uint32_t t = threadIdx.x, mask = __ballot_sync(0xffffffffu, keep), before = 0, all = 0;
    uint32_t *warp = k->warp[turn % 2];
    if (t % 32 == 0) warp[t / 32] = (uint32_t)__popc(mask);
    __syncthreads();
    for (uint32_t i = 0; i < TD_TOPK_THREADS / 32; i++) {
        before += i < t / 32 ? warp[i] : 0;
        all += warp[i];
    }
    *ret_all = all;
    return before + (uint32_t)__popc(mask & ((1u << t % 32) - 1u));
}

/* Appends this thread's candidate to the list of `count` when it is one that matters; threads in
 * order of entries. Returns the new count; others see the list after a barrier. */
static __device__ inline uint32_t td_topk_add(struct td_topk *k, uint64_t *list, uint32_t turn,
                                              uint32_t count, uint64_t c, bool valid) {
    uint32_t all;
    bool keep = valid && c > k->floor;
    uint32_t place = td_topk_place(k, turn, keep, &all);
    if (keep) list[count + place] = c;
    return count + all;
}

/* The digit in whose bin the want-th greatest lies, by the first warp: *ret_digit and what is still
 * wanted of that bin. A lane has eight bins. */
static __device__ inline void td_topk_digit(struct td_topk *k) {
    uint32_t lane = threadIdx.x, own = 0, above;
    for (uint32_t i = 0; i < 8; i++)
        own += k->bin[8 * lane + i];
    above = own;
    for (int by = 1; by < 32; by *= 2) {
        uint32_t o = __shfl_down_sync(0xffffffffu, above, (unsigned)by);
        above += lane + by < 32 ? o : 0;
    }
    above -= own; /* in lanes behind this one */
    uint32_t want = k->want;
    __syncwarp();
    if (above < want && want <= above + own) {
        uint32_t digit = 8 * lane + 7;
        want -= above;
        for (; k->bin[digit] < want; digit--)
            want -= k->bin[digit];
        k->want = want;
        k->digit = digit;
    }
}

/* Cuts the list of `count` to the `topk` greatest, order kept: the topk-th greatest is found eight
 * bits at a time, from the first in which scores differ, until all of the last bin is wanted.
 * Returns the new count. */
static __device__ inline uint32_t td_topk_cut(struct td_topk *k, uint64_t *list, uint32_t count,
                                              uint32_t topk) {
    uint32_t t = threadIdx.x, differ = 0;
    if (count <= topk) return count; /* the whole block */
    __syncthreads();
    uint32_t one = (uint32_t)(list[0] >> 32);
    for (uint32_t i = t; i < count; i += TD_TOPK_THREADS)
        differ |= (uint32_t)(list[i] >> 32) ^ one;
    for (int by = 16; by > 0; by /= 2)
        differ |= __shfl_xor_sync(0xffffffffu, differ, by);
    if (t % 32 == 0) k->differ[t / 32] = differ;
    if (t == 0) k->want = topk;
    __syncthreads();
    differ = 0;
    for (uint32_t i = 0; i < TD_TOPK_THREADS / 32; i++)
        differ |= k->differ[i];
    int shift = differ ? 32 + 24 - __clz((int)differ) : 24; /* of the digit at hand */
    int bits = 8;
    uint64_t fixed = shift == 56 ? 0 : ~(uint64_t)0 << (shift + 8), prefix = list[0] & fixed;
    for (;;) {
        k->bin[t] = 0;
        __syncthreads();
        for (uint32_t i = t; i < count; i += TD_TOPK_THREADS)
            if (((list[i] ^ prefix) & fixed) == 0)
                atomicAdd(&k->bin[list[i] >> shift & ((1u << bits) - 1u)], 1u);
        __syncthreads();
        if (t < 32) td_topk_digit(k);
        __syncthreads();
        prefix |= (uint64_t)k->digit << shift;
        fixed = ~(uint64_t)0 << shift;
        bool whole = k->bin[k->digit] == k->want;
        __syncthreads();
        if (whole || shift == 0) break;
        bits = shift < 8 ? shift : 8;
        shift -= bits;
    }
    uint32_t kept = 0, all, turn = 0;
    for (uint32_t from = 0; from < count; from += TD_TOPK_THREADS, turn++) {
        uint64_t c = from + t < count ? list[from + t] : 0;
        bool keep = from + t < count && c >= prefix;
        uint32_t place = td_topk_place(k, turn, keep, &all);
        if (keep) list[kept + place] = c; /* never behind what is still to be read */
        kept += all;
    }
    if (t == 0) k->floor = prefix - 1; /* the prefix itself may be a candidate still to come */
    __syncthreads();
    return kept;
}

#endif

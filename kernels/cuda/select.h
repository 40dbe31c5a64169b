/* The k greatest of a query's scores, which lie in device memory: a block is one query. The
 * greatest digit of the k-th one is known from a histogram that the scoring blocks filled together;
 * what is left of it is found by counting once or twice more, with scores in registers. Equal
 * scores: the lower entry, which is a place in the order that is written anyway.
 *
 * A warp has one stretch of the scores. What it keeps of 1,024 of them are 32 words of bits, so
 * that places are sums of counted bits. */
#ifndef TD_KERNELS_CUDA_SELECT_H
#define TD_KERNELS_CUDA_SELECT_H

#include "kernels/cuda/topk.h"
#include "kernels/scratch.h"

enum {
    TD_SELECT_THREADS = 1024,
    TD_SELECT_WARPS = TD_SELECT_THREADS / 32,
    TD_SELECT_DIGIT = TD_INDEX_DIGIT,
    TD_SELECT_BINS = TD_INDEX_BINS, /* two a thread */
};

struct td_select {
    struct td_op_batch b;
    uint32_t topk, stride;
    bool bf16;             /* scores have 16 bits */
    const uint32_t *score; /* [rows, stride] upper words of candidates, own keys */
    uint32_t *histogram;   /* [rows, TD_SELECT_BINS] of the upper digit; left zeroed */
    int32_t *selected;     /* [rows, topk] or */
    uint64_t *candidate;
};

struct td_select_shared {
    uint32_t bin[TD_SELECT_BINS];
    uint32_t total[TD_SELECT_WARPS], greater[TD_SELECT_WARPS], equal[TD_SELECT_WARPS];
    uint32_t digit, want, there;
};

/* Of 32 numbers, one a lane, the sum of those in lanes that `mine` says. */
static __device__ inline uint32_t td_select_sum(uint32_t v, bool mine) {
    v = mine ? v : 0;
    for (int by = 16; by > 0; by /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, by);
    return v;
}

/* The bin in which the want-th greatest lies, a thread having bins 2 t and 2 t + 1: s->digit, what
 * is wanted of it and how many are in it. Ends with a barrier. */
static __device__ inline void td_select_bin(struct td_select_shared *s, uint2 own, uint32_t want) {
    uint32_t t = threadIdx.x, lane = t % 32, warp = t / 32, both = own.x + own.y, above = both;
    for (int by = 1; by < 32; by *= 2) {
        uint32_t o = __shfl_down_sync(0xffffffffu, above, (unsigned)by);
        above += lane + (uint32_t)by < 32 ? o : 0;
    }
    if (lane == 0) s->total[warp] = above;
    above -= both;
    __syncthreads();
    above += td_select_sum(s->total[lane], lane > warp);
    if (above < want && want <= above + both) {
        bool upper = want <= above + own.y;
        s->digit = 2 * t + upper;
        s->want = want - above - (upper ? 0 : own.y);
        s->there = upper ? own.y : own.x;
    }
    __syncthreads();
}

/* A warp's 32 words of 32 scores each, from x on; a lane has one of each word. What is not there is
 * the least. */
static __device__ inline void td_select_load(const uint32_t *score, uint32_t x, uint32_t n,
                                             uint32_t *v) {
    uint32_t lane = threadIdx.x % 32, left = x + lane < n ? n - x - lane : 0;
#pragma unroll
    for (uint32_t j = 0; j < 32; j++)
        v[j] = j * 32 < left ? score[x + j * 32 + lane] : 0;
}

/* Of word `lane` which scores are greater than all that share the k-th one's prefix, and which
 * share it. */
static __device__ inline void td_select_bits(const uint32_t *v, uint32_t x, uint32_t n,
                                             uint32_t least, uint32_t most, uint32_t *ret_greater,
                                             uint32_t *ret_equal) {
    uint32_t lane = threadIdx.x % 32, above = 0, from = 0, word = x + lane * 32;
#pragma unroll
    for (uint32_t j = 0; j < 32; j++) {
        uint32_t g = __ballot_sync(0xffffffffu, v[j] > most);
        uint32_t f = __ballot_sync(0xffffffffu, v[j] >= least);
        above = lane == j ? g : above;
        from = lane == j ? f : from;
    }
    uint32_t there = word >= n ? 0 : n - word >= 32 ? 0xffffffffu : (1u << (n - word)) - 1u;
    *ret_greater = above & there;
    *ret_equal = from & ~above & there;
}

/* The first `n` set bits. */
static __device__ inline uint32_t td_select_first(uint32_t bits, uint32_t n) {
    uint32_t left = bits;
    if (n >= (uint32_t)__popc(bits)) return bits;
    for (; n > 0; n--)
        left &= left - 1u;
    return bits & ~left;
}

static __global__ void __launch_bounds__(TD_SELECT_THREADS)
    td_select_rows(const __grid_constant__ struct td_select a) {
    __shared__ struct td_select_shared s;
    uint32_t i = blockIdx.x, t = threadIdx.x, lane = t % 32, warp = t / 32;
    uint32_t visible = (a.b.row[i].pos + 1) / TD_CSA_RATIO;
    size_t to = (size_t)i * a.topk;
    s.bin[t] = 0;
    s.bin[t + TD_SELECT_THREADS] = 0;
    td_launch_wait();
    if (visible <= a.topk) { /* the whole block */
        for (uint32_t e = t; !a.candidate && e < a.topk; e += TD_SELECT_THREADS)
            a.selected[to + e] = e < visible ? (int32_t)e : -1;
        return;
    }
    uint32_t n = td_own_keys(&a.b, visible), stretch = td_ceil(n, TD_SELECT_WARPS * 32) * 32;
    uint32_t begin = warp * stretch, end = begin + stretch < n ? begin + stretch : n;
    bool once = stretch <= 1024; /* a warp's scores stay in its registers */
    const uint32_t *score = a.score + (size_t)i * a.stride;
    uint2 *counted = (uint2 *)(void *)(a.histogram + (size_t)i * TD_SELECT_BINS) + t;
    uint2 own = *counted, zero = {0, 0};
    uint32_t v[32];
    td_select_load(score, begin, end, v);
    *counted = zero;
    uint32_t least = 0, most = 0xffffffffu, want = n; /* all, by their order */
    if (n > a.topk) {
        int shift = 32 - TD_SELECT_DIGIT, last = a.bf16 ? 32 - 2 * TD_SELECT_DIGIT : 0;
        want = a.topk;
        td_select_bin(&s, own, want);
        for (;;) {
            least |= s.digit << shift;
            most = least | ((1u << shift) - 1u);
            want = s.want;
            if (s.there == want || shift <= last) break;
            int bits = shift < TD_SELECT_DIGIT ? shift : TD_SELECT_DIGIT;
            shift -= bits;
            for (uint32_t x = begin; x < end; x += 1024) {
                if (!once) td_select_load(score, x, end, v);
#pragma unroll
                for (uint32_t j = 0; j < 32; j++)
                    if (v[j] - least <= most - least)
                        atomicAdd(&s.bin[(v[j] - least) >> shift], 1u);
            }
            __syncthreads();
            own.x = s.bin[2 * t];
            own.y = s.bin[2 * t + 1];
            s.bin[2 * t] = 0;
            s.bin[2 * t + 1] = 0;
            td_select_bin(&s, own, want);
        }
    }
    uint32_t greater = 0, equal = 0, g = 0, e = 0;
    for (uint32_t x = begin; x < end; x += 1024) {
        if (!once) td_select_load(score, x, end, v);
        td_select_bits(v, x, end, least, most, &g, &e);
        greater += (uint32_t)__popc(g);
        equal += (uint32_t)__popc(e);
    }
    greater = td_select_sum(greater, true);
    equal = td_select_sum(equal, true);
    if (lane == 0) {
        s.greater[warp] = greater;
        s.equal[warp] = equal;
    }
    __syncthreads();
    greater = td_select_sum(s.greater[lane], lane < warp); /* before this warp's */
    equal = td_select_sum(s.equal[lane], lane < warp);
    for (uint32_t x = begin; x < end; x += 1024) {
        if (!once) {
            td_select_load(score, x, end, v);
            td_select_bits(v, x, end, least, most, &g, &e);
        }
        uint32_t gs = (uint32_t)__popc(g), es = (uint32_t)__popc(e), before = gs | es << 16;
        for (int by = 1; by < 32; by *= 2) { /* both at once: no more than 1,024 each */
            uint32_t o = __shfl_sync(0xffffffffu, before, (int)lane - by);
            before += (int)lane >= by ? o : 0;
        }
        uint32_t all = __shfl_sync(0xffffffffu, before, 31);
        uint32_t ahead = equal + (before >> 16) - es, place = greater + (before & 0xffffu) - gs;
        uint32_t bits = g | td_select_first(e, ahead < want ? want - ahead : 0);
        place += ahead < want ? ahead : want;
        for (; bits; bits &= bits - 1u, place++) {
            uint32_t key = x + lane * 32 + 31u - (uint32_t)__clz((int)(bits & (0u - bits)));
            uint32_t entry = td_own_entry(&a.b, key);
            if (a.candidate)
                a.candidate[to + place] = (uint64_t)score[key] << 32 | (0xffffffffu - entry);
            else
                a.selected[to + place] = (int32_t)entry;
        }
        greater += all & 0xffffu;
        equal += all >> 16;
    }
    for (uint32_t at = n + t; at < a.topk; at += TD_SELECT_THREADS)
        td_put_chosen(a.selected, a.candidate, to + at, false, 0);
}

#endif

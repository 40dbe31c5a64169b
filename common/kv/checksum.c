/* The checksum on the CPU. The body is plain C over 32 independent lanes; gcc turns it into vector
 * code, once for every x86-64 and once for AVX2, chosen at run time. */
#include "common/kv/checksum.h"

#include <string.h>

enum {
    BLOCK = TD_CHECKSUM_BLOCK,
    LANES = TD_CHECKSUM_LANES,
    ROUNDS = BLOCK / 4 / LANES,
};

_Static_assert(BLOCK == ROUNDS * LANES * 4, "a block is a whole number of rounds");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read in host order");

/* Lanes as vectors: gcc splits them where the machine's are shorter, and keeps a block's state in
 * registers, which it does not do for arrays. */
enum { WIDTH = 8, VECTORS = LANES / WIDTH };
typedef uint32_t v32 __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t v32_any __attribute__((vector_size(WIDTH * 4), aligned(1), may_alias));
typedef uint64_t v64 __attribute__((vector_size(WIDTH * 4)));

/* Adds td_mix64 of four keys. By pointer: vectors as arguments would depend on the machine. */
static inline __attribute__((always_inline)) void add_mixed(v64 *sum, const v64 *key) {
    v64 x = *key;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 29;
    x *= 0xA0761D6478BD642Fu;
    *sum += x ^ x >> 32;
}

/* Sum of the contributions of `blocks` whole blocks, the first of which is number `first`. */
static inline __attribute__((always_inline)) uint64_t sum_blocks(const uint8_t *p, size_t blocks,
                                                                 uint64_t first) {
    const v32 iota = {0, 1, 2, 3, 4, 5, 6, 7};
    v64 sum = {0};
    for (size_t b = 0; b < blocks; b++, p += BLOCK) {
        const uint32_t name = (uint32_t)((first + b) * LANES);
        v32 a[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            a[v] = TD_CHECKSUM_SEED * (iota + 1 + WIDTH * v);
#pragma GCC unroll 8
        for (int r = 0; r < ROUNDS; r++) {
            const v32_any *w = (const v32_any *)(const void *)(p + r * LANES * 4);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                a[v] = (a[v] ^ w[v]) * TD_CHECKSUM_MUL;
                a[v] ^= a[v] >> 15;
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            /* Even and odd lanes of the vector, each with its name in the upper half. */
            v64 lanes = (v64)(name + WIDTH * v + iota), state = (v64)a[v];
            v64 even = lanes << 32 | (state & 0xFFFFFFFFu);
            v64 odd = (lanes & ~(uint64_t)0xFFFFFFFFu) | state >> 32;
            add_mixed(&sum, &even);
            add_mixed(&sum, &odd);
        }
    }
    return sum[0] + sum[1] + sum[2] + sum[3];
}

static uint64_t sum_any(const uint8_t *p, size_t blocks, uint64_t first) {
    return sum_blocks(p, blocks, first);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static uint64_t sum_avx2(const uint8_t *p, size_t blocks,
                                                         uint64_t first) {
    return sum_blocks(p, blocks, first);
}
#endif

static uint64_t finish(const uint8_t *p, size_t len,
                       uint64_t (*sum)(const uint8_t *, size_t, uint64_t)) {
    size_t blocks = len / BLOCK, tail = len % BLOCK;
    uint64_t total = blocks ? sum(p, blocks, 0) : 0;
    if (tail) {
        uint8_t last[BLOCK] = {0};
        memcpy(last, p + blocks * BLOCK, tail);
        total += sum(last, 1, blocks);
    }
    return td_mix64(total + td_mix64(len + 1));
}

uint64_t td_checksum(const void *bytes, size_t len) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) return finish(bytes, len, sum_avx2);
#endif
    return finish(bytes, len, sum_any);
}

uint64_t td_checksum_portable(const void *bytes, size_t len) {
    return finish(bytes, len, sum_any);
}

uint64_t td_prompt_hash(const int32_t *ids, size_t n) {
    return td_checksum(ids, n * sizeof *ids);
}

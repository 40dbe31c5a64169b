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

/* Sum of the contributions of `blocks` whole blocks, the first of which is number `first`. */
static inline __attribute__((always_inline)) uint64_t sum_blocks(const uint8_t *p, size_t blocks,
                                                                 uint64_t first) {
    uint64_t sum[LANES] = {0};
    for (size_t b = 0; b < blocks; b++, p += BLOCK) {
        uint32_t a[LANES];
        for (uint32_t j = 0; j < LANES; j++)
            a[j] = TD_CHECKSUM_SEED * (j + 1);
        for (int r = 0; r < ROUNDS; r++) {
            uint32_t w[LANES];
            memcpy(w, p + r * sizeof w, sizeof w);
            for (int j = 0; j < LANES; j++) {
                uint32_t x = (a[j] ^ w[j]) * TD_CHECKSUM_MUL;
                a[j] = x ^ (x >> 15);
            }
        }
        uint64_t name = (first + b) * LANES;
        for (uint32_t j = 0; j < LANES; j++)
            sum[j] += td_mix64((name + j) << 32 | a[j]);
    }
    uint64_t total = 0;
    for (int j = 0; j < LANES; j++)
        total += sum[j];
    return total;
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

static uint64_t sum(const uint8_t *p, size_t blocks, uint64_t first) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) return sum_avx2(p, blocks, first);
#endif
    return sum_any(p, blocks, first);
}

uint64_t td_checksum(const void *bytes, size_t len) {
    const uint8_t *p = bytes;
    size_t blocks = len / BLOCK, tail = len % BLOCK;
    uint64_t total = blocks ? sum(p, blocks, 0) : 0;
    if (tail) {
        uint8_t last[BLOCK] = {0};
        memcpy(last, p + blocks * BLOCK, tail);
        total += sum(last, 1, blocks);
    }
    return td_mix64(total + td_mix64(len + 1));
}

uint64_t td_prompt_hash(const int32_t *ids, size_t n) {
    return td_checksum(ids, n * sizeof *ids);
}

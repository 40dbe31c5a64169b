/* One checksum for KV bytes, the same on CPU and GPU.
 *
 * Definition, over `len` bytes:
 *   - cut into blocks of 1,024 bytes, the last one padded with zero bytes;
 *   - a block is 256 little-endian u32 words; word i (0..255) has halves lo and hi, read as signed
 *     16-bit numbers, and the weights of td_checksum_weight(i); modulo 2^32
 *         A = sum over i of lo * a_lo + hi * a_hi
 *         B = sum over i of lo * b_lo + hi * b_hi
 *   - block number n contributes td_mix64((B << 32 | A) ^ (n + 1) * TD_CHECKSUM_NAME);
 * contributions are added mod 2^64, so blocks, and words inside them, may be computed in any order
 * by anyone;
 *   - the result is td_mix64(sum + td_mix64(len + 1)).
 *
 * What is always seen, by arithmetic and not by luck, where it stays inside one block: a change
 * of one word, whatever the bits (a word's two-by-two weights have an odd determinant, so no
 * difference of halves below 2^16 makes A and B both the same), and two words exchanged (for every
 * pair of words the determinant of their weights' differences has at most 15 factors of two; the
 * test looks at all 32,640 pairs). Anything else passes with a chance of about 2^-64. It finds
 * faults, not forgers.
 *
 * Products of 16 bits because that is the product every vector unit adds up fastest: one
 * instruction for 32 of them where there is VNNI, two on AVX2. */
#ifndef TD_COMMON_KV_CHECKSUM_H
#define TD_COMMON_KV_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/hd.h"

enum {
    TD_CHECKSUM_BLOCK = 1024, /* bytes */
    TD_CHECKSUM_WORDS = TD_CHECKSUM_BLOCK / 4,
};
#define TD_CHECKSUM_NAME 0x9E3779B97F4A7C15u

/* Bijection of 64 bits in which every input bit reaches every output bit. A macro as well, because
 * the weights are constants. */
#define TD_MIX64(x) TD_MIX64_SHIFT(TD_MIX64_SECOND(TD_MIX64_FIRST(x)))
#define TD_MIX64_FIRST(x) (((x) ^ (x) >> 32) * 0xD6E8FEB86659FD93u)
#define TD_MIX64_SECOND(x) (((x) ^ (x) >> 29) * 0xA0761D6478BD642Fu)
#define TD_MIX64_SHIFT(x) ((x) ^ (x) >> 32)

TD_HD static inline uint64_t td_mix64(uint64_t x) {
    x = TD_MIX64_FIRST(x);
    x = TD_MIX64_SECOND(x);
    return TD_MIX64_SHIFT(x);
}

/* The weights of word i as signed 16-bit numbers, lowest first: a_lo, a_hi, b_lo, b_hi. a_lo and
 * b_hi are made odd and a_hi even: the determinant is odd. */
#define TD_CHECKSUM_ODD 0x0001000000000001u
#define TD_CHECKSUM_EVEN 0x0000000000010000u
#define TD_CHECKSUM_WEIGHT(i)                                                                      \
    ((TD_MIX64((uint64_t)(i) + 1) | TD_CHECKSUM_ODD) & ~(uint64_t)TD_CHECKSUM_EVEN)

TD_HD static inline uint64_t td_checksum_weight(uint32_t i) {
    return (td_mix64((uint64_t)i + 1) | TD_CHECKSUM_ODD) & ~(uint64_t)TD_CHECKSUM_EVEN;
}

/* What block number n adds, from its A and B. */
TD_HD static inline uint64_t td_checksum_contribution(uint32_t a, uint32_t b, uint64_t n) {
    return td_mix64(((uint64_t)b << 32 | a) ^ (n + 1) * TD_CHECKSUM_NAME);
}

/* The result from the sum of the contributions of all of `len` bytes. */
TD_HD static inline uint64_t td_checksum_end(uint64_t sum, uint64_t len) {
    return td_mix64(sum + td_mix64(len + 1));
}

/* Any length, any alignment. */
uint64_t td_checksum(const void *bytes, size_t len);

/* ---- while copying ----
 * Bytes are summed on their way from one place to another and read once for both: memory is what
 * a copy waits for, the sum has its time for nothing, and what was summed is what was written even
 * if the source changes meanwhile. */

enum { TD_CHECKSUM_LINE = 64 }; /* bytes */

/* A sum under way. Starts zeroed. */
struct td_checksum_run {
    uint64_t lines, sum; /* lines so far; contributions of their whole blocks */
    uint32_t a, b;       /* of the block begun */
};

enum td_checksum_copy {
    TD_CHECKSUM_READ, /* no copy */
    TD_CHECKSUM_NEAR, /* to memory that is read again soon */
    TD_CHECKSUM_FAR,  /* to memory that is not, past the caches where it is 64-aligned;
                         td_checksum_settle before another thread may read it */
};

/* The next `lines` lines, copied as `copy` says; `to` and `from` need not be aligned. */
void td_checksum_lines(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                       enum td_checksum_copy copy);
/* The checksum of all lines and `len` < TD_CHECKSUM_LINE bytes behind them. */
uint64_t td_checksum_finish(const struct td_checksum_run *r, const void *rest, size_t len);
void td_checksum_settle(void);

/* Number i of the ways to compute it that this processor has, the best one first and the plain
 * definition last; NULL beyond them. For the test that compares them. */
struct td_checksum_set {
    const char *name;
    void (*lines)(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                  enum td_checksum_copy copy);
};
const struct td_checksum_set *td_checksum_set(uint32_t i);

/* What the checksum of part `index` adds to a whole made of numbered parts. The whole is the sum
 * (mod 2^64) over its parts: it depends on which part is where, but not on the order of arrival. */
static inline uint64_t td_checksum_part(uint64_t checksum, uint32_t index) {
    return td_mix64(checksum ^ td_mix64((uint64_t)index + 1));
}

/* Hash of a prompt's token ids [n], in order. */
uint64_t td_prompt_hash(const int32_t *ids, size_t n);

#endif

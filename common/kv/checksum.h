/* One checksum for KV bytes, the same on CPU and GPU.
 *
 * Definition, over `len` bytes:
 *   - cut into blocks of 1,024 bytes, the last one padded with zero bytes;
 *   - a block is 256 little-endian u32 words; lane j of 32 takes words j, j + 32, ..., j + 224:
 *         a = TD_CHECKSUM_SEED * (j + 1)
 *         for each word w:  a = (a ^ w) * TD_CHECKSUM_MUL;  a = a ^ (a >> 15)    (mod 2^32)
 *   - a lane contributes td_mix64((block * 32 + j) << 32 | a); contributions are added mod 2^64,
 *     so blocks and lanes may be computed in any order and by anyone;
 *   - the result is td_mix64(sum + td_mix64(len + 1)).
 *
 * Every step is a bijection of the lane's state, of a word, and of a contribution: a change that
 * stays inside one lane's one word is always seen. Others pass with a chance of about 2^-32 (inside
 * one lane) or 2^-64. The shift after the product carries high bits down; without it two swapped
 * words that differ in their top bit only would look the same. It finds faults, not forgers. */
#ifndef TD_COMMON_KV_CHECKSUM_H
#define TD_COMMON_KV_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

enum {
    TD_CHECKSUM_BLOCK = 1024, /* bytes */
    TD_CHECKSUM_LANES = 32,
};
#define TD_CHECKSUM_SEED 0x9E3779B1u
#define TD_CHECKSUM_MUL 0x85EBCA77u

/* Bijection of 64 bits in which every input bit reaches every output bit. */
static inline uint64_t td_mix64(uint64_t x) {
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 29;
    x *= 0xA0761D6478BD642Fu;
    return x ^ x >> 32;
}

/* `len` up to 128 GiB (a block number is 27 bits of the lane's name); any alignment. */
uint64_t td_checksum(const void *bytes, size_t len);
/* The same value without AVX2; for the test that compares the two. */
uint64_t td_checksum_portable(const void *bytes, size_t len);

/* What the checksum of part `index` adds to a whole made of numbered parts. The whole is the sum
 * (mod 2^64) over its parts: it depends on which part is where, but not on the order of arrival. */
static inline uint64_t td_checksum_part(uint64_t checksum, uint32_t index) {
    return td_mix64(checksum ^ td_mix64((uint64_t)index + 1));
}

/* Hash of a prompt's token ids [n], in order. */
uint64_t td_prompt_hash(const int32_t *ids, size_t n);

#endif

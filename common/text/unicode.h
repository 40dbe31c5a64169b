/* UTF-8 and the few character classes the splitters need, for Unicode 16.0 (the version inside
 * Hugging Face `tokenizers`; a character that changes category changes token ids). */
#ifndef TD_COMMON_TEXT_UNICODE_H
#define TD_COMMON_TEXT_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bits of a class: general categories \p{L} \p{M} \p{N} \p{P} \p{S}; White_Space; CR or LF; the
 * ranges U+4E00..9FA5 and U+3040..30FF. */
enum {
    TD_UC_L = 1,
    TD_UC_M = 2,
    TD_UC_N = 4,
    TD_UC_P = 8,
    TD_UC_S = 16,
    TD_UC_SPACE = 32,
    TD_UC_EOL = 64,
    TD_UC_CJK = 128
};

/* Generated (unicode_table.c). */
extern const uint8_t td_unicode_bits[16];   /* class number -> bits */
extern const uint8_t td_unicode_ascii[128]; /* code point -> bits */
extern const uint8_t td_unicode_root[272];  /* code point / 4096 -> node */
extern const uint8_t td_unicode_node[][32]; /* [node][code point / 128 % 32] -> leaf */
extern const uint64_t td_unicode_leaf[][8]; /* [leaf]: 128 class numbers of 4 bits */

/* Bits of a code point < 0x110000. */
static inline uint8_t td_unicode_class(uint32_t cp) {
    if (cp < 128) return td_unicode_ascii[cp];
    uint32_t leaf = td_unicode_node[td_unicode_root[cp >> 12]][cp >> 7 & 31];
    return td_unicode_bits[td_unicode_leaf[leaf][cp >> 4 & 7] >> (cp & 15) * 4 & 15];
}

/* Decodes the code point at p[0..n), n >= 1. Returns its length and the code point; 0 if the bytes
 * are the beginning of one that needs more than n; -k if they are not UTF-8, k being the length of
 * the maximal subpart (what one U+FFFD stands for). */
int td_utf8_decode(const uint8_t *p, size_t n, uint32_t *ret_cp);

/* Encodes a code point < 0x110000, no surrogate; returns its length. */
size_t td_utf8_encode(uint32_t cp, char out[4]);

/* Whether all n bytes are well-formed UTF-8. */
bool td_utf8_valid(const char *text, size_t n);

#endif

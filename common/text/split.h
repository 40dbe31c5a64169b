/* The three splitters in front of BPE, as one hand-written scan (see split.c). */
#ifndef TD_COMMON_TEXT_SPLIT_H
#define TD_COMMON_TEXT_SPLIT_H

#include <stddef.h>
#include <stdint.h>

/* Length in bytes, >= 1, of the piece at the beginning of s[0..n), n >= 1. `s` must be the
 * beginning of a text or follow a piece. Bytes that are not UTF-8 count as characters of no class,
 * one each. Linear over a text: each character is looked at a bounded number of times. */
size_t td_split_piece(const uint8_t *s, size_t n);

#endif

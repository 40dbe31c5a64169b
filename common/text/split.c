/* The pre-tokenizer of DeepSeek-V3 and V4. tokenizer.json gives it as three patterns applied one
 * inside the pieces of the other:
 *
 *   S1  \p{N}{1,3}
 *   S2  [U+4E00-9FA5 U+3040-309F U+30A0-30FF]+
 *   S3  1. [ASCII punctuation][A-Za-z]+
 *       2. [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
 *       3.  ?[\p{P}\p{S}]+[\r\n]*
 *       4. \s*[\r\n]+      5. \s+(?!\S)      6. \s+
 *
 * S1 and S2 depend on classes alone, so their pieces are runs: digits in threes, CJK runs, and the
 * rest. A "segment" here is such a run; S3 sees nothing outside its segment, which is what
 * `in_segment` tests. What no alternative of S3 takes stays together as a gap piece. Inside a
 * segment of digits no alternative matches, so its pieces are those of S1. */
#include "common/text/split.h"

#include <stdbool.h>

#include "common/text/unicode.h"

enum { SEGMENT = TD_UC_N | TD_UC_CJK, WORD = TD_UC_L | TD_UC_M, MARK = TD_UC_P | TD_UC_S };

struct at {
    uint8_t cls; /* of the character; 0 at the end of the text */
    uint8_t len; /* its bytes; 0 at the end */
};

static inline struct at look(const uint8_t *s, size_t n, size_t i) {
    if (i >= n) return (struct at){0, 0};
    if (s[i] < 0x80) return (struct at){td_unicode_ascii[s[i]], 1};
    uint32_t cp;
    int len = td_utf8_decode(s + i, n - i, &cp);
    if (len <= 0) return (struct at){0, 1};
    return (struct at){td_unicode_class(cp), (uint8_t)len};
}

static inline bool in_segment(struct at c, uint8_t segment) {
    return c.len && (c.cls & SEGMENT) == segment;
}

static inline bool in_segment_as(struct at c, uint8_t segment, uint8_t any) {
    return (c.cls & any) && (c.cls & SEGMENT) == segment;
}

static inline bool ascii_letter(uint8_t b) {
    return (uint8_t)((b | 0x20) - 'a') < 26;
}

/* End of the run of characters of the classes `any` in the segment, from i. */
static size_t run(const uint8_t *s, size_t n, size_t i, uint8_t segment, uint8_t any) {
    for (;;) {
        struct at c = look(s, n, i);
        if (!in_segment_as(c, segment, any)) return i;
        i += c.len;
    }
}

static size_t digits(const uint8_t *s, size_t n) {
    size_t i = 0;
    for (int k = 0; k < 3; k++) {
        struct at c = look(s, n, i);
        if (!(c.cls & TD_UC_N)) break;
        i += c.len;
    }
    return i;
}

/* Alternatives 4 to 6: one pass over the white space finds all they can ask about. */
static size_t white(const uint8_t *s, size_t n, uint8_t segment) {
    size_t i = 0, last = 0, after_eol = 0;
    struct at c = look(s, n, 0);
    while (in_segment_as(c, segment, TD_UC_SPACE)) {
        last = i;
        i += c.len;
        if (c.cls & TD_UC_EOL) after_eol = i;
        c = look(s, n, i);
    }
    if (after_eol) return after_eol;
    if (!in_segment(c, segment) || last == 0) return i;
    return last; /* the last white space goes with what follows */
}

/* Characters that no alternative takes, up to the next that one does. `next` is the character
 * at i. */
static size_t gap(const uint8_t *s, size_t n, size_t i, struct at next, uint8_t segment) {
    while (in_segment(next, segment) && !(next.cls & (WORD | MARK | TD_UC_SPACE))) {
        struct at after = look(s, n, i + next.len);
        if (in_segment_as(after, segment, WORD)) break; /* alternative 2 takes both */
        i += next.len;
        next = after;
    }
    return i;
}

size_t td_split_piece(const uint8_t *s, size_t n) {
    struct at c = look(s, n, 0);
    if (c.cls & TD_UC_N) return digits(s, n);
    uint8_t segment = c.cls & SEGMENT;
    if (c.cls & WORD) return run(s, n, c.len, segment, WORD);

    struct at next = look(s, n, c.len);
    if (c.cls & MARK) {
        if (s[0] < 0x80 && n > 1 && ascii_letter(s[1])) {
            size_t i = 2;
            while (i < n && ascii_letter(s[i])) {
                i++;
            }
            return i;
        }
        size_t end = run(s, n, c.len, segment, MARK);
        return run(s, n, end, segment, TD_UC_EOL);
    }
    if (!(c.cls & TD_UC_EOL) && in_segment_as(next, segment, WORD)) {
        return run(s, n, c.len + next.len, segment, WORD);
    }
    if (s[0] == ' ' && in_segment_as(next, segment, MARK)) {
        size_t end = run(s, n, c.len + next.len, segment, MARK);
        return run(s, n, end, segment, TD_UC_EOL);
    }
    if (c.cls & TD_UC_SPACE) return white(s, n, segment);
    return gap(s, n, c.len, next, segment);
}

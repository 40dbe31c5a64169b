/* The checksum in vectors, copying as it goes. A sum mod 2^32 may be folded in any order, so lanes
 * mean nothing. Each line is read once, and what is written past the caches (`far`) does not first
 * fetch the line that it replaces.
 * What is asked for ahead of time, since the sum's instructions leave a processor fewer lines in
 * sight. Intel's: one line of each block of the source a page ahead, so that the next page's start
 * is seen early enough, and of what is written near every other line, since lines are fetched in
 * pairs. AMD's: each line of the source (one stream: blocks side by side are read at half the
 * rate); not what is written: there a store that misses finds its line no later, and asking makes
 * a copy a quarter slower. */
#ifdef __x86_64__
#include "common/kv/checksum_sets.h"

#include <immintrin.h>

enum { LINE = TD_CHECKSUM_LINE, LINES = TD_CHECKSUM_BLOCK / LINE };

#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni,avx2")))

/* Sums of the lanes of a and of b, as B << 32 | A. */
AVX2 INLINE uint64_t fold(__m256i a, __m256i b) {
    __m256i x = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_unpackhi_epi64(y, y));
    return (uint64_t)_mm_cvtsi128_si64(y);
}

/* A block is over: its contribution. */
INLINE void close_block(struct td_checksum_run *r, uint64_t state, uint64_t lines) {
    r->sum += td_checksum_contribution((uint32_t)state, (uint32_t)(state >> 32), lines / LINES - 1);
}

INLINE void leave(struct td_checksum_run *r, uint64_t state) {
    r->a = (uint32_t)state;
    r->b = (uint32_t)(state >> 32);
}

/* One line, summed before it is written. The barrier holds the compiler to that: sums of integers
 * may be added up in any order, and it makes a tree of a block's 128 products, most of which then
 * wait on the stack. In the cache that takes half as long again. */
AVX2 INLINE void line_avx2(__m256i *a, __m256i *b, uint8_t *to, const uint8_t *from, size_t at,
                           enum td_checksum_copy copy, enum td_checksum_ask ask) {
    const __m256i *p = (const __m256i *)(const void *)from;
    const __m256i *ka = (const __m256i *)(const void *)(td_checksum_weights.a + at * LINE / 2);
    const __m256i *kb = (const __m256i *)(const void *)(td_checksum_weights.b + at * LINE / 2);
    __m256i *q = (__m256i *)(void *)to;
    td_checksum_ask(ask, at, from, to, copy);
    __m256i w0 = _mm256_loadu_si256(p), w1 = _mm256_loadu_si256(p + 1);
    *a = _mm256_add_epi32(*a, _mm256_madd_epi16(w0, _mm256_load_si256(ka)));
    *b = _mm256_add_epi32(*b, _mm256_madd_epi16(w0, _mm256_load_si256(kb)));
    *a = _mm256_add_epi32(*a, _mm256_madd_epi16(w1, _mm256_load_si256(ka + 1)));
    *b = _mm256_add_epi32(*b, _mm256_madd_epi16(w1, _mm256_load_si256(kb + 1)));
    __asm__ volatile("" : "+x"(*a), "+x"(*b) : : "memory");
    if (copy == TD_CHECKSUM_NEAR) _mm256_storeu_si256(q, w0), _mm256_storeu_si256(q + 1, w1);
    if (copy == TD_CHECKSUM_FAR) _mm256_stream_si256(q, w0), _mm256_stream_si256(q + 1, w1);
}

/* Lines `at`.. of a block. As a loop for AMD's far copies: a tenth faster there than whole blocks
 * written out, but near copies are a sixth slower so (BENCHMARKS.md). */
AVX2 INLINE void part_avx2(__m256i *a, __m256i *b, uint8_t *q, const uint8_t *p, size_t at,
                           size_t lines, enum td_checksum_copy copy, enum td_checksum_ask ask) {
    if (lines == LINES && !(copy == TD_CHECKSUM_FAR && ask == TD_CHECKSUM_ASK_LINES)) {
#pragma GCC unroll 16
        for (size_t i = 0; i < LINES; i++)
            line_avx2(a, b, q + i * LINE, p + i * LINE, i, copy, ask);
    } else {
#pragma GCC unroll 1
        for (size_t i = 0; i < lines; i++)
            line_avx2(a, b, q + i * LINE, p + i * LINE, at + i, copy, ask);
    }
}

AVX2 INLINE void lines_avx2(struct td_checksum_run *r, uint8_t *q, const uint8_t *p, size_t lines,
                            enum td_checksum_copy copy, enum td_checksum_ask ask) {
    __m256i a = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int32_t)r->a));
    __m256i b = _mm256_zextsi128_si256(_mm_cvtsi32_si128((int32_t)r->b));
    while (lines) {
        size_t at = r->lines % LINES, n = LINES - at < lines ? LINES - at : lines;
        part_avx2(&a, &b, q, p, at, n, copy, ask);
        r->lines += n;
        lines -= n;
        p += n * LINE;
        if (copy != TD_CHECKSUM_READ) q += n * LINE;
        if (r->lines % LINES) continue;
        close_block(r, fold(a, b), r->lines);
        a = b = _mm256_setzero_si256();
    }
    leave(r, fold(a, b));
}

VNNI INLINE uint64_t fold_wide(__m512i a, __m512i b) {
    return fold(_mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)),
                _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1)));
}

VNNI INLINE void part_vnni(__m512i *a, __m512i *b, uint8_t *q, const uint8_t *p, size_t at,
                           size_t lines, enum td_checksum_copy copy, enum td_checksum_ask ask) {
    const struct td_checksum_weights *k = &td_checksum_weights;
#pragma GCC unroll 16
    for (size_t i = 0; i < lines; i++) {
        uint8_t *to = q + i * LINE;
        __m512i w = _mm512_loadu_si512(p + i * LINE);
        td_checksum_ask(ask, at + i, p + i * LINE, to, copy);
        if (copy == TD_CHECKSUM_NEAR) _mm512_storeu_si512(to, w);
        if (copy == TD_CHECKSUM_FAR) _mm512_stream_si512((__m512i *)(void *)to, w);
        *a = _mm512_dpwssd_epi32(*a, w, _mm512_load_si512(k->a + (at + i) * LINE / 2));
        *b = _mm512_dpwssd_epi32(*b, w, _mm512_load_si512(k->b + (at + i) * LINE / 2));
    }
}

VNNI INLINE void lines_vnni(struct td_checksum_run *r, uint8_t *q, const uint8_t *p, size_t lines,
                            enum td_checksum_copy copy, enum td_checksum_ask ask) {
    __m512i a = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int32_t)r->a));
    __m512i b = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int32_t)r->b));
    while (lines) {
        size_t at = r->lines % LINES, n = LINES - at < lines ? LINES - at : lines;
        if (n == LINES)
            part_vnni(&a, &b, q, p, 0, LINES, copy, ask);
        else
            part_vnni(&a, &b, q, p, at, n, copy, ask);
        r->lines += n;
        lines -= n;
        p += n * LINE;
        if (copy != TD_CHECKSUM_READ) q += n * LINE;
        if (r->lines % LINES) continue;
        close_block(r, fold_wide(a, b), r->lines);
        a = b = _mm512_setzero_si512();
    }
    leave(r, fold_wide(a, b));
}

/* One body for each way to copy and to ask. */
#define EACH_COPY(lines_of, ask)                                                                   \
    if (copy == TD_CHECKSUM_READ)                                                                  \
        lines_of(r, to, from, lines, TD_CHECKSUM_READ, ask);                                       \
    else if (copy == TD_CHECKSUM_FAR && (uintptr_t)to % LINE == 0)                                 \
        lines_of(r, to, from, lines, TD_CHECKSUM_FAR, ask);                                        \
    else                                                                                           \
        lines_of(r, to, from, lines, TD_CHECKSUM_NEAR, ask)
#define EACH_WAY(lines_of)                                                                         \
    if (td_checksum_asks() == TD_CHECKSUM_ASK_LINES) {                                             \
        EACH_COPY(lines_of, TD_CHECKSUM_ASK_LINES);                                                \
    } else {                                                                                       \
        EACH_COPY(lines_of, TD_CHECKSUM_ASK_BLOCKS);                                               \
    }

AVX2 void td_checksum_lines_avx2(struct td_checksum_run *r, void *to, const void *from,
                                 size_t lines, enum td_checksum_copy copy){EACH_WAY(lines_avx2)}

VNNI void td_checksum_lines_vnni(struct td_checksum_run *r, void *to, const void *from,
                                 size_t lines, enum td_checksum_copy copy) {
    EACH_WAY(lines_vnni)
}
#endif

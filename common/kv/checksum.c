/* The checksum on the CPU: the plain definition, and the choice among it and the vector forms. */
#include "common/kv/checksum_sets.h"

#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

enum { LINE = TD_CHECKSUM_LINE, LINES = TD_CHECKSUM_BLOCK / LINE };

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read in host order");

#define A(i) (int16_t)(TD_CHECKSUM_WEIGHT(i)), (int16_t)(TD_CHECKSUM_WEIGHT(i) >> 16)
#define B(i) (int16_t)(TD_CHECKSUM_WEIGHT(i) >> 32), (int16_t)(TD_CHECKSUM_WEIGHT(i) >> 48)
#define FOUR(X, i) X(i), X((i) + 1), X((i) + 2), X((i) + 3)
#define SIXTEEN(X, i) FOUR(X, i), FOUR(X, (i) + 4), FOUR(X, (i) + 8), FOUR(X, (i) + 12)
#define SIXTY_FOUR(X, i)                                                                           \
    SIXTEEN(X, i), SIXTEEN(X, (i) + 16), SIXTEEN(X, (i) + 32), SIXTEEN(X, (i) + 48)
#define ALL(X) SIXTY_FOUR(X, 0), SIXTY_FOUR(X, 64), SIXTY_FOUR(X, 128), SIXTY_FOUR(X, 192)

_Alignas(64) const struct td_checksum_weights td_checksum_weights = {{ALL(A)}, {ALL(B)}};

void td_checksum_lines_plain(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                             enum td_checksum_copy copy) {
    const uint8_t *p = from;
    uint8_t *q = to;
    for (; lines; lines--, p += LINE) {
        const int16_t *ka = td_checksum_weights.a + r->lines % LINES * (LINE / 2);
        const int16_t *kb = td_checksum_weights.b + r->lines % LINES * (LINE / 2);
        int16_t half[LINE / 2];
        memcpy(half, p, LINE);
        for (int i = 0; i < LINE / 2; i++) {
            r->a += (uint32_t)(half[i] * ka[i]);
            r->b += (uint32_t)(half[i] * kb[i]);
        }
        if (copy != TD_CHECKSUM_READ) memcpy(q, half, LINE), q += LINE;
        if (++r->lines % LINES) continue;
        r->sum += td_checksum_contribution(r->a, r->b, r->lines / LINES - 1);
        r->a = r->b = 0;
    }
}

const struct td_checksum_set *td_checksum_set(uint32_t i) {
    static const struct td_checksum_set sets[] = {
#ifdef __x86_64__
        {"avx512-vnni", td_checksum_lines_vnni},
        {"avx2", td_checksum_lines_avx2},
#endif
        {"plain", td_checksum_lines_plain},
    };
    enum { SETS = sizeof sets / sizeof *sets };
    uint32_t first = 0; /* the best one here */
#ifdef __x86_64__
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bw")) first = 1;
    if (!__builtin_cpu_supports("avx2")) first = 2;
#endif
    return i < SETS - first ? &sets[first + i] : NULL;
}

void td_checksum_lines(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                       enum td_checksum_copy copy) {
    if (lines) td_checksum_set(0)->lines(r, to, from, lines, copy);
}

void td_checksum_settle(void) {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

uint64_t td_checksum_finish(const struct td_checksum_run *r, const void *rest, size_t len) {
    struct td_checksum_run end = *r;
    if (len) {
        uint8_t line[LINE] = {0};
        memcpy(line, rest, len);
        td_checksum_lines_plain(&end, NULL, line, 1, TD_CHECKSUM_READ);
    }
    if (end.lines % LINES) /* the padding adds nothing to A and B */
        end.sum += td_checksum_contribution(end.a, end.b, end.lines / LINES);
    return td_checksum_end(end.sum, r->lines * LINE + len);
}

uint64_t td_checksum(const void *bytes, size_t len) {
    struct td_checksum_run r = {0};
    td_checksum_lines(&r, NULL, bytes, len / LINE, TD_CHECKSUM_READ);
    return td_checksum_finish(&r, (const uint8_t *)bytes + len / LINE * LINE, len % LINE);
}

uint64_t td_prompt_hash(const int32_t *ids, size_t n) {
    return td_checksum(ids, n * sizeof *ids);
}

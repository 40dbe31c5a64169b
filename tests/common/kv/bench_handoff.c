/* What checksums cost in a handoff: the bytes of one prompt packed from a cold pool into a send
 * slab, put into a landing slab (a memcpy; over shared memory there is no put, and what is packed
 * is unpacked) and unpacked into another cold pool, with checksums and without, in turns in one
 * run. Without means that the linker put others in place of the functions of common/kv/checksum.h:
 * ones that copy the same way and sum nothing, and ones that call memcpy. Everything else is the
 * code that serves. The share is reckoned against the faster of the two, part by part, in the same
 * round: its median and quartiles; the first line that adds up is a handoff over shared memory.
 *
 * usage: bench_handoff [TOKENS [ROUNDS]]     (4509, 40)
 * Two layouts: the bundled model's (6 layers, bf16 rows) and DeepSeek-V4-Flash's (43 layers, FP8
 * rows), both with bf16 keys. Pools are larger than the caches and every round takes other pages.
 * Prints medians of processor time, because a machine may be shared. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "common/kv/checksum_sets.h"
#include "common/kv/wire.h"

enum { SLAB = 8 << 20, MAX_ROUNDS = 400, POOL_BYTES = 512 << 20, SLOTS = 8 };
enum part { PACK, PUT, UNPACK, PARTS };
enum mode { SUMS, NO_SUMS, MEMCPY, MODES };

static enum mode mode;
/* Each after each: what one leaves in the caches is written back in the next one's time. */
enum { TURNS = 6 };
static const enum mode turn[TURNS][MODES] = {
    {SUMS, NO_SUMS, MEMCPY}, {NO_SUMS, SUMS, MEMCPY}, {MEMCPY, SUMS, NO_SUMS},
    {SUMS, MEMCPY, NO_SUMS}, {NO_SUMS, MEMCPY, SUMS}, {MEMCPY, NO_SUMS, SUMS},
};

uint64_t __real_td_checksum(const void *bytes, size_t len);
uint64_t __wrap_td_checksum(const void *bytes, size_t len);
uint64_t __real_td_checksum_finish(const struct td_checksum_run *r, const void *rest, size_t len);
uint64_t __wrap_td_checksum_finish(const struct td_checksum_run *r, const void *rest, size_t len);
void __real_td_checksum_lines(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                              enum td_checksum_copy copy);
void __wrap_td_checksum_lines(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                              enum td_checksum_copy copy);

uint64_t __wrap_td_checksum(const void *bytes, size_t len) {
    return mode == SUMS ? __real_td_checksum(bytes, len) : 0;
}

uint64_t __wrap_td_checksum_finish(const struct td_checksum_run *r, const void *rest, size_t len) {
    return mode == SUMS ? __real_td_checksum_finish(r, rest, len) : 0;
}

/* As the sums' functions copy; where they call memcpy, memcpy. */
#ifdef __x86_64__
#define COPY_ASKING(vector, load, store, what, ways)                                               \
    for (size_t i = 0; i < bytes; i += 64) {                                                       \
        td_checksum_ask(what, i / 64 % 16, from + i, to + i, ways);                                \
        vector v = load((const void *)(from + i)), w = v;                                          \
        if (sizeof v < 64) w = load((const void *)(from + i + sizeof v));                          \
        store((void *)(to + i), v);                                                                \
        if (sizeof v < 64) store((void *)(to + i + sizeof v), w);                                  \
    }
#define COPY(vector, load, store, stream)                                                          \
    if (td_checksum_asks() == TD_CHECKSUM_ASK_LINES && far)                                        \
        COPY_ASKING(vector, load, stream, TD_CHECKSUM_ASK_LINES, TD_CHECKSUM_FAR)                  \
    else if (td_checksum_asks() == TD_CHECKSUM_ASK_LINES)                                          \
        COPY_ASKING(vector, load, store, TD_CHECKSUM_ASK_LINES, TD_CHECKSUM_NEAR)                  \
    else if (far)                                                                                  \
        COPY_ASKING(vector, load, stream, TD_CHECKSUM_ASK_BLOCKS, TD_CHECKSUM_FAR)                 \
    else                                                                                           \
        COPY_ASKING(vector, load, store, TD_CHECKSUM_ASK_BLOCKS, TD_CHECKSUM_NEAR)
__attribute__((target("avx512f"))) static void copy_512(uint8_t *to, const uint8_t *from,
                                                        size_t bytes, bool far) {
    COPY(__m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512)
}
__attribute__((target("avx2"))) static void copy_256(uint8_t *to, const uint8_t *from, size_t bytes,
                                                     bool far) {
    COPY(__m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256)
}
#endif

static void copy_alone(uint8_t *to, const uint8_t *from, size_t bytes, bool far) {
#ifdef __x86_64__
    const char *set = td_checksum_set(0)->name;
    if (strcmp(set, "avx512-vnni") == 0) return copy_512(to, from, bytes, far);
    if (strcmp(set, "avx2") == 0) return copy_256(to, from, bytes, far);
#endif
    memcpy(to, from, bytes);
}

void __wrap_td_checksum_lines(struct td_checksum_run *r, void *to, const void *from, size_t lines,
                              enum td_checksum_copy copy) {
    size_t bytes = lines * TD_CHECKSUM_LINE;
    if (mode == SUMS)
        __real_td_checksum_lines(r, to, from, lines, copy);
    else if (copy != TD_CHECKSUM_READ && mode == MEMCPY)
        memcpy(to, from, bytes);
    else if (copy != TD_CHECKSUM_READ)
        copy_alone(to, from, bytes, copy == TD_CHECKSUM_FAR && (uintptr_t)to % 64 == 0);
}

struct side {
    uint8_t *pool, *slots;
};

struct bench {
    struct td_kv_layout l;
    struct side from, to;
    uint8_t *send, *landing;
    uint32_t tokens, next_page, next_slot;
    double spent[MODES][PARTS][MAX_ROUNDS]; /* [mode][part][round], ns */
};

static void need(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_handoff: %s\n", what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *filled(size_t bytes) {
    uint64_t *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63), x = 88172645463325252u;
    need(p != NULL, "no memory");
    for (size_t i = 0; i < bytes / 8; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        p[i] = x;
    }
    return p;
}

/* Blocks first..first+n-1 of the prompt through one slab; block page_blocks is the slot. */
static void slab(struct bench *b, uint32_t first, uint32_t n, double spent[PARTS]) {
    const struct td_kv_ticket ticket = {1, 2};
    const struct td_kv_layout *l = &b->l;
    uint32_t pages = td_kv_page_blocks(b->tokens);
    size_t used = 0, len[SLAB / sizeof(struct td_kv_block_header)];
    struct td_error err;
    uint8_t *slot_from = b->from.slots + b->next_slot * l->slot_bytes;
    uint8_t *slot_to = b->to.slots + b->next_slot * l->slot_bytes;
    td_status st = TD_OK;
    double t[PARTS + 1] = {now()};
    for (uint32_t i = 0; i < n && st == TD_OK; i++) {
        if (first + i < pages)
            st = td_kv_pack_page(l, b->from.pool, (b->next_page + first + i) % l->pages, ticket,
                                 first + i, td_kv_block_tokens(b->tokens, first + i),
                                 b->send + used, SLAB - used, &len[i], NULL, &err);
        else
            st = td_kv_pack_slot(l, slot_from, ticket, b->tokens, b->send + used, SLAB - used,
                                 &len[i], NULL, &err);
        used += len[i];
    }
    t[1] = now();
    memcpy(b->landing, b->send, used);
    t[2] = now();
    used = 0;
    for (uint32_t i = 0; i < n && st == TD_OK; used += len[i++])
        if (first + i < pages)
            st = td_kv_unpack_page(l, b->landing + used, len[i], ticket, b->tokens, first + i,
                                   b->to.pool, (b->next_page + first + i) % l->pages, NULL, &err);
        else
            st = td_kv_unpack_slot(l, b->landing + used, len[i], ticket, b->tokens, slot_to, NULL,
                                   &err);
    t[3] = now();
    need(st == TD_OK, st == TD_OK ? "" : err.text);
    for (int p = 0; p < PARTS; p++)
        spent[p] += t[p + 1] - t[p];
}

static void handoff(struct bench *b, int round) {
    uint32_t pages = td_kv_page_blocks(b->tokens);
    uint32_t fit = (uint32_t)(SLAB / td_kv_page_block_bytes_max(&b->l));
    double spent[PARTS] = {0};
    for (uint32_t at = 0; at < pages; at += fit)
        slab(b, at, pages - at < fit ? pages - at : fit, spent);
    slab(b, pages, 1, spent);
    b->next_page = (b->next_page + pages) % b->l.pages;
    b->next_slot = (b->next_slot + 1) % SLOTS;
    for (int p = 0; p < PARTS; p++)
        b->spent[mode][p][round] = spent[p];
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

/* Median of a part, or of several when `parts` has more bits than one, and of what sums cost there:
 * of each round's share against the same round's fastest copies. */
static void report_parts(const struct bench *b, const char *what, unsigned parts,
                         const enum mode best[PARTS], double bytes, int rounds) {
    double t[MODES], v[MAX_ROUNDS];
    for (int m = 0; m <= MODES; m++) {
        for (int r = 0; r < rounds; r++) {
            double sums = 0, other = 0;
            for (int p = 0; p < PARTS; p++) {
                if (!(parts >> p & 1)) continue;
                sums += b->spent[SUMS][p][r];
                other += b->spent[m < MODES ? (enum mode)m : best[p]][p][r];
            }
            v[r] = m < MODES ? other : (sums - other) / sums;
        }
        double middle = median(v, rounds);
        if (m < MODES) t[m] = middle;
        if (m == MODES)
            printf("  %-15s %8.3f ms with checksums, %8.3f ms without, %8.3f ms with memcpy, "
                   "%5.2f GB/s; checksums are %4.1f %% (%.1f to %.1f)\n",
                   what, t[SUMS] / 1e6, t[NO_SUMS] / 1e6, t[MEMCPY] / 1e6, bytes / t[SUMS],
                   100 * middle, 100 * v[rounds / 4], 100 * v[rounds * 3 / 4]);
    }
}

static void report(const struct bench *b, double bytes, int rounds) {
    static const char *const part[PARTS] = {"pack", "put", "unpack"};
    enum mode best[PARTS];
    for (int p = 0; p < PARTS; p++) {
        double least[MODES], v[MAX_ROUNDS];
        for (int m = 0; m < MODES; m++) {
            memcpy(v, b->spent[m][p], sizeof v);
            least[m] = median(v, rounds);
        }
        best[p] = least[NO_SUMS] < least[MEMCPY] ? NO_SUMS : MEMCPY;
    }
    for (int p = 0; p < PARTS; p++)
        report_parts(b, part[p], 1u << p, best, bytes, rounds);
    report_parts(b, "pack and unpack", 1u << PACK | 1u << UNPACK, best, bytes, rounds);
    report_parts(b, "all", (1u << PARTS) - 1, best, bytes, rounds);
}

static void run(const char *what, uint32_t layers, const uint8_t *ratio, enum td_kv_row_dtype row,
                uint32_t tokens, int rounds) {
    static struct bench b;
    struct td_error err;
    b = (struct bench){.tokens = tokens};
    need(td_kv_layout_init(&b.l, layers, ratio, row, TD_KV_KEY_BF16, 1, 1, &err) == TD_OK,
         "layout");
    uint32_t pages = (uint32_t)(POOL_BYTES / b.l.pool_bytes);
    need(td_kv_layout_init(&b.l, layers, ratio, row, TD_KV_KEY_BF16, pages, 1, &err) == TD_OK,
         "layout");
    need(td_kv_page_blocks(tokens) <= pages && td_kv_slot_block_bytes_max(&b.l) <= 2 * SLAB,
         "more tokens than the pool holds");
    struct side *side[] = {&b.from, &b.to};
    for (int i = 0; i < 2; i++) {
        side[i]->pool = filled(b.l.pool_bytes);
        side[i]->slots = filled(b.l.slot_bytes * SLOTS);
    }
    b.send = filled(2 * SLAB);
    b.landing = filled(2 * SLAB);
    double bytes = (double)td_kv_slot_block_bytes(&b.l, tokens);
    for (uint32_t i = 0; i < td_kv_page_blocks(tokens); i++)
        bytes += (double)td_kv_page_block_bytes(&b.l, td_kv_block_tokens(tokens, i));
    for (int r = -2; r < rounds; r++)
        for (int k = 0; k < MODES; k++) {
            mode = turn[(r + TURNS) % TURNS][k];
            handoff(&b, r < 0 ? 0 : r);
        }
    printf("%s: %u tokens, %.2f MB, medians of %d rounds\n", what, tokens, bytes / 1e6, rounds);
    report(&b, bytes, rounds);
    for (int i = 0; i < 2; i++) {
        free(side[i]->pool);
        free(side[i]->slots);
    }
    free(b.send);
    free(b.landing);
}

int main(int argc, char **argv) {
    uint32_t tokens = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 4509;
    int rounds = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 40;
    static const uint8_t needle[] = {0, 0, 4, 128, 4, 4};
    uint8_t flash[43] = {0};
    for (int i = 2; i < 43; i++)
        flash[i] = i % 2 ? 128 : 4;
    if (tokens == 0 || rounds < 1 || rounds > MAX_ROUNDS) return 2;
    run("bundled model", sizeof needle, needle, TD_KV_ROW_BF16, tokens, rounds);
    run("DeepSeek-V4-Flash", sizeof flash, flash, TD_KV_ROW_FP8, tokens, rounds);
    return 0;
}

/* What the ranks' candidates select: the least one that stays is found byte by byte, by counting;
 * then the ranks' lists, each by ascending entry, are merged. */
#include "kernels/cpu/op.h"

enum { BYTES = 8, VALUES = 256 };

struct lists {
    const uint64_t *list[TD_MAX_RANKS];
    uint32_t n[TD_MAX_RANKS], ranks, all;
};

static struct lists lists_of(const struct td_index_merge_args *a, uint32_t i) {
    struct lists l = {.ranks = a->ranks};
    for (uint32_t r = 0; r < a->ranks; r++) {
        l.list[r] = a->candidate + ((size_t)r * a->rows + i) * a->topk;
        while (l.n[r] < a->topk && l.list[r][l.n[r]] != 0)
            l.n[r]++;
        l.all += l.n[r];
    }
    return l;
}

/* The k-th greatest candidate; there are as many. */
static uint64_t find_least(const struct lists *l, uint32_t k) {
    uint64_t prefix = 0;
    for (uint32_t byte = BYTES; byte-- > 0;) {
        uint32_t count[VALUES] = {0}, at = VALUES, shift = 8 * byte;
        uint64_t known = byte == BYTES - 1 ? 0 : ~(uint64_t)0 << (shift + 8);
        for (uint32_t r = 0; r < l->ranks; r++)
            for (uint32_t i = 0; i < l->n[r]; i++)
                if (((l->list[r][i] ^ prefix) & known) == 0) count[l->list[r][i] >> shift & 0xff]++;
        while (count[--at] < k)
            k -= count[at];
        prefix |= (uint64_t)at << shift;
    }
    return prefix;
}

/* The next candidate by entry that is not below `least`; NULL: none. */
static const uint64_t *next_candidate(const struct lists *l, uint64_t least,
                                      uint32_t at[TD_MAX_RANKS]) {
    const uint64_t *first = NULL;
    uint32_t rank = 0;
    for (uint32_t r = 0; r < l->ranks; r++) {
        while (at[r] < l->n[r] && l->list[r][at[r]] < least)
            at[r]++;
        if (at[r] == l->n[r]) continue;
        const uint64_t *c = &l->list[r][at[r]];
        if (first && td_index_entry(*first) < td_index_entry(*c)) continue;
        first = c;
        rank = r;
    }
    if (first) at[rank]++;
    return first;
}

static void merge_row(const struct td_index_merge_args *a, uint32_t i, int32_t *to) {
    struct lists l = lists_of(a, i);
    uint64_t least = l.all > a->topk ? find_least(&l, a->topk) : 0;
    uint32_t at[TD_MAX_RANKS] = {0}, n = 0;
    for (const uint64_t *c; (c = next_candidate(&l, least, at)) != NULL;)
        to[n++] = (int32_t)td_index_entry(*c);
    for (; n < a->topk; n++)
        to[n] = -1;
}

static void merge_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_index_merge_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t visible = (a->batch->row[a->first + i].pos + 1) / TD_CSA_RATIO;
        int32_t *to = a->selected + (size_t)(a->first + i) * a->topk;
        if (visible > a->topk)
            merge_row(a, i, to);
        else
            for (uint32_t w = 0; w < a->topk; w++)
                to[w] = w < visible ? (int32_t)w : -1;
    }
}

void TD_OP(index_merge)(const struct td_device *d, const struct td_index_merge_args *a) {
    td_threads_run(d->threads, merge_rows, a, a->rows);
}

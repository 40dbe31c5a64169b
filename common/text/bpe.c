/* Two forms of the same merging. Nearly all pieces are a word: those are merged in a small array
 * on the stack, rescanned for each merge. Long pieces (a megabyte without a split is legal input)
 * use a linked list of symbols and a heap of candidate merges, so that a hostile text costs
 * n log n and not n squared. */
#include "common/text/bpe.h"

#include <stdlib.h>
#include <string.h>

enum { SMALL = 48 };

static inline uint32_t slot_of(uint64_t pair, uint32_t mask) {
    uint64_t h = pair * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> 32 ^ h >> 15) & mask;
}

static inline uint32_t rank_of(const struct td_bpe *b, int32_t left, int32_t right) {
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (uint32_t i = slot_of(pair, b->mask);; i = (i + 1) & b->mask) {
        const struct td_bpe_slot *s = &b->slots[i];
        if (s->pair == pair || s->rank == TD_BPE_NONE) return s->rank;
    }
}

td_status td_bpe_init(struct td_bpe *b, uint32_t cap) {
    *b = (struct td_bpe){.cap = cap};
    uint32_t size = 16;
    while (size < 2 * cap) {
        size *= 2;
    }
    b->mask = size - 1;
    b->slots = malloc(size * sizeof *b->slots);
    b->product = malloc((cap ? cap : 1) * sizeof *b->product);
    if (!b->slots || !b->product) return TD_NO_MEMORY;
    for (uint32_t i = 0; i < size; i++) {
        b->slots[i] = (struct td_bpe_slot){.pair = UINT64_MAX, .rank = TD_BPE_NONE};
    }
    return TD_OK;
}

void td_bpe_finish(struct td_bpe *b) {
    free(b->slots);
    free(b->product);
    *b = (struct td_bpe){0};
}

td_status td_bpe_add(struct td_bpe *b, int32_t left, int32_t right, int32_t product) {
    if (b->n >= b->cap) return TD_TOO_LONG;
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint32_t i = slot_of(pair, b->mask);
    while (b->slots[i].rank != TD_BPE_NONE) {
        if (b->slots[i].pair == pair) return TD_FORMAT;
        i = (i + 1) & b->mask;
    }
    b->slots[i] = (struct td_bpe_slot){.pair = pair, .rank = b->n};
    b->product[b->n++] = product;
    return TD_OK;
}

/* n <= SMALL; `out` has room for n more. */
static void encode_small(const struct td_bpe *b, const uint8_t *piece, size_t n,
                         struct td_ids *out) {
    int32_t id[SMALL];
    uint32_t rank[SMALL]; /* of the pair (i, i + 1) */
    for (size_t i = 0; i < n; i++) {
        id[i] = b->byte_id[piece[i]];
    }
    for (size_t i = 0; i + 1 < n; i++) {
        rank[i] = rank_of(b, id[i], id[i + 1]);
    }
    while (n > 1) {
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[at]) at = i;
        }
        if (rank[at] == TD_BPE_NONE) break;
        id[at] = b->product[rank[at]];
        n--;
        memmove(id + at + 1, id + at + 2, (n - at - 1) * sizeof *id);
        if (at + 1 < n) {
            memmove(rank + at + 1, rank + at + 2, (n - at - 2) * sizeof *rank);
            rank[at] = rank_of(b, id[at], id[at + 1]);
        }
        if (at > 0) rank[at - 1] = rank_of(b, id[at - 1], id[at]);
    }
    memcpy(out->ids + out->n, id, n * sizeof *id);
    out->n += n;
}

struct symbol {
    int32_t id;
    uint32_t prev, next; /* n as next: none */
    uint32_t rank;       /* of the pair with next, TD_BPE_NONE: no rule, or symbol merged away */
};

/* Min-heap of rank << 32 | position: the least is the lowest rank and, among equals, leftmost. */
struct heap {
    uint64_t *v;
    size_t n;
};

static void heap_down(struct heap *h, size_t i) {
    uint64_t x = h->v[i];
    for (size_t c; (c = 2 * i + 1) < h->n; i = c) {
        if (c + 1 < h->n && h->v[c + 1] < h->v[c]) c++;
        if (x <= h->v[c]) break;
        h->v[i] = h->v[c];
    }
    h->v[i] = x;
}

static void heap_push(struct heap *h, uint64_t x) {
    size_t i = h->n++;
    for (size_t up; i > 0 && x < h->v[up = (i - 1) / 2]; i = up) {
        h->v[i] = h->v[up];
    }
    h->v[i] = x;
}

static uint64_t heap_pop(struct heap *h) {
    uint64_t least = h->v[0];
    h->v[0] = h->v[--h->n];
    if (h->n) heap_down(h, 0);
    return least;
}

/* Sets the rank of the pair that starts at i and makes it a candidate. */
static void consider(const struct td_bpe *b, struct symbol *s, size_t n, uint32_t i,
                     struct heap *h) {
    s[i].rank = s[i].next < n ? rank_of(b, s[i].id, s[s[i].next].id) : TD_BPE_NONE;
    if (s[i].rank != TD_BPE_NONE) heap_push(h, (uint64_t)s[i].rank << 32 | i);
}

static void merge_all(const struct td_bpe *b, struct symbol *s, size_t n, struct heap *h) {
    while (h->n) {
        uint64_t top = heap_pop(h);
        uint32_t i = (uint32_t)top, rank = (uint32_t)(top >> 32);
        if (s[i].rank != rank) continue; /* one side has been merged since */
        uint32_t gone = s[i].next;
        s[i].id = b->product[rank];
        s[i].next = s[gone].next;
        s[gone].rank = TD_BPE_NONE;
        if (s[i].next < n) s[s[i].next].prev = i;
        consider(b, s, n, i, h);
        if (i > 0) consider(b, s, n, s[i].prev, h);
    }
}

/* `out` has room for n more. A merge takes one candidate away and adds at most two, and there are
 * at most n - 1 merges, so the heap never holds more than 2 n. */
static td_status encode_long(const struct td_bpe *b, const uint8_t *piece, size_t n,
                             struct td_ids *out) {
    td_status st = TD_NO_MEMORY;
    struct symbol *s = malloc(n * sizeof *s);
    struct heap h = {.v = malloc(2 * n * sizeof *h.v)};
    if (!s || !h.v) goto free_both;
    for (size_t i = 0; i < n; i++) {
        s[i] = (struct symbol){
            .id = b->byte_id[piece[i]], .prev = (uint32_t)(i - (i > 0)), .next = (uint32_t)i + 1};
    }
    for (size_t i = 0; i < n; i++) {
        s[i].rank = i + 1 < n ? rank_of(b, s[i].id, s[i + 1].id) : TD_BPE_NONE;
        if (s[i].rank != TD_BPE_NONE) h.v[h.n++] = (uint64_t)s[i].rank << 32 | i;
    }
    for (size_t i = h.n / 2; i-- > 0;) {
        heap_down(&h, i);
    }
    merge_all(b, s, n, &h);
    for (size_t i = 0; i < n; i = s[i].next) {
        out->ids[out->n++] = s[i].id;
    }
    st = TD_OK;
free_both:
    free(h.v);
    free(s);
    return st;
}

td_status td_bpe_encode(const struct td_bpe *b, const uint8_t *piece, size_t n,
                        struct td_ids *out) {
    TD_TRY(td_ids_reserve(out, n));
    if (n > SMALL) return encode_long(b, piece, n, out);
    encode_small(b, piece, n, out);
    return TD_OK;
}

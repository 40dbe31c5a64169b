/* Wire blocks: every valid row arrives and nothing else is written, for all lengths that matter;
 * and no damaged block writes a byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/kv/checksum.h"
#include "common/kv/wire.h"

enum { SRC_PAGES = 5, DST_PAGES = 7, POISON = 0xA5, HEADER = 256, LONGEST = 520 };

static uint64_t seed;

static uint64_t next_random(void) {
    seed += 0x9E3779B97F4A7C15u;
    return td_mix64(seed);
}

/* Two workers with different pools, and one block under way. */
struct pair {
    struct td_kv_layout src, dst;
    uint8_t *src_pool, *src_slot;
    uint8_t *dst_pool, *dst_slot;   /* poisoned */
    uint8_t *want_pool, *want_slot; /* what dst must be afterwards */
    uint32_t src_page[3], dst_page[3];
    uint8_t *block;
    size_t cap;
    struct td_kv_ticket ticket;
};

static void fill(uint8_t *p, size_t n) {
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t r = next_random();
        memcpy(p + i, &r, 8);
    }
}

static void poison(struct pair *p) {
    memset(p->dst_pool, POISON, p->dst.pool_bytes);
    memset(p->dst_slot, POISON, p->dst.slot_bytes);
    memset(p->want_pool, POISON, p->dst.pool_bytes);
    memset(p->want_slot, POISON, p->dst.slot_bytes);
}

static void pair_init(struct pair *p, uint32_t layers, const uint8_t *ratio,
                      enum td_kv_row_dtype row, enum td_kv_key_dtype key) {
    struct td_error err;
    *p = (struct pair){.src_page = {3, 0, 4}, .dst_page = {6, 2, 1}, .ticket = {0xE1, 77}};
    assert_int_equal(td_kv_layout_init(&p->src, layers, ratio, row, key, SRC_PAGES, 5, &err),
                     TD_OK);
    assert_int_equal(td_kv_layout_init(&p->dst, layers, ratio, row, key, DST_PAGES, 5, &err),
                     TD_OK);
    p->src_pool = malloc(p->src.pool_bytes);
    p->src_slot = malloc(p->src.slot_bytes);
    p->dst_pool = malloc(p->dst.pool_bytes);
    p->dst_slot = malloc(p->dst.slot_bytes);
    p->want_pool = malloc(p->dst.pool_bytes);
    p->want_slot = malloc(p->dst.slot_bytes);
    fill(p->src_pool, p->src.pool_bytes);
    fill(p->src_slot, p->src.slot_bytes);
    size_t a = td_kv_page_block_bytes_max(&p->src), b = td_kv_slot_block_bytes_max(&p->src);
    p->cap = a > b ? a : b;
    p->block = malloc(p->cap);
    poison(p);
}

static void pair_finish(struct pair *p) {
    free(p->src_pool);
    free(p->src_slot);
    free(p->dst_pool);
    free(p->dst_slot);
    free(p->want_pool);
    free(p->want_slot);
    free(p->block);
}

static void assert_as_wanted(const struct pair *p) {
    assert_memory_equal(p->dst_pool, p->want_pool, p->dst.pool_bytes);
    assert_memory_equal(p->dst_slot, p->want_slot, p->dst.slot_bytes);
}

/* ---- what N tokens leave, said once more and row by row ---- */

static void want_row(const struct pair *p, struct td_kv_row to, struct td_kv_row from) {
    memcpy(to.values, from.values, p->src.row_stride);
    if (p->src.row_dtype == TD_KV_ROW_FP8) memcpy(to.scales, from.scales, 8);
}

static void want_entries(struct pair *p, uint32_t y, uint32_t n) {
    for (uint32_t w = 0; p->src.ratio[y] == 4 && w < n / 4; w++) {
        want_row(p, td_kv_csa_row(&p->dst, p->want_pool, y, p->dst_page[w / 64], w % 64),
                 td_kv_csa_row(&p->src, p->src_pool, y, p->src_page[w / 64], w % 64));
        memcpy(td_kv_index_key(&p->dst, p->want_pool, y, p->dst_page[w / 64], w % 64),
               td_kv_index_key(&p->src, p->src_pool, y, p->src_page[w / 64], w % 64),
               p->src.key_bytes);
    }
    for (uint32_t w = 0; p->src.ratio[y] == 128 && w < n / 128; w++)
        want_row(p, td_kv_hca_row(&p->dst, p->want_pool, y, p->dst_page[w / 2], w % 2),
                 td_kv_hca_row(&p->src, p->src_pool, y, p->src_page[w / 2], w % 2));
}

/* Channels [0, count) of u and of g. Not inlined: with UBSan's null checks gcc 12 sees a copy to
 * null on a path that does not exist. */
static __attribute__((noinline)) void want_state(float *to, const float *from, uint32_t dim,
                                                 uint32_t count) {
    memcpy(to, from, count * sizeof *to);
    memcpy(to + dim, from + dim, count * sizeof *to);
}

static void want_slot_layer(struct pair *p, uint32_t y, uint32_t n) {
    for (uint32_t t = n > 128 ? n - 128 : 0; t < n; t++)
        want_row(p, td_kv_window_row(&p->dst, p->want_slot, y, t),
                 td_kv_window_row(&p->src, p->src_slot, y, t));
    if (p->src.ratio[y] == 4)
        for (uint32_t t = 0; t < n; t++) {
            bool open = t / 4 == n / 4, previous = n >= 4 && t / 4 == n / 4 - 1;
            if (!open && !previous) continue;
            want_state(td_kv_csa_state(&p->dst, p->want_slot, y, t),
                       td_kv_csa_state(&p->src, p->src_slot, y, t), 1024, open ? 1024 : 512);
            want_state(td_kv_index_state(&p->dst, p->want_slot, y, t),
                       td_kv_index_state(&p->src, p->src_slot, y, t), 256, open ? 256 : 128);
        }
    if (p->src.ratio[y] == 128)
        for (uint32_t t = n / 128 * 128; t < n; t++)
            want_state(td_kv_hca_state(&p->dst, p->want_slot, y, t),
                       td_kv_hca_state(&p->src, p->src_slot, y, t), 512, 512);
}

/* ---- round trips ---- */

static void check_rows(const struct td_kv_layout *l, const uint64_t rows[TD_KV_FAMILIES],
                       const uint64_t bytes[TD_KV_FAMILIES], uint32_t n) {
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        assert_int_equal(rows[f], td_kv_rows(l, f, n));
        assert_int_equal(bytes[f], td_kv_bytes(l, f, n));
    }
}

static void round_trip(struct pair *p, uint32_t n) {
    struct td_error err = {.text = ""};
    struct td_kv_block_header h, sent;
    uint64_t rows[TD_KV_FAMILIES] = {0}, bytes[TD_KV_FAMILIES] = {0};
    size_t len;
    poison(p);
    for (uint32_t y = 0; y < p->src.layers; y++)
        want_entries(p, y, n);
    for (uint32_t i = 0; i < td_kv_page_blocks(n); i++) {
        uint32_t tokens = td_kv_block_tokens(n, i);
        assert_int_equal(td_kv_pack_page(&p->src, p->src_pool, p->src_page[i], p->ticket, i, tokens,
                                         p->block, p->cap, &len, &sent, &err),
                         TD_OK);
        assert_int_equal(len, td_kv_page_block_bytes(&p->src, tokens));
        if (td_kv_unpack_page(&p->dst, p->block, len, p->ticket, n, i, p->dst_pool, p->dst_page[i],
                              &h, &err) != TD_OK)
            fail_msg("n %u: %s", n, err.text);
        assert_memory_equal(&h, &sent, sizeof h);
        for (int f = 0; f < TD_KV_FAMILIES; f++)
            rows[f] += h.rows[f], bytes[f] += h.bytes[f];
    }
    assert_as_wanted(p);
    for (uint32_t y = 0; y < p->src.layers; y++)
        want_slot_layer(p, y, n);
    assert_int_equal(
        td_kv_pack_slot(&p->src, p->src_slot, p->ticket, n, p->block, p->cap, &len, &sent, &err),
        TD_OK);
    assert_int_equal(len, td_kv_slot_block_bytes(&p->src, n));
    if (td_kv_unpack_slot(&p->dst, p->block, len, p->ticket, n, p->dst_slot, &h, &err) != TD_OK)
        fail_msg("n %u: %s", n, err.text);
    assert_as_wanted(p);
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        rows[f] += h.rows[f], bytes[f] += h.bytes[f];
    check_rows(&p->src, rows, bytes, n);
}

static void test_round_trips(void **state) {
    (void)state;
    static const uint8_t mixed[] = {0, 4, 128, 4}, plain[] = {0, 0}, hca[] = {128};
    for (int row = 0; row < 3; row++)
        for (int key = 0; key < 4; key++) {
            struct pair p;
            pair_init(&p, 4, mixed, row, key);
            for (uint32_t n = 1; n <= 9; n++)
                round_trip(&p, n);
            for (uint32_t edge = 128; edge <= 512; edge += 128)
                for (uint32_t n = edge - 5; n <= edge + 5; n++)
                    round_trip(&p, n);
            round_trip(&p, LONGEST);
            pair_finish(&p);
        }
    struct pair p;
    pair_init(&p, 2, plain, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    for (uint32_t n = 1; n < 300; n += 37)
        round_trip(&p, n);
    pair_finish(&p);
    pair_init(&p, 1, hca, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    for (uint32_t n = 1; n < 300; n += 37)
        round_trip(&p, n);
    pair_finish(&p);
}

/* ---- the order on the wire ---- */

static void expect_bytes(const uint8_t **at, const void *row, size_t bytes) {
    assert_memory_equal(*at, row, bytes);
    *at += bytes;
}

/* Of a layer's rows all values come first, then all scales. */
static void expect_values(const uint8_t **at, const struct td_kv_layout *l, struct td_kv_row row) {
    expect_bytes(at, row.values, l->row_stride);
}

static void expect_scales(const uint8_t **at, struct td_kv_row row) {
    if (row.scales) expect_bytes(at, row.scales, 8);
}

/* First halves of u and of g up to position `open`, then whole rows. */
static void expect_state(const uint8_t **at, const float *row, uint32_t dim, bool open) {
    expect_bytes(at, row, dim / (open ? 1 : 2) * sizeof *row);
    expect_bytes(at, row + dim, dim / (open ? 1 : 2) * sizeof *row);
}

static void expect_slot_order(struct pair *p, uint32_t n) {
    const struct td_kv_layout *l = &p->src;
    const uint8_t *at = p->block + HEADER;
    for (uint32_t y = 0; y < l->layers; y++) {
        for (uint32_t t = n > 128 ? n - 128 : 0; t < n; t++)
            expect_values(&at, l, td_kv_window_row(l, p->src_slot, y, t));
        for (uint32_t t = n > 128 ? n - 128 : 0; t < n; t++)
            expect_scales(&at, td_kv_window_row(l, p->src_slot, y, t));
    }
    uint32_t open = n / 4 * 4, first = n >= 4 ? open - 4 : 0;
    for (uint32_t y = 0; y < l->layers; y++)
        for (uint32_t t = first; l->ratio[y] == 4 && t < n; t++)
            expect_state(&at, td_kv_csa_state(l, p->src_slot, y, t), 1024, t >= open);
    for (uint32_t y = 0; y < l->layers; y++)
        for (uint32_t t = first; l->ratio[y] == 4 && t < n; t++)
            expect_state(&at, td_kv_index_state(l, p->src_slot, y, t), 256, t >= open);
    for (uint32_t y = 0; y < l->layers; y++)
        for (uint32_t t = n / 128 * 128; l->ratio[y] == 128 && t < n; t++)
            expect_state(&at, td_kv_hca_state(l, p->src_slot, y, t), 512, true);
    assert_int_equal(at - p->block, td_kv_slot_block_bytes(l, n));
}

static void expect_entries(const uint8_t **at, struct pair *p, uint32_t page, uint32_t rows,
                           uint32_t ratio) {
    const struct td_kv_layout *l = &p->src;
    for (uint32_t y = 0; y < l->layers; y++)
        for (uint32_t i = 0; l->ratio[y] == ratio && i < 2 * rows; i++) {
            struct td_kv_row row = ratio == 4 ? td_kv_csa_row(l, p->src_pool, y, page, i % rows)
                                              : td_kv_hca_row(l, p->src_pool, y, page, i % rows);
            if (i < rows) expect_values(at, l, row);
            if (i >= rows) expect_scales(at, row);
        }
}

static void expect_page_order(struct pair *p, uint32_t page, uint32_t tokens) {
    const struct td_kv_layout *l = &p->src;
    const uint8_t *at = p->block + HEADER;
    expect_entries(&at, p, page, tokens / 4, 4);
    for (uint32_t y = 0; y < l->layers; y++)
        for (uint32_t i = 0; l->ratio[y] == 4 && i < tokens / 4; i++)
            expect_bytes(&at, td_kv_index_key(l, p->src_pool, y, page, i), l->key_bytes);
    expect_entries(&at, p, page, tokens / 128, 128);
    assert_int_equal(at - p->block, td_kv_page_block_bytes(l, tokens));
}

static void expect_checksums(struct pair *p) {
    struct td_kv_block_header h;
    const uint8_t *at = p->block + HEADER;
    memcpy(&h, p->block, HEADER);
    for (int f = 0; f < TD_KV_FAMILIES; at += h.bytes[f++])
        if (td_kv_in_block(h.kind, f)) assert_true(h.checksum[f] == td_checksum(at, h.bytes[f]));
}

/* Two ends that agree on a wrong order or sum would pass every round trip. */
static void order_of(enum td_kv_row_dtype row) {
    static const uint8_t ratio[] = {128, 4, 0, 4, 128};
    const uint32_t lengths[] = {1, 3, 4, 6, 127, 128, 130, 391};
    struct pair p;
    struct td_error err;
    size_t len;
    pair_init(&p, 5, ratio, row, TD_KV_KEY_FP8);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint32_t n = lengths[i], tokens = n < 256 ? n : 256;
        assert_int_equal(
            td_kv_pack_slot(&p.src, p.src_slot, p.ticket, n, p.block, p.cap, &len, NULL, &err),
            TD_OK);
        expect_slot_order(&p, n);
        expect_checksums(&p);
        assert_int_equal(td_kv_pack_page(&p.src, p.src_pool, 2, p.ticket, 0, tokens, p.block, p.cap,
                                         &len, NULL, &err),
                         TD_OK);
        expect_page_order(&p, 2, tokens);
        expect_checksums(&p);
    }
    pair_finish(&p);
}

static void test_order(void **state) {
    (void)state;
    order_of(TD_KV_ROW_BF16);
    order_of(TD_KV_ROW_FP8);
}

static void test_no_room(void **state) {
    (void)state;
    static const uint8_t ratio[] = {0, 4, 128};
    struct pair p;
    struct td_error err;
    size_t len = 1;
    pair_init(&p, 3, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    memset(p.block, POISON, p.cap);
    size_t need = td_kv_slot_block_bytes(&p.src, 7);
    assert_int_equal(
        td_kv_pack_slot(&p.src, p.src_slot, p.ticket, 7, p.block, need - 1, &len, NULL, &err),
        TD_TOO_LONG);
    assert_int_equal(len, 1);
    for (size_t i = 0; i < p.cap; i++)
        assert_int_equal(p.block[i], POISON);
    assert_int_equal(
        td_kv_pack_slot(&p.src, p.src_slot, p.ticket, 7, p.block, need, &len, NULL, &err), TD_OK);
    pair_finish(&p);
}

/* ---- damage ---- */

enum { N = 391, LAST = 1, LAST_TOKENS = 135 }; /* residue 3, open rows of every kind */

/* One block as it left prefill, and what the receiver makes of a changed copy. */
struct damage {
    struct pair p;
    bool slot;
    struct td_kv_block_header good;
    uint8_t *bytes; /* the block */
    size_t len;
};

static void damage_init(struct damage *d, bool slot) {
    static const uint8_t ratio[] = {0, 4, 128, 4};
    struct td_error err;
    pair_init(&d->p, 4, ratio, TD_KV_ROW_BF16, TD_KV_KEY_FP8);
    d->slot = slot;
    d->bytes = malloc(d->p.cap + 1);
    td_status st = slot ? td_kv_pack_slot(&d->p.src, d->p.src_slot, d->p.ticket, N, d->bytes,
                                          d->p.cap, &d->len, &d->good, &err)
                        : td_kv_pack_page(&d->p.src, d->p.src_pool, 4, d->p.ticket, LAST,
                                          LAST_TOKENS, d->bytes, d->p.cap, &d->len, &d->good, &err);
    assert_int_equal(st, TD_OK);
    memcpy(d->p.block, d->bytes, d->len);
}

static void damage_finish(struct damage *d) {
    free(d->bytes);
    pair_finish(&d->p);
}

/* Where the block's rows belong, poison again: a family is summed on its way there. */
static void forget_rows(struct damage *d) {
    if (d->slot)
        memset(d->p.dst_slot, POISON, d->p.dst.slot_bytes);
    else
        td_kv_copy_page(&d->p.dst, d->p.dst_pool, 0, 2);
}

/* Gives d->p.block, `len` bytes, to the receiver: must be refused with `want` and a sentence with
 * `words`, must not write outside its page or slot, and there only when a family's checksum is
 * wrong; the block as sent is restored for the next attempt. */
static void refused(struct damage *d, size_t len, td_status want, const char *words) {
    struct td_error err = {.text = ""};
    struct td_kv_block_header h;
    memset(&h, POISON, sizeof h);
    struct pair *p = &d->p;
    td_status st =
        d->slot ? td_kv_unpack_slot(&p->dst, p->block, len, p->ticket, N, p->dst_slot, &h, &err)
                : td_kv_unpack_page(&p->dst, p->block, len, p->ticket, N, LAST, p->dst_pool, 2, &h,
                                    &err);
    if (st != want || !strstr(err.text, words))
        fail_msg("expected %s with \"%s\", found %s: %s", td_status_name(want), words,
                 td_status_name(st), st ? err.text : "");
    assert_non_null(strstr(err.text, d->slot ? "KV slot block: " : "KV page block 1: "));
    for (size_t i = 0; i < sizeof h; i++)
        assert_int_equal(((uint8_t *)&h)[i], POISON);
    if (st == TD_CORRUPT && strstr(err.text, ": expected checksum")) forget_rows(d);
    memcpy(p->block, d->bytes, d->len);
}

/* A header that is sound in itself but says something else. */
static void resign(struct damage *d, struct td_kv_block_header h) {
    h.header_checksum = 0;
    h.header_checksum = td_checksum(&h, sizeof h);
    memcpy(d->p.block, &h, sizeof h);
}

static void damage_length(struct damage *d) {
    for (size_t i = 0; i < HEADER; i += 5)
        refused(d, i, TD_CORRUPT, "at least 256 bytes");
    refused(d, HEADER, TD_CORRUPT, "bytes, found 256");
    refused(d, d->len - 1, TD_CORRUPT, "bytes, found");
    refused(d, d->len / 2, TD_CORRUPT, "bytes, found");
    refused(d, d->len + 1, TD_CORRUPT, "bytes, found");
}

static void damage_bits(struct damage *d) {
    for (size_t bit = 0; bit < HEADER * 8; bit++) {
        d->p.block[bit / 8] ^= (uint8_t)(1u << bit % 8);
        refused(d, d->len, TD_CORRUPT, bit < 32 ? "magic" : "header checksum");
    }
    size_t at = HEADER;
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        for (int i = 0; d->good.bytes[f] && i < 60; i++) {
            size_t byte = i == 0   ? 0
                          : i == 1 ? d->good.bytes[f] - 1
                                   : next_random() % d->good.bytes[f];
            d->p.block[at + byte] ^= (uint8_t)(1u << next_random() % 8);
            refused(d, d->len, TD_CORRUPT, td_kv_family_name(f));
        }
        at += d->good.bytes[f];
    }
    assert_int_equal(at, d->len);
}

/* The sender left a family out, consistently. */
static void damage_dropped_family(struct damage *d) {
    size_t at = HEADER;
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        struct td_kv_block_header h = d->good;
        if (!h.bytes[f]) continue;
        memmove(d->p.block + at, d->p.block + at + h.bytes[f], d->len - at - h.bytes[f]);
        h.body_bytes -= h.bytes[f];
        at += h.bytes[f];
        h.rows[f] = h.bytes[f] = 0;
        h.checksum[f] = td_checksum("", 0);
        resign(d, h);
        refused(d, HEADER + h.body_bytes, TD_PROTOCOL, td_kv_family_name(f));
    }
}

static void damage_words(struct damage *d) {
    struct td_kv_block_header h = d->good;
    h.ticket--, resign(d, h), h = d->good;
    refused(d, d->len, TD_STALE, "ticket: expected 77, found 76");
    h.epoch--, resign(d, h), h = d->good;
    refused(d, d->len, TD_STALE, "epoch: expected 225, found 224");
    h.fingerprint++, resign(d, h), h = d->good;
    refused(d, d->len, TD_MISMATCH, "layout");
    h.version++, resign(d, h), h = d->good;
    refused(d, d->len, TD_MISMATCH, "wire version");
    h.index++, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "block index");
    h.kind ^= 3, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "kind of block");
    h.first_token++, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "first token");
    h.tokens--, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "number of tokens");
    h.header_bytes++, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "header bytes");
    h.body_bytes++, resign(d, h), h = d->good;
    refused(d, d->len + 1, TD_PROTOCOL, "body bytes");
    h.reserved[2] = 1, resign(d, h), h = d->good;
    refused(d, d->len, TD_PROTOCOL, "reserved");
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        h.rows[f]++, resign(d, h), h = d->good;
        refused(d, d->len, TD_PROTOCOL, "number of rows");
        h.bytes[f] += UINT64_MAX - 3, resign(d, h), h = d->good;
        refused(d, d->len, TD_PROTOCOL, td_kv_family_name(f));
        h.checksum[f] ^= 1, resign(d, h), h = d->good;
        bool carried = td_kv_in_block(h.kind, f);
        refused(d, d->len, carried ? TD_CORRUPT : TD_PROTOCOL, td_kv_family_name(f));
    }
}

static void test_damaged_blocks(void **state) {
    (void)state;
    for (int slot = 0; slot < 2; slot++) {
        struct damage d;
        damage_init(&d, slot);
        damage_length(&d);
        damage_bits(&d);
        damage_dropped_family(&d);
        damage_words(&d);
        assert_as_wanted(&d.p); /* not one byte was written elsewhere */
        damage_finish(&d);
    }
}

static void test_swapped_blocks(void **state) {
    (void)state;
    struct damage d;
    struct td_error err;
    size_t len;
    damage_init(&d, false);
    struct pair *p = &d.p;
    /* Block 0 where block 1 belongs, and the slot block where a page block belongs. */
    assert_int_equal(td_kv_pack_page(&p->src, p->src_pool, 3, p->ticket, 0, 256, p->block, p->cap,
                                     &len, NULL, &err),
                     TD_OK);
    refused(&d, len, TD_PROTOCOL, "block index: expected 1, found 0");
    assert_int_equal(
        td_kv_pack_slot(&p->src, p->src_slot, p->ticket, N, p->block, p->cap, &len, NULL, &err),
        TD_OK);
    refused(&d, len, TD_PROTOCOL, "kind of block: expected 1, found 2");
    /* The right header over another page's rows. */
    assert_int_equal(td_kv_pack_page(&p->src, p->src_pool, 0, p->ticket, LAST, LAST_TOKENS,
                                     p->block, p->cap, &len, NULL, &err),
                     TD_OK);
    memcpy(p->block, &d.good, HEADER);
    refused(&d, len, TD_CORRUPT, "CSA entries: expected checksum");
    /* Two keys of one layer change places. */
    uint8_t *keys = p->block + HEADER + d.good.bytes[TD_KV_CSA];
    memcpy(keys, d.bytes + (keys - p->block) + 132, 132);
    memcpy(keys + 132, d.bytes + (keys - p->block), 132);
    refused(&d, d.len, TD_CORRUPT, "indexer keys");
    assert_as_wanted(p);
    damage_finish(&d);
}

/* The fault that is hardest to see in text: only the open rows are sent. */
static void test_previous_window_missing(void **state) {
    (void)state;
    struct damage d;
    damage_init(&d, true);
    const size_t previous = 4 * 2 * 512 * 4, open = 3 * 2 * 1024 * 4; /* per layer, 2 layers */
    struct td_kv_block_header h = d.good;
    uint8_t *state5 = d.p.block + HEADER + h.bytes[TD_KV_WINDOW];
    const uint8_t *from = d.bytes + HEADER + h.bytes[TD_KV_WINDOW];
    assert_int_equal(h.bytes[TD_KV_CSA_STATE], 2 * (previous + open));
    memcpy(state5, from + previous, open);
    memcpy(state5 + open, from + 2 * previous + open, open);
    memcpy(state5 + 2 * open, from + 2 * (previous + open),
           h.bytes[TD_KV_INDEX_STATE] + h.bytes[TD_KV_HCA_STATE]);
    h.rows[TD_KV_CSA_STATE] -= 2 * 4;
    h.bytes[TD_KV_CSA_STATE] -= 2 * previous;
    h.body_bytes -= 2 * previous;
    h.checksum[TD_KV_CSA_STATE] = td_checksum(state5, h.bytes[TD_KV_CSA_STATE]);
    resign(&d, h);
    refused(&d, HEADER + h.body_bytes, TD_PROTOCOL,
            "CSA compressor state, number of rows: expected 14, found 6");
    assert_as_wanted(&d.p);
    damage_finish(&d);
}

static void test_peek(void **state) {
    (void)state;
    struct damage d;
    struct td_error err;
    struct td_kv_block_header h;
    damage_init(&d, true);
    assert_int_equal(td_kv_peek(d.bytes, d.len, &h, &err), TD_OK);
    assert_int_equal(h.kind, TD_KV_SLOT_BLOCK);
    assert_int_equal(h.ticket, 77);
    assert_int_equal(h.index, 2);
    assert_int_equal(h.tokens, N);
    assert_int_equal(td_kv_peek(d.bytes, HEADER - 1, &h, &err), TD_CORRUPT);
    d.bytes[40]++;
    assert_int_equal(td_kv_peek(d.bytes, d.len, &h, &err), TD_CORRUPT);
    damage_finish(&d);
}

int main(int argc, char **argv) {
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_damaged_blocks),
        cmocka_unit_test(test_swapped_blocks),
        cmocka_unit_test(test_previous_window_missing),
        cmocka_unit_test(test_peek),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

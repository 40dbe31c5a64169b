/* Packing and unpacking of wire blocks. One walk over a family serves both directions, so that the
 * order on the wire cannot differ between them. */
#include "common/kv/wire.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/kv/checksum.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "blocks are little-endian in memory");

enum { HEADER = sizeof(struct td_kv_block_header), SENTENCE = 320, LINE = TD_CHECKSUM_LINE };

/* ---- what belongs into a block ---- */

/* A page block starts at a multiple of 256, so its `tokens` leave what a sequence of that length
 * leaves. */
static uint64_t block_rows(const struct td_kv_layout *l, enum td_kv_block_kind kind, int family,
                           uint32_t tokens) {
    return td_kv_in_block(kind, family) ? td_kv_rows(l, family, tokens) : 0;
}

static uint64_t block_bytes(const struct td_kv_layout *l, enum td_kv_block_kind kind, int family,
                            uint32_t tokens) {
    return td_kv_in_block(kind, family) ? td_kv_bytes(l, family, tokens) : 0;
}

static uint64_t body_bytes(const struct td_kv_layout *l, enum td_kv_block_kind kind,
                           uint32_t tokens) {
    uint64_t sum = 0;
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        sum += block_bytes(l, kind, f, tokens);
    return sum;
}

size_t td_kv_page_block_bytes(const struct td_kv_layout *l, uint32_t tokens) {
    assert(tokens >= 1 && tokens <= TD_KV_PAGE_TOKENS);
    return HEADER + body_bytes(l, TD_KV_PAGE_BLOCK, tokens);
}

size_t td_kv_slot_block_bytes(const struct td_kv_layout *l, uint32_t n) {
    return HEADER + body_bytes(l, TD_KV_SLOT_BLOCK, n);
}

size_t td_kv_page_block_bytes_max(const struct td_kv_layout *l) {
    return td_kv_page_block_bytes(l, TD_KV_PAGE_TOKENS);
}

/* Every family is at its largest when the window is full, a previous window exists and one token is
 * missing to both the next CSA and the next HCA entry. */
size_t td_kv_slot_block_bytes_max(const struct td_kv_layout *l) {
    return td_kv_slot_block_bytes(l, 2 * TD_KV_WINDOW_ROWS - 1);
}

/* ---- the walk ---- */

/* Between a wire body and this worker's memory. */
struct walk {
    const struct td_kv_layout *l;
    bool pack;               /* own -> wire, or wire -> own */
    uint8_t *wire;           /* the next byte */
    uint8_t *own;            /* pool or slot; only read when packing */
    struct td_kv_move *list; /* not NULL: nothing moves, stretches are listed from a body at 0 */
    uint32_t page;           /* page blocks */
    uint32_t n;              /* tokens in the page, or of the sequence */
    uint64_t body;           /* of the list */
    /* Of the family under way: */
    size_t moved;               /* bytes */
    struct td_checksum_run run; /* over its whole lines */
    uint8_t edge[LINE];         /* the line begun */
};

/* Bytes that are less than a line: through `edge`, so that they too are read once. */
static void move_edge(struct walk *w, uint8_t *to, const uint8_t *from, size_t bytes) {
    memcpy(w->edge + w->moved % LINE, from, bytes);
    memcpy(to, w->edge + w->moved % LINE, bytes);
    w->moved += bytes;
    w->wire += bytes;
    if (bytes && w->moved % LINE == 0)
        td_checksum_lines(&w->run, NULL, w->edge, 1, TD_CHECKSUM_READ);
}

static void list(struct walk *w, uint64_t own, size_t bytes) {
    *w->list++ = (struct td_kv_move){own, w->body, bytes};
    w->body += bytes;
    w->moved += bytes;
}

/* A slab is read next, by another process or by a put; a pool is larger than any cache. */
static void move(struct walk *w, void *own, size_t bytes) {
    if (bytes == 0) return; /* `own` may be NULL */
    if (w->list) {
        list(w, (uint64_t)((uint8_t *)own - w->own), bytes);
        return;
    }
    uint8_t *to = w->pack ? w->wire : own;
    const uint8_t *from = w->pack ? own : w->wire;
    size_t head = -w->moved % LINE;
    if (head > bytes) head = bytes;
    move_edge(w, to, from, head);
    size_t lines = (bytes - head) / LINE, whole = lines * LINE;
    td_checksum_lines(&w->run, to + head, from + head, lines,
                      w->pack ? TD_CHECKSUM_NEAR : TD_CHECKSUM_FAR);
    w->moved += whole;
    w->wire += whole;
    head += whole;
    move_edge(w, to + head, from + head, bytes - head);
}

/* Rows of one layer that lie together: values, then scales. The second stretch is behind the first
 * on the wire (`rows2` 0: there is none). */
static void move_rows(struct walk *w, struct td_kv_row first, uint32_t rows,
                      struct td_kv_row second, uint32_t rows2) {
    const struct td_kv_layout *l = w->l;
    move(w, first.values, (size_t)rows * l->row_stride);
    move(w, second.values, (size_t)rows2 * l->row_stride);
    if (!first.scales) return;
    move(w, first.scales, (size_t)rows * TD_KV_FP8_ROW_SCALES);
    move(w, second.scales, (size_t)rows2 * TD_KV_FP8_ROW_SCALES);
}

/* The rows of one page and layer lie together in the pool. */
static void walk_page_family(struct walk *w, int family) {
    const struct td_kv_layout *l = w->l;
    const struct td_kv_row none = {0};
    for (uint32_t y = 0; y < l->layers; y++) {
        if (l->ratio[y] != (family == TD_KV_HCA ? 128 : 4)) continue;
        if (family == TD_KV_CSA)
            move_rows(w, td_kv_csa_row(l, w->own, y, w->page, 0), w->n / 4, none, 0);
        else if (family == TD_KV_INDEX)
            move(w, td_kv_index_key(l, w->own, y, w->page, 0), (size_t)(w->n / 4) * l->key_bytes);
        else
            move_rows(w, td_kv_hca_row(l, w->own, y, w->page, 0), w->n / 128, none, 0);
    }
}

/* By position; the ring is cut where it wraps. */
static void walk_window(struct walk *w) {
    const struct td_kv_layout *l = w->l;
    uint32_t rows = w->n < TD_KV_WINDOW_ROWS ? w->n : TD_KV_WINDOW_ROWS;
    uint32_t first = w->n - rows;
    uint32_t to_wrap = TD_KV_WINDOW_ROWS - first % TD_KV_WINDOW_ROWS;
    uint32_t head = rows < to_wrap ? rows : to_wrap;
    for (uint32_t y = 0; y < l->layers; y++)
        move_rows(w, td_kv_window_row(l, w->own, y, first), head,
                  td_kv_window_row(l, w->own, y, first + head), rows - head);
}

/* The state of an overlapping compressor: first halves of the previous window, whole open rows. */
static void walk_overlap_state(struct walk *w, bool index) {
    const struct td_kv_layout *l = w->l;
    const uint32_t dim = index ? TD_KV_INDEX_STATE_DIM : TD_KV_CSA_STATE_DIM;
    const uint32_t open = w->n - w->n % 4;
    for (uint32_t y = 0; y < l->layers; y++) {
        if (l->ratio[y] != 4) continue;
        for (uint32_t t = open >= 4 ? open - 4 : open; t < w->n; t++) {
            float *row =
                index ? td_kv_index_state(l, w->own, y, t) : td_kv_csa_state(l, w->own, y, t);
            if (t < open) {
                move(w, row, dim / 2 * sizeof(float));
                move(w, row + dim, dim / 2 * sizeof(float));
            } else {
                move(w, row, 2 * dim * sizeof(float));
            }
        }
    }
}

/* Open rows start at a multiple of the ring's length: they never wrap. */
static void walk_hca_state(struct walk *w) {
    const struct td_kv_layout *l = w->l;
    uint32_t rows = w->n % TD_KV_HCA_RING;
    for (uint32_t y = 0; y < l->layers; y++)
        if (l->ratio[y] == 128)
            move(w, td_kv_hca_state(l, w->own, y, w->n - rows),
                 (size_t)rows * 2 * TD_KV_HCA_STATE_DIM * sizeof(float));
}

static void walk_rows(struct walk *w, int family) {
    switch ((enum td_kv_family)family) {
    case TD_KV_CSA:
    case TD_KV_INDEX:
    case TD_KV_HCA:
        walk_page_family(w, family);
        return;
    case TD_KV_WINDOW:
        walk_window(w);
        return;
    case TD_KV_CSA_STATE:
    case TD_KV_INDEX_STATE:
        walk_overlap_state(w, family == TD_KV_INDEX_STATE);
        return;
    case TD_KV_HCA_STATE:
        walk_hca_state(w);
        return;
    case TD_KV_FAMILIES:
        return;
    }
}

/* Moves a family; its checksum. */
static uint64_t walk_family(struct walk *w, int family, uint64_t bytes) {
    w->moved = 0;
    w->run = (struct td_checksum_run){0};
    walk_rows(w, family);
    assert(w->moved == bytes);
    return td_checksum_finish(&w->run, w->edge, w->moved % LINE);
}

/* ---- packing ---- */

static uint64_t header_checksum(const struct td_kv_block_header *h) {
    struct td_kv_block_header copy = *h;
    copy.header_checksum = 0;
    return td_checksum(&copy, sizeof copy);
}

void td_kv_begin_header(const struct td_kv_layout *l, enum td_kv_block_kind kind,
                        struct td_kv_ticket ticket, uint32_t index, uint32_t n,
                        struct td_kv_block_header *ret) {
    *ret = (struct td_kv_block_header){
        .magic = TD_KV_WIRE_MAGIC,
        .version = TD_KV_WIRE_VERSION,
        .kind = (uint16_t)kind,
        .fingerprint = l->fingerprint,
        .epoch = ticket.epoch,
        .ticket = ticket.ticket,
        .index = index,
        .first_token = kind == TD_KV_PAGE_BLOCK ? index * TD_KV_PAGE_TOKENS : 0,
        .tokens = n,
        .header_bytes = HEADER,
        .body_bytes = body_bytes(l, kind, n),
    };
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        ret->rows[f] = block_rows(l, kind, f, n);
        ret->bytes[f] = block_bytes(l, kind, f, n);
    }
}

void td_kv_seal_header(struct td_kv_block_header *h, const uint64_t checksum[TD_KV_FAMILIES]) {
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        h->checksum[f] = td_kv_in_block(h->kind, f) ? checksum[f] : 0;
    h->header_checksum = header_checksum(h);
}

static td_status pack(struct walk *w, enum td_kv_block_kind kind, struct td_kv_ticket ticket,
                      uint32_t index, void *dst, size_t cap, size_t *ret_len,
                      struct td_kv_block_header *ret_header, struct td_error *err) {
    struct td_kv_block_header h;
    uint64_t checksum[TD_KV_FAMILIES] = {0};
    td_kv_begin_header(w->l, kind, ticket, index, w->n, &h);
    size_t len = HEADER + h.body_bytes;
    if (len > cap)
        return td_fail(err, TD_TOO_LONG, "KV block: needs %zu bytes, room for %zu", len, cap);
    w->wire = (uint8_t *)dst + HEADER;
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        if (td_kv_in_block(kind, f)) checksum[f] = walk_family(w, f, h.bytes[f]);
    td_kv_seal_header(&h, checksum);
    memcpy(dst, &h, HEADER);
    if (ret_header) *ret_header = h;
    *ret_len = len;
    return TD_OK;
}

td_status td_kv_pack_page(const struct td_kv_layout *l, const void *pool, uint32_t page,
                          struct td_kv_ticket ticket, uint32_t index, uint32_t tokens, void *dst,
                          size_t cap, size_t *ret_len, struct td_kv_block_header *ret_header,
                          struct td_error *err) {
    assert(page < l->pages && tokens >= 1 && tokens <= TD_KV_PAGE_TOKENS);
    assert(index < UINT32_MAX / TD_KV_PAGE_TOKENS);
    struct walk w = {
        .l = l, .pack = true, .own = (uint8_t *)(uintptr_t)pool, .page = page, .n = tokens};
    return pack(&w, TD_KV_PAGE_BLOCK, ticket, index, dst, cap, ret_len, ret_header, err);
}

td_status td_kv_pack_slot(const struct td_kv_layout *l, const void *slot,
                          struct td_kv_ticket ticket, uint32_t n, void *dst, size_t cap,
                          size_t *ret_len, struct td_kv_block_header *ret_header,
                          struct td_error *err) {
    assert(n >= 1);
    struct walk w = {.l = l, .pack = true, .own = (uint8_t *)(uintptr_t)slot, .n = n};
    return pack(&w, TD_KV_SLOT_BLOCK, ticket, td_kv_page_blocks(n), dst, cap, ret_len, ret_header,
                err);
}

/* ---- listing ---- */

/* Of a layer: two stretches of values and of scales where the window wraps; two states of
 * overlapping compressors of four cut rows and three whole ones; open rows. Pages have fewer. */
size_t td_kv_moves_max(const struct td_kv_layout *l) {
    return (size_t)l->layers * (4 + 2 * (4 * 2 + 3) + 1);
}

size_t td_kv_moves(const struct td_kv_layout *l, enum td_kv_block_kind kind, const void *own,
                   uint32_t page, uint32_t n, struct td_kv_move *ret) {
    struct walk w = {.l = l, .own = (uint8_t *)(uintptr_t)own, .page = page, .n = n, .list = ret};
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        if (td_kv_in_block(kind, f)) walk_rows(&w, f);
    return (size_t)(w.list - ret);
}

/* ---- checking ---- */

/* What a header must say to be readable at all. */
static const char *unreadable(const struct td_kv_block_header *h, char *buf, size_t cap,
                              td_status *ret_status) {
    *ret_status = TD_CORRUPT;
    if (h->magic != TD_KV_WIRE_MAGIC)
        snprintf(buf, cap, "expected magic %08x, found %08x", TD_KV_WIRE_MAGIC, h->magic);
    else if (h->header_checksum != header_checksum(h))
        snprintf(buf, cap, "header checksum: expected %016" PRIx64 ", found %016" PRIx64,
                 header_checksum(h), h->header_checksum);
    else if (h->version != TD_KV_WIRE_VERSION) {
        snprintf(buf, cap, "expected wire version %d, found %u", TD_KV_WIRE_VERSION, h->version);
        *ret_status = TD_MISMATCH;
    } else
        return NULL;
    return buf;
}

static bool differs(char *buf, size_t cap, const char *what, uint64_t want, uint64_t have) {
    if (want != have)
        snprintf(buf, cap, "%s: expected %" PRIu64 ", found %" PRIu64, what, want, have);
    return want != have;
}

static const char *wrong_family(const struct td_kv_layout *l, const struct td_kv_block_header *h,
                                uint32_t tokens, char *buf, size_t cap) {
    for (int f = 0; f < TD_KV_FAMILIES; f++) {
        char what[64];
        snprintf(what, sizeof what, "%s, number of rows", td_kv_family_name(f));
        if (differs(buf, cap, what, block_rows(l, h->kind, f, tokens), h->rows[f])) return buf;
        snprintf(what, sizeof what, "%s, bytes", td_kv_family_name(f));
        if (differs(buf, cap, what, block_bytes(l, h->kind, f, tokens), h->bytes[f])) return buf;
        if (!td_kv_in_block(h->kind, f) && h->checksum[f] != 0) {
            snprintf(buf, cap, "%s: expected no checksum in this kind of block, found %016" PRIx64,
                     td_kv_family_name(f), h->checksum[f]);
            return buf;
        }
    }
    return NULL;
}

const char *td_kv_block_invalid(const struct td_kv_layout *l, const struct td_kv_block_header *h,
                                enum td_kv_block_kind kind, struct td_kv_ticket ticket, uint32_t n,
                                uint32_t index, char *buf, size_t cap, td_status *ret_status) {
    if (unreadable(h, buf, cap, ret_status)) return buf;
    *ret_status = TD_MISMATCH;
    if (h->fingerprint != l->fingerprint) {
        snprintf(buf, cap, "layout: expected fingerprint %016" PRIx64 ", found %016" PRIx64,
                 l->fingerprint, h->fingerprint);
        return buf;
    }
    *ret_status = TD_STALE;
    if (differs(buf, cap, "epoch", ticket.epoch, h->epoch)) return buf;
    if (differs(buf, cap, "ticket", ticket.ticket, h->ticket)) return buf;

    *ret_status = TD_PROTOCOL;
    bool page = kind == TD_KV_PAGE_BLOCK;
    uint32_t tokens = page ? td_kv_block_tokens(n, index) : n;
    if (differs(buf, cap, "kind of block", kind, h->kind)) return buf;
    if (differs(buf, cap, "block index", index, h->index)) return buf;
    if (differs(buf, cap, "first token", page ? index * TD_KV_PAGE_TOKENS : 0, h->first_token))
        return buf;
    if (differs(buf, cap, "number of tokens", tokens, h->tokens)) return buf;
    if (differs(buf, cap, "header bytes", HEADER, h->header_bytes)) return buf;
    if (wrong_family(l, h, tokens, buf, cap)) return buf;
    if (differs(buf, cap, "body bytes", body_bytes(l, kind, tokens), h->body_bytes)) return buf;
    for (size_t i = 0; i < sizeof h->reserved / sizeof *h->reserved; i++)
        if (differs(buf, cap, "reserved field", 0, h->reserved[i])) return buf;
    *ret_status = TD_OK;
    return NULL;
}

td_status td_kv_peek(const void *block, size_t len, struct td_kv_block_header *ret,
                     struct td_error *err) {
    if (len < HEADER)
        return td_fail(err, TD_CORRUPT, "KV block: expected at least %d bytes, found %zu", HEADER,
                       len);
    struct td_kv_block_header h;
    memcpy(&h, block, HEADER);
    char why[SENTENCE];
    td_status st;
    if (unreadable(&h, why, sizeof why, &st)) return td_fail(err, st, "KV block: %s", why);
    *ret = h;
    return TD_OK;
}

/* ---- unpacking ---- */

enum { NAME = 48 };

static const char *block_name(enum td_kv_block_kind kind, uint32_t index, char buf[NAME]) {
    if (kind == TD_KV_PAGE_BLOCK)
        snprintf(buf, NAME, "KV page block %u", index);
    else
        snprintf(buf, NAME, "KV slot block");
    return buf;
}

/* The sender can still write to a landing slab, so what is checked is the copy. */
td_status td_kv_check_header(const struct td_kv_layout *l, const void *block, size_t len,
                             enum td_kv_block_kind kind, struct td_kv_ticket ticket, uint32_t n,
                             uint32_t index, struct td_kv_block_header *ret, struct td_error *err) {
    char name[NAME], why[SENTENCE];
    block_name(kind, index, name);
    if (len < HEADER)
        return td_fail(err, TD_CORRUPT, "%s: expected at least %d bytes, found %zu", name, HEADER,
                       len);
    memcpy(ret, block, HEADER);
    td_status st;
    if (td_kv_block_invalid(l, ret, kind, ticket, n, index, why, sizeof why, &st))
        return td_fail(err, st, "%s: %s", name, why);
    if (len != HEADER + ret->body_bytes)
        return td_fail(err, TD_CORRUPT, "%s: expected %" PRIu64 " bytes, found %zu", name,
                       HEADER + ret->body_bytes, len);
    return TD_OK;
}

td_status td_kv_check_family(const struct td_kv_block_header *h, enum td_kv_family family,
                             uint64_t found, struct td_error *err) {
    char name[NAME];
    if (found == h->checksum[family]) return TD_OK;
    return td_fail(err, TD_CORRUPT, "%s: %s: expected checksum %016" PRIx64 ", found %016" PRIx64,
                   block_name(h->kind, h->index, name), td_kv_family_name(family),
                   h->checksum[family], found);
}

static td_status unpack(struct walk *w, const void *block, size_t len, enum td_kv_block_kind kind,
                        struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                        struct td_kv_block_header *ret_header, struct td_error *err) {
    struct td_kv_block_header h;
    TD_TRY(td_kv_check_header(w->l, block, len, kind, ticket, n, index, &h, err));
    w->wire = (uint8_t *)(uintptr_t)block + HEADER;
    td_status st = TD_OK;
    for (int f = 0; f < TD_KV_FAMILIES && st == TD_OK; f++)
        if (td_kv_in_block(kind, f))
            st = td_kv_check_family(&h, f, walk_family(w, f, h.bytes[f]), err);
    td_checksum_settle(); /* after a fault too: the page is somebody else's soon */
    if (st == TD_OK && ret_header) *ret_header = h;
    return st;
}

td_status td_kv_unpack_page(const struct td_kv_layout *l, const void *block, size_t len,
                            struct td_kv_ticket ticket, uint32_t n, uint32_t index, void *pool,
                            uint32_t page, struct td_kv_block_header *ret_header,
                            struct td_error *err) {
    assert(page < l->pages && n >= 1 && index < td_kv_page_blocks(n));
    struct walk w = {.l = l, .own = pool, .page = page, .n = td_kv_block_tokens(n, index)};
    return unpack(&w, block, len, TD_KV_PAGE_BLOCK, ticket, n, index, ret_header, err);
}

td_status td_kv_unpack_slot(const struct td_kv_layout *l, const void *block, size_t len,
                            struct td_kv_ticket ticket, uint32_t n, void *slot,
                            struct td_kv_block_header *ret_header, struct td_error *err) {
    assert(n >= 1);
    struct walk w = {.l = l, .own = slot, .n = n};
    return unpack(&w, block, len, TD_KV_SLOT_BLOCK, ticket, n, td_kv_page_blocks(n), ret_header,
                  err);
}

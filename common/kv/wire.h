/* Wire blocks: how KV state looks between two workers, whatever their pools look like.
 *
 * A prompt of N tokens travels as ceil(N / 256) page blocks and one slot block, the last.
 *   page block i: what tokens 256 i .. 256 i + tokens - 1 left in families CSA, INDEX, HCA;
 *                 tokens = 256, or N mod 256 in the last one;
 *   slot block:   families WINDOW, CSA_STATE, INDEX_STATE, HCA_STATE after N tokens.
 *
 * A block is one header of 256 bytes, then the families one after the other, each [layer][row] of
 * valid rows only, nothing between them:
 *   CSA, HCA     [layers of the kind][rows] of row_bytes, by entry; a layer's FP8 rows are the 576
 *                value bytes of each, then the 8 scale bytes of each
 *   INDEX        [CSA layers][rows] of key_bytes, by entry
 *   WINDOW       [layers][min(N, 128)] of row_bytes, positions max(0, N - 128) .. N - 1; FP8 rows
 *                as above
 *   CSA_STATE    [CSA layers] of: if N >= 4 the previous window, 4 rows of 512 u then 512 g (first-
 *                half channels), positions 4 floor(N/4) - 4 ..; then the N mod 4 open rows of
 *                1,024 u then 1,024 g
 *   INDEX_STATE  the same with 128 and 256
 *   HCA_STATE    [HCA layers][N mod 128] of 512 u then 512 g
 * The previous window's second half is not sent: the entry it belonged to is already closed.
 * A family's checksum is td_checksum() over its bytes here. Little-endian throughout.
 *
 * A block's header is checked before its first byte goes into a pool, and its families are summed
 * on the way, each byte being read once: what was summed is what was written, even while a sender
 * that has gone wrong still writes. So nothing may read a page or slot before its block was found
 * right. Where the bytes go follows from the receiver's own layout and never from the header. */
#ifndef TD_COMMON_KV_WIRE_H
#define TD_COMMON_KV_WIRE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/kv/layout.h"

#define TD_KV_WIRE_MAGIC 0x564B4454u /* "TDKV" */

enum td_kv_block_kind { TD_KV_PAGE_BLOCK = 1, TD_KV_SLOT_BLOCK = 2 };

struct td_kv_block_header {
    uint32_t magic;
    uint16_t version;         /* TD_KV_WIRE_VERSION */
    uint16_t kind;            /* td_kv_block_kind */
    uint64_t header_checksum; /* td_checksum of these 256 bytes with this field zero */
    uint64_t fingerprint;     /* of the layout */
    uint64_t epoch;           /* of the decode worker that gave the ticket */
    uint64_t ticket;
    uint32_t index;                /* page block: i; slot block: number of page blocks */
    uint32_t first_token;          /* page block: 256 i; slot block: 0 */
    uint32_t tokens;               /* page block: 1..256; slot block: N */
    uint32_t header_bytes;         /* 256 */
    uint64_t body_bytes;           /* behind the header */
    uint64_t rows[TD_KV_FAMILIES]; /* summed over layers; 0 for families of the other kind */
    uint64_t bytes[TD_KV_FAMILIES];
    uint64_t checksum[TD_KV_FAMILIES]; /* 0 for families of the other kind */
    uint64_t reserved[3];              /* 0 */
};
static_assert(sizeof(struct td_kv_block_header) == 256, "no padding, one size everywhere");

/* Which handoff a block belongs to. Both numbers come from the decode worker. */
struct td_kv_ticket {
    uint64_t epoch, ticket;
};

/* Whether blocks of this kind carry the family. */
static inline bool td_kv_in_block(enum td_kv_block_kind kind, enum td_kv_family family) {
    bool page = family == TD_KV_CSA || family == TD_KV_INDEX || family == TD_KV_HCA;
    return page == (kind == TD_KV_PAGE_BLOCK);
}

/* ---- sizes in bytes, header included ---- */

/* `tokens` 1..256. */
size_t td_kv_page_block_bytes(const struct td_kv_layout *l, uint32_t tokens);
/* `n` >= 1 tokens of the sequence. */
size_t td_kv_slot_block_bytes(const struct td_kv_layout *l, uint32_t n);
/* The largest of each kind: what a slab must hold. */
size_t td_kv_page_block_bytes_max(const struct td_kv_layout *l);
size_t td_kv_slot_block_bytes_max(const struct td_kv_layout *l);
/* Page blocks of a prompt of `n` tokens; the slot block comes on top. */
static inline uint32_t td_kv_page_blocks(uint32_t n) {
    return n / TD_KV_PAGE_TOKENS + (n % TD_KV_PAGE_TOKENS != 0);
}
/* Tokens in page block `index` < td_kv_page_blocks(n) of a prompt of `n` tokens. */
static inline uint32_t td_kv_block_tokens(uint32_t n, uint32_t index) {
    uint32_t left = n - index * TD_KV_PAGE_TOKENS;
    return left < TD_KV_PAGE_TOKENS ? left : TD_KV_PAGE_TOKENS;
}

/* ---- packing ----
 * dst [cap] need not be aligned. TOO_LONG when the block does not fit. *ret_len is the block's
 * length, *ret_header (may be NULL) a copy of its header. `pool` and `slot` are only read. */

TD_MUST_USE td_status td_kv_pack_page(const struct td_kv_layout *l, const void *pool, uint32_t page,
                                      struct td_kv_ticket ticket, uint32_t index, uint32_t tokens,
                                      void *dst, size_t cap, size_t *ret_len,
                                      struct td_kv_block_header *ret_header, struct td_error *err);
TD_MUST_USE td_status td_kv_pack_slot(const struct td_kv_layout *l, const void *slot,
                                      struct td_kv_ticket ticket, uint32_t n, void *dst, size_t cap,
                                      size_t *ret_len, struct td_kv_block_header *ret_header,
                                      struct td_error *err);

/* ---- unpacking ----
 * `n` is the prompt's length as agreed at admission. On failure `err` says what was expected and
 * found; whatever the fault, nothing outside the page or slot has been written, and there only when
 * a family's checksum was wrong: its content is then anything.
 *   CORRUPT   damaged header or family, wrong length;
 *   MISMATCH  another layout or wire version;
 *   STALE     another ticket or epoch;
 *   PROTOCOL  another index, kind, token or row count than this place of the handoff calls for.
 * *ret_header (may be NULL) receives an aligned copy of the verified header. */

TD_MUST_USE td_status td_kv_unpack_page(const struct td_kv_layout *l, const void *block, size_t len,
                                        struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                        void *pool, uint32_t page,
                                        struct td_kv_block_header *ret_header,
                                        struct td_error *err);
TD_MUST_USE td_status td_kv_unpack_slot(const struct td_kv_layout *l, const void *block, size_t len,
                                        struct td_kv_ticket ticket, uint32_t n, void *slot,
                                        struct td_kv_block_header *ret_header,
                                        struct td_error *err);

/* ---- in steps, for who moves the bytes itself ----
 * Where pool and slots lie in a device's memory, its kernels move and sum the rows; what moves
 * where, headers and verdicts are decided here, by the walk and the checks above. */

/* One stretch of a block: `bytes` at `own` in the pool or slot, at `body` behind the header. All
 * are multiples of 4. */
struct td_kv_move {
    uint64_t own, body, bytes;
};
/* The most a block has, whatever its kind. */
size_t td_kv_moves_max(const struct td_kv_layout *l);
/* The stretches of a block in ascending order of `body`, without a gap, into ret [moves_max]; how
 * many. `own`: the pool with the page, or the slot; not read. `n`: tokens of the page, or of the
 * sequence. */
size_t td_kv_moves(const struct td_kv_layout *l, enum td_kv_block_kind kind, const void *own,
                   uint32_t page, uint32_t n, struct td_kv_move *ret);

/* A block's header but for its checksums; and with them. `n`: tokens of the page, or of the
 * sequence. */
void td_kv_begin_header(const struct td_kv_layout *l, enum td_kv_block_kind kind,
                        struct td_kv_ticket ticket, uint32_t index, uint32_t n,
                        struct td_kv_block_header *ret);
void td_kv_seal_header(struct td_kv_block_header *h, const uint64_t checksum[TD_KV_FAMILIES]);

/* The two halves of unpacking's verdict: everything but the rows, and the rows' checksums. */
TD_MUST_USE td_status td_kv_check_header(const struct td_kv_layout *l, const void *block,
                                         size_t len, enum td_kv_block_kind kind,
                                         struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                         struct td_kv_block_header *ret, struct td_error *err);
TD_MUST_USE td_status td_kv_check_family(const struct td_kv_block_header *h,
                                         enum td_kv_family family, uint64_t found,
                                         struct td_error *err);

/* Reads kind, ticket and index of a block that just arrived, to find out whom to give it to. Checks
 * length, magic, version and the header's checksum; what it says is not yet right for anybody. */
TD_MUST_USE td_status td_kv_peek(const void *block, size_t len, struct td_kv_block_header *ret,
                                 struct td_error *err);

/* A sentence saying why the header cannot be the expected block's, or NULL. `kind`, `index` and `n`
 * as above; writes to `buf` [cap]; *ret_status names the kind of fault. */
const char *td_kv_block_invalid(const struct td_kv_layout *l, const struct td_kv_block_header *h,
                                enum td_kv_block_kind kind, struct td_kv_ticket ticket, uint32_t n,
                                uint32_t index, char *buf, size_t cap, td_status *ret_status);

#endif

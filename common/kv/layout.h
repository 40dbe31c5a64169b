/* Where every byte of KV state lies: pool pages, slots, wire blocks.
 *
 * This folder alone knows offsets. Seven families exist per sequence; treating them as one cache
 * is how other systems corrupt text silently, so each has a name, a row count and a checksum.
 *
 * Pool: a page id stands for 256 tokens in all layers. Storage is layer-major: for each family
 * and layer all pages lie together, [layer][page][row]. Rows per page: CSA 64, index 64, HCA 2.
 * In a page of FP8 rows (and in a layer's window ring) the 576 value bytes of all rows come
 * first, then their 8 scale bytes each.
 * Slot: one fixed slab per running sequence with the window rings and the open compressor state.
 * Everything is little-endian; all functions are pure arithmetic. */
#ifndef TD_COMMON_KV_LAYOUT_H
#define TD_COMMON_KV_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/hd.h"
#include "common/base/status.h"

enum td_kv_family {
    TD_KV_WINDOW,      /* 1: window ring, 128 rows, every layer; row of position t at t mod 128 */
    TD_KV_CSA,         /* 2: CSA entries, one per 4 tokens, CSA layers */
    TD_KV_INDEX,       /* 3: indexer keys, one per 4 tokens, CSA layers */
    TD_KV_HCA,         /* 4: HCA entries, one per 128 tokens, HCA layers */
    TD_KV_CSA_STATE,   /* 5: CSA compressor open state, CSA layers */
    TD_KV_INDEX_STATE, /* 6: indexer compressor open state, CSA layers */
    TD_KV_HCA_STATE,   /* 7: HCA compressor open rows, HCA layers */
    TD_KV_FAMILIES,
};

/* 512 values. FP8 rows are mixed: 448 e4m3 with one e8m0 scale per 64, the 64 rotated ones bf16. */
enum td_kv_row_dtype { TD_KV_ROW_BF16, TD_KV_ROW_FP32, TD_KV_ROW_FP8 };
/* 128 values. */
enum td_kv_key_dtype { TD_KV_KEY_BF16, TD_KV_KEY_FP32, TD_KV_KEY_FP8, TD_KV_KEY_FP4 };

enum {
    TD_KV_WIRE_VERSION = 2, /* of wire blocks and checksums; part of the fingerprint */
    TD_KV_MAX_LAYERS = 128,
    TD_KV_MAX_PAGES = 1 << 24,
    TD_KV_PAGE_TOKENS = 256,
    TD_KV_CSA_PER_PAGE = 64,
    TD_KV_HCA_PER_PAGE = 2,
    TD_KV_WINDOW_ROWS = 128,
    TD_KV_CSA_RING = 8,   /* compressor state rows: position t at t mod 8; never copied */
    TD_KV_HCA_RING = 128, /* position t at t mod 128 */
    TD_KV_ROW_DIM = 512,
    TD_KV_KEY_DIM = 128,
    TD_KV_CSA_STATE_DIM = 1024,  /* two halves of 512 */
    TD_KV_INDEX_STATE_DIM = 256, /* two halves of 128 */
    TD_KV_HCA_STATE_DIM = 512,
    TD_KV_FP8_KEY_BYTES = 132,  /* 128 e4m3, then one fp32 scale; the row is only 4-aligned */
    TD_KV_FP4_KEY_BYTES = 68,   /* 64 pairs of e2m1, even value in the low nibble; 4 e8m0 scales */
    TD_KV_FP8_ROW_DIM = 448,    /* values of an FP8 row stored as e4m3, one scale per 64 */
    TD_KV_FP8_ROW_VALUES = 576, /* bytes: 448 e4m3, 64 bf16 */
    TD_KV_FP8_ROW_SCALES = 8,   /* bytes: 7 e8m0, one 0 */
};

/* Filled by td_kv_layout_init; read-only afterwards. */
struct td_kv_layout {
    uint32_t layers;
    uint8_t ratio[TD_KV_MAX_LAYERS];      /* 0, 4 or 128 */
    uint16_t csa_index[TD_KV_MAX_LAYERS]; /* n-th CSA layer, for layers with ratio 4 */
    uint16_t hca_index[TD_KV_MAX_LAYERS]; /* n-th HCA layer, for layers with ratio 128 */
    uint32_t csa_layers, hca_layers;
    enum td_kv_row_dtype row_dtype;
    enum td_kv_key_dtype key_dtype;
    uint32_t row_bytes;  /* 1,024, 2,048 or 584 */
    uint32_t row_stride; /* between neighbouring rows' values: row_bytes, or 576 for FP8 */
    uint32_t key_bytes;  /* 256, 512, 132 or 68 */
    uint32_t pages;      /* of this worker's pool; not part of the fingerprint */
    size_t csa_offset, index_offset, hca_offset, pool_bytes;        /* family starts in the pool */
    size_t slot_window, slot_csa, slot_index, slot_hca, slot_bytes; /* starts in a slot */
    uint64_t fingerprint; /* wire layout + `model_fingerprint` + dtypes: peers compare it */
};

/* `ratio` [layers] of 0 | 4 | 128; `pages` 1..TD_KV_MAX_PAGES. INVALID with a sentence otherwise.
 * All starts are multiples of 64 bytes, so a 64-aligned pool or slot has 64-aligned families. */
TD_MUST_USE td_status td_kv_layout_init(struct td_kv_layout *l, uint32_t layers,
                                        const uint8_t *ratio, enum td_kv_row_dtype row,
                                        enum td_kv_key_dtype key, uint32_t pages,
                                        uint64_t model_fingerprint, struct td_error *err);

/* ---- rows ---- */

/* Where a stored row lies: row_stride bytes of values; for FP8 rows TD_KV_FP8_ROW_SCALES bytes of
 * scales, else `scales` is NULL. */
struct td_kv_row {
    void *values;
    uint8_t *scales;
};

/* Row i of a block of `rows` rows. */
TD_HD static inline struct td_kv_row td_kv_block_row(const struct td_kv_layout *l, void *block,
                                               uint32_t rows, uint32_t i) {
    uint8_t *values = (uint8_t *)block;
    if (l->row_stride == l->row_bytes)
        return (struct td_kv_row){values + (size_t)i * l->row_stride, NULL};
    return (struct td_kv_row){values + (size_t)i * l->row_stride,
                              values + (size_t)rows * l->row_stride +
                                  (size_t)i * TD_KV_FP8_ROW_SCALES};
}
/* Row i of dense rows in canonical form: values, then scales, row after row. */
TD_HD static inline struct td_kv_row td_kv_dense_row(const struct td_kv_layout *l, const void *rows,
                                               size_t i) {
    uint8_t *values = (uint8_t *)(uintptr_t)rows + i * l->row_bytes;
    return (struct td_kv_row){values,
                              l->row_stride == l->row_bytes ? NULL : values + l->row_stride};
}
void td_kv_row_copy(const struct td_kv_layout *l, struct td_kv_row to, struct td_kv_row from);

/* ---- pool rows; `pool` is the start of pool_bytes ---- */

/* CSA entry i (0..63) of `page`. Token range of entry w: 4w..4w+3, page w / 64. */
TD_HD static inline struct td_kv_row td_kv_csa_row(const struct td_kv_layout *l, void *pool,
                                             uint32_t layer, uint32_t page, uint32_t i) {
    size_t row = ((size_t)l->csa_index[layer] * l->pages + page) * TD_KV_CSA_PER_PAGE;
    return td_kv_block_row(l, (uint8_t *)pool + l->csa_offset + row * l->row_bytes,
                           TD_KV_CSA_PER_PAGE, i);
}
/* Indexer key i (0..63) of `page`: key_bytes. */
TD_HD static inline void *td_kv_index_key(const struct td_kv_layout *l, void *pool, uint32_t layer,
                                    uint32_t page, uint32_t i) {
    size_t row = ((size_t)l->csa_index[layer] * l->pages + page) * TD_KV_CSA_PER_PAGE + i;
    return (uint8_t *)pool + l->index_offset + row * l->key_bytes;
}
/* HCA entry i (0..1) of `page`. */
TD_HD static inline struct td_kv_row td_kv_hca_row(const struct td_kv_layout *l, void *pool,
                                             uint32_t layer, uint32_t page, uint32_t i) {
    size_t row = ((size_t)l->hca_index[layer] * l->pages + page) * TD_KV_HCA_PER_PAGE;
    return td_kv_block_row(l, (uint8_t *)pool + l->hca_offset + row * l->row_bytes,
                           TD_KV_HCA_PER_PAGE, i);
}

/* Every row of page `from` into page `to`. */
void td_kv_copy_page(const struct td_kv_layout *l, void *pool, uint32_t from, uint32_t to);

/* ---- slot rows; `slot` is the start of slot_bytes ---- */

/* Window row of position t. */
TD_HD static inline struct td_kv_row td_kv_window_row(const struct td_kv_layout *l, void *slot,
                                                uint32_t layer, uint32_t t) {
    size_t row = (size_t)layer * TD_KV_WINDOW_ROWS;
    return td_kv_block_row(l, (uint8_t *)slot + l->slot_window + row * l->row_bytes,
                           TD_KV_WINDOW_ROWS, t % TD_KV_WINDOW_ROWS);
}
/* Compressor state row of position t: `dim` fp32 of u, then `dim` fp32 of g (ape added), where
 * dim is the family's *_STATE_DIM. */
TD_HD static inline float *td_kv_csa_state(const struct td_kv_layout *l, void *slot, uint32_t layer,
                                     uint32_t t) {
    size_t row = (size_t)l->csa_index[layer] * TD_KV_CSA_RING + t % TD_KV_CSA_RING;
    return (float *)(void *)((uint8_t *)slot + l->slot_csa) + row * 2 * TD_KV_CSA_STATE_DIM;
}
TD_HD static inline float *td_kv_index_state(const struct td_kv_layout *l, void *slot, uint32_t layer,
                                       uint32_t t) {
    size_t row = (size_t)l->csa_index[layer] * TD_KV_CSA_RING + t % TD_KV_CSA_RING;
    return (float *)(void *)((uint8_t *)slot + l->slot_index) + row * 2 * TD_KV_INDEX_STATE_DIM;
}
TD_HD static inline float *td_kv_hca_state(const struct td_kv_layout *l, void *slot, uint32_t layer,
                                     uint32_t t) {
    size_t row = (size_t)l->hca_index[layer] * TD_KV_HCA_RING + t % TD_KV_HCA_RING;
    return (float *)(void *)((uint8_t *)slot + l->slot_hca) + row * 2 * TD_KV_HCA_STATE_DIM;
}

/* Rows of `family` that `n` tokens leave valid, summed over its layers (a state family's row is
 * one ring row; for CSA and index state the previous window counts as 4 half rows). */
uint64_t td_kv_rows(const struct td_kv_layout *l, enum td_kv_family family, uint32_t n);

/* Bytes of those rows. */
uint64_t td_kv_bytes(const struct td_kv_layout *l, enum td_kv_family family, uint32_t n);

const char *td_kv_family_name(enum td_kv_family family);

#endif

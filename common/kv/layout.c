/* Sizes and starts of the seven families, and the fingerprint by which peers compare them. */
#include "common/kv/layout.h"

#include <string.h>

#include "common/kv/checksum.h"

enum { START_ALIGN = 64 };

static size_t align_up(size_t n) {
    return (n + START_ALIGN - 1) / START_ALIGN * START_ALIGN;
}

/* What two workers must share to exchange blocks: the order of fields is part of the format. */
static uint64_t fingerprint(const struct td_kv_layout *l, uint64_t model) {
    const uint64_t facts[] = {
        TD_KV_WIRE_VERSION, model,
        l->layers,          l->row_dtype,
        l->row_bytes,       l->key_dtype,
        l->key_bytes,       TD_KV_PAGE_TOKENS,
        TD_KV_WINDOW_ROWS,  TD_KV_CSA_STATE_DIM,
        TD_KV_HCA_PER_PAGE, TD_KV_INDEX_STATE_DIM,
        TD_KV_CSA_PER_PAGE, TD_KV_HCA_STATE_DIM,
        TD_KV_ROW_DIM,      TD_KV_KEY_DIM,
    };
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        h = td_mix64(h + td_mix64(facts[i]));
    for (uint32_t i = 0; i < l->layers; i++)
        h = td_mix64(h + td_mix64(l->ratio[i]));
    return h;
}

static td_status set_ratios(struct td_kv_layout *l, uint32_t layers, const uint8_t *ratio,
                            struct td_error *err) {
    if (layers == 0 || layers > TD_KV_MAX_LAYERS)
        return td_fail(err, TD_INVALID, "KV layout: expected 1 to %d layers, found %u",
                       TD_KV_MAX_LAYERS, layers);
    l->layers = layers;
    for (uint32_t i = 0; i < layers; i++) {
        l->ratio[i] = ratio[i];
        switch (ratio[i]) {
        case 0:
            break;
        case 4:
            l->csa_index[i] = (uint16_t)l->csa_layers++;
            break;
        case 128:
            l->hca_index[i] = (uint16_t)l->hca_layers++;
            break;
        default:
            return td_fail(err, TD_INVALID,
                           "KV layout: layer %u: expected a compression ratio of 0, 4 or 128, "
                           "found %u",
                           i, ratio[i]);
        }
    }
    return TD_OK;
}

static td_status set_dtypes(struct td_kv_layout *l, enum td_kv_row_dtype row,
                            enum td_kv_key_dtype key, struct td_error *err) {
    l->row_dtype = row;
    l->key_dtype = key;
    switch (row) {
    case TD_KV_ROW_BF16:
        l->row_bytes = TD_KV_ROW_DIM * 2;
        break;
    case TD_KV_ROW_FP32:
        l->row_bytes = TD_KV_ROW_DIM * 4;
        break;
    case TD_KV_ROW_FP8:
        l->row_bytes = TD_KV_FP8_ROW_VALUES + TD_KV_FP8_ROW_SCALES;
        break;
    default:
        return td_fail(err, TD_INVALID, "KV layout: unknown row type %u", (unsigned)row);
    }
    l->row_stride = row == TD_KV_ROW_FP8 ? TD_KV_FP8_ROW_VALUES : l->row_bytes;
    switch (key) {
    case TD_KV_KEY_BF16:
        l->key_bytes = TD_KV_KEY_DIM * 2;
        break;
    case TD_KV_KEY_FP32:
        l->key_bytes = TD_KV_KEY_DIM * 4;
        break;
    case TD_KV_KEY_FP8:
        l->key_bytes = TD_KV_FP8_KEY_BYTES;
        break;
    case TD_KV_KEY_FP4:
        l->key_bytes = TD_KV_FP4_KEY_BYTES;
        break;
    default:
        return td_fail(err, TD_INVALID, "KV layout: unknown indexer key type %u", (unsigned)key);
    }
    return TD_OK;
}

/* The largest pool (2^24 pages, 128 layers, 2,048-byte rows) is below 2^49 bytes: no overflow. */
static void set_starts(struct td_kv_layout *l) {
    size_t csa_rows = (size_t)l->csa_layers * l->pages * TD_KV_CSA_PER_PAGE;
    size_t hca_rows = (size_t)l->hca_layers * l->pages * TD_KV_HCA_PER_PAGE;
    l->csa_offset = 0;
    l->index_offset = align_up(l->csa_offset + csa_rows * l->row_bytes);
    l->hca_offset = align_up(l->index_offset + csa_rows * l->key_bytes);
    l->pool_bytes = align_up(l->hca_offset + hca_rows * l->row_bytes);

    size_t csa_state = (size_t)l->csa_layers * TD_KV_CSA_RING * 2 * sizeof(float);
    size_t hca_state = (size_t)l->hca_layers * TD_KV_HCA_RING * 2 * sizeof(float);
    l->slot_window = 0;
    l->slot_csa = align_up((size_t)l->layers * TD_KV_WINDOW_ROWS * l->row_bytes);
    l->slot_index = align_up(l->slot_csa + csa_state * TD_KV_CSA_STATE_DIM);
    l->slot_hca = align_up(l->slot_index + csa_state * TD_KV_INDEX_STATE_DIM);
    l->slot_bytes = align_up(l->slot_hca + hca_state * TD_KV_HCA_STATE_DIM);
}

td_status td_kv_layout_init(struct td_kv_layout *l, uint32_t layers, const uint8_t *ratio,
                            enum td_kv_row_dtype row, enum td_kv_key_dtype key, uint32_t pages,
                            uint64_t model_fingerprint, struct td_error *err) {
    memset(l, 0, sizeof *l);
    TD_TRY(set_ratios(l, layers, ratio, err));
    TD_TRY(set_dtypes(l, row, key, err));
    if (pages == 0 || pages > TD_KV_MAX_PAGES)
        return td_fail(err, TD_INVALID, "KV layout: expected 1 to %d pages, found %u",
                       TD_KV_MAX_PAGES, pages);
    l->pages = pages;
    set_starts(l);
    l->fingerprint = fingerprint(l, model_fingerprint);
    return TD_OK;
}

void td_kv_row_copy(const struct td_kv_layout *l, struct td_kv_row to, struct td_kv_row from) {
    memcpy(to.values, from.values, l->row_stride);
    if (to.scales) memcpy(to.scales, from.scales, TD_KV_FP8_ROW_SCALES);
}

/* One family: in each of its layers a page is `bytes` bytes. */
static void copy_family(const struct td_kv_layout *l, uint8_t *base, uint32_t layers, size_t bytes,
                        uint32_t from, uint32_t to) {
    for (uint32_t i = 0; i < layers; i++, base += l->pages * bytes)
        memcpy(base + to * bytes, base + from * bytes, bytes);
}

void td_kv_copy_page(const struct td_kv_layout *l, void *pool, uint32_t from, uint32_t to) {
    uint8_t *p = pool;
    copy_family(l, p + l->csa_offset, l->csa_layers, (size_t)TD_KV_CSA_PER_PAGE * l->row_bytes,
                from, to);
    copy_family(l, p + l->index_offset, l->csa_layers, (size_t)TD_KV_CSA_PER_PAGE * l->key_bytes,
                from, to);
    copy_family(l, p + l->hca_offset, l->hca_layers, (size_t)TD_KV_HCA_PER_PAGE * l->row_bytes,
                from, to);
}

uint64_t td_kv_rows(const struct td_kv_layout *l, enum td_kv_family family, uint32_t n) {
    uint64_t window = n < TD_KV_WINDOW_ROWS ? n : TD_KV_WINDOW_ROWS;
    uint64_t csa_open = (n >= 4 ? 4 : 0) + n % 4;
    switch (family) {
    case TD_KV_WINDOW:
        return l->layers * window;
    case TD_KV_CSA:
    case TD_KV_INDEX:
        return (uint64_t)l->csa_layers * (n / 4);
    case TD_KV_HCA:
        return (uint64_t)l->hca_layers * (n / 128);
    case TD_KV_CSA_STATE:
    case TD_KV_INDEX_STATE:
        return l->csa_layers * csa_open;
    case TD_KV_HCA_STATE:
        return (uint64_t)l->hca_layers * (n % 128);
    case TD_KV_FAMILIES:
        break;
    }
    return 0;
}

uint64_t td_kv_bytes(const struct td_kv_layout *l, enum td_kv_family family, uint32_t n) {
    uint64_t rows = td_kv_rows(l, family, n);
    uint64_t half = n >= 4 ? (uint64_t)l->csa_layers * 4 : 0; /* previous window, in half rows */
    switch (family) {
    case TD_KV_WINDOW:
    case TD_KV_CSA:
    case TD_KV_HCA:
        return rows * l->row_bytes;
    case TD_KV_INDEX:
        return rows * l->key_bytes;
    case TD_KV_CSA_STATE:
        return (2 * rows - half) * TD_KV_CSA_STATE_DIM * sizeof(float);
    case TD_KV_INDEX_STATE:
        return (2 * rows - half) * TD_KV_INDEX_STATE_DIM * sizeof(float);
    case TD_KV_HCA_STATE:
        return 2 * rows * TD_KV_HCA_STATE_DIM * sizeof(float);
    case TD_KV_FAMILIES:
        break;
    }
    return 0;
}

const char *td_kv_family_name(enum td_kv_family family) {
    static const char *const names[TD_KV_FAMILIES] = {
        [TD_KV_WINDOW] = "window rows",
        [TD_KV_CSA] = "CSA entries",
        [TD_KV_INDEX] = "indexer keys",
        [TD_KV_HCA] = "HCA entries",
        [TD_KV_CSA_STATE] = "CSA compressor state",
        [TD_KV_INDEX_STATE] = "indexer compressor state",
        [TD_KV_HCA_STATE] = "HCA compressor rows",
    };
    return (unsigned)family < TD_KV_FAMILIES ? names[family] : "unknown family";
}

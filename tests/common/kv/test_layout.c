/* The layout against the byte formulas of the model, and every row in its own place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/kv/layout.h"
#include "common/kv/split.h"
#include "common/kv/wire.h"

/* The real model: 43 layers, two plain, then CSA and HCA in turn: 21 and 20. */
static void real_ratios(uint8_t ratio[43]) {
    for (int i = 0; i < 43; i++)
        ratio[i] = i < 2 ? 0 : i % 2 == 0 ? 4 : 128;
}

static struct td_kv_layout real_layout(enum td_kv_row_dtype row, enum td_kv_key_dtype key,
                                       uint32_t pages) {
    uint8_t ratio[43];
    real_ratios(ratio);
    struct td_kv_layout l;
    struct td_error err;
    assert_int_equal(td_kv_layout_init(&l, 43, ratio, row, key, pages, 7, &err), TD_OK);
    return l;
}

static void test_real_model_bytes(void **state) {
    (void)state;
    struct td_kv_layout l = real_layout(TD_KV_ROW_BF16, TD_KV_KEY_BF16, 512);
    assert_int_equal(l.csa_layers, 21);
    assert_int_equal(l.hca_layers, 20);
    assert_int_equal(l.pool_bytes, (size_t)512 * TD_KV_PAGE_TOKENS * 6880);
    assert_int_equal(l.pool_bytes, 901775360); /* 131,072 tokens */
    /* windows, CSA and indexer rings of 8, HCA rings */
    assert_int_equal(l.slot_bytes, 5636096 + 1720320 + 10485760);
    assert_int_equal(l.slot_csa, 5636096);

    l = real_layout(TD_KV_ROW_BF16, TD_KV_KEY_FP8, 4096);
    /* per token: CSA 21 x 1,024 / 4, index 21 x 132 / 4, HCA 20 x 1,024 / 128 */
    assert_int_equal(l.pool_bytes, (size_t)4096 * TD_KV_PAGE_TOKENS * (5376 + 693 + 160));
    l = real_layout(TD_KV_ROW_FP8, TD_KV_KEY_FP4, 512);
    assert_in_range(l.pool_bytes, 460619776, 460619776 + 3 * 63); /* 131,072 tokens */
    assert_int_equal(l.slot_csa, 3214336);
    l = real_layout(TD_KV_ROW_FP8, TD_KV_KEY_FP8, 512);
    assert_in_range(l.pool_bytes, 504659968, 504659968 + 3 * 63);
    l = real_layout(TD_KV_ROW_FP32, TD_KV_KEY_FP32, 1);
    assert_int_equal(l.pool_bytes, (size_t)TD_KV_PAGE_TOKENS * 2 * 6880);
}

static void test_rows(void **state) {
    (void)state;
    struct td_kv_layout l = real_layout(TD_KV_ROW_BF16, TD_KV_KEY_BF16, 1);
    for (uint32_t n = 0; n < 1100; n++) {
        assert_int_equal(td_kv_rows(&l, TD_KV_WINDOW, n), 43 * (n < 128 ? n : 128));
        assert_int_equal(td_kv_rows(&l, TD_KV_CSA, n), 21 * (n / 4));
        assert_int_equal(td_kv_rows(&l, TD_KV_INDEX, n), 21 * (n / 4));
        assert_int_equal(td_kv_rows(&l, TD_KV_HCA, n), 20 * (n / 128));
        /* state bytes: 21*20,480*(n>=4) + 21*10,240*(n mod 4) + 20*4,096*(n mod 128) */
        uint64_t half = n >= 4 ? 21 * 4 : 0;
        uint64_t csa = td_kv_rows(&l, TD_KV_CSA_STATE, n);
        uint64_t index = td_kv_rows(&l, TD_KV_INDEX_STATE, n);
        uint64_t bytes = half * (4096 + 1024) + (csa - half) * 8192 + (index - half) * 2048 +
                         td_kv_rows(&l, TD_KV_HCA_STATE, n) * 4096;
        assert_int_equal(td_kv_bytes(&l, TD_KV_CSA_STATE, n) +
                             td_kv_bytes(&l, TD_KV_INDEX_STATE, n) +
                             td_kv_bytes(&l, TD_KV_HCA_STATE, n),
                         bytes);
        assert_int_equal(td_kv_bytes(&l, TD_KV_WINDOW, n), 43 * 1024 * (n < 128 ? n : 128));
        if (n % 128 == 0)
            assert_int_equal(td_kv_bytes(&l, TD_KV_CSA, n) + td_kv_bytes(&l, TD_KV_INDEX, n) +
                                 td_kv_bytes(&l, TD_KV_HCA, n),
                             6880 * n);
        assert_int_equal(bytes,
                         21 * 20480 * (n >= 4) + 21 * 10240 * (n % 4) + 20 * 4096 * (n % 128));
    }
    assert_int_equal(td_kv_rows(&l, TD_KV_FAMILIES, 100), 0);
    assert_int_equal(td_kv_rows(&l, TD_KV_CSA, UINT32_MAX), 21ull * (UINT32_MAX / 4));
}

/* Writes a distinct mark over every row through the accessors: together the rows must cover the
 * memory exactly once. */
static void mark(uint8_t *base, size_t total, const void *row, size_t bytes, size_t *sum) {
    const uint8_t *p = row;
    assert_true(p >= base && p + bytes <= base + total);
    for (const uint8_t *q = p; q < p + bytes; q++) {
        assert_int_equal(base[q - base], 0);
        base[q - base] = 1;
    }
    *sum += bytes;
}

static void mark_row(uint8_t *base, size_t total, const struct td_kv_layout *l,
                     struct td_kv_row row, size_t *sum) {
    mark(base, total, row.values, l->row_stride, sum);
    if (l->row_dtype == TD_KV_ROW_FP8)
        mark(base, total, row.scales, 8, sum);
    else
        assert_null(row.scales);
}

static void check_cover(const struct td_kv_layout *l) {
    uint8_t *pool = calloc(1, l->pool_bytes), *slot = calloc(1, l->slot_bytes);
    size_t in_pool = 0, in_slot = 0;
    for (uint32_t y = 0; y < l->layers; y++) {
        for (uint32_t t = 0; t < 128; t++)
            mark_row(slot, l->slot_bytes, l, td_kv_window_row(l, slot, y, 1280 + t), &in_slot);
        for (uint32_t page = 0; l->ratio[y] == 4 && page < l->pages; page++)
            for (uint32_t i = 0; i < 64; i++) {
                mark_row(pool, l->pool_bytes, l, td_kv_csa_row(l, pool, y, page, i), &in_pool);
                mark(pool, l->pool_bytes, td_kv_index_key(l, pool, y, page, i), l->key_bytes,
                     &in_pool);
            }
        for (uint32_t page = 0; l->ratio[y] == 128 && page < l->pages; page++)
            for (uint32_t i = 0; i < 2; i++)
                mark_row(pool, l->pool_bytes, l, td_kv_hca_row(l, pool, y, page, i), &in_pool);
        for (uint32_t t = 0; l->ratio[y] == 4 && t < 8; t++) {
            mark(slot, l->slot_bytes, td_kv_csa_state(l, slot, y, 80 + t), 8192, &in_slot);
            mark(slot, l->slot_bytes, td_kv_index_state(l, slot, y, 80 + t), 2048, &in_slot);
        }
        for (uint32_t t = 0; l->ratio[y] == 128 && t < 128; t++)
            mark(slot, l->slot_bytes, td_kv_hca_state(l, slot, y, 1280 + t), 4096, &in_slot);
    }
    /* All but the gaps before families that start on a multiple of 64. */
    assert_in_range(l->pool_bytes - in_pool, 0, 3 * 63);
    assert_int_equal(in_slot, l->slot_bytes);
    free(pool);
    free(slot);
}

static void test_rows_cover_memory_once(void **state) {
    (void)state;
    const uint8_t ratio[6] = {0, 0, 4, 128, 4, 4};
    const enum td_kv_key_dtype keys[] = {TD_KV_KEY_BF16, TD_KV_KEY_FP32, TD_KV_KEY_FP8,
                                         TD_KV_KEY_FP4};
    const enum td_kv_row_dtype rows[] = {TD_KV_ROW_BF16, TD_KV_ROW_FP32, TD_KV_ROW_FP32,
                                         TD_KV_ROW_FP8};
    for (int k = 0; k < 4; k++) {
        struct td_kv_layout l;
        struct td_error err;
        assert_int_equal(td_kv_layout_init(&l, 6, ratio, rows[k], keys[k], 3, 1, &err), TD_OK);
        check_cover(&l);
        size_t starts[] = {l.index_offset, l.hca_offset, l.slot_csa,
                           l.slot_index,   l.slot_hca,   l.slot_bytes};
        for (size_t i = 0; i < sizeof starts / sizeof *starts; i++)
            assert_int_equal(starts[i] % 64, 0);
    }
}

/* A page of FP8 rows: the values of all, then the scales of all. */
static void test_fp8_places(void **state) {
    (void)state;
    struct td_kv_layout l = real_layout(TD_KV_ROW_FP8, TD_KV_KEY_FP4, 7);
    uint8_t *base = malloc(l.pool_bytes > l.slot_bytes ? l.pool_bytes : l.slot_bytes);
    struct td_kv_row r = td_kv_csa_row(&l, base, 4, 3, 5); /* the second CSA layer */
    size_t page = (size_t)(7 + 3) * (64 * 576 + 64 * 8);
    assert_ptr_equal(r.values, base + page + 5 * 576);
    assert_ptr_equal(r.scales, base + page + 64 * 576 + 5 * 8);
    r = td_kv_hca_row(&l, base, 3, 6, 1);
    page = l.hca_offset + (size_t)6 * (2 * 576 + 2 * 8);
    assert_ptr_equal(r.values, base + page + 576);
    assert_ptr_equal(r.scales, base + page + 2 * 576 + 8);
    r = td_kv_window_row(&l, base, 2, 128 + 9);
    assert_ptr_equal(r.values, base + 2 * 128 * 584 + 9 * 576);
    assert_ptr_equal(r.scales, base + 2 * 128 * 584 + 128 * 576 + 9 * 8);
    r = td_kv_dense_row(&l, base, 3);
    assert_ptr_equal(r.values, base + 3 * 584);
    assert_ptr_equal(r.scales, base + 3 * 584 + 576);
    free(base);
}

static void test_fingerprint(void **state) {
    (void)state;
    uint8_t ratio[43];
    real_ratios(ratio);
    struct td_kv_layout a, b;
    struct td_error err;
    assert_int_equal(td_kv_layout_init(&a, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 5, 9, &err),
                     TD_OK);
    /* The pool's size is a worker's own business. */
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 6, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint == b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 5, 10, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_FP32, TD_KV_KEY_BF16, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_FP8, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_FP8, TD_KV_KEY_BF16, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_FP4, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    assert_int_equal(td_kv_layout_init(&b, 42, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
    uint8_t swap = ratio[2];
    ratio[2] = ratio[3];
    ratio[3] = swap;
    assert_int_equal(td_kv_layout_init(&b, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 5, 9, &err),
                     TD_OK);
    assert_true(a.fingerprint != b.fingerprint);
}

static void test_refusals(void **state) {
    (void)state;
    uint8_t ratio[3] = {0, 4, 5};
    struct td_kv_layout l;
    struct td_error err;
    assert_int_equal(td_kv_layout_init(&l, 3, ratio, 0, 0, 1, 0, &err), TD_INVALID);
    assert_non_null(strstr(err.text, "layer 2"));
    assert_non_null(strstr(err.text, "found 5"));
    assert_int_equal(td_kv_layout_init(&l, 0, ratio, 0, 0, 1, 0, &err), TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 129, ratio, 0, 0, 1, 0, &err), TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 2, ratio, 0, 0, 0, 0, &err), TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 2, ratio, 0, 0, TD_KV_MAX_PAGES + 1, 0, &err),
                     TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 2, ratio, (enum td_kv_row_dtype)9, 0, 1, 0, &err),
                     TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 2, ratio, 0, (enum td_kv_key_dtype)9, 1, 0, &err),
                     TD_INVALID);
    assert_int_equal(td_kv_layout_init(&l, 2, ratio, 0, 0, 1, 0, NULL), TD_OK);
}

/* Row by row through the accessors: the copy has all of the page, and nothing else has changed. */
static void test_copy_page(void **state) {
    (void)state;
    enum { LAYERS = 4, PAGES = 3, FROM = 2, TO = 1 };
    static const uint8_t ratio[LAYERS] = {0, 4, 128, 4};
    struct td_kv_layout l;
    struct td_error err;
    for (int form = 0; form < 3; form++) {
        assert_int_equal(td_kv_layout_init(&l, LAYERS, ratio, (enum td_kv_row_dtype)form,
                                           (enum td_kv_key_dtype)form, PAGES, 1, &err),
                         TD_OK);
        uint8_t *pool = malloc(l.pool_bytes), *before = malloc(l.pool_bytes);
        assert_true(pool && before);
        for (size_t i = 0; i < l.pool_bytes; i++)
            pool[i] = (uint8_t)(i * 2654435761u >> 13);
        memcpy(before, pool, l.pool_bytes);
        td_kv_copy_page(&l, pool, FROM, TO);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t page = 0; page < PAGES; page++) {
                uint32_t from = page == TO ? FROM : page;
                for (uint32_t i = 0; ratio[layer] == 4 && i < TD_KV_CSA_PER_PAGE; i++) {
                    struct td_kv_row a = td_kv_csa_row(&l, pool, layer, page, i);
                    struct td_kv_row b = td_kv_csa_row(&l, before, layer, from, i);
                    assert_memory_equal(a.values, b.values, l.row_stride);
                    if (a.scales) assert_memory_equal(a.scales, b.scales, TD_KV_FP8_ROW_SCALES);
                    assert_memory_equal(td_kv_index_key(&l, pool, layer, page, i),
                                        td_kv_index_key(&l, before, layer, from, i), l.key_bytes);
                }
                for (uint32_t i = 0; ratio[layer] == 128 && i < TD_KV_HCA_PER_PAGE; i++) {
                    struct td_kv_row a = td_kv_hca_row(&l, pool, layer, page, i);
                    struct td_kv_row b = td_kv_hca_row(&l, before, layer, from, i);
                    assert_memory_equal(a.values, b.values, l.row_stride);
                    if (a.scales) assert_memory_equal(a.scales, b.scales, TD_KV_FP8_ROW_SCALES);
                }
            }
        free(pool);
        free(before);
    }
}

static void test_names(void **state) {
    (void)state;
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        for (int g = 0; g < f; g++)
            assert_string_not_equal(td_kv_family_name(f), td_kv_family_name(g));
    assert_string_equal(td_kv_family_name(TD_KV_FAMILIES), "unknown family");
}

/* Wire blocks of the real layout, in numbers. */
static void test_block_sizes(void **state) {
    (void)state;
    const size_t header = sizeof(struct td_kv_block_header);
    uint8_t ratio[43];
    for (int i = 0; i < 43; i++)
        ratio[i] = i < 2 ? 0 : i % 2 == 0 ? 4 : 128;
    struct td_kv_layout l;
    struct td_error err;
    assert_int_equal(td_kv_layout_init(&l, 43, ratio, TD_KV_ROW_BF16, TD_KV_KEY_BF16, 1, 0, &err),
                     TD_OK);
    assert_int_equal(td_kv_page_block_bytes_max(&l), header + 256 * 6880);
    /* window rows, and the most that all compressor state can be */
    assert_int_equal(td_kv_slot_block_bytes_max(&l), header + 5636096 + 11479040);
    struct td_kv_layout small;
    assert_int_equal(td_kv_layout_init(&small, 43, ratio, TD_KV_ROW_FP8, TD_KV_KEY_FP4, 1, 0, &err),
                     TD_OK);
    assert_int_equal(td_kv_page_block_bytes_max(&small),
                     header + 64 * 21 * (584 + 68) + 2 * 20 * 584);
    assert_int_equal(td_kv_slot_block_bytes_max(&small), header + 3214336 + 11479040);
    for (uint32_t n = 1; n < 1100; n++)
        assert_true(td_kv_slot_block_bytes(&l, n) <= td_kv_slot_block_bytes_max(&l));
    assert_int_equal(td_kv_slot_block_bytes(&l, 1024), header + 5636096 + 430080);
    assert_int_equal(td_kv_page_block_bytes(&l, 3), header);
    assert_int_equal(td_kv_page_blocks(1), 1);
    assert_int_equal(td_kv_page_blocks(256), 1);
    assert_int_equal(td_kv_page_blocks(257), 2);
    assert_int_equal(td_kv_block_tokens(257, 0), 256);
    assert_int_equal(td_kv_block_tokens(257, 1), 1);
}

/* Every 1 << split neighbouring pages are on as many ranks, and a rank's are an equal stretch of
 * the shards, whatever the number of ranks. */
static void test_owners(void **state) {
    (void)state;
    static const uint32_t shard[TD_KV_SHARDS] = {0, 4, 2, 6, 1, 5, 3, 7};
    for (uint32_t a = 0; a < 64; a++) {
        assert_int_equal(td_kv_shard(a), shard[a % 8]);
        assert_int_equal(td_kv_shard(td_kv_shard(a)), a % 8);
        assert_int_equal(td_kv_page_rank(a, 0), 0);
        assert_int_equal(td_kv_page_rank(a, 1), a % 2);
        assert_int_equal(td_kv_page_rank(a, 2), shard[a % 8] / 2);
        assert_int_equal(td_kv_page_rank(a, 3), shard[a % 8]);
    }
    for (uint32_t split = 0; split <= TD_KV_MAX_SPLIT; split++) {
        for (uint32_t first = 0; first < 64; first += 1u << split) {
            uint32_t seen = 0;
            for (uint32_t i = 0; i < 1u << split; i++)
                seen |= 1u << td_kv_page_rank(first + i, split);
            assert_int_equal(seen, (1u << (1u << split)) - 1);
        }
        assert_int_equal(td_kv_page_tokens(split), 256u << split);
        assert_int_equal(td_kv_pages(1, split), 1);
        assert_int_equal(td_kv_pages(256u << split, split), 1);
        assert_int_equal(td_kv_pages((256u << split) + 1, split), 2);
    }
    static const uint32_t pages[] = {70, 71, 72};
    assert_int_equal(td_kv_page_of_block(pages, 5, 5, 2), 70); /* blocks 4..7 are page 1's */
    assert_int_equal(td_kv_page_of_block(pages, 5, 7, 2), 70);
    assert_int_equal(td_kv_page_of_block(pages, 5, 8, 2), 71);
    assert_int_equal(td_kv_page_of_block(pages, 5, 7, 0), 72);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_model_bytes),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_rows_cover_memory_once),
        cmocka_unit_test(test_fp8_places),
        cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_copy_page),
        cmocka_unit_test(test_block_sizes),
        cmocka_unit_test(test_owners),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

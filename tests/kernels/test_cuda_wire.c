/* Wire blocks and checksums on a device give the CPU's bytes, and refuse what the CPU refuses with
 * the same sentence. Built twice: over the GPU (skipped where there is none) and over the emulator
 * of tests/kernels/cuda. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/kv/checksum.h"
#include "kernels/device.h"
#include "kernels/kv_staging.h"
#include "tests/kernels/fixture.h"

extern const struct td_backend TD_TEST_BACKEND;

enum { PAGES = 3, SLOTS = 3, POISON = 0xA5, LAYERS = 8, RANKS = 2, MEMORY_PAGE = 4096 };
enum { HALF = 4096 }; /* bytes looked at of a half */
static const struct td_kv_ticket ticket = {225, 77};

/* What a rank has on its device. */
struct rank {
    struct td_device d;
    struct td_kv_staging s;
    uint8_t *pool, *slots;
};

/* A pool and slots on the host and the same on every rank's device. */
struct both {
    struct td_kv_layout l;
    struct rank rank[RANKS];
    struct td_kv_stagings all; /* of the ranks */
    uint8_t *pool, *slots;     /* host */
    uint8_t *want, *found;     /* blocks, want first; whole memory pages, as slabs are */
    size_t cap, block_bytes;   /* of one; of both */
    bool pinned;
};

static void fill(uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(td_test_next() >> 32);
}

static void copy(struct td_device *d, bool down, void *there, void *here, size_t bytes) {
    struct td_error err;
    struct td_copy c = {
        .to = down ? here : there, .from = down ? there : here, .width = bytes, .rows = 1};
    (down ? d->backend->download : d->backend->upload)(d, TD_LANE_KV, &c);
    assert_int_equal(d->backend->wait(d, TD_LANE_KV, &err), TD_OK);
}

static void upload_all(struct both *b) {
    for (int r = 0; r < RANKS; r++) {
        copy(&b->rank[r].d, false, b->rank[r].pool, b->pool, b->l.pool_bytes);
        copy(&b->rank[r].d, false, b->rank[r].slots, b->slots, b->l.slot_bytes * SLOTS);
    }
}

/* The devices' pools and slots are the host's. */
static void same_state(struct both *b) {
    uint8_t *pool = td_test_bytes(b->l.pool_bytes), *slots = td_test_bytes(b->l.slot_bytes * SLOTS);
    for (int r = 0; r < RANKS; r++) {
        copy(&b->rank[r].d, true, b->rank[r].pool, pool, b->l.pool_bytes);
        copy(&b->rank[r].d, true, b->rank[r].slots, slots, b->l.slot_bytes * SLOTS);
        td_test_same("pool", b->pool, pool, b->l.pool_bytes);
        td_test_same("slots", b->slots, slots, b->l.slot_bytes * SLOTS);
    }
    free(pool);
    free(slots);
}

static void setup_rank(struct both *b, struct rank *r) {
    struct td_error err;
    void *pool, *slots;
    assert_int_equal(TD_TEST_BACKEND.open(&r->d, 0, &err), TD_OK);
    td_kv_staging_plan(&r->s, &r->d, &b->l);
    const struct td_backend *k = r->d.backend;
    assert_int_equal(k->take(&r->d, b->l.pool_bytes, "pool", &pool, &err), TD_OK);
    assert_int_equal(k->take(&r->d, b->l.slot_bytes * SLOTS, "slots", &slots, &err), TD_OK);
    r->pool = pool;
    r->slots = slots;
    assert_int_equal(td_kv_staging_take(&r->s, pool, slots, &err), TD_OK);
    assert_int_equal(r->d.taken, b->l.pool_bytes + b->l.slot_bytes * SLOTS + r->s.device_bytes);
    r->d.sealed = true;
    assert_int_equal(k->wait(&r->d, TD_LANE_STEP, &err), TD_OK);
    b->all.rank[b->all.n++] = &r->s;
}

static void setup(struct both *b, enum td_kv_row_dtype row, enum td_kv_key_dtype key) {
    static const uint8_t ratio[LAYERS] = {0, 4, 128, 4, 128, 128, 128, 128};
    struct td_error err;
    *b = (struct both){0};
    assert_int_equal(td_kv_layout_init(&b->l, LAYERS, ratio, row, key, PAGES, 9, &err), TD_OK);
    for (int r = 0; r < RANKS; r++)
        setup_rank(b, &b->rank[r]);
    size_t page = td_kv_page_block_bytes_max(&b->l);
    b->cap = td_kv_slot_block_bytes_max(&b->l);
    b->cap = b->cap > page ? b->cap : page;
    assert_true(b->cap > 3 << 20); /* more pieces than there are halves */
    b->pool = td_test_bytes(b->l.pool_bytes);
    b->slots = td_test_bytes(b->l.slot_bytes * SLOTS);
    b->block_bytes = (2 * b->cap + MEMORY_PAGE - 1) & ~(size_t)(MEMORY_PAGE - 1);
    b->want = aligned_alloc(MEMORY_PAGE, b->block_bytes);
    assert_non_null(b->want);
    memset(b->want, 0, b->block_bytes);
    b->found = b->want + b->cap;
    fill(b->pool, b->l.pool_bytes);
    fill(b->slots, b->l.slot_bytes * SLOTS);
    upload_all(b);
}

static void finish(struct both *b) {
    for (int i = 0; i < RANKS; i++) {
        struct rank *r = &b->rank[i];
        td_kv_staging_finish(&r->s);
        r->d.backend->give(&r->d, r->pool, b->l.pool_bytes);
        r->d.backend->give(&r->d, r->slots, b->l.slot_bytes * SLOTS);
        assert_int_equal(r->d.taken, 0);
        r->d.backend->close(&r->d);
    }
    free(b->pool);
    free(b->slots);
    free(b->want);
}

/* From now on blocks lie in pinned memory, or not. What they pass by the way is poisoned. */
static void pin(struct both *b, bool on) {
    struct td_error err = {.text = ""};
    if (b->pinned && !on) td_kv_staging_unpin(&b->all, b->want);
    if (!b->pinned && on && td_kv_staging_pin(&b->all, b->want, b->block_bytes, &err) != TD_OK)
        fail_msg("%s", err.text);
    b->pinned = on;
}

static void poison_halves(struct both *b) {
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++)
            memset(b->rank[r].s.half[i], POISON, HALF);
}

/* Blocks in pinned memory pass no half, others do, if they have a body. */
static void check_halves(const struct both *b, const struct td_kv_staging *s, uint64_t body) {
    bool touched = false;
    for (int i = 0; i < HALF; i++)
        touched |= s->half[0][i] != POISON;
    assert_int_equal(touched, !b->pinned && body > 0);
}

static td_status unpack_host(struct both *b, size_t len, uint32_t n, uint32_t index,
                             struct td_kv_place to, struct td_kv_block_header *h,
                             struct td_error *err) {
    if (to.kind == TD_KV_PAGE_BLOCK)
        return td_kv_unpack_page(&b->l, b->want, len, ticket, n, index, b->pool, to.number, h, err);
    return td_kv_unpack_slot(&b->l, b->want, len, ticket, n, b->slots + b->l.slot_bytes * to.number,
                             h, err);
}

/* Packs the place on both; the same block; *ret_len its bytes. */
static void pack(struct both *b, struct td_kv_place from, uint32_t index, uint32_t n,
                 size_t *ret_len) {
    struct td_error err = {.text = ""};
    struct td_kv_block_header h[2];
    size_t len = 0;
    memset(b->want, POISON, b->cap);
    memset(b->found, POISON, b->cap);
    poison_halves(b);
    td_status st = from.kind == TD_KV_PAGE_BLOCK
                       ? td_kv_pack_page(&b->l, b->pool, from.number, ticket, index, n, b->want,
                                         b->cap, ret_len, &h[0], &err)
                       : td_kv_pack_slot(&b->l, b->slots + b->l.slot_bytes * from.number, ticket, n,
                                         b->want, b->cap, ret_len, &h[0], &err);
    assert_int_equal(st, TD_OK);
    st = td_kv_staging_pack(&b->rank[index % RANKS].s, from, ticket, index, n, b->found, b->cap,
                            &len, &h[1], &err);
    if (st != TD_OK) fail_msg("%s", err.text);
    assert_int_equal(len, *ret_len);
    check_halves(b, &b->rank[index % RANKS].s, h[0].body_bytes);
    td_test_same("header", &h[0], &h[1], sizeof h[0]);
    td_test_same("block", b->want, b->found, b->cap);
    assert_int_equal(td_kv_staging_pack(&b->rank[index % RANKS].s, from, ticket, index, n, b->found,
                                        len - 1, &len, NULL, &err),
                     TD_TOO_LONG);
}

/* Packs on both, and unpacks to another place on both. */
static void there(struct both *b, struct td_kv_place from, struct td_kv_place to, uint32_t index,
                  uint32_t n, uint32_t prompt) {
    struct td_error err = {.text = ""};
    struct td_kv_block_header h[2];
    size_t len;
    pack(b, from, index, n, &len);
    assert_int_equal(unpack_host(b, len, prompt, index, to, &h[0], &err), TD_OK);
    poison_halves(b);
    if (td_kv_staging_unpack(&b->all, b->want, len, ticket, prompt, index, to, &h[1], &err) !=
        TD_OK)
        fail_msg("%s", err.text);
    check_halves(b, &b->rank[0].s, h[0].body_bytes);
    td_test_same("header", &h[0], &h[1], sizeof h[0]);
}

static void blocks_of(enum td_kv_row_dtype row, enum td_kv_key_dtype key) {
    static const uint32_t tokens[] = {1, 3, 6, 127, 131, 255, 256};
    const struct td_kv_place page[2] = {{TD_KV_PAGE_BLOCK, 1}, {TD_KV_PAGE_BLOCK, 2}};
    const struct td_kv_place slot[2] = {{TD_KV_SLOT_BLOCK, 2}, {TD_KV_SLOT_BLOCK, 0}};
    struct both b;
    setup(&b, row, key);
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        uint32_t n = tokens[i];
        pin(&b, i % 2 == (row == TD_KV_ROW_FP8));
        there(&b, page[i % 2], page[1 - i % 2], 0, n, n);
        if (n < 256) there(&b, page[1], page[0], 2, n, 2 * TD_KV_PAGE_TOKENS + n);
        there(&b, slot[i % 2], slot[1 - i % 2], td_kv_page_blocks(n + 100), n + 100, n + 100);
    }
    pin(&b, false);
    same_state(&b);
    finish(&b);
}

static void test_blocks(void **state) {
    (void)state;
    blocks_of(TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    blocks_of(TD_KV_ROW_FP8, TD_KV_KEY_FP8);
    blocks_of(TD_KV_ROW_FP32, TD_KV_KEY_FP4);
}

/* A bit of every family, and a header of another place: the CPU's sentence, nothing written. */
static void test_damage(void **state) {
    (void)state;
    const struct td_kv_place place[2] = {{TD_KV_PAGE_BLOCK, 1}, {TD_KV_SLOT_BLOCK, 2}};
    struct both b;
    setup(&b, TD_KV_ROW_FP8, TD_KV_KEY_BF16);
    pin(&b, true);
    for (int i = 0; i < 2; i++) {
        struct td_error err[2];
        struct td_kv_block_header h;
        uint32_t n = 227, index = i == 0 ? 0 : 1;
        size_t len, at = sizeof h;
        pack(&b, place[i], index, n, &len);
        memcpy(&h, b.want, sizeof h);
        uint8_t *pool = b.pool, *slots = b.slots;
        for (int f = 0; f < TD_KV_FAMILIES; at += h.bytes[f++]) {
            if (h.bytes[f] == 0) continue;
            size_t byte = at + td_test_below((uint32_t)h.bytes[f]);
            uint8_t bit = (uint8_t)(1u << td_test_below(8));
            b.want[byte] ^= bit;
            b.pool = td_test_bytes(b.l.pool_bytes); /* the host's copy of it is spoilt */
            b.slots = td_test_bytes(b.l.slot_bytes * SLOTS);
            assert_int_equal(unpack_host(&b, len, n, index, place[i], NULL, &err[0]), TD_CORRUPT);
            free(b.pool);
            free(b.slots);
            b.pool = pool;
            b.slots = slots;
            assert_int_equal(td_kv_staging_unpack(&b.all, b.want, len, ticket, n, index, place[i],
                                                  NULL, &err[1]),
                             TD_CORRUPT);
            assert_string_equal(err[0].text, err[1].text);
            assert_non_null(strstr(err[1].text, td_kv_family_name(f)));
            b.want[byte] ^= bit;
        }
        assert_int_equal(td_kv_staging_unpack(&b.all, b.want, len - 4, ticket, n, index, place[i],
                                              NULL, &err[1]),
                         TD_CORRUPT);
        b.want[40] ^= 1;
        assert_int_equal(
            td_kv_staging_unpack(&b.all, b.want, len, ticket, n, index, place[i], NULL, &err[1]),
            TD_CORRUPT);
    }
    pin(&b, false);
    same_state(&b);
    finish(&b);
}

/* Memory that cannot be pinned is refused with a sentence, and blocks go as before; what reaches
 * beyond the pinned range does too. */
static void test_not_pinned(void **state) {
    (void)state;
    const struct td_kv_place page = {TD_KV_PAGE_BLOCK, 1}, to = {TD_KV_PAGE_BLOCK, 2};
    struct both b;
    struct td_error err = {.text = ""};
    setup(&b, TD_KV_ROW_FP8, TD_KV_KEY_BF16);
    assert_int_equal(td_kv_staging_pin(&b.all, NULL, 0, &err), TD_NO_MEMORY);
    assert_non_null(strstr(err.text, "cannot be pinned"));
    there(&b, page, to, 0, 256, 256);
    size_t first = td_kv_page_block_bytes_max(&b.l) / 2 & ~(size_t)(MEMORY_PAGE - 1);
    assert_int_equal(td_kv_staging_pin(&b.all, b.want, first, &err), TD_OK);
    there(&b, page, to, 0, 256, 256);
    td_kv_staging_unpin(&b.all, b.want);
    same_state(&b);
    finish(&b);
}

static void test_copies(void **state) {
    (void)state;
    struct both b;
    struct td_error err;
    setup(&b, TD_KV_ROW_FP8, TD_KV_KEY_FP8);
    assert_int_equal(td_kv_staging_copy_page(&b.all, 2, 0, &err), TD_OK);
    td_kv_copy_page(&b.l, b.pool, 2, 0);
    assert_int_equal(td_kv_staging_copy_slot(&b.all, 0, 2, &err), TD_OK);
    memcpy(b.slots + 2 * b.l.slot_bytes, b.slots, b.l.slot_bytes);
    same_state(&b);
    finish(&b);
}

static void test_checksum(void **state) {
    (void)state;
    static const uint32_t bytes[] = {0,    4,    64,   1020,  1024,   1028,   2044,
                                     2052, 4096, 5004, 65536, 262148, 1048576};
    enum { MOST = 1048576 + 64 };
    struct td_device d = {0};
    struct td_error err;
    void *stretch, *share;
    uint8_t *host = td_test_bytes(MOST);
    fill(host, MOST);
    assert_int_equal(TD_TEST_BACKEND.open(&d, 0, &err), TD_OK);
    assert_int_equal(d.backend->take(&d, MOST, "bytes", &stretch, &err), TD_OK);
    size_t share_bytes = sizeof(uint64_t) * TD_SUM_STRETCHES * TD_SUM_SHARES;
    assert_int_equal(d.backend->take(&d, share_bytes, "sums", &share, &err), TD_OK);
    assert_int_equal(d.backend->wait(&d, TD_LANE_STEP, &err), TD_OK);
    copy(&d, false, stretch, host, MOST);
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        struct td_sums s = {.n = TD_SUM_STRETCHES, .share = share};
        uint64_t shares[TD_SUM_STRETCHES][TD_SUM_SHARES];
        memset(shares, POISON, sizeof shares);
        copy(&d, false, share, shares, sizeof shares);
        for (uint32_t k = 0; k < s.n; k++) {
            s.stretch[k] = (uint8_t *)stretch + 4 * k;
            s.bytes[k] = k % 2 ? bytes[i] : bytes[i] / 8;
            s.bytes[k] -= s.bytes[k] % 4;
        }
        d.backend->sum(&d, &s);
        copy(&d, true, share, shares, sizeof shares);
        for (uint32_t k = 0; k < s.n; k++) {
            uint64_t sum = 0;
            for (int j = 0; j < TD_SUM_SHARES; j++)
                sum += shares[k][j];
            assert_true(td_checksum_end(sum, s.bytes[k]) == td_checksum(host + 4 * k, s.bytes[k]));
        }
    }
    d.backend->give(&d, stretch, MOST);
    d.backend->give(&d, share, share_bytes);
    d.backend->close(&d);
    free(host);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checksum), cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_damage),   cmocka_unit_test(test_not_pinned),
        cmocka_unit_test(test_copies),
    };
    if (!td_test_has(&TD_TEST_BACKEND)) return 77;
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

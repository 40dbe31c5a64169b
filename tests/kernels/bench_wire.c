/* Wire blocks of a GPU's pool: DeepSeek-V4-Flash's layout (43 layers, FP8 rows, bf16 keys), pages
 * packed into host memory and unpacked from there, beside bare copies of as many bytes in the same
 * run: from and to pinned memory, which is the link's limit, and from and to the same pageable
 * memory as the blocks, which is what a program does that pins nothing.
 *
 * usage: bench_wire [ROUNDS]     (20); medians; exit code 77 where there is no GPU */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/device.h"
#include "kernels/kv_staging.h"

enum { PAGES = 64, SLOTS = 2, MAX_ROUNDS = 200, TOKENS = 16000 + 93 };
enum what { PACK, UNPACK, PACK_SLOT, UNPACK_SLOT, DOWN, UP, DOWN_PAGEABLE, UP_PAGEABLE, WHATS };

static void need(td_status st, const struct td_error *err) {
    if (st == TD_OK) return;
    fprintf(stderr, "bench_wire: %s\n", err->text);
    exit(1);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bare(struct td_device *d, bool down, void *there, void *here, size_t bytes) {
    struct td_error err;
    struct td_copy c = {
        .to = down ? here : there, .from = down ? there : here, .width = bytes, .rows = 1};
    (down ? d->backend->download : d->backend->upload)(d, TD_LANE_KV, &c);
    need(d->backend->wait(d, TD_LANE_KV, &err), &err);
}

int main(int argc, char **argv) {
    static double ns[WHATS][MAX_ROUNDS];
    static const char *const name[WHATS] = {
        "pages packed",    "pages unpacked",    "slot packed",       "slot unpacked",
        "bare, to pinned", "bare, from pinned", "bare, to pageable", "bare, from pageable"};
    int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 20;
    uint8_t ratio[43] = {0};
    struct td_device d = {0};
    struct td_kv_layout l;
    struct td_kv_staging s;
    const struct td_kv_stagings ranks = {1, {&s}};
    struct td_error err;
    void *pool, *slots, *pinned;
    const struct td_kv_ticket t = {1, 2};
    for (int i = 2; i < 43; i++)
        ratio[i] = i % 2 ? 128 : 4;
    if (rounds < 1 || rounds > MAX_ROUNDS) return 2;
    if (td_backend_cuda.open(&d, 0, &err) != TD_OK) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    need(td_kv_layout_init(&l, 43, ratio, TD_KV_ROW_FP8, TD_KV_KEY_BF16, PAGES, 1, &err), &err);
    td_kv_staging_plan(&s, &d, &l);
    need(d.backend->take(&d, l.pool_bytes, "pool", &pool, &err), &err);
    need(d.backend->take(&d, l.slot_bytes * SLOTS, "slots", &slots, &err), &err);
    need(td_kv_staging_take(&s, pool, slots, &err), &err);
    size_t page = td_kv_page_block_bytes_max(&l), all = page * (PAGES - 1), len = 0;
    size_t slot = td_kv_slot_block_bytes(&l, TOKENS);
    need(d.backend->take_host(&d, all, "pinned", &pinned, &err), &err);
    uint8_t *blocks = malloc(all), *slot_block = malloc(slot);
    if (!blocks || !slot_block) return 1;
    memset(blocks, 1, all);
    memset(slot_block, 1, slot);
    need(d.backend->wait(&d, TD_LANE_STEP, &err), &err);
    for (int r = -1; r < rounds; r++) {
        uint64_t at[WHATS + 1];
        at[PACK] = td_now_ns();
        for (uint32_t i = 0; i < PAGES - 1; i++)
            need(td_kv_staging_pack(&s, (struct td_kv_place){TD_KV_PAGE_BLOCK, i}, t, i, 256,
                                    blocks + i * page, page, &len, NULL, &err),
                 &err);
        at[UNPACK] = td_now_ns();
        for (uint32_t i = 0; i < PAGES - 1; i++)
            need(td_kv_staging_unpack(&ranks, blocks + i * page, page, t, TOKENS + 256, i,
                                      (struct td_kv_place){TD_KV_PAGE_BLOCK, i + 1}, NULL, &err),
                 &err);
        at[PACK_SLOT] = td_now_ns();
        need(td_kv_staging_pack(&s, (struct td_kv_place){TD_KV_SLOT_BLOCK, 0}, t,
                                td_kv_page_blocks(TOKENS), TOKENS, slot_block, slot, &len, NULL,
                                &err),
             &err);
        at[UNPACK_SLOT] = td_now_ns();
        need(td_kv_staging_unpack(&ranks, slot_block, slot, t, TOKENS, td_kv_page_blocks(TOKENS),
                                  (struct td_kv_place){TD_KV_SLOT_BLOCK, 1}, NULL, &err),
             &err);
        for (int w = DOWN; w < WHATS; w++) {
            at[w] = td_now_ns();
            bare(&d, w == DOWN || w == DOWN_PAGEABLE, pool, w < DOWN_PAGEABLE ? pinned : blocks,
                 all);
        }
        at[WHATS] = td_now_ns();
        for (int w = 0; r >= 0 && w < WHATS; w++)
            ns[w][r] = (double)(at[w + 1] - at[w]);
    }
    double rate[WHATS];
    for (int w = 0; w < WHATS; w++) {
        bool of_slot = w == PACK_SLOT || w == UNPACK_SLOT;
        qsort(ns[w], (size_t)rounds, sizeof **ns, by_value);
        rate[w] = (double)(of_slot ? slot : all) / ns[w][rounds / 2];
    }
    for (int w = 0; w < WHATS; w++)
        printf("%-20s %6.1f MB at %6.2f GB/s, %3.0f %% of pinned\n", name[w],
               (double)(w == PACK_SLOT || w == UNPACK_SLOT ? slot : all) / 1e6, rate[w],
               100 * rate[w] / rate[w % 2 == 0 ? DOWN : UP]);
    printf("one page: packed in %.0f us, unpacked in %.0f us\n",
           ns[PACK][rounds / 2] / 1e3 / (PAGES - 1), ns[UNPACK][rounds / 2] / 1e3 / (PAGES - 1));
    return 0;
}

/* Wire blocks of a GPU's pool: DeepSeek-V4-Flash's layout (43 layers, FP8 rows, bf16 keys), pages
 * packed into host memory and unpacked from there, beside bare copies of as many bytes to and from
 * the same memory: as it comes, then pinned as a worker's slabs are.
 *
 * usage: bench_wire [ROUNDS]     (20); medians; exit code 77 where there is no GPU */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "kernels/device.h"
#include "kernels/kv_staging.h"

enum { PAGES = 64, SLOTS = 2, MAX_ROUNDS = 200, TOKENS = 16000 + 93, MEMORY_PAGE = 4096 };
/* Six in memory as it comes, then the same six in pinned memory. */
enum what {
    PACK,
    UNPACK,
    PACK_SLOT,
    UNPACK_SLOT,
    DOWN_PAGEABLE,
    UP_PAGEABLE,
    PACK_PINNED,
    UNPACK_PINNED,
    PACK_SLOT_PINNED,
    UNPACK_SLOT_PINNED,
    DOWN,
    UP,
    WHATS
};

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

struct bench {
    struct td_device d;
    struct td_kv_layout l;
    struct td_kv_staging s;
    struct td_kv_stagings ranks;
    void *pool;
    uint8_t *blocks, *slot_block; /* one range, [range] */
    size_t page, all, slot, range;
    double ns[WHATS][MAX_ROUNDS];
};

static void start(struct bench *b) {
    uint8_t ratio[43] = {0};
    struct td_error err;
    void *slots;
    for (int i = 2; i < 43; i++)
        ratio[i] = i % 2 ? 128 : 4;
    need(td_kv_layout_init(&b->l, 43, ratio, TD_KV_ROW_FP8, TD_KV_KEY_BF16, PAGES, 1, &err), &err);
    td_kv_staging_plan(&b->s, &b->d, &b->l);
    need(b->d.backend->take(&b->d, b->l.pool_bytes, "pool", &b->pool, &err), &err);
    need(b->d.backend->take(&b->d, b->l.slot_bytes * SLOTS, "slots", &slots, &err), &err);
    need(td_kv_staging_take(&b->s, b->pool, slots, &err), &err);
    b->ranks = (struct td_kv_stagings){1, {&b->s}};
    b->page = td_kv_page_block_bytes_max(&b->l);
    b->all = b->page * (PAGES - 1);
    b->slot = td_kv_slot_block_bytes(&b->l, TOKENS);
    b->range = (b->all + b->slot + MEMORY_PAGE - 1) / MEMORY_PAGE * MEMORY_PAGE;
    b->blocks = aligned_alloc(MEMORY_PAGE, b->range);
    if (!b->blocks) exit(1);
    b->slot_block = b->blocks + b->all;
    memset(b->blocks, 1, b->range);
    need(b->d.backend->wait(&b->d, TD_LANE_STEP, &err), &err);
}

/* Round `r` of the six from `first` on; below 0 they are not kept. */
static void round_of(struct bench *b, enum what first, int r) {
    const struct td_kv_ticket t = {1, 2};
    struct td_error err;
    uint32_t last = td_kv_page_blocks(TOKENS);
    uint64_t at[7];
    size_t len;
    at[0] = td_now_ns();
    for (uint32_t i = 0; i < PAGES - 1; i++)
        need(td_kv_staging_pack(&b->s, (struct td_kv_place){TD_KV_PAGE_BLOCK, i}, t, i, 256,
                                b->blocks + i * b->page, b->page, &len, NULL, &err),
             &err);
    at[1] = td_now_ns();
    for (uint32_t i = 0; i < PAGES - 1; i++)
        need(td_kv_staging_unpack(&b->ranks, b->blocks + i * b->page, b->page, t, TOKENS + 256, i,
                                  (struct td_kv_place){TD_KV_PAGE_BLOCK, i + 1}, NULL, &err),
             &err);
    at[2] = td_now_ns();
    need(td_kv_staging_pack(&b->s, (struct td_kv_place){TD_KV_SLOT_BLOCK, 0}, t, last, TOKENS,
                            b->slot_block, b->slot, &len, NULL, &err),
         &err);
    at[3] = td_now_ns();
    need(td_kv_staging_unpack(&b->ranks, b->slot_block, b->slot, t, TOKENS, last,
                              (struct td_kv_place){TD_KV_SLOT_BLOCK, 1}, NULL, &err),
         &err);
    at[4] = td_now_ns();
    bare(&b->d, true, b->pool, b->blocks, b->all);
    at[5] = td_now_ns();
    bare(&b->d, false, b->pool, b->blocks, b->all);
    at[6] = td_now_ns();
    for (int w = 0; r >= 0 && w < 6; w++)
        b->ns[(int)first + w][r] = (double)(at[w + 1] - at[w]);
}

static void show(struct bench *b, int rounds) {
    static const char *const name[6] = {"pages packed",  "pages unpacked", "slot packed",
                                        "slot unpacked", "bare copy down", "bare copy up"};
    double rate[WHATS];
    for (int w = 0; w < WHATS; w++) {
        bool of_slot = w % 6 == PACK_SLOT || w % 6 == UNPACK_SLOT;
        qsort(b->ns[w], (size_t)rounds, sizeof **b->ns, by_value);
        rate[w] = (double)(of_slot ? b->slot : b->all) / b->ns[w][rounds / 2];
    }
    for (int w = 0; w < WHATS; w++)
        printf("%-14s %-12s %6.1f MB at %6.2f GB/s, %3.0f %% of the pinned copy\n", name[w % 6],
               w < 6 ? "pageable" : "pinned",
               (double)(w % 6 == PACK_SLOT || w % 6 == UNPACK_SLOT ? b->slot : b->all) / 1e6,
               rate[w], 100 * rate[w] / rate[w % 2 == 0 ? DOWN : UP]);
    for (int w = 0; w < WHATS; w += 6)
        printf("one page, %s: packed in %.0f us, unpacked in %.0f us\n", w ? "pinned" : "pageable",
               b->ns[w + PACK][rounds / 2] / 1e3 / (PAGES - 1),
               b->ns[w + UNPACK][rounds / 2] / 1e3 / (PAGES - 1));
}

int main(int argc, char **argv) {
    static struct bench b;
    int rounds = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 20;
    struct td_error err;
    if (rounds < 1 || rounds > MAX_ROUNDS) return 2;
    if (td_backend_cuda.open(&b.d, 0, &err) != TD_OK) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    start(&b);
    for (int r = -1; r < rounds; r++)
        round_of(&b, PACK, r);
    uint64_t before = td_now_ns();
    need(td_kv_staging_pin(&b.ranks, b.blocks, b.range, &err), &err);
    printf("%.1f MB pinned in %.1f ms\n", (double)b.range / 1e6,
           (double)(td_now_ns() - before) / 1e6);
    for (int r = -1; r < rounds; r++)
        round_of(&b, PACK_PINNED, r);
    show(&b, rounds);
    return 0;
}

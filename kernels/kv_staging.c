/* Packing, unpacking and copying of pages and slots; kv_staging.h says where what happens. */
#include "kernels/kv_staging.h"

#include <assert.h>
#include <string.h>

#include "common/kv/checksum.h"
#include "kernels/bump.h"

enum {
    HEADER = sizeof(struct td_kv_block_header),
    PIECE = 1 << 20, /* bytes of a half; shorter ones made slots slower and pages no faster */
    SHARES = TD_SUM_STRETCHES * TD_SUM_SHARES,
};

_Static_assert((int)TD_KV_FAMILIES <= (int)TD_SUM_STRETCHES, "one stretch per family");

/* ---- memory ---- */

static void plan_device(struct td_kv_staging *s, struct td_bump *b) {
    s->stretch = td_bump_take(b, s->stretch_bytes);
    s->move = td_bump_take(b, s->moves * sizeof *s->move);
    s->share = td_bump_take(b, SHARES * sizeof *s->share);
}

static void plan_host(struct td_kv_staging *s, struct td_bump *b) {
    s->listed = td_bump_take(b, s->moves * sizeof *s->listed);
    s->shares = td_bump_take(b, SHARES * sizeof *s->shares);
    for (int i = 0; i < 2; i++)
        s->half[i] = td_bump_take(b, PIECE);
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

void td_kv_staging_plan(struct td_kv_staging *s, struct td_device *d,
                        const struct td_kv_layout *kv) {
    struct td_bump device = {0}, host = {0};
    *s = (struct td_kv_staging){.device = d, .kv = kv};
    if (d->backend->host) return;
    s->stretch_bytes = larger(td_kv_page_block_bytes_max(kv), td_kv_slot_block_bytes_max(kv));
    s->stretch_bytes = larger(s->stretch_bytes, kv->slot_bytes);
    s->moves = td_kv_moves_max(kv);
    plan_device(s, &device);
    plan_host(s, &host);
    s->device_bytes = device.used;
    s->host_bytes = host.used;
}

td_status td_kv_staging_take(struct td_kv_staging *s, void *pool, void *slots,
                             struct td_error *err) {
    const struct td_backend *b = s->device->backend;
    void *on_device, *on_host;
    s->pool = pool;
    s->slots = slots;
    if (b->host) return TD_OK;
    TD_TRY(b->take(s->device, s->device_bytes, "wire block", &on_device, err));
    s->on_device = on_device;
    TD_TRY(b->take_host(s->device, s->host_bytes, "wire block", &on_host, err));
    s->on_host = on_host;
    plan_device(s, &(struct td_bump){s->on_device, 0});
    plan_host(s, &(struct td_bump){s->on_host, 0});
    return TD_OK;
}

/* The range that begins there, or TD_KV_PINNED_MAX; NULL: a free one. */
static int find_pinned(const struct td_kv_staging *s, const void *memory) {
    int i = 0;
    while (i < TD_KV_PINNED_MAX && s->pinned[i].base != memory)
        i++;
    return i;
}

td_status td_kv_staging_pin(const struct td_kv_stagings *all, void *memory, size_t bytes,
                            struct td_error *err) {
    struct td_device *d = all->rank[0]->device;
    int i = find_pinned(all->rank[0], NULL);
    if (!d->backend->pin) return TD_OK;
    if (i == TD_KV_PINNED_MAX)
        return td_fail(err, TD_NO_MEMORY, "expected at most %d ranges to be pinned", i);
    TD_TRY(d->backend->pin(d, memory, bytes, err));
    for (uint32_t r = 0; r < all->n; r++) {
        all->rank[r]->pinned[i].base = memory;
        all->rank[r]->pinned[i].bytes = bytes;
    }
    return TD_OK;
}

void td_kv_staging_unpin(const struct td_kv_stagings *all, const void *memory) {
    struct td_device *d = all->rank[0]->device;
    int i = find_pinned(all->rank[0], memory);
    if (!memory || i == TD_KV_PINNED_MAX) return;
    d->backend->unpin(d, (void *)(uintptr_t)memory);
    for (uint32_t r = 0; r < all->n; r++)
        all->rank[r]->pinned[i].base = NULL;
}

size_t td_kv_staging_pinned(const struct td_kv_staging *s) {
    size_t sum = 0;
    for (int i = 0; i < TD_KV_PINNED_MAX; i++)
        if (s->pinned[i].base) sum += s->pinned[i].bytes;
    return sum;
}

void td_kv_staging_finish(struct td_kv_staging *s) {
    assert(td_kv_staging_pinned(s) == 0);
    if (s->on_device) s->device->backend->give(s->device, s->on_device, s->device_bytes);
    if (s->on_host) s->device->backend->give_host(s->device, s->on_host);
}

/* ---- the parts of a block's way ---- */

static uint8_t *base_of(const struct td_kv_staging *s, struct td_kv_place p) {
    return p.kind == TD_KV_PAGE_BLOCK ? s->pool : s->slots + s->kv->slot_bytes * p.number;
}

static void down(struct td_kv_staging *s, void *to, const void *from, size_t bytes) {
    struct td_copy c = {.to = to, .from = from, .width = bytes, .rows = 1};
    if (bytes) s->device->backend->download(s->device, TD_LANE_KV, &c);
}

static void up(struct td_kv_staging *s, void *to, const void *from, size_t bytes) {
    struct td_copy c = {.to = to, .from = from, .width = bytes, .rows = 1};
    if (bytes) s->device->backend->upload(s->device, TD_LANE_KV, &c);
}

/* The stretches of `from`'s or `to`'s block on the device. */
static struct td_wire_rows list_rows(struct td_kv_staging *s, struct td_kv_place p, uint32_t n) {
    size_t moves = td_kv_moves(s->kv, p.kind, base_of(s, p), p.number, n, s->listed);
    assert(moves <= s->moves);
    up(s, s->move, s->listed, moves * sizeof *s->listed);
    return (struct td_wire_rows){
        .stretch = s->stretch, .own = base_of(s, p), .move = s->move, .n = (uint32_t)moves};
}

/* Queues the sums of the families of `h` in the stretch, and their way to the host. */
static void queue_sums(struct td_kv_staging *s, const struct td_kv_block_header *h) {
    struct td_sums sums = {.n = TD_KV_FAMILIES, .share = s->share};
    const uint8_t *at = s->stretch;
    for (int f = 0; f < TD_KV_FAMILIES; at += h->bytes[f++]) {
        sums.stretch[f] = at;
        sums.bytes[f] = h->bytes[f];
    }
    s->device->backend->sum(s->device, &sums);
    down(s, s->shares, s->share, SHARES * sizeof *s->shares);
}

static uint64_t family_sum(const struct td_kv_staging *s, int family, uint64_t bytes) {
    uint64_t sum = 0;
    for (int i = 0; i < TD_SUM_SHARES; i++)
        sum += s->shares[family * TD_SUM_SHARES + i];
    return td_checksum_end(sum, bytes);
}

static size_t piece(size_t bytes, size_t k) {
    size_t left = bytes - k * PIECE;
    return left < PIECE ? left : PIECE;
}

static bool is_pinned(const struct td_kv_staging *s, const uint8_t *at, size_t bytes) {
    for (int i = 0; i < TD_KV_PINNED_MAX; i++) {
        const uint8_t *base = s->pinned[i].base, *end = base ? base + s->pinned[i].bytes : NULL;
        if (base && at >= base && at <= end && bytes <= (size_t)(end - at)) return true;
    }
    return false;
}

/* The stretch to `dst`: as it is, or a half behind the device. */
static void fetch(struct td_kv_staging *s, uint8_t *dst, size_t bytes) {
    struct td_device *d = s->device;
    if (is_pinned(s, dst, bytes)) {
        down(s, dst, s->stretch, bytes);
        return;
    }
    size_t pieces = (bytes + PIECE - 1) / PIECE;
    for (size_t k = 0; k <= pieces && pieces; k++) {
        if (k < pieces) {
            down(s, s->half[k % 2], s->stretch + k * PIECE, piece(bytes, k));
            d->backend->mark(d, TD_LANE_KV, k % 2);
        }
        if (k == 0) continue;
        d->backend->reach(d, TD_LANE_KV, (k - 1) % 2);
        memcpy(dst + (k - 1) * PIECE, s->half[(k - 1) % 2], piece(bytes, k - 1));
    }
}

/* And back, to all ranks: from where it lies, or from the first one's halves, of which one is
 * filled again when every device has taken it. */
static void send(const struct td_kv_stagings *all, const uint8_t *src, size_t bytes) {
    uint8_t *const *half = all->rank[0]->half;
    if (is_pinned(all->rank[0], src, bytes)) {
        for (uint32_t r = 0; r < all->n; r++)
            up(all->rank[r], all->rank[r]->stretch, src, bytes);
        return;
    }
    for (size_t k = 0; k * PIECE < bytes; k++) {
        for (uint32_t r = 0; k >= 2 && r < all->n; r++) {
            struct td_device *d = all->rank[r]->device;
            d->backend->reach(d, TD_LANE_KV, k % 2);
        }
        memcpy(half[k % 2], src + k * PIECE, piece(bytes, k));
        for (uint32_t r = 0; r < all->n; r++) {
            struct td_kv_staging *s = all->rank[r];
            up(s, s->stretch + k * PIECE, half[k % 2], piece(bytes, k));
            s->device->backend->mark(s->device, TD_LANE_KV, k % 2);
        }
    }
}

/* Waits for all, also behind one that failed: what they were given is used again. */
static td_status wait_all(const struct td_kv_stagings *all, struct td_error *err) {
    td_status st = TD_OK;
    for (uint32_t r = 0; r < all->n; r++) {
        struct td_device *d = all->rank[r]->device;
        td_status own = d->backend->wait(d, TD_LANE_KV, st == TD_OK ? err : NULL);
        if (st == TD_OK) st = own;
    }
    return st;
}

/* ---- packing, unpacking ---- */

td_status td_kv_staging_pack(struct td_kv_staging *s, struct td_kv_place from,
                             struct td_kv_ticket ticket, uint32_t index, uint32_t n, void *dst,
                             size_t cap, size_t *ret_len, struct td_kv_block_header *ret_header,
                             struct td_error *err) {
    struct td_device *d = s->device;
    if (d->backend->host && from.kind == TD_KV_PAGE_BLOCK)
        return td_kv_pack_page(s->kv, s->pool, from.number, ticket, index, n, dst, cap, ret_len,
                               ret_header, err);
    if (d->backend->host)
        return td_kv_pack_slot(s->kv, base_of(s, from), ticket, n, dst, cap, ret_len, ret_header,
                               err);
    assert(n >= 1 && (from.kind == TD_KV_SLOT_BLOCK ||
                      (from.number < s->kv->pages && n <= TD_KV_PAGE_TOKENS)));
    struct td_kv_block_header h;
    uint64_t checksum[TD_KV_FAMILIES];
    td_kv_begin_header(s->kv, from.kind, ticket, index, n, &h);
    if (HEADER + h.body_bytes > cap)
        return td_fail(err, TD_TOO_LONG, "KV block: needs %zu bytes, room for %zu",
                       (size_t)(HEADER + h.body_bytes), cap);
    struct td_wire_rows rows = list_rows(s, from, n);
    d->backend->pack(d, &rows);
    queue_sums(s, &h);
    fetch(s, (uint8_t *)dst + HEADER, h.body_bytes);
    TD_TRY(d->backend->wait(d, TD_LANE_KV, err));
    for (int f = 0; f < TD_KV_FAMILIES; f++)
        checksum[f] = family_sum(s, f, h.bytes[f]);
    td_kv_seal_header(&h, checksum);
    memcpy(dst, &h, HEADER);
    if (ret_header) *ret_header = h;
    *ret_len = HEADER + h.body_bytes;
    return TD_OK;
}

/* Where device memory is the host's: each rank's rows are summed on their way. */
static td_status unpack_here(const struct td_kv_stagings *all, const void *block, size_t len,
                             struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                             struct td_kv_place to, struct td_kv_block_header *ret_header,
                             struct td_error *err) {
    for (uint32_t r = 0; r < all->n; r++) {
        struct td_kv_staging *s = all->rank[r];
        if (to.kind == TD_KV_PAGE_BLOCK)
            TD_TRY(td_kv_unpack_page(s->kv, block, len, ticket, n, index, s->pool, to.number,
                                     ret_header, err));
        else
            TD_TRY(
                td_kv_unpack_slot(s->kv, block, len, ticket, n, base_of(s, to), ret_header, err));
    }
    return TD_OK;
}

static td_status check_sums(const struct td_kv_stagings *all, enum td_kv_block_kind kind,
                            const struct td_kv_block_header *h, struct td_error *err) {
    for (uint32_t r = 0; r < all->n; r++)
        for (int f = 0; f < TD_KV_FAMILIES; f++)
            if (td_kv_in_block(kind, f))
                TD_TRY(td_kv_check_family(h, f, family_sum(all->rank[r], f, h->bytes[f]), err));
    return TD_OK;
}

td_status td_kv_staging_unpack(const struct td_kv_stagings *all, const void *block, size_t len,
                               struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                               struct td_kv_place to, struct td_kv_block_header *ret_header,
                               struct td_error *err) {
    const struct td_kv_staging *first = all->rank[0];
    bool page = to.kind == TD_KV_PAGE_BLOCK;
    if (first->device->backend->host)
        return unpack_here(all, block, len, ticket, n, index, to, ret_header, err);
    assert(n >= 1 && (!page || (to.number < first->kv->pages && index < td_kv_page_blocks(n))));
    struct td_kv_block_header h;
    TD_TRY(td_kv_check_header(first->kv, block, len, to.kind, ticket, n, index, &h, err));
    send(all, (const uint8_t *)block + HEADER, h.body_bytes);
    for (uint32_t r = 0; r < all->n; r++)
        queue_sums(all->rank[r], &h);
    TD_TRY(wait_all(all, err));
    TD_TRY(check_sums(all, to.kind, &h, err));
    for (uint32_t r = 0; r < all->n; r++) {
        struct td_kv_staging *s = all->rank[r];
        struct td_wire_rows rows = list_rows(s, to, page ? td_kv_block_tokens(n, index) : n);
        s->device->backend->unpack(s->device, &rows);
    }
    TD_TRY(wait_all(all, err));
    if (ret_header) *ret_header = h;
    return TD_OK;
}

/* ---- copies ---- */

td_status td_kv_staging_copy_page(const struct td_kv_stagings *all, uint32_t from, uint32_t to,
                                  struct td_error *err) {
    const uint32_t number[] = {from, to};
    for (uint32_t r = 0; r < all->n && all->rank[r]->device->backend->host; r++)
        td_kv_copy_page(all->rank[r]->kv, all->rank[r]->pool, from, to);
    if (all->rank[0]->device->backend->host) return TD_OK;
    for (int i = 0; i < 2; i++) {
        for (uint32_t r = 0; r < all->n; r++) {
            struct td_kv_staging *s = all->rank[r];
            struct td_wire_rows rows =
                list_rows(s, (struct td_kv_place){TD_KV_PAGE_BLOCK, number[i]}, TD_KV_PAGE_TOKENS);
            (i ? s->device->backend->unpack : s->device->backend->pack)(s->device, &rows);
        }
        TD_TRY(wait_all(all, err)); /* the list is written again */
    }
    return TD_OK;
}

static void copy_slot(struct td_kv_staging *s, uint32_t from, uint32_t to) {
    struct td_device *d = s->device;
    uint8_t *a = s->slots + s->kv->slot_bytes * from, *b = s->slots + s->kv->slot_bytes * to;
    if (d->backend->host) {
        memcpy(b, a, s->kv->slot_bytes);
        return;
    }
    s->listed[0] = (struct td_kv_move){.bytes = s->kv->slot_bytes};
    up(s, s->move, s->listed, sizeof *s->listed);
    d->backend->pack(d, &(struct td_wire_rows){s->stretch, a, s->move, 1});
    d->backend->unpack(d, &(struct td_wire_rows){s->stretch, b, s->move, 1});
}

td_status td_kv_staging_copy_slot(const struct td_kv_stagings *all, uint32_t from, uint32_t to,
                                  struct td_error *err) {
    for (uint32_t r = 0; r < all->n; r++)
        copy_slot(all->rank[r], from, to);
    return wait_all(all, err);
}

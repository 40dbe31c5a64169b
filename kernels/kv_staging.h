/* Wire blocks of an engine's pages and slots, wherever the pool lies.
 *
 * On the CPU common/kv/wire.h does it where the rows are. On a device kernels gather a block's rows
 * into one stretch of device memory, or scatter them from there, and sum them, beside the steps. A
 * block in memory that was pinned is copied by the device alone; of others pieces go through two
 * pinned halves, so that the device's copy of one runs beside the host's of the other. On a device
 * nothing reaches the pool before a block was found right, by what is summed there: whoever writes
 * to the block meanwhile spoils it, but changes nothing that was found right. Nothing is taken
 * after td_kv_staging_take.
 *
 * Every rank of a worker has all of the KV state. So one packs a block, whichever; what is unpacked
 * or copied goes to all of them, each over its own link at the same time. */
#ifndef TD_KERNELS_KV_STAGING_H
#define TD_KERNELS_KV_STAGING_H

#include "common/kv/layout.h"
#include "common/kv/wire.h"
#include "kernels/device.h"

enum { TD_KV_PINNED_MAX = 32 };

struct td_kv_staging {
    struct td_device *device;
    const struct td_kv_layout *kv; /* of `pool` and `slots`, device memory */
    uint8_t *pool, *slots;
    /* Sizes; then memory of the device and pinned memory of the host. */
    size_t stretch_bytes, moves, device_bytes, host_bytes;
    uint8_t *on_device, *on_host;
    uint8_t *stretch;                 /* a block's body, or a page's or slot's copy */
    struct td_kv_move *move, *listed; /* of the device, of the host */
    uint64_t *share, *shares;         /* of the device, of the host: td_sums */
    uint8_t *half[2];                 /* of the host */
    struct {
        const uint8_t *base; /* NULL: free */
        size_t bytes;
    } pinned[TD_KV_PINNED_MAX]; /* of the caller's */
};

/* A page or a slot: page blocks and the slot block. */
struct td_kv_place {
    enum td_kv_block_kind kind;
    uint32_t number; /* of the page or slot */
};

/* Sizes alone; then the memory. `d`, `kv`, `pool` and `slots` must outlive it. */
void td_kv_staging_plan(struct td_kv_staging *s, struct td_device *d,
                        const struct td_kv_layout *kv);
TD_MUST_USE td_status td_kv_staging_take(struct td_kv_staging *s, void *pool, void *slots,
                                         struct td_error *err);
void td_kv_staging_finish(struct td_kv_staging *s);

/* td_kv_pack_page, td_kv_pack_slot. `n`: tokens of the page, or of the sequence. */
TD_MUST_USE td_status td_kv_staging_pack(struct td_kv_staging *s, struct td_kv_place from,
                                         struct td_kv_ticket ticket, uint32_t index, uint32_t n,
                                         void *dst, size_t cap, size_t *ret_len,
                                         struct td_kv_block_header *ret_header,
                                         struct td_error *err);

/* Those of a worker's ranks. */
struct td_kv_stagings {
    uint32_t n;
    struct td_kv_staging *rank[TD_MAX_RANKS];
};

/* Memory of blocks to be, whole pages of the host; without it, or where it fails, they go through
 * the halves. Undone before the memory and the stagings go; of what was not pinned it is nothing.
 */
TD_MUST_USE td_status td_kv_staging_pin(const struct td_kv_stagings *all, void *memory,
                                        size_t bytes, struct td_error *err);
void td_kv_staging_unpin(const struct td_kv_stagings *all, const void *memory);
/* Bytes of all ranges. */
size_t td_kv_staging_pinned(const struct td_kv_staging *s);

/* td_kv_unpack_page, td_kv_unpack_slot, on all ranks with one verdict. `n`: tokens of the prompt.
 */
TD_MUST_USE td_status td_kv_staging_unpack(const struct td_kv_stagings *all, const void *block,
                                           size_t len, struct td_kv_ticket ticket, uint32_t n,
                                           uint32_t index, struct td_kv_place to,
                                           struct td_kv_block_header *ret_header,
                                           struct td_error *err);

/* From one page or slot to another of the same pool, on all ranks. */
TD_MUST_USE td_status td_kv_staging_copy_page(const struct td_kv_stagings *all, uint32_t from,
                                              uint32_t to, struct td_error *err);
TD_MUST_USE td_status td_kv_staging_copy_slot(const struct td_kv_stagings *all, uint32_t from,
                                              uint32_t to, struct td_error *err);

#endif

/* Pages and slots of a device's pool in host memory, one at a time, for wire blocks: packing reads
 * them there and unpacking writes them there. On the CPU they are where they are. */
#ifndef TD_KERNELS_KV_STAGING_H
#define TD_KERNELS_KV_STAGING_H

#include "common/kv/layout.h"
#include "kernels/device.h"

struct td_kv_staging {
    struct td_device *device;
    const struct td_kv_layout *kv; /* of `pool` and `slots`, device memory */
    uint8_t *pool, *slots;
    struct td_kv_layout one; /* the same with a pool of one page: of host memory `page`, `slot` */
    void *page, *slot;
};

/* A page or a slot where the host reaches it: page `page` of `pool` under `kv`. */
struct td_kv_view {
    const struct td_kv_layout *kv;
    void *pool, *slot;
    uint32_t page;
};

/* Sizes alone; then the memory. `d`, `kv`, `pool` and `slots` must outlive it. */
TD_MUST_USE td_status td_kv_staging_plan(struct td_kv_staging *s, struct td_device *d,
                                         const struct td_kv_layout *kv, uint64_t model_fingerprint,
                                         struct td_error *err);
TD_MUST_USE td_status td_kv_staging_take(struct td_kv_staging *s, void *pool, void *slots,
                                         struct td_error *err);
void td_kv_staging_finish(struct td_kv_staging *s);
/* Host memory planned. */
size_t td_kv_staging_bytes(const struct td_kv_staging *s);

/* View of a page and back: fetch before packing (`fetch` false: the view only, to write it whole),
 * send after unpacking. A view holds until the next call. */
TD_MUST_USE td_status td_kv_staging_page(struct td_kv_staging *s, uint32_t page, bool fetch,
                                         struct td_kv_view *ret, struct td_error *err);
TD_MUST_USE td_status td_kv_staging_send_page(struct td_kv_staging *s, uint32_t page,
                                              struct td_error *err);
TD_MUST_USE td_status td_kv_staging_slot(struct td_kv_staging *s, uint32_t slot, bool fetch,
                                         struct td_kv_view *ret, struct td_error *err);
TD_MUST_USE td_status td_kv_staging_send_slot(struct td_kv_staging *s, uint32_t slot,
                                              struct td_error *err);

/* From one page or slot to another of the same pool. */
TD_MUST_USE td_status td_kv_staging_copy_page(struct td_kv_staging *s, uint32_t from, uint32_t to,
                                              struct td_error *err);
TD_MUST_USE td_status td_kv_staging_copy_slot(struct td_kv_staging *s, uint32_t from, uint32_t to,
                                              struct td_error *err);

#endif

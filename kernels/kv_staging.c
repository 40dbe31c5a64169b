/* Copies of one page (three families, a strip per layer each) and one slot. */
#include "kernels/kv_staging.h"

#include <string.h>

td_status td_kv_staging_plan(struct td_kv_staging *s, struct td_device *d,
                             const struct td_kv_layout *kv, uint64_t model_fingerprint,
                             struct td_error *err) {
    *s = (struct td_kv_staging){.device = d, .kv = kv};
    if (d->backend->host) return TD_OK;
    return td_kv_layout_init(&s->one, kv->layers, kv->ratio, kv->row_dtype, kv->key_dtype, 1,
                             model_fingerprint, err);
}

td_status td_kv_staging_take(struct td_kv_staging *s, void *pool, void *slots,
                             struct td_error *err) {
    const struct td_backend *b = s->device->backend;
    s->pool = pool;
    s->slots = slots;
    if (b->host) return TD_OK;
    TD_TRY(b->take_host(s->device, s->one.pool_bytes, "KV page", &s->page, err));
    return b->take_host(s->device, s->one.slot_bytes, "KV slot", &s->slot, err);
}

void td_kv_staging_finish(struct td_kv_staging *s) {
    if (s->page) s->device->backend->give_host(s->device, s->page);
    if (s->slot) s->device->backend->give_host(s->device, s->slot);
}

size_t td_kv_staging_bytes(const struct td_kv_staging *s) {
    return s->one.pool_bytes + s->one.slot_bytes;
}

/* One family of a page: `bytes` in each of its layers. */
static void copy_family(struct td_kv_staging *s, bool down, uint32_t page, size_t bytes,
                        uint32_t layers, size_t device_offset, size_t host_offset) {
    struct td_device *d = s->device;
    size_t pitch = bytes * s->kv->pages;
    uint8_t *there = s->pool + device_offset + bytes * page;
    uint8_t *here = (uint8_t *)s->page + host_offset;
    struct td_copy c = {.width = bytes, .rows = layers};
    if (layers == 0) return;
    c.to = down ? here : there;
    c.from = down ? there : here;
    c.to_pitch = down ? bytes : pitch;
    c.from_pitch = down ? pitch : bytes;
    (down ? d->backend->download : d->backend->upload)(d, TD_LANE_KV, &c);
}

static td_status copy_page(struct td_kv_staging *s, bool down, uint32_t page,
                           struct td_error *err) {
    const struct td_kv_layout *kv = s->kv, *one = &s->one;
    copy_family(s, down, page, (size_t)TD_KV_CSA_PER_PAGE * kv->row_bytes, kv->csa_layers,
                kv->csa_offset, one->csa_offset);
    copy_family(s, down, page, (size_t)TD_KV_CSA_PER_PAGE * kv->key_bytes, kv->csa_layers,
                kv->index_offset, one->index_offset);
    copy_family(s, down, page, (size_t)TD_KV_HCA_PER_PAGE * kv->row_bytes, kv->hca_layers,
                kv->hca_offset, one->hca_offset);
    return s->device->backend->wait(s->device, TD_LANE_KV, err);
}

static td_status copy_slot(struct td_kv_staging *s, bool down, uint32_t slot,
                           struct td_error *err) {
    struct td_device *d = s->device;
    uint8_t *there = s->slots + s->kv->slot_bytes * slot;
    struct td_copy c = {.to = down ? s->slot : there,
                        .from = down ? there : s->slot,
                        .width = s->kv->slot_bytes,
                        .rows = 1};
    (down ? d->backend->download : d->backend->upload)(d, TD_LANE_KV, &c);
    return d->backend->wait(d, TD_LANE_KV, err);
}

td_status td_kv_staging_page(struct td_kv_staging *s, uint32_t page, bool fetch,
                             struct td_kv_view *ret, struct td_error *err) {
    if (s->device->backend->host) {
        *ret = (struct td_kv_view){.kv = s->kv, .pool = s->pool, .page = page};
        return TD_OK;
    }
    *ret = (struct td_kv_view){.kv = &s->one, .pool = s->page};
    return fetch ? copy_page(s, true, page, err) : TD_OK;
}

td_status td_kv_staging_send_page(struct td_kv_staging *s, uint32_t page, struct td_error *err) {
    return s->device->backend->host ? TD_OK : copy_page(s, false, page, err);
}

td_status td_kv_staging_slot(struct td_kv_staging *s, uint32_t slot, bool fetch,
                             struct td_kv_view *ret, struct td_error *err) {
    if (s->device->backend->host) {
        *ret = (struct td_kv_view){.kv = s->kv, .slot = s->slots + s->kv->slot_bytes * slot};
        return TD_OK;
    }
    *ret = (struct td_kv_view){.kv = &s->one, .slot = s->slot};
    return fetch ? copy_slot(s, true, slot, err) : TD_OK;
}

td_status td_kv_staging_send_slot(struct td_kv_staging *s, uint32_t slot, struct td_error *err) {
    return s->device->backend->host ? TD_OK : copy_slot(s, false, slot, err);
}

td_status td_kv_staging_copy_page(struct td_kv_staging *s, uint32_t from, uint32_t to,
                                  struct td_error *err) {
    if (s->device->backend->host) {
        td_kv_copy_page(s->kv, s->pool, from, to);
        return TD_OK;
    }
    TD_TRY(copy_page(s, true, from, err));
    return copy_page(s, false, to, err);
}

td_status td_kv_staging_copy_slot(struct td_kv_staging *s, uint32_t from, uint32_t to,
                                  struct td_error *err) {
    if (s->device->backend->host) {
        memcpy(s->slots + s->kv->slot_bytes * to, s->slots + s->kv->slot_bytes * from,
               s->kv->slot_bytes);
        return TD_OK;
    }
    TD_TRY(copy_slot(s, true, from, err));
    return copy_slot(s, false, to, err);
}

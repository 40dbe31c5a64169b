/* Memory that peers may write to. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/statvfs.h>

#include "common/xfer/internal.h"

static td_status seal_key(struct td_xfer_region *region, const void *inner, size_t len,
                          struct td_error *err) {
    struct td_xfer_envelope e = {
        .memory = TD_XFER_HOST, .base = (uint64_t)(uintptr_t)region->base, .bytes = region->bytes};
    return td_xfer_seal(&e, TD_XFER_KEY_MAGIC, inner, len, region->key, sizeof region->key,
                        &region->key_len, err);
}

static td_status pack_key(struct td_xfer_region *region, struct td_error *err) {
    void *inner;
    size_t len;
    ucs_status_t s = ucp_rkey_pack(region->x->context, region->memory, &inner, &len);
    if (s != UCS_OK)
        return td_fail(err, TD_INTERNAL, "UCX: a region's key cannot be packed: %s",
                       ucs_status_string(s));
    td_status st = seal_key(region, inner, len, err);
    ucp_rkey_buffer_release(inner);
    return st;
}

/* Asked before UCX writes the whole segment to find out. */
static td_status check_room(size_t bytes, struct td_error *err) {
    struct statvfs fs;
    if (statvfs("/dev/shm", &fs) != 0)
        return td_fail(err, TD_CONFIG, "/dev/shm: %s; shared memory must be mounted there",
                       strerror(errno));
    unsigned long long room = (unsigned long long)fs.f_bavail * fs.f_bsize;
    if (bytes > room)
        return td_fail(err, TD_NO_MEMORY,
                       "/dev/shm: expected room for %zu bytes, found %llu; give it more (mount -o "
                       "remount,size=..., docker --shm-size) or use fewer or smaller slabs",
                       bytes, room);
    return TD_OK;
}

/* tcp lane: memory of our own, known to peers by a number. */
static td_status take_private(struct td_xfer_region *region, size_t bytes, struct td_error *err) {
    if (getrandom(&region->id, sizeof region->id, 0) != sizeof region->id)
        return td_fail(err, TD_IO, "getrandom: no random region id");
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                   -1, 0);
    if (p == MAP_FAILED)
        return td_fail(err, TD_NO_MEMORY, "region of %zu bytes: %s", bytes, strerror(errno));
    region->base = p;
    region->bytes = bytes;
    return seal_key(region, &region->id, sizeof region->id, err);
}

td_status td_xfer_region_alloc(struct td_xfer *x, size_t bytes, struct td_xfer_region **ret_region,
                               struct td_error *err) {
    if (bytes == 0) return td_fail(err, TD_INVALID, "region: expected at least one byte, found 0");
    bool shared = td_xfer_lane_chosen() == TD_XFER_SHM;
    if (shared) TD_TRY(check_room(bytes, err));
    struct td_xfer_region *region = calloc(1, sizeof *region);
    if (!region) return td_fail(err, TD_NO_MEMORY, "no memory for a region");
    region->x = x;
    td_list_push_back(&x->regions, &region->link);
    td_status st = TD_OK;
    if (!shared) {
        TD_TRY_GOTO(take_private(region, bytes, err), free_region);
        *ret_region = region;
        return TD_OK;
    }
    ucp_mem_map_params_t params = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                                                 UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                                                 UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
                                   .length = bytes,
                                   .flags = UCP_MEM_MAP_ALLOCATE,
                                   .memory_type = UCS_MEMORY_TYPE_HOST};
    td_xfer_ucx_forget();
    ucs_status_t s = ucp_mem_map(x->context, &params, &region->memory);
    if (s != UCS_OK) {
        region->memory = NULL;
        st = td_fail(err, TD_NO_MEMORY, "region of %zu bytes in /dev/shm: %s. %s", bytes,
                     ucs_status_string(s), td_xfer_ucx_said());
        goto free_region;
    }
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH};
    s = ucp_mem_query(region->memory, &attr);
    if (s != UCS_OK || attr.length < bytes) {
        st = td_fail(err, TD_INTERNAL, "UCX: a region's memory cannot be queried: %s",
                     ucs_status_string(s));
        goto free_region;
    }
    region->base = attr.address;
    region->bytes = bytes;
    TD_TRY_GOTO(pack_key(region, err), free_region);
    *ret_region = region;
    return TD_OK;
free_region:
    td_xfer_region_free(region);
    return st;
}

void td_xfer_region_free(struct td_xfer_region *region) {
    if (!region) return;
    td_list_remove(&region->link);
    TD_LIST_EACH (&region->x->peers, it) {
        struct td_xfer_peer *peer = TD_CONTAINER(it, struct td_xfer_peer, link);
        if (peer->grant.region == region) peer->grant = (struct td_xfer_grant){0};
    }
    if (!region->memory && region->base) (void)munmap(region->base, region->bytes);
    if (region->memory) (void)ucp_mem_unmap(region->x->context, region->memory);
    free(region);
}

void *td_xfer_region_base(const struct td_xfer_region *region) {
    return region->base;
}

const char *td_xfer_region_transport(const struct td_xfer_region *region) {
    return region->memory ? "posix" /* the only allocator the settings leave (env.c) */
                          : "private";
}

void td_xfer_grant(struct td_xfer_peer *peer, struct td_xfer_region *region, uint64_t offset,
                   uint64_t bytes) {
    peer->grant = (struct td_xfer_grant){0};
    if (offset <= region->bytes && bytes <= region->bytes - offset)
        peer->grant = (struct td_xfer_grant){region, offset, bytes};
}

const void *td_xfer_region_key(const struct td_xfer_region *region, size_t *ret_len) {
    *ret_len = region->key_len;
    return region->key;
}

/* The CPU as a device, and kinds of devices by name. */
#include "kernels/device.h"

#include <gnu/libc-version.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/collectives.h"
#include "kernels/model/random.h"
#include "kernels/ops.h"

/* Bumped whenever a definition in kernels/ref changes a bit of any result. */
enum { OPS_VERSION = 2, MAX_INDEX = 255 };

static td_status cpu_open(struct td_device *d, uint32_t index, struct td_error *err) {
    if (index != 0) return td_fail(err, TD_CONFIG, "device: expected cpu, found cpu:%u", index);
    d->backend = &td_backend_cpu;
    return TD_OK;
}

static void cpu_close(struct td_device *d) {
    (void)d;
}

static td_status cpu_take_host(struct td_device *d, size_t bytes, const char *what, void **ret,
                               struct td_error *err) {
    (void)d;
    size_t padded = (bytes + 255) & ~(size_t)255;
    void *p = aligned_alloc(256, padded ? padded : 256);
    if (!p)
        return td_fail(err, TD_NO_MEMORY, "%s: expected %zu bytes of memory, the system gave none",
                       what, bytes);
    memset(p, 0, padded); /* touched now, so that a step never meets a page fault */
    *ret = p;
    return TD_OK;
}

static td_status cpu_take(struct td_device *d, size_t bytes, const char *what, void **ret,
                          struct td_error *err) {
    if (d->sealed) return td_fail(err, TD_INTERNAL, "%s: memory is taken at start only", what);
    TD_TRY(cpu_take_host(d, bytes, what, ret, err));
    d->taken += bytes;
    return TD_OK;
}

static void cpu_give(struct td_device *d, void *memory, size_t bytes) {
    if (memory) d->taken -= bytes;
    free(memory);
}

static void cpu_give_host(struct td_device *d, void *memory) {
    (void)d;
    free(memory);
}

/* Often there is nothing to do: both sides are one array. */
static void cpu_copy(struct td_device *d, enum td_lane lane, const struct td_copy *c) {
    (void)d;
    (void)lane;
    for (size_t i = 0; c->to != c->from && i < c->rows; i++)
        memcpy((uint8_t *)c->to + i * c->to_pitch, (const uint8_t *)c->from + i * c->from_pitch,
               c->width);
}

static td_status cpu_wait(struct td_device *d, enum td_lane lane, struct td_error *err) {
    (void)d;
    (void)lane;
    (void)err;
    return TD_OK;
}

static void cpu_fill(struct td_device *d, const struct td_random *r, const struct td_fill *f) {
    (void)d;
    for (size_t i = 0; i < f->rows; i++)
        td_random_bytes(r, f->from + i * f->pitch, f->width, (uint8_t *)f->to + i * f->width);
}

/* Ranks meet on the host by their team; there is nothing to set up. */
static td_status cpu_join(struct td_device *d, size_t words, struct td_error *err) {
    (void)words;
    return d->team ? TD_OK : td_fail(err, TD_INTERNAL, "ranks: a device without a team");
}

static void cpu_leave(struct td_device *d) {
    (void)d;
}

/* Who waits in a meeting is released by the team itself. */
static void cpu_break_off(struct td_device *d) {
    (void)d;
}

static td_status cpu_ops(struct td_device *d, uint64_t force_ref, struct td_ops *ret,
                         struct td_error *err) {
    (void)d;
    (void)err;
    td_ops_init(ret, force_ref);
    return TD_OK;
}

static size_t cpu_index_workspace(uint32_t heads, uint32_t topk, uint32_t rows) {
    (void)rows;
    return td_index_workspace(heads, topk);
}

/* Every table of the CPU gives the same bits, so the instruction set is not part of it; the
 * compiler and C library are, because frequencies come from pow and square roots from both. */
static void cpu_describe(const struct td_device *d, char *buf, size_t cap) {
    (void)d;
    snprintf(buf, cap, "cpu ops %d; compiler %s; libc %s", OPS_VERSION, __VERSION__,
             gnu_get_libc_version());
}

const struct td_backend td_backend_cpu = {
    .name = "cpu",
    .host = true,
    .open = cpu_open,
    .close = cpu_close,
    .take = cpu_take,
    .give = cpu_give,
    .take_host = cpu_take_host,
    .give_host = cpu_give_host,
    .upload = cpu_copy,
    .download = cpu_copy,
    .wait = cpu_wait,
    .fill = cpu_fill,
    .join = cpu_join,
    .leave = cpu_leave,
    .all_reduce = td_host_all_reduce,
    .all_gather = td_host_all_gather,
    .all_to_all = td_host_all_to_all,
    .break_off = cpu_break_off,
    .ops = cpu_ops,
    .index_workspace = cpu_index_workspace,
    .describe = cpu_describe,
};

/* One number at *at, behind it nothing or a comma and more. */
static bool read_index(const char **at, uint32_t *ret) {
    char *end;
    if (**at < '0' || **at > '9') return false;
    unsigned long n = strtoul(*at, &end, 10);
    if (n > MAX_INDEX || (*end != '\0' && *end != ',')) return false;
    *at = *end ? end + 1 : end;
    *ret = (uint32_t)n;
    return *end == '\0' || **at != '\0';
}

/* `list` behind "cuda": nothing, ":N" or ":A,B,...". */
static td_status read_indices(const char *name, const char *list, uint32_t ranks,
                              uint32_t *ret_index, struct td_error *err) {
    uint32_t n = 0, next = 0;
    for (const char *at = *list ? list + 1 : list; *at; n++)
        if (!read_index(&at, n < ranks ? &ret_index[n] : &next))
            return td_fail(
                err, TD_CONFIG,
                "device: expected cuda:N with N from 0 to %d, or such numbers with commas "
                "between, found %.60s",
                MAX_INDEX, name);
    if (n == 0 && *list)
        return td_fail(err, TD_CONFIG, "device: expected a number behind cuda:, found %.60s", name);
    if (n > 1 && n != ranks)
        return td_fail(err, TD_CONFIG,
                       "device: expected one GPU for each of %u ranks (tp), found %u in %.60s",
                       ranks, n, name);
    for (uint32_t r = n; r < ranks; r++)
        ret_index[r] = r ? ret_index[r - 1] + 1 : 0;
    if (ret_index[ranks - 1] <= MAX_INDEX) return TD_OK;
    return td_fail(err, TD_CONFIG,
                   "device: %.60s: expected GPUs up to %d, found %u for the last of %u ranks", name,
                   MAX_INDEX, ret_index[ranks - 1], ranks);
}

td_status td_devices_read(const char *name, uint64_t ranks, bool *ret_cuda,
                          uint32_t ret_index[TD_MAX_RANKS], struct td_error *err) {
    if (ranks == 0 || ranks > TD_MAX_RANKS || (ranks & (ranks - 1)) != 0)
        return td_fail(err, TD_CONFIG, "tp: expected 1, 2, 4 or 8 ranks, found %llu",
                       (unsigned long long)ranks);
    memset(ret_index, 0, TD_MAX_RANKS * sizeof *ret_index);
    *ret_cuda = strcmp(name, "cpu") != 0;
    if (!*ret_cuda) return TD_OK;
    if (strncmp(name, "cuda", 4) != 0 || (name[4] != '\0' && name[4] != ':'))
        return td_fail(err, TD_CONFIG, "device: expected cpu, cuda:N or cuda:A,B,..., found %.60s",
                       name);
    return read_indices(name, name + 4, (uint32_t)ranks, ret_index, err);
}

td_status td_backend_find(const char *name, uint64_t ranks, const struct td_backend **ret,
                          uint32_t ret_index[TD_MAX_RANKS], struct td_error *err) {
    bool cuda;
    TD_TRY(td_devices_read(name, ranks, &cuda, ret_index, err));
    *ret = &td_backend_cpu;
    if (!cuda) return TD_OK;
#ifdef TD_HAVE_CUDA
    *ret = &td_backend_cuda;
    return TD_OK;
#else
    return td_fail(err, TD_CONFIG,
                   "device: %.60s: this build has no CUDA (meson option cuda); expected cpu", name);
#endif
}

/* Sealing and checking of address and key bytes. UCX unpacks what it is given without knowing
 * its length, so nothing damaged, cut or left over from a dead process may reach it. */
#include "common/xfer/wire.h"

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/xfer/internal.h"

static uint64_t fnv1a(uint64_t h, const void *bytes, size_t len) {
    const uint8_t *p = bytes;
    for (size_t i = 0; i < len; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}

static uint64_t envelope_sum(struct td_xfer_envelope envelope, const void *inner, size_t len) {
    envelope.sum = 0;
    uint64_t h = fnv1a(0xcbf29ce484222325u, &envelope, sizeof envelope);
    return fnv1a(h, inner, len);
}

/* 0 when there is no such process, or it is a zombie: its memory is gone. */
static uint64_t process_start(uint32_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    /* The command may hold spaces and brackets; what follows its last bracket does not. */
    char *p = strrchr(text, ')');
    char state = 0;
    unsigned long long start = 0;
    if (!p || sscanf(p + 1,
                     " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d "
                     "%*d %llu",
                     &state, &start) != 2)
        return 0;
    return state == 'Z' || state == 'X' ? 0 : start;
}

/* Alive, and not in our /proc. */
static bool hidden(uint32_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u", pid);
    return pid != 0 && access(path, F_OK) != 0 && kill((pid_t)pid, 0) == 0;
}

td_status td_xfer_origin_check(const struct td_xfer_origin *origin, const char *what,
                               struct td_error *err) {
    if (td_xfer_lane_chosen() == TD_XFER_TCP) return TD_OK;
    if (origin->pid != 0 && process_start(origin->pid) == origin->start) return TD_OK;
    if (hidden(origin->pid))
        return td_fail(err, TD_UNREACHABLE,
                       "%s: process %u, which made it, lives but /proc does not show it to us: "
                       "another user namespace (PrivateUsers=) or other capabilities, and a /proc "
                       "that hides such processes (ProtectProc=)",
                       what, origin->pid);
    return td_fail(err, TD_UNREACHABLE, "%s: process %u, which made it, has ended", what,
                   origin->pid);
}

td_status td_xfer_seal(struct td_xfer_envelope *envelope, uint32_t magic, const void *inner,
                       size_t inner_len, void *out, size_t cap, size_t *ret_len,
                       struct td_error *err) {
    size_t total = sizeof *envelope + inner_len;
    if (inner_len > cap || total > cap)
        return td_fail(err, TD_TOO_LONG,
                       "transfer layer's own bytes: expected at most %zu, UCX made %zu",
                       cap - sizeof *envelope, inner_len);
    envelope->magic = magic;
    envelope->version = TD_XFER_VERSION;
    envelope->inner = (uint32_t)inner_len;
    envelope->lane = td_xfer_lane_chosen();
    envelope->origin = (struct td_xfer_origin){.start = process_start((uint32_t)getpid()),
                                               .pid = (uint32_t)getpid()};
    if (envelope->origin.start == 0)
        return td_fail(err, TD_CONFIG, "/proc/%u/stat: cannot be read; /proc must be mounted",
                       envelope->origin.pid);
    envelope->sum = envelope_sum(*envelope, inner, inner_len);
    memcpy(out, envelope, sizeof *envelope);
    memcpy((char *)out + sizeof *envelope, inner, inner_len);
    *ret_len = total;
    return TD_OK;
}

td_status td_xfer_unseal(const void *bytes, size_t len, uint32_t magic, const char *what,
                         struct td_xfer_envelope *ret_envelope, struct td_error *err) {
    struct td_xfer_envelope e;
    if (len < sizeof e)
        return td_fail(err, TD_PROTOCOL, "%s: expected at least %zu bytes, found %zu", what,
                       sizeof e, len);
    memcpy(&e, bytes, sizeof e);
    if (e.magic != magic || e.version != TD_XFER_VERSION)
        return td_fail(err, TD_PROTOCOL,
                       "%s: expected magic %08x version %d, found %08x version %u", what, magic,
                       TD_XFER_VERSION, e.magic, e.version);
    if (e.inner == 0 || e.inner != len - sizeof e)
        return td_fail(err, TD_PROTOCOL, "%s: expected %u bytes after its head, found %zu", what,
                       e.inner, len - sizeof e);
    if (e.sum != envelope_sum(e, (const char *)bytes + sizeof e, e.inner))
        return td_fail(err, TD_PROTOCOL, "%s: its checksum does not match", what);
    if (e.lane != td_xfer_lane_chosen())
        return td_fail(err, TD_MISMATCH,
                       "%s: expected lane %s, found lane %s: all workers need the "
                       "same setting lane",
                       what, td_xfer_lane_name(td_xfer_lane_chosen()), td_xfer_lane_name(e.lane));
    TD_TRY(td_xfer_origin_check(&e.origin, what, err));
    *ret_envelope = e;
    return TD_OK;
}

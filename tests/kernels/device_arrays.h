/* Arrays of a test in a device's memory. `bytes` are given back uncounted: a test's device has no
 * plan. */
#ifndef TD_TESTS_KERNELS_DEVICE_ARRAYS_H
#define TD_TESTS_KERNELS_DEVICE_ARRAYS_H

#include "kernels/device.h"
#include "tests/kernels/fixture.h"

/* A copy of `from` there, or zeros. */
static inline void *td_test_put(struct td_device *d, const void *from, size_t bytes) {
    struct td_error err;
    void *p;
    if (d->backend->take(d, bytes, "an array", &p, &err) != TD_OK) fail_msg("%s", err.text);
    if (from) td_upload(d, p, from, bytes);
    return p;
}

static inline void td_test_get(struct td_device *d, void *to, const void *p, size_t bytes) {
    struct td_error err;
    td_download(d, to, p, bytes);
    if (d->backend->wait(d, TD_LANE_STEP, &err) != TD_OK) fail_msg("%s", err.text);
}

static inline void td_test_give(struct td_device *d, const void *p) {
    d->backend->give(d, (void *)(uintptr_t)p, 0);
}

/* Devices of a kind that are there, at most TD_MAX_RANKS. */
static inline uint32_t td_test_devices(const struct td_backend *backend) {
    struct td_error err;
    uint64_t bytes, left;
    uint32_t n = 0;
    while (n < TD_MAX_RANKS && backend->memory(n, &bytes, &left, &err) == TD_OK)
        n++;
    return n;
}

#endif

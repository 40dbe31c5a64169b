/* Where an engine computes: the memory, copies, order and ops of one kind of device.
 *
 * The forward pass and the engine are the same for all kinds. What differs is behind this table:
 * who owns memory, how bytes get there and back, and which functions fill the op table. An op
 * queues its work and returns; work of one lane is done in the order it was queued. On the CPU
 * everything is done at once and device memory is host memory. */
#ifndef TD_KERNELS_DEVICE_H
#define TD_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "kernels/threads.h"

struct td_backend;
struct td_kv_move;
struct td_ops;
struct td_random;
struct td_recording;
struct td_team;

enum { TD_MAX_RANKS = 8 }; /* of one worker */

/* The first argument of every op. `backend`, `state` and `comm` are the device's; of a rank `team`,
 * `rank` and `ranks` are set before join; the rest is the CPU's. */
struct td_device {
    const struct td_backend *backend;
    void *state;
    struct td_team *team; /* NULL: a worker of one device */
    uint32_t rank, ranks;
    void *comm;
    size_t taken; /* bytes of device memory so far */
    bool sealed;  /* nothing may be taken any more */
    struct td_threads *threads;
    uint8_t *scratch; /* [threads][scratch_stride], 64-aligned; td_op_scratch bytes */
    size_t scratch_stride;
};

/* Two orders of work: steps, by the thread that runs them, and copies of KV state beside them, by
 * the thread that packs and unpacks. */
enum td_lane { TD_LANE_STEP, TD_LANE_KV, TD_LANES };

/* `rows` pieces of `width` bytes each, `to_pitch` and `from_pitch` bytes apart. */
struct td_copy {
    void *to;
    const void *from;
    size_t width, rows, to_pitch, from_pitch;
};

/* Of a tensor's bytes `rows` pieces of `width` each, `pitch` apart, the first one at byte `from`;
 * side by side at `to`. */
struct td_fill {
    void *to;
    size_t from, width, rows, pitch;
};

/* Rows between a pool or slot and one stretch without gaps, all device memory: td_kv_move says what
 * lies where. */
struct td_wire_rows {
    void *stretch, *own;
    const struct td_kv_move *move; /* [n], device memory */
    uint32_t n;
};

/* Stretches of device memory to be summed, and where their sums go: of stretch i the contributions
 * (common/kv/checksum.h) in TD_SUM_SHARES numbers that are to be added. */
enum { TD_SUM_STRETCHES = 8, TD_SUM_SHARES = 32 };
struct td_sums {
    const void *stretch[TD_SUM_STRETCHES]; /* 4-aligned */
    uint64_t bytes[TD_SUM_STRETCHES];      /* multiples of 4 */
    uint32_t n;
    uint64_t *share; /* [n][TD_SUM_SHARES], device memory */
};

/* ---- what the ranks of a worker tell each other inside a step ----
 * Every rank queues the same calls with the same numbers in the same order, each with buffers of
 * its own device. A result has the same bits on every rank. */

/* y[i] = the ranks' x[i], + add[i] where `add` is not NULL. Ranks are added as a binary tree: the
 * lower half's sum + the upper half's, so that ranks of 2, 4 or 8 that have summed their own shards
 * in that order give the bits of one rank that has them all. `bits`: no sum, but x or-ed as 32-bit
 * words: of values that one rank has and all others hold as zeros. y is not x; y may be add. */
struct td_all_reduce_args {
    const float *x;   /* [n, dim] */
    const float *add; /* [n, dim] or NULL */
    float *y;         /* [n, dim] */
    uint32_t n, dim;
    bool bits;
};
/* Bytes at[r] .. at[r + 1] - 1 of every rank's buffer become those of rank r's, or, where a rank
 * has `own`, as many bytes from there; multiples of 4. */
struct td_all_gather_args {
    void *buffer;
    size_t at[TD_MAX_RANKS + 1]; /* ascending */
    const void *own;             /* aligned as its place is; NULL: what the rank has lies there */
};
/* Part r of rank s's x becomes part s of rank r's y, a rank's own too. x is not y. */
struct td_all_to_all_args {
    const void *x; /* [ranks] parts */
    void *y;       /* [ranks] */
    size_t bytes;  /* of a part; a multiple of 16, and so are the addresses */
};

struct td_backend {
    const char *name; /* "cpu", "cuda" */
    bool host;        /* device memory is host memory: its pointers may be followed */
    /* Device `index` of this kind, into a *d that is zeroed but for backend, team, rank and ranks.
     * A sentence when there is none. */
    td_status (*open)(struct td_device *d, uint32_t index, struct td_error *err);
    void (*close)(struct td_device *d); /* everything taken was given back */
    /* Bytes of device `index` and how many of them nobody has taken. NULL: the host's memory. */
    td_status (*memory)(uint32_t index, uint64_t *ret_bytes, uint64_t *ret_free,
                        struct td_error *err);

    /* Device memory: zeroed, 256-aligned, counted in d->taken; only until d->sealed. `what` is for
     * the sentence. give(NULL) is fine. */
    td_status (*take)(struct td_device *d, size_t bytes, const char *what, void **ret,
                      struct td_error *err);
    void (*give)(struct td_device *d, void *memory, size_t bytes);
    /* Host memory that copies run fastest with; zeroed, 64-aligned. */
    td_status (*take_host)(struct td_device *d, size_t bytes, const char *what, void **ret,
                           struct td_error *err);
    void (*give_host)(struct td_device *d, void *memory);
    /* The same of memory that is there already, whole pages of the host, for all of a worker's
     * devices, until unpin. NULL: this kind copies at the same speed anyway. */
    td_status (*pin)(struct td_device *d, void *memory, size_t bytes, struct td_error *err);
    void (*unpin)(struct td_device *d, void *memory);

    /* Queued. The host side must stay as it is until the lane was waited for; what is uploaded from
     * memory that neither take_host gave nor pin was told of may change at once. */
    void (*upload)(struct td_device *d, enum td_lane lane, const struct td_copy *c);
    void (*download)(struct td_device *d, enum td_lane lane, const struct td_copy *c);
    /* Until all of the lane is done; a fault of anything queued before is reported here. */
    td_status (*wait)(struct td_device *d, enum td_lane lane, struct td_error *err);

    /* A part of a random tensor to device memory, 8-aligned (model/random.h); queued in the step
     * lane. */
    void (*fill)(struct td_device *d, const struct td_random *r, const struct td_fill *f);

    /* Work recorded once and queued again and again, as it was: what changes between two times must
     * be in device memory, and ops' arguments are those of the recording. NULL where a queue costs
     * nothing. Between record and keep the step lane takes ops alone and runs none of them. keep
     * with a NULL ret_recording forgets what was recorded; *ret_launches (may be NULL) is the
     * number of kernels in it. */
    td_status (*record)(struct td_device *d, struct td_error *err);
    td_status (*keep)(struct td_device *d, struct td_recording **ret_recording,
                      uint32_t *ret_launches, struct td_error *err);
    void (*replay)(struct td_device *d, const struct td_recording *r);
    void (*forget)(struct td_device *d, struct td_recording *r); /* NULL is fine */

    /* Ranks of one worker; NULL: this kind of device has none. join: from the thread of every rank,
     * all at once, after open and before anything is sealed; `words` is the most 32-bit words that
     * are summed at once. The collectives are queued in the step lane and may be recorded.
     * What went wrong shows at the next wait. */
    td_status (*join)(struct td_device *d, size_t words, struct td_error *err);
    void (*leave)(
        struct td_device *d); /* like join; of a broken team one by one. NULL comm is fine */
    void (*all_reduce)(const struct td_device *d, const struct td_all_reduce_args *a);
    void (*all_gather)(const struct td_device *d, const struct td_all_gather_args *a);
    void (*all_to_all)(const struct td_device *d, const struct td_all_to_all_args *a);
    /* From any thread: who waits in a collective for a rank that will not come gives up. */
    void (*break_off)(struct td_device *d);

    /* Mark number i (0, 1) of a lane is all that was queued there so far; until it is done. What
     * went wrong shows at the next wait. */
    void (*mark)(struct td_device *d, enum td_lane lane, uint32_t i);
    void (*reach)(struct td_device *d, enum td_lane lane, uint32_t i);

    /* Wire blocks, in the KV lane; NULL where device memory is host memory. */
    void (*pack)(struct td_device *d, const struct td_wire_rows *r);   /* own to stretch */
    void (*unpack)(struct td_device *d, const struct td_wire_rows *r); /* stretch to own */
    void (*sum)(struct td_device *d, const struct td_sums *s);

    /* The op table, ops of the mask (td_ops_mask) taken from the kind's plain definitions. An op
     * without a kernel is an error that names it. */
    td_status (*ops)(struct td_device *d, uint64_t force_ref, struct td_ops *ret,
                     struct td_error *err);
    /* Bytes of the indexer's workspace for steps of up to `rows` rows. */
    size_t (*index_workspace)(uint32_t heads, uint32_t topk, uint32_t rows);
    /* The PCI address of device `index`, as "0000:c1:00.0", or "" where it has none. NULL: this
     * kind is nowhere in particular. */
    void (*pci)(uint32_t index, char *buf, size_t cap);
    /* What decides over bits besides the model's settings, as text. */
    void (*describe)(const struct td_device *d, char *buf, size_t cap);
};

extern const struct td_backend td_backend_cpu;
#ifdef TD_HAVE_CUDA
extern const struct td_backend td_backend_cuda;
#endif

/* Where the `ranks` ranks of a worker compute, 1, 2, 4 or 8: `name` is "cpu", "cuda:N" (N may be
 * missing: 0) for devices N, N + 1, ..., or "cuda:A,B,..." with one for each rank. A device may
 * occur twice: for tests. CONFIG with a sentence for anything else. Any build reads both. */
TD_MUST_USE td_status td_devices_read(const char *name, uint64_t ranks, bool *ret_cuda,
                                      uint32_t ret_index[TD_MAX_RANKS], struct td_error *err);
/* The same as a kind of device; CONFIG also for a kind that this build does not have. */
TD_MUST_USE td_status td_backend_find(const char *name, uint64_t ranks,
                                      const struct td_backend **ret,
                                      uint32_t ret_index[TD_MAX_RANKS], struct td_error *err);

/* `bytes` from the host into device memory and back, in the step lane. */
static inline void td_upload(struct td_device *d, void *to, const void *from, size_t bytes) {
    struct td_copy c = {.to = to, .from = from, .width = bytes, .rows = 1};
    if (bytes) d->backend->upload(d, TD_LANE_STEP, &c);
}
static inline void td_download(struct td_device *d, void *to, const void *from, size_t bytes) {
    struct td_copy c = {.to = to, .from = from, .width = bytes, .rows = 1};
    if (bytes) d->backend->download(d, TD_LANE_STEP, &c);
}

#endif

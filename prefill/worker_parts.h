/* What the files of the prefill worker's shell share. Private to prefill/. */
#ifndef TD_PREFILL_WORKER_PARTS_H
#define TD_PREFILL_WORKER_PARTS_H

#include "kernels/guide.h"
#include "kernels/worker_engine.h"
#include "prefill/sched.h"
#include "prefill/worker.h"
#include "proto/worker_host.h"

enum { TD_PREFILL_PEERS_MAX = 16 }; /* decode workers with a data link at one time */

/* One slab and the put that empties it. */
struct td_send_slab {
    uint8_t *bytes; /* [slab_bytes], of `slabs` */
    bool there;     /* what was packed lies in the landing slab already */
    bool putting;   /* from PUT until both requests are quiet */
    bool reported;  /* PUT_DONE was said */
    bool flushing;  /* the flush was posted */
    uint64_t epoch;
    struct td_xfer_req put, flush;
    struct td_prefill_worker *w;
};

struct td_prefill_link { /* to one decode worker */
    uint64_t epoch;      /* 0: free */
    struct td_xfer_peer *peer;
    struct td_xfer_remote *remote; /* its landing slabs; NULL before the welcome */
    void *pinned;                  /* those of them that are ours, as they are mapped here */
};

/* The step that is in the engine. */
struct td_prefill_job {
    struct td_run run;
    uint32_t n_samples;
    struct td_worker_sample sample[TD_CHOICES_MAX];
    struct td_token token[TD_CHOICES_MAX];
    const struct td_selection *selections; /* [n_samples] or NULL; the engine's */
    td_status status;
    struct td_error failed[TD_CHOICES_MAX], err; /* the samplings, the step */
};

struct td_prefill_worker {
    struct td_config config; /* effective values */
    char name[TD_NAME_MAX];
    uint64_t epoch;
    struct td_worker_engine engine;
    struct td_prefill *machine;
    struct td_host *host;
    struct td_prefill_job job;
    bool stepping, stopping;
    uint64_t slab_bytes;
    uint8_t *slabs;                     /* [send_slabs][slab_bytes] */
    struct td_send_slab *slab;          /* [send_slabs] */
    struct td_kv_block_header *headers; /* [blocks of a slab] of the pack being reported */
    uint32_t headers_max;
    struct td_prefill_link link[TD_PREFILL_PEERS_MAX];
    struct td_msg_hello hello;
    char settings[16 << 10];
};

/* Gives the machine an event, at the present time, and carries out what follows. */
void td_prefill_feed(struct td_prefill_worker *w, struct td_prefill_event *ev);

/* ---- worker_peer.c: the data plane ---- */

extern const struct td_plane_events td_prefill_plane_events;
void td_prefill_connect(struct td_prefill_worker *w, const struct td_prefill_action *a);
void td_prefill_send_peer(struct td_prefill_worker *w, struct td_prefill_action *a);
void td_prefill_close(struct td_prefill_worker *w, uint64_t epoch);
void td_prefill_pack(struct td_prefill_worker *w, const struct td_prefill_action *a);
/* Before the link's memory goes. */
void td_prefill_unpin(struct td_prefill_worker *w, struct td_prefill_link *l);
void td_prefill_put(struct td_prefill_worker *w, const struct td_prefill_action *a);

#endif

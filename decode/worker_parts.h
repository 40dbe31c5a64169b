/* What the files of the decode worker's shell share. Private to decode/. */
#ifndef TD_DECODE_WORKER_PARTS_H
#define TD_DECODE_WORKER_PARTS_H

#include "common/io/pidfd.h"
#include "decode/sched.h"
#include "decode/worker.h"
#include "kernels/guide.h"
#include "kernels/worker_engine.h"
#include "proto/worker_host.h"

enum { TD_DECODE_LINKS_MAX = 64 };

struct td_decode_link {
    td_link_id id; /* 0: free */
    struct td_xfer_peer *peer;
};

/* A prefill process whose exit is awaited, and its newest link: the machine knows a process by
 * that. Stays while the process lives, link or not. */
struct td_decode_watch {
    uint64_t pid; /* 0: free */
    td_link_id link;
    struct td_pidfd *pidfd;
    struct td_decode_worker *w;
};

/* The step that is in the engine. Two sets of tokens: those of the step before are read while the
 * next one is started. */
struct td_decode_job {
    const struct td_run *runs;
    uint32_t n_runs, n_samples, set;
    struct td_worker_sample *samples;      /* [slots] */
    struct td_token *tokens[2];            /* [slots] */
    const struct td_selection *selections; /* [n_samples] or NULL; the engine's */
    struct td_error *failed;               /* [slots] */
    td_status status;
    struct td_error err;
};

struct td_decode_worker {
    struct td_config config; /* effective values */
    char name[TD_NAME_MAX];
    uint64_t epoch;
    struct td_worker_engine engine;
    struct td_decode *machine;
    struct td_host *host;
    struct td_decode_job job;
    bool stepping, stopping;
    uint64_t slab_bytes;
    struct td_xfer_region *landing;     /* [peers][landing_slabs][slab_bytes] */
    struct td_kv_block_header *headers; /* [blocks of a slab] of the unpack being reported */
    uint32_t headers_max;
    td_link_id next_link;
    uint64_t stranger_ns; /* when one was logged last */
    struct td_decode_link link[TD_DECODE_LINKS_MAX];
    struct td_decode_watch watch[TD_DECODE_LINKS_MAX];
    struct td_msg_hello hello;
    char settings[16 << 10];
};

/* Gives the machine an event, at the present time, and carries out what follows. */
void td_decode_feed(struct td_decode_worker *w, struct td_decode_event *ev);

/* ---- worker_peer.c: the data plane ---- */

extern const struct td_plane_events td_decode_plane_events;
void td_decode_send_peer(struct td_decode_worker *w, struct td_decode_action *a);
void td_decode_close(struct td_decode_worker *w, td_link_id link);
void td_decode_unpack(struct td_decode_worker *w, const struct td_decode_action *a);
void td_decode_stop_watching(struct td_decode_worker *w);

#endif

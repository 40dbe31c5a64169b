/* A prefill worker played by the test: it computes a prompt with the real engine, packs real wire
 * blocks, greets a real decode worker over the real data plane, and sends what the test made of
 * them. So a fault is put into good data, and the worker that must find it is the product. */
#ifndef TD_TESTS_WORKERS_FORGER_H
#define TD_TESTS_WORKERS_FORGER_H

#include "common/kv/manifest.h"
#include "common/kv/wire.h"
#include "kernels/worker_engine.h"
#include "proto/data_plane.h"
#include "tests/workers/cluster.h"

enum { FORGER_BLOCKS = 8, FORGER_STEPS = 16 };

/* One block as it will travel. `header` is a copy: forged_seal() puts it back. */
struct forged_block {
    uint8_t *bytes; /* [cap] */
    size_t len, cap;
    struct td_kv_block_header header;
};

/* One thing the sender does, in this order. */
struct forged_step {
    uint32_t block; /* whose bytes are put; UINT32_MAX: none */
    bool say;       /* send `slab` (its number is filled in) */
    bool manifest;  /* send the manifest instead */
    struct td_msg_slab slab;
};

/* A whole handoff, honest until a test changes it. */
struct forged {
    uint32_t n_blocks;
    struct forged_block block[FORGER_BLOCKS];
    struct forged_step step[FORGER_STEPS];
    uint32_t n_steps;
    struct td_msg manifest;
};

struct forger {
    struct cluster *c;
    struct td_config config;
    struct td_worker_engine engine;
    uint64_t epoch;
    /* the prompt that was computed: slot 0, pages 0.. */
    const int32_t *ids;
    uint32_t n_prompt;
    struct td_token first;
    /* the link */
    struct td_plane *plane;
    struct td_xfer_peer *peer;
    struct td_xfer_remote *remote;
    uv_timer_t beat;
    uint64_t beats;
    struct td_msg_peer_welcome welcome;
    bool welcomed, lost, closed;
    uint64_t in_use; /* landing slabs said and not credited, as bits */
    /* about the ticket under way */
    uint64_t ticket;
    bool over; /* a verdict or an abort has come for it */
    td_status status;
    char text[TD_TEXT_MAX];
    bool flushed;
    struct forged good;
};

/* Computes the first token and all KV state of ids [n], on one rank. Before the cluster starts: its
 * router would be silent meanwhile. `settings`: the workers', of which numerics counts here. */
void forger_compute(struct forger *f, const char *model, const char *const *settings,
                    const int32_t *ids, uint32_t n, uint64_t seed);
/* td_xfer_env must have been called. */
void forger_open(struct forger *f, struct cluster *c);
void forger_close(struct forger *f);

/* Connects and greets as for `decode_epoch`; true when welcomed. */
bool forger_greet(struct forger *f, uint64_t decode_epoch);
void forger_hang_up(struct forger *f);

/* The honest handoff of the computed prompt under `ticket`, in f->good. */
struct forged *forger_make(struct forger *f, uint64_t ticket);
/* Carries out the steps until they are done or the ticket is over; false when a landing slab did
 * not come back. */
bool forger_send(struct forger *f, struct forged *h);

/* ---- for making faults ---- */

/* Where a family's bytes are; their number is header.bytes[family]. */
uint8_t *forged_family(struct forged_block *b, int family);
/* Takes `n` bytes at `at` out of the body; the header is left as it is. */
void forged_cut(struct forged_block *b, uint8_t *at, size_t n);
/* Writes `header` back with a checksum that fits it: a sender that lies consistently. */
void forged_seal(struct forged_block *b);
/* Takes the bytes that the SLAB messages name from the blocks as they are now. */
void forged_measure(struct forged *h);
void forged_no_step(struct forged *h, uint32_t step); /* leaves a step out */

#endif

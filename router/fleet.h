/* The fleet: which workers there are, what they can, how much work each has, which pairs work.
 *
 * Passive and pure: no clock, no I/O; the flow (router/flow.h) is its only changer, the shell reads
 * it for /ready and /v1/cluster. A worker is its epoch; a name is only for people, and a newer
 * process under the same name replaces the older one.
 *
 * Load is counted in tokens when work is dispatched and taken back as it is done, so a burst cannot
 * land on one worker before its first heartbeat.
 *
 * Failures cool down what failed: a worker, or the way between the two of a pair when either may be
 * the reason. The time doubles up to a bound with every failure after the last one has cooled, so
 * that one step that takes sixteen sequences with it counts once, and is forgotten after a success.
 * Others are chosen meanwhile; where there is no other, only a request that has just failed waits
 * for it, and the rest of the service goes on.
 *
 * A worker whose engine hangs still beats: its loop is another thread. One that has work and whose
 * steps do not advance for `stall_ns` is stalled, which is as good as down, until they do. */
#ifndef TD_ROUTER_FLEET_H
#define TD_ROUTER_FLEET_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "proto/msg.h"

enum { TD_FLEET_WORKERS_MAX = 64 };

struct td_fleet_options {
    uint32_t max_workers; /* 1..TD_FLEET_WORKERS_MAX */
    const char *model;    /* workers must serve this name; NULL: whatever the first one serves */
    bool colocate;        /* decode workers prefill everything; prefill workers are not needed */
    bool mixed_numerics;  /* pairs of different numerics ids are allowed */
    uint64_t cool_ns;     /* first cool-down after a failure; 0: one second */
    uint64_t cool_max_ns; /* 0: 30 seconds */
    uint64_t stall_ns;    /* 0: no worker is ever stalled */
};

struct td_fleet_cool {
    uint64_t until_ns;
    uint32_t failures; /* in a row */
};

/* Read-only for everybody else. */
struct td_fleet_worker {
    uint64_t epoch; /* 0: free entry */
    enum td_role role;
    char name[TD_NAME_MAX], model[TD_NAME_MAX], numerics[TD_TEXT_MAX];
    uint64_t pid, fingerprint, numerics_id;
    uint32_t max_context, max_running, pages, page_tokens, slots;
    uint32_t selection_max; /* entries of one token's selection */
    uint8_t xfer_address[TD_MSG_ADDRESS_MAX];
    size_t xfer_address_len;
    uint32_t xfer_number;
    bool draining;
    /* what the router gave it and has not got back */
    uint32_t legs;        /* requests */
    uint64_t work_tokens; /* prompt tokens to compute, answer tokens to sample */
    /* what it says itself */
    struct td_msg_heartbeat beat;
    struct td_msg_ledger ledger;
    uint64_t joined_ns, beat_ns;
    /* judgement */
    uint64_t busy_until_ns; /* decode said BUSY */
    bool asked;             /* by one that it refused before: nobody else asks until it answers */
    struct td_fleet_cool cool;
    uint64_t moved_ns; /* its engine did a step, or had nothing to do */
    bool stalled;
    uint64_t proven;   /* decode: bit i = pair with prefill entry i; prefill: unused */
    bool proven_alone; /* decode: it answered a probe by itself */
};

struct td_fleet {
    struct td_fleet_options o;
    /* What every token asks for, apart from the wide entries: their epochs, and the time of
     * td_fleet_stall_at(). */
    uint64_t epoch[TD_FLEET_WORKERS_MAX];
    uint64_t stall_at_ns;
    uint64_t prefills, decodes; /* bit i: entry i is one */
    struct td_fleet_worker worker[TD_FLEET_WORKERS_MAX];
    /* the ways: [entry of prefill][entry of decode] */
    struct td_fleet_cool way[TD_FLEET_WORKERS_MAX][TD_FLEET_WORKERS_MAX];
};

/* Two epochs; prefill 0: decode does it alone. */
struct td_pair {
    uint64_t prefill, decode;
};

void td_fleet_init(struct td_fleet *f, const struct td_fleet_options *o);

/* ---- joining and leaving ---- */

/* May this worker join? OK, or a status with a sentence in `text`: version; no epoch or name; epoch
 * or name already connected; model, fingerprint or numerics other than the fleet's; the table is
 * full. Changes nothing. */
td_status td_fleet_check(const struct td_fleet *f, const struct td_msg_hello *h,
                         char text[TD_TEXT_MAX]);
/* After td_fleet_check said OK. *ret_replaced: epoch of the older process of this name, which has
 * just left the table, or 0. */
void td_fleet_join(struct td_fleet *f, uint64_t now_ns, const struct td_msg_hello *h,
                   uint64_t *ret_replaced);
/* Unknown epochs are fine. */
void td_fleet_leave(struct td_fleet *f, uint64_t epoch);
/* The same process is dialed at another address from now on. False: not a newer one of a decode
 * worker that is here. What failed on the way to the old one counts no more. */
bool td_fleet_moved(struct td_fleet *f, const struct td_msg_moved *m);
/* True: the worker was stalled, and its engine advances again. */
bool td_fleet_beat(struct td_fleet *f, uint64_t now_ns, const struct td_msg_heartbeat *b);
/* Most entries of one token's selection, all layers together, of any worker. */
uint32_t td_fleet_selection_max(const struct td_fleet *f);
/* A worker that is stalled from now on, or 0. */
uint64_t td_fleet_stall(struct td_fleet *f, uint64_t now_ns);
/* When td_fleet_stall() should be asked; UINT64_MAX: not before the next beat. */
uint64_t td_fleet_stall_at(const struct td_fleet *f);
void td_fleet_ledger(struct td_fleet *f, uint64_t epoch, const struct td_msg_ledger *l);
/* A draining worker gets no new work; what it has goes on. False: no worker of that name. */
bool td_fleet_drain(struct td_fleet *f, const char *name, bool draining);

/* NULL when unknown. */
const struct td_fleet_worker *td_fleet_find(const struct td_fleet *f, uint64_t epoch);

/* ---- choosing ---- */

/* Most tokens, prompt and output together, that any pair now connected can hold; 0: no pair. */
uint32_t td_fleet_limit(const struct td_fleet *f, bool colocate);
/* The same of one pair. */
uint32_t td_fleet_pair_limit(const struct td_fleet *f, struct td_pair pair);
/* What a request asks for. */
struct td_fleet_need {
    uint32_t n_prompt, max_new; /* tokens */
    uint32_t choices;           /* sequences of that prompt; 0 reads as 1 */
};
/* Most choices that any pair now connected can hold at a time, at most TD_CHOICES_MAX: a slot for
 * each, the prompt's full pages once and one more page for each. 0: not even one. */
uint32_t td_fleet_choices(const struct td_fleet *f, struct td_fleet_need need, bool colocate);
/* The proven pair with the least outstanding work that can hold the need. UNREACHABLE: there is no
 * proven pair; BUSY: there is, but all are draining, cooling down or full until *ret_when_ns. A
 * pair that cools is taken only when all cool, and not for who is `patient`: for a request that has
 * just failed. */
TD_MUST_USE td_status td_fleet_choose(const struct td_fleet *f, uint64_t now_ns,
                                      struct td_fleet_need need, bool colocate, bool patient,
                                      struct td_pair *ret_pair, uint64_t *ret_when_ns);
/* A pair that should be probed now: compatible, not proven, not cooling. False: none; then
 * *ret_when_ns is when one stops cooling, or UINT64_MAX. */
bool td_fleet_probe_due(const struct td_fleet *f, uint64_t now_ns, struct td_pair *ret_pair,
                        uint64_t *ret_when_ns);
void td_fleet_proven(struct td_fleet *f, struct td_pair pair);
/* Some pair is proven, so a request would be served. */
bool td_fleet_ready(const struct td_fleet *f);
/* A pair of equal ids promises equal bits. */
bool td_fleet_same_numerics(const struct td_fleet *f, struct td_pair pair);

/* ---- accounting; unknown epochs are ignored ---- */

void td_fleet_began(struct td_fleet *f, uint64_t epoch, uint64_t tokens);
void td_fleet_did(struct td_fleet *f, uint64_t epoch, uint64_t tokens);
void td_fleet_ended(struct td_fleet *f, uint64_t epoch, uint64_t tokens_left);
void td_fleet_busy(struct td_fleet *f, uint64_t epoch, uint64_t until_ns);
void td_fleet_roomy(struct td_fleet *f, uint64_t epoch);
void td_fleet_asked(struct td_fleet *f, uint64_t epoch, bool asked);
void td_fleet_failed(struct td_fleet *f, uint64_t epoch, uint64_t now_ns);
/* Either of the two, or what is between them. */
void td_fleet_way_failed(struct td_fleet *f, struct td_pair pair, uint64_t now_ns);
void td_fleet_worked(struct td_fleet *f, struct td_pair pair);
/* Until when the pair cools; 0 or past: it does not. */
uint64_t td_fleet_cool_until(const struct td_fleet *f, struct td_pair pair);

#endif

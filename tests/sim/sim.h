/* The cluster in one process under virtual time: one router, P prefill and D decode machines, a
 * network that delays, doubles, loses and breaks, workers that die, freeze and come back, clients
 * that leave. Everything follows from one seed.
 *
 * The engine is fake but not blind: a token is a hash of all ids before it and its position, and a
 * page or slot holds the hashes of what was written there. Whoever reads KV state that is not this
 * sequence's, or is not complete, is caught at that step; whoever samples a wrong continuation is
 * caught by the client, which knows the definition. */
#ifndef TD_TESTS_SIM_SIM_H
#define TD_TESTS_SIM_SIM_H

#include <stdarg.h>
#include <stdio.h>

#include "common/kv/checksum.h"
#include "common/kv/manifest.h"
#include "decode/sched.h"
#include "prefill/sched.h"
#include "router/flow.h"

enum {
    SIM_WORKERS_MAX = 8,
    SIM_CHOICES = 4, /* most of a request */
    SIM_CLIENTS_MAX = 48 * SIM_CHOICES,
    SIM_PAGES_MAX = 256,
    SIM_SPLIT_MAX = 2,
    SIM_SLOTS_MAX = 16,
    SIM_SLABS_MAX = 64,
    SIM_BLOCKS_MAX = 17, /* in a slab: of the longest prompt */
    SIM_EOS = 1,
    SIM_PROBE_N = 300,
};
#define SIM_US 1000ull
#define SIM_MS 1000000ull
#define SIM_S 1000000000ull

struct sim;

/* ---- what can be varied; filled from the seed, or by a scenario ---- */
struct sim_options {
    uint64_t seed;
    uint32_t prefills, decodes, clients;
    uint32_t kills, freezes, hangs, breaks, router_restarts, deafs; /* over the busy time */
    /* chances in 1/1000 */
    uint32_t doubled;   /* a message comes twice, the second time late */
    uint32_t data_lost; /* a data-plane message is lost */
    uint32_t put_fails;
    uint32_t corrupt; /* a block is damaged on its way and its header shows it */
    uint32_t forged;  /* a block is replaced by a well-formed one of other content */
    uint32_t cancels, stops;
    uint32_t pages, slots; /* of each worker */
    uint32_t split[2];     /* prefill, decode workers: ranks that share pages, as a power of two */
    uint32_t reserve_new;  /* tokens; 0: enough */
    uint32_t choices;      /* most of a request, by chance; 0 and 1: one */
    bool colocate_some;
    bool steady; /* no message is ever very late */
    bool trace;  /* print everything */
    bool record; /* control messages into the trace, for scenarios */
};

/* ---- content ---- */

struct sim_page {        /* 256 tokens' families 2-4 */
    uint64_t start, end; /* hash of the ids before and up to here */
    uint32_t valid;
};
struct sim_slot {
    uint64_t hash; /* of all ids */
    uint32_t n;
};
struct sim_block {
    struct td_kv_block_header h;
    struct sim_page page;
    struct sim_slot slot;
};
struct sim_slab {
    uint32_t n;
    struct sim_block block[SIM_BLOCKS_MAX];
};

/* ---- processes ---- */

struct sim_ids { /* a copy that a machine must give back */
    struct sim_ids *next;
    int32_t ids[];
};

struct sim_worker {
    uint32_t index;
    enum td_role role;
    char name[TD_NAME_MAX];
    bool alive;
    uint32_t life; /* counts starts: an event for an earlier life is dropped */
    uint64_t epoch, frozen_until;
    uint64_t hung_until; /* no step of its engine ends before */
    bool deaf;           /* nothing of the data plane reaches it */
    uint32_t number;     /* of its address */
    struct td_prefill *p;
    struct td_decode *d;
    uint64_t timer_at; /* armed; UINT64_MAX: not */
    /* control link: equal and not 0 on both sides when up */
    uint32_t dials, my_link, router_link;
    uint64_t to_router_at, from_router_at; /* last delivery, for order */
    struct sim_ids *ids;
    bool stepping;
    struct sim_page page[SIM_PAGES_MAX << SIM_SPLIT_MAX]; /* by page and rank */
    struct sim_slot slot[SIM_SLOTS_MAX];
    struct sim_slab slab[SIM_SLABS_MAX];  /* prefill: send; decode: landing */
    uint32_t slab_readers[SIM_SLABS_MAX]; /* prefill: pack or put under way; decode: unpack */
    uint64_t granted[SIM_SLABS_MAX];      /* decode: epoch of the prefill worker that may write */
};

struct sim_link { /* data plane, one life of a connection */
    uint64_t id;
    uint32_t p, d, p_life, d_life;
    uint64_t p_epoch, d_epoch;
    bool p_open, d_open, p_told, d_told; /* told: LOST was reported on this side */
    bool d_heard; /* decode knows of it */
    uint64_t to_d_at, to_p_at;
};

struct sim_put {
    bool used, cancelled, written;
    uint32_t p, p_life, send_slab, landing;
    uint64_t link;
    struct sim_slab content;
};

enum sim_client_state { SIM_UNBORN, SIM_LIVE, SIM_ENDED, SIM_FAILED, SIM_GONE };

/* One choice: those of request i are entries SIM_CHOICES * i and the next ones. */
struct sim_client {
    enum sim_client_state state;
    struct td_flow_submit s; /* of the request; s.request + number is the choice's own */
    uint32_t number;
    uint32_t router_life;
    int32_t *ids;  /* [n_prompt + max_new] the choice's; the request's prompt is that of choice 0 */
    uint64_t hash; /* of prompt and what was delivered */
    uint32_t delivered;
    int32_t last;
    uint32_t stop_after; /* tokens; 0: never */
    bool stopped, too_long, must_end;
    td_status status;
    enum td_finish reason;
    struct td_flow_times times;
};

/* ---- the world ---- */

struct sim_event {
    uint64_t at, order;
    int worker;    /* index, or -1: router or nobody; frozen workers get theirs later */
    uint32_t life; /* of the worker */
    void (*fn)(struct sim *s, struct sim_event *e);
    uint64_t a, b, c, d; /* meaning by fn */
    struct td_msg *msg;  /* heap copy, with `blob` behind its pointers */
    void *blob;
    void *data; /* heap, by fn */
};

struct sim {
    struct sim_options o;
    uint64_t rng, now, order, next_epoch, next_link, next_request;
    struct sim_event **heap;
    size_t n_heap, cap_heap;
    struct td_kv_layout layout;
    struct td_flow *flow;
    uint32_t router_life;
    uint64_t router_timer_at;
    struct sim_worker worker[SIM_WORKERS_MAX];
    uint32_t n_workers;
    struct sim_link *link;
    size_t n_link, cap_link;
    struct sim_put put[SIM_SLABS_MAX * SIM_WORKERS_MAX];
    struct sim_client client[SIM_CLIENTS_MAX];
    uint64_t preempted; /* by all routers of this world */
    int32_t probe[SIM_PROBE_N];
    bool calm;             /* no more faults */
    uint64_t calm_ns;      /* since then */
    enum td_msg_type lose; /* the next data-plane message of this type is lost; 0: none */
    bool draining_flow;
    char failure[512]; /* first broken invariant */
    uint64_t steps;
    /* a readable record of what matters, for scenarios */
    char *trace;
    size_t trace_len;
};

/* sim.c */
void sim_defaults(struct sim_options *o, uint64_t seed);
void sim_init(struct sim *s, const struct sim_options *o);
void sim_finish(struct sim *s);
/* Runs until `at`; stops at the first broken invariant. */
void sim_run(struct sim *s, uint64_t at);
/* The whole random story of a seed; false: s->failure says what broke. */
bool sim_story(struct sim *s);
struct sim_event *sim_at(struct sim *s, uint64_t at, int worker,
                         void (*fn)(struct sim *, struct sim_event *));
void sim_broken(struct sim *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void sim_note(struct sim *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* One line per delivered message. */
void sim_print(struct sim *s, const char *from, const char *to, const struct td_msg *m);
uint64_t sim_random(struct sim *s);
uint64_t sim_below(struct sim *s, uint64_t n);
bool sim_chance(struct sim *s, uint32_t per_mille);
uint64_t sim_delay(struct sim *s);
void sim_copy_msg(struct sim_event *e, const struct td_msg *m);

/* engine.c */
uint64_t sim_hash_start(void);
uint64_t sim_hash_id(uint64_t hash, int32_t id);
int32_t sim_sample(uint64_t hash, uint32_t position, uint64_t seed);
/* Of its pages (common/kv/split.h). */
uint32_t sim_split(const struct sim *s, const struct sim_worker *w);
void sim_engine(struct sim *s, struct sim_worker *w, const struct td_run *r);
void sim_pack(struct sim *s, struct sim_worker *w, const struct td_prefill_action *a);
/* Makes the header fit the content again. */
void sim_reseal(struct sim_block *b);
td_status sim_unpack(struct sim *s, struct sim_worker *w, const struct td_decode_action *a,
                     char *text);

/* router.c */
void sim_router_start(struct sim *s);
void sim_router_stop(struct sim *s);
void sim_router_step(struct sim *s, struct td_flow_event *ev);
/* Request i, all of its choices. */
void sim_client_submit(struct sim *s, uint32_t i);
void sim_client_cancel(struct sim *s, uint32_t i);

/* control.c: links between router and workers */
void sim_dial(struct sim *s, struct sim_worker *w, uint64_t delay);
void sim_link_break(struct sim *s, struct sim_worker *w);
void sim_to_router(struct sim *s, struct sim_worker *w, const struct td_msg *m);
/* As the shell: after it took another address, and at every later link. */
void sim_say_moved(struct sim *s, struct sim_worker *w);
void sim_from_router(struct sim *s, uint64_t epoch, const struct td_msg *m);

/* data.c: links and puts between prefill and decode */
struct sim_address { /* of a process's data plane */
    uint64_t epoch, number;
};
void sim_connect(struct sim *s, struct sim_worker *p, struct sim_address to);
/* A peer ended inside a send: w hears nothing more, until it notices and takes another address. */
void sim_deafen(struct sim *s, struct sim_worker *w);
void sim_send_to_decode(struct sim *s, struct sim_worker *p, uint64_t d_epoch,
                        const struct td_msg *m);
void sim_close_by_prefill(struct sim *s, struct sim_worker *p, uint64_t d_epoch);
void sim_put(struct sim *s, struct sim_worker *p, const struct td_prefill_action *a);
void sim_send_to_prefill(struct sim *s, struct sim_worker *d, uint64_t link,
                         const struct td_msg *m);
void sim_close_by_decode(struct sim *s, struct sim_worker *d, uint64_t link);
void sim_data_death(struct sim *s, struct sim_worker *w);

/* worker.c */
void sim_worker_start(struct sim *s, struct sim_worker *w);
void sim_worker_kill(struct sim *s, struct sim_worker *w);
void sim_prefill_step(struct sim *s, struct sim_worker *w, struct td_prefill_event *ev);
void sim_decode_step(struct sim *s, struct sim_worker *w, struct td_decode_event *ev);

#endif

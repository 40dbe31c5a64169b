/* Inside the flow: its tables, and the functions its files share. Not for others. */
#ifndef TD_ROUTER_FLOW_PARTS_H
#define TD_ROUTER_FLOW_PARTS_H

#include "common/base/fifo.h"
#include "common/base/list.h"
#include "router/flow.h"

enum {
    LEGS_MAX = 2 * TD_FLOW_ATTEMPTS_MAX, /* a refused admission leaves no leg behind */
    HOLD_MAX = 32,                       /* decode's tokens that overtook token 0 */
    WORK_NEW_MAX = 4096, /* output tokens counted as work: most answers end long before */
    NO_LEG = -1,
};

enum state {
    FREE,
    QUEUED,    /* waits for a pair; its clock is queue_ns */
    ADMITTING, /* ADMIT is out; its clock is admit_ns */
    ADMITTED,  /* waits for token 0 and decode's first token; KEEP is sent every third of a lease */
    STREAMING, /* decode has begun, or prefills by itself: nothing but its link limits it */
    FOLLOWING, /* a choice for which its request's choice 0 stands */
    OVER,      /* the client has its answer; some leg is not yet released */
};

/* An attempt's part on one worker; from the message that creates it until RELEASED. */
struct leg {
    uint64_t epoch; /* 0: free entry */
    uint32_t attempt;
    uint32_t choices; /* bit c: `choice[c]` of the entry still has something there */
    uint64_t work;    /* tokens still counted in the fleet */
    uint32_t prompt;  /* of them: the prompt, not yet computed by decode */
    uint64_t kept_ns; /* the last KEEP */
    bool told;        /* CANCEL is out, or the worker ended it itself */
    bool asks;        /* td_fleet_asked(): it was refused before */
};

struct request { /* one choice of one */
    struct td_flow_submit s;
    uint32_t number;   /* of the choice */
    uint32_t together; /* choices that it stands for: all before they part, then itself */
    bool has_prompt;   /* in s.ids; until then it is in `prompt` */
    const int32_t *prompt;
    struct request *lead; /* choice 0 of the request, while that has an entry */
    /* Of choice 0 all entries, of the others themselves alone: [0] is always the entry itself. NULL
     * when given back. */
    struct request *choice[TD_CHOICES_MAX];
    struct request *host; /* whose legs the present attempt has: choice 0, or itself */
    uint64_t prompt_hash;
    enum state state;
    struct td_link link; /* in the list of its state, or in the free list */
    uint32_t hash_next;
    uint64_t order; /* of submission: of one priority who was first is served first, also after coming back */
    uint64_t deadline_ns, queue_deadline_ns;
    bool pinned; /* a probe: this pair or none */
    /* this attempt */
    uint32_t attempt, failures;
    uint32_t refused; /* attempts that ended in BUSY: they were none */
    uint32_t base;    /* tokens delivered before it: they stand in its prompt, and the workers count
                       * from the next one */
    struct td_pair pair;
    int decode, prefill; /* index of leg, or NO_LEG */
    uint64_t keep_ns;
    uint32_t n_held;         /* tokens 1.. that wait for token 0 */
    enum td_finish finished; /* decode said so; 0: not yet */
    uint32_t finished_n;
    bool last_word; /* prefill is out of it and decode will say what is: no more KEEP */
    /* all attempts */
    uint32_t delivered, fruitless; /* preempted in a row without a token */
    enum td_phase phase;           /* and since when */
    uint64_t phase_since_ns;
    struct leg leg[LEGS_MAX];
    struct td_flow_times times;
    struct td_token held[HOLD_MAX];
};

/* Requests of one state with one clock. `next_ns` is at or before the earliest deadline. */
struct clocked {
    struct td_link head;
    uint64_t next_ns;
};

struct probe {
    bool active;
    struct td_pair pair;
    uint32_t stage; /* 0: disaggregated, 1: decode alone */
    uint32_t n[2];
    int32_t ids[2][TD_FLOW_PROBE_TOKENS_MAX];
};

struct td_flow {
    struct td_flow_options o;
    struct td_fleet fleet;
    struct td_fifo actions;
    struct request *table; /* [capacity] */
    uint32_t capacity;
    uint32_t *bucket; /* [capacity] heads of chains by request id; UINT32_MAX: empty */
    struct td_link free;
    struct clocked queued, admitting, admitted;
    bool pump_due;                   /* something changed for those that wait */
    uint64_t pump_ns, probe_ns;      /* when a worker stops being busy or cool; UINT64_MAX: none */
    uint64_t next_order, next_probe; /* next numbers: of submissions, of probes' requests */
    struct probe probe;
    uint64_t now_ns, last_end_ns;
    bool was_queued;     /* somebody waited at the last end */
    uint64_t end_gap_ns; /* smoothed time between ends while others wait */
    struct td_flow_counts counts;
};

static inline uint32_t td_flow_n_prompt(const struct request *r) { /* of this attempt */
    return r->s.n_prompt + r->base;
}
static inline uint32_t td_flow_max_new(const struct request *r) {
    return r->s.max_new - r->base;
}
static inline uint32_t td_flow_work(const struct request *r) { /* expected of its answer */
    return td_flow_max_new(r) < WORK_NEW_MAX ? td_flow_max_new(r) : WORK_NEW_MAX;
}
static inline bool td_flow_shown(const struct request *r) { /* a token of this attempt */
    return r->delivered > r->base;
}

/* Of this attempt: with what stands at the end of its prompt. */
static inline struct td_sampling td_flow_sampling(const struct request *r) {
    struct td_sampling s = r->s.sampling;
    bool counts = s.guide != NULL || s.frequency_penalty != 0 || s.presence_penalty != 0 ||
                  s.repetition_penalty != 0;
    s.n_said = counts ? r->base : 0;
    s.said = s.n_said > 0 ? r->s.ids + r->s.n_prompt : NULL;
    return s;
}

/* The leg of an attempt's part, `i` being r->decode or r->prefill. */
static inline struct leg *td_flow_leg(struct request *r, int i) {
    return &r->host->leg[i];
}
/* The key under which the attempt's workers know it. */
static inline struct td_key td_flow_key(struct request *r, int i) {
    return (struct td_key){r->host->s.request, td_flow_leg(r, i)->attempt};
}

/* flow_leg.c: legs and the ways an attempt or a request ends */
int td_flow_leg_open(struct td_flow *f, struct request *r, uint64_t epoch, uint64_t work);
/* Room for the two legs of an attempt: those of earlier ones may still be open. */
bool td_flow_leg_room(const struct request *r);
void td_flow_leg_did(struct td_flow *f, struct leg *l, uint64_t tokens);
/* It still wants something there. */
bool td_flow_leg_in(struct request *r, int i);
/* The worker said itself that this choice has ended there, or that all have. */
void td_flow_leg_done(struct td_flow *f, struct request *r, int i);
void td_flow_leg_done_all(struct td_flow *f, struct leg *l);
/* Says CANCEL unless the worker knows; the leg stays until it is released. */
void td_flow_leg_leave(struct td_flow *f, struct request *r, int i);
/* Gone from its worker. May free the entry. */
void td_flow_leg_close(struct td_flow *f, struct request *host, int i);
/* The worker has answered its ADMIT, or never will. */
void td_flow_leg_answered(struct td_flow *f, struct leg *l);
/* Those whose present attempt has leg i of `host`, [TD_CHOICES_MAX]; returns how many. */
uint32_t td_flow_leg_choices(struct request *host, int i, struct request **ret);
/* The choices of a request are no longer one. */
void td_flow_part(struct td_flow *f, struct request *lead);
struct td_msg *td_flow_send(struct td_flow *f, uint64_t epoch, enum td_msg_type type);
/* This attempt cannot go on: another one, or FAIL. `epoch` is blamed (0: nobody). */
void td_flow_attempt_failed(struct td_flow *f, struct request *r, td_status s, uint64_t epoch,
                            const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void td_flow_end(struct td_flow *f, struct request *r, enum td_finish reason);
void td_flow_fail(struct td_flow *f, struct request *r, td_status s, uint32_t retry_ms,
                  const char *text);
/* Without a word to the client; of all it stands for. */
void td_flow_over(struct td_flow *f, struct request *r);
/* How long a request that comes now would wait; 0: unknown. */
uint64_t td_flow_wait_ns(const struct td_flow *f);
uint32_t td_flow_retry_ms(const struct td_flow *f);

/* flow_table.c: entries, lists and clocks */
td_status td_flow_table_create(struct td_flow *f, struct td_error *err);
struct request *td_flow_find(struct td_flow *f, uint64_t id);
/* An entry for each choice; returns that of choice 0. NULL: no room for all. */
struct request *td_flow_take(struct td_flow *f, const struct td_flow_submit *s);
void td_flow_give(struct td_flow *f, struct request *r);
/* Moves a request to a state; `deadline_ns` counts in states with a clock. */
void td_flow_to(struct td_flow *f, struct request *r, enum state state, uint64_t deadline_ns);

/* The time so far goes to the phase that ends now; `phase` begins. */
static inline void td_flow_phase(struct td_flow *f, struct request *r, enum td_phase phase) {
    r->times.phase_ns[r->phase] += f->now_ns - r->phase_since_ns;
    r->phase = phase;
    r->phase_since_ns = f->now_ns;
}

/* flow_tokens.c: what workers say about a running request */
void td_flow_message(struct td_flow *f, uint64_t epoch, const struct td_msg *m);

/* flow_probe.c */
void td_flow_probe_pump(struct td_flow *f);
void td_flow_probe_token(struct td_flow *f, int32_t id);
void td_flow_probe_ended(struct td_flow *f);
void td_flow_probe_failed(struct td_flow *f, td_status s, const char *text);

/* flow.c */
void td_flow_start(struct td_flow *f, struct request *r, struct td_pair pair);

#endif

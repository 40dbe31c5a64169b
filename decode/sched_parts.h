/* Inside the decode machine: its table and what its files share. Not for others. */
#ifndef TD_DECODE_SCHED_PARTS_H
#define TD_DECODE_SCHED_PARTS_H

#include "common/kv/ledger.h"
#include "decode/handoff.h"

enum seq_state {
    FREE,
    RESERVED,   /* waits for the handoff; the lease is the receipt's */
    PREFILLING, /* by itself */
    JOINING,    /* waits for its request's choice 0, which is one of these two */
    RUNNING,
    ENDING, /* goes when no step and no unpack uses its pages */
};

struct seq {
    enum seq_state state;
    struct td_key key;
    uint32_t choice, n; /* which of the request's */
    bool orphan;        /* of a router that is gone: tells nobody anything */
    bool dropped;       /* RESERVED, PREFILLING: for the other choices alone, not wanted itself */
    bool alone;         /* prefilled here */
    uint64_t owner;     /* in the ledgers; never reused */
    uint64_t shared;    /* owner of the first n_shared pages, held by each choice; 0: none */
    const int32_t *ids; /* PREFILLING: [n_prompt]; else NULL */
    uint32_t n_prompt, max_new;
    struct td_sampling sampling;
    uint32_t slot;
    uint32_t n_pages, n_shared; /* shared ones included, and first */
    uint32_t pos;               /* tokens whose KV state is there: where the next one is fed */
    uint32_t produced;          /* tokens of the answer, token 0 included */
    int32_t last;               /* the answer's newest token, fed next */
    uint32_t step_n;            /* tokens in the step under way; 0: it has no part in it */
    uint64_t admitted_ns, computed_ns;
};

struct td_decode {
    struct td_decode_options o;
    struct td_fifo actions;
    struct td_receiver receiver;
    struct td_ledger pages, slots;
    struct seq *seq;    /* [slots] */
    uint32_t *page_ids; /* [slots][pages_per_seq], by entry */
    uint32_t pages_per_seq;
    /* the step under way, or the last one */
    bool stepping;
    struct td_run *runs;              /* [slots] */
    uint32_t *run_seq;                /* [slots] entry of each run */
    struct td_decode_sample *samples; /* [slots] */
    uint32_t *sample_seq;             /* [slots] entry of each sample */
    uint32_t n_runs, n_samples;
    uint64_t step_began_ns, step_ns; /* smoothed duration */
    uint64_t next_owner, next_ticket, steps, cancels, now_ns;
};

static inline uint32_t *td_seq_pages(const struct td_decode *d, const struct seq *s) {
    return d->page_ids + (size_t)(s - d->seq) * d->pages_per_seq;
}

/* sched.c */
struct td_msg *td_decode_say(struct td_decode *d, enum td_msg_type type);
/* Whatever ends a sequence comes here; twice is fine. */
void td_seq_retire(struct td_decode *d, struct seq *s, td_status why, const char *text);
void td_seq_fail(struct td_decode *d, struct seq *s, td_status why, const char *text);
/* After the answer got a token: does that end it? */
void td_seq_token(struct td_decode *d, struct seq *s, int32_t id);

/* Any of the key's, choice 0 first while the prompt is on its way; NULL: none. */
struct seq *td_seq_find(struct td_decode *d, struct td_key key);

/* sched_choices.c */
/* Of an admission, in pages: `shared` once, `each` for every choice. */
struct plan {
    uint32_t n, shared, each;
};
TD_MUST_USE td_status td_decode_plan(const struct td_decode *d, const struct td_msg_admit *m,
                                     struct plan *ret, struct td_error *err);
/* What the plan says is free; returns choice 0. */
struct seq *td_decode_reserve(struct td_decode *d, const struct td_msg_admit *m,
                              const struct plan *p);
/* The prompt is in the slot and pages of `lead`: every choice gets its own and runs. */
void td_seq_fork(struct td_decode *d, struct seq *lead);
void td_decode_copy_failed(struct td_decode *d, const struct td_decode_event *ev);
/* Not wanted any more; what the other choices need of it stays. */
void td_seq_drop(struct td_decode *d, struct seq *s);
/* The next choice of the same request after s; start with NULL. */
struct seq *td_seq_next_choice(struct td_decode *d, struct td_key key, struct seq *s);
TD_MUST_USE td_status td_decode_check_pages(const struct td_decode *d, struct td_error *err);

/* sched_step.c */
void td_decode_run(struct td_decode *d);
void td_decode_step_done(struct td_decode *d, const struct td_decode_event *ev);

#endif

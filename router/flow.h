/* The life of every request: the router's step machine.
 *
 *   SUBMIT -> queued -> (pair chosen) ADMIT to decode -> admitted -> PREFILL to prefill
 *          -> token 0 from prefill -> tokens 1.. from decode -> FINISHED
 *
 * Events with a time go in by td_flow_step(); actions come out of td_flow_next() in order. After
 * every step the shell takes actions until there are none; carrying one out may call td_flow_step()
 * again, whose actions queue behind. Pointers in an event's message must live until then.
 *
 * A request has n choices, the sequences of one prompt; most have one. Choice c is a sequence of
 * its own under the number request + c, with its own seed, DELIVER, END or FAIL. Until a worker
 * speaks of one of them they are one: admitted, retried and cancelled together. From then on each
 * goes its own way: what preempts or loses one of them starts an attempt of that one alone, whose
 * prompt and seed are all there is to it.
 *
 * Promises, for every choice:
 *   - it ends in exactly one END or FAIL, except after CANCEL, which ends it silently;
 *   - DELIVER gives every token of the answer once, in order, and never after the end;
 *   - an answer that cannot be completed FAILs; END always means a complete answer;
 *   - before its first token was delivered a request moves to another pair, at most
 *     TD_FLOW_ATTEMPTS_MAX attempts; afterwards a lost decode worker FAILs it, unless the client
 *     waits for the whole answer and has seen nothing yet;
 *   - a request that a decode worker preempts goes on where it was, however often: its next
 *     attempt's prompt is the prompt and what was delivered, and since sampling is keyed by seed
 * and position the same tokens follow. It keeps its place in the queue by age, and workers preempt
 *     the youngest, so it is preempted only while an older one runs. Only a worker that preempts it
 *     TD_FLOW_FRUITLESS_MAX times in a row without a token ends it;
 *   - a worker with work whose engine does not advance for fleet.stall_ns gets nothing new, and
 * what waits for its engine ends as if it were lost, until it advances again;
 *   - every leg (a request's part on one worker) is followed until the worker says RELEASED or is
 *     gone, whatever became of the request meanwhile.
 * A decode worker's word counts once token 0 was shown: if prefill fails then, the handoff may
 * nevertheless be complete, so the flow stops renewing the lease and waits for decode to stream or
 * to fail. Time in the queue is bounded by its own clock and by no other.
 *
 * Probes: a new pair first runs a prompt the shell supplied, disaggregated and on decode alone; it
 * takes requests when both give the same ids. */
#ifndef TD_ROUTER_FLOW_H
#define TD_ROUTER_FLOW_H

#include "proto/msg.h"
#include "router/fleet.h"
#include "router/ledger.h"

enum {
    TD_FLOW_ATTEMPTS_MAX = 3,
    TD_FLOW_FRUITLESS_MAX = 16,
    TD_FLOW_PROBE_TOKENS_MAX = 16, /* sampled by a probe */
};
/* Request ids with this bit are the flow's own (probes). */
#define TD_FLOW_PROBE_BIT (1ull << 63)

struct td_flow_options {
    struct td_fleet_options fleet;
    uint32_t max_requests;    /* choices not yet ended; more are refused with BUSY */
    uint64_t lease_ns;        /* KEEP goes out every third of it */
    uint64_t queue_ns;        /* longest wait for a pair */
    uint64_t admit_ns;        /* longest wait for an ADMIT_REPLY */
    const int32_t *probe_ids; /* [probe_n] outlives the flow; probe_n 0: pairs need no proof */
    uint32_t probe_n, probe_new;
    int32_t eos; /* id of end-of-text; -1: none */
};

enum td_flow_event_kind {
    TD_FLOW_SUBMIT,
    TD_FLOW_CANCEL,      /* nobody wants this choice any more; before they part: all of them */
    TD_FLOW_STOP,        /* the text side found a stop string: end the choice cleanly, with END */
    TD_FLOW_MESSAGE,     /* from a worker whose link is up */
    TD_FLOW_WORKER_UP,   /* its hello passed td_fleet_check() */
    TD_FLOW_WORKER_DOWN, /* its link is lost */
    TD_FLOW_DRAIN,       /* or resume */
    TD_FLOW_TIMER,       /* td_flow_deadline() has come; early or spare ones are harmless */
};

struct td_flow_submit {
    uint64_t request; /* ascending in this router's life, without TD_FLOW_PROBE_BIT, not 0; the n
                       * numbers from it on are the choices' */
    void *user;       /* comes back with every action */
    int32_t *ids; /* [n, n_prompt + max_new], n_prompt >= 1, the first one begins with the prompt;
                   * the flow writes each answer behind its prompt, and the prompt before it
                   * where it needs it. Must live until the actions of the step that ended the
                   * last choice have been taken */
    uint32_t n_prompt;
    uint32_t max_new; /* >= 1, of each choice */
    uint32_t n;       /* choices, at most TD_CHOICES_MAX; 0 reads as 1 */
    uint32_t priority; /* of those that wait, greater ones let smaller ones go before */
    struct td_sampling sampling;
    bool colocate; /* decode shall prefill by itself */
    bool whole;    /* the client sees nothing before the end: a lost worker does not end it */
};

struct td_flow_event {
    enum td_flow_event_kind kind;
    uint64_t now_ns;
    union {
        struct td_flow_submit submit;
        uint64_t request; /* CANCEL, STOP: a choice's number */
        struct {          /* MESSAGE, WORKER_DOWN (msg unused) */
            uint64_t epoch;
            const struct td_msg *msg;
        } worker;
        const struct td_msg_hello *hello; /* WORKER_UP */
        struct {
            const char *name;
            bool draining;
        } drain;
    };
};

/* Nanoseconds on the events' clock; 0: did not happen. */
struct td_flow_times {
    uint64_t submitted, admitted, first_token, ended;
    uint32_t attempts;
    struct td_pair pair; /* of the last attempt */
    /* From `submitted` to `ended` without a gap; TD_PHASE_PREPARE is not the flow's. A decode
     * worker that prefills by itself hands nothing over. */
    uint64_t phase_ns[TD_PHASES];
};

enum td_flow_action_kind {
    TD_FLOW_SEND,       /* msg to worker `epoch`; if its link is down, drop it */
    TD_FLOW_CLOSE_LINK, /* worker `epoch` was replaced by a newer process of its name */
    TD_FLOW_HOLD,       /* what was selected for tokens that will be delivered later */
    TD_FLOW_DELIVER,    /* tokens [n], the first one number `index` of the answer */
    TD_FLOW_END,        /* the answer is complete */
    TD_FLOW_FAIL,       /* it will not be completed */
    TD_FLOW_PROBED,     /* a probe ended: fail.status OK or why not; for the log */
    TD_FLOW_STALLED, /* the engine of worker `epoch` hangs, or, with `moves`, goes on; likewise */
};

struct td_flow_action {
    enum td_flow_action_kind kind;
    uint64_t epoch;   /* SEND, CLOSE_LINK */
    uint64_t request; /* DELIVER, END, FAIL: as submitted */
    uint32_t choice;
    void *user;
    union {
        struct td_msg msg;
        bool moves; /* STALLED */
        struct {
            uint32_t index, n;
            const struct td_token *tokens; /* of the event or the request: use at once */
            /* [n] of the event; NULL: not asked for, or given by HOLD before */
            const struct td_selection *selections;
        } deliver;
        struct {
            uint32_t index, n;
            const struct td_selection *selections; /* [n] of the event: use at once */
            bool first; /* of this attempt: what was held before is void */
        } hold;
        struct {
            enum td_finish reason;
            uint32_t n_prompt, n_tokens;
            struct td_flow_times times;
        } end;
        struct {
            td_status status;  /* TOO_LONG: client's fault; BUSY, UNREACHABLE: try again later */
            uint32_t retry_ms; /* with BUSY and UNREACHABLE: an honest Retry-After */
            uint32_t n_tokens; /* delivered before */
            char text[TD_TEXT_MAX];
            struct td_flow_times times;
            struct td_pair pair; /* PROBED */
        } fail;
    };
};

struct td_flow;
TD_MUST_USE td_status td_flow_create(const struct td_flow_options *o, struct td_flow **ret,
                                     struct td_error *err);
void td_flow_destroy(struct td_flow *f);

void td_flow_step(struct td_flow *f, const struct td_flow_event *ev);
bool td_flow_next(struct td_flow *f, struct td_flow_action *ret);
/* When a TIMER event is wanted; UINT64_MAX: never. */
uint64_t td_flow_deadline(const struct td_flow *f);

const struct td_fleet *td_flow_fleet(const struct td_flow *f);

struct td_flow_counts { /* of choices */
    uint32_t live;
    uint32_t queued;     /* those that wait as one count once */
    uint32_t tombstones; /* ended ones with a leg not yet released */
    uint64_t submitted, ended, failed, cancelled, retries, busy, probes_passed, probes_failed;
    uint64_t preempted;     /* attempts that made room for older ones; not among the retries */
    uint64_t stale_dropped; /* messages of attempts that are over */
};
void td_flow_counts(const struct td_flow *f, struct td_flow_counts *ret);

#endif

/* What the router counts, as Prometheus text (exposition format 0.0.4). Counters and histograms
 * live here; gauges are given at the time of writing, since others own those numbers. */
#ifndef TD_ROUTER_METRICS_H
#define TD_ROUTER_METRICS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "router/json_write.h"
#include "router/ledger.h"

/* How a request for tokens ended. X(name, label) */
#define TD_OUTCOME_MAP(X)                                                                          \
    X(STOP, "stop")                                                                                \
    X(LENGTH, "length")                                                                            \
    X(CLIENT_GONE, "client_gone")                                                                  \
    X(INVALID, "invalid")         /* refused with 4xx */                                           \
    X(OVERLOADED, "overloaded")   /* refused with 429 */                                           \
    X(UNAVAILABLE, "unavailable") /* 503 before the first byte */                                  \
    X(FAILED, "failed")           /* any other error, also in the middle of a stream */

enum td_outcome {
#define X(name, label) TD_OUTCOME_##name,
    TD_OUTCOME_MAP(X)
#undef X
        TD_OUTCOMES
};

enum { TD_HISTOGRAM_BUCKETS = 16 };

struct td_histogram {
    uint64_t count[TD_HISTOGRAM_BUCKETS + 1]; /* not cumulative; the last is beyond all bounds */
    double sum;                               /* seconds */
};

struct td_metrics {
    uint64_t requests[TD_OUTCOMES];
    uint64_t prompt_tokens, completion_tokens;
    uint64_t worker_losses;
    struct td_histogram ttft;  /* request complete -> first token */
    struct td_histogram tpot;  /* mean time between tokens of one answer, after the first */
    struct td_histogram total; /* request complete -> answer complete */
    struct td_histogram phase[TD_PHASES]; /* of which these, in a row */
};

struct td_metrics_worker {
    const char *name, *role;
    uint32_t running, waiting, free_slots, free_pages;
    uint32_t pages_owned, pages_shared, slots_owned;
    uint64_t queued_tokens, steps, handoffs_ok, handoffs_failed, bytes_moved;
};

struct td_metrics_gauges {
    bool ready;
    uint64_t in_flight, queued, connections;
    const uint64_t *statuses; /* [n_statuses] answers begun, by HTTP status; may be NULL */
    size_t n_statuses;
    uint64_t responses_kept, responses_bytes, responses_evicted;
    const struct td_metrics_worker *workers; /* [n_workers] */
    size_t n_workers;
};

const char *td_outcome_label(enum td_outcome o);
void td_histogram_add(struct td_histogram *h, double seconds);
/* Appends the whole page. */
void td_metrics_write(struct td_json_out *w, const struct td_metrics *m,
                      const struct td_metrics_gauges *g);

#define TD_METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

#endif

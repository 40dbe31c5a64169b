/* See metrics.h. */
#include "router/metrics.h"

#include <stdarg.h>
#include <stdio.h>

/* Seconds. One ladder for all: from a token on a fast GPU to a prompt of a million tokens. */
static const double bounds[TD_HISTOGRAM_BUCKETS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300,
};

const char *td_outcome_label(enum td_outcome o) {
    static const char *const label[] = {
#define X(name, label) label,
        TD_OUTCOME_MAP(X)
#undef X
    };
    return o < TD_OUTCOMES ? label[o] : "?";
}

void td_histogram_add(struct td_histogram *h, double seconds) {
    size_t i = 0;
    if (!(seconds >= 0)) seconds = 0;
    while (i < TD_HISTOGRAM_BUCKETS && seconds > bounds[i])
        i++;
    h->count[i]++;
    h->sum += seconds;
}

static void line(struct td_json_out *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void line(struct td_json_out *w, const char *fmt, ...) {
    char buf[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    if (n > 0 && (size_t)n < sizeof buf) td_json_raw(w, buf, (size_t)n);
}

static void head(struct td_json_out *w, const char *name, const char *type, const char *help) {
    line(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void single(struct td_json_out *w, const char *name, const char *type, uint64_t v,
                   const char *help) {
    head(w, name, type, help);
    line(w, "%s %llu\n", name, (unsigned long long)v);
}

/* `label`: one more, `name="value"`; "": none. */
static void samples(struct td_json_out *w, const char *name, const char *label,
                    const struct td_histogram *h) {
    uint64_t below = 0;
    const char *comma = *label ? "," : "", *open = *label ? "{" : "", *close = *label ? "}" : "";
    for (size_t i = 0; i < TD_HISTOGRAM_BUCKETS; i++) {
        below += h->count[i];
        line(w, "%s_bucket{%s%sle=\"%g\"} %llu\n", name, label, comma, bounds[i],
             (unsigned long long)below);
    }
    below += h->count[TD_HISTOGRAM_BUCKETS];
    line(w, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", name, label, comma, (unsigned long long)below);
    line(w, "%s_sum%s%s%s %.12g\n%s_count%s%s%s %llu\n", name, open, label, close, h->sum, name,
         open, label, close, (unsigned long long)below);
}

static void histogram(struct td_json_out *w, const char *name, const struct td_histogram *h,
                      const char *help) {
    head(w, name, "histogram", help);
    samples(w, name, "", h);
}

static void phases(struct td_json_out *w, const struct td_histogram *h) {
    static const char name[] = "tandem_request_phase_seconds";
    head(w, name, "histogram", "Where the time of whole answers went; the sums add up to theirs.");
    for (int i = 0; i < TD_PHASES; i++) {
        char label[40];
        snprintf(label, sizeof label, "phase=\"%s\"", td_phase_name((enum td_phase)i));
        samples(w, name, label, &h[i]);
    }
}

/* Names come from hellos: quote what would break a label. */
static void label_text(const char *s, char buf[80]) {
    size_t n = 0;
    for (; *s && n + 3 < 80; s++) {
        if (*s == '"' || *s == '\\') buf[n++] = '\\';
        buf[n++] = (unsigned char)*s < 0x20 ? ' ' : *s;
    }
    buf[n] = 0;
}

static void per_worker(struct td_json_out *w, const struct td_metrics_gauges *g, const char *name,
                       const char *type, const char *help,
                       uint64_t (*get)(const struct td_metrics_worker *)) {
    head(w, name, type, help);
    for (size_t i = 0; i < g->n_workers; i++) {
        char text[80];
        label_text(g->workers[i].name, text);
        line(w, "%s{worker=\"%s\",role=\"%s\"} %llu\n", name, text, g->workers[i].role,
             (unsigned long long)get(&g->workers[i]));
    }
}

/* X(field, metric, type, help) */
#define WORKER_MAP(X)                                                                              \
    X(running, "tandem_worker_running", "gauge", "Sequences in the worker's batch.")               \
    X(waiting, "tandem_worker_waiting", "gauge", "Sequences waiting in the worker.")               \
    X(queued_tokens, "tandem_worker_queued_tokens", "gauge", "Prompt tokens not yet computed.")    \
    X(free_slots, "tandem_worker_free_slots", "gauge", "Slots without an owner.")                  \
    X(slots_owned, "tandem_worker_slots_owned", "gauge", "Slots that sequences own.")              \
    X(free_pages, "tandem_worker_free_pages", "gauge", "Pages without an owner.")    \
    X(pages_owned, "tandem_worker_pages_owned", "gauge", "Pages that sequences own.")              \
    X(pages_shared, "tandem_worker_pages_shared", "gauge",                                         \
      "Of these, pages that several choices of one request hold, counted once.")                   \
    X(steps, "tandem_worker_steps_total", "counter", "Engine steps.")                              \
    X(handoffs_ok, "tandem_worker_handoffs_total", "counter", "Handoffs completed.")               \
    X(handoffs_failed, "tandem_worker_handoffs_failed_total", "counter", "Handoffs failed.")       \
    X(bytes_moved, "tandem_worker_handoff_bytes_total", "counter", "Bytes of KV state moved.")

#define X(field, name, type, help)                                                                 \
    static uint64_t get_##field(const struct td_metrics_worker *w) {                               \
        return w->field;                                                                           \
    }
WORKER_MAP(X)
#undef X

static uint64_t get_up(const struct td_metrics_worker *w) {
    (void)w;
    return 1;
}

void td_metrics_write(struct td_json_out *w, const struct td_metrics *m,
                      const struct td_metrics_gauges *g) {
    head(w, "tandem_requests_total", "counter", "Requests for tokens, by how they ended.");
    for (int i = 0; i < TD_OUTCOMES; i++)
        line(w, "tandem_requests_total{outcome=\"%s\"} %llu\n",
             td_outcome_label((enum td_outcome)i), (unsigned long long)m->requests[i]);
    single(w, "tandem_prompt_tokens_total", "counter", m->prompt_tokens,
           "Prompt tokens of answered requests.");
    single(w, "tandem_completion_tokens_total", "counter", m->completion_tokens,
           "Tokens generated, end of text counted.");
    histogram(w, "tandem_time_to_first_token_seconds", &m->ttft,
              "From the whole request to its first token.");
    histogram(w, "tandem_time_per_output_token_seconds", &m->tpot,
              "Mean time between tokens of an answer, after the first.");
    histogram(w, "tandem_request_seconds", &m->total,
              "From the whole request to its whole answer.");
    phases(w, m->phase);
    single(w, "tandem_ready", "gauge", g->ready, "1 after a probe passed for a usable pair.");
    single(w, "tandem_requests_in_flight", "gauge", g->in_flight, "Requests being answered.");
    single(w, "tandem_requests_queued", "gauge", g->queued, "Of these, waiting for workers.");
    head(w, "tandem_http_answers_total", "counter",
         "Answers to anything, by status; 499: the client left before.");
    for (size_t i = 0; g->statuses && i < g->n_statuses; i++)
        if (g->statuses[i])
            line(w, "tandem_http_answers_total{code=\"%zu\"} %llu\n", i,
                 (unsigned long long)g->statuses[i]);
    single(w, "tandem_http_connections", "gauge", g->connections, "Open client connections.");
    single(w, "tandem_responses_kept", "gauge", g->responses_kept,
           "Responses that can be continued by their id.");
    single(w, "tandem_responses_bytes", "gauge", g->responses_bytes, "Memory they take.");
    single(w, "tandem_responses_evicted_total", "counter", g->responses_evicted,
           "Responses that made room for newer ones.");
    single(w, "tandem_worker_losses_total", "counter", m->worker_losses, "Workers lost.");
    per_worker(w, g, "tandem_worker_up", "gauge", "Workers connected.", get_up);
#define X(field, name, type, help) per_worker(w, g, name, type, help, get_##field);
    WORKER_MAP(X)
#undef X
}

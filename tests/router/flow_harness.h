/* A flow with one worker of each role, driven one event at a time. Actions are compared as text:
 *   "3 ADMIT 1.1"  a message to worker 3 with its key;  "GIVE 1 #0+1"  tokens for the client. */
#ifndef TD_TESTS_ROUTER_FLOW_HARNESS_H
#define TD_TESTS_ROUTER_FLOW_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/flow.h"

#define MS 1000000ull
enum { P = 1, P2 = 2, D = 3, D2 = 4, EOS = 99 };

static struct td_flow *flow;
static uint64_t now;
static char said[4096];
static uint64_t last_ticket;
static int32_t last_id; /* delivered */
static int32_t prompt[8 + 100] = {5, 6, 7, 8, 9, 10, 11, 12};
static struct td_msg_admit last_admit;
static struct td_msg_prefill last_prefill;
static uint32_t max_context = 100; /* of workers that come up */
static struct td_flow_times last_times; /* of the last END */

static inline void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline void say(const char *fmt, ...) {
    size_t n = strlen(said);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(said + n, sizeof said - n, fmt, ap);
    va_end(ap);
}

/* The phases of a request follow one another without a gap. */
static inline void check_phases(const struct td_flow_times *t) {
    uint64_t sum = 0;
    for (int i = 0; i < TD_PHASES; i++)
        sum += t->phase_ns[i];
    assert_int_equal(sum, t->ended - t->submitted);
    assert_int_equal(t->phase_ns[TD_PHASE_PREPARE], 0);
}

static inline void say_action(const struct td_flow_action *a) {
    unsigned long long r = a->request, e = a->epoch;
    char c[12] = ""; /* which choice, but for the first */
    if (a->choice != 0) snprintf(c, sizeof c, "/%u", a->choice);
    switch (a->kind) {
    case TD_FLOW_SEND: {
        const char *name = a->msg.type == TD_MSG_ADMIT     ? "ADMIT"
                           : a->msg.type == TD_MSG_KEEP    ? "KEEP"
                           : a->msg.type == TD_MSG_PREFILL ? "PREFILL"
                                                           : "CANCEL";
        const struct td_msg_moved *v = &a->msg.moved;
        if (a->msg.type == TD_MSG_MOVED) {
            say("%llu MOVED %llu %.*s\n", e, (unsigned long long)v->epoch,
                (int)v->xfer_address_len, (const char *)v->xfer_address);
            return;
        }
        const struct td_key *k = &a->msg.keep.key; /* first in all the others */
        say("%llu %s %llx.%u", e, name, (unsigned long long)k->request, k->attempt);
        if (a->msg.type == TD_MSG_ADMIT && a->msg.admit.n > 1) say(" n=%u", a->msg.admit.n);
        if (a->msg.type == TD_MSG_PREFILL && a->msg.prefill.n > 1) say(" n=%u", a->msg.prefill.n);
        if (a->msg.type == TD_MSG_CANCEL && a->msg.cancel.only) say("/%u", a->msg.cancel.only - 1);
        say("\n");
        if (a->msg.type == TD_MSG_ADMIT) last_admit = a->msg.admit;
        if (a->msg.type == TD_MSG_PREFILL) last_prefill = a->msg.prefill;
        if (a->msg.type == TD_MSG_PREFILL) last_ticket = a->msg.prefill.ticket;
        return;
    }
    case TD_FLOW_CLOSE_LINK:
        say("CLOSE %llu\n", e);
        return;
    case TD_FLOW_DELIVER:
        last_id = a->deliver.tokens[a->deliver.n - 1].id;
        say("GIVE %llu%s #%u+%u", r, c, a->deliver.index, a->deliver.n);
        if (a->deliver.selections != NULL) say(" with %u", a->deliver.selections->n_entries);
        say("\n");
        return;
    case TD_FLOW_HOLD:
        say("HOLD %llu%s #%u+%u with %u%s\n", r, c, a->hold.index, a->hold.n,
            a->hold.selections->n_entries, a->hold.first ? " first" : "");
        return;
    case TD_FLOW_END:
        last_times = a->end.times;
        check_phases(&a->end.times);
        say("END %llu%s %s %u\n", r, c, a->end.reason == TD_FINISH_STOP ? "stop" : "length",
            a->end.n_tokens);
        return;
    case TD_FLOW_FAIL:
        check_phases(&a->fail.times);
        say("FAIL %llu%s %s %s\n", r, c, td_status_name(a->fail.status),
            a->fail.retry_ms != 0 ? "retry" : "");
        return;
    case TD_FLOW_PROBED:
        say("PROBED %s\n", td_status_name(a->fail.status));
        return;
    case TD_FLOW_STALLED:
        say("STALLED %llu %s\n", e, a->moves ? "moves" : "hangs");
        return;
    }
}

/* Where the time of the last END went, in ms. */
static inline const char *phases(void) {
    static char text[100];
    const uint64_t *t = last_times.phase_ns;
    snprintf(text, sizeof text, "queue %llu prefill %llu transfer %llu decode %llu",
             (unsigned long long)(t[TD_PHASE_QUEUE] / MS),
             (unsigned long long)(t[TD_PHASE_PREFILL] / MS),
             (unsigned long long)(t[TD_PHASE_TRANSFER] / MS),
             (unsigned long long)(t[TD_PHASE_DECODE] / MS));
    return text;
}

/* Takes an event, returns what came of it. */
static inline const char *step(struct td_flow_event ev) {
    struct td_flow_action a;
    said[0] = 0;
    ev.now_ns = now;
    td_flow_step(flow, &ev);
    while (td_flow_next(flow, &a))
        say_action(&a);
    return said;
}

static inline const char *up(enum td_role role, uint64_t epoch) {
    struct td_msg_hello h = {.version = TD_PROTO_VERSION,
                             .role = role,
                             .epoch = epoch,
                             .model = "m",
                             .max_context = max_context,
                             .max_running = 4,
                             .pages = 100,
                             .slots = 4};
    snprintf(h.name, sizeof h.name, "worker%llu", (unsigned long long)epoch);
    return step((struct td_flow_event){.kind = TD_FLOW_WORKER_UP, .hello = &h});
}
static inline const char *down(uint64_t epoch) {
    return step((struct td_flow_event){.kind = TD_FLOW_WORKER_DOWN, .worker = {.epoch = epoch}});
}
static inline const char *submit_n(uint64_t request, uint32_t n_prompt, uint32_t max_new,
                                   bool colocate) {
    return step((struct td_flow_event){.kind = TD_FLOW_SUBMIT,
                                       .submit = {.request = request,
                                                  .ids = prompt,
                                                  .n_prompt = n_prompt,
                                                  .max_new = max_new,
                                                  .colocate = colocate}});
}
static inline const char *submit_later(uint64_t request, uint32_t priority) {
    return step((struct td_flow_event){.kind = TD_FLOW_SUBMIT,
                                       .submit = {.request = request,
                                                  .ids = prompt,
                                                  .n_prompt = 8,
                                                  .max_new = 10,
                                                  .priority = priority}});
}
static inline const char *submit(uint64_t request) {
    return submit_n(request, 8, 10, false);
}
static inline const char *from(uint64_t epoch, struct td_msg m) {
    return step((struct td_flow_event){.kind = TD_FLOW_MESSAGE, .worker = {epoch, &m}});
}
static inline const char *admitted(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(epoch, (struct td_msg){
                           .type = TD_MSG_ADMIT_REPLY,
                           .admit_reply = {.key = {r, attempt}, .ticket = 77, .lease_ms = 300}});
}
static inline const char *busy(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(
        epoch,
        (struct td_msg){.type = TD_MSG_ADMIT_REPLY,
                        .admit_reply = {.key = {r, attempt}, .status = TD_BUSY, .retry_ms = 50}});
}
static inline const char *tokens(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t index,
                                 uint32_t n) {
    static struct td_token t[64];
    return from(epoch,
                (struct td_msg){.type = TD_MSG_TOKENS, .tokens = {{r, attempt}, index, n, t}});
}
static inline const char *finished(uint64_t epoch, uint64_t r, uint32_t attempt, uint32_t n) {
    return from(epoch, (struct td_msg){.type = TD_MSG_FINISHED,
                                       .finished = {{r, attempt}, TD_FINISH_LENGTH, n}});
}
static inline const char *failed(uint64_t epoch, uint64_t r, uint32_t attempt, td_status s) {
    return from(epoch,
                (struct td_msg){.type = TD_MSG_FAILED, .failed = {{r, attempt}, s, "it broke"}});
}
static inline const char *released(uint64_t epoch, uint64_t r, uint32_t attempt) {
    return from(epoch, (struct td_msg){.type = TD_MSG_RELEASED, .released = {.key = {r, attempt}}});
}
static inline const char *after(uint64_t ms) {
    now += ms * MS;
    return step((struct td_flow_event){.kind = TD_FLOW_TIMER});
}
static inline const char *tell(enum td_flow_event_kind kind, uint64_t request) {
    return step((struct td_flow_event){.kind = kind, .request = request});
}
static inline struct td_flow_counts counts(void) {
    struct td_flow_counts c;
    td_flow_counts(flow, &c);
    return c;
}

static inline int begin_with(uint32_t probe_n) {
    const struct td_flow_options o = {
        .fleet = {.max_workers = 8, .cool_ns = MS, .cool_max_ns = MS},
        .max_requests = 3,
        .lease_ns = 300 * MS,
        .queue_ns = 1000 * MS,
        .admit_ns = 500 * MS,
        .probe_ids = prompt,
        .probe_n = probe_n,
        .probe_new = 2,
        .eos = EOS,
    };
    now = 1;
    return td_flow_create(&o, &flow, NULL) == TD_OK ? 0 : -1;
}
static inline int begin(void **state) {
    (void)state;
    if (begin_with(0) != 0) return -1;
    up(TD_ROLE_PREFILL, P);
    up(TD_ROLE_DECODE, D);
    return 0;
}
static inline int end(void **state) {
    (void)state;
    td_flow_destroy(flow);
    return 0;
}

/* To the point where prefill and decode both work on request 1. */
static inline void under_way(void) {
    assert_string_equal(submit(1), "3 ADMIT 1.1\n");
    assert_string_equal(admitted(D, 1, 1), "1 PREFILL 1.1\n");
    assert_int_equal(last_ticket, 77);
}

#define T(f) cmocka_unit_test_setup_teardown(f, begin, end)

#endif

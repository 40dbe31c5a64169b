/* Start, events, actions and end of the decode worker. */
#include "decode/worker.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/progress.h"
#include "kernels/worker_plan.h"
#include "decode/worker_parts.h"

enum {
    NS_PER_MS = 1000000,
    STOP_MS = 5000, /* for a step that runs */
};

/* ---- actions ---- */

static void run_step(void *user) {
    struct td_decode_worker *w = user;
    struct td_decode_job *j = &w->job;
    j->status = td_worker_engine_step(&w->engine, j->runs, j->n_runs, j->samples, j->n_samples,
                                      j->tokens[j->set], &j->selections, j->failed, &j->err);
}

static void step_done(void *user) {
    struct td_decode_worker *w = user;
    w->stepping = false;
    const struct td_decode_job *j = &w->job;
    if (j->status != TD_OK) td_warn("a step failed: %s", j->err.text);
    for (uint32_t i = 0; j->status == TD_OK && i < j->n_samples; i++)
        if (j->failed[i].status != TD_OK) td_warn("a sequence failed: %s", j->failed[i].text);
    struct td_decode_event ev = {
        .kind = TD_DECODE_STEP_DONE,
        .step = {.status = j->status,
                 .text = j->err.text,
                 .tokens = j->tokens[j->set],
                 .selections = j->selections,
                 .failed = j->failed},
    };
    const struct td_error fault = j->err; /* the next step begins in there */
    td_decode_feed(w, &ev);
    td_host_fault(w->host, ev.step.status, fault.text);
}

static void start_step(struct td_decode_worker *w, const struct td_decode_action *a) {
    struct td_decode_job *j = &w->job;
    assert(a->step.n_samples <= w->engine.options.slots);
    j->runs = a->step.runs;
    j->n_runs = a->step.n_runs;
    j->n_samples = a->step.n_samples;
    for (uint32_t i = 0; i < j->n_samples; i++) {
        const struct td_decode_sample *s = &a->step.samples[i];
        j->samples[i] =
            (struct td_worker_sample){s->sampling, s->position, s->row, s->slot, s->owner, s->fed};
    }
    j->set ^= 1;
    j->status = TD_INTERNAL;
    j->err.text[0] = 0;
    w->stepping = true;
    td_status st = td_jobs_submit(td_host_jobs(w->host), run_step, step_done, w);
    assert(st == TD_OK); /* one at a time */
    (void)st;
}

/* On the loop, as unpacking is: what is copied is in no step. */
static void copy_state(struct td_decode_worker *w, const struct td_decode_action *a) {
    struct td_engine *e = w->engine.engine;
    struct td_error err;
    td_status st = td_engine_copy_slot(e, a->copy.from_slot, a->copy.to_slot, &err);
    if (st == TD_OK && a->copy.page)
        st = td_engine_copy_page(e, a->copy.from_page, a->copy.to_page, &err);
    if (st == TD_OK) return;
    td_warn("KV state of a choice: %s", err.text);
    struct td_decode_event ev = {.kind = TD_DECODE_COPY_FAILED,
                                 .copy = {a->copy.to_slot, st, err.text}};
    td_decode_feed(w, &ev);
    td_host_fault(w->host, st, err.text);
}

static void carry_out(struct td_decode_worker *w, struct td_decode_action *a) {
    switch (a->kind) {
    case TD_DECODE_SEND:
        td_host_send(w->host, &a->msg);
        return;
    case TD_DECODE_STEP:
        start_step(w, a);
        return;
    case TD_DECODE_SEND_PEER:
        td_decode_send_peer(w, a);
        return;
    case TD_DECODE_CLOSE:
        td_decode_close(w, a->peer.link);
        return;
    case TD_DECODE_UNPACK:
        td_decode_unpack(w, a);
        return;
    case TD_DECODE_COPY:
        copy_state(w, a);
        return;
    case TD_DECODE_FREE_IDS:
        free((int32_t *)a->ids);
        return;
    case TD_DECODE_FREE_GUIDE:
        td_guide_give(a->guide);
        return;
    }
}

void td_decode_feed(struct td_decode_worker *w, struct td_decode_event *ev) {
    struct td_decode_action a;
    ev->now_ns = td_now_ns();
    td_decode_step(w->machine, ev);
    while (td_decode_next(w->machine, &a))
        carry_out(w, &a);
    td_host_deadline(w->host, td_decode_deadline(w->machine));
}

/* ---- events of the host ---- */

static void on_message(void *user, const struct td_msg *m) {
    struct td_decode_worker *w = user;
    struct td_msg copy = *m;
    struct td_error err;
    td_status st = TD_OK;
    if (m->type == TD_MSG_ADMIT) /* what it lends, until FREE_IDS and FREE_GUIDE */
        st = td_guide_take_prompt(&copy.admit.sampling, &copy.admit.ids, m->admit.n_prompt, &err);
    if (st != TD_OK) {
        struct td_msg r = {.type = TD_MSG_ADMIT_REPLY};
        r.admit_reply.key = m->admit.key;
        r.admit_reply.status = st;
        snprintf(r.admit_reply.text, sizeof r.admit_reply.text, "%s", err.text);
        td_host_send(w->host, &r);
        return;
    }
    struct td_decode_event ev = {.kind = TD_DECODE_MESSAGE, .msg = &copy};
    td_decode_feed(w, &ev);
}

static void on_router_down(void *user) {
    struct td_decode_event ev = {.kind = TD_DECODE_ROUTER_DOWN};
    td_decode_feed(user, &ev);
}

static void on_beat(void *user, struct td_msg_heartbeat *beat, struct td_msg_ledger *ledger) {
    struct td_decode_worker *w = user;
    td_decode_load(w->machine, beat);
    td_decode_ledger(w->machine, ledger);
}

static void on_deadline(void *user) {
    struct td_decode_event ev = {.kind = TD_DECODE_TIMER};
    td_decode_feed(user, &ev);
}

static void on_stop(void *user) {
    struct td_decode_worker *w = user;
    td_info("stopping");
    w->stopping = true;
    on_router_down(w);
}

static bool is_idle(void *user) {
    struct td_decode_worker *w = user;
    struct td_msg_ledger l;
    td_decode_ledger(w->machine, &l);
    return !w->stepping && l.pages_owned == 0 && l.slots_owned == 0;
}

/* ---- start ---- */

static uint64_t landing_bytes(const struct td_decode_worker *w) {
    return w->config.max_prefill_peers * w->config.landing_slabs * w->slab_bytes;
}

static td_status take_memory(struct td_decode_worker *w, struct td_error *err) {
    uint32_t slots = w->engine.options.slots;
    w->slab_bytes = td_worker_slab_bytes(w->engine.layout, w->config.slab_bytes);
    w->config.slab_bytes = w->slab_bytes;
    w->headers_max = (uint32_t)(w->slab_bytes / sizeof(struct td_kv_block_header));
    w->headers = calloc(w->headers_max, sizeof *w->headers);
    w->job.samples = calloc(slots, sizeof *w->job.samples);
    w->job.tokens[0] = calloc(slots, sizeof(struct td_token));
    w->job.tokens[1] = calloc(slots, sizeof(struct td_token));
    w->job.failed = calloc(slots, sizeof *w->job.failed);
    if (!w->headers || !w->job.samples || !w->job.tokens[0] || !w->job.tokens[1] || !w->job.failed)
        return td_fail(err, TD_NO_MEMORY, "no memory for %u sequences", slots);
    return TD_OK;
}

static td_status make_machine(struct td_decode_worker *w, uint32_t *ret_sends,
                              struct td_error *err) {
    const struct td_config *c = &w->config;
    struct td_decode_options o = {
        .epoch = w->epoch,
        .numerics_id = w->engine.numerics_id,
        .layout = w->engine.layout,
        .split = w->engine.split,
        .pages = w->engine.options.pages,
        .slots = w->engine.options.slots,
        .max_context = w->engine.options.max_context,
        .reserve_new = (uint32_t)w->config.reserve_tokens,
        .max_tokens = w->engine.options.max_tokens,
        .eos = w->engine.model->config.eos_id,
        .max_peers = (uint32_t)c->max_prefill_peers,
        .landing_slabs = (uint32_t)c->landing_slabs,
        .slab_bytes = w->slab_bytes,
        .lease_ns = c->lease_ms * NS_PER_MS,
        .beat_ns = c->heartbeat_ms * NS_PER_MS,
        .peer_timeout_ns = c->peer_timeout_ms * NS_PER_MS,
    };
    *ret_sends = td_decode_peer_messages(&o);
    return td_decode_create(&o, &w->machine, err);
}

static void fill_hello(struct td_decode_worker *w) {
    struct td_msg_hello *h = &w->hello;
    td_host_hello_init(h, TD_ROLE_DECODE, w->name, w->host, w->settings, sizeof w->settings);
    h->fingerprint = w->engine.layout->fingerprint;
    h->numerics_id = w->engine.numerics_id;
    snprintf(h->numerics, sizeof h->numerics, "%s", w->engine.numerics);
    snprintf(h->model, sizeof h->model, "%.63s", w->engine.model_name);
    /* What the whole pool holds is a limit as well: known in advance, it bounds answers without a
     * limit of their own and is told to clients in tokens. */
    h->page_tokens = td_kv_page_tokens(w->engine.split);
    uint64_t pool = (uint64_t)w->engine.options.pages * h->page_tokens;
    h->max_context = w->engine.options.max_context;
    if (pool < h->max_context) h->max_context = (uint32_t)pool;
    h->max_running = h->slots = w->engine.options.slots;
    h->pages = w->engine.options.pages;
    h->selection_max = w->engine.layout->csa_layers * w->engine.options.index_topk;
    h->xfer_address = td_xfer_address(td_plane_xfer(td_host_plane(w->host)), &h->xfer_address_len);
}

static void log_start(const struct td_decode_worker *w) {
    char memory[1024];
    td_worker_engine_memory_text(&w->engine, landing_bytes(w), memory, sizeof memory);
    td_log_lines(TD_LOG_INFO, "setting ", w->settings);
    td_log_lines(TD_LOG_INFO, "memory ", memory);
    td_info("landing slabs lie in %s memory", td_xfer_region_transport(w->landing));
    td_info("numerics %s (%016llx), layout %016llx, epoch %016llx", w->engine.numerics,
            (unsigned long long)w->engine.numerics_id,
            (unsigned long long)w->engine.layout->fingerprint, (unsigned long long)w->epoch);
}

static const struct td_host_events *host_events(void) {
    static struct td_host_events e = {.on_message = on_message,
                                      .on_router_down = on_router_down,
                                      .on_beat = on_beat,
                                      .on_deadline = on_deadline,
                                      .on_stop = on_stop,
                                      .is_idle = is_idle};
    e.plane = td_decode_plane_events;
    return &e;
}

static td_status start(struct td_decode_worker *w, struct td_error *err) {
    struct td_progress progress = {.what = "checkpoint"};
    const struct td_load_watch watch = {td_progress_log, &progress};
    w->epoch = td_host_epoch();
    TD_TRY(td_worker_engine_open(&w->engine, &w->config, &watch, err));
    TD_TRY(take_memory(w, err));
    uint32_t sends;
    TD_TRY(make_machine(w, &sends, err));
    TD_TRY(td_host_create(&w->config, TD_ROLE_DECODE, w->epoch, host_events(), w,
                          TD_DECODE_LINKS_MAX, sends, STOP_MS, &w->host, err));
    TD_TRY(td_xfer_region_alloc(td_plane_xfer(td_host_plane(w->host)), landing_bytes(w),
                                &w->landing, err));
    struct td_error why;
    if (td_engine_pin(w->engine.engine, td_xfer_region_base(w->landing), landing_bytes(w), &why) !=
        TD_OK)
        td_warn("landing slabs: %s: the host copies each block once more", why.text);
    fill_hello(w);
    log_start(w);
    return td_host_dial(w->host, &w->hello, err);
}

/* ---- end ---- */

static void log_residue(const struct td_decode_worker *w) {
    struct td_msg_ledger l;
    struct td_error err;
    td_decode_ledger(w->machine, &l);
    if (td_decode_check(w->machine, &err) != TD_OK) td_err("ledger: %s", err.text);
    if (l.pages_owned || l.slots_owned)
        td_warn("left at exit: %u pages, %u slots", l.pages_owned, l.slots_owned);
}

static void finish(struct td_decode_worker *w) {
    td_decode_stop_watching(w);
    if (w->landing) td_engine_unpin(w->engine.engine, td_xfer_region_base(w->landing));
    td_xfer_region_free(w->landing);
    if (td_host_destroy(w->host) != TD_OK) td_warn("a handle of the loop was left open");
    td_decode_destroy(w->machine);
    free(w->job.samples);
    free(w->job.tokens[0]);
    free(w->job.tokens[1]);
    free(w->job.failed);
    free(w->headers);
    td_worker_engine_close(&w->engine);
    free(w);
}

td_status td_decode_worker_run(const struct td_role_args *args, struct td_error *err) {
    struct td_decode_worker *w = calloc(1, sizeof *w);
    if (!w) return td_fail(err, TD_NO_MEMORY, "no memory for the worker");
    w->config = args->config;
    snprintf(w->name, sizeof w->name, "%s", args->name);
    td_status st = start(w, err);
    if (st == TD_OK) {
        st = td_host_run(w->host, err);
        log_residue(w);
        if (st == TD_OK) td_info("stopped"); /* else the last line of the log is why */
    }
    finish(w);
    return st;
}

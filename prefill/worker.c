/* Start, events, actions and end of the prefill worker. */
#include "prefill/worker.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/progress.h"
#include "kernels/worker_plan.h"
#include "prefill/worker_parts.h"

enum {
    NS_PER_MS = 1000000,
    REQUESTS_MAX = 256,    /* waiting ones included */
    SLAB_ALIGNMENT = 4096, /* a device pins whole memory pages */
    STOP_MS = 5000,        /* for a chunk that runs, and for puts to become quiet */
};

/* ---- actions ---- */

static void run_step(void *user) {
    struct td_prefill_worker *w = user;
    struct td_prefill_job *j = &w->job;
    j->status = td_worker_engine_step(&w->engine, &j->run, 1, j->sample, j->n_samples, j->token,
                                      &j->selections, j->failed, &j->err);
    /* Logits that one choice cannot be drawn from are no good for the others either. */
    for (uint32_t i = 0; j->status == TD_OK && i < j->n_samples; i++) {
        j->status = j->failed[i].status;
        if (j->status != TD_OK) j->err = j->failed[i];
    }
}

static void step_done(void *user) {
    struct td_prefill_worker *w = user;
    struct td_token token[TD_CHOICES_MAX]; /* the job's own are used again by the next step */
    memcpy(token, w->job.token, w->job.n_samples * sizeof *token);
    td_status st = w->job.status;
    const struct td_error err = w->job.err; /* the next step begins in there */
    w->stepping = false;
    if (st != TD_OK) td_warn("a step failed: %s", w->job.err.text);
    struct td_prefill_event ev = {.kind = TD_PREFILL_STEP_DONE,
                                  .step = {.status = st,
                                           .text = w->job.err.text,
                                           .tokens = token,
                                           .selections = w->job.selections}};
    td_prefill_feed(w, &ev);
    td_host_fault(w->host, st, err.text);
}

static void start_step(struct td_prefill_worker *w, const struct td_prefill_action *a) {
    w->job.run = a->step.run;
    w->job.n_samples = a->step.n_samples;
    for (uint32_t i = 0; i < a->step.n_samples; i++)
        w->job.sample[i] = (struct td_worker_sample){&a->step.sampling[i], a->step.position, 0,
                                                     a->step.run.slot,     a->step.owner,    -1};
    w->job.status = TD_INTERNAL;
    w->job.err.text[0] = 0;
    w->stepping = true;
    td_status st = td_jobs_submit(td_host_jobs(w->host), run_step, step_done, w);
    assert(st == TD_OK); /* one at a time */
    (void)st;
}

static void carry_out(struct td_prefill_worker *w, struct td_prefill_action *a) {
    switch (a->kind) {
    case TD_PREFILL_SEND:
        td_host_send(w->host, &a->msg);
        return;
    case TD_PREFILL_STEP:
        start_step(w, a);
        return;
    case TD_PREFILL_CONNECT:
        td_prefill_connect(w, a);
        return;
    case TD_PREFILL_SEND_PEER:
        td_prefill_send_peer(w, a);
        return;
    case TD_PREFILL_CLOSE:
        td_prefill_close(w, a->peer.epoch);
        return;
    case TD_PREFILL_PACK:
        td_prefill_pack(w, a);
        return;
    case TD_PREFILL_PUT:
        td_prefill_put(w, a);
        return;
    case TD_PREFILL_FREE_IDS:
        free((int32_t *)a->lent.ids);
        td_guide_give(a->lent.guide);
        return;
    }
}

void td_prefill_feed(struct td_prefill_worker *w, struct td_prefill_event *ev) {
    struct td_prefill_action a;
    ev->now_ns = td_now_ns();
    td_prefill_step(w->machine, ev);
    while (td_prefill_next(w->machine, &a))
        carry_out(w, &a);
    td_host_deadline(w->host, td_prefill_deadline(w->machine));
}

/* ---- events of the host ---- */

static void on_message(void *user, const struct td_msg *m) {
    struct td_prefill_worker *w = user;
    struct td_msg copy = *m;
    struct td_error err;
    td_status st = TD_OK;
    if (m->type == TD_MSG_PREFILL) /* what it lends, until FREE_IDS */
        st = td_guide_take_prompt(&copy.prefill.sampling, &copy.prefill.ids, m->prefill.n_prompt,
                                  &err);
    if (st != TD_OK) {
        struct td_msg r = {.type = TD_MSG_FAILED};
        r.failed.key = m->prefill.key;
        r.failed.status = st;
        snprintf(r.failed.text, sizeof r.failed.text, "%s", err.text);
        td_host_send(w->host, &r);
        r = (struct td_msg){.type = TD_MSG_RELEASED, .released.key = m->prefill.key};
        td_host_send(w->host, &r); /* else the router would wait for it for ever */
        return;
    }
    struct td_prefill_event ev = {.kind = TD_PREFILL_MESSAGE, .msg = &copy};
    td_prefill_feed(w, &ev);
}

static void on_router_down(void *user) {
    struct td_prefill_event ev = {.kind = TD_PREFILL_ROUTER_DOWN};
    td_prefill_feed(user, &ev);
}

static void on_beat(void *user, struct td_msg_heartbeat *beat, struct td_msg_ledger *ledger) {
    struct td_prefill_worker *w = user;
    td_prefill_load(w->machine, beat);
    td_prefill_ledger(w->machine, ledger);
}

static void on_deadline(void *user) {
    struct td_prefill_event ev = {.kind = TD_PREFILL_TIMER};
    td_prefill_feed(user, &ev);
}

static void on_stop(void *user) {
    struct td_prefill_worker *w = user;
    td_info("stopping");
    w->stopping = true;
    on_router_down(w);
}

static bool is_idle(void *user) {
    struct td_prefill_worker *w = user;
    struct td_msg_ledger l;
    td_prefill_ledger(w->machine, &l);
    return !w->stepping && l.pages_owned == 0 && l.slots_owned == 0 && l.send_busy == 0;
}

/* ---- start ---- */

static td_status take_slabs(struct td_prefill_worker *w, struct td_error *err) {
    uint32_t n = (uint32_t)w->config.send_slabs;
    w->slab_bytes = td_worker_slab_bytes(w->engine.layout, w->config.slab_bytes);
    w->config.slab_bytes = w->slab_bytes;
    w->headers_max = (uint32_t)(w->slab_bytes / sizeof(struct td_kv_block_header));
    w->headers = calloc(w->headers_max, sizeof *w->headers);
    w->slab = calloc(n, sizeof *w->slab);
    if (!w->headers || !w->slab) return td_fail(err, TD_NO_MEMORY, "no memory for send slabs");
    w->slabs = aligned_alloc(SLAB_ALIGNMENT, n * w->slab_bytes);
    if (!w->slabs)
        return td_fail(err, TD_NO_MEMORY, "no memory for %u send slabs of %llu bytes", n,
                       (unsigned long long)w->slab_bytes);
    memset(w->slabs, 0, n * w->slab_bytes);
    for (uint32_t i = 0; i < n; i++) {
        w->slab[i].w = w;
        w->slab[i].bytes = w->slabs + i * w->slab_bytes;
    }
    struct td_error why;
    if (td_engine_pin(w->engine.engine, w->slabs, n * w->slab_bytes, &why) != TD_OK)
        td_warn("send slabs: %s: the host copies each block once more", why.text);
    return TD_OK;
}

static td_status make_machine(struct td_prefill_worker *w, uint32_t *ret_sends,
                              struct td_error *err) {
    const struct td_config *c = &w->config;
    struct td_prefill_options o = {
        .epoch = w->epoch,
        .numerics_id = w->engine.numerics_id,
        .layout = w->engine.layout,
        .split = w->engine.split,
        .pages = w->engine.options.pages,
        .slots = w->engine.options.slots,
        .max_context = w->engine.options.max_context,
        .max_requests = REQUESTS_MAX,
        .chunk_tokens = (uint32_t)c->chunk_tokens,
        .eos = w->engine.model->config.eos_id,
        .send_slabs = (uint32_t)c->send_slabs,
        .slab_bytes = w->slab_bytes,
        .max_peers = TD_PREFILL_PEERS_MAX,
        .transfer_ns = c->transfer_timeout_ms * NS_PER_MS,
        .beat_ns = c->heartbeat_ms * NS_PER_MS,
        .peer_timeout_ns = c->peer_timeout_ms * NS_PER_MS,
    };
    *ret_sends = td_prefill_peer_messages(&o);
    return td_prefill_create(&o, &w->machine, err);
}

static void fill_hello(struct td_prefill_worker *w) {
    struct td_msg_hello *h = &w->hello;
    td_host_hello_init(h, TD_ROLE_PREFILL, w->name, w->host, w->settings, sizeof w->settings);
    h->fingerprint = w->engine.layout->fingerprint;
    h->numerics_id = w->engine.numerics_id;
    snprintf(h->numerics, sizeof h->numerics, "%s", w->engine.numerics);
    snprintf(h->model, sizeof h->model, "%.63s", w->engine.model_name);
    /* As decode does: a preempted sequence is prefilled again with its answer. */
    h->page_tokens = td_kv_page_tokens(w->engine.split);
    uint64_t pool = (uint64_t)w->engine.options.pages * h->page_tokens;
    h->max_context = w->engine.options.max_context;
    if (pool < h->max_context) h->max_context = (uint32_t)pool;
    h->max_running = h->slots = w->engine.options.slots;
    h->pages = w->engine.options.pages;
    h->selection_max = w->engine.layout->csa_layers * w->engine.options.index_topk;
}

static void log_start(const struct td_prefill_worker *w) {
    char memory[1024];
    td_worker_engine_memory_text(&w->engine, w->slab_bytes * w->config.send_slabs, memory,
                                 sizeof memory);
    td_log_lines(TD_LOG_INFO, "setting ", w->settings);
    td_log_lines(TD_LOG_INFO, "memory ", memory);
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
    e.plane = td_prefill_plane_events;
    return &e;
}

static td_status start(struct td_prefill_worker *w, struct td_error *err) {
    struct td_progress progress = {.what = "checkpoint"};
    const struct td_load_watch watch = {td_progress_log, &progress};
    w->epoch = td_host_epoch();
    TD_TRY(td_worker_engine_open(&w->engine, &w->config, &watch, err));
    TD_TRY(take_slabs(w, err));
    uint32_t sends;
    TD_TRY(make_machine(w, &sends, err));
    TD_TRY(td_host_create(&w->config, TD_ROLE_PREFILL, w->epoch, host_events(), w,
                          TD_PREFILL_PEERS_MAX, sends, STOP_MS, &w->host, err));
    fill_hello(w);
    log_start(w);
    return td_host_dial(w->host, &w->hello, err);
}

/* ---- end ---- */

static void log_residue(const struct td_prefill_worker *w) {
    struct td_msg_ledger l;
    struct td_error err;
    td_prefill_ledger(w->machine, &l);
    if (td_prefill_check(w->machine, &err) != TD_OK) td_err("ledger: %s", err.text);
    if (l.pages_owned || l.slots_owned || l.send_busy)
        td_warn("left at exit: %u pages, %u slots, %u send slabs", l.pages_owned, l.slots_owned,
                l.send_busy);
}

static void finish(struct td_prefill_worker *w) {
    for (uint32_t i = 0; i < TD_PREFILL_PEERS_MAX; i++)
        td_prefill_unpin(w, &w->link[i]);
    if (td_host_destroy(w->host) != TD_OK) td_warn("a handle of the loop was left open");
    td_prefill_destroy(w->machine);
    td_engine_unpin(w->engine.engine, w->slabs);
    free(w->slabs);
    free(w->slab);
    free(w->headers);
    td_worker_engine_close(&w->engine);
    free(w);
}

td_status td_prefill_worker_run(const struct td_role_args *args, struct td_error *err) {
    struct td_prefill_worker *w = calloc(1, sizeof *w);
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

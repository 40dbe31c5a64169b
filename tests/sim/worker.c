/* The workers' shells: carry out what the machines say, with a fake engine that takes its time. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum {
    CHUNK = 512,
    MAX_CONTEXT = 4096,
    MAX_WAITING = 16,
    DECODE_TOKENS = 320,
    LANDING = 3,
    BEAT_MS = 100
};

static uint64_t slab_bytes(const struct sim *s) {
    return td_kv_slot_block_bytes_max(&s->layout) + td_kv_page_block_bytes_max(&s->layout);
}

/* ---- ids that come back ---- */

static void give_ids(struct sim *s, struct sim_worker *w, const int32_t *ids) {
    for (struct sim_ids **p = &w->ids; *p != NULL; p = &(*p)->next) {
        if ((*p)->ids != ids) continue;
        struct sim_ids *gone = *p;
        *p = gone->next;
        free(gone);
        return;
    }
    sim_broken(s, "%s: ids are given back twice, or are not its own", w->name);
}

/* ---- timers ---- */

static void on_timer(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    if (w->timer_at != e->a) return;
    w->timer_at = UINT64_MAX;
    if (w->role == TD_ROLE_PREFILL) {
        struct td_prefill_event ev = {.kind = TD_PREFILL_TIMER};
        sim_prefill_step(s, w, &ev);
    } else {
        struct td_decode_event ev = {.kind = TD_DECODE_TIMER};
        sim_decode_step(s, w, &ev);
    }
}

static void arm(struct sim *s, struct sim_worker *w, uint64_t deadline) {
    if (deadline == UINT64_MAX || deadline >= w->timer_at) return;
    w->timer_at = deadline > s->now ? deadline : s->now + 1;
    sim_at(s, w->timer_at, (int)w->index, on_timer)->a = w->timer_at;
}

static uint64_t step_end(const struct sim *s, const struct sim_worker *w, uint64_t took) {
    return s->now + took > w->hung_until ? s->now + took : w->hung_until;
}

/* ---- beats ---- */

static void on_beat(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    struct td_msg m = {.type = TD_MSG_HEARTBEAT, .heartbeat = {.epoch = w->epoch}};
    if (w->role == TD_ROLE_PREFILL)
        td_prefill_load(w->p, &m.heartbeat);
    else
        td_decode_load(w->d, &m.heartbeat);
    sim_to_router(s, w, &m);
    sim_at(s, s->now + BEAT_MS * SIM_MS, e->worker, on_beat);
}

/* ---- prefill ---- */

struct prefill_job {
    struct td_prefill_action a;
    int32_t ids[CHUNK];
};

static void on_prefill_computed(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    const struct prefill_job *j = e->data;
    const struct td_run *r = &j->a.step.run;
    if (memcmp(j->ids, r->ids, r->n * sizeof *r->ids) != 0)
        sim_broken(s, "%s: the ids of a step changed while it ran", w->name);
    sim_engine(s, w, r);
    struct td_prefill_event ev = {.kind = TD_PREFILL_STEP_DONE};
    struct td_token tokens[TD_CHOICES_MAX];
    memset(tokens, 0, sizeof tokens);
    if (r->want_logits != (j->a.step.n_samples > 0))
        sim_broken(s, "%s: %u samples", w->name, j->a.step.n_samples);
    if (r->want_logits)
        for (uint32_t c = 0; c < j->a.step.n_samples; c++)
            tokens[c].id =
                sim_sample(w->slot[r->slot].hash, j->a.step.position, j->a.step.sampling[c].seed);
    ev.step.tokens = tokens;
    w->stepping = false;
    sim_prefill_step(s, w, &ev);
}

static void prefill_compute(struct sim *s, struct sim_worker *w,
                            const struct td_prefill_action *a) {
    if (w->stepping) sim_broken(s, "%s: two steps at once", w->name);
    w->stepping = true;
    struct prefill_job *j = malloc(sizeof *j);
    j->a = *a;
    memcpy(j->ids, a->step.run.ids, a->step.run.n * sizeof j->ids[0]);
    uint64_t took = 300 * SIM_US + a->step.run.n * 20 * SIM_US + sim_below(s, 3 * SIM_MS);
    sim_at(s, step_end(s, w, took), (int)w->index, on_prefill_computed)->data = j;
}

static void on_packed(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    const struct td_prefill_action *a = e->data;
    struct td_kv_block_header headers[SIM_BLOCKS_MAX];
    sim_pack(s, w, a);
    struct td_prefill_event ev = {.kind = TD_PREFILL_PACKED};
    ev.packed.send_slab = a->pack.send_slab;
    ev.packed.headers = headers;
    for (uint32_t k = 0; k < a->pack.n_blocks; k++) {
        headers[k] = w->slab[a->pack.send_slab].block[k].h;
        ev.packed.bytes += sizeof headers[k] + headers[k].body_bytes;
    }
    w->slab_readers[a->pack.send_slab]--;
    sim_prefill_step(s, w, &ev);
}

static void prefill_pack(struct sim *s, struct sim_worker *w, const struct td_prefill_action *a) {
    if (w->slab_readers[a->pack.send_slab] != 0)
        sim_broken(s, "%s: send slab %u is packed while it is in use", w->name, a->pack.send_slab);
    if (a->pack.n_blocks > SIM_BLOCKS_MAX || a->pack.n_blocks == 0)
        sim_broken(s, "%s: %u blocks in a slab", w->name, a->pack.n_blocks);
    w->slab_readers[a->pack.send_slab]++;
    struct td_prefill_action *copy = malloc(sizeof *copy);
    *copy = *a;
    sim_at(s, s->now + sim_delay(s), (int)w->index, on_packed)->data = copy;
}

static void carry_out_prefill(struct sim *s, struct sim_worker *w,
                              const struct td_prefill_action *a) {
    struct sim_address to = {0};
    switch (a->kind) {
    case TD_PREFILL_SEND:
        sim_to_router(s, w, &a->msg);
        return;
    case TD_PREFILL_STEP:
        prefill_compute(s, w, a);
        return;
    case TD_PREFILL_CONNECT:
        if (a->peer.address_len == sizeof to) memcpy(&to, a->peer.address, sizeof to);
        if (to.epoch != a->peer.epoch)
            sim_broken(s, "%s: connects to an address that is not the decode worker's", w->name);
        sim_connect(s, w, to);
        return;
    case TD_PREFILL_SEND_PEER:
        sim_send_to_decode(s, w, a->peer.epoch, &a->peer.msg);
        return;
    case TD_PREFILL_CLOSE:
        sim_close_by_prefill(s, w, a->peer.epoch);
        return;
    case TD_PREFILL_PACK:
        prefill_pack(s, w, a);
        return;
    case TD_PREFILL_PUT:
        sim_put(s, w, a);
        return;
    case TD_PREFILL_FREE_IDS:
        give_ids(s, w, a->lent.ids);
        if (a->lent.guide != NULL) give_ids(s, w, (const void *)a->lent.guide);
        return;
    }
}

void sim_prefill_step(struct sim *s, struct sim_worker *w, struct td_prefill_event *ev) {
    struct td_prefill_action a;
    struct td_error err;
    ev->now_ns = s->now;
    td_prefill_step(w->p, ev);
    while (td_prefill_next(w->p, &a))
        carry_out_prefill(s, w, &a);
    if (td_prefill_check(w->p, &err) != TD_OK) sim_broken(s, "%s: %s", w->name, err.text);
    arm(s, w, td_prefill_deadline(w->p));
}

/* ---- decode ---- */

struct decode_job {
    uint32_t n_runs, n_samples;
    struct td_run runs[SIM_SLOTS_MAX];
    struct td_decode_sample samples[SIM_SLOTS_MAX];
    struct td_sampling sampling[SIM_SLOTS_MAX];
    const struct td_run *theirs;
};

static void on_decode_computed(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    const struct decode_job *j = e->data;
    struct td_token tokens[SIM_SLOTS_MAX];
    uint32_t n = 0, row = 0;
    memset(tokens, 0, sizeof tokens);
    if (memcmp(j->runs, j->theirs, j->n_runs * sizeof j->runs[0]) != 0)
        sim_broken(s, "%s: a step changed while it ran", w->name);
    for (uint32_t k = 0; k < j->n_runs; k++) {
        const struct td_run *r = &j->runs[k];
        sim_engine(s, w, r);
        if (!r->want_logits) continue;
        for (; n < j->n_samples && j->samples[n].row == row; n++) {
            if (memcmp(&j->sampling[n], j->samples[n].sampling, sizeof j->sampling[n]) != 0)
                sim_broken(s, "%s: the sampling of a step changed while it ran", w->name);
            tokens[n].id =
                sim_sample(w->slot[r->slot].hash, j->samples[n].position, j->sampling[n].seed);
        }
        row++;
    }
    if (n != j->n_samples) sim_broken(s, "%s: %u samples for %u", w->name, j->n_samples, n);
    struct td_decode_event ev = {.kind = TD_DECODE_STEP_DONE};
    ev.step.tokens = tokens;
    w->stepping = false;
    sim_decode_step(s, w, &ev);
}

static void decode_compute(struct sim *s, struct sim_worker *w, const struct td_decode_action *a) {
    if (w->stepping) sim_broken(s, "%s: two steps at once", w->name);
    w->stepping = true;
    struct decode_job *j = calloc(1, sizeof *j);
    uint32_t tokens = 0;
    j->n_runs = a->step.n_runs;
    j->n_samples = a->step.n_samples;
    j->theirs = a->step.runs;
    memcpy(j->runs, a->step.runs, j->n_runs * sizeof j->runs[0]);
    memcpy(j->samples, a->step.samples, j->n_samples * sizeof j->samples[0]);
    for (uint32_t k = 0; k < j->n_samples; k++)
        j->sampling[k] = *j->samples[k].sampling;
    for (uint32_t k = 0; k < j->n_runs; k++)
        tokens += j->runs[k].n;
    if (tokens > DECODE_TOKENS) sim_broken(s, "%s: %u tokens in one step", w->name, tokens);
    uint64_t took = SIM_MS + tokens * 20 * SIM_US + sim_below(s, 2 * SIM_MS);
    sim_at(s, step_end(s, w, took), (int)w->index, on_decode_computed)->data = j;
}

static void on_unpacked(struct sim *s, struct sim_event *e) {
    struct sim_worker *w = &s->worker[e->worker];
    const struct td_decode_action *a = e->data;
    struct td_kv_block_header headers[SIM_BLOCKS_MAX];
    struct td_decode_event ev = {.kind = TD_DECODE_UNPACKED};
    ev.unpacked.landing_slab = a->unpack.landing_slab;
    ev.unpacked.status = sim_unpack(s, w, a, ev.unpacked.text);
    for (uint32_t k = 0; k < a->unpack.n_blocks; k++)
        headers[k] = w->slab[a->unpack.landing_slab].block[k].h;
    if (ev.unpacked.status == TD_OK) ev.unpacked.headers = headers;
    w->slab_readers[a->unpack.landing_slab]--;
    sim_decode_step(s, w, &ev);
}

static void carry_out_decode(struct sim *s, struct sim_worker *w, struct td_decode_action *a) {
    struct td_decode_action *copy;
    switch (a->kind) {
    case TD_DECODE_SEND:
        sim_to_router(s, w, &a->msg);
        return;
    case TD_DECODE_STEP:
        decode_compute(s, w, a);
        return;
    case TD_DECODE_SEND_PEER:
        if (a->peer.msg.type == TD_MSG_PEER_WELCOME)
            for (uint32_t k = 0; k < a->peer.msg.peer_welcome.n_slabs; k++)
                a->peer.msg.peer_welcome.slab_address[k] = a->peer.first_slab + k;
        sim_send_to_prefill(s, w, a->peer.link, &a->peer.msg);
        return;
    case TD_DECODE_CLOSE:
        sim_close_by_decode(s, w, a->peer.link);
        return;
    case TD_DECODE_UNPACK:
        w->slab_readers[a->unpack.landing_slab]++;
        copy = malloc(sizeof *copy);
        *copy = *a;
        sim_at(s, s->now + sim_delay(s), (int)w->index, on_unpacked)->data = copy;
        return;
    case TD_DECODE_COPY:
        w->slot[a->copy.to_slot] = w->slot[a->copy.from_slot];
        for (uint32_t r = 0; a->copy.page && r < 1u << sim_split(s, w); r++)
            w->page[(a->copy.to_page << sim_split(s, w)) + r] =
                w->page[(a->copy.from_page << sim_split(s, w)) + r];
        return;
    case TD_DECODE_FREE_IDS:
        give_ids(s, w, a->ids);
        return;
    case TD_DECODE_FREE_GUIDE:
        give_ids(s, w, (const void *)a->guide);
        return;
    }
}

void sim_decode_step(struct sim *s, struct sim_worker *w, struct td_decode_event *ev) {
    struct td_decode_action a;
    struct td_error err;
    ev->now_ns = s->now;
    td_decode_step(w->d, ev);
    while (td_decode_next(w->d, &a))
        carry_out_decode(s, w, &a);
    if (td_decode_check(w->d, &err) != TD_OK) sim_broken(s, "%s: %s", w->name, err.text);
    arm(s, w, td_decode_deadline(w->d));
}

/* ---- processes ---- */

static void make_machine(struct sim *s, struct sim_worker *w) {
    struct td_error err;
    td_status st;
    if (w->role == TD_ROLE_PREFILL) {
        const struct td_prefill_options o = {
            .epoch = w->epoch,
            .numerics_id = 1,
            .layout = &s->layout,
            .split = sim_split(s, w),
            .pages = s->o.pages,
            .slots = s->o.slots,
            .max_context = MAX_CONTEXT,
            .max_requests = MAX_WAITING,
            .chunk_tokens = CHUNK,
            .eos = SIM_EOS,
            .send_slabs = 3,
            .slab_bytes = slab_bytes(s),
            .max_peers = SIM_WORKERS_MAX,
            .transfer_ns = 400 * SIM_MS,
            .beat_ns = 100 * SIM_MS,
            .peer_timeout_ns = 500 * SIM_MS,
        };
        st = td_prefill_create(&o, &w->p, &err);
    } else {
        const struct td_decode_options o = {
            .epoch = w->epoch,
            .numerics_id = 1,
            .layout = &s->layout,
            .split = sim_split(s, w),
            .pages = s->o.pages,
            .slots = s->o.slots,
            .max_context = MAX_CONTEXT,
            .reserve_new = s->o.reserve_new,
            .max_tokens = DECODE_TOKENS,
            .eos = SIM_EOS,
            .max_peers = s->o.prefills + 1,
            .landing_slabs = LANDING,
            .slab_bytes = slab_bytes(s),
            .lease_ns = 600 * SIM_MS,
            .beat_ns = 100 * SIM_MS,
            .peer_timeout_ns = 500 * SIM_MS,
        };
        st = td_decode_create(&o, &w->d, &err);
    }
    if (st != TD_OK) sim_broken(s, "%s: %s", w->name, err.text);
}

void sim_worker_start(struct sim *s, struct sim_worker *w) {
    w->alive = true;
    w->life++;
    w->epoch = ++s->next_epoch * 0x10001;
    w->frozen_until = w->hung_until = 0;
    w->deaf = false;
    w->number = 0;
    w->timer_at = UINT64_MAX;
    w->my_link = 0;
    w->stepping = false;
    memset(w->slab_readers, 0, sizeof w->slab_readers);
    memset(w->granted, 0, sizeof w->granted);
    memset(w->page, 0, sizeof w->page);
    memset(w->slot, 0, sizeof w->slot);
    memset(w->slab, 0, sizeof w->slab);
    make_machine(s, w);
    sim_dial(s, w, sim_below(s, 50 * SIM_MS));
    sim_at(s, s->now + BEAT_MS * SIM_MS, (int)w->index, on_beat);
}

void sim_worker_kill(struct sim *s, struct sim_worker *w) {
    if (!w->alive) return;
    sim_data_death(s, w);
    w->alive = false;
    w->life++; /* what was meant for it finds nobody */
    sim_link_break(s, w);
    w->my_link = 0;
    td_prefill_destroy(w->p);
    td_decode_destroy(w->d);
    w->p = NULL;
    w->d = NULL;
    while (w->ids != NULL) {
        struct sim_ids *next = w->ids->next;
        free(w->ids);
        w->ids = next;
    }
}

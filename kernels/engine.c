/* Looking into an engine, one step, one layer; the contract is in engine.h. */
#include "kernels/engine.h"

#include <string.h>

#include "kernels/engine_parts.h"
#include "kernels/mailbox.h"

/* ---- looking in ---- */

const struct td_kv_layout *td_engine_layout(const struct td_engine *e) {
    return &e->layout;
}

void *td_engine_pool(struct td_engine *e) {
    return e->rank[0].pool;
}

void *td_engine_slot(struct td_engine *e, uint32_t slot) {
    return e->rank[0].slots + e->layout.slot_bytes * slot;
}

td_status td_engine_copy_slot(struct td_engine *e, uint32_t from, uint32_t to,
                              struct td_error *err) {
    return td_kv_staging_copy_slot(&e->stagings, from, to, err);
}

td_status td_engine_copy_page(struct td_engine *e, uint32_t from, uint32_t to,
                              struct td_error *err) {
    return td_kv_staging_copy_page(&e->stagings, from, to, err);
}

static void greater(size_t *most, size_t v) {
    if (v > *most) *most = v;
}

void td_engine_memory(const struct td_engine *e, struct td_engine_memory *ret) {
    *ret = (struct td_engine_memory){
        .ranks = e->ranks,
        .pool = e->layout.pool_bytes,
        .slots = e->layout.slot_bytes * e->o.slots,
        .host = e->shared_bytes,
        .pinned = td_kv_staging_pinned(&e->rank[0].staging),
    };
    for (uint32_t i = 0; i < e->ranks; i++) {
        const struct td_rank *r = &e->rank[i];
        bool host = r->f.device.backend->host;
        size_t scratch = r->scratch_bytes - r->index_bytes + r->staging.device_bytes;
        if (host)
            scratch += r->host_bytes;
        else
            ret->host += r->host_bytes + r->staging.host_bytes;
        greater(&ret->weights, r->packed->bytes);
        greater(&ret->index_workspace, r->index_bytes);
        greater(&ret->scratch, scratch);
        if (!host && e->ranks > 1) greater(&ret->collectives, td_join_bytes(e->ranks));
        if (r->graphs.n > ret->graphs) ret->graphs = r->graphs.n;
        if (r->graphs.launches > ret->graph_launches) ret->graph_launches = r->graphs.launches;
    }
}

const char *td_engine_numerics(const struct td_engine *e, uint64_t *ret_id) {
    if (ret_id) *ret_id = e->numerics_id;
    return e->numerics;
}

/* ---- recorded steps ---- */

/* The step as ops are told; what the arrays hold is the device's business. */
static void set_batch(struct td_rank *r, uint32_t n, uint32_t runs, uint32_t max_pos) {
    struct td_forward *f = &r->f;
    f->batch = (struct td_op_batch){.kv = &r->engine->layout,
                                    .pool = r->pool,
                                    .split = r->engine->split,
                                    .rank = r->engine->split ? r->f.device.rank : 0,
                                    .row = r->at.rows,
                                    .run = r->at.runs,
                                    .n = n,
                                    .runs = runs,
                                    .max_pos = max_pos};
    f->ids = r->at.ids;
    f->want = r->at.want;
}

/* Queues a step of n rows, all wanted or none, at any position a sequence may have. */
static void queue_step(void *user, uint32_t n, bool wanted) {
    struct td_rank *r = user;
    const struct td_engine_options *o = &r->engine->o;
    set_batch(r, n, n < o->max_runs ? n : o->max_runs, o->max_context - 1);
    r->f.wanted = wanted ? n : 0;
    r->f.capture = wanted && r->engine->layout.csa_layers > 0;
    td_forward_step(&r->f);
}

td_status td_rank_record(struct td_rank *r, struct td_error *err) {
    const struct td_engine_options *o = &r->engine->o;
    uint32_t most = o->max_runs < o->max_tokens ? o->max_runs : o->max_tokens;
    if (!r->f.device.backend->record) return TD_OK;
    return td_decode_graphs_record(&r->graphs, &r->f.device, queue_step, r, o->eager ? 0 : most,
                                   o->max_tokens, err);
}

/* Runs of a step that outlive its caller. */
static const struct td_run *keep_runs(struct td_engine *e, const struct td_run *runs, uint32_t n) {
    int32_t *ids = e->run_ids;
    uint32_t *pages = e->run_pages;
    for (uint32_t i = 0; i < n; i++) {
        struct td_run *r = &e->runs[i];
        uint32_t n_pages = td_kv_pages(runs[i].pos + runs[i].n, e->split);
        *r = runs[i];
        r->ids = memcpy(ids, runs[i].ids, r->n * sizeof *ids);
        r->pages = memcpy(pages, runs[i].pages, n_pages * sizeof *pages);
        ids += r->n;
        pages += n_pages;
    }
    return e->runs;
}

/* A rank that a broken team has lost may still look at its last call. */
static td_status run_ranks(struct td_engine *e, td_team_fn *fn, const struct td_engine_call *call,
                           struct td_error *err) {
    if (!td_team_broken(e->team)) {
        e->call = *call;
        if (e->team && call->n_runs) e->call.runs = keep_runs(e, call->runs, call->n_runs);
    }
    return td_team_run(e->team, fn, e, err);
}

static td_status count_launches(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_rank *r = &e->rank[rank];
    struct td_device *d = &r->f.device;
    uint32_t launches;
    set_batch(r, 1, 1, e->o.max_context - 1);
    r->f.wanted = 1;
    r->f.capture = false;
    TD_TRY(d->backend->record(d, err));
    td_forward_layer(&r->f, e->call.layer);
    TD_TRY(d->backend->keep(d, NULL, &launches, err));
    if (rank == 0) e->call.launches = launches;
    return TD_OK;
}

td_status td_engine_launches(struct td_engine *e, uint32_t layer, uint32_t *ret,
                             struct td_error *err) {
    *ret = 0;
    if (!e->rank[0].f.device.backend->record) return TD_OK;
    const struct td_engine_call call = {.layer = layer};
    TD_TRY(run_ranks(e, count_launches, &call, err));
    *ret = e->call.launches;
    return TD_OK;
}

static void layer_done(const struct td_forward *f, uint32_t layer) {
    struct td_rank *r = f->layer_user;
    struct td_device *d = &r->f.device;
    if (r->watched.status == TD_OK)
        r->watched.status = d->backend->wait(d, TD_LANE_STEP, &r->watched);
    r->engine->o.layer_done(r->engine->o.layer_user, layer);
}

void td_rank_watch(struct td_rank *r) {
    r->f.layer_user = r;
    if (r->engine->o.layer_done && r->f.device.rank == 0) r->f.layer_done = layer_done;
}

/* ---- a step ---- */

static td_status check_run(struct td_engine *e, const struct td_run *r, uint32_t i,
                           struct td_error *err) {
    if (r->slot >= e->o.slots || e->slot_used[r->slot])
        return td_fail(err, TD_INVALID, "run %u: slot: expected an unused one below %u, found %u",
                       i, e->o.slots, r->slot);
    e->slot_used[r->slot] = 1;
    if (r->n == 0 || r->n > e->o.max_context || r->pos > e->o.max_context - r->n)
        return td_fail(err, TD_INVALID,
                       "run %u: positions: expected 1 or more inside a context "
                       "of %u, found %u from %u",
                       i, e->o.max_context, r->n, r->pos);
    uint32_t pages = td_kv_pages(r->pos + r->n, e->split);
    for (uint32_t p = 0; p < pages; p++)
        if (r->pages[p] >= e->o.pages)
            return td_fail(err, TD_INVALID, "run %u: page %u: expected an id below %u, found %u", i,
                           p, e->o.pages, r->pages[p]);
    for (uint32_t t = 0; t < r->n; t++)
        if (r->ids[t] < 0 || (uint32_t)r->ids[t] >= e->model->config.vocab)
            return td_fail(err, TD_INVALID,
                           "run %u: token at position %u: expected an id below "
                           "%u, found %d",
                           i, r->pos + t, e->model->config.vocab, r->ids[t]);
    return TD_OK;
}

static td_status check_step(struct td_engine *e, const struct td_run *runs, uint32_t n_runs,
                            const struct td_capture *capture, struct td_error *err) {
    if (n_runs == 0 || n_runs > e->o.max_runs)
        return td_fail(err, TD_INVALID, "step: expected 1 to %u runs, found %u", e->o.max_runs,
                       n_runs);
    memset(e->slot_used, 0, e->o.slots);
    uint64_t total = 0;
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < n_runs; i++) {
        TD_TRY(check_run(e, &runs[i], i, err));
        total += runs[i].n;
        wanted += runs[i].want_logits;
    }
    if (total > e->o.max_tokens)
        return td_fail(err, TD_INVALID, "step: expected at most %u tokens, found %llu",
                       e->o.max_tokens, (unsigned long long)total);
    if (capture && (capture->runs < wanted || capture->topk != e->o.index_topk ||
                    capture->csa_layers != e->layout.csa_layers))
        return td_fail(err, TD_INVALID,
                       "capture: expected room for %u runs, %u layers and top-k "
                       "%u, found %u, %u and %u",
                       wanted, e->layout.csa_layers, e->o.index_topk, capture->runs,
                       capture->csa_layers, capture->topk);
    return TD_OK;
}

/* Runs beyond n_runs, up to `rows`, have no sequence: they are position 0 of a slot that nobody
 * has, where no entry is visible and none is closed, so they touch no page. */
static struct td_run run_or_idle(const struct td_run *runs, uint32_t n_runs, uint32_t i) {
    static const int32_t first_id;
    static const uint32_t first_page;
    const struct td_run idle = {
        .n = 1, .ids = &first_id, .pages = &first_page, .want_logits = true};
    return i < n_runs ? runs[i] : idle;
}

/* The runs as rows, ids side by side; then to the device. `all` - n_runs idle ones behind them. */
static void fill_batch(struct td_rank *rank, const struct td_run *runs, uint32_t n_runs,
                       uint32_t all) {
    struct td_forward *f = &rank->f;
    struct td_device *d = &f->device;
    const struct step_arrays *in = &rank->in, *at = &rank->at;
    size_t slot_bytes = rank->engine->layout.slot_bytes;
    uint32_t n = 0, max_pos = 0;
    size_t used = 0;
    f->wanted = 0;
    for (uint32_t i = 0; i < all; i++) {
        const struct td_run r = run_or_idle(runs, n_runs, i);
        uint32_t pages = td_kv_pages(r.pos + r.n, rank->engine->split);
        in->runs[i] = (struct td_op_run){.first = n,
                                         .n = r.n,
                                         .pos = r.pos,
                                         .pages = at->pages + used,
                                         .slot = i < n_runs ? rank->slots + slot_bytes * r.slot
                                                            : rank->idle_slot};
        memcpy(in->pages + used, r.pages, pages * sizeof *in->pages);
        used += pages;
        if (r.pos + r.n - 1 > max_pos) max_pos = r.pos + r.n - 1;
        for (uint32_t t = 0; t < r.n; t++, n++) {
            in->rows[n] = (struct td_op_row){i, r.pos + t};
            in->ids[n] = r.ids[t];
        }
        if (r.want_logits) in->want[f->wanted++] = n - 1;
    }
    td_upload(d, at->runs, in->runs, all * sizeof *in->runs);
    td_upload(d, at->rows, in->rows, n * sizeof *in->rows);
    td_upload(d, at->ids, in->ids, n * sizeof *in->ids);
    td_upload(d, at->want, in->want, f->wanted * sizeof *in->want);
    td_upload(d, at->pages, in->pages, used * sizeof *in->pages);
    set_batch(rank, n, all, max_pos);
}

/* What the step gave for its first `wanted` rows to where the caller reads it: a rank's tokens
 * beside those of the others, and what the indexer chose, which all ranks know, from the first. */
static void fetch(struct td_rank *r, uint32_t wanted) {
    struct td_engine *e = r->engine;
    struct td_forward *f = &r->f;
    struct td_device *d = &f->device;
    const struct td_share *own = &r->packed->share;
    size_t unit = sizeof *e->logits;
    struct td_copy logits = {.to = e->logits + own->token,
                             .from = f->s.logits,
                             .width = own->tokens * unit,
                             .rows = wanted,
                             .to_pitch = e->model->config.vocab * unit,
                             .from_pitch = f->logits_stride * unit};
    if (e->call.want_logits && wanted) d->backend->download(d, TD_LANE_STEP, &logits);
    if (e->call.want_capture && d->rank == 0)
        td_download(d, e->captured, f->s.capture,
                    (size_t)e->layout.csa_layers * f->wanted * e->o.index_topk *
                        sizeof *e->captured);
}

/* A rank of a broken team has garbage; the team knows why. */
static td_status whole(const struct td_engine *e, struct td_error *err) {
    if (!td_team_broken(e->team)) return TD_OK;
    return td_fail(err, TD_IO, "another rank has failed");
}

/* A step of one token of every sequence, each with its logits. */
static bool is_decode(const struct td_run *runs, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (runs[i].n != 1 || !runs[i].want_logits) return false;
    return true;
}

static td_status step_rank(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_rank *r = &e->rank[rank];
    struct td_device *d = &r->f.device;
    const struct td_engine_call *c = &e->call;
    const struct td_decode_graph *g =
        is_decode(c->runs, c->n_runs) ? td_decode_graph_for(&r->graphs, c->n_runs) : NULL;
    fill_batch(r, c->runs, c->n_runs, g ? g->rows : c->n_runs);
    uint32_t idle = g ? g->rows - c->n_runs : 0;
    r->watched.status = TD_OK;
    if (g) {
        (void)td_team_at(e->team, rank, "a recorded step", TD_TEAM_NO_LAYER);
        d->backend->replay(d, g->recording);
    } else {
        r->f.capture = c->want_capture;
        td_forward_step(&r->f);
    }
    TD_TRY(whole(e, err));
    fetch(r, r->f.wanted - idle);
    TD_TRY(d->backend->wait(d, TD_LANE_STEP, err));
    if (r->watched.status == TD_OK) return whole(e, err);
    return td_fail(err, r->watched.status, "%s", r->watched.text);
}

td_status td_engine_step(struct td_engine *e, const struct td_run *runs, uint32_t n_runs,
                         const float **ret_logits, struct td_capture *capture,
                         struct td_error *err) {
    const struct td_forward *f = &e->rank[0].f;
    uint32_t layers = e->layout.csa_layers, topk = e->o.index_topk, wanted = 0;
    TD_TRY(check_step(e, runs, n_runs, capture, err));
    const struct td_engine_call call = {
        .runs = runs, .n_runs = n_runs, .want_logits = ret_logits, .want_capture = capture};
    TD_TRY(run_ranks(e, step_rank, &call, err));
    for (uint32_t i = 0; i < n_runs; i++)
        wanted += runs[i].want_logits;
    if (ret_logits) *ret_logits = e->logits;
    for (uint32_t i = 0; capture && i < wanted; i++)
        for (uint32_t l = 0; l < layers; l++)
            memcpy(capture->entries + ((size_t)i * layers + l) * topk,
                   e->captured + ((size_t)l * f->wanted + i) * topk, topk * sizeof *e->captured);
    return TD_OK;
}

/* ---- wire blocks ---- */

td_status td_engine_pin(struct td_engine *e, void *memory, size_t bytes, struct td_error *err) {
    return td_kv_staging_pin(&e->stagings, memory, bytes, err);
}

void td_engine_unpin(struct td_engine *e, const void *memory) {
    /* Beside a rank that hangs a driver may wait for it; what is pinned ends with the process. */
    if (e && !td_team_lost(e->team)) td_kv_staging_unpin(&e->stagings, memory);
}

/* Who has block `index`; where all ranks have all, in turn, so that their links share the work. */
static struct td_kv_staging *packer(struct td_engine *e, uint32_t index) {
    return e->stagings.rank[e->split ? td_kv_page_rank(index, e->split) : index % e->ranks];
}
/* Who is to have page block `index`. */
static struct td_kv_stagings takers(struct td_engine *e, uint32_t index) {
    if (!e->split) return e->stagings;
    return (struct td_kv_stagings){1, {packer(e, index)}};
}

td_status td_engine_pack_page(struct td_engine *e, uint32_t page, struct td_kv_ticket ticket,
                              uint32_t index, uint32_t tokens, void *dst, size_t cap,
                              size_t *ret_len, struct td_kv_block_header *ret_header,
                              struct td_error *err) {
    return td_kv_staging_pack(packer(e, index), (struct td_kv_place){TD_KV_PAGE_BLOCK, page},
                              ticket, index, tokens, dst, cap, ret_len, ret_header, err);
}

td_status td_engine_pack_slot(struct td_engine *e, uint32_t slot, struct td_kv_ticket ticket,
                              uint32_t n, void *dst, size_t cap, size_t *ret_len,
                              struct td_kv_block_header *ret_header, struct td_error *err) {
    uint32_t index = td_kv_page_blocks(n);
    return td_kv_staging_pack(packer(e, index), (struct td_kv_place){TD_KV_SLOT_BLOCK, slot},
                              ticket, index, n, dst, cap, ret_len, ret_header, err);
}

td_status td_engine_unpack_page(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                uint32_t page, struct td_kv_block_header *ret_header,
                                struct td_error *err) {
    const struct td_kv_stagings to = takers(e, index);
    return td_kv_staging_unpack(&to, block, len, ticket, n, index,
                                (struct td_kv_place){TD_KV_PAGE_BLOCK, page}, ret_header, err);
}

td_status td_engine_unpack_slot(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t slot,
                                struct td_kv_block_header *ret_header, struct td_error *err) {
    return td_kv_staging_unpack(&e->stagings, block, len, ticket, n, td_kv_page_blocks(n),
                                (struct td_kv_place){TD_KV_SLOT_BLOCK, slot}, ret_header, err);
}

/* ---- one layer ---- */

static td_status tap_rank(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_rank *r = &e->rank[rank];
    const struct td_forward_buffers *s = &r->f.s;
    const struct td_layer_tap *tap = e->call.tap;
    struct td_device *d = &r->f.device;
    size_t hidden = e->model->config.hidden, streams = TD_HC_STREAMS * hidden;
    uint32_t pos = e->call.pos, n = e->call.runs->n;
    fill_batch(r, e->call.runs, 1, 1);
    r->f.capture = false;
    td_upload(d, s->x, tap->x_in + pos * streams, n * streams * sizeof *s->x);
    td_forward_angles(&r->f);
    td_forward_layer(&r->f, tap->layer);
    TD_TRY(whole(e, err));
    if (tap->attn_out && rank == 0)
        td_download(d, tap->attn_out + pos * hidden, s->attn_out, n * hidden * sizeof *s->attn_out);
    if (tap->ffn_out && rank == 0)
        td_download(d, tap->ffn_out + pos * hidden, s->ffn_out, n * hidden * sizeof *s->ffn_out);
    if (tap->x_out && rank == 0)
        td_download(d, tap->x_out + pos * streams, s->x, n * streams * sizeof *s->x);
    if (tap->selected && rank == 0 && r->packed->layer[tap->layer].kind == TD_LAYER_CSA)
        td_download(d, tap->selected + (size_t)pos * e->o.index_topk, s->selected,
                    (size_t)n * e->o.index_topk * sizeof *s->selected);
    TD_TRY(d->backend->wait(d, TD_LANE_STEP, err));
    return whole(e, err);
}

static td_status tap_part(struct td_engine *e, const struct td_layer_tap *tap, uint32_t pos,
                          uint32_t n, struct td_error *err) {
    struct td_run run = {
        .slot = 0, .pos = pos, .n = n, .ids = tap->ids + pos, .pages = e->tap_pages};
    const struct td_engine_call call = {.runs = &run, .n_runs = 1, .tap = tap, .pos = pos};
    return run_ranks(e, tap_rank, &call, err);
}

td_status td_engine_layer(struct td_engine *e, const struct td_layer_tap *tap,
                          struct td_error *err) {
    if (tap->layer >= e->model->config.layers)
        return td_fail(err, TD_INVALID, "layer: expected one below %u, found %u",
                       e->model->config.layers, tap->layer);
    struct td_run whole = {.n = tap->n, .ids = tap->ids, .pages = e->tap_pages};
    memset(e->slot_used, 0, e->o.slots);
    TD_TRY(check_run(e, &whole, 0, err));
    for (uint32_t pos = 0; pos < tap->n; pos += e->o.max_tokens)
        TD_TRY(tap_part(e, tap, pos,
                        tap->n - pos < e->o.max_tokens ? tap->n - pos : e->o.max_tokens, err));
    return TD_OK;
}

/* Looking into an engine, one step, one layer; the contract is in engine.h. */
#include "kernels/engine.h"

#include <string.h>

#include "kernels/engine_parts.h"

/* ---- looking in ---- */

const struct td_kv_layout *td_engine_layout(const struct td_engine *e) {
    return &e->layout;
}

void *td_engine_pool(struct td_engine *e) {
    return e->pool;
}

void *td_engine_slot(struct td_engine *e, uint32_t slot) {
    return e->slots + e->layout.slot_bytes * slot;
}

td_status td_engine_copy_slot(struct td_engine *e, uint32_t from, uint32_t to,
                              struct td_error *err) {
    return td_kv_staging_copy_slot(&e->staging, from, to, err);
}

td_status td_engine_copy_page(struct td_engine *e, uint32_t from, uint32_t to,
                              struct td_error *err) {
    return td_kv_staging_copy_page(&e->staging, from, to, err);
}

void td_engine_memory(const struct td_engine *e, struct td_engine_memory *ret) {
    *ret = (struct td_engine_memory){
        .weights = e->packed->bytes,
        .pool = e->layout.pool_bytes,
        .slots = e->layout.slot_bytes * e->o.slots,
        .index_workspace = e->index_bytes,
        .scratch = e->scratch_bytes - e->index_bytes + e->staging.device_bytes,
        .host = e->host_bytes + e->staging.host_bytes,
        .graphs = e->graphs.n,
        .graph_launches = e->graphs.launches,
    };
    if (!e->f.device.backend->host) return;
    ret->scratch += ret->host;
    ret->host = 0;
}

const char *td_engine_numerics(const struct td_engine *e, uint64_t *ret_id) {
    if (ret_id) *ret_id = e->numerics_id;
    return e->numerics;
}

/* ---- recorded steps ---- */

/* The step as ops are told; what the arrays hold is the device's business. */
static void set_batch(struct td_engine *e, uint32_t n, uint32_t runs, uint32_t max_pos) {
    struct td_forward *f = &e->f;
    f->batch = (struct td_op_batch){.kv = &e->layout,
                                    .pool = e->pool,
                                    .row = e->at.rows,
                                    .run = e->at.runs,
                                    .n = n,
                                    .runs = runs,
                                    .max_pos = max_pos};
    f->ids = e->at.ids;
    f->want = e->at.want;
}

/* Queues a step of n rows, all wanted or none, at any position a sequence may have. */
static void queue_step(void *user, uint32_t n, bool wanted) {
    struct td_engine *e = user;
    set_batch(e, n, n < e->o.max_runs ? n : e->o.max_runs, e->o.max_context - 1);
    e->f.wanted = wanted ? n : 0;
    e->f.capture = wanted && e->layout.csa_layers > 0;
    td_forward_step(&e->f);
}

td_status td_engine_record(struct td_engine *e, struct td_error *err) {
    uint32_t most = e->o.max_runs < e->o.max_tokens ? e->o.max_runs : e->o.max_tokens;
    if (!e->f.device.backend->record) return TD_OK;
    return td_decode_graphs_record(&e->graphs, &e->f.device, queue_step, e, e->o.eager ? 0 : most,
                                   e->o.max_tokens, err);
}

td_status td_engine_launches(struct td_engine *e, uint32_t layer, uint32_t *ret,
                             struct td_error *err) {
    struct td_device *d = &e->f.device;
    *ret = 0;
    if (!d->backend->record) return TD_OK;
    set_batch(e, 1, 1, e->o.max_context - 1);
    e->f.wanted = 1;
    e->f.capture = false;
    TD_TRY(d->backend->record(d, err));
    td_forward_layer(&e->f, layer);
    return d->backend->keep(d, NULL, ret, err);
}

static void layer_done(const struct td_forward *f, uint32_t layer) {
    struct td_engine *e = f->layer_user;
    struct td_device *d = &e->f.device;
    if (e->watched.status == TD_OK)
        e->watched.status = d->backend->wait(d, TD_LANE_STEP, &e->watched);
    e->o.layer_done(e->o.layer_user, layer);
}

void td_engine_watch(struct td_engine *e) {
    e->f.layer_user = e;
    if (e->o.layer_done) e->f.layer_done = layer_done;
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
    uint32_t pages = (r->pos + r->n + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS;
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
static void fill_batch(struct td_engine *e, const struct td_run *runs, uint32_t n_runs,
                       uint32_t all) {
    struct td_forward *f = &e->f;
    struct td_device *d = &f->device;
    const struct step_arrays *in = &e->in, *at = &e->at;
    uint32_t n = 0, max_pos = 0;
    size_t used = 0;
    f->wanted = 0;
    for (uint32_t i = 0; i < all; i++) {
        const struct td_run r = run_or_idle(runs, n_runs, i);
        uint32_t pages = (r.pos + r.n + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS;
        in->runs[i] =
            (struct td_op_run){.first = n,
                               .n = r.n,
                               .pos = r.pos,
                               .pages = at->pages + used,
                               .slot = i < n_runs ? td_engine_slot(e, r.slot) : e->idle_slot};
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
    set_batch(e, n, all, max_pos);
}

/* What the step gave for its first `wanted` rows, where the caller reads it. */
static td_status fetch(struct td_engine *e, uint32_t wanted, const float **ret_logits,
                       struct td_capture *capture, struct td_error *err) {
    struct td_forward *f = &e->f;
    struct td_device *d = &f->device;
    uint32_t layers = e->layout.csa_layers, topk = e->o.index_topk;
    float *logits = d->backend->host ? f->s.logits : e->logits;
    int32_t *chosen = d->backend->host ? f->s.capture : e->captured;
    if (ret_logits)
        td_download(d, logits, f->s.logits,
                    (size_t)wanted * e->model->config.vocab * sizeof *logits);
    if (capture)
        td_download(d, chosen, f->s.capture, (size_t)layers * f->wanted * topk * sizeof *chosen);
    TD_TRY(d->backend->wait(d, TD_LANE_STEP, err));
    if (ret_logits) *ret_logits = logits;
    for (uint32_t i = 0; capture && i < wanted; i++)
        for (uint32_t l = 0; l < layers; l++)
            memcpy(capture->entries + ((size_t)i * layers + l) * topk,
                   chosen + ((size_t)l * f->wanted + i) * topk, topk * sizeof *chosen);
    return TD_OK;
}

/* A step of one token of every sequence, each with its logits. */
static bool is_decode(const struct td_run *runs, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (runs[i].n != 1 || !runs[i].want_logits) return false;
    return true;
}

td_status td_engine_step(struct td_engine *e, const struct td_run *runs, uint32_t n_runs,
                         const float **ret_logits, struct td_capture *capture,
                         struct td_error *err) {
    TD_TRY(check_step(e, runs, n_runs, capture, err));
    const struct td_decode_graph *g =
        is_decode(runs, n_runs) ? td_decode_graph_for(&e->graphs, n_runs) : NULL;
    fill_batch(e, runs, n_runs, g ? g->rows : n_runs);
    uint32_t idle = g ? g->rows - n_runs : 0;
    e->watched.status = TD_OK;
    if (g) {
        e->f.device.backend->replay(&e->f.device, g->recording);
    } else {
        e->f.capture = capture != NULL;
        td_forward_step(&e->f);
    }
    TD_TRY(fetch(e, e->f.wanted - idle, ret_logits, capture, err));
    if (e->watched.status != TD_OK) return td_fail(err, e->watched.status, "%s", e->watched.text);
    return TD_OK;
}

/* ---- wire blocks ---- */

td_status td_engine_pack_page(struct td_engine *e, uint32_t page, struct td_kv_ticket ticket,
                              uint32_t index, uint32_t tokens, void *dst, size_t cap,
                              size_t *ret_len, struct td_kv_block_header *ret_header,
                              struct td_error *err) {
    return td_kv_staging_pack(&e->staging, (struct td_kv_place){TD_KV_PAGE_BLOCK, page}, ticket,
                              index, tokens, dst, cap, ret_len, ret_header, err);
}

td_status td_engine_pack_slot(struct td_engine *e, uint32_t slot, struct td_kv_ticket ticket,
                              uint32_t n, void *dst, size_t cap, size_t *ret_len,
                              struct td_kv_block_header *ret_header, struct td_error *err) {
    return td_kv_staging_pack(&e->staging, (struct td_kv_place){TD_KV_SLOT_BLOCK, slot}, ticket,
                              td_kv_page_blocks(n), n, dst, cap, ret_len, ret_header, err);
}

td_status td_engine_unpack_page(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                uint32_t page, struct td_kv_block_header *ret_header,
                                struct td_error *err) {
    return td_kv_staging_unpack(&e->staging, block, len, ticket, n, index,
                                (struct td_kv_place){TD_KV_PAGE_BLOCK, page}, ret_header, err);
}

td_status td_engine_unpack_slot(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t slot,
                                struct td_kv_block_header *ret_header, struct td_error *err) {
    return td_kv_staging_unpack(&e->staging, block, len, ticket, n, td_kv_page_blocks(n),
                                (struct td_kv_place){TD_KV_SLOT_BLOCK, slot}, ret_header, err);
}

/* ---- one layer ---- */

static td_status tap_part(struct td_engine *e, const struct td_layer_tap *tap, uint32_t pos,
                          uint32_t n, struct td_error *err) {
    const struct td_forward_buffers *s = &e->f.s;
    struct td_device *d = &e->f.device;
    size_t hidden = e->model->config.hidden, streams = TD_HC_STREAMS * hidden;
    struct td_run run = {
        .slot = 0, .pos = pos, .n = n, .ids = tap->ids + pos, .pages = e->tap_pages};
    fill_batch(e, &run, 1, 1);
    e->f.capture = false;
    td_upload(d, s->x, tap->x_in + pos * streams, n * streams * sizeof *s->x);
    td_forward_angles(&e->f);
    td_forward_layer(&e->f, tap->layer);
    if (tap->attn_out)
        td_download(d, tap->attn_out + pos * hidden, s->attn_out, n * hidden * sizeof *s->attn_out);
    if (tap->ffn_out)
        td_download(d, tap->ffn_out + pos * hidden, s->ffn_out, n * hidden * sizeof *s->ffn_out);
    if (tap->x_out) td_download(d, tap->x_out + pos * streams, s->x, n * streams * sizeof *s->x);
    if (tap->selected && e->packed->layer[tap->layer].kind == TD_LAYER_CSA)
        td_download(d, tap->selected + (size_t)pos * e->o.index_topk, s->selected,
                    (size_t)n * e->o.index_topk * sizeof *s->selected);
    return d->backend->wait(d, TD_LANE_STEP, err);
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

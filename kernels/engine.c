/* Engine creation, one step, one layer; the contract is in engine.h. */
#include "kernels/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/forward.h"
#include "kernels/kv_staging.h"

/* What a step is told, in one order twice: as the host fills it, and where the device reads it. On
 * the CPU both are the same memory. */
struct step_arrays {
    struct td_op_row *rows; /* [max_tokens] */
    struct td_op_run *runs; /* [max_runs] */
    int32_t *ids;           /* [max_tokens] */
    uint32_t *want;         /* [max_runs] */
    uint32_t *pages;        /* [max_runs * pages of a context], run after run */
};

struct td_engine {
    const struct td_model *model;
    struct td_engine_options o;
    struct td_kv_layout layout;
    struct td_packed_model *packed;
    struct td_threads *threads;
    uint8_t *pool, *slots, *own_pool, *own_slots;
    void *scratch, *host; /* the device's; the host's */
    size_t scratch_bytes, host_bytes, index_bytes;
    struct td_ops ops;
    struct td_forward f;       /* with the device */
    struct step_arrays in, at; /* the host's, the device's */
    struct td_kv_staging staging;
    float *logits;       /* [max_runs, vocab] of the host */
    int32_t *captured;   /* [csa_layers, max_runs, topk] of the host */
    uint32_t *tap_pages; /* [pages of a context] identity, for td_engine_layer */
    uint8_t *slot_used;  /* [slots] of the step being checked */
    char numerics[512];
    uint64_t numerics_id;
};

/* ---- creation ---- */

static td_status range(struct td_error *err, const char *what, uint64_t v, uint64_t lo,
                       uint64_t hi) {
    if (v >= lo && v <= hi) return TD_OK;
    return td_fail(err, TD_CONFIG, "engine: %s: expected %llu to %llu, found %llu", what,
                   (unsigned long long)lo, (unsigned long long)hi, (unsigned long long)v);
}

static td_status multiple(struct td_error *err, const char *what, uint32_t v, uint32_t of) {
    if (v != 0 && v % of == 0) return TD_OK;
    return td_fail(err, TD_UNSUPPORTED, "engine: %s: expected a multiple of %u, found %u", what, of,
                   v);
}

static td_status check_options(const struct td_model_config *m, const struct td_engine_options *o,
                               struct td_error *err) {
    TD_TRY(range(err, "index_topk", o->index_topk, 1, TD_MAX_INDEX_TOPK));
    TD_TRY(range(err, "max_context", o->max_context, 1, m->max_positions));
    TD_TRY(range(err, "pages", o->pages, 1, 1u << 24));
    TD_TRY(range(err, "slots", o->slots, 1, 1u << 20));
    TD_TRY(range(err, "max_runs", o->max_runs, 1, o->slots));
    TD_TRY(range(err, "max_tokens", o->max_tokens, 1, 1u << 16));
    TD_TRY(range(err, "threads", o->threads, 1, TD_MAX_THREADS));
    /* What the kernels' fixed arrays and whole vectors need. */
    TD_TRY(range(err, "heads", m->heads, 1, TD_MAX_HEADS));
    TD_TRY(range(err, "experts", m->experts, 1, TD_MAX_EXPERTS));
    TD_TRY(range(err, "experts per token", m->experts_per_token, 1, TD_MAX_EXPERTS_PER_TOKEN));
    TD_TRY(range(err, "output groups", m->o_groups, 1, m->heads));
    TD_TRY(multiple(err, "hidden size", m->hidden, 16));
    TD_TRY(multiple(err, "q_lora_rank", m->q_lora_rank, 16));
    return multiple(err, "expert inner size", m->expert_inner, 8);
}

static td_status init_layout(struct td_engine *e, struct td_error *err) {
    const struct td_model_config *m = &e->model->config;
    static const uint8_t ratio_of[] = {
        [TD_LAYER_SWA] = 0, [TD_LAYER_CSA] = TD_CSA_RATIO, [TD_LAYER_HCA] = TD_HCA_RATIO};
    uint8_t ratio[TD_MAX_LAYERS];
    for (uint32_t l = 0; l < m->layers; l++)
        ratio[l] = ratio_of[m->kind[l]];
    TD_TRY(td_kv_layout_init(&e->layout, m->layers, ratio, e->o.row_dtype, e->o.key_dtype,
                             e->o.pages, e->model->fingerprint, err));
    if (e->layout.csa_layers == 0) return TD_OK;
    return range(err, "index heads", m->index_heads, 1, TD_MAX_HEADS);
}

static uint32_t context_pages(const struct td_engine *e) {
    return (e->o.max_context + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS;
}

static void plan_arrays(const struct td_engine *e, struct td_bump *b, struct step_arrays *a) {
    a->rows = td_bump_take(b, e->o.max_tokens * sizeof *a->rows);
    a->runs = td_bump_take(b, e->o.max_runs * sizeof *a->runs);
    a->ids = td_bump_take(b, e->o.max_tokens * sizeof *a->ids);
    a->want = td_bump_take(b, e->o.max_runs * sizeof *a->want);
    a->pages = td_bump_take(b, (size_t)e->o.max_runs * context_pages(e) * sizeof *a->pages);
}

static void plan_host(struct td_engine *e, struct td_bump *b) {
    const struct td_model_config *m = &e->model->config;
    size_t chosen = (size_t)e->layout.csa_layers * e->o.max_runs * e->o.index_topk;
    plan_arrays(e, b, &e->in);
    e->tap_pages = td_bump_take(b, context_pages(e) * sizeof *e->tap_pages);
    e->slot_used = td_bump_take(b, e->o.slots);
    for (uint32_t i = 0; b->base && i < context_pages(e); i++)
        e->tap_pages[i] = i;
    if (e->f.device.backend->host) return; /* read where they are */
    e->logits = td_bump_take(b, (size_t)e->o.max_runs * m->vocab * sizeof *e->logits);
    e->captured = td_bump_take(b, chosen * sizeof *e->captured);
}

static void plan_scratch(struct td_engine *e, struct td_bump *b) {
    const struct td_model_config *m = &e->model->config;
    struct td_device *d = &e->f.device;
    uint32_t entries = e->o.max_context / TD_HCA_RATIO;
    if (e->o.index_topk > entries) entries = e->o.index_topk;
    if (d->backend->host) {
        d->threads = e->threads;
        d->scratch_stride = td_op_scratch(m->heads, m->index_heads, entries);
        d->scratch = td_bump_take(b, d->scratch_stride * e->o.threads);
    }
    e->index_bytes =
        e->layout.csa_layers == 0
            ? 0
            : d->backend->index_workspace(m->index_heads, e->o.index_topk, e->o.max_tokens);
    e->f.s.index = td_bump_take(b, e->index_bytes);
    td_forward_plan(&e->f, b, e->o.max_tokens, e->o.max_runs, &e->layout);
    if (d->backend->host)
        e->at = e->in;
    else
        plan_arrays(e, b, &e->at);
}

/* Everything that will be taken, counted. */
static td_status plan_memory(struct td_engine *e, struct td_error *err) {
    struct td_bump host = {0}, scratch = {0};
    TD_TRY(init_layout(e, err));
    TD_TRY(td_packed_plan(e->model, &e->f.device, &e->packed, err));
    e->f.model = e->packed;
    plan_host(e, &host);
    e->host_bytes = host.used;
    plan_scratch(e, &scratch);
    e->scratch_bytes = scratch.used;
    return td_kv_staging_plan(&e->staging, &e->f.device, &e->layout, e->model->fingerprint, err);
}

static td_status take_memory(struct td_engine *e, struct td_error *err) {
    struct td_device *d = &e->f.device;
    struct td_bump bump;
    void *own;
    TD_TRY(d->backend->take_host(d, e->host_bytes, "step arrays", &e->host, err));
    bump = (struct td_bump){e->host, 0};
    plan_host(e, &bump);
    TD_TRY(d->backend->take(d, e->scratch_bytes, "scratch", &e->scratch, err));
    bump = (struct td_bump){e->scratch, 0};
    plan_scratch(e, &bump);
    if (!e->pool) {
        TD_TRY(d->backend->take(d, e->layout.pool_bytes, "KV pool", &own, err));
        e->pool = e->own_pool = own;
    }
    if (!e->slots) {
        TD_TRY(d->backend->take(d, e->layout.slot_bytes * e->o.slots, "slots", &own, err));
        e->slots = e->own_slots = own;
    }
    TD_TRY(td_kv_staging_take(&e->staging, e->pool, e->slots, err));
    d->sealed = true;
    /* Memory is zeroed in the step lane; the other lane may write to it from now on. */
    return d->backend->wait(d, TD_LANE_STEP, err);
}

/* FNV-1a. */
static uint64_t hash_text(const char *s) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *s; s++)
        h = (h ^ (uint8_t)*s) * 0x100000001b3u;
    return h;
}

static void name_numerics(struct td_engine *e) {
    static const char *row[] = {
        [TD_KV_ROW_BF16] = "bf16", [TD_KV_ROW_FP32] = "fp32", [TD_KV_ROW_FP8] = "fp8"};
    static const char *key[] = {[TD_KV_KEY_BF16] = "bf16",
                                [TD_KV_KEY_FP32] = "fp32",
                                [TD_KV_KEY_FP8] = "fp8",
                                [TD_KV_KEY_FP4] = "fp4"};
    char device[160];
    e->f.device.backend->describe(&e->f.device, device, sizeof device);
    snprintf(e->numerics, sizeof e->numerics,
             "%s; activations fp32%s; rows %s; keys %s%s; scores %s; topk %u; shards %u; %s",
             e->o.ref ? "ref" : "plain", e->o.nvfp4_activations ? ", nvfp4 in experts" : "",
             row[e->o.row_dtype], key[e->o.key_dtype], e->o.index_sim4 ? " after sim4" : "",
             e->o.score_bf16 ? "bf16" : "fp32", e->o.index_topk, e->model->config.o_groups, device);
    /* On the CPU forced ops have the same bits, so there they are shown but not hashed. */
    if (e->f.device.backend->host) e->numerics_id = hash_text(e->numerics);
    if (e->o.force_ref) {
        char forced[256];
        size_t used = strlen(e->numerics);
        td_ops_names(e->o.force_ref, forced, sizeof forced);
        snprintf(e->numerics + used, sizeof e->numerics - used, "; reference ops %s", forced);
    }
    if (!e->f.device.backend->host) e->numerics_id = hash_text(e->numerics);
}

static td_status open_device(struct td_engine *e, struct td_error *err) {
    const struct td_backend *b = e->o.backend ? e->o.backend : &td_backend_cpu;
    struct td_device *d = &e->f.device;
    TD_TRY(b->open(d, e->o.device, err));
    if (e->o.ops && !b->host)
        return td_fail(err, TD_INVALID, "engine: a table of host ops and a device of kind %s",
                       b->name);
    if (e->o.ops)
        e->ops = *e->o.ops;
    else
        TD_TRY(b->ops(d, e->o.force_ref, &e->ops, err));
    return b->host ? td_threads_create(e->o.threads, &e->threads, err) : TD_OK;
}

static td_status new_engine(const struct td_model *model, const struct td_engine_options *o,
                            struct td_engine **ret, struct td_error *err) {
    TD_TRY(check_options(&model->config, o, err));
    struct td_engine *e = calloc(1, sizeof *e);
    if (!e) return td_fail(err, TD_NO_MEMORY, "no memory for an engine");
    e->model = model;
    e->o = *o;
    e->pool = o->pool_memory;
    e->slots = o->slot_memory;
    e->f.ops = &e->ops;
    e->f.topk = o->index_topk;
    e->f.ref = o->ref;
    e->f.nvfp4 = o->nvfp4_activations;
    e->f.sim4 = o->index_sim4;
    e->f.score_bf16 = o->score_bf16;
    *ret = e;
    return TD_OK;
}

td_status td_engine_create(const struct td_model *model, const struct td_engine_options *o,
                           struct td_engine **ret, struct td_error *err) {
    struct td_engine *e = NULL;
    td_status st;
    if (o->nvfp4_activations) TD_TRY(td_model_nvfp4_inputs(model, err));
    TD_TRY(new_engine(model, o, &e, err));
    TD_TRY_GOTO(open_device(e, err), destroy);
    TD_TRY_GOTO(plan_memory(e, err), destroy);
    TD_TRY_GOTO(td_packed_fill(e->packed, err), destroy);
    TD_TRY_GOTO(take_memory(e, err), destroy);
    name_numerics(e);
    *ret = e;
    return TD_OK;
destroy:
    td_engine_destroy(e);
    return st;
}

td_status td_engine_plan(const struct td_model *model, const struct td_engine_options *o,
                         struct td_kv_layout *ret_layout, struct td_engine_memory *ret,
                         struct td_error *err) {
    struct td_engine *e = NULL;
    TD_TRY(new_engine(model, o, &e, err));
    e->f.device.backend = o->backend ? o->backend : &td_backend_cpu;
    td_status st = plan_memory(e, err);
    if (st == TD_OK) {
        td_engine_memory(e, ret);
        *ret_layout = e->layout;
    }
    td_packed_destroy(e->packed);
    free(e);
    return st;
}

void td_engine_destroy(struct td_engine *e) {
    if (!e) return;
    struct td_device *d = &e->f.device;
    td_threads_destroy(e->threads);
    if (d->backend) {
        td_packed_destroy(e->packed);
        td_kv_staging_finish(&e->staging);
        d->backend->give(d, e->scratch, e->scratch_bytes);
        d->backend->give(d, e->own_pool, e->layout.pool_bytes);
        d->backend->give(d, e->own_slots, e->layout.slot_bytes * e->o.slots);
        d->backend->give_host(d, e->host);
        d->backend->close(d);
    }
    free(e);
}

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
        .scratch = e->scratch_bytes - e->index_bytes,
        .host = e->host_bytes + td_kv_staging_bytes(&e->staging),
    };
    if (!e->f.device.backend->host) return;
    ret->scratch += ret->host;
    ret->host = 0;
}

const char *td_engine_numerics(const struct td_engine *e, uint64_t *ret_id) {
    if (ret_id) *ret_id = e->numerics_id;
    return e->numerics;
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

/* The runs as rows, ids side by side; then to the device. */
static void fill_batch(struct td_engine *e, const struct td_run *runs, uint32_t n_runs) {
    struct td_forward *f = &e->f;
    struct td_device *d = &f->device;
    const struct step_arrays *in = &e->in, *at = &e->at;
    uint32_t n = 0, max_pos = 0;
    size_t used = 0;
    f->wanted = 0;
    for (uint32_t i = 0; i < n_runs; i++) {
        const struct td_run *r = &runs[i];
        uint32_t pages = (r->pos + r->n + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS;
        in->runs[i] = (struct td_op_run){.first = n,
                                         .n = r->n,
                                         .pos = r->pos,
                                         .pages = at->pages + used,
                                         .slot = td_engine_slot(e, r->slot)};
        memcpy(in->pages + used, r->pages, pages * sizeof *in->pages);
        used += pages;
        if (r->pos + r->n - 1 > max_pos) max_pos = r->pos + r->n - 1;
        for (uint32_t t = 0; t < r->n; t++, n++) {
            in->rows[n] = (struct td_op_row){i, r->pos + t};
            in->ids[n] = r->ids[t];
        }
        if (r->want_logits) in->want[f->wanted++] = n - 1;
    }
    td_upload(d, at->runs, in->runs, n_runs * sizeof *in->runs);
    td_upload(d, at->rows, in->rows, n * sizeof *in->rows);
    td_upload(d, at->ids, in->ids, n * sizeof *in->ids);
    td_upload(d, at->want, in->want, f->wanted * sizeof *in->want);
    td_upload(d, at->pages, in->pages, used * sizeof *in->pages);
    f->batch = (struct td_op_batch){.kv = &e->layout,
                                    .pool = e->pool,
                                    .row = at->rows,
                                    .run = at->runs,
                                    .n = n,
                                    .runs = n_runs,
                                    .max_pos = max_pos};
    f->ids = at->ids;
    f->want = at->want;
}

/* What the step gave, where the caller reads it. */
static td_status fetch(struct td_engine *e, const float **ret_logits, struct td_capture *capture,
                       struct td_error *err) {
    struct td_forward *f = &e->f;
    struct td_device *d = &f->device;
    uint32_t layers = e->layout.csa_layers, topk = e->o.index_topk;
    float *logits = d->backend->host ? f->s.logits : e->logits;
    int32_t *chosen = d->backend->host ? f->s.capture : e->captured;
    if (ret_logits)
        td_download(d, logits, f->s.logits,
                    (size_t)f->wanted * e->model->config.vocab * sizeof *logits);
    if (capture)
        td_download(d, chosen, f->s.capture, (size_t)layers * f->wanted * topk * sizeof *chosen);
    TD_TRY(d->backend->wait(d, TD_LANE_STEP, err));
    if (ret_logits) *ret_logits = logits;
    for (uint32_t i = 0; capture && i < f->wanted; i++)
        for (uint32_t l = 0; l < layers; l++)
            memcpy(capture->entries + ((size_t)i * layers + l) * topk,
                   chosen + ((size_t)l * f->wanted + i) * topk, topk * sizeof *chosen);
    return TD_OK;
}

td_status td_engine_step(struct td_engine *e, const struct td_run *runs, uint32_t n_runs,
                         const float **ret_logits, struct td_capture *capture,
                         struct td_error *err) {
    TD_TRY(check_step(e, runs, n_runs, capture, err));
    fill_batch(e, runs, n_runs);
    e->f.capture = capture != NULL;
    td_forward_step(&e->f);
    return fetch(e, ret_logits, capture, err);
}

/* ---- wire blocks ---- */

td_status td_engine_pack_page(struct td_engine *e, uint32_t page, struct td_kv_ticket ticket,
                              uint32_t index, uint32_t tokens, void *dst, size_t cap,
                              size_t *ret_len, struct td_kv_block_header *ret_header,
                              struct td_error *err) {
    struct td_kv_view v;
    TD_TRY(td_kv_staging_page(&e->staging, page, true, &v, err));
    return td_kv_pack_page(v.kv, v.pool, v.page, ticket, index, tokens, dst, cap, ret_len,
                           ret_header, err);
}

td_status td_engine_pack_slot(struct td_engine *e, uint32_t slot, struct td_kv_ticket ticket,
                              uint32_t n, void *dst, size_t cap, size_t *ret_len,
                              struct td_kv_block_header *ret_header, struct td_error *err) {
    struct td_kv_view v;
    TD_TRY(td_kv_staging_slot(&e->staging, slot, true, &v, err));
    return td_kv_pack_slot(v.kv, v.slot, ticket, n, dst, cap, ret_len, ret_header, err);
}

td_status td_engine_unpack_page(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t index,
                                uint32_t page, struct td_kv_block_header *ret_header,
                                struct td_error *err) {
    struct td_kv_view v;
    TD_TRY(td_kv_staging_page(&e->staging, page, false, &v, err));
    TD_TRY(td_kv_unpack_page(v.kv, block, len, ticket, n, index, v.pool, v.page, ret_header, err));
    return td_kv_staging_send_page(&e->staging, page, err);
}

td_status td_engine_unpack_slot(struct td_engine *e, const void *block, size_t len,
                                struct td_kv_ticket ticket, uint32_t n, uint32_t slot,
                                struct td_kv_block_header *ret_header, struct td_error *err) {
    struct td_kv_view v;
    TD_TRY(td_kv_staging_slot(&e->staging, slot, false, &v, err));
    TD_TRY(td_kv_unpack_slot(v.kv, block, len, ticket, n, v.slot, ret_header, err));
    return td_kv_staging_send_slot(&e->staging, slot, err);
}

/* ---- one layer ---- */

static td_status tap_part(struct td_engine *e, const struct td_layer_tap *tap, uint32_t pos,
                          uint32_t n, struct td_error *err) {
    const struct td_forward_buffers *s = &e->f.s;
    struct td_device *d = &e->f.device;
    size_t hidden = e->model->config.hidden, streams = TD_HC_STREAMS * hidden;
    struct td_run run = {
        .slot = 0, .pos = pos, .n = n, .ids = tap->ids + pos, .pages = e->tap_pages};
    fill_batch(e, &run, 1);
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

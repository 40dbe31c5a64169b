/* Creation and planning of an engine; the contract is in engine.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/engine_parts.h"

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
    TD_TRY(range(err, "ranks (tp)", o->ranks, 0, 1)); /* until ranks compute */
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
    if (!d->backend->host && !e->o.eager) e->idle_slot = td_bump_take(b, e->layout.slot_bytes);
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
    td_kv_staging_plan(&e->staging, &e->f.device, &e->layout);
    return TD_OK;
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
    TD_TRY(b->open(d, e->o.device[0], err));
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
    TD_TRY_GOTO(td_engine_record(e, err), destroy);
    td_engine_watch(e);
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
        td_decode_graphs_finish(&e->graphs, d);
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

/* Creation and planning of an engine; the contract is in engine.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/engine_parts.h"
#include "kernels/exchanged.h"

/* A start may be silent for long: the system gives pages, a disk is slow, links are probed. */
enum { START_SILENCE_MS = 600000, STEP_SILENCE_MS = 60000 };

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

/* A rank has whole output groups. */
static td_status check_ranks(const struct td_model_config *m, const struct td_engine_options *o,
                             struct td_error *err) {
    if (o->ranks < 2) return TD_OK;
    if (o->ranks > TD_MAX_RANKS || (o->ranks & (o->ranks - 1)) != 0)
        return td_fail(err, TD_CONFIG, "tp: expected 1, 2, 4 or 8 ranks, found %u", o->ranks);
    if (m->o_groups % o->ranks != 0)
        return td_fail(
            err, TD_CONFIG,
            "tp: %u ranks share the model's %u output groups: expected a number of ranks "
            "that divides them",
            o->ranks, m->o_groups);
    if (o->threads >= o->ranks || (o->backend && !o->backend->host)) return TD_OK;
    return td_fail(err, TD_CONFIG, "threads: expected one for each of %u ranks (tp), found %u",
                   o->ranks, o->threads);
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
    TD_TRY(check_ranks(m, o, err));
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
    return td_kv_pages(e->o.max_context, e->split);
}

static void plan_arrays(const struct td_engine *e, struct td_bump *b, struct step_arrays *a) {
    a->rows = td_bump_take(b, e->o.max_tokens * sizeof *a->rows);
    a->runs = td_bump_take(b, e->o.max_runs * sizeof *a->runs);
    a->ids = td_bump_take(b, e->o.max_tokens * sizeof *a->ids);
    a->want = td_bump_take(b, e->o.max_runs * sizeof *a->want);
    a->pages = td_bump_take(b, (size_t)e->o.max_runs * context_pages(e) * sizeof *a->pages);
}

static void plan_host(struct td_rank *r, struct td_bump *b) {
    plan_arrays(r->engine, b, &r->in);
}

/* What ranks have together. */
static void plan_shared(struct td_engine *e, struct td_bump *b) {
    const struct td_model_config *m = &e->model->config;
    size_t chosen = (size_t)e->layout.csa_layers * e->o.max_runs * e->o.index_topk;
    e->tap_pages = td_bump_take(b, context_pages(e) * sizeof *e->tap_pages);
    e->slot_used = td_bump_take(b, e->o.slots);
    e->logits = td_bump_take(b, (size_t)e->o.max_runs * m->vocab * sizeof *e->logits);
    if (!e->rank[0].f.device.backend->host) /* else it is read where it is */
        e->captured = td_bump_take(b, chosen * sizeof *e->captured);
    if (e->ranks > 1) {
        e->runs = td_bump_take(b, e->o.max_runs * sizeof *e->runs);
        e->run_ids = td_bump_take(b, e->o.max_tokens * sizeof *e->run_ids);
        e->run_pages =
            td_bump_take(b, (size_t)e->o.max_runs * context_pages(e) * sizeof *e->run_pages);
    }
    for (uint32_t i = 0; b->base && i < context_pages(e); i++)
        e->tap_pages[i] = i;
}

static void plan_logits(struct td_rank *r, struct td_bump *b) {
    const struct td_engine *e = r->engine;
    const struct td_share *own = &r->packed->share;
    bool host = r->f.device.backend->host;
    r->f.logits_stride = host ? e->model->config.vocab : own->tokens;
    if (host)
        r->f.s.logits = e->logits ? e->logits + own->token : NULL;
    else
        r->f.s.logits = td_bump_take(b, e->o.max_runs * r->f.logits_stride * sizeof *r->f.s.logits);
}

static void plan_scratch(struct td_rank *r, struct td_bump *b) {
    struct td_engine *e = r->engine;
    const struct td_model_config *m = &e->model->config;
    struct td_device *d = &r->f.device;
    uint32_t entries = e->o.max_context / TD_HCA_RATIO;
    if (e->o.index_topk > entries) entries = e->o.index_topk;
    if (d->backend->host) {
        d->threads = r->threads;
        uint32_t heads = e->o.kv_split ? m->heads : r->packed->share.heads;
        d->scratch_stride = td_op_scratch(heads, m->index_heads, entries, e->o.kv_split);
        d->scratch = td_bump_take(b, d->scratch_stride * (e->o.threads / e->ranks));
    }
    r->index_bytes =
        e->layout.csa_layers == 0
            ? 0
            : d->backend->index_workspace(m->index_heads, e->o.index_topk, e->o.max_tokens);
    r->f.s.index = td_bump_take(b, r->index_bytes);
    td_forward_plan(&r->f, b, e->o.max_tokens, e->o.max_runs, &e->layout);
    plan_logits(r, b);
    if (d->backend->host)
        r->at = r->in;
    else
        plan_arrays(e, b, &r->at);
    if (!d->backend->host && !e->o.eager) r->idle_slot = td_bump_take(b, e->layout.slot_bytes);
}

/* Everything that a rank will take, counted. */
static td_status plan_rank(struct td_rank *r, struct td_error *err) {
    struct td_bump host = {0}, scratch = {0};
    TD_TRY(td_packed_plan(r->engine->model, &r->f.device, &r->packed, err));
    r->f.model = r->packed;
    plan_host(r, &host);
    r->host_bytes = host.used;
    plan_scratch(r, &scratch);
    r->scratch_bytes = scratch.used;
    td_kv_staging_plan(&r->staging, &r->f.device, &r->engine->layout);
    return TD_OK;
}

static td_status take_rank(struct td_rank *r, struct td_error *err) {
    const struct td_engine *e = r->engine;
    struct td_device *d = &r->f.device;
    struct td_bump bump;
    void *own;
    TD_TRY(d->backend->take_host(d, r->host_bytes, "step arrays", &r->host, err));
    bump = (struct td_bump){r->host, 0};
    plan_host(r, &bump);
    TD_TRY(d->backend->take(d, r->scratch_bytes, "scratch", &r->scratch, err));
    bump = (struct td_bump){r->scratch, 0};
    plan_scratch(r, &bump);
    r->pool = e->o.pool_memory;
    r->slots = e->o.slot_memory;
    if (!r->pool) {
        TD_TRY(d->backend->take(d, e->layout.pool_bytes, "KV pool", &own, err));
        r->pool = r->own_pool = own;
    }
    if (!r->slots) {
        TD_TRY(d->backend->take(d, e->layout.slot_bytes * e->o.slots, "slots", &own, err));
        r->slots = r->own_slots = own;
    }
    TD_TRY(td_kv_staging_take(&r->staging, r->pool, r->slots, err));
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
    e->rank[0].f.device.backend->describe(&e->rank[0].f.device, device, sizeof device);
    snprintf(e->numerics, sizeof e->numerics,
             "%s%s; activations fp32%s; rows %s; keys %s%s; scores %s; topk %u; shards %u; %s",
             e->o.ref ? "ref" : "plain", e->o.kv_split ? ", entries in 8 parts" : "",
             e->o.nvfp4_activations ? ", nvfp4 in experts" : "", row[e->o.row_dtype],
             key[e->o.key_dtype], e->o.index_sim4 ? " after sim4" : "",
             e->o.score_bf16 ? "bf16" : "fp32", e->o.index_topk, e->model->config.o_groups, device);
    /* On the CPU forced ops have the same bits, so there they are shown but not hashed. */
    if (e->rank[0].f.device.backend->host) e->numerics_id = hash_text(e->numerics);
    if (e->o.force_ref) {
        char forced[256];
        size_t used = strlen(e->numerics);
        td_ops_names(e->o.force_ref, forced, sizeof forced);
        snprintf(e->numerics + used, sizeof e->numerics - used, "; reference ops %s", forced);
    }
    if (!e->rank[0].f.device.backend->host) e->numerics_id = hash_text(e->numerics);
}

/* ---- ranks ---- */

/* In the rank's thread, as everything that takes its memory: what is first touched there lies near.
 */
static td_status open_rank(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_rank *r = &e->rank[rank];
    struct td_device *d = &r->f.device;
    const struct td_backend *b = d->backend;
    TD_TRY(b->open(d, e->o.device[rank], err));
    if (e->o.ops && !b->host)
        return td_fail(err, TD_INVALID, "engine: a table of host ops and a device of kind %s",
                       b->name);
    if (e->o.ops)
        r->ops = *e->o.ops;
    else
        TD_TRY(b->ops(d, e->o.force_ref, &r->ops, err));
    return b->host ? td_threads_create(e->o.threads / e->ranks, &r->threads, err) : TD_OK;
}

static td_status start_rank(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_rank *r = &e->rank[rank];
    struct td_device *d = &r->f.device;
    TD_TRY(plan_rank(r, err));
    if (e->team) TD_TRY(d->backend->join(d, td_forward_words(&r->f, e->o.max_tokens), err));
    TD_TRY(td_packed_fill(r->packed, err));
    TD_TRY(take_rank(r, err));
    TD_TRY(td_rank_record(r, err));
    td_rank_watch(r);
    return TD_OK;
}

static void break_off(void *user) {
    struct td_engine *e = user;
    for (uint32_t i = 0; i < e->ranks; i++)
        if (e->rank[i].f.device.comm) e->rank[i].f.device.backend->break_off(&e->rank[i].f.device);
}

/* A thread for each of several ranks. */
static td_status make_team(struct td_engine *e, struct td_error *err) {
    const struct td_backend *b = e->rank[0].f.device.backend;
    struct td_team_options t = {
        .ranks = e->ranks, .silence_ms = START_SILENCE_MS, .break_off = break_off, .user = e};
    if (e->ranks == 1) return TD_OK;
    if (!b->join)
        return td_fail(err, TD_UNSUPPORTED, "tp: expected 1 rank on a device of kind %s, found %u",
                       b->name, e->ranks);
    if (e->o.pool_memory || e->o.slot_memory)
        return td_fail(err, TD_INVALID, "engine: memory given for the pool of one of %u ranks",
                       e->ranks);
    for (uint32_t i = 0; i < e->ranks; i++) {
        if (b->host)
            snprintf(t.place[i], sizeof t.place[i], "%s", b->name);
        else
            snprintf(t.place[i], sizeof t.place[i], "%s:%u", b->name, e->o.device[i]);
        if (b->pci) b->pci(e->o.device[i], t.pci[i], sizeof t.pci[i]);
    }
    TD_TRY(td_team_create(&t, &e->team, err));
    for (uint32_t i = 0; i < e->ranks; i++)
        e->rank[i].f.device.team = e->team;
    return TD_OK;
}

/* ---- creation ---- */

static td_status new_engine(const struct td_model *model, const struct td_engine_options *o,
                            struct td_engine **ret, struct td_error *err) {
    TD_TRY(check_options(&model->config, o, err));
    struct td_engine *e = calloc(1, sizeof *e);
    if (!e) return td_fail(err, TD_NO_MEMORY, "no memory for an engine");
    e->model = model;
    e->o = *o;
    e->ranks = e->stagings.n = o->ranks ? o->ranks : 1;
    e->split = td_engine_split(o);
    for (uint32_t i = 0; i < e->ranks; i++) {
        struct td_rank *r = &e->rank[i];
        struct td_forward *f = &r->f;
        r->engine = e;
        e->stagings.rank[i] = &r->staging;
        f->ops = &r->ops;
        f->topk = o->index_topk;
        f->split = o->kv_split;
        f->ref = o->ref;
        f->nvfp4 = o->nvfp4_activations;
        f->sim4 = o->index_sim4;
        f->score_bf16 = o->score_bf16;
        f->device.backend = o->backend ? o->backend : &td_backend_cpu;
        f->device.rank = i;
        f->device.ranks = e->ranks;
    }
    td_status st = init_layout(e, err);
    struct td_bump shared = {0};
    if (st == TD_OK) plan_shared(e, &shared);
    e->shared_bytes = shared.used;
    if (st == TD_OK) *ret = e;
    if (st != TD_OK) free(e);
    return st;
}

static td_status take_shared(struct td_engine *e, struct td_error *err) {
    struct td_device *d = &e->rank[0].f.device;
    TD_TRY(d->backend->take_host(d, e->shared_bytes, "step arrays", &e->shared, err));
    plan_shared(e, &(struct td_bump){e->shared, 0});
    return TD_OK;
}

td_status td_engine_create(const struct td_model *model, const struct td_engine_options *o,
                           struct td_engine **ret, struct td_error *err) {
    struct td_engine *e = NULL;
    td_status st;
    if (o->nvfp4_activations) TD_TRY(td_model_nvfp4_inputs(model, err));
    TD_TRY(new_engine(model, o, &e, err));
    TD_TRY_GOTO(make_team(e, err), destroy);
    TD_TRY_GOTO(td_team_run(e->team, open_rank, e, err), destroy);
    TD_TRY_GOTO(take_shared(e, err), destroy);
    TD_TRY_GOTO(td_team_run(e->team, start_rank, e, err), destroy);
    if (e->rank[0].f.device.backend->host) e->captured = e->rank[0].f.s.capture;
    td_team_silence(e->team, o->collective_ms ? o->collective_ms : STEP_SILENCE_MS);
    name_numerics(e);
    *ret = e;
    return TD_OK;
destroy:
    (void)td_engine_destroy(e);
    return st;
}

/* All ranks, counted; to be ended by end_plan. */
static td_status plan_ranks(const struct td_model *model, const struct td_engine_options *o,
                            struct td_engine **ret, struct td_error *err) {
    TD_TRY(new_engine(model, o, ret, err));
    for (uint32_t i = 0; i < (*ret)->ranks; i++)
        TD_TRY(plan_rank(&(*ret)->rank[i], err));
    return TD_OK;
}

static void end_plan(struct td_engine *e) {
    for (uint32_t i = 0; e && i < e->ranks; i++)
        td_packed_destroy(e->rank[i].packed);
    free(e);
}

td_status td_engine_plan(const struct td_model *model, const struct td_engine_options *o,
                         struct td_kv_layout *ret_layout, struct td_engine_memory *ret,
                         struct td_error *err) {
    struct td_engine *e = NULL;
    td_status st = plan_ranks(model, o, &e, err);
    if (st == TD_OK) {
        td_engine_memory(e, ret);
        *ret_layout = e->layout;
    }
    end_plan(e);
    return st;
}

td_status td_engine_exchanged(const struct td_model *model, const struct td_engine_options *o,
                              uint32_t rows, uint64_t *ret, struct td_error *err) {
    struct td_engine *e = NULL;
    td_status st = plan_ranks(model, o, &e, err);
    if (st == TD_OK) {
        struct td_rank *r = &e->rank[0];
        struct td_bump nowhere = {(uint8_t *)256, 0}; /* addresses that nobody follows */
        td_forward_plan(&r->f, &nowhere, o->max_tokens, o->max_runs, &e->layout);
        r->f.batch = (struct td_op_batch){.kv = &e->layout, .n = rows, .split = e->split};
        st = td_forward_exchanged(&r->f, ret, err);
    }
    end_plan(e);
    return st;
}

static void end_rank(struct td_rank *r) {
    const struct td_engine *e = r->engine;
    struct td_device *d = &r->f.device;
    td_threads_destroy(r->threads);
    td_decode_graphs_finish(&r->graphs, d);
    td_packed_destroy(r->packed);
    td_kv_staging_finish(&r->staging);
    d->backend->give(d, r->scratch, r->scratch_bytes);
    d->backend->give(d, r->own_pool, e->layout.pool_bytes);
    d->backend->give(d, r->own_slots, e->layout.slot_bytes * e->o.slots);
    d->backend->give_host(d, r->host);
    if (e->team) d->backend->leave(d);
    d->backend->close(d);
}

static td_status leave_rank(void *arg, uint32_t rank, struct td_error *err) {
    struct td_engine *e = arg;
    struct td_device *d = &e->rank[rank].f.device;
    (void)err;
    d->backend->leave(d);
    return TD_OK;
}

bool td_engine_destroy(struct td_engine *e) {
    if (!e) return true;
    if (td_team_lost(e->team)) return false;
    td_team_silence(e->team, START_SILENCE_MS);
    /* Together, as they joined; those of a broken team each for itself, in end_rank. */
    if (e->team) (void)!td_team_run(e->team, leave_rank, e, NULL);
    if (td_team_lost(e->team)) return false;
    td_team_destroy(e->team);
    if (e->shared) e->rank[0].f.device.backend->give_host(&e->rank[0].f.device, e->shared);
    for (uint32_t i = e->ranks; i-- > 0;)
        end_rank(&e->rank[i]);
    free(e);
    return true;
}

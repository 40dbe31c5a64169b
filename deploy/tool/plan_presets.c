/* See plan_presets.h. */
#include "deploy/tool/plan_presets.h"

#include <stdio.h>
#include <string.h>

#include "deploy/tool/plan_worker.h"
#include "deploy/tool/preset.h"

enum { K = 1024 };
static const uint32_t balanced[] = {8 * K, 32 * K, 128 * K};
enum { N_BALANCED = sizeof balanced / sizeof balanced[0] };

/* What ranks exchange: fp32 partial sums (kernels/device.h). */
enum { VALUE_BYTES = 4 };

/* One role of a preset. */
struct side {
    struct td_config config;
    struct td_plan_asked asked;
    uint32_t workers, ranks;
    struct td_worker_plan plan;
};

struct shown {
    const struct td_plan_presets *asked;
    struct td_model_config model;
    enum td_outline format;
    struct td_preset preset;
    struct side prefill, decode;
    struct td_forecast_model m;
};

/* ---- the model in numbers ---- */

static double elements(const struct td_weight *w) {
    return w->format == TD_W_NONE ? 0 : (double)w->rows * w->cols;
}

static double bytes_of(const struct td_weight *w) {
    return (double)(td_weight_data_bytes(w) + td_weight_scale_bytes(w));
}

static double expert_elements(const struct td_expert_weights *e) {
    return elements(&e->w1) + elements(&e->w2) + elements(&e->w3);
}

/* Of what a token is multiplied with in a layer. */
static double layer_elements(const struct td_layer_weights *l, uint32_t experts) {
    const struct td_weight *const all[] = {&l->wq_a,
                                           &l->wq_b,
                                           &l->wkv,
                                           &l->wo_a,
                                           &l->wo_b,
                                           &l->comp.wkv,
                                           &l->comp.wgate,
                                           &l->index_wq_b,
                                           &l->index_weights_proj,
                                           &l->index_comp.wkv,
                                           &l->index_comp.wgate,
                                           &l->gate,
                                           &l->hc_attn.fn,
                                           &l->hc_ffn.fn};
    double sum = expert_elements(&l->shared) + experts * expert_elements(&l->experts[0]);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        sum += elements(all[i]);
    return sum;
}

/* The tables of layers that choose experts by token: a step reads a few of their bytes. */
static double table_bytes(const struct td_model_config *c) {
    return (double)c->hash_layers * c->vocab * c->experts_per_token * sizeof(int64_t);
}

static void count(const struct td_model *model, struct td_forecast_model *m) {
    const struct td_model_config *c = &model->config;
    const struct td_expert_weights *e = &model->layer[0].experts[0];
    m->expert_bytes = bytes_of(&e->w1) + bytes_of(&e->w2) + bytes_of(&e->w3);
    m->dense_bytes = (double)model->bytes - bytes_of(&model->embed) - table_bytes(c) -
                     (double)c->layers * c->experts * m->expert_bytes;
    m->parameters = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        m->parameters += layer_elements(&model->layer[l], c->experts_per_token);
}

/* What every rank has whole, given that a rank's weights are that and its share of the rest. */
static double whole_bytes(const struct td_model *model, const struct side *s) {
    double ranks = s->ranks, all = (double)model->bytes;
    if (s->ranks == 1) return 0;
    return (ranks * (double)s->plan.engine.weights - all) / (ranks - 1) -
           table_bytes(&model->config);
}

static td_status model_in_numbers(struct shown *s, struct td_error *err) {
    const struct td_model_config *c = &s->model;
    const struct td_kv_layout *kv = &s->decode.plan.layout;
    struct td_model *model;
    TD_TRY(td_model_outline(c, s->format, &model, err));
    s->m = (struct td_forecast_model){.layers = c->layers,
                                      .csa_layers = kv->csa_layers,
                                      .hca_layers = kv->hca_layers,
                                      .hidden = c->hidden,
                                      .heads = c->heads,
                                      .head_dim = TD_HEAD_DIM,
                                      .window = TD_WINDOW,
                                      .index_heads = c->index_heads,
                                      .index_dim = TD_INDEX_DIM,
                                      .index_topk = s->decode.plan.options.index_topk,
                                      .experts = c->experts,
                                      .experts_per_token = c->experts_per_token,
                                      .row_bytes = kv->row_bytes,
                                      .key_bytes = kv->key_bytes};
    count(model, &s->m);
    s->m.whole_bytes = whole_bytes(model, &s->decode);
    td_model_close(model);
    return TD_OK;
}

/* ---- planning ---- */

static td_status plan_side(struct shown *s, struct side *side, const char *role, uint64_t workers,
                           struct td_error *err) {
    TD_TRY(td_preset_config(&s->preset, role, "0", &side->config, err));
    side->workers = (uint32_t)workers;
    side->ranks = (uint32_t)side->config.tp;
    side->asked = (struct td_plan_asked){.config = &side->config,
                                         .model = &s->model,
                                         .format = s->format,
                                         .prefill = strcmp(role, "prefill") == 0,
                                         .ranks = side->ranks,
                                         .memory = s->asked->memory};
    struct td_error why;
    td_status st = td_plan_worker(&side->asked, &side->plan, &why);
    return st == TD_OK ? TD_OK : td_fail(err, st, "%s: %s: %s", s->preset.name, role, why.text);
}

static td_status prepare(struct shown *s, const char *name, struct td_error *err) {
    const struct td_plan_presets *a = s->asked;
    struct td_config c;
    TD_TRY(td_preset_find(name, &s->preset, err));
    char dir[TD_CONFIG_STRING_MAX + 16];
    snprintf(dir, sizeof dir, "model.dir=%s", a->model_dir);
    TD_TRY(td_preset_set(&s->preset, dir, err));
    for (uint32_t i = 0; i < a->sets; i++)
        TD_TRY(td_preset_set(&s->preset, a->set[i], err));
    TD_TRY(td_preset_config(&s->preset, "router", "", &c, err));
    TD_TRY(td_model_config_from(&c, &s->model, &s->format, err));
    if (a->format >= 0) s->format = (enum td_outline)a->format;
    TD_TRY(plan_side(s, &s->prefill, "prefill", c.cluster_prefill, err));
    TD_TRY(plan_side(s, &s->decode, "decode", c.cluster_decode, err));
    return model_in_numbers(s, err);
}

/* ---- output ---- */

static void print_assumptions(const struct td_forecast_rates *r) {
    printf(
        "predicted, from config.json and these assumptions; nothing of it was measured on such a "
        "machine\n"
        "  --gpu-read %.2f       TB/s that a GPU reads its memory with\n"
        "  --prefill-rate %.0f   prompt tokens/s that a GPU computes, whatever the length\n"
        "  --floor-share %.0f      percent of what its bytes allow that decode reaches\n"
        "  --output %.0f         tokens of an answer\n"
        "  --link %.0f             GB/s that a rank receives in the reductions of a chunk\n"
        "  --reduction-us %.1f   of one reduction of a decode step\n"
        "  and: a decode step runs as many sequences as a worker holds\n\n",
        r->gpu_bytes / 1e12, r->prefill_tokens, r->floor_share * 100, r->output_tokens,
        r->link_bytes / 1e9, r->reduction_s * 1e6);
}

static void print_model(const struct shown *s) {
    const struct td_forecast_model *m = &s->m;
    printf("model: a decode step reads %.2f GB, of which every rank reads %.2f, and in each of %u "
           "layers\n"
           "  %.0f (1 sequence) to %.0f (64) experts of %.2f MB\n"
           "  %10s %14s %14s %38s\n",
           m->dense_bytes / 1e9, m->whole_bytes / 1e9, m->layers, td_forecast_experts(m, 1),
           td_forecast_experts(m, 64), m->expert_bytes / 1e6, "context", "KV held, MB", "read, MB",
           "GFLOP a prompt token (core, index)");
    for (int i = 0; i < N_BALANCED; i++) {
        struct td_forecast_flop f = td_forecast_flop(m, balanced[i]);
        printf("  %10u %14.1f %14.1f %23.1f (%.1f, %.2f)\n", balanced[i],
               td_forecast_kv_held(m, balanced[i]) / 1e6, td_forecast_kv_read(m, balanced[i]) / 1e6,
               (f.weights + f.core + f.index) / 1e9, f.core / 1e9, f.index / 1e9);
    }
}

static uint64_t pool_tokens(const struct side *s) {
    return (uint64_t)s->plan.options.pages * td_kv_page_tokens(td_engine_split(&s->plan.options));
}

static enum td_forecast_kv layout_of(const struct side *s) {
    return s->plan.options.kv_split ? TD_FORECAST_KV_SPLIT : TD_FORECAST_KV_REPLICATED;
}

static void print_side(const struct side *s, const char *role) {
    const struct td_worker_plan *p = &s->plan;
    printf("  %-8s%2u x tp %u %12llu pool tokens each, %12llu in all; of a GPU: weights %.1f, pool "
           "%.1f, left %.1f GB\n",
           role, s->workers, s->ranks, (unsigned long long)pool_tokens(s),
           (unsigned long long)pool_tokens(s) * s->workers, (double)p->engine.weights / 1e9,
           (double)p->layout.pool_bytes / 1e9,
           ((double)p->device.bytes - (double)td_worker_plan_bytes(p, false)) / 1e9);
}

/* Sequences of a context that run at once, of all decode workers, up to the longest. */
static void print_held(const struct shown *s) {
    uint32_t longest = s->decode.plan.options.max_context;
    printf("  max_context %u; sequences at once:", longest);
    for (uint64_t n = 8 * K; n / 4 < longest; n *= 4) {
        uint32_t tokens = n < longest ? (uint32_t)n : longest;
        printf("%s %u of %uK", n > 8 * K ? "," : "",
               s->decode.workers * td_worker_plan_sequences(&s->decode.plan, tokens), tokens / K);
    }
    printf("\n");
}

static void print_balance(const struct shown *s) {
    const struct td_forecast_rates *r = &s->asked->rates;
    double prefill = s->prefill.workers * s->prefill.ranks,
           decode = s->decode.workers * s->decode.ranks;
    printf("  %10s %9s %19s %19s %30s %9s\n", "context", "sequences", "GPU-s a request",
           "GPUs, best", "requests/s", "of best");
    printf("  %10s %9s %9s %9s %9s %9s %9s %9s %10s\n", "", "a step", "prefill", "decode",
           "prefill", "decode", "prefill", "decode", "goodput");
    for (int i = 0; i < N_BALANCED; i++) {
        uint32_t batch = td_worker_plan_sequences(&s->decode.plan, balanced[i]);
        if (batch == 0) continue;
        double p = td_forecast_prefill_cost(r, balanced[i]);
        double d = td_forecast_decode_cost(&s->m, r, batch, balanced[i], s->decode.ranks,
                                           layout_of(&s->decode));
        struct td_forecast_balance b = td_forecast_balance(prefill, decode, p, d);
        double best = (prefill + decode) * p / (p + d);
        printf("  %10u %9u %9.2f %9.2f %9.1f %9.1f %9.2f %9.2f %10.2f %7.0f %%, %s limits\n",
               balanced[i], batch, p, d, best, prefill + decode - best, b.prefill, b.decode,
               b.goodput, b.share * 100, b.prefill < b.decode ? "prefill" : "decode");
    }
}

/* What ranks exchange per layer; small ones are gathered, larger ones go in parts. */
static void print_reductions(const struct shown *s) {
    const struct td_forecast_rates *r = &s->asked->rates;
    uint32_t n = td_forecast_reductions(&s->m), ranks = s->decode.ranks;
    uint32_t batch = s->decode.plan.options.slots, chunk = s->prefill.plan.options.max_tokens;
    if (ranks > 1) {
        double one = td_forecast_reduced_bytes(&s->m, 1, VALUE_BYTES), all = batch * one;
        double floor = td_forecast_step_floor(&s->m, r, batch, 8 * K, ranks, layout_of(&s->decode));
        printf("  reductions of a decode step, %u ranks: %u of %.0f KB a sequence: a rank receives "
               "%.1f MB for 1 sequence, %.0f MB\n"
               "    for %u; %.2f ms, beside %.1f ms for the bytes of such a step at 8K\n",
               ranks, n, one / 1e3, n * td_forecast_gather_bytes(one, ranks) / 1e6,
               n * td_forecast_ring_bytes(all, ranks) / 1e6, batch, n * r->reduction_s * 1e3,
               floor * 1e3);
    }
    ranks = s->prefill.ranks;
    if (ranks == 1) return;
    double one = td_forecast_reduced_bytes(&s->m, chunk, VALUE_BYTES);
    double received = n * td_forecast_ring_bytes(one, ranks), seconds = received / r->link_bytes;
    printf(
        "  reductions of a chunk of %u, %u ranks: %u of %.0f MB: a rank receives %.1f GB; %.2f s, "
        "%.0f us a token:\n"
        "    at most %.0f prompt tokens/s a worker before any arithmetic, %s the %.0f "
        "assumed\n",
        chunk, ranks, n, one / 1e6, received / 1e9, seconds, seconds / chunk * 1e6, chunk / seconds,
        chunk / seconds < ranks * r->prefill_tokens ? "LESS than" : "beside",
        ranks * r->prefill_tokens);
}

/* What either layout holds, exchanges and reads. */
static td_status print_kv(const struct shown *s, struct td_error *err) {
    const struct side *d = &s->decode;
    uint32_t far = balanced[N_BALANCED - 1], batch = td_worker_plan_sequences(&d->plan, far);
    if (s->prefill.ranks > 1) {
        printf("  prefill:\n");
        TD_TRY(td_plan_print_layouts(&s->prefill.asked, far, err));
    }
    if (d->ranks == 1) return TD_OK;
    printf("  decode:\n");
    TD_TRY(td_plan_print_layouts(&d->asked, far, err));
    if (batch == 0) return TD_OK;
    printf("    a rank reads %.1f GB in a step of %u at %uK replicated, %.1f split\n",
           td_forecast_rank_bytes(&s->m, batch, far, d->ranks, TD_FORECAST_KV_REPLICATED) / 1e9,
           batch, far / K,
           td_forecast_rank_bytes(&s->m, batch, far, d->ranks, TD_FORECAST_KV_SPLIT) / 1e9);
    return TD_OK;
}

td_status td_plan_presets(const struct td_plan_presets *a, struct td_error *err) {
    struct shown s = {.asked = a};
    td_status failed = TD_OK;
    bool first = true;
    for (uint32_t i = 0; td_preset_name(i); i++) {
        struct td_error why;
        td_status st = prepare(&s, td_preset_name(i), &why);
        if (st == TD_OK && first) {
            print_assumptions(&a->rates);
            print_model(&s);
            first = false;
        }
        if (st == TD_NO_MEMORY) {
            failed = td_fail(err, st, "%s", why.text);
            continue;
        }
        if (st != TD_OK) return td_fail(err, st, "%s", why.text);
        printf("\n%s: %s\n", s.preset.name, s.preset.what);
        print_side(&s.prefill, "prefill");
        print_side(&s.decode, "decode");
        print_held(&s);
        print_balance(&s);
        print_reductions(&s);
        TD_TRY(print_kv(&s, err));
    }
    return failed;
}

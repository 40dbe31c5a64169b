/* Opening a checkpoint: which tensors a model of this config.json has, by their official names. */
#include "kernels/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/bind.h"
#include "kernels/model/file.h"
#include "kernels/model/load.h"

static td_status bind_hc(struct td_binder *b, const char *what, uint32_t rows, uint32_t scales,
                         const struct td_model_config *c, struct td_hc_weights *w) {
    char name[64];
    snprintf(name, sizeof name, "hc_%s_fn", what);
    TD_TRY(td_bind_f32(b, name, rows, TD_HC_STREAMS * c->hidden, &w->fn));
    snprintf(name, sizeof name, "hc_%s_base", what);
    TD_TRY(td_bind_f32(b, name, 1, rows, &w->base));
    snprintf(name, sizeof name, "hc_%s_scale", what);
    return td_bind_f32(b, name, 1, scales, &w->scale);
}

/* `width` = channels of u and g per token: d, or 2d where windows overlap. */
static td_status bind_compressor(struct td_binder *b, const char *base, uint32_t ratio,
                                 uint32_t width, uint32_t d, uint32_t hidden,
                                 struct td_compressor_weights *w) {
    char name[96];
    snprintf(name, sizeof name, "%s.ape", base);
    TD_TRY(td_bind_f32(b, name, ratio, width, &w->ape));
    snprintf(name, sizeof name, "%s.wkv.weight", base);
    TD_TRY(td_bind_plain(b, name, width, hidden, &w->wkv));
    snprintf(name, sizeof name, "%s.wgate.weight", base);
    TD_TRY(td_bind_plain(b, name, width, hidden, &w->wgate));
    snprintf(name, sizeof name, "%s.norm.weight", base);
    return td_bind_plain(b, name, 1, d, &w->norm);
}

static td_status bind_attention(struct td_binder *b, const struct td_model_config *c,
                                enum td_layer_kind kind, struct td_layer_weights *w) {
    uint32_t group_in = c->heads / c->o_groups * TD_HEAD_DIM, o_rank = c->o_groups * c->o_lora_rank;
    TD_TRY(td_bind_linear(b, "attn.wq_a", c->q_lora_rank, c->hidden, &w->wq_a));
    TD_TRY(td_bind_plain(b, "attn.q_norm.weight", 1, c->q_lora_rank, &w->q_norm));
    TD_TRY(td_bind_linear(b, "attn.wq_b", c->heads * TD_HEAD_DIM, c->q_lora_rank, &w->wq_b));
    TD_TRY(td_bind_linear(b, "attn.wkv", TD_HEAD_DIM, c->hidden, &w->wkv));
    TD_TRY(td_bind_plain(b, "attn.kv_norm.weight", 1, TD_HEAD_DIM, &w->kv_norm));
    TD_TRY(td_bind_f32(b, "attn.attn_sink", 1, c->heads, &w->sink));
    TD_TRY(td_bind_linear(b, "attn.wo_a", o_rank, group_in, &w->wo_a));
    TD_TRY(td_bind_linear(b, "attn.wo_b", c->hidden, o_rank, &w->wo_b));
    if (kind == TD_LAYER_HCA)
        return bind_compressor(b, "attn.compressor", TD_HCA_RATIO, TD_HEAD_DIM, TD_HEAD_DIM,
                               c->hidden, &w->comp);
    if (kind == TD_LAYER_SWA) return TD_OK;
    TD_TRY(bind_compressor(b, "attn.compressor", TD_CSA_RATIO, 2 * TD_HEAD_DIM, TD_HEAD_DIM,
                           c->hidden, &w->comp));
    TD_TRY(td_bind_linear(b, "attn.indexer.wq_b", c->index_heads * TD_INDEX_DIM, c->q_lora_rank,
                          &w->index_wq_b));
    TD_TRY(td_bind_plain(b, "attn.indexer.weights_proj.weight", c->index_heads, c->hidden,
                         &w->index_weights_proj));
    return bind_compressor(b, "attn.indexer.compressor", TD_CSA_RATIO, 2 * TD_INDEX_DIM,
                           TD_INDEX_DIM, c->hidden, &w->index_comp);
}

static td_status bind_expert(struct td_binder *b, const char *base, const struct td_model_config *c,
                             struct td_expert_weights *w) {
    char name[64];
    snprintf(name, sizeof name, "%s.w1", base);
    TD_TRY(td_bind_linear(b, name, c->expert_inner, c->hidden, &w->w1));
    snprintf(name, sizeof name, "%s.w3", base);
    TD_TRY(td_bind_linear(b, name, c->expert_inner, c->hidden, &w->w3));
    snprintf(name, sizeof name, "%s.w2", base);
    return td_bind_linear(b, name, c->hidden, c->expert_inner, &w->w2);
}

/* All experts of a layer in two tensors, each expert's gate rows before its up rows. */
static td_status bind_stacked_experts(struct td_binder *b, const struct td_model_config *c,
                                      struct td_expert_weights *experts) {
    struct td_weight gate_up, down;
    uint32_t inner = c->expert_inner;
    TD_TRY(
        td_bind_stack(b, "ffn.experts.gate_up_proj", c->experts, 2 * inner, c->hidden, &gate_up));
    TD_TRY(td_bind_stack(b, "ffn.experts.down_proj", c->experts, c->hidden, inner, &down));
    for (uint32_t e = 0; e < c->experts; e++) {
        experts[e].w1 = td_weight_rows(&gate_up, 2 * inner * e, inner);
        experts[e].w3 = td_weight_rows(&gate_up, 2 * inner * e + inner, inner);
        experts[e].w2 = td_weight_rows(&down, c->hidden * e, c->hidden);
    }
    return TD_OK;
}

static td_status bind_ffn(struct td_binder *b, const struct td_model_config *c, bool hash_routed,
                          struct td_layer_weights *w) {
    char base[48];
    TD_TRY(td_bind_plain(b, "ffn.gate.weight", c->experts, c->hidden, &w->gate));
    if (hash_routed)
        TD_TRY(td_bind_ids(b, "ffn.gate.tid2eid", c->vocab, c->experts_per_token, c->experts,
                           &w->tid2eid));
    else
        TD_TRY(td_bind_f32(b, "ffn.gate.bias", 1, c->experts, &w->gate_bias));
    TD_TRY(bind_expert(b, "ffn.shared_experts", c, &w->shared));
    w->experts = calloc(c->experts, sizeof *w->experts);
    if (!w->experts) return td_fail(b->err, TD_NO_MEMORY, "no memory for %u experts", c->experts);
    if (td_bind_has(b, "ffn.experts.gate_up_proj")) return bind_stacked_experts(b, c, w->experts);
    for (uint32_t e = 0; e < c->experts; e++) {
        snprintf(base, sizeof base, "ffn.experts.%u", e);
        TD_TRY(bind_expert(b, base, c, &w->experts[e]));
    }
    return TD_OK;
}

static td_status bind_model(struct td_binder *b, struct td_model *m) {
    const struct td_model_config *c = &m->config;
    m->layer = calloc(c->layers, sizeof *m->layer);
    if (!m->layer) return td_fail(b->err, TD_NO_MEMORY, "no memory for %u layers", c->layers);
    TD_TRY(td_bind_plain(b, "embed.weight", c->vocab, c->hidden, &m->embed));
    TD_TRY(td_bind_plain(b, "head.weight", c->vocab, c->hidden, &m->head));
    TD_TRY(td_bind_plain(b, "norm.weight", 1, c->hidden, &m->norm));
    TD_TRY(bind_hc(b, "head", TD_HC_STREAMS, 1, c, &m->hc_head));
    for (uint32_t l = 0; l < c->layers; l++) {
        struct td_layer_weights *w = &m->layer[l];
        snprintf(b->prefix, sizeof b->prefix, "layers.%u.", l);
        TD_TRY(td_bind_plain(b, "attn_norm.weight", 1, c->hidden, &w->attn_norm));
        TD_TRY(td_bind_plain(b, "ffn_norm.weight", 1, c->hidden, &w->ffn_norm));
        /* 4 weights into the sub-layer, 4 out of it, 4 x 4 between the streams. */
        TD_TRY(bind_hc(b, "attn", TD_HC_STREAMS * (TD_HC_STREAMS + 2), 3, c, &w->hc_attn));
        TD_TRY(bind_hc(b, "ffn", TD_HC_STREAMS * (TD_HC_STREAMS + 2), 3, c, &w->hc_ffn));
        TD_TRY(bind_attention(b, c, c->kind[l], w));
        TD_TRY(bind_ffn(b, c, l < c->hash_layers, w));
    }
    if (!b->files) return TD_OK;
    const struct td_tensor *extra = td_files_unused(b->files, c->layers, c->draft_layers);
    char shown[104];
    if (extra)
        return td_fail(b->err, TD_FORMAT,
                       "%.130s: tensor %s: expected no such name in a model with this config.json, "
                       "found %.20s",
                       extra->file->path, td_name_text(extra->stored, shown), extra->dtype_name);
    return TD_OK;
}

/* Used tensors in order of their names, so that shards do not matter. The sample is the middle
 * of the tensor: one page touched, and no header padding or zeroed edge. */
static uint64_t hash_tensors(const struct td_model_files *f, uint64_t h) {
    enum { SAMPLE = 64 };
    for (size_t i = 0; i < f->tensors; i++) {
        const struct td_tensor *t = f->by_name[i];
        if (!t->used) continue;
        size_t n = t->bytes < SAMPLE ? t->bytes : SAMPLE;
        h = td_hash_more(h, t->name, strlen(t->name) + 1);
        h = td_hash_more(h, t->dtype_name, strlen(t->dtype_name) + 1);
        h = td_hash_more(h, t->shape, t->rank * sizeof t->shape[0]);
        h = td_hash_more(h, t->data + (t->bytes - n) / 2, n);
    }
    return h;
}

/* Values, not text: revisions of config.json that say the same are the same. Up to draft_layers all
 * members are 4 bytes, so that there is no padding among them. */
static uint64_t hash_config(const struct td_model_config *c, uint64_t h) {
    return td_hash_more(h, c, offsetof(struct td_model_config, draft_layers));
}

static td_status model_from_files(struct td_model *m, struct td_error *err) {
    struct td_binder b = {.files = m->files, .err = err};
    TD_TRY(bind_model(&b, m));
    m->config.quantised = b.quantised;
    m->bytes = b.bytes;
    m->fingerprint = hash_tensors(m->files, hash_config(&m->config, TD_HASH_START));
    td_files_drop_names(m->files);
    return TD_OK;
}

static struct td_model *model_create(const char *what, struct td_error *err) {
    struct td_model *m = calloc(1, sizeof *m);
    if (m && (m->files = calloc(1, sizeof *m->files))) return m;
    free(m);
    td_fail(err, TD_NO_MEMORY, "%.250s: no memory", what);
    return NULL;
}

td_status td_model_open_watched(const char *dir, const struct td_load_watch *watch,
                                struct td_model **ret, struct td_error *err) {
    struct td_model *m = model_create(dir, err);
    if (!m) return TD_NO_MEMORY;
    const struct td_model_config *c = &m->config;
    td_status st;
    TD_TRY_GOTO(td_model_config_load(dir, &m->config, err), close_model);
    TD_TRY_GOTO(td_files_open(m->files, dir, err), close_model);
    TD_TRY_GOTO(
        td_files_read_through(m->files, c->layers, c->draft_layers, td_load_limit(), watch, err),
        close_model);
    TD_TRY_GOTO(model_from_files(m, err), close_model);
    *ret = m;
    return TD_OK;
close_model:
    td_model_close(m);
    return st;
}

td_status td_model_open(const char *dir, struct td_model **ret, struct td_error *err) {
    return td_model_open_watched(dir, NULL, ret, err);
}

td_status td_model_parse(const char *name, const struct td_model_config *config,
                         const uint8_t *data, size_t size, struct td_model **ret,
                         struct td_error *err) {
    struct td_model *m = model_create(name, err);
    if (!m) return TD_NO_MEMORY;
    td_status st;
    m->config = *config;
    TD_TRY_GOTO(td_files_parse(m->files, name, data, size, err), close_model);
    TD_TRY_GOTO(model_from_files(m, err), close_model);
    *ret = m;
    return TD_OK;
close_model:
    td_model_close(m);
    return st;
}

/* ---- without files ---- */

/* `b` says which weights there are. */
static td_status model_without_files(const struct td_model_config *config, struct td_binder *b,
                                     struct td_model **ret) {
    struct td_error *err = b->err;
    struct td_model *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_NO_MEMORY, "no memory for the outline of a model");
    struct td_model_config *c = &m->config;
    td_status st;
    m->config = *config;
    if (b->random) {
        size_t n = (size_t)c->hash_layers * c->vocab * c->experts_per_token;
        m->ids = b->ids = calloc(n + 1, sizeof *m->ids);
        if (!m->ids) {
            st = td_fail(err, TD_NO_MEMORY, "no memory for the experts of %u tokens", c->vocab);
            goto close_model;
        }
    }
    TD_TRY_GOTO(bind_model(b, m), close_model);
    m->config.quantised = b->quantised;
    m->bytes = b->bytes;
    m->fingerprint = hash_config(c, TD_HASH_START);
    *ret = m;
    return TD_OK;
close_model:
    td_model_close(m);
    return st;
}

td_status td_model_outline(const struct td_model_config *config, enum td_outline kind,
                           struct td_model **ret, struct td_error *err) {
    struct td_binder b = {.kind = kind, .err = err};
    return model_without_files(config, &b, ret);
}

td_status td_model_random(const struct td_model_config *config, enum td_outline kind, uint64_t seed,
                          struct td_model **ret, struct td_error *err) {
    enum { GROUP = 32 }; /* of FP4 and NVFP4 inputs */
    struct td_binder b = {.kind = kind, .random = true, .seed = seed, .err = err};
    if (kind != TD_OUTLINE_BF16 && (config->hidden % GROUP || config->expert_inner % GROUP))
        return td_fail(err, TD_UNSUPPORTED,
                       "random weights: 4-bit experts take inputs in groups of %d, and the model's "
                       "have %u and %u: expected multiples, or random.format = bf16",
                       GROUP, config->hidden, config->expert_inner);
    TD_TRY(model_without_files(config, &b, ret));
    const uint64_t of[] = {(uint64_t)kind, seed};
    (*ret)->fingerprint = td_hash_more((*ret)->fingerprint, of, sizeof of);
    return TD_OK;
}

static td_status nvfp4_input(const struct td_weight *w, uint32_t layer, uint32_t expert,
                             const char *name, struct td_error *err) {
    const char *found = w->format != TD_W_NVFP4 ? "another format"
                        : w->input_scale > 0    ? NULL
                                                : "no input_scale";
    if (!found) return TD_OK;
    return td_fail(
        err, TD_UNSUPPORTED,
        "nvfp4_activations: layers.%u.ffn.experts.%u.%s: expected an NVFP4 weight with an "
        "input_scale, found %s",
        layer, expert, name, found);
}

td_status td_model_nvfp4_inputs(const struct td_model *m, struct td_error *err) {
    for (uint32_t l = 0; l < m->config.layers; l++)
        for (uint32_t e = 0; e < m->config.experts; e++) {
            const struct td_expert_weights *w = &m->layer[l].experts[e];
            TD_TRY(nvfp4_input(&w->w1, l, e, "w1", err));
            TD_TRY(nvfp4_input(&w->w3, l, e, "w3", err));
            TD_TRY(nvfp4_input(&w->w2, l, e, "w2", err));
            if (w->w1.input_scale != w->w3.input_scale)
                return td_fail(err, TD_UNSUPPORTED,
                               "nvfp4_activations: layers.%u.ffn.experts.%u: expected one "
                               "input_scale for w1 and w3, found %g and %g",
                               l, e, (double)w->w1.input_scale, (double)w->w3.input_scale);
        }
    return TD_OK;
}

void td_model_close(struct td_model *m) {
    if (!m) return;
    if (m->layer)
        for (uint32_t l = 0; l < m->config.layers; l++)
            free(m->layer[l].experts);
    free(m->layer);
    if (m->files) td_files_finish(m->files);
    free(m->files);
    free(m->ids);
    free(m);
}

/* From typed settings and a checkpoint to what the engine is built with: every "auto" resolved. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/device.h"
#include "kernels/engine.h"
#include "kernels/ops.h"

/* "0,4,128,4" in place of config.json's layers. */
static td_status replace_layers(const char *list, struct td_model_config *m, struct td_error *err) {
    uint32_t n = 0;
    for (const char *at = list; *at; n++) {
        char *end;
        unsigned long ratio = strtoul(at, &end, 10);
        bool known = ratio == 0 || ratio == TD_CSA_RATIO || ratio == TD_HCA_RATIO;
        if (end == at || !known || (*end == ',' ? !end[1] : *end) || n == TD_MAX_LAYERS)
            return td_fail(err, TD_CONFIG,
                           "random.layers: expected 1 to %d of 0, 4 and 128 with commas between, "
                           "found \"%.60s\"",
                           TD_MAX_LAYERS, list);
        m->kind[n] = ratio == 0              ? TD_LAYER_SWA
                     : ratio == TD_CSA_RATIO ? TD_LAYER_CSA
                                             : TD_LAYER_HCA;
        at = *end ? end + 1 : end;
    }
    if (n == 0) return TD_OK;
    m->layers = n;
    m->draft_layers = 0;
    if (m->hash_layers > n) m->hash_layers = n;
    return TD_OK;
}

td_status td_model_config_from(const struct td_config *c, struct td_model_config *ret,
                               enum td_outline *ret_kind, struct td_error *err) {
    static const enum td_outline kind[] = {[TD_RANDOM_AS_BF16] = TD_OUTLINE_BF16,
                                           [TD_RANDOM_AS_FP4] = TD_OUTLINE_FP4,
                                           [TD_RANDOM_AS_NVFP4] = TD_OUTLINE_NVFP4};
    if (!c->model_dir[0]) return td_fail(err, TD_CONFIG, "model.dir is not set");
    TD_TRY(td_model_config_load(c->model_dir, ret, err));
    if (c->load_format == TD_LOAD_RANDOM) {
        TD_TRY(replace_layers(c->random_layers, ret, err));
        *ret_kind = kind[c->random_format];
        if (c->random_format != TD_RANDOM_AUTO) return TD_OK;
    }
    return td_model_config_format(c->model_dir, ret_kind, err);
}

td_status td_model_open_from(const struct td_config *c, const struct td_load_watch *watch,
                             struct td_model **ret, struct td_error *err) {
    struct td_model_config m;
    enum td_outline kind;
    if (!c->model_dir[0]) return td_fail(err, TD_CONFIG, "model.dir is not set");
    if (c->load_format == TD_LOAD_CHECKPOINT)
        return td_model_open_watched(c->model_dir, watch, ret, err);
    TD_TRY(td_model_config_from(c, &m, &kind, err));
    return td_model_random(&m, kind, c->random_seed, ret, err);
}

static void storage_types(const struct td_config *c, struct td_engine_options *o) {
    static const enum td_kv_key_dtype key[] = {[TD_KEY_BF16] = TD_KV_KEY_BF16,
                                               [TD_KEY_FP32] = TD_KV_KEY_FP32,
                                               [TD_KEY_FP8] = TD_KV_KEY_FP8,
                                               [TD_KEY_FP4] = TD_KV_KEY_FP4};
    o->key_dtype = key[c->index_key_dtype];
    switch (c->kv_dtype) {
    case TD_ROW_BF16:
        o->row_dtype = TD_KV_ROW_BF16;
        break;
    case TD_ROW_FP8:
        o->row_dtype = TD_KV_ROW_FP8;
        break;
    case TD_ROW_FP32:
        o->row_dtype = TD_KV_ROW_FP32;
        break;
    default: /* auto: in ref numerics FP8 rows hold as much as bf16 ones */
        o->row_dtype = o->ref ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16;
        break;
    }
}

static uint32_t usable_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n < 1 ? 1 : n > TD_MAX_THREADS ? TD_MAX_THREADS : (uint32_t)n;
}

td_status td_engine_options_from(const struct td_config *c, const struct td_model_config *m,
                                 struct td_engine_options *ret, struct td_error *err) {
    struct td_engine_options o = {0};
    TD_TRY(td_backend_find(c->device, c->tp, &o.backend, o.device, err));
    o.ranks = (uint32_t)c->tp;
    o.kv_split = c->kv_layout == TD_LAYOUT_SPLIT;
    o.collective_ms = (uint32_t)c->collective_timeout_ms;
    TD_TRY(td_ops_mask(c->force_ref, &o.force_ref, err));
    o.ref = c->numerics == TD_NUMERICS_REF || (c->numerics == TD_NUMERICS_AUTO && m->quantised);
    o.index_sim4 = c->index_sim4;
    o.nvfp4_activations = c->nvfp4_activations;
    if (o.nvfp4_activations && !o.ref)
        return td_fail(
            err, TD_CONFIG,
            "nvfp4_activations = on: expected numerics ref, found plain, which rounds no "
            "activations");
    o.score_bf16 = c->score_dtype == TD_SCORE_BF16;
    storage_types(c, &o);
    o.index_topk = c->index_topk ? (uint32_t)c->index_topk : m->index_topk;
    o.max_context = c->max_context ? (uint32_t)c->max_context : m->max_positions;
    if (o.max_context > m->max_positions)
        return td_fail(err, TD_CONFIG,
                       "max_context: expected at most the checkpoint's %u, found %u",
                       m->max_positions, o.max_context);
    if (o.max_context < 2)
        return td_fail(
            err, TD_CONFIG,
            "max_context: expected at least 2, a prompt's token and an answer's, found %u",
            o.max_context);
    uint32_t context_pages = td_kv_pages(o.max_context, td_engine_split(&o));
    o.pages = (uint32_t)(c->pool_pages ? c->pool_pages : 2 * context_pages);
    o.slots = (uint32_t)c->max_running;
    o.max_runs = o.slots;
    /* A step must hold one token of every running sequence even when chunks are small. */
    o.max_tokens = (uint32_t)(c->chunk_tokens > o.slots ? c->chunk_tokens : o.slots);
    o.eager = c->eager;
    o.threads = c->threads ? (uint32_t)c->threads : usable_cores();
    if (!c->threads && o.threads < o.ranks) o.threads = o.ranks;
    *ret = o;
    return TD_OK;
}

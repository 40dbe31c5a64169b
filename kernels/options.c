/* From typed settings and a checkpoint to what the engine is built with: every "auto" resolved,
 * everything that does not exist refused by name. */
#include <sched.h>

#include "kernels/engine.h"
#include "kernels/threads.h"

static td_status refuse_numerics(const struct td_config *c, const struct td_model_config *m,
                                 struct td_error *err) {
    if (c->numerics == TD_NUMERICS_REF)
        return td_fail(err, TD_UNSUPPORTED,
                       "numerics=ref (quantised activations) does not exist "
                       "in this build; set numerics=plain");
    if (c->numerics == TD_NUMERICS_AUTO && m->quantised)
        return td_fail(err, TD_UNSUPPORTED,
                       "numerics=auto means ref for a checkpoint with "
                       "quantization_config, and ref does not exist in this build; set "
                       "numerics=plain");
    if (c->index_sim4)
        return td_fail(err, TD_UNSUPPORTED,
                       "index_sim4=on belongs to numerics=ref, which does "
                       "not exist in this build; set index_sim4=off");
    if (c->score_dtype != TD_SCORE_FP32)
        return td_fail(err, TD_UNSUPPORTED,
                       "score_dtype=bf16 does not exist in this build; set "
                       "score_dtype=fp32");
    return TD_OK;
}

static td_status storage_types(const struct td_config *c, struct td_engine_options *o,
                               struct td_error *err) {
    switch (c->index_key_dtype) {
    case TD_KEY_BF16:
        o->key_dtype = TD_KV_KEY_BF16;
        break;
    case TD_KEY_FP32:
        o->key_dtype = TD_KV_KEY_FP32;
        break;
    case TD_KEY_FP8:
        o->key_dtype = TD_KV_KEY_FP8;
        break;
    default:
        return td_fail(err, TD_UNSUPPORTED,
                       "index_key_dtype=fp4 does not exist in this build; "
                       "expected bf16, fp32 or fp8");
    }
    switch (c->kv_dtype) {
    case TD_ROW_AUTO:
    case TD_ROW_BF16:
        o->row_dtype = TD_KV_ROW_BF16;
        break;
    case TD_ROW_FP32:
        o->row_dtype = TD_KV_ROW_FP32;
        break;
    default:
        return td_fail(err, TD_UNSUPPORTED,
                       "kv_dtype=fp8 does not exist in this build; expected "
                       "auto, bf16 or fp32");
    }
    return TD_OK;
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
    TD_TRY(refuse_numerics(c, m, err));
    TD_TRY(storage_types(c, &o, err));
    o.index_topk = c->index_topk ? (uint32_t)c->index_topk : m->index_topk;
    o.max_context = c->max_context ? (uint32_t)c->max_context : m->max_positions;
    if (o.max_context > m->max_positions)
        return td_fail(err, TD_CONFIG,
                       "max_context: expected at most the checkpoint's %u, found %u",
                       m->max_positions, o.max_context);
    uint64_t context_pages = ((uint64_t)o.max_context + TD_KV_PAGE_TOKENS - 1) / TD_KV_PAGE_TOKENS;
    o.pages = (uint32_t)(c->pool_pages ? c->pool_pages : 2 * context_pages);
    o.slots = (uint32_t)c->max_running;
    o.max_runs = o.slots;
    /* A step must hold one token of every running sequence even when chunks are small. */
    o.max_tokens = (uint32_t)(c->chunk_tokens > o.slots ? c->chunk_tokens : o.slots);
    o.threads = c->threads ? (uint32_t)c->threads : usable_cores();
    *ret = o;
    return TD_OK;
}

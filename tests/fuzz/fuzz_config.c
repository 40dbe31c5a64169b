/* config.json: what is accepted lies within the limits that arrays and kernels are made for. */
#include <math.h>

#include "kernels/model/config.h"
#include "tests/fuzz/target.h"

int td_fuzz_accepted;
struct td_error td_fuzz_error;

static void check_numbers(const struct td_model_config *c) {
    const float all[] = {c->routed_scale, c->swiglu_limit,   c->rms_eps,
                         c->hc_eps,       c->rope_theta,     c->compress_rope_theta,
                         c->yarn_factor,  c->yarn_beta_fast, c->yarn_beta_slow};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PROMISE(isfinite(all[i]) && all[i] > 0.0f);
    PROMISE(c->yarn_original_positions > 0 && c->max_positions > 0 && c->max_positions <= 1 << 24);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct td_model_config c;
    td_status st = td_model_config_parse("input", (const char *)data, size, &c, &td_fuzz_error);
    td_fuzz_accepted = st == TD_OK;
    if (st != TD_OK) {
        PROMISE(st == TD_FORMAT && td_fuzz_error.text[0]);
        return 0;
    }
    PROMISE(c.layers > 0 && c.layers <= TD_MAX_LAYERS && c.hash_layers <= c.layers);
    for (uint32_t i = 0; i < c.layers; i++)
        PROMISE(c.kind[i] <= TD_LAYER_HCA);
    PROMISE(c.heads > 0 && c.o_groups > 0 && c.heads % c.o_groups == 0);
    PROMISE(c.experts > 0 && c.experts <= TD_MAX_EXPERTS);
    PROMISE(c.experts_per_token > 0 && c.experts_per_token <= c.experts &&
            c.experts_per_token <= TD_MAX_EXPERTS_PER_TOKEN);
    PROMISE(c.index_topk > 0 && c.index_topk <= TD_MAX_INDEX_TOPK);
    PROMISE(c.bos_id >= 0 && (uint32_t)c.bos_id < c.vocab);
    PROMISE(c.eos_id >= 0 && (uint32_t)c.eos_id < c.vocab);
    check_numbers(&c);
    return 0;
}

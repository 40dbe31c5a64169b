/* See plan_worker.h. */
#include "deploy/tool/plan_worker.h"

#include <stdio.h>

td_status td_plan_worker(const struct td_plan_asked *a, struct td_worker_plan *ret,
                         struct td_error *err) {
    struct td_config c = *a->config;
    struct td_model *model = NULL;
    struct td_engine_options o;
    td_status st;
    const struct td_plan_device device = {.bytes = a->memory, .fraction = (uint32_t)c.mem_fraction};
    /* the device is planned with, not looked for */
    snprintf(c.device, sizeof c.device, "cpu");
    c.tp = a->ranks;
    TD_TRY(td_model_outline(a->model, a->format, &model, err));
    TD_TRY_GOTO(td_engine_options_from(&c, &model->config, &o, err), close);
    if (device.bytes) {
        o.backend = td_worker_plan_cuda();
        o.pages = (uint32_t)c.pool_pages;
    }
    uint64_t slabs = a->prefill ? c.send_slabs : c.max_prefill_peers * c.landing_slabs;
    st = td_worker_plan(model, &o, &device, c.slab_bytes, (uint32_t)slabs, c.grammar_mask_bytes,
                        ret, err);
close:
    td_model_close(model);
    return st;
}

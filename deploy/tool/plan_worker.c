/* See plan_worker.h. */
#include "deploy/tool/plan_worker.h"

#include <stdio.h>

/* The options of a worker as it is planned. */
static td_status options_of(const struct td_plan_asked *a, const struct td_model *model,
                            struct td_engine_options *ret, struct td_error *err) {
    struct td_config c = *a->config;
    /* the device is planned with, not looked for */
    snprintf(c.device, sizeof c.device, "cpu");
    c.tp = a->ranks;
    TD_TRY(td_engine_options_from(&c, &model->config, ret, err));
    if (a->memory) {
        ret->backend = td_worker_plan_cuda();
        ret->pages = (uint32_t)c.pool_pages;
    }
    return TD_OK;
}

static td_status plan_model(const struct td_plan_asked *a, const struct td_model *model,
                            struct td_worker_plan *ret, struct td_error *err) {
    const struct td_config *c = a->config;
    const struct td_plan_device device = {.bytes = a->memory,
                                          .fraction = (uint32_t)c->mem_fraction};
    uint64_t slabs = a->prefill ? c->send_slabs : c->max_prefill_peers * c->landing_slabs;
    struct td_engine_options o;
    TD_TRY(options_of(a, model, &o, err));
    return td_worker_plan(model, &o, &device, c->slab_bytes, (uint32_t)slabs, c->grammar_mask_bytes,
                          ret, err);
}

td_status td_plan_worker(const struct td_plan_asked *a, struct td_worker_plan *ret,
                         struct td_error *err) {
    struct td_model *model = NULL;
    TD_TRY(td_model_outline(a->model, a->format, &model, err));
    td_status st = plan_model(a, model, ret, err);
    td_model_close(model);
    return st;
}

/* ---- both layouts ---- */

td_status td_plan_layout(const struct td_plan_asked *a, bool split, struct td_plan_layout *ret,
                         struct td_error *err) {
    struct td_config c = *a->config;
    struct td_plan_asked asked = *a;
    struct td_model *model = NULL;
    td_status st;
    c.kv_layout = split ? TD_LAYOUT_SPLIT : TD_LAYOUT_REPLICATE;
    /* pages of another layout hold other numbers of tokens */
    if (split != (a->config->kv_layout == TD_LAYOUT_SPLIT)) c.pool_pages = 0;
    asked.config = &c;
    *ret = (struct td_plan_layout){0};
    TD_TRY(td_model_outline(a->model, a->format, &model, err));
    st = plan_model(&asked, model, &ret->plan, err);
    if (st == TD_NO_MEMORY) {
        td_model_close(model);
        return TD_OK;
    }
    const struct td_engine_options *o = &ret->plan.options;
    uint64_t *to[] = {&ret->one, &ret->all, &ret->chunk};
    uint32_t rows[] = {1, o->slots, o->max_tokens};
    for (int i = 0; i < 3 && st == TD_OK; i++)
        st = td_engine_exchanged(model, o, rows[i], to[i], err);
    td_model_close(model);
    return st;
}

static uint64_t pool_tokens(const struct td_worker_plan *p) {
    return (uint64_t)p->options.pages * td_kv_page_tokens(td_engine_split(&p->options));
}

td_status td_plan_print_layouts(const struct td_plan_asked *a, uint32_t far, struct td_error *err) {
    static const char *const word[] = {"replicate", "split"};
    if (a->ranks < 2) return TD_OK;
    printf("  KV state by kv_layout; what one of %u ranks receives, sums in parts\n"
           "    %-10s %12s %10s %12s %13s %14s %14s\n",
           a->ranks, "", "pool tokens", "scratch", "sequences", "step of 1", "of all", "chunk");
    for (int split = 0; split < 2; split++) {
        struct td_plan_layout l;
        TD_TRY(td_plan_layout(a, split, &l, err));
        if (l.plan.options.pages == 0) {
            printf("    %-10s does not fit\n", word[split]);
            continue;
        }
        printf("    %-10s %12llu %7.2f GB %5u of %3uK %10.2f MB %8.1f MB/%-3u %7.0f MB/%u\n",
               word[split], (unsigned long long)pool_tokens(&l.plan),
               (double)l.plan.engine.scratch / 1e9, td_worker_plan_sequences(&l.plan, far),
               far / 1024, (double)l.one / 1e6, (double)l.all / 1e6, l.plan.options.slots,
               (double)l.chunk / 1e6, l.plan.options.max_tokens);
    }
    return TD_OK;
}

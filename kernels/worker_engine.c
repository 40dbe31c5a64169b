/* Start-up and steps of a worker's engine. */
#include "kernels/worker_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/text/tokenizer.h"
#include "kernels/device.h"
#include "kernels/worker_plan.h"

static void name_model(struct td_worker_engine *w, const struct td_config *c) {
    const char *name = c->model_name;
    if (!*name) {
        size_t n = strlen(c->model_dir);
        while (n > 0 && c->model_dir[n - 1] == '/')
            n--;
        size_t from = n;
        while (from > 0 && c->model_dir[from - 1] != '/')
            from--;
        snprintf(w->model_name, sizeof w->model_name, "%.*s", (int)(n - from), c->model_dir + from);
        return;
    }
    snprintf(w->model_name, sizeof w->model_name, "%s", name);
}

/* The settings as they were resolved. */
static void show_effective(const struct td_worker_engine *w, struct td_config *c) {
    const struct td_engine_options *o = &w->options;
    static const uint32_t row[] = {[TD_KV_ROW_BF16] = TD_ROW_BF16,
                                   [TD_KV_ROW_FP32] = TD_ROW_FP32,
                                   [TD_KV_ROW_FP8] = TD_ROW_FP8};
    c->numerics = o->ref ? TD_NUMERICS_REF : TD_NUMERICS_PLAIN;
    c->kv_dtype = row[o->row_dtype];
    c->index_topk = o->index_topk;
    c->max_context = o->max_context;
    c->max_running = o->slots;
    c->pool_pages = o->pages;
    c->threads = o->threads;
    snprintf(c->model_name, sizeof c->model_name, "%s", w->model_name);
}

/* Folders without a tokenizer are fine: then no grammar can be enforced. */
static td_status open_samplers(struct td_worker_engine *w, const struct td_config *c,
                               struct td_error *err) {
    struct td_tokenizer *t = NULL;
    char path[TD_CONFIG_STRING_MAX + 32];
    snprintf(path, sizeof path, "%s/tokenizer.json", c->model_dir);
    if (access(path, F_OK) == 0) TD_TRY(td_tokenizer_load(c->model_dir, &t, err));
    const struct td_samplers_params p = {.slots = w->options.slots,
                                         .vocab = w->model->config.vocab,
                                         .eos = w->model->config.eos_id,
                                         .tokenizer = t,
                                         .mask_bytes = c->grammar_mask_bytes,
                                         .threads = td_worker_sample_threads(&w->options)};
    td_status st = td_samplers_init(&w->samplers, &p, err);
    td_tokenizer_destroy(t);
    w->mask_bytes = p.mask_bytes;
    return st;
}

td_status td_worker_engine_open(struct td_worker_engine *w, struct td_config *c,
                                const struct td_load_watch *watch, struct td_error *err) {
    memset(w, 0, sizeof *w);
    td_status st;
    TD_TRY_GOTO(td_model_open_from(c, watch, &w->model, err), close);
    TD_TRY_GOTO(td_engine_options_from(c, &w->model->config, &w->options, err), close);
    TD_TRY_GOTO(td_worker_plan_card(w->model, c, &w->options, err), close);
    TD_TRY_GOTO(td_engine_create(w->model, &w->options, &w->engine, err), close);
    w->layout = td_engine_layout(w->engine);
    w->split = td_engine_split(&w->options);
    w->numerics = td_engine_numerics(w->engine, &w->numerics_id);
    TD_TRY_GOTO(open_samplers(w, c, err), close);
    uint32_t samples = w->options.slots > TD_CHOICES_MAX ? w->options.slots : TD_CHOICES_MAX;
    TD_TRY_GOTO(td_selections_init(&w->selections, w->layout, w->options.index_topk,
                                   w->options.max_runs, samples, err),
                close);
    name_model(w, c);
    show_effective(w, c);
    return TD_OK;
close:
    td_worker_engine_close(w);
    return st;
}

static bool lost; /* an engine with a rank that hangs */

bool td_worker_engine_lost(void) {
    return lost;
}

void td_worker_engine_close(struct td_worker_engine *w) {
    td_selections_finish(&w->selections);
    td_samplers_finish(&w->samplers);
    if (td_engine_destroy(w->engine))
        td_model_close(w->model);
    else
        lost = true;
    memset(w, 0, sizeof *w);
}

td_status td_worker_engine_step(struct td_worker_engine *w, const struct td_run *runs,
                                uint32_t n_runs, const struct td_worker_sample *samples,
                                uint32_t n_samples, struct td_token *tokens,
                                const struct td_selection **ret_selections, struct td_error *failed,
                                struct td_error *err) {
    const float *logits = NULL;
    struct td_capture *capture = NULL;
    for (uint32_t i = 0; ret_selections && !capture && i < n_samples; i++)
        if (samples[i].sampling->selections) capture = td_selections_begin(&w->selections);
    td_samplers_follow(&w->samplers, samples, n_samples);
    td_status st = td_engine_step(w->engine, runs, n_runs, &logits, capture, err);
    td_samplers_wait(&w->samplers);
    TD_TRY(st);
    for (uint32_t i = 0; capture && i < n_samples; i++)
        if (samples[i].sampling->selections) td_selections_add(&w->selections, i, samples[i].row);
    if (ret_selections) *ret_selections = capture ? td_selections_of(&w->selections) : NULL;
    td_samplers_draw_all(&w->samplers, logits, samples, n_samples, tokens, failed);
    return TD_OK;
}

void td_worker_engine_memory_text(const struct td_worker_engine *w, size_t slabs, char *buf,
                                  size_t cap) {
    struct td_worker_plan p = {
        .options = w->options,
        .layout = *w->layout,
        .sampling = td_samplers_bytes(w->options.slots, w->model->config.vocab,
                                      td_worker_sample_threads(&w->options)),
        .grammars =
            td_samplers_grammar_bytes(w->options.slots, w->model->config.vocab, w->mask_bytes),
        .selections = w->selections.bytes,
        .slabs = slabs,
    };
    if (w->options.backend && w->options.backend->memory)
        td_worker_plan_beside(&p, w->layout->layers);
    td_engine_memory(w->engine, &p.engine);
    td_worker_plan_text(&p, buf, cap);
}

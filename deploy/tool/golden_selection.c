/* Golden files of index selections: which compressed entries each CSA layer chose for the last
 * four prompt positions. */
#include "deploy/tool/golden.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

enum { POSITIONS = 4 };

struct pool { /* per CSA layer, over all cases and positions */
    uint64_t golden, common;
};

/* Layer number of the n-th CSA layer. */
static uint32_t csa_layer(const struct td_model_config *c, uint32_t n) {
    uint32_t l = 0;
    for (;; l++)
        if (c->kind[l] == TD_LAYER_CSA && n-- == 0) return l;
}

static uint32_t csa_layers(const struct td_model_config *c) {
    uint32_t n = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        n += c->kind[l] == TD_LAYER_CSA;
    return n;
}

/* One position in all layers: adds to the pools what is equal. */
static td_status compare(const struct td_golden *g, const json_t *selected, uint32_t position,
                         const struct td_capture *c, struct pool *pools, uint64_t *missed,
                         struct td_error *err) {
    for (uint32_t n = 0; n < c->csa_layers; n++) {
        char key[16], what[48];
        int32_t *golden;
        uint32_t n_golden;
        snprintf(key, sizeof key, "%u", csa_layer(&g->model->config, n));
        snprintf(what, sizeof what, "selected_last4.%s[%u]", key, position);
        const json_t *four = json_object_get(selected, key);
        if (json_array_size(four) != POSITIONS)
            return td_fail(err, TD_FORMAT,
                           "%.200s: selected_last4.%s: expected %d positions, found "
                           "%zu",
                           g->path, key, POSITIONS, json_array_size(four));
        TD_TRY(td_golden_ids(g, json_array_get(four, position), what, 0, -1, INT32_MAX, &golden,
                             &n_golden, err));
        const int32_t *ours = c->entries + (size_t)n * c->topk;
        uint32_t want = td_golden_count(golden, n_golden);
        uint32_t common = td_golden_overlap(ours, c->topk, golden, n_golden);
        pools[n].golden += want;
        pools[n].common += common;
        *missed += want - common;
        free(golden);
    }
    return TD_OK;
}

static td_status run_case(struct td_golden *g, const json_t *v, uint32_t index,
                          struct td_capture *capture, struct pool *pools, struct td_error *err) {
    const json_t *selected = json_object_get(v, "selected_last4");
    const float *logits;
    int32_t *ids;
    uint32_t n, done = 0;
    uint64_t missed = 0;
    TD_TRY(td_golden_ids(g, json_object_get(v, "prompt_ids"), "prompt_ids", 0, 0,
                         g->model->config.vocab - 1, &ids, &n, err));
    td_status st = TD_OK;
    if (n < POSITIONS)
        st = td_fail(err, TD_FORMAT, "%.200s: case %u: expected a prompt of at least %d tokens",
                     g->path, index, POSITIONS);
    for (uint32_t p = 0; p < POSITIONS && st == TD_OK; p++) {
        uint32_t to = n - POSITIONS + 1 + p;
        st = td_golden_run(g, ids, done, to, &logits, capture, err);
        if (st == TD_OK) st = compare(g, selected, p, capture, pools, &missed, err);
        done = to;
    }
    if (st == TD_OK)
        printf("case %u: %u tokens, %llu recorded entries not chosen\n", index, n,
               (unsigned long long)missed);
    free(ids);
    return st;
}

/* The pooled overlap of each layer; true when all reach what the storage types must. */
static bool report(const struct td_golden *g, const struct pool *pools, uint32_t layers,
                   size_t cases) {
    bool pass = true;
    double least = g->exact ? 1.0 : TD_GOLDEN_OVERLAP_SERVED;
    for (uint32_t n = 0; n < layers; n++)
        pass = pass && (double)pools[n].common >= least * (double)pools[n].golden;
    printf("at least %.0f %% of the recorded entries in every layer: %s\n", 100 * least,
           pass ? "ok" : "FAILED");
    printf("golden: cases %zu, overlap", cases);
    for (uint32_t n = 0; n < layers; n++)
        printf("%s layer %u %.2f %%", n ? "," : "", csa_layer(&g->model->config, n),
               100.0 * (double)pools[n].common / (double)(pools[n].golden ? pools[n].golden : 1));
    printf("\n");
    return pass;
}

td_status td_golden_selections(struct td_golden *g, const void *root, bool *ret_pass,
                               struct td_error *err) {
    const json_t *cases = json_object_get(root, "cases");
    size_t n = json_array_size(cases), most = 1;
    uint32_t layers = csa_layers(&g->model->config), topk = g->options.index_topk;
    if (layers == 0)
        return td_fail(err, TD_UNSUPPORTED, "%.200s: the model has no layer with an indexer",
                       g->path);
    struct td_capture capture = {.runs = 1, .csa_layers = layers, .topk = topk};
    struct pool *pools = calloc(layers, sizeof *pools);
    capture.entries = calloc((size_t)layers * topk, sizeof *capture.entries);
    for (size_t i = 0; i < n; i++) {
        size_t tokens = json_array_size(json_object_get(json_array_get(cases, i), "prompt_ids"));
        most = tokens > most ? tokens : most;
    }
    td_status st = pools && capture.entries
                       ? td_golden_engine(g, (uint32_t)most, err)
                       : td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    for (size_t i = 0; i < n && st == TD_OK; i++)
        st = run_case(g, json_array_get(cases, i), (uint32_t)i, &capture, pools, err);
    if (st == TD_OK) *ret_pass = report(g, pools, layers, n);
    free(pools);
    free(capture.entries);
    return st;
}

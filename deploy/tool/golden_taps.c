/* Golden files of layer taps: every layer alone from its recorded input streams, and the logits
 * of the whole pass.
 *
 * Ties: index scores of several entries can be equal (often exactly 0) where the top-k cuts. The
 * engine then takes the lowest entries; the recorded outputs come from a mask by score, which
 * keeps all of them. Such a token is told by its record being reproduced with a larger k.
 *
 * Flips (ref numerics): a value next to a rounding boundary goes to either side by the last bits
 * of a sum, and one step of e4m3 is far above the limit, also for the tokens that attend to such a
 * row. Such a token is told by its record being reproduced, to the same limit, when the values to
 * be rounded meet noise like that of fp32 sums (golden_nudge.c). With a wrong rule it is not.
 *
 * Both are counted and shown. */
#include "deploy/tool/golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/model/safetensors.h"

enum {
    TAPS = 3,    /* attn_out, ffn_out, the next layer's input */
    NUDGES = 64, /* tries to find the side of every boundary that the record took */
};

struct taps {
    struct td_safetensors file;
    uint32_t tokens;
    int32_t *ids;                        /* [tokens] */
    float *golden;                       /* [tokens, 4, hidden]; the largest tap */
    float *in;                           /* [tokens, 4, hidden] */
    float *attn, *ffn, *out;             /* ours */
    double *error, *again;               /* [TAPS][tokens], of the layer at hand */
    bool *flipped;                       /* [tokens], of the layer at hand */
    int32_t *selected, *golden_selected; /* [tokens, topk] */
};

static void finish_taps(struct taps *t) {
    td_safetensors_finish(&t->file);
    free(t->ids);
    free(t->golden);
    free(t->in);
    free(t->attn);
    free(t->ffn);
    free(t->out);
    free(t->error);
    free(t->again);
    free(t->flipped);
    free(t->selected);
    free(t->golden_selected);
}

/* Copies tensor `name` of a 4-byte type and `n` elements. */
static td_status read_tap(const struct td_golden *g, const struct taps *t, const char *name,
                          enum td_dtype dtype, size_t n, void *ret, struct td_error *err) {
    const struct td_tensor *x = td_safetensors_find(&t->file, name);
    if (!x || x->dtype != dtype || x->bytes != 4 * n)
        return td_fail(err, TD_FORMAT,
                       "%.200s: tensor %s: expected %s with %zu elements, found %s%s", g->path,
                       name, dtype == TD_DTYPE_I32 ? "I32" : "F32", n,
                       x ? x->dtype_name : "nothing", x ? " of another size" : "");
    memcpy(ret, x->data, 4 * n);
    return TD_OK;
}

static td_status open_taps(struct td_golden *g, struct taps *t, struct td_error *err) {
    const struct td_model_config *c = &g->model->config;
    TD_TRY(td_safetensors_open(&t->file, g->path, err));
    const char *numerics = td_safetensors_meta(&t->file, "numerics");
    const char *want = g->ref ? "ref" : "plain",
               *sim4 = td_safetensors_meta(&t->file, "index_sim4");
    if (!numerics || strcmp(numerics, want) != 0)
        return td_fail(err, TD_FORMAT, "%.200s: expected taps of numerics %s, found %.20s", g->path,
                       want, numerics ? numerics : "none named");
    g->options.index_sim4 = sim4 && strcmp(sim4, "on") == 0;
    const struct td_tensor *ids = td_safetensors_find(&t->file, "ids");
    if (!ids || ids->rank != 1 || ids->shape[0] == 0 || ids->shape[0] > c->max_positions)
        return td_fail(err, TD_FORMAT, "%.200s: tensor ids: expected I32 [tokens]", g->path);
    t->tokens = (uint32_t)ids->shape[0];
    size_t n = t->tokens, streams = n * TD_HC_STREAMS * c->hidden;
    t->ids = calloc(n, sizeof *t->ids);
    t->golden = calloc(streams + c->vocab, sizeof *t->golden);
    t->in = calloc(streams, sizeof *t->in);
    t->out = calloc(streams, sizeof *t->out);
    t->attn = calloc(n * c->hidden, sizeof *t->attn);
    t->ffn = calloc(n * c->hidden, sizeof *t->ffn);
    t->error = calloc(n * TAPS, sizeof *t->error);
    t->again = calloc(n * TAPS, sizeof *t->again);
    t->flipped = calloc(n, sizeof *t->flipped);
    t->selected = calloc(n * g->options.index_topk, sizeof *t->selected);
    t->golden_selected = calloc(n * g->options.index_topk, sizeof *t->golden_selected);
    if (!t->ids || !t->golden || !t->in || !t->out || !t->attn || !t->ffn || !t->error ||
        !t->again || !t->flipped || !t->selected || !t->golden_selected)
        return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    return read_tap(g, t, "ids", TD_DTYPE_I32, n, t->ids, err);
}

/* Error of every token, relative to the largest value of the whole tap. */
static td_status compare_tap(const struct td_golden *g, struct taps *t, uint32_t layer,
                             const char *what, const float *ours, size_t width, double *ret,
                             struct td_error *err) {
    char name[64];
    size_t n = t->tokens * width;
    double most = 0;
    snprintf(name, sizeof name, "layer.%u.%s", layer, what);
    TD_TRY(read_tap(g, t, name, TD_DTYPE_F32, n, t->golden, err));
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)t->golden[i]));
    for (uint32_t i = 0; i < t->tokens; i++)
        ret[i] = td_golden_error(ours + i * width, t->golden + i * width, width, most);
    return TD_OK;
}

/* Tokens whose selected set is not the recorded one, but for flips. */
static td_status compare_selected(const struct td_golden *g, struct taps *t, uint32_t layer,
                                  uint32_t *ret, struct td_error *err) {
    char name[64];
    uint32_t k = g->options.index_topk, differ = 0;
    snprintf(name, sizeof name, "layer.%u.selected", layer);
    TD_TRY(read_tap(g, t, name, TD_DTYPE_I32, (size_t)t->tokens * k, t->golden_selected, err));
    for (uint32_t i = 0; i < t->tokens; i++) {
        const int32_t *ours = t->selected + (size_t)i * k,
                      *want = t->golden_selected + (size_t)i * k;
        uint32_t n = td_golden_count(want, k);
        bool same = td_golden_count(ours, k) == n && td_golden_overlap(ours, k, want, k) == n;
        differ += !same && !t->flipped[i];
    }
    *ret = differ;
    return TD_OK;
}

/* Layer `layer` of `e` from the recorded input: error [TAPS][tokens]. */
static td_status run_tap(const struct td_golden *g, struct td_engine *e, struct taps *t,
                         uint32_t layer, int32_t *selected, double *error, struct td_error *err) {
    size_t hidden = g->model->config.hidden, streams = TD_HC_STREAMS * hidden;
    char name[64];
    snprintf(name, sizeof name, "layer.%u.in", layer);
    TD_TRY(read_tap(g, t, name, TD_DTYPE_F32, t->tokens * streams, t->in, err));
    struct td_layer_tap tap = {.layer = layer,
                               .n = t->tokens,
                               .ids = t->ids,
                               .x_in = t->in,
                               .attn_out = t->attn,
                               .ffn_out = t->ffn,
                               .x_out = t->out,
                               .selected = selected};
    TD_TRY(td_engine_layer(e, &tap, err));
    TD_TRY(compare_tap(g, t, layer, "attn_out", t->attn, hidden, error, err));
    TD_TRY(compare_tap(g, t, layer, "ffn_out", t->ffn, hidden, error + t->tokens, err));
    return compare_tap(g, t, layer + 1, "in", t->out, streams, error + 2 * (size_t)t->tokens, err);
}

static double token_error(const struct taps *t, const double *error, uint32_t i) {
    return fmax(error[i], fmax(error[t->tokens + i], error[2 * (size_t)t->tokens + i]));
}

static bool outside(const struct taps *t, uint32_t i) {
    return token_error(t, t->error, i) > TD_GOLDEN_TAPS_EXACT;
}

/* Token i takes over the errors of a run that reproduced it; false when that one did not. */
static bool reproduced(struct taps *t, uint32_t i) {
    if (token_error(t, t->again, i) > TD_GOLDEN_TAPS_EXACT) return false;
    for (size_t k = 0; k < TAPS; k++)
        t->error[k * t->tokens + i] = t->again[k * t->tokens + i];
    return true;
}

/* Tokens outside the limit where the selection had to cut. */
static bool may_be_tie(const struct td_golden *g, const struct taps *t, uint32_t i) {
    return outside(t, i) && (i + 1) / TD_CSA_RATIO > g->options.index_topk;
}

/* Runs the layer with ever larger k while tokens are left that could be ties; one reproduced
 * takes over its errors. */
static td_status resolve_ties(const struct td_golden *g, struct taps *t, uint32_t layer,
                              uint32_t *ret_ties, struct td_error *err) {
    uint32_t most = t->tokens / TD_CSA_RATIO, ties = 0;
    struct td_engine_options o = g->options;
    if (most > TD_MAX_INDEX_TOPK) most = TD_MAX_INDEX_TOPK;
    for (o.index_topk++; o.index_topk <= most; o.index_topk++) {
        uint32_t open = 0;
        for (uint32_t i = 0; i < t->tokens; i++)
            open += may_be_tie(g, t, i);
        if (open == 0) break;
        struct td_engine *e;
        TD_TRY(td_engine_create(g->model, &o, &e, err));
        td_status st = run_tap(g, e, t, layer, NULL, t->again, err);
        td_engine_destroy(e);
        if (st != TD_OK) return st;
        for (uint32_t i = 0; i < t->tokens; i++)
            ties += may_be_tie(g, t, i) && reproduced(t, i);
    }
    *ret_ties = ties;
    return TD_OK;
}

/* Runs with noise while tokens are left outside. */
static td_status resolve_flips(const struct td_golden *g, struct taps *t, uint32_t layer,
                               uint32_t *ret_flips, double *ret_largest, struct td_error *err) {
    uint32_t flips = 0, open = 0;
    double largest = 0;
    for (uint32_t i = 0; i < t->tokens; i++)
        open += outside(t, i);
    if (open == 0) return TD_OK;
    struct td_engine_options o = g->options;
    struct td_engine *e;
    o.ops = td_golden_nudge_ops();
    o.backend = NULL; /* noise is added on the CPU, in the order of one rank */
    o.ranks = 1;
    o.pages = td_kv_pages(o.max_context, 0);
    memset(o.device, 0, sizeof o.device);
    TD_TRY(td_engine_create(g->model, &o, &e, err));
    td_status st = TD_OK;
    for (uint64_t seed = 1; seed <= NUDGES && open > 0 && st == TD_OK; seed++) {
        td_golden_nudge(seed);
        st = run_tap(g, e, t, layer, NULL, t->again, err);
        for (uint32_t i = 0; st == TD_OK && i < t->tokens; i++) {
            double before = token_error(t, t->error, i);
            if (!outside(t, i) || !reproduced(t, i)) continue;
            t->flipped[i] = true;
            largest = fmax(largest, before);
            flips++;
            open--;
        }
    }
    td_engine_destroy(e);
    *ret_flips = flips;
    *ret_largest = largest;
    return st;
}

static td_status run_layer(struct td_golden *g, struct taps *t, uint32_t layer, double *ret_error,
                           uint32_t *ret_differ, uint32_t *ret_flips, struct td_error *err) {
    bool csa = g->model->config.kind[layer] == TD_LAYER_CSA;
    double worst[TAPS] = {0}, largest = 0;
    uint32_t ties = 0, flips = 0;
    *ret_differ = 0;
    memset(t->flipped, 0, t->tokens * sizeof *t->flipped);
    TD_TRY(run_tap(g, g->engine, t, layer, csa ? t->selected : NULL, t->error, err));
    if (csa && g->exact) TD_TRY(resolve_ties(g, t, layer, &ties, err));
    if (g->ref && g->exact) TD_TRY(resolve_flips(g, t, layer, &flips, &largest, err));
    if (csa) TD_TRY(compare_selected(g, t, layer, ret_differ, err));
    for (size_t k = 0; k < TAPS; k++)
        for (uint32_t i = 0; i < t->tokens; i++)
            worst[k] = fmax(worst[k], t->error[k * t->tokens + i]);
    printf("layer %u: rel err attn_out %.2e, ffn_out %.2e, streams %.2e", layer, worst[0], worst[1],
           worst[2]);
    if (csa) printf(", other selection at %u of %u tokens", *ret_differ, t->tokens);
    if (ties) printf(", ties at the cut at %u", ties);
    if (flips) printf(", rounding flips at %u tokens, of up to %.2e", flips, largest);
    printf("\n");
    *ret_flips = flips;
    *ret_error = fmax(worst[0], fmax(worst[1], worst[2]));
    return TD_OK;
}

static td_status run_all(struct td_golden *g, struct taps *t, bool *ret_pass,
                         struct td_error *err) {
    const struct td_model_config *c = &g->model->config;
    double served = g->ref ? TD_GOLDEN_REF_WORST : td_golden_served(g);
    double layer_limit = g->exact ? TD_GOLDEN_TAPS_EXACT : served;
    double logit_limit = g->exact && !g->ref ? TD_GOLDEN_LOGITS_EXACT : served;
    double error[TD_MAX_LAYERS], worst = 0, last;
    uint32_t differ, differing = 0, flips, flipped = 0;
    const float *logits;
    for (uint32_t l = 0; l < c->layers; l++) {
        TD_TRY(run_layer(g, t, l, &error[l], &differ, &flips, err));
        worst = fmax(worst, error[l]);
        differing += differ;
        flipped += flips;
    }
    TD_TRY(td_golden_run(g, t->ids, 0, t->tokens, &logits, NULL, err));
    TD_TRY(read_tap(g, t, "last_logits", TD_DTYPE_F32, c->vocab, t->golden, err));
    last = td_golden_error(logits, t->golden, c->vocab, 0);
    printf("logits of the whole pass: rel err %.2e\n", last);
    *ret_pass = worst <= layer_limit && last <= logit_limit && !(g->exact && differing);
    if (g->ref)
        printf("rounding flips: %u of %u tokens in all layers\n", flipped, c->layers * t->tokens);
    printf("tolerance %.0e per layer, %.0e for the logits%s: %s\n", layer_limit, logit_limit,
           g->exact ? ", equal selections" : "", *ret_pass ? "ok" : "FAILED");
    printf("golden: cases %u, worst rel err %.2e, median %.2e, greedy mismatches %d\n", c->layers,
           worst, td_golden_median(error, c->layers),
           td_golden_argmax(logits, c->vocab) != td_golden_argmax(t->golden, c->vocab));
    return TD_OK;
}

td_status td_golden_taps(struct td_golden *g, bool *ret_pass, struct td_error *err) {
    struct taps t = {0};
    td_status st;
    TD_TRY_GOTO(open_taps(g, &t, err), finish);
    TD_TRY_GOTO(td_golden_engine(g, t.tokens, err), finish);
    TD_TRY_GOTO(run_all(g, &t, ret_pass, err), finish);
finish:
    finish_taps(&t);
    return st;
}

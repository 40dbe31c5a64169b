/* Golden files of logits and greedy continuations.
 *
 * A file of ref numerics may hold two parts per case: without and with FP4 rounding of index
 * queries and keys. What counts there is the answer, the greedy tokens through end of text. */
#include "deploy/tool/golden.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { END_OF_TEXT = 1 };

/* Where a case has its results, and the setting they are for. */
static const struct part {
    const char *key; /* NULL: in the case itself */
    bool sim4;
} one_part[] = {{NULL, false}}, two_parts[] = {{"ref_bf16key", false}, {"ref_fp4key", true}};

struct one_case {
    int32_t *ids; /* [prompt + greedy - 1] */
    int32_t *prompt, *greedy;
    uint32_t n_prompt, n_greedy;
    float *logits; /* [vocab] */
};

struct totals {
    uint32_t cases, mismatches;
    uint32_t bad_mismatches; /* plain: no near-tie; ref: inside the answer */
    double *error;           /* [cases] */
    double worst;
};

static void finish_case(struct one_case *c) {
    free(c->ids);
    free(c->prompt);
    free(c->greedy);
    free(c->logits);
}

static td_status read_case(const struct td_golden *g, const json_t *v, const struct part *part,
                           uint32_t index, struct one_case *c, struct td_error *err) {
    uint32_t vocab = g->model->config.vocab;
    const json_t *results = part->key ? json_object_get(v, part->key) : v;
    *c = (struct one_case){0};
    TD_TRY(td_golden_ids(g, json_object_get(v, "prompt_ids"), "prompt_ids", 0, 0, vocab - 1,
                         &c->prompt, &c->n_prompt, err));
    TD_TRY(td_golden_ids(g, json_object_get(results, "greedy_ids"), "greedy_ids", 0, 0, vocab - 1,
                         &c->greedy, &c->n_greedy, err));
    const json_t *logits = json_object_get(results, "last_logits");
    if (!json_is_array(logits) || json_array_size(logits) != vocab)
        return td_fail(err, TD_FORMAT,
                       "%.200s: case %u: last_logits: expected %u numbers, found %zu", g->path,
                       index, vocab, json_array_size(logits));
    c->logits = malloc(vocab * sizeof *c->logits);
    c->ids = malloc((c->n_prompt + c->n_greedy) * sizeof *c->ids);
    if (!c->logits || !c->ids) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    for (uint32_t i = 0; i < vocab; i++)
        c->logits[i] = (float)json_number_value(json_array_get(logits, i));
    memcpy(c->ids, c->prompt, c->n_prompt * sizeof *c->ids);
    memcpy(c->ids + c->n_prompt, c->greedy, c->n_greedy * sizeof *c->ids);
    return TD_OK;
}

/* Token `want` was recorded where `logits` now has another maximum: how far it is behind, as an
 * error of the logits. */
static double shortfall(const float *logits, uint32_t vocab, uint32_t best, int32_t want) {
    double most = 0;
    for (uint32_t i = 0; i < vocab; i++)
        most = fmax(most, fabs((double)logits[i]));
    return ((double)logits[best] - (double)logits[want]) / most;
}

/* Greedy tokens that have to be the recorded ones whatever the logits. */
static uint32_t answer_length(const struct one_case *c) {
    for (uint32_t i = 0; i < c->n_greedy; i++)
        if (c->greedy[i] == END_OF_TEXT) return i + 1;
    return c->n_greedy;
}

/* After a difference the recorded token is fed, so that later ones are judged by themselves. Two
 * logits that both move by the tolerance can swap when they lie closer than twice that. */
static td_status run_greedy(struct td_golden *g, const struct one_case *c, const float *logits,
                            double tolerance, struct totals *t, uint32_t *ret_equal,
                            struct td_error *err) {
    uint32_t vocab = g->model->config.vocab, equal = 0;
    for (uint32_t i = 0; i < c->n_greedy; i++) {
        uint32_t best = td_golden_argmax(logits, vocab);
        if ((int32_t)best == c->greedy[i]) {
            equal++;
        } else {
            double behind = shortfall(logits, vocab, best, c->greedy[i]);
            bool near = behind <= 2 * tolerance;
            bool fine = g->ref ? i >= answer_length(c) : near;
            t->mismatches++;
            t->bad_mismatches += !fine;
            printf("  greedy token %u: recorded %d, now %u; the recorded one is %.2e behind%s\n", i,
                   c->greedy[i], best, behind,
                   !fine    ? ""
                   : g->ref ? " (after the answer)"
                            : " (a near-tie)");
        }
        uint32_t pos = c->n_prompt + i;
        if (i + 1 < c->n_greedy) TD_TRY(td_golden_run(g, c->ids, pos, pos + 1, &logits, NULL, err));
    }
    *ret_equal = equal;
    return TD_OK;
}

static td_status run_case(struct td_golden *g, const json_t *v, const struct part *part,
                          uint32_t index, double tolerance, struct totals *t,
                          struct td_error *err) {
    struct one_case c;
    const float *logits = NULL;
    uint32_t equal = 0;
    td_status st;
    TD_TRY_GOTO(read_case(g, v, part, index, &c, err), finish_one);
    TD_TRY_GOTO(td_golden_run(g, c.ids, 0, c.n_prompt, &logits, NULL, err), finish_one);
    double e = td_golden_error(logits, c.logits, g->model->config.vocab, 0);
    TD_TRY_GOTO(run_greedy(g, &c, logits, tolerance, t, &equal, err), finish_one);
    t->error[t->cases++] = e;
    t->worst = fmax(t->worst, e);
    printf("case %u%s%s: %u tokens, rel err %.2e%s, greedy %u of %u\n", index, part->key ? " " : "",
           part->key ? part->key : "", c.n_prompt, e, e <= tolerance ? "" : " TOO LARGE", equal,
           c.n_greedy);
finish_one:
    finish_case(&c);
    return st;
}

/* The longest prompt with its continuation. */
static uint32_t most_tokens(const json_t *cases, const struct part *part) {
    size_t most = 1;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i);
        const json_t *results = part->key ? json_object_get(c, part->key) : c;
        size_t n = json_array_size(json_object_get(c, "prompt_ids")) +
                   json_array_size(json_object_get(results, "greedy_ids"));
        if (n > most) most = n;
    }
    return most < UINT32_MAX ? (uint32_t)most : UINT32_MAX;
}

static td_status run_part(struct td_golden *g, const json_t *cases, const struct part *part,
                          double tolerance, struct totals *t, struct td_error *err) {
    if (part->key) g->options.index_sim4 = part->sim4;
    TD_TRY(td_golden_engine(g, most_tokens(cases, part), err));
    for (size_t i = 0; i < json_array_size(cases); i++)
        TD_TRY(run_case(g, json_array_get(cases, i), part, (uint32_t)i, tolerance, t, err));
    return TD_OK;
}

static bool report(const struct td_golden *g, struct totals *t, double tolerance) {
    double median = td_golden_median(t->error, t->cases);
    uint32_t bad = g->exact && !g->ref ? t->mismatches : t->bad_mismatches;
    double usual = g->exact ? TD_GOLDEN_REF_MEDIAN : td_golden_served(g);
    bool pass = t->worst <= tolerance && bad == 0 && (!g->ref || median <= usual);
    printf("tolerance %.0e", tolerance);
    if (g->ref) printf(", median %.0e", usual);
    printf(", greedy identical%s: %s\n",
           g->ref     ? " in the answer"
           : g->exact ? ""
                      : " but for near-ties",
           pass ? "ok" : "FAILED");
    printf("golden: cases %u, worst rel err %.2e, median %.2e, greedy mismatches %u\n", t->cases,
           t->worst, median, t->mismatches);
    return pass;
}

td_status td_golden_logits(struct td_golden *g, const void *root, bool *ret_pass,
                           struct td_error *err) {
    const json_t *cases = json_object_get(root, "cases");
    bool both = json_object_get(json_array_get(cases, 0), two_parts[0].key) != NULL;
    const struct part *parts = both ? two_parts : one_part;
    size_t n_parts = both ? 2 : 1;
    double tolerance = g->ref     ? TD_GOLDEN_REF_WORST
                       : g->exact ? TD_GOLDEN_LOGITS_EXACT
                                  : td_golden_served(g);
    struct totals t = {.error = calloc(n_parts * json_array_size(cases) + 1, sizeof *t.error)};
    if (!t.error) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    td_status st = TD_OK;
    for (size_t i = 0; i < n_parts && st == TD_OK; i++)
        st = run_part(g, cases, &parts[i], tolerance, &t, err);
    if (st == TD_OK) *ret_pass = report(g, &t, tolerance);
    free(t.error);
    return st;
}

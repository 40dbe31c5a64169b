/* What the three kinds of golden files share: the engine, running ids through it, comparing. */
#include "deploy/tool/golden.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/device.h"

double td_golden_served(const struct td_golden *g) {
    return g->options.backend && !g->options.backend->host ? TD_GOLDEN_LOGITS_DEVICE
                                                           : TD_GOLDEN_LOGITS_SERVED;
}

td_status td_golden_engine(struct td_golden *g, uint32_t tokens, struct td_error *err) {
    uint32_t pages = td_kv_pages(tokens, td_engine_split(&g->options));
    g->options.max_context = tokens;
    g->options.pages = pages;
    g->options.slots = 1;
    g->options.max_runs = 1;
    td_engine_destroy(g->engine);
    free(g->pages);
    g->engine = NULL;
    g->pages = calloc(pages, sizeof *g->pages);
    if (!g->pages) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    for (uint32_t i = 0; i < pages; i++)
        g->pages[i] = i;
    return td_engine_create(g->model, &g->options, &g->engine, err);
}

td_status td_golden_run(struct td_golden *g, const int32_t *ids, uint32_t from, uint32_t to,
                        const float **ret_logits, struct td_capture *capture,
                        struct td_error *err) {
    while (from < to) {
        uint32_t n = to - from < g->options.max_tokens ? to - from : g->options.max_tokens;
        struct td_run run = {.slot = 0,
                             .pos = from,
                             .n = n,
                             .ids = ids + from,
                             .pages = g->pages,
                             .want_logits = from + n == to};
        TD_TRY(
            td_engine_step(g->engine, &run, 1, ret_logits, run.want_logits ? capture : NULL, err));
        from += n;
    }
    return TD_OK;
}

double td_golden_error(const float *ours, const float *golden, size_t n, double most) {
    double worst = 0, own = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)ours[i] - (double)golden[i]);
        if (!(d <= INFINITY)) return INFINITY; /* NaN */
        worst = fmax(worst, d);
        own = fmax(own, fabs((double)golden[i]));
    }
    return worst == 0 ? 0 : worst / (most > 0 ? most : own);
}

uint32_t td_golden_argmax(const float *logits, uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double td_golden_median(double *v, uint32_t n) {
    if (n == 0) return 0;
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

uint32_t td_golden_count(const int32_t *s, uint32_t n) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += s[i] >= 0;
    return count;
}

uint32_t td_golden_overlap(const int32_t *ours, uint32_t n_ours, const int32_t *golden,
                           uint32_t n_golden) {
    uint32_t common = 0, i = 0, k = 0;
    while (i < n_ours && k < n_golden) {
        if (ours[i] < 0)
            i++;
        else if (golden[k] < 0)
            k++;
        else if (ours[i] == golden[k])
            common++, i++, k++;
        else if (ours[i] < golden[k])
            i++;
        else
            k++;
    }
    return common;
}

td_status td_golden_ids(const struct td_golden *g, const void *array, const char *what,
                        uint32_t expect, int64_t lo, int64_t hi, int32_t **ret, uint32_t *ret_n,
                        struct td_error *err) {
    const json_t *a = array;
    size_t n = json_array_size(a);
    enum { MAX_IDS = 1 << 24 };
    if (!json_is_array(a) || n == 0 || n > MAX_IDS || (expect && n != expect)) {
        if (expect)
            return td_fail(err, TD_FORMAT, "%.200s: %s: expected an array of %u ids, found %zu",
                           g->path, what, expect, n);
        return td_fail(err, TD_FORMAT, "%.200s: %s: expected an array of ids", g->path, what);
    }
    int32_t *ids = malloc(n * sizeof *ids);
    if (!ids) return td_fail(err, TD_NO_MEMORY, "%.250s: no memory", g->path);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(a, i);
        if (!json_is_integer(v) || json_integer_value(v) < lo || json_integer_value(v) > hi) {
            free(ids);
            return td_fail(err, TD_FORMAT, "%.200s: %s[%zu]: expected an integer from %lld to %lld",
                           g->path, what, i, (long long)lo, (long long)hi);
        }
        ids[i] = (int32_t)json_integer_value(v);
    }
    *ret = ids;
    *ret_n = (uint32_t)n;
    return TD_OK;
}

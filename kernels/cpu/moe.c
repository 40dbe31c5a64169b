/* Mixture of experts: choice, activation, and the sum over shards. */
#include "kernels/cpu/op.h"
#include "kernels/cpu/tree.h"

/* The k experts with the greatest score + bias, ties to the lower, listed ascending. */
static void choose(const float *score, const float *bias, uint32_t experts, uint32_t k,
                   uint32_t *expert) {
    bool taken[TD_MAX_EXPERTS] = {false};
    for (uint32_t j = 0; j < k; j++) {
        uint32_t best = experts;
        for (uint32_t e = 0; e < experts; e++)
            if (!taken[e] && (best == experts || score[e] + bias[e] > score[best] + bias[best]))
                best = e;
        taken[best] = true;
    }
    for (uint32_t e = 0, j = 0; e < experts; e++)
        if (taken[e]) expert[j++] = e;
}

/* The token's fixed experts, sorted: the order of a sum must not depend on a table's order. */
static void look_up(const int64_t *row, uint32_t k, uint32_t *expert) {
    for (uint32_t j = 0; j < k; j++) {
        uint32_t at = j, e = (uint32_t)row[j];
        for (; at > 0 && expert[at - 1] > e; at--)
            expert[at] = expert[at - 1];
        expert[at] = e;
    }
}

static void route_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_route_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint32_t *expert = a->expert + (size_t)i * a->k;
        float *weight = a->weight + (size_t)i * a->k, score[TD_MAX_EXPERTS], sum = 0.0f;
        for (uint32_t e = 0; e < a->experts; e++)
            score[e] = sqrtf(softplus1(a->logits[(size_t)i * a->experts + e]));
        if (a->tid2eid)
            look_up(a->tid2eid + (size_t)a->ids[i] * a->k, a->k, expert);
        else
            choose(score, a->bias, a->experts, a->k, expert);
        for (uint32_t j = 0; j < a->k; j++)
            sum += score[expert[j]];
        for (uint32_t j = 0; j < a->k; j++)
            weight[j] = score[expert[j]] / sum * a->scale;
    }
}

void TD_OP(route)(const struct td_device *d, const struct td_route_args *a) {
    td_threads_run(d->threads, route_rows, a, a->n);
}

static void swiglu_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_swiglu_args *a = arg;
    const v8 hi = splat8(a->limit), lo = splat8(-a->limit);
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t c = 0; c < a->inner; c += 8) {
            size_t at = (size_t)i * a->inner + c;
            v8 g = load8(a->a + at), u = load8(a->b + at);
            g = select8(g > hi, hi, g);
            u = select8(u > hi, hi, select8(u < lo, lo, u));
            v8 t = g * sigmoid8(g) * u;
            store8(a->t + at, a->weight ? t * splat8(a->weight[i]) : t);
        }
}

void TD_OP(swiglu)(const struct td_device *d, const struct td_swiglu_args *a) {
    td_threads_run(d->threads, swiglu_rows, a, a->rows ? *a->rows : a->n);
}

static void combine_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_combine_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const float *row[TD_MAX_EXPERTS_PER_TOKEN];
        uint32_t shard[TD_MAX_EXPERTS_PER_TOKEN], count = 0;
        for (uint32_t j = 0; j < a->k; j++) {
            size_t at = (size_t)i * a->k + j;
            shard[count] = a->expert[at] * a->shards / a->experts - a->first_shard;
            if (shard[count] >= a->shards_here) continue;
            row[count++] = a->rows + (size_t)a->place[at] * a->hidden;
        }
        for (uint32_t c = 0; c < a->hidden; c += 8) {
            size_t at = (size_t)i * a->hidden + c;
            float sum[TD_MAX_HEADS * 8]; /* a shard is an output group of heads */
            for (uint32_t here = 0, j = 0; here < a->shards_here; here++) {
                v8 own = splat8(0.0f);
                for (; j < count && shard[j] == here; j++) /* they ascend, as experts do */
                    own = own + load8(row[j] + c);
                store8(sum + (size_t)here * 8, own);
            }
            v8 total = tree_sum8(sum, 8, a->shards_here);
            store8(a->y + at, a->shared ? total + load8(a->shared + at) : total);
        }
    }
}

void TD_OP(combine)(const struct td_device *d, const struct td_combine_args *a) {
    td_threads_run(d->threads, combine_rows, a, a->n);
}

/* Mixture of experts: choice, grouping by expert, activation, and the sum over shards. */
#include "kernels/ref/math.h"
#include "kernels/ref/op.h"
#include "kernels/ref/sum.h"

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

void TD_OP(group)(const struct td_device *d, const struct td_group_args *a) {
    (void)d; /* a counting sort: shorter than waking a thread */
    memset(a->offset, 0, (a->count + 1) * sizeof *a->offset);
    for (uint32_t i = 0; i < a->n * a->k; i++) {
        uint32_t e = a->expert[i] - a->first;
        if (e < a->count) a->offset[e + 1]++;
    }
    uint32_t next[TD_MAX_EXPERTS];
    for (uint32_t e = 0; e < a->count; e++) {
        a->offset[e + 1] += a->offset[e];
        next[e] = a->offset[e];
    }
    for (uint32_t i = 0; i < a->n * a->k; i++) {
        uint32_t e = a->expert[i] - a->first;
        if (e >= a->count) continue;
        uint32_t row = next[e]++;
        a->token[row] = i / a->k;
        a->row_weight[row] = a->weight[i];
        a->place[i] = row;
    }
}

static void swiglu_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_swiglu_args *a = arg;
    for (uint32_t i = begin; i < end; i++)
        for (uint32_t c = 0; c < a->inner; c++) {
            size_t at = (size_t)i * a->inner + c;
            float g = a->a[at], u = a->b[at];
            g = g > a->limit ? a->limit : g;
            u = u > a->limit ? a->limit : u < -a->limit ? -a->limit : u;
            float t = g * sigmoid1(g) * u;
            a->t[at] = a->weight ? t * a->weight[i] : t;
        }
}

void TD_OP(swiglu)(const struct td_device *d, const struct td_swiglu_args *a) {
    td_threads_run(d->threads, swiglu_rows, a, a->rows ? *a->rows : a->n);
}

static void combine_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_combine_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        const uint32_t *expert = a->expert + (size_t)i * a->k, *place = a->place + (size_t)i * a->k;
        for (uint32_t c = 0; c < a->hidden; c++) {
            size_t at = (size_t)i * a->hidden + c;
            float sum[TD_MAX_HEADS] = {0.0f}; /* a shard is an output group of heads */
            for (uint32_t j = 0; j < a->k; j++) {
                uint32_t shard = expert[j] * a->shards / a->experts - a->first_shard;
                if (shard < a->shards_here) sum[shard] += a->rows[(size_t)place[j] * a->hidden + c];
            }
            a->y[at] = tree_sum(sum, 1, a->shards_here);
            if (a->shared) a->y[at] += a->shared[at];
        }
    }
}

void TD_OP(combine)(const struct td_device *d, const struct td_combine_args *a) {
    td_threads_run(d->threads, combine_rows, a, a->n);
}

/* Sparse core: one softmax over window rows, compressed entries and the sink. */
#include "kernels/ref/math.h"
#include "kernels/ref/op.h"
#include "kernels/ref/stored.h"
#include "kernels/ref/sum.h"
#include "kernels/scratch.h"

enum { D = TD_HEAD_DIM };

/* The set of one token. */
struct set {
    const struct td_attend_args *a;
    const struct td_op_run *run;
    uint32_t pos, window, count; /* members; the first `window` are window rows */
    const int32_t *selected;
};

static struct set set_of_row(const struct td_attend_args *a, uint32_t i) {
    const struct td_op_batch *b = a->batch;
    uint32_t pos = b->row[i].pos, window = pos + 1 < TD_WINDOW ? pos + 1 : TD_WINDOW;
    struct set s = {a, &b->run[b->row[i].run], pos, window, window, NULL};
    if (a->ml) return s;
    if (b->kv->ratio[a->layer] == TD_HCA_RATIO) s.count += (pos + 1) / TD_HCA_RATIO;
    if (b->kv->ratio[a->layer] == TD_CSA_RATIO) {
        s.selected = a->selected + (size_t)i * a->topk;
        for (uint32_t e = 0; e < a->topk && s.selected[e] >= 0; e++)
            s.count++;
    }
    return s;
}

/* Where member m of the set is stored. */
static struct td_kv_row member(const struct set *s, uint32_t m) {
    const struct td_op_batch *b = s->a->batch;
    uint32_t layer = s->a->layer;
    if (m < s->window) {
        uint32_t t = s->pos + 1 - s->window + m;
        if (t < s->run->pos) return td_kv_window_row(b->kv, s->run->slot, layer, t);
        return td_kv_dense_row(b->kv, s->a->rows, s->run->first + (t - s->run->pos));
    }
    uint32_t e = m - s->window;
    if (!s->selected)
        return td_kv_hca_row(b->kv, b->pool, layer, td_op_page(b, s->run, e / TD_KV_HCA_PER_PAGE),
                             e % TD_KV_HCA_PER_PAGE);
    uint32_t w = (uint32_t)s->selected[e];
    return td_kv_csa_row(b->kv, b->pool, layer, td_op_page(b, s->run, w / TD_KV_CSA_PER_PAGE),
                         w % TD_KV_CSA_PER_PAGE);
}

/* Scores of one head to exponentials; ml: the maximum, and their sum with the sink's. */
static void softmax(float *score, uint32_t n, float sink, float *ml) {
    float max = sink, den = 0.0f;
    for (uint32_t m = 0; m < n; m++)
        max = max1(score[m], max);
    for (uint32_t m = 0; m < n; m++) {
        score[m] = exp1(score[m] - max);
        den += score[m];
    }
    ml[0] = max;
    ml[1] = den + exp1(sink - max);
}

/* o = block sum over the set of e * row. */
static void weigh(const struct set *s, const float *e, float *chain, float *o) {
    uint32_t heads = s->a->heads;
    float row[D];
    for (uint32_t m = 0; m < s->count; m++) {
        if (m % TD_BLOCK == 0) memset(chain, 0, (size_t)heads * D * sizeof *chain);
        row_decode(member(s, m), s->a->batch->kv->row_dtype, row);
        for (uint32_t h = 0; h < heads; h++)
            for (uint32_t k = 0; k < D; k++)
                chain[h * D + k] = fmaf(e[(size_t)h * s->count + m], row[k], chain[h * D + k]);
        if ((m + 1) % TD_BLOCK != 0 && m + 1 < s->count) continue;
        for (size_t i = 0; i < (size_t)heads * D; i++)
            o[i] = m < TD_BLOCK ? chain[i] : o[i] + chain[i];
    }
}

static void attend_row(const struct td_attend_args *a, uint32_t i, float *scratch) {
    const struct set s = set_of_row(a, i);
    const float *q = a->q + (size_t)i * a->heads * D;
    float *chain = scratch, *score = scratch + (size_t)a->heads * D; /* score: [heads][count] */
    float row[D], own[TD_MAX_HEADS * 2];
    float *o = a->o + (size_t)i * a->heads * D;
    float *ml = a->ml ? a->ml + (size_t)i * a->heads * 2 : own;
    for (uint32_t m = 0; m < s.count; m++) {
        row_decode(member(&s, m), a->batch->kv->row_dtype, row);
        for (uint32_t h = 0; h < a->heads; h++)
            score[(size_t)h * s.count + m] =
                block_sum(q + (size_t)h * D, 1, row, 1, D) * 0.04419417382415922f; /* 512^-0.5 */
    }
    for (uint32_t h = 0; h < a->heads; h++)
        softmax(score + (size_t)h * s.count, s.count, a->sink[h], ml + 2 * h);
    weigh(&s, score, chain, o);
    for (size_t k = 0; !a->ml && k < (size_t)a->heads * D; k++)
        o[k] /= ml[k / D * 2 + 1];
}

struct attend_job {
    const struct td_device *d;
    const struct td_attend_args *a;
};

static void attend_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct attend_job *job = arg;
    for (uint32_t i = begin; i < end; i++)
        attend_row(job->a, i, op_scratch(job->d, thread));
}

void TD_OP(attend)(const struct td_device *d, const struct td_attend_args *a) {
    struct attend_job job = {d, a};
    td_threads_run(d->threads, attend_rows, &job, a->batch->n);
}

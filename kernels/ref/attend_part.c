/* Sparse core where ranks share the entries: softmaxes of parts of a set, and their merging. */
#include "kernels/ref/attend_part.h"

#include "kernels/ref/op.h"
#include "kernels/ref/stored.h"
#include "kernels/ref/sum.h"
#include "kernels/scratch.h"

enum { D = TD_HEAD_DIM };

/* The entries of a row in the pages of one shard, ascending: call until it is false. */
struct entries {
    const struct td_attend_part_args *a;
    uint32_t row, shard, next;
};

static bool next_entry(struct entries *s, struct td_kv_row *ret) {
    const struct td_attend_part_args *a = s->a;
    const struct td_op_batch *b = a->batch;
    const struct td_op_run *run = &b->run[b->row[s->row].run];
    bool csa = b->kv->ratio[a->layer] == TD_CSA_RATIO;
    const int32_t *selected = csa ? a->selected + (size_t)s->row * a->topk : NULL;
    uint32_t per = csa ? TD_KV_CSA_PER_PAGE : TD_KV_HCA_PER_PAGE;
    uint32_t n = csa ? a->topk : (b->row[s->row].pos + 1) / TD_HCA_RATIO;
    while (s->next < n && (!csa || selected[s->next] >= 0)) {
        uint32_t w = csa ? (uint32_t)selected[s->next] : s->next;
        s->next++;
        if (td_kv_shard(w / per) != s->shard) continue;
        uint32_t page = td_op_page(b, run, w / per);
        *ret = (csa ? td_kv_csa_row : td_kv_hca_row)(b->kv, b->pool, a->layer, page, w % per);
        return true;
    }
    return false;
}

/* Of every head of every rank, [heads] side by side. */
struct part {
    float *acc, *ml; /* [heads, 512], [heads, 2] */
};

static const float *query(const struct td_attend_part_args *a, uint32_t row, uint32_t h) {
    size_t rank = h / a->heads, at = rank * a->rows + (row - a->first);
    return a->q + (at * a->heads + h % a->heads) * D;
}

static uint32_t score_entries(const struct td_attend_part_args *a, uint32_t i, uint32_t shard,
                              float *score, size_t stride) {
    struct entries s = {a, i, shard, 0};
    struct td_kv_row at;
    uint32_t count = 0;
    float row[D];
    for (; next_entry(&s, &at); count++) {
        row_decode(at, a->batch->kv->row_dtype, row);
        for (uint32_t h = 0; h < a->ranks * a->heads; h++)
            score[h * stride + count] =
                block_sum(query(a, i, h), 1, row, 1, D) * 0.04419417382415922f; /* 512^-0.5 */
    }
    return count;
}

static void softmax(float *score, uint32_t n, float *ml) {
    float max = score[0], sum = 0.0f;
    for (uint32_t m = 1; m < n; m++)
        max = max1(score[m], max);
    for (uint32_t m = 0; m < n; m++) {
        score[m] = exp1(score[m] - max);
        sum += score[m];
    }
    ml[0] = max;
    ml[1] = sum;
}

static void weigh(const struct td_attend_part_args *a, uint32_t i, uint32_t shard, const float *e,
                  size_t stride, float *chain, float *acc) {
    size_t values = (size_t)a->ranks * a->heads * D;
    struct entries s = {a, i, shard, 0};
    struct td_kv_row at;
    float row[D];
    bool more = next_entry(&s, &at);
    for (uint32_t m = 0; more; m++) {
        row_decode(at, a->batch->kv->row_dtype, row);
        if (m % TD_BLOCK == 0) memset(chain, 0, values * sizeof *chain);
        for (size_t k = 0; k < values; k++)
            chain[k] = fmaf(e[k / D * stride + m], row[k % D], chain[k]);
        more = next_entry(&s, &at);
        if ((m + 1) % TD_BLOCK != 0 && more) continue;
        for (size_t k = 0; k < values; k++)
            acc[k] = m < TD_BLOCK ? chain[k] : acc[k] + chain[k];
    }
}

/* Working memory of a row. */
struct space {
    float *chain, *score;
    size_t stride;
    struct part level[TD_KV_MAX_SPLIT + 1];
};

static void shard_part(const struct td_attend_part_args *a, uint32_t i, uint32_t shard,
                       const struct space *s, struct part to) {
    uint32_t count = score_entries(a, i, shard, s->score, s->stride);
    for (uint32_t h = 0; h < a->ranks * a->heads; h++) {
        if (count)
            softmax(s->score + h * s->stride, count, to.ml + 2 * h);
        else
            to.ml[2 * h] = to.ml[2 * h + 1] = 0.0f;
    }
    weigh(a, i, shard, s->score, s->stride, s->chain, to.acc);
}

/* The tree sum of n shards from `first` into level[0]: as soon as the upper half of a tree is
 * there, it is merged into the lower one, which lies below it. */
static void merge_shards(const struct td_attend_part_args *a, uint32_t i, uint32_t first,
                         uint32_t n, const struct space *s) {
    const struct part *top = s->level;
    for (uint32_t k = 0; k < n; k++, top++) {
        shard_part(a, i, first + k, s, *top);
        for (uint32_t trees = k + 1; trees % 2 == 0; trees /= 2, top--)
            for (uint32_t h = 0; h < a->ranks * a->heads; h++)
                merge_part(top[-1].ml + 2 * h, top[-1].acc + (size_t)h * D, top->ml + 2 * h,
                           top->acc + (size_t)h * D);
    }
}

static struct space divide_scratch(const struct td_attend_part_args *a, float *scratch) {
    const struct td_op_batch *b = a->batch;
    size_t heads = (size_t)a->ranks * a->heads;
    struct space s = {.chain = scratch};
    s.stride = b->kv->ratio[a->layer] == TD_CSA_RATIO ? a->topk : b->max_pos / TD_HCA_RATIO + 1;
    scratch += heads * D;
    for (uint32_t l = 0; l <= TD_KV_MAX_SPLIT; l++, scratch += heads * TD_PART_FLOATS)
        s.level[l] = (struct part){scratch, scratch + heads * D};
    s.score = scratch;
    return s;
}

struct part_job {
    const struct td_device *d;
    const struct td_attend_part_args *a;
};

static void part_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct part_job *job = arg;
    const struct td_attend_part_args *a = job->a;
    const struct space s = divide_scratch(a, op_scratch(job->d, thread));
    uint32_t shards = TD_KV_SHARDS / a->ranks;
    for (uint32_t i = begin; i < end; i++) {
        merge_shards(a, a->first + i, a->batch->rank * shards, shards, &s);
        for (uint32_t h = 0; h < a->ranks * a->heads; h++) {
            float *to = a->part + h / a->heads * td_attend_part_floats(a->rows, a->heads);
            size_t at = (size_t)i * a->heads + h % a->heads;
            const float *ml = s.level[0].ml + 2 * h;
            memcpy(to + (size_t)a->rows * a->heads * D + at * 2, ml, 2 * sizeof *ml);
            if (ml[1] == 0.0f) continue;
            memcpy(to + at * D, s.level[0].acc + (size_t)h * D, D * sizeof *to);
        }
    }
}

void TD_OP(attend_part)(const struct td_device *d, const struct td_attend_part_args *a) {
    struct part_job job = {d, a};
    td_threads_run(d->threads, part_rows, &job, a->rows);
}

/* The tree sum of n ranks' parts from `first`, of row and head `at` of the slice. */
static void merge_ranks(const struct td_attend_merge_args *a, uint32_t first, uint32_t n, size_t at,
                        float *ml, float *acc) {
    if (n > 1) {
        float other_ml[2], other_acc[D];
        merge_ranks(a, first, n / 2, at, ml, acc);
        merge_ranks(a, first + n / 2, n / 2, at, other_ml, other_acc);
        merge_part(ml, acc, other_ml, other_acc);
        return;
    }
    const float *part = a->part + first * td_attend_part_floats(a->rows, a->heads);
    memcpy(ml, part + (size_t)a->rows * a->heads * D + at * 2, 2 * sizeof *ml);
    memcpy(acc, part + at * D, D * sizeof *acc);
}

static void merge_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_attend_merge_args *a = arg;
    for (size_t at = (size_t)begin * a->heads; at < (size_t)end * a->heads; at++) {
        float ml[2], acc[D], own[2];
        size_t row = (size_t)a->first * a->heads + at;
        float *o = a->o + row * D;
        merge_ranks(a, 0, a->ranks, at, ml, acc);
        memcpy(own, a->ml + row * 2, sizeof own);
        merge_part(own, o, ml, acc);
        for (uint32_t k = 0; k < D; k++)
            o[k] /= own[1];
    }
}

void TD_OP(attend_merge)(const struct td_device *d, const struct td_attend_merge_args *a) {
    td_threads_run(d->threads, merge_rows, a, a->rows);
}

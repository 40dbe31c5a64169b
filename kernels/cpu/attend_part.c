/* Sparse core where ranks share the entries: softmaxes of parts of a set, and their merging.
 *
 * One piece is one token with the heads of all ranks. Each shard's part is computed as a whole
 * softmax is (core.h) and merged up the tree with its values as the products leave them; the order
 * of values is put right once. */
#include "kernels/cpu/core.h"
#include "kernels/ref/attend_part.h"

struct part {
    float *acc, *ml; /* [heads, 512], [heads, 2] */
};

struct shards {
    struct core c;
    const struct td_attend_part_args *a;
    int32_t *list; /* the entries of a shard */
    struct part level[TD_KV_MAX_SPLIT + 1];
};

/* merge_part of kernels/ref/attend_part.h. */
TD_INLINE void merge_values(float *ml, float *acc, const float *other_ml, const float *other) {
    const struct part_factor f = merge_scalars(ml, other_ml);
    const v8 factor = splat8(f.factor);
    if (f.take) memcpy(acc, other, D * sizeof *acc);
    if (f.keep || f.take) return;
    for (uint32_t k = 0; k < D; k += 8) {
        v8 a = load8(acc + k), b = load8(other + k);
        store8(acc + k, f.greater ? fma8(b, factor, a) : fma8(a, factor, b));
    }
}

/* The entries of row i in the pages of a shard. */
static void set_of_shard(struct shards *s, uint32_t i, uint32_t shard) {
    const struct td_attend_part_args *a = s->a;
    const struct td_op_batch *b = a->batch;
    struct core *c = &s->c;
    const int32_t *selected = a->selected + (c->csa ? (size_t)i * a->topk : 0);
    uint32_t visible = (b->row[i].pos + 1) / TD_HCA_RATIO;
    c->run = &b->run[b->row[i].run];
    c->count = 0;
    for (uint32_t e = 0; c->csa && e < a->topk && selected[e] >= 0; e++)
        if (td_kv_shard((uint32_t)selected[e] / TD_KV_CSA_PER_PAGE) == shard)
            s->list[c->count++] = selected[e];
    for (uint32_t page = td_kv_shard(shard); !c->csa && page * TD_KV_HCA_PER_PAGE < visible;
         page += TD_KV_SHARDS)
        for (uint32_t w = page * TD_KV_HCA_PER_PAGE;
             w < (page + 1) * TD_KV_HCA_PER_PAGE && w < visible; w++)
            s->list[c->count++] = (int32_t)w;
    c->entry = s->list;
    c->stride = (c->count + 7) & ~7u;
}

/* The part of one shard; values in the order of products. */
static void shard_part(struct shards *s, uint32_t i, uint32_t shard, struct part to) {
    struct core *c = &s->c;
    set_of_shard(s, i, shard);
    uint32_t blocks = blocks_of(c);
    if (blocks == 0) {
        memset(to.ml, 0, (size_t)c->heads * 2 * sizeof *to.ml);
        return;
    }
    for (uint32_t b = 0; b < blocks; b++)
        score_block(c, b, decode_block(c, b));
    softmax(c, to.ml);
    for (uint32_t b = 0; b < blocks; b++) {
        bool kept = blocks <= TD_ATTEND_BLOCKS;
        const float *rows = c->rows + (size_t)(b % TD_ATTEND_BLOCKS) * TD_BLOCK * c->row;
        weigh_block(c, b, kept ? rows : decode_block(c, b), b > 0, to.acc);
    }
}

/* The tree sum of n shards from `first` into level[0]: as soon as the upper half of a tree is
 * there, it is merged into the lower one, which lies below it. */
static void merge_shards(struct shards *s, uint32_t i, uint32_t first, uint32_t n) {
    const struct part *top = s->level;
    for (uint32_t k = 0; k < n; k++, top++) {
        shard_part(s, i, first + k, *top);
        for (uint32_t trees = k + 1; trees % 2 == 0; trees /= 2, top--)
            for (uint32_t h = 0; h < s->c.heads; h++)
                merge_values(top[-1].ml + 2 * h, top[-1].acc + (size_t)h * D, top->ml + 2 * h,
                             top->acc + (size_t)h * D);
    }
}

static void put_part(const struct shards *s, uint32_t i) {
    const struct td_attend_part_args *a = s->a;
    for (uint32_t h = 0; h < s->c.heads; h++) {
        float *to = a->part + h / a->heads * td_attend_part_floats(a->rows, a->heads);
        size_t at = (size_t)(i - a->first) * a->heads + h % a->heads;
        const float *ml = s->level[0].ml + 2 * h;
        memcpy(to + (size_t)a->rows * a->heads * D + at * 2, ml, 2 * sizeof *ml);
        if (ml[1] != 0.0f) put_values(&s->c, s->level[0].acc + (size_t)h * D, 1.0f, to + at * D);
    }
}

struct part_job {
    const struct td_device *d;
    const struct td_attend_part_args *a;
};

static void part_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    const struct part_job *job = arg;
    const struct td_attend_part_args *a = job->a;
    uint32_t heads = a->ranks * a->heads, shards = TD_KV_SHARDS / a->ranks;
    uint32_t most = a->batch->max_pos / TD_HCA_RATIO + 1;
    struct shards s = {.c = core_of(a->batch, a->layer, heads), .a = a};
    struct core *c = &s.c;
    if (c->csa) most = a->topk;
    c->query = a->q;
    c->rank_heads = a->heads;
    c->rank_step = (size_t)a->rows * a->heads * D;
    c->rows = op_scratch(job->d, thread);
    c->dot = c->rows + (size_t)TD_ATTEND_BLOCKS * TD_BLOCK * ROW;
    c->q = c->dot + TD_ATTEND_DOTS;
    float *next = c->q + (size_t)score_rows(c) / PANEL_HEADS * CHAIN * TD_PANEL;
    for (uint32_t l = 0; l <= TD_KV_MAX_SPLIT; l++, next += (size_t)td_lanes(heads) * (D + 2))
        s.level[l] = (struct part){next, next + (size_t)heads * D};
    s.list = (int32_t *)(void *)next;
    c->score = next + td_lanes(most);
    for (uint32_t i = begin; i < end; i++) {
        pack_queries(c, i);
        merge_shards(&s, a->first + i, a->batch->rank * shards, shards);
        put_part(&s, a->first + i);
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
        merge_values(ml, acc, other_ml, other_acc);
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
        merge_values(own, o, ml, acc);
        for (uint32_t k = 0; k < D; k += 8)
            store8(o + k, load8(o + k) / splat8(own[1]));
    }
}

void TD_OP(attend_merge)(const struct td_device *d, const struct td_attend_merge_args *a) {
    td_threads_run(d->threads, merge_rows, a, a->rows);
}

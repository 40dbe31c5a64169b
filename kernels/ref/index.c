/* Lightning indexer: the topk visible keys with the greatest scores, one query after the other. */
#include "kernels/ref/op.h"
#include "kernels/ref/stored.h"
#include "kernels/ref/sum.h"

enum { D = TD_INDEX_DIM };

static float score_of(const struct td_index_args *a, uint32_t i, const float *key) {
    float score = 0.0f;
    for (uint32_t h = 0; h < a->heads; h++) {
        float dot = block_sum(a->q + ((size_t)i * a->heads + h) * D, 1, key, 1, D);
        score = fmaf(a->wt[(size_t)i * a->heads + h] * a->wt_scale, dot > 0.0f ? dot : 0.0f, score);
    }
    return a->score_bf16 ? td_bf16_to_f32(td_f32_to_bf16(score)) : score;
}

/* Into list [n], greatest first, at most topk; returns the new n. */
static uint32_t insert(uint64_t *list, uint32_t n, uint32_t topk, uint64_t c) {
    uint32_t at = n < topk ? n : topk - 1;
    if (n == topk && list[at] > c) return n;
    for (; at > 0 && list[at - 1] < c; at--)
        list[at] = list[at - 1];
    list[at] = c;
    return n < topk ? n + 1 : n;
}

static uint32_t visible(const struct td_op_batch *b, uint32_t i) {
    return (b->row[i].pos + 1) / TD_CSA_RATIO;
}

/* The best of the keys that the rank has; how many. */
static uint32_t best_keys(const struct td_index_args *a, uint32_t i, uint64_t *list) {
    const struct td_op_batch *b = a->batch;
    const struct td_op_run *run = &b->run[b->row[i].run];
    uint32_t n = 0;
    for (uint32_t w = 0; w < visible(b, i); w++) {
        float key[D];
        uint32_t page = w / TD_KV_CSA_PER_PAGE;
        if (!td_op_has_page(b, page)) continue;
        key_decode(td_kv_index_key(b->kv, b->pool, a->layer, td_op_page(b, run, page),
                                   w % TD_KV_CSA_PER_PAGE),
                   b->kv->key_dtype, key);
        n = insert(list, n, a->topk, td_index_candidate(td_f32_bits(score_of(a, i, key)), w));
    }
    return n;
}

/* By entry, ascending. */
static void sort_entries(uint64_t *list, uint32_t n) {
    for (uint32_t j = 1; j < n; j++)
        for (uint32_t at = j; at > 0 && (uint32_t)list[at - 1] < (uint32_t)list[at]; at--) {
            uint64_t t = list[at];
            list[at] = list[at - 1];
            list[at - 1] = t;
        }
}

static void put_selected(const uint64_t *list, uint32_t n, uint32_t topk, int32_t *to) {
    for (uint32_t j = 0; j < topk; j++)
        to[j] = j < n ? (int32_t)td_index_entry(list[j]) : -1;
}

static void index_row(const struct td_index_args *a, uint32_t i, uint64_t *list) {
    uint64_t *to = a->candidate ? a->candidate + (size_t)(i - a->first) * a->topk : NULL;
    if (to && visible(a->batch, i) <= a->topk) return;
    uint32_t n = best_keys(a, i, list);
    sort_entries(list, n);
    if (!to) put_selected(list, n, a->topk, a->selected + (size_t)i * a->topk);
    for (uint32_t j = 0; to && j < a->topk; j++)
        to[j] = j < n ? list[j] : 0;
}

void TD_OP(index)(const struct td_device *d, const struct td_index_args *a) {
    (void)d; /* one list, in the workspace */
    for (uint32_t i = a->first; i < a->first + a->rows; i++)
        index_row(a, i, a->workspace);
}

static void merge_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_index_merge_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        uint64_t list[TD_MAX_INDEX_TOPK];
        uint32_t n = 0, all = visible(a->batch, a->first + i);
        int32_t *to = a->selected + (size_t)(a->first + i) * a->topk;
        for (uint32_t r = 0; all > a->topk && r < a->ranks; r++) {
            const uint64_t *from = a->candidate + ((size_t)r * a->rows + i) * a->topk;
            for (uint32_t j = 0; j < a->topk && from[j]; j++)
                n = insert(list, n, a->topk, from[j]);
        }
        for (uint32_t w = 0; all <= a->topk && w < all; w++)
            list[n++] = td_index_candidate(0, w);
        sort_entries(list, n);
        put_selected(list, n, a->topk, to);
    }
}

void TD_OP(index_merge)(const struct td_device *d, const struct td_index_merge_args *a) {
    td_threads_run(d->threads, merge_rows, a, a->rows);
}

/* Lightning indexer: the topk visible keys with the greatest scores, one query after the other. */
#include "kernels/ref/op.h"
#include "kernels/ref/stored.h"
#include "kernels/ref/sum.h"

enum { D = TD_INDEX_DIM };

/* Score above, low entry first below: any two keys differ. -0 is +0. */
static uint64_t candidate(float score, uint32_t entry) {
    uint32_t u = td_f32_bits(score + 0.0f);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - entry);
}

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

static void index_row(const struct td_index_args *a, uint32_t i, uint64_t *list) {
    const struct td_op_batch *b = a->batch;
    const struct td_op_run *run = &b->run[b->row[i].run];
    uint32_t visible = (b->row[i].pos + 1) / TD_CSA_RATIO, n = 0;
    int32_t *to = a->selected + (size_t)i * a->topk;
    for (uint32_t w = 0; w < visible; w++) {
        float key[D];
        key_decode(td_kv_index_key(b->kv, b->pool, a->layer, run->pages[w / TD_KV_CSA_PER_PAGE],
                                   w % TD_KV_CSA_PER_PAGE),
                   b->kv->key_dtype, key);
        n = insert(list, n, a->topk, candidate(score_of(a, i, key), w));
    }
    for (uint32_t j = 0; j < a->topk; j++)
        to[j] = j < n ? (int32_t)(0xffffffffu - (uint32_t)list[j]) : -1;
    for (uint32_t j = 1; j < n; j++) /* by entry, ascending */
        for (uint32_t at = j; at > 0 && to[at - 1] > to[at]; at--) {
            int32_t t = to[at];
            to[at] = to[at - 1];
            to[at - 1] = t;
        }
}

void TD_OP(index)(const struct td_device *d, const struct td_index_args *a) {
    (void)d; /* one list, in the workspace */
    for (uint32_t i = a->first; i < a->first + a->rows; i++)
        index_row(a, i, a->workspace);
}

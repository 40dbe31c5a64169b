/* The set of a token in the sparse core: who is in it, and where each member is stored. */
#ifndef TD_KERNELS_CUDA_ATTEND_H
#define TD_KERNELS_CUDA_ATTEND_H

#include "kernels/cuda/op.h"

/* td_attend_args with what its pointers of the host lead to. */
struct td_attend {
    struct td_op_batch b;
    struct td_kv_layout kv;
    uint32_t layer, heads, topk;
    const float *q;
    const void *rows;
    const float *sink;
    const int32_t *selected;
    float *o;
};

static inline struct td_attend td_attend_of(const struct td_attend_args *a) {
    struct td_attend p = {.b = *a->batch, .kv = *a->batch->kv};
    p.layer = a->layer;
    p.heads = a->heads;
    p.topk = a->topk;
    p.q = a->q;
    p.rows = a->rows;
    p.sink = a->sink;
    p.selected = a->selected;
    p.o = a->o;
    return p;
}

/* The largest set that this call may meet. */
static inline uint32_t td_attend_most(const struct td_attend_args *a) {
    uint32_t ratio = a->batch->kv->ratio[a->layer];
    if (ratio == TD_CSA_RATIO) return TD_WINDOW + a->topk;
    if (ratio == TD_HCA_RATIO) return TD_WINDOW + a->batch->max_pos / TD_HCA_RATIO + 1;
    return TD_WINDOW;
}

struct td_attend_set {
    const struct td_op_run *run;
    uint32_t pos, window, count; /* members; the first `window` are window rows */
    const int32_t *selected;     /* of a CSA layer */
};

static __device__ inline struct td_attend_set td_attend_set_of(const struct td_attend *a,
                                                               uint32_t i) {
    struct td_attend_set s;
    uint32_t ratio = a->kv.ratio[a->layer];
    s.run = &a->b.run[a->b.row[i].run];
    s.pos = a->b.row[i].pos;
    s.window = s.pos + 1 < TD_WINDOW ? s.pos + 1 : (uint32_t)TD_WINDOW;
    s.count = s.window;
    s.selected = NULL;
    if (ratio == TD_HCA_RATIO) s.count += (s.pos + 1) / TD_HCA_RATIO;
    if (ratio == TD_CSA_RATIO) {
        /* Chosen entries come first: the number of them is a binary search away. */
        uint32_t lo = 0, hi = a->topk;
        s.selected = a->selected + (size_t)i * a->topk;
        while (lo < hi) {
            uint32_t mid = (lo + hi) / 2;
            if (s.selected[mid] >= 0)
                lo = mid + 1;
            else
                hi = mid;
        }
        s.count += lo;
    }
    return s;
}

static __device__ inline struct td_kv_row
td_attend_member(const struct td_attend *a, const struct td_attend_set *s, uint32_t m) {
    if (m < s->window) {
        uint32_t t = s->pos + 1 - s->window + m;
        if (t < s->run->pos) return td_kv_window_row(&a->kv, s->run->slot, a->layer, t);
        return td_kv_dense_row(&a->kv, a->rows, s->run->first + (t - s->run->pos));
    }
    uint32_t e = m - s->window;
    if (!s->selected)
        return td_kv_hca_row(&a->kv, a->b.pool, a->layer, s->run->pages[e / TD_KV_HCA_PER_PAGE],
                             e % TD_KV_HCA_PER_PAGE);
    uint32_t w = (uint32_t)s->selected[e];
    return td_kv_csa_row(&a->kv, a->b.pool, a->layer, s->run->pages[w / TD_KV_CSA_PER_PAGE],
                         w % TD_KV_CSA_PER_PAGE);
}

#endif

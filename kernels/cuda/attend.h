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
    float *o, *ml; /* ml: the window's part */
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
    p.ml = a->ml;
    return p;
}

/* The largest set that this call may meet. */
static inline uint32_t td_attend_most(const struct td_attend_args *a) {
    uint32_t ratio = a->ml ? 0 : a->batch->kv->ratio[a->layer];
    if (ratio == TD_CSA_RATIO) return TD_WINDOW + a->topk;
    if (ratio == TD_HCA_RATIO) return TD_WINDOW + a->batch->max_pos / TD_HCA_RATIO + 1;
    return TD_WINDOW;
}

#ifdef TD_CUDA_EMULATED
#define td_cuda_attend_groups td_emulated_attend_groups
#define td_cuda_attend_bytes td_emulated_attend_bytes
#endif
/* The form for Hopper (groups.cu). False where it does not serve: nothing was done. */
bool td_cuda_attend_groups(const struct td_device *d, const struct td_attend_args *a);

/* Workspace of the sparse core, zeroed at first: [TD_ATTEND_SLOTS] of what one block leaves for
 * another, of 64 heads, then what groups.cu counts arrivals with, zero between launches. */
enum { TD_ATTEND_SLOTS = 512, TD_ATTEND_HEADS = 64 };
struct td_attend_left {
    float o[TD_ATTEND_HEADS * TD_HEAD_DIM];
    float max[TD_ATTEND_HEADS], sum[TD_ATTEND_HEADS];
};
size_t td_cuda_attend_bytes(void);

struct td_attend_set {
    const struct td_op_run *run;
    uint32_t pos, window, count; /* members; the first `window` are window rows */
    const int32_t *selected;     /* of a CSA layer */
};

/* How many of selected[0 .. topk-1] are chosen entries, which come first: by a whole warp, in two
 * looks of up to 32 and 64 places. */
static __device__ inline uint32_t td_attend_chosen(const int32_t *selected, uint32_t topk) {
    uint32_t lane = threadIdx.x % 32, step = td_ceil(topk, 32), at = lane * step;
    uint32_t full = (uint32_t)__popc(
        __ballot_sync(0xffffffffu, at < topk && selected[at < topk ? at : 0] >= 0));
    if (full == 0) return 0; /* the whole warp */
    uint32_t count = (full - 1) * step + 1, end = full * step < topk ? full * step : topk;
    for (uint32_t from = count; from < end; from += 32) {
        at = from + lane;
        count += (uint32_t)__popc(
            __ballot_sync(0xffffffffu, at < end && selected[at < end ? at : 0] >= 0));
    }
    return count;
}

/* By whole warps. */
static __device__ inline struct td_attend_set td_attend_set_of(const struct td_attend *a,
                                                               uint32_t i) {
    struct td_attend_set s;
    uint32_t ratio = a->ml ? 0 : a->kv.ratio[a->layer];
    s.run = &a->b.run[a->b.row[i].run];
    s.pos = a->b.row[i].pos;
    s.window = s.pos + 1 < TD_WINDOW ? s.pos + 1 : (uint32_t)TD_WINDOW;
    s.count = s.window;
    s.selected = NULL;
    if (ratio == TD_HCA_RATIO) s.count += (s.pos + 1) / TD_HCA_RATIO;
    if (ratio == TD_CSA_RATIO) {
        s.selected = a->selected + (size_t)i * a->topk;
        s.count += td_attend_chosen(s.selected, a->topk);
    }
    return s;
}

/* Where a member is, in steps, each of which is a load that needs the one before: its entry; the
 * entry's page; the row. Nothing is loaded for window rows. */
static __device__ inline uint32_t td_attend_entry(const struct td_attend_set *s, uint32_t m) {
    if (m < s->window) return 0;
    return s->selected ? (uint32_t)s->selected[m - s->window] : m - s->window;
}
static __device__ inline uint32_t td_attend_page(const struct td_attend *a,
                                                 const struct td_attend_set *s, uint32_t m,
                                                 uint32_t entry) {
    if (m < s->window) return 0;
    return td_op_page(&a->b, s->run,
                      entry / (s->selected ? TD_KV_CSA_PER_PAGE : TD_KV_HCA_PER_PAGE));
}
static __device__ inline struct td_kv_row td_attend_row(const struct td_attend *a,
                                                        const struct td_attend_set *s, uint32_t m,
                                                        uint32_t entry, uint32_t page) {
    if (m < s->window) {
        uint32_t t = s->pos + 1 - s->window + m;
        if (t < s->run->pos) return td_kv_window_row(&a->kv, s->run->slot, a->layer, t);
        return td_kv_dense_row(&a->kv, a->rows, s->run->first + (t - s->run->pos));
    }
    if (!s->selected)
        return td_kv_hca_row(&a->kv, a->b.pool, a->layer, page, entry % TD_KV_HCA_PER_PAGE);
    return td_kv_csa_row(&a->kv, a->b.pool, a->layer, page, entry % TD_KV_CSA_PER_PAGE);
}

static __device__ inline struct td_kv_row
td_attend_member(const struct td_attend *a, const struct td_attend_set *s, uint32_t m) {
    uint32_t entry = td_attend_entry(s, m);
    return td_attend_row(a, s, m, entry, td_attend_page(a, s, m, entry));
}

#endif

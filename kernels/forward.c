/* The forward pass of DeepSeek-V4, in the order of the model: one page, below; helpers above it
 * fill an argument struct and call an op. Nothing here knows where the ops run.
 *
 * Every rank of a worker does the same calls. What is computed from `h` alone every rank computes
 * whole; of heads, output groups, experts and vocabulary it has its share, and three times a rank's
 * part becomes all ranks' whole: the embedding, attn_out and ffn_out. Where ranks share the entries
 * too, each computes its entries' part of all heads. */
#include "kernels/forward.h"

#include <math.h>

#include "kernels/team.h"

#define OP(f, op, ...) CALL(f, op, (&(const struct td_##op##_args){__VA_ARGS__}))
#define CALL(f, op, args) (goes(f, #op) ? (f)->ops->op(&(f)->device, args) : (void)0)
#define MEET(f, op, ...) CALL_MEET(f, op, (&(const struct td_##op##_args){__VA_ARGS__}))
#define CALL_MEET(f, op, args)                                                                     \
    (goes(f, #op) ? (f)->device.backend->op(&(f)->device, args) : (void)0)

/* Rows from which on ranks divide the indexer's queries among them. A row reads all keys of its
 * sequence, 1.5 us for 32K tokens and 5.8 us for 128K on an RTX PRO 6000, and dividing costs a
 * gather of 7.5 us: with 16 rows and more it pays from 16K tokens on, with fewer only for the
 * longest. */
enum { SPLIT_ROWS = 16 };

/* Told as it goes; of a broken team nothing more is computed, because what it meets may be garbage.
 */
static bool goes(const struct td_forward *f, const char *op) {
    return td_team_at(f->device.team, f->device.rank, op, f->layer);
}

static const struct td_model_config *config(const struct td_forward *f) {
    return &f->model->model->config;
}

static const struct td_share *share(const struct td_forward *f) {
    return &f->model->share;
}

/* Where a rank's part of a sum goes, and the sum over ranks, + add if there is one; a rank alone
 * has the whole at once, without `add`. */
static float *part_of(const struct td_forward *f, float *sum) {
    return f->device.ranks > 1 ? f->s.partial : sum;
}
static void sum_ranks(const struct td_forward *f, float *sum, const float *add) {
    if (f->device.ranks > 1)
        MEET(f, all_reduce, .x = f->s.partial, .add = add, .y = sum, .n = f->batch.n,
             .dim = config(f)->hidden);
}

static void norm(const struct td_forward *f, float *x, const float *w, uint32_t rows,
                 uint32_t dim) {
    OP(f, rms_norm, .x = x, .x_stride = dim, .y = x, .y_stride = dim, .w = w, .n = rows, .dim = dim,
       .eps = config(f)->rms_eps);
}

static struct td_linear_part part(const struct td_matrix *w, float *y) {
    return (struct td_linear_part){w, y, w->rows, 0};
}

/* Memory that is free until attention writes it, and from then on until the next layer's queries.
 */
static struct td_spare before_attend(const struct td_forward *f) {
    return (struct td_spare){f->s.o, f->spare_bytes};
}
static struct td_spare after_attend(const struct td_forward *f) {
    return (struct td_spare){f->s.q, f->spare_bytes};
}

static void linear(const struct td_forward *f, const float *x, const struct td_matrix *w,
                   float *y) {
    OP(f, linear, .x = x, .x_stride = w->cols, .spare = after_attend(f), .n = f->batch.n,
       .parts = 1, .part = {part(w, y)});
}

/* x [n, dim], of which *used rows count (NULL: all), as products with `w` take it: itself, or
 * rounded into `to` (which may be x). */
static const float *input(const struct td_forward *f, const struct td_matrix *w, const float *x,
                          float *to, const uint32_t *used, uint32_t n, uint32_t dim) {
    if (!f->ref || !w->fp8_input) return x;
    OP(f, round_fp8, .x = x, .y = to, .rows = used, .n = n, .dim = dim);
    return to;
}

/* Products of one input, in the one or two calls that need it as it is and rounded. */
struct products {
    struct td_linear_args plain, rounded;
};

static void add_product(const struct td_forward *f, struct products *p, const struct td_matrix *w,
                        float *y) {
    struct td_linear_args *a = f->ref && w->fp8_input ? &p->rounded : &p->plain;
    a->part[a->parts++] = part(w, y);
}

static void run_products(const struct td_forward *f, struct products *p, const float *x,
                         struct td_spare spare) {
    uint32_t n = f->batch.n;
    for (int i = 0; i < 2; i++) {
        struct td_linear_args *a = i ? &p->rounded : &p->plain;
        if (a->parts == 0) continue;
        a->n = n;
        a->spare = spare;
        a->x_stride = a->part[0].w->cols;
        a->x = input(f, a->part[0].w, x, f->s.rounded, NULL, n, a->part[0].w->cols);
        CALL(f, linear, a);
    }
}

static void rope(const struct td_forward *f, const struct td_packed_layer *l, float *x,
                 uint32_t heads, uint32_t dim, bool inverse) {
    OP(f, rope, .x = x, .cs = f->s.cs[l->kind != TD_LAYER_SWA], .n = f->batch.n, .heads = heads,
       .dim = dim, .inverse = inverse);
}

/* x -> y, and what hc_post needs; then h = norm(y). */
static void hc_pre(const struct td_forward *f, const struct td_hc *hc, const float *norm_weight) {
    const struct td_model_config *c = config(f);
    linear(f, f->s.x, &hc->fn, f->s.mix);
    OP(f, hc_pre, .x = f->s.x, .m = f->s.mix, .base = hc->base, .scale = hc->scale, .y = f->s.y,
       .post = f->s.post, .comb = f->s.comb, .n = f->batch.n, .hidden = c->hidden,
       .iters = c->sinkhorn_iters, .eps = c->rms_eps, .hc_eps = c->hc_eps);
    OP(f, rms_norm, .x = f->s.y, .x_stride = c->hidden, .y = f->s.h, .y_stride = c->hidden,
       .w = norm_weight, .n = f->batch.n, .dim = c->hidden, .eps = c->rms_eps);
}

static void hc_post(const struct td_forward *f, const float *o) {
    OP(f, hc_post, .x = f->s.x, .o = o, .post = f->s.post, .comb = f->s.comb, .n = f->batch.n,
       .hidden = config(f)->hidden);
}

/* Everything that reads h: q low rank, kv, both compressors, index head weights. */
static void project(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_forward_buffers *s = &f->s;
    struct products p = {0};
    add_product(f, &p, &l->wq_a, s->qr);
    add_product(f, &p, &l->wkv, s->kv);
    if (l->kind != TD_LAYER_SWA) {
        add_product(f, &p, &l->comp.wkv, s->u);
        add_product(f, &p, &l->comp.wgate, s->g);
    }
    if (l->kind == TD_LAYER_CSA) {
        add_product(f, &p, &l->index_comp.wkv, s->iu);
        add_product(f, &p, &l->index_comp.wgate, s->ig);
        add_product(f, &p, &l->index_weights, s->iw);
    }
    run_products(f, &p, s->h, before_attend(f));
}

/* Rows of the step whose keys this rank chooses. */
struct rows {
    uint32_t first, n;
};
static struct rows index_rows(const struct td_forward *f) {
    uint32_t n = f->batch.n, rank = f->device.rank, ranks = f->device.ranks;
    if (ranks < 2 || f->split || n < SPLIT_ROWS) return (struct rows){0, n}; /* split: by key */
    uint32_t first = n * rank / ranks;
    return (struct rows){first, n * (rank + 1) / ranks - first};
}

/* The second stage of the queries, from the normalised low rank: all of the rank's heads; index
 * queries of all heads, for its rows. */
static void project_queries(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_forward_buffers *s = &f->s;
    struct rows own = index_rows(f);
    struct products p = {0};
    add_product(f, &p, &l->wq_b, s->q);
    if (l->kind == TD_LAYER_CSA && own.n == f->batch.n) add_product(f, &p, &l->index_wq_b, s->iq);
    run_products(f, &p, s->qr, before_attend(f));
    if (l->kind != TD_LAYER_CSA || own.n == f->batch.n) return;
    const struct td_matrix *w = &l->index_wq_b;
    size_t at = (size_t)own.first * w->cols;
    const float *x = input(f, w, s->qr + at, s->rounded + at, NULL, own.n, w->cols);
    OP(f, linear, .x = x, .x_stride = w->cols, .spare = before_attend(f), .n = own.n, .parts = 1,
       .part = {part(w, s->iq + (size_t)own.first * w->rows)});
}

static void compress(const struct td_forward *f, uint32_t layer, enum td_kv_family family,
                     const struct td_packed_compressor *w, const float *u, float *g) {
    OP(f, compress, .batch = &f->batch, .layer = layer, .family = family, .u = u, .g = g,
       .ape = w->ape, .norm = w->norm, .freq = f->model->freq[1], .eps = config(f)->rms_eps,
       .sim8 = f->ref, .hadamard = f->ref, .sim4 = f->sim4);
}

/* Rows of the step from `first` on that ranks deal with together. */
static struct rows slice(const struct td_forward *f, uint32_t first) {
    uint32_t left = f->batch.n - first;
    return (struct rows){first, left < TD_SLICE_ROWS ? left : TD_SLICE_ROWS};
}

/* `candidate`: where those go, or NULL: selected is wanted. */
static void choose(const struct td_forward *f, uint32_t layer, struct rows r, uint64_t *candidate) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t heads = config(f)->index_heads;
    float scale = (float)(1.0 / (sqrt((double)TD_INDEX_DIM) * sqrt((double)heads)));
    OP(f, index, .batch = &f->batch, .layer = layer, .first = r.first, .rows = r.n, .q = s->iq,
       .wt = s->iw, .wt_scale = scale, .heads = heads, .topk = f->topk, .score_bf16 = f->score_bf16,
       .selected = s->selected, .candidate = candidate, .workspace = s->index);
}

/* Each rank looks through its keys; what they find together is chosen by all. */
static void choose_together(const struct td_forward *f, uint32_t layer) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t ranks = f->device.ranks;
    for (struct rows r = slice(f, 0); r.n > 0; r = slice(f, r.first + r.n)) {
        size_t own = (size_t)r.n * f->topk;
        struct td_all_gather_args all = {.buffer = s->candidates};
        for (uint32_t i = 0; i <= ranks; i++)
            all.at[i] = i * own * sizeof *s->candidates;
        choose(f, layer, r, s->candidates + f->device.rank * own);
        CALL_MEET(f, all_gather, &all);
        OP(f, index_merge, .batch = &f->batch, .first = r.first, .rows = r.n, .ranks = ranks,
           .topk = f->topk, .candidate = s->candidates, .selected = s->selected);
    }
}

/* Each rank chooses for its rows from all keys, and tells the others. */
static void choose_rows(const struct td_forward *f, uint32_t layer, struct rows own) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t ranks = f->device.ranks;
    choose(f, layer, own, NULL);
    if (own.n == f->batch.n) return;
    struct td_all_gather_args all = {.buffer = s->selected};
    for (uint32_t r = 0; r <= ranks; r++)
        all.at[r] = (size_t)(f->batch.n * r / ranks) * f->topk * sizeof *s->selected;
    CALL_MEET(f, all_gather, &all);
}

/* iq, iw, keys -> selected. */
static void index_select(const struct td_forward *f, uint32_t layer) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t heads = config(f)->index_heads;
    struct rows own = index_rows(f);
    float *q = s->iq + (size_t)own.first * heads * TD_INDEX_DIM;
    OP(f, rope, .x = q, .cs = s->cs[1] + (size_t)own.first * TD_ROPE_DIM, .n = own.n,
       .heads = heads, .dim = TD_INDEX_DIM);
    if (f->ref || f->sim4)
        OP(f, index_query, .q = q, .n = own.n, .heads = heads, .hadamard = f->ref, .sim4 = f->sim4);
    if (f->split && f->device.ranks > 1)
        choose_together(f, layer);
    else
        choose_rows(f, layer, own);
}

/* The entries' part of all heads, of those that this rank has, for a slice of rows; then the ranks'
 * parts of this rank's heads, merged with the window's. */
static void attend_entries(const struct td_forward *f, uint32_t layer, struct rows r) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t ranks = f->device.ranks, heads = share(f)->heads;
    size_t values = (size_t)r.n * heads * TD_HEAD_DIM;
    const float *q = s->q + (size_t)r.first * heads * TD_HEAD_DIM;
    if (ranks > 1) {
        struct td_all_gather_args all = {.buffer = s->all_q, .own = q};
        for (uint32_t i = 0; i <= ranks; i++)
            all.at[i] = i * values * sizeof *q;
        CALL_MEET(f, all_gather, &all);
        q = s->all_q;
    }
    OP(f, attend_part, .batch = &f->batch, .layer = layer, .first = r.first, .rows = r.n,
       .ranks = ranks, .heads = heads, .q = q, .selected = s->selected, .topk = f->topk,
       .part = s->part);
    if (ranks > 1)
        MEET(f, all_to_all, .x = s->part, .y = s->parts,
             .bytes = td_attend_part_floats(r.n, heads) * sizeof *s->part);
    OP(f, attend_merge, .first = r.first, .rows = r.n, .ranks = ranks, .heads = heads,
       .part = s->parts, .ml = s->ml, .o = s->o);
}

/* q, kv, entries -> o. */
static void attend(const struct td_forward *f, uint32_t layer, const struct td_packed_layer *l) {
    const struct td_forward_buffers *s = &f->s;
    bool parts = f->split && l->kind != TD_LAYER_SWA;
    OP(f, attend, .batch = &f->batch, .layer = layer, .heads = share(f)->heads, .q = s->q,
       .rows = s->rows, .sink = l->sink, .selected = l->kind == TD_LAYER_CSA ? s->selected : NULL,
       .topk = f->topk, .o = s->o, .ml = parts ? s->ml : NULL);
    if (!parts) return;
    for (struct rows r = slice(f, 0); r.n > 0; r = slice(f, r.first + r.n))
        attend_entries(f, layer, r);
}

/* Rows of z as products take them: values are rounded in groups of 128, which may span output
 * groups and so ranks. */
static const float *round_z(const struct td_forward *f, const struct td_matrix *w) {
    float *z = f->s.z;
    if (f->s.merged_z && w->fp8_input) {
        MEET(f, all_reduce, .x = z, .y = f->s.merged_z, .n = f->batch.n, .dim = f->z_dim,
             .bits = true);
        z = f->s.merged_z;
    }
    return input(f, w, z, z, NULL, f->batch.n, f->z_dim);
}

/* Of every output group, a product of its own stretch of x: x_step and y_step apart. */
static void group_products(const struct td_forward *f, const float *x, size_t x_stride,
                           size_t x_step, const struct td_matrix *w, float *y, size_t y_stride,
                           size_t y_step) {
    for (uint32_t g = 0, groups = share(f)->groups; g < groups;) {
        struct td_linear_args a = {
            .x = x, .x_stride = x_stride, .spare = after_attend(f), .n = f->batch.n};
        for (; g < groups && a.parts < TD_LINEAR_PARTS; g++)
            a.part[a.parts++] =
                (struct td_linear_part){&w[g], y + g * y_step, y_stride, g * x_step};
        CALL(f, linear, &a);
    }
}

/* o -> attn_out through the rank's output groups, one partial product per group. */
static void output(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_model_config *c = config(f);
    uint32_t n = f->batch.n, groups = share(f)->groups, lora = c->o_lora_rank;
    uint32_t group_dim = c->heads / c->o_groups * TD_HEAD_DIM;
    size_t at = (size_t)f->z_first * lora;
    group_products(f, f->s.o, share(f)->heads * TD_HEAD_DIM, group_dim, l->wo_a, f->s.z + at,
                   f->z_dim, lora);
    const float *z = round_z(f, &l->wo_b[0]) + at;
    group_products(f, z, f->z_dim, lora, l->wo_b, f->s.shard, c->hidden, (size_t)n * c->hidden);
    OP(f, add_shards, .shard = f->s.shard, .y = part_of(f, f->s.attn_out), .shards = groups, .n = n,
       .dim = c->hidden);
    sum_ranks(f, f->s.attn_out, NULL);
}

static void route(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_model_config *c = config(f);
    const struct td_forward_buffers *s = &f->s;
    linear(f, s->h, &l->gate, s->gate);
    OP(f, route, .logits = s->gate, .bias = l->gate_bias, .tid2eid = l->tid2eid, .ids = f->ids,
       .n = f->batch.n, .experts = c->experts, .k = c->experts_per_token, .scale = c->routed_scale,
       .expert = s->expert, .weight = s->weight);
    if (share(f)->experts == 0) return;
    OP(f, group, .expert = s->expert, .weight = s->weight, .n = f->batch.n,
       .k = c->experts_per_token, .first = share(f)->expert, .count = share(f)->experts,
       .offset = s->offset, .token = s->token, .row_weight = s->row_weight, .place = s->place);
}

static void routed_experts(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_model_config *c = config(f);
    const struct td_forward_buffers *s = &f->s;
    uint32_t rows = f->batch.n * c->experts_per_token, experts = share(f)->experts;
    const uint32_t *used = s->offset + experts; /* of the rows */
    if (experts == 0) return;
    const float *x = input(f, &l->w1[0], s->h, s->rounded, NULL, f->batch.n, c->hidden);
    const uint32_t *x_row = s->token;
    if (f->nvfp4) { /* every expert has a scale of its own; w1 and w3 share one */
        OP(f, round_nvfp4, .x = s->h, .x_row = s->token, .offset = s->offset, .w = l->w1,
           .y = s->expert_out, .codes = s->codes, .experts = experts, .dim = c->hidden);
        x = s->expert_out; /* not written before w2 */
        x_row = NULL;
    }
    OP(f, expert_linear, .x = x, .x_stride = c->hidden, .x_row = x_row, .offset = s->offset,
       .experts = experts, .parts = 2, .most = f->batch.n, .all = rows, .spare = after_attend(f),
       .codes = s->codes, .w = {l->w1, l->w3}, .y = {s->a, s->b});
    OP(f, swiglu, .a = s->a, .b = s->b, .weight = s->row_weight, .t = s->a, .rows = used, .n = rows,
       .inner = c->expert_inner, .limit = c->swiglu_limit);
    if (f->nvfp4)
        OP(f, round_nvfp4, .x = s->a, .offset = s->offset, .w = l->w2, .y = s->a, .codes = s->codes,
           .experts = experts, .dim = c->expert_inner);
    x = input(f, &l->w2[0], s->a, s->a, used, rows, c->expert_inner);
    OP(f, expert_linear, .x = x, .x_stride = c->expert_inner, .offset = s->offset,
       .experts = experts, .parts = 1, .most = f->batch.n, .all = rows, .spare = after_attend(f),
       .codes = s->codes, .w = {l->w2}, .y = {s->expert_out});
}

static void shared_expert(const struct td_forward *f, const struct td_packed_layer *l) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t n = f->batch.n, inner = l->shared.w1.rows;
    struct products p = {0};
    add_product(f, &p, &l->shared.w1, s->a);
    add_product(f, &p, &l->shared.w3, s->b);
    run_products(f, &p, s->h, after_attend(f));
    OP(f, swiglu, .a = s->a, .b = s->b, .t = s->a, .n = n, .inner = inner,
       .limit = config(f)->swiglu_limit);
    linear(f, input(f, &l->shared.w2, s->a, s->a, NULL, n, inner), &l->shared.w2, s->shared_out);
}

/* Routed experts, each rank's, and the shared one, which every rank has whole. */
static void combine(const struct td_forward *f) {
    const struct td_model_config *c = config(f);
    const struct td_forward_buffers *s = &f->s;
    OP(f, combine, .rows = s->expert_out, .expert = s->expert, .place = s->place,
       .shared = f->device.ranks > 1 ? NULL : s->shared_out, .y = part_of(f, s->ffn_out),
       .n = f->batch.n, .k = c->experts_per_token, .hidden = c->hidden, .experts = c->experts,
       .shards = c->o_groups, .first_shard = share(f)->group, .shards_here = share(f)->groups);
    sum_ranks(f, s->ffn_out, s->shared_out);
}

/* ids -> x. Every row is one rank's, and zeros are or-ed to it: added, -0 would become 0. */
static void embed(const struct td_forward *f) {
    const struct td_forward_buffers *s = &f->s;
    uint32_t n = f->batch.n, hidden = config(f)->hidden;
    OP(f, embed, .w = &f->model->embed, .ids = f->ids, .y = part_of(f, s->y), .n = n,
       .first = share(f)->token);
    if (f->device.ranks > 1)
        MEET(f, all_reduce, .x = s->partial, .y = s->y, .n = n, .dim = hidden, .bits = true);
    OP(f, expand, .y = s->y, .x = s->x, .n = n, .hidden = hidden);
}

/* What the indexer chose for the wanted rows, before the next layer overwrites it; moved as bits.
 */
static void capture(const struct td_forward *f, uint32_t layer) {
    size_t at = (size_t)f->batch.kv->csa_index[layer] * f->wanted * f->topk;
    OP(f, gather, .x = (const float *)(const void *)f->s.selected, .index = f->want,
       .y = (float *)(void *)(f->s.capture + at), .n = f->wanted, .dim = f->topk);
}

static void logits(const struct td_forward *f) {
    const struct td_model_config *c = config(f);
    const struct td_forward_buffers *s = &f->s;
    const struct td_hc *hc = &f->model->hc_head;
    uint32_t n = f->wanted, streams = TD_HC_STREAMS * c->hidden;
    OP(f, gather, .x = s->x, .index = f->want, .y = s->top_x, .n = n, .dim = streams);
    OP(f, linear, .x = s->top_x, .x_stride = streams, .n = n, .parts = 1,
       .part = {part(&hc->fn, s->top_mix)});
    OP(f, hc_head, .x = s->top_x, .m = s->top_mix, .base = hc->base, .scale = hc->scale,
       .y = s->top_h, .n = n, .hidden = c->hidden, .eps = c->rms_eps, .hc_eps = c->hc_eps);
    norm(f, s->top_h, f->model->norm, n, c->hidden);
    OP(f, linear, .x = s->top_h, .x_stride = c->hidden, .n = n, .parts = 1,
       .part = {{&f->model->head, s->logits, f->logits_stride, 0}});
}

void td_forward_angles(struct td_forward *f) {
    for (uint32_t i = 0; i < 2; i++)
        OP(f, rope_angles, .row = f->batch.row, .freq = f->model->freq[i], .cs = f->s.cs[i],
           .n = f->batch.n);
}

/* The page, with what each call reads and writes beside it. */
/* clang-format off */
static void attention(const struct td_forward *f, uint32_t i, const struct td_packed_layer *l) {
    const struct td_model_config *c = config(f);
    const struct td_forward_buffers *s = &f->s;
    uint32_t n = f->batch.n, heads = share(f)->heads;

    project(f, l);                                       /* h -> qr, kv, u, g, ...           */
    norm(f, s->qr, l->q_norm, n, c->q_lora_rank);
    norm(f, s->kv, l->kv_norm, n, TD_HEAD_DIM);
    project_queries(f, l);                               /* qr -> q, iq                      */
    norm(f, s->q, NULL, n * heads, TD_HEAD_DIM);
    rope(f, l, s->q, heads, TD_HEAD_DIM, false);
    rope(f, l, s->kv, 1, TD_HEAD_DIM, false);
    OP(f, row_store, .kv = s->kv, .rows = s->rows, .layout = f->batch.kv, .n = n,
       .sim8 = f->ref);

    if (l->kind == TD_LAYER_HCA)                         /* entries closed here are seen here */
        compress(f, i, TD_KV_HCA, &l->comp, s->u, s->g);
    if (l->kind == TD_LAYER_CSA) {
        compress(f, i, TD_KV_CSA, &l->comp, s->u, s->g);
        compress(f, i, TD_KV_INDEX, &l->index_comp, s->iu, s->ig);
        index_select(f, i);                              /* iq, iw, keys -> selected         */
    }
    attend(f, i, l);                                     /* q, kv, entries -> o              */
    OP(f, ring_write, .batch = &f->batch, .layer = i, .rows = s->rows);
    rope(f, l, s->o, heads, TD_HEAD_DIM, true);
    output(f, l);                                        /* o -> attn_out                    */
}

static void feed_forward(const struct td_forward *f, const struct td_packed_layer *l) {
    route(f, l);                                         /* h -> experts, weights, groups    */
    routed_experts(f, l);                                /* h -> expert_out                  */
    shared_expert(f, l);                                 /* h -> shared_out                  */
    combine(f);                                          /* -> ffn_out                       */
}

void td_forward_layer(struct td_forward *f, uint32_t i) {
    const struct td_packed_layer *l = &f->model->layer[i];
    f->layer = i;
    hc_pre(f, &l->hc_attn, l->attn_norm);                /* x -> h                           */
    attention(f, i, l);                                  /* h -> attn_out; KV written        */
    hc_post(f, f->s.attn_out);                           /* into x                           */
    hc_pre(f, &l->hc_ffn, l->ffn_norm);
    feed_forward(f, l);                                  /* h -> ffn_out                     */
    hc_post(f, f->s.ffn_out);
    if (f->capture && l->kind == TD_LAYER_CSA) capture(f, i);
}

void td_forward_step(struct td_forward *f) {
    f->layer = TD_TEAM_NO_LAYER;
    embed(f);                                            /* ids -> x                         */
    td_forward_angles(f);
    for (uint32_t i = 0; i < config(f)->layers; i++) {
        td_forward_layer(f, i);
        if (f->layer_done) f->layer_done(f, i);
    }
    f->layer = TD_TEAM_NO_LAYER;
    if (f->wanted) logits(f);                            /* the rank's tokens                */
}

/* clang-format on */

/* z has own columns alone unless a group of rounded values spans ranks. */
static bool merges_z(const struct td_forward *f) {
    return f->ref && f->device.ranks > 1 && share(f)->groups * config(f)->o_lora_rank % TD_BLOCK;
}

/* What ranks that share the entries tell each other. */
static void plan_split(struct td_forward *f, struct td_bump *b, uint32_t max_rows) {
    struct td_forward_buffers *s = &f->s;
    uint32_t heads = share(f)->heads, ranks = f->device.ranks;
    uint32_t rows = max_rows < TD_SLICE_ROWS ? max_rows : TD_SLICE_ROWS;
    size_t part = ranks * td_attend_part_floats(rows, heads) * sizeof *s->part;
    s->ml = td_bump_take(b, (size_t)max_rows * heads * 2 * sizeof *s->ml);
    s->part = s->parts = td_bump_take(b, part);
    if (ranks == 1) return;
    s->parts = td_bump_take(b, part);
    s->all_q = td_bump_take(b, (size_t)ranks * rows * heads * TD_HEAD_DIM * sizeof *s->all_q);
    s->candidates = td_bump_take(b, (size_t)ranks * rows * f->topk * sizeof *s->candidates);
}

void td_forward_plan(struct td_forward *f, struct td_bump *b, uint32_t max_rows,
                     uint32_t max_wanted, const struct td_kv_layout *kv) {
    const struct td_model_config *c = config(f);
    const struct td_share *own = share(f);
    struct td_forward_buffers *s = &f->s;
    bool merged = merges_z(f);
    f->z_first = merged ? own->group : 0;
    f->z_dim = (merged ? c->o_groups : own->groups) * c->o_lora_rank;
    size_t n = max_rows, k = c->experts_per_token, top = max_wanted;
    size_t shared_inner = f->model->layer[0].shared.w1.rows, inner = k * c->expert_inner;
    inner = shared_inner > inner ? shared_inner : inner;
#define FLOATS(count) td_bump_take(b, (size_t)(count)*4)
    s->x = FLOATS(n * TD_HC_STREAMS * c->hidden);
    s->mix = FLOATS(n * 24);
    s->post = FLOATS(n * 4);
    s->comb = FLOATS(n * 16);
    s->y = FLOATS(n * c->hidden);
    s->h = FLOATS(n * c->hidden);
    s->rounded = FLOATS(n * (c->hidden > c->q_lora_rank ? c->hidden : c->q_lora_rank));
    s->cs[0] = FLOATS(n * TD_ROPE_DIM);
    s->cs[1] = FLOATS(n * TD_ROPE_DIM);
    s->qr = FLOATS(n * c->q_lora_rank);
    s->q = FLOATS(n * own->heads * TD_HEAD_DIM);
    s->o = FLOATS(n * own->heads * TD_HEAD_DIM);
    f->spare_bytes = n * own->heads * TD_HEAD_DIM * 4;
    if (f->split) plan_split(f, b, max_rows);
    s->kv = FLOATS(n * TD_HEAD_DIM);
    s->rows = td_bump_take(b, n * kv->row_bytes);
    s->u = FLOATS(n * TD_KV_CSA_STATE_DIM);
    s->g = FLOATS(n * TD_KV_CSA_STATE_DIM);
    s->iu = FLOATS(n * TD_KV_INDEX_STATE_DIM);
    s->ig = FLOATS(n * TD_KV_INDEX_STATE_DIM);
    s->iq = FLOATS(n * c->index_heads * TD_INDEX_DIM);
    s->iw = FLOATS(n * c->index_heads);
    s->selected = FLOATS(n * f->topk);
    s->z = FLOATS(n * f->z_dim);
    s->merged_z = merged ? FLOATS(n * f->z_dim) : NULL;
    s->shard = FLOATS(n * own->groups * c->hidden);
    s->partial = f->device.ranks > 1 ? FLOATS(n * c->hidden) : NULL;
    s->attn_out = FLOATS(n * c->hidden);
    s->gate = FLOATS(n * c->experts);
    s->expert = FLOATS(n * k);
    s->weight = FLOATS(n * k);
    s->offset = FLOATS(own->experts + 1);
    s->token = FLOATS(n * k);
    s->row_weight = FLOATS(n * k);
    s->place = FLOATS(n * k);
    s->a = FLOATS(n * inner);
    s->b = FLOATS(n * inner);
    s->expert_out = FLOATS(n * k * c->hidden);
    if (f->nvfp4) {
        size_t values = n * k * (c->hidden > c->expert_inner ? c->hidden : c->expert_inner);
        s->codes.code = td_bump_take(b, values / 2);
        s->codes.scale = td_bump_take(b, values / 16);
    }
    s->shared_out = FLOATS(n * c->hidden);
    s->ffn_out = FLOATS(n * c->hidden);
    s->top_x = FLOATS(top * TD_HC_STREAMS * c->hidden);
    s->top_mix = FLOATS(top * TD_HC_STREAMS);
    s->top_h = FLOATS(top * c->hidden);
    s->capture = FLOATS(top * kv->csa_layers * f->topk);
#undef FLOATS
}

size_t td_forward_words(const struct td_forward *f, uint32_t max_rows) {
    size_t most = config(f)->hidden;
    if (most < f->topk) most = f->topk;
    if (merges_z(f) && most < f->z_dim) most = f->z_dim;
    return most * max_rows;
}

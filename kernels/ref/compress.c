/* Window rows in stored form, and the compressors that turn token rows into entries and keys. */
#include "kernels/ref/angle.h"
#include "kernels/ref/math.h"
#include "kernels/ref/op.h"
#include "kernels/ref/stored.h"

static void store_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_row_store_args *a = arg;
    for (uint32_t i = begin; i < end; i++) {
        float v[TD_KV_ROW_DIM];
        memcpy(v, a->kv + (size_t)i * TD_KV_ROW_DIM, sizeof v);
        if (a->sim8) fp8_round(v, v, TD_KV_FP8_ROW_DIM, QUANT_SIM8);
        row_encode(v, a->layout->row_dtype, td_kv_dense_row(a->layout, a->rows, i));
    }
}

void TD_OP(row_store)(const struct td_device *d, const struct td_row_store_args *a) {
    td_threads_run(d->threads, store_rows, a, a->n);
}

static void ring_rows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_ring_write_args *a = arg;
    const struct td_op_batch *b = a->batch;
    for (uint32_t i = begin; i < end; i++) {
        const struct td_op_run *run = &b->run[b->row[i].run];
        uint32_t pos = b->row[i].pos;
        if (pos + TD_KV_WINDOW_ROWS < run->pos + run->n) continue; /* a later row takes its place */
        td_kv_row_copy(b->kv, td_kv_window_row(b->kv, run->slot, a->layer, pos),
                       td_kv_dense_row(b->kv, a->rows, i));
    }
}

void TD_OP(ring_write)(const struct td_device *d, const struct td_ring_write_args *a) {
    td_threads_run(d->threads, ring_rows, a, a->batch->n);
}

/* What distinguishes the three compressors. */
struct shape {
    uint32_t d, width;    /* entry dim; u and g of a token: coff * d */
    uint32_t ratio, ring; /* tokens per entry; state rows */
    bool overlap;         /* the previous window's rows take part, with their first halves */
};

static struct shape shape_of(enum td_kv_family family) {
    switch (family) {
    case TD_KV_CSA:
        return (struct shape){TD_HEAD_DIM, TD_KV_CSA_STATE_DIM, TD_CSA_RATIO, TD_KV_CSA_RING, true};
    case TD_KV_INDEX:
        return (struct shape){TD_INDEX_DIM, TD_KV_INDEX_STATE_DIM, TD_CSA_RATIO, TD_KV_CSA_RING,
                              true};
    default:
        return (struct shape){TD_HEAD_DIM, TD_KV_HCA_STATE_DIM, TD_HCA_RATIO, TD_KV_HCA_RING,
                              false};
    }
}

static float *state_row(const struct td_compress_args *a, const struct td_op_run *run,
                        uint32_t pos) {
    const struct td_kv_layout *kv = a->batch->kv;
    switch (a->family) {
    case TD_KV_CSA:
        return td_kv_csa_state(kv, run->slot, a->layer, pos);
    case TD_KV_INDEX:
        return td_kv_index_state(kv, run->slot, a->layer, pos);
    default:
        return td_kv_hca_state(kv, run->slot, a->layer, pos);
    }
}

/* u and g (ape added) of position pos: from this step or from the ring. */
static void token_row(const struct td_compress_args *a, const struct td_op_run *run, uint32_t width,
                      uint32_t pos, const float **ret_u, const float **ret_g) {
    if (pos >= run->pos) {
        size_t row = run->first + (pos - run->pos);
        *ret_u = a->u + row * width;
        *ret_g = a->g + row * width;
    } else {
        *ret_u = state_row(a, run, pos);
        *ret_g = *ret_u + width;
    }
}

/* v = softmax over the rows, per channel, of g, applied to u. */
static void pool_rows(const float *const *u, const float *const *g, uint32_t rows, uint32_t d,
                      float *v) {
    for (uint32_t c = 0; c < d; c++) {
        float max = g[0][c], den = 0.0f, num = 0.0f;
        for (uint32_t r = 1; r < rows; r++)
            max = max1(g[r][c], max);
        for (uint32_t r = 0; r < rows; r++) {
            float e = exp1(g[r][c] - max);
            den += e;
            num = fmaf(e, u[r][c], num);
        }
        v[c] = num / den;
    }
}

static uint32_t entries_per_page(enum td_kv_family family) {
    return family == TD_KV_HCA ? TD_KV_HCA_PER_PAGE : TD_KV_CSA_PER_PAGE;
}

/* v is rounded in place on the way. */
static void store_entry(const struct td_compress_args *a, const struct td_op_run *run, uint32_t w,
                        float *v) {
    const struct td_op_batch *b = a->batch;
    if (a->family == TD_KV_INDEX) {
        if (a->hadamard) hadamard128(v);
        if (a->sim4) sim4(v, TD_INDEX_DIM);
    } else if (a->sim8) {
        fp8_round(v, v, TD_KV_FP8_ROW_DIM, QUANT_SIM8);
    }
    uint32_t per = entries_per_page(a->family), i = w % per, page = td_op_page(b, run, w / per);
    if (a->family == TD_KV_HCA)
        row_encode(v, b->kv->row_dtype, td_kv_hca_row(b->kv, b->pool, a->layer, page, i));
    else if (a->family == TD_KV_CSA)
        row_encode(v, b->kv->row_dtype, td_kv_csa_row(b->kv, b->pool, a->layer, page, i));
    else
        key_encode(v, b->kv->key_dtype, td_kv_index_key(b->kv, b->pool, a->layer, page, i));
}

static void add_ape(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_compress_args *a = arg;
    struct shape s = shape_of(a->family);
    for (uint32_t i = begin; i < end; i++) {
        const float *ape = a->ape + (size_t)(a->batch->row[i].pos % s.ratio) * s.width;
        float *g = a->g + (size_t)i * s.width;
        for (uint32_t c = 0; c < s.width; c++)
            g[c] += ape[c];
    }
}

static void close_windows(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_compress_args *a = arg;
    struct shape s = shape_of(a->family);
    for (uint32_t i = begin; i < end; i++) {
        const struct td_op_run *run = &a->batch->run[a->batch->row[i].run];
        uint32_t pos = a->batch->row[i].pos, w = pos / s.ratio, rows = 0;
        if ((pos + 1) % s.ratio != 0) continue;
        if (!td_op_has_page(a->batch, w / entries_per_page(a->family))) continue;
        const float *u[TD_HCA_RATIO], *g[TD_HCA_RATIO];
        if (s.overlap && w > 0)
            for (uint32_t t = s.ratio * (w - 1); t < s.ratio * w; t++, rows++)
                token_row(a, run, s.width, t, &u[rows], &g[rows]);
        for (uint32_t t = s.ratio * w; t <= pos; t++, rows++) {
            token_row(a, run, s.width, t, &u[rows], &g[rows]);
            u[rows] += s.width - s.d; /* the second half, where there are two */
            g[rows] += s.width - s.d;
        }
        float v[TD_HEAD_DIM], cs[TD_ROPE_DIM];
        pool_rows(u, g, rows, s.d, v);
        rms_norm_row(v, v, a->norm, s.d, a->eps);
        rope_angles_row(s.ratio * w, a->freq, cs);
        rope_row(v + s.d - TD_ROPE_DIM, cs, false);
        store_entry(a, run, w, v);
    }
}

static void keep_state(const void *arg, uint32_t begin, uint32_t end, uint32_t thread) {
    (void)thread;
    const struct td_compress_args *a = arg;
    struct shape s = shape_of(a->family);
    for (uint32_t i = begin; i < end; i++) {
        const struct td_op_run *run = &a->batch->run[a->batch->row[i].run];
        uint32_t pos = a->batch->row[i].pos;
        if (pos + s.ring < run->pos + run->n) continue; /* a later row takes its place */
        float *state = state_row(a, run, pos);
        memcpy(state, a->u + (size_t)i * s.width, s.width * sizeof *state);
        memcpy(state + s.width, a->g + (size_t)i * s.width, s.width * sizeof *state);
    }
}

void TD_OP(compress)(const struct td_device *d, const struct td_compress_args *a) {
    td_threads_run(d->threads, add_ape, a, a->batch->n);
    td_threads_run(d->threads, close_windows, a, a->batch->n);
    td_threads_run(d->threads, keep_state, a, a->batch->n);
}

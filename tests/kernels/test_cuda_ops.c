/* The fast CUDA kernels against plain formulas: products of every weight format with inputs rounded
 * as they round them (to one bf16, or to two where weights are bf16), which then differ from the
 * formula by the order of a sum alone; and a row's result is the same bits whatever else is in the
 * call. Built like test_cuda.c. */
#include <math.h>
#include <stdio.h>

#include "kernels/device.h"
#include "kernels/model/numbers.h"
#include "tests/kernels/device_arrays.h"
#include "tests/kernels/sequences.h"

extern const struct td_backend TD_TEST_BACKEND;

static struct td_device dev;
static struct td_ops fast;

/* A stored tensor of random values: *ret for the host, `stored` of the result for the device. */
static struct td_matrix random_matrix(enum td_weight_format format, uint32_t rows, uint32_t cols,
                                      struct td_weight *ret) {
    struct td_weight w = {.format = format, .rows = rows, .cols = cols, .scale2 = 0.37f};
    size_t bytes = td_weight_data_bytes(&w), scales = td_weight_scale_bytes(&w);
    uint8_t *data = td_test_bytes(bytes), *scale = td_test_bytes(scales);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)td_test_next();
        if (format == TD_W_FP8_BLOCK && (data[i] & 0x7f) == 0x7f) data[i] ^= 1; /* no NaN */
    }
    for (size_t i = 0; format == TD_W_BF16 && i < bytes / 2; i++)
        ((uint16_t *)(void *)data)[i] = td_f32_to_bf16(td_test_uniform(-1, 1));
    for (size_t i = 0; format == TD_W_F32 && i < bytes / 4; i++)
        ((float *)(void *)data)[i] = td_test_uniform(-1, 1);
    for (size_t i = 0; i < scales; i++)
        scale[i] = (uint8_t)(format == TD_W_NVFP4 ? td_test_below(0x7f) : 118 + td_test_below(6));
    w.data = data;
    w.scale = scales ? scale : NULL;
    *ret = w;
    struct td_matrix m = {.rows = rows, .cols = cols, .stored = w};
    m.stored.data = td_test_put(&dev, data, bytes);
    if (scales) m.stored.scale = td_test_put(&dev, scale, scales);
    return m;
}

static void give_matrix(const struct td_matrix *m, struct td_weight *w) {
    td_test_give(&dev, m->stored.data);
    if (m->stored.scale) td_test_give(&dev, m->stored.scale);
    free((void *)(uintptr_t)w->data);
    if (w->scale) free((void *)(uintptr_t)w->scale);
}

/* Whether inputs are two bf16 values. */
static bool two(enum td_weight_format f) {
    return f == TD_W_F32 || f == TD_W_BF16;
}

/* Output o of input row x, and the sum of the magnitudes that were added. */
static double product(const float *x, const struct td_weight *w, const float *row, uint32_t col,
                      uint32_t cols, double *ret_size) {
    double sum = 0, size = 0;
    for (uint32_t k = 0; k < cols; k++) {
        double v = x[k];
        if (!two(w->format)) v = td_bf16_to_f32(td_f32_to_bf16(x[k]));
        sum += v * row[col + k];
        size += fabs(v * row[col + k]);
    }
    *ret_size = size;
    return sum;
}

static const enum td_weight_format formats[] = {TD_W_BF16, TD_W_FP8_BLOCK, TD_W_FP4, TD_W_NVFP4,
                                                TD_W_F32};

/* Whether the form for chunks of a prefill is this chip's: sm_90. */
static bool hopper(void) {
    char text[256];
    dev.backend->describe(&dev, text, sizeof text);
    return strstr(text, "sm_90") != NULL;
}

/* Room for inputs laid out anew, with NaNs in it; the end is watched. */
enum { SPARE = 4 << 20, WATCHED = 256 };
static struct td_spare spare(void) {
    uint8_t *bytes = td_test_bytes(SPARE + WATCHED);
    memset(bytes, 0xff, SPARE + WATCHED);
    struct td_spare s = {td_test_put(&dev, bytes, SPARE + WATCHED), SPARE};
    free(bytes);
    return s;
}
/* Used, or not. */
static void give_spare(const struct td_spare *s, bool used) {
    uint8_t *bytes = td_test_bytes(SPARE + WATCHED);
    bool found = false;
    td_test_get(&dev, bytes, s->at, SPARE + WATCHED);
    for (uint32_t i = 0; i < SPARE; i++)
        found = found || bytes[i] != 0xff;
    if (found != used) fail_msg("room for inputs: used %d, expected %d", found, used);
    for (uint32_t i = SPARE; i < SPARE + WATCHED; i++)
        if (bytes[i] != 0xff) fail_msg("written %u bytes behind the room for inputs", i - SPARE);
    td_test_give(&dev, s->at);
    free(bytes);
}

static void linear_case(enum td_weight_format format, uint32_t n, uint32_t rows, uint32_t cols,
                        uint32_t row, uint32_t col, bool wide) {
    struct td_weight w;
    struct td_matrix m = random_matrix(format, row + rows, col + cols, &w);
    uint32_t stride = cols + 4 * td_test_below(2), y_stride = rows + td_test_below(3);
    float *x = td_test_floats((size_t)n * stride, -2, 2), *y = td_test_poison((size_t)n * y_stride);
    float *one = td_test_poison(rows), *decoded = td_test_poison(col + cols);
    size_t bytes = (size_t)n * y_stride * sizeof *y;
    float *dx = td_test_put(&dev, x, (size_t)n * stride * sizeof *x),
          *dy = td_test_put(&dev, y, bytes);
    m.rows = rows;
    m.cols = cols;
    m.row = row;
    m.col = col;
    struct td_linear_args a = {.x = dx,
                               .x_stride = stride,
                               .n = n,
                               .parts = 1,
                               .part = {{.w = &m, .y = dy, .y_stride = y_stride}}};
    uint32_t x_at = stride - cols; /* inputs need not begin where a row does */
    a.part[0].x_at = x_at;
    if (wide) a.spare = spare();
    fast.linear(&dev, &a);
    if (wide) give_spare(&a.spare, hopper());
    a.spare.bytes = 0;
    td_test_get(&dev, y, dy, bytes);
    for (uint32_t o = 0; o < rows; o++) {
        td_weight_row(&w, row + o, decoded);
        for (uint32_t i = 0; i < n; i++) {
            const float *in = x + (size_t)i * stride + x_at;
            double size, want = product(in, &w, decoded, col, cols, &size);
            float got = y[(size_t)i * y_stride + o];
            if (!(fabs((double)got - want) <= (two(format) ? 5e-6 : 1e-6) * size))
                fail_msg("format %d, %u rows of %u: row %u output %u: expected %.9g, found %.9g",
                         (int)format, n, cols, i, o, want, (double)got);
        }
    }
    /* One row alone: a pointer into the inputs keeps its alignment. */
    uint32_t i = td_test_below(n);
    a.x = dx + (size_t)i * stride;
    a.n = 1;
    a.part[0].y_stride = rows;
    fast.linear(&dev, &a);
    td_test_get(&dev, one, dy, rows * sizeof *one);
    td_test_same("a row alone", one, y + (size_t)i * y_stride, rows * sizeof *one);
    td_test_give(&dev, dx);
    td_test_give(&dev, dy);
    give_matrix(&m, &w);
    free(x);
    free(y);
    free(one);
    free(decoded);
}

static void linear(void **state) {
    (void)state;
    static const uint32_t ns[] = {1, 7, 8, 9, 33, 67, 130}, outs[] = {1, 16, 24, 40, 280},
                          ins[] = {32, 64, 128, 160, 1024, 1184};
    for (uint32_t c = 0; c < 30; c++)
        linear_case(formats[c % 5], ns[td_test_below(7)], outs[td_test_below(5)],
                    ins[td_test_below(6)], 16 * td_test_below(2), 64 * td_test_below(2), false);
    /* FP8: whole 1024s of inputs, of which a part of K is one to four pieces and more; fp32: parts
     * of several stretches, the last one short. */
    for (uint32_t k = 1; k <= 5; k++)
        linear_case(TD_W_FP8_BLOCK, 1 + td_test_below(8), outs[1 + td_test_below(4)], 1024 * k,
                    16 * td_test_below(2), 128 * td_test_below(2), false);
    linear_case(TD_W_F32, 1 + td_test_below(8), 24, 5 * 1024 + 160, 0, 0, false);
    linear_case(TD_W_F32, 17, 24, 5 * 1024 + 160, 0, 0, false);
    /* Chunks: every number of rows of a tile, and several tiles; parts of K of one 128 and of two.
     */
    static const uint32_t chunks[] = {256, 293, 389, 577};
    for (uint32_t c = 0; c < 8; c++)
        linear_case(formats[c % 4], chunks[td_test_below(4)], c % 2 ? 136 : 280, c < 4 ? 1152 : 384,
                    128 * td_test_below(2), 128 * td_test_below(2), true);
}

enum { E = 5 };
struct experts_case {
    uint32_t k, o, x, offset[E + 1],
        most; /* inputs, outputs, rows; most: of an expert, 0: unknown */
};

static void expert_case(enum td_weight_format format, const struct experts_case *own) {
    uint32_t K = own->k, O = own->o, X = own->x, R = own->offset[E];
    const uint32_t *offset = own->offset;
    bool wide = own->most > 0;
    struct td_weight w[E];
    struct td_matrix m[E];
    uint32_t *x_row = (uint32_t *)(void *)td_test_poison(R);
    float *x = td_test_floats((size_t)X * K, -2, 2), *y = td_test_poison(R * O);
    float *decoded = td_test_poison(K);
    for (uint32_t e = 0; e < E; e++)
        m[e] = random_matrix(format, O, K, &w[e]);
    for (uint32_t r = 0; r < R; r++)
        x_row[r] = td_test_below(X);
    const struct td_matrix *table = td_test_put(&dev, m, sizeof m);
    for (uint32_t e = 0; e < E; e++)
        m[e].device = table + e;
    struct td_expert_linear_args a = {.x = td_test_put(&dev, x, (size_t)X * K * sizeof *x),
                                      .x_stride = K,
                                      .x_row = td_test_put(&dev, x_row, R * sizeof *x_row),
                                      .offset = td_test_put(&dev, offset, sizeof own->offset),
                                      .experts = E,
                                      .parts = 1,
                                      .most = own->most,
                                      .all = wide ? R : 0,
                                      .w = {m},
                                      .y = {td_test_put(&dev, y, R * O * sizeof *y)}};
    if (wide) a.spare = spare();
    fast.expert_linear(&dev, &a);
    if (wide) give_spare(&a.spare, hopper() && format != TD_W_BF16 && format != TD_W_F32);
    a.spare.bytes = 0;
    td_test_get(&dev, y, a.y[0], R * O * sizeof *y);
    for (uint32_t e = 0; e < E; e++)
        for (uint32_t o = 0; o < O; o++) {
            td_weight_row(&w[e], o, decoded);
            for (uint32_t r = offset[e]; r < offset[e + 1]; r++) {
                double size, want = product(x + x_row[r] * K, &w[e], decoded, 0, K, &size);
                if (!(fabs((double)y[r * O + o] - want) <= (two(format) ? 5e-6 : 1e-6) * size))
                    fail_msg("format %d, expert %u row %u output %u: expected %.9g, found %.9g",
                             (int)format, e, r, o, want, (double)y[r * O + o]);
            }
        }
    /* The last expert again with few of its rows: another form, the same bits. */
    enum { FEW = 5 };
    uint32_t fewer[E + 1];
    float *again = td_test_poison(R * O);
    memcpy(fewer, offset, sizeof fewer);
    fewer[E] = offset[E - 1] + FEW;
    td_test_give(&dev, a.offset);
    a.offset = td_test_put(&dev, fewer, sizeof fewer);
    fast.expert_linear(&dev, &a);
    td_test_get(&dev, again, a.y[0], R * O * sizeof *again);
    td_test_same("an expert's rows among fewer", again + offset[E - 1] * O, y + offset[E - 1] * O,
                 FEW * O * sizeof *again);
    /* A rank that has none of the chosen experts: nothing is written. */
    memset(fewer, 0, sizeof fewer);
    td_upload(&dev, (void *)(uintptr_t)a.offset, fewer, sizeof fewer);
    memset(again, 0xff, R * O * sizeof *again);
    td_upload(&dev, a.y[0], again, R * O * sizeof *again);
    fast.expert_linear(&dev, &a);
    td_test_get(&dev, y, a.y[0], R * O * sizeof *y);
    td_test_same("rows of no expert", again, y, R * O * sizeof *y);
    free(again);
    td_test_give(&dev, a.x);
    td_test_give(&dev, a.x_row);
    td_test_give(&dev, a.offset);
    td_test_give(&dev, a.y[0]);
    td_test_give(&dev, table);
    for (uint32_t e = 0; e < E; e++)
        give_matrix(&m[e], &w[e]);
    free(x);
    free(y);
    free(x_row);
    free(decoded);
}

static void expert_linear(void **state) {
    (void)state;
    static const struct experts_case some = {288, 40, 50, {0, 0, 9, 10, 18, 93}, 0};
    /* Few rows that share a block's stage; whole rounds of a warp along K. */
    static const struct experts_case few = {1024, 40, 50, {0, 2, 3, 8, 17, 93}, 0};
    static const struct experts_case many = {384, 136, 90, {0, 7, 7, 48, 246, 633}, 1024};
    for (uint32_t f = 0; f < 5; f++) {
        expert_case(formats[f], &some);
        expert_case(formats[f], &few);
    }
    for (uint32_t f = 1; f < 4; f++)
        expert_case(formats[f], &many);
}

/* A step's sequences in device memory. */
struct copy {
    struct td_op_batch batch;
    struct td_op_run run[TD_SEQ_MAX];
    uint32_t *pages;
    void *slots;
};

static void copy_batch(struct copy *c, const struct td_sequences *s) {
    c->batch = s->batch;
    c->pages = td_test_put(&dev, s->pages, sizeof s->pages);
    c->slots = td_test_put(&dev, s->slots, s->kv.slot_bytes * s->count);
    c->batch.pool = td_test_put(&dev, s->pool, s->kv.pool_bytes);
    c->batch.row = td_test_put(&dev, s->row, s->batch.n * sizeof *s->row);
    for (uint32_t i = 0; i < s->batch.runs; i++) {
        size_t page = (size_t)(s->run[i].pages - s->pages[0]);
        c->run[i] = s->run[i];
        c->run[i].pages = c->pages + page;
        c->run[i].slot = (uint8_t *)c->slots + ((uint8_t *)s->run[i].slot - (uint8_t *)s->slots);
    }
    c->batch.run = td_test_put(&dev, c->run, sizeof c->run);
}

static void give_batch(struct copy *c) {
    td_test_give(&dev, c->batch.run);
    td_test_give(&dev, c->batch.row);
    td_test_give(&dev, c->batch.pool);
    td_test_give(&dev, c->slots);
    td_test_give(&dev, c->pages);
}

/* The one row of the batch is at the end of a sequence of `pages` pages, which are the few there
 * are again and again. */
static void repeat_pages(struct td_sequences *s, uint32_t *pages, uint32_t n) {
    const uint32_t pos = n * TD_KV_PAGE_TOKENS - 1;
    assert_int_equal(s->batch.n, 1);
    for (uint32_t p = 0; p < n; p++)
        pages[p] = s->pages[p % 2][td_test_below(TD_SEQ_PAGES)];
    s->run[0].pages = pages;
    s->run[0].pos = s->row[0].pos = s->batch.max_pos = pos;
}

/* Values small enough for every sum to be exact, so that the order does not matter and scores are
 * often equal: then the chosen entries are the reference's. `pages`: of a long sequence, or 0. */
static void index_case(uint32_t heads, uint32_t topk, const uint32_t *n, uint32_t pages) {
    struct td_sequences s;
    struct copy c;
    uint32_t *more = td_test_bytes(pages * sizeof *more);
    td_sequences_init(&s, 3, TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    for (uint32_t i = 0; i < 3; i++)
        s.pos[i] = td_test_below(TD_SEQ_PAGES * TD_KV_PAGE_TOKENS - n[i]);
    td_sequences_step(&s, n);
    if (pages) repeat_pages(&s, more, pages);
    for (uint32_t p = 0; p < s.kv.pages; p++)
        for (uint32_t e = 0; e < TD_KV_CSA_PER_PAGE; e++) {
            uint16_t *key = td_kv_index_key(&s.kv, s.pool, 1, p, e);
            for (uint32_t i = 0; i < TD_INDEX_DIM; i++)
                key[i] = td_f32_to_bf16((float)td_test_below(5) - 2);
        }
    size_t rows = s.batch.n, q_floats = rows * heads * TD_INDEX_DIM, chosen = rows * topk;
    float *q = td_test_floats(q_floats, -2, 2), *wt = td_test_floats(rows * heads, -4, 4);
    for (size_t i = 0; i < q_floats; i++)
        q[i] = rintf(q[i]);
    for (size_t i = 0; i < rows * heads; i++)
        wt[i] = rintf(wt[i]);
    int32_t *want = td_test_bytes(chosen * sizeof *want),
            *got = td_test_bytes(chosen * sizeof *got);
    struct td_device host = td_test_device(1);
    struct td_index_args a = {.batch = &s.batch,
                              .rows = s.batch.n,
                              .layer = 1,
                              .q = q,
                              .wt = wt,
                              .wt_scale = 0.25f,
                              .heads = heads,
                              .topk = topk,
                              .score_bf16 = td_test_below(2),
                              .selected = want,
                              .workspace = td_test_bytes(td_index_workspace(heads, topk))};
    td_ops_select()->index(&host, &a);
    free(a.workspace);
    td_test_device_finish(&host);
    copy_batch(&c, &s);
    if (pages) {
        td_test_give(&dev, c.pages);
        td_test_give(&dev, c.batch.run);
        c.run[0].pages = c.pages = td_test_put(&dev, more, pages * sizeof *more);
        c.batch.run = td_test_put(&dev, c.run, sizeof c.run);
    }
    a.batch = &c.batch;
    a.q = td_test_put(&dev, q, q_floats * sizeof *q);
    a.wt = td_test_put(&dev, wt, rows * heads * sizeof *wt);
    a.selected = td_test_put(&dev, NULL, chosen * sizeof *got);
    a.workspace =
        td_test_put(&dev, NULL, dev.backend->index_workspace(heads, topk, (uint32_t)rows));
    fast.index(&dev, &a);
    td_test_get(&dev, got, a.selected, chosen * sizeof *got);
    td_test_same("chosen entries", want, got, chosen * sizeof *got);
    /* A rank's rows of the step; the others stay. */
    a.first = td_test_below((uint32_t)rows);
    a.rows = td_test_below((uint32_t)rows - a.first + 1);
    for (size_t i = 0; i < chosen; i++)
        if (i / topk < a.first || i / topk >= a.first + a.rows) want[i] = -2;
    for (size_t i = 0; i < chosen; i++)
        got[i] = -2;
    td_upload(&dev, a.selected, got, chosen * sizeof *got);
    fast.index(&dev, &a);
    td_test_get(&dev, got, a.selected, chosen * sizeof *got);
    td_test_same("chosen entries of some rows", want, got, chosen * sizeof *got);
    td_test_give(&dev, a.q);
    td_test_give(&dev, a.wt);
    td_test_give(&dev, a.selected);
    td_test_give(&dev, a.workspace);
    give_batch(&c);
    td_sequences_finish(&s);
    free(more);
    free(q);
    free(wt);
    free(want);
    free(got);
}

static void index_keys(void **state) {
    (void)state;
    index_case(64, 64, (uint32_t[]){1, 1, 0}, 0);
    index_case(4, 17, (uint32_t[]){3, 1, 2}, 0);
    index_case(3, 512, (uint32_t[]){1, 2, 1}, 0);
    index_case(8, 1, (uint32_t[]){1, 1, 1}, 0);
    index_case(2, 17, (uint32_t[]){140, 0, 0}, 0); /* a query a block */
    /* The scores of a warp, which are 1,024 of 32,768, and more than it keeps. */
    index_case(2, 512, (uint32_t[]){1, 0, 0}, 511);
    index_case(2, 700, (uint32_t[]){1, 0, 0}, 530);
}

/* Against the definition with queries rounded to bf16; what is left is the rounding of exponentials
 * to bf16, 2^-9 of each. */
static void attend_case(enum td_kv_row_dtype type, uint32_t layer, uint32_t heads, uint32_t topk,
                        const uint32_t *n) {
    struct td_sequences s;
    struct copy c;
    td_sequences_init(&s, 3, type, TD_KV_KEY_BF16);
    for (uint32_t i = 0; i < 3; i++)
        s.pos[i] = td_test_below(TD_SEQ_PAGES * TD_KV_PAGE_TOKENS - n[i]);
    td_sequences_step(&s, n);
    size_t rows = s.batch.n, floats = rows * heads * TD_HEAD_DIM;
    float *kv = td_test_floats(rows * TD_HEAD_DIM, -1, 1), *q = td_test_floats(floats, -1, 1);
    float *sink = td_test_floats(heads, -1, 1), *want = td_test_poison(floats);
    float *got = td_test_poison(floats);
    void *stored = td_test_bytes(rows * s.kv.row_bytes);
    int32_t *selected = td_test_bytes(rows * topk * sizeof *selected);
    for (size_t i = 0; i < floats; i++)
        q[i] = td_bf16_to_f32(td_f32_to_bf16(q[i]));
    for (uint32_t i = 0; i < rows; i++) {
        uint32_t visible = (s.row[i].pos + 1) / TD_CSA_RATIO, count = 0;
        for (uint32_t w = 0; w < visible && count < topk; w++)
            if (td_test_below(visible) < topk) selected[i * topk + count++] = (int32_t)w;
        for (; count < topk; count++)
            selected[i * topk + count] = -1;
    }
    /* Every stored row holds a value of its own. */
    struct td_device host = td_test_device(1);
    const struct td_ops *ops = td_ops_select();
    uint32_t all = s.kv.pages * TD_KV_CSA_PER_PAGE;
    float *any = td_test_floats((size_t)all * TD_HEAD_DIM, -1, 1);
    uint8_t *dense = td_test_bytes((size_t)all * s.kv.row_bytes);
    struct td_row_store_args store = {.kv = any, .rows = dense, .layout = &s.kv, .n = all};
    ops->row_store(&host, &store);
    for (uint32_t r = 0; r < all; r++) {
        struct td_kv_row from = td_kv_dense_row(&s.kv, dense, r);
        uint32_t page = r / TD_KV_CSA_PER_PAGE, e = r % TD_KV_CSA_PER_PAGE;
        td_kv_row_copy(&s.kv, td_kv_csa_row(&s.kv, s.pool, 1, page, e), from);
        if (e < TD_KV_HCA_PER_PAGE)
            td_kv_row_copy(&s.kv, td_kv_hca_row(&s.kv, s.pool, 2, page, e), from);
        for (uint32_t i = 0; r < TD_KV_WINDOW_ROWS && i < 3; i++)
            td_kv_row_copy(
                &s.kv, td_kv_window_row(&s.kv, (uint8_t *)s.slots + s.kv.slot_bytes * i, layer, r),
                td_kv_dense_row(&s.kv, dense, r + 128 * i));
    }
    store =
        (struct td_row_store_args){.kv = kv, .rows = stored, .layout = &s.kv, .n = (uint32_t)rows};
    ops->row_store(&host, &store);
    struct td_attend_args a = {.batch = &s.batch,
                               .layer = layer,
                               .heads = heads,
                               .q = q,
                               .rows = stored,
                               .sink = sink,
                               .selected = layer == 1 ? selected : NULL,
                               .topk = topk,
                               .o = want};
    ops->attend(&host, &a);
    td_test_device_finish(&host);
    copy_batch(&c, &s);
    a.batch = &c.batch;
    a.q = td_test_put(&dev, q, floats * sizeof *q);
    a.rows = td_test_put(&dev, stored, rows * s.kv.row_bytes);
    a.sink = td_test_put(&dev, sink, heads * sizeof *sink);
    if (layer == 1) a.selected = td_test_put(&dev, selected, rows * topk * sizeof *selected);
    a.o = td_test_put(&dev, NULL, floats * sizeof *got);
    fast.attend(&dev, &a);
    td_test_get(&dev, got, a.o, floats * sizeof *got);
    for (size_t i = 0; i < floats; i++)
        if (!(fabsf(got[i] - want[i]) <= 4e-3f))
            fail_msg("layer %u, type %d, value %zu: expected %.9g, found %.9g", layer, (int)type, i,
                     (double)want[i], (double)got[i]);
    if (layer == 1) { /* a call that may meet larger sets takes another form: the same bits */
        uint32_t wide = topk + 640;
        int32_t *padded = td_test_bytes(rows * wide * sizeof *padded);
        for (uint32_t i = 0; i < rows * wide; i++)
            padded[i] = i % wide < topk ? selected[i / wide * topk + i % wide] : -1;
        td_test_give(&dev, a.selected);
        a.selected = td_test_put(&dev, padded, rows * wide * sizeof *padded);
        a.topk = wide;
        memcpy(want, got, floats * sizeof *got);
        fast.attend(&dev, &a);
        td_test_get(&dev, got, a.o, floats * sizeof *got);
        td_test_same("a set among larger ones", want, got, floats * sizeof *got);
        free(padded);
    }
    td_test_give(&dev, a.q);
    td_test_give(&dev, a.rows);
    td_test_give(&dev, a.sink);
    if (layer == 1) td_test_give(&dev, a.selected);
    td_test_give(&dev, a.o);
    give_batch(&c);
    td_sequences_finish(&s);
    free(kv);
    free(q);
    free(sink);
    free(want);
    free(got);
    free(stored);
    free(selected);
    free(any);
    free(dense);
}

static void attend(void **state) {
    (void)state;
    for (int type = 0; type < 2; type++) {
        enum td_kv_row_dtype row = type ? TD_KV_ROW_FP8 : TD_KV_ROW_BF16;
        attend_case(row, 0, 4, 64, (uint32_t[]){1, 3, 0});
        attend_case(row, 1, 64, 512, (uint32_t[]){1, 0, 0});
        attend_case(row, 1, 40, 33, (uint32_t[]){2, 0, 1});
        attend_case(row, 2, 4, 64, (uint32_t[]){1, 1, 20});
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear),
        cmocka_unit_test(expert_linear),
        cmocka_unit_test(index_keys),
        cmocka_unit_test(attend),
    };
    struct td_error err;
    if (TD_TEST_BACKEND.open(&dev, 0, &err) != TD_OK) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    if (dev.backend->ops(&dev, 0, &fast, &err) != TD_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    int failed = cmocka_run_group_tests(tests, td_test_seed, NULL);
    dev.backend->close(&dev);
    return failed;
}

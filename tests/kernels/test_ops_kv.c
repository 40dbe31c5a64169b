/* RoPE, window rows, compressors and sparse core against plain formulas over the whole history,
 * while sequences advance by random numbers of tokens. */
#include <math.h>

#include "kernels/ref/stored.h"
#include "tests/kernels/sequences.h"

static struct td_device dev;
static const struct td_ops *table[2];
static uint32_t tables;
static float freq[TD_ROPE_DIM / 2];

static void rotate(double *x, uint32_t pos, bool inverse) {
    for (uint32_t j = 0; j < TD_ROPE_DIM / 2; j++) {
        double angle = (double)((float)pos * freq[j]), c = cos(angle), s = sin(angle);
        double u = x[2 * j], v = x[2 * j + 1];
        if (inverse) s = -s;
        x[2 * j] = u * c - v * s;
        x[2 * j + 1] = u * s + v * c;
    }
}

static void rope(void **state) {
    (void)state;
    enum { N = 5, HEADS = 3, DIM = 128 };
    struct td_op_row row[N] = {{0, 0}, {0, 1}, {0, 127}, {0, 4509}, {0, 1048575}};
    float *x = td_test_floats(N * HEADS * DIM, -1, 1), *cs = td_test_poison(N * TD_ROPE_DIM);
    float *y = td_test_poison(N * HEADS * DIM), *first = NULL;
    for (int inverse = 0; inverse < 2; inverse++)
        for (uint32_t t = 0; t < tables; t++) {
            struct td_rope_angles_args g = {.row = row, .freq = freq, .cs = cs, .n = N};
            struct td_rope_args a = {
                .x = y, .cs = cs, .n = N, .heads = HEADS, .dim = DIM, .inverse = inverse};
            memcpy(y, x, N * HEADS * DIM * sizeof *x);
            table[t]->rope_angles(&dev, &g);
            table[t]->rope(&dev, &a);
            for (uint32_t i = 0; i < N * HEADS; i++) {
                double want[DIM];
                for (uint32_t c = 0; c < DIM; c++)
                    want[c] = x[i * DIM + c];
                rotate(want + DIM - TD_ROPE_DIM, row[i / HEADS].pos, inverse);
                td_test_close("rope", y + i * DIM, want, DIM, 3e-7);
            }
            if (t == 0)
                first = memcpy(td_test_bytes(N * HEADS * DIM * 4), y, N * HEADS * DIM * 4);
            else
                td_test_same("rope", first, y, N * HEADS * DIM * sizeof *y);
            if (t + 1 == tables) free(first);
        }
    free(y);
    free(cs);
    free(x);
}

/* ---- compressors ---- */

struct compressor {
    enum td_kv_family family;
    uint32_t layer, d, width, ratio;
};

static const struct compressor compressors[] = {
    {TD_KV_CSA, 1, 512, 1024, 4}, {TD_KV_INDEX, 1, 128, 256, 4}, {TD_KV_HCA, 2, 512, 512, 128}};

/* Entry w from the history u, g [tokens, width] (g without ape). */
static void entry_formula(const struct compressor *c, const float *u, const float *g,
                          const float *ape, const float *norm, uint32_t w, double *v) {
    bool overlap = c->width > c->d;
    uint32_t from = overlap && w > 0 ? c->ratio * (w - 1) : c->ratio * w, to = c->ratio * (w + 1);
    double ss = 0;
    for (uint32_t ch = 0; ch < c->d; ch++) {
        double num = 0, den = 0;
        for (uint32_t t = from; t < to; t++) {
            uint32_t half = overlap && t >= c->ratio * w ? c->d : 0;
            double score = (double)g[(size_t)t * c->width + half + ch] +
                           ape[(size_t)(t % c->ratio) * c->width + half + ch];
            den += exp(score);
            num += exp(score) * u[(size_t)t * c->width + half + ch];
        }
        v[ch] = num / den;
        ss += v[ch] * v[ch];
    }
    for (uint32_t ch = 0; ch < c->d; ch++)
        v[ch] *= norm[ch] / sqrt(ss / c->d + 1e-6);
    rotate(v + c->d - TD_ROPE_DIM, c->ratio * w, false);
}

static void read_entry(const struct td_sequences *s, const struct compressor *c, uint32_t seq,
                       uint32_t w, float *v) {
    const uint32_t *pages = s->pages[seq];
    if (c->family == TD_KV_HCA)
        row_decode(td_kv_hca_row(&s->kv, s->pool, c->layer, pages[w / 2], w % 2), s->kv.row_dtype,
                   v);
    else if (c->family == TD_KV_CSA)
        row_decode(td_kv_csa_row(&s->kv, s->pool, c->layer, pages[w / 64], w % 64), s->kv.row_dtype,
                   v);
    else
        key_decode(td_kv_index_key(&s->kv, s->pool, c->layer, pages[w / 64], w % 64),
                   s->kv.key_dtype, v);
}

static double storage_tolerance(const struct td_sequences *s, const struct compressor *c) {
    if (c->family == TD_KV_INDEX)
        return s->kv.key_dtype == TD_KV_KEY_FP32   ? 5e-6
               : s->kv.key_dtype == TD_KV_KEY_BF16 ? 0x1p-8
                                                   : 0.25;
    return s->kv.row_dtype == TD_KV_ROW_FP32 ? 5e-6 : 0x1p-8;
}

static void compress_case(const struct compressor *c, enum td_kv_row_dtype row,
                          enum td_kv_key_dtype key) {
    enum { SEQS = 3, TOKENS = 700, MAX_STEP = 140 };
    struct td_sequences s[2];
    uint64_t entries = 0;
    float *u[SEQS], *g[SEQS], *ape = td_test_floats((size_t)c->ratio * c->width, -1, 1);
    float *norm = td_test_floats(c->d, 0.5f, 1.5f);
    float *su = td_test_poison((size_t)SEQS * MAX_STEP * c->width);
    float *sg = td_test_poison((size_t)SEQS * MAX_STEP * c->width);
    for (uint32_t t = 0; t < tables; t++)
        td_sequences_init(&s[t], SEQS, row, key);
    if (tables == 2) memcpy(s[1].pages, s[0].pages, sizeof s[0].pages);
    for (uint32_t i = 0; i < SEQS; i++) {
        u[i] = td_test_floats((size_t)TOKENS * c->width, -2, 2);
        g[i] = td_test_floats((size_t)TOKENS * c->width, -3, 3);
    }
    for (;;) {
        static const uint32_t sizes[] = {0, 1, 1, 2, 3, 4, 5, 127, 128, 129, MAX_STEP};
        uint32_t n[SEQS], total = 0, left = 0;
        for (uint32_t i = 0; i < SEQS; i++) {
            uint32_t rest = TOKENS - s[0].pos[i];
            n[i] = sizes[td_test_below(11)];
            n[i] = n[i] < rest ? n[i] : rest;
            total += n[i];
            left += rest;
        }
        if (left == 0) break;
        if (total == 0) continue;
        for (uint32_t t = 0; t < tables; t++) {
            size_t at = 0;
            for (uint32_t i = 0; i < SEQS; i++) {
                size_t from = (size_t)s[t].pos[i] * c->width, count = (size_t)n[i] * c->width;
                memcpy(su + at, u[i] + from, count * sizeof *su);
                memcpy(sg + at, g[i] + from, count * sizeof *sg);
                at += count;
            }
            td_sequences_step(&s[t], n);
            struct td_compress_args a = {.batch = &s[t].batch,
                                         .layer = c->layer,
                                         .family = c->family,
                                         .u = su,
                                         .g = sg,
                                         .ape = ape,
                                         .norm = norm,
                                         .freq = freq,
                                         .eps = 1e-6f};
            table[t]->compress(&dev, &a);
            td_sequences_advance(&s[t], n);
        }
    }
    for (uint32_t i = 0; i < SEQS; i++)
        for (uint32_t w = 0; w < TOKENS / c->ratio; w++, entries++) {
            double want[512];
            float got[512];
            entry_formula(c, u[i], g[i], ape, norm, w, want);
            read_entry(&s[0], c, i, w, got);
            td_test_close("compressed entry", got, want, c->d, storage_tolerance(&s[0], c));
        }
    assert_true(entries > 0);
    if (tables == 2) {
        td_test_same("pool of the two instruction sets", s[0].pool, s[1].pool, s[0].kv.pool_bytes);
        td_test_same("slots of the two", s[0].slots, s[1].slots, s[0].kv.slot_bytes * SEQS);
    }
    for (uint32_t t = 0; t < tables; t++)
        td_sequences_finish(&s[t]);
    for (uint32_t i = 0; i < SEQS; i++) {
        free(u[i]);
        free(g[i]);
    }
    free(sg);
    free(su);
    free(norm);
    free(ape);
}

static void compress(void **state) {
    (void)state;
    compress_case(&compressors[0], TD_KV_ROW_FP32, TD_KV_KEY_FP32);
    compress_case(&compressors[0], TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    compress_case(&compressors[1], TD_KV_ROW_BF16, TD_KV_KEY_BF16);
    compress_case(&compressors[1], TD_KV_ROW_BF16, TD_KV_KEY_FP32);
    compress_case(&compressors[1], TD_KV_ROW_BF16, TD_KV_KEY_FP8);
    compress_case(&compressors[2], TD_KV_ROW_FP32, TD_KV_KEY_FP32);
    compress_case(&compressors[2], TD_KV_ROW_BF16, TD_KV_KEY_BF16);
}

/* Entry `w` as stored after one run of 300 tokens with the given rounding. */
static void stored_entry(const struct compressor *c, enum td_kv_row_dtype row,
                         enum td_kv_key_dtype key, const struct td_compress_args *with,
                         const float *u, const float *g, uint32_t w, float *v) {
    struct td_sequences s;
    td_sequences_init(&s, 1, row, key);
    float *ape_added =
        memcpy(td_test_bytes((size_t)300 * c->width * 4), g, (size_t)300 * c->width * 4);
    struct td_compress_args a = *with;
    td_sequences_step(&s, (uint32_t[]){300});
    a.batch = &s.batch;
    a.u = u;
    a.g = ape_added;
    table[tables - 1]->compress(&dev, &a);
    read_entry(&s, c, 0, w, v);
    free(ape_added);
    td_sequences_finish(&s);
}

/* What is stored is the fp32 entry after exactly the rounding asked for, in this order. */
static void rounding_before_storing(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        const struct compressor *c = &compressors[i];
        bool index = c->family == TD_KV_INDEX;
        float *u = td_test_floats((size_t)300 * c->width, -2, 2), want[512], got[512];
        float *g = td_test_floats((size_t)300 * c->width, -3, 3);
        float *ape = td_test_floats((size_t)c->ratio * c->width, -1, 1);
        float *norm = td_test_floats(c->d, 0.5f, 1.5f);
        struct td_compress_args a = {.layer = c->layer,
                                     .family = c->family,
                                     .ape = ape,
                                     .norm = norm,
                                     .freq = freq,
                                     .eps = 1e-6f};
        uint32_t w = td_test_below(300 / c->ratio);
        stored_entry(c, TD_KV_ROW_FP32, TD_KV_KEY_FP32, &a, u, g, w, want);
        if (index) {
            hadamard128(want);
            a.hadamard = true;
            stored_entry(c, TD_KV_ROW_FP32, TD_KV_KEY_FP32, &a, u, g, w, got);
            td_test_same("transformed key", want, got, sizeof *want * c->d);
            sim4(want, 128);
            stored_entry(c, TD_KV_ROW_FP32, TD_KV_KEY_FP4, &a, u, g, w, got);
            td_test_same("fp4 key", want, got, sizeof *want * c->d);
            a.sim4 = true;
        } else {
            fp8_round(want, want, 448, 64);
            a.sim8 = true;
        }
        stored_entry(c, TD_KV_ROW_FP32, TD_KV_KEY_FP32, &a, u, g, w, got);
        td_test_same("rounded entry", want, got, sizeof *want * c->d);
        stored_entry(c, TD_KV_ROW_FP8, TD_KV_KEY_FP4, &a, u, g, w, got);
        for (uint32_t k = 448; k < c->d; k++)
            want[k] = td_bf16_to_f32(td_f32_to_bf16(want[k]));
        td_test_same("rounded entry, packed", want, got, sizeof *want * c->d);
        free(norm);
        free(ape);
        free(g);
        free(u);
    }
}

/* Window rows the same way. */
static void window_rows(void **state) {
    (void)state;
    enum { ROWS = 20 };
    static const enum td_kv_row_dtype types[] = {TD_KV_ROW_BF16, TD_KV_ROW_FP32, TD_KV_ROW_FP8};
    float *kv = td_test_floats(ROWS * 512, -3, 3), want[512], got[512];
    for (int type = 0; type < 3; type++)
        for (int sim8 = 0; sim8 < 2; sim8++) {
            struct td_sequences s;
            td_sequences_init(&s, 1, types[type], TD_KV_KEY_BF16);
            uint8_t *rows = td_test_bytes((size_t)ROWS * s.kv.row_bytes);
            struct td_row_store_args a = {
                .kv = kv, .rows = rows, .layout = &s.kv, .n = ROWS, .sim8 = sim8};
            table[tables - 1]->row_store(&dev, &a);
            td_sequences_step(&s, (uint32_t[]){ROWS});
            struct td_ring_write_args r = {.batch = &s.batch, .layer = 0, .rows = rows};
            table[tables - 1]->ring_write(&dev, &r);
            for (uint32_t i = 0; i < ROWS; i++) {
                memcpy(want, kv + i * 512, sizeof want);
                if (sim8 || types[type] == TD_KV_ROW_FP8) fp8_round(want, want, 448, 64);
                for (uint32_t k = 0; types[type] != TD_KV_ROW_FP32 && k < 512; k++)
                    want[k] = td_bf16_to_f32(td_f32_to_bf16(want[k]));
                row_decode(td_kv_window_row(&s.kv, s.slots, 0, i), types[type], got);
                td_test_same("window row", want, got, sizeof want);
            }
            free(rows);
            td_sequences_finish(&s);
        }
    free(kv);
}

static void fp8_keys(void **state) {
    (void)state;
    float v[TD_KV_KEY_DIM] = {0}, back[TD_KV_KEY_DIM], scale;
    uint8_t stored[TD_KV_FP8_KEY_BYTES];
    key_encode_fp8(v, stored);
    key_decode_fp8(stored, back);
    memcpy(&scale, stored + TD_KV_KEY_DIM, sizeof scale);
    assert_true(scale == 1.0f);
    td_test_same("a key of zeros", v, back, sizeof v);
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++)
        v[i] = td_test_uniform(-3, 3);
    v[17] = -7.0f; /* the largest reads back exactly up to one rounding of scale * 448 */
    key_encode_fp8(v, stored);
    key_decode_fp8(stored, back);
    assert_true(fabsf(back[17] + 7.0f) < 1e-6f);
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++)
        assert_true(fabsf(back[i] - v[i]) <= fabsf(v[i]) / 16 + 7.0f / 448 / 512);
}

/* ---- sparse core ---- */

struct core_case {
    uint32_t layer, heads, topk;
    enum td_kv_row_dtype type;
    uint32_t quiet; /* tokens that only fill the window: the formula is slow */
};

/* o of one head over `rows` [count][512]. */
static void core_formula(const float *q, float *const *rows, uint32_t count, float sink,
                         double *o) {
    double max = sink, *e = malloc(count * sizeof *e), den;
    assert_non_null(e);
    for (uint32_t s = 0; s < count; s++) {
        e[s] = 0;
        for (uint32_t k = 0; k < 512; k++)
            e[s] += (double)q[k] * rows[s][k];
        e[s] /= sqrt(512.0);
        max = fmax(max, e[s]);
    }
    den = exp(sink - max);
    memset(o, 0, 512 * sizeof *o);
    for (uint32_t s = 0; s < count; s++) {
        double w = exp(e[s] - max);
        den += w;
        for (uint32_t k = 0; k < 512; k++)
            o[k] += w * rows[s][k];
    }
    for (uint32_t k = 0; k < 512; k++)
        o[k] /= den;
    free(e);
}

static void random_selection(uint32_t visible, uint32_t topk, int32_t *to) {
    uint32_t n = 0, want = visible < topk ? visible : topk;
    for (uint32_t w = 0; w < visible && n < want; w++)
        if (td_test_below(visible - w) < want - n) to[n++] = (int32_t)w;
    while (n < topk)
        to[n++] = -1;
}

/* Random entries in the pool of sequence 0, decoded to `entry` as well. */
static float **fill_entries(struct td_sequences *s, uint32_t layer, uint32_t count) {
    float **entry = calloc(count + 1, sizeof *entry);
    for (uint32_t w = 0; w < count; w++) {
        float *v = entry[w] = td_test_floats(512, -1, 1);
        struct td_kv_row at = layer == 1
                                  ? td_kv_csa_row(&s->kv, s->pool, 1, s->pages[0][w / 64], w % 64)
                                  : td_kv_hca_row(&s->kv, s->pool, 2, s->pages[0][w / 2], w % 2);
        row_encode(v, s->kv.row_dtype, at);
        row_decode(at, s->kv.row_dtype, v);
    }
    return entry;
}

static void core(const struct core_case *c, uint32_t tokens) {
    enum { MAX_STEP = 160 };
    struct td_sequences s;
    td_sequences_init(&s, 1, c->type, TD_KV_KEY_BF16);
    uint32_t ratio = c->layer == 0 ? 0 : c->layer == 1 ? 4 : 128, hd = c->heads * 512;
    uint32_t entries = ratio ? tokens / ratio : 0;
    float **entry = fill_entries(&s, c->layer, entries), **hist = calloc(tokens, sizeof *hist);
    float *sink = td_test_floats(c->heads, -1, 1),
          *q = td_test_floats((size_t)MAX_STEP * hd, -1, 1);
    float *kv = td_test_poison((size_t)MAX_STEP * 512), *o = td_test_poison((size_t)MAX_STEP * hd);
    float *first = td_test_poison((size_t)MAX_STEP * hd);
    uint8_t *rows = td_test_bytes((size_t)MAX_STEP * s.kv.row_bytes);
    int32_t *selected = malloc((size_t)MAX_STEP * (c->topk + 1) * sizeof *selected);
    while (s.pos[0] < tokens) {
        static const uint32_t sizes[] = {1, 1, 3, 4, 127, 128, 129, MAX_STEP};
        uint32_t n = sizes[td_test_below(8)], pos = s.pos[0],
                 edge = pos < c->quiet ? c->quiet : tokens;
        n = n < edge - pos ? n : edge - pos;
        for (uint32_t i = 0; i < n; i++) {
            float *v = hist[pos + i] = td_test_floats(512, -1, 1);
            memcpy(kv + (size_t)i * 512, v, 512 * sizeof *v);
            random_selection((pos + i + 1) / 4, c->topk, selected + (size_t)i * c->topk);
        }
        td_sequences_step(&s, &n);
        bool looked_at = pos + n > c->quiet;
        for (uint32_t t = 0; t < tables; t++) {
            struct td_row_store_args st = {.kv = kv, .rows = rows, .layout = &s.kv, .n = n};
            struct td_attend_args a = {.batch = &s.batch,
                                       .layer = c->layer,
                                       .heads = c->heads,
                                       .q = q,
                                       .rows = rows,
                                       .sink = sink,
                                       .selected = c->layer == 1 ? selected : NULL,
                                       .topk = c->topk,
                                       .o = o};
            memset(o, 0xff, (size_t)n * hd * sizeof *o);
            table[t]->row_store(&dev, &st);
            if (!looked_at) continue;
            table[t]->attend(&dev, &a);
            if (t == 0)
                memcpy(first, o, (size_t)n * hd * sizeof *o);
            else
                td_test_same("attend", first, o, (size_t)n * hd * sizeof *o);
        }
        struct td_ring_write_args rw = {.batch = &s.batch, .layer = c->layer, .rows = rows};
        table[0]->ring_write(&dev, &rw);
        for (uint32_t i = 0; i < n; i++)
            row_decode(td_kv_dense_row(&s.kv, rows, i), c->type, hist[pos + i]);
        /* The formula is slow: the step's first and last row and a random one. */
        uint32_t check[3] = {0, n - 1, td_test_below(n)};
        for (uint32_t j = 0; looked_at && j < 3; j++) {
            uint32_t i = check[j], p = pos + i, count = 0;
            float *set[TD_WINDOW + 2048];
            for (uint32_t t = p < 127 ? 0 : p - 127; t <= p; t++)
                set[count++] = hist[t];
            for (uint32_t e = 0; c->layer == 2 && e < (p + 1) / 128; e++)
                set[count++] = entry[e];
            const int32_t *sel = selected + (size_t)i * c->topk;
            for (uint32_t e = 0; c->layer == 1 && e < c->topk && sel[e] >= 0; e++)
                set[count++] = entry[sel[e]];
            for (uint32_t h = 0; h < c->heads; h++) {
                double want[512];
                core_formula(q + (size_t)i * hd + h * 512, set, count, sink[h], want);
                td_test_close("attend", o + (size_t)i * hd + h * 512, want, 512, 5e-6);
            }
        }
        td_sequences_advance(&s, &n);
    }
    for (uint32_t t = 0; t < tokens; t++)
        free(hist[t]);
    for (uint32_t w = 0; w < entries; w++)
        free(entry[w]);
    free(selected);
    free(rows);
    free(first);
    free(o);
    free(kv);
    free(q);
    free(sink);
    free(hist);
    free(entry);
    td_sequences_finish(&s);
}

static void attend(void **state) {
    (void)state;
    core(&(struct core_case){.layer = 0, .heads = 4, .topk = 1, .type = TD_KV_ROW_FP32}, 400);
    core(&(struct core_case){.layer = 0, .heads = 3, .topk = 1, .type = TD_KV_ROW_BF16}, 300);
    core(
        &(struct core_case){
            .layer = 1, .heads = 4, .topk = 64, .type = TD_KV_ROW_BF16, .quiet = 100},
        500);
    core(&(struct core_case){.layer = 1, .heads = 4, .topk = 64, .type = TD_KV_ROW_FP8}, 420);
    core(&(struct core_case){.layer = 2, .heads = 4, .topk = 1, .type = TD_KV_ROW_FP8}, 420);
    core(
        &(struct core_case){
            .layer = 1, .heads = 17, .topk = 300, .type = TD_KV_ROW_FP32, .quiet = 1000},
        1090);
    core(
        &(struct core_case){
            .layer = 2, .heads = 8, .topk = 1, .type = TD_KV_ROW_BF16, .quiet = 600},
        700);
}

/* Sets longer than the decoded blocks that are kept. */
static void attend_many_entries(void **state) {
    (void)state;
    core(
        &(struct core_case){
            .layer = 1, .heads = 9, .topk = 2048, .type = TD_KV_ROW_BF16, .quiet = 1985},
        2000);
}

static int setup(void **state) {
    dev = td_test_device(2);
    tables = td_test_tables(table);
    for (uint32_t i = 0; i < TD_ROPE_DIM / 2; i++)
        freq[i] = 1.0f / (float)pow(160000.0, 2.0 * i / TD_ROPE_DIM);
    return td_test_seed(state);
}

static int teardown(void **state) {
    (void)state;
    td_test_device_finish(&dev);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rope),
        cmocka_unit_test(compress),
        cmocka_unit_test(rounding_before_storing),
        cmocka_unit_test(window_rows),
        cmocka_unit_test(fp8_keys),
        cmocka_unit_test(attend),
        cmocka_unit_test(attend_many_entries),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

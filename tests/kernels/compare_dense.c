/* Cases of the ops on plain rows: products, norms, hyper-connections, mixture of experts. */
#include "tests/kernels/compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Rows and sizes with tails on all sides: one row, primes, one less and one more than a tile, a
 * panel, a block, a chunk. */
static const uint32_t rows_of[] = {1, 2, 3, 5, 6, 7, 11, 12, 13, 24, 97};
enum { N_ROWS = sizeof rows_of / sizeof *rows_of };

static uint32_t pick(struct td_case *c, const uint32_t *from, uint32_t n) {
    return from[td_case_below(c, n)];
}

static bool bench(const struct td_case *c) {
    return c->shape >= TD_CASE_BENCH;
}

static uint32_t rows(const struct td_case *c, uint32_t measured) {
    return bench(c) ? measured : rows_of[c->shape % N_ROWS];
}

/* A rank's rows of the vocabulary: all, none, the first, the last, or some in the middle. */
static void embed(struct td_case *c) {
    uint32_t n = rows(c, 256), vocab = 101, part = bench(c) ? 0 : c->shape % 5;
    uint32_t hidden = bench(c) ? 4096 : 16 * (1 + td_case_below(c, 9));
    uint32_t first = part == 0 || part == 2 ? 0 : part == 1 ? vocab : td_case_below(c, vocab);
    uint32_t own = part == 1 ? 1 : vocab - first;
    if (part == 2 || part == 4) own = 1 + td_case_below(c, own);
    float *w = td_case_floats(c, (size_t)own * hidden, -1, 1);
    struct td_weight weight = {.format = TD_W_F32, .rows = own, .cols = hidden};
    weight.data = td_case_put(c, TD_IN, w, (size_t)own * hidden * sizeof *w);
    free(w);
    int32_t ids[256];
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)td_case_below(c, vocab);
    float *y = td_case_output(c, TD_FLOATS, (size_t)n * hidden * 4);
    c->bytes = (double)n * 2 * hidden * 4;
    TD_CASE_TEXT(c, "n %u, hidden %u, rows %u of %u from %u", n, hidden, own, vocab, first);
    TD_CASE_CALL(c, embed, .w = &weight, .ids = td_case_put(c, TD_IN, ids, n * 4), .y = y, .n = n,
                 .first = first);
}

static void expand(struct td_case *c) {
    uint32_t n = rows(c, 256), hidden = bench(c) ? 4096 : 16 * (1 + td_case_below(c, 9));
    float *x = td_case_output(c, TD_FLOATS, (size_t)n * 4 * hidden * 4);
    c->bytes = (double)n * 5 * hidden * 4;
    TD_CASE_TEXT(c, "n %u, hidden %u", n, hidden);
    TD_CASE_CALL(c, expand, .y = td_case_input(c, (size_t)n * hidden, -1, 1), .x = x, .n = n,
                 .hidden = hidden);
}

/* How many of n rows count: NULL for all, or a number in the variant's memory, 0 and n among them.
 */
static const uint32_t *counted(struct td_case *c, uint32_t n) {
    uint32_t count = c->shape % 4 == 1 ? 0 : c->shape % 4 == 2 ? n : td_case_below(c, n + 1);
    return bench(c) || c->shape % 4 == 0 ? NULL : td_case_put(c, TD_IN, &count, sizeof count);
}

static void linear_of(struct td_case *c, uint32_t n, uint32_t k, const uint32_t *out,
                      uint32_t parts, bool bf16) {
    size_t x_stride = k + 3 * td_case_below(c, 2);
    struct td_matrix m[TD_LINEAR_PARTS];
    struct td_linear_args a = {.n = n, .parts = parts, .x_stride = x_stride};
    a.x = td_case_input(c, n * x_stride, -1, 1);
    for (uint32_t i = 0; i < parts; i++) {
        size_t stride = out[i] + (i % 2) * 5;
        m[i] = td_case_matrix(c, out[i], k, bf16 != (i == 1 && !bench(c)));
        a.part[i] = (struct td_linear_part){
            .w = &m[i], .y = td_case_output(c, TD_FLOATS, n * stride * 4), .y_stride = stride};
        a.part[i].x_at = td_case_below(c, (uint32_t)(x_stride - k) + 1);
        c->flops += 2.0 * n * k * out[i];
        c->bytes += (double)k * out[i] * (bf16 ? 2 : 4);
    }
    TD_CASE_TEXT(c, "n %u, in %u, out %u of %u parts, weights %s", n, k, out[0], parts,
                 bf16 ? "bf16" : "fp32");
    while (td_case_more(c))
        c->ops->linear(c->device, &a);
}

static void linear(struct td_case *c) {
    static const uint32_t in[] = {1, 3, 127, 128, 129, 256, 300, 1024};
    static const uint32_t outs[] = {1, 7, 8, 15, 16, 17, 24, 64, 65, 144, 333};
    uint32_t out[3];
    for (uint32_t i = 0; i < 3; i++)
        out[i] = pick(c, outs, 11);
    linear_of(c, rows(c, 0), pick(c, in, 8), out, 1 + td_case_below(c, 3), td_case_below(c, 2));
}

/* Measured on its own: one row reads, many rows multiply; a projection of the real model. */
static void linear_one(struct td_case *c) {
    const uint32_t out[] = {4096};
    if (!bench(c))
        linear(c);
    else
        linear_of(c, 1, 4096, out, 1, true);
}

static void linear_many(struct td_case *c) {
    const uint32_t out[] = {1024};
    if (!bench(c))
        linear(c);
    else
        linear_of(c, 512, 4096, out, 1, true);
}

/* Random offsets with empty experts; row r takes a random input row. */
static uint32_t grouping(struct td_case *c, uint32_t experts, uint32_t most,
                         uint32_t **ret_offset) {
    uint32_t *offset = malloc((experts + 1) * sizeof *offset);
    if (!offset) abort();
    bool none = !bench(c) && c->shape % 8 == 7; /* all chosen experts are other ranks' */
    offset[0] = 0;
    for (uint32_t e = 0; e < experts; e++)
        offset[e + 1] = offset[e] + (none       ? 0
                                     : bench(c) ? most
                                                : td_case_below(c, 3) * td_case_below(c, most));
    *ret_offset = offset;
    return offset[experts];
}

static void expert_linear(struct td_case *c) {
    static const uint32_t sizes[] = {1, 8, 17, 64, 100, 256};
    uint32_t experts = bench(c) ? 8 : 1 + td_case_below(c, 9), *offset;
    uint32_t n = grouping(c, experts, bench(c) ? 48 : 10, &offset), inputs = bench(c) ? 256 : 7;
    uint32_t k = bench(c) ? 2048 : pick(c, sizes, 6), out = bench(c) ? 1024 : pick(c, sizes, 6);
    bool indirect = td_case_below(c, 2), bf16 = bench(c) || td_case_below(c, 2);
    uint32_t parts = bench(c) ? 2 : 1 + td_case_below(c, 2);
    uint32_t *x_row = malloc((n + 1) * sizeof *x_row);
    if (!x_row) abort();
    for (uint32_t i = 0; i < n; i++)
        x_row[i] = td_case_below(c, inputs);
    uint32_t room = n + 3; /* rows of the output: as many as the step could have had */
    struct td_expert_linear_args a = {.experts = experts, .parts = parts, .x_stride = k + 1};
    a.x = td_case_input(c, (size_t)(indirect ? inputs : n) * a.x_stride + 1, -1, 1);
    a.offset = td_case_put(c, TD_IN, offset, (experts + 1) * 4);
    a.x_row = indirect ? td_case_put(c, TD_IN, x_row, n * 4) : NULL;
    struct td_matrix *w[2] = {NULL, NULL};
    for (uint32_t i = 0; i < parts; i++) {
        a.w[i] = w[i] = td_case_matrices(c, experts, out, k, bf16);
        a.y[i] = td_case_output(c, TD_FLOATS, (size_t)room * out * 4);
    }
    c->flops = 2.0 * n * k * out * parts;
    c->bytes = (double)k * out * parts * experts * (bf16 ? 2 : 4);
    TD_CASE_TEXT(c, "%u rows, %u experts, in %u, out %u, %u parts", n, experts, k, out, parts);
    while (td_case_more(c))
        c->ops->expert_linear(c->device, &a);
    free(w[0]);
    free(w[1]);
    free(offset);
    free(x_row);
}

static void round_fp8(struct td_case *c) {
    uint32_t n = rows(c, 512), dim = bench(c) ? 4096 : 8 * (1 + td_case_below(c, 50));
    if (!bench(c) && td_case_below(c, 3) == 0)
        dim = 128 * (1 + td_case_below(c, 4)); /* whole groups */
    float *v = td_case_floats(c, (size_t)n * dim, -1, 1);
    for (size_t i = 0; i < (size_t)n * dim; i++) /* all magnitudes, zeros and a few infinities */
        v[i] *= td_case_below(c, 9) == 0 ? 0.0f : exp2f(td_case_uniform(c, -30, 30));
    if (!bench(c)) v[td_case_below(c, n * dim)] = INFINITY;
    const float *x = td_case_put(c, TD_IN, v, (size_t)n * dim * 4);
    free(v);
    const uint32_t *used = counted(c, n);
    c->bytes = (double)n * dim * 8;
    TD_CASE_TEXT(c, "n %u, dim %u", n, dim);
    TD_CASE_CALL(c, round_fp8, .x = x, .y = td_case_output(c, TD_FLOATS, (size_t)n * dim * 4),
                 .rows = used, .n = n, .dim = dim);
}

static void round_nvfp4(struct td_case *c) {
    uint32_t experts = 5, *offset, n = grouping(c, experts, 9, &offset);
    uint32_t dim = 16 * (1 + td_case_below(c, 20));
    const float *x = td_case_input(c, (size_t)n * dim + 1, -3, 3);
    struct td_matrix *w = td_case_matrices(c, experts, 1, 16, true);
    struct td_nvfp4_codes codes = {NULL, NULL};
    if (td_case_below(c, 2)) {
        codes.code = td_case_output(c, TD_OUT, (size_t)(n + 3) * dim / 2);
        codes.scale = td_case_output(c, TD_OUT, (size_t)(n + 3) * dim / 16);
    }
    TD_CASE_TEXT(c, "n %u, dim %u, %s codes", n, dim, codes.code ? "with" : "no");
    c->bytes = (double)n * dim * 8;
    TD_CASE_CALL(c, round_nvfp4, .x = x, .offset = td_case_put(c, TD_IN, offset, (experts + 1) * 4),
                 .w = w, .y = td_case_output(c, TD_FLOATS, (size_t)(n + 3) * dim * 4),
                 .codes = codes, .experts = experts, .dim = dim);
    free(w);
    free(offset);
}

static void rms_norm(struct td_case *c) {
    uint32_t n = rows(c, 512), dim = bench(c) ? 4096 : 16 * (1 + td_case_below(c, 40));
    switch (bench(c) ? 0 : td_case_below(c, 4)) {
    case 1:
        dim = TD_HEAD_DIM;
        break; /* short rows have a form */
    case 2:
        dim = 64 * (1 + td_case_below(c, 70));
        break; /* and so have whole ones */
    }
    size_t xs = dim + td_case_below(c, 2) * 7, ys = dim + td_case_below(c, 2) * 9;
    const float *x = td_case_input(c, n * xs, -5, 5), *w = td_case_input(c, dim, 0, 2);
    c->bytes = (double)n * dim * 8;
    TD_CASE_TEXT(c, "n %u, dim %u", n, dim);
    TD_CASE_CALL(c, rms_norm, .x = x, .x_stride = xs, .w = td_case_below(c, 2) ? w : NULL, .n = n,
                 .y = td_case_output(c, TD_FLOATS, n * ys * 4), .y_stride = ys, .dim = dim,
                 .eps = 1e-6f);
}

static uint32_t hidden_of(struct td_case *c) {
    if (!bench(c) && td_case_below(c, 3) == 0) return 256 * (1 + td_case_below(c, 4));
    return bench(c) ? 4096 : 16 * (1 + td_case_below(c, 20));
}

static void hc_pre(struct td_case *c) {
    uint32_t n = rows(c, 256), hidden = hidden_of(c);
    const float *x = td_case_input(c, (size_t)n * 4 * hidden, -3, 3);
    const float *m = td_case_input(c, (size_t)n * 24, -20, 20);
    const float *base = td_case_input(c, 24, -2, 2), *scale = td_case_input(c, 3, 0, 2);
    c->bytes = (double)n * 5 * hidden * 4;
    TD_CASE_TEXT(c, "n %u, hidden %u", n, hidden);
    TD_CASE_CALL(c, hc_pre, .x = x, .m = m, .base = base, .scale = scale,
                 .y = td_case_output(c, TD_FLOATS, (size_t)n * hidden * 4),
                 .post = td_case_output(c, TD_FLOATS, n * 16),
                 .comb = td_case_output(c, TD_FLOATS, n * 64), .n = n, .hidden = hidden,
                 .iters = bench(c) ? 20 : td_case_below(c, 21), .eps = 1e-6f, .hc_eps = 1e-6f);
}

static void hc_post(struct td_case *c) {
    uint32_t n = rows(c, 256), hidden = hidden_of(c);
    float *x = td_case_floats(c, (size_t)n * 4 * hidden, -3, 3);
    float *there = td_case_put(c, TD_FLOATS, x, (size_t)n * 4 * hidden * 4);
    free(x);
    const float *o = td_case_input(c, (size_t)n * hidden, -3, 3);
    const float *post = td_case_input(c, n * 4, 0, 2), *comb = td_case_input(c, n * 16, 0, 0.25f);
    c->bytes = (double)n * 9 * hidden * 4;
    TD_CASE_TEXT(c, "n %u, hidden %u", n, hidden);
    TD_CASE_CALL(c, hc_post, .x = there, .o = o, .post = post, .comb = comb, .n = n,
                 .hidden = hidden);
}

static void hc_head(struct td_case *c) {
    uint32_t n = rows(c, 256), hidden = hidden_of(c);
    const float *x = td_case_input(c, (size_t)n * 4 * hidden, -3, 3);
    const float *m = td_case_input(c, n * 4, -20, 20), *base = td_case_input(c, 4, -2, 2);
    c->bytes = (double)n * 5 * hidden * 4;
    TD_CASE_TEXT(c, "n %u, hidden %u", n, hidden);
    TD_CASE_CALL(c, hc_head, .x = x, .m = m, .base = base, .scale = td_case_input(c, 1, 0, 2),
                 .y = td_case_output(c, TD_FLOATS, (size_t)n * hidden * 4), .n = n,
                 .hidden = hidden, .eps = 1e-6f, .hc_eps = 1e-6f);
}

static void add_shards(struct td_case *c) {
    uint32_t n = rows(c, 256), shards = bench(c) ? 8 : 1 + td_case_below(c, 17);
    uint32_t dim = bench(c) ? 4096 : 1 + td_case_below(c, 100);
    const float *x = td_case_input(c, (size_t)shards * n * dim, -1, 1);
    c->bytes = (double)n * dim * 4 * (shards + 1);
    TD_CASE_TEXT(c, "n %u, %u shards, dim %u", n, shards, dim);
    TD_CASE_CALL(c, add_shards, .shard = x, .y = td_case_output(c, TD_FLOATS, (size_t)n * dim * 4),
                 .shards = shards, .n = n, .dim = dim);
}

static void route(struct td_case *c) {
    uint32_t n = rows(c, 512), experts = bench(c) ? 256 : 2 + td_case_below(c, 60);
    uint32_t k = bench(c) ? 6 : 1 + td_case_below(c, experts < 8 ? experts : 8), vocab = 13;
    bool hash = !bench(c) && td_case_below(c, 3) == 0;
    int32_t ids[512];
    int64_t *table = malloc((size_t)vocab * k * sizeof *table);
    if (!table) abort();
    for (uint32_t i = 0; i < vocab; i++)
        for (uint32_t j = 0, first = td_case_below(c, experts); j < k; j++)
            table[i * k + j] = (first + j * (experts / k)) % experts;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)td_case_below(c, vocab);
    const float *bias = td_case_input(c, experts, -0.1f, 0.1f);
    const int64_t *hashed = td_case_put(c, TD_IN, table, (size_t)vocab * k * sizeof *table);
    free(table);
    c->bytes = (double)n * (experts + 2 * k) * 4;
    TD_CASE_TEXT(c, "n %u, %u of %u experts%s", n, k, experts, hash ? ", hashed" : "");
    TD_CASE_CALL(c, route, .logits = td_case_input(c, (size_t)n * experts, -30, 30),
                 .bias = hash ? NULL : bias, .tid2eid = hash ? hashed : NULL,
                 .ids = td_case_put(c, TD_IN, ids, n * 4), .n = n, .experts = experts, .k = k,
                 .scale = 1.5f, .expert = td_case_output(c, TD_OUT, n * k * 4),
                 .weight = td_case_output(c, TD_FLOATS, n * k * 4));
}

/* Ascending choices of k experts for n tokens. */
static uint32_t *choices(struct td_case *c, uint32_t n, uint32_t k, uint32_t experts) {
    uint32_t *expert = malloc((size_t)n * k * sizeof *expert);
    if (!expert) abort();
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0, e = 0; j < k; j++, e++) {
            uint32_t room = experts - e - (k - j);
            e += td_case_below(c, room < 4 ? room + 1 : 4);
            expert[i * k + j] = e;
        }
    return expert;
}

/* Shards first..first + here - 1 of a rank: all, the last rank's, or any stretch. */
static void shards_of(struct td_case *c, uint32_t *ret_shards, uint32_t *ret_first,
                      uint32_t *ret_here) {
    static const uint32_t several[] = {1, 2, 3, 4, 6, 8, 8, 16};
    uint32_t shards = bench(c) ? 8 : pick(c, several, 8), ranks = 1u << td_case_below(c, 4);
    *ret_shards = *ret_here = shards;
    *ret_first = 0;
    if (bench(c) || c->shape % 3 == 0) return;
    while (ranks > shards)
        ranks /= 2;
    *ret_here = c->shape % 3 == 1 ? shards / ranks : 1 + td_case_below(c, shards);
    *ret_first = c->shape % 3 == 1 ? shards - *ret_here : td_case_below(c, shards - *ret_here + 1);
}

static void group(struct td_case *c) {
    uint32_t n = rows(c, 512), experts = bench(c) ? 256 : 4 + td_case_below(c, 60);
    uint32_t k = bench(c) ? 6 : 1 + td_case_below(c, 4), *expert = choices(c, n, k, experts);
    uint32_t first = 0, count = experts;
    if (!bench(c) && c->shape % 4 > 0) { /* any, none, the last ones: few are chosen */
        first = td_case_below(c, experts);
        count = c->shape % 4 == 1   ? td_case_below(c, experts - first + 1)
                : c->shape % 4 == 2 ? 0
                                    : experts - first;
    }
    c->bytes = (double)n * k * 20;
    TD_CASE_TEXT(c, "n %u, %u of %u experts, %u from %u", n, k, experts, count, first);
    TD_CASE_CALL(c, group, .expert = td_case_put(c, TD_IN, expert, n * k * 4),
                 .weight = td_case_input(c, n * k, 0, 1), .n = n, .k = k, .first = first,
                 .count = count, .offset = td_case_output(c, TD_OUT, (experts + 1) * 4),
                 .token = td_case_output(c, TD_OUT, n * k * 4),
                 .row_weight = td_case_output(c, TD_FLOATS, n * k * 4),
                 .place = td_case_output(c, TD_OUT, n * k * 4));
    free(expert);
}

static void swiglu(struct td_case *c) {
    uint32_t n = rows(c, 512), inner = bench(c) ? 2048 : 8 * (1 + td_case_below(c, 20));
    const float *w = td_case_input(c, n, 0, 2);
    const uint32_t *used = counted(c, n);
    c->bytes = (double)n * inner * 12;
    TD_CASE_TEXT(c, "n %u, inner %u", n, inner);
    TD_CASE_CALL(c, swiglu, .a = td_case_input(c, (size_t)n * inner, -99, 20),
                 .b = td_case_input(c, (size_t)n * inner, -20, 20),
                 .weight = td_case_below(c, 2) ? w : NULL,
                 .t = td_case_output(c, TD_FLOATS, (size_t)n * inner * 4), .rows = used, .n = n,
                 .inner = inner, .limit = 10);
}

/* Places of experts of other ranks' shards point nowhere. */
static void combine(struct td_case *c) {
    uint32_t n = rows(c, 256), experts = bench(c) ? 256 : 4 + td_case_below(c, 28),
             hidden = hidden_of(c), shards, first, here;
    uint32_t k = bench(c) ? 6 : 1 + td_case_below(c, 4), *expert = choices(c, n, k, experts);
    uint32_t *place = malloc((size_t)n * k * sizeof *place);
    if (!place) abort();
    shards_of(c, &shards, &first, &here);
    for (uint32_t i = 0; i < n * k; i++)
        place[i] =
            expert[i] * shards / experts - first < here ? td_case_below(c, n * k) : 0xffffffffu;
    const float *shared = td_case_input(c, (size_t)n * hidden, -1, 1);
    c->bytes = (double)n * hidden * 4 * (k + 2);
    TD_CASE_TEXT(c, "n %u, %u of %u experts, hidden %u, %u of %u shards from %u", n, k, experts,
                 hidden, here, shards, first);
    TD_CASE_CALL(c, combine, .rows = td_case_input(c, (size_t)n * k * hidden, -1, 1),
                 .expert = td_case_put(c, TD_IN, expert, n * k * 4),
                 .place = td_case_put(c, TD_IN, place, n * k * 4),
                 .shared = bench(c) || td_case_below(c, 2) ? shared : NULL,
                 .y = td_case_output(c, TD_FLOATS, (size_t)n * hidden * 4), .n = n, .k = k,
                 .hidden = hidden, .experts = experts, .shards = shards, .first_shard = first,
                 .shards_here = here);
    free(expert);
    free(place);
}

static void gather(struct td_case *c) {
    uint32_t n = rows(c, 256), from = 31, dim = bench(c) ? 4096 : 1 + td_case_below(c, 99),
             index[256];
    for (uint32_t i = 0; i < n; i++)
        index[i] = td_case_below(c, from);
    c->bytes = (double)n * dim * 8;
    TD_CASE_TEXT(c, "n %u, dim %u", n, dim);
    TD_CASE_CALL(c, gather, .x = td_case_input(c, (size_t)from * dim, -1, 1),
                 .index = td_case_put(c, TD_IN, index, n * 4),
                 .y = td_case_output(c, TD_FLOATS, (size_t)n * dim * 4), .n = n, .dim = dim);
}

const struct td_op_cases td_cases_dense[] = {
    {"embed", embed, 2 * N_ROWS, 0},
    {"expand", expand, N_ROWS, 0},
    {"linear", linear_one, 4 * N_ROWS, 1e-5},
    {"linear", linear_many, 0, 1e-5},
    {"expert_linear", expert_linear, 2 * N_ROWS, 1e-5},
    {"round_fp8", round_fp8, 2 * N_ROWS, 0},
    {"round_nvfp4", round_nvfp4, N_ROWS, 0},
    {"rms_norm", rms_norm, 2 * N_ROWS, 1e-5},
    {"hc_pre", hc_pre, N_ROWS, 1e-5},
    {"hc_post", hc_post, N_ROWS, 1e-5},
    {"hc_head", hc_head, N_ROWS, 1e-5},
    {"add_shards", add_shards, 2 * N_ROWS, 1e-6},
    {"route", route, 2 * N_ROWS, 1e-5},
    {"group", group, 2 * N_ROWS, 0},
    {"swiglu", swiglu, 2 * N_ROWS, 1e-5},
    {"combine", combine, 4 * N_ROWS, 1e-6},
    {"gather", gather, N_ROWS, 0},
    {0},
};

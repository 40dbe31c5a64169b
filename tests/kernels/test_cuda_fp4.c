/* NVFP4 experts with NVFP4 inputs on Blackwell's block-scaled tensor cores: where the instruction
 * finds what, its products against the checkpoint description's section 7 in a second formulation
 * with random calibrated scales, and whole engines against the CPU's. Over the emulator (as Hopper,
 * and with TD_EMULATE=12 as Blackwell) results are compared to the bit; how a chip rounds inside an
 * instruction is not documented, so there they stay within a part of the magnitudes that were
 * added. On a chip without the instruction codes change nothing. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/kernels/device_arrays.h"
#include "tests/kernels/engine_fixture.h"
#include "tests/kernels/random_model.h"

#include "kernels/device.h"
#include "kernels/model/numbers.h"

extern const struct td_backend TD_TEST_BACKEND;

/* cuda/fp4_probe.cu: n products; the lanes' a[4], b[2], sa, sb to their c [n][32][4]. */
void td_test_fp4_products(const struct td_device *d, uint32_t thread_a, uint32_t thread_b,
                          const void *in, float *c, uint32_t n);

#ifdef TD_TEST_EMULATED
static const bool emulated = true;
#else
static const bool emulated = false;
#endif

static struct td_device dev;
static struct td_ops fast;
static bool blackwell;

/* ---- the instruction, place by place ---- */

enum { A_PLACES = 32 * 32, B_PLACES = 32 * 16, ONE = 2, ONES = 0x22222222, E4M3_ONE = 0x38 };

struct lane {
    uint32_t a[4], b[2], sa, sb;
};
struct operands {
    struct lane lane[32];
};

/* The documentation's formulas: element i (of 32, of 16) of a lane's fragment. */
static void a_place(uint32_t lane, uint32_t i, uint32_t *row, uint32_t *k) {
    uint32_t group = lane >> 2, thread = lane % 4;
    *row = i < 8 || (i >= 16 && i < 24) ? group : group + 8;
    *k = i < 16 ? thread * 8 + (i & 7) : thread * 8 + (i & 7) + 32;
}
static void b_place(uint32_t lane, uint32_t i, uint32_t *k, uint32_t *column) {
    uint32_t thread = lane % 4;
    *column = lane >> 2;
    *k = i < 8 ? thread * 8 + (i & 7) : thread * 8 + (i & 7) + 32;
}

static void set_nibble(uint32_t *reg, uint32_t i, uint32_t v) {
    reg[i / 8] = (reg[i / 8] & ~(15u << i % 8 * 4)) | v << i % 8 * 4;
}

/* All scales 1 where they count, and 448 where they do not. */
static void plain_scales(struct operands *o, uint32_t thread_a, uint32_t thread_b) {
    for (uint32_t l = 0; l < 32; l++) {
        o->lane[l].sa = l % 4 / 2 == thread_a ? E4M3_ONE * 0x01010101u : 0x7e7e7e7eu;
        o->lane[l].sb = l % 4 == thread_b ? E4M3_ONE * 0x01010101u : 0x7e7e7e7eu;
    }
}

static float (*products(const struct operands *o, uint32_t n, uint32_t thread_a,
                        uint32_t thread_b))[32][4] {
    size_t bytes = (size_t)n * 32 * 4 * sizeof(float);
    float(*c)[32][4] = td_test_bytes(bytes);
    void *in = td_test_put(&dev, o, n * sizeof *o);
    float *out = td_test_put(&dev, NULL, bytes);
    td_test_fp4_products(&dev, thread_a, thread_b, in, out, n);
    td_test_get(&dev, c, out, bytes);
    td_test_give(&dev, in);
    td_test_give(&dev, out);
    return c;
}

static float at(float (*c)[4], uint32_t row, uint32_t column) {
    return c[row % 8 * 4 + column / 2][row / 8 * 2 + column % 2];
}

static void expect(const char *what, uint32_t place, float (*c)[4], uint32_t row, uint32_t column,
                   float want) {
    float got = at(c, row, column);
    if (got != want)
        fail_msg("%s %u: row %u column %u: expected %g, found %g", what, place, row, column,
                 (double)want, (double)got);
}

/* One element of a at a time; column n of b is bit n of k, and column 7 is 1. */
static void finds_every_a(void **state) {
    (void)state;
    if (!blackwell) skip();
    struct operands *o = td_test_bytes(A_PLACES * sizeof *o);
    for (uint32_t p = 0; p < A_PLACES; p++) {
        plain_scales(&o[p], p % 2, p % 4);
        for (uint32_t b = 0; b < B_PLACES; b++) {
            uint32_t k, column;
            b_place(b / 16, b % 16, &k, &column);
            uint32_t v = column == 7 || (column < 6 && k >> column & 1) ? ONE : 0;
            set_nibble(o[p].lane[b / 16].b, b % 16, v);
        }
        set_nibble(o[p].lane[p / 32].a, p % 32, 7 | p % 2 << 3); /* 6, -6 */
    }
    for (uint32_t selector = 0; selector < 8; selector++) {
        float(*c)[32][4] = products(o, A_PLACES, selector % 2, selector % 4);
        for (uint32_t p = 0; p < A_PLACES; p++) {
            uint32_t row, k;
            a_place(p / 32, p % 32, &row, &k);
            if (selector % 2 != p % 2 || selector % 4 != p % 4) continue;
            for (uint32_t r = 0; r < 16; r++)
                for (uint32_t n = 0; n < 8; n++)
                    expect("a", p, c[p], r, n,
                           r == row && (n == 7 || (n < 6 && k >> n & 1)) ? p % 2 ? -6.0f : 6.0f
                                                                         : 0.0f);
        }
        free(c);
    }
    free(o);
}

/* One element of b at a time; row m of a is bit m of k, and rows 8 .. 15 are 1. */
static void finds_every_b(void **state) {
    (void)state;
    if (!blackwell) skip();
    struct operands *o = td_test_bytes(B_PLACES * sizeof *o);
    for (uint32_t p = 0; p < B_PLACES; p++) {
        plain_scales(&o[p], 1, 2);
        for (uint32_t a = 0; a < A_PLACES; a++) {
            uint32_t row, k;
            a_place(a / 32, a % 32, &row, &k);
            uint32_t v = row >= 8 || (row < 6 && k >> row & 1) ? ONE : 0;
            set_nibble(o[p].lane[a / 32].a, a % 32, v);
        }
        set_nibble(o[p].lane[p / 16].b, p % 16, 3); /* 1.5 */
    }
    float(*c)[32][4] = products(o, B_PLACES, 1, 2);
    for (uint32_t p = 0; p < B_PLACES; p++) {
        uint32_t k, column;
        b_place(p / 16, p % 16, &k, &column);
        for (uint32_t r = 0; r < 16; r++)
            for (uint32_t n = 0; n < 8; n++)
                expect("b", p, c[p], r, n,
                       n == column && (r >= 8 || (r < 6 && k >> r & 1)) ? 1.5f : 0.0f);
    }
    free(c);
    free(o);
}

/* One scale byte is 4 at a time. Column n of b is 1 in block n % 4 alone, a is 1: a scale of a
 * shows in its row at the columns of its block, one of b in its column if that has its block. */
static void finds_every_scale(void **state) {
    (void)state;
    if (!blackwell) skip();
    enum { PLACES = 32 * 4 };
    struct operands *o = td_test_bytes(2 * PLACES * sizeof *o);
    for (uint32_t selector = 0; selector < 8; selector++) {
        uint32_t thread_a = selector / 4, thread_b = selector % 4;
        for (uint32_t p = 0; p < 2 * PLACES; p++) {
            struct lane *l = &o[p].lane[p % PLACES / 4];
            plain_scales(&o[p], thread_a, thread_b);
            for (uint32_t b = 0; b < B_PLACES; b++) {
                uint32_t k, column;
                b_place(b / 16, b % 16, &k, &column);
                set_nibble(o[p].lane[b / 16].b, b % 16, k / 16 == column % 4 ? ONE : 0);
            }
            for (uint32_t i = 0; i < 32; i++)
                for (uint32_t r = 0; r < 4; r++)
                    o[p].lane[i].a[r] = ONES;
            uint32_t *scale = p < PLACES ? &l->sa : &l->sb, shift = p % 4 * 8;
            *scale = (*scale & ~(0xffu << shift)) | 0x48u << shift; /* 4 */
        }
        float(*c)[32][4] = products(o, 2 * PLACES, thread_a, thread_b);
        for (uint32_t p = 0; p < 2 * PLACES; p++) {
            uint32_t lane = p % PLACES / 4, block = p % 4, group = lane >> 2, thread = lane % 4;
            bool of_a = p < PLACES, counts = of_a ? thread / 2 == thread_a : thread == thread_b;
            uint32_t row = thread % 2 ? group + 8 : group;
            for (uint32_t r = 0; r < 16; r++)
                for (uint32_t n = 0; n < 8; n++)
                    expect(of_a ? "a's scale" : "b's scale", p % PLACES, c[p], r, n,
                           counts && n % 4 == block && (of_a ? r == row : n == group) ? 64.0f
                                                                                      : 16.0f);
        }
        free(c);
    }
    free(o);
}

/* ---- section 7, a second time ---- */

enum { GROUP = 16 };

static double e2m1(uint32_t code) {
    static const double grid[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -grid[code & 7] : grid[code & 7];
}
static double e4m3(uint32_t b) {
    return b < 8 ? ldexp(b, -9) : ldexp(1 + (b & 7) / 8.0, (int)(b >> 3) - 7);
}

/* The nearest of the ascending grid's first n, ties to the even code. */
static uint32_t nearest(double x, double (*grid)(uint32_t), uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        double a = fabs(x - grid(i)), b = fabs(x - grid(best));
        if (a < b || (a == b && i % 2 == 0)) best = i;
    }
    return best;
}

/* A row's codes, a byte each, and block scales. */
static void second_codes(const float *x, uint32_t dim, float input_scale, uint8_t *q, uint8_t *b) {
    for (uint32_t g = 0; g < dim; g += GROUP) {
        float most = 0;
        for (uint32_t i = g; i < g + GROUP; i++)
            most = fmaxf(most, fabsf(x[i]));
        b[g / GROUP] = (uint8_t)nearest((double)(most / 6 / input_scale), e4m3, 127);
        float step = (float)e4m3(b[g / GROUP]) * input_scale;
        for (uint32_t i = g; i < g + GROUP; i++)
            q[i] = step > 0 ? (uint8_t)(nearest(fabs((double)(x[i] / step)), e2m1, 8) |
                                        (signbit(x[i]) ? 8u : 0u))
                            : 0;
    }
}

/* One output: q, b [cols] and [cols / 16] of the row, wq and ws of the weights. *ret_size: the
 * magnitudes. The bits of the emulator's order. */
static float second_product(const uint8_t *q, const uint8_t *b, const uint8_t *wq,
                            const uint8_t *ws, uint32_t cols, float factor, double *ret_exact,
                            double *ret_size) {
    uint32_t part = (cols + 1023) / 1024 * 128;
    double exact = 0, size = 0;
    float total = 0, c = 0;
    for (uint32_t g = 0; g < cols / GROUP; g++) {
        double sum = 0;
        if (g > 0 && g * GROUP % part == 0) {
            total += c;
            c = 0;
        }
        for (uint32_t i = g * GROUP; i < (g + 1) * GROUP; i++) {
            sum += e2m1(q[i]) * e2m1(wq[i]);
            size += fabs(e2m1(q[i]) * e2m1(wq[i])) * e4m3(b[g]) * e4m3(ws[g]);
        }
        sum *= e4m3(b[g]) * e4m3(ws[g]);
        exact += sum;
        c += (float)sum;
    }
    *ret_exact = exact * (double)factor;
    *ret_size = size * (double)factor;
    return (total + c) * factor;
}

/* ---- experts ---- */

struct expert {
    struct td_matrix m;
    uint8_t *q, *s; /* [rows][cols] codes, [rows][cols / 16] scales of what it is a part of */
};

static struct expert random_expert(uint32_t rows, uint32_t cols, uint32_t row, uint32_t col,
                                   float input_scale) {
    struct td_weight w = {.format = TD_W_NVFP4, .rows = row + rows, .cols = col + cols};
    size_t n = (size_t)w.rows * w.cols;
    struct expert e = {.q = td_test_bytes(n), .s = td_test_bytes(n / GROUP)};
    uint8_t *data = td_test_bytes(n / 2);
    w.scale2 = td_test_uniform(0.001f, 0.1f);
    for (size_t i = 0; i < n; i++) {
        e.q[i] = (uint8_t)td_test_below(16);
        data[i / 2] = (uint8_t)(data[i / 2] | e.q[i] << i % 2 * 4);
    }
    for (size_t i = 0; i < n / GROUP; i++)
        e.s[i] = (uint8_t)td_test_below(0x7f);
    w.data = td_test_put(&dev, data, n / 2);
    w.scale = td_test_put(&dev, e.s, n / GROUP);
    e.m = (struct td_matrix){.rows = rows,
                             .cols = cols,
                             .row = row,
                             .col = col,
                             .stored = w,
                             .input_scale = input_scale};
    free(data);
    return e;
}

enum { EXPERTS = 7, ROOM = 3 };

struct run {
    struct td_expert_linear_args a;
    struct expert e[2][EXPERTS];
    struct td_matrix m[2][EXPERTS];
    uint32_t offset[EXPERTS + 1], rows, k, outs;
    float *y[2];
};

static void call(struct run *r, bool codes) {
    struct td_expert_linear_args a = r->a;
    size_t bytes = (size_t)(r->rows + ROOM) * r->outs * sizeof(float);
    if (!codes) a.codes.code = NULL;
    for (uint32_t p = 0; p < a.parts; p++) {
        memset(r->y[p], 0xff, bytes);
        td_upload(&dev, a.y[p], r->y[p], bytes);
    }
    fast.expert_linear(&dev, &a);
    for (uint32_t p = 0; p < a.parts; p++)
        td_test_get(&dev, r->y[p], a.y[p], bytes);
}

/* q [rows][k] and b [rows][k / 16]: the second formulation's. */
static void check(const struct run *r, const uint8_t *q, const uint8_t *b) {
    for (uint32_t p = 0; p < r->a.parts; p++)
        for (uint32_t e = 0; e < EXPERTS; e++)
            for (uint32_t i = r->offset[e]; i < r->offset[e + 1]; i++)
                for (uint32_t o = 0; o < r->outs; o++) {
                    const struct expert *w = &r->e[p][e];
                    size_t from = (size_t)(w->m.row + o) * w->m.stored.cols + w->m.col;
                    double exact, size;
                    float got = r->y[p][(size_t)i * r->outs + o];
                    float want =
                        second_product(q + (size_t)i * r->k, b + (size_t)i * r->k / GROUP,
                                       w->q + from, w->s + from / GROUP, r->k,
                                       w->m.stored.scale2 * w->m.input_scale, &exact, &size);
                    if (!(fabs((double)got - exact) <= (emulated ? 1e-6 : 1e-3) * size) ||
                        (emulated && got != want))
                        fail_msg("%u inputs, part %u expert %u row %u output %u: expected %.9g "
                                 "(%.9g exactly), found %.9g",
                                 r->k, p, e, i, o, (double)want, exact, (double)got);
                }
}

/* Every other row becomes NaNs; then the expert of the row has no other one. */
static void check_alone(struct run *r, const uint8_t *code, const uint8_t *scale, float **before) {
    uint32_t row = td_test_below(r->rows), e = 0;
    size_t half = r->k / 2, few = r->k / GROUP;
    uint8_t *wild = td_test_bytes(r->rows * half), *nan = td_test_bytes(r->rows * few);
    memset(wild, 0x77, r->rows * half);
    memset(nan, 0x7f, r->rows * few);
    memcpy(wild + row * half, code + row * half, half);
    memcpy(nan + row * few, scale + row * few, few);
    td_upload(&dev, r->a.codes.code, wild, r->rows * half);
    td_upload(&dev, r->a.codes.scale, nan, r->rows * few);
    call(r, true);
    for (uint32_t p = 0; p < r->a.parts; p++)
        td_test_same("a row among NaNs", before[p] + (size_t)row * r->outs,
                     r->y[p] + (size_t)row * r->outs, r->outs * sizeof(float));
    while (r->offset[e + 1] <= row)
        e++;
    for (uint32_t i = 0; i <= EXPERTS; i++) /* the row is the first there is */
        r->offset[i] = i > e;
    td_upload(&dev, (void *)(uintptr_t)r->a.offset, r->offset, sizeof r->offset);
    td_upload(&dev, r->a.codes.code, code + row * half, half);
    td_upload(&dev, r->a.codes.scale, scale + row * few, few);
    r->a.most = td_test_below(2);
    call(r, true);
    for (uint32_t p = 0; p < r->a.parts; p++) {
        td_test_same("a row alone", before[p] + (size_t)row * r->outs, r->y[p],
                     r->outs * sizeof(float));
        for (size_t i = r->outs; i < (size_t)(r->rows + ROOM) * r->outs; i++)
            if (td_f32_bits(r->y[p][i]) != 0xffffffffu) fail_msg("a row of no expert was written");
    }
    free(wild);
    free(nan);
}

static void experts_case(const uint32_t *sizes, uint32_t k, uint32_t outs, uint32_t parts,
                         uint32_t row, uint32_t col) {
    enum { X = 40 };
    struct run r = {.k = k, .outs = outs};
    for (uint32_t e = 0; e < EXPERTS; e++)
        r.offset[e + 1] = r.offset[e] + sizes[e];
    r.rows = r.offset[EXPERTS];
    float *x = td_test_floats((size_t)X * k, -1, 1);
    uint32_t *x_row = td_test_bytes((r.rows + 1) * sizeof *x_row);
    for (size_t g = 0; g < (size_t)X * k / GROUP; g++) { /* loud groups, quiet ones, zeros */
        float by = td_test_below(9) == 0 ? 0 : exp2f(td_test_uniform(-8, 3));
        for (uint32_t i = 0; i < GROUP; i++)
            x[g * GROUP + i] *= by;
    }
    for (uint32_t i = 0; i < r.rows; i++)
        x_row[i] = td_test_below(X);
    for (uint32_t e = 0; e < EXPERTS; e++) {
        float input_scale = td_test_uniform(2, 9) / 2688;
        for (uint32_t p = 0; p < parts; p++) {
            r.e[p][e] = random_expert(outs, k, row, col, input_scale);
            r.m[p][e] = r.e[p][e].m;
        }
    }
    size_t values = (size_t)r.rows * k, y_bytes = (size_t)(r.rows + ROOM) * outs * sizeof(float);
    uint32_t most = 0;
    for (uint32_t e = 0; e < EXPERTS; e++)
        most = sizes[e] > most ? sizes[e] : most;
    r.a = (struct td_expert_linear_args){.x = td_test_put(&dev, NULL, values * sizeof *x + 64),
                                         .x_stride = k,
                                         .offset = td_test_put(&dev, r.offset, sizeof r.offset),
                                         .experts = EXPERTS,
                                         .parts = parts,
                                         .most = td_test_below(2) ? most : 0,
                                         .codes = {td_test_put(&dev, NULL, values / 2 + 64),
                                                   td_test_put(&dev, NULL, values / GROUP + 64)}};
    for (uint32_t p = 0; p < parts; p++) {
        const struct td_matrix *table = td_test_put(&dev, r.m[p], sizeof r.m[p]);
        for (uint32_t e = 0; e < EXPERTS; e++)
            r.m[p][e].device = table + e;
        r.a.w[p] = r.m[p];
        r.a.y[p] = td_test_put(&dev, NULL, y_bytes);
        r.y[p] = td_test_bytes(y_bytes);
    }
    struct td_round_nvfp4_args round = {.x = td_test_put(&dev, x, (size_t)X * k * sizeof *x),
                                        .x_row =
                                            td_test_put(&dev, x_row, (r.rows + 1) * sizeof *x_row),
                                        .offset = r.a.offset,
                                        .w = r.m[0],
                                        .y = (float *)(uintptr_t)r.a.x,
                                        .codes = r.a.codes,
                                        .experts = EXPERTS,
                                        .dim = k};
    fast.round_nvfp4(&dev, &round);
    uint8_t *code = td_test_bytes(values / 2 + 1), *scale = td_test_bytes(values / GROUP + 1);
    uint8_t *q = td_test_bytes(values + 1), *b = td_test_bytes(values / GROUP + 1);
    td_test_get(&dev, code, r.a.codes.code, values / 2);
    td_test_get(&dev, scale, r.a.codes.scale, values / GROUP);
    for (uint32_t e = 0; e < EXPERTS; e++)
        for (uint32_t i = r.offset[e]; i < r.offset[e + 1]; i++)
            second_codes(x + (size_t)x_row[i] * k, k, r.m[0][e].input_scale, q + (size_t)i * k,
                         b + (size_t)i * k / GROUP);
    td_test_same("block scales", b, scale, values / GROUP);
    for (size_t i = 0; i < values; i++)
        if (q[i] != (code[i / 2] >> i % 2 * 4 & 15))
            fail_msg("code %zu of rows of %u: expected %u, found %u", i, k, q[i],
                     code[i / 2] >> i % 2 * 4 & 15u);
    float *before[2] = {NULL, NULL};
    call(&r, blackwell);
    if (blackwell) check(&r, q, b);
    for (uint32_t p = 0; p < parts; p++)
        before[p] = memcpy(td_test_bytes(y_bytes), r.y[p], y_bytes);
    call(&r, true);
    for (uint32_t p = 0; p < parts; p++)
        td_test_same(blackwell ? "again" : "codes that cannot be used", before[p], r.y[p], y_bytes);
    if (blackwell && r.rows) check_alone(&r, code, scale, before);
    for (uint32_t p = 0; p < parts; p++) {
        for (uint32_t e = 0; e < EXPERTS; e++) {
            td_test_give(&dev, r.e[p][e].m.stored.data);
            td_test_give(&dev, r.e[p][e].m.stored.scale);
            free(r.e[p][e].q);
            free(r.e[p][e].s);
        }
        td_test_give(&dev, r.m[p][0].device);
        td_test_give(&dev, r.a.y[p]);
        free(r.y[p]);
        free(before[p]);
    }
    td_test_give(&dev, r.a.x);
    td_test_give(&dev, r.a.offset);
    td_test_give(&dev, r.a.codes.code);
    td_test_give(&dev, r.a.codes.scale);
    td_test_give(&dev, round.x);
    td_test_give(&dev, round.x_row);
    free(x);
    free(x_row);
    free(code);
    free(scale);
    free(q);
    free(b);
}

static void experts(void **state) {
    (void)state;
    static const uint32_t one[] = {0, 1, 0, 8, 3, 0, 1}, many[] = {9, 0, 1, 65, 8, 0, 17},
                          none[EXPERTS] = {0};
    experts_case(one, 64, 16, 1, 0, 0);
    experts_case(one, 32, 40, 2, 0, 0);
    experts_case(one, 2080, 8, 1, 0, 0); /* parts of 384, the last ones short or empty */
    experts_case(one, 1152, 136, 1, 16, 32);
    experts_case(many, 128, 130, 2, 0, 64);
    experts_case(many, 160, 24, 1, 3, 96);
    experts_case(many, 1184, 17, 1, 0, 0);
    experts_case(none, 96, 16, 2, 0, 0);
}

/* ---- engines ---- */

/* Logits after steps of several sizes; the greatest difference to the CPU's over its greatest
 * logit.
 */
static double walk(const struct td_model *m, struct td_engine_options o, const int32_t *ids,
                   const uint32_t *cut, uint32_t steps, size_t vocab) {
    struct td_engine *e[2] = {NULL, NULL};
    struct td_error err;
    const uint32_t pages[] = {0};
    double worst = 0, most = 0;
    uint64_t only;
    o.nvfp4_activations = o.ref = true;
    assert_int_equal(td_engine_create(m, &o, &e[0], &err), TD_OK);
    o.backend = &TD_TEST_BACKEND;
    assert_int_equal(td_ops_mask("all", &o.force_ref, &err), TD_OK);
    assert_int_equal(td_ops_mask("expert_linear", &only, &err), TD_OK);
    o.force_ref &= ~only;
    if (td_engine_create(m, &o, &e[1], &err) != TD_OK) fail_msg("%s", err.text);
    for (uint32_t i = 0; i < steps; i++) {
        struct td_run r = {.pos = cut[i],
                           .n = cut[i + 1] - cut[i],
                           .ids = ids + cut[i],
                           .pages = pages,
                           .want_logits = true};
        const float *logits[2];
        for (int k = 0; k < 2; k++)
            if (td_engine_step(e[k], &r, 1, &logits[k], NULL, &err) != TD_OK)
                fail_msg("%s", err.text);
        for (size_t j = 0; j < vocab; j++) {
            double d = fabs((double)logits[0][j] - (double)logits[1][j]);
            if (!(d <= worst)) worst = d;
            if (fabs((double)logits[0][j]) > most) most = fabs((double)logits[0][j]);
        }
    }
    td_engine_destroy(e[0]);
    td_engine_destroy(e[1]);
    return worst / most;
}

/* The sum's order differs in the last bits, and now and then, in ref numerics, that puts a value on
 * the other side of a quantiser's boundary, which shows in the logits like an input that is rounded
 * to bf16: so most walks are much closer than those of products of rounded inputs. A chip's own
 * rounding may tip a value in every walk, and tipped values add up: on an H200, whose inputs are
 * rounded, three walks were off by 0.018, 0.027 and 0.2. What is wrong is far off in all of them.
 */
static void walks(const char *what, const struct td_model *m, struct td_engine_options o,
                  int32_t *(*ids_of)(uint32_t n), const uint32_t *cut, size_t vocab) {
    enum { STEPS = 4, TRIES = 3 };
    double least = INFINITY;
    for (int i = 0; i < TRIES && !(least <= 1e-5); i++) {
        int32_t *ids = ids_of(cut[STEPS]);
        double off = walk(m, o, ids, cut, STEPS, vocab);
        printf("%s: greatest difference %.2g of the greatest logit\n", what, off);
        assert_true(off <= 1);
        least = off < least ? off : least;
        free(ids);
    }
    assert_true(least <= (blackwell && emulated ? 1e-5 : 0.1));
}

static void bundled_engine(void **state) {
    (void)state;
    static const uint32_t cut[] = {0, 33, 34, 42, 43};
    walks("bundled model", td_test_model(), td_test_options(), td_test_ids, cut,
          td_test_logit_bytes() / sizeof(float));
}

static void random_engine(void **state) {
    (void)state;
    static float input_scale[RANDOM_LAYERS][RANDOM_EXPERTS][2];
    static const uint32_t cut[] = {0, 19, 45, 46, 47};
    static struct maker maker;
    maker_init(&maker, MAKER_NVFP4);
    td_test_random_fill(&maker, input_scale);
    struct td_model *m = td_test_random_open(&maker);
    walks("random model", m, td_test_random_options(64), td_test_random_ids, cut, RANDOM_VOCAB);
    td_model_close(m);
    maker_finish(&maker);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_every_a),     cmocka_unit_test(finds_every_b),
        cmocka_unit_test(finds_every_scale), cmocka_unit_test(experts),
        cmocka_unit_test(bundled_engine),    cmocka_unit_test(random_engine),
    };
    struct td_error err;
    char chip[128];
    if (TD_TEST_BACKEND.open(&dev, 0, &err) != TD_OK) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    if (dev.backend->ops(&dev, 0, &fast, &err) != TD_OK) {
        printf("%s\n", err.text);
        return 1;
    }
    dev.backend->describe(&dev, chip, sizeof chip);
    blackwell = strstr(chip, "sm_120") != NULL;
    int failed = cmocka_run_group_tests(tests, td_test_seed, NULL);
    dev.backend->close(&dev);
    return failed;
}

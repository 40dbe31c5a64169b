/* The quantisers of ref numerics bit for bit against definitions of their own: doubles, frexp and
 * nearbyint, and tables of every value of the small formats. */
#include <math.h>

#include "kernels/cpu/quant.h"
#include "kernels/ref/quant.h"
#include "kernels/ref/stored.h"
#include "tests/kernels/sequences.h"

enum { RANDOM = 10000000, GROUP = 128 };

/* ---- definitions ---- */

/* The multiple of the format's step at |x| that is nearest to x, ties to the even one. `least`: the
 * exponent below which steps stay the same; `bits`: mantissa bits without the leading one. */
static double nearest(double x, int least, int bits, double most) {
    int e;
    frexp(x, &e); /* |x| in [2^(e-1), 2^e) */
    e = x == 0 || e - 1 < least ? least : e - 1;
    double step = ldexp(1.0, e - bits), r = nearbyint(x / step) * step;
    return copysign(fmin(fabs(r), most), x);
}

static double e4m3_of(double x) {
    return nearest(x, -6, 3, 448);
}

static double e2m1_of(double x) {
    return nearest(x, 0, 1, 6);
}

/* 2^ceil(log2(v)). */
static double power_not_below(double v) {
    int e;
    double m = frexp(v, &e);
    return ldexp(1.0, m == 0.5 ? e - 1 : e);
}

static double scale_of(const float *x, uint32_t n, float least, float one_over_most) {
    float max = least;
    for (uint32_t i = 0; i < n; i++)
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    return power_not_below((double)(max * one_over_most));
}

static void same_float(const char *what, float x, float got, double want) {
    float w = (float)want;
    if (td_f32_bits(got) != td_f32_bits(w))
        fail_msg("%s(%a): expected %a, found %a", what, (double)x, (double)w, (double)got);
}

/* ---- single values ---- */

static void check_e4m3(float x) {
    double want = e4m3_of((double)x);
    same_float("e4m3 value", x, e4m3_nearest8(splat8(x))[5], want);
    same_float("e4m3 byte", x, td_e4m3_to_f32(td_f32_to_e4m3(x)), want);
}

static void check_e2m1(float x) {
    same_float("e2m1", x, td_e2m1_to_f32(td_f32_to_e2m1(x)), e2m1_of((double)x));
}

/* x, its neighbours, and their negatives. */
static void around(void (*check)(float), float x) {
    const float at[] = {x, nextafterf(x, -INFINITY), nextafterf(x, INFINITY)};
    for (int i = 0; i < 3; i++) {
        check(at[i]);
        check(-at[i]);
    }
}

/* Every value of the format, every midpoint, and the floats next to both. */
static void boundaries(void **state) {
    (void)state;
    for (uint32_t b = 0; b < 0x7f; b++) {
        float v = td_e4m3_to_f32((uint8_t)b),
              next = b < 0x7e ? td_e4m3_to_f32((uint8_t)(b + 1)) : 480;
        around(check_e4m3, v);
        around(check_e4m3, 0.5f * (v + next));
        same_float("e4m3 of its own value", v, e4m3_nearest8(splat8(v))[0], v);
        assert_int_equal(td_f32_to_e4m3(v), b);
    }
    static const float grid[] = {0, .5, 1, 1.5, 2, 3, 4, 6, 8};
    for (uint32_t i = 0; i < 8; i++) {
        around(check_e2m1, grid[i]);
        around(check_e2m1, 0.5f * (grid[i] + grid[i + 1]));
        assert_int_equal(td_f32_to_e2m1(grid[i]), i);
    }
    static const float far[] = {1e30f, 449, 1e-40f, 0x1p-149f, 0x1p-10f, 0x1.8p-10f};
    for (uint32_t i = 0; i < sizeof far / sizeof *far; i++) {
        around(check_e4m3, far[i]);
        around(check_e2m1, far[i]);
    }
    same_float("e4m3 of infinity", INFINITY, e4m3_nearest8(splat8(INFINITY))[0], 448);
    same_float("e4m3 of -infinity", -INFINITY, e4m3_nearest8(splat8(-INFINITY))[0], -448);
    const uint32_t nans[] = {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u};
    for (uint32_t i = 0; i < sizeof nans / sizeof *nans; i++)
        assert_true(isnan(e4m3_nearest8(splat8(td_bits_f32(nans[i])))[3]));
}

/* Any bits, and bits in the formats' range. */
static void random_values(void **state) {
    (void)state;
    for (uint32_t i = 0; i < RANDOM; i++) {
        uint64_t r = td_test_next();
        float x = td_bits_f32((uint32_t)r);
        if (i & 1)
            x = td_bits_f32((uint32_t)(r & 0x807fffffu) | (uint32_t)(110 + (r >> 40) % 28) << 23);
        if (!isfinite(x)) continue;
        check_e4m3(x);
        check_e2m1(x);
    }
}

/* ---- scales ---- */

/* 448 * 2^k and 6 * 2^k lie exactly on the boundary; their neighbours do not. */
static void scale_boundaries(void **state) {
    (void)state;
    assert_true(fp8_scale(0) == fp8_scale(1e-4f) && fp8_scale(0) == 0x1p-22f);
    for (int k = -22; k <= 118; k++) {
        float a = ldexpf(448, k);
        if (k > -22) assert_true(fp8_scale(a) == ldexpf(1, k));
        if (k > -22) assert_true(fp8_scale(nextafterf(a, 0)) == ldexpf(1, k));
        assert_true(fp8_scale(nextafterf(a, INFINITY)) == ldexpf(1, k) ||
                    fp8_scale(nextafterf(nextafterf(a, INFINITY), INFINITY)) == ldexpf(1, k + 1));
    }
    assert_true(fp4_scale(0) == 0x1p-126f);
    for (int k = -126; k <= 124; k++)
        assert_true(fp4_scale(ldexpf(6, k)) == ldexpf(1, k));
    assert_true(fp8_scale(INFINITY) == 0x1p127f && fp4_scale(INFINITY) == 0x1p127f);
    for (uint32_t i = 0; i < RANDOM / 10; i++) {
        float x = td_bits_f32((uint32_t)td_test_next() & 0x7fffffffu);
        if (!isfinite(x)) continue;
        same_float("fp8 scale", x, fp8_scale(x), scale_of(&x, 1, 1e-4f, 1.0f / 448));
        same_float("fp4 scale", x, fp4_scale(x), scale_of(&x, 1, 0x1.8p-124f, 1.0f / 6));
    }
}

/* ---- groups ---- */

/* Values of one size, or of many; now and then with an exact maximum, zeros, or tiny. */
static void fill_group(float *x, uint32_t n) {
    uint32_t kind = td_test_below(6);
    int k = (int)td_test_below(40) - 20;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = td_test_uniform(-1, 1) * ldexpf(1, k);
        if (kind == 1) x[i] = ldexpf(x[i], -(int)td_test_below(30));
        if (kind == 2) x[i] *= 1e-6f;
        if (kind == 3 && td_test_below(3)) x[i] = td_test_below(2) ? 0.0f : -0.0f;
    }
    if (kind == 4) x[td_test_below(n)] = ldexpf(td_test_below(2) ? 448 : -6, k - 8);
    if (kind == 5)
        x[td_test_below(n)] = nextafterf(ldexpf(448, k - 8), td_test_below(2) ? 0 : 1e9f);
}

static void check_fp8_row(const float *x, const float *y, uint32_t dim, uint32_t group) {
    for (uint32_t g = 0; g < dim; g += group) {
        uint32_t n = dim - g < group ? dim - g : group;
        double s = scale_of(x + g, n, 1e-4f, 1.0f / 448);
        for (uint32_t i = g; i < g + n; i++)
            same_float("rounded to fp8", x[i], y[i], e4m3_of((double)x[i] / s) * s);
    }
}

/* Also the last group short, as the small model's experts have it. */
static void fp8_groups(void **state) {
    (void)state;
    static const uint32_t dims[] = {128, 64, 192, 448, 136};
    float x[448], y[448];
    for (uint32_t done = 0, i = 0; done < RANDOM; i++) {
        uint32_t dim = dims[i % 5], group = dim == 448 ? QUANT_SIM8 : GROUP;
        for (uint32_t g = 0; g < dim; g += group)
            fill_group(x + g, dim - g < group ? dim - g : group);
        fp8_round(x, y, dim, group);
        check_fp8_row(x, y, dim, group);
        memcpy(x, y, sizeof x);
        fp8_round(y, y, dim, group);
        td_test_same("rounded twice", x, y, dim * sizeof *x);
        done += dim;
    }
}

static void fp4_groups(void **state) {
    (void)state;
    float x[TD_KV_KEY_DIM], y[TD_KV_KEY_DIM], back[TD_KV_KEY_DIM];
    uint8_t key[TD_KV_FP4_KEY_BYTES];
    for (uint32_t done = 0; done < RANDOM; done += TD_KV_KEY_DIM) {
        for (uint32_t g = 0; g < TD_KV_KEY_DIM; g += QUANT_SIM4)
            fill_group(x + g, QUANT_SIM4);
        memcpy(y, x, sizeof x);
        sim4(y, TD_KV_KEY_DIM);
        for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++) {
            double s = scale_of(x + i / 32 * 32, 32, 0x1.8p-124f, 1.0f / 6);
            same_float("sim4", x[i], y[i], e2m1_of((double)x[i] / s) * s);
        }
        key_encode(x, TD_KV_KEY_FP4, key);
        key_decode(key, TD_KV_KEY_FP4, back);
        td_test_same("fp4 key", y, back, sizeof y);
        key_encode(y, TD_KV_KEY_FP4, key);
        key_decode(key, TD_KV_KEY_FP4, back);
        td_test_same("fp4 key after sim4", y, back, sizeof y);
    }
    memset(x, 0, sizeof x);
    x[3] = 1.5f, x[2] = -6, x[33] = 12, x[127] = NAN;
    key_encode(x, TD_KV_KEY_FP4, key);
    assert_int_equal(key[1], 0xf | 3 << 4); /* -6 in the low nibble, 1.5 in the high one */
    assert_int_equal(key[16], 7 << 4);
    assert_int_equal(key[64], 127);
    assert_int_equal(key[65], 128);
    assert_int_equal(key[67], 255);
    key_decode(key, TD_KV_KEY_FP4, back);
    for (uint32_t i = 96; i < 128; i++)
        assert_true(isnan(back[i]));
}

/* The definition once more: block scale and values as doubles, one float rounding per step. */
static double nvfp4_step_of(const float *x, float input_scale) {
    float max = 0;
    for (uint32_t i = 0; i < QUANT_NVFP4; i++)
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    float sixth = (float)((double)max / 6.0), block = (float)((double)sixth / (double)input_scale);
    return (double)(float)(fmin(e4m3_of((double)block), 448) * (double)input_scale);
}

static void check_nvfp4_group(const float *x, const float *y, float input_scale) {
    double step = nvfp4_step_of(x, input_scale);
    for (uint32_t i = 0; i < QUANT_NVFP4; i++) {
        double q = step == 0 ? 0 : e2m1_of((double)(float)((double)x[i] / step));
        same_float("nvfp4", x[i], y[i], step == 0 ? 0 : q * step);
    }
}

/* With every block scale e4m3 has, x on every e2m1 value and midpoint and next to it. */
static void nvfp4_boundaries(void **state) {
    (void)state;
    static const float grid[] = {0, .25f, .5f, .75f, 1, 1.25f, 1.5f, 1.75f, 2, 2.5f, 3, 3.5f, 4, 5};
    static const float inputs[] = {1, 0.01f, 0x1p-20f, 0.37f, 3e-5f};
    enum { POINTS = sizeof grid / sizeof *grid };
    float x[QUANT_NVFP4], y[QUANT_NVFP4];
    for (uint32_t b = 0; b < 0x7f; b++)
        for (uint32_t k = 0; k < 5; k++)
            for (uint32_t p = 0; p < POINTS; p++) {
                float d = td_e4m3_to_f32((uint8_t)b) * inputs[k], at = grid[p] * d;
                memset(x, 0, sizeof x);
                x[0] = 6 * d, x[1] = at, x[2] = -at, x[3] = -0.0f;
                x[4] = nextafterf(at, INFINITY), x[5] = nextafterf(at, -INFINITY);
                x[15] = td_test_below(2) ? nextafterf(6 * d, td_test_below(2) ? 0 : INFINITY) : 0;
                nvfp4_round(x, y, QUANT_NVFP4, inputs[k], NULL, NULL);
                check_nvfp4_group(x, y, inputs[k]);
            }
    /* the block scale's own midpoints, and some floats to either side */
    for (uint32_t b = 0; b < 0x7e; b++)
        for (uint32_t k = 0; k < 5; k++) {
            float mid = 0.5f * (td_e4m3_to_f32((uint8_t)b) + td_e4m3_to_f32((uint8_t)(b + 1)));
            uint32_t bits = td_f32_bits(6 * mid * inputs[k]);
            for (uint32_t side = 0; side < 9; side++) {
                memset(x, 0, sizeof x);
                x[9] = td_bits_f32(bits + side - 4);
                nvfp4_round(x, y, QUANT_NVFP4, inputs[k], NULL, NULL);
                check_nvfp4_group(x, y, inputs[k]);
            }
        }
    memset(x, 0, sizeof x);
    nvfp4_round(x, y, QUANT_NVFP4, 0.01f, NULL, NULL);
    assert_true(y[0] == 0 && y[15] == 0);
    x[4] = 1e-9f; /* the block scale rounds to nothing */
    nvfp4_round(x, y, QUANT_NVFP4, 1, NULL, NULL);
    assert_true(y[4] == 0);
    x[4] = INFINITY, x[5] = -1e30f, x[6] = 1; /* saturates: 448 * 6 */
    nvfp4_round(x, y, QUANT_NVFP4, 1, NULL, NULL);
    assert_true(y[4] == 2688 && y[5] == -2688 && y[6] == 0);
    uint8_t code[QUANT_NVFP4 / 2] = {0}, scale = 0;
    x[7] = NAN;
    nvfp4_round(x, y, QUANT_NVFP4, 1, code, &scale);
    for (uint32_t i = 0; i < QUANT_NVFP4; i++)
        assert_true(isnan(y[i]));
    assert_int_equal(scale, 0x7f);
    assert_int_equal(code[2], 0x77);
}

static void nvfp4_groups(void **state) {
    (void)state;
    enum { DIM = 48 };
    float x[DIM], y[DIM];
    for (uint32_t done = 0; done < RANDOM; done += DIM) {
        float input_scale = ldexpf(td_test_uniform(0.5f, 1), (int)td_test_below(30) - 22);
        for (uint32_t g = 0; g < DIM; g += QUANT_NVFP4)
            fill_group(x + g, QUANT_NVFP4);
        nvfp4_round(x, y, DIM, input_scale, NULL, NULL);
        for (uint32_t g = 0; g < DIM; g += QUANT_NVFP4)
            check_nvfp4_group(x + g, y + g, input_scale);
    }
}

/* Stored FP8 rows are the rounded ones, with or without rounding before. */
static void fp8_rows(void **state) {
    (void)state;
    float x[TD_KV_ROW_DIM], y[TD_KV_ROW_DIM], back[TD_KV_ROW_DIM];
    uint8_t bytes[TD_KV_FP8_ROW_VALUES + TD_KV_FP8_ROW_SCALES];
    struct td_kv_row row = {bytes, bytes + TD_KV_FP8_ROW_VALUES};
    for (uint32_t round = 0; round < 5000; round++) {
        for (uint32_t g = 0; g < TD_KV_ROW_DIM; g += QUANT_SIM8)
            fill_group(x + g, QUANT_SIM8);
        memcpy(y, x, sizeof x);
        fp8_round(y, y, TD_KV_FP8_ROW_DIM, QUANT_SIM8);
        for (uint32_t i = TD_KV_FP8_ROW_DIM; i < TD_KV_ROW_DIM; i++)
            y[i] = td_bf16_to_f32(td_f32_to_bf16(x[i]));
        for (int again = 0; again < 2; again++) {
            memset(bytes, 0xa5, sizeof bytes);
            row_encode(again ? y : x, TD_KV_ROW_FP8, row);
            row_decode(row, TD_KV_ROW_FP8, back);
            td_test_same("fp8 row", y, back, sizeof y);
            assert_int_equal(bytes[sizeof bytes - 1], 0);
        }
    }
    memset(x, 0, sizeof x);
    x[64 + 3] = 448 * 4, x[64 + 4] = -4, x[448] = 1;
    row_encode(x, TD_KV_ROW_FP8, row);
    assert_int_equal(bytes[64 + 3], 0x7e);
    assert_int_equal(bytes[64 + 4], 0xb8);
    assert_int_equal(bytes[448] | bytes[449] << 8, 0x3f80);
    assert_int_equal(row.scales[0], 127 - 22);
    assert_int_equal(row.scales[1], 127 + 2);
    for (uint32_t b = 0; b < 256; b++) {
        memset(bytes, (int)b, 448);
        row_decode(row, TD_KV_ROW_FP8, back);
        float want = td_e4m3_to_f32((uint8_t)b) * 4;
        assert_true(isnan(want) ? isnan(back[64 + 9])
                                : td_f32_bits(back[64 + 9]) == td_f32_bits(want));
    }
}

/* ---- Hadamard ---- */

static void hadamard(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 50; round++) {
        float *x = td_test_floats(128, -3, 3), y[128];
        double want[128] = {0}, back[128];
        memcpy(y, x, sizeof y);
        for (uint32_t i = 0; i < 128; i++) {
            for (uint32_t j = 0; j < 128; j++)
                want[i] += (__builtin_popcount(i & j) & 1 ? -1.0 : 1.0) * (double)x[j];
            want[i] /= sqrt(128.0);
            back[i] = (double)x[i];
        }
        hadamard128(y);
        td_test_close("Hadamard", y, want, 128, 1e-6);
        hadamard128(y);
        td_test_close("Hadamard twice", y, back, 128, 1e-6);
        free(x);
    }
}

/* ---- the ops ---- */

static void ops_are_the_definitions(void **state) {
    (void)state;
    enum { N = 37, DIM = 320, HEADS = 3 };
    struct td_device dev = td_test_device(2);
    const struct td_ops *table[2];
    uint32_t tables = td_test_tables(table);
    float *x = td_test_floats(N * DIM, -5, 5), *y = td_test_poison(N * DIM);
    float *q = td_test_floats(N * HEADS * 128, -5, 5), *r = td_test_poison(N * HEADS * 128);
    for (uint32_t t = 0; t < tables; t++) {
        table[t]->round_fp8(&dev, &(struct td_round_fp8_args){.x = x, .y = y, .n = N, .dim = DIM});
        for (uint32_t i = 0; i < N; i++)
            check_fp8_row(x + i * DIM, y + i * DIM, DIM, GROUP);
        for (int mode = 0; mode < 4; mode++) {
            struct td_index_query_args a = {
                .q = r, .n = N, .heads = HEADS, .hadamard = mode & 1, .sim4 = mode & 2};
            memcpy(r, q, N * HEADS * 128 * sizeof *q);
            table[t]->index_query(&dev, &a);
            for (uint32_t i = 0; i < N * HEADS; i++) {
                float want[128];
                memcpy(want, q + i * 128, sizeof want);
                if (mode & 1) hadamard128(want);
                if (mode & 2) sim4(want, 128);
                td_test_same("index_query", want, r + i * 128, sizeof want);
            }
        }
    }
    free(r);
    free(q);
    free(y);
    free(x);
    td_test_device_finish(&dev);
}

/* A group's values are what its codes and scale say. */
static void check_nvfp4_codes(const float *y, const uint8_t *code, uint8_t scale,
                              float input_scale) {
    float step = td_e4m3_to_f32(scale) * input_scale;
    for (uint32_t i = 0; i < QUANT_NVFP4; i++) {
        float want = td_e2m1_to_f32((uint8_t)(code[i / 2] >> i % 2 * 4 & 15)) * step;
        same_float("nvfp4 code", 0, y[i], want);
    }
}

/* Grouped rows, each with its expert's scale, from other places and in place; an empty expert; with
 * codes and without. */
static void nvfp4_op(void **state) {
    (void)state;
    enum { N = 23, EXPERTS = 5, DIM = 80 };
    static const uint32_t offset[EXPERTS + 1] = {0, 0, 7, 8, 20, N};
    struct td_matrix w[EXPERTS];
    uint32_t x_row[N], expert[N];
    struct td_device dev = td_test_device(2);
    const struct td_ops *table[2];
    uint32_t tables = td_test_tables(table);
    uint8_t code[N * DIM / 2], scale[N * DIM / QUANT_NVFP4];
    float *x = td_test_floats(N * DIM, -5, 5), *y = td_test_poison(N * DIM);
    memset(x, 0, QUANT_NVFP4 * sizeof *x);
    x[QUANT_NVFP4] = 1e-30f; /* and a step that is 0 in a group that is not */
    memset(x + QUANT_NVFP4 + 1, 0, (QUANT_NVFP4 - 1) * sizeof *x);
    x[4 * QUANT_NVFP4] = INFINITY;
    for (uint32_t e = 0; e < EXPERTS; e++) {
        w[e] = (struct td_matrix){.input_scale = td_test_uniform(0.001f, 0.1f)};
        for (uint32_t r = offset[e]; r < offset[e + 1]; r++)
            expert[r] = e;
    }
    for (uint32_t r = 0; r < N; r++)
        x_row[r] = td_test_below(N);
    for (uint32_t t = 0; t < tables; t++)
        for (int turn = 3; turn >= 0; turn--) {
            bool moved = turn / 2, codes = turn % 2;
            struct td_round_nvfp4_args a = {.x = moved ? x : memcpy(y, x, N * DIM * sizeof *x),
                                            .x_row = moved ? x_row : NULL,
                                            .offset = offset,
                                            .w = w,
                                            .y = y,
                                            .experts = EXPERTS,
                                            .dim = DIM};
            if (codes) a.codes = (struct td_nvfp4_codes){code, scale};
            memset(code, 0xff, sizeof code);
            table[t]->round_nvfp4(&dev, &a);
            for (uint32_t i = 0; i < N * DIM; i += QUANT_NVFP4) {
                uint32_t r = i / DIM, from = moved ? x_row[r] : r;
                check_nvfp4_group(x + (size_t)from * DIM + i % DIM, y + i,
                                  w[expert[r]].input_scale);
                if (codes)
                    check_nvfp4_codes(y + i, code + i / 2, scale[i / QUANT_NVFP4],
                                      w[expert[r]].input_scale);
            }
        }
    free(y);
    free(x);
    td_test_device_finish(&dev);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(boundaries),       cmocka_unit_test(random_values),
        cmocka_unit_test(scale_boundaries), cmocka_unit_test(fp8_groups),
        cmocka_unit_test(fp4_groups),       cmocka_unit_test(fp8_rows),
        cmocka_unit_test(nvfp4_boundaries), cmocka_unit_test(nvfp4_groups),
        cmocka_unit_test(hadamard),         cmocka_unit_test(ops_are_the_definitions),
        cmocka_unit_test(nvfp4_op),
    };
    return cmocka_run_group_tests(tests, td_test_seed, NULL);
}

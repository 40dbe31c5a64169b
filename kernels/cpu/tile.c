/* The product loop, in the few sizes that fill the registers; other numbers of rows are made of
 * them. */
#include "kernels/cpu/tile.h"

/* Sums stay in registers when loops over them are unrolled; where 16 lanes are only tried (no
 * AVX-512), that would be minutes of compilation for nothing. */
#if TD_WIDTH == 8 || defined(__AVX512F__)
#define UNROLL_ROWS _Pragma("GCC unroll 12")
#define UNROLL _Pragma("GCC unroll 8")
#else
#define UNROLL_ROWS _Pragma("GCC unroll 1")
#define UNROLL _Pragma("GCC unroll 1")
#endif

TD_INLINE vl load_lanes(const float *p) {
    vl v;
    memcpy(&v, p, sizeof v);
    return v;
}

TD_INLINE void store_lanes(float *p, vl v) {
    memcpy(p, &v, sizeof v);
}

TD_INLINE vl splat_lanes(float x) {
#if TD_WIDTH == 8
    return splat8(x);
#else
    return (vl){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#endif
}

TD_INLINE vl fma_lanes(vl a, vl b, vl c) {
#if TD_WIDTH == 8
    return fma8(a, b, c);
#elif defined(__AVX512F__)
    return (vl)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    v8 part[3][2];
    memcpy(part[0], &a, sizeof a);
    memcpy(part[1], &b, sizeof b);
    memcpy(part[2], &c, sizeof c);
    for (int i = 0; i < 2; i++)
        part[2][i] = fma8(part[0][i], part[1][i], part[2][i]);
    memcpy(&c, part[2], sizeof c);
    return c;
#endif
}

/* p[0..3] again and again. */
TD_INLINE vl quad_lanes(const float *p) {
#if TD_WIDTH == 16 && defined(__AVX512F__)
    return (vl)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif TD_WIDTH == 8 && defined(__AVX__)
    return (vl)_mm256_broadcast_ps((const __m128 *)(const void *)p);
#else
    vl v;
    for (int i = 0; i < TD_WIDTH; i += 4)
        memcpy((float *)&v + i, p, 16);
    return v;
#endif
}

/* The 16 lanes of one k. */
TD_INLINE void load_panel(enum tile_kind kind, const float *w, vl *ret) {
    if (kind != TILE_BF16 && kind != TILE_BAND_BF16) {
        for (int v = 0; v < PANEL_VECTORS; v++)
            ret[v] = load_lanes(w + v * TD_WIDTH);
        return;
    }
    u8 d;
    memcpy(&d, w, sizeof d);
#if TD_WIDTH == 8
    ret[0] = (vl)(d << 16);
    ret[1] = (vl)(d & 0xffff0000u);
#elif defined(__AVX512BW__)
    /* One shuffle puts the halves of both copies where they belong. */
    enum { LOW = 0x01008080, HIGH = 0x03028080, NEXT = 0x04040000 };
    const __m128i low = _mm_setr_epi32(LOW, LOW + NEXT, LOW + 2 * NEXT, LOW + 3 * NEXT);
    const __m128i high = _mm_setr_epi32(HIGH, HIGH + NEXT, HIGH + 2 * NEXT, HIGH + 3 * NEXT);
    const __m512i order =
        _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_broadcastsi128_si256(low)),
                           _mm256_broadcastsi128_si256(high), 1);
    ret[0] = (vl)_mm512_shuffle_epi8(_mm512_broadcast_i64x4((__m256i)d), order);
#else
    ul both = __builtin_shufflevector(d, d, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    ret[0] = (vl)((both << (ul){16, 16, 16, 16, 16, 16, 16, 16}) & 0xffff0000u);
#endif
}

/* x of one row for input k, as every lane of its sums needs it. */
TD_INLINE vl load_input(enum tile_kind kind, const float *x, size_t k, bool odd) {
    switch (kind) {
    case TILE_QUAD:
        return quad_lanes(x + 4 * k);
    case TILE_QUAD_BF16: {
        ul d = (ul)quad_lanes(x + 2 * (k - odd));
        return (vl)(odd ? d & 0xffff0000u : d << 16);
    }
    default:
        return splat_lanes(x[k]);
    }
}

typedef vl tile_sums[TILE_ROWS][8];

/* One k. `odd` (of k) matters to pairs only and is a constant, as are kind, rows and panels: so the
 * sums stay in registers. */
TD_INLINE void tile_step(tile_sums acc, const float *const *x, size_t k, bool odd, const float *w,
                         size_t w_panel, enum tile_kind kind, int rows, int panels) {
    enum { V = PANEL_VECTORS };
    vl lanes[8];
    UNROLL
    for (int p = 0; p < panels; p++)
        load_panel(kind, w + (size_t)p * w_panel, lanes + p * V);
    UNROLL_ROWS
    for (int r = 0; r < rows; r++) {
        vl at = load_input(kind, x[r], k, odd);
        UNROLL
        for (int v = 0; v < panels * V; v++)
            acc[r][v] = fma_lanes(at, lanes[v], acc[r][v]);
    }
}

TD_INLINE void clear_sums(tile_sums acc, int rows, int vectors) {
    UNROLL_ROWS
    for (int r = 0; r < rows; r++) {
        UNROLL
        for (int v = 0; v < vectors; v++)
            acc[r][v] = splat_lanes(0.0f);
    }
}

TD_INLINE void store_sums(float *y, size_t y_step, tile_sums acc, bool add, int rows, int vectors) {
    UNROLL_ROWS
    for (int r = 0; r < rows; r++, y += y_step) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            float *at = y + v * TD_WIDTH;
            store_lanes(at, add ? load_lanes(at) + acc[r][v] : acc[r][v]);
        }
    }
}

enum { SUM_STEP = 8 * TD_WIDTH }; /* floats of a row of sums in memory */

TD_INLINE void move_sums(const float *from, size_t from_step, float *to, size_t to_step, int rows,
                         int vectors) {
    for (int r = 0; r < rows; r++)
        memcpy(to + r * to_step, from + r * from_step, (size_t)vectors * sizeof(vl));
}

/* What of a tile is left to do. Not a copy of it: the rows' pointers were written just now, one by
 * one, and reading them back in vectors would wait for that. */
struct view {
    const struct tile *t;
    const float *const *x;
    const uint32_t *from;
    const float *w;
    float *y;
};

/* Inputs begin..end-1 of a band, where some rows have begun and not ended and others not: few. */
TD_INLINE void band_edge(struct view p, float *sum, uint32_t begin, uint32_t end,
                         enum tile_kind kind, int rows, int panels) {
    enum { V = PANEL_VECTORS };
    const struct tile *t = p.t;
    for (uint32_t k = begin; k < end; k++)
        for (int i = 0; i < panels; i++) {
            vl lanes[V];
            load_panel(kind, p.w + k * t->w_step + (size_t)i * t->w_panel, lanes);
            for (int r = 0; r < rows; r++) {
                if (k - p.from[r] >= t->span) continue;
                for (int v = 0; v < V; v++) {
                    float *at = sum + r * SUM_STEP + (i * V + v) * TD_WIDTH;
                    store_lanes(at, fma_lanes(splat_lanes(p.x[r][k]), lanes[v], load_lanes(at)));
                }
            }
        }
}

TD_INLINE void tile_band(struct view p, enum tile_kind kind, int rows, int panels) {
    enum { V = PANEL_VECTORS };
    const struct tile *t = p.t;
    const float *x[TILE_ROWS];
    for (int r = 0; r < rows; r++)
        x[r] = p.x[r];
    tile_sums acc;
    float sum[TILE_ROWS * SUM_STEP];
    uint32_t all = p.from[rows - 1], end = p.from[0] + t->span; /* here all rows take part */
    end = end > all ? end : all;
    clear_sums(acc, rows, panels * V);
    if (all > p.from[0]) {
        store_sums(sum, SUM_STEP, acc, false, rows, panels * V);
        band_edge(p, sum, p.from[0], all, kind, rows, panels);
        UNROLL_ROWS
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < panels * V; v++)
                acc[r][v] = load_lanes(sum + r * SUM_STEP + v * TD_WIDTH);
        }
    }
    const float *w = p.w + all * t->w_step;
    for (size_t k = all; k < end; k++, w += t->w_step)
        tile_step(acc, x, k, false, w, t->w_panel, kind, rows, panels);
    if (all == p.from[0]) {
        store_sums(p.y, t->y_step, acc, t->add, rows, panels * V);
        return;
    }
    store_sums(sum, SUM_STEP, acc, false, rows, panels * V);
    band_edge(p, sum, end, all + t->span, kind, rows, panels);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < panels * V; v++) {
            float *y = p.y + r * t->y_step + v * TD_WIDTH;
            vl own = load_lanes(sum + r * SUM_STEP + v * TD_WIDTH);
            store_lanes(y, t->add ? load_lanes(y) + own : own);
        }
}

TD_INLINE void tile_fixed(struct view p, enum tile_kind kind, int rows, int panels) {
    enum { V = PANEL_VECTORS };
    const struct tile *t = p.t;
    if (kind == TILE_BAND || kind == TILE_BAND_BF16) {
        tile_band(p, kind, rows, panels);
        return;
    }
    const float *x[TILE_ROWS];
    for (int r = 0; r < rows; r++)
        x[r] = p.x[r];
    /* Several blocks are added up beside each other: rows of y lie pages apart. */
    float sum[TILE_ROWS * SUM_STEP];
    bool several = t->k > TD_BLOCK, add = t->add;
    float *y = several ? sum : p.y;
    size_t y_step = several ? SUM_STEP : t->y_step;
    if (several && add) move_sums(p.y, t->y_step, sum, SUM_STEP, rows, panels * V);
    for (uint32_t begin = 0; begin < t->k; begin += TD_BLOCK, add = true) {
        uint32_t end = t->k - begin < TD_BLOCK ? t->k : begin + TD_BLOCK;
        tile_sums acc;
        clear_sums(acc, rows, panels * V);
        const float *w = p.w + begin * t->w_step;
        if (kind == TILE_QUAD_BF16) { /* k is even */
            for (size_t k = begin; k < end; k += 2, w += 2 * t->w_step) {
                tile_step(acc, x, k, false, w, t->w_panel, kind, rows, panels);
                /* The pairs are read again: kept, they would push sums out of registers. */
                __asm__ volatile("" : : : "memory");
                tile_step(acc, x, k + 1, true, w + t->w_step, t->w_panel, kind, rows, panels);
            }
        } else {
            for (size_t k = begin; k < end; k++, w += t->w_step)
                tile_step(acc, x, k, false, w, t->w_panel, kind, rows, panels);
        }
        store_sums(y, y_step, acc, add, rows, panels * V);
    }
    if (several) move_sums(sum, SUM_STEP, p.y, t->y_step, rows, panels * V);
}

/* `fit` panels at a time while there are as many, then one at a time. */
TD_INLINE void tile_panels(struct view p, enum tile_kind kind, int rows, int fit, uint32_t panels) {
    for (; panels >= (uint32_t)fit; panels -= (uint32_t)fit) {
        tile_fixed(p, kind, rows, fit);
        p.w += (size_t)fit * p.t->w_panel;
        p.y += fit * TD_PANEL;
    }
    for (; fit > 1 && panels > 0; panels--) {
        tile_fixed(p, kind, rows, 1);
        p.w += p.t->w_panel;
        p.y += TD_PANEL;
    }
}

TD_INLINE void tile_rows(const struct tile *t, enum tile_kind kind, uint32_t rows,
                         uint32_t panels) {
    const bool wide = TD_WIDTH == 16;
    const uint32_t most = kind == TILE_QUAD_BF16 ? TILE_ROWS_PAIRS : TILE_ROWS;
    struct view p = {t, t->x, t->from, t->w, t->y};
    while (rows > 0) {
        uint32_t n = rows >= most        ? most
                     : wide && rows >= 8 ? 8
                     : rows >= 4         ? 4
                     : rows >= 2         ? 2
                                         : 1;
        if (n == most)
            tile_panels(p, kind, most, wide ? 2 : 1, panels);
        else if (wide && n == 8)
            tile_panels(p, kind, 8, 2, panels);
        else if (n == 4)
            tile_panels(p, kind, 4, wide ? 4 : 1, panels);
        else if (n == 2)
            tile_panels(p, kind, 2, wide ? 8 : 2, panels);
        else
            tile_panels(p, kind, 1, wide ? 8 : 4, panels);
        rows -= n;
        p.x += n;
        p.from += n;
        p.y += n * t->y_step;
    }
}

void tile_run(const struct tile *t, enum tile_kind kind, uint32_t rows, uint32_t panels) {
    switch (kind) {
    case TILE_FP32:
        tile_rows(t, TILE_FP32, rows, panels);
        break;
    case TILE_BF16:
        tile_rows(t, TILE_BF16, rows, panels);
        break;
    case TILE_QUAD:
        tile_rows(t, TILE_QUAD, rows, panels);
        break;
    case TILE_QUAD_BF16:
        tile_rows(t, TILE_QUAD_BF16, rows, panels);
        break;
    case TILE_BAND:
        tile_rows(t, TILE_BAND, rows, panels);
        break;
    case TILE_BAND_BF16:
        tile_rows(t, TILE_BAND_BF16, rows, panels);
        break;
    }
}

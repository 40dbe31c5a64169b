/* See random.h. */
#include "kernels/model/random.h"

#include <assert.h>
#include <math.h>

#include "kernels/model/file.h"

/* Mean squares of the codes: of +-2^-3 .. 1.875; of e2m1; of 0.5 .. 1.875. */
#define E4M3_SQUARE 0.7133
#define E2M1_SQUARE 8.5625
#define E4M3_SCALE_SQUARE 1.3428

/* The greatest power of two, as e8m0, that leaves products of `cols` such inputs no greater. */
static uint32_t power_for(uint32_t cols, double square) {
    uint32_t e = 127;
    for (double sum = square * cols; sum > 1.0; sum /= 4.0)
        e--;
    return e;
}

struct td_random td_random_of(const struct td_weight *w, bool scale) {
    struct td_random r = {.key = td_random_bits(w->random, scale)};
    r.center = w->random_kind == TD_RANDOM_ONE ? 1.0f : 0.0f;
    r.spread = w->random_kind == TD_RANDOM_MATRIX ? sqrtf(3.0f / (float)w->cols)
               : w->random_kind == TD_RANDOM_ONE  ? 0.5f
                                                  : 0x1p-4f;
    switch (w->format) {
    case TD_W_NONE:
        assert(!"bytes of an absent weight");
        break;
    case TD_W_F32:
        r.form = TD_RANDOM_F32;
        break;
    case TD_W_BF16:
        r.form = TD_RANDOM_BF16;
        break;
    case TD_W_FP8_BLOCK:
        r.form = scale ? TD_RANDOM_E8M0 : TD_RANDOM_E4M3;
        r.base = power_for(w->cols, E4M3_SQUARE);
        break;
    case TD_W_FP4:
        r.form = scale ? TD_RANDOM_E8M0 : TD_RANDOM_E2M1;
        r.base = power_for(w->cols, E2M1_SQUARE);
        break;
    case TD_W_NVFP4:
        r.form = scale ? TD_RANDOM_E4M3_SCALE : TD_RANDOM_E2M1;
        break;
    }
    return r;
}

void td_random_bytes(const struct td_random *r, size_t from, size_t n, void *to) {
    uint8_t *at = to;
    uint64_t word = 0;
    for (size_t i = from; i < from + n; i++) {
        if (i == from || i % 8 == 0) word = td_random_word(r, i / 8);
        *at++ = (uint8_t)(word >> i % 8 * 8);
    }
}

static bool ends(const char *s, const char *with) {
    size_t n = strlen(s), m = strlen(with);
    return n >= m && strcmp(s + n - m, with) == 0;
}

static uint64_t key_of(uint64_t seed, const char *name) {
    uint64_t h = td_hash_more(TD_HASH_START, name, strlen(name));
    uint64_t key = td_random_bits(h, seed);
    return key ? key : 1;
}

void td_random_weight(uint64_t seed, const char *name, struct td_weight *w) {
    w->random = key_of(seed, name);
    w->random_kind = ends(name, "norm.weight") || ends(name, "_scale") ? TD_RANDOM_ONE
                     : w->rows == 1 || ends(name, ".ape")              ? TD_RANDOM_ZERO
                                                                       : TD_RANDOM_MATRIX;
    if (w->format != TD_W_NVFP4) return;
    w->scale2 = (float)(1.0 / sqrt(E2M1_SQUARE * E4M3_SCALE_SQUARE * w->cols));
    w->input_scale = 4.0f / (TD_E2M1_MAX * TD_E4M3_MAX);
}

void td_random_ids(uint64_t seed, const char *name, uint32_t vocab, uint32_t k, uint32_t experts,
                   int64_t *ids) {
    uint64_t key = key_of(seed, name);
    for (uint32_t t = 0; t < vocab; t++) {
        /* Steps of less than experts / k never meet. */
        uint64_t z = td_random_bits(key, t), step = 1 + (z >> 32) % (experts / k);
        for (uint32_t j = 0; j < k; j++)
            *ids++ = (int64_t)(((z & 0xffffffffu) + j * step) % experts);
    }
}

/* Weights that are nowhere stored: every byte of a tensor is a pure function of a key and its
 * place, so any device makes the same ones, and a model needs no more than its config.json. For
 * measurements and tests of shapes: activations stay finite, what the model says means nothing.
 *
 * A tensor's bytes are words of 8, each from 64 random bits. Matrices have a standard deviation of
 * about 1 / sqrt(inputs), so that products keep the size of their input. */
#ifndef TD_KERNELS_MODEL_RANDOM_H
#define TD_KERNELS_MODEL_RANDOM_H

#include <stdbool.h>

#include "common/base/hd.h"
#include "kernels/model/numbers.h"
#include "kernels/model/weight.h"

enum td_random_form {
    TD_RANDOM_F32,        /* 2 a word: center + spread * uniform in [-1, 1) of 24 bits */
    TD_RANDOM_BF16,       /* 4 a word: the same of 16 bits, rounded */
    TD_RANDOM_E4M3,       /* +-2^-3 .. 1.875, uniform over codes */
    TD_RANDOM_E2M1,       /* pairs, uniform over codes */
    TD_RANDOM_E8M0,       /* 2^(base - 127) or half of it */
    TD_RANDOM_E4M3_SCALE, /* 0.5 .. 1.875, uniform over codes */
};

/* The bytes of a weight's data or of its scales. */
struct td_random {
    uint64_t key;
    enum td_random_form form;
    float center, spread;
    uint32_t base;
};

/* Value i of a sequence: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
 * generators", 2014). */
TD_HD static inline uint64_t td_random_bits(uint64_t key, uint64_t i) {
    uint64_t z = key + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Bytes 8 i .. 8 i + 7 of a tensor, the first one lowest. */
TD_HD static inline uint64_t td_random_word(const struct td_random *r, uint64_t i) {
    const uint64_t each = 0x0101010101010101u;
    uint64_t z = td_random_bits(r->key, i), word = 0;
    switch (r->form) {
    case TD_RANDOM_F32:
        for (int k = 0; k < 2; k++) {
            float u = (float)((int32_t)(uint32_t)(z >> 32 * k) >> 8) * 0x1p-23f;
            float v = r->spread * u;
            word |= (uint64_t)td_f32_bits(r->center + v) << 32 * k;
        }
        return word;
    case TD_RANDOM_BF16:
        for (int k = 0; k < 4; k++) {
            float u = (float)(int16_t)(uint16_t)(z >> 16 * k) * 0x1p-15f;
            float v = r->spread * u;
            word |= (uint64_t)td_f32_to_bf16(r->center + v) << 16 * k;
        }
        return word;
    case TD_RANDOM_E4M3:
        return (z & 0x9f * each) + 0x20 * each;
    case TD_RANDOM_E2M1:
        return z;
    case TD_RANDOM_E8M0:
        return r->base * each - (z & each);
    case TD_RANDOM_E4M3_SCALE:
        break;
    }
    return (z & 0x0f * each) | 0x30 * each;
}

/* Of w->data, or of w->scale; w->random is not 0. */
struct td_random td_random_of(const struct td_weight *w, bool scale);
/* Bytes from..from+n-1 of the tensor. */
void td_random_bytes(const struct td_random *r, size_t from, size_t n, void *to);

/* What a tensor of this official name is filled with: fills in the key, and for NVFP4 the factor
 * and the input scale, which are fit for inputs of magnitude 4 (see the checkpoint's format, s.7).
 */
void td_random_weight(uint64_t seed, const char *name, struct td_weight *w);
/* `k` different experts for every token: ids [vocab, k], below `experts` >= k. */
void td_random_ids(uint64_t seed, const char *name, uint32_t vocab, uint32_t k, uint32_t experts,
                   int64_t *ids);

#endif

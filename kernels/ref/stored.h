/* KV rows and indexer keys between fp32 and the form they are stored in.
 *
 * FP8 rows: values 0..447 as e4m3 with a power-of-two scale per 64 (kernels/ref/quant.h), stored as
 * e8m0; 448..511 as bf16. A row that went through the same rounding before is stored without loss.
 * FP8 keys: 128 e4m3 bytes, then one fp32 scale = max|v| / 448 (1 for a key of zeros, so that
 * reading back never divides or multiplies by nothing); a value reads as e4m3 * scale.
 * FP4 keys: 64 bytes of e2m1 pairs, then 4 e8m0 scales; lossless for keys that went through sim4.
 */
#ifndef TD_KERNELS_REF_STORED_H
#define TD_KERNELS_REF_STORED_H

#include "common/kv/layout.h"
#include "kernels/model/numbers.h"
#include "kernels/ref/quant.h"

static inline void narrow(const float *v, uint32_t n, uint16_t *to) {
    for (uint32_t i = 0; i < n; i++)
        to[i] = td_f32_to_bf16(v[i]);
}

static inline void widen(const uint16_t *from, uint32_t n, float *v) {
    for (uint32_t i = 0; i < n; i++)
        v[i] = td_bf16_to_f32(from[i]);
}

/* The e8m0 byte of a power of two from 2^-126 on, or of a NaN. */
static inline uint8_t e8m0_byte(float s) {
    return (uint8_t)((td_f32_bits(s) >> 23) & 0xffu);
}

static inline void row_encode_fp8(const float *v, struct td_kv_row to) {
    uint8_t *values = to.values;
    for (uint32_t g = 0; g < TD_KV_FP8_ROW_DIM / QUANT_SIM8; g++) {
        const float *x = v + g * QUANT_SIM8;
        float s = fp8_scale(max_abs(x, QUANT_SIM8)), inverse = 1.0f / s;
        to.scales[g] = e8m0_byte(s);
        for (uint32_t i = 0; i < QUANT_SIM8; i++)
            values[g * QUANT_SIM8 + i] = td_f32_to_e4m3(x[i] * inverse);
    }
    to.scales[TD_KV_FP8_ROW_SCALES - 1] = 0;
    narrow(v + TD_KV_FP8_ROW_DIM, TD_KV_ROW_DIM - TD_KV_FP8_ROW_DIM,
           (uint16_t *)(void *)(values + TD_KV_FP8_ROW_DIM));
}

static inline void row_decode_fp8(struct td_kv_row from, float *v) {
    const uint8_t *values = from.values;
    for (uint32_t g = 0; g < TD_KV_FP8_ROW_DIM / QUANT_SIM8; g++) {
        float s = td_e8m0_to_f32(from.scales[g]);
        for (uint32_t i = g * QUANT_SIM8; i < (g + 1) * QUANT_SIM8; i++)
            v[i] = td_e4m3_to_f32(values[i]) * s;
    }
    widen((const uint16_t *)(const void *)(values + TD_KV_FP8_ROW_DIM),
          TD_KV_ROW_DIM - TD_KV_FP8_ROW_DIM, v + TD_KV_FP8_ROW_DIM);
}

static inline void row_encode(const float *v, enum td_kv_row_dtype type, struct td_kv_row to) {
    switch (type) {
    case TD_KV_ROW_FP32:
        memcpy(to.values, v, TD_KV_ROW_DIM * sizeof *v);
        break;
    case TD_KV_ROW_FP8:
        row_encode_fp8(v, to);
        break;
    default:
        narrow(v, TD_KV_ROW_DIM, to.values);
        break;
    }
}

static inline void row_decode(struct td_kv_row from, enum td_kv_row_dtype type, float *v) {
    switch (type) {
    case TD_KV_ROW_FP32:
        memcpy(v, from.values, TD_KV_ROW_DIM * sizeof *v);
        break;
    case TD_KV_ROW_FP8:
        row_decode_fp8(from, v);
        break;
    default:
        widen(from.values, TD_KV_ROW_DIM, v);
        break;
    }
}

static inline void key_encode_fp8(const float *v, uint8_t *to) {
    float max = 0.0f, scale;
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++)
        max = fabsf(v[i]) > max ? fabsf(v[i]) : max;
    scale = max / TD_E4M3_MAX;
    if (scale == 0.0f) scale = 1.0f;
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++)
        to[i] = td_f32_to_e4m3(v[i] / scale);
    memcpy(to + TD_KV_KEY_DIM, &scale, sizeof scale);
}

static inline void key_decode_fp8(const uint8_t *from, float *v) {
    float scale;
    memcpy(&scale, from + TD_KV_KEY_DIM, sizeof scale);
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i++)
        v[i] = td_e4m3_to_f32(from[i]) * scale;
}

static inline void key_encode_fp4(const float *v, uint8_t *to) {
    for (uint32_t g = 0; g < TD_KV_KEY_DIM / QUANT_SIM4; g++) {
        const float *x = v + g * QUANT_SIM4;
        float s = fp4_group_scale(x), inverse = 1.0f / s;
        to[TD_KV_KEY_DIM / 2 + g] = e8m0_byte(s);
        for (uint32_t i = 0; i < QUANT_SIM4; i += 2)
            to[(g * QUANT_SIM4 + i) / 2] =
                (uint8_t)(td_f32_to_e2m1(x[i] * inverse) | td_f32_to_e2m1(x[i + 1] * inverse) << 4);
    }
}

static inline void key_decode_fp4(const uint8_t *from, float *v) {
    for (uint32_t i = 0; i < TD_KV_KEY_DIM; i += 2) {
        float s = td_e8m0_to_f32(from[TD_KV_KEY_DIM / 2 + i / QUANT_SIM4]);
        v[i] = td_e2m1_to_f32(from[i / 2] & 15u) * s;
        v[i + 1] = td_e2m1_to_f32(from[i / 2] >> 4) * s;
    }
}

static inline void key_encode(const float *v, enum td_kv_key_dtype type, void *to) {
    switch (type) {
    case TD_KV_KEY_FP32:
        memcpy(to, v, TD_KV_KEY_DIM * sizeof *v);
        break;
    case TD_KV_KEY_FP8:
        key_encode_fp8(v, to);
        break;
    case TD_KV_KEY_FP4:
        key_encode_fp4(v, to);
        break;
    default:
        narrow(v, TD_KV_KEY_DIM, to);
        break;
    }
}

static inline void key_decode(const void *from, enum td_kv_key_dtype type, float *v) {
    switch (type) {
    case TD_KV_KEY_FP32:
        memcpy(v, from, TD_KV_KEY_DIM * sizeof *v);
        break;
    case TD_KV_KEY_FP8:
        key_decode_fp8(from, v);
        break;
    case TD_KV_KEY_FP4:
        key_decode_fp4(from, v);
        break;
    default:
        widen(from, TD_KV_KEY_DIM, v);
        break;
    }
}

#endif

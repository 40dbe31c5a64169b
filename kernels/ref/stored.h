/* KV rows and indexer keys between fp32 and the form they are stored in.
 *
 * FP8 keys: 128 e4m3 bytes, then one fp32 scale = max|v| / 448 (1 for a key of zeros, so that
 * reading back never divides or multiplies by nothing); a value reads as e4m3 * scale. */
#ifndef TD_KERNELS_REF_STORED_H
#define TD_KERNELS_REF_STORED_H

#include "common/kv/layout.h"
#include "kernels/model/numbers.h"
#include "kernels/ref/vec.h"

static inline void narrow(const float *v, uint32_t n, uint16_t *to) {
    for (uint32_t i = 0; i < n; i++)
        to[i] = td_f32_to_bf16(v[i]);
}

static inline void widen(const uint16_t *from, uint32_t n, float *v) {
    for (uint32_t i = 0; i < n; i += 8)
        store8(v + i, widen8(from + i));
}

static inline void row_encode(const float *v, enum td_kv_row_dtype type, void *to) {
    if (type == TD_KV_ROW_FP32)
        memcpy(to, v, TD_KV_ROW_DIM * sizeof *v);
    else
        narrow(v, TD_KV_ROW_DIM, to);
}

static inline void row_decode(const void *from, enum td_kv_row_dtype type, float *v) {
    if (type == TD_KV_ROW_FP32)
        memcpy(v, from, TD_KV_ROW_DIM * sizeof *v);
    else
        widen(from, TD_KV_ROW_DIM, v);
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

static inline void key_encode(const float *v, enum td_kv_key_dtype type, void *to) {
    switch (type) {
    case TD_KV_KEY_FP32:
        memcpy(to, v, TD_KV_KEY_DIM * sizeof *v);
        break;
    case TD_KV_KEY_FP8:
        key_encode_fp8(v, to);
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
    default:
        widen(from, TD_KV_KEY_DIM, v);
        break;
    }
}

#endif

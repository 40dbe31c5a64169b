/* Reading KV rows and indexer keys eight values at a time; writing them is kernels/ref/stored.h. */
#ifndef TD_KERNELS_CPU_STORED_H
#define TD_KERNELS_CPU_STORED_H

#include "kernels/cpu/quant.h"
#include "kernels/ref/stored.h"

/* Eight bf16 as fp32. */
TD_INLINE v8 widen8(const uint16_t *p) {
    h8 h;
    memcpy(&h, p, sizeof h);
    return (v8)(__builtin_convertvector(h, u8) << 16);
}

static inline void widen_row8(const uint16_t *from, uint32_t n, float *v) {
    for (uint32_t i = 0; i < n; i += 8)
        store8(v + i, widen8(from + i));
}

/* Eight e4m3 as fp32. */
TD_INLINE v8 e4m3_widen8(const uint8_t *p) {
    typedef uint8_t b8 __attribute__((vector_size(8)));
    b8 b;
    memcpy(&b, p, sizeof b);
    u8 u = __builtin_convertvector(b, u8);
    u8 sign = (u & 0x80u) << 24, mag = u & 0x7fu;
    v8 fine = __builtin_convertvector((i8)mag, v8) * splat8(0x1p-9f);
    v8 normal = (v8)((mag << 20) + ((127u - 7u) << 23));
    v8 r = select8(mag < 8u, fine, normal);
    r = select8(mag == 0x7fu, splat8(td_bits_f32(0x7fc00000u)), r);
    return (v8)((u8)r | sign);
}

static inline void row_decode8(struct td_kv_row from, enum td_kv_row_dtype type, float *v) {
    const uint8_t *values = from.values;
    switch (type) {
    case TD_KV_ROW_FP8:
        for (uint32_t g = 0; g < TD_KV_FP8_ROW_DIM / QUANT_SIM8; g++) {
            v8 s = splat8(td_e8m0_to_f32(from.scales[g]));
            for (uint32_t i = g * QUANT_SIM8; i < (g + 1) * QUANT_SIM8; i += 8)
                store8(v + i, e4m3_widen8(values + i) * s);
        }
        widen_row8((const uint16_t *)(const void *)(values + TD_KV_FP8_ROW_DIM),
                   TD_KV_ROW_DIM - TD_KV_FP8_ROW_DIM, v + TD_KV_FP8_ROW_DIM);
        break;
    case TD_KV_ROW_BF16:
        widen_row8(from.values, TD_KV_ROW_DIM, v);
        break;
    default:
        row_decode(from, type, v);
        break;
    }
}

static inline void key_decode8(const void *from, enum td_kv_key_dtype type, float *v) {
    if (type == TD_KV_KEY_BF16)
        widen_row8(from, TD_KV_KEY_DIM, v);
    else
        key_decode(from, type, v);
}

#endif

/* The small number formats of checkpoints and KV rows, one value at a time, exact.
 *
 * These are the definitions every packed or vector form is compared with. Rounding is to nearest,
 * ties to even, independent of the floating-point environment except that it must be the default
 * rounding mode. Formats: bf16; e4m3 ("fn": no infinities, 0x7f and 0xff are NaN); e2m1 (FP4);
 * e8m0 (a power of two, 2^(byte - 127), 255 is NaN). */
#ifndef TD_KERNELS_MODEL_NUMBERS_H
#define TD_KERNELS_MODEL_NUMBERS_H

#include <stdint.h>
#include <string.h>

#include "common/base/hd.h"

#define TD_E4M3_MAX 448.0f
#define TD_E2M1_MAX 6.0f

TD_HD static inline uint32_t td_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

TD_HD static inline float td_bits_f32(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

TD_HD static inline float td_bf16_to_f32(uint16_t h) {
    return td_bits_f32((uint32_t)h << 16);
}

/* Values beyond the largest bf16 round to infinity; a NaN stays a NaN (made quiet). */
TD_HD static inline uint16_t td_f32_to_bf16(float x) {
    uint32_t u = td_f32_bits(x);
    uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)(nan ? ((u >> 16) | 0x40u) : rounded);
}

TD_HD static inline float td_e4m3_to_f32(uint8_t b) {
    uint32_t sign = (uint32_t)(b & 0x80u) << 24, mag = b & 0x7fu;
    if (mag == 0x7fu) return td_bits_f32(sign | 0x7fc00000u);
    if (mag >= 8u) return td_bits_f32(sign | ((mag << 20) + ((127u - 7u) << 23)));
    float sub = (float)mag * 0x1p-9f;
    return sign ? -sub : sub;
}

/* Saturates at +-448 (infinities too); NaN gives the NaN code with its sign. */
TD_HD static inline uint8_t td_f32_to_e4m3(float x) {
    uint32_t u = td_f32_bits(x), mag = u & 0x7fffffffu;
    uint8_t sign = (uint8_t)((u >> 24) & 0x80u);
    if (mag > 0x7f800000u) return (uint8_t)(sign | 0x7fu);
    if (mag >= 0x43e00000u) return (uint8_t)(sign | 0x7eu); /* 448 and above */
    if (mag < 0x3c800000u) {
        /* Below 2^-6 the grid is 2^-9: adding 2^23 leaves the rounded count in the low bits. */
        uint32_t count = td_f32_bits(td_bits_f32(mag) * 0x1p9f + 0x1p23f) & 0xfu;
        return (uint8_t)(sign | count);
    }
    mag += 0x7ffffu + ((mag >> 20) & 1u);
    return (uint8_t)(sign | ((mag >> 20) - ((127u - 7u) << 3)));
}

/* `n`: low four bits; bit 3 is the sign, the rest indexes 0 .5 1 1.5 2 3 4 6. */
TD_HD static inline float td_e2m1_to_f32(uint8_t n) {
    static const float grid[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return grid[n & 15u];
}

/* Saturates at +-6. The format has no NaN: a NaN gives +-6, so callers check before. */
TD_HD static inline uint8_t td_f32_to_e2m1(float x) {
    uint32_t u = td_f32_bits(x);
    float a = td_bits_f32(u & 0x7fffffffu);
    uint8_t code;
    /* Midpoints; a tie goes to the neighbour with the even code. */
    if (a <= 0.25f)
        code = 0;
    else if (a < 0.75f)
        code = 1;
    else if (a <= 1.25f)
        code = 2;
    else if (a < 1.75f)
        code = 3;
    else if (a <= 2.5f)
        code = 4;
    else if (a < 3.5f)
        code = 5;
    else if (a <= 5.0f)
        code = 6;
    else
        code = 7;
    return (uint8_t)(code | ((u >> 28) & 8u));
}

/* Byte 0 is the subnormal 2^-127. */
TD_HD static inline float td_e8m0_to_f32(uint8_t b) {
    if (b == 0) return td_bits_f32(0x00400000u);
    if (b == 255) return td_bits_f32(0x7fc00000u);
    return td_bits_f32((uint32_t)b << 23);
}

#endif

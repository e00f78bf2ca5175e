// SPDX-License-Identifier: BSD-3-Clause
// Device codec of symmetric int8 (formats/int8.py is its definition): scale = max|x| / 127 in fp32, 1 for a group of
// zeros; code = round-half-even(x / scale) in [-127, 127]. Divisions are IEEE's, not products with an inverse, so that
// codes equal the reference's bit for bit.
#pragma once
#include "common/device.cuh"
#include "format_layout.h"

static_assert(layout_int8::values == 1 && layout_int8::bytes == 1, "formats/layout.py says otherwise");
constexpr float INT8_CODE_MAX = 127.f;

#ifdef DEVICE_HALF
// Larger of two magnitudes, NaN above infinity above numbers: the order of their bits. fmaxf would drop a NaN.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    return __int_as_float(max(__float_as_int(a), __float_as_int(b)));
}

// Over `lanes` neighbouring lanes, a power of two; every one of them gets it.
__device__ __forceinline__ float max_magnitude_of_lanes(float v, int lanes) {
    for (int s = lanes / 2; s; s >>= 1) v = max_magnitude(v, __shfl_xor_sync(FULL_WARP, v, s));
    return v;
}

__device__ __forceinline__ float int8_scale(float amax) {
    const float scale = __fdiv_rn(amax, INT8_CODE_MAX);
    return scale == 0.f ? 1.f : scale;
}

// 0 where x / scale is NaN: the scale is not finite then, and carries the news.
__device__ __forceinline__ int int8_code(float x, float scale) {
    const float code = rintf(__fdiv_rn(x, scale));
    return code == code ? (int)fminf(fmaxf(code, -INT8_CODE_MAX), INT8_CODE_MAX) : 0;
}

// A sum of products that starts at INT_AS_FLOAT is the float 1.5 * 2^23 + sum, as long as |sum| < 2^22: 260 products of
// codes. One full-rate instruction makes it a number, where a conversion runs at a quarter of the rate.
constexpr int INT_AS_FLOAT = 0x4B400000;
__device__ __forceinline__ float float_of_int(int sum) { return __int_as_float(sum) - 12582912.f; }

// Four codes in a word, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack_codes(int a, int b, int c, int d) {
    return ((uint32_t)a & 255u) | ((uint32_t)b & 255u) << 8 | ((uint32_t)c & 255u) << 16 | (uint32_t)d << 24;
}
#endif

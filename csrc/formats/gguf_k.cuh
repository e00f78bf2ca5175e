// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of GGUF's K types, blocks of 256 values; formats/gguf_k.py is their definition.
#pragma once
#include "formats/blocks.cuh"

#ifdef DEVICE_HALF
// Scale and minimum of a unit from a block's 16 bytes: half d, half dmin, then 6-bit numbers. Of units 0 to 3 they are
// the low bits of a byte; those of units 4 to 7 are nibbles of the last word, and two bits that are left over there.
__device__ __forceinline__ void scale_and_minimum(const uint4& header, uint32_t unit, float& scale, float& minimum) {
    const uint32_t shift = 8 * (unit & 3);
    const uint32_t a = header.y >> shift, b = header.z >> shift, c = header.w >> shift;
    const bool upper = unit & 4;
    const uint32_t s = upper ? (c & 15) | (a >> 2 & 48) : a & 63, m = upper ? (c >> 4 & 15) | (b >> 2 & 48) : b & 63;
    scale = half_value(header.x) * (float)s;
    minimum = -half_value(header.x >> 16) * (float)m;
}

struct format_q4_k : Blocks<layout_q4_k> {
    static constexpr int SCALES = 1, ZERO = 0;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint4 codes, header;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint4>(of_block<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        scale_and_minimum(raw.header, unit, u.scale[0], u.minimum[0]);
    }
};

struct format_q6_k : Blocks<layout_q6_k> {
    static constexpr int SCALES = 2, ZERO = 32;
    struct Raw {
        uint4 low;
        uint2 high;
        uint16_t scales, d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint2>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_unit<2>(p, unit)), load_as<uint16_t>(of_block<3>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.low, u.first, u.last);
        u.first = u.first | unpack2<4>(raw.high.x);
        u.last = u.last | unpack2<4>(raw.high.y);
        const float d = half_value(raw.d);
        u.scale[0] = d * (float)(int8_t)(raw.scales & 255);
        u.scale[1] = d * (float)(int8_t)(raw.scales >> 8);
    }
};
#endif

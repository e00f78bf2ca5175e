// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of 4-bit and 3-bit weights with scales, and zeros, apart; formats/int4.py and int3.py define them.
#pragma once
#include "formats/blocks.cuh"

#ifdef DEVICE_HALF
__device__ __forceinline__ float int4_scale(const Planes& p, uint32_t group) {
    return p.wide_scales ? ((const float*)p.at[1])[group] : half_value(((const uint16_t*)p.at[1])[group]);
}

// Codes with the even column in the low half of a byte.
__device__ __forceinline__ void unpack_pairs(uint32_t packed, uint32_t& first, uint32_t& second) {
    const uint32_t even = packed & 0x0F0F0F0Fu, odd = packed >> 4 & 0x0F0F0F0Fu;
    first = __byte_perm(even, odd, 0x5140);
    second = __byte_perm(even, odd, 0x7362);
}
__device__ __forceinline__ void unpack_pairs(const uint4& packed, uint4& first, uint4& last) {
    unpack_pairs(packed.x, first.x, first.y);
    unpack_pairs(packed.y, first.z, first.w);
    unpack_pairs(packed.z, last.x, last.y);
    unpack_pairs(packed.w, last.z, last.w);
}

struct format_int3 : Blocks<layout_int3> {
    static constexpr int SCALES = 1, ZERO = 4;
    struct Raw {
        uint32_t first, last, third;
        float scale;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        const uint8_t* at = of_unit<0>(p, unit);
        return {load_as<uint32_t>(at), load_as<uint32_t>(at + 4), load_as<uint32_t>(at + 8),
                int4_scale(p, unit >> p.group_units_log2)};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        u.first = unpack2<0>(raw.first) | unpack1<2, 0>(raw.third);
        u.last = unpack2<0>(raw.last) | unpack1<2, 4>(raw.third);
        u.scale[0] = raw.scale;
    }
};

struct format_int4 : Blocks<layout_int4> {
    static constexpr int SCALES = 1, ZERO = 8;
    struct Raw {
        uint4 codes;
        float scale;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), int4_scale(p, unit >> p.group_units_log2)};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack_pairs(raw.codes, u.first, u.last);
        u.scale[0] = raw.scale;
    }
};

struct format_int4_zero : Blocks<layout_int4_zero> {
    static constexpr int SCALES = 1, ZERO = 0;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint4 codes;
        float scale;
        uint8_t zero;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        const uint32_t group = unit >> p.group_units_log2;
        return {load_stream(of_unit<0>(p, unit)), int4_scale(p, group), p.at[2][group]};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack_pairs(raw.codes, u.first, u.last);
        u.scale[0] = raw.scale;
        u.minimum[0] = -raw.scale * (float)raw.zero;
    }
};
#endif

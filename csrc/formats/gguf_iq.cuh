// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of GGUF's IQ types with codebooks; formats/gguf_iq.py is their definition. An entry is 8 codes (IQ1,
// IQ2) or 4 (IQ3); tables of 1 to 16 KB are looked up through L1.
#pragma once
#include "formats/blocks.cuh"

#ifdef DEVICE_HALF
__device__ __forceinline__ uint2 entry_of_8(const Planes& p, uint32_t number) {
    return ((const uint2*)p.codebook)[number];
}
__device__ __forceinline__ uint32_t entry_of_4(const Planes& p, uint32_t number) {
    return ((const uint32_t*)p.codebook)[number];
}

// Bytes with the sign changed where the byte of `negative` is 1. No carry crosses, since no byte is 0.
__device__ __forceinline__ uint32_t with_signs(uint32_t codes, uint32_t negative) {
    return (codes ^ negative * 255u) + negative;
}
// Four bits, one a byte.
__device__ __forceinline__ uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }
// The signs of eight values from seven: their number is even.
__device__ __forceinline__ uint32_t paired_signs(uint32_t seven) { return seven | (uint32_t)(__popc(seven) & 1) << 7; }
__device__ __forceinline__ uint2 with_paired_signs(const uint2& codes, uint32_t seven) {
    const uint32_t bits = paired_signs(seven & 127);
    return make_uint2(with_signs(codes.x, spread(bits)), with_signs(codes.y, spread(bits >> 4)));
}
// Signs in a plane of formats/bits.py, from word FIRST on.
template <int FIRST>
__device__ __forceinline__ uint4 with_plane_signs(const uint4& codes, uint32_t signs) {
    const uint4 negative = unpack1<0, FIRST>(signs);
    return make_uint4(with_signs(codes.x, negative.x), with_signs(codes.y, negative.y), with_signs(codes.z, negative.z),
                      with_signs(codes.w, negative.w));
}
__device__ __forceinline__ uint4 joined(const uint2& a, const uint2& b) { return make_uint4(a.x, a.y, b.x, b.y); }

struct format_iq2_xxs : Blocks<layout_iq2_xxs> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint2 codes;  // four numbers; four times seven signs, scale
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint16_t>(of_block<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        const auto eight = [&](int i) {
            return with_paired_signs(entry_of_8(p, raw.codes.x >> 8 * i & 255), raw.codes.y >> 7 * i);
        };
        u.first = joined(eight(0), eight(1)), u.last = joined(eight(2), eight(3));
        u.scale[0] = half_value(raw.d) * (0.5f + (float)(raw.codes.y >> 28)) * 0.25f;
    }
};

// Scales of 16 values each from a byte's nibbles, as IQ2_XS and IQ2_S have them.
__device__ __forceinline__ void iq2_scales(float d, uint32_t scales, float (&scale)[2]) {
    scale[0] = d * (0.5f + (float)(scales & 15)) * 0.25f;
    scale[1] = d * (0.5f + (float)(scales >> 4)) * 0.25f;
}

struct format_iq2_xs : Blocks<layout_iq2_xs> {
    static constexpr int SCALES = 2, ZERO = 0;
    struct Raw {
        uint2 codes;  // four times nine bits of number, seven signs
        uint16_t d;
        uint8_t scales;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint16_t>(of_block<2>(p, unit)),
                load_as<uint8_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        const auto eight = [&](uint32_t code) { return with_paired_signs(entry_of_8(p, code & 511), code >> 9); };
        u.first = joined(eight(raw.codes.x), eight(raw.codes.x >> 16));
        u.last = joined(eight(raw.codes.y), eight(raw.codes.y >> 16));
        iq2_scales(half_value(raw.d), raw.scales, u.scale);
    }
};

struct format_iq2_s : Blocks<layout_iq2_s> {
    static constexpr int SCALES = 2, ZERO = 0;
    struct Raw {
        uint32_t codes, signs;
        uint16_t d;
        uint8_t high, scales;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint32_t>(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_block<4>(p, unit)), load_as<uint8_t>(of_unit<2>(p, unit)),
                load_as<uint8_t>(of_unit<3>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        const auto eight = [&](int i) {
            return entry_of_8(p, (raw.codes >> 8 * i & 255) | ((uint32_t)raw.high >> 2 * i & 3) << 8);
        };
        u.first = with_plane_signs<0>(joined(eight(0), eight(1)), raw.signs);
        u.last = with_plane_signs<4>(joined(eight(2), eight(3)), raw.signs);
        iq2_scales(half_value(raw.d), raw.scales, u.scale);
    }
};

struct format_iq3_xxs : Blocks<layout_iq3_xxs> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint2 codes;
        uint32_t rest;  // four times seven signs, scale
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_block<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        const auto eight = [&](uint32_t codes, int i) {
            const uint2 entries = make_uint2(entry_of_4(p, codes & 255), entry_of_4(p, codes >> 8 & 255));
            return with_paired_signs(entries, raw.rest >> 7 * i);
        };
        u.first = joined(eight(raw.codes.x, 0), eight(raw.codes.x >> 16, 1));
        u.last = joined(eight(raw.codes.y, 2), eight(raw.codes.y >> 16, 3));
        u.scale[0] = half_value(raw.d) * (0.5f + (float)(raw.rest >> 28)) * 0.5f;
    }
};

struct format_iq3_s : Blocks<layout_iq3_s> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint2 codes;
        uint32_t signs;
        uint16_t d;
        uint8_t high, scales;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_block<4>(p, unit)), load_as<uint8_t>(of_unit<2>(p, unit)),
                load_as<uint8_t>(of_block<3>(p, unit) + (unit & 7) / 2)};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        const uint32_t high = raw.high;
        const auto four = [&](uint32_t codes, int i) {
            return entry_of_4(p, (codes >> 8 * (i & 3) & 255) | (high >> i & 1) << 8);
        };
        const auto sixteen = [&](uint32_t codes, int i) {
            return make_uint4(four(codes, i), four(codes, i + 1), four(codes, i + 2), four(codes, i + 3));
        };
        u.first = with_plane_signs<0>(sixteen(raw.codes.x, 0), raw.signs);
        u.last = with_plane_signs<4>(sixteen(raw.codes.y, 4), raw.signs);
        u.scale[0] = half_value(raw.d) * (float)(1 + 2 * ((uint32_t)raw.scales >> 4 * (unit & 1) & 15));
    }
};

// An entry of IQ1 shifted up or down by an eighth: entries are 8 * (value + 1), the zero is 9.
__device__ __forceinline__ uint2 shifted(const uint2& entry, bool up) {
    const uint32_t add = up ? 0x02020202u : 0;
    return make_uint2(entry.x + add, entry.y + add);
}

struct format_iq1_s : Blocks<layout_iq1_s> {
    static constexpr int SCALES = 1, ZERO = 9;
    struct Raw {
        uint32_t codes;
        uint16_t rest, d;  // four times three high bits, scale, shift
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint32_t>(of_unit<0>(p, unit)), load_as<uint16_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_block<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        const uint32_t rest = raw.rest;
        const auto eight = [&](int i) {
            return shifted(entry_of_8(p, (raw.codes >> 8 * i & 255) | (rest >> 3 * i & 7) << 8), rest < 0x8000u);
        };
        u.first = joined(eight(0), eight(1)), u.last = joined(eight(2), eight(3));
        u.scale[0] = half_value(raw.d) * (float)(2 * (rest >> 12 & 7) + 1) * 0.125f;
    }
};

struct format_iq1_m : Blocks<layout_iq1_m> {
    static constexpr int SCALES = 2, ZERO = 9;
    struct Raw {
        uint32_t codes;
        uint16_t rest;  // four times three high bits, shift
        uint2 scales;   // four words of four 3-bit scales, and a quarter of half d above them
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint32_t>(of_unit<0>(p, unit)), load_as<uint16_t>(of_unit<1>(p, unit)),
                load_as<uint2>(of_block<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes& p, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        const uint32_t rest = raw.rest, a = raw.scales.x, b = raw.scales.y;
        const auto eight = [&](int i) {
            const uint32_t high = rest >> 4 * i;
            return shifted(entry_of_8(p, (raw.codes >> 8 * i & 255) | (high & 7) << 8), !(high & 8));
        };
        u.first = joined(eight(0), eight(1)), u.last = joined(eight(2), eight(3));
        const float d = half_value((a >> 12 & 15) | (a >> 24 & 0xF0) | (b >> 4 & 0xF00) | (b >> 16 & 0xF000)) * 0.125f;
        const uint32_t scales = (unit & 4 ? b : a) >> (unit & 2 ? 16 : 0) >> (unit & 1 ? 6 : 0);
        u.scale[0] = d * (float)(2 * (scales & 7) + 1);
        u.scale[1] = d * (float)(2 * (scales >> 3 & 7) + 1);
    }
};
#endif

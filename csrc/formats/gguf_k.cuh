// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of GGUF's K types, blocks of 256 values; formats/gguf_k.py is their definition.
#pragma once
#include "formats/gguf_basic.cuh"

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
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        scale_and_minimum(raw.header, unit, u.scale[0], u.minimum[0]);
    }
};

struct format_q5_k : Blocks<layout_q5_k> {
    static constexpr int SCALES = 1, ZERO = 0;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint4 codes, header;
        uint32_t fifth;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint4>(of_block<2>(p, unit)),
                load_as<uint32_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.first = u.first | unpack1<4, 0>(raw.fifth);
        u.last = u.last | unpack1<4, 4>(raw.fifth);
        scale_and_minimum(raw.header, unit, u.scale[0], u.minimum[0]);
    }
};

struct format_q2_k : Blocks<layout_q2_k> {
    static constexpr int SCALES = 2, ZERO = 0;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint2 codes;
        uint32_t d;
        uint16_t scales;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint32_t>(of_block<2>(p, unit)),
                load_as<uint16_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        u.first = unpack2<0>(raw.codes.x);
        u.last = unpack2<0>(raw.codes.y);
        const float d = half_value(raw.d), dmin = half_value(raw.d >> 16);
        const uint32_t scales = raw.scales;
        u.scale[0] = d * (float)(scales & 15);
        u.scale[1] = d * (float)(scales >> 8 & 15);
        u.minimum[0] = -(dmin * (float)(scales >> 4 & 15));
        u.minimum[1] = -(dmin * (float)(scales >> 12));
    }
};

struct format_q3_k : Blocks<layout_q3_k> {
    static constexpr int SCALES = 2, ZERO = 4;
    struct Raw {
        uint2 low;
        uint32_t third, scales, high_scales;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        const uint8_t* scales =
            of_block<2>(p, unit);  // two nibbles a byte of units 0 to 3 and 4 to 7; then 2-bit fields
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(scales + 2 * (unit & 3)), load_as<uint16_t>(scales + 8 + 2 * (unit & 1)),
                load_as<uint16_t>(of_block<3>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        u.first = unpack2<0>(raw.low.x) | unpack1<2, 0>(raw.third);
        u.last = unpack2<0>(raw.low.y) | unpack1<2, 4>(raw.third);
        const uint32_t scales = (raw.scales >> (unit & 4) & 0x0F0Fu) | (raw.high_scales >> (unit & 6) & 0x0303u) << 4;
        const float d = half_value(raw.d);
        u.scale[0] = d * (float)((int)(scales & 255) - 32);
        u.scale[1] = d * (float)((int)(scales >> 8) - 32);
    }
};

struct format_iq4_xs : Blocks<layout_iq4_xs> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint4 codes;
        uint2 header;  // half d, 2 bits of each scale; 4 bits of each scale
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint2>(of_block<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        look_up(raw.codes, iq4_levels(), u.first, u.last);
        const uint32_t number = unit & 7;
        const uint32_t scale = (raw.header.y >> 4 * number & 15) | (raw.header.x >> (16 + 2 * number) & 3) << 4;
        u.scale[0] = half_value(raw.header.x) * (float)((int)scale - 32);
    }
};

// Digit number `digit` of each byte's five: a byte is a fraction of 256; times 3, the whole part is the next digit.
__device__ __forceinline__ uint32_t ternary_digits(uint32_t bytes, uint32_t power) {
    constexpr uint32_t mask = 0x00FF00FFu;
    const uint32_t even = (bytes & mask) * power & mask, odd = (bytes >> 8 & mask) * power & mask;
    return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
}
__device__ __forceinline__ uint4 ternary_digits(const uint4& v, uint32_t power) {
    return make_uint4(ternary_digits(v.x, power), ternary_digits(v.y, power), ternary_digits(v.z, power),
                      ternary_digits(v.w, power));
}

// Units 0 to 4 are the five digits of the first 32 bytes; the five digits of the next 16 are units 5, 6 and the first
// half of 7, whose last half are the four digits of the second plane.
struct format_tq1_0 : Blocks<layout_tq1_0> {
    static constexpr int SCALES = 1, ZERO = 1;
    struct Raw {
        uint4 first, last;
        uint32_t four;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        const uint8_t* at = of_block<0>(p, unit);
        const bool head = (unit & 7) < 5;
        return {load_as<uint4>(at + (head ? 0 : 32)), load_as<uint4>(at + (head ? 16 : 32)),
                load_as<uint32_t>(of_block<1>(p, unit)), load_as<uint16_t>(of_block<2>(p, unit))};
    }
    static __device__ __forceinline__ uint32_t power(uint32_t digit) {
        return digit == 0 ? 1 : digit == 1 ? 3 : digit == 2 ? 9 : digit == 3 ? 27 : 81;
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t unit, Unit<SCALES>& u) {
        const uint32_t number = unit & 7, half = 2 * (number - 5);
        const bool head = number < 5;
        u.first = ternary_digits(raw.first, power(head ? number : half));
        u.last = ternary_digits(raw.last, power(head ? number : half + 1));
        if (number == 7)
            u.last = make_uint4(ternary_digits(raw.four, 1), ternary_digits(raw.four, 3), ternary_digits(raw.four, 9),
                                ternary_digits(raw.four, 27));
        u.scale[0] = half_value(raw.d);
    }
};

struct format_tq2_0 : Blocks<layout_tq2_0> {
    static constexpr int SCALES = 1, ZERO = 1;
    struct Raw {
        uint2 codes;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_as<uint2>(of_unit<0>(p, unit)), load_as<uint16_t>(of_block<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        u.first = unpack2<0>(raw.codes.x);
        u.last = unpack2<0>(raw.codes.y);
        u.scale[0] = half_value(raw.d);
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
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.low, u.first, u.last);
        u.first = u.first | unpack2<4>(raw.high.x);
        u.last = u.last | unpack2<4>(raw.high.y);
        const float d = half_value(raw.d);
        u.scale[0] = d * (float)(int8_t)(raw.scales & 255);
        u.scale[1] = d * (float)(int8_t)(raw.scales >> 8);
    }
};
#endif

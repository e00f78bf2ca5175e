// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of GGUF types with blocks of 32 values; formats/gguf_basic.py is their definition.
#pragma once
#include "formats/blocks.cuh"

#ifdef DEVICE_HALF
struct format_q4_0 : Blocks<layout_q4_0> {
    static constexpr int SCALES = 1, ZERO = 8;
    struct Raw {
        uint4 codes;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint16_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.scale[0] = half_value(raw.d);
    }
};

struct format_q4_1 : Blocks<layout_q4_1> {
    static constexpr int SCALES = 1, ZERO = 0;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint4 codes;
        uint32_t dm;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.scale[0] = half_value(raw.dm);
        u.minimum[0] = half_value(raw.dm >> 16);
    }
};

struct format_q5_0 : Blocks<layout_q5_0> {
    static constexpr int SCALES = 1, ZERO = 16;
    struct Raw {
        uint4 codes;
        uint32_t fifth;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_unit<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.first = u.first | unpack1<4, 0>(raw.fifth);
        u.last = u.last | unpack1<4, 4>(raw.fifth);
        u.scale[0] = half_value(raw.d);
    }
};

struct format_q5_1 : Blocks<layout_q5_1> {
    static constexpr int SCALES = 1, ZERO = 0, FOUR_ROWS_BLOCKS = 1;
    static constexpr bool MINIMA = true;
    struct Raw {
        uint4 codes;
        uint32_t fifth, dm;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint32_t>(of_unit<1>(p, unit)),
                load_as<uint32_t>(of_unit<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.first = u.first | unpack1<4, 0>(raw.fifth);
        u.last = u.last | unpack1<4, 4>(raw.fifth);
        u.scale[0] = half_value(raw.dm);
        u.minimum[0] = half_value(raw.dm >> 16);
    }
};

// The levels that eight 4-bit codes of a word name: those in the low halves of its bytes, and in the high ones. A table
// is four words; __byte_perm looks up three bits of four codes at once.
struct Levels {
    uint32_t at[4];
};
__device__ __forceinline__ void look_up(uint32_t codes, const Levels& levels, uint32_t& first, uint32_t& last) {
    const uint32_t low = codes & 0x77777777u, upper = 0x32103210u | (codes & 0x88888888u) >> 1;
    const auto four = [&](uint32_t low, uint32_t upper) {
        return __byte_perm(__byte_perm(levels.at[0], levels.at[1], low), __byte_perm(levels.at[2], levels.at[3], low),
                           upper);
    };
    const uint32_t a = four(low, upper), b = four(low >> 16, upper >> 16);
    first = __byte_perm(a, b, 0x6420);
    last = __byte_perm(a, b, 0x7531);
}
__device__ __forceinline__ void look_up(const uint4& codes, const Levels& levels, uint4& first, uint4& last) {
    look_up(codes.x, levels, first.x, last.x);
    look_up(codes.y, levels, first.y, last.y);
    look_up(codes.z, levels, first.z, last.z);
    look_up(codes.w, levels, first.w, last.w);
}
__device__ __forceinline__ Levels iq4_levels() { return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}}; }
__device__ __forceinline__ Levels e2m1_doubled() { return {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}}; }

struct format_iq4_nl : Blocks<layout_iq4_nl> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint4 codes;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint16_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        look_up(raw.codes, iq4_levels(), u.first, u.last);
        u.scale[0] = half_value(raw.d);
    }
};

struct format_mxfp4 : Blocks<layout_mxfp4> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint4 codes;
        uint8_t exponent;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_as<uint8_t>(of_unit<1>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        look_up(raw.codes, e2m1_doubled(), u.first, u.last);
        const uint32_t e = raw.exponent;
        u.scale[0] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};

struct format_q8_0 : Blocks<layout_q8_0> {
    static constexpr int SCALES = 1, ZERO = 0;
    struct Raw {
        uint4 first, last;
        uint16_t d;
    };
    static __device__ __forceinline__ Raw load(const Planes& p, uint32_t unit) {
        return {load_stream(of_unit<0>(p, unit)), load_stream(of_unit<1>(p, unit)),
                load_as<uint16_t>(of_unit<2>(p, unit))};
    }
    static __device__ __forceinline__ void decode(const Planes&, const Raw& raw, uint32_t, Unit<SCALES>& u) {
        u.first = raw.first, u.last = raw.last;
        u.scale[0] = half_value(raw.d);
    }
};
#endif

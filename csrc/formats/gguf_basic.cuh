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
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t, Unit<SCALES>& u) {
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
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t, Unit<SCALES>& u) {
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
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t, Unit<SCALES>& u) {
        unpack4(raw.codes, u.first, u.last);
        u.first = u.first | unpack1<4, 0>(raw.fifth);
        u.last = u.last | unpack1<4, 4>(raw.fifth);
        u.scale[0] = half_value(raw.d);
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
    static __device__ __forceinline__ void decode(const Raw& raw, uint32_t, Unit<SCALES>& u) {
        u.first = raw.first, u.last = raw.last;
        u.scale[0] = half_value(raw.d);
    }
};
#endif

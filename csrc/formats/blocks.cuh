// SPDX-License-Identifier: BSD-3-Clause
// What device codecs of block formats share. A format is a struct `format_<name>`:
//
//   SCALES  1 or 2 scales for the 32 values of a unit (2: one for each 16)
//   MINIMA  whether a minimum stands beside each scale
//   ZERO    value = scale * (code - ZERO) + minimum; codes are bytes below 128, or int8 with ZERO 0
//   Raw     a unit's bytes in registers
//   load    reads them: units are numbered along a row, and on through all rows of a matrix
//   decode  makes codes, scales and minima of them and of the unit's number
//
// A matrix is kept in planes (vllm_superl8/formats/blocks.py); format_layout.h has the bytes a block in each.
#pragma once
#include "common/device.cuh"
#include "format_layout.h"

constexpr int UNIT = 32;  // values that are decoded together
constexpr int MOST_PLANES = 5;

struct Planes {
    const uint8_t* at[MOST_PLANES];
    const uint8_t* codebook;  // of types that have one: its entries, 4 or 8 codes each
    int group_units_log2;     // int4, int3: units that share a scale are 1 << this
    int wide_scales;          // int4, int3: scales are fp32, not fp16
};

#ifdef DEVICE_HALF
template <int SCALES>
struct Unit {
    uint4 first, last;  // codes of values 0 to 15, 16 to 31; four a word, in order
    float scale[SCALES];
    float minimum[SCALES];
};

// Addresses in planes of a layout with whole bytes a unit, or a block.
template <class Layout>
struct Blocks {
    static constexpr int UNITS = Layout::values / UNIT;  // a block
    static constexpr bool MINIMA = false;
    static constexpr int FOUR_ROWS_BLOCKS = 2;  // blocks of block_gemv_4 an SM; 1 where 128 registers are too few
    template <int PLANE>
    static __device__ __forceinline__ const uint8_t* of_unit(const Planes& p, uint32_t unit) {
        static_assert(Layout::plane_bytes[PLANE] % UNITS == 0, "");
        return p.at[PLANE] + (uint64_t)unit * (Layout::plane_bytes[PLANE] / UNITS);
    }
    template <int PLANE>
    static __device__ __forceinline__ const uint8_t* of_block(const Planes& p, uint32_t unit) {
        return p.at[PLANE] + (uint64_t)(unit / UNITS) * Layout::plane_bytes[PLANE];
    }
};

template <class T>
__device__ __forceinline__ T load_as(const uint8_t* at) {
    return *(const T*)at;
}

__device__ __forceinline__ float half_value(uint32_t bits) { return to_float(from_bits<fp16_t>((uint16_t)bits)); }

// Codes from planes of formats/bits.py.
__device__ __forceinline__ void unpack4(const uint4& packed, uint4& first, uint4& last) {
    constexpr uint32_t mask = 0x0F0F0F0Fu;
    first = make_uint4(packed.x & mask, packed.y & mask, packed.z & mask, packed.w & mask);
    last = make_uint4(packed.x >> 4 & mask, packed.y >> 4 & mask, packed.z >> 4 & mask, packed.w >> 4 & mask);
}

// 16 two-bit fields of a word as bytes, times 1 << SHIFT.
template <int SHIFT>
__device__ __forceinline__ uint4 unpack2(uint32_t packed) {
    constexpr uint32_t mask = 0x03030303u << SHIFT;
    const auto word = [&](int i) {
        return (2 * i < SHIFT ? packed << (SHIFT - 2 * i) : packed >> (2 * i - SHIFT)) & mask;
    };
    return make_uint4(word(0), word(1), word(2), word(3));
}

// Single bits, four of the words that begin with number FIRST, as bytes times 1 << SHIFT.
template <int SHIFT, int FIRST>
__device__ __forceinline__ uint4 unpack1(uint32_t packed) {
    constexpr uint32_t mask = 0x01010101u << SHIFT;
    const auto word = [&](int i) { return (i < SHIFT ? packed << (SHIFT - i) : packed >> (i - SHIFT)) & mask; };
    return make_uint4(word(FIRST), word(FIRST + 1), word(FIRST + 2), word(FIRST + 3));
}

__device__ __forceinline__ uint4 operator|(const uint4& a, const uint4& b) {
    return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}

// Bytes minus ZERO, byte by byte: no borrow crosses, since bit 7 is set before and flipped back.
template <int ZERO>
__device__ __forceinline__ uint32_t minus_zero(uint32_t codes) {
    return ZERO == 0 ? codes : ((codes | 0x80808080u) - ZERO * 0x01010101u) ^ 0x80808080u;
}
template <int ZERO>
__device__ __forceinline__ uint4 minus_zero(const uint4& v) {
    return make_uint4(minus_zero<ZERO>(v.x), minus_zero<ZERO>(v.y), minus_zero<ZERO>(v.z), minus_zero<ZERO>(v.w));
}
#else
#include "launch.h"

// The planes of a matrix, checked. Raises ValueError (naming `op`). group_size and wide_scales are those of int4 and
// int3.
inline Planes planes_of(const char* op, const std::vector<uintptr_t>& planes, uintptr_t codebook, int64_t group_size,
                        bool wide_scales) {
    CHECK(group_size == 32 || group_size == 64 || group_size == 128, "%s: group_size is %lld, wanted 32, 64 or 128", op,
          (long long)group_size);
    CHECK(planes.size() <= MOST_PLANES, "%s: %d planes, at most %d are taken", op, (int)planes.size(), MOST_PLANES);
    Planes p{};
    for (size_t i = 0; i < planes.size(); i++) {
        CHECK(planes[i] % 16 == 0, "%s: plane %d does not start on 16 bytes; clone it", op, (int)i);
        p.at[i] = (const uint8_t*)planes[i];
    }
    p.codebook = (const uint8_t*)codebook;
    p.group_units_log2 = group_size == 128 ? 2 : group_size == 64 ? 1 : 0;
    p.wide_scales = wide_scales;
    return p;
}
#endif

// SPDX-License-Identifier: BSD-3-Clause
// __half and __half2 for g++ by bit arithmetic (IEEE 754 binary16, round to nearest even). Part of cuda_emulator.h.
#pragma once

struct __align__(2) __half {
    uint16_t bits;
};
struct __align__(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

inline __half __ushort_as_half(unsigned short bits) { return __half{bits}; }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __half __short_as_half(short bits) { return __half{(uint16_t)bits}; }
inline short __half_as_short(__half v) { return (short)v.bits; }

inline float __half2float(__half v) {
    const uint32_t sign = (uint32_t)(v.bits & 0x8000u) << 16, exponent = v.bits >> 10 & 31u, fraction = v.bits & 0x3ffu;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24 is exact
        const float magnitude = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23;
    return __uint_as_float(sign | wide | fraction << 13);
}

// Rounds |v| of a double or float to half. A double holds a float exactly, so both conversions share this.
inline __half emulated_double2half(double v) {
    const uint16_t sign = std::signbit(v) ? 0x8000u : 0u;
    if (v != v) return __half{0x7fffu};
    const double magnitude = std::fabs(v);
    if (magnitude >= 65520.0) return __half{(uint16_t)(sign | 0x7c00u)};  // halfway beyond the largest half
    int exponent;
    std::frexp(magnitude, &exponent);                             // magnitude = [0.5, 1) * 2^exponent
    const int scale = exponent - 11 < -24 ? -24 : exponent - 11;  // value of the last place, as a power of 2
    const uint16_t units = (uint16_t)std::nearbyint(std::ldexp(magnitude, -scale));  // 0 to 2048, ties to even
    if (units == 0) return __half{sign};
    // units below 1024 only where scale is -24: subnormal. 2048 carries into the exponent by itself.
    const uint16_t code = units < 1024 ? units : (uint16_t)(((scale + 25) << 10) + (units - 1024));
    return __half{(uint16_t)(sign | code)};
}
inline __half __float2half_rn(float v) { return emulated_double2half((double)v); }
inline __half __float2half(float v) { return __float2half_rn(v); }
inline __half __int2half_rn(int v) { return emulated_double2half((double)v); }

// Sums, products and quotients of halves in float, rounded once more, are the rounded exact ones: 24 >= 2 * 11 + 2
// bits.
inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline __half __hdiv(__half a, __half b) { return __float2half_rn(__half2float(a) / __half2float(b)); }
inline __half __hneg(__half v) { return __half{(uint16_t)(v.bits ^ 0x8000u)}; }
inline __half __habs(__half v) { return __half{(uint16_t)(v.bits & 0x7fffu)}; }
inline __half __hfma(__half a, __half b, __half c) {
    const double product = (double)__half2float(a) * __half2float(b), addend = __half2float(c);  // both exact
    double sum = product + addend;
    if (std::isfinite(sum)) {  // what the sum lost goes into its last bit, so that rounding again cannot go astray
        const double kept = sum - addend, lost = (product - kept) + (addend - (sum - kept));
        uint64_t bits = emulator::bit_cast<uint64_t>(sum);
        if (lost != 0 && !(bits & 1u)) {
            bits += (lost > 0) == (sum > 0) ? 1 : -1;
            sum = emulator::bit_cast<double>(bits);
        }
    }
    return emulated_double2half(sum);
}
inline bool __hlt(__half a, __half b) { return __half2float(a) < __half2float(b); }
inline bool __hgt(__half a, __half b) { return __half2float(a) > __half2float(b); }
inline bool __hisnan(__half v) { return (v.bits & 0x7fffu) > 0x7c00u; }
inline __half __hmax(__half a, __half b) { return __hisnan(a) || __hgt(b, a) ? b : a; }
inline __half __hmin(__half a, __half b) { return __hisnan(a) || __hlt(b, a) ? b : a; }

inline __half2 __halves2half2(__half x, __half y) { return __half2{x, y}; }
inline __half2 __half2half2(__half v) { return __half2{v, v}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return __half2float(v.x); }
inline float __high2float(__half2 v) { return __half2float(v.y); }
inline float2 __half22float2(__half2 v) { return make_float2(__half2float(v.x), __half2float(v.y)); }
inline __half2 __float22half2_rn(float2 v) { return __half2{__float2half_rn(v.x), __float2half_rn(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return __half2{__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float2half2_rn(float v) { return __half2half2(__float2half_rn(v)); }
inline __half2 __hadd2(__half2 a, __half2 b) { return __half2{__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return __half2{__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return __half2{__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __half2{__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hmax2(__half2 a, __half2 b) { return __half2{__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline __half2 __hmin2(__half2 a, __half2 b) { return __half2{__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
inline __half2 __hneg2(__half2 v) { return __half2{__hneg(v.x), __hneg(v.y)}; }
inline __half2 __habs2(__half2 v) { return __half2{__habs(v.x), __habs(v.y)}; }

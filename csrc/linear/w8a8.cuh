// SPDX-License-Identifier: BSD-3-Clause
// What the W8A8 kernels share: their arguments, the 16-byte dot product, and how sums become outputs.
// The output's type is an argument here rather than a kernel of its own: it matters in the last lines only, and the
// large kernels take seconds to compile, also on a card that compiles PTX when it loads them.
#pragma once
#include "common/device.cuh"

enum OutType { OUT_FP16, OUT_BF16, OUT_FP32 };

struct W8A8Params {
    void* out;              // (m, n) of out_type, contiguous
    const int8_t* x;        // (m, k), contiguous
    const float* x_scales;  // (m, groups)
    const int8_t* w;        // (n, k), contiguous
    const float* w_scales;  // (n, groups)
    const void* bias;       // (n) of out_type, or null
    int m, n, k;
    int groups;  // 1: one scale a row; k / W8A8_GROUP: one a row and W8A8_GROUP columns
    OutType out_type;
};

constexpr int W8A8_GROUP = 128;      // columns that share a scale, where a row has more than one
constexpr int W8A8_MOST_K = 131068;  // 128 * 128 * k stays below 2^31, so that no int32 sum of a row overflows

#ifdef DEVICE_HALF
// Integer sums that a float takes over start here: 1.5 * 2^23, whose last bit is worth 1. The sum's bits then are a
// float, MAGIC_FLOAT + sum, exact while |sum| < 2^22 (a group's is at most 2^21); a subtraction at full rate replaces
// an int-to-float conversion at a quarter of it.
constexpr int MAGIC_BITS = 0x4B400000;
constexpr float MAGIC_FLOAT = 12582912.f;

__device__ __forceinline__ float magic_to_float(int sum) { return __int_as_float(sum) - MAGIC_FLOAT; }

// sum + the dot product of 16 bytes with 16 bytes.
__device__ __forceinline__ int dot16(const uint4& a, const uint4& b, int sum) {
    sum = __dp4a((int)a.x, (int)b.x, sum);
    sum = __dp4a((int)a.y, (int)b.y, sum);
    sum = __dp4a((int)a.z, (int)b.z, sum);
    return __dp4a((int)a.w, (int)b.w, sum);
}

// total + sum * x_scale * w_scale. Every kernel rounds in this order, so that a row of x gives the same bits whichever
// kernel takes it (where there is one scale a row; sums over groups also depend on the order of the groups).
__device__ __forceinline__ float add_scaled(float total, float sum, float x_scale, float w_scale) {
    return fmaf(sum * x_scale, w_scale, total);
}

template <class T>
__device__ __forceinline__ float load_bias(const W8A8Params& p, int column) {
    return p.bias ? to_float(((const T*)p.bias)[column]) : 0.f;
}

// Columns `column` (a multiple of 4) to column + 3 of a row, those that exist; in one store where rows allow it.
template <class T>
__device__ __forceinline__ void store_quad(const W8A8Params& p, int64_t row, int column, const float (&v)[4]) {
    struct alignas(4 * sizeof(T)) Quad {
        T v[4];
    } quad;
#pragma unroll
    for (int e = 0; e < 4; e++) quad.v[e] = from_float<T>(v[e]);
    T* out = (T*)p.out + row * p.n + column;
    if (p.n % 4 == 0 && column < p.n) {
        *(Quad*)out = quad;
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (column + e < p.n) out[e] = quad.v[e];
}
#else
#include "launch.h"

// Raises ValueError (naming `op`) for a name that is no type of results.
inline OutType out_type_of(const char* op, const std::string& name) {
    CHECK(name == "fp16" || name == "bf16" || name == "fp32", "%s: out_dtype is %s, wanted fp16, bf16 or fp32", op,
          name.c_str());
    return name == "fp16" ? OUT_FP16 : name == "bf16" ? OUT_BF16 : OUT_FP32;
}

// The arguments of an op, checked. Raises ValueError (naming `op`) for what the kernels cannot take.
inline W8A8Params w8a8_params(const char* op, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                              uintptr_t x_scales, uintptr_t w, uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n,
                              int64_t k, int64_t groups) {
    const OutType type = out_type_of(op, out_dtype);
    CHECK(k >= 4 && k % 4 == 0 && k <= W8A8_MOST_K, "%s: k is %lld, wanted a multiple of 4 from 4 to %d", op,
          (long long)k, W8A8_MOST_K);
    CHECK(groups == 1 || groups * W8A8_GROUP == k, "%s: %lld scales a row for k of %lld, wanted 1 or k / %d", op,
          (long long)groups, (long long)k, W8A8_GROUP);
    CHECK(m < INT32_MAX / 2 && n < INT32_MAX / 2 && m * k < 4ll << 32 && n * k < 4ll << 32,
          "%s: %lld and %lld rows of %lld bytes, wanted less than 2^30 rows and 16 GiB each", op, (long long)m,
          (long long)n, (long long)k);
    CHECK((x | w) % 4 == 0, "%s: x or weight does not start on 4 bytes; clone it", op);
    CHECK(groups == 1 || (x | w) % 16 == 0, "%s: x or weight does not start on 16 bytes; clone it", op);
    return {(void*)out,
            (const int8_t*)x,
            (const float*)x_scales,
            (const int8_t*)w,
            (const float*)w_scales,
            (const void*)bias,
            (int)m,
            (int)n,
            (int)k,
            (int)groups,
            type};
}

// Whether every row of x and w starts on 16 bytes, as the fast kernels read them.
inline bool w8a8_wide(const W8A8Params& p) { return (p.k | (uintptr_t)p.x | (uintptr_t)p.w) % 16 == 0; }
#endif

// SPDX-License-Identifier: BSD-3-Clause
// int8 codes of eight neighbouring elements (common/eight.cuh).
#pragma once
#include "common/eight.cuh"
#include "formats/int8.cuh"

#ifdef DEVICE_HALF
__device__ __forceinline__ float amax_of(const Eight& x, float amax) {
#pragma unroll
    for (int i = 0; i < EIGHT; i++) amax = max_magnitude(amax, fabsf(x.v[i]));
    return amax;
}

__device__ __forceinline__ void store_codes(int8_t* row, int column, int k, bool wide, const Eight& x, float scale) {
    int c[EIGHT];
#pragma unroll
    for (int i = 0; i < EIGHT; i++) c[i] = int8_code(x.v[i], scale);
    if (wide) {
        *(uint2*)(row + column) = make_uint2(pack_codes(c[0], c[1], c[2], c[3]), pack_codes(c[4], c[5], c[6], c[7]));
    } else {
#pragma unroll
        for (int i = 0; i < EIGHT; i++)
            if (column + i < k) row[column + i] = (int8_t)c[i];
    }
}

struct WarpMaxMagnitude {
    __device__ __forceinline__ float operator()(float v) const { return max_magnitude_of_lanes(v, WARP); }
};
#else
#include "launch.h"

// Raises ValueError (naming `op`) unless the kernels can make groups of group_size columns in rows of k; 0 is the row.
inline void check_group_size(const char* op, int64_t k, int64_t group_size) {
    const bool known = group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128;
    CHECK(known && (group_size == 0 || k % group_size == 0),
          "%s: group_size is %lld for k of %lld, wanted 32, 64 or 128, dividing k", op, (long long)group_size,
          (long long)k);
}
#endif

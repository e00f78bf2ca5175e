// SPDX-License-Identifier: BSD-3-Clause
// Arguments of the kernels for weights in blocks, and the scaling of their sums.
#pragma once
#include "formats/blocks.cuh"
#include "linear/w8a8.cuh"

struct BlockParams {
    W8A8Params product;  // x_scales (m, k / UNIT), groups = k / UNIT; w and w_scales are not used
    Planes planes;       // the weights (n, k)
    int k_warps;         // block_gemv: warps that share the columns of a row: 1, 2, 4 or 8
};

#ifdef DEVICE_HALF
// 16 codes' sum by dp4a; exact as a float with MAGIC_BITS as start.
__device__ __forceinline__ int sum16(const uint4& codes, int start) {
    constexpr uint32_t one = 0x01010101u;
    return dot16(codes, make_uint4(one, one, one, one), start);
}
#endif

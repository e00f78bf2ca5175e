// SPDX-License-Identifier: BSD-3-Clause
// quantize_int8: codes = round-half-even(x / scale), scale = max|x| / 127 in fp32, over a row or a group of columns.
//   x       (rows, k) T, rows x_stride elements apart
//   codes   (rows, k) int8, contiguous; scales (rows, k / group_size) fp32
// A group of zeros gets scale 1. NaN or infinity in a group makes its scale NaN or infinity.
// One block a row (threads = 256) when the row is the group, else one warp a group. Two passes; the second reads from
// L1/L2. The division is IEEE, not a multiplication by an inverse, so that kernel and reference agree bit for bit.
#include "common/device.cuh"

struct QuantizeParams {
    int8_t* codes;      // (rows, k)
    float* scales;      // (rows, groups)
    const void* x;      // (rows, k) T
    int64_t x_stride;   // elements from one row of x to the next
    int64_t rows;
    int k;
    int group_size;     // columns a scale; k when the row is the group
};

#ifdef DEVICE_HALF
// max that keeps NaN: fmaxf drops it.
__device__ __forceinline__ float max_keep_nan(float a, float b) { return (a >= b || a != a) ? a : b; }

struct WarpMaxKeepNan {
    __device__ __forceinline__ float operator()(float v) const {
#pragma unroll
        for (int s = WARP / 2; s; s >>= 1) v = max_keep_nan(v, __shfl_xor_sync(FULL_WARP, v, s));
        return v;
    }
};

__device__ __forceinline__ int8_t encode(float v, float scale) {
    const float code = rintf(__fdiv_rn(v, scale));
    if (code != code) return 0;
    return (int8_t)(int)fminf(fmaxf(code, -127.f), 127.f);
}

// Lanes `first`, `first + step`, ... of [0, n) quantise one group; `reduce` joins their maxima.
template <class T, class Reduce>
__device__ __forceinline__ void quantize_group(const T* x, int8_t* codes, float* scale_out, int n, int first, int step,
                                               Reduce reduce) {
    float amax = 0.f;
    for (int i = first; i < n; i += step) amax = max_keep_nan(fabsf(to_float(x[i])), amax);
    amax = reduce(amax);
    float scale = __fdiv_rn(amax, 127.f);
    if (scale == 0.f) scale = 1.f;
    for (int i = first; i < n; i += step) codes[i] = encode(to_float(x[i]), scale);
    if (first == 0) *scale_out = scale;
}

template <class T>
__device__ void quantize_rows(const QuantizeParams& p) {
    __shared__ float scratch[WARP];
    const int64_t row = blockIdx.x;
    quantize_group((const T*)p.x + row * p.x_stride, p.codes + row * p.k, p.scales + row, p.k, threadIdx.x, blockDim.x,
                   [&](float v) { return block_reduce(v, 0.f, scratch, WarpMaxKeepNan()); });
}
KERNELS(quantize_rows, QuantizeParams, 256)

template <class T>
__device__ void quantize_groups(const QuantizeParams& p) {
    const int groups = p.k / p.group_size;
    const int64_t task = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (task >= p.rows * groups) return;
    const int64_t row = task / groups;
    const int column = (int)(task % groups) * p.group_size;
    quantize_group((const T*)p.x + row * p.x_stride + column, p.codes + row * p.k + column, p.scales + task,
                   p.group_size, threadIdx.x % WARP, WARP, WarpMaxKeepNan());
}
KERNELS(quantize_groups, QuantizeParams, 256)
#else
#include "launch.h"

static void quantize_int8(const std::string& dtype, uintptr_t codes, uintptr_t scales, uintptr_t x, int64_t rows,
                          int64_t k, int64_t x_stride, int64_t group_size, uintptr_t stream) {
    CHECK(group_size >= 1 && k % group_size == 0, "quantize_int8: k of %lld is not a multiple of group_size %lld",
          (long long)k, (long long)group_size);
    QuantizeParams p{(int8_t*)codes, (float*)scales, (const void*)x, x_stride, rows, (int)k, (int)group_size};
    if (group_size == k) {
        launch("quantize_rows_" + dtype, {(unsigned)rows}, 256, 0, stream, p);
    } else {
        const int64_t warps = rows * (k / group_size);
        launch("quantize_groups_" + dtype, {(unsigned)((warps + 7) / 8)}, 256, 0, stream, p);
    }
}
REGISTER(quantize_int8)
#endif

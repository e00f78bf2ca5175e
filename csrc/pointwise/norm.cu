// SPDX-License-Identifier: BSD-3-Clause
// rms_norm: out = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), all arithmetic in fp32.
//   x, out    (rows, n) T; rows of x may be strided (x_stride elements apart), rows of out are contiguous
//   residual  (rows, n) T or null: x + residual is what is normalised, and its value rounded to T replaces residual
//   weight    (n) T or null (ones); weight_offset is 1 for Gemma's (1 + w), else 0
// One block a row. Two passes over the row; the second reads it from L1/L2. Shared memory: 32 floats.
#include "common/device.cuh"

struct RmsNormParams {
    void* out;           // (rows, n) T
    const void* x;       // (rows, n) T
    void* residual;      // (rows, n) T, contiguous, or null
    const void* weight;  // (n) T or null
    int64_t x_stride;    // elements from one row of x to the next
    int n;               // elements a row
    float eps;
    float weight_offset;  // added to every weight
};

#ifdef DEVICE_HALF
template <class T>
__device__ void rms_norm(const RmsNormParams& p) {
    __shared__ float scratch[WARP];
    const int64_t row = blockIdx.x;
    const T* x = (const T*)p.x + row * p.x_stride;
    T* residual = p.residual ? (T*)p.residual + row * p.n : nullptr;
    T* out = (T*)p.out + row * p.n;
    const T* weight = (const T*)p.weight;

    float squares = 0.f;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        float v = to_float(x[i]);
        if (residual) {
            v += to_float(residual[i]);
            residual[i] = out[i] = from_float<T>(v);
            v = to_float(out[i]);  // the rounded sum is what is normalised
        }
        squares += v * v;
    }
    const float inv_rms = rsqrtf(block_sum(squares, scratch) / p.n + p.eps);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        const float v = to_float(residual ? out[i] : x[i]);
        const float w = weight ? to_float(weight[i]) + p.weight_offset : 1.f;
        out[i] = from_float<T>(v * inv_rms * w);
    }
}
KERNELS(rms_norm, RmsNormParams, 256)
#else
#include "launch.h"

static void rms_norm(const std::string& dtype, uintptr_t out, uintptr_t x, uintptr_t residual, uintptr_t weight,
                     int64_t rows, int64_t n, int64_t x_stride, double eps, double weight_offset, uintptr_t stream) {
    CHECK(n >= 1 && n <= 1 << 24, "rms_norm: a row has %lld elements, wanted 1 to 2^24", (long long)n);
    RmsNormParams p{(void*)out, (const void*)x, (void*)residual, (const void*)weight,
                    x_stride,   (int)n,         (float)eps,      (float)weight_offset};
    launch("rms_norm_" + dtype, {(unsigned)rows}, 256, 0, stream, p);
}
REGISTER(rms_norm)
#endif

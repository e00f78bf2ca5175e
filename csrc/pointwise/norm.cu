// SPDX-License-Identifier: BSD-3-Clause
// rms_norm: out = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset), all arithmetic in fp32.
//   x, out    (rows, n) T; rows of x may be strided (x_stride elements apart), rows of out are contiguous
//   residual  (rows, n) T or null: x + residual is what is normalised, and its value rounded to T replaces residual
//   weight    (n) T or fp32, or null (ones); weight_offset is 1 for Gemma's (1 + w), else 0
// One block a row, which stays in registers up to n = 8192 (rms.cuh). Shared memory: 32 floats.
#include "pointwise/rms.cuh"

struct RmsNormParams {
    RmsParams row;  // total is residual
    void* out;      // (rows, n) T
};

#ifdef DEVICE_HALF
template <class T>
__device__ void rms_norm(const RmsNormParams& p) {
    __shared__ float scratch[WARP];
    T* out = (T*)p.out + (int64_t)blockIdx.x * p.row.n;
    RmsRow<T>(p.row, scratch).each([&](int column, const Eight& v) {
        if (column < p.row.n) store_eight(out, column, p.row.n, p.row.wide, v);
    });
}
KERNELS(rms_norm, RmsNormParams, RMS_THREADS, RMS_BLOCKS)
#else
static void rms_norm(const std::string& dtype, uintptr_t out, uintptr_t x, uintptr_t residual, uintptr_t weight,
                     bool weight_is_fp32, int64_t rows, int64_t n, int64_t x_stride, double eps, double weight_offset,
                     uintptr_t stream) {
    RmsNormParams p{
        rms_params("rms_norm", dtype, x, residual, residual, weight, weight_is_fp32, n, x_stride, eps, weight_offset),
        (void*)out};
    p.row.wide &= out % 16 == 0;
    launch("rms_norm_" + dtype, {(unsigned)rows}, rms_threads(n), 0, stream, p);
}
REGISTER(rms_norm)
#endif

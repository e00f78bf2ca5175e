// SPDX-License-Identifier: BSD-3-Clause
// rms_norm_quantize: what rms_norm (norm.cu) and then quantize_int8 (linear/quantize.cu) give, bit for bit, without the
// normalised rows ever being written: they stay in registers (up to n = 8192, rms.cuh).
//   x, residual, weight  as in norm.cu; x + residual goes to total
//   codes (rows, n) int8, scales (rows, 1 or n / group_size) fp32
// For fp16 that moves 3 n bytes a row instead of 7 n (5 n instead of 9 n with a residual), in one launch.
// One block a row. Shared memory: 32 floats.
#include "formats/int8_eight.cuh"
#include "pointwise/rms.cuh"

struct RmsNormQuantizeParams {
    RmsParams row;
    int8_t* codes;   // (rows, n)
    float* scales;   // (rows, groups)
    int group_size;  // columns a scale; n when the row is the group
};

#ifdef DEVICE_HALF
template <class T>
__device__ void rms_norm_quantize(const RmsNormQuantizeParams& p) {
    __shared__ float scratch[WARP];
    const int64_t row = blockIdx.x;
    const int n = p.row.n, group_size = p.group_size;
    int8_t* codes = p.codes + row * n;
    float* scales = p.scales + row * (n / group_size);
    const RmsRow<T> norm(p.row, scratch);
    if (group_size < n) {
        norm.each([&](int column, const Eight& v) {
            const float scale = int8_scale(max_magnitude_of_lanes(amax_of(v, 0.f), group_size / EIGHT));
            if (column >= n) return;
            store_codes(codes, column, n, p.row.wide, v, scale);
            if (column % group_size == 0) scales[column / group_size] = scale;
        });
        return;
    }
    float amax = 0.f;
    norm.each([&](int, const Eight& v) { amax = amax_of(v, amax); });
    const float scale = int8_scale(block_reduce(amax, 0.f, scratch, WarpMaxMagnitude()));
    norm.each([&](int column, const Eight& v) {
        if (column < n) store_codes(codes, column, n, p.row.wide, v, scale);
    });
    if (threadIdx.x == 0) *scales = scale;
}
KERNELS(rms_norm_quantize, RmsNormQuantizeParams, RMS_THREADS, RMS_BLOCKS)
#else
// group_size 0 is the whole row.
static void rms_norm_quantize(const std::string& dtype, uintptr_t codes, uintptr_t scales, uintptr_t x,
                              uintptr_t residual, uintptr_t total, uintptr_t weight, bool weight_is_fp32, int64_t rows,
                              int64_t n, int64_t x_stride, double eps, double weight_offset, int64_t group_size,
                              uintptr_t stream) {
    check_group_size("rms_norm_quantize", n, group_size);
    RmsNormQuantizeParams p{rms_params("rms_norm_quantize", dtype, x, residual, total, weight, weight_is_fp32, n,
                                       x_stride, eps, weight_offset),
                            (int8_t*)codes, (float*)scales, (int)(group_size ? group_size : n)};
    p.row.wide &= codes % 8 == 0;
    launch("rms_norm_quantize_" + dtype, {(unsigned)rows}, rms_threads(n), 0, stream, p);
}
REGISTER(rms_norm_quantize)
#endif

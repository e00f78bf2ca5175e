// SPDX-License-Identifier: BSD-3-Clause
// w8a8_gemv: what w8a8_gemm (gemm.cu) computes, for one to eight rows of x; pointers as in W8A8Params.
// int8_gemv.cuh has the scheme: weights are read once, 16 bytes a lane, so time follows weight bytes up to m = 8.
//
//   kernel  rows of x  steps in flight  blocks an SM  registers on sm_70, plain and grouped
//   gemv_1  1          2                4             64, 64
//   gemv_2  2          2                3             64, 80
//   gemv_4  3, 4       2                3             80, 80
//   gemv_8  5 to 8     1                3             80, 80
//
// In a prototype of the same scheme on an H200 (14336x4096, cold weights) m = 1, 2, 4, 8 ran at 87, 86, 84, 73 % of the
// memory's rate; weights packed for speed gave nothing below m = 16.
// Where k or a pointer is not a multiple of 16 bytes, gemv_narrow loads 32-bit words; it is not tuned.
#include "linear/int8_gemv.cuh"

struct GemvParams {
    W8A8Params product;  // m <= 8
    int k_warps;         // warps that share the columns of a row: 1, 2, 4 or 8
};

// name, rows of x, steps in flight, blocks an SM
#define GEMV_KINDS(X)  \
    X(gemv_1, 1, 2, 4) \
    X(gemv_2, 2, 2, 3) \
    X(gemv_4, 4, 2, 3) \
    X(gemv_8, 8, 1, 3)

#ifdef DEVICE_HALF
#define GEMV_KERNELS(name, ROWS, STAGES, BLOCKS)                          \
    KERNEL(name, GemvParams, GEMV_THREADS, BLOCKS) {                      \
        int8_gemv<ROWS, STAGES, false>(p.product, p.k_warps, blockIdx.x); \
    }                                                                     \
    KERNEL(name##_grouped, GemvParams, GEMV_THREADS, BLOCKS) {            \
        int8_gemv<ROWS, STAGES, true>(p.product, p.k_warps, blockIdx.x);  \
    }
GEMV_KINDS(GEMV_KERNELS)
KERNEL(gemv_narrow, GemvParams, GEMV_THREADS) { int8_gemv<8, 1, false, false>(p.product, p.k_warps, blockIdx.x); }
#else
static void w8a8_gemv(int64_t k_warps, const std::string& out_dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales,
                      uintptr_t w, uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n, int64_t k, int64_t groups,
                      uintptr_t stream) {
    CHECK(m <= 8, "w8a8_gemv: x has %lld rows, at most 8 are taken; use w8a8_gemm", (long long)m);
    CHECK(k_warps == 1 || k_warps == 2 || k_warps == 4 || k_warps == 8,
          "w8a8_gemv: k_warps is %lld, wanted 1, 2, 4 or 8", (long long)k_warps);
    const GemvParams p{w8a8_params("w8a8_gemv", out_dtype, out, x, x_scales, w, w_scales, bias, m, n, k, groups),
                       (int)k_warps};
    if (m == 0) return;
    std::string kernel = m > 4 ? "gemv_8" : m > 2 ? "gemv_4" : "gemv_" + std::to_string(m);
    if (groups > 1)
        kernel += "_grouped";
    else if (!w8a8_wide(p.product))
        kernel = "gemv_narrow";
    const int64_t rows = GEMV_WARPS / k_warps * GEMV_N;  // of weights a block
    launch(kernel, {(unsigned)((n + rows - 1) / rows)}, GEMV_THREADS, 0, stream, p);
}
REGISTER(w8a8_gemv)
#endif

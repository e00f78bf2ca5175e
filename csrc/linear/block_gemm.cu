// SPDX-License-Identifier: BSD-3-Clause
// block_gemm: out[m, n] = sum_k x[m, k] * x_scale * w[n, k] + bias for weights that stay in a format of blocks (GGUF
// types, 4-bit checkpoints); pointers as in BlockParams. One image a format, in which FORMAT is its name.
//
// block_gemv.cuh streams the weights once for one to eight rows of x, block_tile.cuh multiplies tiles for more. Both
// take the format as a decoder (formats/blocks.cuh), so that no decoded weight is ever written to global memory.
// Products of 32 columns (16 where the format has a scale for 16) are summed exactly, then scaled and added in fp32 in
// order.
//
//   kernel       rows of x  threads  blocks an SM
//   gemv_1..8    1 to 8     256      2, 2, 2, 1 (16 warps of four units in flight are 32 KB: more than latency asks
//   for) gemm_64x64   tiles      256      1              189 to 213 registers, 38 to 48 KB of shared memory gemm_32x64
//   tiles      128      2              to 219 registers
//
// On sm_70 the main loop of gemm_64x64 has 512 dp4a of 833 (Q8_0) to 1223 (Q2_K) instructions. A dp4a keeps its unit
// busy for two issue slots, so that those with one scale a unit (up to 980) are bound by dp4a itself, not by decoding.
// The loop of gemv_1 has 124 (Q8_0), 159 (Q4_0), 256 (Q4_K), 265 (Q6_K) to 724 (TQ1_0) instructions for 4096 weights.
// Not measured on a GPU yet.
#include "formats/gguf_basic.cuh"
#include "formats/gguf_iq.cuh"
#include "formats/gguf_k.cuh"
#include "formats/int4.cuh"
#include "linear/block_gemv.cuh"
#include "linear/block_tile.cuh"

// rows of x, blocks an SM
#define BLOCK_GEMV_KINDS(X)        \
    X(1, 2)                        \
    X(2, 2)                        \
    X(4, Format::FOUR_ROWS_BLOCKS) \
    X(8, 1)

#define BLOCK_GEMM_TILES(X)    \
    X(64x64, Tile64x64Grouped) \
    X(32x64, Tile32x64Grouped)

#ifdef DEVICE_HALF
using Format = CONCATENATE(format_, FORMAT);

#define BLOCK_GEMV_KERNEL(ROWS, BLOCKS)                                                                 \
    KERNEL(CONCATENATE(CONCATENATE(block_gemv_, FORMAT), _##ROWS), BlockParams, GEMV_THREADS, BLOCKS) { \
        block_gemv<Format, ROWS>(p);                                                                    \
    }
BLOCK_GEMV_KINDS(BLOCK_GEMV_KERNEL)

template <class S>
__device__ __forceinline__ void block_gemm(const BlockParams& p) {
    const TileInBands<S> tile(p.product.m, p.product.n);
    block_tile<Format, S>(p, tile.rows, tile.column0);
}
#define BLOCK_GEMM_KERNEL(name, Shape)                                                                           \
    KERNEL(CONCATENATE(CONCATENATE(block_gemm_, FORMAT), _##name), BlockParams, Shape::THREADS, Shape::BLOCKS) { \
        block_gemm<Shape>(p);                                                                                    \
    }
BLOCK_GEMM_TILES(BLOCK_GEMM_KERNEL)
#else
// group_size and wide_scales are those of the scales of int4 and int3.
static BlockParams block_params(const char* op, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                                uintptr_t x_scales, const std::vector<uintptr_t>& planes, uintptr_t codebook,
                                int64_t group_size, bool wide_scales, uintptr_t bias, int64_t m, int64_t n, int64_t k) {
    CHECK(k % UNIT == 0 && k < INT32_MAX / 2, "%s: k is %lld, wanted a multiple of %d", op, (long long)k, UNIT);
    CHECK(m < INT32_MAX / 2 && n < INT32_MAX / 2 && m * k < 4ll << 32 && n * (k / UNIT) < 1ll << 32,
          "%s: %lld and %lld rows of %lld columns, wanted less than 2^30 rows, 16 GiB of x and 2^37 weights", op,
          (long long)m, (long long)n, (long long)k);
    CHECK(x % 16 == 0, "%s: x does not start on 16 bytes; clone it", op);
    BlockParams p{};
    p.product.out = (void*)out;
    p.product.x = (const int8_t*)x;
    p.product.x_scales = (const float*)x_scales;
    p.product.bias = (const void*)bias;
    p.product.m = (int)m, p.product.n = (int)n, p.product.k = (int)k, p.product.groups = (int)(k / UNIT);
    p.product.out_type = out_type_of(op, out_dtype);
    p.planes = planes_of(op, planes, codebook, group_size, wide_scales);
    return p;
}

static void block_gemv(int64_t k_warps, const std::string& out_dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales,
                       const std::string& format, const std::vector<uintptr_t>& planes, uintptr_t codebook,
                       int64_t group_size, bool wide_scales, uintptr_t bias, int64_t m, int64_t n, int64_t k,
                       uintptr_t stream) {
    CHECK(m <= 8, "block_gemv: x has %lld rows, at most 8 are taken; use block_gemm", (long long)m);
    CHECK(k_warps == 1 || k_warps == 2 || k_warps == 4 || k_warps == 8,
          "block_gemv: k_warps is %lld, wanted 1, 2, 4 or 8", (long long)k_warps);
    BlockParams p = block_params("block_gemv", out_dtype, out, x, x_scales, planes, codebook, group_size, wide_scales,
                                 bias, m, n, k);
    p.k_warps = (int)k_warps;
    if (m == 0) return;
    const int64_t rows = GEMV_WARPS / k_warps * GEMV_N;  // of weights a block
    launch("block_gemv_" + format +
               (m > 4   ? "_8"
                : m > 2 ? "_4"
                : m > 1 ? "_2"
                        : "_1"),
           {(unsigned)((n + rows - 1) / rows)}, GEMV_THREADS, 0, stream, p);
}
REGISTER(block_gemv)

// `tile` is a name such as 64x64.
static void block_gemm(const std::string& tile, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                       uintptr_t x_scales, const std::string& format, const std::vector<uintptr_t>& planes,
                       uintptr_t codebook, int64_t group_size, bool wide_scales, uintptr_t bias, int64_t m, int64_t n,
                       int64_t k, uintptr_t stream) {
    const BlockParams p = block_params("block_gemm", out_dtype, out, x, x_scales, planes, codebook, group_size,
                                       wide_scales, bias, m, n, k);
#define BLOCK_GEMM_LAUNCH(name, Shape)                                                                       \
    if (tile == #name) {                                                                                     \
        const int64_t tiles = (m + Shape::M - 1) / Shape::M * ((n + Shape::N - 1) / Shape::N);               \
        CHECK(tiles <= INT32_MAX, "block_gemm: %lld tiles are too many", (long long)tiles);                  \
        return launch("block_gemm_" + format + "_" + tile, {(unsigned)tiles}, Shape::THREADS, 0, stream, p); \
    }
    BLOCK_GEMM_TILES(BLOCK_GEMM_LAUNCH)
    CHECK(false, "block_gemm: there is no tile %s; see csrc/linear/block_gemm.cu", tile.c_str());
}
REGISTER(block_gemm)
#endif

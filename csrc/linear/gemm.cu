// SPDX-License-Identifier: BSD-3-Clause
// w8a8_gemm: out[m, n] = sum_k x[m, k] * w[n, k] * x_scale * w_scale + bias for many rows; pointers as in W8A8Params.
// Sums inside a group of columns (or the row) are exact int32, groups are added in fp32 in a fixed order.
//
// One block a tile of out; int8_tile.cuh has the scheme.
//
//   tile     threads  slices of K  blocks an SM  registers, shared bytes (sm_70)
//   128x128  256      1            2             126, 16.9 KB     large m: reads the least shared memory a dp4a
//   64x64    256      4            2             127, 35.1 KB     enough warps for m of a few hundred
//   32x32    128      4            4              95, 18.7 KB     m to 64
//   16x64    128      4            4             102, 22.8 KB     m to 16
//   grouped  128x128, 64x64: one block an SM (int32 and fp32 accumulators: 207, 219 registers), 32x64: two (214)
//
// On sm_70 91 to 94 % of the main loop's instructions are dp4a (75 to 83 % grouped), at most 13 of 512 with all
// operands in one register bank, and loads stand half a step before their use (64x64 in two phases had them next to
// it). The scheme reached 95 % of an H200's dp4a rate at 2048x14336x4096, 91 % at 512x4096x14336, 84 % at 256x4096x4096
// and 80 % at 64x14336x4096 in a prototype with the same tiles. Lost there: 16x8 and 8x16 outputs a thread, a
// persistent grid (5 to 7 % slower), 8x4 outputs when grouped. Where k or a pointer is not a multiple of 16 bytes,
// 64x64_narrow loads 32-bit words; it is not tuned.
#include "linear/int8_tile.cuh"

#define GEMM_TILES(X)                           \
    X(gemm_128x128, Tile128x128)                \
    X(gemm_64x64, Tile64x64)                    \
    X(gemm_32x32, Tile32x32)                    \
    X(gemm_16x64, Tile16x64)                    \
    X(gemm_128x128_grouped, Tile128x128Grouped) \
    X(gemm_64x64_grouped, Tile64x64Grouped)     \
    X(gemm_32x64_grouped, Tile32x64Grouped)     \
    X(gemm_64x64_narrow, Tile64x64Narrow)

#ifdef DEVICE_HALF
template <class S>
__device__ __forceinline__ void gemm(const W8A8Params& p) {
    const TileInBands<S> tile(p.m, p.n);
    int8_tile<S>(p, tile.rows, tile.column0, KSpan{0, p.k, p.groups});
}

#define GEMM_KERNEL(name, Shape) \
    KERNEL(name, W8A8Params, Shape::THREADS, Shape::BLOCKS) { gemm<Shape>(p); }
GEMM_TILES(GEMM_KERNEL)
#else
// `tile` is a name such as 128x128; its grouped or narrow form is taken where the arguments need it.
static void w8a8_gemm(const std::string& tile, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                      uintptr_t x_scales, uintptr_t w, uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n,
                      int64_t k, int64_t groups, uintptr_t stream) {
    const W8A8Params p = w8a8_params("w8a8_gemm", out_dtype, out, x, x_scales, w, w_scales, bias, m, n, k, groups);
    const std::string kernel = groups > 1      ? "gemm_" + tile + "_grouped"
                               : !w8a8_wide(p) ? "gemm_64x64_narrow"
                                               : "gemm_" + tile;
#define GEMM_LAUNCH(name, Shape)                                                               \
    if (kernel == #name) {                                                                     \
        const int64_t tiles = (m + Shape::M - 1) / Shape::M * ((n + Shape::N - 1) / Shape::N); \
        CHECK(tiles <= INT32_MAX, "w8a8_gemm: %lld tiles are too many", (long long)tiles);     \
        return launch(kernel, {(unsigned)tiles}, Shape::THREADS, 0, stream, p);                \
    }
    GEMM_TILES(GEMM_LAUNCH)
    CHECK(false, "w8a8_gemm: there is no kernel %s; see csrc/linear/gemm.cu for the tiles", kernel.c_str());
}
REGISTER(w8a8_gemm)
#endif

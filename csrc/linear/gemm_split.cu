// SPDX-License-Identifier: BSD-3-Clause
// w8a8_gemm_split: what w8a8_gemm (gemm.cu) computes where its tiles are too few for the card, as m = 16 and n = 4096
// give 64 of them: several blocks a tile, each with a part of K, and a second kernel that adds the parts.
//   partial (splits, m, n)  workspace: int32 sums of each part, fp32 totals when grouped; no initial value needed
//   others as in W8A8Params
//
// gemm_split: grid (tiles, splits); a block is a tile of int8_tile.cuh over k_split columns, a whole number of its
// steps (the last part ends with the row). gemm_sum: four neighbouring outputs a thread, parts in order.
// With one scale a row the parts add up in int32, so the result has the bits of gemm.cu whatever the split; with groups
// the order of the sum follows the split. No counters or atomics: a kernel of some microseconds in place of state that
// would have to be zero at the next launch.
// gemm_sum also scales the sums of an fp16 product (ops/fp16_product.py).
// Not timed yet. ops/linear.py reckons when splitting pays.
#include "linear/int8_tile.cuh"

struct GemmSplitParams {
    W8A8Params product;  // out is partial
    int k_split;         // columns a part
};

struct GemmSumParams {
    W8A8Params product;   // n is the row of out and of w_scales and bias
    const void* partial;  // (splits, m, columns) int32 or fp32
    int splits;
    int first, columns;  // of out that are made
    bool integers;       // partial is int32
    bool scaled;         // sums are multiplied by x_scales (m) and w_scales (n); else they are already
};

#define SPLIT_TILES(X)                            \
    X(gemm_split_64x64, Tile64x64)                \
    X(gemm_split_32x32, Tile32x32)                \
    X(gemm_split_16x64, Tile16x64)                \
    X(gemm_split_64x64_grouped, Tile64x64Grouped) \
    X(gemm_split_32x64_grouped, Tile32x64Grouped)

constexpr int SUM_THREADS = 256;

#ifdef DEVICE_HALF
template <class S>
__device__ __forceinline__ void gemm_split(const GemmSplitParams& p) {
    W8A8Params own = p.product;
    own.out = (int*)own.out + (int64_t)blockIdx.y * own.m * own.n;
    const int tiles_m = (own.m + S::M - 1) / S::M, begin = blockIdx.y * p.k_split, end = min(begin + p.k_split, own.k);
    const RowsInOrder rows{(int)(blockIdx.x % tiles_m) * S::M, own.m};
    int8_tile<S, true>(own, rows, blockIdx.x / tiles_m * S::N, KSpan{begin, end, (end - begin) / W8A8_GROUP});
}

#define SPLIT_KERNEL(name, Shape) \
    KERNEL(name, GemmSplitParams, Shape::THREADS, Shape::BLOCKS) { gemm_split<Shape>(p); }
SPLIT_TILES(SPLIT_KERNEL)

template <class T>
__device__ __forceinline__ void gemm_sum(const GemmSumParams& p) {
    const W8A8Params& product = p.product;
    const int64_t quads = (p.columns + 3) / 4, i = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x, row = i / quads;
    if (row >= product.m) return;
    const int column = (int)(i % quads) * 4;
    const bool wide = p.columns % 4 == 0;
    const uint32_t* partial = (const uint32_t*)p.partial + row * p.columns + column;
    uint32_t sums[4] = {0, 0, 0, 0};
    float totals[4] = {0.f, 0.f, 0.f, 0.f};
    for (int s = 0; s < p.splits; s++, partial += (int64_t)product.m * p.columns) {
        uint32_t v[4];
        if (wide) {
            const uint4 quad = *(const uint4*)partial;
            v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = column + e < p.columns ? partial[e] : 0;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (p.integers)
                sums[e] += v[e];
            else
                totals[e] += __uint_as_float(v[e]);
        }
    }
    const float x_scale = p.scaled ? product.x_scales[row] : 1.f;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int at = min(p.first + column + e, product.n - 1);
        const float bias = load_bias<T>(product, at), sum = p.integers ? (float)(int)sums[e] : totals[e];
        totals[e] = p.scaled ? add_scaled(bias, sum, x_scale, product.w_scales[at]) : sum + bias;
    }
    store_quad<T>(product, row, p.first + column, totals);
}
KERNEL(gemm_sum, GemmSumParams, SUM_THREADS) {
    if (p.product.out_type == OUT_FP16)
        gemm_sum<fp16_t>(p);
    else if (p.product.out_type == OUT_BF16)
        gemm_sum<bf16_t>(p);
    else
        gemm_sum<fp32_t>(p);
}
#else
// `tile` is a name such as 32x32, whose grouped form is taken where the arguments need it; `partial` is workspace for
// ceil(k / k_split) * m * n 32-bit numbers.
static void w8a8_gemm_split(const std::string& tile, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                            uintptr_t x_scales, uintptr_t w, uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n,
                            int64_t k, int64_t groups, uintptr_t partial, int64_t k_split, uintptr_t stream) {
    const W8A8Params product =
        w8a8_params("w8a8_gemm_split", out_dtype, out, x, x_scales, w, w_scales, bias, m, n, k, groups);
    CHECK(w8a8_wide(product), "w8a8_gemm_split: k of %lld, or a pointer, is no multiple of 16 bytes; use w8a8_gemm",
          (long long)k);
    const std::string kernel = "gemm_split_" + tile + (groups > 1 ? "_grouped" : "");
    if (m == 0) return;
#define SPLIT_LAUNCH(name, Shape)                                                                                      \
    if (kernel == #name) {                                                                                             \
        constexpr int step = Shape::GROUPED ? Shape::SLICES * W8A8_GROUP : Shape::COLUMNS_A_STEP;                      \
        const int64_t tiles = (m + Shape::M - 1) / Shape::M * ((n + Shape::N - 1) / Shape::N);                         \
        const int64_t quads = m * ((n + 3) / 4), sum_blocks = (quads + SUM_THREADS - 1) / SUM_THREADS;                 \
        CHECK(k_split >= step && k_split % step == 0, "w8a8_gemm_split: k_split is %lld, wanted a multiple of %d",     \
              (long long)k_split, step);                                                                               \
        const int64_t splits = (k + k_split - 1) / k_split;                                                            \
        CHECK(tiles <= INT32_MAX && sum_blocks <= INT32_MAX && splits <= 65535,                                        \
              "w8a8_gemm_split: %lld tiles in %lld parts are too many", (long long)tiles, (long long)splits);          \
        GemmSplitParams p{product, (int)k_split};                                                                      \
        p.product.out = (void*)partial;                                                                                \
        launch(kernel, {(unsigned)tiles, (unsigned)splits}, Shape::THREADS, 0, stream, p);                             \
        return launch("gemm_sum", {(unsigned)sum_blocks}, SUM_THREADS, 0, stream,                                      \
                      GemmSumParams{product, (const void*)partial, (int)splits, 0, (int)n, groups == 1, groups == 1}); \
    }
    SPLIT_TILES(SPLIT_LAUNCH)
    CHECK(false, "w8a8_gemm_split: there is no kernel %s; see csrc/linear/gemm_split.cu for the tiles", kernel.c_str());
}
REGISTER(w8a8_gemm_split)

// Columns first to first + columns - 1 of out (m, n) = sums * x_scales * w_scales + bias, of fp32 sums (m, columns).
// first is a multiple of four; columns too, unless they end with the row.
static void w8a8_scale_sums(const std::string& out_dtype, uintptr_t out, uintptr_t sums, uintptr_t x_scales,
                            uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n, int64_t first, int64_t columns,
                            uintptr_t stream) {
    const W8A8Params product =
        w8a8_params("w8a8_scale_sums", out_dtype, out, 0, x_scales, 0, w_scales, bias, m, n, W8A8_GROUP, 1);
    CHECK(first >= 0 && columns >= 0 && first + columns <= n && first % 4 == 0 &&
              (columns % 4 == 0 || first + columns == n),
          "w8a8_scale_sums: %lld columns from %lld of %lld", (long long)columns, (long long)first, (long long)n);
    const int64_t blocks = (m * ((columns + 3) / 4) + SUM_THREADS - 1) / SUM_THREADS;
    CHECK(blocks <= INT32_MAX, "w8a8_scale_sums: %lld rows of %lld are too many", (long long)m, (long long)columns);
    launch("gemm_sum", {(unsigned)blocks}, SUM_THREADS, 0, stream,
           GemmSumParams{product, (const void*)sums, 1, (int)first, (int)columns, false, true});
}
REGISTER(w8a8_scale_sums)
#endif

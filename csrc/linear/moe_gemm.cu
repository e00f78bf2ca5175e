// SPDX-License-Identifier: BSD-3-Clause
// w8a8_moe_gemm: out[r] = x[r / x_repeat] @ weight[expert_ids[r]].T with scales, as w8a8_gemm (gemm.cu) computes it.
//   x           (rows / x_repeat, k) int8, x_scales (.., groups) fp32
//   weight      (num_experts, n, k) int8, w_scales (num_experts, n, groups) fp32
//   expert_ids  (rows) int32; rows of an id outside [0, num_experts) become zeros
//   out         (rows, n)
// Everything is decided on the device and grids depend on shapes only, so that a CUDA graph can hold it.
//
// moe_gemv: for few rows an expert (decoding). One row of out at a time as int8_gemv.cuh does it: an expert's weights
// are
//   streamed once a row; rows that share an expert meet in L2.
// moe_schedule, moe_gemm: for more. One block sorts the rows by expert into tiles of one expert each (a counting sort
// in
//   shared memory), then every tile is one of int8_tile.cuh. The grid has room for the worst case, rows / tile + one
//   partial tile an expert; blocks without a tile end at once. The order of rows within a tile is that of arrival; it
//   does not reach the result, since each row of a tile is computed by itself.
#include "linear/int8_gemv.cuh"
#include "linear/int8_tile.cuh"

struct MoeGemvParams {
    W8A8Params product;     // of all rows; w and w_scales of expert 0; m is not used
    const int* expert_ids;  // (rows)
    int num_experts;
    int x_repeat;    // consecutive rows of out that share a row of x
    int k_warps;     // as in gemv.cu
    int row_blocks;  // blocks a row of out
};

struct MoeGemmParams {
    W8A8Params product;      // as above
    const int* tile_rows;    // (tiles, tile's rows) rows of out, -1 where there is none
    const int* tile_expert;  // (tiles) its expert, num_experts for rows without one, -1 for no tile
    int num_experts;
    int x_repeat;
    int tiles;
};

struct MoeScheduleParams {
    int* tile_rows;         // (tiles, tile_m)
    int* tile_expert;       // (tiles)
    const int* expert_ids;  // (rows)
    int rows, num_experts, tile_m, tiles;
};

constexpr int SCHEDULE_THREADS = 1024;
constexpr int MOST_EXPERTS = 4095;  // counts and places of them and of "none" take 32 KB of shared memory

#define MOE_GEMM_TILES(X)                       \
    X(moe_gemm_64x64, Tile64x64)                \
    X(moe_gemm_32x32, Tile32x32)                \
    X(moe_gemm_64x64_grouped, Tile64x64Grouped) \
    X(moe_gemm_32x64_grouped, Tile32x64Grouped)

#ifdef DEVICE_HALF
__device__ __forceinline__ int out_bytes(const W8A8Params& p) { return p.out_type == OUT_FP32 ? 4 : 2; }

// The product with the weights of one expert.
__device__ __forceinline__ W8A8Params of_expert(const W8A8Params& p, int expert) {
    W8A8Params own = p;
    own.w += (int64_t)expert * p.n * p.k;
    own.w_scales += (int64_t)expert * p.n * p.groups;
    return own;
}

template <bool GROUPED, bool WIDE>
__device__ __forceinline__ void moe_gemv(const MoeGemvParams& p) {
    const int row = blockIdx.x / p.row_blocks, block = blockIdx.x % p.row_blocks, expert = p.expert_ids[row];
    const bool exists = expert >= 0 && expert < p.num_experts;
    W8A8Params product = of_expert(p.product, exists ? expert : 0);
    product.out = (char*)product.out + (int64_t)row * product.n * out_bytes(product);
    product.m = 1;
    if (exists) {
        product.x += (int64_t)(row / p.x_repeat) * product.k;
        product.x_scales += (int64_t)(row / p.x_repeat) * product.groups;
        int8_gemv<1, 2, GROUPED, WIDE>(product, p.k_warps, block);
        return;
    }
    const int columns = GEMV_WARPS / p.k_warps * GEMV_N;  // a block
    for (int i = threadIdx.x; i < columns; i += GEMV_THREADS) {
        const int column = block * columns + i;
        if (column >= product.n) continue;
        if (product.out_type == OUT_FP32)
            ((fp32_t*)product.out)[column] = 0.f;
        else
            ((uint16_t*)product.out)[column] = 0;  // zero in fp16 and bf16
    }
}
KERNEL(moe_gemv, MoeGemvParams, GEMV_THREADS, 4) { moe_gemv<false, true>(p); }
KERNEL(moe_gemv_grouped, MoeGemvParams, GEMV_THREADS, 3) { moe_gemv<true, true>(p); }
KERNEL(moe_gemv_narrow, MoeGemvParams, GEMV_THREADS) { moe_gemv<false, false>(p); }

KERNEL(moe_schedule, MoeScheduleParams, SCHEDULE_THREADS) {
    // bucket num_experts is for rows without an expert
    __shared__ int counts[MOST_EXPERTS + 1];
    __shared__ int next[MOST_EXPERTS + 1];  // first tile, then the next free place of a bucket
    __shared__ int used_tiles;
    const int buckets = p.num_experts + 1;
    const auto bucket_of = [&](int row) {
        const int expert = p.expert_ids[row];
        return expert >= 0 && expert < p.num_experts ? expert : p.num_experts;
    };
    for (int b = threadIdx.x; b < buckets; b += SCHEDULE_THREADS) counts[b] = 0;
    __syncthreads();
    for (int row = threadIdx.x; row < p.rows; row += SCHEDULE_THREADS) atomicAdd(&counts[bucket_of(row)], 1);
    for (int64_t i = threadIdx.x; i < (int64_t)p.tiles * p.tile_m; i += SCHEDULE_THREADS) p.tile_rows[i] = -1;
    __syncthreads();
    if (threadIdx.x < WARP) {  // the first warp numbers the tiles, a running sum over the buckets
        const int lane = threadIdx.x;
        int before = 0;
        for (int first = 0; first < buckets; first += WARP) {
            const int b = first + lane;
            const int own = b < buckets ? (counts[b] + p.tile_m - 1) / p.tile_m : 0;
            int sum = own;
#pragma unroll
            for (int s = 1; s < WARP; s *= 2) {
                const int other = __shfl_up_sync(FULL_WARP, sum, s);
                if (lane >= s) sum += other;
            }
            if (b < buckets) next[b] = before + sum - own;
            before += __shfl_sync(FULL_WARP, sum, WARP - 1);
        }
        if (lane == 0) used_tiles = before;
    }
    __syncthreads();
    for (int t = used_tiles + threadIdx.x; t < p.tiles; t += SCHEDULE_THREADS) p.tile_expert[t] = -1;
    for (int b = threadIdx.x; b < buckets; b += SCHEDULE_THREADS) {
        const int first = next[b], tiles = (counts[b] + p.tile_m - 1) / p.tile_m;
        for (int t = 0; t < tiles; t++) p.tile_expert[first + t] = b;
        next[b] = first * p.tile_m;
    }
    __syncthreads();
    for (int row = threadIdx.x; row < p.rows; row += SCHEDULE_THREADS)
        p.tile_rows[atomicAdd(&next[bucket_of(row)], 1)] = row;
}

struct RoutedRows {
    const int* tile_rows;  // of this tile
    int x_repeat;
    __device__ __forceinline__ int source(int i) const { return max(tile_rows[i], 0) / x_repeat; }
    __device__ __forceinline__ int out(int i) const { return tile_rows[i]; }
};

template <class S>
__device__ __forceinline__ void moe_gemm(const MoeGemmParams& p) {
    const int tile = blockIdx.x % p.tiles, column0 = blockIdx.x / p.tiles * S::N, expert = p.tile_expert[tile];
    if (expert < 0) return;
    const RoutedRows rows{p.tile_rows + (int64_t)tile * S::M, p.x_repeat};
    if (expert < p.num_experts) {
        int8_tile<S>(of_expert(p.product, expert), rows, column0, KSpan{0, p.product.k, p.product.groups});
        return;
    }
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
    for (int i = threadIdx.x; i < S::M * (S::N / 4); i += S::THREADS) {
        const int row = rows.out(i / (S::N / 4)), column = column0 + i % (S::N / 4) * 4;
        if (row < 0) continue;
        if (p.product.out_type == OUT_FP32)
            store_quad<fp32_t>(p.product, row, column, zeros);
        else
            store_quad<fp16_t>(p.product, row, column, zeros);  // zero in fp16 and bf16
    }
}
#define MOE_GEMM_KERNEL(name, Shape) \
    KERNEL(name, MoeGemmParams, Shape::THREADS, Shape::BLOCKS) { moe_gemm<Shape>(p); }
MOE_GEMM_TILES(MOE_GEMM_KERNEL)
#else
// Arguments of all rows, checked.
static W8A8Params moe_product(const std::string& out_dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales, uintptr_t w,
                              uintptr_t w_scales, int64_t rows, int64_t n, int64_t k, int64_t groups,
                              int64_t num_experts, int64_t x_repeat) {
    CHECK(x_repeat >= 1 && rows % x_repeat == 0, "w8a8_moe_gemm: %lld rows with x_repeat %lld", (long long)rows,
          (long long)x_repeat);
    CHECK(num_experts >= 1 && num_experts <= MOST_EXPERTS, "w8a8_moe_gemm: %lld experts, wanted 1 to %d",
          (long long)num_experts, MOST_EXPERTS);
    W8A8Params p =
        w8a8_params("w8a8_moe_gemm", out_dtype, out, x, x_scales, w, w_scales, 0, rows / x_repeat, n, k, groups);
    return p;
}

static void w8a8_moe_gemv(int64_t k_warps, const std::string& out_dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales,
                          uintptr_t w, uintptr_t w_scales, uintptr_t expert_ids, int64_t rows, int64_t n, int64_t k,
                          int64_t groups, int64_t num_experts, int64_t x_repeat, uintptr_t stream) {
    CHECK(k_warps == 1 || k_warps == 2 || k_warps == 4 || k_warps == 8,
          "w8a8_moe_gemv: k_warps is %lld, wanted 1, 2, 4 or 8", (long long)k_warps);
    const int64_t columns = GEMV_WARPS / k_warps * GEMV_N, row_blocks = (n + columns - 1) / columns;
    const MoeGemvParams p{
        moe_product(out_dtype, out, x, x_scales, w, w_scales, rows, n, k, groups, num_experts, x_repeat),
        (const int*)expert_ids,
        (int)num_experts,
        (int)x_repeat,
        (int)k_warps,
        (int)row_blocks};
    CHECK(rows * row_blocks <= INT32_MAX, "w8a8_moe_gemv: %lld rows of %lld columns are too many", (long long)rows,
          (long long)n);
    const char* kernel = groups > 1 ? "moe_gemv_grouped" : w8a8_wide(p.product) ? "moe_gemv" : "moe_gemv_narrow";
    launch(kernel, {(unsigned)(rows * row_blocks)}, GEMV_THREADS, 0, stream, p);
}
REGISTER(w8a8_moe_gemv)

// `tile` is a name such as 64x64, whose grouped form is taken where the arguments need it. tile_rows is workspace for
// `tiles` * (tile's rows) ints, tile_expert for `tiles`; `tiles` is at least rows / (tile's rows) + min(rows, experts +
// 1).
static void w8a8_moe_gemm(const std::string& tile, const std::string& out_dtype, uintptr_t out, uintptr_t x,
                          uintptr_t x_scales, uintptr_t w, uintptr_t w_scales, uintptr_t expert_ids, int64_t rows,
                          int64_t n, int64_t k, int64_t groups, int64_t num_experts, int64_t x_repeat,
                          uintptr_t tile_rows, uintptr_t tile_expert, int64_t tiles, uintptr_t stream) {
    const W8A8Params product =
        moe_product(out_dtype, out, x, x_scales, w, w_scales, rows, n, k, groups, num_experts, x_repeat);
    CHECK(w8a8_wide(product), "w8a8_moe_gemm: k of %lld, or a pointer, is no multiple of 16 bytes; use w8a8_moe_gemv",
          (long long)k);
    const std::string kernel = "moe_gemm_" + tile + (groups > 1 ? "_grouped" : "");
    if (rows == 0) return;
#define MOE_GEMM_LAUNCH(name, Shape)                                                                 \
    if (kernel == #name) {                                                                           \
        const int64_t needed = rows / Shape::M + (rows < num_experts + 1 ? rows : num_experts + 1);  \
        const int64_t blocks = tiles * ((n + Shape::N - 1) / Shape::N);                              \
        CHECK(tiles >= needed && blocks <= INT32_MAX,                                                \
              "w8a8_moe_gemm: got %lld tiles, wanted %lld or more, and at most "                     \
              "2^31 blocks",                                                                         \
              (long long)tiles, (long long)needed);                                                  \
        const MoeScheduleParams schedule{(int*)tile_rows, (int*)tile_expert, (const int*)expert_ids, \
                                         (int)rows,       (int)num_experts,  Shape::M,               \
                                         (int)tiles};                                                \
        const MoeGemmParams p{product,          (const int*)tile_rows, (const int*)tile_expert,      \
                              (int)num_experts, (int)x_repeat,         (int)tiles};                  \
        launch("moe_schedule", {1}, SCHEDULE_THREADS, 0, stream, schedule);                          \
        return launch(kernel, {(unsigned)blocks}, Shape::THREADS, 0, stream, p);                     \
    }
    MOE_GEMM_TILES(MOE_GEMM_LAUNCH)
    CHECK(false, "w8a8_moe_gemm: there is no kernel %s; see csrc/linear/moe_gemm.cu for the tiles", kernel.c_str());
}
REGISTER(w8a8_moe_gemm)
#endif

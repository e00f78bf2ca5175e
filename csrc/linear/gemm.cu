// SPDX-License-Identifier: BSD-3-Clause
// w8a8_gemm: out[m, n] = sum_k x[m, k] * w[n, k] * x_scale * w_scale + bias, integer products by dp4a.
//   x        (m, k) int8, x_scales (m, groups) fp32        w  (n, k) int8, w_scales (n, groups) fp32
//   bias     (n) T or null                                 out (m, n) T
// groups is 1 (one scale a row) or k / 128: sums inside a group are exact int32, groups are added in fp32 in order.
//
// gemm_tile: one block (256 threads) a TILE_M x TILE_N tile, 8x8 outputs a thread on a 16x16 grid of threads. Shared
// memory holds 32-bit words of four consecutive k, word-major (word, row), so that a thread's rows are one 128-bit load;
// rows are padded by 4 words to keep the transposing stores free of bank conflicts. The next K step is fetched to
// registers while this one is multiplied: one barrier a step, two stages of 2 * 8 * 132 words = 16.9 KB.
// gemv: few rows (m <= 8): one warp a weight row streams its bytes once, 16 a lane, for all rows of x.
// k must be a multiple of 4; 16-byte loads are used where k is a multiple of 16, else 4-byte ones.
#include "common/device.cuh"

struct GemmParams {
    void* out;               // (m, n) T
    const int8_t* x;         // (m, k)
    const float* x_scales;   // (m, groups)
    const int8_t* w;         // (n, k)
    const float* w_scales;   // (n, groups)
    const void* bias;        // (n) T or null
    int m, n, k;
    int groups;              // 1, or k / 128
};

constexpr int TILE_M = 128, TILE_N = 128;  // outputs of a block
constexpr int STEP_WORDS = 8;              // words of four k in a K step: 32 columns, a quarter of a group
constexpr int ROW_WORDS = TILE_M + 4;      // padded row of one word position
constexpr int GROUP_STEPS = 128 / (4 * STEP_WORDS);
constexpr int GEMV_ROWS = 8;               // most rows of x that gemv takes
constexpr int GEMV_WARPS = 4;              // weight rows a block

#ifdef DEVICE_HALF
// Word `word` (columns 4 word to 4 word + 3) of row `row`, 0 outside the matrix.
__device__ __forceinline__ int load_word(const int8_t* matrix, int rows, int k, int row, int word) {
    if (row >= rows || 4 * word >= k) return 0;
    return *(const int*)(matrix + (int64_t)row * k + 4 * word);
}

// Four consecutive words starting at `word`, one 16-byte load where the row allows it.
__device__ __forceinline__ int4 load_words(const int8_t* matrix, int rows, int k, int row, int word, bool wide) {
    if (wide && row < rows && 4 * word + 16 <= k) return *(const int4*)(matrix + (int64_t)row * k + 4 * word);
    return make_int4(load_word(matrix, rows, k, row, word), load_word(matrix, rows, k, row, word + 1),
                     load_word(matrix, rows, k, row, word + 2), load_word(matrix, rows, k, row, word + 3));
}

template <class T, bool GROUPED>
__device__ __forceinline__ void tile(const GemmParams& p) {
    __shared__ __align__(16) int xs[2][STEP_WORDS][ROW_WORDS];
    __shared__ __align__(16) int ws[2][STEP_WORDS][ROW_WORDS];
    const int tid = threadIdx.x;
    const int row0 = blockIdx.y * TILE_M, column0 = blockIdx.x * TILE_N;
    const int tx = tid % 16, ty = tid / 16;        // outputs: rows ty*4 + {0..3, 64..67}, columns likewise from tx
    const int load_row = tid / 2, load_word0 = (tid % 2) * 4;
    const bool wide = p.k % 16 == 0;
    const int steps = (p.k + 4 * STEP_WORDS - 1) / (4 * STEP_WORDS);

    int sums[8][8];
    float totals[GROUPED ? 8 : 1][8];  // of the groups that are complete
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sums[i][j] = 0;
            if (GROUPED) totals[GROUPED ? i : 0][j] = 0.f;
        }

    int4 next_x, next_w;
    auto fetch = [&](int step) {
        const int word = step * STEP_WORDS + load_word0;
        next_x = load_words(p.x, p.m, p.k, row0 + load_row, word, wide);
        next_w = load_words(p.w, p.n, p.k, column0 + load_row, word, wide);
    };
    auto store = [&](int stage) {
        const int xv[4] = {next_x.x, next_x.y, next_x.z, next_x.w}, wv[4] = {next_w.x, next_w.y, next_w.z, next_w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) xs[stage][load_word0 + i][load_row] = xv[i], ws[stage][load_word0 + i][load_row] = wv[i];
    };
    auto row_of = [&](int i) { return row0 + ty * 4 + (i & 3) + (i >> 2) * 64; };
    auto column_of = [&](int j) { return column0 + tx * 4 + (j & 3) + (j >> 2) * 64; };

    fetch(0);
    store(0);
    __syncthreads();
    for (int step = 0; step < steps; step++) {
        const int stage = step & 1;
        if (step + 1 < steps) fetch(step + 1);
#pragma unroll
        for (int word = 0; word < STEP_WORDS; word++) {
            const int4 x0 = *(const int4*)&xs[stage][word][ty * 4], x1 = *(const int4*)&xs[stage][word][ty * 4 + 64];
            const int4 w0 = *(const int4*)&ws[stage][word][tx * 4], w1 = *(const int4*)&ws[stage][word][tx * 4 + 64];
            const int xv[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
            const int wv[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sums[i][j] = __dp4a(xv[i], wv[j], sums[i][j]);
        }
        if (step + 1 < steps) store(stage ^ 1);
        if (GROUPED && (step + 1) % GROUP_STEPS == 0) {  // a group is complete: scale it and start the next
            const int group = step / GROUP_STEPS;
            float x_scale[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                x_scale[i] = row_of(i) < p.m ? p.x_scales[(int64_t)row_of(i) * p.groups + group] : 0.f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float w_scale = column_of(j) < p.n ? p.w_scales[(int64_t)column_of(j) * p.groups + group] : 0.f;
#pragma unroll
                for (int i = 0; i < 8; i++) totals[GROUPED ? i : 0][j] += (float)sums[i][j] * x_scale[i] * w_scale, sums[i][j] = 0;
            }
        }
        __syncthreads();
    }

    T* out = (T*)p.out;
    const T* bias = (const T*)p.bias;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = row_of(i);
        if (row >= p.m) continue;
        const float x_scale = GROUPED ? 1.f : p.x_scales[row];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int column = column_of(j);
            if (column >= p.n) continue;
            float v = GROUPED ? totals[GROUPED ? i : 0][j] : (float)sums[i][j] * x_scale * p.w_scales[column];
            if (bias) v += to_float(bias[column]);
            out[(int64_t)row * p.n + column] = from_float<T>(v);
        }
    }
}
template <class T>
__device__ void gemm_tile(const GemmParams& p) {
    tile<T, false>(p);
}
KERNELS(gemm_tile, GemmParams, 256, 2)

template <class T>
__device__ void gemm_tile_grouped(const GemmParams& p) {
    tile<T, true>(p);
}
KERNELS(gemm_tile_grouped, GemmParams, 256, 1)

// ROWS rows of x against the weight row of this warp.
template <class T, int ROWS>
__device__ __forceinline__ void gemv_rows(const GemmParams& p, int row0) {
    const int lane = threadIdx.x % WARP;
    const int column = blockIdx.x * GEMV_WARPS + threadIdx.x / WARP;
    if (column >= p.n) return;
    const int8_t* w = p.w + (int64_t)column * p.k;
    const bool wide = p.k % 16 == 0;
    const int chunk = wide ? 16 : 4;  // bytes a lane takes at once
    const bool grouped = p.groups > 1;
    int sums[ROWS];
    float totals[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = 0, totals[r] = 0.f;

    for (int at = lane * chunk; at < p.k; at += WARP * chunk) {
        if (wide) {
            const uint4 wv = load_stream(w + at);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int4 xv = *(const int4*)(p.x + (int64_t)(row0 + r) * p.k + at);
                sums[r] = __dp4a((int)wv.x, xv.x, sums[r]);
                sums[r] = __dp4a((int)wv.y, xv.y, sums[r]);
                sums[r] = __dp4a((int)wv.z, xv.z, sums[r]);
                sums[r] = __dp4a((int)wv.w, xv.w, sums[r]);
            }
        } else {
            const int wv = *(const int*)(w + at);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                sums[r] = __dp4a(wv, *(const int*)(p.x + (int64_t)(row0 + r) * p.k + at), sums[r]);
        }
        if (grouped) {  // a lane's chunk lies in one group, so its partial sum can be scaled by itself
            const float w_scale = p.w_scales[(int64_t)column * p.groups + at / 128];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                totals[r] += (float)sums[r] * (p.x_scales[(int64_t)(row0 + r) * p.groups + at / 128] * w_scale);
                sums[r] = 0;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float v = grouped ? warp_sum(totals[r]) : (float)warp_sum(sums[r]) * p.x_scales[row0 + r] * p.w_scales[column];
        if (p.bias) v += to_float(((const T*)p.bias)[column]);
        if (lane == 0) ((T*)p.out)[(int64_t)(row0 + r) * p.n + column] = from_float<T>(v);
    }
}

template <class T>
__device__ void gemv(const GemmParams& p) {
    int row = 0;  // eight rows at a time would spill nothing, but m is rarely 8: binary pieces of m
    if (p.m & 8) gemv_rows<T, 8>(p, row), row += 8;
    if (p.m & 4) gemv_rows<T, 4>(p, row), row += 4;
    if (p.m & 2) gemv_rows<T, 2>(p, row), row += 2;
    if (p.m & 1) gemv_rows<T, 1>(p, row);
}
KERNELS(gemv, GemmParams, GEMV_WARPS* WARP)
#else
#include "launch.h"

static void w8a8_gemm(const std::string& dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales, uintptr_t w,
                      uintptr_t w_scales, uintptr_t bias, int64_t m, int64_t n, int64_t k, int64_t groups,
                      uintptr_t stream) {
    CHECK(k >= 4 && k % 4 == 0, "w8a8_gemm: k is %lld, wanted a multiple of 4", (long long)k);
    CHECK(groups == 1 || groups * 128 == k, "w8a8_gemm: %lld groups for k of %lld, wanted 1 or k / 128",
          (long long)groups, (long long)k);
    GemmParams p{(void*)out,     (const int8_t*)x, (const float*)x_scales, (const int8_t*)w, (const float*)w_scales,
                 (const void*)bias, (int)m,        (int)n,                 (int)k,           (int)groups};
    if (m <= GEMV_ROWS) {
        if (m == 0) return;
        launch("gemv_" + dtype, {(unsigned)((n + GEMV_WARPS - 1) / GEMV_WARPS)}, GEMV_WARPS * 32, 0, stream, p);
    } else {
        const Dim3 grid{(unsigned)((n + TILE_N - 1) / TILE_N), (unsigned)((m + TILE_M - 1) / TILE_M)};
        launch((groups == 1 ? "gemm_tile_" : "gemm_tile_grouped_") + dtype, grid, 256, 0, stream, p);
    }
}
REGISTER(w8a8_gemm)
#endif

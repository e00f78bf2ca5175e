// SPDX-License-Identifier: BSD-3-Clause
// Some rows of out for one to eight rows of x, by one block: the weights are streamed once, at memory speed.
// gemv.cu and moe_gemm.cu say which rows; the scheme is this file's.
//
// A block is GEMV_WARPS warps: row sets x k_warps. A row set is GEMV_N weight rows; its k_warps warps share the
// columns. A lane takes 16 bytes of each of its warp's GEMV_N rows at a time, 32 lanes side by side: 512 columns a warp
// and step. STAGES steps are in flight: each register is refilled right after its use (9 % at m = 4 in the prototype).
// x comes through L1, once for GEMV_N weight rows.
//
// The sums of a warp's lanes are added by a transposing butterfly (one shuffle a sum in place of five), those of its
// k_warps through 1 KB of shared memory, in order: the result depends on k_warps but not on how many rows x has.
// Grouped: a lane's 16 columns lie in one group; their exact int32 sum is scaled and added to fp32 totals.
#pragma once
#include "linear/w8a8.cuh"

constexpr int GEMV_WARPS = 8, GEMV_THREADS = GEMV_WARPS * WARP;
constexpr int GEMV_N = 4;       // weight rows a warp
constexpr int GEMV_CHUNK = 16;  // columns a lane takes at once
constexpr int GEMV_STEP = WARP * GEMV_CHUNK;

#ifdef DEVICE_HALF
// Sum each of COUNT values (a power of two, at most 32) over the warp: lane l is left with sum l * COUNT / 32 in v[0].
template <int COUNT, int SPAN = WARP / 2, class V>
__device__ __forceinline__ void transposing_sum(V* v) {
    if constexpr (SPAN > 0) {
        if constexpr (COUNT > 1) {
            const bool upper = threadIdx.x & SPAN;
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                const V give = upper ? v[i] : v[i + COUNT / 2], own = upper ? v[i + COUNT / 2] : v[i];
                v[i] = own + __shfl_xor_sync(FULL_WARP, give, SPAN);
            }
        } else {
            v[0] += __shfl_xor_sync(FULL_WARP, v[0], SPAN);
        }
        transposing_sum<(COUNT > 1 ? COUNT / 2 : 1), SPAN / 2>(v);
    }
}

// 16 bytes of a row of `k` from `column` on, zeros beyond its end, read word by word.
__device__ __forceinline__ uint4 load_narrow(const uint32_t* at, int column, int k) {
    return make_uint4(column < k ? at[0] : 0, column + 4 < k ? at[1] : 0, column + 8 < k ? at[2] : 0,
                      column + 12 < k ? at[3] : 0);
}
// The same of the row that starts at 32-bit word `row` of a matrix; at once where it is wide.
template <bool WIDE>
__device__ __forceinline__ uint4 load_weights(const int8_t* matrix, uint32_t row, int column, int k) {
    const uint32_t* at = (const uint32_t*)matrix + (row + (uint32_t)column / 4);
    return WIDE ? load_stream_if(at, column < k) : load_narrow(at, column, k);
}
// The same where `column` is inside the row: kept in L1.
template <bool WIDE>
__device__ __forceinline__ uint4 load_activations(const int8_t* row, int column, int k) {
    return WIDE ? *(const uint4*)(row + column) : load_narrow((const uint32_t*)(row + column), column, k);
}

// Add the sums of the warps that share columns, scale, write. `first` is the block's first weight row.
template <class T>
__device__ __forceinline__ void finish_gemv(const W8A8Params& p, int first, int rows, const int* partial, int k_warps,
                                            bool grouped) {
    const int sums = rows * GEMV_N, sets = GEMV_WARPS / k_warps;
    for (int i = threadIdx.x; i < sets * sums; i += GEMV_THREADS) {
        const int set = i / sums, at = i % sums, r = at % rows, column = first + set * GEMV_N + at / rows;
        if (r >= p.m || column >= p.n) continue;
        const int* from = partial + set * k_warps * WARP + at;
        int sum = from[0];
        float total = __int_as_float(sum);
        for (int w = 1; w < k_warps; w++) {
            if (grouped)
                total += __int_as_float(from[w * WARP]);
            else
                sum += from[w * WARP];
        }
        const float bias = load_bias<T>(p, column);
        const float v = grouped ? total + bias : add_scaled(bias, (float)sum, p.x_scales[r], p.w_scales[column]);
        ((T*)p.out)[(int64_t)r * p.n + column] = from_float<T>(v);
    }
}

// All p.m rows of out (at most ROWS), for the weight rows of block number `block`.
template <int ROWS, int STAGES, bool GROUPED, bool WIDE = true>
__device__ __forceinline__ void int8_gemv(const W8A8Params& p, int k_warps, int block) {
    constexpr int SUMS = ROWS * GEMV_N;  // of a lane; sum i * ROWS + r is that of weight row i and row r of x
    static_assert(SUMS <= WARP, "");
    __shared__ int partial[GEMV_WARPS * WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first = block * (GEMV_WARPS / k_warps) * GEMV_N;
    const int step = k_warps * GEMV_STEP;

    uint32_t w_row[GEMV_N], w_scale_row[GEMV_N];  // where the warp's weight rows start, in words and in scales
#pragma unroll
    for (int i = 0; i < GEMV_N; i++) {
        const uint32_t row = min(first + warp / k_warps * GEMV_N + i, p.n - 1);
        w_row[i] = row * (uint32_t)(p.k / 4);
        w_scale_row[i] = row * (uint32_t)p.groups;
    }
    int sums[GROUPED ? 1 : SUMS];
    float totals[GROUPED ? SUMS : 1];
#pragma unroll
    for (int s = 0; s < SUMS; s++) sums[GROUPED ? 0 : s] = 0, totals[GROUPED ? s : 0] = 0.f;

    const int lane_column = (warp % k_warps * WARP + lane) * GEMV_CHUNK;
    uint4 weights[STAGES][GEMV_N];
#pragma unroll
    for (int s = 0; s < STAGES; s++)
#pragma unroll
        for (int i = 0; i < GEMV_N; i++) weights[s][i] = load_weights<WIDE>(p.w, w_row[i], lane_column + s * step, p.k);
#pragma unroll 1
    for (int column0 = 0; column0 < p.k; column0 += STAGES * step) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            const int column = column0 + lane_column + s * step;
            if (column < p.k) {
                float w_scale[GEMV_N];
                if (GROUPED)
#pragma unroll
                    for (int i = 0; i < GEMV_N; i++) w_scale[i] = p.w_scales[w_scale_row[i] + column / W8A8_GROUP];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const int row = min(r, p.m - 1);
                    const uint4 x = load_activations<WIDE>(p.x + row * p.k, column, p.k);
                    const float x_scale = GROUPED ? p.x_scales[row * p.groups + column / W8A8_GROUP] : 1.f;
#pragma unroll
                    for (int i = 0; i < GEMV_N; i++) {
                        if (GROUPED) {
                            float& total = totals[GROUPED ? i * ROWS + r : 0];
                            const int sum = dot16(weights[s][i], x, MAGIC_BITS);
                            total = add_scaled(total, magic_to_float(sum), x_scale, w_scale[i]);
                        } else {
                            int& sum = sums[GROUPED ? 0 : i * ROWS + r];
                            sum = dot16(weights[s][i], x, sum);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < GEMV_N; i++)
                weights[s][i] = load_weights<WIDE>(p.w, w_row[i], column + STAGES * step, p.k);
        }
    }

    int own;
    if constexpr (GROUPED) {
        transposing_sum<SUMS>(totals);
        own = __float_as_int(totals[0]);
    } else {
        transposing_sum<SUMS>(sums);
        own = sums[0];
    }
    if (lane % (WARP / SUMS) == 0) partial[warp * WARP + lane / (WARP / SUMS)] = own;
    __syncthreads();
    if (p.out_type == OUT_FP16)
        finish_gemv<fp16_t>(p, first, ROWS, partial, k_warps, GROUPED);
    else if (p.out_type == OUT_BF16)
        finish_gemv<bf16_t>(p, first, ROWS, partial, k_warps, GROUPED);
    else
        finish_gemv<fp32_t>(p, first, ROWS, partial, k_warps, GROUPED);
}
#endif

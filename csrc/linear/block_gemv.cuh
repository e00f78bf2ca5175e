// SPDX-License-Identifier: BSD-3-Clause
// Some rows of out for one to eight rows of x and weights in blocks: int8_gemv.cuh's scheme with a decoder.
//
// A lane takes a unit of 32 columns of each of its warp's GEMV_N weight rows, 32 lanes side by side: 1024 columns a
// warp and step. It decodes the four units once and multiplies them by every row of x; the bytes of its next units
// travel meanwhile. x comes through L1, once for GEMV_N weight rows.
//
// A zero point costs no instruction a code: it is taken off as ZERO times the sum of x, which starts the sum. That sum,
// and the one which minima are multiplied by, are dp4a with ones, once for GEMV_N weight rows.
#pragma once
#include "linear/block_params.cuh"
#include "linear/int8_gemv.cuh"

#ifdef DEVICE_HALF
template <class F, int ROWS>
__device__ __forceinline__ void block_gemv(const BlockParams& p) {
    constexpr int SUMS = ROWS * GEMV_N, SCALES = F::SCALES;
    static_assert(SUMS <= WARP, "");
    __shared__ int partial[GEMV_WARPS * WARP];
    const W8A8Params& q = p.product;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int first = blockIdx.x * (GEMV_WARPS / p.k_warps) * GEMV_N;
    const int units = q.groups, step = p.k_warps * WARP;

    uint32_t row_unit[GEMV_N];  // number of the first unit of the warp's weight rows
#pragma unroll
    for (int i = 0; i < GEMV_N; i++)
        row_unit[i] = (uint32_t)min(first + warp / p.k_warps * GEMV_N + i, q.n - 1) * (uint32_t)units;
    float totals[SUMS];
#pragma unroll
    for (int s = 0; s < SUMS; s++) totals[s] = 0.f;

    int unit = warp % p.k_warps * WARP + lane;
    typename F::Raw raw[GEMV_N];
#pragma unroll
    for (int i = 0; i < GEMV_N; i++) raw[i] = F::load(p.planes, row_unit[i] + min(unit, units - 1));
#pragma unroll 1
    for (; unit < units; unit += step) {
        Unit<SCALES> w[GEMV_N];
#pragma unroll
        for (int i = 0; i < GEMV_N; i++) F::decode(p.planes, raw[i], unit, w[i]);
        const int next = min(unit + step, units - 1);
#pragma unroll
        for (int i = 0; i < GEMV_N; i++) raw[i] = F::load(p.planes, row_unit[i] + next);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = min(r, q.m - 1);
            const uint4* x = (const uint4*)(q.x + row * q.k + unit * UNIT);
            const uint4 x_half[2] = {x[0], x[1]};
            const float x_scale = q.x_scales[row * units + unit];
            int start[SCALES];
            float x_sum[SCALES];  // scaled
#pragma unroll
            for (int h = 0; h < SCALES; h++) {
                start[h] = MAGIC_BITS;
                if (F::ZERO == 0 && !F::MINIMA) continue;
                int sum = sum16(x_half[h], MAGIC_BITS);
                if (SCALES == 1) sum = sum16(x_half[1], sum);
                x_sum[h] = magic_to_float(sum) * x_scale;
                start[h] -= F::ZERO * (sum - MAGIC_BITS);
            }
#pragma unroll
            for (int i = 0; i < GEMV_N; i++) {
                float& total = totals[i * ROWS + r];
#pragma unroll
                for (int h = 0; h < SCALES; h++) {
                    int sum = dot16(h ? w[i].last : w[i].first, x_half[h], start[h]);
                    if (SCALES == 1) sum = dot16(w[i].last, x_half[1], sum);
                    total = add_scaled(total, magic_to_float(sum), x_scale, w[i].scale[h]);
                    if (F::MINIMA) total = fmaf(x_sum[h], w[i].minimum[h], total);
                }
            }
        }
    }

    transposing_sum<SUMS>(totals);
    if (lane % (WARP / SUMS) == 0) partial[warp * WARP + lane / (WARP / SUMS)] = __float_as_int(totals[0]);
    __syncthreads();
    if (q.out_type == OUT_FP16)
        finish_gemv<fp16_t>(q, first, ROWS, partial, p.k_warps, true);
    else if (q.out_type == OUT_BF16)
        finish_gemv<bf16_t>(q, first, ROWS, partial, p.k_warps, true);
    else
        finish_gemv<fp32_t>(q, first, ROWS, partial, p.k_warps, true);
}
#endif

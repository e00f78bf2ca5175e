// SPDX-License-Identifier: BSD-3-Clause
// w8a8_moe_gemm: out[r] = x[r / x_repeat] @ weight[expert_ids[r]].T with scales, integer products by dp4a.
//   x       (rows / x_repeat, k) int8, x_scales (.., groups) fp32    expert_ids (rows) int32, outside [0, experts): zeros
//   weight  (experts, n, k) int8, w_scales (experts, n, groups)     out (rows, n) T
// Each warp takes one (row, n): the expert's weight row is streamed once a row, which suits decoding; rows that share an
// expert meet in L2. moe_sum: out[t] = sum over j in order of weights[t, j] * y[t, j], in fp32.
#include "common/device.cuh"

struct MoeGemmParams {
    void* out;                // (rows, n) T
    const int8_t* x;
    const float* x_scales;
    const int8_t* weight;
    const float* w_scales;
    const int* expert_ids;    // (rows)
    int n, k, groups, num_experts, x_repeat;
};

struct MoeSumParams {
    void* out;                // (tokens, n) T
    const void* y;            // (tokens, topk, n) T
    const float* weights;     // (tokens, topk)
    int n, topk;
};

constexpr int MOE_WARPS = 4;

#ifdef DEVICE_HALF
template <class T>
__device__ void moe_gemm(const MoeGemmParams& p) {
    const int64_t row = blockIdx.y;
    const int lane = threadIdx.x % WARP, column = blockIdx.x * MOE_WARPS + threadIdx.x / WARP;
    if (column >= p.n) return;
    const int expert = p.expert_ids[row];
    if (expert < 0 || expert >= p.num_experts) {
        if (lane == 0) ((T*)p.out)[row * p.n + column] = from_float<T>(0.f);
        return;
    }
    const int8_t* x = p.x + row / p.x_repeat * p.k;
    const float* x_scales = p.x_scales + row / p.x_repeat * p.groups;
    const int64_t weight_row = (int64_t)expert * p.n + column;
    const int8_t* w = p.weight + weight_row * p.k;
    const float* w_scales = p.w_scales + weight_row * p.groups;
    const bool grouped = p.groups > 1;
    int sum = 0;
    float total = 0.f;
    for (int at = lane * 4; at < p.k; at += WARP * 4) {
        sum = __dp4a(*(const int*)(w + at), *(const int*)(x + at), sum);
        if (grouped) total += (float)sum * (x_scales[at / 128] * w_scales[at / 128]), sum = 0;
    }
    const float v = grouped ? warp_sum(total) : (float)warp_sum(sum) * x_scales[0] * w_scales[0];
    if (lane == 0) ((T*)p.out)[row * p.n + column] = from_float<T>(v);
}
KERNELS(moe_gemm, MoeGemmParams, MOE_WARPS* WARP)

template <class T>
__device__ void moe_sum(const MoeSumParams& p) {
    const int64_t token = blockIdx.x;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        float total = 0.f;
        for (int j = 0; j < p.topk; j++)
            total += p.weights[token * p.topk + j] * to_float(((const T*)p.y)[(token * p.topk + j) * p.n + i]);
        ((T*)p.out)[token * p.n + i] = from_float<T>(total);
    }
}
KERNELS(moe_sum, MoeSumParams, 256)
#else
#include "launch.h"

static void w8a8_moe_gemm(const std::string& dtype, uintptr_t out, uintptr_t x, uintptr_t x_scales, uintptr_t weight,
                          uintptr_t w_scales, uintptr_t expert_ids, int64_t rows, int64_t n, int64_t k, int64_t groups,
                          int64_t num_experts, int64_t x_repeat, uintptr_t stream) {
    CHECK(k >= 4 && k % 4 == 0, "w8a8_moe_gemm: k is %lld, wanted a multiple of 4", (long long)k);
    MoeGemmParams p{(void*)out,         (const int8_t*)x, (const float*)x_scales, (const int8_t*)weight,
                    (const float*)w_scales, (const int*)expert_ids, (int)n, (int)k, (int)groups, (int)num_experts,
                    (int)x_repeat};
    const unsigned blocks = (unsigned)((n + MOE_WARPS - 1) / MOE_WARPS);
    const int64_t most = 65535 / x_repeat * x_repeat;  // rows a launch: grid.y ends there
    for (int64_t first = 0; first < rows; first += most) {
        MoeGemmParams part = p;
        part.out = (char*)out + first * n * (dtype == "fp32" ? 4 : 2);
        part.x += first / x_repeat * k, part.x_scales += first / x_repeat * groups, part.expert_ids += first;
        const int64_t now = rows - first < most ? rows - first : most;
        launch("moe_gemm_" + dtype, {blocks, (unsigned)now}, MOE_WARPS * 32, 0, stream, part);
    }
}
REGISTER(w8a8_moe_gemm)

static void moe_sum(const std::string& dtype, uintptr_t out, uintptr_t y, uintptr_t weights, int64_t tokens,
                    int64_t topk, int64_t n, uintptr_t stream) {
    MoeSumParams p{(void*)out, (const void*)y, (const float*)weights, (int)n, (int)topk};
    launch("moe_sum_" + dtype, {(unsigned)tokens}, 256, 0, stream, p);
}
REGISTER(moe_sum)
#endif

// SPDX-License-Identifier: BSD-3-Clause
// moe_sum: out[t] = sum over j, in order, of weights[t, j] * y[t, j], each product and sum rounded to fp32.
//   y (tokens, topk, n) T, contiguous      weights (tokens, topk) fp32      out (tokens, n) T
// A thread sums eight neighbouring columns; bound by reading y.
#include "common/eight.cuh"

struct MoeSumParams {
    void* out;             // (tokens, n) T
    const void* y;         // (tokens, topk, n) T
    const float* weights;  // (tokens, topk)
    int64_t tokens;
    int n, topk;
    bool wide;  // as in common/eight.cuh, for y and out
};

constexpr int MOE_SUM_THREADS = 256;

#ifdef DEVICE_HALF
template <class T>
__device__ void moe_sum(const MoeSumParams& p) {
    const int64_t row_chunks = (p.n + EIGHT - 1) / EIGHT;
    const int64_t chunk = (int64_t)blockIdx.x * MOE_SUM_THREADS + threadIdx.x, token = chunk / row_chunks;
    if (token >= p.tokens) return;
    const int column = (int)(chunk % row_chunks) * EIGHT;
    const T* y = (const T*)p.y + token * p.topk * p.n;
    const float* weights = p.weights + token * p.topk;
    Eight total = {};
#pragma unroll 4
    for (int j = 0; j < p.topk; j++) {
        const Eight v = load_eight(y + (int64_t)j * p.n, column, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) total.v[i] = __fadd_rn(total.v[i], __fmul_rn(weights[j], v.v[i]));
    }
    store_eight((T*)p.out + token * p.n, column, p.n, p.wide, total);
}
KERNELS(moe_sum, MoeSumParams, MOE_SUM_THREADS)
#else
#include "launch.h"

static void moe_sum(const std::string& dtype, uintptr_t out, uintptr_t y, uintptr_t weights, int64_t tokens,
                    int64_t topk, int64_t n, uintptr_t stream) {
    CHECK(n >= 1 && n <= INT32_MAX - EIGHT && topk >= 1 && topk <= INT32_MAX, "moe_sum: got topk %lld and n %lld",
          (long long)topk, (long long)n);
    const int64_t blocks = (tokens * ((n + EIGHT - 1) / EIGHT) + MOE_SUM_THREADS - 1) / MOE_SUM_THREADS;
    CHECK(blocks <= INT32_MAX, "moe_sum: %lld tokens of %lld are too many", (long long)tokens, (long long)n);
    const bool wide = n % EIGHT == 0 && (out | y) % 16 == 0;
    const MoeSumParams p{(void*)out, (const void*)y, (const float*)weights, tokens, (int)n, (int)topk, wide};
    launch("moe_sum_" + dtype, {(unsigned)blocks}, MOE_SUM_THREADS, 0, stream, p);
}
REGISTER(moe_sum)
#endif

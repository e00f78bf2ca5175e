// SPDX-License-Identifier: BSD-3-Clause
// greedy_argmax: the index of the largest logit of each row, the first of equals; NaN counts as largest.
// repetition_penalty: logits of tokens seen in prompt or output are divided (if positive) or multiplied by the penalty.
//   logits (rows, n) T, rows strided    out (rows) int64    masks (rows, n) bool    penalties (rows) P
// One block a row.
#include "common/device.cuh"

struct SamplingParams {
    int64_t* out;                // (rows), argmax only
    void* logits;                // (rows, n) T
    const uint8_t* prompt_mask;  // (rows, n) bool, penalty only
    const uint8_t* output_mask;
    const float* penalties;  // (rows)
    int64_t stride;          // elements from one row of logits to the next
    int n;
};

#ifdef DEVICE_HALF
// Is candidate (v, i) better than (best, at)?
__device__ __forceinline__ bool better(float v, int i, float best, int at) {
    const bool v_nan = v != v, best_nan = best != best;
    if (v_nan || best_nan) return v_nan && (!best_nan || i < at);
    return v > best || (v == best && i < at);
}

template <class T>
__device__ void greedy_argmax(const SamplingParams& p) {
    __shared__ float values[WARP];
    __shared__ int indices[WARP];
    const T* logits = (const T*)p.logits + blockIdx.x * p.stride;
    float best = -INFINITY;
    int at = 0x7fffffff;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        const float v = to_float(logits[i]);
        if (better(v, i, best, at)) best = v, at = i;
    }
    auto reduce = [&] {
#pragma unroll
        for (int s = WARP / 2; s; s >>= 1) {
            const float v = __shfl_xor_sync(FULL_WARP, best, s);
            const int i = __shfl_xor_sync(FULL_WARP, at, s);
            if (better(v, i, best, at)) best = v, at = i;
        }
    };
    reduce();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if (lane == 0) values[warp] = best, indices[warp] = at;
    __syncthreads();
    if (warp == 0) {
        best = lane < warps ? values[lane] : -INFINITY;
        at = lane < warps ? indices[lane] : 0x7fffffff;
        reduce();
        if (lane == 0) p.out[blockIdx.x] = at;
    }
}
KERNELS(greedy_argmax, SamplingParams, 1024)

template <class T>
__device__ void repetition_penalty(const SamplingParams& p) {
    const int64_t row = blockIdx.x;
    T* logits = (T*)p.logits + row * p.stride;
    const float penalty = p.penalties[row];
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
        if (!(p.prompt_mask[row * p.n + i] | p.output_mask[row * p.n + i])) continue;
        const float v = to_float(logits[i]);
        logits[i] = from_float<T>(v > 0.f ? v / penalty : v * penalty);
    }
}
KERNELS(repetition_penalty, SamplingParams, 1024)
#else
#include "launch.h"

static void greedy_argmax(const std::string& dtype, uintptr_t out, uintptr_t logits, int64_t rows, int64_t n,
                          int64_t stride, uintptr_t stream) {
    CHECK(n >= 1, "greedy_argmax: a row has no logits");
    SamplingParams p{(int64_t*)out, (void*)logits, nullptr, nullptr, nullptr, stride, (int)n};
    launch("greedy_argmax_" + dtype, {(unsigned)rows}, 1024, 0, stream, p);
}
REGISTER(greedy_argmax)

static void repetition_penalty(const std::string& dtype, uintptr_t logits, uintptr_t prompt_mask, uintptr_t output_mask,
                               uintptr_t penalties, int64_t rows, int64_t n, int64_t stride, uintptr_t stream) {
    SamplingParams p{
        nullptr, (void*)logits, (const uint8_t*)prompt_mask, (const uint8_t*)output_mask, (const float*)penalties,
        stride,  (int)n};
    launch("repetition_penalty_" + dtype, {(unsigned)rows}, 1024, 0, stream, p);
}
REGISTER(repetition_penalty)
#endif

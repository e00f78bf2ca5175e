// SPDX-License-Identifier: BSD-3-Clause
// merge_attn_states: joins two attentions over different keys by their log-sum-exps (natural), in fp32.
//   a, b = lse of prefix and suffix; +inf means that nothing was attended, as -inf does
//   out = (exp(a) prefix + exp(b) suffix) / (exp(a) + exp(b)), zeros if both attended nothing; out_lse its lse
//   prefix, suffix, out  (tokens, heads, head_dim) T, elements of a head contiguous    lse  (heads, tokens) fp32
// Tokens from with_prefix on have no prefix: their suffix is copied. Method: arXiv:2501.01005, section 2.2.
// One warp a (token, head), eight a block.
#include "common/device.cuh"

struct MergeParams {
    void* out;
    float* out_lse;  // or null
    const void* prefix;
    const float* prefix_lse;
    const void* suffix;
    const float* suffix_lse;
    int64_t out_strides[2], prefix_strides[2], suffix_strides[2];  // elements from one token, head to the next
    int64_t out_lse_strides[2], prefix_lse_strides[2], suffix_lse_strides[2];  // the same
    int64_t tokens, with_prefix;
    int heads, head_dim;
};

constexpr int MERGE_WARPS = 8;

#ifdef DEVICE_HALF
template <class T>
__device__ void merge_attn_states(const MergeParams& p) {
    const int64_t task = (int64_t)blockIdx.x * MERGE_WARPS + threadIdx.x / WARP;
    if (task >= p.tokens * p.heads) return;
    const int64_t token = task / p.heads, head = task % p.heads;
    auto at = [&](const int64_t* strides) { return token * strides[0] + head * strides[1]; };
    const T* prefix = (const T*)p.prefix + at(p.prefix_strides);
    const T* suffix = (const T*)p.suffix + at(p.suffix_strides);
    T* out = (T*)p.out + at(p.out_strides);

    const bool joined = token < p.with_prefix;
    float a = joined ? p.prefix_lse[at(p.prefix_lse_strides)] : -INFINITY, b = p.suffix_lse[at(p.suffix_lse_strides)];
    if (a == INFINITY) a = -INFINITY;
    if (b == INFINITY) b = -INFINITY;
    const float most = fmaxf(a, b);
    const float weight_a = a == -INFINITY ? 0.f : expf(a - most), weight_b = b == -INFINITY ? 0.f : expf(b - most);
    const float total = weight_a + weight_b, inv_total = total > 0.f ? 1.f / total : 0.f;
    const int lane = threadIdx.x % WARP;
    for (int i = lane; i < p.head_dim; i += WARP) {
        if (!joined) {
            out[i] = suffix[i];
            continue;
        }
        // what attended nothing may hold anything, NaN too
        const float from_a = weight_a > 0.f ? to_float(prefix[i]) * (weight_a * inv_total) : 0.f;
        const float from_b = weight_b > 0.f ? to_float(suffix[i]) * (weight_b * inv_total) : 0.f;
        out[i] = from_float<T>(from_a + from_b);
    }
    if (p.out_lse && lane == 0) p.out_lse[at(p.out_lse_strides)] = total > 0.f ? logf(total) + most : -INFINITY;
}
KERNELS(merge_attn_states, MergeParams, MERGE_WARPS* WARP)
#else
#include "launch.h"

static void merge_attn_states(const std::string& dtype, uintptr_t out, uintptr_t out_lse, uintptr_t prefix,
                              uintptr_t prefix_lse, uintptr_t suffix, uintptr_t suffix_lse,
                              const std::vector<int64_t>& strides, int64_t tokens, int64_t heads, int64_t head_dim,
                              int64_t with_prefix, uintptr_t stream) {
    CHECK(strides.size() == 12, "merge_attn_states: got %zu strides, wanted 12", strides.size());
    MergeParams p{};
    p.out = (void*)out;
    p.out_lse = (float*)out_lse;
    p.prefix = (const void*)prefix;
    p.prefix_lse = (const float*)prefix_lse;
    p.suffix = (const void*)suffix;
    p.suffix_lse = (const float*)suffix_lse;
    int64_t* const targets[] = {p.out_strides,     p.prefix_strides,     p.suffix_strides,
                                p.out_lse_strides, p.prefix_lse_strides, p.suffix_lse_strides};
    for (int i = 0; i < 12; i++) targets[i / 2][i % 2] = strides[i];
    p.tokens = tokens, p.with_prefix = with_prefix;
    p.heads = (int)heads, p.head_dim = (int)head_dim;
    launch("merge_attn_states_" + dtype, {(unsigned)((tokens * heads + MERGE_WARPS - 1) / MERGE_WARPS)},
           MERGE_WARPS * WARP, 0, stream, p);
}
REGISTER(merge_attn_states)
#endif

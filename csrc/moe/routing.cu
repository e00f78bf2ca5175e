// SPDX-License-Identifier: BSD-3-Clause
// topk_routing: which experts take a token, and with what weights.
//   score  = softmax(logits), sigmoid(logits), sqrt(softplus(logits)) or logits, in fp32
//   chosen = the topk best of score + bias, best first, the lower expert of equals; NaN ranks as -inf
//   weight = score of the chosen, divided by their sum if renormalised, times scale
// Experts may lie in groups: then only the topk_group best groups take part, ranked by their best expert or, with a
// bias, by the sum of their two best (DeepSeek-V3). Hash routing (DeepSeek-V4) reads the experts of a token from a
// table by its id instead; image tokens, IMAGE_SENTINELS ids from image_sentinel on, choose by image_bias in its place.
// Padding tokens get weight 0 and expert -1.
//   logits (tokens, experts) T    bias, image_bias (experts) fp32    weights, ids, token_expert (tokens, topk)
// One warp a token, four a block. Its scores and ranks lie in shared memory, 8 bytes an expert: 24 KB for 768 experts.
// A choice is one pass over the ranks and a warp reduction; a rank that is taken becomes NaN, which never wins.
#include "common/device.cuh"

enum class Scoring : int { NONE, SOFTMAX, SIGMOID, SQRT_SOFTPLUS };

struct RoutingParams {
    float* weights;
    void* ids;          // int32, or int64 if wide_ids
    int* token_expert;  // token + tokens * choice, or null
    const void* logits;
    const float* bias;          // or null
    const uint8_t* is_padding;  // (tokens) bool, or null
    const int64_t* tokens_in;   // (tokens) token ids, with hash_table or image_bias
    const int* hash_table;      // (vocabulary, topk) experts, or null
    const float* image_bias;    // or null
    int64_t image_sentinel;     // first token id of images; 0: none
    int64_t logits_stride;      // elements from one row of logits to the next
    int tokens, experts, topk, groups, topk_group;
    Scoring scoring;
    int renormalize, wide_ids;
    float scale;
};

constexpr int ROUTING_WARPS = 4;
constexpr int MAX_GROUPS = 32;     // one lane each
constexpr int MAX_EXPERTS = 1536;  // 48 KB of shared memory
constexpr int IMAGE_SENTINELS = 5;

#ifdef DEVICE_HALF
struct Best {
    float value;
    int at;
};
__device__ __forceinline__ Best better(Best a, Best b) {  // NaN in b never wins
    return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int s = WARP / 2; s; s >>= 1) {
        const float value = __shfl_xor_sync(FULL_WARP, best.value, s);
        const int at = __shfl_xor_sync(FULL_WARP, best.at, s);
        best = better(best, Best{value, at});
    }
    return best;
}

// Fill score[] with the scores of the warp's token.
template <class T>
__device__ __forceinline__ void fill_scores(const RoutingParams& p, const T* logits, float* score, int lane) {
    float most = -INFINITY, total = 0.f;
    for (int e = lane; e < p.experts; e += WARP) {
        const float v = to_float(logits[e]);
        score[e] = v;
        most = fmaxf(most, v);
    }
    if (p.scoring == Scoring::SOFTMAX) most = warp_max(most);
    for (int e = lane; e < p.experts; e += WARP) {
        const float v = score[e];
        if (p.scoring == Scoring::SOFTMAX) {
            score[e] = expf(v - most);
            total += score[e];
        } else if (p.scoring == Scoring::SIGMOID) {
            score[e] = 1.f / (1.f + expf(-v));
        } else if (p.scoring == Scoring::SQRT_SOFTPLUS) {
            score[e] = sqrtf(v > 20.f ? v : log1pf(expf(v)));
        }
    }
    if (p.scoring == Scoring::SOFTMAX) {
        const float inv_total = 1.f / warp_sum(total);
        for (int e = lane; e < p.experts; e += WARP) score[e] *= inv_total;
    }
}

// Set the ranks of all groups but the topk_group best to -inf.
__device__ __forceinline__ void keep_best_groups(const RoutingParams& p, float* rank, int lane) {
    const int size = p.experts / p.groups;
    float first = -INFINITY, second = -INFINITY;
    if (lane < p.groups)
        for (int i = 0; i < size; i++) {
            const float v = rank[lane * size + i];
            second = fmaxf(second, fminf(first, v));
            first = fmaxf(first, v);
        }
    const float mine = p.bias && size > 1 ? first + second : first;
    int ahead = 0;  // groups that go before mine
    for (int g = 0; g < p.groups; g++) {
        const float other = __shfl_sync(FULL_WARP, mine, g);
        ahead += other > mine || (other == mine && g < lane);
    }
    __syncwarp();
    if (lane < p.groups && ahead >= p.topk_group)
        for (int i = 0; i < size; i++) rank[lane * size + i] = -INFINITY;
    __syncwarp();
}

template <class T>
__device__ void topk_routing(const RoutingParams& p) {
    DYNAMIC_SHARED(float, shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, token = blockIdx.x * ROUTING_WARPS + warp;
    if (token >= p.tokens) return;
    float* const score = shared + warp * 2 * p.experts;
    float* const rank = score + p.experts;
    fill_scores(p, (const T*)p.logits + token * p.logits_stride, score, lane);

    const int64_t id = p.tokens_in ? p.tokens_in[token] : 0;
    const bool is_image =
        p.image_bias && p.image_sentinel > 0 && id >= p.image_sentinel && id < p.image_sentinel + IMAGE_SENTINELS;
    const float* bias = is_image ? p.image_bias : p.bias;
    for (int e = lane; e < p.experts; e += WARP) {
        const float v = bias ? score[e] + bias[e] : score[e];
        rank[e] = v != v ? -INFINITY : v;
    }
    __syncwarp();
    if (p.groups > 1) keep_best_groups(p, rank, lane);

    const bool hashed = p.hash_table && !is_image;
    float total = 0.f;
    for (int j = 0; j < p.topk; j++) {
        int expert;
        if (hashed) {
            expert = p.hash_table[id * p.topk + j];
        } else {
            Best best = {-INFINITY, 0x7fffffff};
            for (int e = lane; e < p.experts; e += WARP) best = better(best, Best{rank[e], e});
            expert = warp_best(best).at;
        }
        const float weight = score[expert];
        total += weight;
        if (lane == 0) {
            const int64_t at = (int64_t)token * p.topk + j;
            const bool padding = p.is_padding && p.is_padding[token];
            if (!hashed) rank[expert] = __int_as_float(0x7fc00000);
            p.weights[at] = padding ? 0.f : weight;  // scaled below
            if (p.wide_ids)
                ((int64_t*)p.ids)[at] = padding ? -1 : expert;
            else
                ((int*)p.ids)[at] = padding ? -1 : expert;
            if (p.token_expert) p.token_expert[at] = token + p.tokens * j;
        }
        __syncwarp();
    }
    const float factor = p.renormalize && total > 0.f ? p.scale / total : p.scale;
    for (int j = lane; j < p.topk; j += WARP) p.weights[(int64_t)token * p.topk + j] *= factor;
}
KERNELS(topk_routing, RoutingParams, ROUTING_WARPS* WARP)
#else
#include <map>

#include "launch.h"

static void topk_routing(const std::string& dtype, const std::string& scoring, uintptr_t weights, uintptr_t ids,
                         uintptr_t token_expert, uintptr_t logits, uintptr_t bias, uintptr_t is_padding,
                         uintptr_t tokens_in, uintptr_t hash_table, uintptr_t image_bias, int64_t image_sentinel,
                         int64_t logits_stride, int64_t tokens, int64_t experts, int64_t topk, int64_t groups,
                         int64_t topk_group, bool renormalize, bool wide_ids, double scale, uintptr_t stream) {
    static const std::map<std::string, Scoring> scorings = {{"none", Scoring::NONE},
                                                            {"softmax", Scoring::SOFTMAX},
                                                            {"sigmoid", Scoring::SIGMOID},
                                                            {"sqrt_softplus", Scoring::SQRT_SOFTPLUS}};
    const auto found = scorings.find(scoring);
    CHECK(found != scorings.end(), "topk_routing: there is no scoring called %s", scoring.c_str());
    CHECK(topk >= 1 && topk <= experts && experts <= MAX_EXPERTS,
          "topk_routing: got top %lld of %lld experts, wanted at least 1 of at most %d", (long long)topk,
          (long long)experts, MAX_EXPERTS);
    CHECK(groups >= 1 && groups <= MAX_GROUPS && experts % groups == 0 && topk_group >= 1 && topk_group <= groups,
          "topk_routing: got %lld of %lld groups for %lld experts, wanted equal groups, at most %d",
          (long long)topk_group, (long long)groups, (long long)experts, MAX_GROUPS);
    RoutingParams p{};
    p.weights = (float*)weights;
    p.ids = (void*)ids;
    p.token_expert = (int*)token_expert;
    p.logits = (const void*)logits;
    p.bias = (const float*)bias;
    p.is_padding = (const uint8_t*)is_padding;
    p.tokens_in = (const int64_t*)tokens_in;
    p.hash_table = (const int*)hash_table;
    p.image_bias = (const float*)image_bias;
    p.image_sentinel = image_sentinel;
    p.logits_stride = logits_stride;
    p.tokens = (int)tokens, p.experts = (int)experts, p.topk = (int)topk;
    p.groups = (int)groups, p.topk_group = (int)topk_group;
    p.scoring = found->second;
    p.renormalize = renormalize, p.wide_ids = wide_ids;
    p.scale = (float)scale;
    const unsigned blocks = (unsigned)((tokens + ROUTING_WARPS - 1) / ROUTING_WARPS);
    launch("topk_routing_" + dtype, {blocks}, ROUTING_WARPS * WARP, ROUTING_WARPS * 2 * (unsigned)experts * 4, stream,
           p);
}
REGISTER(topk_routing)
#endif

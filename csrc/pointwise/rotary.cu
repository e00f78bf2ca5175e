// SPDX-License-Identifier: BSD-3-Clause
// rotary_embedding: rotates pairs of query and key elements by their position's angles, in place, in fp32.
//   query, key     (tokens, heads, head_dim) T, token and head strides in elements; key may be absent
//   cos_sin_cache  (positions, rotary_dim) C: rotary_dim / 2 cosines, then as many sines
// NeoX pairs element i with i + rotary_dim / 2, GPT-J element 2 i with 2 i + 1, both from rope_dim_offset on.
// One block a token; its threads walk (head, pair).
#include "common/device.cuh"

struct RotaryParams {
    const int64_t* positions;  // (tokens)
    void* query;
    void* key;  // or null
    const void* cos_sin_cache;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride;
    int num_heads, num_kv_heads, rotary_dim, rope_dim_offset;
    int is_neox, inverse, cache_is_fp32;
};

#ifdef DEVICE_HALF
template <class T>
__device__ __forceinline__ void rotate_heads(const RotaryParams& p, T* x, int64_t head_stride, int heads,
                                             int64_t position) {
    const int half = p.rotary_dim / 2;
    for (int task = threadIdx.x; task < heads * half; task += blockDim.x) {
        const int head = task / half, pair = task % half;
        const int64_t at = position * p.rotary_dim + pair;
        const float cosine =
            p.cache_is_fp32 ? ((const float*)p.cos_sin_cache)[at] : to_float(((const T*)p.cos_sin_cache)[at]);
        float sine = p.cache_is_fp32 ? ((const float*)p.cos_sin_cache)[at + half]
                                     : to_float(((const T*)p.cos_sin_cache)[at + half]);
        if (p.inverse) sine = -sine;
        T* first = x + head * head_stride + p.rope_dim_offset + (p.is_neox ? pair : 2 * pair);
        T* second = first + (p.is_neox ? half : 1);
        const float a = to_float(*first), b = to_float(*second);
        *first = from_float<T>(a * cosine - b * sine);
        *second = from_float<T>(b * cosine + a * sine);
    }
}

template <class T>
__device__ void rotary_embedding(const RotaryParams& p) {
    const int64_t token = blockIdx.x, position = p.positions[token];
    rotate_heads(p, (T*)p.query + token * p.query_token_stride, p.query_head_stride, p.num_heads, position);
    if (p.key) rotate_heads(p, (T*)p.key + token * p.key_token_stride, p.key_head_stride, p.num_kv_heads, position);
}
KERNELS(rotary_embedding, RotaryParams, 256)
#else
#include "launch.h"

static void rotary_embedding(const std::string& dtype, uintptr_t positions, uintptr_t query, uintptr_t key,
                             uintptr_t cos_sin_cache, int64_t tokens, int64_t query_token_stride,
                             int64_t query_head_stride, int64_t key_token_stride, int64_t key_head_stride,
                             int64_t num_heads, int64_t num_kv_heads, int64_t rotary_dim, int64_t rope_dim_offset,
                             bool is_neox, bool inverse, bool cache_is_fp32, uintptr_t stream) {
    RotaryParams p{(const int64_t*)positions,
                   (void*)query,
                   (void*)key,
                   (const void*)cos_sin_cache,
                   query_token_stride,
                   query_head_stride,
                   key_token_stride,
                   key_head_stride,
                   (int)num_heads,
                   (int)num_kv_heads,
                   (int)rotary_dim,
                   (int)rope_dim_offset,
                   is_neox,
                   inverse,
                   cache_is_fp32};
    launch("rotary_embedding_" + dtype, {(unsigned)tokens}, 256, 0, stream, p);
}
REGISTER(rotary_embedding)
#endif

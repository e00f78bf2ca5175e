// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of the paged KV cache, one struct kv_<format> for a row of KV_LAYOUTS (formats/layout.py); the
// reference codec is formats/kv.py. A page of one KV head is four planes, page_size tokens each:
//
//     K codes [page_size][head_dim] | V codes [page_size][head_dim] | K scales [page_size] | V scales [page_size]
//
// head_dim is a multiple of 8 and page_size of 16, so planes start on 16 bytes and rows on 8 (on 16 where head_dim
// times BYTES is a multiple of 16). Kernels read four neighbouring values at a time, a quad, which is BYTES 32-bit
// words.
#pragma once
#include "common/device.cuh"
#include "format_layout.h"

#ifdef DEVICE_HALF
#include "formats/int8.cuh"

// Codec of the format that an image is for.
#define KV_CODEC CONCATENATE(kv_, FORMAT)

constexpr int QUAD = 4;  // values

// N 32-bit words from or to an address that is a multiple of their bytes (of 16 if they are more).
template <int N>
__device__ __forceinline__ void load_words(uint32_t* words, const void* address) {
    static_assert(N == 1 || N == 2 || N % 4 == 0, "1, 2 or fours of words");
    if constexpr (N == 1) {
        words[0] = __ldg((const uint32_t*)address);
    } else if constexpr (N == 2) {
        const uint2 v = __ldg((const uint2*)address);
        words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 v = __ldg((const uint4*)address + i / 4);
            words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
        }
    }
}
template <int N>
__device__ __forceinline__ void store_words(void* address, const uint32_t* words) {
    static_assert(N == 1 || N == 2 || N == 4, "");
    if constexpr (N == 1)
        *(uint32_t*)address = words[0];
    else if constexpr (N == 2)
        *(uint2*)address = make_uint2(words[0], words[1]);
    else
        *(uint4*)address = make_uint4(words[0], words[1], words[2], words[3]);
}
template <int N>
__device__ __forceinline__ void clear_words(uint32_t* words) {
#pragma unroll
    for (int i = 0; i < N; i++) words[i] = 0;
}

__device__ __forceinline__ uint16_t bits_of(fp16_t v) { return __half_as_ushort(v); }
__device__ __forceinline__ uint16_t bits_of(bf16_t v) { return v.bits; }

// Floating point, stored as it is. T: the storage type.
template <class T>
struct kv_float {
    static constexpr bool QUANTIZED = false;
    static constexpr int BYTES = sizeof(T);  // a value
    static __device__ __forceinline__ void decode(const uint32_t* words, float* values) {
        if constexpr (BYTES == 4) {
#pragma unroll
            for (int i = 0; i < QUAD; i++) values[i] = __uint_as_float(words[i]);
        } else {
#pragma unroll
            for (int i = 0; i < QUAD; i++)
                values[i] = to_float(from_bits<T>((uint16_t)(words[i / 2] >> (16 * (i % 2)))));
        }
    }
    static __device__ __forceinline__ void encode(const float* values, uint32_t* words) {
        if constexpr (BYTES == 4) {
#pragma unroll
            for (int i = 0; i < QUAD; i++) words[i] = __float_as_uint(values[i]);
        } else {
#pragma unroll
            for (int i = 0; i < QUAD; i += 2)
                words[i / 2] =
                    (uint32_t)bits_of(from_float<T>(values[i])) | (uint32_t)bits_of(from_float<T>(values[i + 1])) << 16;
        }
    }
};
struct kv_fp16 : kv_float<fp16_t> {};
struct kv_bf16 : kv_float<bf16_t> {};
struct kv_fp32 : kv_float<fp32_t> {};

// int8 codes; value = code * scale, one fp32 scale a token for K and one for V.
struct kv_int8 {
    static constexpr bool QUANTIZED = true;
    static constexpr int BYTES = 1;
    static_assert(kv_layout_int8::k_bits == 8 && kv_layout_int8::v_bits == 8 && kv_layout_int8::scale_bytes == 4,
                  "formats/layout.py says otherwise");
    // Codes as floats. 0x4B0000xx is 2^23 + xx, so two full-rate instructions a value do what a conversion does at a
    // quarter of the rate.
    static __device__ __forceinline__ void decode(const uint32_t* words, float* codes) {
        const uint32_t biased = words[0] ^ 0x80808080u;  // code + 128, unsigned
#pragma unroll
        for (int i = 0; i < QUAD; i++)
            codes[i] = __uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7440u + i)) - (8388608.f + 128.f);
    }
    static __device__ __forceinline__ void encode(const float* values, float scale, uint32_t* words) {
        words[0] = pack_codes(int8_code(values[0], scale), int8_code(values[1], scale), int8_code(values[2], scale),
                              int8_code(values[3], scale));
    }
};
#endif

// SPDX-License-Identifier: BSD-3-Clause
// Device codecs of the paged KV cache, one struct kv_<format> for a row of KV_LAYOUTS (formats/layout.py); the
// reference codec is formats/kv.py. A page of one KV head is four planes, page_size tokens each:
//
//     K codes [page_size][row] | V codes [page_size][row] | K scales [page_size][groups] | V scales [page_size][groups]
//
// head_dim is a multiple of 8 and page_size of 16, so planes start on 16 bytes. A row of codes of 8 bits or more starts
// on 8 bytes (on 16 where it is a multiple of them), one of fewer bits on 4. Kernels take four neighbouring values at a
// time, a quad, or two of them.
//
// A plane's codec has: row_bytes and groups of a row; fetch<N>, the words that hold values d .. d + N - 1 of a row, as
// loaded; decode<N>, the values in these words, to be multiplied by multiplier(scale of their group).
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

template <int BYTES>
struct ScaleType {
    typedef fp32_t type;
};
template <>
struct ScaleType<2> {
    typedef fp16_t type;
};

// Sizes of a plane's rows, from its row of the table.
template <int BITS_, int SCALE_BYTES_, int GROUP_, int PADDED_TO>
struct PlaneSizes {
    static constexpr int BITS = BITS_;  // a value
    static constexpr int SCALE_BYTES = SCALE_BYTES_;
    static constexpr int GROUP = GROUP_;  // values that share a scale, 0: all of a row
    static constexpr bool QUANTIZED = SCALE_BYTES > 0;
    typedef typename ScaleType<SCALE_BYTES>::type Scale;
    static __device__ __forceinline__ int padded(int head_dim) {
        return (head_dim + PADDED_TO - 1) / PADDED_TO * PADDED_TO;
    }
    static __device__ __forceinline__ int row_bytes(int head_dim) { return padded(head_dim) * BITS / 8; }
    static __device__ __forceinline__ int groups(int head_dim) {
        return GROUP ? (head_dim + (GROUP ? GROUP : 1) - 1) / (GROUP ? GROUP : 1) : 1;
    }
    static __device__ __forceinline__ int scale_row_bytes(int head_dim) { return groups(head_dim) * SCALE_BYTES; }
    // Whether all values of a row up to `width` share a scale.
    static __host__ __device__ constexpr bool one_scale(int width) { return GROUP == 0 || GROUP >= width; }
};
template <class Row>
using KPlane = PlaneSizes<Row::k_bits, Row::k_scale_bytes, Row::k_group, Row::k_padded_to>;
template <class Row>
using VPlane = PlaneSizes<Row::v_bits, Row::v_scale_bytes, Row::v_group, Row::v_padded_to>;

// A statistic over `lanes` neighbouring lanes (a power of two) in the order of the reference.
template <class Codes>
__device__ __forceinline__ float statistic_of_lanes(float v, int lanes) {
    for (int s = lanes / 2; s; s >>= 1) v = Codes::combine(v, __shfl_xor_sync(FULL_WARP, v, s));
    return v;
}

// Floating point, stored as it is. T: the storage type.
template <class T, class Sizes>
struct FloatCodes : Sizes {
    static constexpr int BYTES = sizeof(T);
    static_assert(Sizes::BITS == 8 * BYTES && !Sizes::QUANTIZED, "formats/layout.py says otherwise");
    template <int N>
    static constexpr int WORDS = N * BYTES / 4;
    template <int N>
    static __device__ __forceinline__ void fetch(const char* row, int d, int, uint32_t* words) {
        load_words<WORDS<N>>(words, row + d * BYTES);
    }
    template <int N>
    static __device__ __forceinline__ void decode(const uint32_t* words, int, float* values) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if constexpr (BYTES == 4)
                values[i] = __uint_as_float(words[i]);
            else
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

// What the quantised codecs have for writing: the statistic of a group's values, the scale that is stored for it, what
// values are divided by, a quad's codes, and where they go: store is called by a whole warp, `valid` says for whom.

// int8 codes in [-127, 127]; scale = largest magnitude / 127.
template <class Sizes>
struct Int8Codes : Sizes {
    static_assert(Sizes::BITS == 8 && Sizes::QUANTIZED, "formats/layout.py says otherwise");
    typedef typename Sizes::Scale Scale;
    static constexpr int BYTES = 1;
    template <int N>
    static constexpr int WORDS = N / 4;
    template <int N>
    static __device__ __forceinline__ void fetch(const char* row, int d, int, uint32_t* words) {
        load_words<WORDS<N>>(words, row + d);
    }
    // Codes as floats. 0x4B0000xx is 2^23 + xx, so two full-rate instructions a value do what a conversion does at a
    // quarter of the rate.
    template <int N>
    static __device__ __forceinline__ void decode(const uint32_t* words, int, float* codes) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t biased = words[i / QUAD] ^ 0x80808080u;  // code + 128, unsigned
            codes[i] = __uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7440u + i % QUAD)) - (8388608.f + 128.f);
        }
    }
    static __device__ __forceinline__ float multiplier(Scale scale) { return to_float(scale); }

    static __device__ __forceinline__ float statistic(const float* values) {
        return max_magnitude(max_magnitude(fabsf(values[0]), fabsf(values[1])),
                             max_magnitude(fabsf(values[2]), fabsf(values[3])));
    }
    static __device__ __forceinline__ float combine(float a, float b) { return max_magnitude(a, b); }
    static __device__ __forceinline__ Scale scale_of(float amax, int) {
        const Scale scale = from_float<Scale>(int8_scale(amax));
        return to_float(scale) == 0.f ? from_float<Scale>(1.f) : scale;
    }
    static __device__ __forceinline__ float divisor(Scale scale) { return to_float(scale); }
    static __device__ __forceinline__ uint32_t encode(const float* values, float scale) {
        return pack_codes(int8_code(values[0], scale), int8_code(values[1], scale), int8_code(values[2], scale),
                          int8_code(values[3], scale));
    }
    static __device__ __forceinline__ void store(char* row, int d, uint32_t codes, bool valid) {
        if (valid) *(uint32_t*)(row + d) = codes;
    }
};

// Bits of a number that fp16 holds exactly and normally, or of 0.
__host__ __device__ constexpr uint32_t fp16_bits(float value) {
    if (value == 0.f) return 0;
    float magnitude = value < 0.f ? -value : value;
    uint32_t exponent = 15;
    for (; magnitude >= 2.f; magnitude /= 2.f) exponent++;
    for (; magnitude < 1.f; magnitude *= 2.f) exponent--;
    return (value < 0.f ? 0x8000u : 0u) | exponent << 10 | (uint32_t)((magnitude - 1.f) * 1024.f);
}
struct Nf4Levels {
    static constexpr int COUNT = 16;
    static __host__ __device__ constexpr float level(int code) {
        constexpr float levels[] = NF4_LEVELS;
        return levels[code];
    }
};
struct LloydLevels {
    static constexpr int COUNT = 8;
    static __host__ __device__ constexpr float level(int code) {
        constexpr float levels[] = LLOYD_LEVELS;
        return levels[code];
    }
};

// The levels of four codes, from their fp16 bytes by byte permutation: `codes` has one in each of its low four nibbles.
// 8 to 15 instructions for four values, where reading a table of shared memory would take as many loads as values.
template <class Levels>
struct LevelTable {
    // Low (byte 0) or high (byte 1) bytes of the levels first .. first + 3.
    static __host__ __device__ constexpr uint32_t bytes(int first, int byte) {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= (fp16_bits(Levels::level(first + i)) >> (8 * byte) & 255u) << (8 * i);
        return word;
    }
    template <int BYTE>
    static __device__ __forceinline__ uint32_t look_up(uint32_t codes) {
        constexpr uint32_t a = bytes(0, BYTE), b = bytes(4, BYTE);
        if constexpr (Levels::COUNT == 8) {
            return __byte_perm(a, b, codes);
        } else {
            constexpr uint32_t c = bytes(8, BYTE), d = bytes(12, BYTE);
            const uint32_t within = codes & 0x7777u, half = (codes >> 1 & 0x4444u) | 0x3210u;
            return __byte_perm(__byte_perm(a, b, within), __byte_perm(c, d, within), half);
        }
    }
    static __device__ __forceinline__ void decode(uint32_t codes, float* values) {
        const uint32_t low = look_up<0>(codes), high = look_up<1>(codes);
        const uint32_t pairs[2] = {__byte_perm(low, high, 0x5140u), __byte_perm(low, high, 0x7362u)};
#pragma unroll
        for (int i = 0; i < QUAD; i++)
            values[i] = to_float(from_bits<fp16_t>((uint16_t)(pairs[i / 2] >> (16 * (i % 2)))));
    }
    // Code of the nearest level; half-way between two it is the lower one, and the lowest for NaN.
    static __device__ __forceinline__ uint32_t encode(float x) {
        uint32_t code = 0;
#pragma unroll
        for (int i = 0; i + 1 < Levels::COUNT; i++) code += x > (Levels::level(i) + Levels::level(i + 1)) / 2.f;
        return code;
    }
};

// NF4 codes, two in a byte, the first in its low half; scale = largest magnitude.
template <class Sizes>
struct Nf4Codes : Sizes {
    static_assert(Sizes::BITS == 4 && Sizes::SCALE_BYTES == 2, "formats/layout.py says otherwise");
    typedef typename Sizes::Scale Scale;
    template <int N>
    static constexpr int WORDS = 1;
    template <int N>
    static __device__ __forceinline__ void fetch(const char* row, int d, int, uint32_t* words) {
        static_assert(N == 4 || N == 8, "");
        if constexpr (N == 4)
            words[0] = __ldg((const unsigned short*)(row + d / 2));
        else
            words[0] = __ldg((const uint32_t*)(row + d / 2));
    }
    template <int N>
    static __device__ __forceinline__ void decode(const uint32_t* words, int, float* levels) {
#pragma unroll
        for (int i = 0; i < N; i += QUAD) LevelTable<Nf4Levels>::decode(words[0] >> (4 * i), levels + i);
    }
    static __device__ __forceinline__ float multiplier(Scale scale) { return to_float(scale); }

    static __device__ __forceinline__ float statistic(const float* values) {
        return Int8Codes<PlaneSizes<8, 4, 0, 1>>::statistic(values);
    }
    static __device__ __forceinline__ float combine(float a, float b) { return max_magnitude(a, b); }
    static __device__ __forceinline__ Scale scale_of(float amax, int) {
        const Scale scale = from_float<Scale>(amax);
        return to_float(scale) == 0.f ? from_float<Scale>(1.f) : scale;
    }
    static __device__ __forceinline__ float divisor(Scale scale) { return to_float(scale); }
    static __device__ __forceinline__ uint32_t encode(const float* values, float scale) {
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < QUAD; i++) codes |= LevelTable<Nf4Levels>::encode(__fdiv_rn(values[i], scale)) << (4 * i);
        return codes;
    }
    static __device__ __forceinline__ void store(char* row, int d, uint32_t codes, bool valid) {
        if (valid) *(uint16_t*)(row + d / 2) = (uint16_t)codes;
    }
};

// 3-bit Lloyd-Max codes, a stream from the lowest bit of 32-bit words on; scale = norm of a block of 128.
template <class Sizes>
struct LloydCodes : Sizes {
    static_assert(Sizes::BITS == 3 && Sizes::SCALE_BYTES == 4 && Sizes::GROUP == LLOYD_BLOCK,
                  "formats/layout.py says otherwise");
    typedef typename Sizes::Scale Scale;
    template <int N>
    static constexpr int WORDS = 2;  // the codes may lie across two
    template <int N>
    static __device__ __forceinline__ void fetch(const char* row, int d, int row_bytes, uint32_t* words) {
        const int word = 3 * d / 32;
        words[0] = __ldg((const uint32_t*)row + word);
        words[1] = __ldg((const uint32_t*)row + min(word + 1, row_bytes / 4 - 1));
    }
    template <int N>
    static __device__ __forceinline__ void decode(const uint32_t* words, int d, float* levels) {
        const uint32_t stream = __funnelshift_r(words[0], words[1], 3 * d % 32);
#pragma unroll
        for (int i = 0; i < N; i += QUAD) {
            uint32_t codes = stream >> (3 * i) & 0xFFFu;
            codes = (codes & 0x3Fu) | (codes << 2 & 0x3F00u);  // two a byte
            codes = (codes & 0x0707u) | (codes << 1 & 0x7070u);
            LevelTable<LloydLevels>::decode(codes, levels + i);
        }
    }
    static __device__ __forceinline__ float multiplier(Scale norm) { return __fmul_rn(norm, LLOYD_UNIT); }

    static __device__ __forceinline__ float statistic(const float* values) {
        float sum = __fmul_rn(values[0], values[0]);
#pragma unroll
        for (int i = 1; i < QUAD; i++) sum = __fadd_rn(sum, __fmul_rn(values[i], values[i]));
        return sum;
    }
    static __device__ __forceinline__ float combine(float a, float b) { return __fadd_rn(a, b); }
    static __device__ __forceinline__ Scale scale_of(float squares, int values) {
        return __fsqrt_rn(__fmul_rn(squares, __fdiv_rn((float)LLOYD_BLOCK, (float)values)));
    }
    static __device__ __forceinline__ float divisor(Scale norm) { return multiplier(norm == 0.f ? 1.f : norm); }
    static __device__ __forceinline__ uint32_t encode(const float* values, float unit) {
        uint32_t codes = 0;
#pragma unroll
        for (int i = 0; i < QUAD; i++) codes |= LevelTable<LloydLevels>::encode(__fdiv_rn(values[i], unit)) << (3 * i);
        return codes;
    }
    // Even and odd quads lie in neighbouring lanes, and fill three bytes together.
    static __device__ __forceinline__ void store(char* row, int d, uint32_t codes, bool valid) {
        const uint32_t pair = codes | __shfl_down_sync(FULL_WARP, codes, 1) << 12;
        if (valid && d % 8 == 0) {
            char* const at = row + d / 8 * 3;
            at[0] = (char)pair, at[1] = (char)(pair >> 8), at[2] = (char)(pair >> 16);
        }
    }
};

// The formats.
#define KV_FLOAT(name, T)                                  \
    struct kv_##name {                                     \
        typedef FloatCodes<T, KPlane<kv_layout_##name>> K; \
        typedef FloatCodes<T, VPlane<kv_layout_##name>> V; \
    };
KV_FLOAT(fp16, fp16_t)
KV_FLOAT(bf16, bf16_t)
KV_FLOAT(fp32, fp32_t)
#define KV_QUANTIZED(name, VCodes)                     \
    struct kv_##name {                                 \
        typedef Int8Codes<KPlane<kv_layout_##name>> K; \
        typedef VCodes<VPlane<kv_layout_##name>> V;    \
    };
KV_QUANTIZED(int8, Int8Codes)
KV_QUANTIZED(k8v8_g32, Int8Codes)
KV_QUANTIZED(k8v8_g16, Int8Codes)
KV_QUANTIZED(k8v4, Nf4Codes)
KV_QUANTIZED(k8v3, LloydCodes)

// Where things lie in a page of one KV head, in bytes.
template <class Codec>
struct PageMap {
    int k_row, v_row, k_scale_row, v_scale_row;  // of a token
    int v_codes, k_scales, v_scales;             // from the page's beginning

    __device__ __forceinline__ PageMap(int head_dim, int page_size)
        : k_row(Codec::K::row_bytes(head_dim)),
          v_row(Codec::V::row_bytes(head_dim)),
          k_scale_row(Codec::K::scale_row_bytes(head_dim)),
          v_scale_row(Codec::V::scale_row_bytes(head_dim)),
          v_codes(page_size * k_row),
          k_scales(v_codes + page_size * v_row),
          v_scales(k_scales + page_size * k_scale_row) {}
};
#endif

// SPDX-License-Identifier: BSD-3-Clause
// kv_write: new keys and values to their slots of the paged cache, in its format; one image a KV format.
//   key, value  (tokens, num_kv_heads, head_dim) T, token and head strides in elements
//   cache       pages, see formats/kv.cuh
//   slots       (tokens) int64, page * page_size + offset; negative ones are skipped
// One block of four warps a token, one warp a row of K or V at a time; a lane holds up to two quads of it in registers,
// so that a row is read once. Quantised formats: bit for bit as the reference.
// Needs head_dim % 8 == 0, at most 256.
#include "common/device.cuh"
#include "format_layout.h"

struct KvWriteParams {
    const void* key;
    const void* value;
    char* cache;
    const int64_t* slots;
    int64_t key_token_stride, key_head_stride;      // elements
    int64_t value_token_stride, value_head_stride;  // elements
    int64_t page_stride, head_stride;               // bytes
    int num_kv_heads, head_dim, page_size;
    bool wide;  // rows of key and value allow loads of a quad
};

constexpr int KV_WRITE_THREADS = 128;

#ifdef DEVICE_HALF
#include "formats/kv.cuh"

constexpr int LANE_QUADS = 2;

template <class T>
using InputCodes = FloatCodes<T, PlaneSizes<8 * sizeof(T), 0, 0, 1>>;

template <class T>
__device__ __forceinline__ void load_quad(const T* row, bool wide, float* values) {
    if (wide) {
        uint32_t words[sizeof(T)];
        load_words<sizeof(T)>(words, row);
        InputCodes<T>::template decode<QUAD>(words, 0, values);
    } else {
#pragma unroll
        for (int i = 0; i < QUAD; i++) values[i] = to_float(row[i]);
    }
}

// A row of K or V, of which a lane holds quads lane and lane + 32, zeros after the last value.
template <class Codes>
__device__ __forceinline__ void write_row(const float values[LANE_QUADS][QUAD], char* codes, char* scales,
                                          int head_dim) {
    const int lane = threadIdx.x % WARP;
    if constexpr (!Codes::QUANTIZED) {
#pragma unroll
        for (int i = 0; i < LANE_QUADS; i++) {
            const int d = (i * WARP + lane) * QUAD;
            uint32_t words[Codes::BYTES];
            Codes::encode(values[i], words);
            if (d < head_dim) store_words<Codes::BYTES>(codes + d * Codes::BYTES, words);
        }
    } else {
        constexpr bool WHOLE = Codes::GROUP == 0;  // one scale a row
        constexpr int SHARING = WHOLE ? WARP : Codes::GROUP / QUAD;
        float statistics[LANE_QUADS];
#pragma unroll
        for (int i = 0; i < LANE_QUADS; i++) statistics[i] = Codes::statistic(values[i]);
        if (WHOLE) statistics[0] = Codes::combine(statistics[0], statistics[1]);
#pragma unroll
        for (int i = 0; i < (WHOLE ? 1 : LANE_QUADS); i++)
            statistics[i] = statistic_of_lanes<Codes>(statistics[i], SHARING);
#pragma unroll
        for (int i = 0; i < LANE_QUADS; i++) {
            const int d = (i * WARP + lane) * QUAD;
            const int first = WHOLE ? 0 : d / (SHARING * QUAD) * (SHARING * QUAD);
            const typename Codes::Scale scale =
                Codes::scale_of(statistics[WHOLE ? 0 : i], WHOLE ? head_dim : min(SHARING * QUAD, head_dim - first));
            if (d == first && d < head_dim) ((typename Codes::Scale*)scales)[first / (SHARING * QUAD)] = scale;
            Codes::store(codes, d, Codes::encode(values[i], Codes::divisor(scale)), d < Codes::padded(head_dim));
        }
    }
}

template <class Codec, class T>
__device__ __forceinline__ void write_token(const KvWriteParams& p) {
    const int64_t token = blockIdx.x, slot = p.slots[token];
    if (slot < 0) return;
    const int lane = threadIdx.x % WARP, offset = (int)(slot % p.page_size);
    char* const token_page = p.cache + slot / p.page_size * p.page_stride;
    const PageMap<Codec> map(p.head_dim, p.page_size);
#pragma unroll 1
    for (int task = threadIdx.x / WARP; task < 2 * p.num_kv_heads; task += KV_WRITE_THREADS / WARP) {
        const int is_value = task % 2, head = task / 2;
        const T* const source = is_value ? (const T*)p.value + token * p.value_token_stride + head * p.value_head_stride
                                         : (const T*)p.key + token * p.key_token_stride + head * p.key_head_stride;
        char* const page = token_page + head * p.head_stride;
        float values[LANE_QUADS][QUAD];
#pragma unroll
        for (int i = 0; i < LANE_QUADS; i++) {
            const int at = (i * WARP + lane) * QUAD;
            if (at < p.head_dim) {
                load_quad(source + at, p.wide, values[i]);
            } else {
#pragma unroll
                for (int j = 0; j < QUAD; j++) values[i][j] = 0.f;
            }
        }
        if (is_value)
            write_row<typename Codec::V>(values, page + map.v_codes + offset * map.v_row,
                                         page + map.v_scales + offset * map.v_scale_row, p.head_dim);
        else
            write_row<typename Codec::K>(values, page + offset * map.k_row,
                                         page + map.k_scales + offset * map.k_scale_row, p.head_dim);
    }
}

#define KV_WRITE(T, suffix)                                                                           \
    KERNEL(CONCATENATE(CONCATENATE(kv_write_, FORMAT), _##suffix), KvWriteParams, KV_WRITE_THREADS) { \
        write_token<KV_CODEC, T>(p);                                                                  \
    }
KV_WRITE(fp16_t, fp16)
KV_WRITE(bf16_t, bf16)
KV_WRITE(fp32_t, fp32)
#else
#include "launch.h"

static void kv_write(const std::string& format, const std::string& dtype, uintptr_t key, uintptr_t value,
                     uintptr_t cache, uintptr_t slots, int64_t tokens, int64_t key_token_stride,
                     int64_t key_head_stride, int64_t value_token_stride, int64_t value_head_stride,
                     int64_t page_stride, int64_t head_stride, int64_t num_kv_heads, int64_t head_dim,
                     int64_t page_size, uintptr_t stream) {
    CHECK(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
          "kv_cache_write: head_dim is %lld, wanted a multiple of 8 up to 256", (long long)head_dim);
    CHECK(page_size >= 16 && page_size % 16 == 0, "kv_cache_write: a page has %lld tokens, wanted a multiple of 16",
          (long long)page_size);
    CHECK(
        cache % 16 == 0 && page_stride % 16 == 0 && head_stride % 16 == 0,
        "kv_cache_write: a page of one KV head must start on 16 bytes; the cache is at %llx with strides %lld and %lld",
        (unsigned long long)cache, (long long)page_stride, (long long)head_stride);
    CHECK(tokens <= INT32_MAX, "kv_cache_write: %lld tokens are too many", (long long)tokens);
    const int64_t quad = dtype == "fp32" ? 16 : 8;  // bytes
    const int64_t strides = key_token_stride | key_head_stride | value_token_stride | value_head_stride;
    const bool wide = key % quad == 0 && value % quad == 0 && strides % 4 == 0;
    const KvWriteParams p{(const void*)key,   (const void*)value,
                          (char*)cache,       (const int64_t*)slots,
                          key_token_stride,   key_head_stride,
                          value_token_stride, value_head_stride,
                          page_stride,        head_stride,
                          (int)num_kv_heads,  (int)head_dim,
                          (int)page_size,     wide};
    launch("kv_write_" + format + "_" + dtype, {(unsigned)tokens}, KV_WRITE_THREADS, 0, stream, p);
}
REGISTER(kv_write)
#endif

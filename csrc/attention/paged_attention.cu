// SPDX-License-Identifier: BSD-3-Clause
// paged_attention: softmax(Q K^T scale) V over a paged cache, decode and prefill alike.
//   query, out  (tokens, num_heads, head_dim) T        cache  pages of planes, see formats/layout.py KVLayout
// A block of four warps takes ROWS query rows of one sequence and KV head, a row being a (query token, head of the
// group) pair, so that K and V are read once for all heads that share them. It walks its part of the context in
// tiles of 32 keys: K and V go to shared memory as 32-bit words, K word-major (stride 33: no bank conflicts) so that lane
// = key, V row-major so that lane = word. A warp owns ROWS / 4 rows from scores to output: softmax state in registers, P
// exchanged through its own shared memory. int8 cache: the block quantises its query rows once and multiplies by dp4a.
// Splits: grid.z is sequences x splits; with more than one, each writes its unnormalised output, maximum and sum, and
// paged_attention_combine joins them in index order: deterministic, and independent of what else is in the batch.
#include "common/device.cuh"
#include "format_layout.h"

struct AttentionParams {
    void* out;                    // (tokens, num_heads, head_dim) T
    const void* query;            // (tokens, num_heads, head_dim) T
    const char* cache;
    const int* block_table;       // (num_seqs, *) page numbers
    const int* seq_lens;          // (num_seqs) context with the new tokens
    const int* query_start_loc;   // (num_seqs + 1)
    const float* sinks;           // (num_heads) or null: an extra logit in the denominator
    const float* alibi_slopes;    // (num_heads) or null
    float* partial_out;           // (num_splits, tokens, num_heads, head_dim), only with splits
    float2* partial_stats;        // (num_splits, tokens, num_heads) maximum and sum, only with splits
    int64_t page_stride, head_stride;                // bytes
    int64_t query_token_stride, query_head_stride;   // elements
    int64_t out_token_stride, out_head_stride;       // elements
    int64_t table_stride;                            // page numbers from one sequence to the next
    int64_t tokens;                                  // rows of query
    int num_seqs, num_heads, num_kv_heads, head_dim, page_size, num_splits;
    int causal;                   // 0: every key of the sequence
    int window;                   // keys at most this many tokens back, itself included; 0: no limit
    float scale, softcap;         // softcap 0: none
};

constexpr int KEYS = 32;          // keys a tile
constexpr int KEY_STRIDE = 33;    // words between two word positions of K
constexpr int ATTENTION_WARPS = 4;
constexpr float LOG2E = 1.4426950408889634f;

// Bytes of dynamic shared memory: K, V, query rows (int8 codes or floats), P, and the tile's scales.
__host__ __device__ inline int attention_shared_bytes(int words, int query_words, int rows) {
    return 4 * (words * KEY_STRIDE + words * KEYS + rows * query_words + KEYS * rows + 2 * KEYS + rows);
}

#ifdef DEVICE_HALF
// How a cache stores values in 32-bit words; value i of a word is at bit i * 32 / VALUES.
template <class T>
struct FloatCache {
    static constexpr bool QUANTIZED = false;
    static constexpr int VALUES = 2;
    static __device__ __forceinline__ float value(uint32_t word, int i) {
        return to_float(from_bits<T>((uint16_t)(word >> (16 * i))));
    }
};
template <>
struct FloatCache<fp32_t> {
    static constexpr bool QUANTIZED = false;
    static constexpr int VALUES = 1;
    static __device__ __forceinline__ float value(uint32_t word, int) { return __uint_as_float(word); }
};
struct Int8Cache {
    static constexpr bool QUANTIZED = true;
    static constexpr int VALUES = 4;
    static __device__ __forceinline__ float value(uint32_t word, int i) { return (float)(int8_t)(word >> (8 * i)); }
};

// LANE_VALUES: values of a V row that a lane owns, 4 up to head_dim 128 and 8 up to 256.
template <class T, class Cache, int ROWS, int LANE_VALUES>
__device__ __forceinline__ void attend(const AttentionParams& p) {
    constexpr int WARP_ROWS = ROWS / ATTENTION_WARPS, LANE_WORDS = LANE_VALUES / Cache::VALUES;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int seq = blockIdx.z / p.num_splits, split = blockIdx.z % p.num_splits, kv_head = blockIdx.y;
    const int group = p.num_heads / p.num_kv_heads;
    const int q_start = p.query_start_loc[seq], q_len = p.query_start_loc[seq + 1] - q_start;
    const int row0 = blockIdx.x * ROWS;
    if (row0 >= q_len * group) return;
    const int seq_len = p.seq_lens[seq], first_position = seq_len - q_len;

    // The keys that any row of this block may see, and this split's tiles of them.
    const int last_token = min(q_len - 1, (row0 + ROWS - 1) / group);
    const int end = p.causal ? first_position + last_token + 1 : seq_len;
    const int begin = p.window > 0 ? max(0, first_position + row0 / group - p.window + 1) : 0;
    const int tile0 = begin / KEYS, tiles = max(0, (end + KEYS - 1) / KEYS - tile0);
    const int my_first = tile0 + (int)((int64_t)tiles * split / p.num_splits);
    const int my_end = tile0 + (int)((int64_t)tiles * (split + 1) / p.num_splits);

    const int words = (p.head_dim + Cache::VALUES - 1) / Cache::VALUES;
    const int query_words = Cache::QUANTIZED ? words : p.head_dim;
    DYNAMIC_SHARED(uint32_t, shared);
    uint32_t* k_words = shared;                              // [words][KEY_STRIDE]
    uint32_t* v_words = k_words + words * KEY_STRIDE;        // [KEYS][words]
    uint32_t* q_words = v_words + words * KEYS;              // [ROWS][query_words]
    float* probabilities = (float*)(q_words + ROWS * query_words) + warp * KEYS * WARP_ROWS;  // [KEYS][WARP_ROWS]
    float* k_scales = (float*)(q_words + ROWS * query_words) + KEYS * ROWS;                   // [KEYS]
    float* v_scales = k_scales + KEYS;                                                        // [KEYS]
    float* q_scales = v_scales + KEYS;                                                        // [ROWS]

    auto token_of = [&](int row) { return q_start + (row0 + row) / group; };
    auto head_of = [&](int row) { return kv_head * group + (row0 + row) % group; };
    auto is_row = [&](int row) { return row0 + row < q_len * group; };

    // Query rows of this warp, scaled; as int8 codes with a scale a row if the cache is int8.
    for (int r = 0; r < WARP_ROWS; r++) {
        const int row = warp * WARP_ROWS + r;
        const bool live = is_row(row);
        const T* q = (const T*)p.query + (live ? token_of(row) * p.query_token_stride + head_of(row) * p.query_head_stride : 0);
        if (!Cache::QUANTIZED) {
            float* target = (float*)q_words + row * query_words;
            for (int i = lane; i < p.head_dim; i += WARP) target[i] = live ? to_float(q[i]) * p.scale : 0.f;
        } else {
            float amax = 0.f;
            if (live)
                for (int i = lane; i < p.head_dim; i += WARP) amax = fmaxf(amax, fabsf(to_float(q[i])));
            float scale = warp_max(amax) / 127.f;
            if (scale == 0.f) scale = 1.f;
            for (int w = lane; w < words; w += WARP) {
                uint32_t word = 0;
                for (int i = 0; i < 4 && live; i++) {
                    const float code = fminf(fmaxf(rintf(to_float(q[4 * w + i]) / scale), -127.f), 127.f);
                    word |= (uint32_t)(uint8_t)(int8_t)(int)code << (8 * i);
                }
                q_words[row * query_words + w] = word;
            }
            if (lane == 0) q_scales[row] = scale * p.scale;
        }
    }

    float maximum[WARP_ROWS], sum[WARP_ROWS], acc[WARP_ROWS][LANE_VALUES];
#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        maximum[r] = -INFINITY, sum[r] = 0.f;
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) acc[r][i] = 0.f;
    }

    const int* table = p.block_table + seq * p.table_stride;
    const int row_bytes = p.head_dim * 4 / Cache::VALUES;  // of a token's K or V
    const bool wide = row_bytes % 16 == 0;
    const float inv_softcap = p.softcap > 0.f ? 1.f / p.softcap : 0.f;  // a division in the loop would spill
    for (int tile = my_first; tile < my_end; tile++) {
        __syncthreads();  // the previous tile is used up, and the query rows are written
        const int pieces = wide ? words / 4 : words;
        for (int task = threadIdx.x; task < KEYS * pieces; task += blockDim.x) {
            const int key = task / pieces, word = (task % pieces) * (wide ? 4 : 1), position = tile * KEYS + key;
            uint4 k{0, 0, 0, 0}, v{0, 0, 0, 0};
            if (position < end) {
                const char* page = p.cache + table[position / p.page_size] * p.page_stride + kv_head * p.head_stride;
                const char* k_at = page + (int64_t)(position % p.page_size) * row_bytes + 4 * word;
                const char* v_at = k_at + (int64_t)p.page_size * row_bytes;
                if (wide)
                    k = load_stream(k_at), v = load_stream(v_at);
                else
                    k.x = *(const uint32_t*)k_at, v.x = *(const uint32_t*)v_at;
            }
            k_words[word * KEY_STRIDE + key] = k.x, v_words[key * words + word] = v.x;
            if (wide) {
                k_words[(word + 1) * KEY_STRIDE + key] = k.y, v_words[key * words + word + 1] = v.y;
                k_words[(word + 2) * KEY_STRIDE + key] = k.z, v_words[key * words + word + 2] = v.z;
                k_words[(word + 3) * KEY_STRIDE + key] = k.w, v_words[key * words + word + 3] = v.w;
            }
        }
        if (Cache::QUANTIZED && warp == 0) {
            const int position = tile * KEYS + lane;
            float k_scale = 0.f, v_scale = 0.f;
            if (position < end) {
                const char* page = p.cache + table[position / p.page_size] * p.page_stride + kv_head * p.head_stride;
                const float* scales = (const float*)(page + 2 * (int64_t)p.page_size * row_bytes);
                k_scale = scales[position % p.page_size];
                v_scale = scales[p.page_size + position % p.page_size];
            }
            k_scales[lane] = k_scale, v_scales[lane] = v_scale;
        }
        __syncthreads();

        // Scores: this lane's key against the warp's rows.
        float score[WARP_ROWS];
        if (Cache::QUANTIZED) {
            int dot[WARP_ROWS];
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) dot[r] = 0;
            for (int w = 0; w < words; w++) {
                const int k = (int)k_words[w * KEY_STRIDE + lane];
#pragma unroll
                for (int r = 0; r < WARP_ROWS; r++)
                    dot[r] = __dp4a(k, (int)q_words[(warp * WARP_ROWS + r) * query_words + w], dot[r]);
            }
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) score[r] = (float)dot[r] * (k_scales[lane] * q_scales[warp * WARP_ROWS + r]);
        } else {
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) score[r] = 0.f;
            for (int w = 0; w < words; w++) {
                const uint32_t k = k_words[w * KEY_STRIDE + lane];
#pragma unroll
                for (int i = 0; i < Cache::VALUES; i++) {
                    const float kv = Cache::value(k, i);
#pragma unroll
                    for (int r = 0; r < WARP_ROWS; r++)
                        score[r] += kv * ((const float*)q_words)[(warp * WARP_ROWS + r) * query_words + w * Cache::VALUES + i];
                }
            }
        }

        // Masks and softmax: the maximum is over the warp's 32 keys, so that it is the same in every lane.
        const int position = tile * KEYS + lane;
#pragma unroll
        for (int r = 0; r < WARP_ROWS; r++) {
            const int row = warp * WARP_ROWS + r, q_position = first_position + (row0 + row) / group;
            float s = score[r];
            if (p.softcap > 0.f) s = p.softcap * tanhf(s * inv_softcap);
            if (p.alibi_slopes && is_row(row)) s += p.alibi_slopes[head_of(row)] * (float)(position - q_position);
            const bool seen = position < end && is_row(row) && (!p.causal || position <= q_position) &&
                              (p.window <= 0 || q_position - position < p.window);
            s = seen ? s * LOG2E : -INFINITY;
            const float new_maximum = fmaxf(maximum[r], warp_max(s));
            const float correction = new_maximum == -INFINITY ? 1.f : exp2f(maximum[r] - new_maximum);
            const float probability = seen ? exp2f(s - new_maximum) : 0.f;
            maximum[r] = new_maximum;
            sum[r] = sum[r] * correction + warp_sum(probability);
#pragma unroll
            for (int i = 0; i < LANE_VALUES; i++) acc[r][i] *= correction;
            probabilities[lane * WARP_ROWS + r] = Cache::QUANTIZED ? probability * v_scales[lane] : probability;
        }
        __syncwarp();
        for (int key = 0; key < KEYS; key++) {
            float weight[WARP_ROWS];
#pragma unroll
            for (int r = 0; r < WARP_ROWS; r++) weight[r] = probabilities[key * WARP_ROWS + r];
#pragma unroll
            for (int w = 0; w < LANE_WORDS; w++) {
                const int word = w * WARP + lane;
                const uint32_t v = word < words ? v_words[key * words + word] : 0;
#pragma unroll
                for (int i = 0; i < Cache::VALUES; i++) {
                    const float value = Cache::value(v, i);
#pragma unroll
                    for (int r = 0; r < WARP_ROWS; r++) acc[r][w * Cache::VALUES + i] += weight[r] * value;
                }
            }
        }
        __syncwarp();
    }

#pragma unroll
    for (int r = 0; r < WARP_ROWS; r++) {
        const int row = warp * WARP_ROWS + r;
        if (!is_row(row)) continue;
        const int64_t token = token_of(row);
        const int head = head_of(row);
        const int64_t flat = (split * p.tokens + token) * p.num_heads + head;
        float inv_sum = 1.f;
        if (p.num_splits == 1) {
            float total = sum[r];
            if (p.sinks) {
                const float sink = p.sinks[head] * LOG2E, top = fmaxf(maximum[r], sink);
                const float correction = maximum[r] == -INFINITY ? 0.f : exp2f(maximum[r] - top);
                total = total * correction + exp2f(sink - top);
                inv_sum = correction / total;
            } else {
                inv_sum = total > 0.f ? 1.f / total : 0.f;
            }
        } else if (lane == 0) {
            p.partial_stats[flat] = make_float2(maximum[r], sum[r]);
        }
#pragma unroll
        for (int w = 0; w < LANE_WORDS; w++)
#pragma unroll
            for (int i = 0; i < Cache::VALUES; i++) {
                const int d = (w * WARP + lane) * Cache::VALUES + i;
                if (d >= p.head_dim) continue;
                const float v = acc[r][w * Cache::VALUES + i];
                if (p.num_splits == 1)
                    ((T*)p.out)[token * p.out_token_stride + head * p.out_head_stride + d] = from_float<T>(v * inv_sum);
                else
                    p.partial_out[flat * p.head_dim + d] = v;
            }
    }
}

#define ATTENTION_KERNELS(name, CACHE, ROWS, LANE_VALUES)             \
    template <class T>                                                \
    __device__ void name(const AttentionParams& p) {                  \
        attend<T, CACHE, ROWS, LANE_VALUES>(p);                       \
    }                                                                 \
    KERNELS(name, AttentionParams, ATTENTION_WARPS* WARP, 2)
ATTENTION_KERNELS(paged_attention_auto_16_128, FloatCache<T>, 16, 4)
ATTENTION_KERNELS(paged_attention_auto_16_256, FloatCache<T>, 16, 8)
ATTENTION_KERNELS(paged_attention_auto_32_128, FloatCache<T>, 32, 4)
ATTENTION_KERNELS(paged_attention_auto_32_256, FloatCache<T>, 32, 8)
ATTENTION_KERNELS(paged_attention_int8_16_128, Int8Cache, 16, 4)
ATTENTION_KERNELS(paged_attention_int8_16_256, Int8Cache, 16, 8)
ATTENTION_KERNELS(paged_attention_int8_32_128, Int8Cache, 32, 4)
ATTENTION_KERNELS(paged_attention_int8_32_256, Int8Cache, 32, 8)

// Joins the splits of one (token, head), one block each; lane = dimension.
template <class T>
__device__ void paged_attention_combine(const AttentionParams& p) {
    const int64_t token = blockIdx.x, head = blockIdx.y, stride = p.tokens * p.num_heads;
    const int64_t flat = token * p.num_heads + head;
    if (token >= p.query_start_loc[p.num_seqs]) return;  // padding
    float top = p.sinks ? p.sinks[head] * LOG2E : -INFINITY;
    for (int s = 0; s < p.num_splits; s++) top = fmaxf(top, p.partial_stats[s * stride + flat].x);
    float total = p.sinks ? exp2f(p.sinks[head] * LOG2E - top) : 0.f;
    for (int s = 0; s < p.num_splits; s++) {
        const float2 stats = p.partial_stats[s * stride + flat];
        if (stats.x != -INFINITY) total += stats.y * exp2f(stats.x - top);
    }
    const float inv_sum = total > 0.f ? 1.f / total : 0.f;
    for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
        float v = 0.f;
        for (int s = 0; s < p.num_splits; s++) {
            const float maximum = p.partial_stats[s * stride + flat].x;
            if (maximum != -INFINITY) v += p.partial_out[(s * stride + flat) * p.head_dim + d] * exp2f(maximum - top);
        }
        ((T*)p.out)[token * p.out_token_stride + head * p.out_head_stride + d] = from_float<T>(v * inv_sum);
    }
}
KERNELS(paged_attention_combine, AttentionParams, 128)
#else
#include "launch.h"

static void paged_attention(const std::string& format, const std::string& dtype, uintptr_t out, uintptr_t query,
                            uintptr_t cache, uintptr_t block_table, uintptr_t seq_lens, uintptr_t query_start_loc,
                            uintptr_t sinks, uintptr_t alibi_slopes, uintptr_t partial_out, uintptr_t partial_stats,
                            int64_t page_stride, int64_t head_stride, int64_t query_token_stride,
                            int64_t query_head_stride, int64_t out_token_stride, int64_t out_head_stride,
                            int64_t table_stride, int64_t tokens, int64_t num_seqs, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_dim, int64_t page_size, int64_t num_splits,
                            int64_t max_query_len, bool causal, int64_t window, double scale, double softcap,
                            uintptr_t stream) {
    CHECK(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
          "paged_attention: head_dim is %lld, wanted a multiple of 8 up to 256", (long long)head_dim);
    CHECK(num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
          "paged_attention: %lld query heads cannot share %lld KV heads evenly", (long long)num_heads,
          (long long)num_kv_heads);
    CHECK(num_seqs * num_splits <= 65535, "paged_attention: %lld sequences in %lld splits, at most 65535 together",
          (long long)num_seqs, (long long)num_splits);
    AttentionParams p{};
    p.out = (void*)out, p.query = (const void*)query, p.cache = (const char*)cache;
    p.block_table = (const int*)block_table, p.seq_lens = (const int*)seq_lens;
    p.query_start_loc = (const int*)query_start_loc;
    p.sinks = (const float*)sinks, p.alibi_slopes = (const float*)alibi_slopes;
    p.partial_out = (float*)partial_out, p.partial_stats = (float2*)partial_stats;
    p.page_stride = page_stride, p.head_stride = head_stride;
    p.query_token_stride = query_token_stride, p.query_head_stride = query_head_stride;
    p.out_token_stride = out_token_stride, p.out_head_stride = out_head_stride;
    p.table_stride = table_stride, p.tokens = tokens;
    p.num_seqs = (int)num_seqs, p.num_heads = (int)num_heads, p.num_kv_heads = (int)num_kv_heads;
    p.head_dim = (int)head_dim, p.page_size = (int)page_size, p.num_splits = (int)num_splits;
    p.causal = causal, p.window = (int)window, p.scale = (float)scale, p.softcap = (float)softcap;

    // 32 query rows a block once they fill one; a float32 cache has shared memory for 16.
    const int64_t query_rows = max_query_len * (num_heads / num_kv_heads);
    const bool quantized = format == "int8";
    const int rows = query_rows > 16 && (quantized || dtype != "fp32") ? 32 : 16;
    const int words = (int)head_dim / (quantized ? 4 : dtype == "fp32" ? 1 : 2);
    const int bytes = attention_shared_bytes(words, quantized ? words : (int)head_dim, rows);
    const Dim3 grid{(unsigned)((query_rows + rows - 1) / rows), (unsigned)num_kv_heads,
                    (unsigned)(num_seqs * num_splits)};
    const std::string shape = "_" + std::to_string(rows) + (head_dim <= 128 ? "_128_" : "_256_");
    launch("paged_attention_" + format + shape + dtype, grid, ATTENTION_WARPS * 32, bytes, stream, p);
    if (num_splits > 1)
        launch("paged_attention_combine_" + dtype, {(unsigned)tokens, (unsigned)num_heads}, 128, 0, stream, p);
}
REGISTER(paged_attention)
#endif

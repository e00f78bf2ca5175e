// SPDX-License-Identifier: BSD-3-Clause
// attn_decode: attention of sequences with few rows (paged.cuh) over their pages, one image a KV format.
//
// A block is one part of one sequence's keys and one KV head, with up to ROWS rows: K and V are read once for all of
// them. Its four warps take neighbouring runs of steps, STEP keys each, and hold everything in registers:
//
//   scores  lane = (key mod 4, slice c = lane mod 8 of head_dim): 16-byte loads of K, dp4a (or fp32) against the rows'
//           slices, then three exchanges that add over c and leave a lane with one row's scores of a few keys
//   softmax running maximum and sum of each row, in the lanes that have its scores; weights go to shared memory
//   output  lane = four or eight neighbouring values of head_dim; the warp takes one to four keys at a time:
//           V is read row after row, and sums need no exchange until the end
//
// K of the next step is loaded once the scores are taken, V once the output is, so that loads are under way all the
// time. Quantised K: rows are quantised here, by the rule of formats/int8.cuh, and their scale takes up softmax_scale *
// log2(e). Weights take up V's scales: before they go to shared memory where V has one for a token, else as they are
// used. Where K has scales within a token, a lane's slice lies within one, and its sums are scaled before they are
// added over c. Sums of four warps are joined in shared memory.
//
// Grid (num_splits, num_kv_heads * ceil(rows / ROWS), num_seqs). ROWS 4 or 8, WIDTH (head_dim rounded up) 64, 128 or
// 256. Needs head_dim % 8 == 0, page_size % 16 == 0; 16-byte loads of K become 8-byte ones for int8 if head_dim % 16
// is 8. A V lane that owned 16 values, as a 16-byte load would have it, needs four times the sums: 64 registers at ROWS
// 4, and ROWS 8 would not fit.
#include "attention/paged.cuh"

constexpr int DECODE_WARPS = 4;
constexpr int DECODE_THREADS = DECODE_WARPS * WARP;

#ifdef DEVICE_HALF
constexpr int SLICES = 8;                 // lanes that share a key's K
constexpr int LOAD_KEYS = WARP / SLICES;  // keys that the warp loads at a time

template <class Codec, int WIDTH, int ROWS>
struct DecodeShape {
    typedef typename Codec::K K;
    typedef typename Codec::V V;
    static constexpr int STEP = WIDTH * K::BYTES <= 256 ? 16 : 8;  // keys; at most 4 KB of K up to 16 bits
    static constexpr int LOADS = STEP / LOAD_KEYS;                 // of K, a step
    static constexpr int K_WORDS = WIDTH / SLICES * K::BYTES / 4;  // of a lane's slice
    static constexpr int CHUNK = K_WORDS < 4 ? K_WORDS : 4;        // words of one load
    static constexpr int SCORES = ROWS * LOADS / SLICES;           // a lane's, all of one row
    static constexpr int CHUNKS = K_WORDS / CHUNK;                 // each within a group of K's scales
    static constexpr int V_VALUES = WIDTH == 256 || (WIDTH == 128 && V::BITS < 8) ? 8 : 4;  // that a lane owns
    static constexpr int V_WORDS = V::template WORDS<V_VALUES>;
    static constexpr int V_LANES = WIDTH / V_VALUES;  // that share a key's V
    static constexpr int V_KEYS = WARP / V_LANES;     // keys that the warp takes at a time
    static constexpr int V_LOADS = STEP / V_KEYS;
    static constexpr bool QUERY_IN_REGISTERS = K::QUANTIZED && ROWS * K_WORDS <= 32;
    static constexpr bool K_GROUPS = K::QUANTIZED && !K::one_scale(WIDTH);  // scales within a row of K, and of V
    static constexpr bool V_GROUPS = V::QUANTIZED && !V::one_scale(WIDTH);
};

template <class Codec, int WIDTH, int ROWS>
struct DecodeShared {
    static constexpr int QUERY_BYTES = Codec::K::QUANTIZED ? 1 : 4;
    uint4 query[ROWS][WIDTH * QUERY_BYTES / 16];  // int8 codes, or floats times score_scale
    float query_scales[ROWS];
    float4 weights[DECODE_WARPS][DecodeShape<Codec, WIDTH, ROWS>::STEP][ROWS / 4];
    float maximum[DECODE_WARPS][ROWS], total[DECODE_WARPS][ROWS];
    float4 sums[DECODE_WARPS][ROWS][WIDTH / 4];
};

// Sums over a slice of head_dim: integers as long as one scale holds for it, and for those of all lanes.
template <bool GROUPS>
struct DotType {
    typedef int type;
};
template <>
struct DotType<true> {
    typedef float type;
};

// Adds x over the lanes whose numbers differ in the bits of LANES - 1, leaving each with its share of the N values:
// at every exchange a lane keeps the upper or lower half, by its bit. N / LANES values stay.
template <int N, int LANES, class T>
__device__ __forceinline__ void add_and_share(T* x, int lane) {
    if constexpr (LANES > 1) {
        static_assert(N % 2 == 0, "");
        const bool upper = lane & (LANES / 2);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const T give = upper ? x[i] : x[i + N / 2], have = upper ? x[i + N / 2] : x[i];
            x[i] = have + __shfl_xor_sync(FULL_WARP, give, LANES / 2);
        }
        add_and_share<N / 2, LANES / 2>(x, lane);
    }
}

// Rows row0 on, to shared memory; those that do not exist are zeros.
template <class Codec, int WIDTH, int ROWS>
__device__ __forceinline__ void load_query(const PagedParams& p, const PagedSequence& s, int row0,
                                           DecodeShared<Codec, WIDTH, ROWS>& shared) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int r = threadIdx.x / WARP; r < ROWS; r += DECODE_WARPS) {
        const PagedRow row(p, s, row0 + r);
        const int64_t at = row.query_offset(p);
        auto value = [&](int d) {
            return row.exists && d < p.head_dim ? load_float(p.query, at + d, p.query_type) : 0.f;
        };
        if constexpr (Codec::K::QUANTIZED) {
            float amax = 0.f;
#pragma unroll 1
            for (int d = lane; d < p.head_dim; d += WARP) amax = max_magnitude(amax, fabsf(value(d)));
            const float scale = int8_scale(max_magnitude_of_lanes(amax, WARP));
#pragma unroll 1  // an IEEE division is a call
            for (int d = lane; d < WIDTH; d += WARP) ((int8_t*)shared.query[r])[d] = (int8_t)int8_code(value(d), scale);
            if (lane == 0) shared.query_scales[r] = scale * p.score_scale;
        } else {
#pragma unroll 1
            for (int d = lane; d < WIDTH; d += WARP) ((float*)shared.query[r])[d] = value(d) * p.score_scale;
        }
    }
}

template <class Codec, int WIDTH, int ROWS>
__device__ __forceinline__ void attn_decode(const PagedParams& p) {
    typedef DecodeShape<Codec, WIDTH, ROWS> Shape;
    constexpr int STEP = Shape::STEP, LOADS = Shape::LOADS, K_WORDS = Shape::K_WORDS, CHUNK = Shape::CHUNK;
    typedef typename Codec::K K;
    typedef typename Codec::V V;
    constexpr int SCORES = Shape::SCORES, V_VALUES = Shape::V_VALUES, V_WORDS = Shape::V_WORDS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, split = blockIdx.x;
    const PagedSequence s(p, blockIdx.z, blockIdx.y % p.num_kv_heads);
    const int row0 = blockIdx.y / p.num_kv_heads * ROWS;
    if (s.rows > p.decode_rows || row0 >= s.rows) return;

    // This split's steps, and this warp's.
    const int begin = s.begin(p, row0), end = s.end(p, row0, ROWS);
    constexpr bool CLEAR_V = !V::QUANTIZED || Shape::V_GROUPS;
    const int step0 = begin / STEP, steps = max(0, (end + STEP - 1) / STEP - step0);
    const int64_t parts = (int64_t)p.num_splits * DECODE_WARPS, part = split * DECODE_WARPS + warp;
    const int first = step0 + (int)(steps * part / parts), last = step0 + (int)(steps * (part + 1) / parts);
    const int rows_here = min(ROWS, s.rows - row0);
    if (p.num_splits > 1 && steps * ((int64_t)split + 1) / p.num_splits == steps * (int64_t)split / p.num_splits) {
        if ((int)threadIdx.x < rows_here)
            p.partial_stats[partial_index(p, s, row0 + threadIdx.x, split)] = make_float2(-INFINITY, 0.f);
        return;
    }

    __shared__ DecodeShared<Codec, WIDTH, ROWS> shared;
    load_query(p, s, row0, shared);
    __syncthreads();

    const int slice = lane % SLICES, load_key = lane / SLICES;
    // add_and_share's choice: row of this lane's scores, and the first of its loads.
    const int my_row = ROWS == 8 ? slice : slice / 2, my_load = ROWS == 8 ? 0 : slice % 2 * (LOADS / 2);
    const PagedRow row(p, s, row0 + my_row);
    const float slope = row.slope(p);
    const float query_scale = K::QUANTIZED ? shared.query_scales[my_row] : 1.f;
    uint32_t query[Shape::QUERY_IN_REGISTERS ? ROWS : 1][K_WORDS];
    if constexpr (Shape::QUERY_IN_REGISTERS) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int w = 0; w < K_WORDS; w++)
                query[r][w] = ((const uint32_t*)shared.query[r])[(w / CHUNK * SLICES + slice) * CHUNK + w % CHUNK];
    }

    // Nothing is loaded under a condition: K of keys that no row sees gives scores that are not used, and V of
    // floating point or its scales, where a weight of 0 would not stop a NaN, are cleared at the ends. Lanes beyond
    // head_dim read its beginning: against zeros of the query, and for sums that are not stored.
    const PageMap<Codec> map(p.head_dim, p.page_size);
    const bool wide = K::BYTES > 1 || CHUNK < 4 || map.k_row % 16 == 0;
    auto within_row = [&](int byte) { return byte < map.k_row ? byte : 0; };
    uint32_t k[LOADS][K_WORDS], v[Shape::V_LOADS][V_WORDS];
    typename K::Scale k_scales[Shape::K_GROUPS ? LOADS * Shape::CHUNKS : SCORES];
    typename V::Scale v_scales[Shape::V_GROUPS ? Shape::V_LOADS : SCORES];

    const int my_key =
        my_load * LOAD_KEYS + load_key;  // in the step, of this lane's first score; the others follow by LOAD_KEYS
    auto fetch_k = [&](const char* page, int offset) {
        const char* at = page + (offset + load_key) * map.k_row;
        if (wide) {
#pragma unroll
            for (int i = 0; i < LOADS; i++, at += LOAD_KEYS * map.k_row)
#pragma unroll
                for (int w = 0; w < K_WORDS; w += CHUNK)
                    load_words<CHUNK>(k[i] + w, at + within_row((w / CHUNK * SLICES + slice) * CHUNK * 4));
        } else {
#pragma unroll
            for (int i = 0; i < LOADS; i++, at += LOAD_KEYS * map.k_row)
#pragma unroll
                for (int w = 0; w < K_WORDS; w += 2)
                    load_words<2>(k[i] + w, at + within_row((w / CHUNK * SLICES + slice) * CHUNK * 4 + w % CHUNK * 4));
        }
        if constexpr (Shape::K_GROUPS) {
            const char* scales = page + map.k_scales + (offset + load_key) * map.k_scale_row;
#pragma unroll
            for (int i = 0; i < LOADS; i++, scales += LOAD_KEYS * map.k_scale_row)
#pragma unroll
                for (int c = 0; c < Shape::CHUNKS; c++) {
                    const int group = within_row((c * SLICES + slice) * CHUNK * 4) / K::GROUP;
                    k_scales[i * Shape::CHUNKS + c] = __ldg((const typename K::Scale*)scales + group);
                }
        } else if constexpr (K::QUANTIZED) {
#pragma unroll
            for (int n = 0; n < SCORES; n++)
                k_scales[n] = __ldg((const float*)(page + map.k_scales) + offset + my_key + n * LOAD_KEYS);
        }
        if constexpr (V::QUANTIZED && !Shape::V_GROUPS) {
#pragma unroll
            for (int n = 0; n < SCORES; n++)
                v_scales[n] = __ldg((const float*)(page + map.v_scales) + offset + my_key + n * LOAD_KEYS);
        }
    };
    const int v_own = lane % Shape::V_LANES * V_VALUES, v_key = lane / Shape::V_LANES;
    const int v_value = v_own < p.head_dim ? v_own : 0;
    auto fetch_v = [&](const char* page, int offset) {
        const char* at = page + map.v_codes + (offset + v_key) * map.v_row;
#pragma unroll
        for (int i = 0; i < Shape::V_LOADS; i++, at += Shape::V_KEYS * map.v_row)
            V::template fetch<V_VALUES>(at, v_value, map.v_row, v[i]);
        if constexpr (Shape::V_GROUPS) {
            const char* scales = page + map.v_scales + (offset + v_key) * map.v_scale_row;
#pragma unroll
            for (int i = 0; i < Shape::V_LOADS; i++, scales += Shape::V_KEYS * map.v_scale_row)
                v_scales[i] = __ldg((const typename V::Scale*)scales + v_value / V::GROUP);
        }
    };
    auto clear_unseen_v = [&](int first_key) {
#pragma unroll
        for (int i = 0; i < Shape::V_LOADS; i++) {
            const int key = first_key + i * Shape::V_KEYS + v_key;
            if (key >= begin && key < end) continue;
            if constexpr (V::QUANTIZED)
                v_scales[i] = from_float<typename V::Scale>(0.f);
            else
                clear_words<V_WORDS>(v[i]);
        }
    };

    float maximum = -INFINITY, total = 0.f, sums[ROWS][V_VALUES];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < V_VALUES; i++) sums[r][i] = 0.f;

    PageCursor cursor(p, s, first * STEP);
    const char* page = nullptr;
    if (first < last) {
        page = cursor.page();
        fetch_k(page, cursor.offset);
        fetch_v(page, cursor.offset);
    }
#pragma unroll 1
    for (int step = first; step < last; step++) {
        // Scores of all rows for the keys that this lane loaded, each from a slice of head_dim.
        float score[SCORES], v_scale[SCORES];
        if constexpr (K::QUANTIZED) {
            typename DotType<Shape::K_GROUPS>::type dot[ROWS * LOADS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) dot[r * LOADS + i] = 0;
#pragma unroll
                for (int w = 0; w < K_WORDS; w += CHUNK) {
                    uint32_t q[CHUNK];
                    if constexpr (Shape::QUERY_IN_REGISTERS) {
#pragma unroll
                        for (int j = 0; j < CHUNK; j++) q[j] = query[r][w + j];
                    } else {
                        const uint4 words = shared.query[r][w / 4 * SLICES + slice];
                        q[0] = words.x, q[1] = words.y, q[2] = words.z, q[3] = words.w;
                    }
#pragma unroll
                    for (int i = 0; i < LOADS; i++) {
                        int part = Shape::K_GROUPS ? INT_AS_FLOAT : (int)dot[r * LOADS + i];
#pragma unroll
                        for (int j = 0; j < CHUNK; j++) part = __dp4a((int)k[i][w + j], (int)q[j], part);
                        if constexpr (Shape::K_GROUPS)
                            dot[r * LOADS + i] =
                                fmaf(float_of_int(part), K::multiplier(k_scales[i * Shape::CHUNKS + w / CHUNK]),
                                     dot[r * LOADS + i]);
                        else
                            dot[r * LOADS + i] = part;
                    }
                }
            }
            add_and_share<ROWS * LOADS, SLICES>(dot, lane);
#pragma unroll
            for (int n = 0; n < SCORES; n++) {
                if constexpr (Shape::K_GROUPS)
                    score[n] = dot[n] * query_scale;
                else
                    score[n] = (float)dot[n] * (k_scales[n] * query_scale);
            }
        } else {
            float dot[ROWS * LOADS];
#pragma unroll
            for (int i = 0; i < ROWS * LOADS; i++) dot[i] = 0.f;
#pragma unroll
            for (int w = 0; w < K_WORDS; w += K::BYTES) {  // a quad
                constexpr int CHUNK_QUADS = CHUNK / K::BYTES;
                float keys[LOADS][QUAD];
#pragma unroll
                for (int i = 0; i < LOADS; i++) K::template decode<QUAD>(k[i] + w, 0, keys[i]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float4 q =
                        ((const float4*)
                             shared.query[r])[(w / CHUNK * SLICES + slice) * CHUNK_QUADS + w % CHUNK / K::BYTES];
#pragma unroll
                    for (int i = 0; i < LOADS; i++) {
                        float& d = dot[r * LOADS + i];
                        d = fmaf(keys[i][0], q.x, d), d = fmaf(keys[i][1], q.y, d);
                        d = fmaf(keys[i][2], q.z, d), d = fmaf(keys[i][3], q.w, d);
                    }
                }
            }
            add_and_share<ROWS * LOADS, SLICES>(dot, lane);
#pragma unroll
            for (int n = 0; n < SCORES; n++) score[n] = dot[n];
        }
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            if constexpr (V::QUANTIZED && !Shape::V_GROUPS)
                v_scale[n] = V::multiplier(v_scales[n]);
            else
                v_scale[n] = 1.f;
        }

        const bool more = step + 1 < last;
        if (more) {
            cursor.advance(STEP);
            if (cursor.offset == 0) page = cursor.page();
            fetch_k(page, cursor.offset);
        }

        // Weights of this lane's keys.
        float top = maximum;
        bool seen[SCORES];
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            const int key = step * STEP + my_key + n * LOAD_KEYS;
            seen[n] = row.sees(p, s, key);
            score[n] = paged_logit(p, score[n], slope, row.position - key);
            if (seen[n]) top = fmaxf(top, score[n]);
        }
        if (ROWS == 4) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 8));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 16));
        const float base = top == -INFINITY ? 0.f : top, correction = exp2f(maximum - base);
        const bool moved = top != maximum;
        maximum = top;
        total *= correction;
        __syncwarp();  // the weights of the step before are used up
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            const float weight = seen[n] ? exp2f(score[n] - base) : 0.f;
            total += weight;
            ((float*)shared.weights[warp][my_key + n * LOAD_KEYS])[my_row] = seen[n] ? weight * v_scale[n] : 0.f;
        }
        __syncwarp();
        if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float factor = __shfl_sync(FULL_WARP, correction, r * (SLICES / ROWS));
#pragma unroll
                for (int i = 0; i < V_VALUES; i++) sums[r][i] *= factor;
            }
        }

        if (CLEAR_V && (step * STEP < begin || (step + 1) * STEP > end)) clear_unseen_v(step * STEP);
#pragma unroll
        for (int i = 0; i < Shape::V_LOADS; i++) {
            float values[V_VALUES];
            V::template decode<V_VALUES>(v[i], v_value, values);
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) {
                float4 weight = shared.weights[warp][i * Shape::V_KEYS + v_key][r / 4];
                if constexpr (Shape::V_GROUPS) {
                    const float scale = V::multiplier(v_scales[i]);
                    weight.x *= scale, weight.y *= scale, weight.z *= scale, weight.w *= scale;
                }
#pragma unroll
                for (int j = 0; j < V_VALUES; j++) {
                    sums[r][j] = fmaf(weight.x, values[j], sums[r][j]);
                    sums[r + 1][j] = fmaf(weight.y, values[j], sums[r + 1][j]);
                    sums[r + 2][j] = fmaf(weight.z, values[j], sums[r + 2][j]);
                    sums[r + 3][j] = fmaf(weight.w, values[j], sums[r + 3][j]);
                }
            }
        }
        if (more) fetch_v(page, cursor.offset);
    }

    // The warp's sums, then the block's.
    if (ROWS == 4) total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 8);
    total += __shfl_xor_sync(FULL_WARP, total, 16);
    if (lane < SLICES) shared.maximum[warp][my_row] = maximum, shared.total[warp][my_row] = total;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 0; i < V_VALUES; i++)
#pragma unroll
            for (int other = Shape::V_LANES; other < WARP; other *= 2)
                sums[r][i] += __shfl_xor_sync(FULL_WARP, sums[r][i], other);
        if (v_key == 0) {
#pragma unroll
            for (int i = 0; i < V_VALUES; i += 4)
                shared.sums[warp][r][(v_own + i) / 4] =
                    make_float4(sums[r][i], sums[r][i + 1], sums[r][i + 2], sums[r][i + 3]);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < rows_here * p.head_dim; i += DECODE_THREADS) {
        const int r = i / p.head_dim, d = i % p.head_dim;
        float top = shared.maximum[0][r], sum = 0.f, weight = 0.f;
#pragma unroll
        for (int w = 1; w < DECODE_WARPS; w++) top = fmaxf(top, shared.maximum[w][r]);
        const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) {
            const float factor = exp2f(shared.maximum[w][r] - base);
            sum = fmaf(factor, ((const float*)shared.sums[w][r])[d], sum);
            weight = fmaf(factor, shared.total[w][r], weight);
        }
        if (p.num_splits == 1) {
            const PagedRow to(p, s, row0 + r);
            store_float(p.out, to.token * p.out_token_stride + to.head * p.out_head_stride + d, p.out_type,
                        sum * output_factor(p, to.head, top, weight));
        } else {
            const int64_t at = partial_index(p, s, row0 + r, split);
            p.partial_out[at * p.head_dim + d] = sum;
            if (d == 0) p.partial_stats[at] = make_float2(top, weight);
        }
    }
}

// Blocks a multiprocessor that registers are to suffice for: a step's K and V take a lane bytes * width / 4 of them,
// V in fewer than 8 bits twice the sums, and groups of K a scale each.
template <class Codec>
__host__ __device__ constexpr int decode_blocks(int width, int rows) {
    const int bytes = Codec::K::BYTES;
    if (width == 256) return bytes == 4 ? 1 : 2;
    const int blocks = bytes * width <= 128 ? 4 : 3;
    const bool wide_sums = Codec::V::BITS < 8 && width == 128, groups = !Codec::K::one_scale(width) && width == 128;
    return blocks - (rows == 8) - (wide_sums || (groups && rows == 8));
}
#define ATTN_DECODE(width, rows)                                                                           \
    KERNEL(CONCATENATE(CONCATENATE(attn_decode_, FORMAT), _##width##_##rows), PagedParams, DECODE_THREADS, \
           decode_blocks<KV_CODEC>(width, rows)) {                                                         \
        attn_decode<KV_CODEC, width, rows>(p);                                                             \
    }
ATTN_DECODE(64, 4)
ATTN_DECODE(64, 8)
ATTN_DECODE(128, 4)
ATTN_DECODE(128, 8)
ATTN_DECODE(256, 4)
ATTN_DECODE(256, 8)
#else
// block_rows  4 or 8: rows that a block takes
// max_rows    bound on the rows of the sequences that are for this kernel
static void attn_decode(const std::string& format, int64_t block_rows, int64_t max_rows, uintptr_t stream,
                        const py::kwargs& given) {
    const PagedParams p = paged_params(given);
    CHECK(block_rows == 4 || block_rows == 8, "attn_decode: blocks of %lld rows, wanted 4 or 8", (long long)block_rows);
    const unsigned row_blocks = (unsigned)((max_rows + block_rows - 1) / block_rows);
    launch("attn_decode_" + format + "_" + std::to_string(width_of(p)) + "_" + std::to_string(block_rows),
           {(unsigned)p.num_splits, (unsigned)p.num_kv_heads * row_blocks, (unsigned)p.num_seqs}, DECODE_THREADS, 0,
           stream, p);
}
REGISTER(attn_decode)
#endif

// SPDX-License-Identifier: BSD-3-Clause
// attn_prefill: attention of sequences with many rows (paged.cuh) over their pages, one image a KV format.
//
// A block is a tile of 64 rows of one sequence and KV head (32 for fp32 above head_dim 128); its four warps own 16 rows
// each from scores to output. It walks the keys that any of its rows sees, 32 at a time:
//
//   K to shared memory -> scores: lane = (4 rows, keys lane % 8 + 8j): dp4a over int8 codes, else fp32 over K as floats
//                         softmax: maxima over 8 lanes by shuffles; weights to the warp's own shared memory
//   V to the same place, as floats (codes times scale) -> output: lane = (the same 4 rows, values 4 (lane % 8) + 32i)
//
// Sums stay in registers (4 rows x WIDTH / 8). K and V of the next tile are loaded while this one is worked on, where
// that takes at most 16 registers each. K and V share a buffer, so that two blocks fit on a multiprocessor up to
// head_dim 128. Scores keep the query in the cache's own type: floating point, or int8 quantised here by the rule
// of formats/int8.cuh.
//
// Grid (tiles, num_kv_heads, prefill_splits). Tile t belongs to the last sequence with first_tile(seq) <= t, where
// first_tile = query_start_loc * group / 64 + seq: room for every sequence's last, partial tile, whatever the lengths,
// so that the grid follows from sizes alone. Later tiles see more keys and start first. fp32 products of weights and V
// are four fifths of the arithmetic for int8 (524k FMA beside 131k dp4a a tile of 64 keys).
#include "attention/paged.cuh"

constexpr int TILE_KEYS = 32;
constexpr int WARP_ROWS = 16;
constexpr int WEIGHT_STRIDE = WARP_ROWS + 4;  // floats from key to key: 16-byte stores of 8 keys meet no bank twice
constexpr int SHARED_PAD = 16;                // bytes after a row of K or the query, for the same reason

// Sizes that host and device agree on. bytes: of a stored value of K; width: head_dim rounded up.
__host__ __device__ constexpr int prefill_warps(int bytes, int width) { return bytes == 4 && width == 256 ? 2 : 4; }
__host__ __device__ constexpr int query_row_bytes(int bytes, int width) { return width * bytes + SHARED_PAD; }
__host__ __device__ constexpr int k_row_bytes(int bytes, int width) {
    return width * (bytes == 1 ? 1 : 4) + SHARED_PAD;
}
__host__ __device__ constexpr int kv_tile_bytes(int bytes, int width) {
    return TILE_KEYS * (k_row_bytes(bytes, width) > 4 * width ? k_row_bytes(bytes, width) : 4 * width);
}
// scale_row_bytes: of a token's scales of K and V.
__host__ __device__ constexpr int prefill_shared_bytes(int bytes, int width, int scale_row_bytes) {
    return kv_tile_bytes(bytes, width) +
           prefill_warps(bytes, width) *
               (WARP_ROWS * (query_row_bytes(bytes, width) + 4) + TILE_KEYS * WEIGHT_STRIDE * 4) +
           TILE_KEYS * scale_row_bytes;
}

#ifdef DEVICE_HALF
constexpr int LANE_ROWS = 4, LANE_KEYS = 4;  // of a lane's scores
constexpr int KEY_LANES = 8;                 // lanes that share rows

// A thread's share of a tile of K or V: quads i * THREADS + threadIdx.x, row-major, and words of its scales.
template <class Codec, int WIDTH, int THREADS>
struct TileShare {
    static constexpr int QUADS = TILE_KEYS * WIDTH / QUAD / THREADS;
    static constexpr int ROW_QUADS = WIDTH / QUAD;
    static constexpr int K_WORDS = Codec::K::template WORDS<QUAD>, V_WORDS = Codec::V::template WORDS<QUAD>;  // a quad
    static constexpr bool PREFETCH_K = WIDTH < 256 && QUADS * K_WORDS <= 16;
    static constexpr bool PREFETCH_V = WIDTH < 256 && QUADS * V_WORDS <= (Codec::V::QUANTIZED ? 8 : 16);
    static __host__ __device__ constexpr int scale_bytes(int group, int bytes) {
        return group ? (WIDTH + group - 1) / group * bytes : bytes;
    }
    static constexpr int MOST_SCALE_WORDS =
        TILE_KEYS / 4 *
        (scale_bytes(Codec::K::GROUP, Codec::K::SCALE_BYTES) + scale_bytes(Codec::V::GROUP, Codec::V::SCALE_BYTES));
    static constexpr int SCALE_WORDS = (MOST_SCALE_WORDS + THREADS - 1) / THREADS;
    static __device__ __forceinline__ int key(int i) { return (i * THREADS + (int)threadIdx.x) / ROW_QUADS; }
    static __device__ __forceinline__ int quad(int i) { return (i * THREADS + (int)threadIdx.x) % ROW_QUADS; }
};

// Where a tile's keys lie: its two runs of SPLIT_UNIT keys, each within a page. Keys outside [begin, end) are not read.
struct TilePlace {
    const char* page[TILE_KEYS / SPLIT_UNIT];
    int offset[TILE_KEYS / SPLIT_UNIT];
    int first_key, begin, end;

    __device__ __forceinline__ void find(PageCursor& cursor, int key) {
        first_key = key;
#pragma unroll
        for (int i = 0; i < TILE_KEYS / SPLIT_UNIT; i++) {
            const int run = key + i * SPLIT_UNIT;
            page[i] = run < end && run + SPLIT_UNIT > begin ? cursor.page() : nullptr;
            offset[i] = cursor.offset;
            cursor.advance(SPLIT_UNIT);
        }
    }
    __device__ __forceinline__ bool live(int key) const { return first_key + key >= begin && first_key + key < end; }
    __device__ __forceinline__ const char* page_of(int key) const { return key < SPLIT_UNIT ? page[0] : page[1]; }
    __device__ __forceinline__ int offset_of(int key) const {
        return (key < SPLIT_UNIT ? offset[0] : offset[1]) + key % SPLIT_UNIT;
    }
};

template <class Codec, int WIDTH>
__device__ __forceinline__ void attn_prefill(const PagedParams& p) {
    typedef typename Codec::K K;
    typedef typename Codec::V V;
    constexpr int BYTES = K::BYTES, WARPS = prefill_warps(BYTES, WIDTH), THREADS = WARPS * WARP;
    constexpr int ROWS = WARPS * WARP_ROWS, SLICES = WIDTH / 32;  // of head_dim, four values of each a lane
    typedef TileShare<Codec, WIDTH, THREADS> Share;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, split = blockIdx.z;

    // Sequence and rows of this block.
    const int tile = gridDim.x - 1 - blockIdx.x;
    auto first_tile = [&](int seq) { return (int)((int64_t)p.query_start_loc[seq] * p.group / ROWS) + seq; };
    int before = 0;
    for (int seq = lane; seq < p.num_seqs; seq += WARP) before += first_tile(seq) <= tile;
    const PagedSequence s(p, warp_sum(before) - 1, blockIdx.y);
    const int row0 = (tile - first_tile(s.seq)) * ROWS;
    if (s.rows <= p.decode_rows || row0 >= s.rows) return;

    // Keys of this block: this split's tiles of those that any row sees.
    TilePlace place;
    place.begin = s.begin(p, row0), place.end = s.end(p, row0, ROWS);
    const int tile0 = place.begin / TILE_KEYS, tiles = max(0, (place.end + TILE_KEYS - 1) / TILE_KEYS - tile0);
    const int first = tile0 + (int)((int64_t)tiles * split / p.prefill_splits);
    const int last = tile0 + (int)((int64_t)tiles * (split + 1) / p.prefill_splits);

    DYNAMIC_SHARED(char, shared);
    char* const kv = shared;                                                             // K or V of a tile
    char* const query = kv + kv_tile_bytes(BYTES, WIDTH);                                // [ROWS][query_row_bytes]
    float* const query_scales = (float*)(query + ROWS * query_row_bytes(BYTES, WIDTH));  // [ROWS]
    float* const weights = query_scales + ROWS + warp * TILE_KEYS * WEIGHT_STRIDE;       // [TILE_KEYS][WEIGHT_STRIDE]
    const PageMap<Codec> map(p.head_dim, p.page_size);
    const int k_groups = K::groups(p.head_dim), v_groups = V::groups(p.head_dim);
    uint32_t* const scales = (uint32_t*)(query_scales + ROWS + WARPS * TILE_KEYS * WEIGHT_STRIDE);
    auto* const k_scales = (const typename K::Scale*)scales;  // [TILE_KEYS][groups]
    auto* const v_scales = (const typename V::Scale*)((char*)scales + TILE_KEYS * map.k_scale_row);  // the same

    // Query rows of this warp, those that do not exist as zeros.
#pragma unroll 1
    for (int r = warp * WARP_ROWS; r < (warp + 1) * WARP_ROWS; r++) {
        const PagedRow row(p, s, row0 + r);
        const int64_t at = row.query_offset(p);
        char* const target = query + r * query_row_bytes(BYTES, WIDTH);
        auto value = [&](int d) {
            return row.exists && d < p.head_dim ? load_float(p.query, at + d, p.query_type) : 0.f;
        };
        float scale = 1.f;
        if constexpr (K::QUANTIZED) {
            float amax = 0.f;
#pragma unroll 1
            for (int d = lane; d < p.head_dim; d += WARP) amax = max_magnitude(amax, fabsf(value(d)));
            scale = int8_scale(max_magnitude_of_lanes(amax, WARP));
        }
        if (lane == 0) query_scales[r] = scale * p.score_scale;
#pragma unroll 1
        for (int d = lane * QUAD; d < WIDTH; d += WARP * QUAD) {
            const float values[QUAD] = {value(d), value(d + 1), value(d + 2), value(d + 3)};
            uint32_t words[BYTES];
            if constexpr (K::QUANTIZED)
                words[0] = K::encode(values, scale);
            else
                K::encode(values, words);
            store_words<BYTES>(target + d * BYTES, words);
        }
    }
    __syncwarp();

    // This lane's rows and values.
    const int lane_row = lane / KEY_LANES * LANE_ROWS, my_row = warp * WARP_ROWS + lane_row, slot = lane % KEY_LANES;
    float maximum[LANE_ROWS], total[LANE_ROWS], sums[LANE_ROWS][SLICES][QUAD];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        maximum[r] = -INFINITY, total[r] = 0.f;
#pragma unroll
        for (int i = 0; i < SLICES; i++)
#pragma unroll
            for (int j = 0; j < QUAD; j++) sums[r][i][j] = 0.f;
    }
    // Keys that every existing row of the block sees: tiles within need no masks.
    const int all_begin =
        p.window > 0 ? max(0, s.first_position + (min(row0 + ROWS, s.rows) - 1) / p.group - p.window + 1) : 0;
    const int all_end = row0 + ROWS > s.rows ? 0
                        : p.ancestors        ? s.first_position
                                             : min(s.seq_len, s.first_position + row0 / p.group + 1 + p.ahead);

    const int row_quads = p.head_dim / QUAD;
    auto fetch_k_quad = [&](int i, uint32_t* words) {
        const int key = Share::key(i), quad = Share::quad(i);
        clear_words<Share::K_WORDS>(words);
        if (quad < row_quads && place.live(key))
            K::template fetch<QUAD>(place.page_of(key) + place.offset_of(key) * map.k_row, quad * QUAD, map.k_row,
                                    words);
    };
    auto fetch_v_quad = [&](int i, uint32_t* words) {
        const int key = Share::key(i), quad = Share::quad(i);
        clear_words<Share::V_WORDS>(words);
        if (quad < row_quads && place.live(key))
            V::template fetch<QUAD>(place.page_of(key) + map.v_codes + place.offset_of(key) * map.v_row, quad * QUAD,
                                    map.v_row, words);
    };
    auto store_k = [&](int i, const uint32_t* words) {
        char* const row = kv + Share::key(i) * k_row_bytes(BYTES, WIDTH);
        if constexpr (K::QUANTIZED) {
            ((uint32_t*)row)[Share::quad(i)] = words[0];
        } else {
            float values[QUAD];
            K::template decode<QUAD>(words, 0, values);
            ((float4*)row)[Share::quad(i)] = make_float4(values[0], values[1], values[2], values[3]);
        }
    };
    // V of keys that are not read is zero, whatever stands in the place of their scales.
    auto store_v = [&](const TilePlace& at, int i, const uint32_t* words) {
        const int key = Share::key(i), d = Share::quad(i) * QUAD;
        float values[QUAD], scale = 1.f;
        V::template decode<QUAD>(words, d, values);
        if constexpr (V::QUANTIZED) {
            const int group = V::one_scale(WIDTH) ? 0 : min(d, p.head_dim - 1) / (V::GROUP ? V::GROUP : 1);
            scale = at.live(key) ? V::multiplier(v_scales[key * v_groups + group]) : 0.f;
        }
        ((float4*)kv)[key * Share::ROW_QUADS + Share::quad(i)] =
            make_float4(values[0] * scale, values[1] * scale, values[2] * scale, values[3] * scale);
    };
    // A tile's scales are copied as they lie: those of a run of keys are contiguous, K's and V's apart.
    const int k_run_words = SPLIT_UNIT / 4 * map.k_scale_row, v_run_words = SPLIT_UNIT / 4 * map.v_scale_row;
    constexpr int RUNS = TILE_KEYS / SPLIT_UNIT;
    auto fetch_scale_word = [&](int word) {
        const bool is_value = word >= RUNS * k_run_words;
        const int in_plane = is_value ? word - RUNS * k_run_words : word;
        const int run_words = is_value ? v_run_words : k_run_words;
        const int run = in_plane >= run_words;
        const char* const page = place.page_of(run * SPLIT_UNIT);
        if (in_plane >= RUNS * run_words || !page) return 0u;
        const char* const plane = page + (is_value ? map.v_scales : map.k_scales) +
                                  place.offset_of(run * SPLIT_UNIT) * (is_value ? map.v_scale_row : map.k_scale_row);
        return ((const uint32_t*)plane)[in_plane - run * run_words];
    };

    uint32_t k[Share::PREFETCH_K ? Share::QUADS : 1][Share::K_WORDS];
    uint32_t v[Share::PREFETCH_V ? Share::QUADS : 1][Share::V_WORDS];
    uint32_t scale_words[K::QUANTIZED ? Share::SCALE_WORDS : 1];
    auto fetch_k = [&] {
        if constexpr (Share::PREFETCH_K) {
#pragma unroll
            for (int i = 0; i < Share::QUADS; i++) fetch_k_quad(i, k[i]);
        }
        if constexpr (K::QUANTIZED) {
#pragma unroll
            for (int i = 0; i < Share::SCALE_WORDS; i++) scale_words[i] = fetch_scale_word(i * THREADS + threadIdx.x);
        }
    };
    auto fetch_v = [&] {
        if constexpr (Share::PREFETCH_V) {
#pragma unroll
            for (int i = 0; i < Share::QUADS; i++) fetch_v_quad(i, v[i]);
        }
    };

    PageCursor cursor(p, s, first * TILE_KEYS);
    if (first < last) {
        place.find(cursor, first * TILE_KEYS);
        fetch_k();
        fetch_v();
    }
#pragma unroll 1
    for (int t = first; t < last; t++) {
        const int first_key = t * TILE_KEYS;
        __syncthreads();  // V of the tile before is used up
        if constexpr (Share::PREFETCH_K) {
#pragma unroll
            for (int i = 0; i < Share::QUADS; i++) store_k(i, k[i]);
        } else {
#pragma unroll 4
            for (int i = 0; i < Share::QUADS; i++) {
                fetch_k_quad(i, k[0]);
                store_k(i, k[0]);
            }
        }
        if constexpr (K::QUANTIZED) {
#pragma unroll
            for (int i = 0; i < Share::SCALE_WORDS; i++) {
                const int word = i * THREADS + threadIdx.x;
                if (word < RUNS * (k_run_words + v_run_words)) scales[word] = scale_words[i];
            }
        }
        __syncthreads();
        const TilePlace here = place;
        if (t + 1 < last) {
            place.find(cursor, first_key + TILE_KEYS);
            fetch_k();
        }

        // Scores of four rows and keys slot + 8j.
        float score[LANE_ROWS][LANE_KEYS];
        const char* const my_query = query + my_row * query_row_bytes(BYTES, WIDTH);
        const char* const my_k = kv + slot * k_row_bytes(BYTES, WIDTH);
        if constexpr (K::QUANTIZED) {
            constexpr bool GROUPS = !K::one_scale(WIDTH);
            int dot[LANE_ROWS][LANE_KEYS];
            auto begin_dots = [&] {
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; j++) dot[r][j] = GROUPS ? INT_AS_FLOAT : 0;
            };
            auto add_sixteen = [&](int d) {
                uint4 q[LANE_ROWS];
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
                    q[r] = *(const uint4*)(my_query + r * query_row_bytes(BYTES, WIDTH) + d);
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) {
                    const uint4 key = *(const uint4*)(my_k + KEY_LANES * j * k_row_bytes(BYTES, WIDTH) + d);
#pragma unroll
                    for (int r = 0; r < LANE_ROWS; r++) {
                        dot[r][j] = __dp4a((int)key.x, (int)q[r].x, dot[r][j]);
                        dot[r][j] = __dp4a((int)key.y, (int)q[r].y, dot[r][j]);
                        dot[r][j] = __dp4a((int)key.z, (int)q[r].z, dot[r][j]);
                        dot[r][j] = __dp4a((int)key.w, (int)q[r].w, dot[r][j]);
                    }
                }
            };
            if constexpr (GROUPS) {
                // Sums of a group in integers, scaled into those of the row.
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; j++) score[r][j] = 0.f;
#pragma unroll 1
                for (int group = 0; group < k_groups; group++) {
                    begin_dots();
#pragma unroll
                    for (int d = 0; d < K::GROUP; d += 16) add_sixteen(group * K::GROUP + d);
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; j++) {
                        const float scale = K::multiplier(k_scales[(slot + KEY_LANES * j) * k_groups + group]);
#pragma unroll
                        for (int r = 0; r < LANE_ROWS; r++)
                            score[r][j] = fmaf(float_of_int(dot[r][j]), scale, score[r][j]);
                    }
                }
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                    for (int j = 0; j < LANE_KEYS; j++) score[r][j] *= query_scales[my_row + r];
            } else {
                begin_dots();
#pragma unroll 2
                for (int d = 0; d < p.head_dim; d += 16) add_sixteen(d);
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) {
                    const float k_scale = K::multiplier(k_scales[slot + KEY_LANES * j]);
#pragma unroll
                    for (int r = 0; r < LANE_ROWS; r++)
                        score[r][j] = (float)dot[r][j] * (k_scale * query_scales[my_row + r]);
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) score[r][j] = 0.f;
#pragma unroll 2
            for (int d = 0; d < p.head_dim; d += QUAD) {
                float q[LANE_ROWS][QUAD];
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++) {
                    uint32_t words[BYTES];
                    const char* const at = my_query + r * query_row_bytes(BYTES, WIDTH) + d * BYTES;
                    if constexpr (BYTES == 2) {
                        const uint2 two = *(const uint2*)at;
                        words[0] = two.x, words[1] = two.y;
                    } else {
                        const uint4 four = *(const uint4*)at;
                        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
                    }
                    K::template decode<QUAD>(words, 0, q[r]);
                }
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) {
                    const float4 key = *(const float4*)(my_k + KEY_LANES * j * k_row_bytes(BYTES, WIDTH) + d * 4);
#pragma unroll
                    for (int r = 0; r < LANE_ROWS; r++) {
                        score[r][j] = fmaf(key.x, q[r][0], score[r][j]);
                        score[r][j] = fmaf(key.y, q[r][1], score[r][j]);
                        score[r][j] = fmaf(key.z, q[r][2], score[r][j]);
                        score[r][j] = fmaf(key.w, q[r][3], score[r][j]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) score[r][j] *= p.score_scale;
        }

        if (p.softcap > 0.f || p.alibi_slopes) {
#pragma unroll 1
            for (int r = 0; r < LANE_ROWS; r++) {
                // Rows go through one place of the code, in turn, so that tanh is not written out sixteen times.
                const PagedRow row(p, s, row0 + my_row + r);
                const float slope = row.slope(p);
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) {
                    const int key = first_key + slot + KEY_LANES * j;
                    const float logit = paged_logit(p, score[0][j], slope, row.position - key);
#pragma unroll
                    for (int next = 0; next + 1 < LANE_ROWS; next++) score[next][j] = score[next + 1][j];
                    score[LANE_ROWS - 1][j] = logit;
                }
            }
        }
        if (first_key < all_begin || first_key + TILE_KEYS > all_end) {
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) {
                const PagedRow row(p, s, row0 + my_row + r);
#pragma unroll
                for (int j = 0; j < LANE_KEYS; j++) {
                    const int key = first_key + slot + KEY_LANES * j;
                    if (!row.sees(p, s, key)) score[r][j] = -INFINITY;
                }
            }
        }

        // Weights, and what is there already brought to the new maxima.
        float correction[LANE_ROWS];
        bool moved = false;
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            float top = maximum[r];
#pragma unroll
            for (int j = 0; j < LANE_KEYS; j++) top = fmaxf(top, score[r][j]);
#pragma unroll
            for (int other = 1; other < KEY_LANES; other *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, other));
            const float base = top == -INFINITY ? 0.f : top;
            correction[r] = exp2f(maximum[r] - base);
            moved |= top != maximum[r];
            maximum[r] = top;
            total[r] *= correction[r];
#pragma unroll
            for (int j = 0; j < LANE_KEYS; j++) {
                score[r][j] = exp2f(score[r][j] - base);
                total[r] += score[r][j];
            }
        }
#pragma unroll
        for (int j = 0; j < LANE_KEYS; j++)
            *(float4*)(weights + (slot + KEY_LANES * j) * WEIGHT_STRIDE + lane_row) =
                make_float4(score[0][j], score[1][j], score[2][j], score[3][j]);
        if (__any_sync(FULL_WARP, moved)) {
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
                for (int i = 0; i < SLICES; i++)
#pragma unroll
                    for (int j = 0; j < QUAD; j++) sums[r][i][j] *= correction[r];
        }

        __syncthreads();  // K is used up
        if constexpr (Share::PREFETCH_V) {
#pragma unroll
            for (int i = 0; i < Share::QUADS; i++) store_v(here, i, v[i]);
        } else {
            const TilePlace next = place;
            place = here;
#pragma unroll 4
            for (int i = 0; i < Share::QUADS; i++) {
                fetch_v_quad(i, v[0]);
                store_v(here, i, v[0]);
            }
            place = next;
        }
        __syncthreads();
        if (t + 1 < last) fetch_v();
        const float* const my_v = (const float*)kv + slot * QUAD;
#pragma unroll 2
        for (int key = 0; key < TILE_KEYS; key++) {
            const float4 weight = *(const float4*)(weights + key * WEIGHT_STRIDE + lane_row);
#pragma unroll
            for (int i = 0; i < SLICES; i++) {
                const float4 value = *(const float4*)(my_v + key * WIDTH + i * 32);
                const float w[LANE_ROWS] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
                for (int r = 0; r < LANE_ROWS; r++) {
                    sums[r][i][0] = fmaf(w[r], value.x, sums[r][i][0]);
                    sums[r][i][1] = fmaf(w[r], value.y, sums[r][i][1]);
                    sums[r][i][2] = fmaf(w[r], value.z, sums[r][i][2]);
                    sums[r][i][3] = fmaf(w[r], value.w, sums[r][i][3]);
                }
            }
        }
    }

#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
#pragma unroll
        for (int other = 1; other < KEY_LANES; other *= 2) total[r] += __shfl_xor_sync(FULL_WARP, total[r], other);
        const int in_sequence = row0 + my_row + r;
        const PagedRow row(p, s, in_sequence);
        if (!row.exists) continue;
        if (p.prefill_splits == 1) {
            const float factor = output_factor(p, row.head, maximum[r], total[r]);
            const int64_t at = row.token * p.out_token_stride + row.head * p.out_head_stride;
#pragma unroll
            for (int i = 0; i < SLICES; i++)
#pragma unroll
                for (int j = 0; j < QUAD; j++) {
                    const int d = slot * QUAD + i * 32 + j;
                    if (d < p.head_dim) store_float(p.out, at + d, p.out_type, sums[r][i][j] * factor);
                }
        } else {
            const int64_t at = partial_index(p, s, in_sequence, split);
#pragma unroll
            for (int i = 0; i < SLICES; i++)
                if (slot * QUAD + i * 32 < p.head_dim)
                    *(float4*)(p.partial_out + at * p.head_dim + slot * QUAD + i * 32) =
                        make_float4(sums[r][i][0], sums[r][i][1], sums[r][i][2], sums[r][i][3]);
            if (slot == 0) p.partial_stats[at] = make_float2(maximum[r], total[r]);
        }
    }
}

#define ATTN_PREFILL(width)                                                        \
    KERNEL(CONCATENATE(CONCATENATE(attn_prefill_, FORMAT), _##width), PagedParams, \
           prefill_warps(KV_CODEC::K::BYTES, width) * WARP, 2) {                   \
        attn_prefill<KV_CODEC, width>(p);                                          \
    }
ATTN_PREFILL(64)
ATTN_PREFILL(128)
ATTN_PREFILL(256)
#else
// value_bytes      of a stored value of K
// scale_row_bytes  of a token's scales of K and V
// tokens           rows of query, or a bound on query_start_loc[num_seqs]
static void attn_prefill(const std::string& format, int64_t value_bytes, int64_t scale_row_bytes, int64_t tokens,
                         uintptr_t stream, const py::kwargs& given) {
    const PagedParams p = paged_params(given);
    const int width = width_of(p), warps = prefill_warps((int)value_bytes, width);
    const int64_t tiles = tokens * p.group / (warps * WARP_ROWS) + p.num_seqs;
    CHECK(tiles <= INT32_MAX, "attn_prefill: %lld query tokens are too many", (long long)tokens);
    launch("attn_prefill_" + format + "_" + std::to_string(width),
           {(unsigned)(p.num_seqs ? tiles : 0), (unsigned)p.num_kv_heads, (unsigned)p.prefill_splits},
           (unsigned)(warps * WARP), (unsigned)prefill_shared_bytes((int)value_bytes, width, (int)scale_row_bytes),
           stream, p);
}
REGISTER(attn_prefill)
#endif

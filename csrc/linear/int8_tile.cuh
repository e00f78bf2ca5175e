// SPDX-License-Identifier: BSD-3-Clause
// One tile of a W8A8 product by one block: integer sums of x rows times weight rows by dp4a. gemm.cu and moe_gemm.cu
// say which rows; the scheme is this file's.
//
// Shared memory holds, for x and for w, 32-bit words of four consecutive k, word-major. A thread then reads four rows
// of one word with one 128-bit load and multiplies ROWS x COLUMNS words, for each of the 8 words of a K step:
//
//   slice 0  word 0  [ row 0, row 1, row 2, ...      | 4 words of padding ]
//            word 1  [ row 0, row 1, row 2, ...      | 4 words of padding ]
//            ...                                     | 16 / SLICES words of padding after a slice
//
// With that padding neither the 128-bit loads nor the four 32-bit stores that transpose a 16-byte chunk meet a bank
// conflict.
//
// SLICES groups of warps take different columns of K and are added at the end, in order, through shared memory: that
// gives small tiles enough warps without a workspace. Two stages; the next one travels from global memory through
// registers (Volta has no cp.async) while this one is multiplied; one barrier a step.
//
// PARTIAL tiles (gemm_split.cu) sum a part of K only and write what they have, the int32 sums, or fp32 totals when
// grouped, in place of outputs.
//
// Grouped (a scale for every 128 columns on both sides): each slice works on a group of its own, and after four steps
// its int32 sums are scaled and added to fp32 totals; scales travel with the first step of their group.
#pragma once
#include "linear/w8a8.cuh"

constexpr int STEP_WORDS = 8;           // words of a slice in a K step
constexpr int STEP_K = 4 * STEP_WORDS;  // its columns

// A warp's lanes form LANES_M x LANES_N, each with ROWS x COLUMNS outputs; a slice has WARPS_M x WARPS_N warps.
// BLOCKS a multiprocessor; FRAGMENTS 2 reads the next word's operands while this one is multiplied; PHASES a K step's
// global loads are spread over, so that fewer registers hold them.
template <int LANES_M_, int LANES_N_, int ROWS_, int COLUMNS_, int WARPS_M_, int WARPS_N_, int SLICES_, int BLOCKS_,
          int FRAGMENTS_, int PHASES_, bool GROUPED_, bool WIDE_ = true>
struct TileShape {
    static constexpr int LANES_M = LANES_M_, LANES_N = LANES_N_, ROWS = ROWS_, COLUMNS = COLUMNS_, WARPS_M = WARPS_M_,
                         WARPS_N = WARPS_N_, SLICES = SLICES_, BLOCKS = BLOCKS_, FRAGMENTS = FRAGMENTS_,
                         PHASES = PHASES_;
    static constexpr bool GROUPED = GROUPED_;
    static constexpr bool WIDE = WIDE_;  // rows start on 16 bytes; else on 4, and every word is loaded by itself
    static constexpr int M = LANES_M * ROWS * WARPS_M, N = LANES_N * COLUMNS * WARPS_N;
    static constexpr int SLICE_THREADS = WARP * WARPS_M * WARPS_N, THREADS = SLICE_THREADS * SLICES;

    // global to shared: CHUNKS neighbouring threads take the 16-byte chunks of one row
    static constexpr int CHUNKS = 2 * SLICES, LOAD_ROWS = THREADS / CHUNKS;
    static constexpr int X_LOADS = M / LOAD_ROWS, W_LOADS = N / LOAD_ROWS, LOADS = X_LOADS + W_LOADS;
    static constexpr int PHASE_LOADS = (LOADS + PHASES - 1) / PHASES, PHASE_WORDS = STEP_WORDS / PHASES;
    static_assert(LANES_M * LANES_N == WARP && ROWS % 4 == 0 && COLUMNS % 4 == 0 && STEP_WORDS % PHASES == 0, "");
    static_assert(M % LOAD_ROWS == 0 && N % LOAD_ROWS == 0, "");

    // shared memory, in words
    static constexpr int X_ROW = M + 4, W_ROW = N + 4, SLICE_PAD = SLICES == 1 ? 0 : 16 / SLICES;
    static constexpr int X_SLICE = STEP_WORDS * X_ROW + SLICE_PAD, W_SLICE = STEP_WORDS * W_ROW + SLICE_PAD;
    static constexpr int W_AT = SLICES * X_SLICE, STAGE = SLICES * (X_SLICE + W_SLICE);
    static constexpr int SCALES = GROUPED ? SLICES * (M + N) : 0;  // of one group a slice
    static constexpr int SCALE_LOADS = (SCALES + THREADS - 1) / THREADS;
    static constexpr int SCALES_AT = 2 * STAGE;
    // sums of the slices: ROUND_ROWS rows of every thread at a time
    static constexpr int ROUND_ROWS = 2 * COLUMNS / 4 % SLICES == 0 ? 2 : 4, QUADS = ROUND_ROWS * COLUMNS / 4;
    static constexpr int SLICE_QUADS = QUADS / SLICES;
    static_assert(SLICE_QUADS * SLICES == QUADS, "");
    static constexpr int MAIN_WORDS = 2 * STAGE + 2 * SCALES, ROUND_SHARED = SLICES > 1 ? THREADS * QUADS * 4 : 0;
    static constexpr int SHARED_WORDS = MAIN_WORDS > ROUND_SHARED ? MAIN_WORDS : ROUND_SHARED;
    static_assert(SHARED_WORDS * 4 <= 48 * 1024, "static shared memory ends at 48 KB");

    static constexpr int TOTAL_ROWS = GROUPED ? ROWS : 1;  // of fp32 totals; an unused array needs one
    static constexpr int COLUMNS_A_STEP = SLICES * STEP_K, GROUP_STEPS = W8A8_GROUP / STEP_K;
};

// The shapes in use. gemm.cu tells when each is taken.
// clang-format off
//                                   lanes  outputs  warps  slices blocks fragments phases grouped wide
using Tile128x128 =        TileShape<4, 8,   8, 8,  4, 2,  1,     2,     1,        2,     false>;
using Tile64x64 =          TileShape<4, 8,   8, 8,  2, 1,  4,     2,     1,        1,     false>;
using Tile32x32 =          TileShape<4, 8,   8, 4,  1, 1,  4,     4,     1,        1,     false>;
using Tile16x64 =          TileShape<2, 16,  8, 4,  1, 1,  4,     4,     1,        1,     false>;
using Tile128x128Grouped = TileShape<4, 8,   8, 8,  4, 2,  1,     1,     2,        1,     true>;
using Tile64x64Grouped =   TileShape<4, 8,   8, 8,  2, 1,  4,     1,     2,        1,     true>;
using Tile32x64Grouped =   TileShape<4, 8,   8, 8,  1, 1,  4,     2,     2,        1,     true>;
using Tile64x64Narrow =    TileShape<4, 8,   8, 8,  2, 1,  4,     1,     1,        1,     false,  false>;
// clang-format on

#ifdef DEVICE_HALF
// Where a thread stands in the tile. Computed anew where it is needed, rather than kept in registers.
template <class S>
struct TilePlace {
    int thread, slice, row, column;  // first row and column of the thread in the tile
    __device__ __forceinline__ TilePlace() {
        thread = fresh_thread_id();
        const int lane = thread % WARP, warp = thread / WARP % (S::WARPS_M * S::WARPS_N);
        slice = S::SLICES == 1 ? 0 : thread / S::SLICE_THREADS;  // a constant keeps the sums in registers
        // four by eight lanes: eight neighbours share two row quads and four column quads, which 128-bit loads like
        const int lane_m = S::LANES_M == 4 ? (lane & 1) | lane >> 4 << 1 : lane % S::LANES_M;
        const int lane_n = S::LANES_M == 4 ? lane >> 1 & 7 : lane / S::LANES_M;
        row = warp % S::WARPS_M * (S::LANES_M * S::ROWS) + lane_m * 4;
        column = warp / S::WARPS_M * (S::LANES_N * S::COLUMNS) + lane_n * 4;
    }
    // Row in the tile of the thread's row i, column of its quad of columns.
    __device__ __forceinline__ int row_of(int i) const { return row + i / 4 * (S::LANES_M * 4) + i % 4; }
    __device__ __forceinline__ int column_of(int quad) const { return column + quad * (S::LANES_N * 4); }
};

// Rows of x and out that a tile takes as they come: `first` on. Overhanging rows are clamped when read and not written.
struct RowsInOrder {
    int first, m;
    __device__ __forceinline__ int source(int i) const { return min(first + i, m - 1); }
    __device__ __forceinline__ int out(int i) const { return first + i < m ? first + i : -1; }
};

// Which tile of an (m, n) result is this block's. Tiles go along bands of eight tile rows, so that the blocks that run
// at the same time share their rows of x and w in L2.
template <class S>
struct TileInBands {
    static constexpr int BAND = 8;  // tile rows
    RowsInOrder rows;
    int column0;
    __device__ __forceinline__ TileInBands(int m, int n) {
        const int tiles_m = (m + S::M - 1) / S::M, tiles_n = (n + S::N - 1) / S::N;
        const int band = blockIdx.x / (BAND * tiles_n), inside = blockIdx.x % (BAND * tiles_n);
        const int height = min(BAND, tiles_m - band * BAND);
        rows = {(band * BAND + inside % height) * S::M, m};
        column0 = inside / height * S::N;
    }
};

// 16 bytes from 32-bit word `word` of a matrix on; of them only `left` are inside the row (none if it is not positive).
template <bool WIDE>
__device__ __forceinline__ uint4 load_chunk(const int8_t* matrix, uint32_t word, int left) {
    const uint32_t* at = (const uint32_t*)matrix + word;
    if (WIDE) return load_early(at, left > 0);
    return make_uint4(left > 0 ? at[0] : 0, left > 4 ? at[1] : 0, left > 8 ? at[2] : 0, left > 12 ? at[3] : 0);
}

// Columns begin to end - 1 of K, whole steps of a tile unless they end with the row; how many groups those are.
struct KSpan {
    int begin, end, groups;
};

// Add the slices' sums through shared memory, scale, write. Each slice finishes its share of every round.
template <class S, class T, bool PARTIAL = false, class Rows>
__device__ __forceinline__ void finish_tile(const W8A8Params& p, const Rows& rows, int column0, uint32_t* shared_words,
                                            const int (&sums)[S::ROWS][S::COLUMNS],
                                            const float (&totals)[S::TOTAL_ROWS][S::COLUMNS]) {
    const TilePlace<S> place;
    const int local = place.thread % S::SLICE_THREADS;
    const auto value = [&](int i, int j) {
        return S::GROUPED ? __float_as_int(totals[S::GROUPED ? i : 0][j]) : sums[i][j];
    };
    const auto quad_of = [&](int share) { return (place.slice * S::SLICE_QUADS + share) % (S::COLUMNS / 4); };
    float w_scales[S::SLICE_QUADS][4], bias[S::SLICE_QUADS][4];
#pragma unroll
    for (int share = 0; share < S::SLICE_QUADS; share++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = min(column0 + place.column_of(quad_of(share)) + e, p.n - 1);
            w_scales[share][e] = S::GROUPED || PARTIAL ? 1.f : p.w_scales[column];
            bias[share][e] = PARTIAL ? 0.f : load_bias<T>(p, column);
        }
    if (S::SLICES > 1) __syncthreads();
#pragma unroll
    for (int round = 0; round < S::ROWS / S::ROUND_ROWS; round++) {
        if (S::SLICES > 1) {
            if (round) __syncthreads();
            // 32-bit stores on purpose: vector stores pin the sums to aligned registers, which costs bank conflicts
#pragma unroll
            for (int q = 0; q < S::QUADS; q++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    shared_words[((q * S::SLICES + place.slice) * 4 + e) * S::SLICE_THREADS + local] =
                        (uint32_t)value(round * S::ROUND_ROWS + q / (S::COLUMNS / 4), q % (S::COLUMNS / 4) * 4 + e);
            __syncthreads();
        }
#pragma unroll
        for (int share = 0; share < S::SLICE_QUADS; share++) {
            const int q = place.slice * S::SLICE_QUADS + share, i = round * S::ROUND_ROWS + q / (S::COLUMNS / 4);
            const int tile_row = place.row_of(i), row = rows.out(tile_row);
            const float x_scale = S::GROUPED || PARTIAL ? 1.f : p.x_scales[rows.source(tile_row)];
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const uint32_t* from = shared_words + (q * S::SLICES * 4 + e) * S::SLICE_THREADS + local;
                int sum = S::SLICES == 1 ? value(i, quad_of(share) * 4 + e) : (int)from[0];
                float total = __int_as_float(sum);
#pragma unroll
                for (int s = 1; s < S::SLICES; s++) {
                    const int other = (int)from[s * 4 * S::SLICE_THREADS];
                    if (S::GROUPED)
                        total += __int_as_float(other);
                    else
                        sum += other;
                }
                v[e] = PARTIAL      ? S::GROUPED ? total : __int_as_float(sum)
                       : S::GROUPED ? total + bias[share][e]
                                    : add_scaled(bias[share][e], (float)sum, x_scale, w_scales[share][e]);
            }
            if (row >= 0) store_quad<T>(p, row, column0 + place.column_of(quad_of(share)), v);
        }
    }
}

// Multiply one tile. `rows.source(i)` is the row of x that tile row i reads (any valid one where the tile overhangs),
// `rows.out(i)` the row of out that it writes, or -1. Weight rows column0 ... are read from p.w, clamped to n.
// p.x and p.w are addressed by 32-bit offsets in words: each at most 16 GiB. PARTIAL writes 32-bit sums to p.out.
template <class S, bool PARTIAL = false, class Rows>
__device__ __forceinline__ void int8_tile(const W8A8Params& p, const Rows& rows, int column0, KSpan span) {
    __shared__ __align__(16) uint32_t shared_words[S::SHARED_WORDS];
    char* const shared = (char*)shared_words;
    const int length = span.end - span.begin, first_group = span.begin / W8A8_GROUP;
    const int steps = S::GROUPED ? (span.groups + S::SLICES - 1) / S::SLICES * S::GROUP_STEPS
                                 : (length + S::COLUMNS_A_STEP - 1) / S::COLUMNS_A_STEP;
    int sums[S::ROWS][S::COLUMNS];
    float totals[S::TOTAL_ROWS][S::COLUMNS];
    const auto zero_sums = [&] {
#pragma unroll
        for (int i = 0; i < S::ROWS; i++)
#pragma unroll
            for (int j = 0; j < S::COLUMNS; j++) sums[i][j] = S::GROUPED ? MAGIC_BITS : 0;
    };

    {  // ---- main loop; its registers end here
        const TilePlace<S> place;
        const int chunk = place.thread % S::CHUNKS, load_row = place.thread / S::CHUNKS;
        const int first_column =
            S::GROUPED ? chunk / 2 * W8A8_GROUP + chunk % 2 * 16 : chunk / 2 * STEP_K + chunk % 2 * 16;
        int left = length - first_column;  // bytes of the span from this thread's chunk on
        uint32_t word[S::LOADS];           // where the thread's chunks are, in words of x (first) and of w
#pragma unroll
        for (int i = 0; i < S::LOADS; i++) {
            const int row = i < S::X_LOADS ? rows.source(load_row + i * S::LOAD_ROWS)
                                           : min(column0 + load_row + (i - S::X_LOADS) * S::LOAD_ROWS, p.n - 1);
            word[i] = (uint32_t)row * (uint32_t)(p.k / 4) + (span.begin + first_column) / 4;
        }
        // byte offsets in shared memory: stores of x and of w, reads of x and of w; `flip` moves them to the other
        // stage
        const int line = chunk % 2 * 4;
        int x_store = 4 * (chunk / 2 * S::X_SLICE + line * S::X_ROW + load_row);
        int w_store = 4 * (S::W_AT + chunk / 2 * S::W_SLICE + line * S::W_ROW + load_row);
        int x_read = 4 * (place.slice * S::X_SLICE + place.row);
        int w_read = 4 * (S::W_AT + place.slice * S::W_SLICE + place.column);
        int flip = 4 * S::STAGE;

        uint4 travelling[S::PHASE_LOADS];
        float travelling_scales[S::SCALE_LOADS > 0 ? S::SCALE_LOADS : 1];
        int step = 0;  // that is being fetched

        const auto fetch = [&](int phase) {
#pragma unroll
            for (int l = 0; l < S::PHASE_LOADS; l++) {
                const int i = phase * S::PHASE_LOADS + l;
                if (i < S::LOADS) travelling[l] = load_chunk<S::WIDE>(i < S::X_LOADS ? p.x : p.w, word[i], left);
            }
            if (phase < S::PHASES - 1) return;
            const bool next_group = S::GROUPED && step % S::GROUP_STEPS == S::GROUP_STEPS - 1;
            const int advance = !S::GROUPED  ? S::COLUMNS_A_STEP
                                : next_group ? S::SLICES * W8A8_GROUP - (S::GROUP_STEPS - 1) * STEP_K
                                             : STEP_K;
            left -= advance;
#pragma unroll
            for (int i = 0; i < S::LOADS; i++) {
                word[i] += advance / 4;
                keep(word[i]);
            }
            if (S::GROUPED && step % S::GROUP_STEPS == 0 && step < steps) {
#pragma unroll
                for (int l = 0; l < S::SCALE_LOADS; l++) {
                    const int at = place.thread + l * S::THREADS, i = at % (S::M + S::N);
                    const int group =
                        min(first_group + step / S::GROUP_STEPS * S::SLICES + at / (S::M + S::N), p.groups - 1);
                    if (at >= S::SCALES) continue;
                    travelling_scales[l] =
                        i < S::M ? p.x_scales[(int64_t)rows.source(i) * p.groups + group]
                                 : p.w_scales[(int64_t)min(column0 + i - S::M, p.n - 1) * p.groups + group];
                }
            }
        };
        const auto store = [&](int phase) {
#pragma unroll
            for (int l = 0; l < S::PHASE_LOADS; l++) {
                const int i = phase * S::PHASE_LOADS + l;
                if (i >= S::LOADS) continue;
                const bool is_x = i < S::X_LOADS;
                uint32_t* to =
                    (uint32_t*)(shared + (is_x ? x_store : w_store)) + (is_x ? i : i - S::X_LOADS) * S::LOAD_ROWS;
                to[0] = travelling[l].x;
                to[is_x ? S::X_ROW : S::W_ROW] = travelling[l].y;
                to[2 * (is_x ? S::X_ROW : S::W_ROW)] = travelling[l].z;
                to[3 * (is_x ? S::X_ROW : S::W_ROW)] = travelling[l].w;
            }
            if (phase < S::PHASES - 1) return;
            if (S::GROUPED && step % S::GROUP_STEPS == 0) {
                float* to = (float*)(shared_words + S::SCALES_AT) + step / S::GROUP_STEPS % 2 * S::SCALES;
#pragma unroll
                for (int l = 0; l < S::SCALE_LOADS; l++)
                    if (place.thread + l * S::THREADS < S::SCALES)
                        to[place.thread + l * S::THREADS] = travelling_scales[l];
            }
        };

        uint32_t xs[S::FRAGMENTS][S::ROWS], ws[S::FRAGMENTS][S::COLUMNS];
        const auto read = [&](int fragment, int line) {
#pragma unroll
            for (int q = 0; q < S::ROWS / 4; q++) {
                const uint4 v = *(const uint4*)(shared + x_read + 4 * (line * S::X_ROW + q * S::LANES_M * 4));
                xs[fragment][4 * q] = v.x, xs[fragment][4 * q + 1] = v.y;
                xs[fragment][4 * q + 2] = v.z, xs[fragment][4 * q + 3] = v.w;
            }
#pragma unroll
            for (int q = 0; q < S::COLUMNS / 4; q++) {
                const uint4 v = *(const uint4*)(shared + w_read + 4 * (line * S::W_ROW + q * S::LANES_N * 4));
                ws[fragment][4 * q] = v.x, ws[fragment][4 * q + 1] = v.y;
                ws[fragment][4 * q + 2] = v.z, ws[fragment][4 * q + 3] = v.w;
            }
        };
        const auto multiply = [&](int fragment) {
#pragma unroll
            for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++)
                    sums[i][j] = __dp4a((int)xs[fragment][i], (int)ws[fragment][j], sums[i][j]);
        };

        zero_sums();
        if (S::GROUPED)
#pragma unroll
            for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++) totals[S::GROUPED ? i : 0][j] = 0.f;
#pragma unroll
        for (int phase = 0; phase < S::PHASES; phase++) fetch(phase), store(phase);
        x_store += flip, w_store += flip;
        __syncthreads();
        if (S::FRAGMENTS == 2) read(0, 0);

#pragma unroll 1
        while (true) {
            step++;
            const bool more = step < steps;
#pragma unroll
            for (int line = 0; line < STEP_WORDS; line++) {
                const int phase = line / S::PHASE_WORDS;
                const bool last_of_phase = line % S::PHASE_WORDS == S::PHASE_WORDS - 1;
                if (line % S::PHASE_WORDS == 0) fetch(phase);
                if (S::FRAGMENTS == 1) {
                    read(0, line);
                    multiply(0);
                    if (last_of_phase && more) store(phase);
                } else {
                    if (last_of_phase && more) store(phase);
                    if (line == STEP_WORDS - 1 && more) {
                        __syncthreads();
                        x_read += flip, w_read += flip;
                    }
                    read((line + 1) % 2, (line + 1) % STEP_WORDS);
                    multiply(line % 2);
                }
            }
            if (S::GROUPED && step % S::GROUP_STEPS == 0) {
                const TilePlace<S> here;
                const float* scales = (const float*)(shared_words + S::SCALES_AT) +
                                      (step - 1) / S::GROUP_STEPS % 2 * S::SCALES + here.slice * (S::M + S::N);
                float w_scales[S::COLUMNS];
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j++) w_scales[j] = scales[S::M + here.column_of(j / 4) + j % 4];
#pragma unroll
                for (int i = 0; i < S::ROWS; i++) {
                    const float x_scale = scales[here.row_of(i)];
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++) {
                        float& total = totals[S::GROUPED ? i : 0][j];
                        total = add_scaled(total, magic_to_float(sums[i][j]), x_scale, w_scales[j]);
                    }
                }
                zero_sums();
            }
            if (!more) break;
            if (S::FRAGMENTS == 1) {
                __syncthreads();
                x_read += flip, w_read += flip;
            }
            flip = -flip;
            x_store += flip, w_store += flip;
        }
    }

    if (!PARTIAL && p.out_type == OUT_FP16)
        finish_tile<S, fp16_t, PARTIAL>(p, rows, column0, shared_words, sums, totals);
    else if (!PARTIAL && p.out_type == OUT_BF16)
        finish_tile<S, bf16_t, PARTIAL>(p, rows, column0, shared_words, sums, totals);
    else
        finish_tile<S, fp32_t, PARTIAL>(p, rows, column0, shared_words, sums, totals);
}
#endif

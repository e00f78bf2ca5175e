// SPDX-License-Identifier: BSD-3-Clause
// One tile of a product with weights in blocks: int8_tile.cuh's scheme with grouped scales, where a step is one unit of
// 32 columns for each of the four slices, and weights are decoded on their way into shared memory.
//
// A thread decodes N * SLICES / THREADS units a step, once for the tile's M rows: some 40 instructions for the 512 (at
// M = 64) lane-dp4a that follow. Slices lie 8 words apart modulo 32 banks for w (a warp stores 8 rows of 4 slices) and
// 4 for x (4 rows of 4 slices and both halves), so that no store meets a bank conflict.
//
// After a step its int32 sums, which start as MAGIC_BITS, are scaled and added to fp32 totals: 3 instructions at full
// rate for 8 dp4a (6 where a unit has two scales), plus one for a minimum, that is multiplied by the sum of the codes
// of x; whoever stores x adds those up.
//
// Shared memory of a stage: x by words, w by words, then for each slice: scales of x (M), scaled sums of x (M each),
// scales of w (N each), minima of w (N each).
#pragma once
#include "linear/block_params.cuh"
#include "linear/int8_tile.cuh"

#ifdef DEVICE_HALF
template <class F, class S>
struct BlockTile {
    static_assert(S::SLICES == 4 && S::GROUPED, "paddings are those of four slices");
    static constexpr int SCALES = F::SCALES, SUMS = F::MINIMA ? SCALES : 0;
    // Two scales and two minima leave no room for the paddings in 48 KB.
    static constexpr bool PADDED = SCALES + SUMS < 4;
    static constexpr int X_SLICE = STEP_WORDS * S::X_ROW + (PADDED ? 4 : 0);
    static constexpr int W_SLICE = STEP_WORDS * S::W_ROW + (PADDED ? 8 : 0);
    static constexpr int W_AT = S::SLICES * X_SLICE, SCALES_AT = W_AT + S::SLICES * W_SLICE;
    static constexpr int SUMS_AT = S::M, W_SCALES_AT = SUMS_AT + SUMS * S::M, MINIMA_AT = W_SCALES_AT + SCALES * S::N;
    static constexpr int SLICE_SCALES = MINIMA_AT + SUMS * S::N;
    static constexpr int STAGE = SCALES_AT + S::SLICES * SLICE_SCALES;
    static constexpr int W_UNITS = S::N * S::SLICES / S::THREADS, W_ROWS = S::THREADS / S::SLICES;
    static constexpr int SHARED_WORDS = 2 * STAGE > S::ROUND_SHARED ? 2 * STAGE : S::ROUND_SHARED;
    static_assert(SHARED_WORDS * 4 <= 48 * 1024, "static shared memory ends at 48 KB");
};

__device__ __forceinline__ void store_words(uint32_t* to, int row, const uint4& v) {
    to[0] = v.x, to[row] = v.y, to[2 * row] = v.z, to[3 * row] = v.w;
}

template <int COUNT>
__device__ __forceinline__ void read_quads(const uint32_t* from, int stride, uint32_t (&v)[COUNT]) {
#pragma unroll
    for (int q = 0; q < COUNT / 4; q++) {
        const uint4 four = *(const uint4*)(from + q * stride);
        v[4 * q] = four.x, v[4 * q + 1] = four.y, v[4 * q + 2] = four.z, v[4 * q + 3] = four.w;
    }
}

// Rows as in int8_tile.
template <class F, class S, class Rows>
__device__ __forceinline__ void block_tile(const BlockParams& p, const Rows& rows, int column0) {
    using B = BlockTile<F, S>;
    __shared__ __align__(16) uint32_t shared_words[B::SHARED_WORDS];
    const W8A8Params& q = p.product;
    const int units = q.groups, steps = (units + S::SLICES - 1) / S::SLICES;
    float totals[S::ROWS][S::COLUMNS];
#pragma unroll
    for (int i = 0; i < S::ROWS; i++)
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j++) totals[i][j] = 0.f;

    {  // ---- main loop; its registers end here
        const TilePlace<S> place;
        const int chunk = place.thread % S::CHUNKS, load_row = place.thread / S::CHUNKS;  // of x: 16 bytes of a row
        const int slice = place.thread % S::SLICES, unit_row = place.thread / S::SLICES;  // of w: a unit
        uint32_t x_unit[S::X_LOADS], w_unit[B::W_UNITS];  // first units of the rows that this thread fetches
#pragma unroll
        for (int l = 0; l < S::X_LOADS; l++) x_unit[l] = (uint32_t)rows.source(load_row + l * S::LOAD_ROWS) * units;
#pragma unroll
        for (int l = 0; l < B::W_UNITS; l++)
            w_unit[l] = (uint32_t)min(column0 + unit_row + l * B::W_ROWS, q.n - 1) * units;

        uint4 x[S::X_LOADS];
        float x_scale[S::X_LOADS];
        typename F::Raw raw[B::W_UNITS];
        int x_at = 0, w_at = 0;  // units of the step that travels; those beyond the row are cut to zeros
        const auto fetch = [&](int step) {
            x_at = step * S::SLICES + chunk / 2, w_at = step * S::SLICES + slice;
#pragma unroll
            for (int l = 0; l < S::X_LOADS; l++) {
                const uint32_t unit = x_unit[l] + min(x_at, units - 1);
                x[l] = load_early(q.x + (uint64_t)unit * UNIT + chunk % 2 * 16, x_at < units);
                x_scale[l] = q.x_scales[unit];
            }
#pragma unroll
            for (int l = 0; l < B::W_UNITS; l++) raw[l] = F::load(p.planes, w_unit[l] + min(w_at, units - 1));
        };
        const auto store = [&](uint32_t* stage) {
            float* const x_scales = (float*)stage + B::SCALES_AT + chunk / 2 * B::SLICE_SCALES + load_row;
            float* const w_scales = (float*)stage + B::SCALES_AT + slice * B::SLICE_SCALES + B::W_SCALES_AT + unit_row;
#pragma unroll
            for (int l = 0; l < S::X_LOADS; l++) {
                store_words(stage + chunk / 2 * B::X_SLICE + chunk % 2 * 4 * S::X_ROW + load_row + l * S::LOAD_ROWS,
                            S::X_ROW, x[l]);
                const float scale = x_at < units ? x_scale[l] : 0.f;
                if (chunk % 2 == 0) x_scales[l * S::LOAD_ROWS] = scale;
                if (!F::MINIMA) continue;
                int sum = sum16(x[l], 0);
                if (B::SCALES == 1) sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                if (B::SCALES == 2 || chunk % 2 == 0)
                    x_scales[B::SUMS_AT + (B::SCALES == 2 ? chunk % 2 * S::M : 0) + l * S::LOAD_ROWS] =
                        (float)sum * scale;
            }
#pragma unroll
            for (int l = 0; l < B::W_UNITS; l++) {
                Unit<B::SCALES> u;
                F::decode(p.planes, raw[l], w_at, u);
                uint32_t* const words = stage + B::W_AT + slice * B::W_SLICE + unit_row + l * B::W_ROWS;
                store_words(words, S::W_ROW, minus_zero<F::ZERO>(u.first));
                store_words(words + 4 * S::W_ROW, S::W_ROW, minus_zero<F::ZERO>(u.last));
#pragma unroll
                for (int h = 0; h < B::SCALES; h++) {
                    w_scales[h * S::N + l * B::W_ROWS] = w_at < units ? u.scale[h] : 0.f;
                    if (F::MINIMA)
                        w_scales[B::MINIMA_AT - B::W_SCALES_AT + h * S::N + l * B::W_ROWS] =
                            w_at < units ? u.minimum[h] : 0.f;
                }
            }
        };

        fetch(0);
        store(shared_words);
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t* const stage = shared_words + step % 2 * B::STAGE;
            const uint32_t* const x_words = stage + place.slice * B::X_SLICE + place.row;
            const uint32_t* const w_words = stage + B::W_AT + place.slice * B::W_SLICE + place.column;
            const uint32_t* const scales = stage + B::SCALES_AT + place.slice * B::SLICE_SCALES;
            const bool more = step + 1 < steps;
            fetch(min(step + 1, steps - 1));
#pragma unroll
            for (int h = 0; h < B::SCALES; h++) {
                int sums[S::ROWS][S::COLUMNS];
#pragma unroll
                for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++) sums[i][j] = MAGIC_BITS;
#pragma unroll
                for (int line = h * STEP_WORDS / B::SCALES; line < (h + 1) * STEP_WORDS / B::SCALES; line++) {
                    if (line == STEP_WORDS / 2 && more) store(shared_words + (step + 1) % 2 * B::STAGE);
                    uint32_t xs[S::ROWS], ws[S::COLUMNS];
                    read_quads(x_words + line * S::X_ROW, S::LANES_M * 4, xs);
                    read_quads(w_words + line * S::W_ROW, S::LANES_N * 4, ws);
#pragma unroll
                    for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                        for (int j = 0; j < S::COLUMNS; j++) sums[i][j] = __dp4a((int)xs[i], (int)ws[j], sums[i][j]);
                }
                uint32_t x_scales[S::ROWS], w_scales[S::COLUMNS];
                read_quads(scales + place.row, S::LANES_M * 4, x_scales);
                read_quads(scales + B::W_SCALES_AT + h * S::N + place.column, S::LANES_N * 4, w_scales);
#pragma unroll
                for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++)
                        totals[i][j] = add_scaled(totals[i][j], magic_to_float(sums[i][j]),
                                                  __uint_as_float(x_scales[i]), __uint_as_float(w_scales[j]));
                if (!F::MINIMA) continue;
                read_quads(scales + B::SUMS_AT + h * S::M + place.row, S::LANES_M * 4, x_scales);
                read_quads(scales + B::MINIMA_AT + h * S::N + place.column, S::LANES_N * 4, w_scales);
#pragma unroll
                for (int i = 0; i < S::ROWS; i++)
#pragma unroll
                    for (int j = 0; j < S::COLUMNS; j++)
                        totals[i][j] = fmaf(__uint_as_float(x_scales[i]), __uint_as_float(w_scales[j]), totals[i][j]);
            }
            __syncthreads();
        }
    }

    const int no_sums[S::ROWS][S::COLUMNS] = {};
    if (q.out_type == OUT_FP16)
        finish_tile<S, fp16_t, false>(q, rows, column0, shared_words, no_sums, totals);
    else if (q.out_type == OUT_BF16)
        finish_tile<S, bf16_t, false>(q, rows, column0, shared_words, no_sums, totals);
    else
        finish_tile<S, fp32_t, false>(q, rows, column0, shared_words, no_sums, totals);
}
#endif

// SPDX-License-Identifier: BSD-3-Clause
// One row of an RMS norm, by one block: x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) in fp32, rounded to T.
// Shared by norm.cu and norm_quantize.cu, so that both have the same bits. The order of the sum follows from n alone.
#pragma once
#include "common/eight.cuh"

struct RmsParams {
    const void* x;         // (rows, n) T
    const void* residual;  // (rows, n) T, contiguous: x + residual is what is normalised; or null
    void* total;           // (rows, n) T, contiguous: takes x + residual, rounded; may be residual itself
    const void* weight;    // (n) T or fp32, or null for ones
    int64_t x_stride;      // elements from one row of x to the next
    int n;                 // elements a row
    float eps;
    float weight_offset;  // added to every weight
    bool weight_is_fp32;
    bool wide;  // as in common/eight.cuh, for all of them and the result
};

constexpr int RMS_KEPT = 2;            // chunks of eight elements that a thread keeps in registers
constexpr unsigned RMS_THREADS = 512;  // at most: rows of up to 8192 are kept whole
constexpr unsigned RMS_BLOCKS = 2;     // a multiprocessor, of the largest; 64 registers (four chunks would spill)

#ifdef DEVICE_HALF
// A row that its block goes over several times, eight neighbouring elements a thread: the first KEPT chunks of a thread
// stay in registers, later ones are made anew at each visit, from L1 or L2.
template <int KEPT>
struct KeptRow {
    Eight kept[KEPT];
    int n;  // elements of the row

    // Chunk `chunk` of this thread: its first column. Uniform over the block whether any thread is inside the row.
    __device__ __forceinline__ int column(int chunk) const { return (chunk * blockDim.x + threadIdx.x) * EIGHT; }
    __device__ __forceinline__ bool any(int chunk) const { return chunk * blockDim.x * EIGHT < n; }

    // make(column) gives a chunk; it is not called beyond the row's end, where there are zeros.
    template <class Make>
    __device__ __forceinline__ Eight made(int column, Make make) const {
        Eight x = {};
        if (column < n) x = make(column);
        return x;
    }

    template <class Make>
    __device__ __forceinline__ void keep(Make make) {
#pragma unroll
        for (int c = 0; c < KEPT; c++) kept[c] = made(column(c), make);
    }

    // kept = change(column, kept)
    template <class Change>
    __device__ __forceinline__ void change(Change change) {
#pragma unroll
        for (int c = 0; c < KEPT; c++)
            if (column(c) < n) kept[c] = change(column(c), kept[c]);
    }

    // visit(column, const Eight&) for every chunk, with all threads of the block; make() gives those that are not kept.
    template <class Make, class Visit>
    __device__ __forceinline__ void each(Make make, Visit visit) const {
#pragma unroll
        for (int c = 0; c < KEPT; c++)
            if (any(c)) visit(column(c), kept[c]);
#pragma unroll 1
        for (int c = KEPT; any(c); c++) visit(column(c), made(column(c), make));
    }
};

template <class T>
struct RmsRow {
    const RmsParams& p;
    KeptRow<RMS_KEPT> row;
    float inv_rms;

    // `scratch` is 32 floats of shared memory.
    __device__ __forceinline__ RmsRow(const RmsParams& params, float* scratch) : p(params) {
        row.n = p.n;
        const auto input = [&](int column) { return add(column); };
        row.keep(input);
        float squares = 0.f;
        row.each(input, [&](int, const Eight& v) {
#pragma unroll
            for (int i = 0; i < EIGHT; i++) squares += v.v[i] * v.v[i];
        });
        inv_rms = rsqrtf(block_sum(squares, scratch) / p.n + p.eps);
        row.change([&](int column, const Eight& v) { return normalise(column, v); });
    }

    // visit(column, const Eight&) for every chunk of the result, as KeptRow::each does.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        row.each([&](int column) { return normalise(column, read(column)); }, visit);
    }

private:
    __device__ __forceinline__ Eight load(const void* rows, int64_t stride, int column) const {
        return load_eight((const T*)rows + blockIdx.x * stride, column, p.n, p.wide);
    }

    // What is normalised, at the first visit: the rounded sum, which is written too.
    __device__ __forceinline__ Eight add(int column) const {
        Eight v = load(p.x, p.x_stride, column);
        if (p.residual) {
            const Eight other = load(p.residual, p.n, column);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) v.v[i] = to_float(from_float<T>(v.v[i] + other.v[i]));
            store_eight((T*)p.total + (int64_t)blockIdx.x * p.n, column, p.n, p.wide, v);
        }
        return v;
    }

    // The same, later.
    __device__ __forceinline__ Eight read(int column) const {
        return p.residual ? load(p.total, p.n, column) : load(p.x, p.x_stride, column);
    }

    __device__ __forceinline__ Eight normalise(int column, Eight v) const {
        if (p.weight) {
            const Eight w = p.weight_is_fp32 ? load_eight((const fp32_t*)p.weight, column, p.n, p.wide)
                                             : load_eight((const T*)p.weight, column, p.n, p.wide);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) v.v[i] = v.v[i] * inv_rms * (w.v[i] + p.weight_offset);
        } else {
#pragma unroll
            for (int i = 0; i < EIGHT; i++) v.v[i] *= inv_rms;
        }
#pragma unroll
        for (int i = 0; i < EIGHT; i++) v.v[i] = to_float(from_float<T>(v.v[i]));
        return v;
    }
};
#else
#include "launch.h"

// Threads of a block for rows of n elements: as many warps as keep them in registers, up to RMS_THREADS.
inline unsigned rms_threads(int64_t n) {
    const int64_t a_warp = WARP * EIGHT * RMS_KEPT, wanted = (n + a_warp - 1) / a_warp * WARP;
    return wanted < RMS_THREADS ? (unsigned)wanted : RMS_THREADS;
}

// The arguments of a norm, checked. Raises ValueError (naming `op`) for rows that are too long.
inline RmsParams rms_params(const char* op, const std::string& dtype, uintptr_t x, uintptr_t residual, uintptr_t total,
                            uintptr_t weight, bool weight_is_fp32, int64_t n, int64_t x_stride, double eps,
                            double weight_offset) {
    CHECK(n >= 1 && n <= 1 << 24, "%s: a row has %lld elements, wanted 1 to 2^24", op, (long long)n);
    const int64_t element = dtype == "fp32" ? 4 : 2;
    const bool wide = n % EIGHT == 0 && x_stride * element % 16 == 0 && (x | residual | total | weight) % 16 == 0;
    return {
        (const void*)x,       (const void*)residual, (void*)total, (const void*)weight, x_stride, (int)n, (float)eps,
        (float)weight_offset, weight_is_fp32,        wide};
}
#endif

// SPDX-License-Identifier: BSD-3-Clause
// quantize_int8: codes and fp32 scales (formats/int8.cuh) of rows, or of groups of 32, 64 or 128 columns.
//   x       (rows, k) T, rows x_stride elements apart      codes (rows, k) int8, contiguous
//   scales  (rows, 1 or k / group_size) fp32
// NaN or infinity in a group makes its scale NaN or infinity and its codes 0, so that every product with it is NaN.
//
// A thread takes eight elements at a time, one 16-byte load of a 16-bit type where rows allow it.
// quantize_rows: one block of 256 threads a row, two passes; the second reads x from L1 or L2 (a row is 8 to 64 KB).
// quantize_groups: group_size / 8 neighbouring lanes a group, one pass. Both are bound by memory: an IEEE division is
// some ten instructions an element, about the time that a V100 takes to move its three bytes.
#include "formats/int8_eight.cuh"

struct QuantizeParams {
    int8_t* codes;     // (rows, k)
    float* scales;     // (rows, groups)
    const void* x;     // (rows, k) T
    int64_t x_stride;  // elements from one row of x to the next
    int64_t rows;
    int k;
    int group_size;  // columns a scale; k when the row is the group
    bool wide;       // as in common/eight.cuh, for x and codes
};

constexpr int QUANTIZE_THREADS = 256;

#ifdef DEVICE_HALF
template <class T>
__device__ void quantize_rows(const QuantizeParams& p) {
    __shared__ float scratch[WARP];
    const int64_t row = blockIdx.x;
    const T* x = (const T*)p.x + row * p.x_stride;
    const int first = threadIdx.x * EIGHT, step = QUANTIZE_THREADS * EIGHT;
    float amax = 0.f;
    for (int column = first; column < p.k; column += step) amax = amax_of(load_eight(x, column, p.k, p.wide), amax);
    const float scale = int8_scale(block_reduce(amax, 0.f, scratch, WarpMaxMagnitude()));
    for (int column = first; column < p.k; column += step)
        store_codes(p.codes + row * p.k, column, p.k, p.wide, load_eight(x, column, p.k, p.wide), scale);
    if (threadIdx.x == 0) p.scales[row] = scale;
}
KERNELS(quantize_rows, QuantizeParams, QUANTIZE_THREADS)

template <class T>
__device__ void quantize_groups(const QuantizeParams& p) {
    const int64_t row_chunks = p.k / EIGHT;  // chunks of eight elements a row
    const int64_t chunk = (int64_t)blockIdx.x * QUANTIZE_THREADS + threadIdx.x;
    const bool exists = chunk < p.rows * row_chunks;  // threads beyond the end still take part in shuffles
    const int64_t row = exists ? chunk / row_chunks : 0;
    const int column = exists ? (int)(chunk % row_chunks) * EIGHT : 0;
    const Eight x = load_eight((const T*)p.x + row * p.x_stride, column, p.k, p.wide);
    const float scale = int8_scale(max_magnitude_of_lanes(amax_of(x, 0.f), p.group_size / EIGHT));
    if (!exists) return;
    store_codes(p.codes + row * p.k, column, p.k, p.wide, x, scale);
    if (column % p.group_size == 0) p.scales[(row * p.k + column) / p.group_size] = scale;
}
KERNELS(quantize_groups, QuantizeParams, QUANTIZE_THREADS)
#else
// group_size 0 is the whole row.
static void quantize_int8(const std::string& dtype, uintptr_t codes, uintptr_t scales, uintptr_t x, int64_t rows,
                          int64_t k, int64_t x_stride, int64_t group_size, uintptr_t stream) {
    CHECK(k >= 1 && k < INT32_MAX - QUANTIZE_THREADS * EIGHT, "quantize_int8: a row has %lld elements", (long long)k);
    const bool by_group = group_size != 0;
    check_group_size("quantize_int8", k, group_size);
    const int64_t element = dtype == "fp32" ? 4 : 2;
    const bool wide = k % EIGHT == 0 && x % 16 == 0 && x_stride * element % 16 == 0 && codes % 8 == 0;
    const QuantizeParams p{
        (int8_t*)codes, (float*)scales, (const void*)x, x_stride, rows, (int)k, (int)(by_group ? group_size : k), wide};
    const int64_t chunks = rows * (k / EIGHT);
    const int64_t blocks = by_group ? (chunks + QUANTIZE_THREADS - 1) / QUANTIZE_THREADS : rows;
    CHECK(blocks <= INT32_MAX, "quantize_int8: %lld rows of %lld elements are too many", (long long)rows, (long long)k);
    launch((by_group ? "quantize_groups_" : "quantize_rows_") + dtype, {(unsigned)blocks}, QUANTIZE_THREADS, 0, stream,
           p);
}
REGISTER(quantize_int8)
#endif

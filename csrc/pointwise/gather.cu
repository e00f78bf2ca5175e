// SPDX-License-Identifier: BSD-3-Clause
// embedding: out[i] = weight[row(ids[i])], and embedding_int8 for int8 rows with one scale each.
//   ids  (tokens) int64 or int32    weight  (rows, n) T or int8    scales  (rows) fp32, int8 only    out  (tokens, n) T
// A shard of a vocabulary (tensor parallelism) holds the rows of ids [first, last), then padding, then the rows of ids
// [added_first, added_last) from row added_row on; a whole one has first 0, last rows and no added ids. Ids outside
// give rows of zeros, so that the sum over all shards is the embedding. One block a token; a thread moves 16 bytes, or
// 4 codes, where the row divides so, else one element.
#include "common/device.cuh"

struct GatherParams {
    void* out;            // (tokens, n) T
    const void* ids;      // (tokens)
    const void* weight;   // (rows, n) T, or int8 with scales
    const float* scales;  // (rows), only int8
    int64_t first, last, added_first, added_last, added_row;
    int n;
    int wide_ids;   // ids are int64
    int wide_rows;  // rows start at multiples of 16 bytes (T) or of 4 bytes (int8), and are whole ones
};

#ifdef DEVICE_HALF
// Row of the block's token, or -1.
__device__ __forceinline__ int64_t row_of_token(const GatherParams& p) {
    const int64_t id = p.wide_ids ? ((const int64_t*)p.ids)[blockIdx.x] : ((const int*)p.ids)[blockIdx.x];
    if (id >= p.first && id < p.last) return id - p.first;
    if (id >= p.added_first && id < p.added_last) return id - p.added_first + p.added_row;
    return -1;
}

template <class T>
__device__ void embedding(const GatherParams& p) {
    const int64_t row = row_of_token(p);
    T* out = (T*)p.out + (int64_t)blockIdx.x * p.n;
    const T* in = (const T*)p.weight + (row < 0 ? 0 : row) * p.n;
    if (p.wide_rows) {
        const int pieces = p.n / (16 / (int)sizeof(T));
        for (int i = threadIdx.x; i < pieces; i += blockDim.x)
            ((uint4*)out)[i] = row < 0 ? make_uint4(0, 0, 0, 0) : ((const uint4*)in)[i];
    } else {
        for (int i = threadIdx.x; i < p.n; i += blockDim.x) out[i] = row < 0 ? from_float<T>(0.f) : in[i];
    }
}
KERNELS(embedding, GatherParams, 256)

template <class T>
__device__ void embedding_int8(const GatherParams& p) {
    const int64_t row = row_of_token(p);
    T* out = (T*)p.out + (int64_t)blockIdx.x * p.n;
    const int8_t* codes = (const int8_t*)p.weight + (row < 0 ? 0 : row) * p.n;
    const float scale = row < 0 ? 0.f : p.scales[row];
    if (p.wide_rows) {
        for (int i = threadIdx.x; i < p.n / 4; i += blockDim.x) {
            const char4 four = row < 0 ? make_char4(0, 0, 0, 0) : ((const char4*)codes)[i];
            out[4 * i] = from_float<T>((float)four.x * scale);
            out[4 * i + 1] = from_float<T>((float)four.y * scale);
            out[4 * i + 2] = from_float<T>((float)four.z * scale);
            out[4 * i + 3] = from_float<T>((float)four.w * scale);
        }
    } else {
        for (int i = threadIdx.x; i < p.n; i += blockDim.x)
            out[i] = from_float<T>(row < 0 ? 0.f : (float)codes[i] * scale);
    }
}
KERNELS(embedding_int8, GatherParams, 256)
#else
#include "launch.h"

static void embedding(const std::string& dtype, bool int8, uintptr_t out, uintptr_t ids, uintptr_t weight,
                      uintptr_t scales, int64_t tokens, int64_t n, int64_t first, int64_t last, int64_t added_first,
                      int64_t added_last, int64_t added_row, bool wide_ids, uintptr_t stream) {
    CHECK(n >= 1 && n <= 1 << 24, "embedding: a row has %lld elements, wanted 1 to 2^24", (long long)n);
    const int64_t row_bytes = int8 ? n : n * (dtype == "fp32" ? 4 : 2), unit = int8 ? 4 : 16;
    GatherParams p{};
    p.out = (void*)out;
    p.ids = (const void*)ids;
    p.weight = (const void*)weight;
    p.scales = (const float*)scales;
    p.first = first, p.last = last;
    p.added_first = added_first, p.added_last = added_last, p.added_row = added_row;
    p.n = (int)n;
    p.wide_ids = wide_ids;
    p.wide_rows = row_bytes % unit == 0 && weight % unit == 0 && out % 16 == 0;
    launch((int8 ? "embedding_int8_" : "embedding_") + dtype, {(unsigned)tokens}, 256, 0, stream, p);
}
REGISTER(embedding)
#endif

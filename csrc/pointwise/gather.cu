// SPDX-License-Identifier: BSD-3-Clause
// embedding: out[i] = weight[ids[i]], and embedding_int8 for int8 rows with one scale each.
//   ids  (tokens) int64; an id outside [0, rows) gives a row of zeros    weight  (rows, n) T or int8    out  (tokens, n) T
// One block a token.
#include "common/device.cuh"

struct GatherParams {
    void* out;             // (tokens, n) T
    const int64_t* ids;    // (tokens)
    const void* weight;    // (rows, n) T, or int8 with scales
    const float* scales;   // (rows), only int8
    int64_t rows;
    int n;
};

#ifdef DEVICE_HALF
template <class T>
__device__ void embedding(const GatherParams& p) {
    const int64_t token = blockIdx.x, id = p.ids[token];
    const bool inside = id >= 0 && id < p.rows;
    const T* row = (const T*)p.weight + (inside ? id : 0) * p.n;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) ((T*)p.out)[token * p.n + i] = inside ? row[i] : from_float<T>(0.f);
}
KERNELS(embedding, GatherParams, 256)

template <class T>
__device__ void embedding_int8(const GatherParams& p) {
    const int64_t token = blockIdx.x, id = p.ids[token];
    const bool inside = id >= 0 && id < p.rows;
    const int8_t* row = (const int8_t*)p.weight + (inside ? id : 0) * p.n;
    const float scale = inside ? p.scales[id] : 0.f;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) ((T*)p.out)[token * p.n + i] = from_float<T>((float)row[i] * scale);
}
KERNELS(embedding_int8, GatherParams, 256)
#else
#include "launch.h"

static void embedding(const std::string& format, const std::string& dtype, uintptr_t out, uintptr_t ids,
                      uintptr_t weight, uintptr_t scales, int64_t tokens, int64_t rows, int64_t n, uintptr_t stream) {
    CHECK(rows > 0, "embedding: the weight has no rows");
    GatherParams p{(void*)out, (const int64_t*)ids, (const void*)weight, (const float*)scales, rows, (int)n};
    launch((format == "int8" ? "embedding_int8_" : "embedding_") + dtype, {(unsigned)tokens}, 256, 0, stream, p);
}
REGISTER(embedding)
#endif

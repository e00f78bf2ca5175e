// SPDX-License-Identifier: BSD-3-Clause
// block_embedding: out[i] = decoded row ids[i] of a vocabulary that is kept in a format of blocks; zeros for ids
// outside.
//   ids (tokens) int64 or int32    planes of (rows, n) as in formats/blocks.cuh    out (tokens, n) of out_type
// One block of 128 threads a token; a thread decodes a unit of 32 values at a time, computes value = scale * (code -
// zero)
// + minimum with the reference's two roundings, and writes it. One image a format, in which FORMAT is its name.
#include "common/eight.cuh"
#include "formats/gguf_basic.cuh"
#include "formats/gguf_iq.cuh"
#include "formats/gguf_k.cuh"
#include "formats/int4.cuh"
#include "linear/w8a8.cuh"

struct BlockEmbeddingParams {
    void* out;        // (tokens, n) of out_type
    const void* ids;  // (tokens)
    Planes planes;
    int64_t rows;
    int n;         // a multiple of UNIT
    int wide_ids;  // ids are int64
    OutType out_type;
};

constexpr int BLOCK_EMBEDDING_THREADS = 128;

#ifdef DEVICE_HALF
using Format = CONCATENATE(format_, FORMAT);

template <class T>
__device__ __forceinline__ void block_embedding(const BlockEmbeddingParams& p) {
    const int64_t row = p.wide_ids ? ((const int64_t*)p.ids)[blockIdx.x] : ((const int*)p.ids)[blockIdx.x];
    const bool exists = row >= 0 && row < p.rows;
    T* const out = (T*)p.out + (int64_t)blockIdx.x * p.n;
    const uint32_t first = (uint32_t)(exists ? row : 0) * (uint32_t)(p.n / UNIT);
    for (int unit = threadIdx.x; unit < p.n / UNIT; unit += BLOCK_EMBEDDING_THREADS) {
        Unit<Format::SCALES> u;
        Format::decode(p.planes, Format::load(p.planes, first + unit), unit, u);
        const uint4 halves[2] = {u.first, u.last};
#pragma unroll
        for (int e = 0; e < UNIT / EIGHT; e++) {
            const int h = Format::SCALES == 1 ? 0 : e / 2;
            const uint4 codes = minus_zero<Format::ZERO>(halves[e / 2]);
            const uint32_t words[2] = {e % 2 ? codes.z : codes.x, e % 2 ? codes.w : codes.y};
            Eight v;
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                const float product = __fmul_rn((float)(int8_t)(words[i / 4] >> 8 * (i % 4)), u.scale[h]);
                v.v[i] = !exists ? 0.f : Format::MINIMA ? __fadd_rn(product, u.minimum[h]) : product;
            }
            store_eight(out, unit * UNIT + e * EIGHT, p.n, true, v);
        }
    }
}

KERNEL(CONCATENATE(block_embedding_, FORMAT), BlockEmbeddingParams, BLOCK_EMBEDDING_THREADS) {
    if (p.out_type == OUT_FP16)
        block_embedding<fp16_t>(p);
    else if (p.out_type == OUT_BF16)
        block_embedding<bf16_t>(p);
    else
        block_embedding<fp32_t>(p);
}
#else
#include "launch.h"

// group_size and wide_scales are those of the scales of int4 and int3.
static void block_embedding(const std::string& out_dtype, uintptr_t out, uintptr_t ids, const std::string& format,
                            const std::vector<uintptr_t>& planes, uintptr_t codebook, int64_t group_size,
                            bool wide_scales, int64_t tokens, int64_t rows, int64_t n, bool wide_ids,
                            uintptr_t stream) {
    CHECK(n >= UNIT && n % UNIT == 0 && n < INT32_MAX / 2 && rows * (n / UNIT) < 1ll << 32,
          "block_embedding: %lld rows of %lld, wanted a multiple of %d and less than 2^37 values", (long long)rows,
          (long long)n, UNIT);
    CHECK(out % 16 == 0, "block_embedding: out does not start on 16 bytes");
    BlockEmbeddingParams p{};
    p.out = (void*)out;
    p.ids = (const void*)ids;
    p.planes = planes_of("block_embedding", planes, codebook, group_size, wide_scales);
    p.rows = rows;
    p.n = (int)n;
    p.wide_ids = wide_ids;
    p.out_type = out_type_of("block_embedding", out_dtype);
    launch("block_embedding_" + format, {(unsigned)tokens}, BLOCK_EMBEDDING_THREADS, 0, stream, p);
}
REGISTER(block_embedding)
#endif

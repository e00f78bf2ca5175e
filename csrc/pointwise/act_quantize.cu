// SPDX-License-Identifier: BSD-3-Clause
// act_and_mul_quantize: what act_and_mul (activation.cu) and then quantize_int8 (linear/quantize.cu) give, bit for bit,
// without the activated rows ever being written to memory.
//   x (rows, 2 n) T      codes (rows, n) int8, scales (rows, 1 or n / group_size) fp32
// For fp16 that moves 5 n bytes a row instead of 9 n, in one launch.
//
// One block a row, eight neighbouring columns a thread and step. With groups, group_size / 8 lanes share a scale and
// one pass does it. With one scale a row the activated values wait for it in shared memory, each read by the thread
// that wrote it: in registers the loop over a row would have to be unrolled, with ten activations in each copy. Shared
// memory: 32 floats, and the row in T without groups (48 KB at most; longer rows take the two kernels).
#include "formats/int8_eight.cuh"
#include "pointwise/gated.cuh"

struct ActQuantizeParams {
    int8_t* codes;     // (rows, n)
    float* scales;     // (rows, groups)
    const void* x;     // (rows, 2 n) T
    int64_t x_stride;  // elements from one row of x to the next
    int n;
    int group_size;  // columns a scale; n when the row is the group
    bool wide;       // as in common/eight.cuh, for x and codes
    ActivationKind act;
};

constexpr int64_t ACT_QUANTIZE_THREADS = 512;
constexpr int64_t ACT_QUANTIZE_BYTES = 47 * 1024;  // of a row in T, which with `scratch` keeps to 48 KB

#ifdef DEVICE_HALF
template <class T>
__device__ void act_and_mul_quantize(const ActQuantizeParams& p) {
    __shared__ float scratch[WARP];
    DYNAMIC_SHARED(uint4, shared);
    T* activated = (T*)shared;  // (n) rounded up to whole chunks; not there with groups
    const int64_t row = blockIdx.x;
    const T* x = (const T*)p.x + row * p.x_stride;
    int8_t* codes = p.codes + row * p.n;
    const bool by_group = p.group_size < p.n;
    const int first = threadIdx.x * EIGHT, step = blockDim.x * EIGHT;
    float amax = 0.f;
#pragma unroll 1
    for (int begin = 0; begin < p.n; begin += step) {  // all lanes of a warp, for the sake of its shuffles
        const int column = begin + first;
        Eight v = {};
        if (column < p.n) v = gated_eight(p.act, x, column, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) v.v[i] = to_float(from_float<T>(v.v[i]));
        if (by_group) {
            const float scale = int8_scale(max_magnitude_of_lanes(amax_of(v, 0.f), p.group_size / EIGHT));
            if (column >= p.n) continue;
            store_codes(codes, column, p.n, p.wide, v, scale);
            if (column % p.group_size == 0) p.scales[(row * p.n + column) / p.group_size] = scale;
        } else if (column < p.n) {
            amax = amax_of(v, amax);
            store_eight(activated, column, p.n, true, v);
        }
    }
    if (by_group) return;
    const float scale = int8_scale(block_reduce(amax, 0.f, scratch, WarpMaxMagnitude()));
    for (int column = first; column < p.n; column += step)
        store_codes(codes, column, p.n, p.wide, load_eight(activated, column, p.n, true), scale);
    if (threadIdx.x == 0) p.scales[row] = scale;
}
KERNELS(act_and_mul_quantize, ActQuantizeParams, ACT_QUANTIZE_THREADS, 2)
#else
// group_size 0 is the whole row.
static void act_and_mul_quantize(const std::string& kind, const std::string& dtype, uintptr_t codes, uintptr_t scales,
                                 uintptr_t x, int64_t rows, int64_t n, int64_t x_stride, double a, double b, double c,
                                 int64_t group_size, uintptr_t stream) {
    const ActivationKind act = activation_kind(kind, a, b, c);
    CHECK(is_gated(act), "act_and_mul_quantize: %s is not a gated activation", kind.c_str());
    CHECK(n >= 1 && n <= 1 << 24, "act_and_mul_quantize: a row has %lld elements, wanted 1 to 2^24", (long long)n);
    check_group_size("act_and_mul_quantize", n, group_size);
    const int64_t element = dtype == "fp32" ? 4 : 2, chunks = (n + EIGHT - 1) / EIGHT;
    const int64_t bytes = group_size && group_size < n ? 0 : chunks * EIGHT * element;
    CHECK(bytes <= ACT_QUANTIZE_BYTES,
          "act_and_mul_quantize: a row has %lld bytes, wanted %lld at most; use act_and_mul "
          "and quantize_int8",
          (long long)bytes, (long long)ACT_QUANTIZE_BYTES);
    const bool wide = n % EIGHT == 0 && x_stride * element % 16 == 0 && x % 16 == 0 && codes % 8 == 0;
    const ActQuantizeParams p{(int8_t*)codes, (float*)scales,
                              (const void*)x, x_stride,
                              (int)n,         (int)(group_size ? group_size : n),
                              wide,           act};
    const int64_t threads = (chunks + WARP - 1) / WARP * WARP;
    launch("act_and_mul_quantize_" + dtype, {(unsigned)rows},
           (unsigned)(threads < ACT_QUANTIZE_THREADS ? threads : ACT_QUANTIZE_THREADS), (unsigned)bytes, stream, p);
}
REGISTER(act_and_mul_quantize)
#endif

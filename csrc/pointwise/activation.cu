// SPDX-License-Identifier: BSD-3-Clause
// activation: out = act(x), and act_and_mul: out = gated activation of the two halves of each row of x, in fp32.
//   x    (rows, n) T or, gated, (rows, 2 n) T with the gate first (swigluoai: gate and up interleaved)
//   out  (rows, n) T
// A thread makes eight neighbouring outputs; blocks of 256 threads along the row, grid.y over rows (strided, so any
// number of rows fits).
#include "common/device.cuh"
#include "common/eight.cuh"

enum class Activation : int {
    SILU,
    GELU,
    GELU_TANH,
    MUL_AND_SILU,
    FATRELU,
    SITU,
    SILU_CLAMP,
    SWIGLUOAI,
    SWIGLUSTEP,  // gated
    GELU_NEW,
    GELU_FAST,
    GELU_QUICK,
    RELU2,
    SILU_NO_MUL  // plain
};

struct ActivationParams {
    void* out;      // (rows, n) T
    const void* x;  // (rows, n) or (rows, 2 n) T
    int64_t rows;
    int64_t x_stride;  // elements from one row of x to the next
    int n;
    int wide;  // for load_eight: rows of x and out start on 16 bytes, n is a multiple of eight
    Activation kind;
    float a, b, c;  // meaning by kind, see ops/activation.py
};

constexpr int ROWS_IN_GRID = 65535;

#ifdef DEVICE_HALF
__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }
__device__ __forceinline__ float gelu(float v) { return 0.5f * v * (1.f + erff(v * 0.70710678118654752f)); }
__device__ __forceinline__ float gelu_tanh(float v) {
    return 0.5f * v * (1.f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
}
// Unlike fminf and fmaxf these keep NaN, as torch does.
__device__ __forceinline__ float at_most(float v, float high) { return v > high ? high : v; }
__device__ __forceinline__ float clamp(float v, float low, float high) { return v < low ? low : at_most(v, high); }

__device__ __forceinline__ float gated(const ActivationParams& p, float gate, float up) {
    switch (p.kind) {
        case Activation::SILU:
            return gate * sigmoid(gate) * up;
        case Activation::GELU:
            return gelu(gate) * up;
        case Activation::GELU_TANH:
            return gelu_tanh(gate) * up;
        case Activation::MUL_AND_SILU:
            return gate * up * sigmoid(up);
        case Activation::FATRELU:
            return gate <= p.a ? 0.f * up : gate * up;
        case Activation::SITU:
            if (p.b > 0.f) up = p.b * tanhf(up / p.b);
            return p.a * tanhf(gate / p.a) * sigmoid(gate) * up;
        case Activation::SILU_CLAMP:
            gate = at_most(gate, p.a);
            return gate * sigmoid(p.b * gate) * (clamp(up, -p.a, p.a) + p.c);
        case Activation::SWIGLUOAI:
            gate = at_most(gate, p.b);
            return gate * sigmoid(p.a * gate) * (clamp(up, -p.b, p.b) + 1.f);
        default:
            return at_most(gate * sigmoid(gate), p.a) * clamp(up, -p.a, p.a);  // SWIGLUSTEP
    }
}

__device__ __forceinline__ float plain(Activation kind, float v) {
    switch (kind) {
        case Activation::GELU_QUICK:
            return v * sigmoid(1.702f * v);
        case Activation::RELU2:
            return v <= 0.f ? 0.f : v * v;
        case Activation::SILU_NO_MUL:
            return v * sigmoid(v);
        default:
            return gelu_tanh(v);  // GELU_NEW and GELU_FAST are the same function
    }
}

template <class T>
__device__ void act_and_mul(const ActivationParams& p) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * EIGHT;
    if (column >= p.n) return;
    const bool interleaved = p.kind == Activation::SWIGLUOAI;
    for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const T* x = (const T*)p.x + row * p.x_stride;
        Eight result;
        if (interleaved) {
            const Eight first = load_eight(x, 2 * column, 2 * p.n, p.wide);
            const Eight second = load_eight(x, 2 * column + EIGHT, 2 * p.n, p.wide);
#pragma unroll
            for (int i = 0; i < EIGHT / 2; i++) {
                result.v[i] = gated(p, first.v[2 * i], first.v[2 * i + 1]);
                result.v[EIGHT / 2 + i] = gated(p, second.v[2 * i], second.v[2 * i + 1]);
            }
        } else {
            const Eight gate = load_eight(x, column, p.n, p.wide), up = load_eight(x + p.n, column, p.n, p.wide);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) result.v[i] = gated(p, gate.v[i], up.v[i]);
        }
        store_eight((T*)p.out + row * p.n, column, p.n, p.wide, result);
    }
}
KERNELS(act_and_mul, ActivationParams, 256)

template <class T>
__device__ void activation(const ActivationParams& p) {
    const int column = (blockIdx.x * blockDim.x + threadIdx.x) * EIGHT;
    if (column >= p.n) return;
    for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        Eight x = load_eight((const T*)p.x + row * p.x_stride, column, p.n, p.wide);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) x.v[i] = plain(p.kind, x.v[i]);
        store_eight((T*)p.out + row * p.n, column, p.n, p.wide, x);
    }
}
KERNELS(activation, ActivationParams, 256)
#else
#include <map>

#include "launch.h"

static void activation(const std::string& kind, const std::string& dtype, uintptr_t out, uintptr_t x, int64_t rows,
                       int64_t n, int64_t x_stride, double a, double b, double c, uintptr_t stream) {
    static const std::map<std::string, Activation> kinds = {{"silu", Activation::SILU},
                                                            {"gelu", Activation::GELU},
                                                            {"gelu_tanh", Activation::GELU_TANH},
                                                            {"mul_and_silu", Activation::MUL_AND_SILU},
                                                            {"fatrelu", Activation::FATRELU},
                                                            {"situ", Activation::SITU},
                                                            {"silu_clamp", Activation::SILU_CLAMP},
                                                            {"swigluoai", Activation::SWIGLUOAI},
                                                            {"swiglustep", Activation::SWIGLUSTEP},
                                                            {"gelu_new", Activation::GELU_NEW},
                                                            {"gelu_fast", Activation::GELU_FAST},
                                                            {"gelu_quick", Activation::GELU_QUICK},
                                                            {"relu2", Activation::RELU2},
                                                            {"silu_no_mul", Activation::SILU_NO_MUL}};
    const auto found = kinds.find(kind);
    CHECK(found != kinds.end(), "activation: there is none called %s", kind.c_str());
    CHECK(n >= 1 && n <= 1 << 28, "%s: a row has %lld elements, wanted 1 to 2^28", kind.c_str(), (long long)n);
    const bool wide = n % EIGHT == 0 && x_stride % EIGHT == 0 && x % 16 == 0 && out % 16 == 0;
    ActivationParams p{(void*)out, (const void*)x, rows,     x_stride, (int)n,
                       wide,       found->second,  (float)a, (float)b, (float)c};
    const int64_t threads = (n + EIGHT - 1) / EIGHT;
    const Dim3 grid{(unsigned)((threads + 255) / 256), (unsigned)(rows < ROWS_IN_GRID ? rows : ROWS_IN_GRID)};
    launch((found->second < Activation::GELU_NEW ? "act_and_mul_" : "activation_") + dtype, grid, 256, 0, stream, p);
}
REGISTER(activation)
#endif

// SPDX-License-Identifier: BSD-3-Clause
// activation: out = act(x), and act_and_mul: out = gated activation of the two halves of each row of x, in fp32.
//   x    (rows, n) T or, gated, (rows, 2 n) T with the gate first (swigluoai: gate and up interleaved)
//   out  (rows, n) T
// A thread makes eight neighbouring outputs; blocks of 256 threads along the row, grid.y over rows (strided, so any
// number of rows fits).
#include "pointwise/gated.cuh"

struct ActivationParams {
    void* out;      // (rows, n) T
    const void* x;  // (rows, n) or (rows, 2 n) T
    int64_t rows;
    int64_t x_stride;  // elements from one row of x to the next
    int n;
    int wide;  // for load_eight: rows of x and out start on 16 bytes, n is a multiple of eight
    ActivationKind act;
};

constexpr int ROWS_IN_GRID = 65535;

#ifdef DEVICE_HALF
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
    for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
        const T* x = (const T*)p.x + row * p.x_stride;
        const Eight result = gated_eight(p.act, x, column, p.n, p.wide);
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
        for (int i = 0; i < EIGHT; i++) x.v[i] = plain(p.act.kind, x.v[i]);
        store_eight((T*)p.out + row * p.n, column, p.n, p.wide, x);
    }
}
KERNELS(activation, ActivationParams, 256)
#else
static void activation(const std::string& kind, const std::string& dtype, uintptr_t out, uintptr_t x, int64_t rows,
                       int64_t n, int64_t x_stride, double a, double b, double c, uintptr_t stream) {
    const ActivationKind act = activation_kind(kind, a, b, c);
    CHECK(n >= 1 && n <= 1 << 28, "%s: a row has %lld elements, wanted 1 to 2^28", kind.c_str(), (long long)n);
    const bool wide = n % EIGHT == 0 && x_stride % EIGHT == 0 && x % 16 == 0 && out % 16 == 0;
    ActivationParams p{(void*)out, (const void*)x, rows, x_stride, (int)n, wide, act};
    const int64_t threads = (n + EIGHT - 1) / EIGHT;
    const Dim3 grid{(unsigned)((threads + 255) / 256), (unsigned)(rows < ROWS_IN_GRID ? rows : ROWS_IN_GRID)};
    launch((is_gated(act) ? "act_and_mul_" : "activation_") + dtype, grid, 256, 0, stream, p);
}
REGISTER(activation)
#endif

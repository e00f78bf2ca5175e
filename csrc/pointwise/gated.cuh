// SPDX-License-Identifier: BSD-3-Clause
// The activations of activation.cu and act_quantize.cu by name, and the gated ones of eight neighbouring columns, in
// fp32.
#pragma once
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

struct ActivationKind {
    Activation kind;
    float a, b, c;  // meaning by kind, see ops/activation.py
};

#ifdef DEVICE_HALF
__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }
__device__ __forceinline__ float gelu(float v) { return 0.5f * v * (1.f + erff(v * 0.70710678118654752f)); }
__device__ __forceinline__ float gelu_tanh(float v) {
    return 0.5f * v * (1.f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
}
// Unlike fminf and fmaxf these keep NaN, as torch does.
__device__ __forceinline__ float at_most(float v, float high) { return v > high ? high : v; }
__device__ __forceinline__ float clamp(float v, float low, float high) { return v < low ? low : at_most(v, high); }

__device__ __forceinline__ float gated(const ActivationKind& p, float gate, float up) {
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

// Columns `column` (a multiple of eight) on of the activated row whose gate and up are row x of 2 n elements.
template <class T>
__device__ __forceinline__ Eight gated_eight(const ActivationKind& act, const T* x, int column, int n, bool wide) {
    Eight result;
    if (act.kind == Activation::SWIGLUOAI) {  // gate and up interleaved
        const Eight first = load_eight(x, 2 * column, 2 * n, wide);
        const Eight second = load_eight(x, 2 * column + EIGHT, 2 * n, wide);
#pragma unroll
        for (int i = 0; i < EIGHT / 2; i++) {
            result.v[i] = gated(act, first.v[2 * i], first.v[2 * i + 1]);
            result.v[EIGHT / 2 + i] = gated(act, second.v[2 * i], second.v[2 * i + 1]);
        }
    } else {
        const Eight gate = load_eight(x, column, n, wide), up = load_eight(x + n, column, n, wide);
#pragma unroll
        for (int i = 0; i < EIGHT; i++) result.v[i] = gated(act, gate.v[i], up.v[i]);
    }
    return result;
}
#else
#include <map>

#include "launch.h"

// Raises ValueError for a name that is not known.
inline ActivationKind activation_kind(const std::string& kind, double a, double b, double c) {
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
    return {found->second, (float)a, (float)b, (float)c};
}

inline bool is_gated(const ActivationKind& act) { return act.kind < Activation::GELU_NEW; }
#endif

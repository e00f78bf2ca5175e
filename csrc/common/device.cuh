// SPDX-License-Identifier: BSD-3-Clause
// What every kernel may use: storage types, conversions, dp4a, warp and block sums, wide loads.
// PTX stands only here, behind names that the CPU emulator (tests/emulator) defines too.
// A host half sees the vector types, WARP and `__host__ __device__`; the rest is for device halves.
#pragma once
#ifndef DEVICE_HALF
#include <vector_types.h>

#include <cstdint>
#elif defined(EMULATOR)
#include "cuda_emulator.h"
#else
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#endif

// One name of two, after macros in them (such as the build's FORMAT) are replaced.
#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

#ifdef DEVICE_HALF
#ifndef EMULATOR
// 16 bytes that are read once: through the read-only path, not kept in L1. The address must be 16-byte aligned.
__device__ __forceinline__ uint4 load_stream(const void* address) {
    uint4 v;
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
#else
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
#endif
    return v;
}

// Dynamic shared memory as an array `name` of T, 16-byte aligned; the launch says how many bytes.
#define DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) T name[]
// The parameter struct of a kernel: read in place from constant memory (sm_61 has no such annotation).
#if __CUDA_ARCH__ >= 700
#define KERNEL_PARAMETER(Params) const __grid_constant__ Params
#else
#define KERNEL_PARAMETER(Params) const Params
#endif
#define KERNEL_THREADS(symbol, ...)  // the emulator notes the launch bounds here
#endif

// 16 bytes, or zeros where `valid` is false (nothing is read then). The load stays where it is written: a plain one
// under an `if` is moved down to its first use, which exposes its latency (2 to 3 % of the large matrix products).
//   load_early, load_stream_if   through L1, and as load_stream; the address must be 16-byte aligned
//   keep                         hides a value from the optimiser, which then keeps it in one register instead of
//                                deriving it anew
//   fresh_thread_id              threadIdx.x, read again: what is computed from it lives no longer than its uses
#ifdef EMULATOR
__device__ __forceinline__ uint4 load_early(const void* address, bool valid) {
    return valid ? *(const uint4*)address : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ uint4 load_stream_if(const void* address, bool valid) {
    return valid ? load_stream(address) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void keep(uint32_t&) {}
__device__ __forceinline__ int fresh_thread_id() { return threadIdx.x; }
#else
#define LOAD_IF(qualifiers)                                                    \
    uint4 v;                                                                   \
    asm volatile(                                                              \
        "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n"                          \
        " mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n" \
        " @p ld.global.nc" qualifiers ".v4.u32 {%0, %1, %2, %3}, [%4];\n}"     \
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                       \
        : "l"(address), "r"((int)valid));                                      \
    return v;
__device__ __forceinline__ uint4 load_early(const void* address, bool valid){LOAD_IF("")}
#if __CUDA_ARCH__ >= 700
__device__ __forceinline__ uint4 load_stream_if(const void* address, bool valid){LOAD_IF(".L1::no_allocate")}
#else
__device__ __forceinline__ uint4 load_stream_if(const void* address, bool valid){LOAD_IF("")}
#endif
#undef LOAD_IF
__device__ __forceinline__ void keep(uint32_t& v) {
    asm volatile("" : "+r"(v));
}
__device__ __forceinline__ int fresh_thread_id() {
    int id;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
    return id;
}
#endif

// bfloat16 is a storage type: two bytes, converted by shifts. Volta has no arithmetic for it.
struct bf16_t {
    uint16_t bits;
};
typedef __half fp16_t;
typedef float fp32_t;

__device__ __forceinline__ float to_float(fp32_t v) { return v; }
__device__ __forceinline__ float to_float(fp16_t v) { return __half2float(v); }
__device__ __forceinline__ float to_float(bf16_t v) { return __uint_as_float((uint32_t)v.bits << 16); }

// The 16-bit value with these bits.
template <class T>
__device__ __forceinline__ T from_bits(uint16_t bits);
template <>
__device__ __forceinline__ fp16_t from_bits<fp16_t>(uint16_t bits) {
    return __ushort_as_half(bits);
}
template <>
__device__ __forceinline__ bf16_t from_bits<bf16_t>(uint16_t bits) {
    return bf16_t{bits};
}

template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ fp32_t from_float<fp32_t>(float v) {
    return v;
}
template <>
__device__ __forceinline__ fp16_t from_float<fp16_t>(float v) {
    return __float2half_rn(v);
}
template <>
__device__ __forceinline__ bf16_t from_float<bf16_t>(float v) {  // round to nearest even; NaN stays NaN
    uint32_t u = __float_as_uint(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return bf16_t{(uint16_t)((u >> 16) | 0x40u)};
    return bf16_t{(uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int s = WARP / 2; s; s >>= 1) v += __shfl_xor_sync(FULL_WARP, v, s);
    return v;
}
__device__ __forceinline__ int warp_sum(int v) {
#pragma unroll
    for (int s = WARP / 2; s; s >>= 1) v += __shfl_xor_sync(FULL_WARP, v, s);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int s = WARP / 2; s; s >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, s));
    return v;
}

// Reduction over a block of `threads` (a multiple of 32, at most 1024); every thread gets the result.
// `scratch` is 32 floats of shared memory, free to reuse after the call's last barrier.
template <class Reduce>
__device__ __forceinline__ float block_reduce(float v, float identity, float* scratch, Reduce reduce_warp) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    v = reduce_warp(v);
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = reduce_warp(lane < warps ? scratch[lane] : identity);
    __syncthreads();
    return v;
}
struct WarpSum {
    __device__ __forceinline__ float operator()(float v) const { return warp_sum(v); }
};
struct WarpMax {
    __device__ __forceinline__ float operator()(float v) const { return warp_max(v); }
};
__device__ __forceinline__ float block_sum(float v, float* scratch) { return block_reduce(v, 0.f, scratch, WarpSum()); }
__device__ __forceinline__ float block_max(float v, float* scratch) {
    return block_reduce(v, -INFINITY, scratch, WarpMax());
}

// Head of a kernel, for a body that reads its parameter struct as `p`: KERNEL(name, Params, launch bounds) { ... }
// The last arguments are those of __launch_bounds__: threads, and blocks a multiprocessor if that is wanted.
#define KERNEL(symbol, Params, ...)     \
    KERNEL_THREADS(symbol, __VA_ARGS__) \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) symbol(KERNEL_PARAMETER(Params) p)
// One kernel for each storage type from a function template `op<T>(params)`: op_fp16, op_bf16, op_fp32.
#define KERNEL_OF(op, Params, T, suffix, ...) \
    KERNEL(op##_##suffix, Params, __VA_ARGS__) { op<T>(p); }
#define KERNELS(op, Params, ...)                     \
    KERNEL_OF(op, Params, fp16_t, fp16, __VA_ARGS__) \
    KERNEL_OF(op, Params, bf16_t, bf16, __VA_ARGS__) \
    KERNEL_OF(op, Params, fp32_t, fp32, __VA_ARGS__)
#endif

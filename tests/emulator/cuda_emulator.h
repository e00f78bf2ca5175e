// SPDX-License-Identifier: BSD-3-Clause
// The part of CUDA that device halves use, for g++: qualifiers, vector and half types, intrinsics, and the calls that
// make a thread wait (barriers, shuffles, votes), which emulator.cpp carries out. Included by common/device.cuh.
// Meanings follow the CUDA C++ Programming Guide; what it leaves undefined stops the launch with an error here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __shared__ static  // blocks run one at a time; emulator.cpp fills it with 0xFF before each
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define KERNEL_PARAMETER(Params) const Params&
#define FIRST_ARGUMENT(first, ...) first
#define KERNEL_THREADS(symbol, ...) \
    extern "C" __attribute__((visibility("default"))) const int symbol##_max_threads = FIRST_ARGUMENT(__VA_ARGS__, 0);
#define DYNAMIC_SHARED(T, name) T* const name = (T*)emulator::dynamic_shared

// ---- vector types

#define VECTOR_TYPES(name, T, bytes)                                             \
    struct name##1 { T x; };                                                     \
    struct __align__(2 * bytes) name##2 { T x, y; };                             \
    struct name##3 { T x, y, z; };                                               \
    struct __align__(4 * bytes > 16 ? 16 : 4 * bytes) name##4 { T x, y, z, w; }; \
    inline name##1 make_##name##1(T x) { return {x}; }                           \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                   \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }           \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_TYPES(char, signed char, 1)
VECTOR_TYPES(uchar, unsigned char, 1)
VECTOR_TYPES(short, short, 2)
VECTOR_TYPES(ushort, unsigned short, 2)
VECTOR_TYPES(int, int, 4)
VECTOR_TYPES(uint, unsigned, 4)
VECTOR_TYPES(float, float, 4)
VECTOR_TYPES(longlong, long long, 8)
VECTOR_TYPES(ulonglong, unsigned long long, 8)
VECTOR_TYPES(double, double, 8)

// ---- the running thread, and waiting

extern uint3 threadIdx, blockIdx, blockDim, gridDim;  // of the thread that runs now
constexpr int warpSize = 32;

namespace emulator {
extern char* dynamic_shared;

enum Wait {
    SYNCTHREADS,
    SYNCTHREADS_COUNT,
    SYNCTHREADS_AND,
    SYNCTHREADS_OR,
    SYNCWARP,
    SHUFFLE,
    SHUFFLE_UP,
    SHUFFLE_DOWN,
    SHUFFLE_XOR,
    BALLOT,
    ANY,
    ALL,
    MATCH_ANY
};

// Where in the source a thread waits. All threads that wait together have to wait at the same place.
struct Place {
    const char* file;
    int line;
};
#define PLACE_HERE emulator::Place place = {__builtin_FILE(), __builtin_LINE()}

// Waits for every thread of the block; returns what the variant returns.
int wait_block(Wait kind, int predicate, Place place);
// Waits for the lanes of `mask`. `bits` is what the lane gives, `argument` the lane, delta or xor mask of a shuffle.
uint64_t wait_warp(Wait kind, unsigned mask, uint64_t bits, int argument, int width, Place place);
// Stops the launch with an error that names kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
inline T shuffle(Wait kind, unsigned mask, T value, int argument, int width, Place place) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffles take values of up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = wait_warp(kind, mask, bits, argument, width, place);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace emulator

inline void __syncthreads(PLACE_HERE) { emulator::wait_block(emulator::SYNCTHREADS, 0, place); }
inline int __syncthreads_count(int p, PLACE_HERE) {
    return emulator::wait_block(emulator::SYNCTHREADS_COUNT, p, place);
}
inline int __syncthreads_and(int p, PLACE_HERE) { return emulator::wait_block(emulator::SYNCTHREADS_AND, p, place); }
inline int __syncthreads_or(int p, PLACE_HERE) { return emulator::wait_block(emulator::SYNCTHREADS_OR, p, place); }
inline void __syncwarp(unsigned mask = 0xffffffffu, PLACE_HERE) {
    emulator::wait_warp(emulator::SYNCWARP, mask, 0, 0, 32, place);
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, PLACE_HERE) {
    return emulator::shuffle(emulator::SHUFFLE, mask, v, lane, width, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, PLACE_HERE) {
    return emulator::shuffle(emulator::SHUFFLE_UP, mask, v, (int)delta, width, place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, PLACE_HERE) {
    return emulator::shuffle(emulator::SHUFFLE_DOWN, mask, v, (int)delta, width, place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, PLACE_HERE) {
    return emulator::shuffle(emulator::SHUFFLE_XOR, mask, v, lane_mask, width, place);
}
inline unsigned __ballot_sync(unsigned mask, int p, PLACE_HERE) {
    return (unsigned)emulator::wait_warp(emulator::BALLOT, mask, p != 0, 0, 32, place);
}
inline int __any_sync(unsigned mask, int p, PLACE_HERE) {
    return (int)emulator::wait_warp(emulator::ANY, mask, p != 0, 0, 32, place);
}
inline int __all_sync(unsigned mask, int p, PLACE_HERE) {
    return (int)emulator::wait_warp(emulator::ALL, mask, p != 0, 0, 32, place);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T v, PLACE_HERE) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return (unsigned)emulator::wait_warp(emulator::MATCH_ANY, mask, bits, 0, 32, place);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// ---- memory

inline uint4 load_stream(const void* address) {
    if ((uintptr_t)address % 16) emulator::fail("load_stream: address %p is not a multiple of 16", address);
    return *(const uint4*)address;
}
template <class T>
inline T __ldg(const T* address) {
    return *address;
}

// Threads take turns only where they wait, so plain reads and writes are atomic.
template <class T, class V>
inline T atomicAdd(T* address, V value) {
    const T old = *address;
    if constexpr (std::is_integral<T>::value)
        *address = (T)((std::make_unsigned_t<T>)old + (std::make_unsigned_t<T>)value);
    else
        *address = old + (T)value;
    return old;
}
template <class T, class V>
inline T atomicMax(T* address, V value) {
    const T old = *address;
    if ((T)value > old) *address = (T)value;
    return old;
}
template <class T, class V>
inline T atomicMin(T* address, V value) {
    const T old = *address;
    if ((T)value < old) *address = (T)value;
    return old;
}
template <class T, class V>
inline T atomicExch(T* address, V value) {
    const T old = *address;
    *address = (T)value;
    return old;
}
template <class T, class V, class W>
inline T atomicCAS(T* address, V compare, W value) {
    const T old = *address;
    if (old == (T)compare) *address = (T)value;
    return old;
}
template <class T, class V>
inline T atomicOr(T* address, V value) {
    const T old = *address;
    *address = old | (T)value;
    return old;
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    const unsigned old = *address;
    *address = old >= limit ? 0 : old + 1;
    return old;
}

// ---- integers

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value) return std::fmin((T)a, (T)b);
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value) return std::fmax((T)a, (T)b);
    return (T)a < (T)b ? (T)b : (T)a;
}
inline int __dp4a(int a, int b, int c) {
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 32; i += 8) sum += (unsigned)((int)(int8_t)(a >> i) * (int)(int8_t)(b >> i));
    return (int)sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255u) * (b >> i & 255u);
    return c;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> (4 * i) & 15u;
        unsigned byte = (unsigned)(bytes >> (8 * (nibble & 7u))) & 255u;
        if (nibble & 8u) byte = byte & 128u ? 255u : 0u;  // the byte's sign, eight times
        result |= byte << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (v >> i & 1u) << (31 - i);
    return result;
}
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

// ---- floats

inline unsigned __float_as_uint(float v) { return emulator::bit_cast<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::bit_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return emulator::bit_cast<float>(v); }
inline float __int_as_float(int v) { return emulator::bit_cast<float>(v); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fsqrt_rn(float v) { return sqrtf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return expf(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __saturatef(float v) { return v != v ? 0.f : fminf(fmaxf(v, 0.f), 1.f); }
inline float rsqrtf(float v) { return (float)(1.0 / sqrt((double)v)); }
inline float exp10f(float v) { return powf(10.f, v); }
// Conversions saturate, and NaN becomes 0, as on the GPU; in C++ they would be undefined.
inline int __float2int_rz(float v) {
    return v != v ? 0 : v >= 2147483648.f ? 2147483647 : v < -2147483648.f ? -2147483647 - 1 : (int)v;
}
inline int __float2int_rn(float v) { return __float2int_rz(rintf(v)); }
inline int __float2int_rd(float v) { return __float2int_rz(floorf(v)); }
inline int __float2int_ru(float v) { return __float2int_rz(ceilf(v)); }
inline unsigned __float2uint_rz(float v) { return !(v > 0.f) ? 0u : v >= 4294967296.f ? 4294967295u : (unsigned)v; }
inline unsigned __float2uint_rn(float v) { return __float2uint_rz(rintf(v)); }
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }

#include "half_emulator.h"

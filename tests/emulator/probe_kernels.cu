// SPDX-License-Identifier: BSD-3-Clause
// Small kernels that test the emulator itself: one call or one mistake each. test_emulator.py says what is expected.
#include "common/device.cuh"

struct ProbeParams {
    const void* in;
    void* out;
    int n;
};

#ifdef DEVICE_HALF
// ---- intrinsics, element by element

KERNEL(half_to_float, ProbeParams, 256) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) ((float*)p.out)[i] = __half2float(((const __half*)p.in)[i]);
}
KERNEL(float_to_half, ProbeParams, 256) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) ((__half*)p.out)[i] = __float2half_rn(((const float*)p.in)[i]);
}
KERNEL(half_fma, ProbeParams, 256) {  // in (n, 3)
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const __half* v = (const __half*)p.in + 3 * i;
    if (i < p.n) ((__half*)p.out)[i] = __hfma(v[0], v[1], v[2]);
}
KERNEL(integers, ProbeParams, 256) {  // in (n, 3) int, out (n, 8)
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.n) return;
    const int* v = (const int*)p.in + 3 * i;
    const unsigned a = (unsigned)v[0], b = (unsigned)v[1], c = (unsigned)v[2];
    int* out = (int*)p.out + 8 * i;
    out[0] = __dp4a(v[0], v[1], v[2]);
    out[1] = (int)__dp4a(a, b, c);
    out[2] = (int)__byte_perm(a, b, c);
    out[3] = (int)__funnelshift_l(a, b, c);
    out[4] = (int)__funnelshift_r(a, b, c);
    out[5] = __popc(a);
    out[6] = __clz(v[0]);
    out[7] = (int)__brev(a);
}

// ---- threads together: out (kinds, threads) int

KERNEL(shuffles, ProbeParams, 64) {
    int* out = (int*)p.out + threadIdx.x;
    const int v = (int)threadIdx.x * 10;
    out[0 * blockDim.x] = __shfl_sync(FULL_WARP, v, 5);
    out[1 * blockDim.x] = __shfl_sync(FULL_WARP, v, 3, 8);
    out[2 * blockDim.x] = __shfl_up_sync(FULL_WARP, v, 2, 8);
    out[3 * blockDim.x] = __shfl_down_sync(FULL_WARP, v, 7, 16);
    out[4 * blockDim.x] = __shfl_xor_sync(FULL_WARP, v, 6);
    out[5 * blockDim.x] = __shfl_xor_sync(FULL_WARP, v, 16, 16);
}
KERNEL(votes, ProbeParams, 64) {
    int* out = (int*)p.out + threadIdx.x;
    const int odd = threadIdx.x & 1, first_warp = threadIdx.x < 32;
    out[0 * blockDim.x] = (int)__ballot_sync(FULL_WARP, odd);
    out[1 * blockDim.x] = __any_sync(FULL_WARP, threadIdx.x == 40);
    out[2 * blockDim.x] = __all_sync(FULL_WARP, first_warp);
    out[3 * blockDim.x] = (int)__match_any_sync(FULL_WARP, threadIdx.x % 4);
    out[4 * blockDim.x] = __syncthreads_count(odd);
    out[5 * blockDim.x] = __syncthreads_and(first_warp);
    out[6 * blockDim.x] = __syncthreads_or(threadIdx.x == 63);
}
KERNEL(half_warp_shuffle, ProbeParams, 32) {  // the two halves of a warp shuffle apart
    const unsigned mask = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
    ((int*)p.out)[threadIdx.x] = __shfl_xor_sync(mask, (int)threadIdx.x, 15);
}
KERNEL(histogram, ProbeParams, 256) {  // in (n) int below 16, out 16 counts
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) atomicAdd((int*)p.out + ((const int*)p.in)[i], 1);
}

// Reverses 64 values through shared memory. BARRIER is what stands between writing and reading.
#define REVERSE(name, BARRIER)                                 \
    KERNEL(name, ProbeParams, 64) {                            \
        __shared__ int values[64];                             \
        values[threadIdx.x] = ((const int*)p.in)[threadIdx.x]; \
        BARRIER;                                               \
        ((int*)p.out)[threadIdx.x] = values[63 - threadIdx.x]; \
    }
REVERSE(reverse, __syncthreads())
REVERSE(reverse_without_barrier, )

KERNEL(unwritten_shared, ProbeParams, 64) {
    __shared__ int fixed[64];
    DYNAMIC_SHARED(int, dynamic);
    ((int*)p.out)[threadIdx.x] = fixed[threadIdx.x] & dynamic[threadIdx.x];
    fixed[threadIdx.x] = dynamic[threadIdx.x] = 0;  // must not be seen by the next block
}

// ---- mistakes

KERNEL(barrier_after_exit, ProbeParams, 64) {
    if (threadIdx.x == 33) return;
    __syncthreads();
}
KERNEL(barriers_apart, ProbeParams, 64) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}
KERNEL(shuffle_without_lane, ProbeParams, 32) {
    if (threadIdx.x == 7) return;
    ((int*)p.out)[threadIdx.x] = __shfl_xor_sync(FULL_WARP, 1, 1);
}
KERNEL(shuffle_against_barrier, ProbeParams, 32) {
    if (threadIdx.x == 9) __syncthreads();
    __syncwarp();
    __syncthreads();
}
KERNEL(shuffle_from_outside, ProbeParams, 32) {
    if (threadIdx.x < 16) ((int*)p.out)[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
}
KERNEL(lane_outside_mask, ProbeParams, 32) { __syncwarp(0xffu); }
KERNEL(misaligned_load, ProbeParams, 32) { ((uint4*)p.out)[0] = load_stream((const char*)p.in + 4 * threadIdx.x); }
KERNEL(misaligned_pointer, ProbeParams, 32) { ((int*)p.out)[0] = ((const int4*)((const char*)p.in + 4))->x; }
KERNEL(beyond_dynamic_shared, ProbeParams, 32) {
    DYNAMIC_SHARED(char, dynamic);
    dynamic[threadIdx.x + p.n] = 1;
}
KERNEL(beyond_static_shared, ProbeParams, 32) {
    __shared__ int values[32];
    int* at = values;
    at[threadIdx.x + p.n] = 1;
    ((int*)p.out)[threadIdx.x] = at[threadIdx.x];
}
KERNEL(beyond_global, ProbeParams, 32) {
    for (int i = threadIdx.x; i <= p.n; i += blockDim.x) ((int*)p.out)[i] = i;
}
KERNEL(signed_overflow, ProbeParams, 32) { ((int*)p.out)[threadIdx.x] = 2147483647 - 16 + (p.n + (int)threadIdx.x); }
#endif

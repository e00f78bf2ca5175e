// SPDX-License-Identifier: BSD-3-Clause
// Two ceilings of a card, for `superl8 doctor` and for the shares that benchmarks print.
//   probe_dp4a  out[thread] = sum over 16 chains of `steps` dp4a each; chain c starts at c, and each step adds the four
//               signed bytes of (thread + c): 8 integer operations, registers only. 16 independent chains cover the
//               latency of dp4a; 256 threads a block, several blocks a multiprocessor.
//   probe_read  out[thread] = xor of the 32-bit words that the thread read of words (num_words), 16 bytes at a time,
//               in a grid-stride loop with 4 loads in flight. num_words a multiple of 4, words 16-byte aligned.
// Every thread writes its result, so no work can be left out, and both have a closed form to test against.
#include "common/device.cuh"

struct ProbeDp4aParams {
    int* out;   // (blocks * PROBE_THREADS)
    int steps;  // dp4a a chain
};

struct ProbeReadParams {
    uint32_t* out;          // (blocks * PROBE_THREADS)
    const uint32_t* words;  // (num_words)
    int64_t num_words;
};

constexpr int PROBE_THREADS = 256;

#ifdef DEVICE_HALF
constexpr int CHAINS = 16;  // dp4a in flight a thread
constexpr int LOADS = 4;    // 16-byte loads in flight a thread

extern "C" __global__ void __launch_bounds__(PROBE_THREADS) probe_dp4a(KERNEL_PARAMETER(ProbeDp4aParams) p) {
    const int thread = blockIdx.x * PROBE_THREADS + threadIdx.x;
    int chain[CHAINS];
#pragma unroll
    for (int c = 0; c < CHAINS; c++) chain[c] = c;
#pragma unroll 4
    for (int step = 0; step < p.steps; step++) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) chain[c] = __dp4a(thread + c, 0x01010101, chain[c]);
    }
    int sum = 0;
#pragma unroll
    for (int c = 0; c < CHAINS; c++) sum += chain[c];
    p.out[thread] = sum;
}

extern "C" __global__ void __launch_bounds__(PROBE_THREADS) probe_read(KERNEL_PARAMETER(ProbeReadParams) p) {
    const int64_t thread = (int64_t)blockIdx.x * PROBE_THREADS + threadIdx.x;
    const int64_t threads = (int64_t)gridDim.x * PROBE_THREADS, quads = p.num_words / 4;
    uint32_t all = 0;
    for (int64_t first = thread; first < quads; first += LOADS * threads) {
        uint4 quad[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int64_t at = first + i * threads;
            quad[i] = at < quads ? load_stream(p.words + 4 * at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) all ^= quad[i].x ^ quad[i].y ^ quad[i].z ^ quad[i].w;
    }
    p.out[thread] = all;
}
#else
#include "launch.h"

static void probe_dp4a(uintptr_t out, int64_t blocks, int64_t steps, uintptr_t stream) {
    CHECK(blocks >= 1 && blocks <= 1 << 20, "probe_dp4a: %lld blocks, wanted 1 to 2^20", (long long)blocks);
    CHECK(steps >= 1 && steps <= 1 << 16, "probe_dp4a: %lld steps, wanted 1 to 2^16", (long long)steps);  // sums fit
    ProbeDp4aParams p{(int*)out, (int)steps};
    launch("probe_dp4a", {(unsigned)blocks}, PROBE_THREADS, 0, stream, p);
}
REGISTER(probe_dp4a)

static void probe_read(uintptr_t out, uintptr_t words, int64_t num_words, int64_t blocks, uintptr_t stream) {
    CHECK(blocks >= 1 && blocks <= 1 << 20, "probe_read: %lld blocks, wanted 1 to 2^20", (long long)blocks);
    CHECK(num_words % 4 == 0 && words % 16 == 0, "probe_read: %lld words at %#llx, wanted whole aligned quads",
          (long long)num_words, (unsigned long long)words);
    ProbeReadParams p{(uint32_t*)out, (const uint32_t*)words, num_words};
    launch("probe_read", {(unsigned)blocks}, PROBE_THREADS, 0, stream, p);
}
REGISTER(probe_read)
#endif

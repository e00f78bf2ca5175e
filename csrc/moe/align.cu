// SPDX-License-Identifier: BSD-3-Clause
// moe_align: orders (token, choice) numbers by expert, each expert's padded to whole tiles of a grouped GEMM.
//   topk_ids (tokens, topk) int32 or int64: experts; those outside [0, experts) or without a local number take no part
//   sorted_ids (length): the numbers, expert after expert and ascending within one; `numbers` in the padding
//   expert_ids (length / tile): the expert of each tile; `unused` after the last
//   total (1): numbers with padding    scatter_ids (numbers): the number itself, -1 where its expert takes no part
// With adapters (LoRA) block b does so for the tokens of adapter adapters[b] alone, into that adapter's part of the
// outputs; adapters of -1 and disabled ones are left as they are.
// One block an adapter, or one block. Each of its warps takes a contiguous eighth of the numbers, 32 at a time, and
// counts experts in its own row of shared memory: lanes of one expert find their places by comparing with all others,
// so the order is fixed and nothing is atomic. Then the rows are summed up and the walk is done again, storing.
// Shared memory: 36 bytes an expert.
#include "common/device.cuh"

struct AlignParams {
    int* sorted_ids;
    int* expert_ids;
    int* total;
    int* scatter_ids;  // or null
    const void* topk_ids;
    const int* expert_map;       // (experts) local number of each expert, -1 for none; or null
    const int* token_adapter;    // (tokens) adapter of each token, or null
    const int* adapters;         // (blocks) with token_adapter
    const int* adapter_enabled;  // (number of adapters) with token_adapter
    int num_adapters;            // outputs hold this many parts
    int numbers, topk, experts, tile, length, tiles, unused, wide_ids;
};

constexpr int ALIGN_WARPS = 8;
constexpr int MAX_ALIGN_EXPERTS = 2048;  // 72 KB

#ifdef DEVICE_HALF
// Local expert of number i in this block, or -1.
__device__ __forceinline__ int align_expert(const AlignParams& p, int i, int adapter) {
    if (i >= p.numbers || (p.token_adapter && p.token_adapter[i / p.topk] != adapter)) return -1;
    const int64_t id = p.wide_ids ? ((const int64_t*)p.topk_ids)[i] : ((const int*)p.topk_ids)[i];
    if (id < 0 || id >= p.experts) return -1;
    const int local = p.expert_map ? p.expert_map[id] : (int)id;
    return local < p.experts ? local : -1;
}

// Walks the warp's share; number i of expert e goes to place next[e]++, in ascending order of i.
template <class Store>
__device__ __forceinline__ void align_walk(const AlignParams& p, int* next, int adapter, Store store) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int share = (p.numbers + ALIGN_WARPS * WARP - 1) / (ALIGN_WARPS * WARP) * WARP;
    for (int step = 0; step < share; step += WARP) {
        const int i = warp * share + step + lane, expert = align_expert(p, i, adapter);
        int before = 0, after = 0;  // lanes of the same expert
#pragma unroll
        for (int other = 0; other < WARP; other++) {
            const bool same = __shfl_sync(FULL_WARP, expert, other) == expert;
            before += same && other < lane;
            after += same && other > lane;
        }
        const int place = expert < 0 ? 0 : next[expert] + before;
        __syncwarp();
        if (expert >= 0 && after == 0) next[expert] = place + 1;
        __syncwarp();
        if (i < p.numbers) store(i, expert, place);
    }
}

KERNEL(moe_align, AlignParams, ALIGN_WARPS* WARP) {
    DYNAMIC_SHARED(int, shared);
    __shared__ int padded_total;
    int* const next = shared;                            // (warps, experts): counts, then places
    int* const ends = shared + ALIGN_WARPS * p.experts;  // (experts): padded end of each
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    const int adapter = p.token_adapter ? p.adapters[blockIdx.x] : 0;
    if (p.token_adapter && (adapter < 0 || adapter >= p.num_adapters || !p.adapter_enabled[adapter])) return;
    int* const sorted_ids = p.sorted_ids + (int64_t)adapter * p.length;
    int* const expert_ids = p.expert_ids + (int64_t)adapter * p.tiles;

    for (int i = threadIdx.x; i < ALIGN_WARPS * p.experts; i += blockDim.x) next[i] = 0;
    for (int i = threadIdx.x; i < p.length; i += blockDim.x) sorted_ids[i] = p.numbers;
    __syncthreads();
    align_walk(p, next + warp * p.experts, adapter, [](int, int, int) {});
    __syncthreads();

    if (warp == 0) {  // ends: sums over experts of counts rounded up to tiles
        int sum = 0;
        for (int first = 0; first < p.experts; first += WARP) {
            const int e = first + lane;
            int count = 0;
            if (e < p.experts)
                for (int w = 0; w < ALIGN_WARPS; w++) count += next[w * p.experts + e];
            int end = (count + p.tile - 1) / p.tile * p.tile;
#pragma unroll
            for (int s = 1; s < WARP; s <<= 1) {
                const int below = __shfl_up_sync(FULL_WARP, end, s);
                if (lane >= s) end += below;
            }
            end += sum;
            sum = __shfl_sync(FULL_WARP, end, WARP - 1);
            if (e < p.experts) ends[e] = end;
        }
        if (lane == 0) padded_total = sum, p.total[adapter] = sum;
    }
    __syncthreads();

    for (int e = threadIdx.x; e < p.experts; e += blockDim.x) {
        int place = e ? ends[e - 1] : 0;
        for (int tile = place / p.tile; tile < ends[e] / p.tile; tile++) expert_ids[tile] = e;
        for (int w = 0; w < ALIGN_WARPS; w++) {
            const int count = next[w * p.experts + e];
            next[w * p.experts + e] = place;
            place += count;
        }
    }
    for (int tile = padded_total / p.tile + threadIdx.x; tile < p.tiles; tile += blockDim.x)
        expert_ids[tile] = p.unused;
    __syncthreads();
    align_walk(p, next + warp * p.experts, adapter, [&](int i, int expert, int place) {
        if (expert >= 0) sorted_ids[place] = i;
        if (p.scatter_ids) p.scatter_ids[i] = expert < 0 ? -1 : i;
    });
}
#else
#include "launch.h"

static void moe_align(uintptr_t sorted_ids, uintptr_t expert_ids, uintptr_t total, uintptr_t scatter_ids,
                      uintptr_t topk_ids, uintptr_t expert_map, uintptr_t token_adapter, uintptr_t adapters,
                      uintptr_t adapter_enabled, int64_t blocks, int64_t num_adapters, int64_t numbers, int64_t topk,
                      int64_t experts, int64_t tile, int64_t length, int64_t tiles, int64_t unused, bool wide_ids,
                      uintptr_t stream) {
    CHECK(experts >= 1 && experts <= MAX_ALIGN_EXPERTS && tile >= 1,
          "moe_align: got %lld experts and tiles of %lld, wanted 1 to %d experts", (long long)experts, (long long)tile,
          MAX_ALIGN_EXPERTS);
    CHECK(numbers + experts * (tile - 1) < INT32_MAX, "moe_align: %lld numbers are too many", (long long)numbers);
    AlignParams p{};
    p.sorted_ids = (int*)sorted_ids, p.expert_ids = (int*)expert_ids;
    p.total = (int*)total, p.scatter_ids = (int*)scatter_ids;
    p.topk_ids = (const void*)topk_ids;
    p.expert_map = (const int*)expert_map;
    p.token_adapter = (const int*)token_adapter;
    p.adapters = (const int*)adapters;
    p.adapter_enabled = (const int*)adapter_enabled;
    p.num_adapters = (int)num_adapters;
    p.numbers = (int)numbers, p.topk = (int)topk, p.experts = (int)experts, p.tile = (int)tile;
    p.length = (int)length, p.tiles = (int)tiles, p.unused = (int)unused;
    p.wide_ids = wide_ids;
    launch("moe_align", {(unsigned)blocks}, ALIGN_WARPS * WARP, (unsigned)((ALIGN_WARPS + 1) * experts * 4), stream, p);
}
REGISTER(moe_align)
#endif

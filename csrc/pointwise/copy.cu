// SPDX-License-Identifier: BSD-3-Clause
// copy_bytes: copies by address, addresses and sizes being on the device (states of recurrent layers that move pages).
// A target may overlap the end of its source (move down), not its beginning.
// One block a copy; 16 bytes a thread and step where source, target and size divide so, else one byte. All threads have
// read a step before one of them writes it, and a step's targets lie before later steps' sources.
#include "common/device.cuh"

struct CopyParams {
    const int64_t* sources;  // (copies) byte addresses
    const int64_t* targets;  // (copies)
    const void* sizes;       // (copies) bytes, int32 or int64
    int wide_sizes;
};

#ifdef DEVICE_HALF
template <class Unit>
__device__ __forceinline__ void copy_units(Unit* target, const Unit* source, int64_t units) {
    for (int64_t first = 0; first < units; first += blockDim.x) {
        const int64_t i = first + threadIdx.x;
        Unit unit{};
        if (i < units) unit = source[i];
        __syncthreads();
        if (i < units) target[i] = unit;
    }
}

KERNEL(copy_bytes, CopyParams, 256) {
    const int64_t source = p.sources[blockIdx.x], target = p.targets[blockIdx.x];
    const int64_t size = p.wide_sizes ? ((const int64_t*)p.sizes)[blockIdx.x] : ((const int*)p.sizes)[blockIdx.x];
    if ((source | target | size) % 16 == 0)
        copy_units((uint4*)target, (const uint4*)source, size / 16);
    else
        copy_units((uint8_t*)target, (const uint8_t*)source, size);
}
#else
#include "launch.h"

static void copy_bytes(uintptr_t sources, uintptr_t targets, uintptr_t sizes, int64_t copies, bool wide_sizes,
                       uintptr_t stream) {
    CopyParams p{(const int64_t*)sources, (const int64_t*)targets, (const void*)sizes, wide_sizes};
    launch("copy_bytes", {(unsigned)copies}, 256, 0, stream, p);
}
REGISTER(copy_bytes)
#endif

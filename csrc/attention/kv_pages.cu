// SPDX-License-Identifier: BSD-3-Clause
// zero_pages: clear pages of the KV cache in all its segments, addresses, strides and sizes being on the device.
// Strides and sizes count 32-bit words, as int32 or int64. One block a (page, segment).
#include "common/device.cuh"

struct ZeroPagesParams {
    const int64_t* addresses;  // (segments) byte address of each
    const void* strides;       // (segments) words from one page to the next
    const void* sizes;         // (segments) words to clear
    const int64_t* pages;      // (num_pages) page numbers
    int wide;                  // strides and sizes are int64
};

#ifdef DEVICE_HALF
KERNEL(zero_pages, ZeroPagesParams, 256) {
    const int segment = blockIdx.y;
    const int64_t stride = p.wide ? ((const int64_t*)p.strides)[segment] : ((const int*)p.strides)[segment];
    const int64_t size = p.wide ? ((const int64_t*)p.sizes)[segment] : ((const int*)p.sizes)[segment];
    uint32_t* words = (uint32_t*)p.addresses[segment] + p.pages[blockIdx.x] * stride;
    for (int64_t i = threadIdx.x; i < size; i += blockDim.x) words[i] = 0;
}
#else
#include "launch.h"

static void zero_pages(uintptr_t addresses, uintptr_t strides, uintptr_t sizes, uintptr_t pages, int64_t segments,
                       int64_t num_pages, bool wide, uintptr_t stream) {
    ZeroPagesParams p{(const int64_t*)addresses, (const void*)strides, (const void*)sizes, (const int64_t*)pages, wide};
    launch("zero_pages", {(unsigned)num_pages, (unsigned)segments}, 256, 0, stream, p);
}
REGISTER(zero_pages)
#endif

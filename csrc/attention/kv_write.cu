// SPDX-License-Identifier: BSD-3-Clause
// kv_write: new keys and values to their slots of the paged cache, quantised on the way if the cache is int8.
//   key, value  (tokens, num_kv_heads, head_dim) T, token and head strides in elements
//   cache       pages; the planes of a page and head are laid out as formats/layout.py KVLayout says
//   slots       (tokens) int64, page * page_size + offset; -1 is skipped
// One block a token, one warp a (K or V, head) row. int8: scale = max|x| / 127 by IEEE division, as the reference.
#include "common/device.cuh"
#include "format_layout.h"

struct KvWriteParams {
    const void* key;
    const void* value;
    char* cache;
    const int64_t* slots;
    int64_t key_token_stride, key_head_stride;      // elements
    int64_t value_token_stride, value_head_stride;  // elements
    int64_t page_stride, head_stride;               // bytes
    int num_kv_heads, head_dim, page_size;
};

#ifdef DEVICE_HALF
// Calls row(source, plane base, offset in the page, is_value) for each row of this block's token, one warp each.
template <class T, class Row>
__device__ __forceinline__ void for_rows(const KvWriteParams& p, Row row) {
    const int64_t token = blockIdx.x, slot = p.slots[token];
    if (slot < 0) return;
    char* token_page = p.cache + slot / p.page_size * p.page_stride;
    const int offset = (int)(slot % p.page_size), warps = blockDim.x / WARP;
    for (int task = threadIdx.x / WARP; task < 2 * p.num_kv_heads; task += warps) {
        const bool is_value = task >= p.num_kv_heads;
        const int head = is_value ? task - p.num_kv_heads : task;
        const T* source = is_value ? (const T*)p.value + token * p.value_token_stride + head * p.value_head_stride
                                   : (const T*)p.key + token * p.key_token_stride + head * p.key_head_stride;
        row(source, token_page + head * p.head_stride, offset, is_value);
    }
}

template <class T>
__device__ void kv_write_auto(const KvWriteParams& p) {
    for_rows<T>(p, [&](const T* source, char* page, int offset, bool is_value) {
        T* target = (T*)page + ((int64_t)(is_value ? p.page_size : 0) + offset) * p.head_dim;
        for (int i = threadIdx.x % WARP; i < p.head_dim; i += WARP) target[i] = source[i];
    });
}
KERNELS(kv_write_auto, KvWriteParams, 128)

template <class T>
__device__ void kv_write_int8(const KvWriteParams& p) {
    static_assert(kv_layout_int8::k_bits == 8 && kv_layout_int8::v_bits == 8 && kv_layout_int8::scale_bytes == 4, "");
    for_rows<T>(p, [&](const T* source, char* page, int offset, bool is_value) {
        const int lane = threadIdx.x % WARP;
        float amax = 0.f;
        for (int i = lane; i < p.head_dim; i += WARP) amax = fmaxf(amax, fabsf(to_float(source[i])));
        float scale = __fdiv_rn(warp_max(amax), 127.f);
        if (scale == 0.f) scale = 1.f;
        const int plane = is_value ? p.page_size : 0;
        int8_t* codes = (int8_t*)page + ((int64_t)plane + offset) * p.head_dim;
#pragma unroll 1  // the division is a call; four of them in a row spill
        for (int i = lane; i < p.head_dim; i += WARP) {
            const float code = rintf(__fdiv_rn(to_float(source[i]), scale));
            codes[i] = (int8_t)(int)fminf(fmaxf(code, -127.f), 127.f);
        }
        float* scales = (float*)(page + 2 * (int64_t)p.page_size * p.head_dim);
        if (lane == 0) scales[plane + offset] = scale;
    });
}
KERNELS(kv_write_int8, KvWriteParams, 128)
#else
#include "launch.h"

static void kv_write(const std::string& format, const std::string& dtype, uintptr_t key, uintptr_t value,
                     uintptr_t cache, uintptr_t slots, int64_t tokens, int64_t key_token_stride,
                     int64_t key_head_stride, int64_t value_token_stride, int64_t value_head_stride,
                     int64_t page_stride, int64_t head_stride, int64_t num_kv_heads, int64_t head_dim,
                     int64_t page_size, uintptr_t stream) {
    CHECK(head_dim >= 1 && head_dim <= 256, "kv_write: head_dim is %lld, wanted 1 to 256", (long long)head_dim);
    KvWriteParams p{(const void*)key,
                    (const void*)value,
                    (char*)cache,
                    (const int64_t*)slots,
                    key_token_stride,
                    key_head_stride,
                    value_token_stride,
                    value_head_stride,
                    page_stride,
                    head_stride,
                    (int)num_kv_heads,
                    (int)head_dim,
                    (int)page_size};
    launch("kv_write_" + format + "_" + dtype, {(unsigned)tokens}, 128, 0, stream, p);
}
REGISTER(kv_write)
#endif

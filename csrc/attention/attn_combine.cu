// SPDX-License-Identifier: BSD-3-Clause
// attn_combine: joins the parts that attn_decode and attn_prefill left of each row (paged.cuh), in the order of the
// parts:
//   out = sum_s 2^(maximum_s - top) partial_s / sum_s 2^(maximum_s - top) total_s, a sink in the denominator included
// One block a row of a KV head and sequence: grid (partial_rows * num_kv_heads, num_seqs), a thread for each value of
// head_dim, 128 at a time. Parts without keys have a total of 0 and unwritten sums, which are not read.
#include "attention/paged.cuh"

constexpr int COMBINE_THREADS = 128;

#ifdef DEVICE_HALF
KERNEL(attn_combine, PagedParams, COMBINE_THREADS) {
    const PagedSequence s(p, blockIdx.y, blockIdx.x / p.partial_rows);
    const int in_sequence = blockIdx.x % p.partial_rows;
    const bool split = s.rows <= p.decode_rows ? p.num_splits > 1 : p.prefill_splits > 1;
    if (!split || in_sequence >= s.rows) return;
    const PagedRow row(p, s, in_sequence);
    const int64_t first = partial_index(p, s, in_sequence, 0);
    const float2* const stats = p.partial_stats + first;

    float top = -INFINITY, total = 0.f;
    for (int i = 0; i < p.num_splits; i++) top = fmaxf(top, stats[i].x);
    const float base = top == -INFINITY ? 0.f : top;
    for (int i = 0; i < p.num_splits; i++) total = fmaf(exp2f(stats[i].x - base), stats[i].y, total);
    const float factor = output_factor(p, row.head, top, total);
    const int64_t at = row.token * p.out_token_stride + row.head * p.out_head_stride;
    for (int d = threadIdx.x; d < p.head_dim; d += COMBINE_THREADS) {
        float sum = 0.f;
        for (int i = 0; i < p.num_splits; i++)
            if (stats[i].y != 0.f)
                sum = fmaf(exp2f(stats[i].x - base), p.partial_out[(first + i) * p.head_dim + d], sum);
        store_float(p.out, at + d, p.out_type, sum * factor);
    }
}
#else
static void attn_combine(uintptr_t stream, const py::kwargs& given) {
    const PagedParams p = paged_params(given);
    launch("attn_combine", {(unsigned)(p.partial_rows * p.num_kv_heads), (unsigned)p.num_seqs}, COMBINE_THREADS, 0,
           stream, p);
}
REGISTER(attn_combine)
#endif

// SPDX-License-Identifier: BSD-3-Clause
// What the kernels of attention over a paged KV cache share: attn_decode.cu, attn_prefill.cu, attn_combine.cu.
//
//   out = softmax(mask(softcap(query K^T * softmax_scale) + alibi)) V         for each sequence, over its pages
//
// A *row* is a (query token, query head) pair of one KV head, numbered token-major: row = token * group + head in
// group, group = num_heads / num_kv_heads. All rows of a sequence and KV head see the same K and V, so a block takes
// several.
//
// Which kernel takes a sequence depends on its own number of rows: up to decode_rows attn_decode, else attn_prefill.
// Both may be launched for a mixed batch; blocks without work return. A sequence whose keys are cut into num_splits
// parts leaves, for each part, unnormalised sums with their maximum and weight in partial_out and partial_stats, which
// attn_combine joins in the order of the parts: results are deterministic and do not depend on the rest of the batch.
//
// Logits are in units of log2: score_scale holds softmax_scale * log2(e), and exp2 stands for exp.
#pragma once
#include "common/device.cuh"
#include "format_layout.h"

struct PagedParams {
    void* out;                   // (tokens, num_heads, head_dim) out_type; written below query_start_loc[num_seqs] only
    const void* query;           // (tokens, num_heads, head_dim) query_type
    const char* cache;           // pages, see formats/kv.cuh
    const int* block_table;      // (num_seqs, *) page numbers; those beyond a sequence's keys are not read
    const int* seq_lens;         // (num_seqs) keys, those of the query tokens included; 0: nothing to do
    const int* query_start_loc;  // (num_seqs + 1) first query token of each sequence
    const float* sinks;          // (num_heads) a logit that counts in the denominator only, or null
    const uint32_t* ancestors;   // (tokens) bit i: sees query token i of its sequence, beside all keys before; or null
    const float* alibi_slopes;   // (num_heads) slope * (key - query position) is added to logits, or null
    float* partial_out;          // (num_seqs, num_kv_heads, partial_rows, num_splits, head_dim), null with one split
    float2* partial_stats;       // (num_seqs, num_kv_heads, partial_rows, num_splits) maximum, sum of exp2
    int64_t page_stride, head_stride;               // bytes
    int64_t query_token_stride, query_head_stride;  // elements
    int64_t out_token_stride, out_head_stride;      // elements
    int64_t table_stride;                           // page numbers from one sequence to the next
    int num_seqs, num_kv_heads, group, head_dim, page_size;
    int query_type, out_type;    // FloatType
    int decode_rows;             // a sequence with more rows belongs to attn_prefill
    int partial_rows;            // rows of a sequence and KV head that partials have room for
    int num_splits;              // parts of a sequence's keys in attn_decode
    int prefill_splits;          // and in attn_prefill: num_splits or 1
    int ahead;                   // keys up to this many tokens after its own: 0 is causal, ALL_AHEAD every key
    int window;                  // > 0: keys fewer than this many tokens back
    float score_scale;           // softmax_scale, times log2(e) if there is no softcap
    float softcap, inv_softcap;  // c > 0: logits become c * tanh(logit / c)
};

enum FloatType { FP16, BF16, FP32 };

constexpr int ALL_AHEAD = 1 << 30;
constexpr int SPLIT_UNIT = 16;  // page_size is a multiple of this many tokens
constexpr float LOG2E = 1.4426950408889634f;

#ifdef DEVICE_HALF
#include "formats/kv.cuh"

__device__ __forceinline__ float load_float(const void* array, int64_t index, int type) {
    if (type == FP16) return to_float(((const fp16_t*)array)[index]);
    if (type == BF16) return to_float(((const bf16_t*)array)[index]);
    return ((const float*)array)[index];
}
__device__ __forceinline__ void store_float(void* array, int64_t index, int type, float v) {
    if (type == FP32)
        ((float*)array)[index] = v;
    else
        ((uint16_t*)array)[index] = type == FP16 ? bits_of(from_float<fp16_t>(v)) : bits_of(from_float<bf16_t>(v));
}

// A sequence, as one KV head's blocks see it.
struct PagedSequence {
    int seq, kv_head;
    int first_token;     // its place in query
    int rows;            // query tokens * group; 0 if there is nothing to do
    int seq_len;         // keys
    int first_position;  // of the first query token among the keys

    __device__ __forceinline__ PagedSequence(const PagedParams& p, int seq, int kv_head) : seq(seq), kv_head(kv_head) {
        first_token = p.query_start_loc[seq];
        const int tokens = p.query_start_loc[seq + 1] - first_token;
        seq_len = p.seq_lens[seq];
        rows = seq_len > 0 ? tokens * p.group : 0;
        first_position = seq_len - tokens;
    }
    // Keys [begin, end) that any of rows [row, row + count) may see.
    __device__ __forceinline__ int begin(const PagedParams& p, int row) const {
        return p.window > 0 ? max(0, first_position + row / p.group - p.window + 1) : 0;
    }
    __device__ __forceinline__ int end(const PagedParams& p, int row, int count) const {
        return max(0, min(seq_len, first_position + (min(row + count, rows) - 1) / p.group + 1 + p.ahead));
    }
};

// One row: where it lies and which keys it sees.
struct PagedRow {
    bool exists;
    int token, head, position;
    int begin, end;  // keys it sees; empty if it does not exist

    __device__ __forceinline__ PagedRow(const PagedParams& p, const PagedSequence& s, int row) {
        exists = row < s.rows;
        const int in_sequence = exists ? row / p.group : 0;
        token = s.first_token + in_sequence;
        head = s.kv_head * p.group + (exists ? row % p.group : 0);
        position = s.first_position + in_sequence;
        begin = p.window > 0 ? max(0, position - p.window + 1) : 0;
        end = exists ? min(s.seq_len, position + 1 + p.ahead) : 0;
    }
    __device__ __forceinline__ bool sees(const PagedParams& p, const PagedSequence& s, int key) const {
        if (key < begin || key >= end) return false;
        return !p.ancestors || key < s.first_position || (p.ancestors[token] >> (key - s.first_position) & 1u);
    }
    __device__ __forceinline__ int64_t query_offset(const PagedParams& p) const {
        return token * p.query_token_stride + head * p.query_head_stride;
    }
    // Adds to the logit of a key for each token that the key lies behind the query.
    __device__ __forceinline__ float slope(const PagedParams& p) const {
        return p.alibi_slopes ? p.alibi_slopes[head] * LOG2E : 0.f;
    }
};

// Logit of a key, in units of log2, from its score (dot product * score_scale).
__device__ __forceinline__ float paged_logit(const PagedParams& p, float score, float slope, int distance) {
    if (p.softcap > 0.f) score = p.softcap * LOG2E * tanhf(score * p.inv_softcap);
    return score - slope * (float)distance;
}

// What a row's sum of weights * V, taken relative to `maximum` and with weights adding up to `total`, is multiplied by.
__device__ __forceinline__ float output_factor(const PagedParams& p, int head, float maximum, float total) {
    const float sink = p.sinks ? p.sinks[head] * LOG2E : -INFINITY;
    if (sink > -INFINITY) {
        const float top = fmaxf(maximum, sink), factor = exp2f(maximum - top);
        return factor / (total * factor + exp2f(sink - top));
    }
    return total == 0.f ? 0.f : 1.f / total;  // no key: zeros
}

__device__ __forceinline__ int64_t partial_index(const PagedParams& p, const PagedSequence& s, int row, int split) {
    return (((int64_t)s.seq * p.num_kv_heads + s.kv_head) * p.partial_rows + row) * p.num_splits + split;
}

// Walks a sequence's pages; never looks at an entry of the table before it is asked for.
struct PageCursor {
    const int* table;
    const char* cache;  // of the KV head
    int64_t page_stride;
    int page_size, index, offset;  // page of the sequence, token in it

    __device__ __forceinline__ PageCursor(const PagedParams& p, const PagedSequence& s, int token)
        : table(p.block_table + s.seq * p.table_stride),
          cache(p.cache + s.kv_head * p.head_stride),
          page_stride(p.page_stride),
          page_size(p.page_size),
          index(token / p.page_size),
          offset(token % p.page_size) {}
    __device__ __forceinline__ void advance(int tokens) {  // a divisor of page_size
        offset += tokens;
        if (offset == page_size) offset = 0, index++;
    }
    __device__ __forceinline__ const char* page() const { return cache + table[index] * page_stride; }
};
#else
#include "launch.h"

// From the keyword arguments that ops/paged_attention.py gives to every launcher, named as the fields above.
inline PagedParams paged_params(const py::kwargs& given) {
    auto number = [&](const char* name) { return given[name].cast<int64_t>(); };
    auto real = [&](const char* name) { return (float)given[name].cast<double>(); };
    auto address = [&](const char* name) { return (void*)given[name].cast<uintptr_t>(); };
    auto type = [&](const char* name) {
        const std::string value = given[name].cast<std::string>();
        CHECK(value == "fp16" || value == "bf16" || value == "fp32", "paged_attention: %s is %s", name, value.c_str());
        return value == "fp16" ? FP16 : value == "bf16" ? BF16 : FP32;
    };
    const int64_t head_dim = number("head_dim"), num_heads = number("num_heads"), num_kv_heads = number("num_kv_heads");
    const int64_t page_size = number("page_size");
    CHECK(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0,
          "paged_attention: head_dim is %lld, wanted a multiple of 8 up to 256", (long long)head_dim);
    CHECK(num_kv_heads >= 1 && num_heads >= 1 && num_heads % num_kv_heads == 0,
          "paged_attention: %lld query heads cannot share %lld KV heads evenly", (long long)num_heads,
          (long long)num_kv_heads);
    CHECK(page_size >= SPLIT_UNIT && page_size % SPLIT_UNIT == 0,
          "paged_attention: a page has %lld tokens, wanted a multiple of %d", (long long)page_size, SPLIT_UNIT);
    CHECK(number("cache") % 16 == 0 && number("page_stride") % 16 == 0 && number("head_stride") % 16 == 0,
          "paged_attention: a page of one KV head must start on 16 bytes; the cache is at %llx with strides %lld and "
          "%lld",
          (unsigned long long)number("cache"), (long long)number("page_stride"), (long long)number("head_stride"));
    CHECK(number("num_seqs") <= 65535, "paged_attention: %lld sequences, at most 65535 are taken",
          (long long)number("num_seqs"));
    CHECK(number("num_splits") >= 1 && number("num_splits") <= 65535, "paged_attention: num_splits is %lld",
          (long long)number("num_splits"));
    PagedParams p{};
    p.out = address("out"), p.query = address("query"), p.cache = (const char*)address("cache");
    p.block_table = (const int*)address("block_table"), p.seq_lens = (const int*)address("seq_lens");
    p.query_start_loc = (const int*)address("query_start_loc");
    p.sinks = (const float*)address("sinks"), p.alibi_slopes = (const float*)address("alibi_slopes");
    p.partial_out = (float*)address("partial_out"), p.partial_stats = (float2*)address("partial_stats");
    p.page_stride = number("page_stride"), p.head_stride = number("head_stride");
    p.query_token_stride = number("query_token_stride"), p.query_head_stride = number("query_head_stride");
    p.out_token_stride = number("out_token_stride"), p.out_head_stride = number("out_head_stride");
    p.table_stride = number("table_stride");
    p.num_seqs = (int)number("num_seqs"), p.num_kv_heads = (int)num_kv_heads, p.group = (int)(num_heads / num_kv_heads);
    p.head_dim = (int)head_dim, p.page_size = (int)page_size;
    p.query_type = type("query_type"), p.out_type = type("out_type");
    p.decode_rows = (int)number("decode_rows"), p.partial_rows = (int)number("partial_rows");
    p.num_splits = (int)number("num_splits"), p.prefill_splits = (int)number("prefill_splits");
    p.ancestors = (const uint32_t*)address("ancestors");
    const bool everything = p.ancestors || !number("causal");
    p.window = (int)number("window");
    p.ahead = !everything ? 0 : number("symmetric_window") && p.window > 0 ? p.window - 1 : ALL_AHEAD;
    const float scale = real("softmax_scale");
    p.softcap = real("softcap"), p.inv_softcap = p.softcap > 0.f ? 1.f / p.softcap : 0.f;
    p.score_scale = p.softcap > 0.f ? scale : scale * LOG2E;
    return p;
}

// The smallest of the compiled widths that holds head_dim.
inline int width_of(const PagedParams& p) { return p.head_dim <= 64 ? 64 : p.head_dim <= 128 ? 128 : 256; }
#endif

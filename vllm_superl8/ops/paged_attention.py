# SPDX-License-Identifier: BSD-3-Clause
"""Attention over the paged KV cache, prefill and decode (softmax as Milakov and Gimelshein 2018, arXiv:1805.02867;
splits as flash-decoding, Dao et al. 2023)."""

import torch

from vllm_superl8.formats import kv
from vllm_superl8.ops.registry import dtype_name, ptr, register, stream


def _check(query, kv_cache, out, kv_format):
    if (kv_cache.dtype == torch.int8) != (kv_format == "int8"):
        raise ValueError(f"paged_attention: kv_format {kv_format!r} does not fit a cache of {kv_cache.dtype}")
    if kv_format != "int8" and kv_cache.dtype != query.dtype:
        raise ValueError(f"paged_attention: a cache of {kv_cache.dtype} does not fit a query of {query.dtype}")
    if query.shape[1] % kv_cache.shape[1]:
        raise ValueError(f"paged_attention: {query.shape[1]} query heads over {kv_cache.shape[1]} KV heads")
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(f"paged_attention: out is {tuple(out.shape)} {out.dtype}, query {tuple(query.shape)}")


def attend(query, k, v, position, softmax_scale, causal, sliding_window, logit_softcap, sinks, alibi_slopes):
    """The definition, for one sequence: query (heads, q_len, D), k and v (kv_heads, context, D) float32, position
    (q_len) of each query token in the context. Returns (heads, q_len, D)."""
    heads, q_len, head_dim = query.shape
    kv_heads, context, _ = k.shape
    scores = query.reshape(kv_heads, -1, head_dim) @ k.transpose(1, 2)
    scores = scores.reshape(heads, q_len, context) * softmax_scale
    if logit_softcap:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    distance = position[:, None] - torch.arange(context, device=query.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * distance
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if sliding_window:
        hidden |= distance >= sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, q_len, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0.0)  # a row that sees no key gives zeros
    return (weights.reshape(kv_heads, -1, context) @ v).reshape(heads, q_len, head_dim)


def paged_attention_reference(
    query, kv_cache, out, block_table, seq_lens, query_start_loc, max_query_len, num_splits, softmax_scale, kv_format,
    causal=True, sliding_window=0, logit_softcap=0.0, sinks=None, alibi_slopes=None,
):  # fmt: skip
    _check(query, kv_cache, out, kv_format)
    page_size, head_dim = kv_cache.shape[2], query.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for seq, seq_len in enumerate(lengths):
        start, end = starts[seq], starts[seq + 1]
        if start == end:
            continue
        first = seq_len - (end - start)  # position of the first query token
        # Pages that end before every window are skipped, which is the same as masking them.
        first_page = max(0, first - sliding_window + 1) // page_size if sliding_window else 0
        pages = block_table[seq, first_page : -(-seq_len // page_size)].long()
        offset = first_page * page_size
        k, v = kv.gather(kv_cache, pages, head_dim)
        k, v = k[:, : seq_len - offset], v[:, : seq_len - offset]
        position = torch.arange(first - offset, seq_len - offset, device=query.device)
        q = query[start:end].float().transpose(0, 1)
        seen = attend(
            q, k, v, position, softmax_scale, causal, sliding_window, logit_softcap, sinks, alibi_slopes
        )  # fmt: skip
        out[start:end] = seen.transpose(0, 1).to(out.dtype)


def paged_attention_fake(*_, **__):
    return None


def paged_attention_kernel(
    module, query, kv_cache, out, block_table, seq_lens, query_start_loc, max_query_len, num_splits, softmax_scale,
    kv_format, causal=True, sliding_window=0, logit_softcap=0.0, sinks=None, alibi_slopes=None,
):  # fmt: skip
    _check(query, kv_cache, out, kv_format)
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("paged_attention: the last dimension of query and out must be contiguous")
    tokens, num_heads, head_dim = query.shape
    partial_out = partial_stats = None
    if num_splits > 1:
        partial_out = torch.empty(num_splits, tokens, num_heads, head_dim, dtype=torch.float32, device=query.device)
        partial_stats = torch.empty(num_splits, tokens, num_heads, 2, dtype=torch.float32, device=query.device)
    size = kv_cache.element_size()
    module.paged_attention(
        kv_format, dtype_name(query, "paged_attention"), ptr(out), ptr(query), ptr(kv_cache), ptr(block_table),
        ptr(seq_lens), ptr(query_start_loc), ptr(sinks), ptr(alibi_slopes), ptr(partial_out), ptr(partial_stats),
        kv_cache.stride(0) * size, kv_cache.stride(1) * size, query.stride(0), query.stride(1), out.stride(0),
        out.stride(1), block_table.stride(0), tokens, seq_lens.shape[0], num_heads, kv_cache.shape[1], head_dim,
        kv_cache.shape[2], num_splits, max_query_len, causal, sliding_window, softmax_scale, logit_softcap,
        stream(query),
    )  # fmt: skip


paged_attention = register(
    "paged_attention",
    "(Tensor query, Tensor kv_cache, Tensor(a!) out, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "int max_query_len, int num_splits, float softmax_scale, str kv_format, bool causal=True, int sliding_window=0, "
    "float logit_softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None) -> ()",
    reference=paged_attention_reference,
    fake=paged_attention_fake,
    kernel=paged_attention_kernel,
)
"""out = softmax(mask(softcap(query K^T * softmax_scale) + alibi)) V, per sequence over its pages.

query            (tokens, num_heads, head_dim) float16, bfloat16 or float32, last dimension contiguous
kv_cache         (num_pages, num_kv_heads, page_size, content), see formats.kv; num_heads a multiple of num_kv_heads
out              as query, written for tokens below query_start_loc[-1] only
block_table      (num_seqs, max_pages) int32; entries beyond a sequence's length are never read
seq_lens         (num_seqs) int32, context lengths with the new tokens; the last query token is the last of the context
query_start_loc  (num_seqs + 1) int32
max_query_len    host bound on a sequence's query tokens
num_splits       parts the context is cut into, >= 1; the result does not depend on what else is in the batch
kv_format        "auto" for a cache of query's dtype, "int8": the query is then quantised a row at a time too
sliding_window   a token sees this many tokens, itself included; 0: all
logit_softcap    c > 0: logits become c * tanh(logit / c)
sinks            (num_heads) float32, an extra logit in every denominator
alibi_slopes     (num_heads) float32, adds slope * (key - query position)

A query token that sees no key gives zeros. Raises ValueError for a cache that does not fit.
"""

# SPDX-License-Identifier: BSD-3-Clause
"""Attention over the paged KV cache, prefill and decode (softmax as Milakov and Gimelshein 2018, arXiv:1805.02867;
splits as flash-decoding, Dao et al. 2023)."""

import torch

from vllm_superl8.formats import kv
from vllm_superl8.formats.layout import KVLayout
from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.registry import dtype_name, ptr, register, stream

DECODE_ROWS = 32
"""Rows (query tokens times heads of a group) up to which a sequence is attn_decode's: it takes four or eight rows a
pass and reads K and V again for each, from L2 if the passes run side by side; attn_prefill takes 64 at a time."""

MAX_TREE_TOKENS = 32
"""Bits of an ancestor mask."""

SPLIT_QUERY_LEN = 16
"""Longest query up to which attn_prefill splits the keys of a sequence too. Longer ones fill the card with their rows,
and partial results would take num_splits times the memory of the output in float32."""


def _check(query, kv_cache, out, kv_format) -> KVLayout:
    if query.dim() != 3 or out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(
            f"paged_attention: query is {tuple(query.shape)} {query.dtype}, out {tuple(out.shape)} {out.dtype}"
        )
    layout = kv.layout_of(kv_cache, kv_format, query.shape[2])
    if query.shape[1] % kv_cache.shape[1]:
        raise ValueError(f"paged_attention: {query.shape[1]} query heads over {kv_cache.shape[1]} KV heads")
    return layout


def _check_tree(ancestors, query, max_query_len, sliding_window, alibi_slopes) -> None:
    if ancestors is None:
        return
    if max_query_len > MAX_TREE_TOKENS or sliding_window or alibi_slopes is not None:
        raise ValueError(
            f"paged_attention: ancestors take up to {MAX_TREE_TOKENS} query tokens a sequence, without sliding_window "
            f"and alibi_slopes; got {max_query_len} tokens, a window of {sliding_window}"
            f"{'' if alibi_slopes is None else ' and alibi_slopes'}"
        )
    if ancestors.shape != query.shape[:1]:
        raise ValueError(f"paged_attention: ancestors are {tuple(ancestors.shape)}, query {tuple(query.shape)}")


def paged_attention_reference(
    query, kv_cache, out, block_table, seq_lens, query_start_loc, max_query_len, num_splits, softmax_scale, kv_format,
    causal=True, sliding_window=0, logit_softcap=0.0, sinks=None, alibi_slopes=None, symmetric_window=False,
    ancestors=None,
):  # fmt: skip
    layout = _check(query, kv_cache, out, kv_format)
    _check_tree(ancestors, query, max_query_len, sliding_window, alibi_slopes)
    page_size, head_dim = kv_cache.shape[2], query.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for seq, seq_len in enumerate(lengths):
        start, end = starts[seq], starts[seq + 1]
        if start == end or seq_len <= 0:
            continue
        first_position = seq_len - (end - start)
        # Keys before every window are left out, which is the same as masking them.
        first_key = max(0, first_position - sliding_window + 1) if sliding_window else 0
        first_page = first_key // page_size
        pages = block_table[seq, first_page : -(-seq_len // page_size)].long()
        keys = slice(first_key - first_page * page_size, seq_len - first_page * page_size)
        # In float64, so that a token's result, rounded, does not depend on the tokens that share its chunk.
        k, v = (x[:, keys].double() for x in kv.decode(kv_cache, layout, pages, head_dim))
        seen = attend(
            query[start:end].double().transpose(0, 1), k, v, first_position - first_key, softmax_scale, causal,
            sliding_window, logit_softcap, sinks, alibi_slopes, symmetric_window,
            None if ancestors is None else ancestors[start:end],
        )  # fmt: skip
        out[start:end] = seen.transpose(0, 1)


def paged_attention_fake(*_, **__):
    return None


def paged_attention_kernel(
    module, query, kv_cache, out, block_table, seq_lens, query_start_loc, max_query_len, num_splits, softmax_scale,
    kv_format, causal=True, sliding_window=0, logit_softcap=0.0, sinks=None, alibi_slopes=None, symmetric_window=False,
    ancestors=None,
):  # fmt: skip
    layout = _check(query, kv_cache, out, kv_format)
    _check_tree(ancestors, query, max_query_len, sliding_window, alibi_slopes)
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("paged_attention: the last dimension of query and out must be contiguous")
    for name, tensor, dtype in (
        ("block_table", block_table, torch.int32),
        ("seq_lens", seq_lens, torch.int32),
        ("query_start_loc", query_start_loc, torch.int32),
        ("sinks", sinks, torch.float32),
        ("alibi_slopes", alibi_slopes, torch.float32),
        ("ancestors", ancestors, torch.int32),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.stride(-1) != 1):
            raise ValueError(f"paged_attention: {name} must be contiguous {dtype}, got {tensor.dtype}")
    if not layout.quantized and query.dtype != kv_cache.dtype:
        query = query.to(kv_cache.dtype)  # scores are taken in the cache's type
    tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = seq_lens.shape[0], kv_cache.shape[1]
    group = num_heads // num_kv_heads

    # A sequence is attn_decode's or attn_prefill's by its own length; both are launched where it may be either.
    rows = max_query_len * group
    decodes = (rows <= DECODE_ROWS or num_seqs > 1) and group <= DECODE_ROWS
    prefills = rows > DECODE_ROWS
    short = max_query_len <= SPLIT_QUERY_LEN
    partial_rows = rows if short else min(rows, DECODE_ROWS)
    prefill_splits = num_splits if short else 1
    splits = num_splits > 1 and (decodes or prefill_splits > 1)
    partial_out = partial_stats = None
    if splits:
        parts = (num_seqs, num_kv_heads, partial_rows, num_splits)
        partial_out = torch.empty(*parts, head_dim, dtype=torch.float32, device=query.device)
        partial_stats = torch.empty(*parts, 2, dtype=torch.float32, device=query.device)
    size = kv_cache.element_size()
    arguments = {
        "out": ptr(out),
        "query": ptr(query),
        "cache": ptr(kv_cache),
        "block_table": ptr(block_table),
        "seq_lens": ptr(seq_lens),
        "query_start_loc": ptr(query_start_loc),
        "sinks": ptr(sinks),
        "alibi_slopes": ptr(alibi_slopes),
        "ancestors": ptr(ancestors),
        "partial_out": ptr(partial_out),
        "partial_stats": ptr(partial_stats),
        "page_stride": kv_cache.stride(0) * size,
        "head_stride": kv_cache.stride(1) * size,
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "table_stride": block_table.stride(0),
        "num_seqs": num_seqs,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": kv_cache.shape[2],
        "query_type": dtype_name(query, "paged_attention"),
        "out_type": dtype_name(out, "paged_attention"),
        "decode_rows": DECODE_ROWS,
        "partial_rows": partial_rows,
        "num_splits": num_splits,
        "prefill_splits": prefill_splits,
        "causal": causal,
        "symmetric_window": symmetric_window,
        "window": sliding_window,
        "softmax_scale": softmax_scale,
        "softcap": logit_softcap,
    }
    if decodes:
        # A mixed batch's decodes are mostly of one token.
        block_rows = 4 if (rows if short else group) <= 4 else 8
        module.attn_decode(layout.name, block_rows, min(rows, DECODE_ROWS), stream(query), **arguments)
    if prefills:
        scale_bytes = sum(plane.groups(head_dim) * plane.scale_bytes for plane in (layout.k, layout.v))
        module.attn_prefill(layout.name, layout.k.bits // 8, scale_bytes, tokens, stream(query), **arguments)
    if splits:
        module.attn_combine(stream(query), **arguments)


paged_attention = register(
    "paged_attention",
    "(Tensor query, Tensor kv_cache, Tensor(a!) out, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    "int max_query_len, int num_splits, float softmax_scale, str kv_format, bool causal=True, int sliding_window=0, "
    "float logit_softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, bool symmetric_window=False, "
    "Tensor? ancestors=None) -> ()",
    reference=paged_attention_reference,
    fake=paged_attention_fake,
    kernel=paged_attention_kernel,
)
"""out = softmax(mask(softcap(query K^T * softmax_scale) + alibi)) V, per sequence over its pages.

query            (tokens, num_heads, head_dim) float16, bfloat16 or float32, last dimension contiguous; for the kernels
                 head_dim is a multiple of 8, at most 256
kv_cache         (num_pages, num_kv_heads, page_size, content), see formats.kv; num_heads a multiple of num_kv_heads,
                 page_size of 16
out              as query, written for tokens below query_start_loc[-1] only
block_table      (num_seqs, max_pages) int32; entries beyond a sequence's length are never read
seq_lens         (num_seqs) int32, keys with those of the new tokens; the last query token is at the last key; a
                 sequence of 0 keys or 0 query tokens is skipped
query_start_loc  (num_seqs + 1) int32
max_query_len    host bound on a sequence's query tokens
num_splits       parts that the keys of short queries are cut into, >= 1
kv_format        "auto" for a floating-point cache (the query is rounded to its dtype), or a name of
                 formats.layout.KV_LAYOUTS; over a quantised one the kernels quantise the query too, a row at a time
causal           False: a token sees keys after its own position too
sliding_window   a token sees this many tokens, itself included; 0: all
symmetric_window with a window and without causal: and as many on the other side; else all after it
logit_softcap    c > 0: logits become c * tanh(logit / c)
sinks            (num_heads) float32, an extra logit in every denominator
alibi_slopes     (num_heads) float32, adds slope * (key - query position)
ancestors        (tokens) int32, in place of causal for a tree of drafts: bit i of a token says whether it sees query
                 token i of its sequence (its own among them); it sees all keys before the query tokens. At most 32
                 query tokens a sequence, without sliding_window and alibi_slopes, which go by the order of the keys

A query token that sees no key gives zeros. With max_query_len and num_splits given, a sequence's result does not depend
on the other sequences. Raises ValueError for a cache that does not fit.
"""

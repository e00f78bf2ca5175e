# SPDX-License-Identifier: BSD-3-Clause
"""Attention over keys and values that are not cached: encoder-only models (embedding, reranking)."""

import itertools

import torch

from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.kv_write import kv_cache_write_kernel
from vllm_superl8.ops.paged_attention import paged_attention_kernel
from vllm_superl8.ops.registry import register

PAGE_TOKENS = 16
"""Tokens of a page of the kernel's scratch cache."""


def _check(q, k, v, out):
    if q.shape[1] % k.shape[1] or k.shape != v.shape or out.shape != q.shape:
        raise ValueError(
            f"dense_attention: q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out.shape)}"
        )


def dense_attention_reference(
    q, k, v, out, cu_seqlens, max_seqlen, softmax_scale, causal=False, sliding_window=0, logit_softcap=0.0,
    alibi_slopes=None,
):  # fmt: skip
    _check(q, k, v, out)
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        heads = [x[start:end].float().transpose(0, 1) for x in (q, k, v)]
        seen = attend(*heads, 0, softmax_scale, causal, sliding_window, logit_softcap, None, alibi_slopes, True)
        out[start:end] = seen.transpose(0, 1)


def _nothing(*_, **__):
    return None


def dense_attention_kernel(
    module, q, k, v, out, cu_seqlens, max_seqlen, softmax_scale, causal=False, sliding_window=0, logit_softcap=0.0,
    alibi_slopes=None,
):  # fmt: skip
    _check(q, k, v, out)
    tokens, num_kv_heads, head_dim = k.shape
    starts = cu_seqlens.int()
    num_seqs = starts.shape[0] - 1
    # Sequence s has its pages from starts[s] // PAGE_TOKENS + s on: room for each one's last, partial page, so that
    # the size of the scratch cache follows from shapes alone.
    first_pages = starts[:-1] // PAGE_TOKENS + torch.arange(num_seqs, device=q.device, dtype=torch.int32)
    token = torch.arange(tokens, device=q.device, dtype=torch.int32)
    seq = torch.searchsorted(starts[1:], token, right=True).clamp_(max=max(num_seqs - 1, 0))
    slots = first_pages[seq].long() * PAGE_TOKENS + token - starts[seq]
    slots = torch.where(token < starts[-1], slots, -1)
    pages = tokens // PAGE_TOKENS + num_seqs
    cache = torch.empty(pages, num_kv_heads, PAGE_TOKENS, 2 * head_dim, dtype=q.dtype, device=q.device)
    reach = torch.arange(-(-max_seqlen // PAGE_TOKENS), device=q.device, dtype=torch.int32)
    kv_cache_write_kernel(module, k, v, cache, slots, "auto")
    paged_attention_kernel(
        module, q, cache, out, first_pages[:, None] + reach, starts[1:] - starts[:-1], starts, max_seqlen, 1,
        softmax_scale, "auto", causal, sliding_window, logit_softcap, None, alibi_slopes, True,
    )  # fmt: skip


dense_attention = register(
    "dense_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor cu_seqlens, int max_seqlen, float softmax_scale, "
    "bool causal=False, int sliding_window=0, float logit_softcap=0.0, Tensor? alibi_slopes=None) -> ()",
    reference=dense_attention_reference,
    fake=_nothing,
    kernel=dense_attention_kernel,
)
"""out = softmax(mask(softcap(q k^T * softmax_scale) + alibi)) v within each sequence of a batch.

q, out         (tokens, num_heads, head_dim) float16, bfloat16 or float32; out is written below cu_seqlens[-1] only
k, v           (tokens, num_kv_heads, head_dim), num_heads a multiple of num_kv_heads
cu_seqlens     (num_seqs + 1) int32 or int64, first token of each sequence, and their sum
max_seqlen     host bound on the longest sequence
causal         False: every token sees the whole sequence
sliding_window a token sees this many tokens, itself included, and without causal as many on the other side; 0: all
logit_softcap, alibi_slopes as ops.paged_attention

The kernels are those of paged_attention; K and V are copied into pages in q's dtype first, so head_dim is a multiple of
8 up to 256 there. Nothing is read on the host. Raises ValueError for shapes that do not fit.
"""

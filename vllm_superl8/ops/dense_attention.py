# SPDX-License-Identifier: BSD-3-Clause
"""Attention over keys and values that are not cached: encoder-only models (embedding, reranking)."""

import itertools

from vllm_superl8.ops.attend import attend
from vllm_superl8.ops.registry import register


def dense_attention_reference(
    q, k, v, out, cu_seqlens, max_seqlen, softmax_scale, causal=False, sliding_window=0, logit_softcap=0.0,
    alibi_slopes=None,
):  # fmt: skip
    if q.shape[1] % k.shape[1] or k.shape != v.shape or out.shape != q.shape:
        raise ValueError(
            f"dense_attention: q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out.shape)}"
        )
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        if start == end:
            continue
        heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        if not q.is_cuda:
            heads = [x.float() for x in heads]
        seen = attend(*heads, 0, softmax_scale, causal, sliding_window, logit_softcap, None, alibi_slopes)
        out[start:end] = seen.transpose(0, 1)


def _nothing(*_, **__):
    return None


dense_attention = register(
    "dense_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor cu_seqlens, int max_seqlen, float softmax_scale, "
    "bool causal=False, int sliding_window=0, float logit_softcap=0.0, Tensor? alibi_slopes=None) -> ()",
    reference=dense_attention_reference,
    fake=_nothing,
    kernel=None,
)
"""out = softmax(mask(softcap(q k^T * softmax_scale) + alibi)) v within each sequence of a batch.

q, out         (tokens, num_heads, head_dim) float16, bfloat16 or float32; out is written below cu_seqlens[-1] only
k, v           (tokens, num_kv_heads, head_dim), num_heads a multiple of num_kv_heads
cu_seqlens     (num_seqs + 1) int32 or int64, first token of each sequence, and their sum
max_seqlen     longest sequence (for kernels; the torch ops here do without)
causal         False: every token sees the whole sequence
sliding_window, logit_softcap, alibi_slopes as ops.paged_attention

A call of torch's scaled_dot_product_attention for each sequence: on a GPU in q's dtype, on a CPU in float32. It reads
cu_seqlens on the host. Raises ValueError for shapes that do not fit.
"""

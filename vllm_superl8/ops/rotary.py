# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in place."""

import math

import torch

from vllm_superl8.ops.registry import dtype_name, ptr, register, stream


def _heads(x: torch.Tensor, positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """x as (tokens, heads, head_dim), the same memory. Raises ValueError if it cannot be seen so."""
    tokens, heads = positions.numel(), math.prod(x.shape[positions.dim() :]) // head_dim
    if x.numel() != tokens * heads * head_dim or x.stride(-1) != 1:
        raise ValueError(
            f"rotary_embedding: {tuple(x.shape)} with strides {x.stride()} is not {tokens} tokens of heads of "
            f"{head_dim}"
        )
    return x.view(tokens, heads, head_dim)


def rotary_embedding_reference(
    positions, query, key, head_dim, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):  # fmt: skip
    rotary_dim = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions.flatten()].float()[:, None].chunk(2, -1)
    if inverse:
        sin = -sin
    for x in (query, key):
        if x is None:
            continue
        part = _heads(x, positions, head_dim)[..., rope_dim_offset : rope_dim_offset + rotary_dim]
        first, second = (part.chunk(2, -1)) if is_neox else (part[..., ::2], part[..., 1::2])
        a, b = first.float(), second.float()
        turned = a * cos - b * sin, b * cos + a * sin  # both before either is stored: a and b may be the same memory
        first.copy_(turned[0])
        second.copy_(turned[1])


def rotary_embedding_fake(*_, **__):
    return None


def rotary_embedding_kernel(
    module, positions, query, key, head_dim, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):  # fmt: skip
    q = _heads(query, positions, head_dim)
    k = None if key is None else _heads(key, positions, head_dim)
    rotary_dim = cos_sin_cache.shape[1]
    if positions.dtype != torch.int64 or not cos_sin_cache.is_contiguous():
        raise ValueError(f"rotary_embedding: got {positions.dtype} positions, wanted int64, and a contiguous cache")
    if cos_sin_cache.dtype not in (torch.float32, query.dtype) or (key is not None and key.dtype != query.dtype):
        dtypes = ", ".join(str(tensor.dtype) for tensor in (query, key, cos_sin_cache) if tensor is not None)
        raise ValueError(f"rotary_embedding: query, key and cache are {dtypes}; only the cache may differ, by float32")
    if rotary_dim % 2 or rope_dim_offset + rotary_dim > head_dim:
        raise ValueError(f"rotary_embedding: {rotary_dim} elements from {rope_dim_offset} on do not fit {head_dim}")
    positions = positions.contiguous()
    module.rotary_embedding(
        dtype_name(query, "rotary_embedding"), ptr(positions), ptr(q), ptr(k), ptr(cos_sin_cache), positions.numel(),
        q.stride(0), q.stride(1), 0 if k is None else k.stride(0), 0 if k is None else k.stride(1), q.shape[1],
        0 if k is None else k.shape[1], rotary_dim, rope_dim_offset, is_neox, inverse,
        cos_sin_cache.dtype == torch.float32, stream(query),
    )  # fmt: skip


rotary_embedding = register(
    "rotary_embedding",
    "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_dim, Tensor cos_sin_cache, bool is_neox, "
    "int rope_dim_offset=0, bool inverse=False) -> ()",
    reference=rotary_embedding_reference,
    fake=rotary_embedding_fake,
    kernel=rotary_embedding_kernel,
)
"""Rotate query and key by their positions' angles.

positions        (tokens) int64
query, key       (tokens, heads * head_dim) or (tokens, heads, head_dim), rows may be strided; key may be None
cos_sin_cache    (positions, rotary_dim) float32 or query's dtype, cosines then sines; rotary_dim <= head_dim
is_neox          True: element i turns with i + rotary_dim / 2; False (GPT-J): 2 i with 2 i + 1
rope_dim_offset  first rotated element of a head
inverse          rotate back

Raises ValueError for shapes that do not fit.
"""

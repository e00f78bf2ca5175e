# SPDX-License-Identifier: BSD-3-Clause
"""Token embeddings gathered from 16-bit or int8 rows."""

import torch

from vllm_superl8.ops.registry import DTYPE_NAMES, dtype_name, ptr, register, stream


def _rows(ids, weight):
    """Rows of weight by id, and which ids lie inside."""
    flat = ids.long()
    inside = (flat >= 0) & (flat < weight.shape[0])
    return weight[torch.where(inside, flat, 0)], inside.unsqueeze(-1)


def embedding_reference(ids, weight):
    rows, inside = _rows(ids, weight)
    return torch.where(inside, rows, 0)


def embedding_fake(ids, weight):
    return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def embedding_kernel(module, ids, weight):
    out, ids = embedding_fake(ids, weight), ids.long().contiguous()
    module.embedding(
        "auto", dtype_name(weight, "embedding"), ptr(out), ptr(ids), ptr(weight), 0, ids.numel(), *weight.shape,
        stream(ids),
    )  # fmt: skip
    return out


def embedding_int8_reference(ids, weight, scales, out_dtype):
    rows, inside = _rows(ids, weight)
    row_scales, _ = _rows(ids, scales)
    return torch.where(inside, rows.float() * row_scales, 0).to(out_dtype)


def embedding_int8_fake(ids, weight, scales, out_dtype):
    return torch.empty((*ids.shape, weight.shape[1]), dtype=out_dtype, device=weight.device)


def embedding_int8_kernel(module, ids, weight, scales, out_dtype):
    out, ids = embedding_int8_fake(ids, weight, scales, out_dtype), ids.long().contiguous()
    module.embedding(
        "int8", DTYPE_NAMES[out_dtype], ptr(out), ptr(ids), ptr(weight), ptr(scales), ids.numel(), *weight.shape,
        stream(ids),
    )  # fmt: skip
    return out


embedding = register(
    "embedding",
    "(Tensor ids, Tensor weight) -> Tensor",
    reference=embedding_reference,
    fake=embedding_fake,
    kernel=embedding_kernel,
)
"""out = weight[ids]; an id outside the vocabulary gives zeros, as a tensor-parallel shard needs.

ids (...) integer; weight (vocab, n) float16, bfloat16 or float32, contiguous; returns (..., n), dtype of weight
"""

embedding_int8 = register(
    "embedding_int8",
    "(Tensor ids, Tensor weight, Tensor scales, ScalarType out_dtype) -> Tensor",
    reference=embedding_int8_reference,
    fake=embedding_int8_fake,
    kernel=embedding_int8_kernel,
)
"""out = weight[ids] * scales[ids]; ids as embedding.

weight (vocab, n) int8, contiguous; scales (vocab, 1) float32; returns (..., n) in out_dtype
"""

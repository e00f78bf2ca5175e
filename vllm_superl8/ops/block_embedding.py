# SPDX-License-Identifier: BSD-3-Clause
"""Token embeddings decoded from a vocabulary that stays in its own bytes."""

import torch

from vllm_superl8.formats import blocks
from vllm_superl8.ops.block_gemm import planes_arguments
from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, register, stream


def _check(ids, planes, format, n, out_dtype) -> blocks.Layout:
    layout = blocks.layout_of(format)
    blocks.check_planes(planes, layout, n)
    if ids.dtype not in (torch.int32, torch.int64) or out_dtype not in DTYPE_NAMES:
        raise TypeError(
            f"block_embedding: ids are {ids.dtype} and out_dtype is {out_dtype}, wanted int32 or int64 and one of "
            f"{', '.join(map(str, DTYPE_NAMES))}"
        )
    return layout


def block_embedding_reference(ids, planes, format, n, out_dtype):
    layout = _check(ids, planes, format, n, out_dtype)
    flat = ids.flatten().long()
    inside = (flat >= 0) & (flat < planes[0].shape[0])
    rows = torch.where(inside, flat, 0)
    values = blocks.dequantize([plane[rows] for plane in planes], layout)
    return torch.where(inside.unsqueeze(-1), values, 0).to(out_dtype).reshape(*ids.shape, n)


def block_embedding_fake(ids, planes, format, n, out_dtype):
    return torch.empty((*ids.shape, n), dtype=out_dtype, device=planes[0].device)


def block_embedding_kernel(module, ids, planes, format, n, out_dtype):
    layout = _check(ids, planes, format, n, out_dtype)
    out = block_embedding_fake(ids, planes, format, n, out_dtype)
    ids = ids.contiguous()
    module.block_embedding(
        DTYPE_NAMES[out_dtype], ptr(out), ptr(ids), *planes_arguments("block_embedding", planes, layout, n),
        ids.numel(), planes[0].shape[0], n, ids.dtype == torch.int64, stream(ids),
    )  # fmt: skip
    return out


block_embedding = register(
    "block_embedding",
    "(Tensor ids, Tensor[] planes, str format, int n, ScalarType out_dtype) -> Tensor",
    reference=block_embedding_reference,
    fake=block_embedding_fake,
    kernel=block_embedding_kernel,
)
"""out = decoded rows of a vocabulary; an id outside gives zeros, as a tensor-parallel shard needs.

ids      (...) int32 or int64
planes   the vocabulary (rows, n) in `format`, as block_gemm takes it
returns  (..., n) in out_dtype: float16, bfloat16 or float32

Kernel and reference agree bit for bit. Raises as block_gemm.
"""

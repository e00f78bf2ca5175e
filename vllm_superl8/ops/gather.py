# SPDX-License-Identifier: BSD-3-Clause
"""Token embeddings gathered from 16-bit or int8 rows."""

import torch

from vllm_superl8.ops.registry import DTYPE_NAMES, dtype_name, ptr, register, stream


def _rows(ids, weight):
    """Rows of weight by id, and which ids lie inside."""
    flat = ids.long()
    inside = (flat >= 0) & (flat < weight.shape[0])
    return weight[torch.where(inside, flat, 0)], inside.unsqueeze(-1)


def _launch(module, out, ids, weight, scales, shard):
    """shard: first and last id, first and last added id, row of the first added id."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"embedding: ids are {ids.dtype}, wanted int32 or int64")
    if not weight.is_contiguous() or not out.is_contiguous():
        raise ValueError(f"embedding: weight or out is not contiguous, strides {weight.stride()} and {out.stride()}")
    ids = ids.contiguous()
    module.embedding(
        dtype_name(out, "embedding"), scales is not None, ptr(out), ptr(ids), ptr(weight), ptr(scales), ids.numel(),
        weight.shape[1], *shard, ids.dtype == torch.int64, stream(ids),
    )  # fmt: skip


def embedding_reference(ids, weight):
    rows, inside = _rows(ids, weight)
    return torch.where(inside, rows, 0)


def embedding_fake(ids, weight):
    return torch.empty((*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device)


def embedding_kernel(module, ids, weight):
    out = embedding_fake(ids, weight)
    _launch(module, out, ids, weight, None, (0, weight.shape[0], 0, 0, 0))
    return out


def embedding_int8_reference(ids, weight, scales, out_dtype):
    rows, inside = _rows(ids, weight)
    row_scales, _ = _rows(ids, scales)
    return torch.where(inside, rows.float() * row_scales, 0).to(out_dtype)


def embedding_int8_fake(ids, weight, scales, out_dtype):
    return torch.empty((*ids.shape, weight.shape[1]), dtype=out_dtype, device=weight.device)


def embedding_int8_kernel(module, ids, weight, scales, out_dtype):
    if out_dtype not in DTYPE_NAMES or scales.dtype != torch.float32 or scales.numel() != weight.shape[0]:
        raise ValueError(
            f"embedding_int8: scales are {tuple(scales.shape)} {scales.dtype} and out_dtype is {out_dtype}, wanted "
            f"({weight.shape[0]}, 1) float32 and one of {', '.join(map(str, DTYPE_NAMES))}"
        )
    out = embedding_int8_fake(ids, weight, scales, out_dtype)
    _launch(module, out, ids, weight, scales.contiguous(), (0, weight.shape[0], 0, 0, 0))
    return out


def vocab_parallel_embedding_reference(out, ids, weight, first, last, num_padding, added_first, added_last):
    ids = ids.long()
    own = (ids >= first) & (ids < last)
    added = (ids >= added_first) & (ids < added_last)
    row = torch.where(own, ids - first, torch.where(added, ids - added_first + last - first + num_padding, -1))
    out.copy_(embedding_reference(row, weight))


def vocab_parallel_embedding_kernel(module, out, ids, weight, first, last, num_padding, added_first, added_last):
    if out.shape != (*ids.shape, weight.shape[1]) or out.dtype != weight.dtype:
        raise ValueError(
            f"vocab_parallel_embedding: out is {tuple(out.shape)} {out.dtype} for {ids.numel()} ids of a weight "
            f"{tuple(weight.shape)} {weight.dtype}"
        )
    shard = (first, last, added_first, added_last, last - first + num_padding)
    _launch(module, out, ids, weight, None, shard)


embedding = register(
    "embedding",
    "(Tensor ids, Tensor weight) -> Tensor",
    reference=embedding_reference,
    fake=embedding_fake,
    kernel=embedding_kernel,
)
"""out = weight[ids]; an id outside the vocabulary gives zeros, as a tensor-parallel shard needs.

ids (...) int32 or int64; weight (vocab, n) float16, bfloat16 or float32, contiguous; returns (..., n), dtype of weight
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

vocab_parallel_embedding = register(
    "vocab_parallel_embedding",
    "(Tensor(a!) out, Tensor ids, Tensor weight, int first, int last, int num_padding, int added_first, "
    "int added_last) -> ()",
    reference=vocab_parallel_embedding_reference,
    fake=lambda *_, **__: None,
    kernel=vocab_parallel_embedding_kernel,
)
"""out = rows of one shard of a vocabulary, zeros for ids of other shards.

out          (..., n), dtype of weight, contiguous
ids          (...) int32 or int64, numbers in the whole vocabulary
weight       (rows, n): ids [first, last), then num_padding rows, then ids [added_first, added_last) (extra words)

Raises ValueError for an out that does not fit.
"""

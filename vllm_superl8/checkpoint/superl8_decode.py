# SPDX-License-Identifier: BSD-3-Clause
"""Values of quantised tensors of a ``.superl8`` file, whatever their scheme: for what no kernel takes as stored."""

import torch

from vllm_superl8.checkpoint import gguf_tensors
from vllm_superl8.checkpoint.superl8_file import Superl8File
from vllm_superl8.checkpoint.superl8_header import Blob, ContainerError
from vllm_superl8.formats import int4
from vllm_superl8.formats.container import INT8, columns

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the codes 0 to 15 (Dettmers et al., QLoRA, appendix E)."""

CHUNK_VALUES = 1 << 22
"""Values decoded at a time: 16 MB of float32 beside the result."""


def decode(file: Superl8File, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor's values (out, in) in `dtype`; raw tensors of any shape.

    Raises ContainerError for damage, for rotated weights and for a GGUF type that gguf does not decode.
    """
    blob = file.header.tensors[name]
    if blob.rotated:
        raise ContainerError(
            f"{file.header.path}: tensor {name} is rotated (hadamard_dim {blob.hadamard_dim}), which needs rotated "
            "activations; this version does not serve it: convert the model without rotation"
        )
    codes = file.tensor(name)
    if blob.scheme == "raw":
        return codes.to(dtype)
    scales = None if blob.scale is None else file.scales(name)
    rows, k = codes.shape[0], columns(blob.scheme, codes.shape[1])
    if blob.scheme == "gguf_kquant":
        k = _kquant(file, blob, codes[:1]).shape[1]
    out = torch.empty(rows, k, dtype=dtype)
    step = max(1, CHUNK_VALUES // max(1, k))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if blob.scheme == "gguf_kquant":
            out[part] = _kquant(file, blob, codes[part])
            continue
        values = codes[part].float() if blob.scheme in INT8 else CODES[blob.scheme](codes[part], blob.codebook)
        spread = scales[part].repeat_interleave(blob.group_size or k, 1)[:, :k]
        out[part] = values * spread
    return out


def _four_bits(codes: torch.Tensor, codebook: str) -> torch.Tensor:
    """(rows, k / 2) bytes, the even column in the low nibble, -> (rows, k) codes or NF4 values."""
    nibbles = int4.unpack(codes)
    if codebook == "nf4":
        return torch.tensor(NF4)[nibbles.int()]
    return ((nibbles.to(torch.int8) ^ 8) - 8).float()


def _three_bits(words: torch.Tensor, codebook: str | None) -> torch.Tensor:
    """(rows, k / 32 * 3) words -> (rows, k) codes in [-4, 3].

    Words of 32 columns: the low two bits of columns 0 to 15, those of 16 to 31, the inverted high bits. Column j lies
    in byte j & 3; with s = j >> 2 its low bits are at 2 (s mod 4) of that byte and its high bit at s.
    """
    column = torch.arange(32)
    byte, step = column & 3, column >> 2
    groups = words.long().unflatten(1, (-1, 3)) & 0xFFFFFFFF
    low = (groups[..., column // 16] >> (8 * byte + 2 * (step % 4))) & 3
    high = (groups[..., 2:3] >> (8 * byte + step)) & 1
    return (low + 4 * high - 4).flatten(1).float()


CODES = {"per_group_i4": _four_bits, "per_group_w3a8": _three_bits}
"""Scheme to what makes codes, as float32, of stored rows."""


def _kquant(file: Superl8File, blob: Blob, rows: torch.Tensor) -> torch.Tensor:
    try:
        return gguf_tensors.decode(rows, blob.codebook.upper(), torch.float32)
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ContainerError(
            f"{file.header.path}: tensor {blob.name} holds GGUF type {blob.codebook!r} in rows of "
            f"{rows.shape[1]} bytes, which the installed gguf package cannot decode ({error}); convert the model again"
        ) from error

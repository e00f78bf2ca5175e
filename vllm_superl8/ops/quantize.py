# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic int8 quantisation of rows or groups of columns (format: formats.int8)."""

import torch

from vllm_superl8.formats import int8
from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream


def _check(x: torch.Tensor, group_size: int) -> None:
    if group_size != -1 and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"quantize_int8: k of {x.shape[-1]} is not a multiple of group_size {group_size}")
    if x.shape[-1] == 0:
        raise ValueError("quantize_int8: x has rows of no elements")


def quantize_int8_reference(x, group_size=-1):
    _check(x, group_size)
    return int8.quantize(x, group_size)


def quantize_int8_fake(x, group_size=-1):
    groups = 1 if group_size == -1 else x.shape[-1] // group_size
    return (
        torch.empty(x.shape, dtype=torch.int8, device=x.device),
        torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device),
    )


def quantize_int8_kernel(module, x, group_size=-1):
    _check(x, group_size)
    codes, scales = quantize_int8_fake(x, group_size)
    rows = rows_of(x)
    k = x.shape[-1]
    module.quantize_int8(
        dtype_name(x, "quantize_int8"), ptr(codes), ptr(scales), ptr(rows), rows.shape[0], k, rows.stride(0),
        k if group_size == -1 else group_size, stream(x),
    )  # fmt: skip
    return codes, scales


quantize_int8 = register(
    "quantize_int8",
    "(Tensor x, int group_size=-1) -> (Tensor, Tensor)",
    reference=quantize_int8_reference,
    fake=quantize_int8_fake,
    kernel=quantize_int8_kernel,
)
"""codes, scales = int8 codes of x and their fp32 scales, kernel and reference bit for bit.

x           (..., k) float16, bfloat16 or float32
group_size  columns that share a scale, dividing k; -1 is one scale a row
returns     codes (..., k) int8 in [-127, 127]; scales (..., k / group_size) or (..., 1) float32

NaN or infinity in x makes the scale of its group NaN or infinity. Raises ValueError for a group_size that does not
divide k.
"""

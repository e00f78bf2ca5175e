# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic int8 quantisation of rows or groups of columns (format: formats.int8)."""

import torch

from vllm_superl8.formats import int8
from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream

GROUP_SIZES = (32, 64, 128)


def check_groups(op: str, k: int, group_size: int) -> None:
    """Raise ValueError unless rows of k elements have groups of group_size, one of GROUP_SIZES or -1 (the row)."""
    if k == 0:
        raise ValueError(f"{op}: x has rows of no elements")
    if group_size != -1 and (group_size not in GROUP_SIZES or k % group_size):
        raise ValueError(
            f"{op}: group_size is {group_size} for rows of {k}, wanted -1 (the row) or one of "
            f"{', '.join(map(str, GROUP_SIZES))} that divides them"
        )


def quantize_int8_reference(x, group_size=-1):
    check_groups("quantize_int8", x.shape[-1], group_size)
    dtype_name(x, "quantize_int8")
    return int8.quantize(x, group_size)


def quantize_int8_fake(x, group_size=-1):
    groups = 1 if group_size == -1 else x.shape[-1] // group_size
    return (
        torch.empty(x.shape, dtype=torch.int8, device=x.device),
        torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device),
    )


def quantize_int8_kernel(module, x, group_size=-1):
    check_groups("quantize_int8", x.shape[-1], group_size)
    codes, scales = quantize_int8_fake(x, group_size)
    rows = rows_of(x)
    module.quantize_int8(
        dtype_name(x, "quantize_int8"), ptr(codes), ptr(scales), ptr(rows), *rows.shape, rows.stride(0),
        0 if group_size == -1 else group_size, stream(x),
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

x           (..., k) float16, bfloat16 or float32; rows may be strided
group_size  columns that share a scale: 32, 64 or 128, dividing k; -1 is one scale a row
returns     codes (..., k) int8 in [-127, 127]; scales (..., k / group_size) or (..., 1) float32

scale = max|x| / 127 (1 for zeros), code = round-half-even(x / scale). NaN or infinity in a group makes its scale NaN or
infinity and its codes 0, so that products with it are NaN.
Raises TypeError for other dtypes, ValueError for a group_size that does not divide k.
"""

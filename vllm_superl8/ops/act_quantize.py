# SPDX-License-Identifier: BSD-3-Clause
"""Gated activations that give int8 codes at once, for layers that would only quantise what the activation writes."""

import torch

from vllm_superl8.ops.activation import GATED, act_and_mul_kernel, act_and_mul_reference
from vllm_superl8.ops.quantize import (
    check_groups,
    quantize_int8_fake,
    quantize_int8_kernel,
    quantize_int8_reference,
)
from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream

MOST_ROW_BYTES = 47 * 1024
"""Bytes of a row that wait in shared memory for the row's scale; longer rows take two kernels."""


def _empty(x):
    return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)


def _check(x, activation, group_size):
    if activation not in GATED:
        raise ValueError(f"act_and_mul_quantize: there is none called {activation!r}; known are {', '.join(GATED)}")
    if x.shape[-1] % 2:
        raise ValueError(f"act_and_mul_quantize: rows of {x.shape[-1]} have no two halves")
    check_groups("act_and_mul_quantize", x.shape[-1] // 2, group_size)


def act_and_mul_quantize_reference(x, activation, a=0.0, b=0.0, c=0.0, group_size=-1):
    _check(x, activation, group_size)
    out = _empty(x)
    act_and_mul_reference(out, x, activation, a, b, c)
    return quantize_int8_reference(out, group_size)


def act_and_mul_quantize_fake(x, activation, a=0.0, b=0.0, c=0.0, group_size=-1):
    return quantize_int8_fake(_empty(x), group_size)


def act_and_mul_quantize_kernel(module, x, activation, a=0.0, b=0.0, c=0.0, group_size=-1):
    _check(x, activation, group_size)
    n = x.shape[-1] // 2
    if group_size in (-1, n) and n * x.element_size() > MOST_ROW_BYTES:
        out = _empty(x)
        act_and_mul_kernel(module, out, x, activation, a, b, c)
        return quantize_int8_kernel(module, out, group_size)
    codes, scales = act_and_mul_quantize_fake(x, activation, a, b, c, group_size)
    rows = rows_of(x)
    module.act_and_mul_quantize(
        activation, dtype_name(x, "act_and_mul_quantize"), ptr(codes), ptr(scales), ptr(rows), rows.shape[0], n,
        rows.stride(0), a, b, c, max(group_size, 0), stream(x),
    )  # fmt: skip
    return codes, scales


act_and_mul_quantize = register(
    "act_and_mul_quantize",
    "(Tensor x, str activation, float a=0.0, float b=0.0, float c=0.0, int group_size=-1) -> (Tensor, Tensor)",
    reference=act_and_mul_quantize_reference,
    fake=act_and_mul_quantize_fake,
    kernel=act_and_mul_quantize_kernel,
)
"""codes, scales = quantize_int8(act_and_mul(x), group_size), in one pass over x.

x           (..., 2 n) as in act_and_mul, whose activation, a, b and c these are
group_size  as in quantize_int8, of the n columns that are left
returns     codes (..., n) int8; scales (..., n / group_size) or (..., 1) float32

The result is that of the two ops bit for bit, reference as reference and kernel as kernel: what the activation gives is
rounded to the dtype of x before it is quantised. Raises as they do.
"""

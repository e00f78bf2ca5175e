# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 matrix product by dp4a, int8 x int8 with fp32 scales."""

import math

import torch

from vllm_superl8.device import multiprocessors
from vllm_superl8.ops import linear
from vllm_superl8.ops.fp16_product import fp16_product
from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, register, stream
from vllm_superl8.ops.tuning import tuning_for

GROUP_SIZE = 128
"""Columns that share a scale where a row has more than one."""

EXACT_K = 1024
"""128 * 128 * 1024 = 2^24: sums of this many products are exact in float32."""

MOST_K = 131068
"""Largest k: 128 * 128 * k stays below 2^31, so that no int32 sum overflows whatever the codes."""


def check_shapes(op: str, x, x_scales, weight, weight_scales, out_dtype) -> None:
    """Raise ValueError or TypeError for operands that are no product; weight (..., n, k)."""
    k, groups = x.shape[-1], weight_scales.shape[-1]
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise TypeError(f"{op}: x is {x.dtype} and weight {weight.dtype}, wanted int8 codes (quantize_int8 makes them)")
    if x_scales.dtype != torch.float32 or weight_scales.dtype != torch.float32:
        raise TypeError(f"{op}: scales are {x_scales.dtype} and {weight_scales.dtype}, wanted float32")
    if out_dtype not in DTYPE_NAMES:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, wanted one of {', '.join(map(str, DTYPE_NAMES))}")
    if weight.shape[-1] != k:
        raise ValueError(f"{op}: x has rows of {k} and weight of {weight.shape[-1]}, wanted the same")
    if not 4 <= k <= MOST_K or k % 4:
        raise ValueError(f"{op}: k is {k}, wanted a multiple of 4 from 4 to {MOST_K}; pad both sides with zeros")
    if x_scales.shape[-1] != groups or not (groups == 1 or groups * GROUP_SIZE == k):
        raise ValueError(
            f"{op}: {x_scales.shape[-1]} scales a row of x and {groups} a row of weight for k of {k}, wanted one each, "
            f"or one for every {GROUP_SIZE} columns each; quantise both with the same group_size"
        )
    if x_scales.shape[:-1] != x.shape[:-1] or weight_scales.shape[:-1] != weight.shape[:-1]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} has scales {tuple(x_scales.shape)} and weight {tuple(weight.shape)} "
            f"{tuple(weight_scales.shape)}, wanted those of every row"
        )


def check_weight(op: str, weight, weight_scales) -> None:
    """Raise ValueError for weights that no kernel takes as they are, and that are too large to copy at each call."""
    if not (weight.is_contiguous() and weight_scales.is_contiguous()):
        raise ValueError(f"{op}: weight or its scales are not contiguous; store them with .contiguous()")


def w8a8_gemm_reference(x, x_scales, weight, weight_scales, bias, out_dtype):
    check_shapes("w8a8_gemm", x, x_scales, weight, weight_scales, out_dtype)
    rows = x.reshape(-1, x.shape[-1])
    groups = weight_scales.shape[-1]
    if groups == 1:
        total = sum(
            (a.float() @ w.float().T).double()
            for a, w in zip(rows.split(EXACT_K, 1), weight.split(EXACT_K, 1), strict=True)
        )
        total = total.float() * x_scales.reshape(-1, 1) * weight_scales.T
    else:
        # Sums within a group are exact and groups are added in order: a row's bits do not depend on the batch.
        total = torch.zeros(rows.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        scales = x_scales.reshape(-1, groups)
        for group, (a, w) in enumerate(zip(rows.split(GROUP_SIZE, 1), weight.split(GROUP_SIZE, 1), strict=True)):
            total += (a.float() @ w.float().T) * (scales[:, group, None] * weight_scales[:, group])
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def w8a8_gemm_fake(x, x_scales, weight, weight_scales, bias, out_dtype):
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)


def w8a8_gemm_kernel(module, x, x_scales, weight, weight_scales, bias, out_dtype):
    check_shapes("w8a8_gemm", x, x_scales, weight, weight_scales, out_dtype)
    check_weight("w8a8_gemm", weight, weight_scales)
    if bias is not None:
        bias = bias.to(out_dtype).contiguous()
    out = w8a8_gemm_fake(x, x_scales, weight, weight_scales, bias, out_dtype)
    x, x_scales = x.contiguous(), x_scales.contiguous()
    (n, k), groups = weight.shape, weight_scales.shape[-1]
    m = x.numel() // k
    arguments = (
        DTYPE_NAMES[out_dtype], ptr(out), ptr(x), ptr(x_scales), ptr(weight), ptr(weight_scales), ptr(bias),
        m, n, k, groups,
    )  # fmt: skip
    units, tuning = multiprocessors(x.device), tuning_for(x.device)
    if m <= tuning.gemv_most_rows:
        module.w8a8_gemv(linear.k_warps_for(n, k, units), *arguments, stream(x))
        return out
    aligned = k % 16 == 0 and ptr(x) % 16 == 0 and ptr(weight) % 16 == 0
    plan = linear.plan_for(m, n, k, groups > 1, units, aligned, tuning)
    if plan.tile is None:
        fp16_product(module, x.view(m, k), x_scales.view(m, groups), weight, weight_scales, bias, out.view(m, n))
    elif plan.k_split is None:
        module.w8a8_gemm(plan.tile, *arguments, stream(x))
    else:
        partial = torch.empty(math.ceil(k / plan.k_split), m, n, dtype=torch.int32, device=x.device)
        module.w8a8_gemm_split(plan.tile, *arguments, ptr(partial), plan.k_split, stream(x))
    return out


w8a8_gemm = register(
    "w8a8_gemm",
    "(Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales, Tensor? bias, ScalarType out_dtype) -> Tensor",
    reference=w8a8_gemm_reference,
    fake=w8a8_gemm_fake,
    kernel=w8a8_gemm_kernel,
)
"""out = (x * x_scales) @ (weight * weight_scales).T + bias.

x              (..., k) int8, k a multiple of 4 up to 131068
x_scales       (..., groups) float32
weight         (n, k) int8, contiguous
weight_scales  (n, groups) float32, contiguous; groups = 1 or k / 128 as in x_scales
bias           (n), any float dtype (rounded to out_dtype first), or None
returns        (..., n) in out_dtype: float16, bfloat16 or float32

Sums within a group (or row) are exact integers; they are scaled in float32, groups are added in float32, and the
result is rounded once. Deterministic. With one scale a row, a row of x gives the same bits in any batch; with groups
the order of the sum, and so its last bit, differs between the kernels that ops/linear.py chooses from. Where
``superl8 tune`` found fp16 matrix products faster, those of many rows round like ops/fp16_product.py.
Raises TypeError for wrong dtypes, ValueError for shapes that do not fit or weights that are not contiguous.
"""

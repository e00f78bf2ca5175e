# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 matrix product by dp4a."""

import torch

from vllm_superl8.ops.registry import DTYPE_NAMES, ptr, register, stream

EXACT_K = 1024
"""127 * 127 * 1024 < 2^24: sums of this many products are exact in float32."""


def _check(x, x_scales, weight, weight_scales):
    k = x.shape[-1]
    if weight.shape[-1] != k or k % 4:
        raise ValueError(f"w8a8_gemm: x has k of {k}, weight {weight.shape[-1]}; wanted the same, and a multiple of 4")
    groups = weight_scales.shape[-1]
    if x_scales.shape[-1] != groups or groups not in (1, k // 128) or (groups > 1 and k % 128):
        raise ValueError(
            f"w8a8_gemm: {x_scales.shape[-1]} scales a row of x and {groups} a row of weight for k of {k}; wanted one "
            "each, or one for every 128 columns each"
        )


def w8a8_gemm_reference(x, x_scales, weight, weight_scales, bias, out_dtype):
    _check(x, x_scales, weight, weight_scales)
    rows = x.reshape(-1, x.shape[-1])
    groups = weight_scales.shape[-1]
    if groups == 1:
        total = sum(
            (a.float() @ w.float().T).double()
            for a, w in zip(rows.split(EXACT_K, 1), weight.split(EXACT_K, 1), strict=True)
        )
        total = total.float() * x_scales.reshape(-1, 1) * weight_scales.T
    else:
        size = x.shape[-1] // groups
        scaled_x = rows.unflatten(-1, (groups, size)).float() * x_scales.reshape(-1, groups, 1)
        scaled_w = weight.unflatten(-1, (groups, size)).float() * weight_scales.unsqueeze(-1)
        total = scaled_x.flatten(1) @ scaled_w.flatten(1).T
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def w8a8_gemm_fake(x, x_scales, weight, weight_scales, bias, out_dtype):
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype, device=x.device)


def w8a8_gemm_kernel(module, x, x_scales, weight, weight_scales, bias, out_dtype):
    _check(x, x_scales, weight, weight_scales)
    if not weight.is_contiguous():
        raise ValueError("w8a8_gemm: weight is not contiguous")
    if bias is not None and bias.dtype != out_dtype:
        bias = bias.to(out_dtype)
    out = w8a8_gemm_fake(x, x_scales, weight, weight_scales, bias, out_dtype)
    rows, row_scales = x.contiguous(), x_scales.contiguous()
    k = x.shape[-1]
    module.w8a8_gemm(
        DTYPE_NAMES[out_dtype], ptr(out), ptr(rows), ptr(row_scales), ptr(weight), ptr(weight_scales), ptr(bias),
        x.numel() // k, weight.shape[0], k, weight_scales.shape[-1], stream(x),
    )  # fmt: skip
    return out


w8a8_gemm = register(
    "w8a8_gemm",
    "(Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales, Tensor? bias, ScalarType out_dtype) -> Tensor",
    reference=w8a8_gemm_reference,
    fake=w8a8_gemm_fake,
    kernel=w8a8_gemm_kernel,
)
"""out = (x * x_scales) @ (weight * weight_scales).T + bias.

x              (..., k) int8, k a multiple of 4
x_scales       (..., groups) float32
weight         (n, k) int8, contiguous
weight_scales  (n, groups) float32, groups = 1 or k / 128 as in x_scales
bias           (n) or None
returns        (..., n) in out_dtype (float16, bfloat16 or float32)

Sums within a group are exact integers; groups are added in float32. Deterministic. Raises ValueError for shapes that do
not fit.
"""

# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 product of routed tokens with their experts, and the weighted sum of what the experts gave."""

import torch

from vllm_superl8.ops.gemm import w8a8_gemm_reference
from vllm_superl8.ops.registry import DTYPE_NAMES, dtype_name, ptr, register, stream


def _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat):
    if x.shape[0] * x_repeat != expert_ids.numel():
        raise ValueError(f"w8a8_moe_gemm: {x.shape[0]} rows of x, x_repeat {x_repeat}, {expert_ids.numel()} expert ids")
    if weight.shape[2] != x.shape[1] or x_scales.shape[1] != weight_scales.shape[2]:
        raise ValueError(
            f"w8a8_moe_gemm: x {tuple(x.shape)} with scales {tuple(x_scales.shape)} does not fit weight "
            f"{tuple(weight.shape)} with scales {tuple(weight_scales.shape)}"
        )


def w8a8_moe_gemm_reference(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype):
    _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat)
    out = torch.zeros(expert_ids.numel(), weight.shape[1], dtype=out_dtype, device=x.device)
    for expert in range(weight.shape[0]):
        rows = (expert_ids == expert).nonzero().flatten()
        if rows.numel():
            source = rows // x_repeat
            out[rows] = w8a8_gemm_reference(
                x[source], x_scales[source], weight[expert], weight_scales[expert], None, out_dtype
            )
    return out


def w8a8_moe_gemm_fake(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype):
    return torch.empty(expert_ids.numel(), weight.shape[1], dtype=out_dtype, device=x.device)


def w8a8_moe_gemm_kernel(module, x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype):
    _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat)
    out = w8a8_moe_gemm_fake(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype)
    x, x_scales, expert_ids = x.contiguous(), x_scales.contiguous(), expert_ids.int().contiguous()
    num_experts, n, k = weight.shape
    module.w8a8_moe_gemm(
        DTYPE_NAMES[out_dtype], ptr(out), ptr(x), ptr(x_scales), ptr(weight), ptr(weight_scales), ptr(expert_ids),
        expert_ids.numel(), n, k, weight_scales.shape[2], num_experts, x_repeat, stream(x),
    )  # fmt: skip
    return out


w8a8_moe_gemm = register(
    "w8a8_moe_gemm",
    "(Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales, Tensor expert_ids, int x_repeat, "
    "ScalarType out_dtype) -> Tensor",
    reference=w8a8_moe_gemm_reference,
    fake=w8a8_moe_gemm_fake,
    kernel=w8a8_moe_gemm_kernel,
)
"""out[r] = (x * x_scales)[r // x_repeat] @ (weight * weight_scales)[expert_ids[r]].T.

x              (rows / x_repeat, k) int8, k a multiple of 4; x_scales (.., groups) float32, groups 1 or k / 128
weight         (num_experts, n, k) int8; weight_scales (num_experts, n, groups) float32
expert_ids     (rows) int32; an id that is no expert's gives zeros
x_repeat       how many consecutive rows share a row of x (top-k of the router, or 1)
returns        (rows, n) in out_dtype
"""


def moe_sum_reference(y, topk_weights):
    return (y.float() * topk_weights.unsqueeze(-1)).sum(1).to(y.dtype)


def moe_sum_fake(y, topk_weights):
    return torch.empty(y.shape[0], y.shape[2], dtype=y.dtype, device=y.device)


def moe_sum_kernel(module, y, topk_weights):
    out, y, weights = moe_sum_fake(y, topk_weights), y.contiguous(), topk_weights.float().contiguous()
    module.moe_sum(dtype_name(y, "moe_sum"), ptr(out), ptr(y), ptr(weights), *y.shape, stream(y))
    return out


moe_sum = register(
    "moe_sum",
    "(Tensor y, Tensor topk_weights) -> Tensor",
    reference=moe_sum_reference,
    fake=moe_sum_fake,
    kernel=moe_sum_kernel,
)
"""out = sum over experts of y * topk_weights: y (tokens, topk, n), topk_weights (tokens, topk) -> (tokens, n)."""

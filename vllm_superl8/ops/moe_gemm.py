# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 product of routed rows with their experts, and the weighted sum of what the experts gave."""

import torch

from vllm_superl8.device import multiprocessors
from vllm_superl8.ops import linear
from vllm_superl8.ops.gemm import check_shapes, check_weight, w8a8_gemm_reference
from vllm_superl8.ops.registry import DTYPE_NAMES, dtype_name, ptr, register, stream


def _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype):
    check_shapes("w8a8_moe_gemm", x, x_scales, weight, weight_scales, out_dtype)
    if x.dim() != 2 or weight.dim() != 3:
        raise ValueError(
            f"w8a8_moe_gemm: x {tuple(x.shape)} and weight {tuple(weight.shape)}, wanted (rows, k) and "
            "(num_experts, n, k)"
        )
    if expert_ids.dtype != torch.int32:
        raise TypeError(f"w8a8_moe_gemm: expert_ids are {expert_ids.dtype}, wanted int32")
    if x_repeat < 1 or x.shape[0] * x_repeat != expert_ids.numel():
        raise ValueError(
            f"w8a8_moe_gemm: {expert_ids.numel()} expert ids for {x.shape[0]} rows of x and x_repeat {x_repeat}, "
            "wanted their product"
        )


def w8a8_moe_gemm_reference(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype):
    _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype)
    expert_ids = expert_ids.flatten()
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
    _check(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype)
    check_weight("w8a8_moe_gemm", weight, weight_scales)
    out = w8a8_moe_gemm_fake(x, x_scales, weight, weight_scales, expert_ids, x_repeat, out_dtype)
    x, x_scales, expert_ids = x.contiguous(), x_scales.contiguous(), expert_ids.contiguous()
    (num_experts, n, k), groups, rows = weight.shape, weight_scales.shape[-1], expert_ids.numel()
    arguments = (
        DTYPE_NAMES[out_dtype], ptr(out), ptr(x), ptr(x_scales), ptr(weight), ptr(weight_scales), ptr(expert_ids),
        rows, n, k, groups, num_experts, x_repeat,
    )  # fmt: skip
    aligned = k % 16 == 0 and ptr(x) % 16 == 0 and ptr(weight) % 16 == 0
    tile = linear.moe_tile_for(rows, num_experts, groups > 1) if aligned else None
    if tile is None:
        module.w8a8_moe_gemv(linear.k_warps_for(n, k, multiprocessors(x.device), rows), *arguments, stream(x))
    else:
        tiles = rows // tile.m + min(rows, num_experts + 1)  # the most that any routing needs
        tile_rows = torch.empty(tiles * tile.m, dtype=torch.int32, device=x.device)
        tile_expert = torch.empty(tiles, dtype=torch.int32, device=x.device)
        module.w8a8_moe_gemm(tile.name, *arguments, ptr(tile_rows), ptr(tile_expert), tiles, stream(x))
    return out


w8a8_moe_gemm = register(
    "w8a8_moe_gemm",
    "(Tensor x, Tensor x_scales, Tensor weight, Tensor weight_scales, Tensor expert_ids, int x_repeat, "
    "ScalarType out_dtype) -> Tensor",
    reference=w8a8_moe_gemm_reference,
    fake=w8a8_moe_gemm_fake,
    kernel=w8a8_moe_gemm_kernel,
)
"""out[r] = (x * x_scales)[r // x_repeat] @ (weight * weight_scales)[expert_ids[r]].T, arithmetic as in w8a8_gemm.

x              (rows / x_repeat, k) int8, k a multiple of 4 up to 131068; x_scales (.., groups) float32
weight         (num_experts, n, k) int8, weight_scales (num_experts, n, groups) float32, both contiguous;
               groups 1 or k / 128; up to 4095 experts
expert_ids     rows ids in any shape, int32; rows of an id outside [0, num_experts), such as -1, become zeros
x_repeat       how many consecutive rows share a row of x (top-k of the router, or 1)
returns        (rows, n) in out_dtype

Nothing is read back to the host and launches depend on shapes only. Deterministic.
Raises TypeError for wrong dtypes, ValueError for shapes that do not fit.
"""


def _check_sum(y, topk_weights):
    if y.dim() != 3 or topk_weights.shape != y.shape[:2]:
        raise ValueError(
            f"moe_sum: y {tuple(y.shape)} with topk_weights {tuple(topk_weights.shape)}, wanted (tokens, topk, n) and "
            "(tokens, topk)"
        )


def moe_sum_reference(y, topk_weights):
    _check_sum(y, topk_weights)
    total = torch.zeros(y.shape[0], y.shape[2], dtype=torch.float32, device=y.device)
    for j in range(y.shape[1]):
        total = total + y[:, j].float() * topk_weights[:, j, None].float()
    return total.to(y.dtype)


def moe_sum_fake(y, topk_weights):
    return torch.empty(y.shape[0], y.shape[2], dtype=y.dtype, device=y.device)


def moe_sum_kernel(module, y, topk_weights):
    _check_sum(y, topk_weights)
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
"""out[t] = sum over j of topk_weights[t, j] * y[t, j], in that order, in float32: kernel and reference bit for bit.

y             (tokens, topk, n) float16, bfloat16 or float32
topk_weights  (tokens, topk), taken as float32
returns       (tokens, n), dtype of y

Raises ValueError for shapes that do not fit.
"""

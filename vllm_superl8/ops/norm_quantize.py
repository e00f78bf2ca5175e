# SPDX-License-Identifier: BSD-3-Clause
"""RMS norms that give int8 codes at once, for layers that would only quantise what the norm writes."""

import torch

from vllm_superl8.ops.norm import fused_add_rms_norm_reference, rms_norm_reference, weight_arguments
from vllm_superl8.ops.quantize import check_groups, quantize_int8_fake, quantize_int8_reference
from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream


def rms_norm_quantize_reference(x, weight, eps, weight_offset=0.0, group_size=-1):
    return quantize_int8_reference(rms_norm_reference(x, weight, eps, weight_offset), group_size)


def rms_norm_quantize_fake(x, weight, eps, weight_offset=0.0, group_size=-1):
    return quantize_int8_fake(x, group_size)


def rms_norm_quantize_kernel(module, x, weight, eps, weight_offset=0.0, group_size=-1):
    codes, scales, _ = _launch(module, "rms_norm_quantize", x, None, weight, eps, weight_offset, group_size)
    return codes, scales


def add_rms_norm_quantize_reference(x, residual, weight, eps, weight_offset=0.0, group_size=-1):
    total = residual.clone()
    normalised = fused_add_rms_norm_reference(x, total, weight, eps, weight_offset)
    return *quantize_int8_reference(normalised, group_size), total


def add_rms_norm_quantize_fake(x, residual, weight, eps, weight_offset=0.0, group_size=-1):
    return *quantize_int8_fake(x, group_size), torch.empty(x.shape, dtype=x.dtype, device=x.device)


def add_rms_norm_quantize_kernel(module, x, residual, weight, eps, weight_offset=0.0, group_size=-1):
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm_quantize: residual is {tuple(residual.shape)} {residual.dtype} for x of {tuple(x.shape)} "
            f"{x.dtype}, wanted the same"
        )
    return _launch(module, "add_rms_norm_quantize", x, residual.contiguous(), weight, eps, weight_offset, group_size)


def _launch(module, op, x, residual, weight, eps, weight_offset, group_size):
    check_groups(op, x.shape[-1], group_size)
    rows = rows_of(x)
    codes, scales = quantize_int8_fake(x, group_size)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    module.rms_norm_quantize(
        dtype_name(x, op), ptr(codes), ptr(scales), ptr(rows), ptr(residual), ptr(total),
        *weight_arguments(op, x, weight), *rows.shape, rows.stride(0), eps, weight_offset, max(group_size, 0),
        stream(x),
    )  # fmt: skip
    return codes, scales, total


rms_norm_quantize = register(
    "rms_norm_quantize",
    "(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, int group_size=-1) -> (Tensor, Tensor)",
    reference=rms_norm_quantize_reference,
    fake=rms_norm_quantize_fake,
    kernel=rms_norm_quantize_kernel,
)
"""codes, scales = quantize_int8(rms_norm(x, weight, eps, weight_offset), group_size), in one pass over x.

Arguments as those of rms_norm and quantize_int8. The result is that of the two ops bit for bit, reference as reference
and kernel as kernel: what the norm gives is rounded to the dtype of x before it is quantised. (Kernel and reference of
rms_norm add squares in different orders, so a code may differ by one between them.)
"""

add_rms_norm_quantize = register(
    "add_rms_norm_quantize",
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0.0, int group_size=-1) -> "
    "(Tensor, Tensor, Tensor)",
    reference=add_rms_norm_quantize_reference,
    fake=add_rms_norm_quantize_fake,
    kernel=add_rms_norm_quantize_kernel,
)
"""codes, scales, total: total = x + residual rounded to their dtype, the others as rms_norm_quantize(total, ...).

residual  (..., n) shape and dtype of x; it is not changed, unlike by fused_add_rms_norm
Bit for bit what fused_add_rms_norm and quantize_int8 give. Raises ValueError for another residual.
"""

# SPDX-License-Identifier: BSD-3-Clause
"""RMS normalisation, plain or with the residual added first (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch

from vllm_superl8.ops.registry import dtype_name, ptr, register, rows_of, stream


def rms_norm_reference(x, weight, eps, weight_offset=0.0):
    v = x.float()
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        v = v * (weight.float() + weight_offset)
    return v.to(x.dtype)


def weight_arguments(op: str, x, weight) -> tuple[int, bool]:
    """Address of a norm's weight, and whether it is float32 beside an x that is not.

    Raises TypeError for other mixtures, ValueError for weights of another shape.
    """
    if weight is None:
        return 0, False
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{op}: weight is {weight.dtype} for x of {x.dtype}, wanted that or float32")
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"{op}: weight is {tuple(weight.shape)} for rows of {x.shape[-1]}, wanted one a column")
    return ptr(weight), weight.dtype == torch.float32


def rms_norm_kernel(module, x, weight, eps, weight_offset=0.0):
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    module.rms_norm(
        dtype_name(x, "rms_norm"), ptr(out), ptr(rows), 0, *weight_arguments("rms_norm", x, weight),
        rows.shape[0], rows.shape[1], rows.stride(0), eps, weight_offset, stream(x),
    )  # fmt: skip
    return out


def fused_add_rms_norm_reference(x, residual, weight, eps, weight_offset=0.0):
    residual.copy_((x.float() + residual.float()).to(x.dtype))
    total = residual.float()
    total = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        total = total * (weight.float() + weight_offset)
    return total.to(x.dtype)


def fused_add_rms_norm_kernel(module, x, residual, weight, eps, weight_offset=0.0):
    if not residual.is_contiguous():
        raise ValueError("fused_add_rms_norm: residual is not contiguous; pass residual.contiguous()")
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    module.rms_norm(
        dtype_name(x, "fused_add_rms_norm"), ptr(out), ptr(rows), ptr(residual),
        *weight_arguments("fused_add_rms_norm", x, weight), rows.shape[0], rows.shape[1], rows.stride(0), eps,
        weight_offset, stream(x),
    )  # fmt: skip
    return out


def _like_x(x, *_):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


rms_norm = register(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps, float weight_offset=0.0) -> Tensor",
    reference=rms_norm_reference,
    fake=_like_x,
    kernel=rms_norm_kernel,
)
"""out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), computed in fp32.

x              (..., n) float16, bfloat16 or float32
weight         (n) dtype of x or float32, or None
weight_offset  1.0 for Gemma's norms, whose weights are stored minus one
returns        (..., n), dtype of x, contiguous

The kernel raises TypeError and ValueError for other weights.
"""

fused_add_rms_norm = register(
    "fused_add_rms_norm",
    "(Tensor x, Tensor(a!) residual, Tensor? weight, float eps, float weight_offset=0.0) -> Tensor",
    reference=fused_add_rms_norm_reference,
    fake=_like_x,
    kernel=fused_add_rms_norm_kernel,
)
"""residual += x, then rms_norm of the rounded sum; arguments as rms_norm, residual (..., n) contiguous, dtype of x.

Raises ValueError if residual is not contiguous.
"""

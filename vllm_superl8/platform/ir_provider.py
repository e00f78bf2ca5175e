# SPDX-License-Identifier: BSD-3-Clause
"""Our norms as a provider of vLLM's IR ops (name: superl8)."""

import torch
from torch import Tensor
from vllm import ir

from vllm_superl8.ops import norm


def _kernel_serves(x: Tensor, weight: Tensor | None, *_) -> bool:
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def _serves_rms_norm(x, weight, epsilon, variance_size=None) -> bool:
    return variance_size is None and _kernel_serves(x, weight)


def _serves_fused_add(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    return variance_size is None and _kernel_serves(x, weight) and x_residual.is_contiguous()


@ir.ops.rms_norm.register_impl("superl8", supports_args=_serves_rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return norm.rms_norm(x, weight, epsilon)


@ir.ops.fused_add_rms_norm.register_impl("superl8", supports_args=_serves_fused_add, inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    return norm.fused_add_rms_norm(x, x_residual, weight, epsilon), x_residual

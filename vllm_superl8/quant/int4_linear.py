# SPDX-License-Identifier: BSD-3-Clause
"""W4A8 linear layers: 4-bit weights in groups, decoded as they are multiplied with int8 activations."""

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.utils import replace_parameter

from vllm_superl8.formats import int4
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.ops.block_gemm import block_gemm
from vllm_superl8.ops.quantize import quantize_int8
from vllm_superl8.quant.linear import Int8LinearMethod


def planes(layer: torch.nn.Module) -> tuple[list[torch.Tensor], str]:
    """A layer's weight as block_gemm takes it, and its format."""
    zeros = getattr(layer, "weight_zero_point", None)
    if zeros is None:
        return [layer.weight, layer.weight_scale], "int4"
    return [layer.weight, layer.weight_scale, zeros], "int4_zero"


@register_weight_loader_v2_supported_method
class Int4LinearMethod(Int8LinearMethod):
    """y = dequantise(4-bit weight) @ x, 16-bit weights being rounded to int4 with zeros as they stream in.

    group_size  columns that share a scale and a zero: 32, 64 or 128, dividing K

    Activations have a scale for every 32 columns, as in all products with weights in their own bytes.
    """

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.dtype == torch.uint8:
            return  # quantised while loading; vLLM calls this again for the whole model
        codes, scales, zeros = int4.quantize(layer.weight.data, self.group_size, symmetric=False)
        replace_parameter(layer, "weight", codes)
        layer.register_parameter("weight_scale", Parameter(scales, requires_grad=False))
        layer.register_parameter("weight_zero_point", Parameter(zeros, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = quantize_int8(x, UNIT)
        return block_gemm(codes, scales, *planes(layer), bias, x.dtype)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the dtype that it was loaded in."""
        return int4.dequantize(planes(layer)[0]).to(layer.orig_dtype)

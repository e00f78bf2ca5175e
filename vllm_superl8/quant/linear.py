# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 linear layers from 16-bit weights, quantised as they stream in."""

import torch
from torch.nn import Parameter
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_superl8.ops.gemm import w8a8_gemm
from vllm_superl8.ops.quantize import quantize_int8

logger = init_logger(__name__)


def group_size_for(k: int, group_size: int, name: str) -> int:
    """The group size that a layer with this K can have: the wanted one, else -1 (one scale a row), which is logged."""
    if group_size == -1 or k % group_size == 0:
        return group_size
    logger.warning("superl8: %s has one scale a row, its K of %d is not a multiple of %d", name, k, group_size)
    return -1


@register_weight_loader_v2_supported_method
class Int8LinearMethod(LinearMethodBase):
    """y = dequantise(int8 weight) @ x, activations quantised per call.

    group_size  -1: one scale a token and weight row; 128: one a token or row and 128 columns

    Weights are created on the meta device and filled, quantised and released one layer at a time
    (vLLM's layerwise loading), so that the peak is the int8 model plus one 16-bit layer.
    """

    uses_meta_device = True

    def __init__(self, group_size: int, prefix: str):
        super().__init__()
        self.group_size = group_size
        self.prefix = prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        weight = ModelWeightParameter(
            data=torch.empty(
                layer.output_size_per_partition, input_size_per_partition, device="meta", dtype=params_dtype
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs.get("weight_loader"),
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.dtype == torch.int8:
            return  # quantised while loading; vLLM calls this again for the whole model
        group_size = group_size_for(layer.weight.shape[1], self.group_size, self.prefix)
        weight, scales = quantize_int8(layer.weight.data, group_size)
        replace_parameter(layer, "weight", weight)
        layer.register_parameter("weight_scale", Parameter(scales, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        k, groups = layer.weight.shape[1], layer.weight_scale.shape[1]
        codes, scales = quantize_int8(x, -1 if groups == 1 else k // groups)
        return w8a8_gemm(codes, scales, layer.weight, layer.weight_scale, bias, x.dtype)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the dtype that it was loaded in."""
        n, k = layer.weight.shape
        groups = layer.weight_scale.shape[1]
        weight = layer.weight.float().view(n, groups, k // groups) * layer.weight_scale.unsqueeze(-1)
        return weight.view(n, k).to(layer.orig_dtype)

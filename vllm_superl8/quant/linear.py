# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 linear layers from 16-bit weights, quantised as they stream in."""

from collections.abc import Callable

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_superl8.formats import int8
from vllm_superl8.ops.gemm import w8a8_gemm
from vllm_superl8.ops.quantize import quantize_int8


class LinearMethod(LinearMethodBase):
    """What our linear methods share: a layer's sizes are noted on it before it gets its parameters."""

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
        self.create_parameters(layer, input_size, extra_weight_attrs.get("weight_loader"))

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        """Register the parameters that `loader`, vLLM's weight loader of the layer, fills.

        input_size  columns of the weight on all ranks together
        """
        raise NotImplementedError


@register_weight_loader_v2_supported_method
class Int8LinearMethod(LinearMethod):
    """y = dequantise(int8 weight) @ x, activations quantised per call.

    group_size  -1: one scale a token and weight row; 128: one a token or row and 128 columns, K being padded with zeros
                to whole groups

    Weights are created on the meta device and filled, quantised and released one layer at a time
    (vLLM's layerwise loading), so that the peak is the int8 model plus one 16-bit layer.
    """

    uses_meta_device = True

    def __init__(self, group_size: int):
        super().__init__()
        self.group_size = group_size

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        shape = (layer.output_size_per_partition, layer.input_size_per_partition)
        weight = ModelWeightParameter(
            data=torch.empty(shape, device="meta", dtype=layer.orig_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=loader,
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.dtype == torch.int8:
            return  # quantised while loading; vLLM calls this again for the whole model
        padding = -layer.weight.shape[1] % max(1, self.group_size)
        weight, scales = quantize_int8(torch.nn.functional.pad(layer.weight.data, (0, padding)), self.group_size)
        replace_parameter(layer, "weight", weight)
        layer.register_parameter("weight_scale", Parameter(scales, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        padding = layer.weight.shape[1] - x.shape[-1]
        codes, scales = quantize_int8(torch.nn.functional.pad(x, (0, padding)) if padding else x, self.group_size)
        return w8a8_gemm(codes, scales, layer.weight, layer.weight_scale, bias, x.dtype)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the dtype that it was loaded in."""
        weight = int8.dequantize(layer.weight, layer.weight_scale, layer.orig_dtype)
        return weight[:, : layer.input_size_per_partition]

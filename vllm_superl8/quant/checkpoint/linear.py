# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 linear layers whose codes come from a quantised checkpoint (converted by stream.py)."""

from collections.abc import Callable
from functools import wraps

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.formats import int8
from vllm_superl8.ops.gemm import w8a8_gemm
from vllm_superl8.ops.quantize import quantize_int8
from vllm_superl8.quant.linear import Int8LinearMethod


def checked(weight_loader: Callable) -> Callable:
    """weight_loader, refusing tensors that have not been converted: another dtype would be cast without a word."""

    @wraps(weight_loader)
    def load(param, loaded_weight, *args, **kwargs):
        if loaded_weight.dtype != param.dtype:
            raise ValueError(
                f"superl8: a {loaded_weight.dtype} tensor of shape {list(loaded_weight.shape)} came for a parameter of "
                f"{param.dtype}; quantised checkpoints are read by --load-format auto, safetensors or fastsafetensors"
            )
        return weight_loader(param, loaded_weight, *args, **kwargs)

    return load


@register_weight_loader_v2_supported_method
class CheckpointLinearMethod(Int8LinearMethod):
    """y = dequantise(stored int8 weight) @ x, activations quantised per call.

    parts       the checkpoint's matrices that the layer consists of
    group_size  as in quant.linear; 128 divides K
    shifted     activations are quantised around the middle of their token's range, as asymmetric schemes do: the
                middle's share of the product is added as middle * (sum of the weight's row)
    """

    uses_meta_device = False

    def __init__(self, parts: list[Matrix], group_size: int):
        super().__init__(group_size)
        self.targets = {part.name: group_size for part in parts}
        self.shifted = any(part.shifted for part in parts)

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
        n, k = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = k
        layer.output_size_per_partition = n
        layer.orig_dtype = params_dtype
        loader = checked(extra_weight_attrs["weight_loader"])
        weight = ModelWeightParameter(
            data=torch.empty(n, k, dtype=torch.int8), input_dim=1, output_dim=0, weight_loader=loader
        )
        if self.group_size == -1:
            scales = ChannelQuantScaleParameter(
                data=torch.empty(n, 1, dtype=torch.float32), output_dim=0, weight_loader=loader
            )
        else:
            scales = GroupQuantScaleParameter(
                data=torch.empty(n, k // self.group_size, dtype=torch.float32),
                input_dim=1,
                output_dim=0,
                weight_loader=loader,
            )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scales)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.shifted:
            sums = int8.dequantize(layer.weight.data, layer.weight_scale.data).sum(-1)
            layer.register_parameter("weight_sums", Parameter(sums, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self.shifted:
            return super().apply(layer, x, bias)
        wide = x.float()
        lowest, highest = wide.aminmax(dim=-1, keepdim=True)
        middle = (lowest + highest) / 2
        codes, scales = quantize_int8(wide - middle, self.group_size)
        out = w8a8_gemm(codes, scales, layer.weight, layer.weight_scale, bias, torch.float32)
        return torch.addcmul(out, middle, layer.weight_sums).to(x.dtype)

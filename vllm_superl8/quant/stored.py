# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 and W4A8 layers whose codes and scales come from a ``.superl8`` file: nothing is quantised again."""

from collections.abc import Callable
from typing import NoReturn

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_superl8.quant.int4_linear import Int4LinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod, register_stored


@register_weight_loader_v2_supported_method
class StoredInt8LinearMethod(Int8LinearMethod):
    """As Int8LinearMethod, with weight (n, k) int8 and weight_scale (n, groups) float32 loaded by vLLM's loaders.

    names        tensors of the checkpoint that it takes
    stored       group size of the checkpoint: -1, one scale a row, or 128
    group_size   that it runs with; 128 with one scale a row repeats the scale for each group, which is exact
    """

    uses_meta_device = False

    def __init__(self, names: tuple[str, ...], stored: int, group_size: int, prefix: str):
        super().__init__(group_size)
        self.names, self.stored, self.prefix = names, stored, prefix

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        weight = torch.empty(n, k, dtype=torch.int8)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        if self.stored == -1:
            scales = ChannelQuantScaleParameter(
                data=torch.empty(n, 1, dtype=torch.float32), output_dim=0, weight_loader=loader
            )
        else:
            if k != input_size and k % self.stored:
                _refuse_cut(self.prefix, input_size, self.stored, k)
            groups = -(-k // self.stored)
            scales = GroupQuantScaleParameter(
                data=torch.empty(n, groups, dtype=torch.float32), input_dim=1, output_dim=0, weight_loader=loader
            )
        layer.register_parameter("weight_scale", scales)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.group_size == -1:
            return
        padding = -layer.weight.shape[1] % self.group_size
        if padding:
            replace_parameter(layer, "weight", torch.nn.functional.pad(layer.weight.data, (0, padding)))
        groups = layer.weight.shape[1] // self.group_size
        if layer.weight_scale.shape[1] != groups:
            replace_parameter(layer, "weight_scale", layer.weight_scale.data.repeat(1, groups))


@register_weight_loader_v2_supported_method
class StoredInt4LinearMethod(Int4LinearMethod):
    """As Int4LinearMethod, symmetric: weight (n, k / 2) uint8, two codes a byte, weight_scale (n, groups) float32.

    names        tensors of the checkpoint that it takes
    group_size   32, 64 or 128, dividing k

    The file has codes in two's complement; block_gemm wants them around a zero of 8, which differs in one bit a code.
    """

    uses_meta_device = False

    def __init__(self, names: tuple[str, ...], group_size: int, prefix: str):
        super().__init__(group_size)
        self.names, self.prefix = names, prefix

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        if k % self.group_size:
            _refuse_cut(self.prefix, input_size, self.group_size, k)
        both = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        weight = torch.empty(n, k // 2, dtype=torch.uint8)
        scales = torch.empty(n, k // self.group_size, dtype=torch.float32)
        layer.register_parameter("weight", ModelWeightParameter(data=weight, **both))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, **both))
        layer.in_twos_complement = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.in_twos_complement:  # vLLM may call this again for the whole model
            layer.weight.data.bitwise_xor_(0x88)
            layer.in_twos_complement = False


def _refuse_cut(prefix: str, whole: int, group_size: int, part: int) -> NoReturn:
    raise ValueError(
        f"superl8: {prefix} has {whole} columns in groups of {group_size}, which cannot be cut into parts of {part}; "
        "take a smaller --tensor-parallel-size, or convert the model with another --group"
    )


class StoredInt8MoEMethod(Int8MoEMethod):
    """As Int8MoEMethod, with w13_weight, w2_weight int8 and their scales (experts, n, groups) from the checkpoint.

    names        tensors of the checkpoint that it takes
    group_sizes  of w13 and w2 in the checkpoint
    """

    uses_meta_device = False

    def __init__(self, moe, names: tuple[str, ...], group_sizes: tuple[int, int], prefix: str):
        super().__init__(moe, max(group_sizes), prefix)
        self.names, self.group_sizes = names, group_sizes

    def create_parameters(self, layer: torch.nn.Module, shapes: dict[str, tuple[int, ...]], attrs: dict) -> None:
        for (name, shape), group_size in zip(shapes.items(), self.group_sizes, strict=True):
            if group_size != -1 and shape[-1] % group_size:
                raise ValueError(
                    f"superl8: {self.prefix}.{name} has {shape[-1]} columns on each rank and groups of {group_size}; "
                    "take another --tensor-parallel-size, or convert the model with --group -1"
                )
            register_stored(layer, name, shape, group_size, attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Codes and scales are multiplied as they were loaded."""

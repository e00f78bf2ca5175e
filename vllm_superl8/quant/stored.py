# SPDX-License-Identifier: BSD-3-Clause
"""W8A8 and W4A8 layers whose codes and scales come from a ``.superl8`` file: nothing is quantised again."""

from typing import NoReturn

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from vllm_superl8.formats import int4
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.ops.block_gemm import block_gemm
from vllm_superl8.ops.quantize import quantize_int8
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod


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
        layer.output_size_per_partition = n = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        loader = extra_weight_attrs.get("weight_loader")
        weight = torch.empty(n, input_size_per_partition, dtype=torch.int8)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        if self.stored == -1:
            scales = ChannelQuantScaleParameter(
                data=torch.empty(n, 1, dtype=torch.float32), output_dim=0, weight_loader=loader
            )
        else:
            if input_size_per_partition != input_size and input_size_per_partition % self.stored:
                _refuse_cut(self.prefix, input_size, self.stored, input_size_per_partition)
            groups = -(-input_size_per_partition // self.stored)
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
class StoredInt4LinearMethod(LinearMethodBase):
    """y = dequantise(4-bit weight) @ x: weight (n, k / 2) uint8, two codes a byte, weight_scale (n, groups) float32.

    names        tensors of the checkpoint that it takes
    group_size   32, 64 or 128, dividing k

    The file has codes in two's complement; block_gemm wants them around a zero of 8, which differs in one bit a code.
    """

    def __init__(self, names: tuple[str, ...], group_size: int, prefix: str):
        super().__init__()
        self.names, self.group_size, self.prefix = names, group_size, prefix

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
        layer.input_size_per_partition = k = input_size_per_partition
        layer.output_size_per_partition = n = sum(output_partition_sizes)
        layer.orig_dtype = params_dtype
        if k % self.group_size:
            _refuse_cut(self.prefix, input_size, self.group_size, k)
        both = {"input_dim": 1, "output_dim": 0, "weight_loader": extra_weight_attrs.get("weight_loader")}
        weight = torch.empty(n, k // 2, dtype=torch.uint8)
        scales = torch.empty(n, k // self.group_size, dtype=torch.float32)
        layer.register_parameter("weight", ModelWeightParameter(data=weight, **both))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, **both))
        layer.in_twos_complement = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.in_twos_complement:  # vLLM may call this again for the whole model
            layer.weight.data.bitwise_xor_(0x88)
            layer.in_twos_complement = False

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = quantize_int8(x, UNIT)
        return block_gemm(codes, scales, [layer.weight, layer.weight_scale], "int4", bias, x.dtype)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the model's dtype."""
        return int4.dequantize([layer.weight, layer.weight_scale]).to(layer.orig_dtype)


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

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        if self.moe.has_bias:
            raise ValueError(f"superl8: {self.prefix} has experts with biases, which int8 does not serve")
        shards = 2 if self.moe.is_act_and_mul else 1
        shapes = {
            "w13": (num_experts, shards * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for (name, (experts, n, k)), group_size in zip(shapes.items(), self.group_sizes, strict=True):
            if group_size != -1 and k % group_size:
                raise ValueError(
                    f"superl8: {self.prefix}.{name} has {k} columns on each rank and groups of {group_size}; take "
                    "another --tensor-parallel-size, or convert the model with --group -1"
                )
            groups = 1 if group_size == -1 else k // group_size
            weight = Parameter(torch.empty(experts, n, k, dtype=torch.int8), requires_grad=False)
            scales = Parameter(torch.empty(experts, n, groups, dtype=torch.float32), requires_grad=False)
            kind = FusedMoeWeightScaleSupported.CHANNEL if group_size == -1 else FusedMoeWeightScaleSupported.GROUP
            layer.register_parameter(f"{name}_weight", weight)
            layer.register_parameter(f"{name}_weight_scale", scales)
            set_weight_attrs(weight, extra_weight_attrs)
            set_weight_attrs(scales, {**extra_weight_attrs, "quant_method": kind.value})

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Codes and scales are multiplied as they were loaded."""

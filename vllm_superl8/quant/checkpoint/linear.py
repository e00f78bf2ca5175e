# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers whose codes come from a quantised checkpoint (converted by stream.py): W8A8 and W4A8."""

from collections.abc import Callable
from functools import wraps

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.quant.checkpoint.targets import Target
from vllm_superl8.quant.int4_linear import Int4LinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod, LinearMethod


def checked(weight_loader: Callable, parts: list[Matrix]) -> Callable:
    """weight_loader for tensors made of `parts`, which says what does not fit.

    Tensors that have not been converted are refused: another dtype would be cast without a word.
    """
    names = ", ".join(part.name for part in parts[:4]) + (", ..." if len(parts) > 4 else "")

    @wraps(weight_loader)
    def load(param, loaded_weight, *args, **kwargs):
        what = f"{names}: a {loaded_weight.dtype} tensor of shape {list(loaded_weight.shape)}"
        if loaded_weight.dtype != param.dtype:
            raise ValueError(
                f"{what} came for a parameter of {param.dtype}; quantised checkpoints are read by --load-format auto, "
                "safetensors or fastsafetensors"
            )
        try:
            return weight_loader(param, loaded_weight, *args, **kwargs)
        except (AssertionError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"{what} does not fit a parameter of shape {list(param.shape)} ({error or 'shapes differ'}); does "
                "config.json describe this model?"
            ) from error

    return load


class CheckpointLinearMethod(LinearMethod):
    """What the methods for stored codes share; stands before the arithmetic's class in their bases.

    parts   the checkpoint's matrices that the layer consists of
    target  what they are converted to; groups divide K

    Where the checkpoint quantises activations around a zero point, they are quantised around the middle of their
    token's range: the middle's share of the product is added as middle * (sum of the weight's row).
    """

    uses_meta_device = False

    def __init__(self, parts: list[Matrix], target: Target):
        super().__init__(target.group_size)
        self.parts, self.target = parts, target
        self.targets = {part.name: target for part in parts}
        self.shifted = any(part.shifted for part in parts)

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        loader = checked(loader, self.parts)

        def add(name, kind, dtype, *shape, **dims):
            layer.register_parameter(name, kind(data=torch.empty(*shape, dtype=dtype), weight_loader=loader, **dims))

        both = {"input_dim": 1, "output_dim": 0}
        if self.target.format == "int8":
            add("weight", ModelWeightParameter, torch.int8, n, k, **both)
            if self.group_size == -1:
                add("weight_scale", ChannelQuantScaleParameter, torch.float32, n, 1, output_dim=0)
                return
        else:
            add("weight", ModelWeightParameter, torch.uint8, n, k // 2, **both)
        groups = k // self.group_size
        add("weight_scale", GroupQuantScaleParameter, self.target.scale_dtype, n, groups, **both)
        if self.target.format == "int4_zero":
            add("weight_zero_point", GroupQuantScaleParameter, torch.uint8, n, groups, **both)
        if self.target.ordered:
            columns = torch.arange(k, dtype=torch.int32)  # --load-format dummy leaves it so
            layer.register_parameter(
                "weight_columns",
                PerTensorScaleParameter(data=columns.repeat(len(layer.logical_widths), 1), weight_loader=loader),
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.target.ordered and layer.weight_columns.dim() == 2:
            first = layer.weight_columns[0]
            if not (layer.weight_columns == first).all():
                raise ValueError(
                    f"{', '.join(self.targets)}: their activation orders differ, but they are multiplied as one "
                    'layer; give option weight_bits: --additional-config \'{"superl8": {"weight_bits": 8}}\''
                )
            del layer.weight_columns
            layer.register_parameter("weight_columns", Parameter(first.clone(), requires_grad=False))
        if self.shifted:
            sums = self.dequantize_weight(layer).float().sum(-1)
            layer.register_parameter("weight_sums", Parameter(sums, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.target.ordered:
            x = x.index_select(-1, layer.weight_columns)
        if not self.shifted:
            return super().apply(layer, x, bias)
        wide = x.float()
        lowest, highest = wide.aminmax(dim=-1, keepdim=True)
        middle = (lowest + highest) / 2
        out = super().apply(layer, wide - middle, bias)
        return torch.addcmul(out, middle, layer.weight_sums).to(x.dtype)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k), its columns in the order of its input."""
        weight = super().dequantize_weight(layer)
        if not self.target.ordered:
            return weight
        return torch.empty_like(weight).index_copy_(1, layer.weight_columns.long(), weight)


@register_weight_loader_v2_supported_method
class CheckpointInt8LinearMethod(CheckpointLinearMethod, Int8LinearMethod):
    """y = dequantise(stored int8 weight) @ x, activations quantised per call."""


@register_weight_loader_v2_supported_method
class CheckpointInt4LinearMethod(CheckpointLinearMethod, Int4LinearMethod):
    """y = dequantise(stored 4-bit weight) @ x, activations quantised per call."""


def method(parts: list[Matrix], target: Target) -> CheckpointLinearMethod:
    """The method for a layer made of `parts`."""
    return (CheckpointInt8LinearMethod if target.format == "int8" else CheckpointInt4LinearMethod)(parts, target)

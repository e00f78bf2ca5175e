# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers whose weights stay in the blocks of a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    ReplicatedLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import BasevLLMParameter

from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.formats import blocks
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.formats.gguf_basic import quantize_q8_0
from vllm_superl8.formats.layout import LAYOUTS, Layout
from vllm_superl8.ops.block_gemm import block_gemm
from vllm_superl8.ops.quantize import quantize_int8


class BlockParameter(BasevLLMParameter):
    """What vLLM's loaders see as the layer's weight: collects the parts of this rank, each in its own type.

    parts  first row in the layer to (rows, k) StoredMatrix or plain tensor
    """

    output_dim, input_dim = 0, 1

    def __init__(self, data: torch.Tensor, weight_loader: Callable):
        super().__init__(data=data, weight_loader=weight_loader)
        self.parts: dict[int, torch.Tensor] = {}

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        size = loaded_weight.shape[0] // self.tp_size
        self.parts[0] = loaded_weight.narrow(0, self.tp_rank * size, size)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        size = loaded_weight.shape[1] // self.tp_size
        start = self.tp_rank * size
        stored = isinstance(loaded_weight, StoredMatrix) and self.tp_size > 1
        self.parts[0] = loaded_weight.columns(start, size) if stored else loaded_weight.narrow(1, start, size)

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, *, shard_offset, shard_size, **_) -> None:
        self.parts[shard_offset] = loaded_weight.narrow(0, self.tp_rank * shard_size, shard_size)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, *, shard_offset, shard_size, shard_id, num_heads) -> None:
        rank = self.tp_rank if shard_id == "q" else self.tp_rank // num_heads
        self.parts[shard_offset] = loaded_weight.narrow(0, rank * shard_size, shard_size)


@dataclass(frozen=True)
class Part:
    """Rows of a layer in one format.

    names  the layer's parameters with its planes
    rows   first one and the one after the last
    """

    layout: Layout
    names: tuple[str, ...]
    rows: tuple[int, int]


@register_weight_loader_v2_supported_method
class BlockLinearMethod(LinearMethodBase):
    """y = weight @ x with the weight in its blocks, activations quantised per call and 32 columns.

    A fused layer may hold several types, for each of which its rows are multiplied by themselves. Weights that come as
    floats (F16 tensors, types without a kernel) are rounded to Q8_0.
    """

    def __init__(self, prefix: str):
        super().__init__()
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
        loader = extra_weight_attrs.get("weight_loader")
        if isinstance(layer, ReplicatedLinear):

            def loader(param, loaded_weight):
                param.parts[0] = loaded_weight

        weight = BlockParameter(data=torch.empty(0, dtype=params_dtype), weight_loader=loader)
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = getattr(layer, "weight", None)
        if weight is None:
            return  # done; vLLM may call this again for the whole model
        device, parts = weight.device, weight.parts
        del layer.weight
        rows = 0
        runs: list[tuple[Layout, int, list[list[torch.Tensor]]]] = []
        for start in sorted(parts):
            if start != rows:
                break
            layout, planes = self._planes(parts.pop(start), device)
            if not runs or runs[-1][0] is not layout:
                runs.append((layout, rows, []))
            runs[-1][2].append(planes)
            rows += planes[0].shape[0]
        if parts or rows != layer.output_size_per_partition:
            raise ValueError(
                f"superl8: {self.prefix} has {layer.output_size_per_partition} rows, of which the file gave {rows}; "
                "option activation=group128 loads this model in another way"
            )
        layer.parts = []
        for layout, first, shards in runs:
            names = []
            for number, plane in enumerate(zip(*shards, strict=True)):
                names.append(f"weight_{first}_{number}")
                joined = plane[0] if len(plane) == 1 else torch.cat(plane)
                layer.register_parameter(names[-1], Parameter(joined, requires_grad=False))
            last = first + getattr(layer, names[0]).shape[0]
            layer.parts.append(Part(layout, tuple(names), (first, last)))

    def _planes(self, part: torch.Tensor, device: torch.device) -> tuple[Layout, list[torch.Tensor]]:
        if isinstance(part, StoredMatrix):
            return part.format, blocks.pack(part.blocks.to(device), part.format)
        padded = torch.nn.functional.pad(part.to(device), (0, -part.shape[1] % UNIT))
        return LAYOUTS["q8_0"], quantize_q8_0(padded)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        padding = -x.shape[-1] % UNIT
        codes, scales = quantize_int8(torch.nn.functional.pad(x, (0, padding)) if padding else x, UNIT)
        outputs = [
            block_gemm(
                codes, scales, [getattr(layer, name) for name in part.names], part.layout.name,
                None if bias is None else bias[slice(*part.rows)], x.dtype,
            )
            for part in layer.parts
        ]  # fmt: skip
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the model's dtype."""
        parts = [blocks.dequantize([getattr(layer, name) for name in part.names], part.layout) for part in layer.parts]
        return torch.cat(parts)[:, : layer.input_size_per_partition].to(layer.orig_dtype)

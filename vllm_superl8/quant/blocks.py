# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers, embeddings and LM heads whose weights stay in the blocks of a GGUF file."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.linear import ReplicatedLinear, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.parameter import BasevLLMParameter

from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.formats import blocks
from vllm_superl8.formats.bits import UNIT
from vllm_superl8.formats.gguf_basic import quantize_q8_0
from vllm_superl8.formats.layout import LAYOUTS, Layout
from vllm_superl8.ops.block_embedding import block_embedding
from vllm_superl8.ops.block_gemm import block_gemm
from vllm_superl8.ops.quantize import quantize_int8
from vllm_superl8.quant.linear import LinearMethod


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

    @staticmethod
    def register(layer: torch.nn.Module, layout: Layout, planes: list[torch.Tensor], first: int = 0) -> "Part":
        """Make `planes` parameters of the layer."""
        names = tuple(f"weight_{first}_{number}" for number in range(len(planes)))
        for name, plane in zip(names, planes, strict=True):
            layer.register_parameter(name, Parameter(plane, requires_grad=False))
        return Part(layout, names, (first, first + planes[0].shape[0]))

    def planes(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        return [getattr(layer, name) for name in self.names]


def planes_of(weight: torch.Tensor, device: torch.device) -> tuple[Layout, list[torch.Tensor]]:
    """Format and planes of a weight (n, k) as it was loaded; floats are rounded to Q8_0, K padded to whole blocks."""
    if isinstance(weight, StoredMatrix):
        return weight.format, blocks.pack(weight.blocks.to(device), weight.format)
    padded = torch.nn.functional.pad(weight.to(device), (0, -weight.shape[1] % UNIT))
    return LAYOUTS["q8_0"], quantize_q8_0(padded)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of activations (..., k), k padded as planes_of does."""
    padding = -x.shape[-1] % UNIT
    return quantize_int8(torch.nn.functional.pad(x, (0, padding)) if padding else x, UNIT)


@register_weight_loader_v2_supported_method
class BlockLinearMethod(LinearMethod):
    """y = weight @ x with the weight in its blocks, activations quantised per call and 32 columns.

    A fused layer may hold several types, for each of which its rows are multiplied by themselves. Weights that come as
    floats (F16 tensors, types without a kernel) are rounded to Q8_0.
    """

    def __init__(self, prefix: str):
        super().__init__()
        self.prefix = prefix

    def create_parameters(self, layer: torch.nn.Module, input_size: int, loader: Callable | None) -> None:
        if isinstance(layer, ReplicatedLinear):

            def loader(param, loaded_weight):
                param.parts[0] = loaded_weight

        weight = BlockParameter(data=torch.empty(0, dtype=layer.orig_dtype), weight_loader=loader)
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
            layout, planes = planes_of(parts.pop(start), device)
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
            joined = [plane[0] if len(plane) == 1 else torch.cat(plane) for plane in zip(*shards, strict=True)]
            layer.parts.append(Part.register(layer, layout, joined, first))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = quantized(x)
        outputs = []
        for part in layer.parts:
            own_bias = None if bias is None else bias[slice(*part.rows)]
            outputs.append(block_gemm(codes, scales, part.planes(layer), part.layout.name, own_bias, x.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def dequantize_weight(self, layer: torch.nn.Module) -> torch.Tensor:
        """The layer's weight (n, k) as float, in the model's dtype."""
        parts = [blocks.dequantize(part.planes(layer), part.layout) for part in layer.parts]
        return torch.cat(parts)[:, : layer.input_size_per_partition].to(layer.orig_dtype)


class BlockEmbeddingMethod(QuantizeMethodBase):
    """A vocabulary matrix in its blocks: rows are decoded as they are gathered (embedding), or multiplied (LM head).

    A tied LM head shares the embedding's planes. A matrix that comes as floats stays so.
    """

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
        def load(param: BlockParameter, loaded_weight: torch.Tensor) -> None:
            first, last = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
            param.parts[0] = loaded_weight.narrow(0, first, last - first)

        weight = BlockParameter(data=torch.empty(0, dtype=params_dtype), weight_loader=load)
        layer.register_parameter("weight", weight)
        layer.orig_dtype = params_dtype
        layer.tied_embedding = layer.part = None

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        object.__setattr__(layer, "tied_embedding", embed_tokens)  # not a submodule: it is one of the model already
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if not isinstance(getattr(layer, "weight", None), BlockParameter):
            return  # done
        tied = layer.tied_embedding
        if tied is None:
            self._take(layer, layer.weight)
            return
        self.process_weights_after_loading(tied)
        del layer.weight
        if tied.part is None:
            layer.weight = tied.weight
            return
        layer.part = tied.part
        for name in tied.part.names:
            setattr(layer, name, getattr(tied, name))

    @staticmethod
    def _take(layer: torch.nn.Module, weight: BlockParameter) -> None:
        if 0 not in weight.parts:
            raise ValueError("superl8: the file gave no rows of a vocabulary; fetch it again")
        part, device = weight.parts.pop(0), weight.device
        missing = layer.num_embeddings_per_partition - part.shape[0]  # rows of zeros up to vLLM's padded vocabulary
        del layer.weight
        if isinstance(part, StoredMatrix):
            layout, planes = planes_of(part, device)
            padded = [torch.nn.functional.pad(plane, (0, 0, 0, missing)) for plane in planes]
            layer.part = Part.register(layer, layout, padded)
        else:
            padded = torch.nn.functional.pad(part.to(device), (0, 0, 0, missing))
            layer.register_parameter("weight", Parameter(padded, requires_grad=False))

    def embedding(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        if layer.part is None:
            return torch.nn.functional.embedding(ids, layer.weight)
        planes = layer.part.planes(layer)
        return block_embedding(ids, planes, layer.part.layout.name, layer.embedding_dim, layer.orig_dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.part is None:
            return torch.nn.functional.linear(x, layer.weight, bias)
        return block_gemm(*quantized(x), layer.part.planes(layer), layer.part.layout.name, bias, x.dtype)

# SPDX-License-Identifier: BSD-3-Clause
"""Int8 token embeddings and LM heads, by choice (quant.options)."""

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from vllm_superl8.ops.gather import embedding_int8
from vllm_superl8.ops.gemm import w8a8_gemm
from vllm_superl8.ops.quantize import quantize_int8


class Int8EmbeddingMethod(QuantizeMethodBase):
    """A vocabulary matrix with one scale a token: rows are gathered (embedding) or multiplied (LM head).

    A tied LM head shares the embedding's codes when the embedding is int8 too, and otherwise holds an int8 copy of
    the 16-bit embedding: a quarter to a half more memory for half the bytes read at every token.
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
        weight = Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype), requires_grad=False
        )
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)
        layer.orig_dtype = params_dtype
        layer.tied_embedding = None

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        layer.weight = embed_tokens.weight
        object.__setattr__(layer, "tied_embedding", embed_tokens)  # not a submodule: it is one of the model already
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        tied = layer.tied_embedding
        if tied is not None and isinstance(tied.quant_method, Int8EmbeddingMethod):
            tied.quant_method.process_weights_after_loading(tied)
            layer.weight, layer.weight_scale = tied.weight, tied.weight_scale
        elif layer.weight.dtype != torch.int8:
            codes, scales = quantize_int8(layer.weight.data, -1)
            if tied is None:
                replace_parameter(layer, "weight", codes)
            else:  # the embedding keeps its own parameter
                layer.weight = Parameter(codes, requires_grad=False)
            layer.weight_scale = Parameter(scales, requires_grad=False)

    def embedding(self, layer: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return embedding_int8(ids, layer.weight, layer.weight_scale, layer.orig_dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = quantize_int8(x, -1)
        return w8a8_gemm(codes, scales, layer.weight, layer.weight_scale, bias, x.dtype)

# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come from a GGUF file."""

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_superl8.quant.blocks import BlockEmbeddingMethod, BlockLinearMethod
from vllm_superl8.quant.online import OnlineWeights


class GgufWeights(OnlineWeights):
    """A GGUF file: linear layers and vocabulary keep its blocks, unless the options ask for other groups or bits."""

    default_scheme = "group128"

    @property
    def in_blocks(self) -> bool:
        return self.options.activation == "auto" and self.options.weight_bits is None

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        return BlockLinearMethod(prefix) if self.in_blocks else super().linear(layer, prefix)

    def vocabulary(self, layer: VocabParallelEmbedding) -> QuantizeMethodBase | None:
        if self.in_blocks and not (self.options.lm_head or self.options.embedding):
            return BlockEmbeddingMethod()
        return super().vocabulary(layer)

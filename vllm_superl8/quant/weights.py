# SPDX-License-Identifier: BSD-3-Clause
"""What each kind of checkpoint decides: which method a layer gets."""

from abc import ABC, abstractmethod

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from vllm_superl8.quant.embedding import Int8EmbeddingMethod
from vllm_superl8.quant.options import Options


class Weights(ABC):
    """One kind of checkpoint, with the user's options."""

    def __init__(self, options: Options):
        self.options = options

    @abstractmethod
    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        """The method of the linear layer at `prefix`."""

    @abstractmethod
    def experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        """The method of the routed experts at `prefix`."""

    def vocabulary(self, layer: VocabParallelEmbedding) -> QuantizeMethodBase | None:
        """The method of an embedding or LM head; None: 16 bit."""
        wanted = self.options.lm_head if isinstance(layer, ParallelLMHead) else self.options.embedding
        return Int8EmbeddingMethod() if wanted else None

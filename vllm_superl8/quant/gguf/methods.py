# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come from a GGUF file."""

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.online import OnlineWeights


class GgufWeights(OnlineWeights):
    """A GGUF file: linear layers keep its blocks, unless the options ask for other groups or bits."""

    default_scheme = "group128"

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        """The method of the linear layer at `prefix`."""
        if self.options.activation == "auto" and self.options.weight_bits is None:
            return BlockLinearMethod(prefix)
        return super().linear(layer, prefix)

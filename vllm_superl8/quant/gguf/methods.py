# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come from a GGUF file."""

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import ACTIVATIONS, Options


class GgufWeights:
    """A GGUF file: linear layers keep its blocks, unless an activation scheme asks for other groups."""

    def __init__(self, options: Options):
        if options.weight_bits is not None:
            raise ValueError(
                f"superl8 option weight_bits={options.weight_bits}: a GGUF file's own types say how many bits its "
                "weights have; leave it out"
            )
        self.in_blocks = options.activation == "auto"
        self.group_size = ACTIVATIONS[options.scheme("group128")]

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        """The method of the linear layer at `prefix`."""
        return BlockLinearMethod(prefix) if self.in_blocks else Int8LinearMethod(self.group_size)

    def experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        """The method of the routed experts at `prefix`."""
        return Int8MoEMethod(layer.moe_config, self.group_size, prefix)

# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come in 16 bit and are quantised as they stream in."""

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_superl8.quant.checkpoint.targets import int4_group_size
from vllm_superl8.quant.int4_linear import Int4LinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import ACTIVATIONS, INT4_GROUP_SIZE, Options
from vllm_superl8.quant.weights import Weights

logger = init_logger(__name__)


def k_of(layer: torch.nn.Module) -> int:
    """Columns of a linear layer on this rank."""
    return getattr(layer, "input_size_per_partition", layer.input_size)


class OnlineWeights(Weights):
    """A 16-bit checkpoint."""

    default_scheme = "token"

    def __init__(self, options: Options):
        super().__init__(options)
        self.group_size = ACTIVATIONS[options.scheme(self.default_scheme)]

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        if self.options.weight_bits == 4:
            if size := int4_group_size(INT4_GROUP_SIZE, k_of(layer)):
                return Int4LinearMethod(size)
            logger.warning("superl8: %s has int8 weights, its K of %d is not a multiple of 32", prefix, k_of(layer))
        return Int8LinearMethod(self.group_size)

    def experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        return Int8MoEMethod(layer.moe_config, self.group_size, prefix)

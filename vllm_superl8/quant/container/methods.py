# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come from a ``.superl8`` file."""

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.container.layers import Layers, group_size_of
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import GROUP_SIZE, Options
from vllm_superl8.quant.stored import StoredInt4LinearMethod, StoredInt8LinearMethod, StoredInt8MoEMethod
from vllm_superl8.quant.weights import Weights

logger = init_logger(__name__)


class ContainerWeights(Weights):
    """A ``.superl8`` file: int8 and int4 codes and GGUF blocks are taken as they are.

    packed  name of a fused module to those of its parts
    """

    def __init__(self, options: Options, layers: Layers, packed: dict[str, list[str]]):
        if options.weight_bits is not None:
            raise ValueError(
                f"superl8 option weight_bits={options.weight_bits}: the .superl8 file says how many bits its weights "
                "have; leave it out"
            )
        super().__init__(options)
        self.layers, self.packed = layers, packed

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        stored = self.layers.linear(prefix, self.packed)
        if stored.kind == "raw":
            return UnquantizedLinearMethod()
        if stored.kind == "blocks":
            return BlockLinearMethod(prefix)
        if stored.kind == "other" or len(set(stored.group_sizes.values())) > 1:
            logger.warning("superl8: %s is quantised again, to int8: no kernel takes it as it is stored", prefix)
            return Int8LinearMethod(GROUP_SIZE)
        if stored.kind == "int4":
            return StoredInt4LinearMethod(stored.names, max(stored.group_sizes.values()), prefix)
        group_size = group_size_of(stored.group_sizes, self.options.activation, prefix)
        return StoredInt8LinearMethod(stored.names, max(stored.group_sizes.values()), group_size, prefix)

    def experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        stored = self.layers.experts(prefix)
        if stored.kind == "raw":
            return UnquantizedFusedMoEMethod(layer.moe_config)
        down = stored.group_sizes.get(layer.ckpt_down_proj_name)
        up = {size for part, size in stored.group_sizes.items() if part != layer.ckpt_down_proj_name}
        if stored.kind != "int8" or down is None or len(up) != 1:
            logger.warning("superl8: %s are quantised again, to int8: no kernel takes them as they are stored", prefix)
            return Int8MoEMethod(layer.moe_config, GROUP_SIZE, prefix)
        return StoredInt8MoEMethod(layer.moe_config, stored.names, (up.pop(), down), prefix)

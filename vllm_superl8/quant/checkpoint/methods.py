# SPDX-License-Identifier: BSD-3-Clause
"""Methods of layers whose weights come from a published quantised checkpoint."""

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.quant.checkpoint.linear import method
from vllm_superl8.quant.checkpoint.moe import StoredMoEMethod
from vllm_superl8.quant.checkpoint.source import Source
from vllm_superl8.quant.checkpoint.targets import choose
from vllm_superl8.quant.online import k_of
from vllm_superl8.quant.options import Options

logger = init_logger(__name__)


class PublishedWeights:
    """A checkpoint that checkpoint.schemes reads: layers are quantised that are so there.

    packed  name of a fused module to those of its parts
    """

    def __init__(self, options: Options, source: Source, packed: dict[str, list[str]]):
        self.options, self.source, self.packed = options, source, packed

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        """The method of the linear layer at `prefix`."""
        parts = self.source.parts(prefix, self.packed)
        stored = [part for part in parts if part is not None]
        if len(stored) < len(parts):
            if stored:
                logger.warning(
                    "superl8: %s stays in 16 bit, of its parts only %s are quantised in the checkpoint",
                    prefix,
                    ", ".join(part.name for part in stored),
                )
            return UnquantizedLinearMethod()
        k = k_of(layer)
        return method(stored, choose(stored, k, k != layer.input_size, self.options, prefix))

    def experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        """The method of the routed experts at `prefix`."""
        parts: list[Matrix] = self.source.experts(prefix)
        wanted = layer.moe_config.num_logical_experts * (3 if layer.moe_config.is_act_and_mul else 2)
        if len(parts) == wanted:
            return StoredMoEMethod(layer.moe_config, parts, self.options, prefix)
        if parts:
            logger.warning(
                "superl8: %s stays in 16 bit, %d of its %d matrices are quantised in the checkpoint",
                prefix,
                len(parts),
                wanted,
            )
        return UnquantizedFusedMoEMethod(layer.moe_config)

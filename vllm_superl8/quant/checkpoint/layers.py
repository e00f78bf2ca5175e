# SPDX-License-Identifier: BSD-3-Clause
"""Which quantised checkpoints are taken over, and which method a layer of one gets."""

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.platforms import current_platform

from vllm_superl8.checkpoint.schemes import READERS, reader
from vllm_superl8.quant.checkpoint.linear import method
from vllm_superl8.quant.checkpoint.moe import CheckpointMoEMethod
from vllm_superl8.quant.checkpoint.source import Source
from vllm_superl8.quant.checkpoint.stream import quantization_config
from vllm_superl8.quant.checkpoint.targets import choose
from vllm_superl8.quant.online import k_of
from vllm_superl8.quant.options import Options
from vllm_superl8.quant.weights import Weights

logger = init_logger(__name__)

NAME = "superl8"


def takes_over(config: dict[str, Any], user_quant: str | None, hf_config: Any) -> bool:
    """Whether a checkpoint with this quantisation config becomes ours: its scheme has a reader, and the user asks for
    superl8 or the platform is ours. A wish for an fp8 KV cache is taken out of the configuration then.

    Raises ValueError when the user asks for it and the scheme is another.
    """
    scheme = config.get("quant_method")
    ours = type(current_platform).__module__.startswith("vllm_superl8.")
    if scheme == NAME or not (user_quant == NAME or (user_quant is None and ours)):
        return False
    if reader(config) is None:
        if user_quant == NAME:
            raise ValueError(f"superl8 does not read checkpoints of {scheme!r}; it reads {', '.join(READERS)}")
        return False
    # vLLM asks the model's config for the cache's dtype, which holds another copy.
    for copy in (config, quantization_config(hf_config)):
        _leave_kv_cache_in_16_bit(copy or {})
    return True


def _leave_kv_cache_in_16_bit(config: dict[str, Any]) -> None:
    """Take the wish for an fp8 KV cache, which vLLM would follow, out of a ModelOpt configuration."""
    for part in (config, config.get("quantization")):
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            if isinstance(part, dict) and (wish := part.pop(key, None)):
                logger.warning_once(
                    "superl8: %s=%s of the checkpoint is not followed, an fp8 KV cache is not served here; choose one "
                    "with --kv-cache-dtype",
                    key,
                    str(wish),
                )


class PublishedWeights(Weights):
    """A checkpoint that checkpoint.schemes reads: layers are quantised that are so there.

    packed  name of a fused module to those of its parts
    """

    def __init__(self, options: Options, source: Source, packed: dict[str, list[str]]):
        super().__init__(options)
        self.source, self.packed = source, packed

    def linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
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
        parts = self.source.experts(prefix)
        wanted = layer.moe_config.num_logical_experts * (3 if layer.moe_config.is_act_and_mul else 2)
        if len(parts) == wanted:
            return CheckpointMoEMethod(layer.moe_config, parts, self.options, prefix)
        if parts:
            logger.warning(
                "superl8: %s stays in 16 bit, %d of its %d matrices are quantised in the checkpoint",
                prefix,
                len(parts),
                wanted,
            )
        return UnquantizedFusedMoEMethod(layer.moe_config)

# SPDX-License-Identifier: BSD-3-Clause
"""``--quantization superl8``: which layer gets which method."""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.container.layers import Layers, group_size_of, layers_in_force
from vllm_superl8.quant.embedding import Int8EmbeddingMethod
from vllm_superl8.quant.gguf.engine_args import LOAD_FORMAT
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import GROUP_SIZE, Options
from vllm_superl8.quant.stored import StoredInt4LinearMethod, StoredInt8LinearMethod, StoredInt8MoEMethod

logger = init_logger(__name__)

NAME = "superl8"


class Superl8Config(QuantizationConfig):
    """W8A8: fp16, bf16 or fp32 weights are quantised layer by layer while they load, codes of ``.superl8`` files taken
    as they are.

    Raises ValueError for unknown or contradictory options (see quant.options).
    """

    def __init__(self, options: Options | None = None):
        super().__init__()
        self._given = options
        self._mapper: Any = None
        self._layers: Layers | None = None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self._mapper = hf_to_vllm_mapper

    @property
    def layers(self) -> Layers | None:
        """What is stored for each layer, when the checkpoint is a ``.superl8`` file."""
        if self._layers is None:
            self._layers = layers_in_force(self._mapper)
        return self._layers

    @property
    def group_size(self) -> int:
        """Columns that share a scale, in weights and activations; -1 for the whole row."""
        return self.options.group_size(_is_gguf())

    @property
    def options(self) -> Options:
        """The options given here, or those of the vLLM configuration in force."""
        if self._given is None:
            self._given = _options_in_force()
            logger.info("superl8 quantisation: %s", self._given)
        return self._given

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 61

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Superl8Config":
        return cls(Options.from_dict({key: value for key, value in config.items() if key != "quant_method"}))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        options = self.options
        if isinstance(layer, ParallelLMHead):
            return Int8EmbeddingMethod() if options.lm_head and not self._ignores(prefix) else None
        if isinstance(layer, VocabParallelEmbedding):
            wanted = options.embedding and not self._ignores(prefix)
            return Int8EmbeddingMethod() if wanted else UnquantizedEmbeddingMethod()
        if isinstance(layer, LinearBase):
            # Rounding a router sends tokens to other experts; most models of vLLM's leave theirs in 16 bit anyway.
            if isinstance(layer, GateLinear) or self._ignores(prefix) or not _k_is_served(layer, prefix):
                return UnquantizedLinearMethod()
            return self._linear(prefix)
        if isinstance(layer, RoutedExperts):
            if not options.moe or self._ignores(prefix):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return self._experts(layer, prefix)
        return None

    def _linear(self, prefix: str) -> QuantizeMethodBase:
        if self.options.in_blocks(_is_gguf()):
            return BlockLinearMethod(prefix)
        if self.layers is None:
            return Int8LinearMethod(self.group_size)
        stored = self.layers.linear(prefix, self.packed_modules_mapping)
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

    def _experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        if self.layers is None:
            return Int8MoEMethod(layer.moe_config, self.group_size, prefix)
        stored = self.layers.experts(prefix)
        if stored.kind == "raw":
            return UnquantizedFusedMoEMethod(layer.moe_config)
        down = stored.group_sizes.get(layer.ckpt_down_proj_name)
        up = {size for part, size in stored.group_sizes.items() if part != layer.ckpt_down_proj_name}
        if stored.kind != "int8" or down is None or len(up) != 1:
            logger.warning("superl8: %s are quantised again, to int8: no kernel takes them as they are stored", prefix)
            return Int8MoEMethod(layer.moe_config, GROUP_SIZE, prefix)
        return StoredInt8MoEMethod(layer.moe_config, stored.names, (up.pop(), down), prefix)

    def _ignores(self, prefix: str) -> bool:
        return should_ignore_layer(
            prefix, ignore=self.options.ignore, fused_mapping=self.packed_modules_mapping, use_fnmatch=True
        )


def _is_gguf() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == LOAD_FORMAT


def _k_is_served(layer: LinearBase, prefix: str) -> bool:
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    if k % 4:
        logger.warning("superl8: %s stays in 16 bit, its K of %d is not a multiple of 4", prefix, k)
    return k % 4 == 0


def _options_in_force() -> Options:
    config = get_current_vllm_config_or_none()
    if config is None:
        return Options()
    options = Options.from_dict((config.additional_config or {}).get(NAME, {}))
    args = config.model_config.quantization_config if config.model_config is not None else None
    if args is None:
        return options
    if args.linear is not None or args.moe is not None or args.targets is not None:
        raise ValueError(
            "--quantization-config: with --quantization superl8 only `ignore` is taken; other choices are options of "
            "--additional-config '{\"superl8\": {...}}'"
        )
    return replace(options, ignore=(*options.ignore, *args.ignore))


if NAME not in QUANTIZATION_METHODS:
    register_quantization_config(NAME)(Superl8Config)

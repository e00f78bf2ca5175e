# SPDX-License-Identifier: BSD-3-Clause
"""``--quantization superl8``: which layer gets which method, whatever kind of checkpoint its weights come from."""

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
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_superl8.checkpoint.schemes import reader
from vllm_superl8.quant.checkpoint.layers import NAME, PublishedWeights, takes_over
from vllm_superl8.quant.checkpoint.source import Source, read
from vllm_superl8.quant.container.layers import layers_in_force
from vllm_superl8.quant.container.methods import ContainerWeights
from vllm_superl8.quant.gguf.engine_args import LOAD_FORMAT as GGUF
from vllm_superl8.quant.gguf.methods import GgufWeights
from vllm_superl8.quant.online import OnlineWeights, k_of
from vllm_superl8.quant.options import Options
from vllm_superl8.quant.weights import Weights

logger = init_logger(__name__)


class Superl8Config(QuantizationConfig):
    """Every layer of a 16-bit checkpoint, quantised while it loads; of a quantised one those that are so there.

    options  as given in a checkpoint of our own
    scheme   quantisation config of a published checkpoint that checkpoint.schemes reads

    Raises ValueError for unknown or contradictory options (see quant.options).
    """

    def __init__(self, options: Options | None = None, scheme: dict[str, Any] | None = None):
        super().__init__()
        self._given = options
        self._scheme = scheme
        self._source: Source | None = None
        self._mapper: Any = None
        self._weights: Weights | None = None

    @property
    def weights(self) -> Weights:
        """The kind of checkpoint that is being loaded."""
        if self._weights is None:
            self._weights = self._weights_in_force()
        return self._weights

    def _weights_in_force(self) -> Weights:
        packed = self.packed_modules_mapping
        if self._source is not None:
            return PublishedWeights(self.options, self._source, packed)
        if (layers := layers_in_force(self._mapper)) is not None:
            return ContainerWeights(self.options, layers, packed)
        config = get_current_vllm_config_or_none()
        if config is not None and config.load_config.load_format == GGUF:
            return GgufWeights(self.options)
        return OnlineWeights(self.options)

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
        if reader(config) is not None:
            return cls(scheme=config)
        return cls(Options.from_dict({key: value for key, value in config.items() if key != "quant_method"}))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
        """Ours for the published checkpoints that are taken over (see checkpoint.layers)."""
        return NAME if takes_over(hf_quant_cfg, user_quant, hf_config) else None

    def maybe_update_config(self, model_name: str, hf_config=None, revision: str | None = None) -> None:
        """Read what the checkpoint's files hold, which says better than any configuration what is quantised."""
        if self._scheme is not None:
            self._source = Source(read(model_name, revision, self._scheme))

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        self._mapper = hf_to_vllm_mapper
        if self._source is not None:
            self._source.rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        options = self.options
        if isinstance(layer, VocabParallelEmbedding):
            return None if self._ignores(prefix) else self.weights.vocabulary(layer)
        if isinstance(layer, LinearBase):
            # Rounding a router sends tokens to other experts; most models of vLLM's leave theirs in 16 bit anyway.
            if isinstance(layer, GateLinear) or self._ignores(prefix) or not _k_is_served(layer, prefix):
                return UnquantizedLinearMethod()
            return self.weights.linear(layer, prefix)
        if isinstance(layer, RoutedExperts):
            if not options.moe or self._ignores(prefix):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return self.weights.experts(layer, prefix)
        return None

    def _ignores(self, prefix: str) -> bool:
        return should_ignore_layer(
            prefix, ignore=self.options.ignore, fused_mapping=self.packed_modules_mapping, use_fnmatch=True
        )


def _k_is_served(layer: LinearBase, prefix: str) -> bool:
    k = k_of(layer)
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

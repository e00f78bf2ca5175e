# SPDX-License-Identifier: BSD-3-Clause
"""``--quantization superl8``: which layer gets which method, for 16-bit and for quantised checkpoints."""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
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
from vllm.platforms import current_platform

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.checkpoint.schemes import READERS, reader
from vllm_superl8.quant.blocks import BlockLinearMethod
from vllm_superl8.quant.checkpoint.linear import method as stored_linear_method
from vllm_superl8.quant.checkpoint.moe import StoredMoEMethod
from vllm_superl8.quant.checkpoint.source import Source, read
from vllm_superl8.quant.checkpoint.stream import quantization_config
from vllm_superl8.quant.checkpoint.targets import choose, int4_group_size
from vllm_superl8.quant.embedding import Int8EmbeddingMethod
from vllm_superl8.quant.gguf.engine_args import LOAD_FORMAT
from vllm_superl8.quant.int4_linear import Int4LinearMethod
from vllm_superl8.quant.linear import Int8LinearMethod
from vllm_superl8.quant.moe import Int8MoEMethod
from vllm_superl8.quant.options import INT4_GROUP_SIZE, Options

logger = init_logger(__name__)

NAME = "superl8"


class Superl8Config(QuantizationConfig):
    """W8A8: every layer of a 16-bit checkpoint, quantised while it loads; of a quantised one those that are so there.

    options  as given in a checkpoint of our own
    scheme   quantisation config of a published checkpoint that checkpoint.schemes reads

    Raises ValueError for unknown or contradictory options (see quant.options).
    """

    def __init__(self, options: Options | None = None, scheme: dict[str, Any] | None = None):
        super().__init__()
        self._given = options
        self._scheme = scheme
        self._source: Source | None = None

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
        if reader(config) is not None:
            return cls(scheme=config)
        return cls(Options.from_dict({key: value for key, value in config.items() if key != "quant_method"}))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
        """Ours for every scheme that checkpoint.schemes reads, where the user or the platform asks for it.

        Raises ValueError when the user asks for it and the scheme is another.
        """
        method = hf_quant_cfg.get("quant_method")
        ours = type(current_platform).__module__.startswith("vllm_superl8.")
        if method == NAME or not (user_quant == NAME or (user_quant is None and ours)):
            return None
        if reader(hf_quant_cfg) is None:
            if user_quant == NAME:
                raise ValueError(f"superl8 does not read checkpoints of {method!r}; it reads {', '.join(READERS)}")
            return None
        # vLLM asks the model's config for the cache's dtype, which holds another copy.
        for config in (hf_quant_cfg, quantization_config(hf_config)):
            _leave_kv_cache_in_16_bit(config or {})
        return NAME

    def maybe_update_config(self, model_name: str, hf_config=None, revision: str | None = None) -> None:
        """Read what the checkpoint's files hold, which says better than any configuration what is quantised."""
        if self._scheme is not None:
            self._source = Source(read(model_name, revision, self._scheme))

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        if self._source is not None:
            self._source.rename(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        options = self.options
        if isinstance(layer, ParallelLMHead):
            return Int8EmbeddingMethod() if options.lm_head and not self._ignores(prefix) else None
        if isinstance(layer, VocabParallelEmbedding):
            wanted = options.embedding and not self._ignores(prefix)
            return Int8EmbeddingMethod() if wanted else UnquantizedEmbeddingMethod()
        if isinstance(layer, LinearBase):
            if self._ignores(prefix) or not _k_is_served(layer, prefix):
                return UnquantizedLinearMethod()
            if self._source is not None:
                return self._stored_linear(layer, prefix)
            return self._online_linear(layer, prefix)
        if isinstance(layer, RoutedExperts):
            if not options.moe or self._ignores(prefix):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            if self._source is not None:
                return self._stored_experts(layer, prefix)
            return Int8MoEMethod(layer.moe_config, self.group_size, prefix)
        return None

    def _online_linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        if self.options.in_blocks(_is_gguf()):
            return BlockLinearMethod(prefix)
        if self.options.weight_bits == 4:
            if size := int4_group_size(INT4_GROUP_SIZE, _k_of(layer)):
                return Int4LinearMethod(size)
            logger.warning("superl8: %s has int8 weights, its K of %d is not a multiple of 32", prefix, _k_of(layer))
        return Int8LinearMethod(self.group_size)

    def _stored_linear(self, layer: LinearBase, prefix: str) -> QuantizeMethodBase:
        parts = self._source.parts(prefix, self.packed_modules_mapping)
        stored = [part for part in parts if part is not None]
        if len(stored) < len(parts):
            if stored:
                logger.warning(
                    "superl8: %s stays in 16 bit, of its parts only %s are quantised in the checkpoint",
                    prefix,
                    ", ".join(part.name for part in stored),
                )
            return UnquantizedLinearMethod()
        k = _k_of(layer)
        return stored_linear_method(stored, choose(stored, k, k != layer.input_size, self.options, prefix))

    def _stored_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        parts: list[Matrix] = self._source.experts(prefix)
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

    def _ignores(self, prefix: str) -> bool:
        return should_ignore_layer(
            prefix, ignore=self.options.ignore, fused_mapping=self.packed_modules_mapping, use_fnmatch=True
        )


def _k_of(layer: LinearBase) -> int:
    return getattr(layer, "input_size_per_partition", layer.input_size)


def _leave_kv_cache_in_16_bit(config: dict[str, Any]) -> None:
    """Take the wish for an fp8 KV cache, which vLLM would follow, out of a ModelOpt configuration."""
    for part in (config, config.get("quantization")):
        for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            if isinstance(part, dict) and (wish := part.pop(key, None)):
                logger.warning_once(
                    "superl8: %s=%s of the checkpoint is not followed, an fp8 KV cache is not served here; choose one "
                    "with --kv-cache-dtype",
                    key,
                    wish,
                )


def _is_gguf() -> bool:
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == LOAD_FORMAT


def _k_is_served(layer: LinearBase, prefix: str) -> bool:
    k = _k_of(layer)
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

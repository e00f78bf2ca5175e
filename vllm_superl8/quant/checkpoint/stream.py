# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a quantised checkpoint on their way to the model: every scheme becomes int8 or int4 codes."""

import math
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_superl8.checkpoint.convert import to_int4, to_int8, values
from vllm_superl8.checkpoint.matrix import Codes, Matrix
from vllm_superl8.quant.checkpoint.source import read
from vllm_superl8.quant.checkpoint.targets import Target

logger = init_logger(__name__)

KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point", "q_zero_point")
"""Last words of tensors that belong to a KV cache of fp8."""

KV_OUTPUT_SCALES = tuple(f"{name}_proj.output_scale" for name in "qkv")
"""The same under AutoFP8's names."""

STATIC = ("input_scale", "input_zero_point", "input_global_scale")
"""Last words of static activation scales."""


CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that no model's parameters have; vLLM would cast them to the parameter's, without their scales."""


def transform(model_config: ModelConfig, model: nn.Module, weights: Iterator) -> Iterator | None:
    """`weights` as the model's parameters have them; None for checkpoints that are not ours to convert."""
    config = quantization_config(model_config.hf_config)
    if model_config.quantization != "superl8" or config is None or config.get("quant_method") == "superl8":
        return None
    matrices = read(model_config.model, model_config.revision, config)
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    targets = {name: target for method in methods for name, target in getattr(method, "targets", {}).items()}
    return converted(weights, matrices, targets, model_config.dtype, current_platform.device_type)


def quantization_config(hf_config: Any) -> dict[str, Any] | None:
    """The quantisation config of a config.json, where vLLM looks for it."""
    for config in (hf_config, getattr(hf_config, "text_config", None)):
        for name in ("quantization_config", "compression_config"):
            if found := getattr(config, name, None):
                return found
    return None


def converted(
    weights: Iterator[tuple[str, torch.Tensor]],
    matrices: dict[str, Matrix],
    targets: dict[str, Target],
    dtype: torch.dtype,
    device: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) with the tensors of each quantised module replaced.

    weights   of the checkpoint
    matrices  its quantised modules, by module path
    targets   module path to format: these become `weight` (codes) and `weight_scale` (n, groups), int4 ones perhaps
              `weight_zero_point` (n, groups) and `weight_columns` (1, k); other quantised modules become a `weight` in
              `dtype`
    device    where tensors are converted

    Raises ValueError, naming the tensor, if one never comes or contradicts the configuration.
    """
    owners = {f"{name}.{tensor}": (name, tensor) for name, matrix in matrices.items() for tensor in matrix.tensors}
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    report = _Report()
    for name, tensor in weights:
        if name not in owners:
            if not report.leaves_out(name, matrices):
                if tensor.dtype in CODES:
                    raise ValueError(
                        f"tensor {name} holds {tensor.dtype} codes, but is no part of a quantised matrix; superl8 "
                        "reads experts that are stored one matrix each"
                    )
                yield name, tensor
            continue
        module, part = owners[name]
        waiting.setdefault(module, {})[part] = tensor.to(device)
        if len(waiting[module]) == len(matrices[module].tensors):
            yield from _convert(matrices[module], waiting.pop(module), targets.get(module), dtype, report)
    if waiting:
        module, came = next(iter(waiting.items()))
        missing = next(tensor for tensor in matrices[module].tensors if tensor not in came)
        raise ValueError(f"tensor {module}.{missing} did not come with {', '.join(came)}; the checkpoint is incomplete")
    report.log()


def _convert(matrix: Matrix, tensors: dict[str, torch.Tensor], target: Target | None, dtype, report: "_Report"):
    decoded = matrix.decode(tensors)
    if isinstance(decoded, Codes) and decoded.zeros is not None and not matrix.zeros:
        raise ValueError(f"{matrix.name}: stored zero points are not the middle, though its configuration is symmetric")
    if target is None:
        report.kept(matrix)
        yield f"{matrix.name}.weight", values(decoded).to(dtype)
        return
    columns = None
    if target.format == "int8":
        *planes, sqnr = to_int8(decoded, target.group_size)
    else:
        try:
            planes, columns, sqnr = to_int4(
                decoded, target.group_size, target.format == "int4_zero", target.ordered, target.scale_dtype
            )
        except ValueError as error:
            raise ValueError(f"{matrix.name}: {error}") from error
    if not torch.isfinite(planes[1]).all():
        raise ValueError(f"{matrix.name}: its stored weights or scales have NaN or infinity among them")
    report.converted(matrix, target, sqnr)
    for name, plane in zip(("weight", "weight_scale", "weight_zero_point"), planes, strict=False):
        yield f"{matrix.name}.{name}", plane
    if columns is not None:
        yield f"{matrix.name}.weight_columns", columns.unsqueeze(0)


class _Report:
    """What becomes of the checkpoint, said once at its end; each layer at debug level."""

    def __init__(self):
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sqnr: list[tuple[float, str]] = []
        self._kv_scales = self._static = 0

    def leaves_out(self, name: str, matrices: dict[str, Matrix]) -> bool:
        """Whether a tensor has no use here."""
        module, _, last = name.rpartition(".")
        if last in KV_SCALES or name.endswith(KV_OUTPUT_SCALES):
            self._kv_scales += 1
            return True
        if last in STATIC:
            self._static += 1
            return True
        while module and module not in matrices:
            module = module.rpartition(".")[0]
        return bool(module) and last != "bias"

    def converted(self, matrix: Matrix, target: Target, sqnr: float) -> None:
        how = "codes as stored" if math.isinf(sqnr) else "converted"
        self._counts[matrix.scheme, f"{how}, {target}"] += 1
        if not math.isinf(sqnr):
            self._sqnr.append((sqnr, matrix.name))
            logger.debug("%s: %s converted to %s, %.1f dB", matrix.name, matrix.scheme, target, sqnr)

    def kept(self, matrix: Matrix) -> None:
        self._counts[matrix.scheme, "dequantised to 16 bit"] += 1

    def log(self) -> None:
        for (scheme, what), count in sorted(self._counts.items()):
            logger.info("superl8: %d matrices of %s: %s", count, scheme, what)
        if self._sqnr:
            worst, name = min(self._sqnr)
            middle = median(sqnr for sqnr, _ in self._sqnr)
            logger.info("superl8: conversion error: median %.1f dB SQNR, worst %.1f dB (%s)", middle, worst, name)
        if self._static:
            logger.info(
                "superl8: %d static activation scales are not used: each token gets its own, which clip nothing",
                self._static,
            )
        if self._kv_scales:
            logger.warning(
                "superl8: %d KV cache scales are not used: they are for an fp8 cache, which is not served here; "
                "--kv-cache-dtype int8 has a scale for every token and head instead",
                self._kv_scales,
            )

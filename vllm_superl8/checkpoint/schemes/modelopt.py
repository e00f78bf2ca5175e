# SPDX-License-Identifier: BSD-3-Clause
"""NVIDIA ModelOpt: FP8 with one scale a matrix, and NVFP4 (E2M1, an E4M3 scale a group of 16, one scale over all).

Format: NVIDIA TensorRT Model Optimizer's unified Hugging Face export (https://github.com/NVIDIA/TensorRT-Model-Optimizer).
"""

from functools import partial
from typing import Any

import torch

from vllm_superl8.checkpoint.matrix import Matrix, group_count, needed, two_dims
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes.compressed_tensors import fp4_values, fp8_matrix

GROUP = 16
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    inner = config.get("quantization") or config
    algorithm = str(inner.get("quant_algo", "")).upper()
    if algorithm not in ALGORITHMS:
        raise ValueError(f"ModelOpt quant_algo {algorithm or None}: superl8 reads {', '.join(ALGORITHMS)}")
    kind, read = ("U8", _nvfp4) if algorithm == "NVFP4" else ("F8_E4M3", _fp8)
    names = sorted(
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if name.endswith(".weight") and tensor.dtype == kind
    )
    return {name: read(name, stored) for name in names}


def _fp8(name: str, stored: dict[str, Stored]) -> Matrix:
    return fp8_matrix(name, stored, "weight_scale", None, "ModelOpt FP8")


def _nvfp4(name: str, stored: dict[str, Stored]) -> Matrix:
    why = "ModelOpt NVFP4"
    n, half = two_dims(needed(stored, name, "weight", why))
    groups = group_count(2 * half, GROUP, name)
    needed(stored, name, "weight_scale", why).expect((n, groups), why, ("F8_E4M3",))
    needed(stored, name, "weight_scale_2", why)
    return Matrix(name, (n, 2 * half), why, 0, GROUP, ("weight", "weight_scale", "weight_scale_2"), partial(_decode))


def _decode(tensors) -> torch.Tensor:
    scales = tensors["weight_scale"].float() * tensors["weight_scale_2"].float()
    return fp4_values(tensors["weight"], scales, GROUP)

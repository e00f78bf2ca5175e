# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embedding parameters from a GGUF file."""

import math
from typing import Any

import torch

from vllm_superl8.checkpoint.gguf_metadata import Metadata
from vllm_superl8.checkpoint.gguf_tensors import check_types, read

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Llama 3.1 to 3.3 share; a file holds only the frequency factors that follow from it."""

SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")
"""Keys under rope.scaling that are understood."""


def rope_parameters(fields: Metadata, default_theta: float = 1e4) -> dict[str, Any]:
    """transformers' rope_parameters of the layers that see the whole context.

    Linear and YaRN scaling are stated in the metadata; Llama 3's only by the tensor rope_freqs.weight of
    head_dim / 2 factors. Raises ValueError for other scalings.
    """
    theta = fields.number("rope.freq_base", default_theta)
    if fields.has("rope_freqs.weight"):
        return {"rope_theta": theta, **_llama3(fields, theta)}
    prefix = f"{fields.architecture}.rope.scaling."
    if unknown := [key for key in fields.values if key.startswith(prefix) and key[len(prefix) :] not in SCALING_KEYS]:
        fields.refuse(f"{unknown[0]} is not understood; take the Hugging Face checkpoint")
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": fields.number("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind == "yarn":
        original = fields.count("rope.scaling.original_context_length")
        return {**scaling, "original_max_position_embeddings": original}
    fields.refuse(f"rope scaling {kind!r} is not served from GGUF; take the Hugging Face checkpoint")


def _llama3(fields: Metadata, theta: float) -> dict[str, Any]:
    """The scaling whose frequency factors are those of the file."""
    tensor = fields.tensor("rope_freqs.weight")
    check_types([tensor])
    stored = read(tensor, torch.float64).flatten()
    factor = float(stored.max())
    if torch.all(stored == 1):
        return {"rope_type": "default"}
    expected = llama3_factors(len(stored), theta, factor)
    if not bool(((stored - expected).abs() < 1e-3 * expected).all()):
        fields.refuse(
            "tensor rope_freqs.weight holds frequency factors that are not Llama 3's; take the Hugging Face checkpoint"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_factors(pairs: int, theta: float, factor: float) -> torch.Tensor:
    """By what Llama 3's rope scaling divides the frequency of each rotary pair, (pairs,) float64.

    Wavelengths above original / low_freq_factor tokens are divided by factor, below original / high_freq_factor by 1,
    and those between by a weighted harmonic mean (transformers, modeling_rope_utils).
    """
    original, low, high = (
        LLAMA3[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi * theta ** (torch.arange(pairs, dtype=torch.float64) / pairs)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)

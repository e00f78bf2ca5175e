# SPDX-License-Identifier: BSD-3-Clause
"""FP8 checkpoints: E4M3 weights with one scale, one a row (fbgemm), or one a block of 128x128 (DeepSeek, Qwen).

Format: model cards of deepseek-ai/DeepSeek-V3 (weight_scale_inv multiplies, whatever its name says) and AutoFP8.
"""

from typing import Any

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes.compressed_tensors import fp8_matrix


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    block = config.get("weight_block_size")
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise ValueError(f"FP8 weight_block_size {block!r}: wanted two positive numbers")
    scale = "weight_scale_inv" if block else "weight_scale"
    why = f"FP8, blocks of {block[0]}x{block[1]}" if block else "FP8"
    names = sorted(
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if name.endswith(".weight") and tensor.dtype == "F8_E4M3"
    )
    return {name: fp8_matrix(name, stored, scale, block, why) for name in names}

# SPDX-License-Identifier: BSD-3-Clause
"""The published schemes by the name in a config.json's ``quant_method``: one file each, one function each."""

from collections.abc import Callable
from typing import Any

from vllm_superl8.checkpoint.matrix import Matrix
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes import auto_round, awq, bitsandbytes, compressed_tensors, fp8, gptq, modelopt

Reader = Callable[[dict[str, Any], dict[str, Stored]], dict[str, Matrix]]

READERS: dict[str, Reader] = {
    "compressed-tensors": compressed_tensors.matrices,
    "gptq": gptq.matrices,
    "awq": awq.matrices,
    "auto-round": auto_round.matrices,
    "fp8": fp8.matrices,
    "fbgemm_fp8": fp8.matrices,
    "modelopt": modelopt.matrices,
    "modelopt_fp4": modelopt.matrices,
    "bitsandbytes": bitsandbytes.matrices,
}
"""``quant_method`` to what reads it: (quantisation config, tensors by name) -> quantised matrices by module path.

Readers raise ValueError, naming the tensor or the key, for what contradicts itself and for what they do not read.
"""


def reader(config: dict[str, Any]) -> Reader | None:
    """What reads checkpoints with this quantisation config; None if nothing here does."""
    return READERS.get(str(config.get("quant_method", "")).lower().replace("_tensors", "-tensors"))

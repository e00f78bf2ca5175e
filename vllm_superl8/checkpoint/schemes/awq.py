# SPDX-License-Identifier: BSD-3-Clause
"""AWQ, as AutoAWQ writes it: 4 bits in groups, with zero points, eight columns of the output in a word.

Format: AutoAWQ (https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py), version "gemm".
"""

from functools import partial
from typing import Any

from vllm_superl8.checkpoint.matrix import Codes, Matrix, group_count, needed, two_dims
from vllm_superl8.checkpoint.packing import unpack_awq
from vllm_superl8.checkpoint.safetensors_header import Stored
from vllm_superl8.checkpoint.schemes.gptq import centred

BITS = 4


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    bits = config.get("bits", config.get("w_bit"))
    if bits != BITS:
        raise ValueError(f"AWQ with {bits!r} bits, superl8 reads 4")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"AWQ version {version!r} orders its words in another way; superl8 reads version 'gemm'")
    names = sorted(name.removesuffix(".qweight") for name in stored if name.endswith(".qweight"))
    group_size = config.get("group_size", config.get("q_group_size"))
    return {name: _matrix(name, group_size, config.get("zero_point", True), stored) for name in names}


def _matrix(name: str, group_size: int, has_zeros: bool, stored: dict[str, Stored]) -> Matrix:
    why = f"AWQ, 4 bits, groups of {group_size}"
    k, words = two_dims(needed(stored, name, "qweight", why))
    stored[f"{name}.qweight"].expect((k, words), why, ("I32",))
    groups, n = group_count(k, group_size, name), words * 8
    needed(stored, name, "scales", why).expect((groups, n), why, ("F16", "BF16", "F32"))
    tensors = ["qweight", "scales"]
    if has_zeros:
        needed(stored, name, "qzeros", why).expect((groups, words), why, ("I32",))
        tensors.append("qzeros")
    half = stored[f"{name}.scales"].dtype == "F16"
    return Matrix(
        name, (n, k), why, BITS, group_size, tuple(tensors), partial(_decode), zeros=has_zeros, half_scales=half
    )


def _decode(tensors) -> Codes:
    codes = unpack_awq(tensors["qweight"]).T.contiguous()
    scales = tensors["scales"].float().T.contiguous()
    if "qzeros" in tensors:
        zeros = unpack_awq(tensors["qzeros"]).T.short()
    else:
        zeros = scales.new_full(scales.shape, 1 << (BITS - 1)).short()
    return centred(Codes(codes, scales, zeros), BITS)

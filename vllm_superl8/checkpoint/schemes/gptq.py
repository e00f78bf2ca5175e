# SPDX-License-Identifier: BSD-3-Clause
"""GPTQ, as AutoGPTQ, GPTQModel and optimum write it: 2, 3, 4 and 8 bits, with and without activation order.

Format: GPTQModel (https://github.com/ModelCloud/GPTQModel, nn_modules/qlinear): qweight packed along k, qzeros along n,
each 3-bit run of 32 codes in 3 words; checkpoint_format "gptq" stores zero points less one, "gptq_v2" as they are.
"""

import re
from functools import partial
from typing import Any

import torch

from vllm_superl8.checkpoint.matrix import Codes, Matrix, group_count, needed, two_dims
from vllm_superl8.checkpoint.packing import unpack
from vllm_superl8.checkpoint.safetensors_header import Stored

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format to what has to be added to the stored zero points."""


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    kind = config.get("checkpoint_format") or "gptq"
    if kind not in FORMATS:
        raise ValueError(f"GPTQ checkpoint_format {kind!r}: superl8 reads {', '.join(FORMATS)}")
    names = sorted(name.removesuffix(".qweight") for name in stored if name.endswith(".qweight"))
    return {name: _matrix(name, _settings(name, config), stored, FORMATS[kind]) for name in names}


def _settings(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with GPTQModel's `dynamic` rule for this module, the first that matches, put in."""
    for pattern, changes in (config.get("dynamic") or {}).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
            if pattern.startswith("-:"):
                raise ValueError(
                    f"tensor {name}.qweight is quantised, but dynamic rule {pattern!r} of the configuration says that "
                    "it is not"
                )
            return {**config, **changes}
    return config


def _matrix(name: str, config: dict[str, Any], stored: dict[str, Stored], add: int) -> Matrix:
    bits, group_size = config.get("bits"), config.get("group_size")
    if bits not in BITS:
        raise ValueError(f"{name}: GPTQ with bits={bits!r}, superl8 reads {', '.join(map(str, BITS))}")
    why = f"GPTQ, {bits} bits, groups of {group_size}"
    words, n = two_dims(needed(stored, name, "qweight", why))
    stored[f"{name}.qweight"].expect((words, n), why, ("I32",))
    k = words * 32 // bits
    groups = group_count(k, group_size, name)
    needed(stored, name, "scales", why).expect((groups, n), why, ("F16", "BF16", "F32"))
    needed(stored, name, "qzeros", why).expect((groups, -(-n * bits // 32)), why, ("I32",))
    tensors = ["qweight", "scales", "qzeros"]
    ordered = f"{name}.g_idx" in stored
    if ordered:
        stored[f"{name}.g_idx"].expect((k,), why, ("I32", "I64"))
        tensors.append("g_idx")
    elif config.get("desc_act") and group_size != -1:
        needed(stored, name, "g_idx", f"{why}, desc_act")
    zeros = not config.get("sym", True)
    scheme = why + (", activation order" if config.get("desc_act") else "")
    decode = partial(_decode, name=name, bits=bits, add=add)
    ordered = ordered and bool(config.get("desc_act")) and groups > 1
    half = stored[f"{name}.scales"].dtype == "F16"
    return Matrix(
        name, (n, k), scheme, bits, group_size, tuple(tensors), decode, zeros=zeros, ordered=ordered, half_scales=half
    )


def _decode(tensors, name, bits, add) -> Codes:
    k, n = tensors["qweight"].shape[0] * 32 // bits, tensors["qweight"].shape[1]
    codes = unpack(tensors["qweight"], bits, 0, k, straddle=True).T
    scales = tensors["scales"].float().T.contiguous()
    stored_zeros = unpack(tensors["qzeros"], bits, 1, n, straddle=True).T.short()
    zeros = (stored_zeros + add) & ((1 << bits) - 1)  # 0 less one was stored as all ones
    group_of = tensors.get("g_idx")
    if group_of is not None:
        group_of = group_of.long()
        if group_of.numel() and not 0 <= int(group_of.min()) <= int(group_of.max()) < scales.shape[1]:
            raise ValueError(
                f"tensor {name}.g_idx names groups up to {int(group_of.max())}, there are {scales.shape[1]}"
            )
    return centred(Codes(codes.contiguous(), scales, zeros, group_of), bits)


def centred(codes: Codes, bits: int) -> Codes:
    """The same with signed codes and no zero points where all zero points are the middle, as symmetric ones are."""
    half = 1 << (bits - 1)
    if codes.zeros is None or (codes.zeros != half).any():
        return codes
    signed = (codes.codes.short() - half).to(torch.int8)
    return Codes(signed, codes.scales, None, codes.group_of)

# SPDX-License-Identifier: BSD-3-Clause
"""bitsandbytes: int8 with one scale a row, and NF4 or FP4 in blocks, their scales perhaps quantised once more.

Format: https://github.com/bitsandbytes-foundation/bitsandbytes (functional.py, QuantState.as_dict): codes two a byte,
the first in the high half, over the flattened matrix; the table of values is stored with them.
"""

import json
from functools import partial
from typing import Any

import torch

from vllm_superl8.checkpoint.matrix import Codes, Matrix, needed, two_dims
from vllm_superl8.checkpoint.packing import nibbles, table_values
from vllm_superl8.checkpoint.safetensors_header import Stored

STATE = "weight.quant_state.bitsandbytes__"
"""Prefix, before "nf4" or "fp4", of the tensor with the JSON of shape and block size."""


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    int8 = {name.removesuffix(".SCB") for name in stored if name.endswith(".SCB")}
    int8 |= {
        name.removesuffix(".weight") for name, of in stored.items() if name.endswith(".weight") and of.dtype == "I8"
    }
    four_bits = {name.removesuffix(".weight.absmax") for name in stored if name.endswith(".weight.absmax")}
    four_bits |= {name.partition("." + STATE)[0] for name in stored if STATE in name}
    return {name: _int8(name, stored) for name in sorted(int8)} | {
        name: _four_bits(name, stored) for name in sorted(four_bits)
    }


def _int8(name: str, stored: dict[str, Stored]) -> Matrix:
    why = "bitsandbytes int8"
    n, k = two_dims(needed(stored, name, "weight", why))
    stored[f"{name}.weight"].expect((n, k), why, ("I8",))
    needed(stored, name, "SCB", why).expect((n,), why)
    return Matrix(name, (n, k), why, 8, -1, ("weight", "SCB"), partial(_decode_int8))


def _decode_int8(tensors) -> Codes:
    return Codes(tensors["weight"], tensors["SCB"].float().reshape(-1, 1) / 127)


def _four_bits(name: str, stored: dict[str, Stored]) -> Matrix:
    states = [of for of in stored if of.startswith(f"{name}.{STATE}")]
    if not states:
        raise ValueError(f"tensor {name}.{STATE}nf4 is missing from the checkpoint (bitsandbytes, 4 bits)")
    kind = states[0].rpartition("__")[2]
    why = f"bitsandbytes {kind}"
    tensors = ["weight", "weight.absmax", "weight.quant_map", states[0].removeprefix(f"{name}.")]
    if f"{name}.weight.nested_absmax" in stored:
        tensors += ["weight.nested_absmax", "weight.nested_quant_map"]
    for tensor in tensors:
        needed(stored, name, tensor, why)
    # Its shape and block size, 64 unless chosen otherwise, are in the JSON, which is read with the tensors.
    return Matrix(name, None, why, 0, 64, tuple(tensors), partial(_decode_four_bits, name=name))


def _decode_four_bits(tensors, name) -> torch.Tensor:
    state = json.loads(bytes(next(of for key, of in tensors.items() if key.startswith(STATE)).tolist()))
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        outer = tensors["weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: scales.numel()]
        scales = table_values(scales, tensors["weight.nested_quant_map"].float()) * outer + state["nested_offset"]
    codes = nibbles(tensors["weight"].flatten(), high_first=True)
    n, k = state["shape"]
    if n * k > codes.numel():
        raise ValueError(f"tensor {name}.weight holds {codes.numel()} values, its quant_state says {n}x{k}")
    scales = scales.float().repeat_interleave(state["blocksize"])[: n * k]
    return (table_values(codes[: n * k], tensors["weight.quant_map"]) * scales).reshape(n, k)

# SPDX-License-Identifier: BSD-3-Clause
"""compressed-tensors, as llm-compressor writes it: integers and floats of 2 to 8 bits.

Format: the compressed-tensors package (quantization/quant_args.py, compressors/).
"""

import re
from functools import partial
from typing import Any

import torch

from vllm_superl8.checkpoint.matrix import Codes, Matrix, group_count, needed, two_dims
from vllm_superl8.checkpoint.packing import FP4, e8m0, nibbles, table_values, unpack
from vllm_superl8.checkpoint.safetensors_header import Stored

FLOATS = ("BF16", "F16", "F32")
MARKS = ("weight_packed", "weight_scale")
"""A module with one of these is quantised."""


def matrices(config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Matrix]:
    if config.get("transform_config"):
        raise ValueError("compressed-tensors: transform_config asks for rotated weights, which superl8 does not read")
    if (sparsity := (config.get("sparsity_config") or {}).get("format") or "dense") != "dense":
        raise ValueError(
            f"compressed-tensors: sparsity_config has format {sparsity!r}, superl8 reads dense weights only"
        )
    names = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in MARKS}
    names |= {name.rpartition(".")[0] for name, of in stored.items() if _is_quantised_weight(name, of)}
    return {name: _matrix(name, _group(name, config), stored) for name in sorted(names)}


def _is_quantised_weight(name: str, tensor: Stored) -> bool:
    return name.endswith(".weight") and tensor.dtype in ("I8", "F8_E4M3") and len(tensor.shape) == 2


def _group(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config group of a module, the group's own format put in. Named targets go before classes of layers."""
    groups = list((config.get("config_groups") or {}).values())
    for matches in (_names_module, _names_class):
        for group in groups:
            if any(matches(target, name) for target in group.get("targets") or ()):
                return {**group, "format": group.get("format") or config.get("format")}
    raise ValueError(
        f"tensor {name}.weight is quantised, but no entry of config_groups has it among its targets: the "
        "configuration and the weights are of different checkpoints"
    )


def _names_module(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def _names_class(target: str, name: str) -> bool:
    return not target.startswith("re:") and target.endswith("Linear")


def _matrix(name: str, group: dict[str, Any], stored: dict[str, Stored]) -> Matrix:
    weights, kind = group.get("weights") or {}, group["format"]
    activations = group.get("input_activations") or {}
    bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
    if kind == "pack-quantized" and not is_float and bits in range(2, 9):
        matrix = _integers(name, weights, stored, packed=True)
    elif kind in ("int-quantized", "naive-quantized") and not is_float and bits in range(2, 9):
        matrix = _integers(name, weights, stored, packed=False)
    elif kind in ("float-quantized", "naive-quantized") and is_float and bits == 8:
        matrix = _fp8(name, weights, stored)
    elif kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") and is_float and bits == 4:
        matrix = _fp4(name, stored, kind)
    else:
        raise ValueError(
            f"{name}: compressed-tensors format {kind!r} with {bits} bits of type {weights.get('type')!r} is none that "
            "superl8 reads"
        )
    shifted = activations.get("symmetric") is False
    return Matrix(**{**vars(matrix), "shifted": shifted})


def _integers(name: str, weights: dict[str, Any], stored: dict[str, Stored], packed: bool) -> Matrix:
    bits = weights["num_bits"]
    why = f"compressed-tensors, {bits} bits, {weights.get('strategy')}"
    if packed:
        words = needed(stored, name, "weight_packed", why)
        if needed(stored, name, "weight_shape", why).shape != (2,):
            raise ValueError(f"{stored[name + '.weight_shape']} has not two numbers")
        n, columns = two_dims(words)
        k = _columns(name, weights, stored, columns * (32 // bits), why)
        words.expect((n, -(-k // (32 // bits))), f"{why}, rows of {k}", ("I32",))
    else:
        n, k = two_dims(needed(stored, name, "weight", why))
        stored[f"{name}.weight"].expect((n, k), why, ("I8",))
    group_size = _group_size(weights, name)
    groups = group_count(k, group_size, name)
    scale = needed(stored, name, "weight_scale", why)
    per_tensor = weights.get("strategy") == "tensor"
    if not per_tensor and scale.shape != (n,):
        scale.expect((n, groups), f"{why}, groups of {group_size}", FLOATS)
    zeros = weights.get("symmetric") is False
    packed_zeros = False
    tensors = ["weight_packed" if packed else "weight", "weight_scale"]
    if zeros:
        tensors.append("weight_zero_point")
        zero = needed(stored, name, "weight_zero_point", why)
        packed_zeros = zero.dtype == "I32"
        rows = -(-n // (32 // bits)) if packed_zeros else n
        zero.expect(scale.shape if per_tensor else (rows, groups), why, ("I32", "I8"))
    ordered = f"{name}.weight_g_idx" in stored
    if ordered:
        tensors.append("weight_g_idx")
        stored[f"{name}.weight_g_idx"].expect((k,), why)
    elif weights.get("actorder") in ("group", "dynamic"):
        needed(stored, name, "weight_g_idx", f"{why}, actorder {weights['actorder']}")
    decode = partial(_decode_integers, bits=bits, n=n, k=k, groups=groups, packed_zeros=packed_zeros)
    return Matrix(
        name, (n, k), f"{why} {group_size if group_size != -1 else ''}".strip(), bits, group_size, tuple(tensors),
        decode, zeros=zeros, ordered=ordered, half_scales=scale.dtype == "F16",
    )  # fmt: skip


def _columns(name: str, weights: dict[str, Any], stored: dict[str, Stored], most: int, why: str) -> int:
    """Columns of a packed weight, whose last word may have padding: its scales say where it ends."""
    if weights.get("strategy") != "group":
        return most
    return min(most, _group_size(weights, name) * needed(stored, name, "weight_scale", why).shape[-1])


def _group_size(weights: dict[str, Any], name: str) -> int:
    strategy = weights.get("strategy")
    if strategy in ("channel", "tensor"):
        return -1
    if strategy != "group":
        raise ValueError(f"{name}: compressed-tensors strategy {strategy!r} of weights is none that superl8 reads")
    return weights.get("group_size")


def _decode_integers(tensors, bits, n, k, groups, packed_zeros) -> Codes:
    half = 1 << (bits - 1)
    if "weight_packed" in tensors:
        codes = (unpack(tensors["weight_packed"], bits, 1, k).short() - half).to(torch.int8)
    else:
        codes = tensors["weight"]
    scales = tensors["weight_scale"].float().reshape(-1, groups).expand(n, groups).contiguous()
    zeros = tensors.get("weight_zero_point")
    if packed_zeros:
        zeros = unpack(zeros, bits, 0, n).short() - half
    if zeros is not None:
        zeros = zeros.reshape(-1, groups).expand(n, groups)
    group_of = tensors.get("weight_g_idx")
    return Codes(codes, scales, zeros, None if group_of is None else group_of.long())


def _fp8(name: str, weights: dict[str, Any], stored: dict[str, Stored]) -> Matrix:
    why = f"compressed-tensors, fp8, {weights.get('strategy')}"
    block = weights.get("block_structure") if weights.get("strategy") == "block" else None
    return fp8_matrix(name, stored, "weight_scale", block, why)


def fp8_matrix(name: str, stored: dict[str, Stored], scale: str, block: list[int] | None, why: str) -> Matrix:
    """An E4M3 weight with one scale, one a row or one a block of [rows, columns]; value = code * scale."""
    weight = needed(stored, name, "weight", why)
    n, k = two_dims(weight)
    weight.expect((n, k), why, ("F8_E4M3",))
    scales = needed(stored, name, scale, why)
    if block:
        scales.expect((-(-n // block[0]), -(-k // block[1])), f"{why}, blocks of {block[0]}x{block[1]}")
    elif scales.shape not in ((), (1,), (1, 1), (n,), (n, 1)):
        raise ValueError(f"{scales} has shape {list(scales.shape)}, wanted one number or one for each of {n} rows")
    decode = partial(_decode_fp8, scale=scale, block=tuple(block) if block else None)
    return Matrix(name, (n, k), why, 0, block[1] if block else -1, ("weight", scale), decode)


def _decode_fp8(tensors, scale, block) -> torch.Tensor:
    weight, scales = tensors["weight"].float(), tensors[scale].float()
    n, k = weight.shape
    if block:
        scales = scales.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    elif scales.numel() > 1:
        scales = scales.reshape(n, 1)
    return weight * scales


def _fp4(name: str, stored: dict[str, Stored], kind: str) -> Matrix:
    n, half = two_dims(needed(stored, name, "weight_packed", kind))
    stored[f"{name}.weight_packed"].expect((n, half), kind, ("U8",))
    tensors = ["weight_packed", "weight_scale"]
    micro = kind == "mxfp4-pack-quantized"
    group_size = 32 if micro else 16
    scale = needed(stored, name, "weight_scale", kind)
    scale.expect((n, group_count(2 * half, group_size, name)), kind, ("U8", "F8_E8M0") if micro else ("F8_E4M3",))
    if not micro:
        tensors.append("weight_global_scale")
        needed(stored, name, "weight_global_scale", kind)
    return Matrix(name, (n, 2 * half), kind, 0, group_size, tuple(tensors), partial(_decode_fp4, group_size=group_size))


def _decode_fp4(tensors, group_size) -> torch.Tensor:
    scales = tensors["weight_scale"]
    if "weight_global_scale" in tensors:  # stored as what the scales were divided by
        scales = scales.float() / tensors["weight_global_scale"].float()
    else:
        scales = e8m0(scales.view(torch.uint8))
    return fp4_values(tensors["weight_packed"], scales, group_size)


def fp4_values(packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """packed (n, k / 2) uint8, even column in the low half, scales (n, k / group_size) float32 -> (n, k) float32."""
    return table_values(nibbles(packed), FP4) * scales.repeat_interleave(group_size, dim=1)

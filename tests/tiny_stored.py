# SPDX-License-Identifier: BSD-3-Clause
"""Tiny quantised checkpoints, written by the schemes' own library or by their published format, and their values.

Each packer takes a weight (n, k) and gives the module's stored tensors and the float32 weight that they stand for.
compressed-tensors is written and read back by its library; the others are packed here as streams of bits, which has
nothing in common with how they are read.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from models import tiny
from safetensors.torch import load_file, save_file

from vllm_superl8.formats import int4

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]

NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
"""QLoRA (arXiv:2305.14314), appendix E."""


@dataclass(frozen=True)
class Scheme:
    """A way to store a model.

    config  its quantization_config; empty: a 16-bit checkpoint
    pack    weight -> Packed
    """

    config: dict
    pack: Callable[[torch.Tensor], Packed]


def write(scheme: Scheme, folder: Path, model="qwen3"):
    """Write tiny.CONFIGS[model] in `scheme`; returns the transformers model with the values that the file stands for.

    Linear layers of the decoder are quantised, routers and the head are not.
    """
    built = tiny.write(model, folder)
    stored = load_file(folder / "model.safetensors")
    state = built.state_dict()
    for name in [name for name in stored if name.endswith("_proj.weight") and stored[name].dim() == 2]:
        packed, values = scheme.pack(stored.pop(name).float())
        stored |= {
            name.removesuffix("weight") + suffix: tensor.contiguous().clone() for suffix, tensor in packed.items()
        }
        _set(state, name, values)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if scheme.config:
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    return built


def _set(state: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Put a checkpoint's tensor into a model's state, where transformers keeps experts in one tensor each."""
    if name in state:
        state[name].copy_(values)
        return
    parent, _, rest = name.partition(".experts.")
    expert, which = rest.split(".")[:2]
    if which == "down_proj":
        state[f"{parent}.experts.down_proj"][int(expert)].copy_(values)
    else:
        halves = state[f"{parent}.experts.gate_up_proj"][int(expert)].chunk(2)
        halves[which == "up_proj"].copy_(values)


def compressed_tensors(kind: str, weights: dict, activations: dict | None = None) -> Scheme:
    """The library's own compressor for format `kind`."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=activations and QuantizationArgs(**activations)
    )
    compressor = BaseCompressor.get_value_from_registry(kind)

    def pack(weight: torch.Tensor) -> Packed:
        state = {"weight": weight, **_parameters(weight, args)}
        with torch.compiler.set_stance("force_eager"):  # the library compiles its FP4 packing, which takes seconds
            stored = compressor.compress(state, scheme)
            values = compressor.decompress(stored, scheme)["weight"].float()
        if activations and not activations.get("dynamic"):
            stored["input_scale"] = torch.tensor([0.02])
        return stored, values

    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return Scheme({**config, "ignore": ["lm_head"]}, pack)


def _parameters(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    k = weight.shape[1]
    extra = {}
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        blocks = weight.reshape(1, 1, -1)
    else:
        blocks = weight.unflatten(1, (-1, args.group_size or k))
        if args.actorder:
            group_of = torch.randperm(k, generator=torch.Generator().manual_seed(k)) // args.group_size
            blocks = weight[:, torch.argsort(group_of, stable=True)].unflatten(1, (-1, args.group_size))
            extra["weight_g_idx"] = group_of.int()
    if args.num_bits == 4 and args.type == "float" and args.group_size == 16:
        extra["weight_global_scale"] = 6 * 448 / weight.abs().amax().reshape(1)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, extra.get("weight_global_scale"))
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return {"weight_scale": scale, "weight_zero_point": zero, **extra}


def _pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row's codes, lowest bit first, as 32-bit words of one stream of bits."""
    stream = (codes.numpy()[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4"))


def _asymmetric(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool):
    """codes, scales and zero points of groups of neighbouring columns, (n, k) and (n, groups)."""
    top, half = (1 << bits) - 1, 1 << (bits - 1)
    groups = weight.unflatten(1, (-1, group_size))
    if symmetric:
        scales = (groups.abs().amax(-1) / (half - 1)).half().float()
        zeros = torch.full_like(scales, half)
    else:
        lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((highest - lowest) / (top - 1)).half().float()
        zeros = (1 - lowest / scales).round().clamp(1, top)  # 0 cannot be told from 16 in AutoGPTQ's files
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    values = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1).int(), scales, zeros.int(), values.flatten(1)


def gptq(bits: int, group_size: int, desc_act=False, sym=True, version=1) -> Scheme:
    def pack(weight: torch.Tensor) -> Packed:
        k = weight.shape[1]
        size = k if group_size == -1 else group_size
        group_of = torch.arange(k) // size
        if desc_act:
            group_of = group_of[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        order = torch.argsort(group_of, stable=True)
        codes, scales, zeros, values = _asymmetric(weight[:, order], bits, size, sym)
        back = torch.argsort(order)
        stored = {
            "qweight": _pack_rows(codes[:, back], bits).T,
            "scales": scales.half().T,
            "qzeros": _pack_rows((zeros - int(version == 1)).T, bits),
            "g_idx": group_of.int(),
        }
        return stored, values[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym}
    return Scheme({**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, pack)


def awq(group_size: int) -> Scheme:
    def interleaved(codes: torch.Tensor) -> torch.Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return _pack_rows(codes.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros, values = _asymmetric(weight, 4, group_size, symmetric=False)
        stored = {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.half().T}
        return stored, values

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return Scheme(config, pack)


def auto_round(like: Scheme, packing: str) -> Scheme:
    config = {**like.config, "quant_method": "auto-round", "packing_format": f"auto_round:{packing}"}
    del config["checkpoint_format" if packing == "auto_gptq" else "version"]
    return Scheme(config, like.pack)


def fp8(block: list[int] | None) -> Scheme:
    def pack(weight: torch.Tensor) -> Packed:
        rows, columns = block or weight.shape
        tiles = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = tiles.abs().amax((1, 3), keepdim=True) / 448
        codes = (tiles / scales).to(torch.float8_e4m3fn)
        values = (codes.float() * scales).flatten(2).flatten(0, 1)
        name, stored = ("weight_scale_inv", scales[:, 0, :, 0]) if block else ("weight_scale", scales.reshape(()))
        return {"weight": codes.flatten(2).flatten(0, 1), name: stored}, values

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return Scheme({**config, **({"weight_block_size": block} if block else {})}, pack)


def modelopt_nvfp4() -> Scheme:
    written = compressed_tensors("nvfp4-pack-quantized", NVFP4_WEIGHTS)

    def pack(weight: torch.Tensor) -> Packed:
        stored, values = written.pack(weight)
        return {
            "weight": stored["weight_packed"],
            "weight_scale": stored["weight_scale"],
            "weight_scale_2": 1 / stored["weight_global_scale"].reshape(()),
            "input_scale": torch.tensor(0.01),
        }, values

    return Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, pack)


def bitsandbytes_int8() -> Scheme:
    def pack(weight: torch.Tensor) -> Packed:
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, codes.float() * largest[:, None] / 127

    return Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


def bitsandbytes_nf4(nested: bool) -> Scheme:
    table = torch.tensor(NF4)

    def pack(weight: torch.Tensor) -> Packed:
        blocks = weight.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        stored, state = {}, {"blocksize": 64, "shape": list(weight.shape), "dtype": "float32", "quant_type": "nf4"}
        if nested:
            offset = largest.mean()
            outer = (largest - offset).unflatten(0, (-1, min(256, largest.numel()))).abs().amax(1)
            step = torch.linspace(-1, 1, 256)
            ratios = (largest - offset) / outer.repeat_interleave(256)[: largest.numel()]
            inner = (ratios[:, None] - step).abs().argmin(1)
            largest = step[inner] * outer.repeat_interleave(256)[: largest.numel()] + offset
            stored |= {"weight.nested_absmax": outer, "weight.nested_quant_map": step}
            state |= {"nested_blocksize": 256, "nested_offset": offset.item()}
        codes = (blocks / largest[:, None]).unsqueeze(-1).sub(table).abs().argmin(-1)
        values = (table[codes] * largest[:, None]).reshape(weight.shape)
        pairs = codes.flatten().reshape(-1, 2)
        stored |= {
            "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
            "weight.absmax": inner.to(torch.uint8) if nested else largest,
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        return stored, values

    return Scheme({"quant_method": "bitsandbytes", "load_in_4bit": True}, pack)


def rounded_to_4_bits() -> Scheme:
    """A 16-bit checkpoint whose values are those that option weight_bits=4 makes of them."""

    def pack(weight: torch.Tensor) -> Packed:
        return {"weight": weight}, int4.dequantize(int4.quantize(weight, 64, symmetric=False))

    return Scheme({}, pack)


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def _weights(bits: int, group_size: int, **more) -> dict:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": True, **more}


SCHEMES: dict[str, Scheme] = {
    "ct-w8a8": compressed_tensors("int-quantized", CHANNEL, TOKEN),
    "ct-w8a8-static": compressed_tensors("int-quantized", CHANNEL, {**TOKEN, "strategy": "tensor", "dynamic": False}),
    "ct-w8a8-asymmetric": compressed_tensors("int-quantized", CHANNEL, {**TOKEN, "symmetric": False}),
    "ct-w8a8-g128": compressed_tensors("int-quantized", _weights(8, 128), TOKEN),
    "ct-w8a16": compressed_tensors("pack-quantized", CHANNEL),
    "ct-w8a16-g32-asymmetric": compressed_tensors("pack-quantized", _weights(8, 32, symmetric=False)),
    "ct-w4a16-g128": compressed_tensors("pack-quantized", _weights(4, 128)),
    "ct-w4a16-g32-asymmetric": compressed_tensors("pack-quantized", _weights(4, 32, symmetric=False)),
    "ct-w4a16-g64-actorder": compressed_tensors("pack-quantized", _weights(4, 64, actorder="group")),
    "ct-w3a16-g64": compressed_tensors("pack-quantized", _weights(3, 64)),
    "ct-fp8": compressed_tensors("float-quantized", {**CHANNEL, "type": "float"}, {**TOKEN, "type": "float"}),
    "ct-fp8-tensor": compressed_tensors("float-quantized", {**CHANNEL, "type": "float", "strategy": "tensor"}),
    "ct-nvfp4": compressed_tensors("nvfp4-pack-quantized", NVFP4_WEIGHTS),
    "ct-mxfp4": compressed_tensors("mxfp4-pack-quantized", {**NVFP4_WEIGHTS, "strategy": "group", "group_size": 32}),
    "gptq-8": gptq(8, 128),
    "gptq-8-rows": gptq(8, -1),
    "gptq-8-g64": gptq(8, 64),
    "gptq-4": gptq(4, 128),
    "gptq-4-rows-desc_act": gptq(4, -1, desc_act=True),
    "gptq-4-g32-desc_act": gptq(4, 32, desc_act=True),
    "gptq-4-g64-asymmetric-v2": gptq(4, 64, sym=False, version=2),
    "gptq-4-g128-asymmetric": gptq(4, 128, sym=False),
    "gptq-3": gptq(3, 64),
    "gptq-2": gptq(2, 32, sym=False),
    "awq": awq(64),
    "auto-round": auto_round(gptq(4, 128), "auto_gptq"),
    "auto-round-awq": auto_round(awq(128), "auto_awq"),
    "fp8": fp8(None),
    "fp8-block": fp8([128, 128]),
    "modelopt-nvfp4": modelopt_nvfp4(),
    "bitsandbytes-int8": bitsandbytes_int8(),
    "bitsandbytes-nf4": bitsandbytes_nf4(nested=False),
    "bitsandbytes-nf4-nested": bitsandbytes_nf4(nested=True),
}

# SPDX-License-Identifier: BSD-3-Clause
"""16-bit checkpoints to ``.superl8`` files, a tensor at a time."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from vllm_superl8 import __version__
from vllm_superl8.checkpoint.gguf_stored import StoredMatrix
from vllm_superl8.checkpoint.superl8_header import ContainerError
from vllm_superl8.checkpoint.superl8_writer import Superl8Writer
from vllm_superl8.formats import int4, int8
from vllm_superl8.formats.container import DTYPE_NAMES
from vllm_superl8.quant.container.source import Source
from vllm_superl8.quant.options import GROUP_SIZE

CHUNK_VALUES = 1 << 24
"""Values quantised at a time: some 200 MB of float32 beside a tensor, whatever its size."""

NOT_LINEAR = re.compile(
    r"embed|lm_head|norm|conv|rotary|(^|\.)(wte|wpe|router|gate|shared_expert_gate)$|(^|\.)block_sparse_moe\.gate$"
)
"""Modules whose matrices stay in 16 bit, as those of vLLM that run without quantisation: embeddings, heads, routers."""

EXPERT = re.compile(r"(?:^|\.)layers\.(\d+)\..*experts\.(\d+)\.")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Recipe:
    """How to convert.

    bits        8: int8 codes. 4: two codes a byte in [-7, 7] (experts: int8). 16: values as they are
    group       columns that share a scale: 128; -1 is one scale a row; for 4 bits 32, 64 or 128. Experts with another K
                than whole groups get one scale a row; for 4 bits the largest group up to this one that divides K is
                taken, and int8 where there is none
    blocks      matrices that come in the blocks of a GGUF file keep them
    keep        modules that stay in 16 bit: names, fnmatch patterns, or regular expressions after "re:"
    pp_stages   pipeline stages that the shard lists are for
    """

    bits: int = 8
    group: int = -1
    keep: tuple[str, ...] = ()
    pp_stages: int = 1
    blocks: bool = False

    def __post_init__(self):
        if self.bits not in (4, 8, 16):
            raise ContainerError(f"convert: bits is {self.bits}, choose 4, 8 or 16")
        if self.bits == 4 and self.group not in int4.GROUP_SIZES:
            raise ContainerError(f"convert: group is {self.group}, 4 bits have groups of 32, 64 or 128")
        if self.bits != 4 and self.group not in (-1, GROUP_SIZE):
            raise ContainerError(f"convert: group is {self.group}, choose -1 (one scale a row) or {GROUP_SIZE}")
        if self.pp_stages < 1:
            raise ContainerError(f"convert: pp_stages is {self.pp_stages}, at least 1 is possible")

    def scheme(self, name: str, shape: Sequence[int]) -> tuple[str, int]:
        """The scheme of a tensor, and columns that share a scale (-1: the row)."""
        module = name.removesuffix(".weight")
        if self.bits == 16 or module == name or len(shape) != 2 or shape[0] < 2 or shape[1] % 4:
            return "raw", -1
        if NOT_LINEAR.search(module) or any(_matches(module, pattern) for pattern in self.keep):
            return "raw", -1
        if self.bits == 4 and not EXPERT.search(name):
            for group in sorted(int4.GROUP_SIZES, reverse=True):
                if group <= self.group and shape[1] % group == 0:
                    return "per_group_i4", group
        group = GROUP_SIZE if self.bits == 4 else self.group
        if group == -1 or (EXPERT.search(name) and shape[1] % group):
            return "per_row_i8", -1
        return "per_group_i8", group


def _matches(module: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else fnmatch(module, pattern)


def convert(
    source: Source,
    target: Path,
    recipe: Recipe,
    variant: str = "footer",
    advance: Callable[[str, int], None] = lambda name, nbytes: None,
) -> None:
    """Write the model at `source` to the file `target`, which appears when it is whole.

    advance   called after each tensor with its name and the bytes that were written; 0 for one from before

    An interrupted call of the same source and recipe goes on where it stopped. Raises ContainerError for tensors that
    the format cannot hold, OSError where the disk does.
    """
    key = json.dumps({"version": __version__, "source": source.fingerprint, "recipe": asdict(recipe)}, sort_keys=True)
    with Superl8Writer(target, variant, resume_key=key) as writer:
        writer.provenance = {"converter": f"vllm-superl8 {__version__}", "source": source.path.name, **asdict(recipe)}
        architecture = (source.config.get("architectures") or [source.config.get("model_type")])[0]
        writer.meta = {"arch": architecture, "weight_bits": recipe.bits, "config": source.config}
        done = {name for name, row in writer.rows.items() if row["scale"] is None or row["scale"] in writer}
        for name in done - {row["scale"] for row in writer.rows.values()}:
            advance(name, 0)
        for name, value in source.tensors(done):
            advance(name, _add(writer, name, value, recipe))
        for file in source.files:
            writer.add_file(file.name, file.read_bytes())
        writer.pp_stages = stages(list(writer.rows), recipe.pp_stages)
        writer.experts = experts(list(writer.rows))


def _add(writer: Superl8Writer, name: str, value: torch.Tensor, recipe: Recipe) -> int:
    if isinstance(value, StoredMatrix):
        if recipe.blocks and recipe.scheme(name, value.shape)[0] != "raw":
            writer.add(name, value.blocks, "gguf_kquant", codebook=value.format.ggml)
            return value.blocks.nbytes
        value = value.values()
    scheme, group = recipe.scheme(name, value.shape)
    if not value.is_floating_point() or scheme == "raw":
        if value.dtype not in DTYPE_NAMES:
            raise ContainerError(f"{writer.path}: tensor {name} is {value.dtype}, which the format cannot hold")
        writer.add(name, value)
        return value.nbytes
    codes, scales = quantize(value, group, scheme)
    if not torch.isfinite(scales).all():
        raise ContainerError(f"{writer.path}: tensor {name} of the source has NaN or infinity; keep it in 16 bit")
    scale_name = f"{name}_scale"
    if scale_name not in writer:
        writer.add(scale_name, scales.squeeze(1) if group == -1 else scales)
    codebook = "int4" if scheme == "per_group_i4" else None
    writer.add(name, codes, scheme, scale=scale_name, group_size=None if group == -1 else group, codebook=codebook)
    return codes.nbytes + scales.nbytes


def quantize(weight: torch.Tensor, group: int, scheme: str = "per_group_i8") -> tuple[torch.Tensor, torch.Tensor]:
    """weight (n, k) -> codes (n, k) int8, the last group of which may be short, or for per_group_i4 (n, k / 2) uint8;
    and scales (n, groups) float32."""
    n, k = weight.shape
    four = scheme == "per_group_i4"
    padding = 0 if group == -1 else -k % group
    codes = torch.empty(n, k // 2 if four else k, dtype=torch.uint8 if four else torch.int8)
    scales = torch.empty(n, 1 if group == -1 else (k + padding) // group)
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, n, step):
        part = slice(start, start + step)
        if four:
            packed, scales[part] = int4.quantize(weight[part], group, scale_dtype=torch.float32)
            codes[part] = packed ^ 0x88  # from codes around a zero of 8 to two's complement
            continue
        padded = torch.nn.functional.pad(weight[part], (0, padding))
        quantised, scales[part] = int8.quantize(padded, group)
        codes[part] = quantised[:, :k]
    return codes, scales


def stages(names: Sequence[str], count: int) -> list[list[str]]:
    """Names a pipeline stage: layers in equal parts, what stands before the first layer first, the rest last."""
    numbers = [int(match[1]) if (match := LAYER.search(name)) else None for name in names]
    layers = 1 + max((number for number in numbers if number is not None), default=-1)
    lists: list[list[str]] = [[] for _ in range(count)]
    for name, number in zip(names, numbers, strict=True):
        if number is not None:
            stage = number * count // layers
        else:
            stage = 0 if "embed" in name or "wte" in name else count - 1
        lists[stage].append(name)
    return lists


def experts(names: Sequence[str]) -> dict[str, list[str]]:
    """ "layer.expert" to the names of its tensors."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := EXPERT.search(name):
            found.setdefault(f"{match[1]}.{match[2]}", []).append(name)
    return found

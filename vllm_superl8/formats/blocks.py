# SPDX-License-Identifier: BSD-3-Clause
"""Formats of weights whose bytes hold codes and their own scales: a matrix (n, k) as planes, and what they mean.

A GGUF block mixes codes, high bits and scales in 18 to 210 bytes, which no wide load can fetch. Here each of these
parts has a tensor of its own, a *plane* (n, bytes a row): as many bytes in all, rearranged once at load. LAYOUTS lists
the planes of a format. Rows stay rows: planes of several matrices of one format can be put one below the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from vllm_superl8.formats.layout import LAYOUTS, Layout


@dataclass(frozen=True)
class Decoded:
    """What planes say: value = scale * code + minimum, group by group.

    codes   (..., size) uint8 or int8; the groups of a row in order
    scales  float32, one a group
    minima  the same, or None for zeros
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


@dataclass(frozen=True)
class Codec:
    """The reference codec of one GGUF type.

    pack    blocks (n, blocks, bytes) uint8 as the file has them -> planes, each (n, blocks, bytes)
    decode  planes, each (n, blocks, bytes) -> Decoded
    """

    pack: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    decode: Callable[..., Decoded]


def halves(plane: torch.Tensor) -> torch.Tensor:
    """(..., 2 c) uint8 -> (..., c) float32: fp16 numbers."""
    return plane.contiguous().view(torch.float16).float()


def signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """uint8 codes minus `zero`, as int8."""
    return codes.view(torch.int8) - zero


def codec_of(layout: Layout) -> Codec:
    """The reference codec of a GGUF format."""
    return _module(layout).CODECS[layout.name]


def codebook(layout: Layout, device: torch.device) -> torch.Tensor | None:
    """The table of codes that a format's kernels look numbers up in, (entries, 4 or 8) int8 on `device`; or None."""
    find = getattr(_module(layout), "codebook", None)
    return find and find(layout.name, device)


def _module(layout: Layout):
    return import_module(f"vllm_superl8.formats.{layout.codec}")


def layout_of(name: str) -> Layout:
    """The format called `name`. Raises ValueError, listing the known ones, if it is no format of blocks."""
    layout = LAYOUTS.get(name)
    if layout is None or not layout.planes:
        known = ", ".join(row.name for row in LAYOUTS.values() if row.planes)
        raise ValueError(f"weights of format {name!r}: wanted one of {known}")
    return layout


def pack(rows: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """rows (n, bytes) uint8 of a GGUF tensor -> its planes, each (n, bytes a row) uint8, contiguous.

    Raises ValueError if a row is not a whole number of blocks.
    """
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % layout.bytes:
        raise ValueError(
            f"{layout.name}: rows are {tuple(rows.shape)} {rows.dtype}, wanted (n, bytes) uint8, whole blocks of "
            f"{layout.bytes} bytes"
        )
    planes = codec_of(layout).pack(rows.unflatten(1, (-1, layout.bytes)))
    return [plane.flatten(1).contiguous() for plane in planes]


def check_planes(planes: list[torch.Tensor], layout: Layout, k: int) -> None:
    """Raise ValueError for planes that are no matrix with rows of k of this format."""
    if k < layout.values or k % layout.values:
        raise ValueError(f"{layout.name}: k is {k}, wanted a multiple of the block's {layout.values} values")
    if not layout.ggml:
        _module(layout).check(planes, layout, k)
        return
    n, blocks = planes[0].shape[0] if planes else 0, k // layout.values
    shapes = [(tuple(plane.shape), plane.dtype) for plane in planes]
    wanted = [((n, blocks * size), torch.uint8) for size in layout.planes]
    if shapes != wanted:
        raise ValueError(f"{layout.name}: planes are {shapes}, wanted {wanted} for rows of {k}")


def decode(planes: list[torch.Tensor], layout: Layout) -> Decoded:
    """Codes (n, groups, size), scales and minima (n, groups) of planes."""
    if not layout.ggml:
        return _module(layout).decode(planes)
    split = [plane.unflatten(1, (-1, size)) for plane, size in zip(planes, layout.planes, strict=True)]
    found = codec_of(layout).decode(*split)
    scales = found.scales.flatten(1)
    minima = None if found.minima is None else found.minima.flatten(1)
    return Decoded(found.codes.flatten(1).unflatten(1, (scales.shape[1], -1)), scales, minima)


def dequantize(planes: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The values (n, k) float32 of planes."""
    found = decode(planes, layout)
    values = found.codes.float().mul_(found.scales.unsqueeze(-1))
    if found.minima is not None:
        values += found.minima.unsqueeze(-1)
    return values.flatten(1)

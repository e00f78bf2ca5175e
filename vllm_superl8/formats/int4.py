# SPDX-License-Identifier: BSD-3-Clause
"""4-bit weights with a scale for every group of columns of a row: the reference codec. Device: csrc/formats/int4.cuh.

value = scale * (code - zero), codes 0 to 15. Format "int4" has the zero 8; "int4_zero" one zero a group.
Planes of a matrix (n, k), in this order:

    codes   (n, k / 2) uint8, two a byte, the even column in the low half
    scales  (n, k / group_size) float16 or float32; group_size is 32, 64 or 128
    zeros   (n, k / group_size) uint8, "int4_zero" only
"""

import torch

from vllm_superl8.formats.bits import UNIT
from vllm_superl8.formats.blocks import Decoded
from vllm_superl8.formats.layout import Layout

ZERO = 8
"""The zero of symmetric weights."""

GROUP_SIZES = (32, 64, 128)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes (..., k) of 0 to 15, any integer dtype -> (..., k / 2) uint8.

    Raises ValueError for odd k or other codes.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"int4.pack: rows of {codes.shape[-1]} codes, wanted an even number")
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) <= 15):
        raise ValueError(f"int4.pack: codes from {int(codes.min())} to {int(codes.max())}, wanted 0 to 15")
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(..., k / 2) uint8 -> codes (..., k) uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantize(
    weight: torch.Tensor, group_size: int, symmetric: bool = True, scale_dtype: torch.dtype = torch.float16
) -> list[torch.Tensor]:
    """weight (n, k) float -> planes of "int4", or of "int4_zero" if not symmetric.

    Symmetric: scale = max|w| / 7, codes 1 to 15. Else scale = (max - min) / 15 with 0 inside the range, so that it is
    met exactly. Codes are rounded with the scale as stored. Raises ValueError for a group_size that does not divide k.
    """
    if group_size not in GROUP_SIZES or weight.shape[-1] % group_size:
        raise ValueError(
            f"int4.quantize: group_size {group_size} for rows of {weight.shape[-1]}, wanted one of {GROUP_SIZES} that "
            "divides them"
        )
    groups = weight.float().unflatten(-1, (-1, group_size))
    if symmetric:
        scales, zeros = groups.abs().amax(-1) / 7, None
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / 15
    scales = torch.where(scales.to(scale_dtype) == 0, torch.ones_like(scales), scales).to(scale_dtype)
    inverse = scales.float().unsqueeze(-1)
    if not symmetric:
        zeros = torch.round(-low / inverse.squeeze(-1)).clamp(0, 15)
    codes = torch.round(groups / inverse) + (ZERO if zeros is None else zeros.unsqueeze(-1))
    planes = [pack(codes.clamp(1 if symmetric else 0, 15).to(torch.uint8).flatten(-2)), scales]
    return planes if zeros is None else [*planes, zeros.to(torch.uint8)]


def check(planes: list[torch.Tensor], layout: Layout, k: int) -> None:
    """Raise ValueError for planes that are no matrix with rows of k of this format, or of int3."""
    wanted = 3 if layout.name == "int4_zero" else 2
    shapes = [(tuple(plane.shape), plane.dtype) for plane in planes]
    if len(planes) == wanted:
        codes, scales, *zeros = planes
        groups = scales.shape[-1]
        if (
            (codes.dtype, codes.dim(), codes.shape[-1]) == (torch.uint8, 2, k // UNIT * layout.bytes)
            and scales.dtype in (torch.float16, torch.float32)
            and any(groups * size == k for size in GROUP_SIZES)
            and scales.shape == (codes.shape[0], groups)
            and all(zero.dtype == torch.uint8 and zero.shape == scales.shape for zero in zeros)
        ):
            return
    raise ValueError(
        f"{layout.name}: planes are {shapes} for rows of {k}, wanted codes (n, {k // UNIT * layout.bytes}) uint8, "
        "scales (n, groups) "
        f"float16 or float32{', zeros (n, groups) uint8' if wanted == 3 else ''}, with groups of 32, 64 or 128 columns"
    )


def decode(planes: list[torch.Tensor]) -> Decoded:
    """Codes (n, k / 32, 32), scales and minima (n, k / 32) of planes."""
    packed, scales, *zeros = planes
    codes = unpack(packed).unflatten(-1, (-1, UNIT))
    repeat = codes.shape[1] // scales.shape[1]
    scales = scales.float()
    minima = -scales * zeros[0] if zeros else -scales * ZERO
    return Decoded(codes, scales.repeat_interleave(repeat, 1), minima.repeat_interleave(repeat, 1))


def dequantize(planes: list[torch.Tensor]) -> torch.Tensor:
    """The values (n, k) float32 of planes."""
    packed, scales, *zeros = planes
    codes = unpack(packed).unflatten(-1, (scales.shape[1], -1)).float()
    zero = zeros[0].unsqueeze(-1) if zeros else ZERO
    return ((codes - zero) * scales.float().unsqueeze(-1)).flatten(1)

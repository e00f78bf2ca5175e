# SPDX-License-Identifier: BSD-3-Clause
"""3-bit weights with a scale for every group of columns of a row (W3A8): the reference codec.

value = scale * (code - 4), codes 0 to 7. Planes of a matrix (n, k), in this order; device: csrc/formats/int4.cuh.

    codes   (n, k / 32 * 12) uint8: of 32 values the low two bits, 8 bytes, and the high bit, 4 bytes (formats.bits)
    scales  (n, k / group_size) float16 or float32; group_size is 32, 64 or 128

As three little-endian 32-bit words these are the bit-planes qs0, qs1, hp of per_group_w3a8 in .superl8 files.
"""

import torch

from vllm_superl8.formats.bits import UNIT, pack1, pack2, unpack1, unpack2
from vllm_superl8.formats.blocks import Decoded
from vllm_superl8.formats.int4 import GROUP_SIZES, check

ZERO = 4

__all__ = ["GROUP_SIZES", "ZERO", "check", "decode", "pack", "quantize", "unpack"]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes (n, k) of 0 to 7, k a multiple of 32 -> (n, k / 32 * 12) uint8. Raises ValueError for other codes."""
    if codes.numel() and not (int(codes.min()) >= 0 and int(codes.max()) <= 7):
        raise ValueError(f"int3.pack: codes from {int(codes.min())} to {int(codes.max())}, wanted 0 to 7")
    units = codes.to(torch.uint8).unflatten(-1, (-1, UNIT))
    return torch.cat((pack2(units & 3), pack1(units >> 2)), -1).flatten(-2)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(n, k / 32 * 12) uint8 -> codes (n, k / 32, 32) uint8."""
    low, high = packed.unflatten(-1, (-1, 12)).split((8, 4), -1)
    return unpack2(low) | unpack1(high) << 2


def quantize(weight: torch.Tensor, group_size: int, scale_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """weight (n, k) float -> planes: scale = max|w| / 3.5 as stored, codes 0 to 7.

    Raises ValueError for a group_size that does not divide k.
    """
    if group_size not in GROUP_SIZES or weight.shape[-1] % group_size:
        raise ValueError(
            f"int3.quantize: group_size {group_size} for rows of {weight.shape[-1]}, wanted one of {GROUP_SIZES} that "
            "divides them"
        )
    groups = weight.float().unflatten(-1, (-1, group_size))
    scales = (groups.abs().amax(-1) / 3.5).to(scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (torch.round(groups / scales.float().unsqueeze(-1)) + ZERO).clamp(0, 7)
    return [pack(codes.flatten(-2)), scales]


def decode(planes: list[torch.Tensor]) -> Decoded:
    """Codes (n, k / 32, 32) and scales (n, k / 32) of planes."""
    packed, scales = planes
    codes = unpack(packed).view(torch.int8) - ZERO
    return Decoded(codes, scales.float().repeat_interleave(codes.shape[1] // scales.shape[1], 1))

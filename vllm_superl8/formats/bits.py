# SPDX-License-Identifier: BSD-3-Clause
"""Codes of a few bits, 32 at a time, in the order in which a kernel unpacks them (csrc/formats/blocks.cuh).

Value 4 i + b of 32 belongs to byte b of word i, so that a shift and a mask give the four values of a dp4a word. Codes
of 3, 5 or 6 bits are kept as a plane of their low bits and one of their high bits.
"""

import torch

UNIT = 32
"""Values that are packed and decoded together."""


def _shifts(count: int, width: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, count * width, width, dtype=torch.uint8, device=like.device)


def _unpack(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Runs (..., runs, bytes) -> (..., runs * count * bytes): of a run the lowest fields of its bytes, then the next.

    Four bytes at a time, as a kernel does it: twice as fast as byte by byte.
    """
    words = packed.contiguous().view(torch.int32).unsqueeze(-2)  # (..., runs, 1, words)
    shifts = torch.arange(0, count * width, width, dtype=torch.int32, device=packed.device).unsqueeze(-1)
    return (words >> shifts).bitwise_and_(0x01010101 * ((1 << width) - 1)).view(torch.uint8).flatten(-3)


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """codes (..., 32) uint8 below 16 -> (..., 16): byte j holds value j and, in the high half, value 16 + j."""
    return codes[..., :16] | codes[..., 16:] << 4


def unpack4(packed: torch.Tensor) -> torch.Tensor:
    """(..., 16) uint8 -> (..., 32) uint8."""
    return torch.cat((packed & 15, packed >> 4), -1)


def pack2(codes: torch.Tensor) -> torch.Tensor:
    """codes (..., 32) uint8 below 4 -> (..., 8): value 16 h + 4 i + b is at bit 2 i of byte 4 h + b."""
    fields = codes.unflatten(-1, (2, 4, 4)) << _shifts(4, 2, codes).unsqueeze(-1)
    return fields.sum(-2, dtype=torch.uint8).flatten(-2)


def unpack2(packed: torch.Tensor) -> torch.Tensor:
    """(..., 8) uint8 -> (..., 32) uint8."""
    return _unpack(packed.unflatten(-1, (2, 4)), 4, 2)


def pack1(codes: torch.Tensor) -> torch.Tensor:
    """codes (..., 32) uint8 below 2 -> (..., 4): value 4 i + b is bit i of byte b."""
    return (codes.unflatten(-1, (8, 4)) << _shifts(8, 1, codes).unsqueeze(-1)).sum(-2, dtype=torch.uint8)


def unpack1(packed: torch.Tensor) -> torch.Tensor:
    """(..., 4) uint8 -> (..., 32) uint8."""
    return _unpack(packed.unsqueeze(-2), 8, 1)


def fields(packed: torch.Tensor, width: int) -> torch.Tensor:
    """(..., bytes) uint8 -> (..., 8 / width, bytes): the fields of every byte, the lowest first."""
    return packed.unsqueeze(-2) >> _shifts(8 // width, width, packed).unsqueeze(-1) & (1 << width) - 1
